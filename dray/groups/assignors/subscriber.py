"""What an assignor is told and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias
from uuid import UUID

# Topic id to partitions. A topic without partitions is not in it.
Assignment: TypeAlias = Mapping[UUID, frozenset[int]]


@dataclass(frozen=True, slots=True)
class Subscriber:
    """A member as an assignor sees it."""

    topics: frozenset[UUID]  # those of its subscription that exist
    assigned: Assignment  # its target of the epoch before; empty for a new member
    instance_id: str | None = None


# Members by id and the partition count of every subscribed topic, to the target of every member.
Assign: TypeAlias = Callable[[Mapping[str, Subscriber], Mapping[UUID, int]], dict[str, Assignment]]
