"""What tests of consumer groups share: topics in memory, and heartbeats as clients send them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from uuid import UUID

from dray.groups.group import Assignment, Beat, Process, TopicShape

HERE, THERE = Process(1, 1_000), Process(2, 2_000)


class MemoryTopics:
    """`Topics` over a dict. A topic that is made again is another one."""

    def __init__(self, **partitions: int) -> None:
        self.shapes: dict[str, TopicShape] = {}
        self.made = 0
        for name, count in partitions.items():
            self.create(name, count)

    def create(self, name: str, partitions: int) -> UUID:
        self.made += 1
        self.shapes[name] = TopicShape(UUID(int=self.made), partitions)
        return self.shapes[name].topic_id

    def grow(self, name: str, partitions: int) -> None:
        self.shapes[name] = TopicShape(self.shapes[name].topic_id, partitions)

    def delete(self, name: str) -> None:
        del self.shapes[name]

    def copy(self) -> MemoryTopics:
        copied = MemoryTopics()
        copied.shapes = dict(self.shapes)
        return copied

    def get(self, name: str) -> TopicShape | None:
        return self.shapes.get(name)

    def name_of(self, topic_id: UUID) -> str | None:
        return next((name for name, shape in self.shapes.items() if shape.topic_id == topic_id), None)

    def matching(self, regex: str) -> frozenset[str]:
        return frozenset(name for name in self.shapes if re.fullmatch(regex, name))


def light_beat(member_id: str, epoch: int, **fields: Any) -> Beat:
    """One that says only that the member is there, besides what is given."""
    said: dict[str, Any] = {
        "instance_id": None,
        "rack_id": None,
        "rebalance_timeout_ms": -1,
        "topics": None,
        "regex": None,
        "assignor": None,
        "owned": None,
        "client_id": "client",
        "client_host": "/10.0.0.1",
        "heard_by": HERE,
    }
    return Beat(member_id=member_id, epoch=epoch, **{**said, **fields})


def join_beat(member_id: str, *topics: str, **fields: Any) -> Beat:
    said: dict[str, Any] = {"rebalance_timeout_ms": 60_000, "topics": frozenset(topics), "owned": {}}
    return light_beat(member_id, 0, **{**said, **fields})


def pairs(assignment: Assignment | Mapping[UUID, set[int]]) -> set[tuple[int, int]]:
    """Topics by the number that `MemoryTopics` gave them."""
    return {(topic_id.int, each) for topic_id, partitions in assignment.items() for each in partitions}
