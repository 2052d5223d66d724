"""One member's next step from what it has to its target: give up first, then get. Pure.

Between two heartbeats a member is in one of three states (KIP-848):

| state | what it waits for |
|---|---|
| STABLE | nothing: it has its target |
| UNREVOKED | that it says, by the partitions it owns, that it gave up `revoking` |
| UNRELEASED | that others give up what its target has and they hold |

**The invariant that all of this is for**: a partition is in `assigned` or `revoking` of one member at most.
A member gets a partition only when no other holds it, and a partition leaves `revoking` only when its member
said that it owns it no longer, or is out of the group. A member reaches the target's epoch when nothing is
left to give up, so a member of an epoch owns no partition that this epoch gave to another.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from uuid import UUID

from dray.groups.group import NOTHING, Assignment, ConsumerMember, MemberState


def is_reconciled(member: ConsumerMember, target_epoch: int) -> bool:
    return member.state is MemberState.STABLE and member.epoch == target_epoch


def reconcile(
    member: ConsumerMember,
    target_epoch: int,
    target: Assignment,
    owned: Assignment | None,
    others: Iterable[ConsumerMember],
    *,
    unsubscribed: frozenset[UUID] = frozenset(),
) -> ConsumerMember:
    """The member after its next step; the same one if there is none.

    `owned` is what it says that it has, None where it does not say. `others` are only looked at where there
    is something to get. `unsubscribed` topics are given up at once, also while it gives up others.
    """
    if is_reconciled(member, target_epoch):
        return member
    if member.state is MemberState.UNREVOKED and _owns_any(owned, member.revoking):
        return _give_up_more(member, target_epoch, unsubscribed)
    kept = _both(member.assigned, target)
    surplus = _without(member.assigned, kept)
    if surplus and _owns_any(owned, surplus):
        return replace(
            member,
            state=MemberState.UNREVOKED,
            assigned=kept,
            revoking=surplus,
            revoking_for=target_epoch,
        )
    wanted = _without(target, kept)
    free = _without(wanted, *_holdings(others)) if wanted else wanted
    assigned = _together(kept, free)
    state = MemberState.STABLE if free == wanted else MemberState.UNRELEASED
    if member.epoch == target_epoch and member.state is state and member.assigned == assigned:
        return member  # it waits still
    return replace(
        member,
        state=state,
        epoch=target_epoch,
        # As long as the epoch stays, so does the one before: a member that did not hear of its epoch may
        # say so more than once.
        previous_epoch=member.previous_epoch if member.epoch == target_epoch else member.epoch,
        assigned=assigned,
        revoking=NOTHING,
        revoking_for=0,
    )


def is_subset(part: Assignment, whole: Assignment) -> bool:
    return all(partitions <= whole.get(topic_id, frozenset()) for topic_id, partitions in part.items())


def _give_up_more(member: ConsumerMember, target_epoch: int, unsubscribed: frozenset[UUID]) -> ConsumerMember:
    surplus = {
        topic_id: member.assigned[topic_id] for topic_id in member.assigned if topic_id in unsubscribed
    }
    if not surplus:
        return member
    return replace(
        member,
        assigned=_without(member.assigned, surplus),
        revoking=_together(member.revoking, surplus),
        revoking_for=target_epoch,
    )


def _owns_any(owned: Assignment | None, partitions: Assignment) -> bool:
    """Whether the member may own some of these. One that does not say may own all."""
    return owned is None or bool(_both(owned, partitions))


def _holdings(members: Iterable[ConsumerMember]) -> Iterable[Assignment]:
    for member in members:
        yield member.assigned
        if member.revoking:
            yield member.revoking


def _both(one: Assignment, other: Assignment) -> Assignment:
    both = {
        topic_id: partitions & other[topic_id] for topic_id, partitions in one.items() if topic_id in other
    }
    return {topic_id: partitions for topic_id, partitions in both.items() if partitions}


def _without(whole: Assignment, *parts: Assignment) -> Assignment:
    left = dict(whole)
    for part in parts:
        for topic_id in left.keys() & part.keys():
            left[topic_id] -= part[topic_id]
            if not left[topic_id]:
                del left[topic_id]
    return left


def _together(one: Assignment, other: Assignment) -> Assignment:
    together = dict(one)
    for topic_id, partitions in other.items():
        together[topic_id] = together.get(topic_id, frozenset()) | partitions
    return together
