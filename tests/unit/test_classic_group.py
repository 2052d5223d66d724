"""The classic protocol, event by event. What is expected is what Kafka's coordinator does; where Dray differs
on purpose, the test says so.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from dray.errors import (
    FencedInstance,
    GroupError,
    GroupFull,
    IllegalGeneration,
    InconsistentProtocol,
    InvalidSessionTimeout,
    MemberIdRequired,
    RebalanceInProgress,
    UnknownGroup,
    UnknownMember,
)
from dray.groups import classic
from dray.groups.group import (
    ClassicGroup,
    ConsumerGroup,
    ConsumerMember,
    Dying,
    Group,
    GroupLimits,
    GroupState,
    Join,
    Joined,
    JoinedMember,
    Leaving,
    Left,
    MemberSession,
    Outcome,
    Process,
    Sync,
    Synced,
    TimerKind,
)

HERE, THERE = Process(1, 1_000), Process(2, 2_000)
LIMITS = GroupLimits()
NOW = 1_700_000_000_000
RANGE = (("range", b"r"),)


def joining(new_id: str = "", member_id: str = "", **changes: Any) -> Join:
    """A newcomer that gets `new_id`, or a member. As a member of old clients, without a first refusal."""
    fields: dict[str, Any] = {
        "member_id": member_id,
        "new_member_id": new_id or f"{member_id}-again",
        "instance_id": None,
        "client_id": "client",
        "client_host": "/10.0.0.1",
        "session_timeout_ms": 10_000,
        "rebalance_timeout_ms": 60_000,
        "protocol_type": "consumer",
        "protocols": RANGE,
        "heard_by": HERE,
        "needs_known_id": False,
        "can_skip_assignment": True,
    }
    return Join(**fields | changes)


def syncing(member_id: str, generation: int, **changes: Any) -> Sync:
    fields: dict[str, Any] = {
        "member_id": member_id,
        "instance_id": None,
        "generation": generation,
        "protocol_type": "consumer",
        "protocol": "range",
        "assignments": {},
    }
    return Sync(**fields | changes)


def changed(outcome: Outcome[Any]) -> ClassicGroup:
    assert isinstance(outcome.group, ClassicGroup)
    return outcome.group


def as_classic(group: Group | None) -> ClassicGroup:
    assert isinstance(group, ClassicGroup)
    return group


def join(group: Group | None, request: Join, limits: GroupLimits = LIMITS) -> ClassicGroup:
    """Of one that is taken."""
    outcome = classic.join(group, request, limits, NOW)
    assert not isinstance(outcome.answer, GroupError), outcome.answer
    return changed(outcome)


def fire(group: ClassicGroup, now_ms: int = NOW) -> ClassicGroup:
    (timer,) = classic.timers(group)
    return as_classic(classic.fire(group, timer, now_ms))


def completing(*requests: Join) -> ClassicGroup:
    """A group in its first generation, whose members have not synced."""
    group: ClassicGroup | None = None
    for request in requests:
        group = join(group, request)
    assert group is not None
    while group.state is GroupState.PREPARING:
        group = fire(group)
    return group


def stable(*requests: Join, assignments: dict[str, bytes] | None = None) -> ClassicGroup:
    group = completing(*requests)
    assert group.leader is not None
    each = {member_id: member_id.encode() for member_id in group.members}
    for member_id in [group.leader, *group.members]:
        found = group.members[member_id]
        request = syncing(
            member_id,
            group.generation,
            instance_id=found.instance_id,
            assignments=each if assignments is None else assignments,
            protocol_type=group.protocol_type,
            protocol=group.protocol,
        )
        group = changed(classic.sync(group, request))
    assert group.state is GroupState.STABLE
    return group


def static(new_id: str, instance_id: str, **changes: Any) -> Join:
    return joining(new_id, instance_id=instance_id, **changes)


class TestJoining:
    def test_a_group_begins_with_the_initial_delay(self) -> None:
        outcome = classic.join(None, joining("a"), LIMITS, NOW)
        group = changed(outcome)
        assert outcome.answer is None
        assert (group.state, group.generation, group.leader) == (GroupState.PREPARING, 0, "a")
        assert [(each.kind, each.after_ms) for each in classic.timers(group)] == [
            (TimerKind.INITIAL_DELAY, 3_000)
        ]

    def test_first_member_leads_and_is_told_of_all(self) -> None:
        group = completing(joining("a"), joining("b", protocols=(("range", b"other"),)))
        assert (group.state, group.generation) == (GroupState.COMPLETING, 1)
        assert classic.joined(group, joining("a"), "a") == Joined(
            member_id="a",
            generation=1,
            protocol_type="consumer",
            protocol="range",
            leader="a",
            members=(JoinedMember("a", None, b"r"), JoinedMember("b", None, b"other")),
        )
        assert classic.joined(group, joining("b"), "b") == Joined(
            member_id="b",
            generation=1,
            protocol_type="consumer",
            protocol="range",
            leader="a",
            members=(),
        )

    @pytest.mark.parametrize("timeout_ms", [-1, 0, 5_999, 1_800_001])
    def test_session_timeout_out_of_bounds_is_refused(self, timeout_ms: int) -> None:
        outcome = classic.join(None, joining("a", session_timeout_ms=timeout_ms), LIMITS, NOW)
        assert outcome.group is None
        assert isinstance(outcome.answer, InvalidSessionTimeout)

    @pytest.mark.parametrize("timeout_ms", [6_000, 1_800_000])
    def test_session_timeout_at_the_bound_is_taken(self, timeout_ms: int) -> None:
        join(None, joining("a", session_timeout_ms=timeout_ms))

    def test_negative_rebalance_timeout_is_none(self) -> None:
        """It ends up in a record that has no negative numbers there."""
        group = join(None, joining("a", rebalance_timeout_ms=-5))
        assert group.members["a"].rebalance_timeout_ms == 0
        again = join(group, joining(member_id="a", rebalance_timeout_ms=-7))
        assert again.members["a"].rebalance_timeout_ms == 0

    @pytest.mark.parametrize("changes", [{"protocol_type": ""}, {"protocols": ()}])
    def test_a_member_without_protocols_makes_no_group(self, changes: dict[str, Any]) -> None:
        outcome = classic.join(None, joining("a", **changes), LIMITS, NOW)
        assert outcome.group is None
        assert isinstance(outcome.answer, InconsistentProtocol)

    @pytest.mark.parametrize(
        "changes", [{"protocol_type": "connect"}, {"protocols": (("sticky", b""),)}, {"protocols": ()}]
    )
    def test_nothing_in_common_with_the_others_is_refused(self, changes: dict[str, Any]) -> None:
        group = stable(joining("a"))
        outcome = classic.join(group, joining("b", **changes), LIMITS, NOW)
        assert outcome.group is group
        assert isinstance(outcome.answer, InconsistentProtocol)

    def test_an_empty_group_takes_another_type(self) -> None:
        group = changed(classic.leave(stable(joining("a")), [Leaving("a", None)], NOW))
        assert (group.state, group.protocol_type, group.protocol) == (GroupState.EMPTY, "consumer", None)
        assert join(group, joining("b", protocol_type="connect")).protocol_type == "connect"

    def test_id_that_nobody_has_is_unknown(self) -> None:
        for group in (None, ConsumerGroup(epoch=4), stable(joining("a")), join(None, joining("a"))):
            outcome = classic.join(group, joining(member_id="nobody"), LIMITS, NOW)
            assert outcome.group is group
            assert isinstance(outcome.answer, UnknownMember)

    def test_newcomers_during_a_rebalance_end_it_with_all_the_others(self) -> None:
        group = stable(joining("a"))
        group = join(group, joining("b"))
        assert group.state is GroupState.PREPARING
        group = join(group, joining("c"))
        assert group.state is GroupState.PREPARING
        outcome = classic.join(group, joining(member_id="a"), LIMITS, NOW)
        assert changed(outcome).state is GroupState.COMPLETING
        assert isinstance(outcome.answer, Joined)
        assert (outcome.answer.generation, len(outcome.answer.members)) == (2, 3)

    def test_rejoin_updates_what_the_member_said(self) -> None:
        group = join(stable(joining("a"), joining("b")), joining("c"))
        new = joining(
            member_id="b",
            session_timeout_ms=7_000,
            rebalance_timeout_ms=8_000,
            protocols=(("range", b"2"),),
            heard_by=THERE,
        )
        b = join(group, new).members["b"]
        assert (b.session_timeout_ms, b.rebalance_timeout_ms) == (7_000, 8_000)
        assert (b.protocols, b.heard_by) == ((("range", b"2"),), THERE)

    def test_waiting_joins_wait_until_the_end(self) -> None:
        group = join(join(None, joining("a")), joining("b"))
        assert classic.joined(group, joining("a"), "a") is None
        assert classic.joined(group, joining("b"), "b") is None


class TestNewIds:
    def test_newcomer_is_told_its_id_first(self) -> None:
        outcome = classic.join(None, joining("a", needs_known_id=True), LIMITS, NOW)
        group = changed(outcome)
        assert isinstance(outcome.answer, MemberIdRequired)
        assert outcome.answer.member_id == "a"
        assert (group.state, list(group.pending), dict(group.members)) == (GroupState.EMPTY, ["a"], {})
        assert list(classic.sessions(group)) == [MemberSession("a", HERE, 10_000)]
        group = join(group, joining(member_id="a", needs_known_id=True))
        assert (list(group.pending), list(group.members)) == ([], ["a"])

    def test_static_newcomer_needs_no_id(self) -> None:
        assert list(join(None, static("a", "i", needs_known_id=True)).members) == ["a"]

    def test_asking_twice_is_asking_once(self) -> None:
        request = joining("a", needs_known_id=True)
        group = changed(classic.join(None, request, LIMITS, NOW))
        outcome = classic.join(group, request, LIMITS, NOW)
        assert outcome.group is group
        assert isinstance(outcome.answer, MemberIdRequired)

    def test_a_rebalance_waits_for_who_is_about_to_join(self) -> None:
        group = stable(joining("a"))
        group = changed(classic.join(group, joining("b", needs_known_id=True), LIMITS, NOW))
        assert group.state is GroupState.STABLE
        group = join(group, joining(member_id="a"))
        assert group.state is GroupState.PREPARING
        assert join(group, joining(member_id="b")).state is GroupState.COMPLETING
        assert as_classic(classic.expel(group, "b", HERE, NOW)).state is GroupState.COMPLETING
        assert changed(classic.leave(group, [Leaving("b", None)], NOW)).state is GroupState.COMPLETING

    def test_id_that_expired_is_unknown(self) -> None:
        group = changed(classic.join(None, joining("a", needs_known_id=True), LIMITS, NOW))
        group = as_classic(classic.expel(group, "a", HERE, NOW))
        assert not group.pending
        outcome = classic.join(group, joining(member_id="a"), LIMITS, NOW)
        assert isinstance(outcome.answer, UnknownMember)

    def test_instance_cannot_join_by_an_id_that_was_given_to_nobody(self) -> None:
        """Kafka's coordinator fails with UNKNOWN_SERVER_ERROR here."""
        group = changed(classic.join(None, joining("a", needs_known_id=True), LIMITS, NOW))
        outcome = classic.join(group, joining(member_id="a", instance_id="i"), LIMITS, NOW)
        assert outcome.group is group
        assert isinstance(outcome.answer, UnknownMember)

    def test_ids_are_bounded(self) -> None:
        """Kafka has no bound here."""
        group: Group | None = None
        answers = []
        for number in range(1_200):
            outcome = classic.join(group, joining(f"m{number}", needs_known_id=True), LIMITS, NOW)
            group = outcome.group
            answers.append(type(outcome.answer))
        assert len(as_classic(group).pending) == 1_000
        assert answers == [MemberIdRequired] * 1_000 + [GroupFull] * 200

    def test_ids_that_are_out_count_towards_the_size(self) -> None:
        """Kafka gives out any number, and refuses whoever joins too late."""
        limits = GroupLimits(max_size=3)
        group: Group | None = stable(joining("a"), joining("b"))
        group = changed(classic.join(group, joining("c", needs_known_id=True), limits, NOW))
        outcome = classic.join(group, joining("d", needs_known_id=True), limits, NOW)
        assert outcome.group is group
        assert isinstance(outcome.answer, GroupFull)
        assert len(join(group, joining(member_id="c"), limits).members) == 3


class TestSize:
    LIMITS = GroupLimits(max_size=2)

    def test_full_group_refuses_newcomers(self) -> None:
        group = stable(joining("a"), joining("b"))
        for request in (joining("c"), joining("c", needs_known_id=True), static("c", "i")):
            outcome = classic.join(group, request, self.LIMITS, NOW)
            assert outcome.group is group
            assert isinstance(outcome.answer, GroupFull)

    def test_full_group_takes_its_members(self) -> None:
        group = stable(joining("a"), joining("b"))
        assert isinstance(classic.join(group, joining(member_id="b"), self.LIMITS, NOW).answer, Joined)

    def test_those_who_rejoin_last_are_not_taken_when_the_bound_was_lowered(self) -> None:
        group = stable(joining("a"), joining("b"), joining("c"))
        group = join(group, joining(member_id="a"), self.LIMITS)
        group = join(group, joining(member_id="b"), self.LIMITS)
        outcome = classic.join(group, joining(member_id="c"), self.LIMITS, NOW)
        assert isinstance(outcome.answer, GroupFull)
        assert list(changed(outcome).members) == ["a", "b"]
        again = classic.join(group, joining(member_id="a"), self.LIMITS, NOW)
        assert again == Outcome(group, None)

    def test_a_pending_member_that_finds_no_room_is_dropped(self) -> None:
        group = stable(joining("a"))
        group = changed(classic.join(group, joining("c", needs_known_id=True), LIMITS, NOW))
        group = join(group, joining("b"))
        group = join(group, joining(member_id="a"))
        outcome = classic.join(group, joining(member_id="c"), self.LIMITS, NOW)
        assert isinstance(outcome.answer, GroupFull)
        assert not changed(outcome).pending


class TestInitialDelay:
    def test_it_ends_with_the_delay_when_nobody_came(self) -> None:
        group = fire(join(None, joining("a")))
        assert (group.state, group.generation) == (GroupState.COMPLETING, 1)

    def test_it_goes_on_while_newcomers_come_up_to_the_rebalance_timeout(self) -> None:
        group = join(None, joining("a", rebalance_timeout_ms=8_000))
        delays = []
        for number in range(10):
            (timer,) = classic.timers(group)
            if timer.kind is not TimerKind.INITIAL_DELAY:
                break
            delays.append(timer.after_ms)
            group = join(group, joining(f"m{number}", rebalance_timeout_ms=1))
            group = as_classic(classic.fire(group, timer, NOW))
        assert delays == [3_000, 3_000, 2_000]
        assert group.state is GroupState.COMPLETING

    def test_rejoin_is_no_newcomer(self) -> None:
        group = join(None, joining("a"))
        assert join(group, joining(member_id="a")) is group
        assert fire(group).state is GroupState.COMPLETING

    def test_no_delay_is_a_timer_that_is_over(self) -> None:
        group = join(None, joining("a"), GroupLimits(initial_rebalance_delay_ms=0))
        assert classic.timers(group)[0].after_ms == 0
        assert fire(group).state is GroupState.COMPLETING

    def test_all_leave_meanwhile(self) -> None:
        group = join(None, joining("a"))
        group = changed(classic.leave(group, [Leaving("a", None)], NOW))
        assert (group.state, group.leader) == (GroupState.PREPARING, None)
        group = fire(group, NOW + 7)
        assert (group.state, group.generation, group.state_since_ms) == (GroupState.EMPTY, 1, NOW + 7)
        assert classic.timers(group) == ()

    def test_the_second_begins_as_the_first(self) -> None:
        group = changed(classic.leave(stable(joining("a")), [Leaving("a", None)], NOW))
        group = join(group, joining("b"))
        assert classic.timers(group)[0].kind is TimerKind.INITIAL_DELAY
        assert fire(group).state is GroupState.COMPLETING

    def test_there_is_none_in_a_group_with_members(self) -> None:
        group = join(stable(joining("a", rebalance_timeout_ms=45_000)), joining("b"))
        assert [(each.kind, each.after_ms) for each in classic.timers(group)] == [(TimerKind.JOIN, 60_000)]

    def test_a_session_that_ends_ends_it(self) -> None:
        """Kafka's too: expiry does not look whether the rebalance is the first."""
        group = changed(classic.join(None, joining("b", needs_known_id=True), LIMITS, NOW))
        group = join(group, joining("a"))
        assert as_classic(classic.expel(group, "b", HERE, NOW)).state is GroupState.COMPLETING


class TestRebalance:
    def test_timer_removes_those_who_stayed_away(self) -> None:
        group = join(stable(joining("a"), joining("b"), joining("c")), joining("d"))
        group = fire(join(group, joining(member_id="b")))
        assert (group.state, list(group.members)) == (GroupState.COMPLETING, ["b", "d"])
        assert (group.leader, group.generation) == ("b", 2)
        answer = classic.joined(group, joining(member_id="a"), "a")
        assert isinstance(answer, UnknownMember)

    def test_timeout_is_the_longest_of_the_members_when_it_began(self) -> None:
        group = stable(joining("a", rebalance_timeout_ms=100), joining("b", rebalance_timeout_ms=200))
        group = join(group, joining(member_id="a", rebalance_timeout_ms=50))
        (timer,) = classic.timers(group)
        assert timer.after_ms == 200
        assert classic.timers(join(group, joining("c", rebalance_timeout_ms=900))) == (timer,)

    def test_nobody_stays(self) -> None:
        """Only one that was about to join kept the rebalance from ending at once."""
        group = stable(joining("a"))
        group = changed(classic.join(group, joining("b", needs_known_id=True), LIMITS, NOW))
        group = changed(classic.leave(group, [Leaving("a", None)], NOW))
        assert (group.state, classic.timers(group)[0].after_ms) == (GroupState.PREPARING, 0)
        group = fire(group)
        assert (group.state, group.generation, group.leader) == (GroupState.EMPTY, 2, None)
        assert list(group.pending) == ["b"]

    def test_last_member_leaves(self) -> None:
        group = changed(classic.leave(stable(joining("a")), [Leaving("a", None)], NOW + 5))
        assert (group.state, group.generation) == (GroupState.EMPTY, 2)
        assert (group.leader, group.protocol, group.state_since_ms) == (None, None, NOW + 5)

    def test_stale_timers_do_nothing(self) -> None:
        first = join(stable(joining("a"), joining("b")), joining("c"))
        (timer,) = classic.timers(first)
        group = fire(join(first, joining(member_id="a")))
        assert classic.fire(group, timer, NOW) is group
        second = join(group, joining("d"))
        assert second.state is GroupState.PREPARING
        assert classic.fire(second, timer, NOW) is second

    def test_follower_rejoins_without_news(self) -> None:
        group = stable(joining("a"), joining("b"))
        outcome = classic.join(group, joining(member_id="b"), LIMITS, NOW)
        assert outcome.group is group
        assert isinstance(outcome.answer, Joined)
        assert (outcome.answer.generation, outcome.answer.leader) == (1, "a")

    def test_leader_rejoins_for_a_rebalance(self) -> None:
        group = stable(joining("a"), joining("b"))
        outcome = classic.join(group, joining(member_id="a"), LIMITS, NOW)
        assert (changed(outcome).state, outcome.answer) == (GroupState.PREPARING, None)

    def test_changed_metadata_is_a_rebalance(self) -> None:
        for group in (stable(joining("a"), joining("b")), completing(joining("a"), joining("b"))):
            request = joining(member_id="b", protocols=(("range", b"changed"),))
            assert join(group, request).state is GroupState.PREPARING

    @pytest.mark.parametrize("member_id", ["a", "b"])
    def test_join_again_before_the_assignment_is_a_lost_answer(self, member_id: str) -> None:
        group = completing(joining("a"), joining("b"))
        outcome = classic.join(group, joining(member_id=member_id), LIMITS, NOW)
        assert outcome.group is group
        assert isinstance(outcome.answer, Joined)
        assert len(outcome.answer.members) == (2 if member_id == "a" else 0)
        assert not outcome.answer.skip_assignment

    def test_a_rebalance_voids_an_assignment_that_nobody_got(self) -> None:
        group = completing(joining("a"), joining("b"))
        group = replace(group, members={k: replace(v, assignment=b"old") for k, v in group.members.items()})
        assert {each.assignment for each in join(group, joining("c")).members.values()} == {b""}

    def test_member_that_missed_the_end_is_told_of_it_in_the_next(self) -> None:
        group = join(completing(joining("a"), joining("b")), joining("c"))
        assert group.state is GroupState.PREPARING
        answer = classic.joined(group, joining("a"), "a")
        assert isinstance(answer, Joined)
        assert (answer.generation, [each.member_id for each in answer.members]) == (1, ["a", "b"])
        assert isinstance(classic.sync(group, syncing("a", 1)).answer, RebalanceInProgress)

    def test_members_keep_the_order_in_which_they_came(self) -> None:
        group = join(stable(joining("a"), joining("b"), joining("c")), joining(member_id="a"))
        for member_id in ("c", "b"):
            group = join(group, joining(member_id=member_id))
        assert list(group.members) == ["a", "b", "c"]

    def test_leader_that_goes_is_followed_by_the_first_that_is_left(self) -> None:
        group = changed(
            classic.leave(stable(joining("a"), joining("b"), joining("c")), [Leaving("a", None)], NOW)
        )
        assert group.leader == "b"


class TestProtocol:
    def protocol(self, *preferences: str) -> str | None:
        requests = [
            joining(f"m{number}", protocols=tuple((name, b"") for name in names.split()))
            for number, names in enumerate(preferences)
        ]
        return completing(*requests).protocol

    def test_most_votes_win(self) -> None:
        assert self.protocol("range sticky", "sticky range", "sticky range") == "sticky"
        assert self.protocol("range sticky", "range sticky", "sticky range") == "range"

    def test_votes_are_for_what_all_have(self) -> None:
        assert self.protocol("sticky range", "sticky range", "range") == "range"

    def test_of_equals_the_first(self) -> None:
        assert self.protocol("range sticky", "sticky range") == "range"

    def test_newcomer_must_share_with_all(self) -> None:
        group = stable(joining("a", protocols=(("x", b""), ("y", b""))))
        group = join(group, joining("b", protocols=(("y", b""), ("z", b""))))
        for name in ("x", "z"):
            outcome = classic.join(group, joining("c", protocols=((name, b""),)), LIMITS, NOW)
            assert isinstance(outcome.answer, InconsistentProtocol)
        join(group, joining("c", protocols=(("y", b""),)))


class TestSync:
    def test_followers_wait_for_the_leader(self) -> None:
        group = completing(joining("a"), joining("b"))
        outcome = classic.sync(group, syncing("b", 1))
        assert (outcome.answer, changed(outcome).state) == (None, GroupState.COMPLETING)
        assert classic.synced(changed(outcome), syncing("b", 1)) is None
        given = {"a": b"0", "b": b"1", "stranger": b"2"}
        outcome = classic.sync(outcome.group, syncing("a", 1, assignments=given))
        assert changed(outcome).state is GroupState.STABLE
        assert outcome.answer == Synced(protocol_type="consumer", protocol="range", assignment=b"0")
        answer = classic.synced(outcome.group, syncing("b", 1))
        assert answer == Synced(protocol_type="consumer", protocol="range", assignment=b"1")
        assert list(changed(outcome).members) == ["a", "b"]

    def test_member_that_the_leader_forgot_gets_nothing(self) -> None:
        group = stable(joining("a"), joining("b"), assignments={"a": b"0"})
        assert group.members["b"].assignment == b""

    def test_only_the_leader_assigns(self) -> None:
        group = completing(joining("a"), joining("b"))
        outcome = classic.sync(group, syncing("b", 1, assignments={"b": b"all"}))
        assert (outcome.answer, changed(outcome).members["b"].assignment) == (None, b"")

    def test_late_sync_is_answered_at_once(self) -> None:
        group = completing(joining("a"), joining("b"))
        group = changed(classic.sync(group, syncing("a", 1, assignments={"b": b"1"})))
        outcome = classic.sync(group, syncing("b", 1))
        assert outcome.answer == Synced(protocol_type="consumer", protocol="range", assignment=b"1")
        again = classic.sync(outcome.group, syncing("b", 1))
        assert again.group is outcome.group

    def test_leader_that_syncs_again_changes_nothing(self) -> None:
        group = stable(joining("a"), joining("b"))
        outcome = classic.sync(group, syncing("a", 1, assignments={"a": b"other"}))
        assert outcome.group is group
        assert outcome.answer == Synced(protocol_type="consumer", protocol="range", assignment=b"a")

    @pytest.mark.parametrize(
        ("changes", "error"),
        [
            ({"member_id": "nobody"}, UnknownMember),
            ({"instance_id": "i"}, FencedInstance),
            ({"instance_id": "nobody"}, UnknownMember),
            ({"generation": 0}, IllegalGeneration),
            ({"generation": 2}, IllegalGeneration),
            ({"protocol_type": "connect"}, InconsistentProtocol),
            ({"protocol": "sticky"}, InconsistentProtocol),
        ],
    )
    def test_wrong_sync_is_refused(self, changes: dict[str, Any], error: type[GroupError]) -> None:
        for group in (
            completing(joining("a"), static("s", "i")),
            stable(joining("a"), static("s", "i")),
        ):
            outcome = classic.sync(group, replace(syncing("a", 1), **changes))
            assert outcome.group is group
            assert isinstance(outcome.answer, error)

    def test_sync_before_version_5_names_no_protocol(self) -> None:
        group = completing(joining("a"))
        answer = classic.sync(group, syncing("a", 1, protocol_type=None, protocol=None)).answer
        assert isinstance(answer, Synced)

    def test_rebalance_sends_waiting_syncs_away(self) -> None:
        group = completing(joining("a"), joining("b"))
        group = changed(classic.sync(group, syncing("b", 1)))
        group = join(group, joining("c"))
        for answer in (
            classic.synced(group, syncing("b", 1)),
            classic.sync(group, syncing("b", 1)).answer,
        ):
            assert isinstance(answer, RebalanceInProgress)

    def test_waiting_sync_that_missed_the_rebalance(self) -> None:
        """Kafka told it when the rebalance began. A member that was removed meanwhile is unknown."""
        group = completing(joining("a"), static("s", "i"), joining("b"))
        group = fire(join(group, joining("c")))
        assert (group.generation, list(group.members)) == (2, ["s", "c"])
        assert isinstance(classic.synced(group, syncing("s", 1, instance_id="i")), RebalanceInProgress)
        assert isinstance(classic.synced(group, syncing("b", 1)), UnknownMember)

    def test_those_who_never_sync_are_removed(self) -> None:
        group = completing(joining("a"), joining("b"), joining("c"))
        group = changed(classic.sync(group, syncing("a", 1)))
        group = changed(classic.sync(group, syncing("b", 1)))
        assert group.state is GroupState.STABLE
        (timer,) = classic.timers(group)
        assert (timer.kind, timer.after_ms) == (TimerKind.SYNC, 60_000)
        late = changed(classic.sync(group, syncing("c", 1)))
        assert classic.timers(late) == ()
        assert classic.fire(late, timer, NOW) is late
        group = as_classic(classic.fire(group, timer, NOW))
        assert (group.state, list(group.members)) == (GroupState.PREPARING, ["a", "b"])

    def test_a_leader_that_never_syncs_is_removed(self) -> None:
        group = completing(joining("a"), joining("b"))
        group = fire(changed(classic.sync(group, syncing("b", 1))))
        assert (group.state, list(group.members), group.leader) == (GroupState.PREPARING, ["b"], "b")

    def test_sync_timer_is_the_same_before_and_after_the_assignment(self) -> None:
        group = completing(joining("a"), joining("b"))
        before = classic.timers(group)
        assert classic.timers(changed(classic.sync(group, syncing("a", 1)))) == before


class TestHeartbeat:
    def test_in_every_state(self) -> None:
        beat = classic.heartbeat
        assert beat(completing(joining("a")), "a", None, 1) is None
        assert beat(stable(joining("a")), "a", None, 1) is None
        rebalancing = join(stable(joining("a")), joining("b"))
        assert isinstance(beat(rebalancing, "a", None, 1), RebalanceInProgress)
        empty = changed(classic.leave(stable(joining("a")), [Leaving("a", None)], NOW))
        assert isinstance(beat(empty, "a", None, 2), UnknownMember)

    @pytest.mark.parametrize(
        ("asked", "error"),
        [
            (("nobody", None, 1), UnknownMember),
            (("a", "i", 1), FencedInstance),
            (("a", "nobody", 1), UnknownMember),
            (("s", "i", 2), IllegalGeneration),
            (("s", "i", 0), IllegalGeneration),
        ],
    )
    def test_wrong_heartbeats(self, asked: tuple[str, str | None, int], error: type[GroupError]) -> None:
        assert isinstance(classic.heartbeat(stable(joining("a"), static("s", "i")), *asked), error)

    def test_pending_member_is_none_yet(self) -> None:
        group = changed(classic.join(None, joining("a", needs_known_id=True), LIMITS, NOW))
        assert isinstance(classic.heartbeat(group, "a", None, 0), UnknownMember)


class TestSessions:
    def test_who_waits_for_an_answer_is_not_timed(self) -> None:
        group = completing(joining("a"), joining("b"))
        assert {each.member_id for each in classic.sessions(group)} == {"a", "b"}
        group = changed(classic.sync(group, syncing("b", 1)))
        assert {each.member_id for each in classic.sessions(group)} == {"a"}
        assert classic.expel(group, "b", HERE, NOW) is group
        group = changed(classic.sync(group, syncing("a", 1)))
        assert {each.member_id for each in classic.sessions(group)} == {"a", "b"}
        group = join(group, joining(member_id="a"))
        assert {each.member_id for each in classic.sessions(group)} == {"b"}
        assert classic.expel(group, "a", HERE, NOW) is group

    def test_newcomer_has_five_minutes_for_its_first_rebalance(self) -> None:
        group = join(stable(joining("a")), joining("b"))
        assert MemberSession("b", HERE, 300_000) in classic.sessions(group)
        expelled = as_classic(classic.expel(group, "b", HERE, NOW))
        assert list(expelled.members) == ["a"]
        group = join(group, joining(member_id="a"))
        assert MemberSession("b", HERE, 10_000) in classic.sessions(group)

    def test_expelling_begins_a_rebalance(self) -> None:
        for group in (stable(joining("a"), joining("b")), completing(joining("a"), joining("b"))):
            after = as_classic(classic.expel(group, "a", HERE, NOW))
            assert (after.state, after.leader, list(after.members)) == (GroupState.PREPARING, "b", ["b"])

    def test_expelling_the_last_that_is_missed_ends_it(self) -> None:
        group = join(stable(joining("a"), joining("b")), joining(member_id="a"))
        after = as_classic(classic.expel(group, "b", HERE, NOW))
        assert (after.state, after.generation) == (GroupState.COMPLETING, 2)

    def test_expelling_the_last_member_empties_the_group(self) -> None:
        after = as_classic(classic.expel(stable(joining("a")), "a", HERE, NOW + 3))
        assert (after.state, after.state_since_ms) == (GroupState.EMPTY, NOW + 3)

    def test_only_the_one_who_hears_a_member_expels_it(self) -> None:
        group = stable(joining("a"), joining("b"))
        assert classic.expel(group, "a", THERE, NOW) is group
        assert classic.expel(group, "nobody", HERE, NOW) is group
        moved = classic.hear(group, "a", THERE)
        assert classic.expel(moved, "a", HERE, NOW) is moved
        assert "a" not in as_classic(classic.expel(moved, "a", THERE, NOW)).members

    def test_hearing_again_is_no_change(self) -> None:
        group = stable(joining("a"))
        assert classic.hear(group, "a", HERE) is group
        assert classic.hear(group, "nobody", THERE) is group
        pending = changed(classic.join(None, joining("p", needs_known_id=True), LIMITS, NOW))
        assert classic.hear(pending, "p", HERE) is pending
        assert as_classic(classic.hear(pending, "p", THERE)).pending["p"].heard_by == THERE


class TestLeave:
    def test_several_leave_by_one_request(self) -> None:
        group = stable(joining("a"), static("s", "i"), static("t", "j"), joining("b"))
        leaving = [
            Leaving("a", None),
            Leaving("", "i"),
            Leaving("wrong", "j"),
            Leaving("b", "nobody"),
            Leaving("nobody", None),
            Leaving("", "nobody"),
            Leaving("", None),
        ]
        outcome = classic.leave(group, leaving, NOW)
        assert isinstance(outcome.answer, tuple)
        assert [(each.member_id, each.instance_id) for each in outcome.answer] == leaving
        assert [None if each.error is None else type(each.error) for each in outcome.answer] == [
            None,
            None,
            FencedInstance,
            UnknownMember,
            UnknownMember,
            UnknownMember,
            UnknownMember,
        ]
        after = changed(outcome)
        assert (after.state, list(after.members), after.leader) == (GroupState.PREPARING, ["t", "b"], "t")

    def test_nobody_leaves(self) -> None:
        group = stable(joining("a"))
        outcome = classic.leave(group, [Leaving("nobody", None)], NOW)
        assert outcome.group is group

    def test_one_that_is_about_to_join_leaves(self) -> None:
        """Kafka begins a rebalance even so."""
        group = stable(joining("a"))
        group = changed(classic.join(group, joining("p", needs_known_id=True), LIMITS, NOW))
        outcome = classic.leave(group, [Leaving("p", None)], NOW)
        assert outcome.answer == (Left("p", None, None),)
        assert (changed(outcome).state, dict(changed(outcome).pending)) == (GroupState.PREPARING, {})

    def test_leaving_the_others_ends_their_rebalance(self) -> None:
        group = join(stable(joining("a"), joining("b")), joining(member_id="a"))
        after = changed(classic.leave(group, [Leaving("b", None)], NOW))
        assert (after.state, list(after.members)) == (GroupState.COMPLETING, ["a"])

    def test_waiting_join_of_one_that_left_is_unknown(self) -> None:
        group = join(stable(joining("a"), joining("b")), joining(member_id="a"))
        after = changed(classic.leave(group, [Leaving("a", None)], NOW))
        assert isinstance(classic.joined(after, joining(member_id="a"), "a"), UnknownMember)

    def test_empty_group_stays_empty(self) -> None:
        group = changed(classic.join(None, joining("p", needs_known_id=True), LIMITS, NOW))
        after = changed(classic.leave(group, [Leaving("p", None)], NOW))
        assert (after.state, after.generation, dict(after.pending)) == (GroupState.EMPTY, 0, {})


class TestStatic:
    def test_restart_in_a_stable_group_goes_unnoticed(self) -> None:
        group = stable(joining("a"), static("s1", "i"))
        request = static("s2", "i", heard_by=THERE, session_timeout_ms=20_000)
        outcome = classic.join(group, request, LIMITS, NOW)
        after = changed(outcome)
        assert (after.state, after.generation, list(after.members)) == (GroupState.STABLE, 1, ["a", "s2"])
        s = after.members["s2"]
        assert (s.assignment, s.heard_by, s.session_timeout_ms) == (b"s1", THERE, 20_000)
        assert outcome.answer == Joined(
            member_id="s2",
            generation=1,
            protocol_type="consumer",
            protocol="range",
            leader="a",
            members=(),
        )
        got = classic.sync(after, syncing("s2", 1, instance_id="i")).answer
        assert got == Synced(protocol_type="consumer", protocol="range", assignment=b"s1")

    def test_leader_that_restarts_skips_the_assignment(self) -> None:
        """KIP-814: it leads on, but others have what it assigned before."""
        group = stable(static("s1", "i"), joining("b"))
        outcome = classic.join(group, static("s2", "i"), LIMITS, NOW)
        assert isinstance(outcome.answer, Joined)
        assert (outcome.answer.leader, outcome.answer.skip_assignment) == ("s2", True)
        assert [each.member_id for each in outcome.answer.members] == ["s2", "b"]
        assert changed(outcome).leader == "s2"

    def test_leader_that_restarts_is_not_told_so_before_version_9(self) -> None:
        group = stable(static("s1", "i"), joining("b"))
        request = static("s2", "i", can_skip_assignment=False)
        outcome = classic.join(group, request, LIMITS, NOW)
        assert isinstance(outcome.answer, Joined)
        assert (outcome.answer.leader, outcome.answer.members) == ("s1", ())
        assert changed(outcome).leader == "s2"
        again = classic.join(outcome.group, request, LIMITS, NOW)
        assert again.group is outcome.group
        assert isinstance(again.answer, Joined)
        assert (again.answer.leader, again.answer.members) == ("", ())

    def test_changed_metadata_is_no_rebalance(self) -> None:
        group = stable(joining("a"), static("s1", "i"))
        request = static("s2", "i", protocols=(("range", b"changed"),))
        after = changed(classic.join(group, request, LIMITS, NOW))
        assert after.state is GroupState.STABLE
        assert after.members["s2"].protocols == (("range", b"changed"),)

    def test_another_protocol_is_a_rebalance(self) -> None:
        both = (("range", b""), ("sticky", b""))
        group = stable(static("s1", "i", protocols=both), joining("b", protocols=both))
        assert group.protocol == "range"
        request = static("s2", "i", protocols=(("sticky", b""),))
        outcome = classic.join(group, request, LIMITS, NOW)
        assert (changed(outcome).state, outcome.answer) == (GroupState.PREPARING, None)
        assert list(changed(outcome).members) == ["s2", "b"]

    def test_restart_before_the_assignment_is_a_rebalance(self) -> None:
        """The leader may be assigning to the id that is gone."""
        group = completing(joining("a"), static("s1", "i"))
        outcome = classic.join(group, static("s2", "i"), LIMITS, NOW)
        assert (changed(outcome).state, outcome.answer) == (GroupState.PREPARING, None)
        assert changed(outcome).members["s2"].is_joining

    def test_restart_during_a_rebalance_joins_it(self) -> None:
        group = join(stable(joining("a"), static("s1", "i")), joining(member_id="a"))
        outcome = classic.join(group, static("s2", "i"), LIMITS, NOW)
        assert changed(outcome).state is GroupState.COMPLETING
        assert isinstance(outcome.answer, Joined)
        assert outcome.answer.generation == 2

    def test_restart_in_the_initial_delay_waits_for_its_end(self) -> None:
        group = join(None, static("s1", "i"))
        outcome = classic.join(group, static("s2", "i"), LIMITS, NOW)
        assert (changed(outcome).state, outcome.answer) == (GroupState.PREPARING, None)
        assert fire(changed(outcome)).state is GroupState.COMPLETING

    def test_the_one_before_is_fenced(self) -> None:
        group = changed(classic.join(stable(joining("a"), static("s1", "i")), static("s2", "i"), LIMITS, NOW))
        old = joining(member_id="s1", instance_id="i")
        answers: list[Any] = [
            classic.join(group, old, LIMITS, NOW).answer,
            classic.joined(group, old, "s1"),
            classic.sync(group, syncing("s1", 1, instance_id="i")).answer,
            classic.synced(group, syncing("s1", 1, instance_id="i")),
            classic.heartbeat(group, "s1", "i", 1),
            classic.check_commit(group, "s1", "i", 1),
        ]
        assert [type(each) for each in answers] == [FencedInstance] * 6
        left = classic.leave(group, [Leaving("s1", "i")], NOW).answer
        assert isinstance(left, tuple)
        assert isinstance(left[0].error, FencedInstance)

    def test_join_that_waits_is_fenced_by_the_next(self) -> None:
        group = join(stable(joining("a")), static("s1", "i"))
        assert classic.joined(group, static("s1", "i"), "s1") is None
        group = join(group, static("s2", "i"))
        assert isinstance(classic.joined(group, static("s1", "i"), "s1"), FencedInstance)
        assert classic.joined(group, static("s2", "i"), "s2") is None

    def test_it_stays_when_it_misses_a_rebalance(self) -> None:
        group = fire(join(stable(static("s", "i"), joining("b")), joining("c")))
        assert (group.state, list(group.members), group.leader) == (GroupState.COMPLETING, ["s", "c"], "c")
        assert MemberSession("s", HERE, 10_000) in classic.sessions(group)

    def test_rebalance_that_no_member_joins_goes_on(self) -> None:
        """Until they come, or their sessions end."""
        group = stable(static("s", "i"), static("t", "j"), joining("b"))
        group = changed(classic.leave(group, [Leaving("b", None)], NOW))
        (first,) = classic.timers(group)
        group = as_classic(classic.fire(group, first, NOW))
        (second,) = classic.timers(group)
        assert (group.state, group.generation) == (GroupState.PREPARING, 1)
        assert (second.kind, first != second) == (TimerKind.JOIN, True)
        group = as_classic(classic.expel(group, "s", HERE, NOW))
        group = as_classic(classic.expel(group, "t", HERE, NOW))
        assert (group.state, group.generation) == (GroupState.EMPTY, 2)

    def test_newcomer_with_an_instance_joins_as_any(self) -> None:
        group = join(stable(joining("a")), static("s", "i"))
        assert group.members["s"].is_new
        assert group.state is GroupState.PREPARING

    def test_rejoin_with_another_instance_is_fenced_or_unknown(self) -> None:
        group = stable(static("s", "i"), static("t", "j"))
        fenced = classic.join(group, joining(member_id="s", instance_id="j"), LIMITS, NOW).answer
        assert isinstance(fenced, FencedInstance)
        unknown = classic.join(group, joining(member_id="s", instance_id="k"), LIMITS, NOW).answer
        assert isinstance(unknown, UnknownMember)


class TestAppliedAgain:
    """The answer of a put was lost, and the request is applied to what it made itself."""

    @pytest.mark.parametrize(
        "request_", [joining("x"), static("x", "i"), static("x", "s"), joining("x", needs_known_id=True)]
    )
    def test_join(self, request_: Join) -> None:
        full = GroupLimits(max_size=3)
        for group in (
            None,
            join(None, joining("a")),
            completing(joining("a"), static("b", "s")),
            stable(joining("a"), static("b", "s")),
            join(stable(joining("a"), static("b", "s")), joining(member_id="a")),
        ):
            once = classic.join(group, request_, full, NOW)
            twice = classic.join(once.group, request_, full, NOW)
            assert twice.group is once.group
            assert type(twice.answer) is type(once.answer)
            if isinstance(once.answer, Joined):
                assert twice.answer == once.answer

    def test_join_of_one_member_that_ends_the_rebalance_by_itself(self) -> None:
        group = stable(joining("a"))
        once = classic.join(group, joining(member_id="a"), LIMITS, NOW)
        assert changed(once).generation == 2
        assert classic.join(once.group, joining(member_id="a"), LIMITS, NOW) == once

    def test_sync(self) -> None:
        for member_id in ("a", "b"):
            request = syncing(member_id, 1, assignments={"a": b"0", "b": b"1"})
            once = classic.sync(completing(joining("a"), joining("b")), request)
            twice = classic.sync(once.group, request)
            assert twice.group is once.group
            assert twice == once


CONSUMERS = ConsumerGroup(
    epoch=7,
    members={
        "c": ConsumerMember(
            member_id="c",
            instance_id="i",
            rack_id=None,
            client_id="",
            client_host="",
            rebalance_timeout_ms=1,
            topics=frozenset("t"),
            regex=None,
            assignor=None,
            heard_by=HERE,
            epoch=7,
            assigned={UUID(int=1): frozenset({0})},
        )
    },
)


class TestOtherGroups:
    def test_empty_consumer_group_becomes_classic_and_goes_on_counting(self) -> None:
        """Kafka begins at generation 0 again."""
        group = fire(join(ConsumerGroup(epoch=7), joining("a")))
        assert (group.state, group.generation) == (GroupState.COMPLETING, 8)

    def test_refused_join_does_not_convert(self) -> None:
        group = ConsumerGroup(epoch=7)
        assert classic.join(group, joining("a", protocols=()), LIMITS, NOW).group is group

    def test_consumer_group_with_members_takes_none(self) -> None:
        for request in (joining("a"), joining(member_id="c"), static("a", "i")):
            outcome = classic.join(CONSUMERS, request, LIMITS, NOW)
            assert outcome.group is CONSUMERS
            assert isinstance(outcome.answer, InconsistentProtocol)

    @pytest.mark.parametrize(
        "group", [None, Dying(), ConsumerGroup(), CONSUMERS], ids=lambda each: repr(each)[:20]
    )
    def test_nobody_is_a_member(self, group: Group | None) -> None:
        synced = classic.sync(group, syncing("c", 7))
        left = classic.leave(group, [Leaving("c", None), Leaving("", "i")], NOW)
        answers: list[Any] = [
            classic.joined(group, joining(member_id="c"), "c"),
            synced.answer,
            classic.synced(group, syncing("c", 7)),
            classic.heartbeat(group, "c", None, 7),
        ]
        assert [type(each) for each in answers] == [UnknownMember] * 4
        assert isinstance(left.answer, tuple)
        assert [(*each[:2], type(each.error)) for each in left.answer] == [
            ("c", None, UnknownMember),
            ("", "i", UnknownMember),
        ]
        assert synced.group is group
        assert left.group is group
        assert classic.expel(group, "c", HERE, NOW) is group
        assert classic.hear(group, "c", THERE) is group
        assert list(classic.sessions(group)) == []
        assert classic.timers(group) == ()
        (timer,) = classic.timers(join(None, joining("a")))
        assert classic.fire(group, timer, NOW) is group
        assert classic.subscribed_topics(group) is None
        assert not classic.is_subscribed(group, "t")


class TestCommit:
    def test_member_in_every_state(self) -> None:
        check = classic.check_commit
        assert check(stable(joining("a")), "a", None, 1) is None
        assert check(join(stable(joining("a")), joining("b")), "a", None, 1) is None
        assert isinstance(check(completing(joining("a")), "a", None, 1), RebalanceInProgress)

    @pytest.mark.parametrize(
        ("asked", "error"),
        [
            (("a", None, 0), IllegalGeneration),
            (("a", None, -1), IllegalGeneration),
            (("nobody", None, 1), UnknownMember),
            (("a", "i", 1), FencedInstance),
            (("", None, -1), UnknownMember),
            (("", None, 1), UnknownMember),
            (("", "i", -1), FencedInstance),
        ],
    )
    def test_others_may_not(self, asked: tuple[str, str | None, int], error: type[GroupError]) -> None:
        assert isinstance(classic.check_commit(stable(joining("a"), static("s", "i")), *asked), error)

    def test_without_members_anybody_may_who_claims_no_generation(self) -> None:
        left = changed(classic.leave(stable(joining("a")), [Leaving("a", None)], NOW))
        for group in (None, Dying(), left, ConsumerGroup(epoch=3)):
            assert classic.check_commit(group, "", None, -1) is None
            assert classic.check_commit(group, "someone", "i", -1) is None
        assert isinstance(classic.check_commit(left, "a", None, 2), UnknownMember)
        assert isinstance(classic.check_commit(None, "a", None, 0), UnknownGroup)
        assert isinstance(classic.check_commit(CONSUMERS, "", None, -1), UnknownMember)


def subscription(*topics: str, version: int = 0) -> bytes:
    """By hand, of the protocol's guide: version, topics, user data."""
    body = version.to_bytes(2, "big") + len(topics).to_bytes(4, "big")
    for topic in topics:
        body += len(topic).to_bytes(2, "big") + topic.encode()
    return body + b"\xff\xff\xff\xff"


class TestSubscriptions:
    def subscribed(self, *metadata: bytes, protocol_type: str = "consumer") -> ClassicGroup:
        return stable(
            *(
                joining(f"m{number}", protocols=(("range", each),), protocol_type=protocol_type)
                for number, each in enumerate(metadata)
            )
        )

    def test_topics_of_all_members(self) -> None:
        group = self.subscribed(
            subscription("a", "b"), subscription("b", "c", version=3) + b"more", subscription()
        )
        assert classic.subscribed_topics(group) == frozenset("abc")
        assert classic.is_subscribed(group, "c")
        assert not classic.is_subscribed(group, "d")

    @pytest.mark.parametrize(
        "metadata",
        [
            b"",
            b"\0",
            b"\0\0",
            subscription("a")[:-1],
            b"\0\0\x7f\xff\xff\xff",
            b"\0\0\xff\xff\xff\xff",
            b"\0\0\0\0\0\1\0\1\xff\xff\xff\xff\xff",
            b"\0\0\0\0\0\1\xff\xff\xff\xff\xff\xff",
        ],
    )
    def test_of_damaged_ones_every_topic_may_be_theirs(self, metadata: bytes) -> None:
        group = self.subscribed(subscription("a"), metadata)
        assert classic.subscribed_topics(group) is None
        assert classic.is_subscribed(group, "anything")

    def test_newcomers_count_from_their_first_generation_on(self) -> None:
        group = self.subscribed(subscription("a"))
        newcomer = joining("b", protocols=(("range", subscription("b")),))
        group = join(group, newcomer)
        assert classic.subscribed_topics(group) == frozenset("a")
        group = join(group, joining(member_id="m0", protocols=(("range", subscription("a")),)))
        assert classic.subscribed_topics(group) == frozenset("ab")

    def test_others_than_consumers_subscribe_to_nothing(self) -> None:
        group = self.subscribed(subscription("a"), protocol_type="connect")
        assert classic.subscribed_topics(group) is None
        assert not classic.is_subscribed(group, "a")

    def test_empty_group_subscribes_to_nothing(self) -> None:
        group = self.subscribed(subscription("a"))
        left = changed(classic.leave(group, [Leaving("m0", None)], NOW))
        assert classic.subscribed_topics(left) == frozenset()
        assert not classic.is_subscribed(left, "a")
        assert not classic.is_subscribed(ClassicGroup(), "a")
