"""The assignor `uniform`: as balanced as subscriptions allow, and then with as few moves as it can.

First each member keeps what it had of the topics that it still subscribes to. When all subscribe to the same
topics their counts end at most one apart, and those that had more keep more: no partition moves without need.
Otherwise free partitions go to the least loaded subscribers, and then partitions move from the most to the
least loaded subscriber of a topic while these are two or more apart. Between equals the order of ids decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from heapq import heapreplace
from uuid import UUID

from dray.groups.assignors.subscriber import Assignment, Subscriber

# Where subscriptions overlap without being equal, a round about halves what is out of balance. There could be
# as many rounds as members, each for less than the one before; Kafka stops after so many.
_ROUNDS = 16

_FREE = -1


def uniform(members: Mapping[str, Subscriber], partitions: Mapping[UUID, int]) -> dict[str, Assignment]:
    names = sorted(members)
    subscribers = [members[name] for name in names]
    table = _Table(subscribers, partitions)
    if any(one.topics != subscribers[0].topics for one in subscribers):
        topics = _least_choice_first(table)
        _assign_free(table, topics)
        _balance(table, topics)
    elif names:
        _level(table)
    return dict(zip(names, table.assignments(), strict=True))


class _Table:
    """Who owns each partition, with members and topics as numbers."""

    def __init__(self, members: Sequence[Subscriber], partitions: Mapping[UUID, int]) -> None:
        subscribers: dict[UUID, list[int]] = {}
        for number, member in enumerate(members):
            for topic in member.topics:
                subscribers.setdefault(topic, []).append(number)

        self.topics = sorted(subscribers, key=_signed_halves)
        self.subscribers = [subscribers[topic] for topic in self.topics]
        self.owners = [[_FREE] * partitions[topic] for topic in self.topics]
        self.loads = [0] * len(members)
        self._keep(members)

    def _keep(self, members: Sequence[Subscriber]) -> None:
        number_of = {topic: number for number, topic in enumerate(self.topics)}
        for member, before in enumerate(members):
            for topic, had in before.assigned.items():
                if topic not in before.topics:
                    continue
                owners = self.owners[number_of[topic]]
                for partition in had:
                    if partition < len(owners) and owners[partition] == _FREE:
                        owners[partition] = member
                        self.loads[member] += 1

    def give(self, topic: int, partition: int, member: int) -> None:
        owner = self.owners[topic][partition]
        if owner != _FREE:
            self.loads[owner] -= 1
        self.owners[topic][partition] = member
        self.loads[member] += 1

    def assignments(self) -> list[Assignment]:
        found: list[dict[UUID, list[int]]] = [{} for _ in self.loads]
        for number, topic in enumerate(self.topics):
            for partition, owner in enumerate(self.owners[number]):
                found[owner].setdefault(topic, []).append(partition)
        return [{topic: frozenset(numbers) for topic, numbers in one.items()} for one in found]


def _level(table: _Table) -> None:
    """All subscribe to the same topics: everyone up or down to an equal share."""
    share, larger = divmod(sum(map(len, table.owners)), len(table.loads))
    # Those that have more than the share keep one more: taking it would move a partition for nothing. What is
    # over goes to the last of the others, as in Kafka.
    above = [member for member, load in enumerate(table.loads) if load > share]
    others = [member for member, load in enumerate(table.loads) if load <= share]
    quotas = [share] * len(table.loads)
    for member in [*above, *reversed(others)][:larger]:
        quotas[member] += 1
    spare: list[tuple[int, int]] = []
    held: list[list[tuple[int, int]]] = [[] for _ in table.loads]
    for topic, owners in enumerate(table.owners):
        for partition, owner in enumerate(owners):
            (spare if owner == _FREE else held[owner]).append((topic, partition))
    for member, quota in enumerate(quotas):
        spare += held[member][quota:]
    left = iter(spare)
    for member, quota in enumerate(quotas):
        for _ in range(quota - len(held[member])):
            table.give(*next(left), member)


def _least_choice_first(table: _Table) -> list[int]:
    """Topics with many partitions for each subscriber, and of these the ones with few subscribers."""

    def choice(topic: int) -> tuple[float, int, int]:
        subscribers = len(table.subscribers[topic])
        return -len(table.owners[topic]) / subscribers, subscribers, topic

    return sorted(range(len(table.topics)), key=choice)


def _assign_free(table: _Table, topics: Sequence[int]) -> None:
    for topic in topics:
        free = [partition for partition, owner in enumerate(table.owners[topic]) if owner == _FREE]
        takers = _line(table, topic) if free else []
        for partition in free:
            load, place, member = takers[0]
            table.give(topic, partition, member)
            heapreplace(takers, (load + 1, place, member))


def _balance(table: _Table, topics: Sequence[int]) -> None:
    shared = [topic for topic in topics if len(table.subscribers[topic]) > 1]
    settled = 0  # topics in a row that needed no move
    for _ in range(_ROUNDS):
        for topic in shared:
            settled = 0 if _balance_topic(table, topic) else settled + 1
            if settled >= len(shared):
                return


def _balance_topic(table: _Table, topic: int) -> bool:
    """Moves partitions from the most to the least loaded. Whether any moved."""
    loads = [table.loads[member] for member in table.subscribers[topic]]
    if max(loads) - min(loads) < 2:
        return False
    takers = _line(table, topic)
    held: dict[int, list[int]] = {}
    for partition, owner in enumerate(table.owners[topic]):
        held.setdefault(owner, []).append(partition)
    moved = False
    for most, giver in _givers(table, [member for _, _, member in takers], held):
        least, place, taker = takers[0]
        if most - least < 2:
            break
        table.give(topic, held[giver].pop(), taker)
        heapreplace(takers, (least + 1, place, taker))
        moved = True
    return moved


def _givers(table: _Table, rest: list[int], held: Mapping[int, list[int]]) -> Iterator[tuple[int, int]]:
    """Again and again the load and number of the most loaded that holds something. `rest` is all, by load."""
    giving: list[int] = []  # those at or above the level, in their turns
    first = 0  # before it are those that have nothing left
    level = 0
    while first < len(giving) or rest:
        level = level - 1 if first < len(giving) else table.loads[rest[-1]]
        while rest and table.loads[rest[-1]] == level:
            giving.append(rest.pop())
        for turn in range(first, len(giving)):
            if held.get(giving[turn]):
                yield level, giving[turn]
            else:
                # The first in line takes its turn: who gives when is then as in Kafka.
                giving[turn] = giving[first]
                first += 1


def _line(table: _Table, topic: int) -> list[tuple[int, int, int]]:
    """A heap of the topic's subscribers: load, place by the loads as they are now, member."""
    ordered = sorted((table.loads[member], member) for member in table.subscribers[topic])
    return [(load, place, member) for place, (load, member) in enumerate(ordered)]


def _signed_halves(topic: UUID) -> int:
    """Sorts topic ids as Kafka does: each half as a signed number."""
    return topic.int ^ (1 << 127 | 1 << 63)
