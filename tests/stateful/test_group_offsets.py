"""Two brokers that commit offsets of one group at once, in every order of their calls.

Hypothesis chooses who makes the next call, how it ends (well, with a lost answer, late), when the group goes
on to its next generation, and how much of that each broker has heard. After every write the store is looked
at: a commit of an old generation never replaces one of a newer generation, nor a member's one that was made
without members after it left; what was replaced never comes back; what was acknowledged was made; commits of
one broker are made in their order; and what expires is what was seen to be old.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dray.errors import GroupError, IllegalGeneration, OutcomeUnknown, Unavailable, UnknownMember
from dray.groups.offsets import Committed, Key, OffsetStore, decode, offset_key
from dray.metadata.keys import domain_of
from dray.metadata.memory import MemoryData, MemoryStore
from dray.metadata.store import Record
from tests.topic_store import DOMAINS, Fault, FaultyStore

GROUP = "g"
KEYS: list[Key] = [("t", 0), ("t", 1)]
# Most writes end well, or nothing would ever be committed.
ENDS = st.sampled_from([*[None] * 8, Fault.NOT_SENT, Fault.LOST, Fault.DONE, Fault.LATE])
MAX_AT_ONCE = 3
# Passes of the event loop until all wait for a call to be let through: far more than any step takes.
SETTLING = 40


class State(NamedTuple):
    """The group at one moment. With every change of its members comes a new generation."""

    incarnation: int
    generation: int
    is_empty: bool


@dataclass
class Commit:
    number: int
    broker: int
    state: State | None  # in which it is a member; None: it commits without being one
    keys: list[Key]
    rank: tuple[int, int, bool] = (-1, -1, False)  # by the group that it was last checked with
    made_at: tuple[int, int, bool] = (-1, -1, False)  # what that was when it was made

    def offsets(self) -> dict[Key, Committed]:
        committed = Committed(
            topic_id=UUID(int=1),
            offset=self.number,
            leader_epoch=0,
            metadata="",
            committed_at_ms=0,
        )
        return dict.fromkeys(self.keys, committed)


@dataclass
class History:
    """What each key has held."""

    data: MemoryData
    commits: list[Commit] = field(default_factory=list)
    held: dict[Key, list[Commit | None]] = field(default_factory=lambda: {key: [None] for key in KEYS})
    may_go: set[tuple[Key, int]] = field(default_factory=set)  # keys and commits that may be deleted

    def look(self) -> None:
        for key in KEYS:
            record = self.record(key)
            now = None if record is None else self.commits[decode(record.key, record.value).committed.offset]
            held = self.held[key]
            if now is held[-1]:
                continue
            if now is None:
                assert held[-1] is not None
                assert (key, held[-1].number) in self.may_go, "something new was taken for old"
            else:
                self._look_at_next(held, now)
            held.append(now)

    def _look_at_next(self, held: list[Commit | None], now: Commit) -> None:
        before = held[-1]
        now.made_at = now.rank
        assert before is None or now.made_at >= before.made_at, "an old commit replaced a newer one"
        since_deleted = held[len(held) - held[::-1].index(None) :]
        assert now not in since_deleted, "a commit was made twice"
        if None not in held[1:]:
            earlier = [each.number for each in held if each is not None and each.broker == now.broker]
            assert all(number < now.number for number in earlier), "overtaken on one broker"

    def record(self, key: Key) -> Record | None:
        return self.data.domain(domain_of(GROUP, DOMAINS)).records.get(offset_key(GROUP, *key))

    def was_made(self, commit: Commit) -> bool:
        return all(commit in self.held[key] for key in commit.keys)


class WritesFail(FaultyStore):
    """Reads come through, in their turn: one that fails ends a commit, and no more."""

    def __init__(self, brokers: Brokers, aborts: bool) -> None:
        look = brokers.history.look
        super().__init__(brokers.data, conditions_abort=aborts, before=brokers.ends, after=look)
        self.turn = brokers.turn

    async def _read(self) -> None:
        await self.turn()


class Brokers:
    def __init__(self, data: st.DataObject, aborts: bool) -> None:
        self.draw = data.draw
        self.data = MemoryData()
        self.history = History(self.data)
        self.states = [State(0, 0, is_empty=True)]
        self.views = [0, 0]  # how much of `states` each broker has heard
        self._calls = 0
        self._gates: dict[int, asyncio.Event] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self.is_calm = False
        self.stores = [WritesFail(self, aborts) for _ in self.views]
        self.offsets = [OffsetStore(store, DOMAINS) for store in self.stores]

    async def turn(self) -> None:
        if self.is_calm:
            return
        self._calls += 1
        gate = self._gates[self._calls] = asyncio.Event()
        await gate.wait()

    async def ends(self, _: int) -> Fault | None:
        await self.turn()
        return None if self.is_calm else self.draw(ENDS, label="ends")

    async def check(self, commit: Commit, fresh: bool) -> int:
        if fresh:
            await self.turn()
        if fresh or self.draw(st.booleans(), label="has heard"):
            self.views[commit.broker] = len(self.states) - 1
        state = self.states[self.views[commit.broker]]
        if commit.state is None and not state.is_empty:
            raise UnknownMember("there are members")
        if commit.state is not None and state != commit.state:
            raise IllegalGeneration("the group went on")
        commit.rank = (state.incarnation, state.generation, commit.state is None)
        return state.generation

    async def _commit(self, commit: Commit) -> None:
        with suppress(GroupError, OutcomeUnknown, Unavailable):
            await self.offsets[commit.broker].commit(
                GROUP, commit.offsets(), lambda fresh: self.check(commit, fresh)
            )
            assert self.history.was_made(commit), "acknowledged but never made"

    async def _delete(self, broker: int, keys: Iterable[Key]) -> None:
        with suppress(OutcomeUnknown, Unavailable):
            await self.offsets[broker].delete(GROUP, list(keys))

    async def _expire(self, broker: int) -> None:
        with suppress(OutcomeUnknown, Unavailable):
            found = await self.offsets[broker].fetch(GROUP)
            self.history.may_go |= {(at, each.value.offset) for at, each in found.items()}
            await self.offsets[broker].delete_at(GROUP, {at: each.version for at, each in found.items()})

    def start(self, what: str) -> None:
        broker = self.draw(st.sampled_from([0, 1]), label="broker")
        if what == "delete":
            self.history.may_go |= {(key, number) for key in KEYS for number in range(100)}
            self._run(self._delete(broker, KEYS))
        elif what == "expire":
            self._run(self._expire(broker))
        else:
            # Mostly those that the broker would let in.
            states = [*self.states[-3:], *[self.states[self.views[broker]]] * 4]
            state = self.draw(st.sampled_from(states), label="state")
            keys = self.draw(st.lists(st.sampled_from(KEYS), min_size=1, unique=True), label="keys")
            commit = Commit(len(self.history.commits), broker, None if state.is_empty else state, keys)
            self.history.commits.append(commit)
            self._run(self._commit(commit))

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        # `go` raises what it ended in, unless Hypothesis gives the example up first: then nobody asks.
        task.add_done_callback(lambda done: None if done.cancelled() else done.exception())
        self._tasks.append(task)

    def change_group(self) -> None:
        now = self.states[-1]
        changes = [State(now.incarnation, now.generation + 1, is_empty=False)]
        if not now.is_empty:
            changes.append(now._replace(is_empty=True))
        elif now.generation:
            changes.append(State(now.incarnation + 1, 0, is_empty=True))
        chosen = self.draw(st.sampled_from(changes), label="group")
        if chosen.incarnation != now.incarnation:
            domain = self.data.domain(domain_of(GROUP, DOMAINS))
            for key in KEYS:
                domain.delete(offset_key(GROUP, *key))
                self.history.may_go |= {(key, commit.number) for commit in self.history.commits}
            self.history.look()
        self.states.append(chosen)

    async def go(self, operations: list[str]) -> None:
        while True:
            for _ in range(SETTLING):
                await asyncio.sleep(0)
            running = [task for task in self._tasks if not task.done()]
            choices: list[int | str] = [*self._gates]
            assert choices or not running, "they wait for each other"
            if operations and len(running) < MAX_AT_ONCE:
                choices += ["start"] * 3
            if not choices:
                break
            choices += ["group", *(f"land{i}" for i, store in enumerate(self.stores) if store.late)]
            match self.draw(st.sampled_from(choices), label="next"):
                case "start":
                    self.start(operations.pop())
                case "group":
                    self.change_group()
                case str(land):
                    await self.stores[int(land[-1])].land()
                case int(call):
                    self._gates.pop(call).set()
        for task in self._tasks:
            task.result()
        for store in self.stores:
            await store.land()


async def run(data: st.DataObject, aborts: bool, choice: list[str]) -> None:
    brokers = Brokers(data, aborts)
    await brokers.go(data.draw(st.lists(st.sampled_from(choice), min_size=2, max_size=8), label="operations"))
    await check_all_goes_on(brokers, aborts)


async def check_all_goes_on(brokers: Brokers, aborts: bool) -> None:
    """Whatever was left behind: whoever may commit now does, through either broker."""
    brokers.is_calm = True
    plain = OffsetStore(MemoryStore(brokers.data, conditions_abort=aborts), DOMAINS)
    for broker, offsets in enumerate(brokers.offsets):
        commit = Commit(len(brokers.history.commits), broker, None, KEYS, rank=(100, 0, True))
        brokers.history.commits.append(commit)

        async def check(fresh: bool) -> int:
            return brokers.states[-1].generation

        await offsets.commit(GROUP, commit.offsets(), check)
        found = await plain.fetch(GROUP)
        assert {at: each.value for at, each in found.items()} == commit.offsets()


@pytest.mark.parametrize("aborts", [True, False], ids=["aborting", "each-alone"])
@pytest.mark.parametrize(
    "choice", [["commit"], ["commit"] * 4 + ["delete", "expire"]], ids=["commits", "deletes"]
)
def test_offsets_never_go_back_whoever_comes_first_and_whatever_fails(
    aborts: bool, choice: list[str]
) -> None:
    @settings(max_examples=150, deadline=None, print_blob=True, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def check(data: st.DataObject) -> None:
        asyncio.run(run(data, aborts, choice))

    check()
