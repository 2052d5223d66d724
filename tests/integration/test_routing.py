"""Who is sent where: zones, owners, racks, workers, and brokers that leave (D-ZONE-01…14, I6)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from kio.schema.errors import ErrorCode

from tests.batches import build_batch
from tests.integration.rdkafka import QUIET, Sender, create_topic, in_zone, read_values, send_all
from tests.integration.waiting import eventually, eventually_async
from tests.integration.wire import LATEST, Wire, fetch_request, produce_request
from tests.servers.dray import DrayBroker, answers_api_versions
from tests.servers.proxy import Mode, TcpProxy
from tests.servers.s3 import S3Server

# So many that each broker leads some: one of three has none once in a hundred million times.
PARTITIONS = 48


@dataclass
class Zones:
    directory: Path
    free: DrayBroker  # 11 in zone a
    strict: DrayBroker  # 12 in zone a, takes only what it owns
    other: DrayBroker  # 21 in zone b
    topic: str

    @property
    def brokers(self) -> tuple[DrayBroker, ...]:
        return self.free, self.strict, self.other


@pytest.fixture(scope="module")
def zones(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zones]:
    directory = tmp_path_factory.mktemp("zones")
    brokers = [
        DrayBroker(directory, zone="a", node_id=11),
        DrayBroker(directory, zone="a", node_id=12, settings={"routing.enforce_owner": True}),
        DrayBroker(directory, zone="b", node_id=21),
    ]
    for broker in brokers:
        broker.launch()
    for broker in brokers:
        broker.wait_started()
    for broker in brokers:
        eventually(lambda broker=broker: _nodes(broker, None) == {11, 12, 21}, "all know of each other")  # type: ignore[misc]
    free, strict, other = brokers
    yield Zones(directory, free, strict, other, create_topic(free.address, partitions=PARTITIONS))
    for broker in brokers:
        broker.kill()


@pytest.mark.parametrize(
    ("client_id", "expected"),
    [
        ("zone_id=a", {11, 12}),
        ("zone_id=b", {21}),
        ("zone_id=b,app=orders", {21}),
        ("app=orders,zone_id=b", {21}),
        # A zone without brokers, no zone, and what only looks like one: all brokers.
        ("zone_id=c", {11, 12, 21}),
        ("zone_id=B", {11, 12, 21}),
        ("zone_id=", {11, 12, 21}),
        ("zone_id=b,", {11, 12, 21}),
        ("zone_id=b,zone_id=a", {11, 12, 21}),
        ("ZONE_ID=b", {11, 12, 21}),
        ("orders", {11, 12, 21}),
        ("", {11, 12, 21}),
        (None, {11, 12, 21}),
    ],
)
def test_clients_are_kept_in_their_zone(zones: Zones, client_id: str | None, expected: set[int]) -> None:
    answers = []
    for broker in zones.brokers:  # also those of other zones
        with Wire(broker.address, client_id) as wire:
            answer = wire.metadata(zones.topic)
            coordinators = [wire.coordinator(f"group-{number}") for number in range(10)]
        # The one that is asked is known to answer; those of the zone may have just died.
        assert {one.node_id for one in answer.brokers} == expected | {broker.node_id}
        assert answer.controller_id in expected
        leaders = _leaders(answer)
        assert set(leaders) == expected
        assert set(coordinators) <= expected
        for part in answer.topics[0].partitions:
            assert set(part.replica_nodes) == set(part.isr_nodes) == {part.leader_id}
        answers.append((leaders, coordinators, answer.controller_id))
    assert answers[0] == answers[1] == answers[2]  # whoever is asked


def test_only_what_a_broker_takes_or_leaves_moves(zones: Zones) -> None:
    before = {zone: _leaders_for(zones.free, zones.topic, zone) for zone in ("a", "b", None)}
    added = DrayBroker(zones.directory, zone="a", node_id=13)
    added.start()
    try:
        for broker in zones.brokers:
            eventually(lambda broker=broker: 13 in _nodes(broker, "a"), "the others know")  # type: ignore[misc]
        with_it = {zone: _leaders_for(zones.free, zones.topic, zone) for zone in before}
        assert with_it["b"] == before["b"]
        for zone in ("a", None):
            moved = [new for old, new in zip(before[zone], with_it[zone], strict=True) if new != old]
            assert moved
            assert set(moved) == {13}
            assert len(moved) < PARTITIONS * 2 / 3
    finally:
        code = added.terminate()
    assert code == 0
    # It has said so itself before it ended: nobody waits for its session.
    eventually(lambda: 13 not in _nodes(zones.other, None), "the others know that it left", limit_s=5)
    assert {zone: _leaders_for(zones.free, zones.topic, zone) for zone in before} == before


def test_a_broker_that_enforces_refuses_what_it_does_not_own(zones: Zones) -> None:
    leaders = _leaders_for(zones.free, zones.topic, "a")
    own, foreign = leaders.index(12), leaders.index(11)
    with Wire(zones.strict.address, in_zone("a")) as strict, Wire(zones.free.address, in_zone("a")) as free:
        assert strict.produce(zones.topic, own, build_batch()).error is ErrorCode.none
        assert strict.fetch(zones.topic, own, 0).error is ErrorCode.none
        assert strict.list_offset(zones.topic, own, LATEST)[0] is ErrorCode.none

        assert strict.produce(zones.topic, foreign, build_batch()).error is ErrorCode.not_leader_or_follower
        assert strict.fetch(zones.topic, foreign, 0).error is ErrorCode.not_leader_or_follower
        assert strict.list_offset(zones.topic, foreign, LATEST)[0] is ErrorCode.not_leader_or_follower

        # Others serve whatever they are asked for.
        for partition in (own, foreign):
            assert free.produce(zones.topic, partition, build_batch()).error is ErrorCode.none
            assert free.fetch(zones.topic, partition, 0).error is ErrorCode.none


@pytest.mark.parametrize("zone", ["a", "b", None])
def test_clients_of_any_zone_write_and_read_everything(zones: Zones, zone: str | None) -> None:
    topic = create_topic(zones.free.address, partitions=6)
    conf: dict[str, Any] = {"client_id": in_zone(zone)} if zone else {}
    sender = Sender(zones.other.address, **conf)
    for number in range(60):
        sender.send(topic, str(number).encode(), number % 6)
    sender.flush()
    assert not sender.failed
    for partition in range(6):
        log = read_values(zones.free.address, topic, partition, **conf)
        assert log == {n: str(partition + 6 * n).encode() for n in range(10)}


def test_a_consumer_is_sent_to_its_rack(zones: Zones) -> None:
    leaders = _leaders_for(zones.free, zones.topic, None)
    partition = leaders.index(11)
    with Wire(zones.free.address) as wire:
        assert wire.produce(zones.topic, partition, build_batch()).error is ErrorCode.none
        sent_on = wire.fetch(zones.topic, partition, 0, rack="b")
        assert (sent_on.preferred_read_replica, sent_on.records) == (21, b"")
        # A rack without brokers changes nothing.
        stays = wire.fetch(zones.topic, partition, 0, rack="c")
        assert stays.preferred_read_replica == -1
        assert stays.records

    fetches_from: set[int] = set()

    def look(statistics: str) -> None:
        known: dict[str, Any] = json.loads(statistics)["topics"].get(zones.topic, {}).get("partitions", {})
        if str(partition) in known:
            fetches_from.add(known[str(partition)]["broker"])

    consumer = Consumer(
        {
            **QUIET,
            "bootstrap.servers": zones.free.address,
            "group.id": "unused",
            "client.rack": "b",
            "statistics.interval.ms": 50,
            "stats_cb": look,
        }
    )
    with closing(consumer):
        consumer.assign([TopicPartition(zones.topic, partition, 0)])

        def got_it() -> bool:
            message = consumer.poll(0.1)
            return message is not None and message.error() is None

        eventually(got_it, "a record from the broker of the rack", pause_s=0)

        def is_there() -> bool:
            consumer.poll(0.05)
            return 21 in fetches_from

        eventually(is_there, "fetches from the rack", pause_s=0)


def test_workers_are_brokers_of_their_own_and_stop_together(tmp_path: Path) -> None:
    group = DrayBroker(tmp_path, workers=3, settings={"broker.session.timeout.ms": 2000})
    group.start()
    try:
        eventually(lambda: len(_nodes(group, None)) == 3, "all are registered")
        with Wire(group.address) as wire:
            brokers = {one.node_id: one.port for one in wire.metadata().brokers}
        assert sorted(brokers.values()) == list(group.ports)

        # Through the first port to all of them.
        topic = create_topic(group.address, partitions=PARTITIONS)
        leaders = _leaders_for(group, topic, None)
        assert set(leaders) == set(brokers)
        partitions = [leaders.index(node_id) for node_id in brokers]
        values = [str(number).encode() for number in range(20)]
        for partition in partitions:
            send_all(group.address, topic, values, partition)

        # One that dies comes back, on its port and under its id.
        victim = _pid_of_worker(group.pid, group.ports[1])
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        eventually(lambda: _pid_of_worker(group.pid, group.ports[1]) not in (None, victim), "another process")
        group.wait_started()
        with Wire(f"127.0.0.1:{group.ports[1]}") as wire:
            assert {one.node_id: one.port for one in wire.metadata().brokers} == brokers
        for partition in partitions:
            assert read_values(group.address, topic, partition) == dict(enumerate(values))

        workers = [_pid_of_worker(group.pid, port) for port in group.ports]
        assert group.terminate() == 0
        assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]
        assert group.log_text().count("broker stopped") == 3
    finally:
        if group.is_running:
            group.terminate()


def test_workers_do_not_outlive_the_one_that_started_them(tmp_path: Path) -> None:
    """They would keep its ports, and whoever starts it again would find them taken."""
    group = DrayBroker(tmp_path, workers=2)
    group.start()
    workers = [_pid_of_worker(group.pid, port) for port in group.ports]
    group.kill()
    try:
        eventually(lambda: group.log_text().count("broker stopped") == 2, "both have stopped in order")
        eventually(lambda: not any(map(answers_api_versions, group.ports)), "nobody answers")
    finally:
        for pid in workers:
            if pid is not None and Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)


async def test_a_stop_answers_what_is_under_way(
    tmp_path: Path, s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """SIGTERM: deregistered at once, requests in flight are committed and answered, exit code 0."""
    proxy = TcpProxy(s3_server.address)
    await proxy.start()
    objects = s3_server.url(tmp_path_factory.mktemp("stop").name, address=proxy.address)
    stays, leaves = (DrayBroker(tmp_path, objects=objects) for _ in range(2))
    try:
        for broker in (stays, leaves):
            await asyncio.to_thread(broker.start)
        topic = await asyncio.to_thread(create_topic, stays.address, partitions=2)
        node_id = leaves.node_id
        await eventually_async(lambda: node_id in _nodes(stays, None))
        with Wire(leaves.address) as producer, Wire(leaves.address) as consumer:
            await asyncio.to_thread(producer.metadata, topic)  # both are served, not only connected
            await asyncio.to_thread(consumer.metadata, topic)
            await proxy.set_mode(Mode.BLACK_HOLE)
            for _ in range(3):
                producer.send(produce_request(topic, 0, build_batch(), timeout_ms=30_000))
            consumer.send(fetch_request(topic, 1, 0, max_wait_ms=60_000))
            await eventually_async(lambda: _has_read_everything(leaves), "the requests have been read")
            leaves.signal(signal.SIGTERM)
            await eventually_async(lambda: node_id not in _nodes(stays, None), "it has deregistered")
            assert leaves.is_running
            await proxy.set_mode(Mode.PASS)
            answers = [await asyncio.to_thread(producer.receive_produced) for _ in range(3)]
            assert answers == [(ErrorCode.none, offset) for offset in range(3)]
            fetched = await asyncio.to_thread(consumer.receive_fetched)
            assert fetched.error is ErrorCode.none
            assert await asyncio.to_thread(leaves.wait_ended, 10) == 0
        with Wire(stays.address) as wire:
            assert await asyncio.to_thread(wire.list_offset, topic, 0, LATEST) == (ErrorCode.none, 3)
    finally:
        leaves.kill()
        stays.kill()
        await proxy.stop()


def test_a_producer_goes_on_elsewhere_when_its_broker_stops(tmp_path: Path) -> None:
    brokers = [DrayBroker(tmp_path) for _ in range(2)]
    for broker in brokers:
        broker.start()
    try:
        topic = create_topic(brokers[0].address, partitions=4)
        sender = Sender(",".join(broker.address for broker in brokers))
        for number in range(200):
            sender.send(topic, str(number).encode(), number % 4)
        assert brokers[0].terminate() == 0
        for number in range(200, 400):
            sender.send(topic, str(number).encode(), number % 4)
        sender.flush()
        assert not sender.failed
        logs = {partition: read_values(brokers[1].address, topic, partition) for partition in range(4)}
        for acked in sender.acked:
            assert logs[acked.partition][acked.offset] == acked.value
        assert len(sender.acked) == 400
        send_all(brokers[1].address, topic, [b"after"])
    finally:
        for broker in brokers:
            broker.kill()


def _nodes(broker: DrayBroker, zone: str | None) -> set[int]:
    with Wire(broker.address, in_zone(zone) if zone else None) as wire:
        return {one.node_id for one in wire.metadata().brokers}


def _leaders_for(broker: DrayBroker, topic: str, zone: str | None) -> list[int]:
    with Wire(broker.address, in_zone(zone) if zone else None) as wire:
        return _leaders(wire.metadata(topic))


def _leaders(answer: Any) -> list[int]:
    """By partition."""
    parts = sorted(answer.topics[0].partitions, key=lambda part: part.partition_index)
    return [part.leader_id for part in parts]


def _pid_of_worker(parent: int, port: int) -> int | None:
    """The child that was given this port, if there is one."""
    for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        arguments = Path(f"/proc/{pid}/cmdline").read_text().split("\0")  # of one that is dead, none
        if ("--listen", f"127.0.0.1:{port}") in pairwise(arguments):
            return int(pid)
    return None


def _has_read_everything(broker: DrayBroker) -> bool:
    """Whether the kernel holds no bytes that were sent to this port and not read."""
    port = f"{broker.port:04X}"
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, queues, *_ = line.split()
        if local.endswith(f":{port}") and state == "01" and int(queues.split(":")[1], 16):
            return False
    return True
