"""Compactors beside brokers and producers in a simulated world, and an oracle that knows what tables must be.

The rounds, plans, saga and garbage collector are the real ones. Simulated are what they stand on: the stores,
a catalog that loses answers and takes commits late, and workers, whose files say which batch has which
offsets. A compactor may crash, and it may stop in the middle of anything and go on when others have done its
work. On a weak store a swap is several requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from unittest.mock import patch
from uuid import UUID

from compactor import collect as collect_module
from compactor import service as service_module
from compactor.collect import GarbageCollector
from compactor.commit import NewFile
from compactor.plan import PlanLimits
from compactor.saga import FILE_GARBAGE, WAL_GARBAGE, Claim, Saga
from compactor.service import Compactor, Options, Stream
from compactor.task import DIRECTORY, Kind, Part, State, decode
from compactor.work import Done, served_batches
from dray.columns.parquet import FileStats
from dray.errors import CatalogUnavailable, DrayError, ObjectNotFound, OutcomeUnknown, VersionConflict
from dray.index.entry import IndexEntry, ParquetFile, Placed, Void, WalChunk, live, place_all, sequence_of
from dray.index.fold import EXPIRATION_MS
from dray.metadata.cluster import Cluster
from dray.metadata.pages import records_of
from dray.metadata.store import AppendResult, Delete, Entry, EntryChange, NewEntry, Position, Put
from dray.topics.record import TopicRecord, TopicState
from dray.wal.objects import OBJECTS, decode_record
from dray.wal.objects import State as ObjectState
from dray.wal.orphans import OrphanCollector
from tests.simulation.producers import (
    PATIENCE_S,
    STREAMS,
    Book,
    Broker,
    IdempotentProducer,
    Ledger,
    ProducerWorld,
    Truth,
    check_seen,
    check_told,
    plain_producer,
    stopped,
    truth,
)
from tests.simulation.producers import Rules as ProducerRules
from tests.simulation.test_wal import INCARNATION, D, check, collector
from tests.simulation.world import Machine, SimulatedMetadata, SimulatedObjects, simulate

T = TypeVar("T")
TOPIC = TopicRecord("t", UUID(int=1), TopicState.ACTIVE, STREAMS, (), {}, 0)
# What a reader may be behind when it looks at an object.
GRACE_MS = 5_000
LIMITS = PlanLimits(max_age_ms=0, part_bytes=500, file_bytes=10**6, max_files=2)
# So that changes fall between two scans.
few_at_a_time = partial(records_of, page_records=5)
OPTIONS = Options("", "n", "partition", LIMITS, GRACE_MS, keep_snapshots=1, snapshot_age_ms=0)


@dataclass(frozen=True)
class Rules:
    """The parts that run, and what is patched: the real ones, or some with a rule taken out."""

    saga: type[Saga] = Saga
    collector: type[GarbageCollector] = GarbageCollector
    asserts: bool = True  # a commit holds only on the snapshot that was loaded
    looks: bool = True  # whether a commit is in the table
    patches: tuple[tuple[Any, str, Any], ...] = ()

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        small = ((service_module, "MAINTAIN_EVERY_S", 0.0), (collect_module, "records_of", few_at_a_time))
        with contextlib.ExitStack() as stack:
            stack.enter_context(ProducerRules().in_force())
            for owner, name, value in (*small, *self.patches):
                stack.enter_context(patch.object(owner, name, value))
            yield


# --- below all faults


class Kept(dict[str, tuple[bytes, int]]):
    """Objects; those that are deleted are still known here."""

    def __init__(self, is_needed: Callable[[str], bool]) -> None:
        super().__init__()
        self.ever: dict[str, tuple[bytes, int]] = {}
        self._is_needed = is_needed

    def __setitem__(self, key: str, value: tuple[bytes, int]) -> None:
        super().__setitem__(key, value)
        before = self.ever.setdefault(key, value)
        check(before[0] == value[0], f"{key} was written twice, and not the same")

    def pop(self, key: str, *default: Any) -> Any:
        check(not self._is_needed(key), f"{key} was deleted, and the table has it")
        return super().pop(key, *default)


class CompactionWorld(ProducerWorld):
    def __init__(self, seed: int, plot: Plot) -> None:
        super().__init__(seed, strong=plot.strong, expiration_ms=EXPIRATION_MS, trouble=plot.trouble)
        self.catalog = Catalog()
        self.kept = self.objects.objects = Kept(lambda key: key in self.catalog.needed())
        self.naps = plot.naps
        self.compactors: list[SimulatedCompactor] = []

    def open_store(self) -> SplittingLedger:
        return SplittingLedger(self)

    def was_swapped(self, before: Placed, after: IndexEntry) -> None:
        if not isinstance(after.where, ParquetFile):
            super().was_swapped(before, after)
            return
        self.counts["rewritten" if isinstance(before.entry.where, ParquetFile) else "swapped"] += 1
        self._check(after.where.path in self.objects.objects, f"{after.where.path} is no object")
        stream = after.stream_id
        name = after.where.iceberg_file
        self._check(name in self.catalog.ever, f"stream {stream}: {name} was not in the table before")


class SplittingLedger(Ledger):
    async def remove(self, domain: int, sequence: str, positions: Sequence[Position]) -> None:
        """The second request of a swap."""
        inside = self._inside(domain)
        entries = inside.sequences[sequence]
        inside.sequences[sequence] = [each for each in entries if each.position not in positions]
        self._data.next_version()
        inside.publish([EntryChange(sequence, position, None) for position in positions])


class CompactorMetadata(SimulatedMetadata):
    """A compactor's client: a swap is several requests on a weak store."""

    _real: SplittingLedger
    _machine: SleepyMachine

    async def entries(self, domain: int, sequence: str, start: int, limit: int) -> list[Entry]:
        found = await super().entries(domain, sequence, start, limit)
        self._machine.has_read = True
        return found

    async def append(
        self,
        domain: int,
        entries: Sequence[NewEntry],
        puts: Sequence[Put] = (),
        deletes: Sequence[Delete] = (),
    ) -> AppendResult:
        assert not entries
        return await self._machine.write(lambda: self._real.append(domain, (), puts, deletes))

    async def swap(
        self,
        domain: int,
        sequence: str,
        at: Position,
        version: int,
        value: bytes,
        deletes: Sequence[Position],
    ) -> int:
        if self.conditions_abort:
            return await super().swap(domain, sequence, at, version, value, deletes)
        done = await super().swap(domain, sequence, at, version, value, ())
        for first in range(0, len(deletes), 3):
            await self.remove(domain, sequence, deletes[first : first + 3])
        return done

    async def remove(self, domain: int, sequence: str, positions: Sequence[Position]) -> None:
        try:
            await self._machine.write(lambda: self._real.remove(domain, sequence, positions))
        except DrayError as error:
            raise OutcomeUnknown(f"simulated: replaced, but {error}") from None


class SleepyMachine(Machine):
    """Stands still in the middle of anything, for long enough to lose its session."""

    def __init__(self, world: CompactionWorld, on_nap: Callable[[], None]) -> None:
        super().__init__(world)
        self.awake_at_s = 0.0
        self.has_read = False  # entries, which may change before it writes
        self._naps = world.naps
        self._on_nap = on_nap

    async def write(self, apply: Callable[[], Awaitable[T]]) -> T:
        chance = self.world.chance
        if apply == self._note_now:  # a barrier
            return await super().write(apply)
        naps, self.has_read = self._naps * (5 if self.has_read else 1), False
        if self.world.trouble and chance.random() < naps:
            self._on_nap()
            self.awake_at_s = asyncio.get_running_loop().time() + chance.choice((1.0, 10.0, 40.0))
        return await super().write(apply)

    async def check_alive(self) -> None:
        await super().check_alive()
        while (left := self.awake_at_s - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(left)
            await super().check_alive()


# --- the table


@dataclass
class Catalog:
    """One table: what was committed, in order."""

    snapshot: int = 0
    files: tuple[str, ...] = ()
    ends: dict[int, int] = field(default_factory=dict)
    rewrites: dict[int, str] = field(default_factory=dict)
    before: tuple[str, ...] = ()  # of the snapshot before, which is kept
    ever: set[str] = field(default_factory=set)

    async def commit(
        self,
        expected: int | None,
        add: Sequence[str],
        remove: Sequence[str] = (),
        ends: Mapping[int, int] | None = None,
        rewrites: Mapping[int, str] | None = None,
    ) -> None:
        if expected is not None and expected != self.snapshot:
            raise VersionConflict("table", expected)
        self.snapshot += 1
        self.before = self.files
        self.files = (*(each for each in self.files if each not in remove), *add)
        self.ends = {**self.ends, **(ends or {})}
        self.rewrites = {**self.rewrites, **(rewrites or {})}
        self.ever.update(add)

    def needed(self) -> set[str]:
        return {*self.files, *self.before}


class _Tables:
    def ensure_table(self, *_: object, **__: object) -> None: ...

    def close(self) -> None: ...


class SimulatedCompactor(Compactor):
    """The real one, but for what works at files and tables."""

    def __init__(self, world: CompactionWorld, rules: Rules) -> None:
        self.world, self.rules = world, rules
        self.machine = SleepyMachine(world, self.nap)
        store, objects = CompactorMetadata(self.machine), SimulatedObjects(self.machine)
        super().__init__(
            Cluster("c", D + 1, INCARNATION, 0),
            store,
            objects,
            _Tables,  # type: ignore[arg-type]  # all that is asked of it
            None,  # type: ignore[arg-type]  # `_write` does without
            OPTIONS,
            file_uri=lambda key: key,
            wall_clock_ms=world.now_ms,
        )
        self._saga = rules.saga(
            store,
            self._index,
            incarnation=INCARNATION,
            file_uri=lambda key: key,
            wall_clock_ms=world.now_ms,
        )
        self._collector = rules.collector(store, objects, self._in_tables, grace_ms=GRACE_MS)
        self.task = asyncio.create_task(self._go_round())
        world.compactors.append(self)

    def crash(self) -> None:
        self.machine.crashed = True
        self.expire()

    def nap(self) -> None:
        self.world.counts["naps"] += 1
        self.expire()

    def expire(self) -> None:
        session: Any = self._session
        if session is not None:
            session.expire()

    async def _go_round(self) -> None:
        while True:
            with contextlib.suppress(DrayError):
                await self.round(everything=True)
            await asyncio.sleep(self.world.chance.uniform(0, 4))

    async def _register(self) -> None:
        await self.machine.check_alive()
        await super()._register()

    def _domain_of(self, stream_id: int) -> int:
        return D

    async def _streams(self) -> list[Stream]:
        return [Stream(stream, TOPIC, number) for number, stream in enumerate(STREAMS)]

    async def _tables(self) -> Any:
        return _Tables()

    def _expire(self, *_: object) -> None: ...

    async def _in_tables(
        self, namespace: str, topic: str, topic_id: UUID, paths: Collection[str]
    ) -> Collection[str]:
        await self._reach_catalog()
        return self.world.catalog.needed() & set(paths)

    async def _reach_catalog(self) -> None:
        await self.machine.check_alive()
        await self.world.delay(0.2)
        if self.world.strikes():
            raise CatalogUnavailable("simulated: no answer")
        await self.machine.check_alive()

    async def _write(self, claims: Any) -> None:
        created = [claim for claim in claims if claim.task.state is State.CREATED]
        done: dict[str, Done] = {}
        for claim in created:
            for part in claim.task.parts:
                done[part.key] = await self._carry_out(claim.task.kind, part)
        await self._each(created, lambda claim: self._written(claim, done))

    async def _carry_out(self, kind: Kind, part: Part) -> Done:
        rows: list[tuple[int, int, int]] = []
        try:
            for each in part.inputs:
                await self.machine.check_alive()
                if kind is Kind.REWRITE:
                    rows += json.loads(await self._objects.get(each.path))
                elif each.length:
                    chunk = await self._objects.get_range(each.path, each.offset, each.offset + each.length)
                    for batch, offset in served_batches(each, chunk):
                        records = int.from_bytes(batch[57:61])
                        rows.append((offset, offset + records, int.from_bytes(batch[-8:])))
            await self._objects.put(part.key, json.dumps(rows).encode())
        except DrayError as error:
            # Of an object that is gone, too: whoever has the claim still would have it.
            is_gone = isinstance(error, ObjectNotFound)
            self.world.counts["inputs gone"] += is_gone
            return Done(part.key, problem=repr(error))
        return Done(part.key, stats=_stats(rows))

    async def _append(self, table: Any, claims: Sequence[Claim]) -> None:
        files = [file for claim in claims for file in self._new_files(claim.task)]
        touched = False
        for _ in range(8):
            await self._reach_catalog()
            loaded = self.world.catalog
            snapshot, ends = loaded.snapshot, dict(loaded.ends)
            pending = [file for file in files if file.end_offset > ends.get(file.partition, 0)]
            if not self.rules.looks and not touched:
                pending = files
            if not pending:
                break
            for file in pending:
                known = ends.get(file.partition, 0)
                check(file.start_offset >= known or not self.rules.looks, f"{file} is half in the table")
            await self._saga.touch(claims)
            touched = True
            with contextlib.suppress(VersionConflict, OutcomeUnknown):
                await self._send(snapshot, pending, ends)
                if not self.rules.looks:
                    break
        else:
            raise CatalogUnavailable("simulated: no commit")
        await self._each(claims, lambda claim: self._saga.advance(claim, State.ICEBERG_COMMITTED))

    async def _send(self, snapshot: int, pending: Sequence[NewFile], ends: dict[int, int]) -> None:
        new = {file.partition: file.end_offset for file in pending}
        expected = snapshot if self.rules.asserts else None
        await self.machine.write(
            lambda: self.world.catalog.commit(expected, [file.path for file in pending], ends=new)
        )

    async def _send_rewrite(self, snapshot: int, claim: Claim, gone: Sequence[str]) -> None:
        task = claim.task
        add = [file.path for file in self._new_files(task)]
        done = {task.partition: task.task_id.hex}
        expected = snapshot if self.rules.asserts else None
        await self.machine.write(lambda: self.world.catalog.commit(expected, add, gone, rewrites=done))

    async def _replace(self, table: Any, claim: Claim) -> None:
        task = claim.task
        gone = [each.iceberg_file for part in task.parts for each in part.inputs]
        for _ in range(8):
            await self._reach_catalog()
            loaded = self.world.catalog
            snapshot = loaded.snapshot
            if loaded.rewrites.get(task.partition) == task.task_id.hex:
                break
            if any(path not in loaded.files for path in gone):
                await self._saga.touch([claim])
                raise AssertionError("nobody else rewrites files of this table")
            await self._saga.touch([claim])
            with contextlib.suppress(VersionConflict, OutcomeUnknown):
                await self._send_rewrite(snapshot, claim, gone)
        else:
            raise CatalogUnavailable("simulated: no commit")
        await self._saga.advance(claim, State.ICEBERG_COMMITTED)


def _stats(rows: Sequence[tuple[int, int, int]]) -> FileStats:
    start, end = (rows[0][0], rows[-1][1]) if rows else (0, 0)
    return FileStats(end - start, 1, start, end, 0, 0, 0, {}, {}, {}, {}, {}, [])


# --- readers


class _Gone(Exception): ...


class ReadingBroker(Broker):
    """Reads files too. What is gone, it looks up again, as brokers do."""

    world: CompactionWorld

    async def look(self, stream: int, start: int, max_entries: int) -> int:
        for attempt in range(3):
            entries = await self.index.range(stream, start, max_entries, fresh=attempt > 0)
            check(bool(entries), f"stream {stream}: {start} is below the high watermark and not there")
            first = entries[0]
            check(first.start_offset <= start < first.end_offset, f"{start} is not in {first}")
            with contextlib.suppress(_Gone):
                for placed in entries:
                    self._see(placed)
                return entries[-1].end_offset
        check(False, f"stream {stream} at {start}: its object is gone")
        raise AssertionError

    def _see(self, placed: Placed) -> None:
        where, stream = placed.entry.where, placed.entry.stream_id
        if isinstance(where, WalChunk | ParquetFile) and where.path not in self.world.objects.objects:
            raise _Gone
        if not isinstance(where, ParquetFile):
            super()._see(placed)
            return
        at = placed.start_offset
        for first, end, ident in json.loads(self.world.objects.objects[where.path][0]):
            self.book.note(stream, at, first, None)
            self.book.note(stream, first, end, ident)
            at = end
        self.book.note(stream, at, placed.end_offset, None)


# --- the story


@dataclass(frozen=True)
class Plot:
    strong: bool = False
    producers: int = 2
    batches: int = 8
    trouble: float = 0.06
    crashes: int = 3
    naps: float = 0.03  # how often a write of a compactor begins with one
    seconds: float = 100.0


def play(seed: int, plot: Plot, rules: Rules) -> Counter[str]:
    """How often which thing happened. Raises `Violation`."""
    with rules.in_force():
        return simulate(lambda: story(seed, plot, rules))


async def story(seed: int, plot: Plot, rules: Rules) -> Counter[str]:
    world = CompactionWorld(seed, plot)
    book, chance = Book(), world.chance
    plain = ProducerRules()
    brokers: list[Broker] = [ReadingBroker(world, book, plain) for _ in range(2)]
    compactors = [SimulatedCompactor(world, rules) for _ in range(2)]

    async def crashes() -> None:
        for _ in range(plot.crashes):
            await asyncio.sleep(chance.uniform(0, 1.5 * plot.seconds / plot.crashes))
            which = chance.randrange(len(compactors))
            compactors[which].crash()
            compactors[which] = SimulatedCompactor(world, rules)

    async def broker_crashes() -> None:
        await asyncio.sleep(chance.uniform(0, plot.seconds / 2))
        brokers[0].crash()
        brokers[0] = ReadingBroker(world, book, plain)

    background = [asyncio.create_task(collector(world, OrphanCollector, 500))]
    working = [
        asyncio.create_task(
            IdempotentProducer(world, brokers, book, 1000 + number, chance.choice(STREAMS), 0.7).run(
                2, plot.batches
            )
        )
        for number in range(plot.producers)
    ]
    working.append(asyncio.create_task(plain_producer(world, brokers, book, plot.batches)))
    working += [asyncio.create_task(crashes()), asyncio.create_task(broker_crashes())]
    everything = asyncio.gather(*working, asyncio.sleep(plot.seconds))
    try:
        await asyncio.wait({everything}, timeout=PATIENCE_S)
        await stopped(background)
        await world.calm()
        await asyncio.wait({everything}, timeout=PATIENCE_S)
        check(everything.done(), "somebody waits for ever")
        await everything
        await reckon(world, book, brokers, rules)
    finally:
        for task in (*working, *background):
            task.cancel()
    return world.counts


async def reckon(world: CompactionWorld, book: Book, brokers: list[Broker], rules: Rules) -> None:
    """In calm times: all is compacted, everybody reads everything, and it is what the oracle says."""
    for broker in brokers:
        await broker.writer.close()
    for broker in world.brokers:
        for task in broker.checks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
    for compactor in world.compactors:
        if compactor.task.done():
            await compactor.task  # it has failed
    streams = _truth(world)
    ends = {stream: entries[-1][1] if entries else 0 for stream, entries in streams.items()}
    for broker in (*brokers, ReadingBroker(world, book, ProducerRules())):
        for stream in STREAMS:
            for _ in range(200):
                if await broker.end(stream) == ends[stream]:
                    break
                await asyncio.sleep(0.5)
            else:
                check(False, f"a reader never gets to the end of stream {stream}, {ends[stream]}")
        await broker.read_all()
    await _finish(world, rules)
    last = ReadingBroker(world, book, ProducerRules())
    await last.read_all()
    for broker in (*brokers, last):
        await broker.index.folds.catch_up(STREAMS[0], fresh=True)
        await broker.stop()
    for broker in world.brokers:
        await stopped(broker.tasks)
    check(not world.violations, "; ".join(world.violations))
    check_seen(book, streams)
    check_told(world, book, streams)
    check_compacted(world, streams)


def _truth(world: CompactionWorld) -> Truth:
    """From all that was ever written."""
    world.objects.objects = world.kept.ever
    try:
        return truth(world)
    finally:
        world.objects.objects = world.kept


async def _finish(world: CompactionWorld, rules: Rules) -> None:
    """Compactors that are still there do all that is left, and collect it."""
    for compactor in world.compactors:
        compactor.machine.awake_at_s = 0.0
    quiet = 0
    for _ in range(600):
        await asyncio.sleep(2)
        for compactor in world.compactors:
            if compactor.task.done():
                await compactor.task
        world.catalog.before = ()  # snapshots expire
        quiet = quiet + 1 if _is_quiet(world) else 0
        if quiet == 3:
            break
    else:
        inside = world.data.domain(D)
        left = [key for key in inside.records if "producers" not in key]
        check(False, f"compaction never ends: {left}")
    await stopped([compactor.task for compactor in world.compactors])


def _is_quiet(world: CompactionWorld) -> bool:
    inside = world.data.domain(D)
    for key, record in inside.records.items():
        if key.startswith((WAL_GARBAGE, FILE_GARBAGE)):
            return False
        if key.startswith(DIRECTORY) and decode(key, record.value).unfinished is not None:
            return False
    for stream in STREAMS:
        entries = place_all(inside.sequences.get(sequence_of(stream), []))
        if any(isinstance(placed.entry.where, WalChunk) and _has_rows(placed) for placed in entries):
            return False
    return True


def _has_rows(placed: Placed) -> bool:
    where = placed.entry.where
    assert isinstance(where, WalChunk)
    return any(map(where.is_served, range(len(where.batches))))


def check_compacted(world: CompactionWorld, streams: Truth) -> None:
    """The table has every row once; the index names its files; nothing else is left."""
    inside = world.data.domain(D)
    reachable: set[str] = set()
    rows: Counter[tuple[int, int, int]] = Counter()
    for path in world.catalog.files:
        check(path in world.objects.objects, f"the table has {path}, which is gone")
        rows.update(map(tuple, json.loads(world.objects.objects[path][0])))
        reachable.add(path)
    real = Counter(
        (fact.start, fact.end, fact.ident)
        for entries in streams.values()
        for _, _, facts in entries
        for fact in facts or ()
        if fact.kind.value == "ok"
    )
    check(rows == real, f"the table lacks {real - rows}, and has too much {rows - real}")
    for stream in STREAMS:
        stored = place_all(inside.sequences.get(sequence_of(stream), []))
        check(live(stored) == stored, f"stream {stream}: entries that were replaced are still there")
        at = 0
        for placed in stored:
            check(placed.start_offset == at, f"stream {stream}: a hole or overlap at {at}")
            at = placed.end_offset
            where = placed.entry.where
            if isinstance(where, ParquetFile):
                check(where.iceberg_file in world.catalog.files, f"{where.path} is not in the table")
                reachable.add(where.path)
            elif isinstance(where, WalChunk):
                reachable.add(where.path)
            else:
                assert isinstance(where, Void)
    for key, record in inside.records.items():
        if key.startswith(f"{OBJECTS}/") and "-" not in key:
            state = decode_record(key, record.value)
            if state.state is ObjectState.COMMITTED:
                check(state.path in reachable, f"nothing refers to {key}, and nobody will collect it")
    marked = {json.loads(r.value)["path"] for k, r in inside.records.items() if k.startswith("wal/staging")}
    fenced = {
        decode_record(k, r.value).path
        for k, r in inside.records.items()
        if k.startswith(f"{OBJECTS}/") and "-" not in k
    }
    leaked = world.objects.objects.keys() - reachable - marked - fenced
    check(not leaked, f"leaked: {leaked}")
