"""Idempotent producers on three brokers whose appends are held in the network, land late, and lose their
answers; brokers crash between an append and its resolution, and producers go on elsewhere.

What landed is judged by the oracle of the simulation (`tests.simulation.producers`), which shares no code
with the fold. What was acknowledged is there once, in order, where it was said to be; what any broker serves,
at any time, is what the oracle says; what it acknowledged it serves at once; its high watermark never goes
back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import pytest
from aiokafka.record.default_records import DefaultRecordBatchBuilder  # type: ignore[import-untyped]  # has no stubs
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from dray.errors import (
    CommitUnknown,
    MetadataError,
    NotCommitted,
    OutcomeUnknown,
    OutOfOrderSequence,
    UnknownProducer,
)
from dray.index.entry import Kind, Producer, decode, place
from dray.index.fold import EXPIRATION_MS
from dray.log.read import Want
from dray.metadata.store import AppendResult, Delete, NewEntry, Position, Put
from dray.wal.writer import Committed
from tests.batches import end_of
from tests.index_entries import INCARNATION
from tests.log_node import CONFIGS, DOMAIN, HeldObjects, HeldStore, Node, records_of, settle
from tests.simulation.producers import ProducerWorld, check_stored, truth
from tests.simulation.world import VirtualTime

T = TypeVar("T")

STREAMS = (0x51, 0x52)
BROKERS = 3
PRODUCERS = 3
MANY = 2**31 - 1
MAX_IN_FLIGHT = 5


class World(ProducerWorld):
    domain = DOMAIN
    incarnation = INCARNATION
    streams = STREAMS


@dataclass(eq=False)
class Held:
    """An append in the network."""

    store: NetworkStore
    operations: tuple[Sequence[NewEntry], Sequence[Put], Sequence[Delete]]
    answer: asyncio.Future[AppendResult]


class NetworkStore(HeldStore):
    """One broker's client. Its next appends can be held; when it has crashed, nothing comes back."""

    def __init__(self, world: World, held: list[Held]) -> None:
        super().__init__(world.data, conditions_abort=world.strong)
        self._world = world
        self._held = held
        self.holds = False
        self.has_crashed = False

    async def append(
        self,
        domain: int,
        entries: Sequence[NewEntry],
        puts: Sequence[Put] = (),
        deletes: Sequence[Delete] = (),
    ) -> AppendResult:
        await self._alive()
        if self.holds and entries:
            one = Held(self, (entries, puts, deletes), asyncio.get_running_loop().create_future())
            self._held.append(one)
            result = await one.answer
        else:
            result = await self.land((entries, puts, deletes))
        await self._alive()
        return result

    async def land(
        self, operations: tuple[Sequence[NewEntry], Sequence[Put], Sequence[Delete]]
    ) -> AppendResult:
        entries, puts, deletes = operations
        result = await super().append(DOMAIN, entries, puts, deletes)
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
        await self._alive()
        before = await self.ceiling(domain, sequence, at.end_records)
        result = await super().swap(domain, sequence, at, version, value, deletes)
        assert before is not None
        self._world.was_swapped(place(before), decode(value))
        return result

    async def _now(self, what: str) -> None:
        await self._alive()
        await super()._now(what)

    async def barrier(self, domain: int) -> None:
        await self._alive()
        await super().barrier(domain)

    async def _alive(self) -> None:
        if self.has_crashed:
            await asyncio.get_running_loop().create_future()


@dataclass(eq=False)
class Sent:
    """A batch of a producer, and what is under way for it."""

    producer: Producer
    values: list[bytes]
    answers: list[tuple[int, asyncio.Future[Committed]]] = field(default_factory=list)  # with who was asked
    at: int | None = None  # where it was acknowledged


@dataclass(eq=False)
class Client:
    id: int
    stream: int
    broker: int = 0
    epoch: int = 0
    sent: list[Sent] = field(default_factory=list)  # of this epoch
    over: list[Sent] = field(default_factory=list)  # of earlier ones

    @property
    def open(self) -> list[Sent]:
        return [one for one in self.sent if one.at is None]

    @property
    def next_sequence(self) -> int:
        return sum(len(one.values) for one in self.sent)

    @property
    def last_acknowledged(self) -> int:
        done = [one for one in self.sent if one.at is not None]
        return done[-1].producer.base_sequence + len(done[-1].values) - 1 if done else -1


class Machine(RuleBasedStateMachine):
    strong = False

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner(loop_factory=VirtualTime)
        self.world = World(0, strong=self.strong, expiration_ms=EXPIRATION_MS)
        self.held: list[Held] = []
        self.clients = [Client(1_000 + n, STREAMS[n // 2]) for n in range(PRODUCERS)]
        self.seen: dict[tuple[int, int], bytes | None] = {}
        self.told: dict[tuple[int, int], int] = {}  # by broker and stream
        self.nodes = [self.call(self.start()) for _ in range(BROKERS)]

    def call(self, work: Awaitable[T]) -> T:
        async def run() -> T:
            return await work

        return self.runner.run(run())

    async def start(self) -> Node:
        node = Node(
            NetworkStore(self.world, self.held),
            HeldObjects(self.world.objects),
            index_bytes=8_000,
            target_bytes=300,
            now_ms=self.world.now_ms,
        )
        node.index.folds._snapshot_entries = 4
        await node.start()
        return node

    def teardown(self) -> None:
        try:
            self.reckon()
        finally:
            self.runner.close()

    # --- producers

    @rule(
        which=st.integers(0, PRODUCERS - 1),
        who=st.integers(0, BROKERS - 1),
        sizes=st.lists(st.integers(1, 3), min_size=1, max_size=5),
        holds=st.booleans(),
    )
    def write(self, which: int, who: int, sizes: list[int], holds: bool) -> None:
        client = self.clients[which]
        if not client.open:
            client.broker = who
        self.store(client.broker).holds = holds
        for size in sizes:
            if len(client.open) < MAX_IN_FLIGHT:
                first = client.next_sequence
                values = [b"%d.%d.%d" % (client.id, client.epoch, first + n) for n in range(size)]
                one = Sent(Producer(client.id, client.epoch, first), values)
                client.sent.append(one)
                self.call(self.send(client, one))
        self.go_on()

    @precondition(lambda self: any(client.open for client in self.clients))
    @rule(data=st.data(), who=st.integers(0, BROKERS - 1), holds=st.booleans())
    def write_again(self, data: st.DataObject, who: int, holds: bool) -> None:
        """What is not acknowledged, in order, at any broker, whatever is still under way elsewhere."""
        client = data.draw(st.sampled_from([client for client in self.clients if client.open]))
        client.broker = who
        self.store(who).holds = holds
        for one in client.open:
            one.answers.clear()
            self.call(self.send(client, one))
        self.go_on()

    @rule(which=st.integers(0, PRODUCERS - 1))
    def begin_an_epoch(self, which: int) -> None:
        client = self.clients[which]
        if client.sent and not client.open:
            client.epoch += 1
            client.over += client.sent
            client.sent = []

    async def send(self, client: Client, one: Sent) -> None:
        builder = DefaultRecordBatchBuilder(2, 0, 0, *one.producer, 2**20)
        for delta, value in enumerate(one.values):
            assert builder.append(delta, 1, None, value, []) is not None
        node = self.nodes[client.broker]
        try:
            answer = node.appender.append(client.stream, CONFIGS, bytes(builder.build())).committed
        except NotCommitted:
            return
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        one.answers.append((client.broker, answer))

    def go_on(self) -> None:
        """Let everything happen that can without more time, and hear what became of it."""
        self.call(settle())
        for client in self.clients:
            for one in client.open:
                for who, answer in list(one.answers):
                    if answer.done() and one.at is None:
                        one.answers.remove((who, answer))
                        self.hear(client, one, who, answer)
        assert not self.world.violations, self.world.violations

    def hear(self, client: Client, one: Sent, who: int, answer: asyncio.Future[Committed]) -> None:
        error = answer.exception()
        if error is None:
            where = answer.result()
            assert where.end_offset - where.start_offset == len(one.values)
            one.at = where.start_offset
            end = self.read(who, client.stream)
            assert end >= where.end_offset, "what was acknowledged here cannot be read here"
            for offset, value in enumerate(one.values, one.at):
                assert self.seen[client.stream, offset] == value
        elif isinstance(error, OutOfOrderSequence | UnknownProducer):
            assert one.producer.base_sequence != client.last_acknowledged + 1, "the next one was refused"
        else:
            assert isinstance(error, NotCommitted | CommitUnknown), repr(error)

    # --- the network

    @precondition(lambda self: self.held)
    @rule(data=st.data(), is_heard=st.booleans())
    def land(self, data: st.DataObject, is_heard: bool) -> None:
        held = data.draw(st.sampled_from(self.held))
        self.held.remove(held)
        self.call(self.landed(held, is_heard))
        self.go_on()

    async def landed(self, held: Held, is_heard: bool) -> None:
        try:
            result = await held.store.land(held.operations)
        except MetadataError as error:
            if is_heard and not held.answer.done():
                held.answer.set_exception(error)
        else:
            if is_heard and not held.answer.done():
                held.answer.set_result(result)
        if not held.answer.done():
            held.answer.set_exception(OutcomeUnknown("its answer was lost"))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        """The caller hears nothing; the append is still under way."""
        held = data.draw(st.sampled_from(self.held))
        if not held.answer.done():
            held.answer.set_exception(OutcomeUnknown("no answer"))
        self.go_on()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.held))
        self.held.remove(held)
        if not held.answer.done():
            held.answer.set_exception(OutcomeUnknown("lost on the way"))
        self.go_on()

    @rule(who=st.integers(0, BROKERS - 1), how=st.sampled_from(["late", "stale", "caught up"]))
    def delay(self, who: int, how: str) -> None:
        store = self.store(who)
        store.watch_gate.open()
        if how == "late":
            store.watch_gate.close()
        elif how == "stale" and not self.strong:
            store.fall_behind()

    @rule(who=st.integers(0, BROKERS - 1))
    def crash(self, who: int) -> None:
        """Its appends may still land. Another one takes its place, with nothing in memory."""
        self.store(who).has_crashed = True
        for client in self.clients:
            for one in client.open:
                one.answers = [answer for answer in one.answers if answer[0] != who]
        for stream in STREAMS:
            self.told.pop((who, stream), None)
        self.nodes[who] = self.call(self.start())

    @rule(seconds=st.sampled_from([0.2, 3.0, 20.0]))
    def wait(self, seconds: float) -> None:
        self.call(asyncio.sleep(seconds))
        self.go_on()

    def store(self, who: int) -> NetworkStore:
        store = self.nodes[who].store
        assert isinstance(store, NetworkStore)
        return store

    # --- readers

    @rule(who=st.integers(0, BROKERS - 1), stream=st.sampled_from(STREAMS))
    def fetch(self, who: int, stream: int) -> None:
        self.read(who, stream)

    def read(self, who: int, stream: int) -> int:
        """All of a stream, as a client decodes it; its high watermark."""
        node, at, end = self.nodes[who], 0, 1
        while at < end:
            want = Want(stream, at, MANY)
            done = self.call(node.reader.fetch([want], min_bytes=0, max_bytes=MANY, max_wait_s=0.0))
            (got,) = done.partitions
            assert got.error is None, got.error
            end = got.high_watermark
            assert end >= self.told.get((who, stream), 0), "the high watermark went back"
            self.told[who, stream] = end
            records = dict(records_of(got))
            assert got.records is not None
            data = b"".join(got.records.buffers)
            done.release()
            if not data:
                assert at >= end, f"stream {stream}: nothing at {at}, and {end} is the end"
                break
            reached = end_of(data)
            for offset in range(at, reached):
                value = records.get(offset)
                assert self.seen.setdefault((stream, offset), value) == value
            at = reached
        return end

    # --- the reckoning

    def reckon(self) -> None:
        """When everything has landed, all get through, and what was told and seen is so."""
        for who in range(BROKERS):
            self.store(who).holds = False
            self.store(who).watch_gate.open()
        for held in self.held:
            self.call(self.landed(held, True))
        self.held.clear()
        self.call(asyncio.sleep(60))
        self.go_on()
        for _ in range(20):
            for client in self.clients:
                client.broker = (client.broker + 1) % BROKERS
                for one in client.open:
                    one.answers.clear()
                    self.call(self.send(client, one))
            self.call(asyncio.sleep(5))
            self.go_on()
        assert not any(client.open for client in self.clients), "a producer does not get through"
        streams = truth(self.world)
        self.nodes.append(self.call(self.start()))
        for who in range(len(self.nodes)):
            for stream, entries in streams.items():
                end = entries[-1][1] if entries else 0
                for _ in range(10):
                    if self.read(who, stream) == end:
                        break
                    self.call(asyncio.sleep(3))
                assert self.read(who, stream) == end, "a reader never gets to the end"
        check_stored(self.world, streams)
        found: dict[Producer, list[int]] = {}
        real: dict[tuple[int, int], bytes | None] = {}
        for stream, entries in streams.items():
            for start, end, facts in entries:
                real.update(((stream, offset), None) for offset in range(start, end))
                for fact in facts or ():
                    if fact.kind is Kind.OK and fact.producer is not None:
                        found.setdefault(fact.producer, []).append(fact.start)
                        who_wrote, epoch, first = fact.producer
                        for offset in range(fact.start, fact.end):
                            real[stream, offset] = b"%d.%d.%d" % (
                                who_wrote,
                                epoch,
                                first + offset - fact.start,
                            )
        assert self.seen == real
        for client in self.clients:
            batches = [*client.over, *client.sent]
            assert [found.get(one.producer) for one in batches] == [[one.at] for one in batches]
            assert [one.at for one in batches] == sorted(one.at or 0 for one in batches)
        for node in self.nodes:
            self.call(node.index.close())
            self.call(node.stop())


@pytest.mark.parametrize("strong", [False, True], ids=["each-alone", "whole"])
def test_every_batch_is_there_once_and_where_it_was_said_to_be(strong: bool) -> None:
    run_state_machine_as_test(
        type("MachineOn", (Machine,), {"strong": strong}),
        settings=settings(
            max_examples=120,
            stateful_step_count=40,
            deadline=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
