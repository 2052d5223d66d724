"""Configs of topics and brokers, altered through each library's admin client and Kafka's own tool."""

from __future__ import annotations

import subprocess
import warnings
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

import pytest
from aiokafka.admin.config_resource import ConfigResource as AioResource  # type: ignore[import-untyped]
from aiokafka.admin.config_resource import ConfigResourceType as AioResourceType
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import AlterConfigOpType, ConfigEntry, ConfigResource
from kio.schema.errors import ErrorCode

from tests import wire
from tests.batches import build_batch
from tests.integration.aio import with_aiokafka
from tests.integration.conftest import BrokerCluster
from tests.integration.rdkafka import QUIET, create_topic, fresh_name, in_zone
from tests.integration.waiting import eventually
from tests.integration.wire import Wire
from tests.servers.kafka import SHORT_LIVED_OPTIONS, java_command

with warnings.catch_warnings():
    # kafka-python reads its schemas in a way that Python wants to drop.
    warnings.simplefilter("ignore", DeprecationWarning)
    import kafka.admin as kafka_admin  # type: ignore[import-untyped]
    import kafka.errors as kafka_errors  # type: ignore[import-untyped]

TIMEOUT_S = 40.0

# Kafka's numbers.
TOPIC, BROKER = 2, 4
FROM_TOPIC, FROM_CLUSTER, FROM_BROKER, FROM_DEFAULT = 1, 3, 4, 5
UNKNOWN_TOPIC_OR_PARTITION, INVALID_CONFIG, INVALID_REQUEST = 3, 40, 42

SET, DELETE = AlterConfigOpType.SET, AlterConfigOpType.DELETE
APPEND, SUBTRACT = AlterConfigOpType.APPEND, AlterConfigOpType.SUBTRACT
REPLICAS = "leader.replication.throttled.replicas"


class RdConfigs:
    """Of one zone: its requests go to that zone's broker, not to any."""

    def __init__(self, address: str, zone: str = "a") -> None:
        self._admin = AdminClient({**QUIET, "bootstrap.servers": address, "client.id": in_zone(zone)})

    def replace(
        self, kind: int, name: str, configs: Mapping[str, str], *, validate_only: bool = False
    ) -> None:
        resource = ConfigResource(_kind(kind), name, set_config=dict(configs))
        with warnings.catch_warnings():
            # It is deprecated for the other; clients use it all the same.
            warnings.simplefilter("ignore", DeprecationWarning)
            futures = self._admin.alter_configs([resource], validate_only=validate_only)
        futures[resource].result(TIMEOUT_S)

    def change(
        self,
        kind: int,
        name: str,
        *changes: tuple[str, AlterConfigOpType, str | None],
        validate_only: bool = False,
    ) -> None:
        entries = [ConfigEntry(key, value, incremental_operation=how) for key, how, value in changes]
        resource = ConfigResource(_kind(kind), name, incremental_configs=entries)
        self._admin.incremental_alter_configs([resource], validate_only=validate_only)[resource].result(
            TIMEOUT_S
        )

    def describe(self, kind: int, name: str) -> dict[str, Any]:
        resource = ConfigResource(_kind(kind), name)
        found: dict[str, Any] = self._admin.describe_configs([resource])[resource].result(TIMEOUT_S)
        return found

    def topic(self, name: str) -> dict[str, str | None]:
        """What the topic has of its own."""
        found = self.describe(TOPIC, name).values()
        return {entry.name: entry.value for entry in found if entry.source == FROM_TOPIC}


def _kind(number: int) -> Any:
    return ConfigResource.Type.TOPIC if number == TOPIC else ConfigResource.Type.BROKER


def _code(raised: pytest.ExceptionInfo[KafkaException]) -> int:
    return int(raised.value.args[0].code())


def test_librdkafka_alters_configs_of_topics(embedded: BrokerCluster) -> None:
    topic = create_topic(embedded.a.address, configs={"retention.ms": "1000"})
    one, other = RdConfigs(embedded.a.address), RdConfigs(embedded.b.address, "b")
    one.change(TOPIC, topic, ("max.message.bytes", SET, "5000"), (REPLICAS, APPEND, "0:1,0:2"))
    expected = {"retention.ms": "1000", "max.message.bytes": "5000", REPLICAS: "0:1,0:2"}
    assert one.topic(topic) == expected, "at once, where it was altered"
    eventually(lambda: other.topic(topic) == expected, "the same on the other broker")
    one.change(TOPIC, topic, ("retention.ms", DELETE, None), (REPLICAS, SUBTRACT, "0:1"))
    assert one.topic(topic) == {"max.message.bytes": "5000", REPLICAS: "0:2"}
    assert one.describe(TOPIC, topic)["retention.ms"].value == "604800000"

    one.replace(TOPIC, topic, {"segment.ms": "99"}, validate_only=True)
    one.change(TOPIC, topic, ("segment.ms", SET, "99"), validate_only=True)
    assert one.topic(topic) == {"max.message.bytes": "5000", REPLICAS: "0:2"}
    one.replace(TOPIC, topic, {"segment.ms": "99"})
    assert one.topic(topic) == {"segment.ms": "99"}

    for bad in ({"segment.ms": "98", "nope": "1"}, {"segment.ms": "soon"}, {"cleanup.policy": "compact"}):
        with pytest.raises(KafkaException) as raised:
            one.replace(TOPIC, topic, bad)
        assert _code(raised) == INVALID_CONFIG
    with pytest.raises(KafkaException) as raised:
        one.change(TOPIC, topic, ("segment.ms", APPEND, "98"))
    assert _code(raised) == INVALID_CONFIG
    with pytest.raises(KafkaException) as raised:
        one.change(TOPIC, fresh_name(), ("segment.ms", SET, "98"))
    assert _code(raised) == UNKNOWN_TOPIC_OR_PARTITION
    assert one.topic(topic) == {"segment.ms": "99"}


def test_librdkafka_cannot_alter_what_is_one_broker_s_own(embedded: BrokerCluster) -> None:
    name = str(embedded.a.node_id)
    admin = RdConfigs(embedded.a.address)
    with pytest.raises(KafkaException) as raised:
        admin.change(BROKER, name, ("log.retention.ms", SET, "5"))
    assert _code(raised) == INVALID_REQUEST
    entries = admin.describe(BROKER, name)
    assert entries["wal.linger.ms"].is_read_only
    assert not entries["log.retention.ms"].is_read_only


def test_kafka_python_alters_resets_and_lists(embedded: BrokerCluster) -> None:
    topic = create_topic(embedded.a.address)
    resource = kafka_admin.ConfigResource
    with closing(
        kafka_admin.KafkaAdminClient(bootstrap_servers=embedded.a.address, client_id=in_zone("a"))
    ) as admin:

        def own() -> dict[str, str]:
            found: Any = admin.describe_configs([resource("TOPIC", topic)])
            return {name: each["value"] for name, each in found["topic"][topic].items()}

        for incremental in (True, False):
            admin.alter_configs(
                [resource("TOPIC", topic, {"retention.ms": "7", "segment.ms": "8"})], incremental=incremental
            )
            assert own() == {"retention.ms": "7", "segment.ms": "8"}
            admin.reset_configs([resource("TOPIC", topic, ["retention.ms"])], incremental=incremental)
            assert own() == {"segment.ms": "8"}
        refused: Any = None
        try:
            refused = admin.alter_configs([resource("TOPIC", topic, {"retention.ms": "soon"})])
        except kafka_errors.InvalidConfigurationError as error:
            refused = error
        assert "InvalidConfiguration" in repr(refused) or "is not usable" in repr(refused)
        listed = admin.list_config_resources()
        assert topic in listed["topic"]
        assert set(map(str, listed["broker"])) == {str(embedded.a.node_id)}, "that of its zone"


def test_aiokafka_replaces_configs(embedded: BrokerCluster) -> None:
    topic = create_topic(embedded.a.address, configs={"retention.ms": "1000"})

    async def work(admin: Any) -> list[tuple[int, str | None]]:
        codes = []
        for configs in ({"segment.ms": "9"}, {"segment.ms": "9", "nope": "1"}):
            resource = AioResource(AioResourceType.TOPIC, topic, configs=configs)
            (answer,) = await admin.alter_configs([resource])
            codes.append(answer.resources[0][:2])
        return codes

    (good, _), (bad, said) = with_aiokafka(embedded.a.address, work, client_id=in_zone("a"))
    assert (good, bad) == (0, INVALID_CONFIG)
    assert said is not None
    assert "nope" in said
    assert RdConfigs(embedded.a.address).topic(topic) == {"segment.ms": "9"}


def test_altered_max_message_bytes_holds_on_both_brokers(cluster: BrokerCluster) -> None:
    topic = create_topic(cluster.a.address)
    batch = build_batch()
    admin = RdConfigs(cluster.a.address)
    with Wire(cluster.a.address) as first, Wire(cluster.b.address) as second:
        for connection in (first, second):
            assert connection.produce(topic, 0, batch).error is ErrorCode.none
        admin.change(TOPIC, topic, ("max.message.bytes", SET, str(len(batch) - 1)))
        assert first.produce(topic, 0, batch).error is ErrorCode.message_too_large
        eventually(
            lambda: second.produce(topic, 0, batch).error is ErrorCode.message_too_large,
            "the limit on the other broker",
        )
        admin.change(TOPIC, topic, ("max.message.bytes", DELETE, None))
        assert first.produce(topic, 0, batch).error is ErrorCode.none
        eventually(lambda: second.produce(topic, 0, batch).error is ErrorCode.none, "no limit any more")


def test_altered_timestamps_hold(embedded: BrokerCluster) -> None:
    topic = create_topic(embedded.a.address)
    admin = RdConfigs(embedded.a.address)
    old = build_batch(base_timestamp=1_000)
    with Wire(embedded.a.address) as connection:
        assert connection.produce(topic, 0, old).error is ErrorCode.none
        admin.change(TOPIC, topic, ("message.timestamp.before.max.ms", SET, "60000"))
        assert connection.produce(topic, 0, old).error is ErrorCode.invalid_timestamp
        admin.change(TOPIC, topic, ("message.timestamp.type", SET, "LogAppendTime"))
        assert connection.produce(topic, 0, old).error is ErrorCode.none


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerCluster]:
    """A cluster whose defaults may be altered: nobody else depends on them."""
    directory = tmp_path_factory.mktemp("altered")
    cluster = BrokerCluster(directory, f"sqlite:///{directory}/metadata.db", f"file://{directory}/objects")
    cluster.start()
    yield cluster
    cluster.kill()


class Defaults:
    """The settings of all brokers, which no Python client can name."""

    def __init__(self, address: str) -> None:
        self._port = int(address.rpartition(":")[2])

    def change(self, *changes: tuple[str, int, str | None], **more: Any) -> ErrorCode:
        configs = [{"name": key, "config_operation": how, "value": value} for key, how, value in changes]
        resource = {"resource_type": BROKER, "resource_name": "", "configs": configs}
        answer = self._ask(44, 1, {"resources": [resource], **more})
        code: ErrorCode = answer.responses[0].error_code
        return code

    def replace(self, configs: Mapping[str, str]) -> ErrorCode:
        named = [{"name": key, "value": value} for key, value in configs.items()]
        resource = {"resource_type": BROKER, "resource_name": "", "configs": named}
        code: ErrorCode = self._ask(33, 2, {"resources": [resource]}).responses[0].error_code
        return code

    def describe(self, kind: int, name: str) -> dict[str, Any]:
        resource = {"resource_type": kind, "resource_name": name, "configuration_keys": None}
        (answer,) = self._ask(32, 4, {"resources": [resource], "include_synonyms": True}).results
        assert answer.error_code is ErrorCode.none
        return {config.name: config for config in answer.configs}

    def list(self, version: int, *types: int) -> set[tuple[int, str]]:
        answer = self._ask(74, version, {"resource_types": types} if version else {})
        assert answer.error_code is ErrorCode.none
        return {(each.resource_type, each.resource_name) for each in answer.config_resources}

    def _ask(self, api_key: int, version: int, fields: dict[str, Any]) -> Any:
        with wire.Wire(self._port) as connection:
            return connection.ask(api_key, version, fields)


def _sources(config: Any) -> list[tuple[str, str, int]]:
    return [(each.name, each.value, each.source) for each in config.synonyms]


def test_altered_defaults_hold_on_both_brokers_and_for_topics_that_are_there(own: BrokerCluster) -> None:
    topic = create_topic(own.a.address)
    batch = build_batch()
    defaults, other = Defaults(own.a.address), Defaults(own.b.address)
    node = str(own.b.node_id)
    limit = str(len(batch) - 1)
    with Wire(own.a.address) as first, Wire(own.b.address) as second:
        assert second.produce(topic, 0, batch).error is ErrorCode.none
        assert defaults.change(("message.max.bytes", 0, limit), ("num.partitions", 0, "5")) is ErrorCode.none
        assert first.produce(topic, 0, batch).error is ErrorCode.message_too_large
        eventually(
            lambda: second.produce(topic, 0, batch).error is ErrorCode.message_too_large,
            "the limit on the other broker",
        )
        created = create_topic(own.b.address, partitions=-1)
        assert len(second.metadata(created).topics[0].partitions) == 5

        # Kafka's sources and synonyms.
        config = other.describe(TOPIC, topic)["max.message.bytes"]
        assert (config.value, config.config_source) == (limit, FROM_CLUSTER)
        assert _sources(config) == [
            ("message.max.bytes", limit, FROM_CLUSTER),
            ("message.max.bytes", "1048588", FROM_DEFAULT),
        ]
        broker = other.describe(BROKER, node)
        assert (broker["num.partitions"].value, broker["num.partitions"].config_source) == ("5", FROM_CLUSTER)
        assert not broker["num.partitions"].read_only
        assert broker["log.retention.ms"].config_source == FROM_DEFAULT
        assert broker["listen"].read_only
        assert broker["listen"].config_source == FROM_BROKER
        assert {name: each.value for name, each in other.describe(BROKER, "").items()} == {
            "message.max.bytes": limit,
            "num.partitions": "5",
        }

        assert defaults.change(("message.max.bytes", 0, "x"), ("num.partitions", 0, "6")) is (
            ErrorCode.invalid_request
        )
        assert defaults.change(("wal.linger.ms", 0, "6")) is ErrorCode.invalid_request
        assert defaults.change(("num.partitions", 0, "6"), validate_only=True) is ErrorCode.none
        assert defaults.describe(BROKER, "")["num.partitions"].value == "5"

        assert defaults.replace({"auto.create.topics.enable": "false"}) is ErrorCode.none
        assert first.produce(topic, 0, batch).error is ErrorCode.none
        eventually(lambda: second.produce(topic, 0, batch).error is ErrorCode.none, "no limit any more")
        assert other.describe(BROKER, "").keys() == {"auto.create.topics.enable"}
        named = {"topics": [{"name": fresh_name()}], "allow_auto_topic_creation": True}
        asked = other._ask(3, 9, named).topics[0]
        assert asked.error_code is ErrorCode.unknown_topic_or_partition
        assert defaults.replace({}) is ErrorCode.none
        eventually(lambda: not other.describe(BROKER, ""), "nothing altered any more")
        assert other._ask(3, 9, named).topics[0].error_code is ErrorCode.none


def test_altered_defaults_are_there_after_a_start(own: BrokerCluster) -> None:
    assert Defaults(own.a.address).change(("num.partitions", 0, "4")) is ErrorCode.none
    third = own.broker("c", settings={"num.partitions": "2"})
    third.start()
    try:
        config = Defaults(third.address).describe(BROKER, str(third.node_id))["num.partitions"]
        assert [(value, source) for _, value, source in _sources(config)] == [
            ("4", FROM_CLUSTER),
            ("2", FROM_BROKER),
            ("1", FROM_DEFAULT),
        ]
    finally:
        third.kill()
        Defaults(own.a.address).replace({})


def test_resources_with_configs_are_listed(own: BrokerCluster) -> None:
    topic = create_topic(own.a.address)
    admin = Defaults(own.a.address)
    nodes = {(BROKER, str(broker.node_id)) for broker in (own.a, own.b)}
    assert admin.list(1) >= {(TOPIC, topic), *nodes}
    assert (TOPIC, topic) in admin.list(1, TOPIC)
    assert nodes <= admin.list(1, BROKER)
    assert {kind for kind, _ in admin.list(1, BROKER)} == {BROKER}
    assert admin.list(1, 16) == admin.list(0) == set()


def kafka_configs(cluster: BrokerCluster, *arguments: str) -> str:
    """What kafka-configs.sh says, with all its requests to broker `a`."""
    properties = cluster.directory / "tool.properties"
    properties.write_text(f"client.id={in_zone('a')}\n")
    where = ["--bootstrap-server", cluster.a.address, "--command-config", str(properties)]
    command = java_command("kafka.admin.ConfigCommand", [*where, *arguments], SHORT_LIVED_OPTIONS)
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S * 2)
    return done.stdout + done.stderr


def test_kafka_s_own_tool_alters_and_describes(own: BrokerCluster) -> None:
    topic = create_topic(own.a.address)
    address = own.a.address
    assert "Completed updating" in kafka_configs(
        own, "--alter", "--topic", topic, "--add-config", "max.message.bytes=2000,retention.ms=5"
    )
    assert RdConfigs(address).topic(topic) == {"max.message.bytes": "2000", "retention.ms": "5"}
    said = kafka_configs(own, "--describe", "--topic", topic)
    assert "max.message.bytes=2000" in said
    assert "DYNAMIC_TOPIC_CONFIG:max.message.bytes=2000, DEFAULT_CONFIG:message.max.bytes=1048588" in said
    everybody = ("--entity-type", "brokers", "--entity-default")
    assert "Completed updating" in kafka_configs(
        own, "--alter", *everybody, "--add-config", "log.retention.ms=7"
    )
    said = kafka_configs(own, "--describe", *everybody)
    assert "log.retention.ms=7" in said
    assert "DYNAMIC_DEFAULT_BROKER_CONFIG" in said
    refused = kafka_configs(own, "--alter", *everybody, "--add-config", "wal.linger.ms=7")
    assert "Cannot update these configs dynamically: wal.linger.ms" in refused
    assert "Completed updating" in kafka_configs(
        own, "--alter", *everybody, "--delete-config", "log.retention.ms"
    )
    assert Defaults(address).describe(BROKER, "") == {}
