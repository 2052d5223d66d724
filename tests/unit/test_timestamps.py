"""Timestamps inside batches that client libraries built, against plain lists; and malformed records."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc
import warnings
from collections.abc import Sequence

import pytest
import zstandard
from aiokafka.record.default_records import (  # type: ignore[import-untyped]  # has no stubs
    DefaultRecordBatchBuilder as AiokafkaBuilder,
)
from hypothesis import given
from hypothesis import strategies as st

from dray.errors import CorruptBatch, DecompressedTooLarge, InvalidBatch, InvalidRecords
from dray.protocol.records import Batch, read_batch, stamp_append_time
from dray.protocol.timestamps import first_at_or_after, latest
from tests.batches import build_batch, captured

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # its import reads resources the old way
    from kafka.record.default_records import (  # type: ignore[import-untyped]  # has no stubs
        DefaultRecordBatchBuilder as KafkaPythonBuilder,
    )

MIB = 2**20
T = 1_700_000_000_000
CODES = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}
BUILDERS = {"aiokafka": AiokafkaBuilder, "kafka-python": KafkaPythonBuilder}
# kafka-python wants one more library for snappy: `golden/records/` has a batch of its own.
MADE_BY = [
    (client, codec) for client in BUILDERS for codec in CODES if (client, codec) != ("kafka-python", "snappy")
]
TIMES = {
    "one": [T],
    "rising": [T, T + 1, T + 5],
    "falling": [T + 5, T + 1, T],
    "mixed": [T, T - 3_600_000, T + 70, T + 3, T + 70, T + 69, T - 1],
    "all the same": [T] * 4,
    "none given": [-1, -1, -1],
    "some given": [-1, T, -1, T],
    "some given, the first is": [T, -1, T + 1],
    "from 1970": [0, 1, 0],
}


def build(client: str, codec: str, times: Sequence[int]) -> Batch:
    builder = BUILDERS[client](
        magic=2,
        compression_type=CODES[codec],
        is_transactional=False,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=-1,
        batch_size=16 * MIB,
    )
    for number, timestamp in enumerate(times):
        headers = [("h", b"x" * number), ("n", None)]
        assert builder.append(number, timestamp, b"key", b"value " * 20, headers)
    return read_batch(memoryview(bytes(builder.build())))


def expected_first(times: Sequence[int], wanted: int) -> tuple[int, int] | None:
    return next(((delta, time) for delta, time in enumerate(times) if time >= wanted), None)


def expected_latest(times: Sequence[int]) -> tuple[int, int]:
    return times.index(max(times)), max(times)


def zigzag(number: int) -> bytes:
    encoded = 2 * number if number >= 0 else -2 * number - 1
    out = bytearray()
    while encoded > 0x7F:
        out.append(encoded & 0x7F | 0x80)
        encoded >>= 7
    out.append(encoded)
    return bytes(out)


def record(timestamp_delta: int, offset_delta: int, rest: bytes = b"\x01\x01\x00") -> bytes:
    """No key, no value, no headers."""
    fields = b"\x00" + zigzag(timestamp_delta) + zigzag(offset_delta) + rest
    return zigzag(len(fields)) + fields


def batch_of(body: bytes, records: int, base: int = T, attributes: int = 0) -> Batch:
    return read_batch(
        memoryview(build_batch(body, records=records, base_timestamp=base, attributes=attributes))
    )


@pytest.mark.parametrize(("client", "codec"), MADE_BY)
@pytest.mark.parametrize("case", TIMES)
def test_records_of_clients_are_found(client: str, codec: str, case: str) -> None:
    times = TIMES[case]
    if client == "aiokafka" and case == "some given":
        times = [T, T, -1, T]  # its builder takes a first -1 for "not set yet", and gives it the next time
    batch = build(client, codec, times)
    for wanted in sorted({time + step for time in times for step in (-1, 0, 1)}):
        assert first_at_or_after(batch, wanted, MIB) == expected_first(times, wanted)
    assert latest(batch, MIB) == expected_latest(times)


@pytest.mark.parametrize("client", ["librdkafka", "kafka-python"])
@pytest.mark.parametrize("codec", CODES)
def test_captured_records_are_found(client: str, codec: str) -> None:
    """`golden/records/README.md` says when they are from."""
    batch = read_batch(memoryview(captured(f"{client}-{codec}")))
    found = [first_at_or_after(batch, T + after, MIB) for after in (-1, 0, 1, 1_000, 1_001, 2_000, 2_001)]
    assert found == [(0, T), (0, T), (1, T + 1_000), (1, T + 1_000), (2, T + 2_000), (2, T + 2_000), None]
    assert latest(batch, MIB) == (2, T + 2_000)


@given(
    st.lists(st.integers(0, 2**45) | st.integers(-1, 3), min_size=1, max_size=40),
    st.integers(-1, 2**45) | st.integers(-1, 4),
    st.sampled_from(["none", "gzip", "lz4", "zstd"]),
)
def test_any_times_are_found(times: list[int], wanted: int, codec: str) -> None:
    batch = build("kafka-python", codec, times)
    for one in (wanted, *times):
        assert first_at_or_after(batch, one, MIB) == expected_first(times, one)
    assert latest(batch, MIB) == expected_latest(times)


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_records_before_the_first_that_counts_are_passed_over(codec: str) -> None:
    times = [T, T + 9, T + 3, T + 4]
    batch = build("kafka-python", codec, times)
    assert [first_at_or_after(batch, T + 3, MIB, first) for first in range(4)] == [
        (1, T + 9),
        (1, T + 9),
        (2, T + 3),
        (3, T + 4),
    ]
    assert first_at_or_after(batch, T + 5, MIB, 2) is None
    newest = [latest(batch, MIB, first) for first in range(4)]
    assert newest == [(1, T + 9), (1, T + 9), (3, T + 4), (3, T + 4)]


@pytest.mark.parametrize("codec", CODES)
def test_under_append_time_every_record_has_the_time_of_the_header(codec: str) -> None:
    data = bytearray(build("aiokafka", codec, [T, T + 9, T + 3]).data)
    stamp_append_time(memoryview(data), T + 4)
    batch = read_batch(memoryview(data))
    assert first_at_or_after(batch, T + 4, MIB) == (0, T + 4)
    assert first_at_or_after(batch, T + 5, MIB) is None
    assert latest(batch, MIB) == (0, T + 4)
    assert first_at_or_after(batch, T + 4, MIB, 2) == latest(batch, MIB, 2) == (2, T + 4)


def test_a_header_that_says_too_much_or_too_little_is_not_believed() -> None:
    for claimed in (T + 1_000, T - 1_000, -1):
        data = build_batch(record(0, 0) + record(5, 1), records=2, base_timestamp=T, max_timestamp=claimed)
        batch = read_batch(memoryview(data))
        assert first_at_or_after(batch, T + 1, MIB) == (1, T + 5)
        assert first_at_or_after(batch, T + 6, MIB) is None
        assert latest(batch, MIB) == (1, T + 5)


@pytest.mark.parametrize(
    ("encoded", "number"),
    [
        ("00", 0),
        ("01", -1),
        ("02", 1),
        ("7e", 63),
        ("7f", -64),
        ("80 01", 64),
        ("81 01", -65),
        ("fe ff 03", 32_767),
        ("fe ff ff ff 0f", 2**31 - 1),
        ("ff ff ff ff 0f", -(2**31)),
        ("80 80 80 80 10", 2**31),
        ("fe ff ff ff ff ff ff ff ff 01", 2**63 - 1),
        ("ff ff ff ff ff ff ff ff ff 01", -(2**63)),
        ("ff ff ff ff ff ff ff ff ff 7f", -(2**63)),  # with bits that do not count
        ("82 80 00", 1),  # longer than it needs to be
    ],
)
def test_timestamp_deltas_are_read(encoded: str, number: int) -> None:
    """By the tables of Kafka's own test of varlongs."""
    fields = b"\x00" + bytes.fromhex(encoded) + b"\x00\x01\x01\x00"
    assert latest(batch_of(zigzag(len(fields)) + fields, 1, base=0), MIB) == (0, number)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=100))
def test_any_delta_comes_back(deltas: list[int]) -> None:
    """More than 64 records, so that offset deltas have more than one byte, too."""
    body = b"".join(record(delta, number) for number, delta in enumerate(deltas))
    assert latest(batch_of(body, len(deltas), base=0), MIB) == expected_latest(deltas)


def test_a_sum_beyond_64_bits_wraps_as_it_does_for_consumers() -> None:
    assert latest(batch_of(record(2**63 - 1, 0), 1, base=5), MIB) == (0, -(2**63) + 4)


MALFORMED = {
    "nothing": (b"", 1),
    "fewer records than announced": (record(0, 0), 2),
    "more records than announced": (record(0, 0) + record(0, 1), 1),
    "a record longer than the rest": (b"\x7e" + record(0, 0)[1:], 1),
    "a record of negative length": (b"\x01" + record(0, 0)[1:], 1),
    "a record of length zero": (b"\x00" * 7, 1),
    "fields beyond their record": (b"\x04\x00\x00\x00\x01\x01\x00", 1),
    "a length that does not end": (b"\x80" * 6 + b"\x01" * 10, 1),
    "a time that does not end": (b"\x20\x00" + b"\x80" * 10 + b"\x01\x00\x01\x01\x00", 1),
    "a number cut off": (b"\x06\x00\x80\x80", 1),
    "first delta not 0": (record(0, 1), 1),
    "deltas with a gap": (record(0, 0) + record(0, 2), 2),
    "deltas twice": (record(0, 0) + record(0, 0), 2),
    "a negative delta": (record(0, -1), 1),
    "a huge delta": (record(0, 2**31 - 1), 1),
    "no records at all": (b"", 0),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_records_are_refused(case: str) -> None:
    body, records = MALFORMED[case]
    with pytest.raises(InvalidRecords):
        latest(batch_of(body, records), MIB)


def test_no_field_is_read_from_the_next_record() -> None:
    """The second has no room for its offset delta; what follows would do for one."""
    batch = batch_of(record(0, 0) + b"\x04\x00\x0a" + b"\x02\x00", 3)
    with pytest.raises(InvalidRecords):
        first_at_or_after(batch, T + 5, MIB)


def test_rubbish_in_a_codec_is_refused() -> None:
    for code in (1, 2, 3, 4):
        with pytest.raises(CorruptBatch):
            latest(batch_of(b"\xff" * 50, 1, attributes=code), MIB)


def test_a_bomb_is_refused_within_the_limit() -> None:
    body = zstandard.ZstdCompressor().compress(bytes(512 * MIB))
    batch = batch_of(body, 1, attributes=4)
    tracemalloc.start()
    try:
        with pytest.raises(DecompressedTooLarge):
            first_at_or_after(batch, T, 8 * MIB)
        assert tracemalloc.get_traced_memory()[1] < 17 * MIB
    finally:
        tracemalloc.stop()


@given(st.data())
def test_mutated_batches_raise_only_typed_errors(data: st.DataObject) -> None:
    """With the checksum made anew, so that the records are read: a client can send any bytes."""
    codec = data.draw(st.sampled_from(sorted(CODES)))
    batch = build("aiokafka", codec, data.draw(st.lists(st.integers(0, 2**41), min_size=1, max_size=8)))
    body = bytearray(batch.data[61:])
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(body) - 1))
        change = data.draw(st.integers(0, 257))
        if change < 256:
            body[at] = change
        elif change == 256:
            body[at:at] = struct.pack(">I", data.draw(st.integers(0, 2**32 - 1)))
        elif len(body) > 1:
            del body[at]
    mutated = batch_of(bytes(body), batch.records, attributes=batch.attributes)
    with contextlib.suppress(InvalidBatch):
        first_at_or_after(mutated, data.draw(st.integers(-1, 2**41)), MIB)
    with contextlib.suppress(InvalidBatch):
        delta, timestamp = latest(mutated, MIB)
        assert 0 <= delta < batch.records
        assert -(2**63) <= timestamp < 2**63
