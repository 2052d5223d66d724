"""The group protocol of KIP-848, where brokers assign: a group and a heartbeat in, a group out. Pure.

A heartbeat does three things, each only where there is something to do:
1. the member is made, changed or removed. A change of what is subscribed to, by a member or because topics
   came and went, raises the group's **epoch**;
2. for a new epoch an assignor makes a new **target**: who should have which partitions;
3. the member that is asking takes its next step towards its target (`reconcile`).

A member that leaves raises the epoch as well; the target is made by the next heartbeat of another.

**Invariants**: the epoch never goes back, nor does a member's, save for a static one that left for a moment
(-2). The target is that of `target_epoch`, which is at most `epoch`. `topics_digest` is of the topics that
the target was made of.

**Old readings**: a broker may answer from an older group a heartbeat that changes nothing and says nothing
(`needs_newest`); any other, and every refusal, is for the newest.

**Heartbeats may be applied twice**, when it is not known whether the first time was stored. A member is told
of partitions only when they change; so the second time has to say so (`Beat.is_repeat`), and tells all.

Left to others: sessions (whoever hears a member), the clock, and topics that the broker does not know of yet.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from uuid import UUID

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
from dray.groups import regex
from dray.groups.assignors import ASSIGNORS, Assign, Subscriber
from dray.groups.group import (
    NOTHING,
    Assignment,
    Beat,
    Beaten,
    ClassicGroup,
    ConsumerGroup,
    ConsumerMember,
    Dying,
    Group,
    GroupLimits,
    GroupState,
    Leaving,
    Left,
    MemberSession,
    MemberState,
    Outcome,
    Process,
    Timer,
    TimerKind,
    Topics,
    TopicShape,
)
from dray.groups.reconcile import is_reconciled, is_subset, reconcile

JOIN, LEAVE, LEAVE_FOR_A_MOMENT = 0, -1, -2
AS_BEFORE_MS = -1

# What Java's String.trim removes, by which Kafka decides whether a name is empty.
_BLANK = "".join(map(chr, range(0x21)))
_DIGEST_BYTES = 16


def check(beat: Beat, limits: GroupLimits) -> GroupError | None:
    """What is wrong with the request, whatever the group."""
    if not beat.member_id.strip(_BLANK):
        return InvalidMemberRequest("it has to have a member id")
    if beat.instance_id is not None and not beat.instance_id.strip(_BLANK):
        return InvalidMemberRequest("an instance id must not be empty")
    if beat.rack_id is not None and not beat.rack_id.strip(_BLANK):
        return InvalidMemberRequest("a rack id must not be empty")
    if beat.epoch == JOIN:
        if beat.rebalance_timeout_ms == AS_BEFORE_MS:
            return InvalidMemberRequest("a member joins with a rebalance timeout")
        if beat.owned is None or beat.owned:
            return InvalidMemberRequest("a member joins without partitions, and says so")
        if beat.topics is None and beat.regex is None:
            return InvalidMemberRequest("a member joins with a subscription, if only to nothing")
    elif beat.epoch == LEAVE_FOR_A_MOMENT and beat.instance_id is None:
        return InvalidMemberRequest("only a static member leaves for a moment")
    elif beat.epoch < LEAVE_FOR_A_MOMENT:
        return InvalidMemberRequest(f"there is no member epoch {beat.epoch}")
    if beat.assignor is not None and beat.assignor not in limits.assignors:
        return UnsupportedAssignor(
            f"there is no assignor {beat.assignor[:100]!r}; there are {', '.join(limits.assignors)}"
        )
    if beat.regex:
        try:
            regex.check(beat.regex)
        except InvalidRegex as error:
            return error
    return None


def beat(
    group: Group | None, beat: Beat, topics: Topics, limits: GroupLimits, now_ms: int
) -> Outcome[Beaten]:
    """What a heartbeat does. It was checked before."""
    match group:
        case Dying():
            return Outcome(group, CoordinatorAway("the group is being deleted"))
        case ConsumerGroup():
            current = group
        case None if beat.epoch == JOIN:
            current = ConsumerGroup()
        case ClassicGroup(state=GroupState.EMPTY) if beat.epoch == JOIN:
            # Kafka begins at 0 again. Here offsets remember the age of the group that committed them.
            current = ConsumerGroup(epoch=group.age, target_epoch=group.age)
        case _:
            return Outcome(group, UnknownGroup("there is no such group, or it is no consumer group"))
    try:
        if beat.epoch in (LEAVE, LEAVE_FOR_A_MOMENT):
            changed, answer = _leave(current, beat, now_ms)
        else:
            changed, answer = _heartbeat(current, beat, topics, limits)
    except GroupError as refusal:
        return Outcome(group, refusal)
    return Outcome(changed, answer)


def leave(group: ConsumerGroup, leaving: Sequence[Leaving], now_ms: int) -> Outcome[tuple[Left, ...]]:
    """LeaveGroup, by which tools take members out: all of them in one epoch."""
    left: list[Left] = []
    gone: set[str] = set()
    for each in leaving:
        try:
            gone.add(_who_leaves(group, each))
            left.append(Left(*each, None))
        except GroupError as refusal:
            left.append(Left(*each, refusal))
    return Outcome(_remove(group, gone, now_ms) if gone else group, tuple(left))


def needs_newest(beat: Beat) -> bool:
    """Whether it has to be put to the newest group even where it changes nothing in an older one.

    A member says what it owns once. If a broker that has not read of the revocation yet takes that for no
    news, the member waits until it is fenced.
    """
    return beat.epoch <= 0 or any(
        said is not None for said in (beat.owned, beat.topics, beat.regex, beat.assignor, beat.rack_id)
    )


def is_current(group: ConsumerGroup, topics: Topics) -> bool:
    """Whether the subscribed topics are what they were when the target was made."""
    return group.topics_digest == _digest(group, topics)


def subscribed_topics(group: ConsumerGroup, topics: Topics) -> frozenset[str]:
    """By name, also those that do not exist."""
    return group.topic_names.union(*(topics.matching(each) for each in group.regexes))


def expel(group: ConsumerGroup, member_id: str, heard_by: Process, now_ms: int) -> ConsumerGroup:
    """The group without a member whose session is over, if it is still heard by whoever says so."""
    member = group.members.get(member_id)
    if member is None or member.heard_by != heard_by:
        return group
    return _remove(group, {member_id}, now_ms)


def hear(group: ConsumerGroup, member_id: str, by: Process) -> ConsumerGroup:
    """Let another time a member's session."""
    member = group.members.get(member_id)
    if member is None or member.heard_by == by:
        return group
    return replace(group, members={**group.members, member_id: replace(member, heard_by=by)})


def sessions(group: ConsumerGroup, limits: GroupLimits) -> Iterator[MemberSession]:
    for member in group.members.values():
        yield MemberSession(member.member_id, member.heard_by, limits.consumer_session_timeout_ms)


def timers(group: ConsumerGroup) -> tuple[Timer, ...]:
    """A member that does not give up what it is told to, within its own time, is out."""
    return tuple(
        Timer(TimerKind.REVOKE, member.revoking_for, member.member_id, member.rebalance_timeout_ms)
        for member in group.members.values()
        if member.revoking
    )


def fire(group: ConsumerGroup, timer: Timer, now_ms: int) -> ConsumerGroup:
    """What a timer that has run out does: nothing, if the group no longer wants it."""
    member = group.members.get(timer.member_id)
    if timer.kind is not TimerKind.REVOKE or member is None or not member.revoking:
        return group
    return _remove(group, {timer.member_id}, now_ms) if member.revoking_for == timer.phase else group


def state_of(group: ConsumerGroup) -> GroupState:
    if not group.members:
        return GroupState.EMPTY
    if group.epoch > group.target_epoch:
        return GroupState.ASSIGNING
    if all(is_reconciled(member, group.target_epoch) for member in group.members.values()):
        return GroupState.STABLE
    return GroupState.RECONCILING


def assignor_of(group: ConsumerGroup, limits: GroupLimits) -> str:
    """The assignor that most members ask for. Of as many, and of none, it is the first in the settings."""
    votes = Counter(member.assignor for member in group.members.values())
    return max(limits.assignors, key=lambda name: votes[name])


def check_commit(
    group: ConsumerGroup, member_id: str, epoch: int, *, is_epoch: bool = True
) -> GroupError | None:
    """Whether offsets may be committed in this name. One with no epoch may where there are no members.

    Not `is_epoch`: it is the generation of a client that knows no epochs.
    """
    if epoch < 0 and not group.members:
        return None
    if not is_epoch and member_id in group.members:
        return NoMemberEpoch(f"member {member_id!r} commits without its epoch")
    return _check_epoch(group, member_id, epoch)


def check_fetch(group: ConsumerGroup, member_id: str | None, epoch: int) -> GroupError | None:
    """Whether offsets may be read in this name. Those who name nobody may always."""
    if member_id is None and epoch < 0:
        return None
    return _check_epoch(group, member_id, epoch)


def _check_epoch(group: ConsumerGroup, member_id: str | None, epoch: int) -> GroupError | None:
    member = None if member_id is None else group.members.get(member_id)
    if member is None:
        return UnknownMember(f"member {member_id!r} is not in the group")
    if member.epoch != epoch:
        return StaleMemberEpoch(f"the member's epoch is {member.epoch}, and not {epoch}")
    return None


def _leave(group: ConsumerGroup, beat: Beat, now_ms: int) -> tuple[ConsumerGroup, Beaten]:
    answer = Beaten(member_id=beat.member_id, epoch=beat.epoch, assignment=None)
    try:
        member = _find(group, beat)
    except UnknownMember:
        if beat.is_repeat:
            return group, answer
        raise
    if beat.epoch == LEAVE:
        return _remove(group, {member.member_id}, now_ms), answer
    away = replace(
        member, epoch=LEAVE_FOR_A_MOMENT, state=MemberState.STABLE, revoking=NOTHING, revoking_for=0
    )
    return _put(group, member, away), answer


def _heartbeat(
    group: ConsumerGroup, beat: Beat, topics: Topics, limits: GroupLimits
) -> tuple[ConsumerGroup, Beaten]:
    if len(group.members) >= limits.consumer_max_size and beat.member_id not in group.members:
        raise GroupFull(f"the group has {limits.consumer_max_size} members, and takes no more")
    if beat.epoch == JOIN:
        group, before = _join(group, beat)
    else:
        before = _find(group, beat)
        _check_heartbeat_epoch(before, beat)
    member = _updated(before, beat)
    group = _put(group, before, member)

    is_resubscribed = member.topics != before.topics or member.regex != before.regex
    digest = _digest(group, topics)
    # A group that is to get a new target anyway gets that of the topics as they are.
    if (
        group.epoch == 0
        or is_resubscribed
        or (group.epoch == group.target_epoch and digest != group.topics_digest)
    ):
        group = replace(group, epoch=group.epoch + 1)
    if group.epoch > group.target_epoch:
        target = _assign(group, topics, ASSIGNORS[assignor_of(group, limits)])
        group = replace(group, target_epoch=group.epoch, target=target, topics_digest=digest)

    if not is_reconciled(member, group.target_epoch):
        unsubscribed = _unsubscribed(member, topics) if is_resubscribed else frozenset()
        others = (each for each in group.members.values() if each.member_id != member.member_id)
        target_of_member = group.target.get(member.member_id, NOTHING)
        reconciled = reconcile(
            member, group.target_epoch, target_of_member, beat.owned, others, unsubscribed=unsubscribed
        )
        group = _put(group, member, reconciled)
        member = reconciled

    is_full = (
        beat.rebalance_timeout_ms != AS_BEFORE_MS
        and (beat.topics is not None or beat.regex is not None)
        and beat.owned is not None
    )
    tells = beat.epoch == JOIN or is_full or beat.is_repeat or member.assigned != before.assigned
    assignment = member.assigned if tells else None
    return group, Beaten(member_id=member.member_id, epoch=member.epoch, assignment=assignment)


def _join(group: ConsumerGroup, beat: Beat) -> tuple[ConsumerGroup, ConsumerMember]:
    """The group with the member in it. A member that joins once more stays what it is."""
    static = _static_member(group, beat.instance_id)
    if static is not None and static.epoch == LEAVE_FOR_A_MOMENT:
        back = replace(static, member_id=beat.member_id, epoch=0, previous_epoch=0, heard_by=beat.heard_by)
        members = {each: group.members[each] for each in group.members if each != static.member_id}
        target = {each: group.target[each] for each in group.target if each != static.member_id}
        if static.member_id in group.target:
            target[beat.member_id] = group.target[static.member_id]
        return replace(group, members={**members, beat.member_id: back}, target=target), back
    # Kafka refuses also the member itself, whose first answer may have been lost.
    if static is not None and static.member_id != beat.member_id:
        raise UnreleasedInstance(
            f"member {static.member_id} has the instance id {beat.instance_id}, and has not left"
        )
    member = group.members.get(beat.member_id)
    if member is not None:
        return group, member
    member = ConsumerMember(
        member_id=beat.member_id,
        instance_id=beat.instance_id,
        rack_id=None,
        client_id=beat.client_id,
        client_host=beat.client_host,
        rebalance_timeout_ms=beat.rebalance_timeout_ms,
        topics=frozenset(),
        regex=None,
        assignor=None,
        heard_by=beat.heard_by,
        epoch=0,
    )
    return replace(group, members={**group.members, member.member_id: member}), member


def _who_leaves(group: ConsumerGroup, leaving: Leaving) -> str:
    """Raises `UnknownMember`, `FencedInstance`."""
    if leaving.member_id or leaving.instance_id is None:
        return _find(group, leaving).member_id
    static = _static_member(group, leaving.instance_id)  # whoever has it
    if static is None:
        raise UnknownMember(f"no member has the instance id {leaving.instance_id}")
    return static.member_id


def _find(group: ConsumerGroup, named: Beat | Leaving) -> ConsumerMember:
    """The member that is there already. Raises `UnknownMember`, `FencedInstance`."""
    member = group.members.get(named.member_id)
    if named.instance_id is None or (member is not None and member.instance_id == named.instance_id):
        if member is None:
            raise UnknownMember(f"member {named.member_id} is not in the group")
        return member
    static = _static_member(group, named.instance_id)
    if static is None:
        raise UnknownMember(f"no member has the instance id {named.instance_id}")
    raise FencedInstance(
        f"member {static.member_id} has the instance id {named.instance_id} now, and not {named.member_id}"
    )


def _static_member(group: ConsumerGroup, instance_id: str | None) -> ConsumerMember | None:
    if instance_id is None:
        return None
    return next((each for each in group.members.values() if each.instance_id == instance_id), None)


def _check_heartbeat_epoch(member: ConsumerMember, beat: Beat) -> None:
    """Raises `FencedMemberEpoch`.

    A member that did not hear of its epoch comes with the one before. It is believed if it owns nothing that
    it should not, or if the broker itself knows that it asks a second time.
    """
    if beat.epoch == member.epoch:
        return
    is_believed = beat.is_repeat if beat.owned is None else is_subset(beat.owned, member.assigned)
    if is_believed and beat.epoch == member.previous_epoch < member.epoch:
        return
    raise FencedMemberEpoch(
        f"the member's epoch is {member.epoch}, and not {beat.epoch}: it has to give up all and join again"
    )


def _updated(member: ConsumerMember, beat: Beat) -> ConsumerMember:
    """The member as it describes itself now."""
    updated = replace(
        member,
        instance_id=member.instance_id if beat.instance_id is None else beat.instance_id,
        rack_id=member.rack_id if beat.rack_id is None else beat.rack_id,
        rebalance_timeout_ms=(
            member.rebalance_timeout_ms
            if beat.rebalance_timeout_ms == AS_BEFORE_MS
            else beat.rebalance_timeout_ms
        ),
        topics=member.topics if beat.topics is None else beat.topics,
        regex=member.regex if beat.regex is None else beat.regex or None,
        assignor=member.assignor if beat.assignor is None else beat.assignor,
        client_id=beat.client_id,
        client_host=beat.client_host,
        heard_by=beat.heard_by,
    )
    return member if updated == member else updated


def _put(group: ConsumerGroup, before: ConsumerMember, member: ConsumerMember) -> ConsumerGroup:
    if member == before:
        return group
    return replace(group, members={**group.members, member.member_id: member})


def _remove(group: ConsumerGroup, member_ids: Collection[str], now_ms: int) -> ConsumerGroup:
    members = {each: group.members[each] for each in group.members if each not in member_ids}
    target = {each: group.target[each] for each in group.target if each not in member_ids}
    group = replace(group, epoch=group.epoch + 1, members=members, target=target)
    return group if members else replace(group, state_since_ms=now_ms, topics_digest=b"")


def _assign(group: ConsumerGroup, topics: Topics, assign: Assign) -> Mapping[str, Assignment]:
    """The target of every member that gets something."""
    partitions: dict[UUID, int] = {}
    subscribed: dict[tuple[frozenset[str], str | None], frozenset[UUID]] = {}  # most members say the same
    subscribers: dict[str, Subscriber] = {}
    for member in group.members.values():
        subscription = (member.topics, member.regex)
        if subscription not in subscribed:
            shapes = _existing(_names(member, topics), topics).values()
            partitions.update((shape.topic_id, shape.partitions) for shape in shapes)
            subscribed[subscription] = frozenset(shape.topic_id for shape in shapes)
        subscribers[member.member_id] = Subscriber(
            subscribed[subscription], group.target.get(member.member_id, NOTHING), member.instance_id
        )
    target = assign(subscribers, partitions)
    return {member_id: assigned for member_id, assigned in target.items() if assigned}


def _unsubscribed(member: ConsumerMember, topics: Topics) -> frozenset[UUID]:
    """The topics that it has partitions of, and no longer wants any of."""
    shapes = _existing(_names(member, topics), topics).values()
    return frozenset(member.assigned) - {shape.topic_id for shape in shapes}


def _names(member: ConsumerMember, topics: Topics) -> frozenset[str]:
    return member.topics if member.regex is None else member.topics | topics.matching(member.regex)


def _existing(names: frozenset[str], topics: Topics) -> dict[str, TopicShape]:
    """In one order everywhere."""
    shapes = ((name, topics.get(name)) for name in sorted(names))
    return {name: shape for name, shape in shapes if shape is not None}


def _digest(group: ConsumerGroup, topics: Topics) -> bytes:
    existing = _existing(subscribed_topics(group, topics), topics)
    if not existing:
        return b""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for name, (topic_id, partitions) in existing.items():
        # Names have no slash.
        digest.update(b"%s/%s/%d/" % (name.encode(), topic_id.bytes, partitions))
    return digest.digest()
