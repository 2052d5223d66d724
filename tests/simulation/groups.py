"""Brokers that serve groups, members that behave like Kafka's clients, and an oracle below all faults.

Each broker is the real coordinator with the real registry, over a machine that crashes, stands still, loses
its session and is cut off from the store. `GroupWorld` sees every record that really landed, and holds it
against what the members were told:
- nobody is expelled who was told within its session timeout that it is a member;
- no partition has two owners in one generation, or at one moment;
- a group's age never goes back, and who was told of a generation was in it;
- who is a member is not told that it is none.

Afterwards every member that lives gets on, and no other is left.

What may differ by as much as a watch is late is `SLACK_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar
from unittest.mock import patch
from uuid import UUID

from dray.errors import (
    CoordinatorAway,
    DrayError,
    FencedInstance,
    FencedMemberEpoch,
    IllegalGeneration,
    MemberIdRequired,
    RebalanceInProgress,
    Unavailable,
    UnknownGroup,
    UnknownMember,
)
from dray.groups.coordinator import GroupCoordinator
from dray.groups.group import (
    NOTHING,
    Assignment,
    Beat,
    Beaten,
    ClassicGroup,
    ConsumerGroup,
    Dying,
    Group,
    GroupLimits,
    GroupState,
    Join,
    Joined,
    Process,
    Sync,
)
from dray.groups.offsets import OffsetStore
from dray.groups.record import decode, group_key, group_of_key
from dray.groups.topics import TopicsView
from dray.index.cache import IndexCache
from dray.metadata.directory import Directory
from dray.metadata.feed import Feed
from dray.metadata.keys import CLUSTER_DOMAIN, domain_of
from dray.metadata.memory import MemorySession, MemoryStore
from dray.metadata.store import (
    AppendResult,
    Delete,
    Expect,
    Expectation,
    Gap,
    NewEntry,
    Put,
    Session,
    Watch,
    WatchEvent,
)
from dray.registry import BrokerRegistry
from dray.topics.catalog import TopicCatalog
from dray.topics.record import decode_topic
from tests.simulation.world import Machine, SimulatedMetadata, World, simulate

T = TypeVar("T")

NUM_DOMAINS = 2
TTL_MS = 4_000
SESSION_MS = 10_000
REBALANCE_MS = 60_000
HEARTBEAT_S = 2.0
PARTITIONS = 6
TOPIC = "t"
# A watch is at most so late, and so is the news that a session is over.
LATE_S = 1.0
SLACK_S = 2 * LATE_S
# What a client waits for an answer, unless it is one that takes as long as others do.
PATIENCE_S = 8.0
LIMITS = GroupLimits(
    min_session_timeout_ms=1_000, initial_rebalance_delay_ms=500, consumer_session_timeout_ms=SESSION_MS
)
# After the faults: the timers of dead members and brokers, one after the other, and two rebalances.
SETTLING_S = 2 * (SESSION_MS + TTL_MS) / 1000 + 2 * REBALANCE_MS / 1000 + 60


class Violation(AssertionError):
    pass


class Disconnected(Exception):
    pass


def check(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)


# --- below all faults


class Ledger(MemoryStore):
    def __init__(self, world: GroupWorld) -> None:
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
        for put, version in zip(puts, result.puts, strict=True):
            if version is not None:
                self._world.was_put(put)
        return result


class GroupWorld(World):
    def __init__(self, seed: int, *, trouble: float = 0.15, strong: bool = False) -> None:
        super().__init__(seed, trouble=trouble, strong=strong)
        self.brokers: list[Broker] = []
        self.clients: dict[str, Client] = {}  # by member id
        self.groups: dict[str, Group] = {}
        self.since: dict[str, float] = {}  # when each became a member
        self.generations: dict[str, dict[int, set[str]]] = {}  # the members of each
        self.owners: dict[tuple[str, int, int], str] = {}  # of a partition in a generation
        self.replaced: set[str] = set()  # static members that came back, and have another id since
        self.counts: Counter[str] = Counter()
        self._started = 0

    def open_store(self) -> MemoryStore:
        return Ledger(self)

    @property
    def time(self) -> float:
        return asyncio.get_running_loop().time()

    def was_put(self, put: Put) -> None:
        group_id = group_of_key(put.key)
        if group_id is None:
            return
        before, group = self.groups.get(group_id), decode(put.key, put.value)
        self.groups[group_id] = group
        if isinstance(group, Dying):
            return
        for member_id in group.members:
            self.since.setdefault(member_id, self.time)
        if isinstance(before, ClassicGroup | ConsumerGroup):
            self._check(group.age >= before.age, f"{group_id}: age {group.age} after {before.age}")
            for member_id in before.members.keys() - group.members.keys():
                self._was_removed(group_id, member_id)
        if isinstance(group, ClassicGroup):
            if group.state in (GroupState.COMPLETING, GroupState.STABLE):
                generation = self.generations.setdefault(group_id, {}).setdefault(group.generation, set())
                generation.update(group.members)
        else:
            self._check_holdings(group_id, group)

    def _was_removed(self, group_id: str, member_id: str) -> None:
        del self.since[member_id]
        client = self.clients.get(member_id)
        if client is None or member_id in self.replaced:
            return
        self.counts["expelled"] += 1
        silent_s = self.time - client.told_at
        self._check(
            silent_s >= SESSION_MS / 1000 - SLACK_S,
            f"{group_id}: {member_id} is out {silent_s:.2f} s after it was told that all is well",
        )

    def _check_holdings(self, group_id: str, group: ConsumerGroup) -> None:
        held: dict[tuple[UUID, int], str] = {}
        for member in group.members.values():
            for topic_id, partition in [*_pairs(member.assigned), *_pairs(member.revoking)]:
                other = held.setdefault((topic_id, partition), member.member_id)
                self._check(
                    other == member.member_id, f"{group_id}: {partition} of {other} and {member.member_id}"
                )
        for member_id in group.members:
            client = self.clients.get(member_id)
            if isinstance(client, ConsumerClient) and client.is_up:
                for pair in _pairs(client.owned):
                    self._check(
                        held.get(pair) == member_id,
                        f"{group_id}: {member_id} owns {pair[1]}, which is {held.get(pair)}'s",
                    )

    def told_assignment(self, group_id: str, generation: int, member_id: str, partitions: set[int]) -> None:
        self._check(
            member_id in self.generations.get(group_id, {}).get(generation, set()),
            f"{group_id}: {member_id} was told of generation {generation}, and is not in it",
        )
        for partition in partitions:
            name = self.clients[member_id].name  # a static member may have several ids
            owner = self.owners.setdefault((group_id, generation, partition), name)
            self._check(owner == name, f"{group_id} {generation}: {partition} of {owner} and {name}")

    def _check(self, holds: bool, what: str) -> None:
        if not holds:
            self.violations.append(what)

    # The world's hands

    async def start(self, brokers: int) -> None:
        """Without faults: brokers, and a topic."""
        trouble, self.trouble = self.trouble, 0.0
        for node_id in range(brokers):
            await self.start_broker(node_id)
        await self.brokers[0].catalog.create(TOPIC, PARTITIONS, {})
        for broker in self.brokers:
            await broker.catalog.reload()
        self.trouble = trouble

    async def start_broker(self, node_id: int) -> Broker:
        self._started += 1
        broker = Broker(self, node_id, self._started)
        self.brokers.append(broker)
        await broker.start()
        return broker

    def up(self) -> list[Broker]:
        return [broker for broker in self.brokers if broker.is_up]

    def record(self, group_id: str) -> Group | None:
        """As it is in the store."""
        stored = self.data.domain(domain_of(group_id, NUM_DOMAINS)).records.get(group_key(group_id))
        return None if stored is None else decode(stored.key, stored.value)


def _pairs(assignment: Assignment) -> Iterator[tuple[UUID, int]]:
    return ((topic_id, partition) for topic_id in assignment for partition in assignment[topic_id])


# --- brokers


class GroupMachine(Machine):
    """It can also stand still, and be cut off from the store."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._runs = asyncio.Event()
        self._runs.set()
        self.is_cut_off = False

    @property
    def stands_still(self) -> bool:
        return not self._runs.is_set()

    async def check_alive(self) -> None:
        await super().check_alive()
        await self._runs.wait()
        await super().check_alive()
        if self.is_cut_off:
            raise Unavailable("simulated: cut off")

    async def running(self) -> None:
        await self._runs.wait()

    async def stand_still(self, seconds: float) -> None:
        self._runs.clear()
        await asyncio.sleep(seconds)
        self._runs.set()


class _Clock:
    """The event loop of a machine that may stand still: what is due meanwhile runs late."""

    def __init__(self, machine: GroupMachine) -> None:
        self._machine = machine
        self._loop = asyncio.get_running_loop()

    def time(self) -> float:
        return self._loop.time()

    def call_at(self, when: float, callback: Callable[..., None], *args: Any) -> asyncio.TimerHandle:
        handle: asyncio.TimerHandle

        async def late() -> None:
            await self._machine.running()
            if not handle.cancelled():
                callback(*args)

        def ring() -> None:
            if self._machine.stands_still:
                self._loop.create_task(late())
            elif not self._machine.crashed:
                callback(*args)

        handle = self._loop.call_at(when, ring)
        return handle


class GroupMetadata(SimulatedMetadata):
    def __init__(self, machine: GroupMachine) -> None:
        super().__init__(machine)
        self.session_now: LateSession | None = None

    @asynccontextmanager
    async def watch(self, domain: int, prefix: str | None = None) -> AsyncIterator[Watch]:
        async with self._real.watch(domain, prefix) as feed:
            yield BoundedFeed(feed, self._machine)

    @asynccontextmanager
    async def session(self, ttl_ms: int) -> AsyncIterator[Session]:
        await self._machine.check_alive()
        session = MemorySession(self._machine.world.data)
        self.session_now = LateSession(session, self._machine)
        try:
            yield self.session_now
        finally:
            self.session_now.end()


class LateSession:
    """Its owner may learn later than the others that it is over."""

    def __init__(self, real: MemorySession, machine: Machine) -> None:
        self._real = real
        self._machine = machine
        self._over = asyncio.Event()

    @property
    def lost(self) -> bool:
        return self._over.is_set()

    async def wait_lost(self) -> None:
        await self._over.wait()

    async def put_ephemeral(
        self, domain: int, key: str, value: bytes, expect: Expectation = Expect.ANY
    ) -> int:
        return await self._machine.write(lambda: self._real.put_ephemeral(domain, key, value, expect))

    async def close(self) -> None:
        self.end()

    def end(self) -> None:
        self.lose()
        self._expire()

    def lose(self) -> None:
        self._over.set()

    def expire(self, late_s: float) -> None:
        self._expire()
        asyncio.get_running_loop().call_later(late_s, self.lose)

    def _expire(self) -> None:
        self._machine.world.data.next_version()  # a barrier is behind what was before
        self._real.expire()


class BoundedFeed(Feed):
    """As late as `LATE_S`, in bursts, and with gaps; never later, unless the machine stands still."""

    def __init__(self, feed: Feed, machine: Machine) -> None:
        super().__init__()
        self._feed = feed
        self._machine = machine
        self._ready: deque[WatchEvent] = deque()

    async def __anext__(self) -> WatchEvent:
        world = self._machine.world
        if not self._ready:
            self._ready.append(await self._feed.__anext__())
            await world.delay(LATE_S if world.strikes() else 0.02)
            while self._feed._events:
                self._ready.append(await self._feed.__anext__())
        await self._machine.check_alive()
        if world.strikes(0.05):
            raise Unavailable("simulated: the watch broke")
        if world.strikes(0.05):
            self._ready.clear()
            return Gap()
        return self._ready.popleft()


class Broker:
    """A broker's process: it can be started once, and can crash."""

    def __init__(self, world: GroupWorld, node_id: int, started: int) -> None:
        self.world = world
        self.node_id = node_id
        self.machine = GroupMachine(world)
        self.store = GroupMetadata(self.machine)
        self.is_up = False
        self.down: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.registry = BrokerRegistry(
            self.store,
            host="localhost",
            port=9000 + node_id,
            zone="",
            rack=None,
            node_id=node_id,
            ttl_ms=TTL_MS,
            started_at_ms=started,
            version="0",
        )
        self.directory = Directory(self.store, CLUSTER_DOMAIN, "topics", decode_topic)
        self.catalog = TopicCatalog(self.store, NUM_DOMAINS, self.directory, wall_clock_ms=world.now_ms)
        self.topics = TopicsView(self.catalog)
        self._tasks: list[asyncio.Task[None]] = []
        self.calls: set[asyncio.Task[Any]] = set()
        self.coordinator: GroupCoordinator

    async def start(self, *, retention_ms: int = 10**9, limits: GroupLimits = LIMITS) -> None:
        self._run(self.directory.run())
        await self.directory.loaded()
        await self.registry.start()
        self._run(self.registry.run())
        self.coordinator = GroupCoordinator(
            self.store,
            NUM_DOMAINS,
            self.registry,
            self.topics,
            OffsetStore(self.store, NUM_DOMAINS, self.world.now_ms),
            limits,
            retention_ms=retention_ms,
            retention_check_s=10**9,
            wall_clock_ms=self.world.now_ms,
        )
        self.coordinator._loop = _Clock(self.machine)  # type: ignore[assignment]
        for domain in range(NUM_DOMAINS):
            self._run(self._follow(domain))
        self._run(self.coordinator.run())
        self.is_up = True

    def _run(self, work: Awaitable[None]) -> None:
        self._tasks.append(asyncio.ensure_future(work))

    async def _follow(self, domain: int) -> None:
        """As a broker does."""
        cache = IndexCache()
        while True:
            with contextlib.suppress(DrayError):
                await cache.follow(self.store, domain, lambda event: self.coordinator.told(domain, event))
                return
            self.coordinator.told(domain, Gap())
            await asyncio.sleep(0.5)

    def crash(self) -> None:
        """Without a word. Its session is over when that has not been renewed for its time to live."""
        self.machine.crashed = True
        self.is_up = False
        self.down.set_result(None)
        self.coordinator.stop()
        for task in self._tasks:
            task.cancel()
        session = self.store.session_now
        if session is not None:
            asyncio.get_running_loop().call_later(TTL_MS / 1000, session.expire, 0.0)

    def lose_session(self) -> None:
        session = self.store.session_now
        if session is not None and not session.lost:
            session.expire(self.world.chance.uniform(0, LATE_S) if self.world.trouble else 0.0)

    async def cut_off(self, seconds: float) -> None:
        self.machine.is_cut_off = True
        await asyncio.sleep(seconds)
        if seconds >= TTL_MS / 1000:
            self.lose_session()
        self.machine.is_cut_off = False

    async def stand_still(self, seconds: float) -> None:
        if seconds >= TTL_MS / 1000:
            asyncio.get_running_loop().call_later(TTL_MS / 1000, self.lose_session)
        await self.machine.stand_still(seconds)

    async def call(
        self,
        act: Callable[[GroupCoordinator, asyncio.Future[None]], Awaitable[T]],
        patience_s: float = PATIENCE_S,
    ) -> T:
        """A request over a connection of its own, which closes when the client goes or the broker dies."""
        if not self.is_up:
            raise Disconnected
        gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def serve() -> T:
            await self.world.delay(0.01)
            await self.machine.running()
            if gone.done():
                raise Disconnected
            try:
                return await act(self.coordinator, gone)
            finally:
                await self.machine.running()

        task = asyncio.create_task(serve())
        self.calls.add(task)
        task.add_done_callback(self._served)
        try:
            either: set[asyncio.Future[Any]] = {task, self.down}
            await asyncio.wait(either, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            if self.down.done() or not task.done():
                raise Disconnected
            return task.result()
        finally:
            if not gone.done():
                gone.set_result(None)

    def _served(self, task: asyncio.Task[Any]) -> None:
        self.calls.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, DrayError | Disconnected):
            self.world.violations.append(f"{error!r}")


# --- members


class Client:
    """`run` until cancelled. It looks for another broker when its own sends it away."""

    def __init__(self, world: GroupWorld, group_id: str, name: str, *, moves: float = 0.0) -> None:
        self.world = world
        self.group_id = group_id
        self.name = name
        self.moves = moves  # how likely it goes to another broker between two heartbeats
        self.member_id = ""
        self.told_at = float("-inf")  # when it was last told that it is a member
        self._asked_at = self._answered_at = self.told_at
        self.is_up = False
        self.broker: Broker | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self.is_up = True
        self._task = asyncio.create_task(self.run())
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.world.violations.append(str(error) if isinstance(error, Violation) else repr(error))

    def die(self) -> None:
        assert self._task is not None
        self.is_up = False
        self._task.cancel()

    async def run(self) -> None:
        raise NotImplementedError

    def is_member(self, member_id: str) -> None:
        self.member_id = member_id
        self.world.clients[member_id] = self

    def told(self) -> None:
        """It was, when the broker answered: answers may stay away while a machine stands still."""
        self.told_at = max(self.told_at, self._answered_at)
        self.world.counts["told"] += 1

    def refused(self) -> None:
        """It was told that it is no member."""
        since = self.world.since.get(self.member_id, float("inf"))
        check(since >= self._asked_at, f"{self.group_id}: {self.member_id} was told that it is no member")

    async def ask(
        self,
        act: Callable[[GroupCoordinator, asyncio.Future[None]], Awaitable[T]],
        patience_s: float = PATIENCE_S,
    ) -> T:
        if self.broker is None or not self.broker.is_up:
            await asyncio.sleep(0.2)
            self.broker = self.world.chance.choice(self.world.up()) if self.world.up() else None
        if self.broker is None:
            raise Disconnected

        self._asked_at = self.world.time

        async def act_and_note(coordinator: GroupCoordinator, gone: asyncio.Future[None]) -> tuple[T, float]:
            return await act(coordinator, gone), self.world.time

        try:
            answer, self._answered_at = await self.broker.call(act_and_note, patience_s)
        except (Disconnected, CoordinatorAway):
            self.broker = None
            raise
        return answer

    def maybe_move(self) -> None:
        if self.world.chance.random() < self.moves:
            self.world.counts["moved"] += 1
            self.broker = None


class ClassicClient(Client):
    def __init__(
        self,
        world: GroupWorld,
        group_id: str,
        name: str,
        *,
        moves: float = 0.0,
        instance_id: str | None = None,
    ) -> None:
        super().__init__(world, group_id, name, moves=moves)
        self.instance_id = instance_id
        self.generation = -1
        self.partitions: set[int] = set()
        self._ids = count(1)

    async def run(self) -> None:
        while True:
            try:
                joined = await self.join()
                await self.sync(joined)
                await self.beat_until_rebalance()
            except MemberIdRequired as error:
                self.is_member(error.member_id)
            except UnknownMember:
                self.refused()
                self.member_id = ""
            except FencedInstance:
                self.member_id = ""
            except (RebalanceInProgress, IllegalGeneration, CoordinatorAway, Disconnected):
                await asyncio.sleep(0.1)

    async def join(self) -> Joined:
        new_member_id = f"{self.name}-{next(self._ids)}"
        joined = await self.ask(
            lambda coordinator, gone: coordinator.join(
                self.group_id, self._join_request(new_member_id, coordinator.process), gone
            ),
            REBALANCE_MS / 1000 + 5,
        )
        self.is_member(joined.member_id)
        self.generation = joined.generation
        self.told()
        return joined

    def _join_request(self, new_member_id: str, heard_by: Process) -> Join:
        return Join(
            member_id=self.member_id,
            new_member_id=new_member_id,
            instance_id=self.instance_id,
            client_id=self.name,
            client_host="/h",
            session_timeout_ms=SESSION_MS,
            rebalance_timeout_ms=REBALANCE_MS,
            protocol_type="consumer",
            protocols=(("range", b""),),
            heard_by=heard_by,
            needs_known_id=self.instance_id is None,
            can_skip_assignment=True,
        )

    async def sync(self, joined: Joined) -> None:
        assignments: dict[str, bytes] = {}
        if joined.leader == joined.member_id and not joined.skip_assignment:
            members = sorted(member.member_id for member in joined.members)
            for index, member_id in enumerate(members):
                assignments[member_id] = bytes(range(index, PARTITIONS, len(members)))
        request = Sync(
            member_id=self.member_id,
            instance_id=self.instance_id,
            generation=joined.generation,
            protocol_type=joined.protocol_type,
            protocol=joined.protocol,
            assignments=assignments,
        )
        synced = await self.ask(
            lambda coordinator, gone: coordinator.sync(self.group_id, request, gone), REBALANCE_MS / 1000 + 5
        )
        self.partitions = set(synced.assignment)
        self.world.told_assignment(self.group_id, joined.generation, self.member_id, self.partitions)
        self.told()

    async def beat_until_rebalance(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self.maybe_move()
            try:
                await self.heartbeat()
            except (CoordinatorAway, Disconnected):
                continue
            except RebalanceInProgress:
                return

    async def heartbeat(self) -> None:
        await self.ask(
            lambda coordinator, gone: coordinator.heartbeat(
                self.group_id, self.member_id, self.instance_id, self.generation
            )
        )
        self.told()

    def come_back(self) -> None:
        """Restarted, with its instance id and nothing else."""
        self.world.replaced.add(self.member_id)
        self.member_id, self.generation, self.partitions = "", -1, set()
        self.start()


class ConsumerClient(Client):
    """It gives up partitions at once, and says so with its next heartbeat."""

    def __init__(self, world: GroupWorld, group_id: str, name: str, *, moves: float = 0.0) -> None:
        super().__init__(world, group_id, name, moves=moves)
        self.is_member(name)
        self.epoch = 0
        self.owned: Assignment = NOTHING
        self._says_all = True
        self._says_owned = False

    async def run(self) -> None:
        while True:
            try:
                self.take(await self.beat())
            except (UnknownMember, FencedMemberEpoch, UnknownGroup) as error:
                if not isinstance(error, FencedMemberEpoch):
                    self.refused()
                self.epoch, self.owned = 0, NOTHING
                self._says_all = True
                continue
            except (CoordinatorAway, Disconnected):
                self._says_all = True
                await asyncio.sleep(0.1)
                continue
            if not self._says_owned:
                await asyncio.sleep(HEARTBEAT_S)
            self.maybe_move()

    async def beat(self) -> Beaten:
        return await self.ask(
            lambda coordinator, gone: coordinator.beat(
                self.group_id, self._request(coordinator.process), gone
            )
        )

    def _request(self, heard_by: Process) -> Beat:
        says_owned = self._says_all or self._says_owned
        return Beat(
            member_id=self.member_id,
            epoch=self.epoch,
            instance_id=None,
            rack_id=None,
            rebalance_timeout_ms=REBALANCE_MS if self._says_all else -1,
            topics=frozenset({TOPIC}) if self._says_all else None,
            regex=None,
            assignor=None,
            owned=self.owned if says_owned else None,
            client_id=self.name,
            client_host="/h",
            heard_by=heard_by,
        )

    def take(self, beaten: Beaten) -> None:
        self._says_all = self._says_owned = False
        self.epoch = beaten.epoch
        if beaten.assignment is not None and beaten.assignment != self.owned:
            self.owned = beaten.assignment
            self._says_owned = True
        self.told()


# --- schedules


@dataclass(frozen=True)
class Rules:
    """What is patched: nothing, or a rule is taken out."""

    patches: tuple[tuple[Any, str, Any], ...] = ()

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for owner, name, value in self.patches:
                stack.enter_context(patch.object(owner, name, value))
            yield


@dataclass(frozen=True)
class Plot:
    strong: bool = False
    trouble: float = 0.1
    brokers: int = 3
    classic: int = 3
    consumers: int = 3
    statics: int = 0  # classic members with an instance id
    restarts: int = 0  # of static members, each within its session
    deaths: int = 2  # of other members, for ever
    moves: float = 0.05
    incidents: int = 4
    kinds: tuple[str, ...] = ("crash", "restart", "lose", "cut", "still")  # of incidents
    duration_s: float = 60.0


async def play_unread(seconds: float) -> int:
    """The only broker stands still, and what its member says lies unread. How many are expelled?"""
    world = GroupWorld(0, trouble=0.0)
    await world.start(1)
    client = ConsumerClient(world, "consumer", "k0")
    client.start()
    await asyncio.sleep(SESSION_MS / 1000)
    await world.brokers[0].machine.stand_still(seconds)
    await asyncio.sleep(SESSION_MS / 1000)
    _judge(world)
    return world.counts["expelled"]


def play(seed: int, plot: Plot, rules: Rules = Rules()) -> Counter[str]:
    """What happened how often. Raises `Violation`."""
    with rules.in_force():
        return simulate(lambda: _Schedule(seed, plot).run())


class _Schedule:
    def __init__(self, seed: int, plot: Plot) -> None:
        self._plot = plot
        self._world = GroupWorld(seed, trouble=plot.trouble, strong=plot.strong)
        self._chance = self._world.chance
        self._running: set[asyncio.Future[Any]] = set()

    async def run(self) -> Counter[str]:
        plot, world, chance = self._plot, self._world, self._chance
        await world.start(plot.brokers)
        statics = [
            ClassicClient(world, "classic", f"s{number}", moves=plot.moves, instance_id=f"i{number}")
            for number in range(plot.statics)
        ]
        others: list[Client] = [
            ClassicClient(world, "classic", f"c{number}", moves=plot.moves) for number in range(plot.classic)
        ]
        others += [
            ConsumerClient(world, "consumer", f"k{number}", moves=plot.moves)
            for number in range(plot.consumers)
        ]
        beginning, end = plot.duration_s / 4, plot.duration_s
        schedule = [(chance.uniform(0, beginning), client.start) for client in [*others, *statics]]
        doomed = chance.sample(others, plot.deaths)
        schedule += [(chance.uniform(beginning, end), client.die) for client in doomed]
        for client in chance.sample(statics, plot.restarts):
            at = chance.uniform(beginning, end)
            schedule += [(at, client.die), (at + chance.uniform(0, SESSION_MS / 2000), client.come_back)]
        schedule += [(chance.uniform(beginning / 2, end), self._strike) for _ in range(plot.incidents)]
        for at, act in sorted(schedule, key=lambda each: each[0]):
            await asyncio.sleep(max(0.0, at - world.time))
            act()
            _judge(world)
        while self._running:
            await asyncio.wait(self._running)
        await world.calm()
        await self._settle([*others, *statics])
        return world.counts

    async def _settle(self, clients: Sequence[Client]) -> None:
        world = self._world
        latest = world.time + SETTLING_S
        while True:
            await asyncio.sleep(SESSION_MS / 1000)
            _judge(world)
            try:
                _check_settled(world, clients)
                return
            except Violation:
                if world.time > latest:
                    raise

    def _strike(self) -> None:
        world, chance = self._world, self._chance
        up = world.up()
        if not up:
            return
        broker = chance.choice(up)
        kind = chance.choice(self._plot.kinds)
        world.counts[kind] += 1
        match kind:
            case "crash" if len(up) > 1:
                broker.crash()
            case "crash" | "restart":
                broker.crash()
                self._begin(world.start_broker(broker.node_id))
            case "lose":
                broker.lose_session()
            case "cut":
                self._begin(broker.cut_off(chance.choice([1.0, 6.0, 15.0])))
            case "still":
                self._begin(broker.stand_still(chance.choice([0.4, 2.0, 6.0, 15.0])))

    def _begin(self, work: Awaitable[Any]) -> None:
        task = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)


def _judge(world: GroupWorld) -> None:
    check(not world.violations, "; ".join(world.violations[:3]))


def _check_settled(world: GroupWorld, all_clients: Sequence[Client]) -> None:
    for group_id in {client.group_id for client in all_clients}:
        clients = [client for client in all_clients if client.group_id == group_id and client.is_up]
        group = world.record(group_id)
        if not isinstance(group, ClassicGroup | ConsumerGroup):
            raise Violation(f"{group_id}: {group}")
        members, names = sorted(group.members), sorted(client.member_id for client in clients)
        check(members == names, f"{group_id}: {members}, and not {names}")
        for client in clients:
            late_s = world.time - client.told_at
            check(late_s < 3 * HEARTBEAT_S, f"{group_id}: {client.name} was told nothing for {late_s:.1f} s")
        owned: list[int] = []
        for client in clients:
            if isinstance(client, ConsumerClient):
                assert isinstance(group, ConsumerGroup)
                assigned = group.members[client.member_id].assigned
                check(client.owned == assigned, f"{group_id}: {client.name} owns {client.owned}: {assigned}")
                owned += [partition for _, partition in _pairs(client.owned)]
            else:
                assert isinstance(client, ClassicClient)
                owned += client.partitions
        if not clients:
            continue
        if isinstance(group, ClassicGroup):
            check(group.state is GroupState.STABLE, f"{group_id}: {group.state}")
        check(sorted(owned) == list(range(PARTITIONS)), f"{group_id}: owned are {sorted(owned)}")
