"""Readers that judge what they read, beside the real writer and collector, on seeded schedules of faults.

Several readers, each on its own machine, read while brokers write, crash and are fenced far too early. What
any of them sees at an offset, at any time, is written down: all have to see the same, and in the end what
every caller was told. When the last append has landed, fences are forgotten as fast as they can be, beside
readers that crash. Taking out a part of protocol 12 makes this fail (`BROKEN`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from uuid import UUID

import pytest

from dray.errors import CorruptStore, DrayError, OutcomeUnknown, Unavailable, VersionConflict
from dray.index.changes import void
from dray.index.entry import Placed, Void, WalChunk, live, place_all, sequence_of
from dray.index.lookup import OffsetIndex
from dray.index.witness import Witness
from dray.metadata.memory import MemoryStore
from dray.objectstore.memory import MemoryObjectStore
from dray.wal.objects import State, decode_record, record_key
from dray.wal.orphans import OrphanCollector
from dray.wal.writer import WalWriter
from tests.simulation.test_wal import (
    INCARNATION,
    STREAMS,
    ZONE,
    Book,
    D,
    ForgetsTooMuch,
    Violation,
    check,
    client,
    collector,
)
from tests.simulation.world import Machine, SimulatedMetadata, SimulatedObjects, World, simulate

# What may keep a reader from an answer; it tries again.
RETRIABLE = (Unavailable, OutcomeUnknown, VersionConflict)


@dataclass
class Sights:
    """What was seen by anybody: per stream and offset the id of a batch, None where there is no record."""

    at: dict[tuple[int, int], int | None] = field(default_factory=dict)

    def note(self, stream: int, start: int, end: int, ident: int | None) -> None:
        for offset in range(start, end):
            seen = self.at.setdefault((stream, offset), ident)
            check(seen == ident, f"stream {stream} at {offset}: {seen} for one reader, {ident} for another")


class Reader:
    def __init__(self, world: World, sights: Sights, rules: Rules) -> None:
        self.machine = Machine(world)
        self._world = world
        self._sights = sights
        store = SimulatedMetadata(self.machine)
        self._index = OffsetIndex(store, lambda stream: D)
        self._witness = rules.witness(store, lambda stream: D, max_objects=8)

    async def run(self) -> None:
        chance = self._world.chance
        while True:
            await asyncio.sleep(chance.uniform(0, 1))
            stream = chance.choice(STREAMS)
            with contextlib.suppress(*RETRIABLE):
                end = (await self._index.end(stream)).end_records
                if end:
                    await self.read(stream, chance.randrange(end), chance.randrange(1, 6))

    async def read(self, stream: int, start: int, max_entries: int) -> int:
        """Where to go on."""
        entries = await self._index.range(stream, start, max_entries)
        judged = self._witness.known(entries)
        if judged is None:
            judged = await self._witness.judge(entries)
        check(ranges(judged) == ranges(entries), f"{ranges(entries)} became {ranges(judged)}")
        for placed in judged:
            await self._look(placed)
        return judged[-1].end_offset if judged else start

    async def read_all(self) -> None:
        """In calm times."""
        for stream in STREAMS:
            at, end = 0, (await self._index.end(stream, fresh=True)).end_records
            while at < end:
                at = await self.read(stream, at, 5)

    async def _look(self, placed: Placed) -> None:
        stream, chunk = placed.entry.stream_id, placed.entry.where
        if isinstance(chunk, Void):
            self._sights.note(stream, placed.start_offset, placed.end_offset, None)
            return
        assert isinstance(chunk, WalChunk)
        # What is really so, whatever this reader could know.
        key = record_key(chunk.object_id)
        record = await MemoryStore(self._world.data).get(D, key)
        counts = record is not None and decode_record(key, record.value).state is State.COMMITTED
        check(counts, f"stream {stream} at {placed.start_offset}: records of an object that is not committed")
        body = self._world.objects.objects.get(chunk.path, (b"",))[0]
        check(bool(body), f"stream {stream} at {placed.start_offset}: its object is gone")
        for number, found in enumerate(chunk.batches):
            last = chunk.batch_offset(number) + found.size_bytes
            ident = int.from_bytes(bytes(body[last - 8 : last]), "big")
            first = placed.start_offset + chunk.batch_start(number)
            self._sights.note(stream, first, first + found.records, ident)


def ranges(entries: Sequence[Placed]) -> list[tuple[int, int]]:
    return [(placed.start_offset, placed.end_offset) for placed in entries]


async def story(seed: int, rules: Rules) -> Counter[str]:
    world, book, sights = World(seed), Book(), Sights()
    chance = world.chance
    writers: list[tuple[Machine, WalWriter]] = []
    readers = [Reader(world, sights, rules) for _ in range(3)]

    def start_broker() -> tuple[Machine, WalWriter]:
        machine = Machine(world)
        made = WalWriter(
            SimulatedMetadata(machine),
            SimulatedObjects(machine),
            zone=ZONE,
            incarnation=INCARNATION,
            target_bytes=400,
            max_buffer_bytes=2_000,
            wall_clock_ms=world.now_ms,
            new_id=lambda: UUID(int=chance.getrandbits(128)),
        )
        writers.append((machine, made))
        return writers[-1]

    async def crashes() -> None:
        await asyncio.sleep(chance.uniform(0, 8))
        brokers[0][0].crashed = True
        brokers[0] = start_broker()

    brokers = [start_broker(), start_broker()]
    reading = [asyncio.create_task(reader.run()) for reader in readers]
    collecting = [asyncio.create_task(collector(world, rules.collector)) for _ in range(2)]
    crashing = asyncio.create_task(crashes())
    await asyncio.gather(*(client(world, brokers, book) for _ in range(3)))
    await stopped(reading)  # some of what is fenced is left for later
    await world.calm()
    await crashing
    for machine, made in writers:
        if not machine.crashed:
            await made.close()
    await stopped(collecting)
    await world.calm()

    # Every append has landed, so fences may go, beside readers in trouble: one after the other, so that what
    # one has begun is seldom finished by another at once.
    landed = await fenced_entries(world)
    world.trouble = 0.3
    forgetting = [asyncio.create_task(forget(world, rules.collector)) for _ in range(2)]
    for _ in range(3):
        readers.append(Reader(world, sights, rules))
        reading.append(asyncio.create_task(readers[-1].run()))
        await asyncio.sleep(chance.uniform(1, 12))
        readers[-1].machine.crashed = True
    await stopped(reading)
    await world.calm()

    # Those that know what was, and one that knows nothing, read everything.
    for reader in (*readers, Reader(world, sights, rules)):
        if not reader.machine.crashed:
            await reader.read_all()
    await stopped(forgetting)
    await rules.collector(MemoryStore(world.data), MemoryObjectStore(world.objects)).forget_fences(
        D, world.now_ms(), 0
    )
    await Reader(world, sights, rules).read_all()
    for ident, (stream, done) in book.committed.items():
        seen = [sights.at.get((stream, offset)) for offset in range(done.start_offset, done.end_offset)]
        check(set(seen) == {ident}, f"{ident} was acknowledged at {done}, and readers see {seen}")
    shown = set(sights.at.values())
    check(not shown & book.refused, f"{shown & book.refused} were refused for certain, and are there")
    check(not await fenced_entries(world), "a fenced entry was read and has no mark")
    return Counter(committed=len(book.committed), fenced=landed, void=await marks(world))


async def forget(world: World, how: type[OrphanCollector]) -> None:
    machine = Machine(world)
    collect = how(SimulatedMetadata(machine), SimulatedObjects(machine))
    while True:
        await asyncio.sleep(world.chance.uniform(0, 0.5))
        with contextlib.suppress(DrayError):
            await collect.forget_fences(D, world.now_ms(), 0)


async def stopped(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if not isinstance(outcome, asyncio.CancelledError) and outcome is not None:
            raise outcome


async def stored(world: World) -> list[Placed]:
    store = MemoryStore(world.data)
    return [
        placed
        for stream in STREAMS
        for placed in live(place_all(await store.entries(D, sequence_of(stream), 0, 100_000)))
    ]


async def fenced_entries(world: World) -> int:
    """How many have no mark."""
    count = 0
    for placed in await stored(world):
        if isinstance(placed.entry.where, WalChunk):
            key = record_key(placed.entry.where.object_id)
            record = await MemoryStore(world.data).get(D, key)
            count += record is None or decode_record(key, record.value).state is State.FENCED
    return count


async def marks(world: World) -> int:
    return sum(isinstance(placed.entry.where, Void) for placed in await stored(world))


# Protocol 12, and what happens without each part of it.


class CountsEverything(Witness):
    """Takes what has landed for committed."""

    async def judge(self, entries: Sequence[Placed]) -> list[Placed]:
        return list(entries)


class TakesAbsentForCommitted(Witness):
    async def _read_record(self, domain: int, object_id: UUID) -> State | None:
        return await super()._read_record(domain, object_id) or State.COMMITTED


class TakesAbsentForVoid(Witness):
    async def _judge(self, placed: Placed) -> Placed:
        chunk = placed.entry.where
        if isinstance(chunk, WalChunk) and await self._read_record(D, chunk.object_id) is None:
            return marked_in_thought(placed)
        return await super()._judge(placed)


class VoidBeforeTheMark(Witness):
    """Takes FENCED for the verdict, and its part of the fence away."""

    async def _mark(self, domain: int, placed: Placed) -> Placed:
        return marked_in_thought(placed)


class DeletesTheReferenceFirst(Witness):
    async def _mark(self, domain: int, placed: Placed) -> Placed:
        await self._delete_reference(domain, marked_in_thought(placed))
        return await super()._mark(domain, placed)


class BelievesInItsMark(Witness):
    """Takes a mark whose outcome is unknown for one that is in place."""

    async def _mark(self, domain: int, placed: Placed) -> Placed:
        try:
            return await super()._mark(domain, placed)
        except OutcomeUnknown:
            return marked_in_thought(placed)


def marked_in_thought(placed: Placed) -> Placed:
    return Placed(void(placed).new, placed.end_offset, placed.end_bytes, placed.version)


@dataclass(frozen=True)
class Rules:
    witness: type[Witness] = Witness
    collector: type[OrphanCollector] = OrphanCollector


BROKEN: dict[str, Rules] = {
    **{
        rule.__name__: Rules(witness=rule)
        for rule in (
            CountsEverything,
            TakesAbsentForCommitted,
            TakesAbsentForVoid,
            VoidBeforeTheMark,
            DeletesTheReferenceFirst,
            BelievesInItsMark,
        )
    },
    "ForgetsTooMuch": Rules(collector=ForgetsTooMuch),
}


@pytest.mark.parametrize("part", range(2))
def test_all_readers_see_the_same_and_what_callers_were_told(part: int) -> None:
    told: Counter[str] = Counter()
    for seed in range(part * 50, part * 50 + 50):
        try:
            told += simulate(lambda seed=seed: story(seed, Rules()))  # type: ignore[misc]
        except (Violation, CorruptStore) as violation:
            raise AssertionError(f"seed {seed}: {violation}") from violation
    assert min(told["committed"], told["void"], told["fenced"]) > 20, told


@pytest.mark.parametrize("rule", BROKEN)
def test_without_a_rule_readers_see_what_is_not_so(rule: str) -> None:
    def fails(seed: int) -> bool:
        try:
            simulate(lambda: story(seed, BROKEN[rule]))
        except (Violation, CorruptStore):
            return True
        return False

    assert any(fails(seed) for seed in range(400)), f"{rule} makes no difference in 400 schedules"
