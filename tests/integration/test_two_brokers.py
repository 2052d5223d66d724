"""Two brokers on the same partitions: one order of records, whoever wrote and whoever reads (I1, I2).

Clients are kept to one of the brokers by their zone, so both brokers serve every partition.
"""

from __future__ import annotations

import random
from collections import defaultdict

from kio.schema.errors import ErrorCode

from tests.batches import build_batch
from tests.integration.conftest import BrokerCluster
from tests.integration.rdkafka import Sender, create_topic, fresh_name, in_zone, read_values, send_all
from tests.integration.wire import LATEST, Wire, fetch_request

PARTITIONS = 2
ROUNDS = 150


def test_records_of_both_have_one_order_and_none_is_lost_or_doubled(cluster: BrokerCluster) -> None:
    topic = create_topic(cluster.a.address, partitions=PARTITIONS)
    senders = {
        zone: Sender(broker.address, client_id=in_zone(zone))
        for zone, broker in (("a", cluster.a), ("b", cluster.b))
    }
    for number in range(ROUNDS):
        for zone, sender in senders.items():
            for partition in range(PARTITIONS):
                sender.send(topic, f"{zone} {partition} {number}".encode(), partition)
    for sender in senders.values():
        sender.flush()
        assert not sender.failed

    expected: dict[int, dict[int, bytes]] = defaultdict(dict)
    for sender in senders.values():
        last = dict.fromkeys(range(PARTITIONS), -1)
        for acked in sender.acked:
            assert acked.offset > last[acked.partition]  # in the order of sending
            last[acked.partition] = acked.offset
            assert acked.offset not in expected[acked.partition]
            expected[acked.partition][acked.offset] = acked.value
    for partition in range(PARTITIONS):
        assert sorted(expected[partition]) == list(range(2 * ROUNDS))
        for zone, broker in (("a", cluster.a), ("b", cluster.b)):
            log = read_values(broker.address, topic, partition, client_id=in_zone(zone))
            assert log == expected[partition]


def test_what_one_acknowledged_the_other_has_at_once(cluster: BrokerCluster) -> None:
    topic = create_topic(cluster.a.address)
    with Wire(cluster.a.address) as first, Wire(cluster.b.address) as second:
        for number in range(30):
            writer, reader = (first, second) if number % 2 else (second, first)
            batch = build_batch(base_timestamp=1_700_000_000_000 + number)
            produced = writer.produce(topic, 0, batch)
            assert produced == (ErrorCode.none, number)
            # A broker that has told of an end has what is before it; one that was not asked may wait for it.
            asks = number % 3 > 0
            if asks:
                assert reader.list_offset(topic, 0, LATEST) == (ErrorCode.none, number + 1)
            fetched = reader.fetch(topic, 0, number, max_wait_ms=0 if asks else 60_000)
            assert fetched.error is ErrorCode.none
            assert fetched.high_watermark == number + 1
            assert _without_place(fetched.records) == _without_place(batch)


def test_a_waiting_fetch_hears_of_what_the_other_takes(cluster: BrokerCluster) -> None:
    topic = create_topic(cluster.a.address)
    with Wire(cluster.a.address) as first, Wire(cluster.b.address) as second:
        for number in range(3):
            # Sent before the record is: it is answered long before its time is up, or the socket gives up.
            second.send(fetch_request(topic, 0, number, max_wait_ms=60_000))
            assert first.produce(topic, 0, build_batch()).error is ErrorCode.none
            assert second.receive_fetched().records


def test_after_both_were_killed_everything_is_there_and_goes_on(cluster: BrokerCluster) -> None:
    topic = create_topic(cluster.a.address)
    values = [f"before {number}".encode() for number in range(100)]
    send_all(cluster.a.address, topic, values[:50], client_id=in_zone("a"))
    send_all(cluster.b.address, topic, values[50:], client_id=in_zone("b"))
    for broker in (cluster.a, cluster.b):
        broker.kill()
    for broker in (cluster.a, cluster.b):
        broker.launch()
    for broker in (cluster.a, cluster.b):
        broker.wait_started()
    (after,) = send_all(cluster.a.address, topic, [b"after"], client_id=in_zone("a"))
    assert after.offset == 100
    expected = dict(enumerate([*values, b"after"]))
    for zone, broker in (("a", cluster.a), ("b", cluster.b)):
        assert read_values(broker.address, topic, client_id=in_zone(zone)) == expected


def test_a_reader_that_is_far_behind_gets_every_byte(cluster: BrokerCluster) -> None:
    """Of what the other broker wrote, and more than its cache holds: all comes from the object store."""
    topic = create_topic(cluster.a.address, partitions=PARTITIONS)
    noise = random.Random(1).randbytes(2**20)
    sender = Sender(cluster.a.address, client_id=in_zone("a"))
    expected: dict[int, dict[int, bytes]] = {partition: {} for partition in range(PARTITIONS)}
    for number in range(120):
        at = number * 7919 % 2**19
        sender.send(topic, noise[at : at + 100_000], number % PARTITIONS)
        if number % 30 == 0:
            sender.flush()
    sender.flush()
    for acked in sender.acked:
        expected[acked.partition][acked.offset] = acked.value
    zone = fresh_name("zone")
    reader = cluster.broker(zone, settings={"fetch.cache.bytes": 2 * 2**20})
    reader.start()
    try:
        for partition in range(PARTITIONS):
            assert (
                read_values(reader.address, topic, partition, client_id=in_zone(zone)) == expected[partition]
            )
        assert reader.terminate() == 0
    finally:
        reader.kill()


def _without_place(batch: bytes) -> bytes:
    """Without what a broker writes into it: base offset and leader epoch. Neither is under the checksum."""
    return batch[8:12] + batch[16:]
