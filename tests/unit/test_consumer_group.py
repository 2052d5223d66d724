"""One heartbeat at a time: what it does to a consumer group and what the member is told.

Epochs, assignments and errors are those of Apache Kafka 4.2's coordinator, save where a test says otherwise.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from dray.errors import (
    CoordinatorAway,
    FencedInstance,
    FencedMemberEpoch,
    GroupError,
    GroupFull,
    InvalidMemberRequest,
    InvalidRegex,
    NoMemberEpoch,
    StaleMemberEpoch,
    UnknownGroup,
    UnknownMember,
    UnreleasedInstance,
    UnsupportedAssignor,
)
from dray.groups import consumer
from dray.groups.group import (
    Beat,
    Beaten,
    ClassicGroup,
    ConsumerGroup,
    Dying,
    Group,
    GroupLimits,
    GroupState,
    Leaving,
    MemberState,
    TimerKind,
)
from tests.consumer_groups import HERE, THERE, MemoryTopics, join_beat, light_beat, pairs

LIMITS = GroupLimits()


class Scene:
    """A group, the topics, and what members are told."""

    def __init__(self, group: Group | None = None, limits: GroupLimits = LIMITS, **partitions: int) -> None:
        self.group = group
        self.topics = MemoryTopics(**partitions)
        self.limits = limits

    def ask(self, beat: Beat) -> Beaten | GroupError:
        outcome = consumer.beat(self.group, beat, self.topics, self.limits, 7_000)
        self.group = outcome.group
        assert outcome.answer is not None
        return outcome.answer

    def told(self, beat: Beat) -> tuple[int, set[tuple[int, int]] | None]:
        """Its epoch, and its partitions if it was told of them."""
        answer = self.ask(beat)
        assert isinstance(answer, Beaten), repr(answer)
        assert answer.member_id == beat.member_id
        return answer.epoch, None if answer.assignment is None else pairs(answer.assignment)

    def changes_nothing(self, beat: Beat) -> bool:
        before = self.group
        self.ask(beat)
        return self.group is before

    @property
    def consumers(self) -> ConsumerGroup:
        assert isinstance(self.group, ConsumerGroup)
        return self.group

    def settle(self) -> None:
        """Everybody says what it has, until nothing changes."""
        before: Group | None = None
        while before is not self.group:
            before = self.group
            for member in list(self.consumers.members.values()):
                self.ask(light_beat(member.member_id, member.epoch, owned=member.assigned))


def two_members() -> Scene:
    scene = Scene(a=4)
    scene.ask(join_beat("A", "a"))
    scene.ask(join_beat("B", "a"))
    scene.settle()
    return scene


def test_first_member_gets_everything() -> None:
    scene = Scene(a=2, b=1)
    assert scene.told(join_beat("A", "a", "b")) == (1, {(1, 0), (1, 1), (2, 0)})
    assert consumer.state_of(scene.consumers) is GroupState.STABLE


def test_heartbeat_without_news_changes_nothing() -> None:
    scene = Scene(a=2)
    scene.ask(join_beat("A", "a"))
    assert scene.changes_nothing(light_beat("A", 1))
    assert scene.told(light_beat("A", 1)) == (1, None)
    assert scene.changes_nothing(join_beat("A", "a"))


def test_partitions_are_given_up_before_another_gets_them() -> None:
    scene = Scene(a=4)
    scene.ask(join_beat("A", "a"))
    assert scene.told(join_beat("B", "a")) == (2, set())
    assert consumer.state_of(scene.consumers) is GroupState.RECONCILING
    epoch, kept = scene.told(light_beat("A", 1))
    assert epoch == 1  # until it has given up the others
    assert kept is not None
    assert len(kept) == 2
    assert scene.told(light_beat("B", 2)) == (2, None)
    assert scene.told(light_beat("A", 1)) == (1, None)  # it does not say what it owns
    owned = scene.consumers.members["A"].assigned
    everything = {topic_id: frozenset(range(4)) for topic_id in owned}
    assert scene.told(light_beat("A", 1, owned=everything)) == (1, None)  # and it still owns all
    assert scene.told(light_beat("A", 1, owned=owned)) == (2, None)
    assert scene.told(light_beat("B", 2)) == (2, {(1, each) for each in range(4)} - kept)
    assert consumer.state_of(scene.consumers) is GroupState.STABLE


def test_full_heartbeat_is_told_everything() -> None:
    scene = Scene(a=1)
    scene.ask(join_beat("A", "a"))
    assigned = scene.consumers.members["A"].assigned
    full: dict[str, Any] = {"rebalance_timeout_ms": 60_000, "topics": frozenset("a"), "owned": assigned}
    assert scene.told(light_beat("A", 1, **full)) == (1, {(1, 0)})
    for lacking in full:
        said = {name: value for name, value in full.items() if name != lacking}
        assert scene.told(light_beat("A", 1, **said)) == (1, None)


def test_member_joins_again_with_what_it_had() -> None:
    """Kafka 4.2: epoch 0 is never fenced."""
    scene = two_members()
    had = pairs(scene.consumers.members["A"].assigned)
    before = scene.group
    assert scene.told(join_beat("A", "a")) == (2, had)
    assert scene.group is before


def test_change_of_subscription_raises_the_epoch() -> None:
    scene = Scene(a=1, b=1)
    scene.ask(join_beat("A", "a"))
    owned = scene.consumers.members["A"].assigned
    assert scene.told(light_beat("A", 1, topics=frozenset("b"))) == (1, set())
    assert scene.told(light_beat("A", 1, owned={})) == (2, {(2, 0)})
    assert owned != scene.consumers.members["A"].assigned


def test_unsubscribed_topic_is_given_up_while_others_are() -> None:
    scene = Scene(a=2, b=2)
    scene.ask(join_beat("A", "a", "b"))
    scene.ask(join_beat("B", "a", "b"))
    scene.ask(light_beat("A", 1))
    revoking = scene.consumers.members["A"].revoking
    assert pairs(revoking) == {(2, 0), (2, 1)}
    assert scene.told(light_beat("A", 1, topics=frozenset("b"))) == (1, set())
    member = scene.consumers.members["A"]
    assert member.state is MemberState.UNREVOKED
    assert pairs(member.revoking) == {(1, 0), (1, 1), (2, 0), (2, 1)}


@pytest.mark.parametrize("change", ["create", "grow", "delete", "make again"])
def test_change_of_topics_raises_the_epoch(change: str) -> None:
    scene = Scene(a=2)
    scene.ask(join_beat("A", "a", "b"))
    assert consumer.is_current(scene.consumers, scene.topics)
    match change:
        case "create":
            scene.topics.create("b", 1)
        case "grow":
            scene.topics.grow("a", 3)
        case "delete":
            scene.topics.delete("a")
        case "make again":
            scene.topics.create("a", 2)
    assert not consumer.is_current(scene.consumers, scene.topics)
    scene.ask(light_beat("A", 1))
    assert scene.consumers.epoch == scene.consumers.target_epoch == 2
    assert consumer.is_current(scene.consumers, scene.topics)


def test_topics_nobody_subscribes_to_do_not_matter() -> None:
    scene = Scene(a=2)
    scene.ask(join_beat("A", "a"))
    scene.topics.create("b", 5)
    assert consumer.is_current(scene.consumers, scene.topics)
    assert scene.changes_nothing(light_beat("A", 1))


def test_subscription_by_expression() -> None:
    """Kafka finds the topics after it answered, and so needs two epochs for this."""
    scene = Scene(logs_a=1, logs_b=1, other=1)
    assert scene.told(join_beat("A", regex="logs_.*", topics=None)) == (1, {(1, 0), (2, 0)})
    scene.topics.create("logs_c", 1)
    assert scene.told(light_beat("A", 1)) == (2, {(1, 0), (2, 0), (4, 0)})
    assert consumer.subscribed_topics(scene.consumers, scene.topics) == {"logs_a", "logs_b", "logs_c"}
    scene.ask(light_beat("A", 2, regex=""))
    assert scene.consumers.members["A"].regex is None
    assert consumer.subscribed_topics(scene.consumers, scene.topics) == set()


def test_epoch_of_nobodys_knowledge_is_fenced() -> None:
    scene = two_members()
    before = scene.group
    assert isinstance(scene.ask(light_beat("A", 3)), FencedMemberEpoch)
    assert isinstance(scene.ask(light_beat("A", 1)), FencedMemberEpoch)  # it does not say what it owns
    assert scene.group is before


def test_previous_epoch_is_believed_of_a_member_that_owns_nothing_else() -> None:
    scene = two_members()
    member = scene.consumers.members["A"]
    topic_id = next(iter(member.assigned))
    full: dict[str, Any] = {"rebalance_timeout_ms": 60_000, "topics": frozenset("a")}
    assert scene.told(light_beat("A", 1, owned=member.assigned, **full)) == (2, pairs(member.assigned))
    too_much = {topic_id: frozenset(range(4))}
    assert isinstance(scene.ask(light_beat("A", 1, owned=too_much, **full)), FencedMemberEpoch)
    assert isinstance(scene.ask(light_beat("B", 1, owned={}, **full)), FencedMemberEpoch)  # it never had 1


def test_member_is_taken_at_its_word_and_fenced_if_it_took_the_partition_all_the_same() -> None:
    """It was still to take what it was told, did not hear the answer, and so took too much. As in Kafka."""
    scene = Scene(a=2)
    scene.ask(join_beat("A", "a"))
    scene.ask(join_beat("B", "a"))
    assert scene.told(light_beat("A", 1, owned={})) == (2, {(1, 0)})
    assert scene.told(light_beat("B", 2)) == (2, {(1, 1)})
    assert isinstance(consumer.check_commit(scene.consumers, "A", 1), StaleMemberEpoch)
    topic_id = next(iter(scene.consumers.members["B"].assigned))
    too_much = {topic_id: frozenset({0, 1})}
    assert isinstance(scene.ask(light_beat("A", 1, owned=too_much)), FencedMemberEpoch)


def test_heartbeat_that_is_applied_twice_is_answered_alike() -> None:
    scene = Scene(a=4)
    scene.ask(join_beat("A", "a"))
    scene.ask(join_beat("B", "a"))
    scene.ask(light_beat("A", 1))
    scene.ask(light_beat("A", 1, owned=scene.consumers.members["A"].assigned))
    beat = light_beat("B", 2)
    first = scene.ask(beat)
    assert isinstance(first, Beaten)
    assert first.assignment
    assert scene.ask(replace(beat, is_repeat=True)) == first
    scene.topics.grow("a", 6)
    beat = light_beat("B", 2)
    first = scene.ask(beat)
    assert isinstance(first, Beaten)
    assert first.epoch == 3
    after = scene.group
    assert scene.ask(replace(beat, is_repeat=True)) == first
    assert scene.group is after


def test_leaving_twice_is_leaving() -> None:
    scene = two_members()
    beat = light_beat("A", -1)
    first = scene.ask(beat)
    after = scene.group
    assert scene.ask(replace(beat, is_repeat=True)) == first
    assert scene.group is after
    assert isinstance(scene.ask(beat), UnknownMember)


def test_leaving_raises_the_epoch_and_the_next_heartbeat_assigns() -> None:
    scene = two_members()
    assert scene.told(light_beat("A", -1)) == (-1, None)
    assert (scene.consumers.epoch, scene.consumers.target_epoch) == (3, 2)
    assert consumer.state_of(scene.consumers) is GroupState.ASSIGNING
    assert scene.told(light_beat("B", 2)) == (3, {(1, each) for each in range(4)})
    assert scene.consumers.epoch == 3


def test_leaving_with_the_only_subscription_to_a_topic_is_one_epoch() -> None:
    scene = Scene(a=1, b=1)
    scene.ask(join_beat("A", "a"))
    scene.ask(join_beat("B", "b"))
    scene.settle()
    scene.ask(light_beat("A", -1))
    scene.ask(light_beat("B", 2))
    assert scene.consumers.epoch == scene.consumers.target_epoch == 3


def test_last_one_out_leaves_an_empty_group() -> None:
    scene = Scene(a=1)
    scene.ask(join_beat("A", "a"))
    scene.ask(light_beat("A", -1))
    group = scene.consumers
    assert consumer.state_of(group) is GroupState.EMPTY
    assert (group.epoch, group.state_since_ms, group.target) == (2, 7_000, {})
    assert scene.told(join_beat("B", "a")) == (3, {(1, 0)})


def test_tools_take_several_members_out_in_one_epoch() -> None:
    scene = Scene(a=3)
    for member_id, instance_id in (("A", None), ("B", "two"), ("C", "three")):
        scene.ask(join_beat(member_id, "a", instance_id=instance_id))
    scene.settle()
    before = scene.consumers
    leaving = [
        Leaving("A", None),
        Leaving("", "two"),
        Leaving("wrong", "three"),
        Leaving("", "four"),
        Leaving("A", "four"),
        Leaving("nobody", None),
    ]
    outcome = consumer.leave(before, leaving, 7_000)
    assert isinstance(outcome.answer, tuple)
    assert [(each.member_id, each.instance_id) for each in outcome.answer] == leaving
    assert [type(each.error) for each in outcome.answer] == [
        *[type(None)] * 2,
        FencedInstance,
        *[UnknownMember] * 3,
    ]
    assert isinstance(outcome.group, ConsumerGroup)
    assert set(outcome.group.members) == set(outcome.group.target) == {"C"}
    assert outcome.group.epoch == before.epoch + 1
    assert consumer.leave(outcome.group, leaving, 7_000).group is outcome.group


def test_static_member_returns_to_its_partitions_in_the_same_epoch() -> None:
    scene = Scene(a=2)
    scene.ask(join_beat("A", "a", instance_id="one"))
    scene.ask(join_beat("B", "a"))
    scene.settle()
    had = pairs(scene.consumers.members["A"].assigned)
    assert scene.told(light_beat("A", -2, instance_id="one")) == (-2, None)
    assert scene.changes_nothing(light_beat("B", 2))
    assert scene.told(join_beat("A2", "a", instance_id="one")) == (2, had)
    assert scene.consumers.epoch == 2
    assert set(scene.consumers.members) == {"A2", "B"}
    assert isinstance(scene.ask(light_beat("A", 2, instance_id="one")), FencedInstance)
    assert isinstance(scene.ask(light_beat("A", -2, instance_id="one")), FencedInstance)
    assert isinstance(scene.ask(light_beat("A", -1, instance_id="two")), UnknownMember)
    assert scene.told(light_beat("A2", 2, instance_id="one")) == (2, None)


def test_static_member_that_is_away_holds_its_partitions_and_gives_up_what_it_was_to() -> None:
    scene = Scene(a=2)
    scene.ask(join_beat("A", "a", instance_id="one"))
    scene.ask(join_beat("B", "a"))
    scene.ask(light_beat("A", 1, instance_id="one"))
    assert consumer.timers(scene.consumers)
    scene.ask(light_beat("A", -2, instance_id="one"))
    assert consumer.timers(scene.consumers) == ()
    _, got = scene.told(light_beat("B", 2))
    assert got is not None
    assert len(got) == 1


def test_instance_id_of_one_who_has_not_left_is_not_given_away() -> None:
    scene = Scene(a=2)
    scene.ask(join_beat("A", "a", instance_id="one"))
    before = scene.group
    assert isinstance(scene.ask(join_beat("B", "a", instance_id="one")), UnreleasedInstance)
    assert scene.group is before


def test_static_member_may_join_twice() -> None:
    """Kafka refuses it, and a client stops. Here a broker may die between put and answer."""
    scene = Scene(a=1)
    scene.ask(join_beat("A", "a", instance_id="one"))
    assert scene.told(join_beat("A", "a", instance_id="one")) == (1, {(1, 0)})


def test_full_group_takes_only_its_members() -> None:
    scene = Scene(a=1, limits=GroupLimits(consumer_max_size=1))
    scene.ask(join_beat("A", "a"))
    assert isinstance(scene.ask(join_beat("B", "a")), GroupFull)
    assert isinstance(scene.ask(light_beat("B", 1)), GroupFull)  # as Kafka, before it looks for the member
    assert scene.told(light_beat("A", 1)) == (1, None)


@pytest.mark.parametrize("epoch", [5, -1, -2])
@pytest.mark.parametrize("group", [None, ClassicGroup(), ClassicGroup(state=GroupState.STABLE)])
def test_only_a_join_makes_a_group(group: Group | None, epoch: int) -> None:
    scene = Scene(group, a=1)
    assert isinstance(scene.ask(light_beat("A", epoch, instance_id="one")), UnknownGroup)
    assert scene.group is group


def test_empty_classic_group_becomes_a_consumer_group_and_ages_on() -> None:
    """Kafka's begins at epoch 1."""
    scene = Scene(ClassicGroup(generation=8, protocol_type="consumer"), a=1)
    assert scene.told(join_beat("A", "a")) == (9, {(1, 0)})


def test_classic_group_with_members_stays_one() -> None:
    scene = Scene(ClassicGroup(generation=8, state=GroupState.PREPARING), a=1)
    assert isinstance(scene.ask(join_beat("A", "a")), UnknownGroup)


def test_group_that_is_being_deleted_is_to_be_asked_again() -> None:
    assert isinstance(Scene(Dying(), a=1).ask(join_beat("A", "a")), CoordinatorAway)


def test_members_vote_for_the_assignor() -> None:
    scene = Scene(a=2, b=2)
    scene.ask(join_beat("A", "a", "b"))
    assert consumer.assignor_of(scene.consumers, LIMITS) == "uniform"
    scene.ask(join_beat("B", "a", "b", assignor="range"))
    assert consumer.assignor_of(scene.consumers, LIMITS) == "range"
    scene.settle()
    # Range gives both topics' same partitions to one member.
    assert {partition for _, partition in pairs(scene.consumers.members["A"].assigned)} in ({0}, {1})
    scene.ask(join_beat("C", "a", "b", assignor="uniform"))
    assert consumer.assignor_of(scene.consumers, LIMITS) == "uniform"  # as many: the first in the settings
    before = scene.consumers.epoch
    scene.ask(light_beat("C", 3, assignor="range"))
    assert scene.consumers.epoch == before


def test_who_hears_a_member_moves_with_it() -> None:
    scene = two_members()
    epoch = scene.consumers.epoch
    assert not scene.changes_nothing(light_beat("A", 2, heard_by=THERE))
    assert scene.consumers.members["A"].heard_by == THERE
    assert scene.consumers.epoch == epoch
    assert scene.changes_nothing(light_beat("A", 2, heard_by=THERE))
    group = scene.consumers
    assert consumer.expel(group, "A", HERE, 0) is group  # that one no longer hears it
    assert consumer.expel(group, "nobody", HERE, 0) is group
    assert "A" not in consumer.expel(group, "A", THERE, 0).members
    assert consumer.hear(group, "A", THERE) is group
    assert consumer.hear(group, "nobody", THERE) is group
    assert consumer.hear(group, "A", HERE).members["A"].heard_by == HERE
    sessions = {session.member_id: session for session in consumer.sessions(group, LIMITS)}
    assert sessions["A"] == ("A", THERE, 45_000)


def test_member_that_does_not_give_up_is_fenced() -> None:
    scene = Scene(a=4)
    scene.ask(join_beat("A", "a", rebalance_timeout_ms=300))
    assert consumer.timers(scene.consumers) == ()
    scene.ask(join_beat("B", "a"))
    scene.ask(light_beat("A", 1))
    (timer,) = consumer.timers(scene.consumers)
    assert (timer.kind, timer.member_id, timer.after_ms) == (TimerKind.REVOKE, "A", 300)
    fenced = consumer.fire(scene.consumers, timer, 0)
    assert set(fenced.members) == {"B"}
    assert fenced.epoch == 3
    assert consumer.fire(fenced, timer, 0) is fenced
    scene.ask(light_beat("A", 1, owned=scene.consumers.members["A"].assigned))
    assert consumer.fire(scene.consumers, timer, 0) is scene.consumers


def test_each_revocation_has_its_own_time() -> None:
    scene = Scene(a=6)
    scene.ask(join_beat("A", "a"))
    scene.ask(join_beat("B", "a"))
    scene.ask(light_beat("A", 1))
    (first,) = consumer.timers(scene.consumers)
    scene.ask(join_beat("C", "a"))
    scene.ask(light_beat("A", 1))
    assert consumer.timers(scene.consumers) == (first,)  # it was told of nothing else yet
    scene.ask(light_beat("A", 1, owned=scene.consumers.members["A"].assigned))
    (second,) = consumer.timers(scene.consumers)
    assert second != first
    assert scene.consumers.members["A"].epoch == 1
    assert consumer.fire(scene.consumers, first, 0) is scene.consumers


def test_commits_are_for_members_of_this_epoch() -> None:
    scene = two_members()
    group = scene.consumers
    assert consumer.check_commit(group, "A", 2) is None
    assert isinstance(consumer.check_commit(group, "A", 1), StaleMemberEpoch)
    assert isinstance(consumer.check_commit(group, "A", -1), StaleMemberEpoch)
    assert isinstance(consumer.check_commit(group, "", -1), UnknownMember)
    assert consumer.check_commit(ConsumerGroup(epoch=3), "", -1) is None
    assert isinstance(consumer.check_commit(ConsumerGroup(epoch=3), "A", 3), UnknownMember)


def test_commits_of_members_say_an_epoch() -> None:
    """Before OffsetCommit 9 they cannot; who is no member is told that."""
    group = two_members().consumers
    assert isinstance(consumer.check_commit(group, "A", 2, is_epoch=False), NoMemberEpoch)
    assert isinstance(consumer.check_commit(group, "A", 1, is_epoch=False), NoMemberEpoch)
    assert isinstance(consumer.check_commit(group, "nobody", 2, is_epoch=False), UnknownMember)
    assert consumer.check_commit(ConsumerGroup(epoch=3), "", -1, is_epoch=False) is None


def test_fetches_in_a_members_name_are_for_this_epoch() -> None:
    group = two_members().consumers
    assert consumer.check_fetch(group, None, -1) is None
    assert consumer.check_fetch(group, "A", 2) is None
    assert isinstance(consumer.check_fetch(group, "A", 1), StaleMemberEpoch)
    assert isinstance(consumer.check_fetch(group, "nobody", 1), UnknownMember)
    assert isinstance(consumer.check_fetch(group, None, 1), UnknownMember)


@pytest.mark.parametrize(
    ("beat", "error"),
    [
        (join_beat("", "a"), InvalidMemberRequest),
        (join_beat(" \t", "a"), InvalidMemberRequest),
        (light_beat("", 3), InvalidMemberRequest),
        (join_beat("A", "a", instance_id=" "), InvalidMemberRequest),
        (join_beat("A", "a", rack_id=""), InvalidMemberRequest),
        (join_beat("A", "a", rebalance_timeout_ms=-1), InvalidMemberRequest),
        (join_beat("A", "a", owned=None), InvalidMemberRequest),
        (join_beat("A", "a", owned={UUID(int=1): frozenset({0})}), InvalidMemberRequest),
        (join_beat("A", topics=None), InvalidMemberRequest),
        (light_beat("A", -2), InvalidMemberRequest),
        (light_beat("A", -3), InvalidMemberRequest),
        (join_beat("A", "a", assignor="sticky"), UnsupportedAssignor),
        (join_beat("A", topics=None, regex="("), InvalidRegex),
        (light_beat("A", 3, regex="("), InvalidRegex),
    ],
)
def test_request_that_makes_no_sense(beat: Beat, error: type[GroupError]) -> None:
    assert isinstance(consumer.check(beat, LIMITS), error)


@pytest.mark.parametrize(
    "beat",
    [
        join_beat("A"),
        join_beat("A", topics=None, regex=""),
        join_beat("A", "a", rebalance_timeout_ms=0, assignor="range"),
        light_beat("A", 3),
        light_beat("A", -1),
        light_beat("A", -2, instance_id="one"),
    ],
)
def test_request_that_makes_sense(beat: Beat) -> None:
    assert consumer.check(beat, LIMITS) is None


def test_heartbeat_that_says_something_needs_the_newest_group() -> None:
    assert not consumer.needs_newest(light_beat("A", 3, instance_id="one"))
    for beat in (
        light_beat("A", 3, owned={}),
        light_beat("A", 3, topics=frozenset()),
        light_beat("A", 3, regex=""),
        light_beat("A", -1),
        join_beat("A", "a"),
    ):
        assert consumer.needs_newest(beat)


def test_member_without_a_subscription_does_not_disturb_the_others() -> None:
    scene = Scene(a=1)
    scene.ask(join_beat("A", "a"))
    assert scene.told(join_beat("B")) == (1, set())
    assert scene.consumers.epoch == 1
