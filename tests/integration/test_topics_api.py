"""Topics, configs, offsets and the cluster through each library's admin client, with Kafka's own codes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple, Protocol, TypeAlias

import pytest
from aiokafka.admin import NewPartitions  # type: ignore[import-untyped]
from aiokafka.admin import NewTopic as AioNewTopic
from aiokafka.admin.config_resource import ConfigResource as AioResource  # type: ignore[import-untyped]
from aiokafka.admin.config_resource import ConfigResourceType as AioResourceType
from aiokafka.errors import KafkaError as AioKafkaError  # type: ignore[import-untyped]
from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import ConfigResource
from confluent_kafka.admin._listoffsets import OffsetSpec
from confluent_kafka.cimpl import NewPartitions as RdNewPartitions
from confluent_kafka.cimpl import NewTopic

from tests.integration.aio import with_aiokafka
from tests.integration.conftest import BrokerCluster
from tests.integration.java_clients import Admin, Refused
from tests.integration.rdkafka import QUIET, Sender, create_topic, fresh_name, in_zone, read_values, send_all
from tests.integration.waiting import eventually
from tests.integration.wire import Wire

with warnings.catch_warnings():
    # kafka-python reads its schemas in a way that Python wants to drop.
    warnings.simplefilter("ignore", DeprecationWarning)
    import kafka  # type: ignore[import-untyped]
    import kafka.admin as kafka_admin  # type: ignore[import-untyped]
    import kafka.errors as kafka_errors  # type: ignore[import-untyped]

TIMEOUT_S = 40.0

# Kafka's numbers.
NONE = 0
UNKNOWN_TOPIC_OR_PARTITION = 3
INVALID_TOPIC = 17
TOPIC_ALREADY_EXISTS = 36
INVALID_PARTITIONS = 37
INVALID_REPLICATION_FACTOR = 38
INVALID_CONFIG = 40


class Create(NamedTuple):
    name: str
    partitions: int = 1
    replication_factor: int = 1
    configs: Mapping[str, str] = {}
    validate_only: bool = False


class Delete(NamedTuple):
    name: str


class Grow(NamedTuple):
    name: str
    total: int


class AdminFace(Protocol):
    name: str

    def run(self, address: str, operations: Sequence[Create | Delete | Grow]) -> list[int]:
        """The error code of each, one after the other."""

    def configs(self, address: str, topic: str) -> dict[str, str | None]: ...

    def cluster(self, address: str) -> tuple[str, set[int], int]:
        """Its id, its brokers, and which of them is called the controller."""

    def topics(self, address: str) -> set[str]: ...


class RdAdmin:
    name = "librdkafka"

    def run(self, address: str, operations: Sequence[Create | Delete | Grow]) -> list[int]:
        admin = AdminClient({**QUIET, "bootstrap.servers": address})
        codes = []
        for one in operations:
            if isinstance(one, Create):
                topic = NewTopic(one.name, one.partitions, one.replication_factor, config=dict(one.configs))
                futures = admin.create_topics([topic], validate_only=one.validate_only)
            elif isinstance(one, Delete):
                futures = admin.delete_topics([one.name])
            else:
                futures = admin.create_partitions([RdNewPartitions(one.name, one.total)])
            try:
                futures[one.name].result(TIMEOUT_S)
                codes.append(NONE)
            except KafkaException as error:
                codes.append(error.args[0].code())
        return codes

    def configs(self, address: str, topic: str) -> dict[str, str | None]:
        admin = AdminClient({**QUIET, "bootstrap.servers": address})
        resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
        found = admin.describe_configs([resource])[resource].result(TIMEOUT_S)
        return {name: entry.value for name, entry in found.items()}

    def cluster(self, address: str) -> tuple[str, set[int], int]:
        admin = AdminClient({**QUIET, "bootstrap.servers": address})
        found = admin.describe_cluster().result(TIMEOUT_S)
        return found.cluster_id, {node.id for node in found.nodes}, found.controller.id

    def topics(self, address: str) -> set[str]:
        admin = AdminClient({**QUIET, "bootstrap.servers": address})
        return set(admin.list_topics(timeout=TIMEOUT_S).topics)


class PythonAdmin:
    name = "kafka-python"

    def run(self, address: str, operations: Sequence[Create | Delete | Grow]) -> list[int]:
        codes = []
        with closing(kafka_admin.KafkaAdminClient(bootstrap_servers=address)) as admin:
            for one in operations:
                try:
                    if isinstance(one, Create):
                        topic = kafka_admin.NewTopic(
                            one.name,
                            one.partitions,
                            one.replication_factor,
                            topic_configs=dict(one.configs),
                        )
                        admin.create_topics([topic], validate_only=one.validate_only)
                    elif isinstance(one, Delete):
                        admin.delete_topics([one.name])
                    else:
                        admin.create_partitions({one.name: kafka_admin.NewPartitions(one.total)})
                    codes.append(NONE)
                except kafka_errors.KafkaError as error:
                    codes.append(int(error.errno))
        return codes

    def configs(self, address: str, topic: str) -> dict[str, str | None]:
        with closing(kafka_admin.KafkaAdminClient(bootstrap_servers=address)) as admin:
            resource = kafka_admin.ConfigResource(kafka_admin.ConfigResourceType.TOPIC, topic)
            found: Any = admin.describe_configs([resource], config_filter="all")
        return _python_configs(found, topic)

    def cluster(self, address: str) -> tuple[str, set[int], int]:
        with closing(kafka_admin.KafkaAdminClient(bootstrap_servers=address)) as admin:
            found = admin.describe_cluster()
        nodes = {broker.get("node_id", broker.get("broker_id")) for broker in found["brokers"]}
        return found["cluster_id"], nodes, found["controller_id"]

    def topics(self, address: str) -> set[str]:
        with closing(kafka_admin.KafkaAdminClient(bootstrap_servers=address)) as admin:
            return set(admin.list_topics())


class AioAdmin:
    name = "aiokafka"

    def run(self, address: str, operations: Sequence[Create | Delete | Grow]) -> list[int]:
        async def work(admin: Any) -> list[int]:
            codes = []
            for one in operations:
                if isinstance(one, Create):
                    topic = AioNewTopic(
                        one.name, one.partitions, one.replication_factor, topic_configs=dict(one.configs)
                    )
                    answer = await admin.create_topics([topic], validate_only=one.validate_only)
                    codes.append(answer.topic_errors[0][1])
                elif isinstance(one, Delete):
                    answer = await admin.delete_topics([one.name])
                    codes.append(answer.topic_error_codes[0][1])
                else:
                    try:
                        await admin.create_partitions({one.name: NewPartitions(one.total)})
                        codes.append(NONE)
                    except AioKafkaError as error:
                        codes.append(error.errno)
            return codes

        return with_aiokafka(address, work)

    def configs(self, address: str, topic: str) -> dict[str, str | None]:
        async def work(admin: Any) -> dict[str, str | None]:
            (answer,) = await admin.describe_configs([AioResource(AioResourceType.TOPIC, topic)])
            code, _, _, _, entries = answer.resources[0]
            assert code == NONE
            return {entry[0]: entry[1] for entry in entries}

        return with_aiokafka(address, work)

    def cluster(self, address: str) -> tuple[str, set[int], int]:
        async def work(admin: Any) -> tuple[str, set[int], int]:
            found = await admin.describe_cluster()
            return found["cluster_id"], {one["node_id"] for one in found["brokers"]}, found["controller_id"]

        return with_aiokafka(address, work)

    def topics(self, address: str) -> set[str]:
        async def work(admin: Any) -> set[str]:
            return set(await admin.list_topics())

        return with_aiokafka(address, work)


class JavaAdmin:
    name = "Java"

    CODES = {  # noqa: RUF012
        "UnknownTopicOrPartitionException": UNKNOWN_TOPIC_OR_PARTITION,
        "InvalidTopicException": INVALID_TOPIC,
        "TopicExistsException": TOPIC_ALREADY_EXISTS,
        "InvalidPartitionsException": INVALID_PARTITIONS,
        "InvalidReplicationFactorException": INVALID_REPLICATION_FACTOR,
        "InvalidConfigurationException": INVALID_CONFIG,
    }

    def run(self, address: str, operations: Sequence[Create | Delete | Grow]) -> list[int]:
        admin = Admin(address)
        for one in operations:
            if isinstance(one, Create):
                admin.create_topic(
                    one.name, one.partitions, one.replication_factor, one.configs, one.validate_only
                )
            elif isinstance(one, Delete):
                admin.delete_topic(one.name)
            else:
                admin.create_partitions(one.name, one.total)
        return [self.CODES[one.error] if isinstance(one, Refused) else NONE for one in admin.run()]

    def configs(self, address: str, topic: str) -> dict[str, str | None]:
        (found,) = Admin(address).describe_configs("TOPIC", topic).run()
        assert isinstance(found, dict)
        return {name: one["value"] for name, one in _by_name(found["configs"]).items()}

    def cluster(self, address: str) -> tuple[str, set[int], int]:
        (found,) = Admin(address).describe_cluster().run()
        assert isinstance(found, dict)
        return found["cluster_id"], {node["id"] for node in found["nodes"]}, found["controller"]

    def topics(self, address: str) -> set[str]:
        (found,) = Admin(address).list_topics().run()
        assert isinstance(found, dict)
        return set(found["topics"])


ADMINS: tuple[AdminFace, ...] = (RdAdmin(), AioAdmin(), PythonAdmin(), JavaAdmin())
with_each_admin = pytest.mark.parametrize("admin", ADMINS, ids=lambda admin: admin.name)


@with_each_admin
def test_topics_come_grow_and_go_with_kafka_s_codes(admin: AdminFace, embedded: BrokerCluster) -> None:
    name, other, tried = fresh_name(), fresh_name(), fresh_name()
    steps: list[tuple[Create | Delete | Grow, int]] = [
        (Create(name, 2, configs={"retention.ms": "1000", "cleanup.policy": "delete"}), NONE),
        (Create(name), TOPIC_ALREADY_EXISTS),
        (Create(other, 0), INVALID_PARTITIONS),
        (Create(other, 1, 0), INVALID_REPLICATION_FACTOR),
        (Create(other, configs={"no.such.config": "1"}), INVALID_CONFIG),
        (Create(other, configs={"retention.ms": "soon"}), INVALID_CONFIG),
        (Create("no/slash"), INVALID_TOPIC),
        (Create("x" * 250), INVALID_TOPIC),
        (Create(".."), INVALID_TOPIC),
        (Create(tried, validate_only=True), NONE),
        (Create(name, validate_only=True), TOPIC_ALREADY_EXISTS),
        (Grow(name, 5), NONE),
        (Grow(name, 5), INVALID_PARTITIONS),
        (Grow(name, 3), INVALID_PARTITIONS),
        (Grow(other, 3), UNKNOWN_TOPIC_OR_PARTITION),
        (Delete(other), UNKNOWN_TOPIC_OR_PARTITION),
        (Delete(name), NONE),
        (Delete(name), UNKNOWN_TOPIC_OR_PARTITION),
        (Create(name, 3), NONE),
    ]
    answers = admin.run(embedded.a.address, [step for step, _ in steps])
    assert list(zip([step for step, _ in steps], answers, strict=True)) == steps
    for broker in (embedded.a, embedded.b):
        with Wire(broker.address) as wire:
            eventually(lambda: len(wire.metadata(name).topics[0].partitions) == 3, "the topic as it is now")
    listed = admin.topics(embedded.b.address)
    assert name in listed
    assert not listed & {other, tried}


@with_each_admin
def test_configs_and_cluster_as_each_client_asks(admin: AdminFace, embedded: BrokerCluster) -> None:
    topic = create_topic(embedded.a.address, configs={"max.message.bytes": "2000000"})
    configs = admin.configs(embedded.b.address, topic)
    assert configs["max.message.bytes"] == "2000000"
    # What Kafka has where nothing is set.
    assert configs["cleanup.policy"] == "delete"
    assert configs["retention.ms"] == "604800000"
    assert configs["message.timestamp.type"] == "CreateTime"

    with Wire(embedded.a.address) as wire:
        expected = wire.metadata().cluster_id
    cluster_id, nodes, controller = admin.cluster(embedded.b.address)
    assert cluster_id == expected
    assert nodes >= {embedded.a.node_id, embedded.b.node_id}
    assert controller in nodes


def test_a_topic_made_again_is_empty_and_its_old_records_stay_away(embedded: BrokerCluster) -> None:
    name = fresh_name()
    for round_ in range(3):
        create_topic(embedded.a.address, name)
        values = [b"%d %d" % (round_, number) for number in range(5)]
        for zone, broker in (("a", embedded.a), ("b", embedded.b)):
            acked = send_all(broker.address, name, values, client_id=in_zone(zone))
            assert [one.offset for one in acked] == list(range(5) if zone == "a" else range(5, 10))
        log = read_values(embedded.b.address, name, client_id=in_zone("b"))
        assert list(log.values()) == values * 2
        assert RdAdmin().run(embedded.b.address, [Delete(name)]) == [NONE]


def test_records_of_a_topic_that_grew_stay_where_they_are(embedded: BrokerCluster) -> None:
    topic = create_topic(embedded.a.address)
    send_all(embedded.a.address, topic, [b"old"])
    assert RdAdmin().run(embedded.a.address, [Grow(topic, 3)]) == [NONE]
    for partition in (1, 2):
        (acked,) = send_all(embedded.b.address, topic, [b"new"], partition)
        assert acked.offset == 0
    assert read_values(embedded.b.address, topic) == {0: b"old"}


Offsets: TypeAlias = list[tuple[int, int]]  # with their timestamps


def _list_with_librdkafka(address: str, topic: str, specs: Sequence[int | str]) -> Offsets:
    admin = AdminClient({**QUIET, "bootstrap.servers": address})
    spec: Any = OffsetSpec  # its functions have no types
    named = {"earliest": spec.earliest, "latest": spec.latest, "max": spec.max_timestamp}
    offsets = []
    for one in specs:
        where = TopicPartition(topic, 0)
        asked = named[one]() if isinstance(one, str) else spec.for_timestamp(one)
        found = admin.list_offsets({where: asked})[where].result(TIMEOUT_S)
        offsets.append((found.offset, found.timestamp))
    return offsets


def _list_with_kafka_python(address: str, topic: str, specs: Sequence[int | str]) -> Offsets:
    numbers = {"latest": -1, "earliest": -2, "max": -3}
    where = kafka.TopicPartition(topic, 0)
    offsets = []
    with closing(kafka_admin.KafkaAdminClient(bootstrap_servers=address)) as admin:
        for one in specs:
            asked = numbers[one] if isinstance(one, str) else one
            found = admin.list_partition_offsets({where: asked})[where]
            offsets.append((found.offset, found.timestamp))
    return offsets


def _list_with_java(address: str, topic: str, specs: Sequence[int | str]) -> Offsets:
    admin = Admin(address)
    for one in specs:
        admin.list_offsets(topic, 0, one)
    offsets = []
    for found in admin.run():
        assert isinstance(found, dict)
        offsets.append((found["offset"], found["timestamp"]))
    return offsets


@pytest.mark.parametrize("listed", [_list_with_librdkafka, _list_with_kafka_python, _list_with_java])
def test_offsets_as_admins_list_them(
    listed: Callable[[str, str, Sequence[int | str]], Offsets], embedded: BrokerCluster
) -> None:
    empty = create_topic(embedded.a.address)
    topic = create_topic(embedded.a.address)
    sender = Sender(embedded.a.address)
    for timestamp in (3000, 9000, 5000):
        sender.send(topic, b"x", timestamp=timestamp)
        sender.flush()
    address = embedded.b.address
    assert listed(address, topic, ["earliest", "latest", "max", 3000, 3001, 9001]) == [
        (0, -1),
        (3, -1),
        (1, 9000),
        (0, 3000),
        (1, 9000),
        (-1, -1),
    ]
    if listed is not _list_with_java:  # each time it starts a JVM
        assert listed(address, empty, ["earliest", "latest", "max", 0]) == [(0, -1)] * 2 + [(-1, -1)] * 2


def test_java_s_admin_describes_topics_and_brokers(embedded: BrokerCluster) -> None:
    topic = create_topic(embedded.a.address, partitions=2)
    described, unknown, broker = (
        Admin(embedded.a.address)
        .describe_topic(topic)
        .describe_topic(fresh_name())
        .describe_configs("BROKER", str(embedded.a.node_id))
        .run()
    )
    assert isinstance(described, dict)
    assert len(described["partitions"]) == 2
    assert isinstance(unknown, Refused)
    assert unknown.error == "UnknownTopicOrPartitionException"
    assert isinstance(broker, dict)
    assert "message.max.bytes" in _by_name(broker["configs"])


def _by_name(configs: Any) -> dict[str, Any]:
    return configs if isinstance(configs, dict) else {one["name"]: one for one in configs}


def _python_configs(found: Any, topic: str) -> dict[str, str | None]:
    return {name: one["value"] for name, one in found["topic"][topic].items()}
