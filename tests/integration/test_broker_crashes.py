"""kill -9 of a broker: what was acknowledged is there at its offset, the rest is whole or absent (I3, I4)."""

from __future__ import annotations

import random
import signal
from collections import defaultdict
from pathlib import Path

import pytest
from kio.schema.errors import ErrorCode

from tests.batches import build_batch
from tests.integration.broker_child import BEFORE_ANSWER, STEPS
from tests.integration.conftest import STACKS, BrokerCluster
from tests.integration.rdkafka import Acked, Sender, create_topic, fresh_name, in_zone, read_values, send_all
from tests.integration.waiting import eventually
from tests.integration.wire import EARLIEST, LATEST, Wire, fetch_request, produce_request
from tests.servers.dray import DrayBroker

PARTITIONS = 3
MAX_UNANSWERED = 300


@pytest.mark.parametrize(
    ("cluster", "step"),
    [
        (stack, step)
        for stack in STACKS
        for step in STEPS
        if "sqlite" in stack or "append" in step or "answer" in step
    ],
    indirect=["cluster"],
)
def test_a_broker_killed_between_two_steps(cluster: BrokerCluster, step: str, tmp_path: Path) -> None:
    """I3: before the commit nothing is seen. I4: after it all is, at offsets that go on."""
    trigger = tmp_path / "now"
    # Not shared: the brokers of other tests stay registered for a while after their death.
    zone = fresh_name("zone")
    mortal = cluster.broker(zone, program=("-m", "tests.integration.broker_child", step, str(trigger)))
    mortal.start()
    try:
        topic = create_topic(cluster.a.address, partitions=PARTITIONS)
        sent = {
            partition: [f"{partition} {n}".encode() for n in range(20)] for partition in range(PARTITIONS)
        }
        acked = []
        for partition, values in sent.items():
            acked += send_all(mortal.address, topic, values, partition, client_id=in_zone(zone))

        trigger.touch()
        lost = Sender(mortal.address, client_id=in_zone(zone), retries=0, message_timeout_ms=30_000)
        for partition in range(PARTITIONS):
            for number in range(20):
                lost.send(topic, f"{partition} lost {number}".encode(), partition)
        assert mortal.wait_ended() == -signal.SIGKILL
        assert not lost.acked

        landed = _ends(cluster.b, topic)
        if step == BEFORE_ANSWER:
            assert sum(landed) > len(acked)
        else:
            assert landed == [20] * PARTITIONS

        # All memory is gone. What is there now was there before.
        trigger.unlink()
        mortal.start()
        for partition in range(PARTITIONS):
            (after,) = send_all(mortal.address, topic, [b"after"], partition, client_id=in_zone(zone))
            assert after.offset == landed[partition]
            for near, broker in ((zone, mortal), ("b", cluster.b)):
                log = list(read_values(broker.address, topic, partition, client_id=in_zone(near)).values())
                assert log[:20] == sent[partition]
                # A batch of what nobody was told of is there as a whole: a run from its first record on.
                rest = log[20:-1]
                assert rest == [f"{partition} lost {number}".encode() for number in range(len(rest))]
                assert log[-1] == b"after"
        # So that the clients of other tests are not sent to it for as long as its session lives.
        assert mortal.terminate() == 0
    finally:
        mortal.kill()


def test_what_was_acknowledged_outlives_every_kill_under_load(tmp_path: Path) -> None:
    """Brokers die at random moments, one after the other, while a producer goes on with whoever lives."""
    seed = random.randrange(2**32)
    moments = random.Random(seed)
    # A short session, so that those who live hear of a death soon.
    brokers = [DrayBroker(tmp_path, settings={"broker.session.timeout.ms": 2000}) for _ in range(2)]
    brokers[0].start()
    brokers[1].start()
    try:
        bootstrap = ",".join(broker.address for broker in brokers)
        topic = create_topic(bootstrap, partitions=PARTITIONS)
        sender = Sender(bootstrap, message_timeout_ms=100_000, reconnect_backoff_max_ms=500)
        sent: list[bytes] = []

        def send_until_acked(more: int, why: str) -> None:
            goal = len(sender.acked) + more

            def is_reached() -> bool:
                if len(sender) < MAX_UNANSWERED:
                    sent.append(str(len(sent)).encode())
                    sender.send(topic, sent[-1], len(sent) % PARTITIONS)
                else:
                    sender.poll(0.01)
                return len(sender.acked) >= goal

            eventually(is_reached, f"seed {seed}: {why}", pause_s=0)

        for victim in brokers:
            send_until_acked(moments.randrange(200, 1500), "records acknowledged")
            victim.kill()
            send_until_acked(500, "records acknowledged after a kill")
            victim.start()

        sender.flush(100)
        assert not sender.failed
        assert len(sender.acked) == len(sent)

        for broker in brokers:
            _check_log(broker, topic, sender.acked, set(sent), seed)
    finally:
        for broker in brokers:
            broker.kill()


def test_a_broker_that_was_away_for_a_while_goes_on(tmp_path: Path) -> None:
    """Stopped for longer than its session lives, with requests to answer: nobody minds, not even itself."""
    stays, sleeper = (DrayBroker(tmp_path, settings={"broker.session.timeout.ms": 2000}) for _ in range(2))
    stays.start()
    sleeper.start()
    try:
        topic = create_topic(stays.address)
        node_id = sleeper.node_id
        with Wire(stays.address) as awake, Wire(sleeper.address) as asleep:
            assert asleep.produce(topic, 0, build_batch()) == (ErrorCode.none, 0)
            sleeper.signal(signal.SIGSTOP)
            asleep.send(produce_request(topic, 0, build_batch(), timeout_ms=60_000))
            asleep.send(fetch_request(topic, 0, 0))
            eventually(lambda: node_id not in _nodes(awake), "its session is over")
            assert awake.produce(topic, 0, build_batch()) == (ErrorCode.none, 1)
            sleeper.signal(signal.SIGCONT)
            assert asleep.receive_produced() == (ErrorCode.none, 2)
            assert asleep.receive_fetched().error is ErrorCode.none
            assert asleep.list_offset(topic, 0, LATEST) == (ErrorCode.none, 3)
            eventually(lambda: node_id in _nodes(awake), "it is registered again")
            assert asleep.fetch(topic, 0, 2, max_wait_ms=10_000).high_watermark == 3
    finally:
        sleeper.kill()
        stays.kill()


def _nodes(wire: Wire) -> set[int]:
    return {broker.node_id for broker in wire.metadata().brokers}


def _check_log(broker: DrayBroker, topic: str, acked: list[Acked], sent: set[bytes], seed: int) -> None:
    by_partition: dict[int, dict[int, bytes]] = defaultdict(dict)
    for each in acked:
        assert each.offset not in by_partition[each.partition], f"seed {seed}: {each} twice"
        by_partition[each.partition][each.offset] = each.value
    for partition, expected in by_partition.items():
        log = read_values(broker.address, topic, partition)
        for offset, value in expected.items():
            assert log.get(offset) == value, f"seed {seed}: partition {partition} offset {offset}"
        # What is not at an offset that was told is a second copy, of a batch whose answer was lost.
        assert set(log.values()) <= sent, f"seed {seed}"


def _ends(broker: DrayBroker, topic: str) -> list[int]:
    with Wire(broker.address) as wire:
        assert wire.list_offset(topic, 0, EARLIEST) == (ErrorCode.none, 0)
        return [wire.list_offset(topic, partition, LATEST)[1] for partition in range(PARTITIONS)]
