"""The real writer, index and orphan collector in a simulated world, on seeded schedules of faults.

Several brokers write to the same streams, crash and are replaced; collectors run beside them, far too eager
on purpose, since safety may not rest on age. Afterwards the world is read as a reader would, and compared
with what every caller was told. Taking out one rule at a time makes this fail (`BROKEN`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from dataclasses import dataclass, field
from uuid import UUID

import pytest

from dray.errors import CommitUnknown, DrayError, NotCommitted, OutcomeUnknown, Unavailable, VersionConflict
from dray.index.entry import WalChunk, live, place_all, sequence_of
from dray.index.lookup import OffsetIndex
from dray.metadata.memory import MemoryStore
from dray.metadata.store import Expect
from dray.objectstore.memory import MemoryObjectStore
from dray.wal import writer as writer_module
from dray.wal.batcher import PendingBatch
from dray.wal.objects import OBJECTS, STAGING, ObjectRecord, State, decode_record, record_key, reference_key
from dray.wal.orphans import Collected, OrphanCollector
from dray.wal.writer import Committed, WalWriter
from tests.simulation.world import (
    CALL_TIMEOUT_S,
    LATEST_S,
    Machine,
    SimulatedMetadata,
    SimulatedObjects,
    World,
    simulate,
)

D = 3
STREAMS = (1, 2, 2**64 - 1)
ZONE = "a"
INCARNATION = "00" * 16
# A batch of one record as far as anybody here looks: a header whose length is right, and an id in its body.
HEADER = bytes(8) + (49 + 8).to_bytes(4, "big") + bytes(4) + b"\x02" + bytes(44)


FORGET_AFTER_MS = int((CALL_TIMEOUT_S + LATEST_S) * 1000) * 2


class Violation(AssertionError):
    """The system told somebody something that is not so."""


def check(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)


@dataclass
class Book:
    """What every caller was told."""

    committed: dict[int, tuple[int, Committed]] = field(default_factory=dict)  # id -> stream, where
    refused: set[int] = field(default_factory=set)
    unknown: set[int] = field(default_factory=set)
    in_order: list[list[int]] = field(default_factory=list)  # ids that one caller wrote in this order
    next_id: int = 1


def batch(stream: int, ident: int, records: int) -> PendingBatch:
    return PendingBatch(stream, memoryview(HEADER + ident.to_bytes(8, "big")), records, 0, 0)


async def client(world: World, brokers: list[tuple[Machine, WalWriter]], book: Book) -> None:
    """Writes to one stream through one broker, several writes in flight; moves on after trouble."""
    chance = world.chance
    for _ in range(4):
        (machine, broker), stream = chance.choice(brokers), chance.choice(STREAMS)
        ids: list[int] = []
        writes = []
        for _ in range(chance.randrange(1, 4)):
            ident, book.next_id = book.next_id, book.next_id + 1
            ids.append(ident)
            writes.append(asyncio.create_task(one_write(broker, stream, ident, chance.randrange(1, 4), book)))
            await asyncio.sleep(chance.choice((0, 0, 0.05)))
        book.in_order.append(ids)
        # Some clients give up early. A broker that crashed never answers; one that lives must.
        patient = chance.random() < 0.7
        await asyncio.wait(writes, timeout=1.0)
        for _ in range(100):
            if not patient or machine.crashed or all(write.done() for write in writes):
                break
            await asyncio.wait(writes, timeout=3.0)
        for ident, write in zip(ids, writes, strict=True):
            if not write.done():
                check(not patient or machine.crashed, f"{ident} was never answered by a broker that lives")
                write.cancel()
                book.unknown.add(ident)
        for outcome in await asyncio.gather(*writes, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome


async def one_write(broker: WalWriter, stream: int, ident: int, records: int, book: Book) -> None:
    try:
        done = await broker.write(D, [batch(stream, ident, records)])
    except NotCommitted:
        book.refused.add(ident)
    except CommitUnknown:
        book.unknown.add(ident)
    else:
        check(done.end_offset - done.start_offset == records, f"{ident}: {records} records at {done}")
        book.committed[ident] = (stream, done)


async def collector(world: World, how: type[OrphanCollector], older_than_ms: int = 100) -> None:
    """Runs over and over, calling objects orphans that are a tenth of a second old."""
    machine = Machine(world)
    collect = how(SimulatedMetadata(machine), SimulatedObjects(machine))
    while True:
        await asyncio.sleep(world.chance.uniform(0, 1))
        with contextlib.suppress(DrayError):
            await collect.collect(D, world.now_ms(), older_than_ms)
        if world.chance.random() < 0.2:
            with contextlib.suppress(DrayError):
                await collect.collect_unmarked(D, ZONE, world.now_ms(), older_than_ms)
                # Longer than any call may be late: this one does rest on age.
                await collect.forget_fences(D, world.now_ms(), FORGET_AFTER_MS)


async def reader(world: World) -> None:
    """Follows the streams with the real index: what it was told never goes back, and is where it says."""
    index = OffsetIndex(SimulatedMetadata(Machine(world)), lambda stream: D)
    told = dict.fromkeys(STREAMS, 0)
    while True:
        await asyncio.sleep(world.chance.uniform(0, 0.5))
        stream = world.chance.choice(STREAMS)
        with contextlib.suppress(Unavailable, OutcomeUnknown):
            end = (await index.end(stream)).end_records
            check(end >= told[stream], f"stream {stream} ended at {told[stream]}, and then at {end}")
            told[stream] = end
            if end:
                offset = world.chance.randrange(end)
                found = await index.find(stream, offset)
                check(found is not None, f"stream {stream} ends at {end} and has no {offset}")
                assert found is not None
                check(found.start_offset <= offset < found.end_offset, f"{offset} is not in {found}")


async def story(seed: int, rules: Rules) -> Book:
    world, book = World(seed), Book()
    machines: list[Machine] = []
    writers: list[WalWriter] = []

    def start_broker() -> tuple[Machine, WalWriter]:
        machine = Machine(world)
        machines.append(machine)
        made = WalWriter(
            SimulatedMetadata(machine),
            SimulatedObjects(machine),
            zone=ZONE,
            incarnation=INCARNATION,
            target_bytes=400,
            max_buffer_bytes=2_000,
            wall_clock_ms=world.now_ms,
            new_id=lambda: UUID(int=world.chance.getrandbits(128)),
            pipeline=rules.pipeline,
        )
        writers.append(made)
        return machine, made

    brokers = [start_broker(), start_broker()]  # those that clients know

    async def crashes() -> None:
        for _ in range(2):
            await asyncio.sleep(world.chance.uniform(0, 8))
            which = world.chance.randrange(2)
            brokers[which][0].crashed = True
            brokers[which] = start_broker()

    readers = [asyncio.create_task(reader(world)) for _ in range(2)]
    background = [
        asyncio.create_task(collector(world, rules.collector)),
        asyncio.create_task(collector(world, rules.collector)),
        asyncio.create_task(crashes()),
        *readers,
    ]
    await asyncio.gather(*(client(world, brokers, book) for _ in range(4)))
    await world.calm()
    await asyncio.wait([background[2]])
    for machine, made in zip(machines, writers, strict=True):
        if not machine.crashed:
            await made.close()
    for task in background:
        task.cancel()
    for outcome in await asyncio.gather(*background, return_exceptions=True):
        if not isinstance(outcome, asyncio.CancelledError) and outcome is not None:
            raise outcome
    await world.calm()
    check(not world.violations, "; ".join(world.violations))
    await reckon(world, book, rules)
    return book


async def reckon(world: World, book: Book, rules: Rules) -> None:
    metadata = MemoryStore(world.data, conditions_abort=False)
    objects = MemoryObjectStore(world.objects)
    at = await visible(metadata, objects)
    for ident, (stream, done) in book.committed.items():
        check(
            at.get(ident) == [(stream, done.start_offset, done.end_offset)],
            f"{ident} was acknowledged at {done}, is at {at.get(ident)}",
        )
    index = OffsetIndex(metadata, lambda stream: D)
    for ident, (stream, done) in book.committed.items():
        found = await index.find(stream, done.start_offset, fresh=True)
        check(found is not None and found.end_offset >= done.end_offset, f"the index does not find {ident}")
    for ident in book.refused:
        check(ident not in at, f"{ident} was refused for certain, and is there")
    for ident, places in at.items():
        check(len(places) == 1, f"{ident} is there {len(places)} times")
    for ids in book.in_order:
        starts = [book.committed[i][1].start_offset for i in ids if i in book.committed]
        check(starts == sorted(starts), f"{ids} were written in this order, and are at {starts}")

    # What is left over goes away, and nothing else does.
    sweep = rules.collector(metadata, objects)
    later = world.now_ms() + 10**9
    await sweep.collect(D, later, 0)
    for info in await objects.list(limit=10_000):
        known = await metadata.get(D, record_key(UUID(info.key.rpartition("/")[2].removesuffix(".wo"))))
        check(known is not None, f"{info.key} had no marker: only a listing would have found it")
    await sweep.collect_unmarked(D, ZONE, later, 0)
    check(await metadata.scan(D, STAGING, limit=10) == [], "markers are left")
    for info in await objects.list(limit=10_000):
        key = record_key(UUID(info.key.rpartition("/")[2].removesuffix(".wo")))
        record = await metadata.get(D, key)
        check(
            record is not None and decode_record(key, record.value).state is State.COMMITTED,
            f"{info.key} leaked",
        )
    check(await visible(metadata, objects) == at, "sweeping changed what readers see")
    await sweep.forget_fences(D, later, 0)
    check(await visible(metadata, objects) == at, "forgetting fences changed what readers see")


async def visible(metadata: MemoryStore, objects: MemoryObjectStore) -> dict[int, list[tuple[int, int, int]]]:
    """What a reader sees: id -> where. Entries of a fenced object are void (protocol 11, 12)."""
    at: dict[int, list[tuple[int, int, int]]] = {}
    for stream in STREAMS:
        entries = live(place_all(await metadata.entries(D, sequence_of(stream), 0, 100_000)))
        end = 0
        for placed in entries:
            check(placed.start_offset == end, f"stream {stream}: a hole or overlap at {end}")
            end = placed.end_offset
            assert isinstance(placed.entry.where, WalChunk)
            key = record_key(placed.entry.where.object_id)
            record = await metadata.get(D, key)
            check(record is not None, f"stream {stream}: an entry whose object nobody decided about")
            assert record is not None
            if decode_record(key, record.value).state is State.FENCED:
                continue
            reference = reference_key(placed.entry.where.object_id, stream)
            check(await metadata.get(D, reference) is not None, f"no reference for stream {stream}")
            body = (await objects.list(placed.entry.where.path, limit=1)) and await objects.get(
                placed.entry.where.path
            )
            check(bool(body), f"stream {stream} at {placed.start_offset}: its object is gone")
            chunk = placed.entry.where
            for number, found in enumerate(chunk.batches):
                start = chunk.batch_offset(number)
                raw = bytes(body[start : start + found.size_bytes])  # type: ignore[arg-type]
                ident = int.from_bytes(raw[-8:], "big")
                first = placed.start_offset + chunk.batch_start(number)
                at.setdefault(ident, []).append((stream, first, first + found.records))
    return at


# The rules, and what happens without each.


class AcknowledgesFenced(writer_module._Pipeline):
    """Without protocol 11: takes entries that landed for a commit."""

    async def _acknowledge(self, sent, result, began):  # type: ignore[no-untyped-def]
        whole = type(result)(result.entries, tuple(v or 1 for v in result.puts), result.deletes)
        await super()._acknowledge(sent, whole, began)


class Resends(writer_module._Pipeline):
    """Without protocol 6: sends an append again when its outcome is unknown."""

    async def _settle(self, sent, unknown):  # type: ignore[no-untyped-def]
        while True:
            with contextlib.suppress(OutcomeUnknown):
                result = await self._metadata.append(self._domain, *writer_module._operations(sent))
                whole = type(result)(result.entries, tuple(v or 1 for v in result.puts), result.deletes)
                return await self._acknowledge(sent, whole, 0)


class DecidesByReading(writer_module._Pipeline):
    """Without "nothing is decided on a read alone": no record seen is taken for no commit."""

    async def _settled(self, sealed, part, deadline):  # type: ignore[no-untyped-def]
        if await self._metadata.get(self._domain, record_key(sealed.id)) is None:
            return None
        return await super()._settled(sealed, part, deadline)


class MarksAfterwards(writer_module._Pipeline):
    """Without "marker before object" (X-08): a crash in between leaves an object that nobody looks for."""

    def _mark_ahead(self, *operations):  # type: ignore[no-untyped-def]
        return []

    async def _put_marker(self, sealed):  # type: ignore[no-untyped-def]
        await super()._put_object(sealed)

    async def _put_object(self, sealed):  # type: ignore[no-untyped-def]
        await super()._put_marker(sealed)


class CommitsInAnyOrder(writer_module._Pipeline):
    """Without the order of seals: whatever is uploaded first is committed first."""

    def _advance(self) -> None:
        self._on_way = type(self._on_way)(sorted(self._on_way, key=lambda o: o.step.value, reverse=True))
        super()._advance()


class DoesNotFence(OrphanCollector):
    """Without protocol 13: old is taken for dead."""

    async def _fenced(self, domain: int, object_id: UUID, fence: ObjectRecord) -> bool:
        return await self._metadata.get(domain, record_key(object_id)) is None


class DeletesTheCommitted(OrphanCollector):
    """Without protocol 13: takes a refused fence for a fence of its own."""

    async def _fenced(self, domain: int, object_id: UUID, fence: ObjectRecord) -> bool:
        with contextlib.suppress(VersionConflict):
            await super()._fenced(domain, object_id, fence)
        return True


class ForgetsTooMuch(OrphanCollector):
    """Forgets the fence of entries that have landed: readers wait for ever for somebody to decide."""

    async def forget_fences(self, domain: int, now_ms: int, older_than_ms: int) -> Collected:
        for found in await self._metadata.scan(domain, OBJECTS, limit=1_000):
            if b"FENCED" in found.value:
                await self._metadata.delete(domain, found.key)
        return Collected()


class AppendsSideBySide(writer_module._Pipeline):
    """Without protocol 3: does not wait for the append before."""

    def _advance(self) -> None:
        ready = [each for each in self._on_way if each.step is writer_module._Step.UPLOADED]
        if ready:
            for each in ready:
                each.step = writer_module._Step.APPENDING
            self._start(self._commit(ready))
        super()._advance()


class LosesCallers(writer_module._Pipeline):
    """Answers nobody after an append without an answer."""

    async def _settle(self, chosen, unknown):  # type: ignore[no-untyped-def]
        await asyncio.get_running_loop().create_future()


class ForgetsItsFence(OrphanCollector):
    """Leaves an object alone whose fence is there already: a collector that died is never finished."""

    async def _fenced(self, domain: int, object_id: UUID, fence: ObjectRecord) -> bool:
        from dray.wal.objects import encode_record

        try:
            await self._metadata.put(domain, record_key(object_id), encode_record(fence), Expect.ABSENT)
        except VersionConflict:
            return False
        return True


@dataclass(frozen=True)
class Rules:
    pipeline: type[writer_module._Pipeline] = writer_module._Pipeline
    collector: type[OrphanCollector] = OrphanCollector


BROKEN: dict[str, Rules] = {
    **{
        rule.__name__: Rules(pipeline=rule)
        for rule in (
            AcknowledgesFenced,
            Resends,
            DecidesByReading,
            MarksAfterwards,
            CommitsInAnyOrder,
            AppendsSideBySide,
            LosesCallers,
        )
    },
    **{
        rule.__name__: Rules(collector=rule)
        for rule in (DoesNotFence, DeletesTheCommitted, ForgetsItsFence, ForgetsTooMuch)
    },
}


@pytest.mark.parametrize("hundreds", range(3))
def test_what_callers_were_told_is_so(hundreds: int) -> None:
    told: Counter[str] = Counter()
    for seed in range(hundreds * 100, hundreds * 100 + 100):
        try:
            book = simulate(lambda seed=seed: story(seed, Rules()))  # type: ignore[misc]
        except Violation as violation:
            raise AssertionError(f"seed {seed}: {violation}") from violation
        told += Counter(committed=len(book.committed), refused=len(book.refused), unknown=len(book.unknown))
    assert min(told["committed"], told["refused"], told["unknown"]) > 100, told


@pytest.mark.parametrize("rule", BROKEN)
def test_without_a_rule_somebody_is_told_what_is_not_so(rule: str) -> None:
    def fails(seed: int) -> bool:
        try:
            simulate(lambda: story(seed, BROKEN[rule]))
        except Violation:
            return True
        return False

    assert any(fails(seed) for seed in range(300)), f"{rule} makes no difference in 300 schedules"
