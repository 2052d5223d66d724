"""The assignor `range`: of each topic, every subscriber gets one run of consecutive partitions.

Subscribers stand in one line: static members first, by instance id, then the others by member id. Each topic
is cut along that line by itself, the longer runs first. So topics with equal counts and the same subscribers
are cut at the same places: same-numbered partitions go to one member. What a member had before plays no part;
a static member stays in its place because its instance id outlives its member id.
"""

from __future__ import annotations

from collections.abc import Mapping
from uuid import UUID

from dray.groups.assignors.subscriber import Assignment, Subscriber


def range_(members: Mapping[str, Subscriber], partitions: Mapping[UUID, int]) -> dict[str, Assignment]:
    line = sorted(members, key=lambda member: _place(member, members[member].instance_id))
    subscribers: dict[UUID, list[str]] = {}
    for member in line:
        for topic in members[member].topics:
            subscribers.setdefault(topic, []).append(member)
    runs: dict[str, dict[UUID, frozenset[int]]] = {member: {} for member in line}
    for topic in sorted(subscribers):
        share, longer = divmod(partitions[topic], len(subscribers[topic]))
        start = 0
        for place, member in enumerate(subscribers[topic]):
            end = start + share + (place < longer)
            if start == end:
                break
            runs[member][topic] = frozenset(range(start, end))
            start = end
    return dict(runs)


def _place(member: str, instance_id: str | None) -> tuple[bool, bytes, bytes]:
    return instance_id is None, _utf16(instance_id or ""), _utf16(member)


def _utf16(text: str) -> bytes:
    """Kafka compares strings by UTF-16 units: characters beyond the first plane come before U+E000."""
    return text.encode("utf-16-be", "surrogatepass")
