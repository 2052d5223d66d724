"""Batches of real clients are taken as they are; whatever else arrives is refused for the right reason.

Positions and codes are those of Kafka's documentation ("Record Batch"), the reasons those of its
`ProduceRequest.validateRecords`, `DefaultRecordBatch` and `LogValidator`.
"""

from __future__ import annotations

import struct
import tracemalloc

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from dray.errors import (
    BatchTooLarge,
    CorruptBatch,
    InvalidBatch,
    InvalidRecords,
    InvalidTimestamp,
    LegacyBatch,
    TransactionalBatch,
    UnsupportedCodec,
)
from dray.protocol.records import patch, patched, read_batch, split_batches, stamp_append_time
from tests.batches import build_batch, captured

CODECS = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}


def test_the_checksum_is_crc32c() -> None:
    """RFC 3720 B.4 and the check value of the Castagnoli polynomial."""
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA


@pytest.mark.parametrize("client", ["librdkafka", "kafka-python"])
@pytest.mark.parametrize("codec", CODECS)
def test_batches_of_real_clients_are_taken(client: str, codec: str) -> None:
    payload = captured(f"{client}-{codec}")
    (batch,) = split_batches(payload)
    assert batch.data == payload
    assert batch.codec == codec
    assert batch[1:] == (
        0,  # base offset
        0,  # leader epoch
        CODECS[codec],
        2,  # last offset delta
        1_700_000_000_000,
        1_700_000_002_000,
        -1,  # producer id
        -1,  # producer epoch
        -1,  # base sequence
        3,  # records
    )
    assert batch.timestamp_range_ms == (1_700_000_000_000, 1_700_000_002_000)


def test_an_idempotent_producer_is_read_from_the_header() -> None:
    (batch,) = split_batches(captured("librdkafka-idempotent"))
    assert (batch.producer_id, batch.producer_epoch, batch.base_sequence) == (4711, 3, 0)


def test_several_batches_are_slices_of_the_payload() -> None:
    parts = [captured(f"librdkafka-{codec}") for codec in CODECS]
    payload = bytearray(b"".join(parts))
    batches = split_batches(payload)
    assert [bytes(batch.data) for batch in batches] == parts
    assert all(batch.data.obj is payload for batch in batches)


def test_splitting_copies_nothing() -> None:
    payload = build_batch(bytes(8 << 20), attributes=1)
    tracemalloc.start()
    try:
        split_batches(payload)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 << 10


@pytest.mark.parametrize("magic", [0, 1])
def test_message_sets_from_before_0_11_are_refused(magic: int) -> None:
    with pytest.raises(LegacyBatch, match=f"message format {magic}"):
        split_batches(captured(f"kafka-python-magic{magic}"))


def test_transactions_are_refused() -> None:
    with pytest.raises(TransactionalBatch):
        split_batches(captured("kafka-python-transactional"))


def test_no_batch_at_all_is_refused() -> None:
    with pytest.raises(InvalidRecords):
        split_batches(b"")


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"magic": 3}, CorruptBatch),
        ({"magic": -1}, CorruptBatch),
        ({"length": 48}, CorruptBatch),
        ({"length": 0}, CorruptBatch),
        ({"length": -1}, CorruptBatch),
        ({"length": -(2**31)}, CorruptBatch),
        ({"length": 2**31 - 1}, InvalidRecords),
        ({"records": 0}, InvalidRecords),
        ({"records": -1}, InvalidRecords),
        ({"records": 2, "last_offset_delta": 0}, InvalidRecords),
        ({"records": 1, "last_offset_delta": 1}, InvalidRecords),
        ({"records": 1, "last_offset_delta": -1}, InvalidRecords),
        ({"records": -(2**31), "last_offset_delta": 2**31 - 1}, InvalidRecords),
        ({"attributes": 5}, UnsupportedCodec),
        ({"attributes": 6}, UnsupportedCodec),
        ({"attributes": 7}, UnsupportedCodec),
        ({"attributes": 0x08}, InvalidTimestamp),
        ({"attributes": 0x10}, TransactionalBatch),
        ({"attributes": 0x20}, InvalidRecords),
        ({"attributes": 0x30}, InvalidRecords),
        ({"attributes": 0x40}, InvalidRecords),
        ({"attributes": 0x80}, InvalidRecords),
        ({"attributes": 0x4000}, InvalidRecords),
        ({"attributes": -0x8000}, InvalidRecords),
        ({"max_timestamp": -2}, InvalidTimestamp),
        ({"max_timestamp": -(2**63)}, InvalidTimestamp),
        ({"base_timestamp": -2}, InvalidTimestamp),
        ({"base_timestamp": -(2**63), "max_timestamp": -1}, InvalidTimestamp),
        ({"producer_id": 1, "producer_epoch": 0, "base_sequence": -1}, InvalidRecords),
        ({"producer_id": 1, "producer_epoch": -1, "base_sequence": 0}, InvalidRecords),
        ({"records": 2}, InvalidRecords),
        ({"records": 2**31 - 1}, InvalidRecords),
        ({"body": b""}, InvalidRecords),
        ({"body": b"", "attributes": 4}, InvalidRecords),
    ],
    ids=str,
)
def test_malformed_batches_are_refused_for_the_right_reason(
    fields: dict[str, int], error: type[InvalidBatch]
) -> None:
    good = captured("librdkafka-none")
    with pytest.raises(InvalidBatch) as refused:
        split_batches(good + build_batch(**fields))  # type: ignore[arg-type]  # one of them is bytes
    assert type(refused.value) is error
    assert refused.value.at == len(good)


@pytest.mark.parametrize(
    "fields",
    [
        {"base_offset": 7, "leader_epoch": 5},
        {"max_timestamp": -1},
        {"base_timestamp": -1, "max_timestamp": -1},
        {"base_timestamp": 2_000_000_000_000},
        {"producer_id": 2**63 - 1, "producer_epoch": 32767, "base_sequence": 2**31 - 1},
        {"producer_id": -1, "producer_epoch": 0, "base_sequence": 0},
    ],
    ids=str,
)
def test_what_kafka_takes_is_taken(fields: dict[str, int]) -> None:
    """Sarama leaves the maximum timestamp unset and, without idempotence, epoch and sequence at 0."""
    (batch,) = split_batches(build_batch(**fields))  # type: ignore[arg-type]  # none of them is the body
    assert {name: getattr(batch, name.replace("timestamp", "timestamp_ms")) for name in fields} == fields


@pytest.mark.parametrize(
    ("code", "compressed_bytes", "records"),
    [
        (4, 774_959, 1_000_000),  # zstd -3
        (4, 1_194_506, 1_000_000),  # zstd -19
        (4, 39_839, 100_000),  # zstd -5, the densest found
        (1, 1_397_913, 1_000_000),  # gzip -9
        (3, 4_001_807, 1_000_000),  # lz4 -1
        (4, 2**20, 2**24),
    ],
)
def test_compressed_batches_may_be_dense(code: int, compressed_bytes: int, records: int) -> None:
    """Sizes are those of empty records with offset deltas 0, 1, 2 …, as the named tools compress them."""
    (batch,) = split_batches(build_batch(bytes(compressed_bytes), attributes=code, records=records))
    assert batch.records == records


@pytest.mark.parametrize(
    ("code", "body_bytes", "records"),
    [
        (1, 1, 2**31 - 1),
        (2, 1, 2**31 - 1),
        (3, 1, 2**31 - 1),
        (4, 1, 2**31 - 1),
        (4, 100, 6_401),
        (4, 2**20, 2**24 + 1),
    ],
)
def test_a_count_of_records_that_no_client_reaches_is_refused(
    code: int, body_bytes: int, records: int
) -> None:
    """Offsets are given out by it: 62 bytes could use up 2^31 of them."""
    with pytest.raises(InvalidRecords):
        split_batches(build_batch(bytes(body_bytes), attributes=code, records=records))


@pytest.mark.parametrize(
    ("base", "maximum", "expected"),
    [(5, 9, (5, 9)), (5, -1, (5, 5)), (-1, -1, (-1, -1)), (9, 5, (5, 5))],
)
def test_the_range_of_timestamps_is_what_a_header_can_know(
    base: int, maximum: int, expected: tuple[int, int]
) -> None:
    (batch,) = split_batches(build_batch(base_timestamp=base, max_timestamp=maximum))
    assert batch.timestamp_range_ms == expected


def test_a_batch_above_the_limit_is_refused_before_its_checksum_is_computed() -> None:
    payload = captured("librdkafka-none")
    assert split_batches(payload, max_batch_bytes=len(payload))
    with pytest.raises(BatchTooLarge, match="381 bytes are above the limit of 380"):
        split_batches(payload[:-1] + b"!", max_batch_bytes=len(payload) - 1)


def test_every_flipped_bit_under_the_checksum_is_noticed() -> None:
    good = captured("librdkafka-gzip")
    for bit in range(17 * 8, len(good) * 8):
        damaged = bytearray(good)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptBatch):
            split_batches(damaged)


def test_every_truncation_is_noticed() -> None:
    good = captured("librdkafka-gzip")
    for size in range(1, len(good)):
        with pytest.raises(InvalidRecords):
            split_batches(good[:size])
        with pytest.raises(InvalidRecords) as refused:
            split_batches(good + good[:size])
        assert refused.value.at == len(good)


@given(
    st.binary(max_size=200) | st.binary(max_size=80).map(lambda body: build_batch(body)[:16] + b"\2" + body)
)
def test_random_bytes_are_refused_by_type(payload: bytes) -> None:
    with pytest.raises(InvalidBatch):
        split_batches(payload)


@given(
    st.lists(st.sampled_from([*CODECS]), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), max_size=4),
)
def test_mutated_batches_are_taken_or_refused_by_type(
    codecs: list[str], changes: list[tuple[int, int]]
) -> None:
    payload = bytearray(b"".join(captured(f"librdkafka-{codec}") for codec in codecs))
    for position, value in changes:
        payload[position % len(payload)] = value
    try:
        batches = split_batches(payload)
    except InvalidBatch:
        return
    assert b"".join(batch.data for batch in batches) == payload


@given(st.integers(0, 2**63 - 1), st.integers(-1, 2**31 - 1), st.sampled_from([*CODECS]))
def test_base_offset_and_leader_epoch_need_no_new_checksum(offset: int, epoch: int, codec: str) -> None:
    """D-WAL-27: the checksum begins behind both, at the attributes."""
    original = captured(f"librdkafka-{codec}")
    expected = struct.pack(">q", offset) + original[8:12] + struct.pack(">i", epoch) + original[16:]

    head, rest = patched(memoryview(original), offset, epoch)
    assert head + bytes(rest) == expected
    assert rest.obj is original

    own = bytearray(original)
    patch(memoryview(own), offset, epoch)
    assert own == expected

    (batch,) = split_batches(expected)
    assert (batch.base_offset, batch.leader_epoch) == (offset, epoch)


@pytest.mark.parametrize("codec", CODECS)
def test_append_time_changes_three_fields_and_the_checksum_follows(codec: str) -> None:
    original = captured(f"librdkafka-{codec}")
    own = bytearray(original)
    stamp_append_time(memoryview(own), 1_800_000_000_123)

    batch = read_batch(memoryview(own))
    assert batch.attributes == CODECS[codec] | 0x08
    assert batch.max_timestamp_ms == 1_800_000_000_123
    assert batch.base_timestamp_ms == 1_700_000_000_000
    assert own[:17] == original[:17]
    assert own[23:35] == original[23:35]
    assert own[43:] == original[43:]
    with pytest.raises(InvalidTimestamp):  # a producer may not claim it
        split_batches(own)
