"""What admin clients can ask beside topics and configs (`test_topics_api.py`, `test_configs_api.py`)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer  # type: ignore[import-untyped]
from aiokafka import TopicPartition as AioPartition
from aiokafka.admin import RecordsToDelete  # type: ignore[import-untyped]
from aiokafka.errors import OffsetOutOfRangeError as AioOutOfRange  # type: ignore[import-untyped]
from aiokafka.errors import TransactionalIdAuthorizationFailed
from confluent_kafka import (
    ElectionType,
    KafkaError,
    KafkaException,
    Producer,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient

from tests.integration.aio import in_own_loop, with_aiokafka
from tests.integration.conftest import BrokerCluster
from tests.integration.rdkafka import QUIET, TIMEOUT_S, create_topic, fresh_name, read_values, send_all

with warnings.catch_warnings():
    # kafka-python reads its schemas in a way that Python wants to drop.
    warnings.simplefilter("ignore", DeprecationWarning)
    import kafka  # type: ignore[import-untyped]
    import kafka.admin as kafka_admin  # type: ignore[import-untyped]
    import kafka.errors as kafka_errors  # type: ignore[import-untyped]

VALUES = [b"%03d" % number for number in range(30)]


@pytest.fixture
def python_admin(embedded: BrokerCluster) -> Iterator[Any]:
    with closing(kafka_admin.KafkaAdminClient(bootstrap_servers=embedded.a.address)) as admin:
        yield admin


def test_librdkafka_describes_topics(embedded: BrokerCluster) -> None:
    topic, missing = create_topic(embedded.a.address, partitions=3), fresh_name()
    nodes = {embedded.a.node_id, embedded.b.node_id}
    admin = AdminClient({**QUIET, "bootstrap.servers": embedded.a.address})
    futures = admin.describe_topics(TopicCollection([topic, missing]))
    found = futures[topic].result(TIMEOUT_S)
    assert [each.id for each in found.partitions] == [0, 1, 2]
    for each in found.partitions:
        assert each.leader.id in nodes
        assert [node.id for node in each.replicas] == [node.id for node in each.isr] == [each.leader.id]
    with pytest.raises(KafkaException) as refused:
        futures[missing].result(TIMEOUT_S)
    assert refused.value.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART


def test_kafka_python_describes_topics(embedded: BrokerCluster, python_admin: Any) -> None:
    topic = create_topic(embedded.a.address, partitions=5)
    (found,) = python_admin.describe_topics([topic])
    assert [each["partition_index"] for each in found["partitions"]] == [0, 1, 2, 3, 4]
    pages: list[list[int]] = []
    cursor = None
    while cursor is not None or not pages:
        page = python_admin.describe_topic_partitions([topic], response_partition_limit=2, cursor=cursor)
        pages.append([each["partition_index"] for each in page["topics"][0]["partitions"]])
        cursor = page["next_cursor"]
    assert pages == [[0, 1], [2, 3], [4]]


def test_aiokafka_describes_topics(embedded: BrokerCluster) -> None:
    topic = create_topic(embedded.a.address, partitions=3)
    (found,) = with_aiokafka(embedded.a.address, lambda admin: admin.describe_topics([topic]))
    assert [each["partition"] for each in found["partitions"]] == [0, 1, 2]
    assert found["error_code"] == 0


def test_kafka_python_deletes_records(embedded: BrokerCluster, python_admin: Any) -> None:
    topic = create_topic(embedded.a.address)
    send_all(embedded.a.address, topic, VALUES)
    where = kafka.TopicPartition(topic, 0)
    assert python_admin.delete_records({where: 10})[where]["low_watermark"] == 10
    assert python_admin.list_partition_offsets({where: -2})[where].offset == 10
    with pytest.raises(kafka_errors.OffsetOutOfRangeError):
        python_admin.delete_records({where: 31})


def test_aiokafka_deletes_records(embedded: BrokerCluster) -> None:
    topic = create_topic(embedded.a.address)
    send_all(embedded.a.address, topic, VALUES)
    where = AioPartition(topic, 0)

    async def work(admin: Any) -> Any:
        with pytest.raises(AioOutOfRange):
            await admin.delete_records({where: RecordsToDelete(before_offset=31)})
        return await admin.delete_records({where: RecordsToDelete(before_offset=10)})

    assert with_aiokafka(embedded.a.address, work) == {where: 10}
    assert list(read_values(embedded.b.address, topic, start=10).values()) == VALUES[10:]


def test_kafka_python_adds_up_directories(embedded: BrokerCluster, python_admin: Any) -> None:
    """Over all brokers, each partition is there once."""
    topic = create_topic(embedded.a.address, partitions=6)
    for partition in range(6):
        send_all(embedded.a.address, topic, VALUES, partition)
    described = python_admin.describe_log_dirs({topic: list(range(6))})
    assert {each["broker"] for each in described} >= {embedded.a.node_id, embedded.b.node_id}
    directories = [directory for each in described for directory in each["log_dirs"]]
    assert {each["log_dir"] for each in directories} == {embedded.objects}
    sizes = [
        (part["partition_index"], part["partition_size"] > sum(map(len, VALUES)))
        for directory in directories
        for each in directory["topics"]
        for part in each["partitions"]
    ]
    assert sorted(sizes) == [(number, True) for number in range(6)]


def test_there_is_nothing_to_elect_or_to_move(embedded: BrokerCluster, python_admin: Any) -> None:
    topic = create_topic(embedded.a.address)
    where, nowhere = TopicPartition(topic, 0), TopicPartition(topic, 1)
    admin = AdminClient({**QUIET, "bootstrap.servers": embedded.a.address})
    elected = admin.elect_leaders(ElectionType.PREFERRED, [where, nowhere]).result(TIMEOUT_S)
    assert elected[where].code() == KafkaError.ELECTION_NOT_NEEDED
    assert elected[nowhere].code() == KafkaError.UNKNOWN_TOPIC_OR_PART
    assert admin.elect_leaders(ElectionType.PREFERRED).result(TIMEOUT_S) == {}

    (leader,) = (
        part["leader_id"] for each in python_admin.describe_topics([topic]) for part in each["partitions"]
    )
    part = kafka.TopicPartition(topic, 0)
    assert python_admin.alter_partition_reassignments({part: [leader]}) == {part: None}
    refused = python_admin.alter_partition_reassignments({part: [leader + 1]})
    assert refused == {part: kafka_errors.InvalidReplicationAssignmentError}
    assert python_admin.list_partition_reassignments() == {}


def test_there_are_no_features(python_admin: Any) -> None:
    assert python_admin.describe_features() == {}
    with pytest.raises(kafka_errors.InvalidUpdateVersionError):
        python_admin.update_features({"metadata.version": 7})


def send_with_librdkafka(address: str, topic: str) -> None:
    send_all(address, topic, VALUES, enable_idempotence=True)


def send_with_kafka_python(address: str, topic: str) -> None:
    with closing(kafka.KafkaProducer(bootstrap_servers=address, enable_idempotence=True)) as producer:
        sent = [producer.send(topic, value, partition=0) for value in VALUES]
        assert [each.get(TIMEOUT_S).offset for each in sent] == list(range(len(VALUES)))


def send_with_aiokafka(address: str, topic: str) -> None:
    async def work() -> None:
        async with AIOKafkaProducer(bootstrap_servers=address, enable_idempotence=True) as producer:
            for number, value in enumerate(VALUES):
                sent = await producer.send_and_wait(topic, value, partition=0)
                assert sent.offset == number

    in_own_loop(work())


@pytest.mark.parametrize("send", [send_with_librdkafka, send_with_kafka_python, send_with_aiokafka])
def test_idempotent_producers_are_described(
    send: Callable[[str, str], None], embedded: BrokerCluster, python_admin: Any
) -> None:
    topic = create_topic(embedded.a.address)
    where = kafka.TopicPartition(topic, 0)
    assert python_admin.describe_producers([where])[where].active_producers == []
    send(embedded.a.address, topic)
    send(embedded.a.address, create_topic(embedded.a.address))  # as another producer, elsewhere
    (producer,) = python_admin.describe_producers([where])[where].active_producers
    assert (producer.producer_epoch, producer.last_sequence) == (0, len(VALUES) - 1)
    assert list(read_values(embedded.b.address, topic).values()) == VALUES


def test_transactional_producers_are_refused_at_once(embedded: BrokerCluster) -> None:
    """None of them goes on asking for a coordinator that will never be there."""
    address = embedded.a.address
    conf = {**QUIET, "bootstrap.servers": address, "transactional.id": "t", "error_cb": lambda _: None}
    producer = Producer(conf)
    with pytest.raises(KafkaException) as refused:
        producer.init_transactions(TIMEOUT_S)
    assert refused.value.args[0].fatal()
    assert "transactions are not supported: unset transactional.id" in refused.value.args[0].str()

    with (
        closing(kafka.KafkaProducer(bootstrap_servers=address, transactional_id="t")) as python_producer,
        pytest.raises(kafka_errors.TransactionalIdAuthorizationFailedError),
    ):
        python_producer.init_transactions()

    async def work() -> None:
        aio_producer = AIOKafkaProducer(bootstrap_servers=address, transactional_id="t")
        try:
            with pytest.raises(TransactionalIdAuthorizationFailed):
                await aio_producer.start()
        finally:
            await aio_producer.stop()

    in_own_loop(work())
