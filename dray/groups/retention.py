"""Which committed offsets need not be kept. Pure.

As in Apache Kafka, with one difference: of a group without members nothing expires before it has had none for
the whole retention. Kafka's consumer groups (KIP-848) forget an offset that was committed long ago at the
moment when the last member leaves, and its classic groups forget one that was committed after that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from uuid import UUID

from dray.groups.group import ClassicGroup, ConsumerGroup, Dying, Group, GroupState
from dray.groups.offsets import Committed, Key
from dray.metadata.directory import Found


def expired(
    group: Group | None,
    offsets: Mapping[Key, Found[Committed]],
    subscribed: Collection[str] | None,
    now_ms: int,
    retention_ms: int,
) -> set[Key]:
    """Those that nobody has used for `retention_ms`, or for as long as they were asked to be kept.

    `subscribed` are the topics of the group's members; None where that is not known.
    """
    since_ms = _counts_from(group, is_known=subscribed is not None)
    if since_ms is None:
        return set()

    def is_expired(committed: Committed) -> bool:
        if committed.expire_at_ms is not None:
            return now_ms >= committed.expire_at_ms
        return now_ms - max(committed.committed_at_ms, since_ms) >= retention_ms

    used = subscribed or ()
    return {at for at, found in offsets.items() if at[0] not in used and is_expired(found.value)}


def orphaned(offsets: Mapping[Key, Found[Committed]], topic_id_of: Callable[[str], UUID | None]) -> set[Key]:
    """Those whose topic is gone, also where another has its name now.

    What `topic_id_of` knows is at least as new as `offsets`, or new topics would be taken for deleted ones.
    """
    return {at for at, found in offsets.items() if topic_id_of(at[0]) != found.value.topic_id}


def _counts_from(group: Group | None, *, is_known: bool) -> int | None:
    """The earliest time from which the retention counts, if any offset of the group may expire."""
    match group:
        case None:
            return 0
        case Dying():
            return None  # whoever buries it removes them all
        case ConsumerGroup():
            return 0 if group.members else group.state_since_ms
        case ClassicGroup(protocol_type=None):
            return 0
        case ClassicGroup(state=GroupState.EMPTY):
            return group.state_since_ms
        case ClassicGroup(state=GroupState.STABLE) if is_known:
            return 0
        case ClassicGroup():
            return None
