"""Our assignors beside Kafka's own, over epochs in which members come and go and topics change.

Kafka's `uniform` breaks ties by the order in which a hash map shows it the members. Here it is shown them in
the order that ours takes, so that the results can be compared one to one. Where all subscribe to the same,
the order of a hash set of topic ids plays a part too: ids below 16 stand in it sorted.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from uuid import UUID

from dray.groups.assignors import ASSIGNORS, Assignment, Subscriber
from tests.servers import kafka

_SOURCE = Path(kafka.__file__).parent / "kafka" / "Assignors.java"
_TIMEOUT_S = 60

Assignments = Mapping[str, Assignment]

# Java sorts by UTF-16, where the last comes before the one before it.
INITIALS = "mé\uffee\N{GRINNING FACE}"
SMALL_IDS = [UUID(int=number) for number in range(2, 14)]


@dataclass(frozen=True)
class Epoch:
    label: str
    assignor: str
    members: Mapping[str, Subscriber]
    partitions: Mapping[UUID, int]
    ours: Assignments


def test_range_assigns_as_kafka_does() -> None:
    epochs = [
        epoch
        for seed in range(20)
        for epoch in run("range", seed, random_ids(seed), same_topics=seed % 3 == 0)
    ]
    assert len(epochs) == 120
    for epoch, theirs in zip(epochs, ask_kafka(epochs), strict=True):
        assert epoch.ours == theirs, epoch.label


def test_uniform_assigns_as_kafka_does_where_all_subscribe_to_the_same() -> None:
    epochs = [epoch for seed in range(20) for epoch in run("uniform", seed, SMALL_IDS, same_topics=True)]
    assert len(epochs) == 120
    for epoch, theirs in zip(epochs, ask_kafka(epochs), strict=True):
        assert epoch.ours == theirs, epoch.label


def test_uniform_moves_as_many_as_kafka_where_topic_ids_are_any() -> None:
    epochs = [
        epoch for seed in range(10) for epoch in run("uniform", seed, random_ids(seed), same_topics=True)
    ]
    for epoch, theirs in zip(epochs, ask_kafka(epochs), strict=True):
        assert counts(epoch.ours) == counts(theirs), epoch.label
        assert kept(epoch, epoch.ours) == kept(epoch, theirs), epoch.label


def test_uniform_assigns_as_kafka_does_where_subscriptions_differ() -> None:
    epochs = [
        epoch for seed in range(30) for epoch in run("uniform", seed, random_ids(seed), same_topics=False)
    ]
    epochs += staircase()
    assert len(epochs) == 183
    for epoch, theirs in zip(epochs, ask_kafka(epochs), strict=True):
        assert epoch.ours == theirs, epoch.label


def random_ids(seed: int) -> list[UUID]:
    rng = Random(seed)
    return [UUID(int=rng.getrandbits(128)) for _ in range(12)]


def run(assignor: str, seed: int, ids: Sequence[UUID], same_topics: bool) -> list[Epoch]:
    """Six epochs of a group. Between them members join, leave or subscribe anew; topics grow or appear."""
    rng = Random(f"{assignor} {seed}")
    most_partitions = rng.choice((4, 9, 40))
    partitions = {topic: rng.randint(1, most_partitions) for topic in ids[: rng.randint(2, 6)]}
    members: dict[str, tuple[frozenset[UUID], str | None]] = {}

    def subscription() -> frozenset[UUID]:
        if same_topics:
            return next((topics for topics, _ in members.values()), frozenset(partitions))
        return frozenset(topic for topic in partitions if rng.random() < 0.6)

    def join() -> None:
        name, instance_id = (f"{rng.choice(INITIALS)}{rng.randrange(10**9):09}" for _ in range(2))
        members[name] = subscription(), instance_id if rng.random() < 0.3 else None

    # Always there, so that subscriptions do differ.
    members["first"] = (frozenset(partitions) if same_topics else frozenset([ids[0]])), None
    if not same_topics:
        members["last"] = frozenset([ids[1]]), None
    fixed = set(members)
    for _ in range(rng.choice((1, 3, 12))):
        join()
    epochs: list[Epoch] = []
    before: Assignments = {}
    for number in range(6):
        given = {
            name: Subscriber(topics, before.get(name, {}), instance_id)
            for name, (topics, instance_id) in members.items()
        }
        before = ASSIGNORS[assignor](given, dict(partitions))
        epochs.append(Epoch(f"seed {seed}, epoch {number}", assignor, given, dict(partitions), before))
        match rng.choice(("join", "join", "leave", "leave", "grow", "topic", "subscribe")):
            case "join":
                for _ in range(rng.choice((1, 3))):
                    join()
            case "leave":
                leavers = sorted(set(members) - fixed)
                for name in rng.sample(leavers, min(len(leavers), rng.choice((1, 3)))):
                    del members[name]
            case "grow":
                partitions[rng.choice(sorted(partitions))] += rng.randint(1, 5)
            case "topic":
                topic = ids[len(partitions)]
                partitions[topic] = rng.randint(1, most_partitions)
                for name in sorted(members):
                    topics, instance_id = members[name]
                    if same_topics or (name not in fixed and rng.random() < 0.6):
                        members[name] = topics | {topic}, instance_id
            case "subscribe":
                topics = frozenset(rng.sample(sorted(partitions), rng.randint(1, len(partitions))))
                changed = members if same_topics else set(members) - fixed
                for name in sorted(changed):
                    if same_topics or rng.random() < 0.4:
                        members[name] = topics, members[name][1]
    return epochs


def staircase() -> list[Epoch]:
    """Each of twenty members has one partition less than the one before, and can take from it alone.

    One more for the first wanders down the stairs, by one member in each round; the limit of rounds ends it
    on the way.
    """
    steps = 20
    names = [f"m{step:02}" for step in range(steps)]
    own = [UUID(int=100 + step) for step in range(steps)]
    shared = [UUID(int=200 + step) for step in range(steps)]
    partitions = {own[step]: 2 * (steps - step) - 1 for step in range(steps)}
    partitions |= {shared[step]: step + 1 for step in range(steps)}
    topics = [frozenset({own[step], shared[step]} | {shared[max(step - 1, 0)]}) for step in range(steps)]
    before: Assignments = {
        names[step]: {topic: frozenset(range(partitions[topic])) for topic in (own[step], shared[step])}
        for step in range(steps)
    }
    partitions[own[0]] += 1
    epochs = []
    for number in range(3):
        given = {names[step]: Subscriber(topics[step], before[names[step]]) for step in range(steps)}
        before = ASSIGNORS["uniform"](given, partitions)
        epochs.append(Epoch(f"staircase, epoch {number}", "uniform", given, partitions, before))
    changes = [any(one.assigned != e.ours[name] for name, one in e.members.items()) for e in epochs]
    assert changes == [True, True, False], "the first epoch must not suffice"
    return epochs


def counts(assignments: Assignments) -> dict[str, int]:
    return {name: sum(map(len, one.values())) for name, one in assignments.items()}


def kept(epoch: Epoch, after: Assignments) -> int:
    """Partitions that stay with the member that had them."""
    return sum(
        len(had & after[name].get(topic, frozenset()))
        for name, one in epoch.members.items()
        for topic, had in one.assigned.items()
    )


def ask_kafka(epochs: Sequence[Epoch]) -> list[Assignments]:
    """One JVM for all: it compiles our source and runs Kafka's classes."""
    command = kafka.java_command(str(_SOURCE), [], kafka.SHORT_LIVED_OPTIONS)
    lines = "".join(f"{_encode(epoch)}\n" for epoch in epochs)
    done = subprocess.run(command, input=lines.encode(), capture_output=True, timeout=_TIMEOUT_S)
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-2000:]
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    return [
        {name: _decode(answer.get(name, {})) for name in epoch.members}
        for epoch, answer in zip(epochs, answers, strict=True)
    ]


def _encode(epoch: Epoch) -> str:
    members = {
        name: {
            "instance": one.instance_id,
            "topics": sorted(map(str, one.topics)),
            "assigned": {str(topic): sorted(one.assigned[topic]) for topic in sorted(one.assigned)},
        }
        for name, one in sorted(epoch.members.items())
    }
    partitions = {str(topic): count for topic, count in epoch.partitions.items()}
    return json.dumps({"assignor": epoch.assignor, "partitions": partitions, "members": members})


def _decode(topics: Mapping[str, Sequence[int]]) -> Assignment:
    return {UUID(topic): frozenset(numbers) for topic, numbers in topics.items()}
