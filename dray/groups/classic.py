"""The classic group protocol: what JoinGroup, SyncGroup, Heartbeat and LeaveGroup do to a group. Pure.

It owns the states of a `ClassicGroup` and what its members are told. Writing the group, waiting for it to
change and running its timers is the caller's. Behaviour is that of Kafka's coordinator, except where a
comment says so.

| state | goes on when |
|---|---|
| EMPTY | somebody joins: PREPARING, for the initial delay |
| PREPARING | all members have joined, or the timer ends: COMPLETING, or EMPTY where nobody is left |
| COMPLETING | the leader hands in the assignment: STABLE. Members come, go or change: PREPARING |
| STABLE | members come, go or change: PREPARING |

**Nobody waits in here.** Kafka keeps the requests that wait; here the record says what it is that they wait
for. `is_joining` is a JoinGroup that waits for the end of PREPARING, `is_synced` in COMPLETING a SyncGroup
that waits for the leader. Whoever holds such a request asks `joined` or `synced` whenever the group changed,
which may have gone on by several steps.

**Applied again.** The answer of a put may be lost. Then the same request is applied to what the first
attempt made of the group, and has to come out as if it were the first.

Invariants of a `ClassicGroup`: it has a leader where it has members, and that is one of them. All members
have a protocol in common. An instance id is one member's. Nobody is a member and pending. Members are
`is_joining` in PREPARING only, and `is_synced` in COMPLETING and STABLE only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from kio.schema.consumer_protocol_subscription.v0.data import ConsumerProtocolSubscription
from kio.serial import entity_reader
from kio.serial.errors import SerialError

from dray.errors import (
    FencedInstance,
    GroupError,
    GroupFull,
    IllegalGeneration,
    InconsistentProtocol,
    InvalidSessionTimeout,
    MalformedRequest,
    MemberIdRequired,
    RebalanceInProgress,
    UnknownGroup,
    UnknownMember,
)
from dray.groups.group import (
    ClassicGroup,
    ClassicMember,
    ConsumerGroup,
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
    PendingMember,
    Process,
    Sync,
    Synced,
    Timer,
    TimerKind,
)
from dray.protocol.guard import Walked, walker

CONSUMER_PROTOCOL = "consumer"
# Kafka's. A newcomer has no id to send heartbeats with, so nothing else ends the wait of one that went away.
NEW_MEMBER_TIMEOUT_MS = 300_000
# Ids that nobody has joined with yet. Kafka has no bound on them, and whoever asks for an id and never
# uses it leaves one behind for a session timeout. A member that does join needs its id for one round trip,
# so a thousand are far more than ever wait at once; together they take some 60 KB of the record.
MAX_PENDING = 1_000
NO_LEADER = ""

T = TypeVar("T")


# Joining.


def join(group: Group | None, request: Join, limits: GroupLimits, now_ms: int) -> Outcome[Joined]:
    if not limits.min_session_timeout_ms <= request.session_timeout_ms <= limits.max_session_timeout_ms:
        return Outcome(
            group,
            InvalidSessionTimeout(
                f"{request.session_timeout_ms} ms is not between {limits.min_session_timeout_ms} "
                f"and {limits.max_session_timeout_ms}"
            ),
        )
    if isinstance(group, ClassicGroup):
        return _join(group, request, limits, now_ms)
    if isinstance(group, ConsumerGroup) and group.members:
        return Outcome(group, InconsistentProtocol("its members use the consumer protocol"))
    if request.member_id:
        return Outcome(group, UnknownMember("the group has no members"))
    # Kafka begins at 0 again where a consumer group becomes a classic one. Here ages never go back.
    generation = group.epoch if isinstance(group, ConsumerGroup) else 0
    fresh = ClassicGroup(generation=generation, state_since_ms=now_ms)
    outcome = _join(fresh, request, limits, now_ms)
    # A join that is refused makes no group.
    return Outcome(group, outcome.answer) if outcome.group is fresh else outcome


def _join(group: ClassicGroup, request: Join, limits: GroupLimits, now_ms: int) -> Outcome[Joined]:
    if not request.member_id and request.new_member_id in group.members:
        return _answered(group, request, request.new_member_id)  # applied again
    if not _has_room(group, request.member_id, limits):
        return Outcome(_without(group, {request.member_id}), GroupFull("it has as many members as it may"))
    if not _supports(group, request):
        return Outcome(group, InconsistentProtocol("no protocol that all members have"))
    if request.member_id:
        return _join_by_id(group, request, limits, now_ms)
    if request.instance_id is not None:
        return _join_as_instance(group, request, request.instance_id, limits, now_ms)
    if request.needs_known_id:
        return _give_id(group, request, limits)
    return _add(group, request, request.new_member_id, limits, now_ms)


def _has_room(group: ClassicGroup, member_id: str, limits: GroupLimits) -> bool:
    """When the group is above its size, those that rejoin last are not taken."""
    member = group.members.get(member_id)
    match group.state:
        case GroupState.EMPTY:
            return True
        case GroupState.PREPARING:
            joining = sum(each.is_joining for each in group.members.values())
            return (member is not None and member.is_joining) or joining < limits.max_size
        case _:
            return member is not None or len(group.members) < limits.max_size


def _supports(group: ClassicGroup, request: Join) -> bool:
    if group.state is GroupState.EMPTY:
        return bool(request.protocol_type and request.protocols)
    common = _common_protocols(group)
    return request.protocol_type == group.protocol_type and any(
        common is None or name in common for name, _ in request.protocols
    )


def _give_id(group: ClassicGroup, request: Join, limits: GroupLimits) -> Outcome[Joined]:
    member_id = request.new_member_id
    answer = MemberIdRequired(member_id)
    if member_id in group.pending:
        return Outcome(group, answer)
    # Kafka gives out ids that there is no room for, and refuses who joins with one.
    if len(group.pending) >= MAX_PENDING or len(group.members) + len(group.pending) >= limits.max_size:
        return Outcome(group, GroupFull("as many are about to join as may"))
    pending = PendingMember(session_timeout_ms=request.session_timeout_ms, heard_by=request.heard_by)
    return Outcome(replace(group, pending={**group.pending, member_id: pending}), answer)


def _join_as_instance(
    group: ClassicGroup, request: Join, instance_id: str, limits: GroupLimits, now_ms: int
) -> Outcome[Joined]:
    before = _member_of_instance(group, instance_id)
    if before is None:
        return _add(group, request, request.new_member_id, limits, now_ms)
    group, leader_before = _renamed(group, before, request.new_member_id), group.leader
    quiet = _with_member(group, _updated(group, request, request.new_member_id))
    if group.state is GroupState.STABLE and _select_protocol(quiet) == group.protocol:
        # It takes over the assignment, and nobody else notices (KIP-345).
        return Outcome(quiet, _told(quiet, request, request.new_member_id, leader_before))
    # In COMPLETING too: the leader may be assigning to the id that is gone.
    return _rejoin(group, request, request.new_member_id, limits, now_ms)


def _join_by_id(group: ClassicGroup, request: Join, limits: GroupLimits, now_ms: int) -> Outcome[Joined]:
    member_id = request.member_id
    # Kafka fails where somebody joins as an instance by an id that was given to nobody in particular.
    if member_id in group.pending and request.instance_id is None:
        return _add(group, request, member_id, limits, now_ms)
    error = _check_member(group, member_id, request.instance_id)
    if error is not None:
        return Outcome(group, error)
    has_changed = group.members[member_id].protocols != request.protocols
    match group.state:
        case GroupState.STABLE:
            # A leader that joins again wants a rebalance, for reasons of its own.
            must_rebalance = has_changed or member_id == group.leader
        case GroupState.COMPLETING:
            must_rebalance = has_changed  # else the answer to its join was lost
        case _:
            must_rebalance = True
    if not must_rebalance:
        return _answered(group, request, member_id)
    return _rejoin(group, request, member_id, limits, now_ms)


def _add(
    group: ClassicGroup, request: Join, member_id: str, limits: GroupLimits, now_ms: int
) -> Outcome[Joined]:
    member = ClassicMember(
        member_id=member_id,
        instance_id=request.instance_id,
        client_id=request.client_id,
        client_host=request.client_host,
        session_timeout_ms=request.session_timeout_ms,
        rebalance_timeout_ms=max(request.rebalance_timeout_ms, 0),
        protocols=request.protocols,
        heard_by=request.heard_by,
        is_joining=True,
        is_new=True,
    )
    group = replace(
        group,
        protocol_type=group.protocol_type if group.members else request.protocol_type,
        leader=group.leader or member_id,
        members={**group.members, member_id: member},
        pending=_dropped(group.pending, {member_id}),
        has_newcomers=group.initial_delay_ms is not None,
    )
    return _answered(_came(group, limits, now_ms), request, member_id)


def _rejoin(
    group: ClassicGroup, request: Join, member_id: str, limits: GroupLimits, now_ms: int
) -> Outcome[Joined]:
    member = replace(_updated(group, request, member_id), is_joining=True)
    return _answered(_came(_with_member(group, member), limits, now_ms), request, member_id)


def _updated(group: ClassicGroup, request: Join, member_id: str) -> ClassicMember:
    return replace(
        group.members[member_id],
        session_timeout_ms=request.session_timeout_ms,
        rebalance_timeout_ms=max(request.rebalance_timeout_ms, 0),
        protocols=request.protocols,
        heard_by=request.heard_by,
    )


def _came(group: ClassicGroup, limits: GroupLimits, now_ms: int) -> ClassicGroup:
    match group.state:
        case GroupState.EMPTY:
            return _begin_initial_delay(group, limits)
        case GroupState.PREPARING:
            return _complete_if_ready(group, now_ms)
        case _:
            return _rebalance(group, now_ms)


def _answered(group: ClassicGroup, request: Join, member_id: str) -> Outcome[Joined]:
    return Outcome(group, joined(group, request, member_id))


def joined(group: Group | None, request: Join, member_id: str) -> Joined | GroupError | None:
    """What a JoinGroup that waits is told now; None: it waits.

    A member that has missed the end of its rebalance, and sees the next one already, is told what it missed.
    Its SyncGroup is told of the next one.
    """
    if not isinstance(group, ClassicGroup):
        return UnknownMember("the group has no members")
    error = _check_member(group, member_id, request.instance_id)
    if error is not None:
        return error
    if group.members[member_id].is_joining:
        return None
    return _told(group, request, member_id)


def _told(group: ClassicGroup, request: Join, member_id: str, leader_before: str | None = None) -> Joined:
    leader, is_assigned = group.leader or NO_LEADER, group.state is GroupState.STABLE
    if leader == member_id and is_assigned and not request.can_skip_assignment:
        # It must not assign again what others have already. Before KIP-814 there is no way to say so, but not
        # to tell it that it leads.
        leader = NO_LEADER if leader_before in (None, member_id) else leader_before
    return Joined(
        member_id=member_id,
        generation=group.generation,
        protocol_type=group.protocol_type,
        protocol=group.protocol,
        leader=leader,
        members=_listed(group) if leader == member_id else (),
        skip_assignment=leader == member_id and is_assigned,
    )


def _listed(group: ClassicGroup) -> tuple[JoinedMember, ...]:
    return tuple(
        JoinedMember(member.member_id, member.instance_id, _metadata(member, group.protocol) or b"")
        for member in group.members.values()
        if not member.is_new  # that is, not of this generation
    )


# Syncing.


def sync(group: Group | None, request: Sync) -> Outcome[Synced]:
    if not isinstance(group, ClassicGroup):
        return Outcome(group, UnknownMember("the group has no members"))
    error = _check_sync(group, request)
    if error is not None or group.state is GroupState.PREPARING:
        return Outcome(group, error or RebalanceInProgress("a rebalance has begun"))
    following = _with_member(group, replace(group.members[request.member_id], is_synced=True))
    if group.state is GroupState.COMPLETING and request.member_id == group.leader:
        members = {
            member_id: replace(member, assignment=request.assignments.get(member_id, b""))
            for member_id, member in following.members.items()
        }
        following = replace(following, state=GroupState.STABLE, members=members)
    return Outcome(following, synced(following, request))


def _check_sync(group: ClassicGroup, request: Sync) -> GroupError | None:
    error = _check_member(group, request.member_id, request.instance_id)
    if error is not None:
        return error
    if request.generation != group.generation:
        return IllegalGeneration(f"the generation is {group.generation}")
    for asked, actual in (
        (request.protocol_type, group.protocol_type),
        (request.protocol, group.protocol),
    ):
        if asked is not None and actual is not None and asked != actual:
            return InconsistentProtocol(f"the protocol is {actual}")
    return None


def synced(group: Group | None, request: Sync) -> Synced | GroupError | None:
    """What a SyncGroup that waits is told now; None: it waits."""
    if not isinstance(group, ClassicGroup):
        return UnknownMember("the group has no members")
    error = _check_member(group, request.member_id, request.instance_id)
    if error is not None:
        return error
    # It was of this generation when it began to wait. Kafka told it so at the moment that the next began.
    if group.state is GroupState.PREPARING or group.generation != request.generation:
        return RebalanceInProgress("a rebalance has begun")
    if group.state is GroupState.COMPLETING:
        return None
    return Synced(
        protocol_type=group.protocol_type,
        protocol=group.protocol,
        assignment=group.members[request.member_id].assignment,
    )


# Living and leaving.


def heartbeat(
    group: Group | None, member_id: str, instance_id: str | None, generation: int
) -> GroupError | None:
    """`RebalanceInProgress` is a sign of life that was heard, any other error is not."""
    if not isinstance(group, ClassicGroup):
        return UnknownMember("the group has no members")
    error = _check_member(group, member_id, instance_id)
    if error is not None:
        return error
    if generation != group.generation:
        return IllegalGeneration(f"the generation is {group.generation}")
    if group.state is GroupState.PREPARING:
        return RebalanceInProgress("a rebalance has begun")
    return None


def leave(group: Group | None, leaving: Sequence[Leaving], now_ms: int) -> Outcome[tuple[Left, ...]]:
    if not isinstance(group, ClassicGroup):
        unknown = UnknownMember("the group has no members")
        return Outcome(group, tuple(Left(*each, unknown) for each in leaving))
    left: list[Left] = []
    for each in leaving:
        member_id = _who_leaves(group, each)
        if isinstance(member_id, GroupError):
            left.append(Left(*each, member_id))
        else:
            group = _without(group, {member_id})
            left.append(Left(*each, None))
    if any(each.error is None for each in left):
        match group.state:
            case GroupState.COMPLETING | GroupState.STABLE:
                group = _rebalance(group, now_ms)
            case GroupState.PREPARING:
                group = _complete_if_ready(group, now_ms)
    return Outcome(group, tuple(left))


def _who_leaves(group: ClassicGroup, leaving: Leaving) -> str | GroupError:
    if leaving.member_id in group.pending:
        return leaving.member_id
    if not leaving.member_id:  # an administrator removes whoever has the instance id
        member = _member_of_instance(group, leaving.instance_id)
        return UnknownMember("no such instance") if member is None else member.member_id
    return _check_member(group, leaving.member_id, leaving.instance_id) or leaving.member_id


def sessions(group: Group | None) -> Iterator[MemberSession]:
    """Whose silence counts. A session that is wanted anew, or with another timeout, begins anew.

    A member that waits for an answer cannot send heartbeats: its session stands still. There is a timer then
    that ends the wait.
    """
    if not isinstance(group, ClassicGroup):
        return
    for member in group.members.values():
        if member.is_joining and member.is_new:
            yield MemberSession(member.member_id, member.heard_by, NEW_MEMBER_TIMEOUT_MS)
        elif not member.is_joining and not (group.state is GroupState.COMPLETING and member.is_synced):
            yield MemberSession(member.member_id, member.heard_by, member.session_timeout_ms)
    for member_id, pending in group.pending.items():
        yield MemberSession(member_id, pending.heard_by, pending.session_timeout_ms)


def hear(group: Group | None, member_id: str, by: Process) -> Group | None:
    """The session of a member, or of one that is about to join, is timed by `by` from now on."""
    if not isinstance(group, ClassicGroup):
        return group
    member, pending = group.members.get(member_id), group.pending.get(member_id)
    if member is not None:
        return _with_member(group, replace(member, heard_by=by))
    if pending is not None and pending.heard_by != by:
        return replace(group, pending={**group.pending, member_id: replace(pending, heard_by=by)})
    return group


def expel(group: Group | None, member_id: str, heard_by: Process, now_ms: int) -> Group | None:
    """A session is over. Nothing happens where it is none of `sessions(group)` any more."""
    if not isinstance(group, ClassicGroup):
        return group
    if all(each.member_id != member_id or each.heard_by != heard_by for each in sessions(group)):
        return group
    was_member = member_id in group.members
    group = _without(group, {member_id})
    match group.state:
        case GroupState.COMPLETING | GroupState.STABLE if was_member:
            return _rebalance(group, now_ms)
        case GroupState.PREPARING if _has_all_joined(group):
            return _complete(group, now_ms)  # the initial delay ends too, as in Kafka
    return group


# The course of a rebalance.


def timers(group: Group | None) -> tuple[Timer, ...]:
    if not isinstance(group, ClassicGroup):
        return ()
    match group.state:
        case GroupState.PREPARING:
            is_initial = group.initial_delay_ms is not None
            kind = TimerKind.INITIAL_DELAY if is_initial else TimerKind.JOIN
        case GroupState.COMPLETING | GroupState.STABLE if _unsynced(group):
            kind = TimerKind.SYNC
        case _:
            return ()
    return (Timer(kind, group.phase, "", group.timeout_ms),)


def fire(group: Group | None, timer: Timer, now_ms: int) -> Group | None:
    """A timer is over. Nothing happens where it is none of `timers(group)` any more."""
    if not isinstance(group, ClassicGroup) or timer not in timers(group):
        return group
    match timer.kind:
        case TimerKind.INITIAL_DELAY:
            return _end_initial_delay(group, now_ms)
        case TimerKind.JOIN:
            return _complete(group, now_ms)
        case _:
            return _rebalance(_without(group, _unsynced(group)), now_ms)


def _begin_initial_delay(group: ClassicGroup, limits: GroupLimits) -> ClassicGroup:
    delay_ms = limits.initial_rebalance_delay_ms
    return replace(
        _with_timer(group, delay_ms),
        state=GroupState.PREPARING,
        initial_delay_ms=delay_ms,
        initial_remaining_ms=max(_rebalance_timeout_ms(group) - delay_ms, 0),
        has_newcomers=False,
    )


def _end_initial_delay(group: ClassicGroup, now_ms: int) -> ClassicGroup:
    delay_ms, remaining_ms = group.timeout_ms, group.initial_remaining_ms
    if not group.has_newcomers or not remaining_ms:
        return _complete(group, now_ms)
    delay_ms = min(delay_ms, remaining_ms)
    return replace(
        _with_timer(group, delay_ms),
        initial_delay_ms=delay_ms,
        initial_remaining_ms=remaining_ms - delay_ms,
        has_newcomers=False,
    )


def _rebalance(group: ClassicGroup, now_ms: int) -> ClassicGroup:
    """From COMPLETING or STABLE. What a leader was about to assign is void."""
    is_assigned = group.state is GroupState.STABLE
    members = {
        member_id: replace(member, is_synced=False, assignment=member.assignment if is_assigned else b"")
        for member_id, member in group.members.items()
    }
    group = replace(
        _with_timer(group, _rebalance_timeout_ms(group)), state=GroupState.PREPARING, members=members
    )
    return _complete_if_ready(group, now_ms)


def _complete_if_ready(group: ClassicGroup, now_ms: int) -> ClassicGroup:
    is_ready = group.initial_delay_ms is None and _has_all_joined(group)
    return _complete(group, now_ms) if is_ready else group


def _has_all_joined(group: ClassicGroup) -> bool:
    return not group.pending and all(member.is_joining for member in group.members.values())


def _complete(group: ClassicGroup, now_ms: int) -> ClassicGroup:
    """PREPARING ends, for those who have joined. Static members stay though they have not: their sessions
    decide."""
    group = _without(
        group,
        {
            member.member_id
            for member in group.members.values()
            if not member.is_joining and member.instance_id is None
        },
    )
    joining = [member.member_id for member in group.members.values() if member.is_joining]
    if not group.members:
        group = replace(group, state=GroupState.EMPTY, state_since_ms=now_ms, protocol=None)
    elif not joining:
        # Static members that stay away, and nobody who could lead: until they come, or their sessions end.
        return _with_timer(group, _rebalance_timeout_ms(group))
    else:
        members = {
            member_id: replace(member, is_joining=False, is_new=False, is_synced=False)
            for member_id, member in group.members.items()
        }
        group = replace(
            _with_timer(group, _rebalance_timeout_ms(group)),
            state=GroupState.COMPLETING,
            protocol=_select_protocol(group),
            leader=group.leader if group.leader in joining else joining[0],
            members=members,
        )
    return replace(
        group,
        generation=group.generation + 1,
        initial_delay_ms=None,
        initial_remaining_ms=0,
        has_newcomers=False,
    )


def _unsynced(group: ClassicGroup) -> set[str]:
    return {member.member_id for member in group.members.values() if not member.is_synced}


def _rebalance_timeout_ms(group: ClassicGroup) -> int:
    return max((member.rebalance_timeout_ms for member in group.members.values()), default=0)


def _with_timer(group: ClassicGroup, timeout_ms: int) -> ClassicGroup:
    return replace(group, phase=group.phase + 1, timeout_ms=timeout_ms)


# Members and protocols.


def _check_member(group: ClassicGroup, member_id: str, instance_id: str | None) -> GroupError | None:
    if instance_id is not None:
        member = _member_of_instance(group, instance_id)
        if member is not None and member.member_id != member_id:
            return FencedInstance(f"{instance_id} is another member's")
        if member is None:
            return UnknownMember("no such instance")
    return None if member_id in group.members else UnknownMember("no such member")


def _member_of_instance(group: ClassicGroup, instance_id: str | None) -> ClassicMember | None:
    if instance_id is None:
        return None
    return next((each for each in group.members.values() if each.instance_id == instance_id), None)


def _with_member(group: ClassicGroup, member: ClassicMember) -> ClassicGroup:
    if group.members[member.member_id] == member:
        return group
    return replace(group, members={**group.members, member.member_id: member})


def _without(group: ClassicGroup, member_ids: Collection[str]) -> ClassicGroup:
    """Of members, or of those that are about to join."""
    members, pending = _dropped(group.members, member_ids), _dropped(group.pending, member_ids)
    if members is group.members and pending is group.pending:
        return group
    leader = group.leader if group.leader in members else next(iter(members), None)
    return replace(group, members=members, pending=pending, leader=leader)


def _dropped(mapping: Mapping[str, T], keys: Collection[str]) -> Mapping[str, T]:
    if not any(key in mapping for key in keys):
        return mapping
    return {key: value for key, value in mapping.items() if key not in keys}


def _renamed(group: ClassicGroup, member: ClassicMember, member_id: str) -> ClassicGroup:
    """The member goes on under another id: it is no newcomer, and where it stands it stays."""
    renamed = replace(member, member_id=member_id, is_joining=False, is_new=False)
    in_place = (renamed if each is member else each for each in group.members.values())
    return replace(
        group,
        members={each.member_id: each for each in in_place},
        leader=member_id if group.leader == member.member_id else group.leader,
    )


def _common_protocols(group: ClassicGroup) -> set[str] | None:
    """Those that all members have; None, that is any, where there are no members."""
    common: set[str] | None = None
    for member in group.members.values():
        names = {name for name, _ in member.protocols}
        common = names if common is None else common & names
    return common


def _select_protocol(group: ClassicGroup) -> str | None:
    """Each member votes for the first of its own that all have. Of equals the one that was voted for first
    wins."""
    common = _common_protocols(group)
    if common is None:
        return None
    votes = Counter(
        next(name for name, _ in member.protocols if name in common) for member in group.members.values()
    )
    return max(votes, key=votes.__getitem__)


def _metadata(member: ClassicMember, protocol: str | None) -> bytes | None:
    return next((metadata for name, metadata in member.protocols if name == protocol), None)


# Offsets and subscriptions.


def check_commit(
    group: Group | None, member_id: str, instance_id: str | None, generation: int
) -> GroupError | None:
    """Whether offsets may be committed. Without a member and a generation: to groups without members only."""
    if isinstance(group, ConsumerGroup):
        return None if generation < 0 and not group.members else UnknownMember("no such member")
    if not isinstance(group, ClassicGroup):
        return None if generation < 0 else UnknownGroup("there is no such group")
    if generation < 0 and group.state is GroupState.EMPTY:
        return None
    if generation < 0 and not member_id and instance_id is None:
        return UnknownMember("the group has members, and this is none of them")
    error = _check_member(group, member_id, instance_id)
    if error is not None:
        return error
    if generation != group.generation:
        return IllegalGeneration(f"the generation is {group.generation}")
    if group.state is GroupState.COMPLETING:
        return RebalanceInProgress("the partitions are not assigned yet")
    return None


def is_subscribed(group: Group | None, topic: str) -> bool:
    """Of consumers whose subscriptions nobody can read, every topic may be one of theirs."""
    topics = subscribed_topics(group)
    if topics is not None:
        return topic in topics
    return isinstance(group, ClassicGroup) and group.protocol_type == CONSUMER_PROTOCOL


def subscribed_topics(group: Group | None) -> frozenset[str] | None:
    """None where that is not known, as of members that are no consumers.

    As in Kafka, a newcomer's are not among them before its first rebalance ends.
    """
    if not isinstance(group, ClassicGroup) or group.protocol_type != CONSUMER_PROTOCOL:
        return None
    topics: set[str] = set()
    for member in group.members.values():
        if member.is_new and group.protocol is not None:
            continue
        subscribed = _topics_in(_metadata(member, group.protocol))
        if subscribed is None:
            return None
        topics.update(subscribed)
    return frozenset(topics)


_walk_subscription = walker(ConsumerProtocolSubscription)
_read_subscription = entity_reader(ConsumerProtocolSubscription)


def _topics_in(metadata: bytes | None) -> tuple[str, ...] | None:
    """Version 0 stands at the beginning of every version, behind the version's number."""
    if metadata is None:
        return None
    body = metadata[2:]
    try:
        _walk_subscription(body, 0, Walked())
        subscription, _ = _read_subscription(body, 0)
    except (MalformedRequest, SerialError):
        return None
    return subscription.topics
