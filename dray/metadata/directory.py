"""A live view of one directory of the store: every record in it, decoded, kept current by a watch.

For records that change seldom and are asked for all the time: topics, brokers. `Directory` owns the view;
what the records mean is for whoever gives it `decode`, and writing them is for others too.

**What a reader may see.** Each record as it was at a time that the watch has not passed: as stale as the
watch is late, while the store is away as stale as that. Nothing is decided on the view alone. `refresh`
makes one record at least as new as its call, so who wrote a record and refreshed it finds it from then on.

**Why an older value never stays.**
- Reads of one record are taken in one after the other (`_locks`), so what is taken in last was read last.
- A change told by the watch is read after it was told. If that gives another version than the one told, the
  read may be stale or the record may have gone on: it is read once more behind a barrier.
- A load begins when the watch stands. What changes after that is told, and taken in after the load. What a
  `refresh` brought meanwhile the load leaves alone; a `refresh` that began before it reads again.

Versions are compared for equality only: the contract gives them no order.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

from dray.errors import CorruptStore, IncompatibleStore, InvalidRequest, MetadataError, Unavailable
from dray.metadata.store import Changes, KeyChange, MetadataStore, Record, WatchEvent

log = logging.getLogger(__name__)

# About 1 MiB of small records in one answer, below what any store puts into one.
PAGE_RECORDS = 1_000
# Enough to hide the round trip of a batch of changes, few enough to leave the store to others.
MAX_READS = 16
# The store repeats reads itself within its call timeout, so whatever comes here has lasted seconds already.
FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 5.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Found(Generic[T]):
    value: T
    version: int


class Directory(Generic[T]):
    """All records directly below one directory of one domain, decoded, kept current by a watch.

    `decode(key, value)` may raise `CorruptStore` or `IncompatibleStore`: such a record is logged and left
    out until it changes.
    """

    def __init__(
        self, store: MetadataStore, domain: int, directory: str, decode: Callable[[str, bytes], T]
    ) -> None:
        self.revision = 0  # grows with each change that was taken in
        self._store = store
        self._domain = domain
        self._directory = directory
        self._decode = decode
        self._found: dict[str, Found[T]] = {}
        self._left_out: dict[str, int] = {}  # the version of each record that cannot be decoded
        self._subscribers: list[Callable[[str], None]] = []
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._phase = 0  # grows when a load begins and when it ends
        self._refreshed: set[str] | None = None  # since the load began that is under way
        self._settled = asyncio.Event()  # the first load is done, or will never be
        self._failure: Exception | None = None  # why it will never be

    async def run(self) -> None:
        """Load, then follow until cancelled or the store is closed. Trouble with the store is waited out."""
        pause_s = FIRST_PAUSE_S
        try:
            while True:
                try:
                    async with self._store.watch(self._domain, self._directory + "/") as watch:
                        await self._load()
                        self._settle(None)
                        pause_s = FIRST_PAUSE_S
                        async for event in watch:
                            await self._follow(event)
                    return
                except InvalidRequest:
                    raise  # a mistake in here: trying again would not mend it
                except MetadataError as error:
                    log.warning("%s: trying again in %.1f s: %s", self._directory, pause_s, error)
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, MAX_PAUSE_S)
        except Exception as error:
            self._settle(error)
            raise
        finally:
            self._settle(Unavailable(f"{self._directory}: stopped before it was loaded"))

    async def loaded(self) -> None:
        """Return when the first load is done. Raises what `run` raised if there will be none."""
        await self._settled.wait()
        if self._failure is not None:
            raise self._failure

    def get(self, segment: str) -> Found[T] | None:
        return self._found.get(segment)

    def values(self) -> Mapping[str, Found[T]]:
        """All of them, by segment. This follows the view: copy it to keep it across an await."""
        return MappingProxyType(self._found)

    async def refresh(self, segment: str) -> Found[T] | None:
        """Read this one behind a barrier and take it in. Raises what the store raises."""
        async with self._lock(segment):
            while True:
                phase = self._phase
                await self._store.barrier(self._domain)
                record = await self._read(segment)
                if phase == self._phase:
                    break
            if self._refreshed is not None:
                self._refreshed.add(segment)
            self._take(segment, record)
            return self._found.get(segment)

    async def reload(self) -> None:
        """Make every record at least as new as this call. Raises what the store raises."""
        await self._store.barrier(self._domain)
        stored: dict[str, int] = {}
        start = ""
        while True:
            page = await self._store.scan(self._domain, self._directory, start=start, limit=PAGE_RECORDS)
            stored.update((record.key.rpartition("/")[2], record.version) for record in page)
            if len(page) < PAGE_RECORDS:
                break
            start = page[-1].key.rpartition("/")[2] + "\0"
        for segment in stored.keys() | self._found.keys() | self._left_out.keys():
            if stored.get(segment) != self._version(segment):
                await self.refresh(segment)

    def subscribe(self, callback: Callable[[str], None]) -> None:
        """Have `callback` called with the segment after each change was taken in. It must not raise."""
        self._subscribers.append(callback)

    def _settle(self, failure: Exception | None) -> None:
        if not self._settled.is_set():
            self._failure = failure
            self._settled.set()

    async def _load(self) -> None:
        self._phase += 1
        self._refreshed = set()
        await self._store.barrier(self._domain)
        seen: set[str] = set()
        start = ""
        while True:
            page = await self._store.scan(self._domain, self._directory, start=start, limit=PAGE_RECORDS)
            for record in page:
                segment = record.key.rpartition("/")[2]
                seen.add(segment)
                if segment not in self._refreshed:
                    self._take(segment, record)
            if len(page) < PAGE_RECORDS:
                break
            start = page[-1].key.rpartition("/")[2] + "\0"
        for segment in (self._found.keys() | self._left_out.keys()) - seen - self._refreshed:
            self._take(segment, None)
        self._refreshed = None
        self._phase += 1

    async def _follow(self, event: WatchEvent) -> None:
        if not isinstance(event, Changes):
            await self._load()
            return
        told: dict[str, int | None] = {}
        for change in event.changes:
            if isinstance(change, KeyChange):
                directory, _, segment = change.key.rpartition("/")
                if directory == self._directory:
                    told[segment] = change.version
        remaining = iter(told.items())
        readers = [self._take_told(remaining) for _ in range(min(MAX_READS, len(told)))]
        # All end before an error goes on: none may come in late, after the load that follows it.
        for error in await asyncio.gather(*readers, return_exceptions=True):
            if error is not None:
                raise error

    async def _take_told(self, remaining: Iterator[tuple[str, int | None]]) -> None:
        for segment, version in remaining:
            async with self._lock(segment):
                if self._version(segment) == version:
                    continue
                record = await self._read(segment)
                if (None if record is None else record.version) != version:
                    await self._store.barrier(self._domain)
                    record = await self._read(segment)
                self._take(segment, record)

    async def _read(self, segment: str) -> Record | None:
        return await self._store.get(self._domain, f"{self._directory}/{segment}")

    def _take(self, segment: str, record: Record | None) -> None:
        if self._version(segment) == (None if record is None else record.version):
            return
        self._found.pop(segment, None)
        self._left_out.pop(segment, None)
        if record is not None:
            try:
                self._found[segment] = Found(self._decode(record.key, record.value), record.version)
            except (CorruptStore, IncompatibleStore) as error:
                self._left_out[segment] = record.version
                log.error("%s is left out, at version %d: %s", record.key, record.version, error)
        self.revision += 1
        for callback in self._subscribers:
            callback(segment)

    def _version(self, segment: str) -> int | None:
        found = self._found.get(segment)
        return found.version if found is not None else self._left_out.get(segment)

    def _lock(self, segment: str) -> asyncio.Lock:
        return self._locks.setdefault(segment, asyncio.Lock())
