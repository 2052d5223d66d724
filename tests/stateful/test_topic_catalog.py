"""Brokers that create, grow, alter and delete the same topics at once, in every order of their calls.

Hypothesis chooses who makes the next call and how it ends: well, with a lost answer, late, or with the death
of the broker. After every write the store is looked at: no topic is half visible, streams are only added,
no stream is in two topics, and what was hidden never comes back. Configs keep all that was set before, and no
change is made twice. At the end a new broker brings all to rest.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TypeAlias
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dray.altering import Change, change_some
from dray.altering import Operation as ConfigOperation
from dray.errors import InvalidPartitions, OutcomeUnknown, TopicExists, Unavailable, UnknownTopic
from dray.metadata.memory import MemoryData, MemoryStore
from dray.topics.catalog import TopicCatalog
from dray.topics.record import TopicRecord
from tests.topic_store import DiedError, Fault, FaultyStore, broker, catalog, check_sound, stored

NAMES = ["a", "b"]
# Two configs that change together: one that is overwritten, and one that keeps all.
LAST = "retention.ms"
ALL = "leader.replication.throttled.replicas"
# Few enough that brokers hit upon each other's.
STREAM_IDS = st.integers(min_value=1, max_value=40)
# Most calls end well, or nothing would ever be finished under way.
ENDS = st.one_of(st.none(), st.none(), st.none(), st.sampled_from(list(Fault)))


@dataclass
class History:
    """What was visible after each write."""

    data: MemoryData
    streams: dict[UUID, tuple[int, ...]] = field(default_factory=dict)  # all that were ever visible
    names: dict[UUID, str] = field(default_factory=dict)
    hidden: set[UUID] = field(default_factory=set)  # visible once, but no longer
    marks: dict[UUID, list[str]] = field(default_factory=dict)  # of alterations, in their order

    def look(self) -> None:
        check_sound(self.data)
        visible = {record.topic_id: record for record in stored(self.data) if record.visible}
        for topic_id, record in visible.items():
            assert topic_id not in self.hidden, "a deleted topic came back"
            before = self.streams.get(topic_id, ())
            assert record.streams[: len(before)] == before, "a partition changed its stream"
            self.streams[topic_id] = record.streams
            self.names[topic_id] = record.name
            self._look_at_configs(record)
        self.hidden |= self.streams.keys() - visible.keys()

    def _look_at_configs(self, record: TopicRecord) -> None:
        marks = self.marks.setdefault(record.topic_id, [])
        last = record.configs.get(LAST)
        if last is not None and marks[-1:] != [last]:
            assert last not in marks, "a change was made twice"
            marks.append(last)
        listed = record.configs.get(ALL, "")
        assert listed == ",".join(f"{mark}:0" for mark in marks), "a change was lost"


@dataclass(frozen=True)
class Create:
    name: str
    partitions: int

    async def on(self, topics: TopicCatalog) -> UUID | None:
        return (await topics.create(self.name, self.partitions, {})).topic_id


@dataclass(frozen=True)
class Grow:
    name: str
    total: int

    async def on(self, topics: TopicCatalog) -> UUID | None:
        topic = await topics.grow(self.name, self.total)
        assert len(topic.streams) >= self.total
        return None


@dataclass(frozen=True)
class Delete:
    name: str

    async def on(self, topics: TopicCatalog) -> UUID | None:
        await topics.delete(self.name)
        return None


@dataclass(frozen=True)
class Alter:
    name: str
    mark: str = ""  # given when it is run: each differs from all others

    async def on(self, topics: TopicCatalog) -> UUID | None:
        changes = [
            Change(LAST, ConfigOperation.SET, self.mark),
            Change(ALL, ConfigOperation.APPEND, f"{self.mark}:0"),
        ]
        await topics.alter_configs(self.name, change_some(changes, {ALL: ""}))
        return None


Operation: TypeAlias = Create | Grow | Delete | Alter
OPERATIONS: st.SearchStrategy[Operation] = st.one_of(
    st.builds(Create, st.sampled_from(NAMES), st.integers(1, 4)),
    st.builds(Grow, st.sampled_from(NAMES), st.integers(2, 6)),
    st.builds(Delete, st.sampled_from(NAMES)),
    st.builds(Alter, st.sampled_from(NAMES)),
    st.builds(Alter, st.sampled_from(NAMES)),
)
# Among all others, two alterations of one topic meet too seldom.
ALTERATIONS: st.SearchStrategy[Operation] = st.builds(Alter, st.just("a"))


class Brokers:
    """Runs operations, each on a broker of its own, one call to the store at a time."""

    def __init__(self, data: st.DataObject, aborts: bool) -> None:
        self.draw = data.draw
        self.data = MemoryData()
        self.aborts = aborts
        self.history = History(self.data)
        self.created: list[UUID] = []
        self._stores: list[FaultyStore] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._gates: dict[int, asyncio.Event] = {}  # of the brokers that are about to make a call
        self._arrived = asyncio.Event()  # one more of them, or one that is through

    def add(self, operation: Operation) -> None:
        number = len(self._stores)
        if isinstance(operation, Alter):
            operation = replace(operation, mark=str(number + 1))

        async def before(_: int) -> Fault | None:
            gate = self._gates[number] = asyncio.Event()
            self._arrived.set()
            await gate.wait()
            return self.draw(ENDS, label=f"broker {number}")

        look = self.history.look
        store = FaultyStore(self.data, conditions_abort=self.aborts, before=before, after=look)
        self._stores.append(store)
        topics = catalog(store, new_stream_id=lambda: self.draw(STREAM_IDS, label="stream id"))
        task = asyncio.create_task(self._run(operation, topics))
        task.add_done_callback(self._is_through)
        self._tasks.append(task)

    def _is_through(self, task: asyncio.Task[None]) -> None:
        # `go` raises what it ended in, unless Hypothesis gives the example up first: then nobody asks.
        if not task.cancelled():
            task.exception()
        self._arrived.set()

    async def _run(self, operation: Operation, topics: TopicCatalog) -> None:
        with suppress(DiedError, OutcomeUnknown, Unavailable, TopicExists, UnknownTopic, InvalidPartitions):
            created = await operation.on(topics)
            if isinstance(operation, Alter):
                made = sum(operation.mark in marks for marks in self.history.marks.values())
                assert made == 1, "acknowledged but never made"
            if created is not None:
                assert created in self.history.streams, "acknowledged but never visible"
                self.created.append(created)

    async def go(self) -> None:
        while True:
            while sum(not task.done() for task in self._tasks) > len(self._gates):
                self._arrived.clear()
                await self._arrived.wait()
            if not self._gates:
                break
            late = [-1 - i for i, store in enumerate(self._stores) if store.late]
            chosen = self.draw(st.sampled_from([*self._gates, *late]), label="next")
            if chosen < 0:
                await self._stores[-1 - chosen].land()
            else:
                self._gates.pop(chosen).set()
        for task in self._tasks:
            task.result()
        for store in self._stores:
            await store.land()


async def run(data: st.DataObject, aborts: bool, choice: st.SearchStrategy[Operation]) -> None:
    brokers = Brokers(data, aborts)
    plain = MemoryStore(brokers.data, conditions_abort=aborts)
    there = st.sets(st.sampled_from(NAMES)) if choice is OPERATIONS else st.just({"a"})
    for name in data.draw(there, label="there before"):
        await catalog(plain).create(name, 2, {})
        brokers.history.look()
    for operation in data.draw(st.lists(choice, min_size=2, max_size=4), label="operations"):
        brokers.add(operation)
    await brokers.go()
    assert len(brokers.created) == len(set(brokers.created))
    async with broker(plain) as last:
        await last.sweep()
        brokers.history.look()
        assert all(record.at_rest for record in stored(brokers.data))
        for record in stored(brokers.data):
            await last.delete(record.name)
            brokers.history.look()
        for name in NAMES:
            await last.create(name, 1, {})
            brokers.history.look()


@pytest.mark.parametrize("aborts", [True, False], ids=["aborting", "each-alone"])
@pytest.mark.parametrize("choice", [OPERATIONS, ALTERATIONS], ids=["all", "altering"])
def test_topics_stay_sound_whoever_comes_first_and_whatever_fails(
    aborts: bool, choice: st.SearchStrategy[Operation]
) -> None:
    @settings(max_examples=300, deadline=None, print_blob=True, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def check(data: st.DataObject) -> None:
        asyncio.run(run(data, aborts, choice))

    check()
