"""Which entry holds an offset, and where a stream begins and ends.

`OffsetIndex` reads the store, through an `IndexCache` where it is given one. It knows nothing of verdicts:
which entries are decided, and so the high watermark, is for those who fold them; which of them count, where
that is not certain, is for a `Witness`.

- Live entries tile [0, end): what is not so was read while it changed, or is stale, and is read again, behind
  a barrier. It is never taken for an offset out of range.
- What was told never goes back: an end or a log start is at least the highest told before.
- A superseded entry that is still stored is as good an answer as the one that supersedes it: it holds the
  same records, and its object goes only after it. Where that one is a truncation, `log_start` tells.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import NamedTuple

from dray.errors import CorruptStore, InvalidRequest
from dray.index.cache import IndexCache
from dray.index.changes import MAX_RUN_ENTRIES, MAX_TRUNCATED_ENTRIES
from dray.index.entry import (
    BATCH_PREFIX_BYTES,
    ParquetFile,
    Placed,
    Truncated,
    WalChunk,
    live,
    place_all,
    sequence_of,
)
from dray.index.log_start import decode, log_start_key
from dray.metadata.store import Entry, MetadataStore, Position

# The second reads behind a barrier. More are for changes that overtake a read of several pages.
READ_ATTEMPTS = 4
# Looking for the end of a half-removed run.
PAGE_ENTRIES = 256
# About 30 MiB. Those beyond are read behind a barrier instead of being remembered.
MAX_TOLD_STREAMS = 65_536

NOTHING = Position(0, 0)


class Told(NamedTuple):
    end: Position
    log_start: int


NOTHING_TOLD = Told(NOTHING, 0)


class OffsetIndex:
    def __init__(
        self, store: MetadataStore, domain_of: Callable[[int], int], cache: IndexCache | None = None
    ) -> None:
        """`domain_of` says which domain a stream is in."""
        self._store = store
        self._domain_of = domain_of
        self._cache = IndexCache() if cache is None else cache  # one that nobody follows stays empty
        self._told: OrderedDict[int, Told] = OrderedDict()
        self._has_forgotten = False

    async def find(self, stream_id: int, offset: int, *, fresh: bool = False) -> Placed | None:
        """The entry that holds `offset`; None at and behind the end of the stream.

        `fresh` reads the store behind a barrier, whatever the cache has.
        """
        if not fresh:
            found = self._cache.find(stream_id, offset)
            if found is not None:
                return found
        if offset < 0:
            raise InvalidRequest(f"offset {offset} of stream {stream_id:016x}")
        if not fresh:
            end = self._cache.end(stream_id)
            if end is not None and offset >= end.end_records:
                return None
        run = await self._read(stream_id, offset, 1, fresh)
        return run[0] if run else None

    async def range(
        self, stream_id: int, start: int, max_entries: int, *, fresh: bool = False
    ) -> list[Placed]:
        """At most `max_entries` adjacent entries in order, from the one that holds `start` on.

        Fewer, only if the stream ends there.
        """
        if start < 0 or max_entries < 1:
            raise InvalidRequest(f"{max_entries} entries from offset {start} of stream {stream_id:016x}")
        if not fresh:
            run = self._cache.run(stream_id, start, max_entries)
            end = self._cache.end(stream_id)
            reached = run[-1].end_offset if run else start
            if len(run) == max_entries or (end is not None and reached >= end.end_records):
                return run
        return await self._read(stream_id, start, max_entries, fresh)

    def has_at_hand(self, stream_id: int) -> bool:
        """Whether the bounds of the stream are known without asking the store."""
        return self._cache.end(stream_id) is not None and self._cache.log_start(stream_id) is not None

    def told_log_start(self, stream_id: int) -> int:
        """The highest log start that is known here: at least so many offsets are gone."""
        return self._told_of(stream_id).log_start

    async def end(self, stream_id: int, *, fresh: bool = False) -> Position:
        """Where the next append will start: offset and cumulative bytes."""
        known = None if fresh else self._cache.end(stream_id)
        if known is None:
            domain = self._domain_of(stream_id)
            if fresh or self._may_have_forgotten(stream_id):
                await self._store.barrier(domain)
            began = self._cache.now()
            tail = await self._store.tail(domain, sequence_of(stream_id))
            known = NOTHING if tail is None else tail.position
            # A stale end in the cache would hide entries that were told of while nobody followed.
            known = max(known, self._told_of(stream_id).end)
            self._cache.learn_end(domain, began, stream_id, known)
        return self._tell(stream_id, end=known).end

    async def log_start(self, stream_id: int, *, fresh: bool = False) -> int:
        """The first offset that is neither truncated nor deleted; the end, if all are."""
        known = None if fresh else self._cache.log_start(stream_id)
        if known is None:
            known = await self._read_log_start(stream_id, fresh)
        return self._tell(stream_id, log_start=known).log_start

    async def size_bytes(self, stream_id: int) -> int:
        """How much the stream holds from its log start on, whole batches, as it was written first."""
        end = await self.end(stream_id)
        log_start = await self.log_start(stream_id) if end > NOTHING else 0
        if log_start == 0:
            return end.end_bytes
        placed = await self.find(stream_id, log_start) if log_start < end.end_records else None
        if placed is None:
            return 0
        return max(end.end_bytes - placed.end_bytes, 0) + _bytes_from(placed, log_start)

    def raise_log_start(self, stream_id: int, log_start: int) -> int:
        """Take in that the log starts there at least, before the watch tells. Where it starts, then."""
        return self._tell(stream_id, log_start=log_start).log_start

    def now(self) -> int:
        """To be taken before a write whose entries are to be added."""
        return self._cache.now()

    def add(self, placed: Placed, began: int) -> None:
        """Take in an entry that this broker wrote, by a call begun at `began`."""
        stream_id = placed.entry.stream_id
        self._cache.add(self._domain_of(stream_id), began, [placed])
        self._tell(stream_id, end=Position(placed.end_offset, placed.end_bytes))

    async def _read(self, stream_id: int, start: int, max_entries: int, fresh: bool) -> list[Placed]:
        domain = self._domain_of(stream_id)
        for attempt in range(READ_ATTEMPTS):
            if fresh or attempt > 0 or self._may_have_forgotten(stream_id):
                await self._store.barrier(domain)
            began = self._cache.now()
            run = await self._read_once(domain, stream_id, start, max_entries)
            if run is not None:
                self._cache.add(domain, began, run)
                return run
        raise _torn(stream_id, start)

    async def _read_once(
        self, domain: int, stream_id: int, start: int, max_entries: int
    ) -> list[Placed] | None:
        """None if there is a hole: read again."""
        sequence = sequence_of(stream_id)
        limit = max_entries
        stored: list[Placed] = []
        at = start + 1
        while len(stored) <= MAX_RUN_ENTRIES + max_entries:
            if limit == 1:
                entry = await self._store.ceiling(domain, sequence, at)
                page = [] if entry is None else [entry]
            else:
                page = await self._store.entries(domain, sequence, at, limit)
            stored += _place(stream_id, page)
            run = adjacent(live(stored), start)
            if len(run) >= max_entries:
                self._tell(stream_id, end=Position(run[-1].end_offset, run[-1].end_bytes))
                return run[:max_entries]
            if len(page) < limit:
                last = stored[-1].end_offset if stored else 0
                reached = run[-1].end_offset if run else start
                if reached < max(last, self._told_of(stream_id).end.end_records):
                    return None
                if run:
                    self._tell(stream_id, end=Position(run[-1].end_offset, run[-1].end_bytes))
                return run
            at = stored[-1].end_offset + 1
            limit = max(limit, PAGE_ENTRIES)
        return None

    async def _read_log_start(self, stream_id: int, fresh: bool) -> int:
        domain = self._domain_of(stream_id)
        for attempt in range(READ_ATTEMPTS):
            if fresh or attempt > 0 or self._may_have_forgotten(stream_id):
                await self._store.barrier(domain)
            began = self._cache.now()
            # Two reads are no snapshot. Neither needs to be: what either says never goes back.
            stored, record = await asyncio.gather(
                self._read_front(domain, stream_id), self._store.get(domain, log_start_key(stream_id))
            )
            version = None if record is None else record.version
            if not stored and version is None and self._told_of(stream_id).end == NOTHING:
                return 0
            if attempt == 0 and not fresh and self._cache.doubts_record(domain, stream_id, version):
                continue  # whoever was woken by the watch looks here, and would not be woken again
            first = live(stored)[0] if stored else None
            if first is not None and first.start_offset == 0:
                truncated = first.end_offset if isinstance(first.entry.where, Truncated) else 0
                deleted = 0 if record is None else decode(record.key, record.value)
                log_start = max(truncated, deleted)
                self._cache.learn_log_start(domain, began, stream_id, log_start, stored, version)
                return log_start
        raise _torn(stream_id, 0)

    async def _read_front(self, domain: int, stream_id: int) -> list[Placed]:
        """The first entries: as many as a truncation may cover, and on to the one that covers offset 0."""
        stored: list[Placed] = []
        at, limit = 1, MAX_TRUNCATED_ENTRIES
        while len(stored) < MAX_RUN_ENTRIES:
            page = _place(stream_id, await self._store.entries(domain, sequence_of(stream_id), at, limit))
            stored += page
            if len(page) < limit or any(placed.start_offset == 0 for placed in page):
                break
            at, limit = page[-1].end_offset + 1, PAGE_ENTRIES
        return stored

    def _told_of(self, stream_id: int) -> Told:
        return self._told.get(stream_id, NOTHING_TOLD)

    def _tell(self, stream_id: int, *, end: Position = NOTHING, log_start: int = 0) -> Told:
        before = self._told_of(stream_id)
        told = Told(max(before.end, end), max(before.log_start, log_start))
        self._told[stream_id] = told
        self._told.move_to_end(stream_id)
        if len(self._told) > MAX_TOLD_STREAMS:
            self._told.popitem(last=False)
            self._has_forgotten = True
        return told

    def _may_have_forgotten(self, stream_id: int) -> bool:
        return self._has_forgotten and stream_id not in self._told


def adjacent(entries: Iterable[Placed], start: int) -> list[Placed]:
    """The entry that holds `start`, and those that follow it without a hole."""
    run: list[Placed] = []
    for placed in entries:
        if placed.start_offset != run[-1].end_offset if run else placed.start_offset > start:
            break
        run.append(placed)
    return run


def _bytes_from(placed: Placed, offset: int) -> int:
    """What an entry holds from the batch at `offset` on."""
    where = placed.entry.where
    if isinstance(where, WalChunk):
        number = where.batch_at(offset - placed.start_offset)
        skipped = where.batch_offset(number) - BATCH_PREFIX_BYTES - where.chunk_offset
        return where.chunk_length - skipped
    if isinstance(where, ParquetFile):  # where its batches were is not known any more
        return where.size_bytes * (placed.end_offset - offset) // placed.entry.records
    return 0


def _place(stream_id: int, stored: Iterable[Entry]) -> list[Placed]:
    placed = place_all(stored)
    for one in placed:
        if one.entry.stream_id != stream_id:
            raise CorruptStore(
                f"the index of stream {stream_id:016x} has an entry of {one.entry.stream_id:016x}"
                f" at {one.end_offset}"
            )
    return placed


def _torn(stream_id: int, offset: int) -> CorruptStore:
    return CorruptStore(
        f"the index of stream {stream_id:016x} has a hole at or behind offset {offset}:"
        f" read {READ_ATTEMPTS} times"
    )
