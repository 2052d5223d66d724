"""Plans of structural changes: what they swap, and what they refuse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from uuid import UUID

import pytest

from dray.errors import InvalidRequest, VersionConflict
from dray.index.changes import carry_out, replace_run, resolve, truncate, void
from dray.index.entry import (
    IndexEntry,
    Kind,
    Placed,
    Producer,
    Truncated,
    Void,
    WalChunk,
    encode,
    place_all,
    sequence_of,
)
from dray.metadata.memory import MemoryStore
from dray.metadata.store import NewEntry, Position
from tests.index_entries import INCARNATION, STREAM, parquet_entry, truncated_entry, void_entry, wal_entry

D = 3


def row(*entries: IndexEntry, start: int = 0) -> list[Placed]:
    """Adjacent entries of 104 bytes each, at versions 1, 2, …"""
    placed, end = [], start
    for version, entry in enumerate(entries, 1):
        end += entry.records
        placed.append(Placed(entry, end, version * 104, version))
    return placed


def test_a_run_becomes_one_entry_at_its_end() -> None:
    """It keeps the cumulative size of the last entry, whatever the size of the file (X-07)."""
    run = row(wal_entry(3), wal_entry(2), wal_entry(4))
    swap = replace_run(run, parquet_entry(9))
    assert (swap.at, swap.version) == (Position(9, 312), 3)
    assert swap.deletes == (Position(3, 104), Position(5, 208))


def test_one_entry_is_a_run() -> None:
    assert replace_run(row(wal_entry(3)), parquet_entry(3)).deletes == ()


def test_what_a_crash_has_left_is_removed_as_well() -> None:
    """The swap that left it is finished by the same plan."""
    left = row(wal_entry(3), wal_entry(2), wal_entry(4))
    stored = [*left[:2], Placed(parquet_entry(9), 9, 312, 4)]
    swap = replace_run(stored, stored[-1].entry)
    assert (swap.at, swap.version, swap.deletes) == (
        Position(9, 312),
        4,
        (Position(3, 104), Position(5, 208)),
    )


@pytest.mark.parametrize(
    ("stored", "new", "message"),
    [
        ([], parquet_entry(1), "a run of 0 entries"),
        (row(wal_entry(3)), parquet_entry(2), "2 records for a run of 3"),
        (row(wal_entry(3)), parquet_entry(4), "4 records for a run of 3"),
        (row(wal_entry(3)), parquet_entry(3, stream_id=8), "those of another stream"),
        (row(wal_entry(3)), wal_entry(3), "only a Parquet file or a truncation"),
        (row(wal_entry(3), wal_entry(3), wal_entry(2))[::2], parquet_entry(8), "up to 3 and then one from 6"),
        (row(wal_entry(3), wal_entry(2))[::-1], parquet_entry(5), "not in order"),
        (row(truncated_entry(3), wal_entry(2)), parquet_entry(5), "cannot be in a Parquet file"),
        (row(wal_entry(2), start=3), truncated_entry(2), "from 3, not from 0"),
        (row(*[wal_entry(1)] * 121), truncated_entry(121), "a truncation of 121 entries"),
        (row(*[wal_entry(1)] * 8_193), parquet_entry(8_193), "a run of 8193 entries"),
    ],
)
def test_what_would_tear_the_index_is_refused(
    stored: Sequence[Placed], new: IndexEntry, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        replace_run(stored, new)


@pytest.mark.parametrize(
    ("before", "end", "deletes"),
    [
        (3, 3, []),
        (4, 3, []),
        (5, 5, [3]),
        (9, 9, [3, 5]),
        (10**9, 9, [3, 5]),
    ],
)
def test_retention_takes_whole_entries_and_never_removes_the_last(
    before: int, end: int, deletes: list[int]
) -> None:
    swap = truncate(row(wal_entry(3), wal_entry(2), wal_entry(4)), before, 7_000, INCARNATION)
    assert swap is not None
    assert (swap.at.end_records, [position.end_records for position in swap.deletes]) == (end, deletes)
    assert (swap.new.where, swap.new.records, swap.new.stream_id) == (Truncated(), end, STREAM)


@pytest.mark.parametrize("before", [0, 2])
def test_nothing_to_truncate(before: int) -> None:
    assert truncate(row(wal_entry(3), wal_entry(2)), before, 0, INCARNATION) is None
    assert truncate(row(truncated_entry(2), wal_entry(2)), before, 0, INCARNATION) is None


def test_a_truncation_takes_in_the_one_before() -> None:
    swap = truncate(row(truncated_entry(3), wal_entry(2), wal_entry(4)), 5, 0, INCARNATION)
    assert swap is not None
    assert (swap.new.records, swap.deletes) == (5, (Position(3, 104),))


def test_an_entry_that_reaches_beyond_is_kept_with_all_it_covers() -> None:
    left = row(wal_entry(3), wal_entry(2), wal_entry(4))
    stored = [*left[:2], Placed(parquet_entry(9), 9, 312, 4)]
    assert truncate(stored, 5, 0, INCARNATION) is None


def test_many_entries_are_truncated_in_steps() -> None:
    swap = truncate(row(*[wal_entry(1)] * 300), 300, 0, INCARNATION)
    assert swap is not None
    assert (swap.at.end_records, len(swap.deletes)) == (120, 119)


async def test_a_plan_is_carried_out_once() -> None:
    store = MemoryStore()
    sequence = sequence_of(STREAM)
    for entry in (wal_entry(3), wal_entry(2)):
        await store.append(D, [NewEntry(sequence, entry.records, 104, encode(entry))])
    stored = place_all(await store.entries(D, sequence, 0, 10))
    swap = replace_run(stored, parquet_entry(5))
    placed = await carry_out(store, D, swap)
    assert place_all(await store.entries(D, sequence, 0, 10)) == [placed]
    with pytest.raises(VersionConflict):
        await carry_out(store, D, swap)


def test_a_void_entry_keeps_its_place_and_its_clock() -> None:
    """Readers who look for a timestamp are not to find it, those who keep a clock by the entries are."""
    (placed,) = row(replace(wal_entry(2, 3, number=9), expected_start=7), start=7)
    swap = void(placed)
    expected = replace(
        placed.entry, where=Void(UUID(int=9)), min_timestamp_ms=-1, max_timestamp_ms=-1, expected_start=7
    )
    at = (placed.end_offset, placed.end_bytes)
    assert (swap.at, swap.version, swap.new, swap.deletes) == (at, placed.version, expected, ())


@pytest.mark.parametrize("entry", [parquet_entry(2), truncated_entry(2), void_entry(2)])
def test_only_an_entry_of_a_wal_object_becomes_void(entry: IndexEntry) -> None:
    with pytest.raises(InvalidRequest, match="is of no WAL object"):
        void(row(entry)[0])


def test_a_void_entry_goes_the_way_of_its_neighbours() -> None:
    run = row(wal_entry(2), void_entry(3), wal_entry(1))
    assert replace_run(run, parquet_entry(6)).at.end_records == 6
    swap = truncate(run, 5, 0, INCARNATION)
    assert swap is not None
    assert (swap.at.end_records, swap.new.where) == (5, Truncated())


def test_resolving_adds_the_verdicts_and_nothing_else() -> None:
    entry = wal_entry(2, 1, producers=[Producer(7, 0, 0), None])
    (placed,) = row(entry)
    swap = resolve(placed, [Kind.DUPLICATE, Kind.OK])
    assert (swap.at, swap.version, swap.deletes) == (Position(3, 104), 1, ())
    assert isinstance(swap.new.where, WalChunk)
    assert swap.new.where.verdicts == (Kind.DUPLICATE, Kind.OK)
    assert replace(swap.new, where=replace(swap.new.where, verdicts=())) == entry


@pytest.mark.parametrize("count", [0, 1, 3])
def test_there_is_one_verdict_for_each_batch(count: int) -> None:
    with pytest.raises(InvalidRequest, match=f"{count} verdicts"):
        resolve(row(wal_entry(2, 1))[0], [Kind.OK] * count)


def test_23_verdicts_are_stored_once() -> None:
    (placed,) = row(resolve(row(wal_entry(2))[0], [Kind.OK]).new)
    with pytest.raises(InvalidRequest):
        resolve(placed, [Kind.DUPLICATE])
    with pytest.raises(InvalidRequest):
        resolve(row(void_entry(2))[0], [Kind.OK])
