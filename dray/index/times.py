"""Which record of a stream is the first from a given time on, and which is the newest: exact to the record.

Timestamps are the clients' and need not rise with the offsets. The index has the highest of every entry and
batch; it says where to look, the records inside decide. So a lookup walks the entries from the log start on,
in memory as far as the cache has them, and decodes one batch; more, only where headers say more than their
records hold. A header that says too little hides its records.

A batch whose records cannot be read (a client may compress rubbish) or would take too much memory never makes
a lookup fail: it counts as one record at its first offset, with the time of its header.

Bytes are read by the caller's `read_batch`, which is given an entry that is a `WalChunk` and the number of a
batch in it, and by its `files`, which look into Parquet files as a whole. What they raise goes through. All
other kinds of entries hold no records, nor do void batches.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import NamedTuple, Protocol

from dray.errors import InvalidBatch
from dray.index.entry import ParquetFile, Placed, WalChunk
from dray.index.lookup import OffsetIndex
from dray.protocol.records import Batch
from dray.protocol.timestamps import first_at_or_after, latest

# Entries of one page are in memory together, and one of 8 MiB may have 500 batches of 416 bytes in the cache.
PAGE_ENTRIES = 256
# Batches have 1 MiB as a rule. One at a time is decompressed, so that this is all that lookups hold.
MAX_DECODED_BYTES = 64 * 2**20
# Walking less is not worth a thread. What is compressed may be any size inside.
INLINE_BYTES = 64 * 2**10
# One is enough where headers are right. By wrong ones a client makes us read so many, and no more.
MAX_CANDIDATES = 16
# Of batches that could not be read. Beyond them the log is full enough.
MAX_REPORTED = 1_024

log = logging.getLogger(__name__)

ReadBatch = Callable[[Placed, int], Awaitable[Batch]]


class Files(Protocol):
    """Looks into Parquet entries; offsets and times of records in them."""

    async def first_at_or_after(
        self, placed: Placed, timestamp_ms: int, start_offset: int, end_offset: int
    ) -> tuple[int, int] | None: ...

    async def latest(self, placed: Placed, start_offset: int, end_offset: int) -> tuple[int, int] | None: ...


class Found(NamedTuple):
    offset: int
    timestamp_ms: int


class _Candidate(NamedTuple):
    """A batch or a Parquet file, by what the index has of it.

    Sorts by newness: of equals, the first in the log is newest.
    """

    max_timestamp_ms: int
    minus_offset: int  # of its first record that is not deleted
    placed: Placed
    number: int
    deleted: int  # records before that one

    @property
    def offset(self) -> int:
        return -self.minus_offset


class TimeIndex:
    def __init__(self, index: OffsetIndex, read_batch: ReadBatch, files: Files) -> None:
        self._index = index
        self._read_batch = read_batch
        self._files = files
        self._one_at_a_time = asyncio.Lock()
        self._reported: set[tuple[int, int]] = set()

    async def find_by_time(
        self, stream_id: int, timestamp_ms: int, *, end_offset: int | None = None
    ) -> Found | None:
        """The first record in offset order that is not older than `timestamp_ms`.

        Only offsets below `end_offset` count, which is to be the high watermark.
        """

        def look(batch: Batch, first: int) -> tuple[int, int] | None:
            return first_at_or_after(batch, timestamp_ms, MAX_DECODED_BYTES, first)

        log_start = at = await self._index.log_start(stream_id)
        while page := await self._page(stream_id, at, end_offset):
            for placed in page:
                if placed.entry.max_timestamp_ms < timestamp_ms:
                    continue
                for candidate in _candidates(placed, log_start, end_offset):
                    if candidate.max_timestamp_ms < timestamp_ms:
                        continue
                    if isinstance(placed.entry.where, ParquetFile):
                        bounds = _bounds(candidate, end_offset)
                        row = await self._files.first_at_or_after(placed, timestamp_ms, *bounds)
                        found = None if row is None else Found(*row)
                    else:
                        found = await self._look_into(candidate, look)
                    if found is not None:
                        return found
            at = page[-1].end_offset
        return None

    async def find_latest_time(self, stream_id: int, *, end_offset: int | None = None) -> Found | None:
        """The newest record; the first of them, if several are equally new. `end_offset` as above.

        Headers choose which `MAX_CANDIDATES` batches are looked into. Where that many say more than they
        hold, it is the newest record of those.
        """
        best_known: list[_Candidate] = []  # a heap: the least of them first
        log_start = at = await self._index.log_start(stream_id)
        while page := await self._page(stream_id, at, end_offset):
            for placed in page:
                is_full = len(best_known) == MAX_CANDIDATES
                if is_full and placed.entry.max_timestamp_ms <= best_known[0].max_timestamp_ms:
                    continue
                for candidate in _candidates(placed, log_start, end_offset):
                    heapq.heappush(best_known, candidate)
                    if len(best_known) > MAX_CANDIDATES:
                        heapq.heappop(best_known)
            at = page[-1].end_offset

        best: Found | None = None
        for candidate in sorted(best_known, reverse=True):
            if best is not None and _newness(best) > candidate[:2]:
                break
            if isinstance(candidate.placed.entry.where, ParquetFile):
                row = await self._files.latest(candidate.placed, *_bounds(candidate, end_offset))
                found = None if row is None else Found(*row)
            else:
                found = await self._look_into(
                    candidate, lambda batch, first: latest(batch, MAX_DECODED_BYTES, first)
                )
            if found is not None and (best is None or _newness(found) > _newness(best)):
                best = found
        return best

    async def _page(self, stream_id: int, at: int, end_offset: int | None) -> list[Placed]:
        """The entries from `at` on; none at the end."""
        if end_offset is not None and at >= end_offset:
            return []
        await asyncio.sleep(0)  # pages that are all in memory would keep everyone else waiting
        return await self._index.range(stream_id, at, PAGE_ENTRIES)

    async def _look_into(
        self, candidate: _Candidate, look: Callable[[Batch, int], tuple[int, int] | None]
    ) -> Found | None:
        batch = await self._read_batch(candidate.placed, candidate.number)
        try:
            if batch.codec == "none" and len(batch.data) <= INLINE_BYTES:
                found = look(batch, candidate.deleted)
            else:
                async with self._one_at_a_time:
                    found = await asyncio.to_thread(look, batch, candidate.deleted)
        except InvalidBatch as error:
            self._report(candidate, error)
            return Found(candidate.offset, candidate.max_timestamp_ms)
        if found is None:
            return None
        delta, timestamp_ms = found
        return Found(candidate.offset - candidate.deleted + delta, timestamp_ms)

    def _report(self, candidate: _Candidate, error: InvalidBatch) -> None:
        """Once per batch, since clients may ask for it again and again."""
        place = candidate.placed.entry.stream_id, candidate.offset
        if place in self._reported or len(self._reported) >= MAX_REPORTED:
            return
        self._reported.add(place)
        log.warning("stream %016x: the batch at offset %d cannot be read: %s", *place, error.problem)


def _candidates(placed: Placed, log_start: int, end_offset: int | None) -> Iterator[_Candidate]:
    """The batches of an entry, in offset order. The log may start inside of one."""
    where = placed.entry.where
    if isinstance(where, ParquetFile):
        deleted = max(log_start - placed.start_offset, 0)
        if deleted < placed.entry.records:
            offset = placed.start_offset + deleted
            yield _Candidate(placed.entry.max_timestamp_ms, -offset, placed, 0, deleted)
        return
    if not isinstance(where, WalChunk):
        return
    for number, batch in enumerate(where.batches):
        offset = placed.start_offset + where.batch_start(number)
        if end_offset is not None and offset >= end_offset:
            return
        deleted = max(log_start - offset, 0)
        if deleted < batch.records and where.is_served(number):
            yield _Candidate(batch.max_timestamp_ms, -(offset + deleted), placed, number, deleted)


def _bounds(candidate: _Candidate, end_offset: int | None) -> tuple[int, int]:
    end = candidate.placed.end_offset
    return candidate.offset, end if end_offset is None else min(end, end_offset)


def _newness(found: Found) -> tuple[int, int]:
    return found.timestamp_ms, -found.offset
