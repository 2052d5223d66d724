"""Batches to columns: what a naive reader of Kafka's documentation makes of them, and nothing else."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable, Sequence

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dray.columns.decode import decode_batches
from dray.columns.schema import SCHEMA
from dray.errors import InvalidBatch, UndecodableBatch
from tests.batches import build_batch, captured
from tests.mutation import mutated
from tests.naive_records import (
    CODECS,
    Plan,
    Record,
    Refused,
    build,
    decompressed,
    parse,
    record,
    rows_as_records,
    sized,
    varint,
)
from tests.record_plans import plans

MIB = 2**20
NO_HEADERS: tuple[tuple[str, bytes | None], ...] = ()


def decode(*batches: bytes, max_bytes: int = 64 * MIB) -> pa.Table:
    """The batches one behind the other, from offset 0 on."""
    placed, offset = [], 0
    for batch in batches:
        placed.append((memoryview(batch), offset))
        offset += max(0, int.from_bytes(batch[57:61], signed=True)) if len(batch) > 61 else 0
    return decode_batches(placed, 7, max_bytes=max_bytes)


def plan_of(count: int, *, codec: str = "none", value: bytes = b"value") -> Plan:
    return Plan([(1_700_000_000_000 + n, b"key %d" % n, value, NO_HEADERS) for n in range(count)], codec)


def with_body(body: bytes, records: int = 1) -> bytes:
    return build_batch(body, records=records)


def sized_record(body: bytes) -> bytes:
    return varint(len(body)) + body


@pytest.mark.parametrize("client", ["librdkafka", "kafka-python"])
@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_batches_of_real_clients_are_read(client: str, codec: str) -> None:
    """What is in them says `golden/records/README.md`."""
    table = decode_batches([(memoryview(captured(f"{client}-{codec}")), 1_000)], 7, max_bytes=MIB)
    assert table.schema.equals(SCHEMA, check_metadata=True)
    rows = table.to_pylist()
    assert [row["offset"] for row in rows] == [1_000, 1_001, 1_002]
    for number, row in enumerate(rows):
        assert row["partition"] == 7
        assert row["timestamp"].timestamp() * 1_000 == 1_700_000_000_000 + 1_000 * number
        assert row["key"] == b"key %d" % number
        assert row["value"].startswith(b"value %d abc abc" % number)
        assert row["headers"] == [{"key": "h", "value": b"x"}]
        assert row["attributes"] == 0
        for name in ("raw_timestamp", "producer_id", "producer_epoch", "sequence"):
            assert row[name] is None


@pytest.mark.parametrize(
    ("name", "sequences", "attributes"),
    [("librdkafka-idempotent", [0, 1, 2], 0), ("kafka-python-transactional", [17], 16)],
)
def test_producers_of_real_clients_are_read(name: str, sequences: list[int], attributes: int) -> None:
    table = decode(captured(name))
    assert table["producer_id"].to_pylist() == [4711] * len(sequences)
    assert table["producer_epoch"].to_pylist() == [3] * len(sequences)
    assert table["sequence"].to_pylist() == sequences
    assert table["attributes"].to_pylist() == [attributes] * len(sequences)


@pytest.mark.parametrize("name", ["kafka-python-magic0", "kafka-python-magic1"])
def test_older_formats_are_refused(name: str) -> None:
    with pytest.raises(UndecodableBatch):
        decode(captured(name))


def test_nothing_is_an_empty_table() -> None:
    assert decode().schema.equals(SCHEMA, check_metadata=True)
    assert decode().num_rows == 0


@settings(max_examples=150, deadline=None)
@given(plans())
def test_any_batches_are_read_as_a_naive_reader_does(batches: Sequence[Plan]) -> None:
    placed, expected, offset = [], list[Record](), 0
    for plan in batches:
        data, offset = build(plan), offset + plan.gap
        placed.append((memoryview(data), offset))
        expected += parse(data, offset)
        offset += len(plan.records)
    table = decode_batches(placed, 7, max_bytes=64 * MIB)
    table.validate(full=True)
    assert table.schema.equals(SCHEMA, check_metadata=True)
    assert rows_as_records(table) == expected


@pytest.mark.parametrize("count", [1, 47, 48, 200])
def test_many_batches_of_different_sizes_are_read_together(count: int) -> None:
    """Few of them go through a plain loop, many in lock-step, and some begin in one and end in the other."""
    rng = random.Random(count)
    batches = [
        build(
            Plan(
                [
                    (
                        1_700_000_000_000 + rng.randrange(10**6),
                        rng.choice([None, b"", b"key"]),
                        rng.choice([None, b"", rng.randbytes(rng.choice([10, 100, 9_000, 70_000]))]),
                        tuple(("h", b"x") for _ in range(rng.choice([0, 0, 1, 100]))),
                    )
                    for _ in range(rng.choice([1, 2, 30, 60]))
                ],
                rng.choice(list(CODECS)),
            )
        )
        for _ in range(count)
    ]
    expected, offset = list[Record](), 0
    for batch in batches:
        records = parse(batch, offset)
        expected, offset = expected + records, offset + len(records)
    assert rows_as_records(decode(*batches, max_bytes=2**30)) == expected


def test_sequences_wrap() -> None:
    """Kafka, `DefaultRecordBatch.incrementSequence`."""
    plan = Plan([(0, None, None, NO_HEADERS)] * 4, producer=(1, 2, 2**31 - 2))
    assert decode(build(plan))["sequence"].to_pylist() == [2**31 - 2, 2**31 - 1, 0, 1]


def test_the_append_time_is_every_records() -> None:
    plan = Plan([(1_000, None, None, NO_HEADERS), (2_000, None, None, NO_HEADERS)], append_time=77_000)
    table = decode(build(plan))
    assert [time.timestamp() for time in table["timestamp"].to_pylist()] == [77, 77]
    assert table["attributes"].to_pylist() == [8, 8]


@pytest.mark.parametrize("value", [-1, -62_135_596_800_001, 253_402_300_800_000, 2**63 - 1, -(2**63)])
def test_times_that_no_table_holds_are_kept_apart(value: int) -> None:
    table = decode(build(Plan([(value, None, None, NO_HEADERS), (5, None, None, NO_HEADERS)])))
    assert table["raw_timestamp"].to_pylist() == [value, None]
    assert table["timestamp"].cast(pa.int64()).to_pylist() == [None, 5_000]


@pytest.mark.parametrize("value", [-62_135_596_800_000, 253_402_300_799_999, 0, -2])
def test_times_that_a_table_holds_are_times(value: int) -> None:
    table = decode(build(Plan([(value, None, None, NO_HEADERS)])))
    assert table["timestamp"].cast(pa.int64()).to_pylist() == [value * 1_000]
    assert table["raw_timestamp"].to_pylist() == [None]


FIELDS = b"\x00" + varint(0) + varint(0)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(record(1, 0, b"k", b"v"), id="offset delta"),
        pytest.param(record(0, 0, b"k", b"v") + b"\x00", id="a byte behind the last record"),
        pytest.param(record(0, 0, b"k", b"v")[:-1], id="cut short"),
        pytest.param(sized_record(FIELDS + sized(b"k") + sized(b"v") + b"\x00\x00"), id="a byte too many"),
        pytest.param(sized_record(FIELDS + varint(100) + sized(b"v") + b"\x00"), id="key too long"),
        pytest.param(sized_record(FIELDS + sized(b"k") + varint(2**31 - 1) + b"v\x00"), id="value too long"),
        pytest.param(sized_record(FIELDS + sized(b"k") + sized(b"v")), id="no header count"),
        pytest.param(sized_record(FIELDS + sized(b"k") + sized(b"v") + varint(-1)), id="-1 headers"),
        pytest.param(sized_record(FIELDS + sized(b"k") + sized(b"v") + varint(2**31 - 1)), id="no headers"),
        pytest.param(sized_record(FIELDS + b"\x01\x01" + varint(1) + b"\x01\x01"), id="header key null"),
        pytest.param(
            sized_record(FIELDS + b"\x01\x01" + varint(1) + sized(b"\xff") + b"\x01"), id="no UTF-8"
        ),
        pytest.param(sized_record(FIELDS + b"\x01\x01" + varint(1) + varint(9) + b"\x01"), id="header key"),
        pytest.param(sized_record(FIELDS + b"\x01\x01" + varint(1) + b"\x00" + varint(9)), id="header value"),
        pytest.param(sized_record(b"\x00" + b"\xff" * 10 + b"\x00" * 5), id="varlong of 11 bytes"),
        pytest.param(sized_record(b"\x00\x00" + b"\x80" * 5 + b"\x00" * 5), id="varint of 6 bytes"),
        pytest.param(b"\x80" * 5 + b"\x0c" + bytes(6), id="length of 6 bytes"),
        pytest.param(b"\x00" * 7, id="a length of 0"),
        pytest.param(b"\x01" * 7, id="a negative length"),
        pytest.param(b"\x0d" + bytes(6), id="a negative length that would fit"),
        pytest.param(b"\x81\x01" * 4, id="a negative length of two bytes"),
        pytest.param(b"\x0c" + bytes(6) + b"\x0c" + bytes(6), id="another record"),
    ],
)
@pytest.mark.parametrize("copies", [1, 60], ids=["loop", "lock-step"])
def test_what_contradicts_itself_is_named(body: bytes, copies: int) -> None:
    """By number, among sound ones, and the naive reader agrees."""
    bad, good = with_body(body), with_body(record(0, 0, b"k", b"v"))
    with pytest.raises(Refused):
        parse(bad)
    batches = [good] * copies + [bad] + [good] * copies
    with pytest.raises(UndecodableBatch) as caught:
        decode(*batches)
    assert caught.value.number == copies
    assert isinstance(caught.value, InvalidBatch)


@pytest.mark.parametrize("copies", [1, 60], ids=["loop", "lock-step"])
def test_the_first_bad_batch_is_named_whatever_is_wrong_with_others(copies: int) -> None:
    good = build(plan_of(3))
    bad = {
        "last field": with_body(sized_record(FIELDS + b"\x01\x01" + varint(1) + sized(b"\xff") + b"\x01")),
        "middle field": with_body(record(1, 0, b"k", b"v")),
        "first field": with_body(bytes(7)),
        "checksum": good[:-1] + b"x",
    }
    for first in bad.values():
        for second in bad.values():
            with pytest.raises(UndecodableBatch) as caught:
                decode(*[good] * copies, first, *[good] * copies, second)
            assert caught.value.number == copies


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param(build_batch(records=2), id="more records than there is room for"),
        pytest.param(build_batch(records=2**31 - 1), id="2^31-1 records"),
        pytest.param(build_batch(records=0, last_offset_delta=0), id="none"),
        pytest.param(build_batch(records=-1), id="-1 records"),
        pytest.param(build_batch(last_offset_delta=5), id="last offset delta"),
        pytest.param(build_batch(attributes=0x20), id="control batch"),
        pytest.param(build_batch(attributes=0x40), id="delete horizon"),
        pytest.param(build_batch(attributes=5), id="unknown codec"),
        pytest.param(build_batch(producer_id=1, producer_epoch=-1, base_sequence=0), id="no epoch"),
        pytest.param(build_batch(producer_id=1, producer_epoch=0, base_sequence=-1), id="no sequence"),
        pytest.param(build_batch() + b"x", id="a byte behind it"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_a_header_that_contradicts_its_batch_is_refused(batch: bytes) -> None:
    with pytest.raises(UndecodableBatch) as caught:
        decode(build(plan_of(1)), batch)
    assert caught.value.number == 1


def test_numbers_may_be_longer_than_they_need_to_be() -> None:
    """Kafka's `ByteUtils.readVarint` takes 0x80 0x00 for 0, and drops what is above 32 bits."""
    body = b"\x00" + b"\x80\x00" + b"\x80\x80\x80\x80\x70" + b"\x82\x00k" + b"\x83\x80\x00" + b"\x80\x00"
    (row,) = decode(with_body(sized_record(body))).to_pylist()
    assert (row["key"], row["value"], row["headers"]) == (b"k", None, [])


@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec != "none"])
def test_decompressed_bytes_are_limited_together(codec: str) -> None:
    batch = build(plan_of(10, codec=codec, value=b"v" * 1_000))
    size = len(decompressed(CODECS[codec][0], batch[61:]))
    assert decode(*[batch] * 3, max_bytes=3 * size).num_rows == 30
    with pytest.raises(UndecodableBatch) as caught:
        decode(*[batch] * 3, max_bytes=3 * size - 1)
    assert caught.value.number == 2


@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec != "none"])
def test_a_bomb_takes_no_more_memory_than_the_limit(codec: str) -> None:
    code, compress = CODECS[codec]
    bomb = build_batch(compress(bytes(128 * MIB)), attributes=code)
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    try:
        with pytest.raises(UndecodableBatch):
            decode(bomb, max_bytes=8 * MIB)
        assert tracemalloc.get_traced_memory()[1] < 16 * MIB + len(bomb)
    finally:
        tracemalloc.stop()
    assert pa.total_allocated_bytes() == before


def test_the_smallest_records_take_a_bounded_multiple_of_their_bytes() -> None:
    """Seven bytes each. A row of the table takes 73 bytes, and what is needed on the way about as many."""
    body = b"".join(record(delta, 0, None, None) for delta in range(200_000))
    batch = with_body(body, 200_000)
    tracemalloc.start()
    try:
        table = decode(batch)
        assert tracemalloc.get_traced_memory()[1] < 30 * len(batch)
    finally:
        tracemalloc.stop()
    assert table.nbytes < 10 * len(batch)


def test_more_than_a_part_is_one_table_of_several_pieces() -> None:
    batch = build(plan_of(20, value=bytes(MIB)))
    table = decode(*[batch] * 7)
    assert table["offset"].to_pylist() == list(range(140))
    assert table["value"].num_chunks > 1
    bad = [batch] * 6 + [build_batch(records=2)]
    with pytest.raises(UndecodableBatch) as caught:
        decode(*bad)
    assert caught.value.number == 6


def restored(batch: bytes) -> bytes:
    """With a length and a checksum that fit again, so that the damage gets beyond them."""
    if len(batch) < 61:
        return batch
    return build_batch(
        batch[61:],
        attributes=int.from_bytes(batch[21:23], signed=True),
        last_offset_delta=int.from_bytes(batch[23:27], signed=True),
        base_timestamp=int.from_bytes(batch[27:35], signed=True),
        max_timestamp=int.from_bytes(batch[35:43], signed=True),
        producer_id=int.from_bytes(batch[43:51], signed=True),
        producer_epoch=int.from_bytes(batch[51:53], signed=True),
        base_sequence=int.from_bytes(batch[53:57], signed=True),
        records=int.from_bytes(batch[57:61], signed=True),
    )


SEEDS = [
    build(Plan([(5, b"k", b"value", (("a", b"1"), ("a", None), ("b", b"")))] * 5)),
    build(Plan([(n * 100, None, b"v" * n * 10, NO_HEADERS) for n in range(80)], producer=(1, 2, 3))),
    build(Plan([(-1, b"", b"x" * 9_000, NO_HEADERS)] * 3, append_time=7)),
    build(Plan([(n**5, b"k", None, (("h", b"x"),) * (n % 60)) for n in range(120)])),
]


@pytest.mark.parametrize("change", [bytes, restored], ids=["as it is", "with a right checksum"])
@pytest.mark.parametrize("copies", [0, 50], ids=["loop", "lock-step"])
def test_mutations_are_refused_or_read_as_naively(change: Callable[[bytes], bytes], copies: int) -> None:
    """Uncompressed, since what a damaged frame still says is for each decompressor to say."""
    rng = random.Random(8)
    good = SEEDS[1]
    refused = read = 0
    for _ in range(2_000 if copies == 0 else 400):
        # Never the length of what a request would have in front of a batch.
        batch = change(mutated(rng.choice(SEEDS), rng, SEEDS))
        try:
            expected = parse(batch, copies * 80) if not (len(batch) > 22 and batch[22] & 7) else None
        except Refused:
            expected = None
        try:
            table = decode_batches(
                [(memoryview(good), 80 * number) for number in range(copies)]
                + [(memoryview(batch), 80 * copies)],
                7,
                max_bytes=MIB,
            )
        except UndecodableBatch as error:
            assert error.number == copies
            assert expected is None
            refused += 1
        else:
            table.validate(full=True)
            assert rows_as_records(table)[80 * copies :] == expected
            read += 1
    assert refused > 100
    if change is restored:
        assert read > 10


@pytest.mark.parametrize("codec", CODECS)
def test_mutations_of_compressed_batches_raise_only_typed_errors(codec: str) -> None:
    rng = random.Random(codec)
    seeds = [build(plan_of(30, codec=codec)), build(plan_of(1, codec=codec, value=bytes(5_000)))]
    for _ in range(500):
        batch = restored(mutated(rng.choice(seeds), rng, seeds))
        try:
            table = decode(seeds[0], batch, max_bytes=MIB)
        except UndecodableBatch as error:
            assert error.number == 1
        else:
            table.validate(full=True)


@pytest.mark.parametrize("seed", SEEDS, ids=["headers", "producer", "large", "many headers"])
def test_every_cut_is_noticed(seed: bytes) -> None:
    for end in random.Random(3).sample(range(len(seed)), 200):
        with pytest.raises(UndecodableBatch):
            decode(restored(seed[:end]) if end >= 61 else seed[:end])


@given(st.binary(max_size=200), st.integers(1, 5))
def test_rubbish_raises_only_typed_errors(body: bytes, records: int) -> None:
    batch = with_body(body, records)
    try:
        expected = parse(batch, 0)
    except Refused:
        with pytest.raises(UndecodableBatch):
            decode(batch)
    else:
        assert rows_as_records(decode(batch)) == expected
