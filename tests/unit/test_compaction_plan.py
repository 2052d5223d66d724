"""What is compacted when: by age, by size, around what stays as it is; and which files are put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from uuid import UUID

from compactor.plan import (
    MAX_TASK_ENTRIES,
    PlanLimits,
    bundle_count,
    input_of,
    pack,
    plan_parts,
    plan_rewrite,
)
from compactor.task import Input
from dray.index.entry import IndexEntry, Kind, ParquetFile, Placed, Producer, WalChunk
from tests.index_entries import of, parquet_entry, truncated_entry, void_entry, wal_entry

# Entries are of 5,000 ms, and a batch of them is 104 bytes in its chunk.
LIMITS = PlanLimits(max_age_ms=1_000, part_bytes=300, file_bytes=200, max_files=3)
YOUNG_MS, OLD_MS = 5_999, 6_000


def placed(*entries: IndexEntry) -> list[Placed]:
    """One behind the other."""
    found: list[Placed] = []
    end = 0
    for entry in entries:
        end += entry.records
        found.append(Placed(entry, end, end * 10, 1))
    return found


def planned(
    entries: Sequence[Placed],
    *,
    now_ms: int = OLD_MS,
    undecodable: Sequence[int] = (),
    log_start: int = 0,
    limits: PlanLimits = LIMITS,
) -> list[tuple[int, int]]:
    """Start and end of each part."""
    parts = plan_parts(entries, undecodable=undecodable, log_start=log_start, limits=limits, now_ms=now_ms)
    return [(part[0].start_offset, part[-1].end_offset) for part in parts]


def test_nothing_gives_nothing() -> None:
    assert planned([]) == []


def test_records_wait_until_they_are_old() -> None:
    entries = placed(wal_entry(2), wal_entry(3))
    assert planned(entries, now_ms=YOUNG_MS) == []
    assert planned(entries, now_ms=OLD_MS) == [(0, 5)]


def test_a_full_part_does_not_wait_and_the_last_one_does() -> None:
    entries = placed(*[wal_entry(1)] * 5)  # two of 104 bytes fit
    assert planned(entries, now_ms=YOUNG_MS) == [(0, 2), (2, 4)]
    assert planned(entries, now_ms=OLD_MS) == [(0, 2), (2, 4), (4, 5)]


def test_a_small_part_in_front_of_what_stays_waits_until_it_is_old() -> None:
    entries = placed(wal_entry(1), wal_entry(1), wal_entry(1), wal_entry(1))
    assert planned(entries, now_ms=YOUNG_MS, undecodable=[2]) == []
    assert planned(entries, now_ms=OLD_MS, undecodable=[2]) == [(0, 1), (2, 4)]


def test_an_entry_larger_than_a_part_is_one() -> None:
    assert planned(placed(wal_entry(*[1] * 9), wal_entry(1))) == [(0, 9), (9, 10)]


def test_what_was_deleted_or_is_a_file_or_cannot_be_decoded_stays() -> None:
    entries = placed(truncated_entry(4), wal_entry(1), parquet_entry(3), wal_entry(1), wal_entry(1))
    assert planned(entries) == [(4, 5), (8, 10)]
    assert planned(entries, undecodable=[9]) == [(4, 5), (9, 10)]
    assert planned(entries, log_start=5) == [(8, 10)]
    assert planned(entries, log_start=10) == []


def test_an_entry_that_is_half_deleted_is_compacted_for_its_other_half() -> None:
    entries = placed(wal_entry(2, 3))
    assert planned(entries, log_start=3) == [(0, 5)]
    assert planned(entries, log_start=5) == []


def test_void_entries_come_along_but_make_no_file_of_their_own() -> None:
    """A table takes no file without rows."""
    duplicates = replace(
        chunk := wal_entry(2, producers=[Producer(1, 0, 0)]),
        where=replace(chunk_of(chunk), verdicts=(Kind.DUPLICATE,)),
    )
    assert planned(placed(void_entry(3), duplicates)) == []
    assert planned(placed(void_entry(3), duplicates, wal_entry(1), void_entry(1))) == [(0, 7)]
    assert planned(placed(wal_entry(1), void_entry(1), parquet_entry(1), void_entry(1))) == [(0, 2)]


def chunk_of(entry: IndexEntry) -> WalChunk:
    assert isinstance(entry.where, WalChunk)
    return entry.where


def test_a_task_has_so_many_entries_at_most_and_then_is_due() -> None:
    entries = placed(*[wal_entry(1)] * (MAX_TASK_ENTRIES + 10))
    limits = replace(LIMITS, part_bytes=2**40)
    assert planned(entries, now_ms=YOUNG_MS, limits=limits) == [(0, MAX_TASK_ENTRIES)]
    assert planned(entries[: MAX_TASK_ENTRIES - 1], now_ms=YOUNG_MS, limits=limits) == []


def test_inputs_name_what_is_not_for_readers() -> None:
    chunk = wal_entry(2, 0, 3, number=7, producers=[Producer(1, 0, 0)] * 3)
    chunk = replace(chunk, where=replace(chunk_of(chunk), verdicts=(Kind.DUPLICATE, Kind.LEFT_OUT, Kind.OK)))
    one, two, three = map(input_of, placed(chunk, void_entry(4, number=8), parquet_entry(5, number=9)))
    assert one == Input(5, 50, 5, UUID(int=7), "wal/7", 49, 312, left_out=(1,), void=(0,))
    assert two == Input(9, 90, 4, UUID(int=8), "", 0, 0)
    assert three == Input(14, 140, 5, UUID(int=9), "data/9.parquet", 0, 77)
    assert (two.start_offset, three.start_offset) == (5, 9)


# --- rewrites: a file is 77 bytes here, and small below 100


def rewritten(
    entries: Sequence[Placed], limits: PlanLimits = LIMITS, undecodable: Sequence[int] = ()
) -> list[tuple[int, int]]:
    return [(run[0].start_offset, run[-1].end_offset) for run in plan_rewrite(entries, limits, undecodable)]


def test_few_files_stay_and_many_small_ones_are_put_together() -> None:
    assert rewritten(placed(*[parquet_entry(1)] * 3)) == []
    assert rewritten(placed(*[parquet_entry(1)] * 4)) == [(0, 2), (2, 4)]
    assert rewritten(placed(*[parquet_entry(1)] * 4), replace(LIMITS, file_bytes=1_000)) == [(0, 4)]


def test_a_file_without_a_neighbour_and_a_large_one_stay() -> None:
    small = parquet_entry(1)
    large = of(ParquetFile(UUID(int=1), "data/1.parquet", 100), 1)
    assert rewritten(placed(small, large, small, small, large, small)) == [(2, 4)]
    assert rewritten(placed(small, wal_entry(1), small, small, void_entry(1), small)) == [(2, 4)]


def test_a_file_that_cannot_be_read_stays() -> None:
    assert rewritten(placed(*[parquet_entry(1)] * 5), undecodable=[2]) == [(2, 4)]


# --- spreading


def test_bundles_are_of_about_the_same_size() -> None:
    work = list("abcdefg")
    packed = pack(work, [10, 1, 1, 1, 5, 5, 1], 3)
    assert sorted(each for one in packed for each in one) == work
    sizes = {"a": 10, "e": 5, "f": 5}
    assert sorted(sum(sizes.get(each, 1) for each in one) for one in packed) == [7, 7, 10]
    assert pack(work, [0] * 7, 100) == [[each] for each in work]
    assert pack([], [], 4) == []


def test_there_are_bundles_for_every_slot_and_none_is_large() -> None:
    assert bundle_count([1, 2], 8, 100) == 8
    assert bundle_count([100] * 30, 8, 100) == 30
    assert bundle_count([101], 1, 100) == 2
