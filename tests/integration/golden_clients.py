"""Runs the clients whose exchanges are in `golden/protocol/`, and compares those with Apache Kafka.

    python -m tests.integration.golden_clients --record [client …]   run the clients again
    python -m tests.integration.golden_clients --answers             the same requests, new answers
    python -m tests.integration.golden_clients --kafka [client …]    print where Apache Kafka differs

The first two replace golden files, for a diff that somebody reviews. Every client follows the same script, as
far as it can: topics, metadata, records in each codec, reading them, offsets, and the rest of the APIs.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import aiokafka  # type: ignore[import-untyped]  # has no stubs
import aiokafka.admin  # type: ignore[import-untyped]  # has no stubs
import confluent_kafka
import kafka  # type: ignore[import-untyped]  # has no stubs
import kafka.admin  # type: ignore[import-untyped]  # has no stubs
from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # documented, but not exported
    AdminClient,
    ConfigResource,
    OffsetSpec,
    ResourceType,
)
from confluent_kafka.cimpl import NewPartitions, NewTopic

from tests.integration.golden_protocol import (
    DIRECTORY,
    NODE_ID,
    Golden,
    Tape,
    golden_of,
    load,
    replay,
    save,
)
from tests.integration.golden_requests import BY_HAND
from tests.integration.java_clients import Admin, JavaClientError, ToRead, ToSend, consume, produce
from tests.servers.dray import DrayBroker
from tests.servers.kafka import KafkaServer, kafka_version

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
HEADERS: list[tuple[str, Any]] = [("h", b"\xff\x00"), ("h", b""), ("ü", None)]
FIRST_MS = 1_700_000_000_000
TIMEOUT_S = 20.0
# How long fetches at the end wait: each replay waits as long.
WAIT_MS = 50
UNAVAILABLE = 1_000_000


def values(codec: str) -> list[bytes]:
    return [f"{codec} {number} {'abc ' * 20}".encode() for number in range(3)]


def timestamps(codec: str) -> list[int]:
    first = FIRST_MS + 1000 * CODECS.index(codec)
    return [first, first + 100, first + 50]


def fetches(offset: int) -> Callable[[Any], bool]:
    """Fetch requests for that offset; all of other APIs."""

    def check(body: Any) -> bool:
        if not type(body).__name__.startswith("Fetch"):
            return True
        return any(part.fetch_offset == offset for topic in body.topics for part in topic.partitions)

    return check


def librdkafka(address: str, tape: Tape) -> str:
    base: dict[str, Any] = {"bootstrap.servers": address, "log_level": 0, "client.id": "golden"}
    spec_of: Any = OffsetSpec

    def wait(futures: dict[Any, Any]) -> None:
        for future in futures.values():
            with suppress(KafkaException):
                future.result(TIMEOUT_S)

    with tape.step("ApiVersions: handshake", "Metadata: brokers alone"):
        admin = AdminClient(base)
        admin.list_topics(timeout=TIMEOUT_S)
    with tape.step("CreateTopics: two topics, one with configs"):
        stamped = NewTopic("stamped", 2, 1, config={"message.timestamp.type": "LogAppendTime"})
        wait(admin.create_topics([NewTopic("golden", 1, 1), stamped]))
    with tape.step("CreateTopics: exists, bad name, no partitions, bad config"):
        bad = NewTopic("config", 1, 1, config={"retention.ms": "soon"})
        wait(admin.create_topics([NewTopic("golden", 1, 1), NewTopic("a/b", 1, 1), NewTopic("c", 0, 1), bad]))
    with tape.step("CreateTopics: validate only"):
        wait(admin.create_topics([NewTopic("imagined", 3, 1)], validate_only=True))
    with tape.step("Metadata: all"):
        admin.list_topics(timeout=TIMEOUT_S)
    for acks, codec in (("all", "none"), *((1, codec) for codec in CODECS[1:])):
        producer = confluent_kafka.Producer(
            {**base, "acks": acks, "compression.type": codec, "linger.ms": 200, "request.timeout.ms": 5000}
        )
        with tape.step(f"Produce: three records, {codec}, acks={acks}"):
            for value, timestamp in zip(values(codec), timestamps(codec), strict=True):
                producer.produce("golden", value, b"key", 0, timestamp=timestamp, headers=HEADERS)
            producer.flush(TIMEOUT_S)
    with tape.step("Metadata: by name, makes the topic", "Produce: to a topic just made, no key, no value"):
        producer.produce("made", None, partition=0, timestamp=FIRST_MS)
        producer.flush(TIMEOUT_S)
    with tape.step("Produce: to a topic with LogAppendTime"):
        producer.produce("stamped", b"x", partition=1, timestamp=FIRST_MS)
        producer.flush(TIMEOUT_S)
    reading = {
        **base,
        "group.id": "golden",
        "enable.auto.commit": False,
        "auto.offset.reset": "error",
        "fetch.wait.max.ms": WAIT_MS,
    }

    def fetch(offset: int, *names: str) -> None:
        consumer = confluent_kafka.Consumer(reading)
        with tape.step(*names, only=fetches(offset)), closing(consumer):
            consumer.assign([TopicPartition("golden", 0, offset)])
            with suppress(KafkaException):
                consumer.consume(1, timeout=5 if offset != 15 else 0.5)

    fetch(0, "FindCoordinator: of a group", "Fetch: from the start")
    fetch(4, "Fetch: from within a batch")
    fetch(15, "Fetch: at the end")
    fetch(UNAVAILABLE, "Fetch: out of range")
    consumer = confluent_kafka.Consumer(reading)
    with closing(consumer), tape.step("Metadata: by name, unknown and not to be made"):
        consumer.list_topics("nowhere", timeout=TIMEOUT_S)
    for what, spec in (
        ("earliest", spec_of.earliest()),
        ("latest", spec_of.latest()),
        ("of the highest timestamp", spec_of.max_timestamp()),
        ("by time, within a batch", spec_of.for_timestamp(FIRST_MS + 1060)),
        ("by time, behind all", spec_of.for_timestamp(FIRST_MS + 10**9)),
    ):
        with tape.step(f"ListOffsets: {what}"):
            wait(admin.list_offsets({TopicPartition("golden", 0): spec}))
    with tape.step("DescribeConfigs: of a topic"):
        wait(admin.describe_configs([ConfigResource(ResourceType.TOPIC, "stamped")]))
    with tape.step("DescribeConfigs: of an unknown topic"):
        wait(admin.describe_configs([ConfigResource(ResourceType.TOPIC, "nowhere")]))
    with tape.step("Metadata: brokers alone, and what one may do with the cluster"):
        admin.describe_cluster(include_authorized_operations=True).result(TIMEOUT_S)
    with tape.step("CreatePartitions: one more"):
        wait(admin.create_partitions([NewPartitions("golden", 2)]))
    with tape.step("CreatePartitions: fewer, and of an unknown topic"):
        wait(admin.create_partitions([NewPartitions("golden", 1), NewPartitions("nowhere", 2)]))
    with tape.step("DeleteTopics: two, one of them unknown"):
        wait(admin.delete_topics(["made", "nowhere"]))
    return f"librdkafka {confluent_kafka.libversion()[0]} (confluent-kafka {confluent_kafka.version()})"


def java(address: str, tape: Tape) -> str:
    properties = {"client.id": "golden", "request.timeout.ms": 5000}
    with tape.step(
        "ApiVersions: handshake",
        "CreateTopics: two partitions, with a config",
        "CreateTopics: one partition",
        "CreateTopics: exists",
        "CreateTopics: no partitions",
        "CreateTopics: validate only",
        "Metadata: brokers alone",
        "Metadata: all",
    ):
        (
            Admin(address, properties)
            .create_topic("golden", 2, 1, {"retention.ms": "-1"})
            .create_topic("short-lived", 1, 1)
            .create_topic("golden", 2, 1)
            .create_topic("c", 0, 1)
            .create_topic("imagined", validate_only=True)
            .list_topics()
            .run()
        )
    for acks, codec in (("all", "none"), *((1, codec) for codec in CODECS[1:])):
        records = [
            ToSend("golden", value, b"key", 1, timestamp, tuple(HEADERS))
            for value, timestamp in zip(values(codec), timestamps(codec), strict=True)
        ]
        names = [f"Produce: three records, {codec}, acks={acks}"]
        with tape.step(*names, *(["Metadata: by name"] if codec == "none" else [])):
            produce(
                address,
                records,
                {
                    **properties,
                    "acks": acks,
                    "compression.type": codec,
                    "linger.ms": 200,
                    "delivery.timeout.ms": 6000,
                    "enable.idempotence": False,
                },
            )

    def fetch(start: int, end: int | str, *names: str) -> None:
        reading = {**properties, "fetch.max.wait.ms": WAIT_MS, "auto.offset.reset": "none"}
        with tape.step(*names, only=fetches(start)), suppress(JavaClientError, TimeoutError):
            consume(address, [ToRead("golden", 1, start, end)], reading, timeout_s=3)

    fetch(0, 1, "Fetch: from the start")
    fetch(4, 5, "Fetch: from within a batch")
    fetch(15, "+1", "Fetch: at the end")
    fetch(UNAVAILABLE, "+1", "Fetch: out of range")
    with tape.step(
        "ListOffsets: earliest",
        "ListOffsets: latest",
        "ListOffsets: of the highest timestamp",
        "ListOffsets: by time, within a batch",
        "ListOffsets: by time, behind all",
        "DescribeTopicPartitions: of a topic",
        "DescribeTopicPartitions: of an unknown topic",
        "DescribeConfigs: of a topic",
        "DescribeCluster: brokers",
        "CreatePartitions: one more",
        "CreatePartitions: fewer",
        "DeleteTopics: by name",
        "DeleteTopics: unknown",
    ):
        (
            Admin(address, properties)
            .list_offsets("golden", 1, "earliest")
            .list_offsets("golden", 1, "latest")
            .list_offsets("golden", 1, "max")
            .list_offsets("golden", 1, FIRST_MS + 1060)
            .list_offsets("golden", 1, FIRST_MS + 10**9)
            .describe_topic("golden")
            .describe_topic("nowhere")
            .describe_configs("TOPIC", "golden")
            .describe_cluster()
            .create_partitions("golden", 3)
            .create_partitions("golden", 2)
            .delete_topic("short-lived")
            .delete_topic("nowhere")
            .run()
        )
    return f"Java {kafka_version()}"


def kafka_python(address: str, tape: Tape) -> str:
    base: dict[str, Any] = {"bootstrap_servers": address, "client_id": "golden"}
    with tape.step("ApiVersions: handshake", "Metadata: brokers alone"):
        admin = kafka.KafkaAdminClient(**base)
    with tape.step("CreateTopics: one topic"):
        admin.create_topics({"golden": {"num_partitions": 1, "replication_factor": 1}})
    with tape.step("CreateTopics: exists"), suppress(kafka.errors.KafkaError):
        admin.create_topics({"golden": {"num_partitions": 1, "replication_factor": 1}})
    with tape.step("Metadata: of all topics"):
        admin.describe_topics()
    # Its snappy comes from a library that nothing else here needs; `golden/records/` has such a batch.
    for acks, codec in (("all", None), (1, "gzip"), (1, "lz4"), (1, "zstd")):
        producer = kafka.KafkaProducer(
            **base, acks=acks, compression_type=codec, linger_ms=200, enable_idempotence=False
        )
        name = codec or "none"
        with tape.step(f"Produce: three records, {name}, acks={acks}"), closing(producer):
            for value, timestamp in zip(values(name), timestamps(name), strict=True):
                producer.send("golden", value, b"key", HEADERS[:2], partition=0, timestamp_ms=timestamp)
            producer.flush(TIMEOUT_S)

    def fetch(offset: int, *names: str) -> None:
        consumer = kafka.KafkaConsumer(
            **base, auto_offset_reset="none", enable_auto_commit=False, fetch_max_wait_ms=WAIT_MS
        )
        with tape.step(*names, only=fetches(offset)), closing(consumer):
            partition = kafka.TopicPartition("golden", 0)
            consumer.assign([partition])
            consumer.seek(partition, offset)
            with suppress(kafka.errors.KafkaError):
                consumer.poll(timeout_ms=3000 if offset != 12 else 500)

    fetch(0, "Fetch: from the start")
    fetch(4, "Fetch: from within a batch")
    fetch(12, "Fetch: at the end")
    fetch(UNAVAILABLE, "Fetch: out of range")
    consumer = kafka.KafkaConsumer(**base)
    partition = kafka.TopicPartition("golden", 0)
    with closing(consumer):
        with tape.step("ListOffsets: earliest"):
            consumer.beginning_offsets([partition])
        with tape.step("ListOffsets: latest"):
            consumer.end_offsets([partition])
        with tape.step("ListOffsets: by time, within a batch"):
            consumer.offsets_for_times({partition: FIRST_MS + 1060})
    with tape.step("ListOffsets: of the highest timestamp"):
        admin.list_partition_offsets({partition: kafka.admin.OffsetSpec.MAX_TIMESTAMP})
    kinds = kafka.admin.ConfigResourceType
    with tape.step("DescribeConfigs: some of a broker's"):
        wanted = {"message.max.bytes": None, "num.partitions": None, "auto.create.topics.enable": None}
        of_broker = kafka.admin.ConfigResource(kinds.BROKER, str(NODE_ID), wanted)
        admin.describe_configs([of_broker], include_synonyms=True, config_filter="all")
    with tape.step("DescribeConfigs: some of a topic's"):
        of_topic = kafka.admin.ConfigResource(kinds.TOPIC, "golden", {"max.message.bytes": None})
        admin.describe_configs([of_topic], include_synonyms=True, config_filter="all")
    with tape.step("DescribeCluster: brokers"):
        admin.describe_cluster()
    with tape.step("CreatePartitions: two more"):
        admin.create_partitions({"golden": 3})
    with (
        tape.step("DescribeTopicPartitions: of a topic and an unknown one"),
        suppress(kafka.errors.KafkaError),
    ):
        admin.describe_topic_partitions(["golden", "absent"])
    with tape.step("FindCoordinator: of a group"), suppress(kafka.errors.KafkaError):
        admin.describe_groups(["golden"])
    with tape.step("DeleteTopics: by name"):
        admin.delete_topics(["golden"])
    admin.close()
    return f"kafka-python {kafka.__version__}"


def aiokafka_(address: str, tape: Tape) -> str:
    asyncio.run(_aiokafka(address, tape))
    return f"aiokafka {aiokafka.__version__}"


async def _aiokafka(address: str, tape: Tape) -> None:
    base: dict[str, Any] = {"bootstrap_servers": address, "client_id": "golden"}
    admin = aiokafka.admin.AIOKafkaAdminClient(**base)
    with tape.step("ApiVersions: handshake", "Metadata: brokers alone"):
        await admin.start()
    new = aiokafka.admin.NewTopic
    with tape.step("CreateTopics: one topic"):
        await admin.create_topics([new("golden", 1, 1), new("short-lived", 1, 1)])
    with tape.step("Metadata: all"):
        await admin.list_topics()
    for acks, codec in (("all", None), (1, "gzip"), (1, "snappy"), (1, "lz4"), (1, "zstd")):
        name = codec or "none"
        producer = aiokafka.AIOKafkaProducer(
            **base, acks=acks, compression_type=codec, linger_ms=200, enable_idempotence=False
        )
        await producer.start()
        with tape.step(f"Produce: three records, {name}, acks={acks}"):
            sent = [
                await producer.send("golden", value, b"key", 0, timestamp, HEADERS[:2])
                for value, timestamp in zip(values(name), timestamps(name), strict=True)
            ]
            await asyncio.gather(*sent)
        await producer.stop()

    partition = aiokafka.TopicPartition("golden", 0)

    async def fetch(offset: int, *names: str) -> None:
        consumer = aiokafka.AIOKafkaConsumer(
            **base, auto_offset_reset="none", enable_auto_commit=False, fetch_max_wait_ms=WAIT_MS
        )
        with tape.step(*names, only=fetches(offset)):
            await consumer.start()
            consumer.assign([partition])
            consumer.seek(partition, offset)
            with suppress(aiokafka.errors.KafkaError):
                await consumer.getmany(timeout_ms=3000 if offset != 15 else 500)
            await consumer.stop()

    await fetch(0, "Fetch: from the start")
    await fetch(4, "Fetch: from within a batch")
    await fetch(15, "Fetch: at the end")
    await fetch(UNAVAILABLE, "Fetch: out of range")
    consumer = aiokafka.AIOKafkaConsumer(**base)
    await consumer.start()
    with tape.step("ListOffsets: earliest"):
        await consumer.beginning_offsets([partition])
    with tape.step("ListOffsets: latest"):
        await consumer.end_offsets([partition])
    with tape.step("ListOffsets: by time, within a batch"):
        await consumer.offsets_for_times({partition: FIRST_MS + 1060})
    await consumer.stop()
    resource = aiokafka.admin.config_resource
    with tape.step("DescribeConfigs: of a topic"):
        kind = resource.ConfigResourceType.TOPIC
        await admin.describe_configs([resource.ConfigResource(kind, "golden")])
    with tape.step("FindCoordinator: of a group"):
        await admin.find_coordinator("golden")
    with tape.step("CreatePartitions: one more"):
        await admin.create_partitions({"golden": aiokafka.admin.NewPartitions(2)})
    with tape.step("DeleteTopics: by name"):
        await admin.delete_topics(["short-lived"])
    await admin.close()


def librdkafka_idempotent(address: str, tape: Tape) -> str:
    base: dict[str, Any] = {"bootstrap.servers": address, "log_level": 0, "client.id": "golden"}
    with tape.step("CreateTopics: one topic"):
        admin = AdminClient(base)
        admin.create_topics([NewTopic("golden", 1, 1)])["golden"].result(TIMEOUT_S)
    producer = confluent_kafka.Producer({**base, "enable.idempotence": True, "linger.ms": 200})
    for number in range(3):
        names = [f"Produce: batch {number}"]
        with tape.step(*names, *(["InitProducerId: a new one"] if number == 0 else [])):
            for value, timestamp in zip(values("none"), timestamps("none"), strict=True):
                producer.produce("golden", value, b"key", 0, timestamp=timestamp)
            producer.flush(TIMEOUT_S)
    return f"librdkafka {confluent_kafka.libversion()[0]} (confluent-kafka {confluent_kafka.version()})"


def java_idempotent(address: str, tape: Tape) -> str:
    properties = {"client.id": "golden", "linger.ms": 200, "enable.idempotence": True}
    with tape.step("CreateTopics: one topic"):
        Admin(address, {"client.id": "golden"}).create_topic("golden", 1, 1).run()
    records = [
        ToSend("golden", value, b"key", 0, timestamp)
        for value, timestamp in zip(values("none") * 3, timestamps("none") * 3, strict=True)
    ]
    with tape.step(
        "InitProducerId: a new one", *(f"Produce: batch {number}" for number in range(3)), "Metadata: by name"
    ):
        produce(address, records, properties, flush_every=3)
    return f"Java {kafka_version()}"


def kafka_python_idempotent(address: str, tape: Tape) -> str:
    base: dict[str, Any] = {"bootstrap_servers": address, "client_id": "golden"}
    partition = kafka.TopicPartition("golden", 0)
    with closing(kafka.KafkaAdminClient(**base)) as admin:
        with tape.step("CreateTopics: one topic"):
            admin.create_topics({"golden": {"num_partitions": 1, "replication_factor": 1}})
        with closing(kafka.KafkaProducer(**base, linger_ms=200, enable_idempotence=True)) as producer:
            for number in range(3):
                names = [f"Produce: batch {number}"]
                with tape.step(*names, *(["InitProducerId: a new one"] if number == 0 else [])):
                    for value, timestamp in zip(values("none"), timestamps("none"), strict=True):
                        producer.send("golden", value, b"key", partition=0, timestamp_ms=timestamp)
                    producer.flush(TIMEOUT_S)
        with tape.step("DescribeProducers: the one"):
            admin.describe_producers([partition])
        with tape.step("DeleteRecords: the first four"):
            admin.delete_records({partition: 4})
        with tape.step("DescribeLogDirs: of all"):
            admin.describe_log_dirs()
        with tape.step("ElectLeaders: of one partition"):
            admin.elect_leaders(0, {"golden": [0]})
        with tape.step("AlterPartitionReassignments: to where it is"):
            admin.alter_partition_reassignments({partition: [NODE_ID]})
        with tape.step("ListPartitionReassignments: all"):
            admin.list_partition_reassignments()
        of_topic = kafka.admin.ConfigResource
        with tape.step("IncrementalAlterConfigs: set"):
            admin.alter_configs([of_topic("TOPIC", "golden", {"retention.ms": "7"})])
        with tape.step("AlterConfigs: replaced", "DescribeConfigs: before they are replaced"):
            admin.alter_configs([of_topic("TOPIC", "golden", {"segment.ms": "8"})], incremental=False)
        with tape.step("IncrementalAlterConfigs: unset"):
            admin.reset_configs([of_topic("TOPIC", "golden", ["segment.ms"])])
        with tape.step("ListConfigResources: all"):
            admin.list_config_resources()
        with tape.step("UpdateFeatures: an unknown one"), suppress(kafka.errors.KafkaError):
            admin.update_features({"metadata.version": 7})
    return f"kafka-python {kafka.__version__}"


def aiokafka_idempotent(address: str, tape: Tape) -> str:
    async def run() -> None:
        base: dict[str, Any] = {"bootstrap_servers": address, "client_id": "golden"}
        admin = aiokafka.admin.AIOKafkaAdminClient(**base)
        await admin.start()
        with tape.step("CreateTopics: one topic"):
            await admin.create_topics([aiokafka.admin.NewTopic("golden", 1, 1)])
        producer = aiokafka.AIOKafkaProducer(**base, linger_ms=200, enable_idempotence=True)
        with tape.step("InitProducerId: a new one"):
            await producer.start()
        for number in range(3):
            with tape.step(f"Produce: batch {number}"):
                sent = [
                    await producer.send("golden", value, b"key", 0, timestamp)
                    for value, timestamp in zip(values("none"), timestamps("none"), strict=True)
                ]
                await asyncio.gather(*sent)
        await producer.stop()
        await admin.close()

    asyncio.run(run())
    return f"aiokafka {aiokafka.__version__}"


CLIENTS: dict[str, Callable[[str, Tape], str]] = {
    "librdkafka": librdkafka,
    "librdkafka-idempotent": librdkafka_idempotent,
    "java": java,
    "java-idempotent": java_idempotent,
    "kafka-python": kafka_python,
    "kafka-python-idempotent": kafka_python_idempotent,
    "aiokafka": aiokafka_,
    "aiokafka-idempotent": aiokafka_idempotent,
}


@contextmanager
def dray_broker(directory: Path, advertised_port: int | None = None) -> Iterator[DrayBroker]:
    settings = {} if advertised_port is None else {"advertise": f"127.0.0.1:{advertised_port}"}
    broker = DrayBroker(directory, node_id=NODE_ID, settings=settings)
    broker.start()
    try:
        yield broker
    finally:
        broker.kill()


def record(names: Sequence[str]) -> None:
    for name in names or [*CLIENTS, *BY_HAND]:
        golden = answered(BY_HAND[name]()) if name in BY_HAND else recorded(CLIENTS[name])
        save(DIRECTORY / f"{name}.json", golden)
        sys.stderr.write(f"{name}: {len(golden.exchanges)} exchanges\n")


def recorded(script: Callable[[str, Tape], str]) -> Golden:
    with tempfile.TemporaryDirectory() as scratch, closing(Tape()) as tape:
        directory = Path(scratch)
        with dray_broker(directory, tape.port) as broker:
            tape.broker_port = broker.port
            client = script(f"127.0.0.1:{tape.port}", tape)
        return golden_of(client, tape, directory)


def answered(golden: Golden) -> Golden:
    """The same requests, with the answers of now."""
    with tempfile.TemporaryDirectory() as scratch, dray_broker(Path(scratch)) as broker:
        answers = list(replay(golden, ("127.0.0.1", broker.port), Path(scratch)))
    return golden._replace(exchanges=[exchange._replace(answer=answer) for exchange, answer in answers])


def answer_again() -> None:
    for path in sorted(DIRECTORY.glob("*.json")):
        save(path, answered(load(path)))


def compare_with_kafka(names: Sequence[str]) -> None:
    """Print the fields that Apache Kafka answers otherwise to the same requests."""
    for path in [DIRECTORY / f"{name}.json" for name in names or [*CLIENTS, *BY_HAND]]:
        with tempfile.TemporaryDirectory() as scratch:
            server = KafkaServer(Path(scratch))
            server.start()
            try:
                print(f"\n{path.stem}")  # noqa: T201 - it is what was asked for
                golden = load(path)
                for exchange, answer in replay(golden, ("127.0.0.1", server.port), Path(scratch)):
                    for line in differences("", exchange.answer, answer):
                        print(f"  {exchange.api}, {exchange.name}: {line}")  # noqa: T201
                    _settled(server.address)
            finally:
                server.kill()


def differences(at: str, dray: Any, kafka: Any) -> Iterator[str]:
    if isinstance(dray, dict) and isinstance(kafka, dict):
        if dray.keys() != kafka.keys():
            yield f"{at} is {dray}, Kafka's {kafka}"
            return
        for name in dray:
            yield from differences(f"{at}.{name}", dray[name], kafka[name])
    elif isinstance(dray, list) and isinstance(kafka, list):
        if len(dray) != len(kafka):
            yield f"{at} has {len(dray)} elements, Kafka's {len(kafka)}"
        ours, theirs = ({_key(each): each for each in rows} for rows in (dray, kafka))
        if lacking := [key for key in theirs if key not in ours]:
            yield f"{at} lacks {lacking}"
        if more := [key for key in ours if key not in theirs]:
            yield f"{at} has also {more}"
        for key in ours:
            if key in theirs:
                yield from differences(f"{at}[{key}]", ours[key], theirs[key])
    elif dray != kafka:
        yield f"{at} is {dray!r}, Kafka's {kafka!r}"


def _key(row: Any) -> Any:
    """What tells an element of an array from the others, so that their order does not matter."""
    if not isinstance(row, dict):
        return row
    names = ("name", "api_key", "topic", "topic_id", "partition_index", "index", "node_id", "resource_name")
    named = next((row[name] for name in names if name in row), "")
    return f"{named} from {row['source']}" if "source" in row else named


def _settled(address: str) -> None:
    """Kafka answers before all of it knows of a new partition."""
    admin = AdminClient({"bootstrap.servers": address, "log_level": 0})
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        topics = admin.list_topics(timeout=TIMEOUT_S).topics.values()
        if all(part.leader >= 0 for topic in topics for part in topic.partitions.values()):
            return


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--record", *names]:
            record(names)
        case ["--answers"]:
            answer_again()
        case ["--kafka", *names]:
            compare_with_kafka(names)
        case _:
            sys.exit("say --record [client …] or --answers to replace golden files, or --kafka to compare")
