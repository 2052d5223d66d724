"""Index entries as they are stored: what goes in comes out, and what nobody wrote is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dray.errors import CorruptStore, IncompatibleStore
from dray.index import entry_pb2 as pb
from dray.index.entry import (
    KINDS,
    BatchIndex,
    IndexEntry,
    Kind,
    ParquetFile,
    Placed,
    Producer,
    Truncated,
    Void,
    WalChunk,
    Where,
    decode,
    encode,
    is_decided,
    live,
    place,
    sequence_of,
    stream_domain,
    stream_of,
)
from dray.metadata.store import Entry, Position
from tests.index_entries import INCARNATION, STREAM, parquet_entry, truncated_entry, wal_entry

I64 = st.integers(-(2**63), 2**63 - 1)
# Their differences are stored, which need one bit more than they do.
TIMES = I64 | st.sampled_from([-(2**63), -1, 0, 2**63 - 1])
UUIDS = st.binary(min_size=16, max_size=16).map(lambda raw: UUID(bytes=raw))
PATHS = st.text(st.characters(codec="utf-8"), max_size=20)
PRODUCERS = st.none() | st.builds(
    Producer, st.integers(0, 2**63 - 1), st.integers(0, 2**15 - 1), st.integers(0, 2**31 - 1)
)
BATCHES = st.lists(
    st.builds(BatchIndex, st.integers(1, 2**24), st.integers(61, 2**24), TIMES, TIMES, PRODUCERS),
    min_size=1,
    max_size=8,
)


@st.composite
def entries(draw: st.DrawFn) -> IndexEntry:
    kind = draw(st.sampled_from(["wal", "parquet", "truncated", "void"]))
    records = draw(st.integers(1, 2**63 - 1))
    where: Where = Truncated()
    if kind == "wal":
        batches = tuple(draw(BATCHES))
        for number in draw(st.sets(st.integers(1, len(batches) - 1))) if len(batches) > 1 else ():
            batches = (*batches[:number], replace(batches[number], records=0), *batches[number + 1 :])
        is_stored = draw(st.booleans())
        verdicts = tuple(draw(st.sampled_from(KINDS)) for _ in batches) if is_stored else ()
        records = sum(b.records for b in batches)
        length = sum(4 + b.size_bytes for b in batches)
        offset = draw(st.integers(0, 2**64 - 1))
        where = WalChunk(draw(UUIDS), draw(PATHS), offset, length, batches, verdicts)
    elif kind == "parquet":
        where = ParquetFile(draw(UUIDS), draw(PATHS), draw(st.integers(0, 2**64 - 1)), draw(PATHS))
    elif kind == "void":
        where = Void(draw(UUIDS))
    return IndexEntry(
        stream_id=draw(st.integers(0, 2**64 - 1)),
        records=records,
        created_at_ms=draw(I64),
        min_timestamp_ms=draw(TIMES),
        max_timestamp_ms=draw(I64),
        incarnation=draw(st.binary(min_size=16, max_size=16)).hex(),
        where=where,
        expected_start=draw(st.none() | st.integers(0, 2**63 - 1)),
    )


@given(entries())
def test_what_is_encoded_is_decoded(entry: IndexEntry) -> None:
    value = encode(entry)
    assert decode(value) == entry
    assert encode(decode(value)) == value


def test_no_timestamp_and_the_highest_one_stand_in_one_entry() -> None:
    """A client may send either, and the entry is of them both: their distance is 2^63."""
    batches = (BatchIndex(1, 100, -1, -1), BatchIndex(1, 100, 0, 2**63 - 1))
    chunk = WalChunk(UUID(int=1), "p", 49, 208, batches)
    entry = IndexEntry(STREAM, 2, 0, -1, 2**63 - 1, INCARNATION, chunk)
    assert decode(encode(entry)) == entry


@given(st.binary(max_size=200))
def test_random_bytes_raise_a_typed_error_or_are_an_entry(value: bytes) -> None:
    try:
        entry = decode(value)
    except (CorruptStore, IncompatibleStore):
        return
    assert decode(encode(entry)) == entry


@given(entries(), st.data())
def test_a_damaged_entry_raises_a_typed_error_or_is_another_entry(
    entry: IndexEntry, data: st.DataObject
) -> None:
    value = bytearray(encode(entry))
    for _ in range(data.draw(st.integers(1, 3))):
        value[data.draw(st.integers(0, len(value) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        damaged = decode(bytes(value))
    except (CorruptStore, IncompatibleStore):
        return
    assert decode(encode(damaged)) == damaged


@given(entries(), st.data())
def test_a_cut_entry_is_noticed(entry: IndexEntry, data: st.DataObject) -> None:
    """The place is the last field, so nothing that was cut off can look whole."""
    value = encode(entry)
    with pytest.raises(CorruptStore):
        decode(value[: data.draw(st.integers(0, len(value) - 1))])


def changed(entry: IndexEntry, **fields: Any) -> bytes:
    """The stored form with fields set, or cut short by one where the value is None."""
    message = pb.IndexEntry.FromString(encode(entry))
    for name, value in fields.items():
        holder = message.wal if name in pb.WalChunk.DESCRIPTOR.fields_by_name else message
        if value is None:
            del getattr(holder, name)[-1]
        elif isinstance(value, list):
            getattr(holder, name)[:] = value
        else:
            setattr(holder, name, value)
    return message.SerializeToString()


def test_a_newer_format_is_not_touched() -> None:
    with pytest.raises(IncompatibleStore, match="format 2, this Dray knows up to 1"):
        decode(changed(wal_entry(1), format=2))


@pytest.mark.parametrize(
    "column",
    [
        "batch_bytes",
        "batch_records",
        "batch_min_timestamp",
        "batch_max_timestamp",
        "producer_id",
        "producer_epoch",
        "base_sequence",
    ],
)
def test_uneven_columns_are_corrupt(column: str) -> None:
    entry = wal_entry(1, 2, 3, producers=[Producer(7, 0, 0)] * 3)
    with pytest.raises(CorruptStore, match="uneven columns"):
        decode(changed(entry, **{column: None}))


@pytest.mark.parametrize("column", ["producer_id", "producer_epoch", "base_sequence"])
def test_some_columns_of_producers_without_the_others_are_corrupt(column: str) -> None:
    entry = wal_entry(1, producers=[Producer(7, 0, 0)])
    with pytest.raises(CorruptStore, match="uneven columns"):
        decode(changed(entry, **{column: None}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"records": 0}, "lacks what all have"),
        ({"records": 4}, "covers 4 records, but its batches have 3"),
        ({"format": 0}, "lacks what all have"),
        ({"incarnation": b"short"}, "lacks what all have"),
        ({"chunk_length": 207}, "batches of another length"),
        ({"object_id": b"short"}, "an id of 5 bytes"),
    ],
)
def test_what_nobody_can_have_written_is_corrupt(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CorruptStore, match=message):
        decode(changed(wal_entry(1, 2), **fields))


def test_too_few_verdicts_are_corrupt_and_unknown_ones_are_left_alone() -> None:
    with pytest.raises(CorruptStore, match="has 1 verdicts"):
        decode(changed(wal_entry(1, 2), verdict=[1]))
    for code in (0, 7):
        with pytest.raises(IncompatibleStore, match="a verdict that this Dray does not know"):
            decode(changed(wal_entry(1, 2), verdict=[1, code]))


def test_verdicts_are_stored_as_these_numbers_for_ever() -> None:
    assert [kind.value for kind in KINDS] == [
        "ok",
        "duplicate",
        "out of order",
        "stale epoch",
        "unknown producer",
        "left out",
    ]


def test_which_batches_are_served() -> None:
    chunk = wal_entry(2, 0, 3).where
    assert isinstance(chunk, WalChunk)
    assert [chunk.is_served(number) for number in range(3)] == [True, False, True]
    assert not chunk.serves_all
    assert [chunk.batch_at(delta) for delta in range(5)] == [0, 0, 2, 2, 2]
    judged = replace(chunk, verdicts=(Kind.DUPLICATE, Kind.LEFT_OUT, Kind.OK))
    assert [judged.is_served(number) for number in range(3)] == [False, False, True]
    whole = wal_entry(1, 1).where
    assert isinstance(whole, WalChunk)
    assert whole.serves_all


def test_what_is_decided() -> None:
    other = "ff" * 16
    owned = wal_entry(2, producers=[Producer(7, 0, 0)])

    def says(entry: IndexEntry, end: int = 12, incarnation: str = INCARNATION) -> bool:
        return is_decided(Placed(entry, end, 0, 1), incarnation)

    assert not says(owned)
    assert says(replace(owned, expected_start=10))
    assert not says(replace(owned, expected_start=9)), "somebody came in between"
    assert not says(replace(owned, expected_start=10), incarnation=other)
    assert isinstance(owned.where, WalChunk)
    assert says(replace(owned, where=replace(owned.where, verdicts=(Kind.DUPLICATE,))), incarnation=other)
    assert says(wal_entry(2), incarnation=other), "without producers the question does not arise"
    assert says(parquet_entry(2), incarnation=other)


def test_an_entry_that_points_nowhere_is_corrupt() -> None:
    message = pb.IndexEntry.FromString(encode(truncated_entry(1)))
    message.ClearField("truncated")
    with pytest.raises(CorruptStore, match="points nowhere"):
        decode(message.SerializeToString())


def test_an_entry_longer_than_its_position_is_corrupt() -> None:
    with pytest.raises(CorruptStore, match="at 4 covers 5 records"):
        place(Entry(Position(4, 100), encode(parquet_entry(5)), 1))


def test_batches_are_found_by_offset_without_the_chunk() -> None:
    chunk = wal_entry(3, 1, 4).where
    assert isinstance(chunk, WalChunk)
    assert [chunk.batch_at(delta) for delta in range(8)] == [0, 0, 0, 1, 2, 2, 2, 2]
    assert [chunk.batch_start(number) for number in range(3)] == [0, 3, 4]
    # 49 bytes of header, then per batch 4 bytes of length and 100 of batch.
    assert [chunk.batch_offset(number) for number in range(3)] == [53, 157, 261]


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), max_size=12))
def test_live_entries_are_those_that_no_later_one_covers_from_the_start(rows: list[tuple[int, int]]) -> None:
    ends = sorted({end for end, _ in rows})
    lengths = {end: min(length, end) for end, length in rows}
    placed = [Placed(parquet_entry(lengths[end]), end, end, 1) for end in ends]
    naive = [
        one
        for i, one in enumerate(placed)
        if not any(
            later.end_offset - later.entry.records <= one.end_offset - one.entry.records
            for later in placed[i + 1 :]
        )
    ]
    assert live(placed) == naive


def test_names_and_domains_of_streams_are_for_ever() -> None:
    assert sequence_of(STREAM) == "streams/000000000000001f"
    assert stream_of("streams/000000000000001f") == 0x1F
    assert stream_of("check/000000000000001f") is None
    # XXH64 of the 16 hex digits, computed from the specification of xxHash.
    assert [stream_domain(number, 16) for number in (0, 1, 0x1F, 2**64 - 1)] == [14, 7, 13, 7]


def test_incarnations_are_stored_as_bytes() -> None:
    assert bytes.fromhex(INCARNATION) in encode(wal_entry(1))
