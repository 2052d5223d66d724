"""Clients and two brokers around one group of the classic protocol, in every order of what can happen.

The brokers work from what they have last seen of the record, and change it by compare-and-put: one that is
behind is refused, reads, and applies the same again. Puts lose their answers, brokers lose all they hold,
clients give up waiting, crash and come back, and timers and sessions end at any moment, or long after they
meant anything.

Whatever happens: no partition is given to two members in one generation, nobody is given something else in
the same generation, generations never go back, the group is sound and bounded, timers that are over never
matter again, and whatever is applied twice is applied once. When all is quiet again, every client that lives
is a member of a stable group in which every partition is somebody's, and nobody else is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, NamedTuple, TypeAlias

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dray.errors import (
    FencedInstance,
    GroupError,
    GroupFull,
    IllegalGeneration,
    InconsistentProtocol,
    MemberIdRequired,
    RebalanceInProgress,
    UnknownMember,
)
from dray.groups import classic, record
from dray.groups.group import (
    ClassicGroup,
    Group,
    GroupLimits,
    GroupState,
    Join,
    Joined,
    Leaving,
    Process,
    Sync,
    Synced,
    Timer,
)

KEY = "groups/g"
PARTITIONS = 5
LIMITS = GroupLimits(max_size=4)
MAX_CLIENTS = 5  # that live at one time: one more than there is room for
# Far more than the few rounds in which the largest of these groups settles.
MAX_ROUNDS = 100
PROTOCOLS = [("x",), ("x", "y"), ("y", "x")]

Answer: TypeAlias = Any
Apply: TypeAlias = Callable[[Group | None], tuple[Group | None, Answer]]
Ask: TypeAlias = Callable[[Group | None], Answer]
Tell: TypeAlias = Callable[[Answer, Group | None], None]


class Op(NamedTuple):
    apply: Apply
    ask: Ask  # while there is no answer
    tell: Tell


@dataclass
class Store:
    """One key. Keeps bytes, so that nothing lives on that is not in the record."""

    value: bytes | None = None
    version: int = 0
    timers_over: set[Timer] = field(default_factory=set)

    def get(self) -> tuple[Group | None, int]:
        group = None if self.value is None else record.decode(KEY, self.value)
        return group, self.version

    def put(self, group: Group, expected: int) -> bool:
        if expected != self.version:
            return False
        before, _ = self.get()
        check_step(before, group)
        self.timers_over |= {*classic.timers(before)} - {*classic.timers(group)}
        assert not self.timers_over & {*classic.timers(group)}
        self.value, self.version = record.encode("g", group), self.version + 1
        assert self.get()[0] == group
        return True


def check_step(before: Group | None, after: Group) -> None:
    assert isinstance(after, ClassicGroup)
    check_sound(after)
    if isinstance(before, ClassicGroup):
        assert after.generation in (before.generation, before.generation + 1)
        assert after.phase >= before.phase
        if after.generation == before.generation:
            # EMPTY, then PREPARING, ends a generation; COMPLETING, then STABLE, is the next.
            order = [GroupState.COMPLETING, GroupState.STABLE, GroupState.EMPTY, GroupState.PREPARING]
            assert order.index(after.state) >= order.index(before.state)


def check_timeout(before: ClassicGroup, after: ClassicGroup) -> None:
    """A new generation is of those who came, and of static members; one who came leads."""
    if after.generation > before.generation:
        came = {each.member_id for each in before.members.values() if each.is_joining}
        assert all(each.member_id in came or each.instance_id is not None for each in after.members.values())
        assert after.leader in came if after.members else after.leader is None


def check_sound(group: ClassicGroup) -> None:
    members = list(group.members.values())
    assert (group.leader in group.members) if members else group.leader is None
    assert not group.members.keys() & group.pending.keys()
    instances = [each.instance_id for each in members if each.instance_id is not None]
    assert len(instances) == len(set(instances))
    if members:
        assert set.intersection(*({name for name, _ in each.protocols} for each in members))
    if group.state is GroupState.EMPTY:
        assert not members
    if group.state in (GroupState.COMPLETING, GroupState.STABLE):
        assert members
        assert all(group.protocol in dict(each.protocols) for each in members)
    if group.state is GroupState.STABLE:
        assert sorted(b"".join(each.assignment for each in members)) == list(range(PARTITIONS))
    if group.state is not GroupState.PREPARING:
        assert not any(each.is_joining or each.is_new for each in members)
    if group.state in (GroupState.EMPTY, GroupState.PREPARING):
        assert not any(each.is_synced for each in members)
    # Whoever waits for an answer is waited for by a timer.
    if group.state in (GroupState.PREPARING, GroupState.COMPLETING):
        assert classic.timers(group)
    assert sum(each.is_joining for each in members) <= LIMITS.max_size
    assert len(group.pending) <= LIMITS.max_size


class Broker:
    def __init__(self, store: Store, process: Process) -> None:
        self.store, self.process = store, process
        self.queue: deque[Op] = deque()
        self.waiting: list[Op] = []
        self.group, self.version = store.get()

    def die(self) -> None:
        self.queue.clear()
        self.waiting.clear()
        self.process = self.process._replace(registration=self.process.registration + 1)
        self.look()

    def look(self) -> None:
        self.group, self.version = self.store.get()
        waiting, self.waiting = self.waiting, []
        for op in waiting:
            self._answer(op, op.ask(self.group))

    def step(self, *, loses_answer: bool = False) -> bool:
        """Applies the first that was asked. Whether it was done."""
        if not self.queue:
            return False
        op = self.queue[0]
        group, answer = op.apply(self.group)
        if group is self.group:
            if isinstance(answer, GroupError) and self.store.version != self.version:
                self.look()  # a refusal is never from what may be old
                return False
        else:
            assert group is not None
            is_put = self.store.put(group, self.version)
            self.look()
            if is_put:
                assert op.apply(self.group)[0] is self.group, "applied again, it does something else"
            if not is_put or loses_answer:
                return False
        self.queue.popleft()
        self._answer(op, answer)
        return True

    def _answer(self, op: Op, answer: Answer) -> None:
        if answer is None:
            self.waiting.append(op)
        else:
            op.tell(answer, self.group)


@dataclass
class Client:
    name: str
    instance_id: str | None
    protocols: tuple[str, ...]
    needs_known_id: bool
    can_skip_assignment: bool
    member_id: str = ""
    generation: int = -1
    protocol: str | None = None
    assigns: Mapping[str, bytes] = field(default_factory=dict)
    is_joined: bool = False  # and has to sync
    is_stable: bool = False
    is_alive: bool = True
    asked: int = 0  # the request whose answer it waits for; 0: none
    at: Broker | None = None  # where it asked
    news: int = 0  # what it tells the others with its metadata

    @property
    def ids(self) -> set[str]:
        """Its own, and that which it may be given."""
        return {self.member_id, f"{self.name}-{self.asked}"}


OK = object()  # answers of those that have none of their own


class Groups(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.store = Store()
        self.brokers = [Broker(self.store, Process(1, 100)), Broker(self.store, Process(2, 200))]
        self.clients: list[Client] = []
        self.numbers = count(1)
        self.syncs: list[tuple[Client, Sync]] = []
        self.timers: list[Timer] = []
        self.sessions: list[tuple[str, Process]] = []
        # What was told to whom: generation, then member, or instance where it has one.
        self.told: dict[int, dict[str, bytes]] = {}

    # What happens.

    kinds = st.tuples(
        st.sampled_from([None, None, None, None, "i", "j"]),
        st.sampled_from(PROTOCOLS),
        st.booleans(),
        st.booleans(),
    )

    @initialize(kinds=st.lists(kinds, min_size=2, max_size=4))
    def begins(self, kinds: list[tuple[str | None, tuple[str, ...], bool, bool]]) -> None:
        for kind in kinds:
            self.starts(kind)

    @precondition(lambda self: len(self.living) < MAX_CLIENTS)
    @rule(kind=kinds)
    def starts(self, kind: tuple[str | None, tuple[str, ...], bool, bool]) -> None:
        self.clients.append(Client(f"c{len(self.clients)}", *kind))

    clients_of = st.integers(0, MAX_CLIENTS - 1)
    brokers_of = st.integers(0, 1)

    @rule(who=clients_of, at=brokers_of)
    def asks(self, who: int, at: int) -> None:
        client = self._client(who)
        if client is not None and not client.asked:
            self._ask(client, self.brokers[at])

    @rule(at=brokers_of)
    def all_ask(self, at: int) -> None:
        for who, client in enumerate(self.living):
            if not client.asked:
                self._ask(client, self.brokers[(who + at) % 2])

    @rule(at=brokers_of, steps=st.integers(1, 6), loses_answer=st.booleans())
    def serves(self, at: int, steps: int, loses_answer: bool) -> None:
        for _ in range(steps):
            self.brokers[at].step(loses_answer=loses_answer)
            loses_answer = False

    @precondition(lambda self: self.syncs)
    @rule(at=brokers_of, which=st.integers(0, 1_000))
    def old_sync_arrives(self, at: int, which: int) -> None:
        """Of a connection that the client gave up long ago."""
        self._send_sync(*self.syncs[which % len(self.syncs)], -1, self.brokers[at])

    @rule(at=brokers_of)
    def looks(self, at: int) -> None:
        self.brokers[at].look()

    @rule(who=clients_of, is_new=st.booleans())
    def rejoins(self, who: int, is_new: bool) -> None:
        client = self._client(who)
        if client is not None:
            client.news += is_new
            self._reset(client)

    @rule(who=clients_of)
    def gives_up_waiting(self, who: int) -> None:
        client = self._client(who)
        if client is not None and client.asked:
            self._reset(client)

    @precondition(lambda self: len(self.living) > 1)
    @rule(who=clients_of, at=brokers_of)
    def leaves(self, who: int, at: int) -> None:
        client = self._client(who)
        if client is not None and client.member_id:
            leaving = [Leaving(client.member_id, client.instance_id)]
            client.is_alive = False
            self._do(self.brokers[at], lambda group: _outcome(classic.leave(group, leaving, 0)))

    @precondition(lambda self: len(self.living) > 1)
    @rule(who=clients_of)
    def crashes(self, who: int) -> None:
        client = self._client(who)
        if client is not None:
            client.is_alive = False

    @rule(at=brokers_of)
    def broker_crashes(self, at: int) -> None:
        self.brokers[at].die()
        for client in self.clients:
            if client.at is self.brokers[at]:
                client.asked = 0

    @rule(at=brokers_of)
    def timer_ends(self, at: int) -> None:
        for timer in classic.timers(self.brokers[at].group):
            self._fire(self.brokers[at], timer)

    @precondition(lambda self: self.timers)
    @rule(at=brokers_of, which=st.integers(0, 1_000))
    def stale_timer_ends(self, at: int, which: int) -> None:
        self._fire(self.brokers[at], self.timers[which % len(self.timers)])

    @rule(at=brokers_of, which=st.integers(0, 10))
    def session_ends(self, at: int, which: int) -> None:
        sessions = list(classic.sessions(self.brokers[at].group))
        if sessions:
            self._expel(self.brokers[at], *sessions[which % len(sessions)][:2])

    @precondition(lambda self: self.sessions)
    @rule(at=brokers_of, which=st.integers(0, 1_000))
    def stale_session_ends(self, at: int, which: int) -> None:
        self._expel(self.brokers[at], *self.sessions[which % len(self.sessions)])

    @rule()
    def all_is_quiet(self) -> None:
        """Nothing fails any more. Sessions of those end who do not live."""
        for _ in range(MAX_ROUNDS):
            before = self._what_is()
            self.all_ask(0)
            self._serve()
            if self._what_is() != before:
                continue  # there is time enough for whatever clients do
            if self._is_settled():
                return
            group, _ = self.store.get()
            living = set[str]().union(*(client.ids for client in self.living))
            for member_id, heard_by, _ in classic.sessions(group):
                if member_id not in living:
                    self._expel(self.brokers[0], member_id, heard_by)
            for timer in classic.timers(group):
                self._fire(self.brokers[1], timer)
            self._serve()
        raise AssertionError(f"never settled: {self.store.get()[0]}, {self.clients}")

    def teardown(self) -> None:
        self.all_is_quiet()

    @invariant()
    def remembers_what_will_be_stale(self) -> None:
        group, _ = self.store.get()
        self.timers += [each for each in classic.timers(group) if each not in self.timers]
        sessions = [(each.member_id, each.heard_by) for each in classic.sessions(group)]
        self.sessions += [each for each in sessions if each not in self.sessions]

    # How it is done.

    @property
    def living(self) -> list[Client]:
        return [client for client in self.clients if client.is_alive]

    def _client(self, who: int) -> Client | None:
        return self.living[who % len(self.living)] if self.living else None

    def _serve(self) -> None:
        for _ in range(MAX_ROUNDS):
            for broker in self.brokers:
                broker.step()
            if not any(broker.queue for broker in self.brokers):
                break
        for broker in self.brokers:
            broker.look()

    def _what_is(self) -> tuple[object, ...]:
        return self.store.version, *(
            (client.member_id, client.is_joined, client.is_stable, client.is_alive) for client in self.clients
        )

    def _is_settled(self) -> bool:
        group, _ = self.store.get()
        living = {client.member_id for client in self.living}
        if not all(client.is_stable for client in self.living):
            return False
        if not isinstance(group, ClassicGroup):
            return not living
        is_at_rest = group.state is (GroupState.STABLE if living else GroupState.EMPTY)
        return is_at_rest and set(group.members) == living and not group.pending

    def _fire(self, broker: Broker, timer: Timer) -> None:
        def fire(group: Group | None) -> tuple[Group | None, Answer]:
            after = classic.fire(group, timer, 0)
            is_stale = broker.version == self.store.version and timer in self.store.timers_over
            assert not is_stale or after is group
            if isinstance(group, ClassicGroup) and isinstance(after, ClassicGroup):
                check_timeout(group, after)
            return after, OK

        self._do(broker, fire)

    def _expel(self, broker: Broker, member_id: str, heard_by: Process) -> None:
        def expel(group: Group | None) -> tuple[Group | None, Answer]:
            after = classic.expel(group, member_id, heard_by, 0)
            if after is not group:
                assert isinstance(group, ClassicGroup)
                member = group.members.get(member_id) or group.pending[member_id]
                assert member.heard_by == heard_by
            return after, OK

        self._do(broker, expel)

    def _do(self, broker: Broker, apply: Apply) -> None:
        broker.queue.append(Op(apply, lambda group: OK, lambda answer, group: None))

    def _ask(self, client: Client, broker: Broker) -> None:
        """What a client does next: join, then sync, then heartbeats."""
        client.asked, client.at = next(self.numbers), broker
        if client.is_joined:
            self._sync(client, broker)
        elif client.is_stable:
            self._beat(client, broker)
        else:
            self._join(client, broker)

    def _join(self, client: Client, broker: Broker) -> None:
        request = Join(
            member_id=client.member_id,
            new_member_id=f"{client.name}-{client.asked}",
            instance_id=client.instance_id,
            client_id=client.name,
            client_host="",
            session_timeout_ms=10_000,
            rebalance_timeout_ms=20_000,
            protocol_type="consumer",
            protocols=tuple((name, str(client.news).encode()) for name in client.protocols),
            heard_by=broker.process,
            needs_known_id=client.needs_known_id,
            can_skip_assignment=client.can_skip_assignment,
        )
        member_id = request.member_id or request.new_member_id
        broker.queue.append(
            Op(
                lambda group: _outcome(classic.join(group, request, LIMITS, 0)),
                lambda group: classic.joined(group, request, member_id),
                partial(self._joined, client, client.asked),
            )
        )

    def _joined(self, client: Client, asked: int, answer: Answer, group: Group | None) -> None:
        if not self._hears(client, asked):
            return
        match answer:
            case Joined():
                client.member_id, client.generation = answer.member_id, answer.generation
                client.protocol, client.is_joined = answer.protocol, True
                is_leader = answer.leader == answer.member_id and not answer.skip_assignment
                client.assigns = self._assign(answer) if is_leader else {}
            case MemberIdRequired():
                client.member_id = answer.member_id
            case UnknownMember():
                client.member_id = ""
            case FencedInstance() | GroupFull() | InconsistentProtocol():
                client.is_alive = False
            case _:
                raise AssertionError(answer)

    def _assign(self, joined: Joined) -> Mapping[str, bytes]:
        """Never twice in the same way: two who assign in one generation are found out."""
        shift = next(self.numbers)
        shares: dict[str, list[int]] = {each.member_id: [] for each in joined.members}
        assert joined.member_id in shares
        for partition in range(PARTITIONS):
            owner = joined.members[(partition + shift) % len(joined.members)].member_id
            shares[owner].append(partition)
        return {member_id: bytes(share) for member_id, share in shares.items()}

    def _sync(self, client: Client, broker: Broker) -> None:
        request = Sync(
            member_id=client.member_id,
            instance_id=client.instance_id,
            generation=client.generation,
            protocol_type="consumer",
            protocol=client.protocol,
            assignments=client.assigns,
        )
        self.syncs.append((client, request))
        self._send_sync(client, request, client.asked, broker)

    def _send_sync(self, client: Client, request: Sync, asked: int, broker: Broker) -> None:
        broker.queue.append(
            Op(
                lambda group: _outcome(classic.sync(group, request)),
                lambda group: classic.synced(group, request),
                partial(self._synced, client, asked, request),
            )
        )

    def _synced(self, client: Client, asked: int, request: Sync, answer: Answer, group: Group | None) -> None:
        if isinstance(answer, Synced):
            assert isinstance(group, ClassicGroup)
            assert group.generation == request.generation
            # Also of an answer that nobody hears.
            told = self.told.setdefault(request.generation, {})
            owner = request.instance_id or request.member_id
            assert told.setdefault(owner, answer.assignment) == answer.assignment
            given = [partition for share in told.values() for partition in share]
            assert len(given) == len(set(given)), f"given twice: {told}"
        if not self._hears(client, asked):
            return
        client.is_joined = False
        client.is_stable = isinstance(answer, Synced)
        match answer:
            case UnknownMember():
                client.member_id = ""
            case FencedInstance():
                client.is_alive = False
            case Synced() | RebalanceInProgress() | IllegalGeneration():
                pass
            case _:
                raise AssertionError(answer)

    def _beat(self, client: Client, broker: Broker) -> None:
        member_id, instance_id, generation = client.member_id, client.instance_id, client.generation
        process = broker.process

        def beat(group: Group | None) -> tuple[Group | None, Answer]:
            error = classic.heartbeat(group, member_id, instance_id, generation)
            if error is not None and not isinstance(error, RebalanceInProgress):
                return group, error
            return classic.hear(group, member_id, process), error or OK

        broker.queue.append(Op(beat, lambda group: OK, partial(self._beaten, client, client.asked)))

    def _beaten(self, client: Client, asked: int, answer: Answer, group: Group | None) -> None:
        if not self._hears(client, asked):
            return
        client.is_stable = answer is OK
        match answer:
            case UnknownMember():
                client.member_id = ""
            case FencedInstance():
                client.is_alive = False
            case _:
                assert answer is OK or isinstance(answer, RebalanceInProgress | IllegalGeneration)

    def _hears(self, client: Client, asked: int) -> bool:
        if client.asked != asked or not client.is_alive:
            return False
        client.asked = 0
        return True

    def _reset(self, client: Client) -> None:
        """To begin again by joining."""
        client.asked = 0
        client.is_joined = client.is_stable = False


def _outcome(outcome: Any) -> tuple[Group | None, Answer]:
    return outcome.group, outcome.answer


TestGroups = Groups.TestCase
TestGroups.settings = settings(
    max_examples=200,
    stateful_step_count=80,
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
