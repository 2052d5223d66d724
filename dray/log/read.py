"""Reads partitions: finds batches by the index, their bytes in memory or in the object store, and waits.

`LogReader.fetch` is one Fetch request over many partitions. It looks, and if that is too little it waits for
the watch to tell of more, without ever polling the store. What a reader hears is true as of some moment after
it asked: an offset is called out of range only behind a write (protocol 10), and what was told never goes
back (protocol 18; `OffsetIndex` sees to that).

The bytes of all answers that are being read or sent are bounded by `buffer_bytes`: above that, fetches wait
for their turn. A single larger answer is let through alone.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dray.errors import (
    DamagedWal,
    DrayError,
    ObjectNotFound,
    OffsetOutOfRange,
)
from dray.index.decided import DecidedIndex
from dray.index.entry import BATCH_PREFIX_BYTES, ParquetFile, Placed, Truncated, WalChunk
from dray.log.compacted import CompactedReader
from dray.log.plan import Available, Span, batch_bytes, share, size_of
from dray.log.wakeups import Waiter, Wakeups
from dray.protocol.codec import Buffer, Pieces
from dray.protocol.records import HEADER_BYTES, Batch, empty_batch, patched, read_batch
from dray.wal.reader import WalReader

# There are no leaders, so there is one epoch for ever.
LEADER_EPOCH = 0
# Entries asked for at once, and at most for one partition of one fetch. The second bounds the work where
# batches are tiny; the reader comes back for the rest.
PAGE_ENTRIES = 64
MAX_ENTRIES = 1_024
# Streams that the index does not have at hand, looked up at once.
MAX_LOOKUPS = 16
# How much of what follows is read ahead for a reader that is behind.
READ_AHEAD_BYTES = 4 * 2**20
# Below this size on average, copying buffers into one is cheaper than handing each to the kernel.
SMALL_BUFFER_BYTES = 8 * 2**10
NOTHING = Pieces(())


@dataclass(frozen=True, slots=True)
class Want:
    stream_id: int
    offset: int
    max_bytes: int


@dataclass(slots=True)
class Got:
    """What one partition gives. After an error the rest is unset."""

    high_watermark: int = -1
    log_start: int = -1
    records: Pieces | None = None
    error: DrayError | None = None


@dataclass(slots=True)
class Fetched:
    """In the order of the wants. `release` is to be called once the bytes have left."""

    partitions: list[Got]
    release: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Located:
    """What is there from the wanted offset on: all of it, or more than may be sent."""

    entries: Sequence[Placed] = ()
    size_bytes: int = 0  # of batches from the wanted one on, no more than may be sent
    end: int = -1
    log_start: int = -1
    error: DrayError | None = None


NOWHERE = _Located()


class _Read(NamedTuple):
    """What was read, and where it was found in the end."""

    located: _Located
    spans: list[Span]
    records: Pieces


class LogReader:
    def __init__(
        self,
        index: DecidedIndex,
        objects: WalReader,
        compacted: CompactedReader,
        wakeups: Wakeups,
        *,
        buffer_bytes: int,
    ) -> None:
        self._index = index
        self._objects = objects
        self._compacted = compacted
        self._wakeups = wakeups
        self._budget = _Budget(buffer_bytes)

    async def fetch(
        self,
        wants: Sequence[Want],
        *,
        min_bytes: int,
        max_bytes: int,
        max_wait_s: float,
        gone: asyncio.Future[None] | None = None,
    ) -> Fetched:
        """Read, waiting up to `max_wait_s` for `min_bytes` in all. `gone`: nobody waits for more.

        As in Kafka, what counts for `min_bytes` is what is there within each limit, not the whole batches
        that fit: those may never come to as much.
        """
        located = [NOWHERE] * len(wants)
        if max_wait_s > 0 and wants:
            await self._wait(wants, located, min(min_bytes, max_bytes), max_bytes, max_wait_s, gone)
        else:
            await self._locate_all(wants, located, range(len(wants)), max_bytes)
        chosen = _choose(wants, located, max_bytes)
        size = sum(map(size_of, chosen))
        await self._budget.take(size)
        try:
            partitions = await self._read_all(wants, located, chosen, max_bytes)
            self._read_ahead(located, chosen)
        except BaseException:
            self._budget.give_back(size)
            raise
        return Fetched(partitions, lambda: self._budget.give_back(size))

    @property
    def compacted(self) -> CompactedReader:
        return self._compacted

    async def read_batch(self, placed: Placed, number: int) -> Batch:
        """One batch of a chunk, checked, for those who look inside."""
        chunk = placed.entry.where
        assert isinstance(chunk, WalChunk), "only a chunk has batches"
        pieces = await self._objects.read(*_place_of(chunk, number, number + 1))
        return read_batch(_joined(pieces))

    # --- looking

    async def _wait(
        self,
        wants: Sequence[Want],
        located: list[_Located],
        min_bytes: int,
        max_bytes: int,
        max_wait_s: float,
        gone: asyncio.Future[None] | None,
    ) -> None:
        """Look, and again whenever something has changed, until it is enough or time is up."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + max_wait_s
        waiter = Waiter()
        streams = {want.stream_id for want in wants}
        self._wakeups.register(waiter, streams)  # first, so that nothing comes unnoticed
        if gone is not None:
            gone.add_done_callback(waiter.give_up)
        try:
            changed = streams
            while True:
                numbers = [number for number, want in enumerate(wants) if want.stream_id in changed]
                await self._locate_all(wants, located, numbers, max_bytes)
                left_s = deadline - loop.time()
                if waiter.is_over or left_s <= 0 or _is_enough(located, min_bytes):
                    return
                changed = await waiter.wait(left_s)
        finally:
            self._wakeups.unregister(waiter, streams)
            if gone is not None:
                gone.remove_done_callback(waiter.give_up)

    async def _locate_all(
        self, wants: Sequence[Want], located: list[_Located], numbers: Iterable[int], max_bytes: int
    ) -> None:
        """Bring these of `located` up to date."""
        cold = []
        for number in numbers:
            want = wants[number]
            if self._index.knows(want.stream_id, want.offset):
                located[number] = await self._locate(want, max_bytes, located[number])
            else:
                cold.append(number)
        if cold:
            turns = asyncio.Semaphore(MAX_LOOKUPS)

            async def locate(number: int) -> None:
                async with turns:
                    located[number] = await self._locate(wants[number], max_bytes, located[number])

            await asyncio.gather(*map(locate, cold))

    async def _locate(
        self, want: Want, max_bytes: int, before: _Located = NOWHERE, *, fresh: bool = False
    ) -> _Located:
        try:
            end, log_start = await self._bounds(want, fresh)
            if (end, log_start) == (before.end, before.log_start):
                return before
            return await self._entries(want, min(want.max_bytes, max_bytes), end, log_start, before, fresh)
        except DrayError as error:
            return _Located(error=error)

    async def _bounds(self, want: Want, fresh: bool) -> tuple[int, int]:
        end = (await self._index.end(want.stream_id, fresh=fresh)).end_records
        log_start = await self._index.log_start(want.stream_id, fresh=fresh)
        if log_start <= want.offset <= end:
            return end, log_start
        if not fresh:
            return await self._bounds(want, fresh=True)
        if log_start <= want.offset <= (await self._index.tail(want.stream_id)).end_records:
            return end, log_start  # not decided yet; others may have told of it
        raise OffsetOutOfRange(want.offset, log_start, end)

    async def _entries(
        self, want: Want, limit: int, end: int, log_start: int, before: _Located, fresh: bool
    ) -> _Located:
        """Entries from the one that holds the offset on: enough for what is wanted, or all there are."""
        entries = list(before.entries)  # what was appended since comes behind them
        size = before.size_bytes
        at = entries[-1].end_offset if entries else want.offset
        while at < end and len(entries) < MAX_ENTRIES and (size < limit or not entries):
            page = await self._index.range(want.stream_id, at, PAGE_ENTRIES, fresh=fresh)
            if not page or (entries and page[0].start_offset != at):
                break  # taken apart meanwhile: the reader comes back for it
            if isinstance(page[0].entry.where, Truncated):
                # Since the bounds were read; that it was is certain, however stale the read.
                raise OffsetOutOfRange(want.offset, page[0].end_offset, end)
            size += sum(map(_bytes_of, page))
            if not entries and isinstance(where := page[0].entry.where, WalChunk):
                number = where.batch_at(at - page[0].start_offset)
                size -= sum(batch_bytes(where, before) for before in range(number))
                limit = max(limit, batch_bytes(where, number))
            entries += page
            at = page[-1].end_offset
        # Where there is more than is looked at, it is as much as it will ever be, however long one waits.
        size = limit if at < end else min(size, limit)
        return _Located(entries, size, max(end, at) if entries else end, log_start)

    # --- reading

    async def _read_all(
        self, wants: Sequence[Want], located: list[_Located], chosen: list[list[Span]], max_bytes: int
    ) -> list[Got]:
        """`located` and `chosen` then say what was really read."""
        partitions: list[Got] = []
        missing: list[int] = []
        for number, (one, spans) in enumerate(zip(located, chosen, strict=True)):
            got = Got(one.end, one.log_start, NOTHING) if one.error is None else Got(error=one.error)
            partitions.append(got)
            stored = self._in_memory(spans)
            if stored is None:
                missing.append(number)
            elif stored:
                try:
                    got.records = self._records(spans, stored)
                except DamagedWal as error:
                    partitions[number] = Got(error=error)
        if missing:
            # One by one: an error of one is its own. Cancelled, this cancels and awaits them all.
            reads = [self._read_or_look_again(wants[n], located[n], chosen[n], max_bytes) for n in missing]
            for number, read in zip(
                missing, await asyncio.gather(*reads, return_exceptions=True), strict=True
            ):
                if isinstance(read, _Read):
                    located[number], chosen[number], records = read
                    partitions[number] = Got(read.located.end, read.located.log_start, records)
                elif isinstance(read, DrayError):
                    chosen[number] = []
                    partitions[number] = Got(error=read)
                else:
                    raise read
        return partitions

    def _in_memory(self, spans: Sequence[Span]) -> list[list[memoryview]] | None:
        """What is stored of each, if all is at hand. It stays valid whatever happens to the cache."""
        stored = []
        for span in spans:
            pieces: list[memoryview] | None = []
            if span.chunk is not None:
                pieces = self._objects.try_read(*_place_of(span.chunk, span.first, span.last))
            if pieces is None or isinstance(span.placed.entry.where, ParquetFile):
                return None
            stored.append(pieces)
        return stored

    async def _read_or_look_again(
        self, want: Want, located: _Located, spans: list[Span], max_bytes: int
    ) -> _Read:
        """An object that is gone means that the entry was replaced: look it up again, once."""
        try:
            return _Read(located, spans, await self._read(spans, want.offset))
        except ObjectNotFound:
            size = size_of(spans)
            located = await self._locate(want, max_bytes, fresh=True)
            if located.error is not None:
                raise located.error from None
            (spans,) = share([Available(located.entries, want.offset, size)], size)
            return _Read(located, spans, await self._read(spans, want.offset))

    async def _read(self, spans: Sequence[Span], offset: int) -> Pieces:
        """Up to the first that cannot be read, unless that is the first of all."""
        stored: list[Sequence[Buffer]] = []
        reads = [self._read_span(span, offset) for span in spans]
        for pieces in await asyncio.gather(*reads, return_exceptions=True):
            if isinstance(pieces, BaseException):
                if not stored or not isinstance(pieces, DrayError):
                    raise pieces
                break
            stored.append(pieces)
        return self._records(spans[: len(stored)], stored)

    async def _read_span(self, span: Span, offset: int) -> Sequence[Buffer]:
        if isinstance(span.placed.entry.where, ParquetFile):
            start = max(offset, span.placed.start_offset)
            return await self._compacted.read(span.placed, start, span.size_bytes)
        chunk = span.chunk
        return [] if chunk is None else await self._objects.read(*_place_of(chunk, span.first, span.last))

    def _records(self, spans: Sequence[Span], stored: Sequence[Sequence[Buffer]]) -> Pieces:
        try:
            return _records(spans, stored)
        except DamagedWal:
            where = spans[0].placed.entry.where
            if isinstance(where, WalChunk):
                self._objects.forget(where.path)  # what is stored may be better than what was read
            raise

    def _read_ahead(self, located: Sequence[_Located], chosen: Sequence[Sequence[Span]]) -> None:
        """What a reader that is behind will ask for next."""
        for one, spans in zip(located, chosen, strict=True):
            if not spans:
                continue
            last = spans[-1].placed
            left = READ_AHEAD_BYTES
            where = last.entry.where
            if isinstance(where, WalChunk) and spans[-1].last < len(where.batches):
                start = where.batch_offset(spans[-1].last)
                end = min(where.chunk_offset + where.chunk_length, start + left)
                self._objects.prefetch(where.path, start, end)
                left -= end - start
            for placed in one.entries[len(spans) :]:
                where = placed.entry.where
                if left <= 0:
                    break
                if placed.start_offset >= last.end_offset and isinstance(where, WalChunk):
                    end = where.chunk_offset + min(where.chunk_length, left)
                    self._objects.prefetch(where.path, where.chunk_offset, end)
                    left -= end - where.chunk_offset


def _choose(wants: Sequence[Want], located: Sequence[_Located], max_bytes: int) -> list[list[Span]]:
    available = [
        Available(one.entries, want.offset, want.max_bytes) for want, one in zip(wants, located, strict=True)
    ]
    return share(available, max_bytes)


def _is_enough(located: Sequence[_Located], min_bytes: int) -> bool:
    """An error is answered at once, together with what there is."""
    size = 0
    for one in located:
        if one.error is not None:
            return True
        size += one.size_bytes
    return size >= min_bytes


def _bytes_of(placed: Placed) -> int:
    where = placed.entry.where
    if isinstance(where, ParquetFile):  # more as batches; so much is enough for anybody to wait no longer
        return max(where.size_bytes, HEADER_BYTES)
    if not isinstance(where, WalChunk):
        return HEADER_BYTES
    if where.serves_all:
        return where.chunk_length - len(where.batches) * BATCH_PREFIX_BYTES
    return sum(batch_bytes(where, number) for number in range(len(where.batches)))


def _place_of(chunk: WalChunk, first: int, last: int) -> tuple[str, int, int]:
    """Path and range of the bytes of batches: each behind its length, but for the first."""
    end = chunk.batch_offset(last - 1) + chunk.batches[last - 1].size_bytes
    return chunk.path, chunk.batch_offset(first), end


def _records(spans: Sequence[Span], stored: Sequence[Sequence[Buffer]]) -> Pieces:
    """The batches of the spans, each at its offset, up to the first that is damaged."""
    buffers: list[Buffer] = []
    for span, pieces in zip(spans, stored, strict=True):
        chunk = span.chunk
        if isinstance(span.placed.entry.where, ParquetFile):
            buffers += pieces  # rebuilt, and each at its offset
        elif chunk is None:
            buffers.append(empty_batch(span.start_offset, span.records, LEADER_EPOCH))
        elif not _add_batches(buffers, span, chunk, _joined(pieces)):
            break
    records = Pieces(buffers)
    if len(buffers) > 1 and records.size < len(buffers) * SMALL_BUFFER_BYTES:
        return Pieces([b"".join(buffers)])
    return records


def _add_batches(buffers: list[Buffer], span: Span, where: WalChunk, data: memoryview) -> bool:
    """Whether all are sound. Raises `DamagedWal` if there is nothing to be sent in front of what is not."""
    base = where.batch_offset(span.first)
    for number in range(span.first, span.last):
        at = where.batch_offset(number) - base
        batch = data[at : at + where.batches[number].size_bytes]
        if len(batch) < HEADER_BYTES or int.from_bytes(batch[8:12]) + 12 != len(batch) or batch[16] != 2:
            if buffers:
                return False
            raise DamagedWal(f"{where.path} has no batch here", where.batch_offset(number))
        buffers += patched(batch, span.placed.start_offset + where.batch_start(number), LEADER_EPOCH)
    return True


def _joined(pieces: Sequence[Buffer]) -> memoryview:
    return memoryview(pieces[0]) if len(pieces) == 1 else memoryview(b"".join(pieces))


@dataclass(slots=True)
class _Budget:
    """Bytes that may be held at once; first come, first served."""

    total: int
    taken: int = 0
    waiting: deque[tuple[int, asyncio.Future[None]]] = field(default_factory=deque)

    async def take(self, size: int) -> None:
        if size == 0 or (not self.waiting and self._fits(size)):
            self.taken += size
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            # It may have been given just now. If not, the next one may fit where this one did not.
            self.give_back(0 if turn.cancelled() else size)
            raise

    def give_back(self, size: int) -> None:
        self.taken -= size
        while self.waiting and (self.waiting[0][1].done() or self._fits(self.waiting[0][0])):
            wanted, turn = self.waiting.popleft()
            if not turn.done():
                self.taken += wanted
                turn.set_result(None)

    def _fits(self, size: int) -> bool:
        return self.taken + size <= self.total or self.taken == 0
