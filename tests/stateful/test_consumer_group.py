"""Consumer groups against clients that believe what they are told.

Clients follow KIP-848: they give up before they take, say what they own when that changed, and say everything
after an answer that they did not get. A client waits for the answer to a heartbeat before it changes what it
owns.

One thing the protocol does not promise, nor does Kafka: a client that has yet to take what it was
told says that it does not own it, and the broker gives it to another. If the client does not hear of that, it
takes it all the same. Its epoch is an old one then: its commits are refused, and the answer to its next
heartbeat is that it has to give up everything.

Brokers work from what they last read: a change is put on condition that nobody wrote since, and is made
again from the newest otherwise. A heartbeat that says nothing is answered from an old reading, but it is not
refused by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple
from uuid import UUID

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from dray.errors import (
    FencedInstance,
    FencedMemberEpoch,
    GroupError,
    StaleMemberEpoch,
    UnknownGroup,
    UnknownMember,
    UnreleasedInstance,
)
from dray.groups import consumer
from dray.groups.group import (
    Beat,
    Beaten,
    ConsumerGroup,
    ConsumerMember,
    Group,
    GroupLimits,
    GroupState,
    Outcome,
    Process,
    Timer,
)
from dray.groups.record import decode, encode, group_key
from tests.consumer_groups import MemoryTopics, join_beat, light_beat, pairs

LIMITS = GroupLimits()
NAMES = ("a", "b", "c1", "c2")
REGEXES = {"c.*": ("c1", "c2"), "a|b": ("a", "b")}
INSTANCES = ("one", "two")
# Enough for everybody to give up, everybody to take, and once more where topics were found to have changed.
ROUNDS = 12

brokers = st.integers(0, 1)
subscriptions = st.one_of(st.frozensets(st.sampled_from(NAMES), max_size=3), st.sampled_from(sorted(REGEXES)))
fates = st.sampled_from(["answered", "answered", "answered", "lost", "unknown", "broker died"])


@dataclass
class Client:
    member_id: str
    instance_id: str | None
    subscription: frozenset[str] | str
    assignor: str | None
    epoch: int = 0
    owned: dict[UUID, frozenset[int]] = field(default_factory=dict)
    told: dict[UUID, frozenset[int]] = field(default_factory=dict)
    last_said: dict[UUID, frozenset[int]] | None = None
    says_all: bool = True
    says_subscription: bool = True
    is_leaving: bool = False
    is_gone: bool = False
    sent: Beat | None = None  # and not answered
    # What it said that it does not own, may take all the same, and would have heard of in a lost answer.
    unfinished: set[tuple[int, int]] = field(default_factory=set)

    def next_beat(self, heard_by: Process) -> Beat:
        names, regex = (
            (frozenset[str](), self.subscription)
            if isinstance(self.subscription, str)
            else (self.subscription, "")
        )
        common = {"instance_id": self.instance_id, "heard_by": heard_by}
        if self.is_leaving:
            return light_beat(self.member_id, -1 if self.instance_id is None else -2, **common)
        if self.epoch == 0:
            return join_beat(self.member_id, *names, regex=regex, assignor=self.assignor, **common)
        fields: dict[str, object] = dict(common)
        if self.says_all or self.says_subscription:
            fields |= {"topics": names, "regex": regex}
        if self.says_all:
            fields |= {"rebalance_timeout_ms": 60_000, "assignor": self.assignor}
        if self.says_all or self.owned != self.last_said:
            fields["owned"] = dict(self.owned)
        return light_beat(self.member_id, self.epoch, **fields)

    def hear(self, answer: Beaten | GroupError) -> None:
        sent = self.sent
        assert sent is not None
        self.sent = None
        self.unfinished.clear()
        if self.is_leaving:
            self.is_gone = True
        elif isinstance(answer, Beaten):
            assert answer.member_id == self.member_id
            assert answer.epoch > 0
            self.epoch = answer.epoch
            if sent.owned is not None:
                self.last_said = dict(sent.owned)
            if answer.assignment is not None and answer.assignment != self.told:
                # It may own nothing of what it was told to give up: that has to be said as well.
                self.told, self.last_said = dict(answer.assignment), None
            self.says_all = False
            if sent.topics is not None:
                self.says_subscription = False
        elif isinstance(answer, FencedMemberEpoch | UnknownMember | UnknownGroup):
            assert sent.epoch > 0, f"a newcomer was refused: {answer!r}"
            self.start_again()
        elif isinstance(answer, UnreleasedInstance):
            assert sent.epoch == 0
            assert self.instance_id is not None
        else:
            assert isinstance(answer, FencedInstance), repr(answer)
            assert self.instance_id is not None
            self.start_again()
            self.is_gone = True

    def hear_nothing(self) -> None:
        assert self.sent is not None
        if self.sent.owned is not None:
            self.unfinished |= pairs(self.told) - pairs(self.sent.owned)
        self.sent = None
        self.says_all = True
        self.is_gone = self.is_leaving

    def start_again(self) -> None:
        self.epoch, self.owned, self.told, self.last_said, self.says_all = 0, {}, {}, None, True

    def give_up(self) -> None:
        self.owned = {
            topic_id: partitions & self.told[topic_id]
            for topic_id, partitions in self.owned.items()
            if topic_id in self.told and partitions & self.told[topic_id]
        }

    def wanted_names(self) -> tuple[str, ...]:
        return REGEXES[self.subscription] if isinstance(self.subscription, str) else tuple(self.subscription)


class Read(NamedTuple):
    version: int
    group: Group | None


class Groups(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.topics = MemoryTopics()
        self.views = [MemoryTopics(), MemoryTopics()]
        self.group: ConsumerGroup | None = None
        self.version = 0
        self.read = [Read(0, None), Read(0, None)]
        self.brokers = [Process(0, 1), Process(1, 1)]
        self.clients: list[Client] = []
        self.started = 0
        self.timers: list[Timer] = []
        self.epoch = 0
        self.member_epochs: dict[str, int] = {}

    # What happens.

    @initialize(counts=st.tuples(st.integers(1, 6), st.integers(1, 3)))
    def begin(self, counts: tuple[int, int]) -> None:
        self.topics.create("a", counts[0])
        self.topics.create("c1", counts[1])

    @precondition(lambda self: len(self.living()) < 5)
    @rule(subscription=subscriptions, assignor=st.sampled_from([None, "uniform", "range"]))
    def dynamic_client_starts(self, subscription: frozenset[str] | str, assignor: str | None) -> None:
        self.start(None, subscription, assignor)

    @precondition(lambda self: len(self.living()) < 5)
    @rule(subscription=subscriptions, instance=st.sampled_from(INSTANCES))
    def static_client_starts(self, subscription: frozenset[str] | str, instance: str) -> None:
        self.start(instance, subscription, None)

    @precondition(lambda self: self.living())
    @rule(data=st.data(), subscription=subscriptions)
    def client_resubscribes(self, data: st.DataObject, subscription: frozenset[str] | str) -> None:
        client = data.draw(st.sampled_from(self.living()), label="client")
        if client.sent is None:
            client.subscription, client.says_subscription = subscription, True

    @precondition(lambda self: self.living())
    @rule(data=st.data())
    def client_leaves(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from(self.living()), label="client")
        if client.sent is None and client.epoch > 0:
            client.is_leaving, client.owned = True, {}

    @precondition(lambda self: self.living())
    @rule(data=st.data())
    def client_crashes(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from(self.living()), label="client")
        client.is_gone = True

    @precondition(lambda self: self.living())
    @rule(data=st.data(), broker=brokers)
    def client_sends(self, data: st.DataObject, broker: int) -> None:
        client = data.draw(st.sampled_from(self.living()), label="client")
        if client.sent is None:
            client.sent = client.next_beat(self.brokers[broker])

    @precondition(lambda self: self.living())
    @rule(data=st.data(), fate=fates)
    def broker_answers(self, data: st.DataObject, fate: str) -> None:
        client = data.draw(st.sampled_from(self.living()), label="client")
        if client.sent is not None:
            self.answer(client, fate)

    @precondition(lambda self: self.living())
    @rule(broker=brokers, fate=fates, reconciles=st.booleans())
    def everybody_is_heard(self, broker: int, fate: str, reconciles: bool) -> None:
        """What mostly happens, so that examples get somewhere."""
        for client in self.living():
            if client.sent is None:
                client.sent = client.next_beat(self.brokers[broker])
            self.answer(client, fate)
            if reconciles and not client.is_leaving:
                client.give_up()
                client.owned = dict(client.told)

    @precondition(lambda self: self.living())
    @rule(data=st.data(), is_whole=st.booleans())
    def client_reconciles(self, data: st.DataObject, is_whole: bool) -> None:
        client = data.draw(st.sampled_from(self.living()), label="client")
        if client.sent is None and not client.is_leaving:
            client.give_up()
            if is_whole:
                client.owned = dict(client.told)

    @rule(name=st.sampled_from(NAMES), count=st.integers(1, 6))
    def topic_appears_or_grows(self, name: str, count: int) -> None:
        if name not in self.topics.shapes:
            self.topics.create(name, count)
        elif self.topics.shapes[name].partitions < count:
            self.topics.grow(name, count)

    @precondition(lambda self: self.topics.shapes)
    @rule(data=st.data())
    def topic_goes(self, data: st.DataObject) -> None:
        self.topics.delete(data.draw(st.sampled_from(sorted(self.topics.shapes)), label="topic"))

    @rule(broker=brokers)
    def broker_reads(self, broker: int) -> None:
        self.refresh(broker)

    @rule(broker=brokers)
    def broker_hears_of_topics(self, broker: int) -> None:
        self.views[broker] = self.topics.copy()

    @precondition(lambda self: self.timers)
    @rule(data=st.data(), broker=brokers)
    def some_timer_runs_out(self, data: st.DataObject, broker: int) -> None:
        """Any that ever ran: most are of a group that went on since."""
        timer = data.draw(st.sampled_from(self.timers), label="timer")
        before = self.group
        self.change(broker, lambda group: consumer.fire(group, timer, 0))
        after = self.group
        if before is not None and after is not None and timer not in consumer.timers(before):
            assert after == before

    @precondition(lambda self: self.clients)
    @rule(data=st.data(), broker=brokers)
    def session_runs_out(self, data: st.DataObject, broker: int) -> None:
        member_id = data.draw(st.sampled_from([client.member_id for client in self.clients]), label="member")
        self.change(broker, lambda group: consumer.expel(group, member_id, self.brokers[broker], 0))

    @precondition(lambda self: self.clients)
    @rule(data=st.data(), broker=brokers)
    def broker_takes_a_member_over(self, data: st.DataObject, broker: int) -> None:
        member_id = data.draw(st.sampled_from([client.member_id for client in self.clients]), label="member")
        self.change(broker, lambda group: consumer.hear(group, member_id, self.brokers[broker]))

    @rule()
    def it_is_quiet_for_a_while(self) -> None:
        self.settle()

    def teardown(self) -> None:
        self.settle()

    # How it is carried out.

    def start(
        self, instance_id: str | None, subscription: frozenset[str] | str, assignor: str | None
    ) -> None:
        self.started += 1
        self.clients.append(Client(f"m{self.started}", instance_id, subscription, assignor))

    def living(self) -> list[Client]:
        return [client for client in self.clients if not client.is_gone]

    def refresh(self, broker: int) -> None:
        self.read[broker] = Read(self.version, self.group)

    def put(self, broker: int, group: Group) -> bool:
        """Compare-and-put. The group is what its bytes say."""
        if self.read[broker].version != self.version:
            return False
        stored = decode(group_key("g"), encode("g", group))
        assert isinstance(stored, ConsumerGroup)
        assert stored == group
        self.group, self.version = stored, self.version + 1
        self.refresh(broker)
        self.timers += [timer for timer in consumer.timers(stored) if timer not in self.timers]
        return True

    def change(self, broker: int, how: Callable[[ConsumerGroup], ConsumerGroup]) -> None:
        while isinstance(group := self.read[broker].group, ConsumerGroup):
            changed = how(group)
            if changed is group or self.put(broker, changed):
                return
            self.refresh(broker)

    def answer(self, client: Client, fate: str) -> None:
        beat = client.sent
        assert beat is not None
        broker = self.brokers.index(beat.heard_by)
        assert consumer.check(beat, LIMITS) is None
        if fate == "broker died":
            client.hear_nothing()
            return
        outcome = self.apply(broker, beat)
        if fate == "unknown":
            self.refresh(broker)
            outcome = self.apply(broker, replace(beat, is_repeat=True))
        if fate == "lost":
            client.hear_nothing()
        else:
            assert outcome.answer is not None
            client.hear(outcome.answer)

    def apply(self, broker: int, beat: Beat) -> Outcome[Beaten]:
        while True:
            read = self.read[broker]
            if isinstance(read.group, ConsumerGroup) and not consumer.is_current(
                read.group, self.views[broker]
            ):
                self.views[broker] = self.topics.copy()
            outcome = consumer.beat(read.group, beat, self.views[broker], LIMITS, 0)
            if outcome.group is not read.group:
                assert outcome.group is not None
                if self.put(broker, outcome.group):
                    return outcome
            elif read.version == self.version or may_be_old(beat, outcome):
                return outcome
            self.refresh(broker)

    def settle(self) -> None:
        """The world stands still: those who crashed are expelled, and everybody else goes on."""
        for broker in (0, 1):
            self.refresh(broker)
            self.views[broker] = self.topics.copy()
        for client in self.living():
            if client.sent is not None:
                self.answer(client, "answered")
        present = {client.member_id for client in self.living() if client.epoch > 0 and not client.is_leaving}
        group = self.group
        for member in [] if group is None else list(group.members.values()):
            if member.member_id not in present:
                self.refresh(0)
                self.change(0, partial(expelled, member))
        for number in range(ROUNDS):
            if all(self.has_settled(client) for client in self.living()):
                break
            for client in self.living():
                client.sent = client.next_beat(self.brokers[number % 2])
                self.answer(client, "answered")
                client.give_up()
                client.owned = dict(client.told)
                self.check_owners()
        group = self.group
        living = self.settled_clients()
        if group is None or not living:
            return
        assert consumer.state_of(group) is GroupState.STABLE
        assert set(group.members) == {client.member_id for client in living}
        for client in living:
            assert (
                client.owned
                == group.target.get(client.member_id, {})
                == group.members[client.member_id].assigned
            )
            assert client.epoch == group.epoch
        owned = [pair for client in living for pair in pairs(client.owned)]
        wanted = {name for client in living for name in client.wanted_names()}
        everything = {
            (shape.topic_id.int, partition)
            for name, shape in self.topics.shapes.items()
            if name in wanted
            for partition in range(shape.partitions)
        }
        assert sorted(owned) == sorted(everything)
        for client in living:
            names = {self.topics.name_of(topic_id) for topic_id in client.owned}
            assert names <= set(client.wanted_names())

    def has_settled(self, client: Client) -> bool:
        group = self.group
        member = None if group is None else group.members.get(client.member_id)
        return (
            member is not None
            and group is not None
            and client.epoch == member.epoch == group.epoch == group.target_epoch
            and client.owned == group.target.get(client.member_id, {})
            and client.owned == (client.last_said or {})
            and not client.says_subscription
            and consumer.is_current(group, self.topics)
        )

    def settled_clients(self) -> list[Client]:
        """All but those whose instance id another has."""
        held = {client.instance_id for client in self.living() if client.epoch > 0}
        return [
            client for client in self.living() if client.epoch > 0 or client.instance_id not in held - {None}
        ]

    # What always holds.

    @invariant()
    def check_owners(self) -> None:
        """For members of the group: one that was expelled, and does not know it, may own what it likes."""
        group = self.group
        if group is None:
            return
        owners: dict[tuple[int, int], str] = {}
        for client in self.living():
            member = group.members.get(client.member_id)
            if member is None:
                continue
            owned, has = pairs(client.owned), pairs(member.assigned) | pairs(member.revoking)
            assert owned <= has | client.unfinished
            if not owned <= has:
                refusal = consumer.check_commit(group, client.member_id, client.epoch)
                assert isinstance(refusal, StaleMemberEpoch)
            for pair in owned & has:
                assert owners.setdefault(pair, client.member_id) == client.member_id, f"{pair} has two owners"
        held = [
            pair
            for member in group.members.values()
            for pair in (*pairs(member.assigned), *pairs(member.revoking))
        ]
        assert len(held) == len(set(held))

    @invariant()
    def epochs_never_go_back(self) -> None:
        group = self.group
        if group is None:
            return
        assert self.epoch <= group.epoch
        assert group.target_epoch <= group.epoch
        self.epoch = group.epoch
        for member in group.members.values():
            assert member.epoch <= group.target_epoch
            if member.epoch > 0:
                assert self.member_epochs.get(member.member_id, 0) <= member.epoch
                self.member_epochs[member.member_id] = member.epoch


def expelled(member: ConsumerMember, group: ConsumerGroup) -> ConsumerGroup:
    return consumer.expel(group, member.member_id, member.heard_by, 0)


def may_be_old(beat: Beat, outcome: Outcome[Beaten]) -> bool:
    return isinstance(outcome.answer, Beaten) and not consumer.needs_newest(beat)


def test_partitions_have_one_owner_and_members_converge() -> None:
    run_state_machine_as_test(
        Groups,
        settings=settings(max_examples=200, stateful_step_count=60, deadline=None, print_blob=True),
    )
