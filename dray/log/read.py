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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dray.errors import (
    CompactedRange,
    DamagedWal,
    DrayError,
    ObjectNotFound,
    OffsetOutOfRange,
)
from dray.index.entry import ParquetFile, Placed, WalChunk
from dray.index.lookup import OffsetIndex
from dray.log.plan import Available, Span, share
from dray.log.wakeups import Waiter, Wakeups
from dray.protocol.codec import Buffer, Pieces
from dray.protocol.records import Batch, empty_batch, patched, read_batch
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


@dataclass(slots=True)
class _Located:
    entries: Sequence[Placed] = ()
    end: int = -1
    log_start: int = -1
    error: DrayError | None = None


class LogReader:
    def __init__(
        self,
        index: OffsetIndex,
        objects: WalReader,
        wakeups: Wakeups,
        *,
        buffer_bytes: int,
    ) -> None:
        self._index = index
        self._objects = objects
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
        """Read, waiting up to `max_wait_s` for `min_bytes` in all. `gone`: nobody wants it any more."""
        located = await self._locate_all(wants)
        chosen = _choose(wants, located, max_bytes)
        if max_wait_s > 0 and _is_too_little(located, chosen, min_bytes):
            chosen = await self._wait(wants, located, min(min_bytes, max_bytes), max_bytes, max_wait_s, gone)
        size = sum(span.size_bytes for spans in chosen for span in spans)
        await self._budget.take(size)
        try:
            partitions = await self._read_all(wants, located, chosen)
        except BaseException:
            self._budget.give_back(size)
            raise
        self._read_ahead(located, chosen)
        return Fetched(partitions, lambda: self._budget.give_back(size))

    async def read_batch(self, placed: Placed, number: int) -> Batch:
        """One batch of a chunk, checked, for those who look inside."""
        pieces = await self._objects.read(*_place_of(Span(placed, number, number + 1, 0)))
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
    ) -> list[list[Span]]:
        """Look again whenever something has changed, until it is enough or time is up."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + max_wait_s
        waiter = Waiter()
        streams = {want.stream_id for want in wants}
        self._wakeups.register(waiter, streams)
        if gone is not None:
            gone.add_done_callback(waiter.give_up)
        try:
            changed = streams  # something may have come before the registration
            while True:
                for number, want in enumerate(wants):
                    if want.stream_id in changed:
                        located[number] = await self._locate(want)
                chosen = _choose(wants, located, max_bytes)
                left_s = deadline - loop.time()
                if waiter.is_over or left_s <= 0 or not _is_too_little(located, chosen, min_bytes):
                    return chosen
                changed = await waiter.wait(left_s)
        finally:
            self._wakeups.unregister(waiter, streams)
            if gone is not None:
                gone.remove_done_callback(waiter.give_up)

    async def _locate_all(self, wants: Sequence[Want]) -> list[_Located]:
        located = [_Located()] * len(wants)
        cold = []
        for number, want in enumerate(wants):
            if self._index.has_at_hand(want.stream_id):
                located[number] = await self._locate(want)
            else:
                cold.append(number)
        if cold:
            turns = asyncio.Semaphore(MAX_LOOKUPS)

            async def locate(number: int) -> None:
                async with turns:
                    located[number] = await self._locate(wants[number])

            await asyncio.gather(*(locate(number) for number in cold))
        return located

    async def _locate(self, want: Want, *, fresh: bool = False) -> _Located:
        try:
            end = (await self._index.end(want.stream_id)).end_records
            log_start = await self._index.log_start(want.stream_id)
            if not log_start <= want.offset <= end:
                end = (await self._index.end(want.stream_id, fresh=True)).end_records
                log_start = await self._index.log_start(want.stream_id, fresh=True)
                if not log_start <= want.offset <= end:
                    raise OffsetOutOfRange(want.offset, log_start, end)
            entries = await self._entries(want, end, fresh) if want.offset < end else ()
        except DrayError as error:
            return _Located(error=error)
        return _Located(entries, end, log_start)

    async def _entries(self, want: Want, end: int, fresh: bool) -> list[Placed]:
        """Entries from the one that holds the offset on: enough for what is wanted, or all there are."""
        entries: list[Placed] = []
        size = 0
        at = want.offset
        while at < end and size < want.max_bytes and len(entries) < MAX_ENTRIES:
            page = await self._index.range(want.stream_id, at, PAGE_ENTRIES, fresh=fresh)
            if not page:
                break
            for placed in page:
                where = placed.entry.where
                size += where.chunk_length if isinstance(where, WalChunk) else 0
            if not entries and isinstance(first := page[0].entry.where, WalChunk):
                number = first.batch_at(at - page[0].start_offset)
                size -= first.batch_offset(number) - first.chunk_offset  # in front of the offset
            entries += page
            at = page[-1].end_offset
        return entries

    # --- reading

    async def _read_all(
        self, wants: Sequence[Want], located: list[_Located], chosen: list[list[Span]]
    ) -> list[Got]:
        missing = {
            number: asyncio.ensure_future(self._read_or_look_again(wants[number], located, chosen, number))
            for number, spans in enumerate(chosen)
            if spans and not self._is_in_memory(spans)
        }
        if missing:
            await asyncio.wait(missing.values())
        partitions = []
        for number, one in enumerate(located):
            got = Got(one.end, one.log_start, Pieces(()), one.error)
            if number in missing:
                error = missing[number].exception()
                if error is not None and not isinstance(error, DrayError):
                    raise error
                got = Got(error=error) if error else Got(one.end, one.log_start, missing[number].result())
            elif one.error is not None:
                got = Got(error=one.error)
            elif chosen[number]:
                try:
                    got.records = _records(chosen[number], [self._in_memory(s) for s in chosen[number]])
                except DamagedWal as error:
                    got = Got(error=error)
            partitions.append(got)
        return partitions

    def _is_in_memory(self, spans: Sequence[Span]) -> bool:
        for span in spans:
            where = span.placed.entry.where
            if isinstance(where, ParquetFile):
                return False
            if isinstance(where, WalChunk) and self._objects.try_read(*_place_of(span)) is None:
                return False
        return True

    def _in_memory(self, span: Span) -> list[memoryview]:
        if not isinstance(span.placed.entry.where, WalChunk):
            return []
        pieces = self._objects.try_read(*_place_of(span))
        assert pieces is not None, "nothing was awaited since it was there"
        return pieces

    async def _read_or_look_again(
        self, want: Want, located: list[_Located], chosen: list[list[Span]], number: int
    ) -> Pieces:
        """An object that is gone means that the entry was replaced: look it up again, once."""
        try:
            return await self._read(chosen[number])
        except ObjectNotFound:
            found = await self._locate(want, fresh=True)
            if found.error is not None:
                raise found.error from None
            size = sum(span.size_bytes for span in chosen[number])
            located[number] = found
            (chosen[number],) = share([Available(found.entries, want.offset, size)], size)
            return await self._read(chosen[number])

    async def _read(self, spans: Sequence[Span]) -> Pieces:
        async def pieces(span: Span) -> list[memoryview]:
            where = span.placed.entry.where
            if isinstance(where, ParquetFile):
                raise CompactedRange(where.path)
            return await self._objects.read(*_place_of(span)) if isinstance(where, WalChunk) else []

        return _records(spans, await asyncio.gather(*map(pieces, spans)))

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
            for placed in one.entries:
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


def _is_too_little(located: Sequence[_Located], chosen: Sequence[Sequence[Span]], min_bytes: int) -> bool:
    if any(one.error is not None for one in located):
        return False
    return sum(span.size_bytes for spans in chosen for span in spans) < min_bytes


def _place_of(span: Span) -> tuple[str, int, int]:
    """Path and range of the bytes of a span: batches behind their lengths, but for the first."""
    where = span.placed.entry.where
    assert isinstance(where, WalChunk), "only a chunk has bytes"
    end = where.batch_offset(span.last - 1) + where.batches[span.last - 1].size_bytes
    return where.path, where.batch_offset(span.first), end


def _records(spans: Sequence[Span], stored: Sequence[list[memoryview]]) -> Pieces:
    """The batches of the spans, each at its offset."""
    buffers: list[Buffer] = []
    for span, pieces in zip(spans, stored, strict=True):
        placed = span.placed
        where = placed.entry.where
        if not isinstance(where, WalChunk):
            buffers.append(empty_batch(placed.start_offset, placed.entry.records, LEADER_EPOCH))
            continue
        data = _joined(pieces)
        base = where.batch_offset(span.first)
        for number in range(span.first, span.last):
            at = where.batch_offset(number) - base
            batch = data[at : at + where.batches[number].size_bytes]
            if int.from_bytes(batch[8:12]) + 12 != len(batch) or batch[16] != 2:
                raise DamagedWal(f"{where.path} has no batch here", where.batch_offset(number))
            buffers += patched(batch, placed.start_offset + where.batch_start(number), LEADER_EPOCH)
    records = Pieces(buffers)
    if len(buffers) > 1 and records.size < len(buffers) * SMALL_BUFFER_BYTES:
        return Pieces([b"".join(buffers)])
    return records


def _joined(pieces: Sequence[memoryview]) -> memoryview:
    return pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))


@dataclass(slots=True)
class _Budget:
    """Bytes that may be held at once; first come, first served."""

    total: int
    taken: int = 0
    waiting: deque[tuple[int, asyncio.Future[None]]] = field(default_factory=deque)

    async def take(self, size: int) -> None:
        if not self.waiting and self._fits(size):
            self.taken += size
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(size)
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
