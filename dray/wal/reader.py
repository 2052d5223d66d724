"""Bytes of WAL objects for fetches, out of memory where possible.

`WalReader` owns a bounded cache of what was read and of the objects that this broker wrote itself, and the
reads that fill it. Which bytes are wanted, what they mean and what will be wanted next, its callers know: it
decodes nothing, and reads ahead only what `prefetch` names. It does not slow producers down, because object
stores read and write with threads of their own.

**Units.** The cache lets go of whole units, the one used longest ago first. A unit is an own object, or the
aligned blocks that one GET brought: up to 8 MiB that were asked for together. Blocks are slices of it, not
copies, since copying doubles the memory while it lasts and costs the event loop a millisecond per GET; but a
slice keeps all of its unit alive, so the unit is what is weighed and what goes.

**Bound.** `size_bytes` never exceeds `cache_bytes`. It counts units, what is around them, and from before a
GET begins all that it may bring. Where nothing can give way, because all is being read, the next GET waits.
What a caller was given stays valid after its unit went, and is the caller's to account for.

**Single flight.** A block is read by one GET, however many wait for it. Who is cancelled stops waiting, and
the GET goes on for the others and the cache; one that has not begun does not begin once nobody waits for it.
An error goes to all who wait. It is not remembered: the next reader asks the store again.

WAL objects never change, so nothing becomes stale; `forget` is for those found to be gone or damaged. All of
this belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Iterator
from functools import partial

from dray.errors import DamagedWal, ObjectStoreUnavailable, ObjectTooShort
from dray.objectstore.store import MERGED_BYTES, Body, ObjectStore, check_range

# What is around a unit's bytes, its places in the dictionaries included: measured with tracemalloc on
# CPython 3.11, rounded up. A broker with little to do writes objects that are hardly larger.
UNIT_BYTES = 1_024


class WalReader:
    def __init__(
        self, objects: ObjectStore, *, cache_bytes: int, block_bytes: int = 2**20, max_reads: int = 8
    ) -> None:
        """At most `max_reads` GETs are under way, and at most half as many are read-ahead."""
        if cache_bytes < block_bytes + UNIT_BYTES:
            raise ValueError(f"a cache of {cache_bytes} bytes cannot hold a block of {block_bytes}")
        self._objects = objects
        self._cache_bytes = cache_bytes
        self._block_bytes = block_bytes
        self._max_reads = max_reads
        # All GETs together take half of a cache of some size, and leave the rest to own objects and reuse.
        self._read_blocks = max(1, min(MERGED_BYTES, cache_bytes // (2 * max_reads)) // block_bytes)
        self._bytes = 0
        self._reading_bytes = 0  # the part of `_bytes` that cannot give way
        self._own: dict[str, _Unit] = {}
        self._blocks: dict[tuple[str, int], _Unit] = {}  # held, being read, or in the queue
        self._held: OrderedDict[_Unit, None] = OrderedDict()  # the one used last is last
        self._queue: deque[_Unit] = deque()  # to be read, when there is a GET and room for it
        self._reading: dict[_Unit, asyncio.Task[bytes]] = {}
        self._ahead: set[_Unit] = set()  # being read or held, but no reader has asked for it yet
        self._closed = False

    @property
    def size_bytes(self) -> int:
        return self._bytes

    def add(self, path: str, body: Body) -> None:
        """Keep an object that this broker wrote, if there is room. `body` must not change any more."""
        if self._closed or path in self._own:
            return
        view = memoryview(body).cast("B").toreadonly()
        unit = _Unit(path, 0, len(view))
        if self._make_room(unit.weight):
            self._own[path] = unit
            self._hold(unit, view)

    def try_read(self, path: str, start: int, end: int) -> list[memoryview] | None:
        """What `read` returns, without suspending: None if not all of it is in memory."""
        own = self._own.get(path)
        if own is not None and 0 <= start < end <= own.end:
            self._held.move_to_end(own)
            return [own.body[start:end]]
        check_range(start, end)
        units: list[_Unit] = []
        at = start
        while at < end:
            unit = self._blocks.get((path, at // self._block_bytes))
            if unit is None or unit not in self._held or unit.end <= at:
                return None
            units.append(unit)
            at = unit.end
        for unit in units:
            self._use(unit)
        return _cut(path, units, start, end)

    async def read(self, path: str, start: int, end: int) -> list[memoryview]:
        """Pieces that together are exactly these bytes, at least one.

        Raises `DamagedWal` if the object ends before `end`, and what the object store raises:
        `ObjectNotFound` means that whoever gave the path may have a stale one.
        """
        pieces = self.try_read(path, start, end)
        if pieces is not None:
            return pieces
        if self._closed:
            raise _closed()
        units = list(self._units(path, start, end, ahead=False))
        missing = [unit for unit in units if unit not in self._held]
        for unit in units:
            self._use(unit)
        for unit in missing:
            unit.waiters += 1
        self._start_reads()
        try:
            # Cancels none of them when it is cancelled itself.
            await asyncio.wait([unit.ended for unit in missing], return_when=asyncio.FIRST_EXCEPTION)
            for unit in missing:
                if unit.ended.done():
                    unit.ended.result()
            return _cut(path, units, start, end)
        except ObjectTooShort as error:
            raise DamagedWal(str(error), error.start) from error
        finally:
            for unit in missing:
                unit.waiters -= 1

    def prefetch(self, path: str, start: int, end: int) -> None:
        """Begin to read what will be asked for soon, as far as there are GETs and room; drop the rest.

        What was read ahead and nobody has asked for yet takes at most a quarter of the cache. Where those
        who were to ask are gone, it goes as other units do.
        """
        check_range(start, end)
        own = self._own.get(path)
        if self._closed or self._queue or (own is not None and end <= own.end):
            return
        for unit in self._units(path, start, end, ahead=True):
            if unit in self._held or unit in self._reading:
                continue
            if not self._may_read_ahead(unit):
                self._unlist(unit)
                return
            self._ahead.add(unit)
            self._start(unit)

    def forget(self, path: str) -> None:
        """Ask the store again from now on. Who waits already gets what was asked for before."""
        for unit in [unit for unit in self._held if unit.path == path]:
            self._drop(unit)
        for unit in self._reading:
            if unit.path == path:
                self._unlist(unit)

    async def close(self) -> None:
        """Let go of everything; who waits gets `ObjectStoreUnavailable`. The object store stays open."""
        self._closed = True
        while self._queue:
            self._fail(self._queue.popleft(), _closed())
        tasks = list(self._reading.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        while self._held:
            self._drop(next(iter(self._held)))

    def _units(self, path: str, start: int, end: int, *, ahead: bool) -> Iterator[_Unit]:
        """Those that have these bytes, in order; where there are none, new ones, put in the queue or `ahead`.

        A held unit that ends inside a block says that the object ends there. A reader who knows better has
        it read again; who reads ahead goes no further.
        """
        at = start
        while at < end:
            number = at // self._block_bytes
            unit = self._blocks.get((path, number))
            if unit is not None and unit.end < end and unit.end % self._block_bytes:
                if ahead:
                    return
                self._drop(unit)
                unit = None
            if unit is None:
                unit = self._list(path, number, end)
                if not ahead:
                    self._queue.append(unit)
            yield unit
            at = unit.end

    def _list(self, path: str, first: int, end: int) -> _Unit:
        """A unit of adjacent blocks that no other has, as many as one GET may bring."""
        last = first + 1
        limit = min(first + self._read_blocks, -(-end // self._block_bytes))
        while last < limit and (path, last) not in self._blocks:
            last += 1
        unit = _Unit(path, first * self._block_bytes, last * self._block_bytes)
        unit.ended = asyncio.get_running_loop().create_future()
        for key in unit.keys(self._block_bytes):
            self._blocks[key] = unit
        return unit

    def _unlist(self, unit: _Unit) -> None:
        self._ahead.discard(unit)
        for key in unit.keys(self._block_bytes):
            if self._blocks.get(key) is unit:
                del self._blocks[key]

    def _use(self, unit: _Unit) -> None:
        if unit in self._held:
            self._held.move_to_end(unit)
        if self._ahead:
            self._ahead.discard(unit)

    def _may_read_ahead(self, unit: _Unit) -> bool:
        return (
            len(self._reading) < self._max_reads
            and len(self._ahead & self._reading.keys()) < self._max_reads // 2
            and sum(each.weight for each in self._ahead) + unit.weight <= self._cache_bytes // 4
            and self._make_room(unit.weight)
        )

    def _start_reads(self) -> None:
        while self._queue and len(self._reading) < self._max_reads:
            unit = self._queue[0]
            if not unit.waiters:
                self._unlist(unit)
            elif self._make_room(unit.weight):
                self._start(unit)
            else:
                return
            self._queue.popleft()

    def _start(self, unit: _Unit) -> None:
        self._bytes += unit.weight
        self._reading_bytes += unit.weight
        read = self._objects.get_range(unit.path, unit.start, unit.end, clip=True)
        # As a callback: a task that is cancelled before its first step runs no code of its own.
        self._reading[unit] = asyncio.create_task(read)
        self._reading[unit].add_done_callback(partial(self._finish, unit))

    def _finish(self, unit: _Unit, read: asyncio.Task[bytes]) -> None:
        del self._reading[unit]
        self._bytes -= unit.weight
        self._reading_bytes -= unit.weight
        if read.cancelled():
            self._fail(unit, _closed())
        elif error := read.exception():
            self._fail(unit, error)
        else:
            self._succeed(unit, read.result())
        self._start_reads()

    def _fail(self, unit: _Unit, error: BaseException) -> None:
        self._unlist(unit)
        unit.ended.set_exception(error)
        unit.ended.exception()  # it may be that nobody waits for it

    def _succeed(self, unit: _Unit, body: bytes) -> None:
        wanted = self._blocks.get((unit.path, unit.start // self._block_bytes)) is unit
        ahead = unit in self._ahead
        self._unlist(unit)
        unit.end = unit.start + len(body)
        unit.body = memoryview(body)
        if wanted:  # not forgotten meanwhile
            for key in unit.keys(self._block_bytes):
                self._blocks[key] = unit
            if ahead:
                self._ahead.add(unit)
            self._hold(unit, unit.body)
        unit.ended.set_result(None)

    def _hold(self, unit: _Unit, body: memoryview) -> None:
        unit.body = body
        self._held[unit] = None
        self._bytes += unit.weight

    def _drop(self, unit: _Unit) -> None:
        del self._held[unit]
        self._bytes -= unit.weight
        if self._own.get(unit.path) is unit:
            del self._own[unit.path]
        else:
            self._unlist(unit)

    def _make_room(self, weight: int) -> bool:
        """Whether there is room for so much, after others gave way to it."""
        if self._reading_bytes + weight > self._cache_bytes:
            return False
        while self._bytes + weight > self._cache_bytes:
            self._drop(next(iter(self._held)))
        return True


class _Unit:
    """Bytes of an object that are read, kept and dropped together."""

    __slots__ = ("body", "end", "ended", "path", "start", "waiters")

    def __init__(self, path: str, start: int, end: int) -> None:
        self.path = path
        self.start = start
        self.end = end  # of what is to be read; then of what was, which is less where the object ends
        self.body: memoryview  # once it was read; waiters may need it after it was dropped
        self.ended: asyncio.Future[None]  # if it is to be read
        self.waiters = 0

    @property
    def weight(self) -> int:
        return self.end - self.start + UNIT_BYTES

    def keys(self, block_bytes: int) -> Iterator[tuple[str, int]]:
        for number in range(self.start // block_bytes, -(-self.end // block_bytes)):
            yield self.path, number


def _cut(path: str, units: list[_Unit], start: int, end: int) -> list[memoryview]:
    pieces = []
    at = start
    for unit in units:
        if not unit.start <= at < unit.end:
            break
        stop = min(end, unit.end)
        pieces.append(unit.body[at - unit.start : stop - unit.start])
        at = stop
    if at < end:
        raise DamagedWal(f"{path} ends here, but bytes {start} to {end} were asked for", at)
    return pieces


def _closed() -> ObjectStoreUnavailable:
    return ObjectStoreUnavailable("the WAL reader was closed")
