"""Brokers, idempotent producers and readers in a simulated world, and an oracle that knows the truth.

`Ledger` stands below all faults: it writes down what really landed, and checks what may be changed at all.
`truth` judges that from the beginning, with none of the code that is tested. What anybody was told or has
seen is compared with it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias
from unittest.mock import patch
from uuid import UUID

from dray.errors import (
    CommitUnknown,
    DrayError,
    NotCommitted,
    OutcomeUnknown,
    OutOfOrderSequence,
    ReadAgain,
    StaleEpoch,
    Unavailable,
    UnknownProducer,
    VersionConflict,
)
from dray.index import decided as decided_module
from dray.index.cache import IndexCache
from dray.index.changes import carry_out, truncate
from dray.index.decided import DecidedIndex
from dray.index.entry import (
    IndexEntry,
    Kind,
    Placed,
    Producer,
    Truncated,
    Void,
    WalChunk,
    decode,
    is_decided,
    place,
    place_all,
    sequence_of,
)
from dray.index.fold import EXPIRATION_MS
from dray.index.fold import decode as decode_fold
from dray.index.witness import Witness
from dray.metadata.memory import MemoryStore
from dray.metadata.store import AppendResult, Delete, NewEntry, Position, Put
from dray.producers import folds as folds_module
from dray.producers.folds import SNAPSHOTS, StreamFolds, snapshot_key
from dray.wal import writer as writer_module
from dray.wal.batcher import PendingBatch
from dray.wal.objects import OBJECTS, State, decode_record, record_key
from dray.wal.orphans import OrphanCollector
from dray.wal.writer import Committed, CommittedObject, WalWriter
from tests.simulation.test_wal import HEADER, INCARNATION, ZONE, D, check, collector
from tests.simulation.world import Machine, SimulatedMetadata, SimulatedObjects, World, simulate

STREAMS = (1, 2)
# What may keep a reader from an answer; it tries again.
RETRIABLE = (Unavailable, OutcomeUnknown, VersionConflict, ReadAgain)
# Long enough for everything that a healthy system waits for.
PATIENCE_S = 600.0


@dataclass(frozen=True)
class Rules:
    """The parts that run, and what is patched: the real ones, or some with a rule taken out."""

    pipeline: type[writer_module._Pipeline] = writer_module._Pipeline
    writer: type[WalWriter] = WalWriter
    index: type[DecidedIndex] = DecidedIndex
    folds: type[StreamFolds] = StreamFolds
    witness: type[Witness] = Witness
    collector: type[OrphanCollector] = OrphanCollector
    patches: tuple[tuple[Any, str, Any], ...] = ()
    truncates_above: bool = False  # takes away what no snapshot covers

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Pages and snapshots are small, so that all of it happens within a hundred entries."""
        small = (
            (folds_module, "PAGE_ENTRIES", 4),
            (decided_module, "PAGE_ENTRIES", 4),
            (decided_module, "SNAPSHOT_ENTRIES", 20),
            (folds_module, "MAX_UNDECIDED", 6),
        )
        with contextlib.ExitStack() as stack:
            for owner, name, value in (*small, *self.patches):
                stack.enter_context(patch.object(owner, name, value))
            yield


# --- below all faults


class Ledger(MemoryStore):
    """The store itself: what it does is written down, and must be what may be done."""

    def __init__(self, world: ProducerWorld) -> None:
        super().__init__(world.data, conditions_abort=world.strong)
        self._world = world

    async def append(
        self,
        domain: int,
        entries: Sequence[NewEntry],
        puts: Sequence[Put] = (),
        deletes: Sequence[Delete] = (),
    ) -> AppendResult:
        result = await super().append(domain, entries, puts, deletes)
        self._world.was_appended(entries, puts, result)
        return result

    async def swap(
        self,
        domain: int,
        sequence: str,
        at: Position,
        version: int,
        value: bytes,
        deletes: Sequence[Position],
    ) -> int:
        before = await self.ceiling(domain, sequence, at.end_records)
        result = await super().swap(domain, sequence, at, version, value, deletes)
        assert before is not None
        self._world.was_swapped(place(before), decode(value))
        return result


class ProducerWorld(World):
    domain = D
    incarnation = INCARNATION
    streams: tuple[int, ...] = STREAMS

    def __init__(self, seed: int, *, strong: bool, expiration_ms: int, trouble: float = 0.15) -> None:
        super().__init__(seed, trouble=trouble, strong=strong)
        self.expiration_ms = expiration_ms
        self.landed: list[tuple[IndexEntry, int]] = []  # with where they end, in the order they landed
        self.states: dict[str, State] = {}  # by the key of an object's record: what it was first
        self.snapshots: dict[str, int] = {}  # how far they reach
        self.counts: Counter[str] = Counter()
        self.brokers: list[Broker] = []  # also those that crashed

    @property
    def expires(self) -> bool:
        """Whether producers are forgotten while they work."""
        return self.expiration_ms < EXPIRATION_MS

    @property
    def pause_s(self) -> float:
        return self.expiration_ms / 1000 if self.expires else 0.0

    def timestamp_ms(self) -> int:
        """Of a record. Clients choose it."""
        return self.chance.choice((0, self.now_ms(), 10**12)) if self.expires else self.now_ms()

    def open_store(self) -> MemoryStore:
        return Ledger(self)

    def is_committed(self, object_id: UUID) -> bool:
        return self.states.get(record_key(object_id)) is State.COMMITTED

    def was_appended(self, entries: Sequence[NewEntry], puts: Sequence[Put], result: AppendResult) -> None:
        for new, assigned in zip(entries, result.entries, strict=True):
            self.landed.append((decode(new.value), assigned.position.end_records))
        for put, version in zip(puts, result.puts, strict=True):
            if version is not None:
                self._was_put(put.key, put.value)

    def _was_put(self, key: str, value: bytes) -> None:
        name = key.rpartition("/")[2]
        if key.startswith(f"{SNAPSHOTS}/"):
            self._check_snapshot(key, int(name, 16), value)
        elif key.startswith(f"{OBJECTS}/") and "-" not in name:
            self.states.setdefault(key, decode_record(key, value).state)

    def _check_snapshot(self, key: str, stream: int, value: bytes) -> None:
        end = decode_fold(value, self.expiration_ms).end
        self._check(end >= self.snapshots.get(key, 0), f"a snapshot went back to {end} (protocol 16)")
        self.snapshots[key] = max(end, self.snapshots.get(key, 0))
        self.counts["snapshots"] += 1
        for entry in self.data.domain(self.domain).sequences.get(sequence_of(stream), []):
            placed = place(entry)
            where = placed.entry.where
            if placed.end_offset <= end and isinstance(where, WalChunk):
                self._check(
                    is_decided(placed, self.incarnation) and self.is_committed(where.object_id),
                    f"a snapshot at {end} is above the entry at {placed.end_offset} that is not decided"
                    " (protocol 15)",
                )

    def was_swapped(self, before: Placed, after: IndexEntry) -> None:
        """Entries are marked void, get their verdicts once, or are truncated: nothing else (protocol 23)."""
        was, now = before.entry.where, after.where
        if isinstance(now, Truncated):
            return
        fair = isinstance(was, WalChunk)
        if isinstance(was, WalChunk) and isinstance(now, Void):
            fair = now.object_id == was.object_id and not self.is_committed(was.object_id)
            after = replace(after, where=was)
            fair = fair and replace(after, min_timestamp_ms=0, max_timestamp_ms=0) == replace(
                before.entry, min_timestamp_ms=0, max_timestamp_ms=0
            )
            self.counts["void"] += 1
        elif isinstance(was, WalChunk) and isinstance(now, WalChunk):
            fair = not was.verdicts and replace(after, where=replace(now, verdicts=())) == before.entry
            self.counts["resolved"] += 1
        self._check(fair, f"{before.entry} became {after} (protocol 23)")

    def _check(self, holds: bool, what: str) -> None:
        if not holds:
            self.violations.append(what)


# --- the truth


@dataclass(frozen=True)
class Fact:
    """A batch that landed and takes offsets, and what it is."""

    stream: int
    start: int
    end: int
    ident: int
    kind: Kind
    producer: Producer | None


# By stream: start and end of each entry, with its batches, or None if it is void.
Truth: TypeAlias = dict[int, list[tuple[int, int, list[Fact] | None]]]


@dataclass
class _Known:
    """All that a producer has written in its epoch, as the oracle keeps it."""

    epoch: int
    ok: list[tuple[int, int, int]]  # first sequence, records, offset
    clock_ms: int


def truth(world: ProducerWorld) -> Truth:
    """Everything that landed, judged from the beginning."""
    streams: Truth = {stream: [] for stream in world.streams}
    known: dict[tuple[int, int], _Known] = {}
    clocks: Counter[int] = Counter()
    ends: Counter[int] = Counter()
    for entry, end in world.landed:
        stream, start = entry.stream_id, end - entry.records
        check(start == ends[stream], f"stream {stream}: a hole or overlap at {ends[stream]}")
        ends[stream] = end
        clocks[stream] = max(clocks[stream], entry.created_at_ms)
        chunk = entry.where
        assert isinstance(chunk, WalChunk)
        if not world.is_committed(chunk.object_id):
            streams[stream].append((start, end, None))
            continue
        body = world.objects.objects.get(chunk.path, (b"",))[0]
        check(bool(body), f"stream {stream} at {start}: its object is gone")
        facts: list[Fact] = []
        at = start
        for number, batch in enumerate(chunk.batches):
            if batch.records == 0:
                continue
            kind = Kind.OK
            if batch.producer is not None:
                kind = judged(known, stream, batch.producer, batch.records, at, clocks[stream], world)
            last = chunk.batch_offset(number) + batch.size_bytes
            ident = int.from_bytes(bytes(body[last - 8 : last]), "big")
            facts.append(Fact(stream, at, at + batch.records, ident, kind, batch.producer))
            at += batch.records
        check(at == end, f"stream {stream}: the entry at {end} counts up to {at}")
        streams[stream].append((start, end, facts))
    return streams


def judged(
    known: dict[tuple[int, int], _Known],
    stream: int,
    producer: Producer,
    records: int,
    offset: int,
    clock_ms: int,
    world: ProducerWorld,
) -> Kind:
    """What the protocol says of a batch, written down once more (9, 20)."""
    key = stream, producer.id
    state = known.get(key)
    if state is not None and clock_ms - state.clock_ms > world.expiration_ms:
        state = None
    if state is None or producer.epoch > state.epoch:
        if producer.base_sequence != 0:
            return Kind.UNKNOWN_PRODUCER if state is None else Kind.OUT_OF_ORDER
        known[key] = _Known(producer.epoch, [(0, records, offset)], clock_ms)
        return Kind.OK
    if producer.epoch < state.epoch:
        return Kind.STALE_EPOCH
    if any((first, size) == (producer.base_sequence, records) for first, size, _ in state.ok[-5:]):
        return Kind.DUPLICATE
    if producer.base_sequence != state.ok[-1][0] + state.ok[-1][1]:
        return Kind.OUT_OF_ORDER
    state.ok.append((producer.base_sequence, records, offset))
    state.clock_ms = clock_ms
    return Kind.OK


# --- what was seen and told


@dataclass
class Book:
    """What every caller was told, and what every reader saw."""

    acknowledged: dict[int, tuple[int, Committed]] = field(default_factory=dict)  # id -> stream, where
    refused: set[int] = field(default_factory=set)  # of plain producers
    in_order: list[list[int]] = field(default_factory=list)  # ids of one producer, as it wrote them
    seen: dict[tuple[int, int], int | None] = field(default_factory=dict)  # None: no record
    next_id: int = 1

    def ident(self) -> int:
        self.next_id += 1
        return self.next_id - 1

    def note(self, stream: int, start: int, end: int, ident: int | None) -> None:
        for offset in range(start, end):
            seen = self.seen.setdefault((stream, offset), ident)
            check(seen == ident, f"stream {stream} at {offset}: {seen} for one reader, {ident} for another")


class Broker:
    """One broker's worth of writer and index, wired as it wires them."""

    def __init__(self, world: ProducerWorld, book: Book, rules: Rules, *, skew_ms: int = 0) -> None:
        self.world, self.book = world, book
        self.machine = Machine(world)
        self.gone = asyncio.Event()
        self.store = SimulatedMetadata(self.machine)
        self.cache = IndexCache(30_000)
        self.witness = rules.witness(self.store, lambda stream: D)
        self.index = rules.index(
            self.store,
            lambda stream: D,
            self.cache,
            self.witness,
            incarnation=INCARNATION,
            expiration_ms=world.expiration_ms,
            resolve_after_s=1.0,
        )
        self.index.folds = rules.folds(
            self.store,
            lambda stream: D,
            self.index,
            incarnation=INCARNATION,
            expiration_ms=world.expiration_ms,
            snapshot_entries=8,
        )
        self.writer = rules.writer(
            self.store,
            SimulatedObjects(self.machine),
            zone=ZONE,
            incarnation=INCARNATION,
            target_bytes=400,
            max_buffer_bytes=2_000,
            linger_ms=50,
            wall_clock_ms=lambda: world.now_ms() + skew_ms,
            new_id=lambda: UUID(int=world.chance.getrandbits(128)),
            clock=self.index.now,
            on_commit=self._committed,
            folds=self.index.folds,
            resolve=self.index.resolve,
            pipeline=rules.pipeline,
        )
        self.told: Counter[int] = Counter()
        self.checks: list[asyncio.Task[None]] = []
        world.brokers.append(self)
        self.tasks = [asyncio.create_task(self._follow()), asyncio.create_task(self._read())]

    def crash(self) -> None:
        self.machine.crashed = True
        self.gone.set()
        for task in (*self.tasks, *self.checks):
            task.cancel()

    async def stop(self) -> None:
        await self.writer.close()
        await self.index.close()
        await stopped(self.tasks)

    def _committed(self, done: CommittedObject) -> None:
        for placed in done.entries:
            assert isinstance(placed.entry.where, WalChunk)
            self.witness.know(placed.entry.where.object_id)
            self.index.add(placed, done.began)

    async def _follow(self) -> None:
        while True:
            with contextlib.suppress(*RETRIABLE):
                await self.cache.follow(self.store, D)
            await asyncio.sleep(0.1)

    async def _read(self) -> None:
        chance = self.world.chance
        while True:
            await asyncio.sleep(chance.uniform(0, 1))
            stream = chance.choice(STREAMS)
            with contextlib.suppress(*RETRIABLE):
                end = await self.end(stream)
                if end:
                    await self.look(stream, chance.randrange(end), chance.randrange(1, 6))

    async def end(self, stream: int) -> int:
        """The high watermark. It never goes back."""
        told = self.told[stream]
        end = (await self.index.end(stream)).end_records
        check(end >= told, f"stream {stream} ended at {told}, and then at {end} (protocol 18)")
        self.told[stream] = max(end, self.told[stream])
        return end

    async def look(self, stream: int, start: int, max_entries: int) -> int:
        """Read from an offset that is below the high watermark; where to go on."""
        entries = await self.index.range(stream, start, max_entries)
        check(bool(entries), f"stream {stream}: {start} is below the high watermark and not there")
        check(entries[0].start_offset <= start < entries[0].end_offset, f"{start} is not in {entries[0]}")
        for placed in entries:
            self._see(placed)
        return entries[-1].end_offset

    def _see(self, placed: Placed) -> None:
        stream, where = placed.entry.stream_id, placed.entry.where
        if isinstance(where, Void):
            self.book.note(stream, placed.start_offset, placed.end_offset, None)
        elif isinstance(where, WalChunk):
            body = self.world.objects.objects.get(where.path, (b"",))[0]
            check(bool(body), f"stream {stream} at {placed.start_offset}: its object is gone")
            for number, batch in enumerate(where.batches):
                last = where.batch_offset(number) + batch.size_bytes
                ident = int.from_bytes(bytes(body[last - 8 : last]), "big")
                first = placed.start_offset + where.batch_start(number)
                self.book.note(
                    stream, first, first + batch.records, ident if where.is_served(number) else None
                )

    async def read_all(self) -> None:
        for stream in STREAMS:
            at, end = 0, await self.end(stream)
            while at < end:
                at = await self.look(stream, at, 5)

    def acknowledged(self, stream: int, ident: int, done: Committed) -> None:
        self.checks.append(asyncio.create_task(self._check_acknowledged(stream, ident, done)))

    async def _check_acknowledged(self, stream: int, ident: int, done: Committed) -> None:
        """What this broker has acknowledged can be read here at once (protocol 18)."""
        for _ in range(20):
            try:
                end = await self.end(stream)
                check(end >= done.end_offset, f"{ident}: acknowledged at {done}, but {end} is the end")
                await self.look(stream, done.start_offset, 1)
            except RETRIABLE:
                continue
            if self.index.told_log_start(stream) <= done.start_offset:
                seen = self.book.seen.get((stream, done.start_offset), ident)
                check(seen == ident, f"{ident}: acknowledged at {done}, where {seen} is")
            return


async def stopped(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if not isinstance(outcome, asyncio.CancelledError) and outcome is not None:
            raise outcome


# --- producers


def batch(stream: int, ident: int, records: int, at_ms: int, producer: Producer | None) -> PendingBatch:
    header = HEADER[:-4] + records.to_bytes(4, "big")  # all that compaction looks at
    return PendingBatch(
        stream, memoryview(header + ident.to_bytes(8, "big")), records, at_ms, at_ms, producer
    )


@dataclass(eq=False)
class _Unsent:
    ident: int
    records: int
    producer: Producer
    is_acknowledged: bool = False


class _Expired(Exception): ...


@dataclass
class IdempotentProducer:
    """Writes like Java's: five batches in flight, in order; what fails is sent again, in order, anywhere."""

    world: ProducerWorld
    brokers: list[Broker]
    book: Book
    id: int
    stream: int
    patience: float
    last_acknowledged: int = -1

    async def run(self, epochs: int, batches: int) -> None:
        ids: list[int] = []
        self.book.in_order.append(ids)
        for epoch in range(epochs):
            sequence = 0
            left: list[_Unsent] = []
            for _ in range(batches):
                records = self.world.chance.randrange(1, 4)
                left.append(_Unsent(self.book.ident(), records, Producer(self.id, epoch, sequence)))
                ids.append(left[-1].ident)
                sequence += records
            try:
                await self._send_all(left)
            except _Expired:
                # Nothing is known of it any more: as Java's, it goes on as another.
                self.world.counts["expired"] += 1
                self.id += 1_000

    async def _send_all(self, batches: list[_Unsent]) -> None:
        chance = self.world.chance
        in_flight = 5
        self.last_acknowledged = -1
        while left := [each for each in batches if not each.is_acknowledged]:
            first = batches.index(left[0])
            window = [each for each in batches[first : first + in_flight] if not each.is_acknowledged]
            all_done = await self._send(chance.choice(self.brokers), window)
            in_flight = 5 if all_done else chance.choice((1, 5))
            await asyncio.sleep(chance.choice((0, 0, 0.1, 1.0, self.world.pause_s)))

    async def _send(self, broker: Broker, window: list[_Unsent]) -> bool:
        chance = self.world.chance
        sent: list[tuple[_Unsent, asyncio.Future[Committed]]] = []
        for each in window:
            if broker.machine.crashed:
                break
            try:
                pending = batch(
                    self.stream, each.ident, each.records, self.world.timestamp_ms(), each.producer
                )
                sent.append((each, broker.writer.submit(D, [pending])))
            except NotCommitted:
                break
            await asyncio.sleep(chance.choice((0, 0, 0.05)))
        if not sent:
            return False
        patient = chance.random() < self.patience
        await answered(
            [future for _, future in sent], broker, PATIENCE_S if patient else chance.choice((0.3, 2.0))
        )
        done = 0
        for each, future in sent:
            if broker.machine.crashed or not future.done():
                lives = not broker.machine.crashed
                check(not (patient and lives), f"{each.ident} was never answered by a broker that lives")
                if chance.random() < 0.5:
                    future.cancel()
                future.add_done_callback(_ignore)
                continue
            done += self._hear(broker, each, future)
        return done == len(window)

    def _hear(self, broker: Broker, each: _Unsent, future: asyncio.Future[Committed]) -> bool:
        counts = self.world.counts
        error = future.exception()
        if error is None:
            where = future.result()
            counts["acknowledged"] += 1
            check(where.end_offset - where.start_offset == each.records, f"{each} is at {where}")
            told = self.book.acknowledged.setdefault(each.ident, (self.stream, where))
            check(told == (self.stream, where), f"{each} is at {told}, and then at {where}")
            each.is_acknowledged = True
            self.last_acknowledged = max(
                self.last_acknowledged, each.producer.base_sequence + each.records - 1
            )
            broker.acknowledged(self.stream, each.ident, where)
            return True
        counts[type(error).__name__] += 1
        if isinstance(error, OutOfOrderSequence | UnknownProducer):
            # Java's producer gives up then: it has lost a batch that was acknowledged.
            is_next = each.producer.base_sequence == self.last_acknowledged + 1
            if self.world.expires and each.producer.base_sequence <= self.last_acknowledged + 1:
                raise _Expired
            check(not is_next, f"{each} is the next one and was refused: {error!r} (protocol 10)")
        elif not isinstance(error, NotCommitted | CommitUnknown):
            check(not isinstance(error, StaleEpoch), f"{each}: {error!r}")
            raise error
        return False


def _ignore(future: asyncio.Future[Committed]) -> None:
    if not future.cancelled():
        future.exception()


async def answered(futures: Sequence[asyncio.Future[Committed]], broker: Broker, timeout_s: float) -> None:
    """All of them, or the broker is gone, or it takes too long."""

    async def all_answered() -> None:
        await asyncio.wait(futures)

    waiting = {asyncio.create_task(broker.gone.wait()), asyncio.create_task(all_answered())}
    await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()


async def plain_producer(world: ProducerWorld, brokers: list[Broker], book: Book, writes: int) -> None:
    for _ in range(writes):
        broker, stream, ident = world.chance.choice(brokers), world.chance.choice(STREAMS), book.ident()
        await asyncio.sleep(world.chance.uniform(0, 1))
        if broker.machine.crashed:
            continue
        try:
            pending = batch(stream, ident, world.chance.randrange(1, 4), world.timestamp_ms(), None)
            future = broker.writer.submit(D, [pending])
        except NotCommitted:
            book.refused.add(ident)
            continue
        await answered([future], broker, PATIENCE_S)
        if broker.machine.crashed:
            future.cancel()
            continue
        check(future.done(), f"{ident} was never answered by a broker that lives")
        error = future.exception()
        if error is None:
            book.acknowledged[ident] = stream, future.result()
            broker.acknowledged(stream, ident, future.result())
        elif isinstance(error, NotCommitted):
            book.refused.add(ident)
        elif not isinstance(error, CommitUnknown):
            raise error


async def truncator(world: ProducerWorld, rules: Rules) -> None:
    """Takes away old entries, as far as a snapshot covers them (protocol 15)."""
    store = SimulatedMetadata(Machine(world))
    while True:
        await asyncio.sleep(world.chance.uniform(2, 10))
        stream = world.chance.choice(STREAMS)
        with contextlib.suppress(DrayError):
            await store.barrier(D)
            record = await store.get(D, snapshot_key(stream))
            end = 0 if record is None else decode_fold(record.value, world.expiration_ms).end
            stored = place_all(await store.entries(D, sequence_of(stream), 0, 100))
            if rules.truncates_above:
                end = max((placed.end_offset for placed in stored[:-1]), default=0)
            swap = truncate(stored, end, world.now_ms(), INCARNATION)
            if swap is not None:
                await carry_out(store, D, swap)
                world.counts["truncated"] += 1


# --- the story


@dataclass(frozen=True)
class Plot:
    """What happens in a world besides its faults."""

    strong: bool = False
    producers: int = 3
    batches: int = 8
    epochs: int = 2
    crashes: int = 2
    truncates: bool = False
    trouble: float = 0.15
    patience: float = 0.7  # how often producers wait until they are answered
    streams: tuple[int, ...] = STREAMS
    expiration_ms: int = EXPIRATION_MS
    skew_ms: int = 0  # how far the clocks of brokers may be apart


def play(seed: int, plot: Plot, rules: Rules) -> Counter[str]:
    """How often which thing happened. Raises `Violation`."""
    with rules.in_force():
        return simulate(lambda: story(seed, plot, rules))


async def story(seed: int, plot: Plot, rules: Rules) -> Counter[str]:
    world = ProducerWorld(seed, strong=plot.strong, expiration_ms=plot.expiration_ms, trouble=plot.trouble)
    book, chance = Book(), world.chance

    def start_broker() -> Broker:
        return Broker(world, book, rules, skew_ms=chance.randint(0, plot.skew_ms))

    brokers = [start_broker() for _ in range(3)]

    async def crashes() -> None:
        for _ in range(plot.crashes):
            await asyncio.sleep(chance.uniform(0, 10))
            which = chance.randrange(len(brokers))
            brokers[which].crash()
            brokers[which] = start_broker()

    background = [asyncio.create_task(collector(world, rules.collector, 500))]
    if plot.truncates:
        background.append(asyncio.create_task(truncator(world, rules)))
    crashing = asyncio.create_task(crashes())
    working = [
        asyncio.create_task(
            IdempotentProducer(
                world, brokers, book, 1000 + number, chance.choice(plot.streams), plot.patience
            ).run(plot.epochs, plot.batches)
        )
        for number in range(plot.producers)
    ]
    working.append(asyncio.create_task(plain_producer(world, brokers, book, plot.batches)))
    everything = asyncio.gather(*working, crashing)
    try:
        await asyncio.wait({everything}, timeout=120.0)
        await stopped(background)
        await world.calm()
        await asyncio.wait({everything}, timeout=PATIENCE_S)
        check(everything.done(), "somebody waits for ever")
        await everything
        for broker in world.brokers:
            for task in broker.checks:
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        await reckon(world, book, brokers, rules)
    finally:
        for task in (*working, crashing, *background):
            task.cancel()
    return world.counts


async def reckon(world: ProducerWorld, book: Book, brokers: list[Broker], rules: Rules) -> None:
    """In calm times: everybody reads everything, and it is what the oracle says."""
    for broker in brokers:
        await broker.writer.close()
    streams = truth(world)
    ends = {stream: entries[-1][1] if entries else 0 for stream, entries in streams.items()}
    for broker in (*brokers, Broker(world, book, rules)):
        for stream in STREAMS:
            for _ in range(200):
                if await broker.end(stream) == ends[stream]:
                    break
                await asyncio.sleep(0.5)
            else:
                check(False, f"a reader never gets to the end of stream {stream}, {ends[stream]}")
        await broker.read_all()
        await broker.stop()
    for broker in world.brokers:
        await stopped(broker.tasks)
    check(not world.violations, "; ".join(world.violations))
    check_seen(book, streams)
    check_stored(world, streams)
    check_told(world, book, streams)


def check_told(world: ProducerWorld, book: Book, streams: Truth) -> None:
    """What was acknowledged is there once, where it was said to be, in order; what was refused is not."""
    at: dict[int, list[Fact]] = {}
    for fact in (fact for entries in streams.values() for _, _, facts in entries for fact in facts or ()):
        world.counts[fact.kind.value] += 1
        if fact.kind is Kind.OK:
            at.setdefault(fact.ident, []).append(fact)
    for ident, places in at.items():
        # Whoever was forgotten may write twice what was not acknowledged.
        check(len(places) == 1 or world.expires, f"{ident} is there {len(places)} times: {places}")
        check(ident not in book.refused, f"{ident} was refused for certain, and is there")
    for ident, (stream, done) in book.acknowledged.items():
        found = [(fact.stream, fact.start, fact.end) for fact in at.get(ident, [])]
        check(
            (stream, done.start_offset, done.end_offset) in found,
            f"{ident} was acknowledged at {done} of stream {stream}, and is at {found}",
        )
    for ids in book.in_order if not world.expires else ():
        starts = [at[ident][0].start for ident in ids if ident in at]
        check(starts == sorted(starts), f"{ids} were written in this order, and are at {starts}")


def check_seen(book: Book, streams: Truth) -> None:
    real: dict[tuple[int, int], int | None] = {}
    for stream, entries in streams.items():
        for start, end, facts in entries:
            for offset in range(start, end):
                real[stream, offset] = None
            for fact in facts or ():
                for offset in range(fact.start, fact.end):
                    real[stream, offset] = fact.ident if fact.kind is Kind.OK else None
    for place_, ident in book.seen.items():
        check(real.get(place_) == ident, f"{place_}: readers saw {ident}, and {real.get(place_)} is there")


def check_stored(world: ProducerWorld, streams: Truth) -> None:
    """Every stored entry says what the oracle says (protocol 2)."""
    for stream, entries in streams.items():
        end = entries[-1][1] if entries else 0
        by_end = {end: facts for _, end, facts in entries}
        stored = place_all(world.data.domain(world.domain).sequences.get(sequence_of(stream), []))
        check((stored[-1].end_offset if stored else 0) == end, "the tail of a sequence is gone")
        for placed in stored:
            where = placed.entry.where
            if not isinstance(where, WalChunk):
                continue
            facts = by_end[placed.end_offset]
            check(facts is not None, f"stream {stream} at {placed.end_offset}: fenced, and has no mark")
            check(
                is_decided(placed, world.incarnation), f"stream {stream} at {placed.end_offset}: not decided"
            )
            kinds = [fact.kind for fact in facts or ()]
            if where.verdicts:
                world.counts["unresolved"] += 1
                said = [
                    kind for kind, each in zip(where.verdicts, where.batches, strict=True) if each.records
                ]
                check(said == kinds, f"stream {stream} at {placed.end_offset}: {said}, but it is {kinds}")
            else:
                trusted = f"stream {stream} at {placed.end_offset}: trusted, but it is {kinds} (protocol 3)"
                check(all(kind is Kind.OK for kind in kinds), trusted)
