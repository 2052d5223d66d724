"""Decoded index entries in memory, kept right by one watch per domain.

`IndexCache` does no reads: who reads the store offers what was read, and `follow` (or the broker, where
others listen to the same watch) tells it what has changed. Bounded by bytes; the stream that was not asked
for longest gives way first, from its lowest offsets on.

**What a reader may see.** An answer is what the store held at a time that the watch has not passed yet: never
what the watch has said is changed, however late the read that brought it came back. So it is as stale as
the watch is late, and no more:
- an entry may have been replaced or removed since. It holds the same records, and its object is there until
  garbage collection, which comes after. An object that is gone, then, means a stale entry: look up again with
  `fresh=True`, which goes around the cache;
- an end or a log start may have moved up since. They never go back (`OffsetIndex` sees to it).
  A log start is forgotten when the front of the index may have changed, and when its record did.

A domain that is not followed, and one whose watch had a gap, has nothing in here.

**How stale reads are kept out.** A reader takes the time (`now`) before it reads. The watch's latest
`MAX_REMEMBERED` changes of a domain are remembered with their time: an entry that comes in at another
version than the last one told for its position is dropped, and so is all that a read brings that began
before the oldest change remembered. Versions are compared for equality only; the contract gives them no
order.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from dray.index.entry import Placed, WalChunk, stream_of
from dray.index.log_start import stream_of_key
from dray.metadata.store import Change, EntryChange, Gap, MetadataStore, Position, WatchEvent

DEFAULT_MAX_BYTES = 128 * 2**20
# At 1,000 changes a second these are four seconds, and a read takes milliseconds. About 1 MiB per domain.
MAX_REMEMBERED = 4_096
# Measured with tracemalloc on CPython 3.11, rounded up.
STREAM_BYTES = 1_024
ENTRY_BYTES = 1_024
BATCH_BYTES = 416


class IndexCache:
    def __init__(self, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._streams: OrderedDict[int, _Stream] = OrderedDict()  # the one asked for last is last
        self._domains: dict[int, _Followed] = {}
        self._clock = 0  # changes told so far, of all domains

    @property
    def size_bytes(self) -> int:
        return self._bytes

    # --- asking

    def find(self, stream_id: int, offset: int) -> Placed | None:
        """The entry that holds `offset`, if it is here."""
        stream = self._streams.get(stream_id)
        if stream is None:
            return None
        index = bisect_right(stream.ends, offset)
        if index == len(stream.ends):
            return None
        placed = stream.placed[index]
        if placed.start_offset > offset:
            return None
        self._streams.move_to_end(stream_id)
        return placed

    def run(self, stream_id: int, start: int, max_entries: int) -> list[Placed]:
        """Adjacent entries from the one that holds `start` on, as far as they are here."""
        found = self.find(stream_id, start)
        if found is None:
            return []
        stream = self._streams[stream_id]
        first = bisect_right(stream.ends, start)
        run = [found]
        for placed in stream.placed[first + 1 : first + max_entries]:
            if placed.start_offset != run[-1].end_offset:
                break
            run.append(placed)
        return run

    def end(self, stream_id: int) -> Position | None:
        """The end of the stream, if the watch keeps it known."""
        stream = self._streams.get(stream_id)
        return None if stream is None else stream.end

    def log_start(self, stream_id: int) -> int | None:
        stream = self._streams.get(stream_id)
        return None if stream is None else stream.log_start

    # --- offering what was read

    def now(self) -> int:
        """The time to take before a read, or before a write whose outcome is to be added."""
        return self._clock

    def add(self, domain: int, began: int, entries: Iterable[Placed]) -> None:
        """Take in entries of one stream that were read, or written, by a call begun at `began`.

        Adding an entry twice, or before and after the watch tells of it, is the same as adding it once.
        """
        followed = self._domains.get(domain)
        if followed is None:
            return
        for placed in entries:
            stream_id = placed.entry.stream_id
            stream = self._stream(domain, stream_id)
            position = Position(placed.end_offset, placed.end_bytes)
            if stream.end is not None and position > stream.end:
                stream.end = position
            self._bytes += stream.insert(placed, keep=followed.confirms(began, stream_id, placed))
        self._give_way()

    def learn_end(self, domain: int, began: int, stream_id: int, end: Position) -> None:
        """Take in the end of a stream. From here on the watch moves it."""
        followed = self._domains.get(domain)
        if followed is None or not followed.remembers(began):
            return
        stream = self._stream(domain, stream_id)
        stream.end = max(end, stream.end or end, *followed.ends(stream_id))
        self._give_way()

    def learn_log_start(
        self,
        domain: int,
        began: int,
        stream_id: int,
        log_start: int,
        stored: Sequence[Placed],
        record_version: int | None,
    ) -> None:
        """Take in a log start worked out from `stored`, all entries from the front to some end, and from
        its record at that version (None: there is none)."""
        followed = self._domains.get(domain)
        if (
            followed is not None
            and followed.agrees(began, stream_id, stored)
            and followed.agrees_on_record(stream_id, record_version)
        ):
            self._stream(domain, stream_id).log_start = log_start
            self._give_way()

    def doubts_record(self, domain: int, stream_id: int, record_version: int | None) -> bool:
        """Whether the watch has told of another version of a log-start record than was read."""
        followed = self._domains.get(domain)
        return followed is not None and not followed.agrees_on_record(stream_id, record_version)

    # --- being told of changes

    async def follow(
        self, store: MetadataStore, domain: int, tell: Callable[[WatchEvent], None] = lambda _: None
    ) -> None:
        """Keep a domain coherent until cancelled or the store is closed; raises what the watch raises.

        `tell` is called with each event once the cache has taken it in.

        The barrier, because a change from before the watch is not told, and a read that began later must
        not bring what it replaced.
        """
        async with store.watch(domain) as watch:
            try:
                await store.barrier(domain)
                self.open(domain)
                tell(Gap())  # changes from before may have been missed
                async for event in watch:
                    if isinstance(event, Gap):
                        self.close(domain)
                        await store.barrier(domain)
                        self.open(domain)
                    else:
                        self.apply(domain, event.changes)
                    tell(event)
            finally:
                self.close(domain)

    def open(self, domain: int) -> None:
        """From now on every change of the domain will be applied. Reads that began before do not count."""
        self._clock += 1
        self._domains[domain] = _Followed(horizon=self._clock)

    def close(self, domain: int) -> None:
        """Changes may be missed from now on: forget the domain."""
        self._domains.pop(domain, None)
        for stream_id in [number for number, stream in self._streams.items() if stream.domain == domain]:
            self._bytes -= self._streams.pop(stream_id).size_bytes

    def apply(self, domain: int, changes: Iterable[Change]) -> None:
        followed = self._domains.get(domain)
        if followed is None:
            return
        for change in changes:
            if isinstance(change, EntryChange):
                stream_id = stream_of(change.sequence)
            else:
                stream_id = stream_of_key(change.key)
            if stream_id is None:
                continue
            self._clock += 1
            followed.remember(stream_id, change, self._clock)
            stream = self._streams.get(stream_id)
            if stream is None:
                continue
            if isinstance(change, EntryChange):
                self._bytes -= stream.changed(change)
            else:
                stream.log_start = None

    def _stream(self, domain: int, stream_id: int) -> _Stream:
        stream = self._streams.get(stream_id)
        if stream is None:
            stream = self._streams[stream_id] = _Stream(domain)
            self._bytes += stream.size_bytes
        self._streams.move_to_end(stream_id)
        return stream

    def _give_way(self) -> None:
        while self._bytes > self._max_bytes:
            stream_id, stream = next(iter(self._streams.items()))
            if stream.placed:
                # An eighth at once: taking the first element off a list moves all the others.
                self._bytes -= stream.drop(0, 1 + len(stream.placed) // 8)
            else:
                self._bytes -= self._streams.pop(stream_id).size_bytes


@dataclass(slots=True)
class _Stream:
    """What is known of a stream. None of its entries supersedes another: ends and starts both rise."""

    domain: int
    ends: list[int] = field(default_factory=list)  # of `placed`, for bisect
    placed: list[Placed] = field(default_factory=list)
    end: Position | None = None
    log_start: int | None = None
    size_bytes: int = STREAM_BYTES

    def insert(self, new: Placed, keep: bool) -> int:
        """Put `new` in the place of what stands there and of what it supersedes; how many bytes that adds.

        Without `keep`, only take those out: something has changed there.
        """
        high = later = bisect_left(self.ends, new.end_offset)
        if high < len(self.ends) and self.ends[high] == new.end_offset:
            if self.placed[high].version == new.version:
                return 0
            later += 1
        if later < len(self.placed) and self.placed[later].start_offset <= new.start_offset:
            return -self.drop(high, later)  # superseded itself
        low = high
        while low > 0 and self.placed[low - 1].start_offset >= new.start_offset:
            low -= 1
        added = -self.drop(low, later)
        if keep:
            self.ends.insert(low, new.end_offset)
            self.placed.insert(low, new)
            size = _weigh(new)
            self.size_bytes += size
            added += size
        return added

    def changed(self, change: EntryChange) -> int:
        """Follow a change that the watch tells; how many bytes that frees."""
        position, version = change.position, change.version
        index = bisect_left(self.ends, position.end_records)
        known = index < len(self.ends) and self.ends[index] == position.end_records
        if version is not None and self.end is not None and position > self.end:
            self.end = position
        elif version is not None and not (known and self._is_chunk(index, version)):
            # Neither an append, as far as is known here, nor one taken in already: perhaps a truncation.
            self.log_start = None
        if not known or self.placed[index].version == version:
            return 0
        return self.drop(index, index + 1)

    def _is_chunk(self, index: int, version: int) -> bool:
        placed = self.placed[index]
        return placed.version == version and isinstance(placed.entry.where, WalChunk)

    def drop(self, low: int, high: int) -> int:
        size = sum(_weigh(placed) for placed in self.placed[low:high])
        del self.ends[low:high]
        del self.placed[low:high]
        self.size_bytes -= size
        return size


class _Told(NamedTuple):
    time: int
    version: int | None


# Of an entry, and of a log-start record.
_Place: TypeAlias = Position | None
_RECORD = None


@dataclass(slots=True)
class _Followed:
    """The latest changes that the watch of a domain has told."""

    horizon: int  # a read that began before this may be outdated by a change no longer remembered
    told: dict[int, dict[_Place, _Told]] = field(default_factory=dict)  # by stream
    order: deque[tuple[int, _Place, int]] = field(default_factory=deque)

    def remember(self, stream_id: int, change: Change, time: int) -> None:
        place = change.position if isinstance(change, EntryChange) else _RECORD
        self.told.setdefault(stream_id, {})[place] = _Told(time, change.version)
        self.order.append((stream_id, place, time))
        if len(self.order) > MAX_REMEMBERED:
            oldest, place, self.horizon = self.order.popleft()
            of_stream = self.told[oldest]
            if of_stream[place].time == self.horizon:  # not told anew since
                del of_stream[place]
                if not of_stream:
                    del self.told[oldest]

    def remembers(self, began: int) -> bool:
        return began >= self.horizon

    def confirms(self, began: int, stream_id: int, placed: Placed) -> bool:
        """Whether nothing told speaks against this entry."""
        told = self.told.get(stream_id, {}).get(Position(placed.end_offset, placed.end_bytes))
        return self.remembers(began) and (told is None or told.version == placed.version)

    def agrees(self, began: int, stream_id: int, stored: Sequence[Placed]) -> bool:
        """Whether all that was told says that these are the entries up to their last, still."""
        versions = {placed.end_offset: placed.version for placed in stored}
        last = stored[-1].end_offset if stored else 0
        return self.remembers(began) and all(
            told.time <= began
            and (place.end_records > last or versions.get(place.end_records) == told.version)
            for place, told in self.told.get(stream_id, {}).items()
            if place is not _RECORD
        )

    def agrees_on_record(self, stream_id: int, version: int | None) -> bool:
        """Whether a log-start record that was read at this version is what was told last of it."""
        told = self.told.get(stream_id, {}).get(_RECORD)
        return told is None or told.version == version

    def ends(self, stream_id: int) -> list[Position]:
        return [
            place
            for place, told in self.told.get(stream_id, {}).items()
            if place is not _RECORD and told.version is not None
        ]


def _weigh(placed: Placed) -> int:
    where = placed.entry.where
    return ENTRY_BYTES + (len(where.batches) * BATCH_BYTES if isinstance(where, WalChunk) else 0)
