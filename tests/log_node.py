"""What a broker reads and writes partitions with, wired as it wires them, over stores that tests hold."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from aiokafka.record.default_records import DefaultRecordBatchBuilder  # type: ignore[import-untyped]  # has no stubs
from aiokafka.record.memory_records import MemoryRecords  # type: ignore[import-untyped]  # has no stubs

from dray.index.cache import IndexCache
from dray.index.decided import DecidedIndex
from dray.index.entry import WalChunk, stream_of
from dray.index.witness import Witness
from dray.log.append import LogAppender
from dray.log.compacted import CompactedReader
from dray.log.read import Got, LogReader
from dray.log.wakeups import Wakeups
from dray.metadata.feed import Feed
from dray.metadata.memory import MemoryData, MemoryStore
from dray.metadata.store import Entry, EntryChange, Gap, MetadataStore, Record, WatchEvent
from dray.objectstore.memory import MemoryObjects, MemoryObjectStore
from dray.objectstore.store import Body, ObjectStore
from dray.topics.configs import TopicConfigs, parse_configs
from dray.wal.format import object_id_of
from dray.wal.objects import ObjectRecord, State, encode_record, record_key
from dray.wal.reader import WalReader
from dray.wal.writer import Committed, CommittedObject, WalWriter
from tests.index_entries import INCARNATION

T = TypeVar("T")

DOMAIN = 0
CONFIGS = parse_configs({})


class Gate:
    """Open at first. `held` says how many wait for it to open again."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self.held = 0

    def close(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    async def __call__(self) -> None:
        self.held += 1
        try:
            await self._open.wait()
        finally:
            self.held -= 1


class HeldStore(MemoryStore):
    """Remembers what it is asked; can be slow, late with its watch, and stale up to the next barrier."""

    def __init__(self, data: MemoryData, *, conditions_abort: bool = True) -> None:
        super().__init__(data, conditions_abort=conditions_abort)
        self.reads: list[str] = []
        self.barriers = 0
        self.read_gate = Gate()
        self.watch_gate = Gate()
        self._past: MemoryStore | None = None

    def fall_behind(self) -> None:
        """Answer as of now, until somebody asks for a barrier."""
        past = MemoryData()
        for number, domain in self._data._domains.items():
            past.domain(number).records = dict(domain.records)
            past.domain(number).sequences = copy.deepcopy(domain.sequences)
        self._past = MemoryStore(past)

    async def _now(self, what: str) -> None:
        self.reads.append(what)
        await asyncio.sleep(0)
        await self.read_gate()

    async def get(self, domain: int, key: str) -> Record | None:
        await self._now(f"get {key}")
        return await (self._past.get(domain, key) if self._past else super().get(domain, key))

    async def entries(self, domain: int, sequence: str, start: int, limit: int) -> list[Entry]:
        await self._now(f"entries {sequence} {start}")
        if self._past:
            return await self._past.entries(domain, sequence, start, limit)
        return await super().entries(domain, sequence, start, limit)

    async def tail(self, domain: int, sequence: str) -> Entry | None:
        await self._now(f"tail {sequence}")
        return await (self._past.tail(domain, sequence) if self._past else super().tail(domain, sequence))

    async def barrier(self, domain: int) -> None:
        self.barriers += 1
        self._past = None
        await super().barrier(domain)

    @asynccontextmanager
    async def watch(self, domain: int, prefix: str | None = None) -> AsyncIterator[Feed]:
        async with super().watch(domain, prefix) as feed:
            yield _HeldFeed(feed, self.watch_gate)


class _HeldFeed(Feed):
    def __init__(self, feed: Feed, gate: Gate) -> None:
        super().__init__()
        self._feed = feed
        self._gate = gate

    async def __anext__(self) -> WatchEvent:
        event = await self._feed.__anext__()
        await self._gate()
        return event


class HeldObjects(MemoryObjectStore):
    """Remembers its GETs and lets them go on when the test does; can fence what is put."""

    def __init__(self, data: MemoryObjects) -> None:
        super().__init__(data)
        self.gets: list[str] = []
        self.gate = Gate()
        self.fence_next: MetadataStore | None = None  # where the next object that is put is fenced

    async def put(self, key: str, body: Body, *, if_absent: bool = False) -> None:
        await super().put(key, body, if_absent=if_absent)
        if self.fence_next is not None:
            store, self.fence_next = self.fence_next, None
            object_id = object_id_of(key)
            assert object_id is not None
            fence = ObjectRecord(State.FENCED, key, len(body), 1)
            await store.put(DOMAIN, record_key(object_id), encode_record(fence))

    async def get_range(self, key: str, start: int, end: int, *, clip: bool = False) -> bytes:
        self.gets.append(key)
        await self.gate()
        return await super().get_range(key, start, end, clip=clip)


class Node:
    """One broker's worth of writer, index and reader, all in one domain."""

    def __init__(
        self,
        store: MetadataStore,
        objects: ObjectStore,
        *,
        index_bytes: int = 64 * 2**20,
        cache_bytes: int = 64 * 2**20,
        block_bytes: int = 2**20,
        buffer_bytes: int = 2**28,
        now_ms: Callable[[], int] = lambda: 1_700_000_000_000,
        target_bytes: int = 8 * 2**20,
    ) -> None:
        self.store = store
        self.objects = objects
        self.cache = IndexCache(index_bytes)
        self.witness = Witness(store, lambda stream_id: DOMAIN)
        self.index = DecidedIndex(
            store, lambda stream_id: DOMAIN, self.cache, self.witness, incarnation=INCARNATION
        )
        self.wal = WalReader(objects, cache_bytes=cache_bytes, block_bytes=block_bytes)
        self.wakeups = Wakeups()
        self.writer = WalWriter(
            store,
            objects,
            zone="z",
            incarnation=INCARNATION,
            linger_ms=0,
            target_bytes=target_bytes,
            clock=self.index.now,
            on_commit=self._committed,
            folds=self.index.folds,
            resolve=self.index.resolve,
        )
        self.appender = LogAppender(self.writer, 1, now_ms)
        compacted = CompactedReader(self.wal, cache_bytes=cache_bytes)
        self.reader = LogReader(self.index, self.wal, compacted, self.wakeups, buffer_bytes=buffer_bytes)
        self._task: asyncio.Task[None] | None = None

    def _committed(self, done: CommittedObject) -> None:
        self.wal.add(done.path, done.body)
        for placed in done.entries:
            assert isinstance(placed.entry.where, WalChunk)
            self.witness.know(placed.entry.where.object_id)
            self.index.add(placed, done.began)
            self.wakeups.wake(placed.entry.stream_id)

    def _tell(self, event: WatchEvent) -> None:
        if isinstance(event, Gap):
            self.wakeups.wake_all()
            return
        for change in event.changes:
            if isinstance(change, EntryChange) and change.version is not None:
                stream_id = stream_of(change.sequence)
                if stream_id is not None:
                    self.wakeups.wake(stream_id)

    async def start(self) -> None:
        self._task = asyncio.create_task(self.cache.follow(self.store, DOMAIN, self._tell))
        await settle()

    async def stop(self) -> None:
        await self.writer.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.wal.close()

    async def append(self, stream_id: int, payload: bytes, configs: TopicConfigs = CONFIGS) -> Committed:
        return await self.appender.append(stream_id, configs, payload).committed


def payload(*values: bytes, timestamp_ms: int = 1_700_000_000_000) -> bytes:
    """One batch, as aiokafka builds it."""
    builder = DefaultRecordBatchBuilder(2, 0, 0, -1, -1, -1, 2**24)
    for delta, value in enumerate(values):
        assert builder.append(delta, timestamp_ms, None, value, []) is not None
    return bytes(builder.build())


def records_of(got: Got) -> list[tuple[int, bytes]]:
    """Offsets and values, as aiokafka reads them."""
    assert got.error is None, got.error
    assert got.records is not None
    memory = MemoryRecords(b"".join(got.records.buffers))
    found = []
    while memory.has_next():
        batch = memory.next_batch()
        assert batch is not None
        assert batch.validate_crc()
        found += [(record.offset, record.value) for record in batch]
    return found


async def settle() -> None:
    """Let everything run that can."""
    for _ in range(50):
        await asyncio.sleep(0)


async def soon(call: Awaitable[T]) -> T:
    """A bound on what would otherwise hang."""
    async with asyncio.timeout(20):
        return await call
