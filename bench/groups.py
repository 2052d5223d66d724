"""Consumer groups on Dray and Apache Kafka side by side: the same members, the same settings, one run.

    python -m bench.groups
    python -m bench.groups --members 1 10 --rounds 1 --targets dray

Both brokers run from the start, on loopback, and take turns round by round; who begins changes. Members are
librdkafka consumers in this process, all polled by one thread, on a topic of 100 partitions with a record in
each. Neither broker delays the first rebalance, heartbeats come every second (for the consumer protocol the
brokers are told so), and everything else is a default. Dray is embedded: SQLite and files.

- `first record`: from when all members subscribe at once to when each has its first record; the median member
  and the last one. What it takes to find the coordinator and to fetch is part of it.
- `rebalance`: one member of the group leaves; until the others have all partitions again.
- `commit`: OffsetCommit of 12 partitions, one after the other over one connection, as a simple consumer.
- `writes` has no Kafka beside it: how many writes the metadata store (an etcd, which counts them) gets for
  each member and minute while a group does nothing but send heartbeats.

Times are medians of the rounds in milliseconds, p99 of all commits of all rounds. Nothing here asserts.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from kio.schema.offset_commit.v8 import request as offset_commit
from kio.schema.types import GroupId, TopicName
from kio.static.primitive import i32, i64

from bench.running import Broker, ClientFailed, running, topic_on
from tests.integration.wire import Wire
from tests.servers.dray import DrayBroker
from tests.servers.etcd import EtcdServer
from tests.servers.kafka import KafkaServer, kafka_version

TOPIC = "groups"
PARTITIONS = 100
COMMITTED = 12
COMMITS = 300
HEARTBEAT_MS = 1_000
# Far above what any case takes when it works.
TIMEOUT_S = 120.0
# A group whose members had no news for so long has settled.
QUIET_S = 3.0
STEADY_S = 30.0
PROTOCOLS = ("classic", "consumer")


@dataclass
class Member:
    consumer: Consumer
    owned: set[int] = field(default_factory=set)
    changed_at: float = 0.0
    first_at: float | None = None


class Members:
    """Some members of one group, polled by whoever waits for something."""

    def __init__(self, address: str, count: int, protocol: str) -> None:
        self._properties: dict[str, str | int | float | bool] = {
            "bootstrap.servers": address,
            "group.id": f"bench-{secrets.token_hex(6)}",
            "group.protocol": protocol,
            "auto.offset.reset": "earliest",
            # Who had a partition for a moment and read its record would leave nothing for the next.
            "enable.auto.commit": False,
            "log_level": 0,
        }
        if protocol == "classic":
            self._properties["heartbeat.interval.ms"] = HEARTBEAT_MS
        self.all = [Member(Consumer(self._properties)) for _ in range(count)]
        # Connections are made before the clock runs, as in an application that is there already.
        for member in self.all:
            member.consumer.list_topics(TOPIC, timeout=TIMEOUT_S)

    def subscribe(self) -> None:
        for member in self.all:
            member.consumer.subscribe(
                [TOPIC], on_assign=self._assigned(member), on_revoke=self._revoked(member)
            )

    def poll_until(self, done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not done():
            if time.monotonic() > deadline:
                raise ClientFailed(f"not {what} after {TIMEOUT_S:g} s")
            got = [self._poll(member) for member in self.all]
            if not any(got):
                time.sleep(0.001)

    @property
    def have_all(self) -> bool:
        return sum(len(member.owned) for member in self.all) == PARTITIONS

    @property
    def settled_at(self) -> float:
        return max(member.changed_at for member in self.all)

    def settle(self) -> None:
        self.poll_until(lambda: self.have_all and time.monotonic() > self.settled_at + QUIET_S, "settled")

    def close(self) -> None:
        for member in self.all:
            member.consumer.close()

    def _poll(self, member: Member) -> bool:
        message = member.consumer.poll(0)
        if message is None:
            return False
        error = message.error()
        if error is not None and error.code() != KafkaError._PARTITION_EOF:
            raise ClientFailed(str(error))
        if member.first_at is None:
            member.first_at = time.monotonic()
        return True

    @staticmethod
    def _assigned(member: Member) -> Callable[[Consumer, list[TopicPartition]], None]:
        def assigned(_: Consumer, partitions: list[TopicPartition]) -> None:
            member.owned |= {each.partition for each in partitions}
            member.changed_at = time.monotonic()

        return assigned

    @staticmethod
    def _revoked(member: Member) -> Callable[[Consumer, list[TopicPartition]], None]:
        def revoked(_: Consumer, partitions: list[TopicPartition]) -> None:
            member.owned -= {each.partition for each in partitions}
            member.changed_at = time.monotonic()

        return revoked


@contextmanager
def members_of(address: str, count: int, protocol: str) -> Iterator[Members]:
    members = Members(address, count, protocol)
    try:
        yield members
    finally:
        members.close()


def join_and_rebalance(address: str, count: int, protocol: str, figures: dict[str, list[float]]) -> None:
    with members_of(address, count, protocol) as members:
        started = time.monotonic()
        members.subscribe()
        members.poll_until(lambda: all(each.first_at is not None for each in members.all), "reading")
        firsts = [each.first_at - started for each in members.all if each.first_at is not None]
        name = f"{protocol}, {count} members"
        figures.setdefault(f"{name}: first record, median", []).append(median(firsts) * 1000)
        figures.setdefault(f"{name}: first record, last", []).append(max(firsts) * 1000)
        if count == 1:
            return
        members.settle()
        leaver = members.all.pop()
        left = time.monotonic()
        leaver.consumer.close()
        members.settle()
        figures.setdefault(f"{name}: rebalance", []).append((members.settled_at - left) * 1000)


def commit(address: str, latencies_ms: list[float]) -> None:
    partitions = tuple(
        offset_commit.OffsetCommitRequestPartition(
            partition_index=i32(index), committed_offset=i64(7), committed_metadata=""
        )
        for index in range(COMMITTED)
    )
    topic = offset_commit.OffsetCommitRequestTopic(name=TopicName(TOPIC), partitions=partitions)
    request = offset_commit.OffsetCommitRequest(
        group_id=GroupId(f"bench-{secrets.token_hex(6)}"),
        generation_id_or_member_epoch=i32(-1),
        member_id="",
        topics=(topic,),
    )
    with Wire(address) as wire:
        for number in range(COMMITS):
            started = time.perf_counter()
            answer = wire.ask(request)
            if number:  # the first makes the group
                latencies_ms.append((time.perf_counter() - started) * 1000)
            codes = {each.error_code for topic in answer.topics for each in topic.partitions}
            if codes != {0}:
                raise ClientFailed(f"OffsetCommit: {codes}")


def fill(broker: Broker) -> None:
    producer = Producer({"bootstrap.servers": broker.address, "log_level": 0})
    for partition in range(PARTITIONS):
        producer.produce(TOPIC, b"x" * 100, partition=partition)
    producer.flush()


def side_by_side(targets: Sequence[str], counts: Sequence[int], rounds: int, scratch: Path) -> None:
    heartbeats = {
        "group.consumer.heartbeat.interval.ms": str(HEARTBEAT_MS),
        "group.initial.rebalance.delay.ms": "0",
    }
    brokers: dict[str, Broker] = {}
    if "dray" in targets:
        brokers["dray"] = DrayBroker(scratch / "dray", settings=heartbeats)
    if "kafka" in targets:
        least = {"group.consumer.min.heartbeat.interval.ms": str(HEARTBEAT_MS)}
        brokers["kafka"] = KafkaServer(scratch / "kafka", {**heartbeats, **least})
    figures: dict[str, dict[str, list[float]]] = {name: {} for name in brokers}
    latencies: dict[str, list[float]] = {name: [] for name in brokers}
    with ExitStack() as stack:
        for broker in brokers.values():
            stack.enter_context(running(broker))
            stack.enter_context(topic_on(broker, TOPIC, PARTITIONS))
            fill(broker)
            join_and_rebalance(broker.address, 1, "classic", {})  # Kafka makes its topic of offsets now
            commit(broker.address, [])
        for number in range(rounds):
            order = list(brokers) if number % 2 == 0 else list(reversed(brokers))
            for protocol in PROTOCOLS:
                for count in counts:
                    for name in order:
                        join_and_rebalance(brokers[name].address, count, protocol, figures[name])
                        print(".", end="", file=sys.stderr, flush=True)
            for name in order:
                commit(brokers[name].address, latencies[name])
        print(file=sys.stderr)
    print_table(figures, latencies)


def print_table(figures: dict[str, dict[str, list[float]]], latencies: dict[str, list[float]]) -> None:
    rows = {name: {case: median(times) for case, times in cases.items()} for name, cases in figures.items()}
    for name, times in latencies.items():
        rows[name]["commit of 12 partitions: p50"] = median(times)
        rows[name]["commit of 12 partitions: p99"] = quantiles(times, n=100)[98]
    print(f"{'ms':<48}" + "".join(f"{name:>10}" for name in rows) + f"{'ratio':>8}")
    for case in next(iter(rows.values())):
        values = [cases[case] for cases in rows.values()]
        ratio = f"{values[0] / values[1]:8.2f}" if len(values) == 2 else ""
        print(f"{case:<48}" + "".join(f"{value:10.1f}" for value in values) + ratio)


def steady_writes(count: int, scratch: Path) -> None:
    """How often a group that does nothing is written."""
    etcd = EtcdServer(scratch / "etcd")
    etcd.start()
    try:
        metadata = f"etcd://{etcd.address}/{secrets.token_hex(6)}"
        broker = DrayBroker(
            scratch / "steady", metadata=metadata, settings={"group.initial.rebalance.delay.ms": "0"}
        )
        with running(broker), topic_on(broker, TOPIC, PARTITIONS):
            for protocol in PROTOCOLS:
                with members_of(broker.address, count, protocol) as members:
                    members.subscribe()
                    members.settle()
                    before = etcd.revision()
                    until = time.monotonic() + STEADY_S
                    members.poll_until(lambda until=until: time.monotonic() > until, "steady")  # type: ignore[misc]
                    written = etcd.revision() - before
                    each = written / count * 60 / STEADY_S
                    print(f"{protocol}, {count} members, writes in {STEADY_S:g} s: {written}")
                    print(f"{protocol}, {count} members, writes for each in a minute: {each:.2f}")
    finally:
        etcd.stop()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--members", type=int, nargs="+", default=[1, 10, 100])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--targets", nargs="+", choices=("dray", "kafka"), default=["dray", "kafka"])
    options = parser.parse_args()
    print(f"Dray beside Apache Kafka {kafka_version()}, {options.rounds} rounds")
    with tempfile.TemporaryDirectory(prefix="dray-bench-") as scratch:
        side_by_side(options.targets, options.members, options.rounds, Path(scratch))
        steady_writes(max(options.members), Path(scratch))


if __name__ == "__main__":
    main()
