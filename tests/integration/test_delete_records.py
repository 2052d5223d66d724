"""DeleteRecords by real admin clients, on two brokers of one cluster and on each kind of stores."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._listoffsets import OffsetSpec
from kio.schema.errors import ErrorCode

from tests.integration.conftest import BrokerCluster
from tests.integration.rdkafka import QUIET, TIMEOUT_S, create_topic, in_zone, read_values, send_all
from tests.integration.wire import Wire, fetch_request

VALUES = [b"%03d" % number for number in range(30)]


def admin_of(address: str, zone: str) -> AdminClient:
    return AdminClient({**QUIET, "bootstrap.servers": address, "client.id": in_zone(zone)})


def delete(admin: AdminClient, topic: str, offset: int, partition: int = 0) -> int:
    where = TopicPartition(topic, partition, offset)
    low: int = admin.delete_records([where])[where].result(TIMEOUT_S).low_watermark
    return low


def earliest(admin: AdminClient, topic: str) -> int:
    where = TopicPartition(topic, 0)
    spec_of: Any = OffsetSpec  # its functions have no types
    found: int = admin.list_offsets({where: spec_of.earliest()})[where].result(TIMEOUT_S).offset
    return found


def read_from_earliest(address: str, zone: str, topic: str, begin: int, count: int) -> dict[int, bytes]:
    """From `begin`, and where that is deleted from the earliest."""
    conf = {
        **QUIET,
        "bootstrap.servers": address,
        "client.id": in_zone(zone),
        "group.id": "unused",
        "enable.auto.commit": False,
        "auto.offset.reset": "earliest",
    }
    with closing(Consumer(conf)) as consumer:
        consumer.assign([TopicPartition(topic, 0, begin)])
        got: dict[int, bytes] = {}
        for message in consumer.consume(count, timeout=TIMEOUT_S):
            assert message.error() is None
            offset, value = message.offset(), message.value()
            assert offset is not None
            assert value is not None
            got[offset] = value
        return got


def test_both_brokers_begin_where_one_deleted_up_to(cluster: BrokerCluster) -> None:
    topic = create_topic(cluster.a.address)
    send_all(cluster.a.address, topic, VALUES, client_id=in_zone("a"))
    assert len(read_values(cluster.b.address, topic, client_id=in_zone("b"))) == len(VALUES)
    first, second = admin_of(cluster.a.address, "a"), admin_of(cluster.b.address, "b")
    assert delete(first, topic, 10) == 10
    assert earliest(second, topic) == earliest(first, topic) == 10
    assert delete(second, topic, 4) == 10, "nothing comes back"
    assert delete(second, topic, 12) == 12
    for broker, zone in ((cluster.a, "a"), (cluster.b, "b")):
        for begin in (OFFSET_BEGINNING, 0, 11, 12):
            got = read_from_earliest(broker.address, zone, topic, begin, len(VALUES) - 12)
            assert got == dict(enumerate(VALUES[12:], 12))
    assert delete(first, topic, -1) == len(VALUES)
    assert earliest(second, topic) == len(VALUES)
    (after,) = send_all(cluster.b.address, topic, [b"after"], client_id=in_zone("b"))
    assert after.offset == len(VALUES)
    assert read_from_earliest(cluster.a.address, "a", topic, OFFSET_BEGINNING, 1) == {len(VALUES): b"after"}


def test_a_fetch_that_waits_at_one_broker_hears_of_a_deletion_at_the_other(cluster: BrokerCluster) -> None:
    topic = create_topic(cluster.a.address)
    send_all(cluster.a.address, topic, VALUES, client_id=in_zone("a"))
    with Wire(cluster.b.address) as second:
        assert second.fetch(topic, 0, 0).error is ErrorCode.none
        # Sent before: it is answered long before its time is up, or the socket gives up.
        second.send(fetch_request(topic, 0, 3, max_wait_ms=60_000, min_bytes=10**6))
        assert delete(admin_of(cluster.a.address, "a"), topic, 10) == 10
        assert second.receive_fetched().error is ErrorCode.offset_out_of_range
        assert second.fetch(topic, 0, 10).error is ErrorCode.none


def test_deletions_survive_both_brokers(cluster: BrokerCluster) -> None:
    topic = create_topic(cluster.a.address)
    send_all(cluster.a.address, topic, VALUES, client_id=in_zone("a"))
    assert delete(admin_of(cluster.a.address, "a"), topic, 10) == 10
    cluster.kill()
    for broker in (cluster.a, cluster.b):
        broker.start()
    assert earliest(admin_of(cluster.b.address, "b"), topic) == 10
    assert read_from_earliest(cluster.a.address, "a", topic, 0, 20) == dict(enumerate(VALUES[10:], 10))


def test_what_is_behind_the_end_cannot_be_deleted(embedded: BrokerCluster) -> None:
    topic = create_topic(embedded.a.address)
    send_all(embedded.a.address, topic, VALUES, client_id=in_zone("a"))
    with pytest.raises(KafkaException) as refused:
        delete(admin_of(embedded.a.address, "a"), topic, len(VALUES) + 1)
    assert refused.value.args[0].code() == KafkaError.OFFSET_OUT_OF_RANGE
