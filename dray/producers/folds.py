"""The folds of the streams that this broker is asked about: loaded, kept up with the index, bounded.

A fold is loaded from the stream's snapshot, or from its beginning, and moves over adjacent entries that
count, from values only: those read from the index, and those this broker wrote and was acknowledged
(protocol 5, 12). It moves when it is asked to, so a stream that nobody asks about costs nothing.

- `fold` is what has been folded by now; `catch_up` reads on. Behind a barrier, it has seen everything that
  happened before the call: only then may a gap or an unknown producer be told (protocol 10).
- An entry that does not continue the fold says nothing about any batch: it is read again, then all is loaded
  anew from a newer snapshot, and at last `ReadAgain` is raised (protocol 17).
- Verdicts on entries that are not decided are kept until they are (`verdicts`), for whoever resolves them.
- A snapshot is put after many entries, so that nobody starts far back: by compare-and-put, its end only
  grows, and everything below it is decided (protocol 15, 16). It may fail; nothing rests on it.

Folds are caches: the one not asked for longest goes first when they hold too many producers.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakValueDictionary

from dray.errors import CorruptStore, DrayError, ReadAgain, VersionConflict
from dray.index.entry import Kind, Placed, WalChunk, is_decided
from dray.index.fold import EXPIRATION_MS, Fold, Verdict, decode, encode
from dray.metadata.store import Expect, MetadataStore, Position

log = logging.getLogger(__name__)

SNAPSHOTS = "producers"
PAGE_ENTRIES = 256
# Folding so many takes about a tenth of a second, and reading them a few round trips more.
SNAPSHOT_ENTRIES = 2_000
LOAD_ATTEMPTS = 3
# Decoding a smaller snapshot takes less than 5 ms; the largest, 0.3 s.
INLINE_BYTES = 2 * 2**10
# Of all streams together; with five batches each, about 1 KiB a producer.
MAX_PRODUCERS = 50_000
# An empty fold is not free either.
STREAM_WEIGHT = 1
# Entries of one stream that nobody has resolved: more than a broker leaves behind when it dies.
MAX_UNDECIDED = 1_024
# Ends of acknowledged writes that are remembered, by stream.
MAX_ACKNOWLEDGED = 65_536


class CountedIndex(Protocol):
    """What is read: entries that count, whether or not they are decided."""

    async def counted(
        self, stream_id: int, start: int, max_entries: int, *, fresh: bool = False
    ) -> list[Placed]: ...

    async def tail(self, stream_id: int, *, fresh: bool = False) -> Position: ...

    def followed_end(self, stream_id: int) -> int | None: ...


@dataclass(slots=True, eq=False)
class _Stream:
    fold: Fold
    snapshot_version: int | None
    snapshot_end: int  # of that version
    entries: int = 0  # folded since the snapshot
    weight: int = STREAM_WEIGHT
    may_be_snapshot: bool = True  # false once it is not known any more whether all is decided
    undecided: OrderedDict[int, tuple[Verdict, ...]] = field(default_factory=OrderedDict)  # by end offset


class StreamFolds:
    def __init__(
        self,
        store: MetadataStore,
        domain_of: Callable[[int], int],
        index: CountedIndex,
        *,
        incarnation: str,
        expiration_ms: int = EXPIRATION_MS,
        max_producers: int = MAX_PRODUCERS,
        snapshot_entries: int = SNAPSHOT_ENTRIES,
    ) -> None:
        self._store = store
        self._domain_of = domain_of
        self._index = index
        self.incarnation = incarnation
        self.expiration_ms = expiration_ms
        self._max_producers = max_producers
        self._snapshot_entries = snapshot_entries
        self._streams: OrderedDict[int, _Stream] = OrderedDict()  # the one asked for last is last
        self._weight = 0
        # Of streams that are being caught up with: each is there for as long as somebody holds it or waits.
        self._locks: WeakValueDictionary[int, asyncio.Lock] = WeakValueDictionary()
        self._snapshots: dict[int, asyncio.Task[None]] = {}
        self._acknowledged: OrderedDict[int, int] = OrderedDict()

    # --- asking

    def fold(self, stream_id: int) -> Fold | None:
        """As far as it is folded; None if it is not loaded."""
        stream = self._streams.get(stream_id)
        if stream is None:
            return None
        self._streams.move_to_end(stream_id)
        return stream.fold

    def current(self, stream_id: int) -> Fold | None:
        """The fold, if it is loaded and has all that the watch has told of."""
        fold = self.fold(stream_id)
        told = self._index.followed_end(stream_id)
        return None if fold is None or (told is not None and told > fold.end) else fold

    async def catch_up(self, stream_id: int, *, to: int = 0, fresh: bool = False) -> Fold:
        """Fold on, to the end of the stream as it can be seen now, and at least to `to`.

        `fresh` has seen everything that was written before the call. Raises `ReadAgain`, and what the store
        raises; none of that says anything about a batch. The fold may be forgotten here and go on where it
        is held: it stays true, but does not move any more.
        """
        return (await self._catch_up(stream_id, to, fresh)).fold

    async def _catch_up(self, stream_id: int, to: int, fresh: bool = False) -> _Stream:
        if fresh:
            to = max(to, (await self._index.tail(stream_id, fresh=True)).end_records)
        async with self._locks.setdefault(stream_id, asyncio.Lock()):
            problem: ReadAgain | None = None
            for attempt in range(LOAD_ATTEMPTS):
                stream = self._streams.get(stream_id)
                if stream is None:
                    stream = await self._load(stream_id, behind_barrier=attempt > 0)
                try:
                    await self._read_on(stream_id, stream, to, fresh=attempt > 0)
                except ReadAgain as error:
                    problem = error
                    if attempt > 0:
                        self.drop(stream_id)
                else:
                    return stream
            assert problem is not None
            raise problem

    async def verdicts(self, placed: Placed) -> tuple[Verdict, ...]:
        """The fold's verdicts on an entry that counts and is not decided."""
        stream_id = placed.entry.stream_id
        for _ in range(2):
            stream = await self._catch_up(stream_id, placed.end_offset)
            found = stream.undecided.get(placed.end_offset)
            if found is not None:
                return found
            self.drop(stream_id)  # it was folded before, and its verdicts are forgotten: once more
        raise ReadAgain(f"stream {stream_id:016x}: the entry at {placed.end_offset} is decided by now")

    def remembered(self, placed: Placed) -> tuple[Verdict, ...] | None:
        """The verdicts, if the entry was folded here while it was not decided."""
        stream = self._streams.get(placed.entry.stream_id)
        return None if stream is None else stream.undecided.get(placed.end_offset)

    async def settle(self, placed: Placed) -> tuple[Verdict | None, ...]:
        """What to answer for an entry that this broker wrote, and that others came before.

        Where the verdicts themselves are gone, the state tells of the last five batches of a producer where
        they are, whether in this entry or before (protocol 8). None for others.
        """
        stream_id = placed.entry.stream_id
        stream = await self._catch_up(stream_id, placed.start_offset)
        if stream.fold.end < placed.end_offset:
            self._advance(stream_id, stream, placed)
        found = stream.undecided.get(placed.end_offset)
        if found is not None:
            return found
        chunk = placed.entry.where
        assert isinstance(chunk, WalChunk), "nothing else is written"
        told = ((batch, stream.fold.check(batch.producer, batch.records, 0)) for batch in chunk.batches)
        certain = (Kind.DUPLICATE, Kind.LEFT_OUT)
        return tuple(
            verdict if batch.producer is None or verdict.kind in certain else None for batch, verdict in told
        )

    async def snapshot_end(self, stream_id: int) -> int:
        """Up to there everything is decided."""
        record = await self._store.get(self._domain_of(stream_id), snapshot_key(stream_id))
        return 0 if record is None else (await self._decoded(record.value)).end

    # --- telling

    def own(self, placed: Placed) -> None:
        """An entry that this broker wrote, and that counts. One that is not adjacent is left to reading."""
        stream_id = placed.entry.stream_id
        stream = self._streams.get(stream_id)
        if stream is not None and placed.start_offset == stream.fold.end:
            self._advance(stream_id, stream, placed)

    def drop(self, stream_id: int) -> None:
        """Forget a fold; it is loaded anew when it is asked for."""
        stream = self._streams.pop(stream_id, None)
        if stream is not None:
            self._weight -= stream.weight

    def resolved(self, placed: Placed) -> None:
        """Its verdicts are stored."""
        stream = self._streams.get(placed.entry.stream_id)
        if stream is not None:
            stream.undecided.pop(placed.end_offset, None)

    def decided(self, stream_id: int, end_offset: int) -> None:
        """Everything up to there is decided: its verdicts are not needed any more."""
        stream = self._streams.get(stream_id)
        while stream is not None and stream.undecided:
            first = next(iter(stream.undecided))
            if first > end_offset:
                break
            del stream.undecided[first]

    def acknowledge(self, stream_id: int, end_offset: int) -> None:
        """A client of this broker knows that a record right before there is stored."""
        self._acknowledged[stream_id] = max(self._acknowledged.get(stream_id, 0), end_offset)
        self._acknowledged.move_to_end(stream_id)
        if len(self._acknowledged) > MAX_ACKNOWLEDGED:
            self._acknowledged.popitem(last=False)

    def acknowledged(self, stream_id: int) -> int:
        return self._acknowledged.get(stream_id, 0)

    async def close(self) -> None:
        """Wait for snapshots that are on their way."""
        if self._snapshots:
            await asyncio.wait(self._snapshots.values())

    # --- moving

    async def _read_on(self, stream_id: int, stream: _Stream, to: int, fresh: bool) -> None:
        told = self._index.followed_end(stream_id)
        if told is None:  # from now on the watch keeps it: `current` hears of what others write
            told = (await self._index.tail(stream_id)).end_records
        to = max(to, told)
        while stream.fold.end < to:
            page = await self._index.counted(stream_id, stream.fold.end, PAGE_ENTRIES, fresh=fresh)
            for placed in page:
                self._advance(stream_id, stream, placed)
            if len(page) < PAGE_ENTRIES:
                break
            await asyncio.sleep(0)  # pages that are all in memory would keep everyone else waiting
        if stream.fold.end < to:
            raise ReadAgain(f"stream {stream_id:016x} is folded up to {stream.fold.end} of {to}")

    def _advance(self, stream_id: int, stream: _Stream, placed: Placed) -> None:
        verdicts = stream.fold.advance(placed)
        if verdicts is None:
            return
        stream.entries += 1
        if not self._store.conditions_abort and not is_decided(placed, self.incarnation):
            # The first are kept: they are resolved first, and then there is room for the next.
            if len(stream.undecided) < MAX_UNDECIDED:
                stream.undecided[placed.end_offset] = verdicts
            else:
                stream.may_be_snapshot = False
        if self._streams.get(stream_id) is not stream:
            return  # dropped meanwhile
        weight = STREAM_WEIGHT + len(stream.fold.producers)
        self._weight += weight - stream.weight
        stream.weight = weight
        self._make_room(stream_id)
        if stream.entries >= self._snapshot_entries and stream.may_be_snapshot and not stream.undecided:
            self._begin_snapshot(stream_id, stream)

    def _make_room(self, wanted: int) -> None:
        while self._weight > self._max_producers and len(self._streams) > 1:
            oldest = next(one for one in self._streams if one != wanted)
            self.drop(oldest)

    # --- snapshots

    async def _load(self, stream_id: int, behind_barrier: bool) -> _Stream:
        domain = self._domain_of(stream_id)
        if behind_barrier:  # an older snapshot may have nothing left that continues it
            await self._store.barrier(domain)
        record = await self._store.get(domain, snapshot_key(stream_id))
        fold = Fold(self.expiration_ms)
        if record is not None:
            try:
                fold = await self._decoded(record.value)
            except CorruptStore as error:
                # It only saves reading. If the entries it stood for are gone, that will be noticed.
                log.error("stream %016x is folded from its beginning: %s", stream_id, error)
        stream = _Stream(fold, None if record is None else record.version, fold.end)
        stream.weight += len(stream.fold.producers)
        self.drop(stream_id)
        self._streams[stream_id] = stream
        self._weight += stream.weight
        self._make_room(stream_id)
        return stream

    async def _decoded(self, value: bytes) -> Fold:
        if len(value) <= INLINE_BYTES:
            return decode(value, self.expiration_ms)
        return await asyncio.to_thread(decode, value, self.expiration_ms)

    def _begin_snapshot(self, stream_id: int, stream: _Stream) -> None:
        if stream_id in self._snapshots:
            return
        stream.entries = 0
        task = asyncio.get_running_loop().create_task(
            self._put_snapshot(stream_id, stream, stream.fold.copy())
        )
        self._snapshots[stream_id] = task
        task.add_done_callback(lambda _: self._snapshots.pop(stream_id))

    async def _put_snapshot(self, stream_id: int, stream: _Stream, fold: Fold) -> None:
        domain, key = self._domain_of(stream_id), snapshot_key(stream_id)
        try:
            value = await asyncio.to_thread(encode, fold)
            for _ in range(2):
                # What began from an older one may have a long way to go to the latest.
                if stream.snapshot_end >= fold.end:
                    return
                version = stream.snapshot_version
                try:
                    version = await self._store.put(
                        domain, key, value, Expect.ABSENT if version is None else version
                    )
                except VersionConflict:  # others put one too; theirs may be older
                    record = await self._store.get(domain, key)
                    if record is None:
                        return
                    stream.snapshot_version = record.version
                    stream.snapshot_end = (await self._decoded(record.value)).end
                else:
                    stream.snapshot_version, stream.snapshot_end = version, fold.end
                    return
        except DrayError as error:
            log.info("no snapshot of the producers of stream %016x this time: %s", stream_id, error)


def snapshot_key(stream_id: int) -> str:
    return f"{SNAPSHOTS}/{stream_id:016x}"
