"""Which ranges of a stream become Parquet now, and how the work is spread. Pure.

A range is compacted when it fills a file, or when its oldest entry is old enough; then all of the stream is.
So a busy stream makes files of the wanted size and a quiet one makes a file now and then. A part is a run of
adjacent entries: it ends in front of what stays as it is (an entry that nobody can decode, a truncation, what
was deleted), and has at least one batch for readers.

Small Parquet files that lie side by side are rewritten into one when a stream has too many files.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

from compactor.task import Input
from dray.index.changes import MAX_RUN_ENTRIES
from dray.index.entry import Kind, ParquetFile, Placed, Void, WalChunk

# A task is one record of the metadata store: about 200 bytes for each of so many entries fit into any.
MAX_TASK_ENTRIES = 2_000
# A file is kept as it is once it has this part of the wanted size.
FULL_ENOUGH = 0.5

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PlanLimits:
    max_age_ms: int  # the most time that records wait to be in the table
    part_bytes: int  # the most WAL bytes that become one file
    file_bytes: int  # the size that small files are rewritten to
    max_files: int  # Parquet files of a stream, above which small ones are rewritten


def plan_parts(
    entries: Sequence[Placed],
    *,
    undecodable: Collection[int],
    log_start: int,
    limits: PlanLimits,
    now_ms: int,
) -> list[list[Placed]]:
    """The parts of the next task of a stream; none if it is not time yet.

    `entries` are decided and adjacent; `undecodable` are the ends of those that nobody can decode.
    """
    runs: list[list[Placed]] = []
    is_open = False
    size = 0
    for placed in entries[:MAX_TASK_ENTRIES]:
        stays = placed.end_offset <= log_start or placed.end_offset in undecodable
        if stays or not isinstance(placed.entry.where, WalChunk | Void):
            is_open = False
            continue
        added = _wal_bytes(placed)
        if not is_open or size + added > limits.part_bytes or len(runs[-1]) >= MAX_RUN_ENTRIES:
            runs.append([])
            is_open, size = True, 0
        runs[-1].append(placed)
        size += added
    runs = [run for run in runs if any(has_rows(placed, log_start) for placed in run)]
    if not runs:
        return []
    oldest_ms = min(placed.entry.created_at_ms for run in runs for placed in run)
    if now_ms - oldest_ms >= limits.max_age_ms or len(entries) >= MAX_TASK_ENTRIES:
        return runs
    # What is followed by another part will not grow any more.
    return [run for run in runs[:-1] if sum(map(_wal_bytes, run)) >= limits.part_bytes * FULL_ENOUGH]


def plan_rewrite(
    entries: Sequence[Placed], limits: PlanLimits, undecodable: Collection[int] = ()
) -> list[list[Placed]]:
    """Runs of small Parquet files to be made one file each; none if there are few files.

    `undecodable` are the ends of those that nobody can read.
    """

    def is_small(placed: Placed) -> bool:
        where = placed.entry.where
        is_one = isinstance(where, ParquetFile) and where.size_bytes < limits.file_bytes * FULL_ENOUGH
        return is_one and placed.end_offset not in undecodable

    files = [placed for placed in entries if isinstance(placed.entry.where, ParquetFile)]
    if len(files) <= limits.max_files:
        return []
    runs: list[list[Placed]] = []
    for are_small, group in groupby(entries, key=is_small):
        if not are_small:
            continue
        run: list[Placed] = []
        size = 0
        for placed in group:
            added = _file_bytes(placed)
            if run and size + added > limits.file_bytes:
                runs.append(run)
                run, size = [], 0
            run.append(placed)
            size += added
        runs.append(run)
    chosen: list[list[Placed]] = []
    for run in runs:
        if len(run) > 1 and sum(map(len, chosen)) + len(run) <= MAX_TASK_ENTRIES:
            chosen.append(run)
    return chosen


def has_rows(placed: Placed, log_start: int) -> bool:
    """Whether a file of it has a row: a table takes no empty ones."""
    where = placed.entry.where
    if not isinstance(where, WalChunk):
        return False
    ends = (placed.start_offset + where.batch_start(n) + b.records for n, b in enumerate(where.batches))
    return any(end > log_start and where.is_served(number) for number, end in enumerate(ends))


def input_of(placed: Placed) -> Input:
    where = placed.entry.where
    end, end_bytes, records = placed.end_offset, placed.end_bytes, placed.entry.records
    match where:
        case WalChunk():
            left_out = tuple(n for n, batch in enumerate(where.batches) if batch.records == 0)
            verdicts = enumerate(where.verdicts)
            void = tuple(n for n, kind in verdicts if kind is not Kind.OK and where.batches[n].records)
            at, length = where.chunk_offset, where.chunk_length
            return Input(end, end_bytes, records, where.object_id, where.path, at, length, left_out, void)
        case Void():
            return Input(end, end_bytes, records, where.object_id, "", 0, 0)
        case ParquetFile():
            size, uri = where.size_bytes, where.iceberg_file
            return Input(end, end_bytes, records, where.file_id, where.path, 0, size, iceberg_file=uri)
        case _:
            raise AssertionError(f"no task takes {where}")


def pack(work: Sequence[T], sizes: Sequence[int], bundles: int) -> list[list[T]]:
    """Spread work over at most so many bundles of about the same size: the largest first, to the emptiest."""
    count = max(1, min(bundles, len(work)))
    filled = [0] * count
    packed: list[list[T]] = [[] for _ in range(count)]
    for number in sorted(range(len(work)), key=lambda n: -sizes[n]):
        emptiest = filled.index(min(filled))
        packed[emptiest].append(work[number])
        filled[emptiest] += max(sizes[number], 1)
    return [bundle for bundle in packed if bundle]


def bundle_count(sizes: Iterable[int], slots: int, bundle_bytes: int) -> int:
    """Enough for every slot, and so many that none is much larger than `bundle_bytes`."""
    return max(slots, -(-sum(sizes) // bundle_bytes))


def _wal_bytes(placed: Placed) -> int:
    where = placed.entry.where
    return where.chunk_length if isinstance(where, WalChunk) else 0


def _file_bytes(placed: Placed) -> int:
    where = placed.entry.where
    assert isinstance(where, ParquetFile)
    return where.size_bytes
