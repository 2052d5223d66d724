"""Structural changes of an index: a run of entries becomes one. Planning is pure; `carry_out` is one call.

A swap puts the new entry where the run ends, at the version that was read, and removes the others. The new
entry keeps the position of the one it replaces, so cumulative sizes and all later entries stay as they are
(a Parquet file's own size is in its entry), and the end of a sequence is never removed.

Live entries of a stream tile [0, end). Retention keeps that: what it takes becomes one `Truncated` entry
from 0 on, which a later retention takes in again.

Two other changes keep the entry in its place: `void`, where its object was fenced and it points to nothing,
and `resolve`, which adds the fold's verdicts. Everybody plans the same ones, and whoever may does so by the
same compare-and-put, at any time, so they need no claim.

Left to the caller: one change at a time per stream, claimed by a task record and finished before the next;
and what has to be done before and after a removal (producer snapshot, verdicts, marks, references).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from dray.errors import InvalidRequest
from dray.index.entry import (
    IndexEntry,
    Kind,
    ParquetFile,
    Placed,
    Truncated,
    Void,
    WalChunk,
    encode,
    live,
    sequence_of,
)
from dray.metadata.store import MetadataStore, Position

# While a run is being removed, a reader may find the middle of it and has to look for the entry that
# covers it: so many entries ahead at most.
MAX_RUN_ENTRIES = 8_192
# The log start is where the first live entry says, and a reader knows that it is live when it has seen as
# many entries as one truncation may cover. As many fit into one transaction of etcd as well.
MAX_TRUNCATED_ENTRIES = 120
NO_TIMESTAMP = -1


@dataclass(frozen=True, slots=True)
class Swap:
    """A planned replacement: what `MetadataStore.swap` is to be called with."""

    at: Position
    version: int
    new: IndexEntry
    deletes: tuple[Position, ...]


async def carry_out(store: MetadataStore, domain: int, swap: Swap) -> Placed:
    """Do it, in one call; how the new entry stands in the index.

    Raises `VersionConflict` if the end of the run was changed since it was read. After `OutcomeUnknown`
    read again: if the new entry is there, plan to replace what was read with it once more.
    """
    sequence, value = sequence_of(swap.new.stream_id), encode(swap.new)
    version = await store.swap(domain, sequence, swap.at, swap.version, value, swap.deletes)
    return Placed(swap.new, *swap.at, version)


def replace_run(stored: Sequence[Placed], new: IndexEntry) -> Swap:
    """Plan to replace a run by one entry that covers exactly the same offsets.

    `stored` is the run as it was read, in order, with the superseded entries that a crash has left in it:
    they are removed too. So a swap that was interrupted is finished by replacing what is left with the
    entry that is there. Raises `InvalidRequest` for what would tear a hole or move an offset.
    """
    if not 1 <= len(stored) <= MAX_RUN_ENTRIES:
        raise InvalidRequest(f"a run of {len(stored)} entries; it has 1 to {MAX_RUN_ENTRIES}")
    stream = f"stream {new.stream_id:016x}"
    if any(placed.entry.stream_id != new.stream_id for placed in stored):
        raise InvalidRequest(f"{stream}: its entry cannot replace those of another stream")
    for before, after in pairwise(stored):
        if before.end_offset >= after.end_offset or before.end_bytes > after.end_bytes:
            raise InvalidRequest(f"{stream}: the run is not in order at {after.end_offset}")
    run = live(stored)
    for before, after in pairwise(run):
        if before.end_offset != after.start_offset:
            raise InvalidRequest(
                f"{stream}: the run has an entry up to {before.end_offset} and then one from"
                f" {after.start_offset}"
            )
    last = run[-1]
    covered = last.end_offset - run[0].start_offset
    if new.records != covered:
        raise InvalidRequest(f"{stream}: an entry of {new.records} records for a run of {covered}")
    _check_kind(stream, stored, run, new)
    deletes = tuple(Position(placed.end_offset, placed.end_bytes) for placed in stored[:-1])
    return Swap(Position(last.end_offset, last.end_bytes), last.version, new, deletes)


def truncate(
    stored: Sequence[Placed], before_offset: int, created_at_ms: int, incarnation: str
) -> Swap | None:
    """Plan to give up the entries that end at or before `before_offset`; None if there is nothing to give up.

    `stored` is read from the front of the stream. One plan takes at most `MAX_TRUNCATED_ENTRIES` of them:
    repeat until None.
    """
    ends = {placed.end_offset for placed in live(stored) if placed.end_offset <= before_offset}
    counts = enumerate(stored[:MAX_TRUNCATED_ENTRIES], 1)
    taken = max((count for count, placed in counts if placed.end_offset in ends), default=0)
    run = stored[:taken]
    if not run or (len(run) == 1 and isinstance(run[0].entry.where, Truncated)):
        return None
    new = IndexEntry(
        stream_id=run[-1].entry.stream_id,
        records=run[-1].end_offset,
        created_at_ms=created_at_ms,
        min_timestamp_ms=NO_TIMESTAMP,
        max_timestamp_ms=NO_TIMESTAMP,
        incarnation=incarnation,
        where=Truncated(),
    )
    return replace_run(run, new)


def void(placed: Placed) -> Swap:
    """Plan to mark an entry of an object that is known to be FENCED. Everybody plans the same.

    It keeps the time it was written at, which is a clock for others. It loses the timestamps of its
    records, so that nobody who looks for a time finds it.
    """
    chunk = placed.entry.where
    if not isinstance(chunk, WalChunk):
        stream = f"stream {placed.entry.stream_id:016x}"
        raise InvalidRequest(f"{stream}: the entry at {placed.end_offset} is of no WAL object")
    new = replace(
        placed.entry,
        min_timestamp_ms=NO_TIMESTAMP,
        max_timestamp_ms=NO_TIMESTAMP,
        where=Void(chunk.object_id),
    )
    return Swap(Position(placed.end_offset, placed.end_bytes), placed.version, new, ())


def resolve(placed: Placed, verdicts: Sequence[Kind]) -> Swap:
    """Plan to store the fold's verdicts, one for each batch, in an entry that counts and is not decided."""
    chunk = placed.entry.where
    if not isinstance(chunk, WalChunk) or len(chunk.batches) != len(verdicts) or chunk.verdicts:
        stream = f"stream {placed.entry.stream_id:016x}"
        raise InvalidRequest(f"{stream}: {len(verdicts)} verdicts for the entry at {placed.end_offset}")
    new = replace(placed.entry, where=replace(chunk, verdicts=tuple(verdicts)))
    return Swap(Position(placed.end_offset, placed.end_bytes), placed.version, new, ())


def _check_kind(stream: str, stored: Sequence[Placed], run: Sequence[Placed], new: IndexEntry) -> None:
    match new.where:
        case Truncated():
            if run[0].start_offset != 0:
                raise InvalidRequest(f"{stream}: a truncation from {run[0].start_offset}, not from 0")
            if len(stored) > MAX_TRUNCATED_ENTRIES:
                raise InvalidRequest(
                    f"{stream}: a truncation of {len(stored)} entries; at most {MAX_TRUNCATED_ENTRIES}"
                )
        case ParquetFile():
            if any(isinstance(placed.entry.where, Truncated) for placed in run):
                raise InvalidRequest(f"{stream}: what was truncated cannot be in a Parquet file")
        case _:
            raise InvalidRequest(f"{stream}: only a Parquet file or a truncation replaces a run")
