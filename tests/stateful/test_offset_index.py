"""A stream's index under appends, compaction, retention, deletions and crashes between them, on every store.

The model is one list with an element per offset: what a record is, and whether it was truncated. Whatever
the entries look like, every reader must find every record that is not truncated in an object that the model
knows to hold it. The log starts behind what was truncated or deleted, whichever is further.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)

from dray.errors import OffsetOutOfRange
from dray.index.cache import IndexCache
from dray.index.changes import Swap, carry_out, replace_run, truncate
from dray.index.deletion import RecordDeleter
from dray.index.entry import ParquetFile, Placed, Truncated, WalChunk, encode, place_all, sequence_of
from dray.index.lookup import OffsetIndex
from dray.metadata.store import Change, EntryChange, MetadataStore, NewEntry, Position
from tests.conformance.backends import Backend
from tests.index_entries import INCARNATION, STREAM, parquet_entry, wal_entry
from tests.stateful.running import STORES, run_on

T = TypeVar("T")

D = 9
SEQUENCE = sequence_of(STREAM)
OTHER = STREAM + 1  # its entries must never show


class NotedCache(IndexCache):
    """Says how far the watch has come."""

    def __init__(self) -> None:
        super().__init__(max_bytes=12_000)  # so small that entries give way now and then
        self.came = asyncio.Event()
        self.followed = False
        self.seen: set[Change] = set()

    def open(self, domain: int) -> None:
        super().open(domain)
        self.followed = True
        self.came.set()

    def apply(self, domain: int, changes: Iterable[Change]) -> None:
        changes = list(changes)
        super().apply(domain, changes)
        self.seen.update(changes)
        self.came.set()

    async def wait(self, enough: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not enough():
                self.came.clear()
                await self.came.wait()


class Reader:
    """A broker: its own client of the store, its own cache."""

    def __init__(self, store: MetadataStore, cache: NotedCache) -> None:
        self.store = store
        self.cache = cache
        self.cached = OffsetIndex(store, lambda stream_id: D, cache)
        self.uncached = OffsetIndex(store, lambda stream_id: D)
        self.deleter = RecordDeleter(store, lambda stream_id: D, self.cached)
        self.task = asyncio.create_task(cache.follow(store, D))
        self.told_end = self.told_log_start = 0

    @classmethod
    async def start(cls, backend: Backend) -> Reader:
        reader = cls(await backend.open(), NotedCache())
        await reader.cache.wait(lambda: reader.cache.followed)
        return reader

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.store.close()


class Machine(RuleBasedStateMachine):
    backend_factory: Any  # set by the test: makes an empty store

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.directory = tempfile.TemporaryDirectory()
        backend: Backend = type(self).backend_factory(Path(self.directory.name))
        self.store: MetadataStore = self.run_call(backend.open())
        self.readers: list[Reader] = [self.run_call(Reader.start(backend)) for _ in range(2)]
        self.offsets: list[set[str]] = []  # by offset: the paths that hold it, or have held it
        self.total_bytes = 0
        self.truncated = self.deleted = 0
        self.objects = 0
        self.interrupted: Swap | None = None  # its deletes are yet to be finished

    @property
    def log_start(self) -> int:
        return max(self.truncated, self.deleted)

    def run_call(self, call: Awaitable[T]) -> T:
        async def wrapped() -> T:
            return await call

        return self.runner.run(wrapped())

    def teardown(self) -> None:
        for reader in self.readers:
            self.run_call(reader.stop())
        self.run_call(self.store.close())
        self.runner.close()
        self.directory.cleanup()

    def stored(self) -> list[Placed]:
        return place_all(self.run_call(self.store.entries(D, SEQUENCE, 0, 10_000)))

    @rule(
        who=st.integers(0, 1), batches=st.lists(st.integers(1, 3), min_size=1, max_size=2), told=st.booleans()
    )
    def append(self, who: int, batches: list[int], told: bool) -> None:
        self.objects += 1
        entry = wal_entry(*batches, number=self.objects)
        other = wal_entry(1, number=self.objects, stream_id=OTHER)
        reader = self.readers[who]
        began = reader.cached.now()
        result = self.run_call(
            reader.store.append(
                D,
                [
                    NewEntry(sequence_of(OTHER), 1, 104, encode(other)),
                    NewEntry(SEQUENCE, entry.records, 104 * len(batches), encode(entry)),
                ],
            )
        )
        self.offsets += [{f"wal/{self.objects}"} for _ in range(entry.records)]
        self.total_bytes += 104 * len(batches)
        assigned = result.entries[1]
        assert assigned.position == (len(self.offsets), self.total_bytes)
        if told:
            for _ in range(2):
                reader.cached.add(Placed(entry, *assigned.position, assigned.version), began)

    @precondition(lambda self: self.offsets and self.interrupted is None)
    @rule(data=st.data(), crash=st.sampled_from(["no", "no", "all left", "some left"]))
    def compact(self, data: st.DataObject, crash: str) -> None:
        stored = [placed for placed in self.stored() if not isinstance(placed.entry.where, Truncated)]
        if not stored:
            return
        first = data.draw(st.integers(0, len(stored) - 1))
        run = stored[first : first + data.draw(st.integers(1, 6))]
        self.objects += 1
        start, end = run[0].start_offset, run[-1].end_offset
        swap = replace_run(run, parquet_entry(end - start, number=self.objects))
        for offset in range(start, end):
            self.offsets[offset].add(f"data/{self.objects}.parquet")
        self.swap(swap, crash, data)

    @precondition(lambda self: self.offsets and self.interrupted is None)
    @rule(data=st.data(), crash=st.sampled_from(["no", "no", "all left", "some left"]))
    def retain(self, data: st.DataObject, crash: str) -> None:
        before = data.draw(st.integers(0, len(self.offsets)))
        ends = [placed.end_offset for placed in self.stored() if placed.end_offset <= before]
        swap = truncate(self.stored(), before, 6_000, INCARNATION)
        assert (swap is None) == (max(ends, default=0) <= self.truncated)
        if swap is not None:
            self.swap(swap, crash, data)
            self.truncated = max(ends)

    @rule(who=st.integers(0, 1), data=st.data())
    def delete(self, who: int, data: st.DataObject) -> None:
        end = len(self.offsets)
        before = data.draw(st.none() | st.integers(-2, end + 2))
        reader = self.readers[who]
        deleting = reader.deleter.delete_before(STREAM, before)
        if before is not None and not 0 <= before <= end:
            with pytest.raises(OffsetOutOfRange):
                self.run_call(deleting)
            return
        self.deleted = max(self.deleted, end if before is None else before)
        answer = self.run_call(deleting)
        assert max(reader.told_log_start, end if before is None else before) <= answer <= self.log_start
        reader.told_log_start = answer
        assert self.run_call(reader.cached.log_start(STREAM)) >= answer

    def swap(self, swap: Swap, crash: str, data: st.DataObject) -> None:
        """Carry it out, or crash with some of its deletes done."""
        if crash == "no":
            self.run_call(carry_out(self.store, D, swap))
            return
        done: list[Position] = []
        if crash == "some left" and swap.deletes:
            done = data.draw(st.lists(st.sampled_from(swap.deletes), unique=True))
        value = encode(swap.new)
        version = self.run_call(self.store.swap(D, SEQUENCE, swap.at, swap.version, value, done))
        if len(done) < len(swap.deletes):
            self.interrupted = Swap(swap.at, version, swap.new, swap.deletes)

    @precondition(lambda self: self.interrupted is not None)
    @rule()
    def finish(self) -> None:
        """The next one to claim the stream plans from what it finds."""
        assert self.interrupted is not None
        swap, self.interrupted = self.interrupted, None
        start = swap.at.end_records - swap.new.records
        run = [placed for placed in self.stored() if start < placed.end_offset <= swap.at.end_records]
        self.run_call(carry_out(self.store, D, replace_run(run, swap.new)))
        covered = [p for p in self.stored() if start < p.end_offset <= swap.at.end_records]
        assert [placed.entry for placed in covered] == [swap.new]

    @rule(who=st.integers(0, 1), fresh=st.booleans())
    def look_up_every_offset(self, who: int, fresh: bool) -> None:
        reader = self.readers[who]
        for index in (reader.cached, reader.uncached):
            current = fresh or index is reader.uncached
            found = [self.run_call(index.find(STREAM, x, fresh=fresh)) for x in range(len(self.offsets) + 2)]
            for offset, placed in enumerate(found):
                self.check_holds(placed, offset, current)

    @rule(who=st.integers(0, 1), data=st.data(), max_entries=st.integers(1, 5), fresh=st.booleans())
    def read_on(self, who: int, data: st.DataObject, max_entries: int, fresh: bool) -> None:
        reader = self.readers[who]
        start = data.draw(st.integers(0, len(self.offsets)))
        for index in (reader.cached, reader.uncached):
            run = self.run_call(index.range(STREAM, start, max_entries, fresh=fresh))
            assert len(run) <= max_entries
            at = start
            for number, placed in enumerate(run):
                assert placed.start_offset <= at if number == 0 else placed.start_offset == at
                self.check_holds(placed, at, fresh or index is reader.uncached)
                at = placed.end_offset
            if index is reader.uncached:
                assert len(run) == max_entries or at == len(self.offsets)

    def check_holds(self, placed: Placed | None, offset: int, current: bool) -> None:
        """A cached answer may be as old as the watch is late; then it shows less, or an object of before."""
        if placed is None:
            assert offset >= len(self.offsets) or not current
            return
        assert placed.entry.stream_id == STREAM
        assert placed.start_offset <= offset < placed.end_offset <= len(self.offsets)
        if isinstance(placed.entry.where, Truncated):
            assert placed.end_offset <= self.truncated
        else:
            assert isinstance(placed.entry.where, WalChunk | ParquetFile)
            assert placed.entry.where.path in self.offsets[offset]

    @rule(who=st.integers(0, 1), fresh=st.booleans())
    def ask_for_the_bounds(self, who: int, fresh: bool) -> None:
        reader = self.readers[who]
        assert self.run_call(reader.uncached.end(STREAM)) == (len(self.offsets), self.total_bytes)
        assert self.run_call(reader.uncached.log_start(STREAM)) == self.log_start
        end = self.run_call(reader.cached.end(STREAM, fresh=fresh)).end_records
        log_start = self.run_call(reader.cached.log_start(STREAM, fresh=fresh))
        assert reader.told_end <= end <= len(self.offsets)
        assert reader.told_log_start <= log_start <= self.log_start
        if fresh:
            assert (end, log_start) == (len(self.offsets), self.log_start)
        reader.told_end, reader.told_log_start = end, log_start

    @rule(who=st.integers(0, 1))
    def catch_up(self, who: int) -> None:
        """A cache whose watch has seen everything has nothing but what is stored, and knows it is there."""
        reader = self.readers[who]
        mark = NewEntry(sequence_of(OTHER), 1, 104, encode(wal_entry(1, stream_id=OTHER)))
        [done] = self.run_call(self.store.append(D, [mark])).entries
        change = EntryChange(sequence_of(OTHER), done.position, done.version)
        self.run_call(reader.cache.wait(lambda: change in reader.cache.seen))
        stored = self.stored()
        for offset in range(len(self.offsets) + 1):
            kept = reader.cache.find(STREAM, offset)
            assert kept is None or kept in stored
            found = self.run_call(reader.cached.find(STREAM, offset))
            self.check_holds(found, offset, current=True)
            assert found is None or found in stored
        assert self.run_call(reader.cached.end(STREAM)) == (len(self.offsets), self.total_bytes)
        assert self.run_call(reader.cached.log_start(STREAM)) == self.log_start

    @invariant()
    def positions_only_grow(self) -> None:
        """D-IDX-10, also after compaction."""
        positions = [(placed.end_offset, placed.end_bytes) for placed in self.stored()]
        assert positions == sorted(positions)
        if self.offsets:
            assert positions[-1] == (len(self.offsets), self.total_bytes)


@pytest.mark.parametrize("name", STORES)
def test_every_reader_finds_every_offset(name: str, request: pytest.FixtureRequest) -> None:
    run_on(Machine, name, request, examples=25, in_memory=150, steps=30)
