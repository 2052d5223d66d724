"""Kafka's own command-line tools against two brokers. Those of configs are in `test_configs_api.py`."""

from __future__ import annotations

import json
import re
from contextlib import closing
from pathlib import Path

import pytest
from confluent_kafka import Consumer, TopicPartition

from dray.handlers.compatibility import KAFKA
from dray.handlers.table import APIS
from tests.integration.conftest import BrokerCluster
from tests.integration.kafka_tools import Tool, run_tool, run_tools
from tests.integration.rdkafka import QUIET, TIMEOUT_S, create_topic, fresh_name, read_values, send_all
from tests.integration.wire import Wire


def server(cluster: BrokerCluster) -> list[str]:
    return ["--bootstrap-server", cluster.a.address]


def test_topics_are_created_described_altered_and_deleted(embedded: BrokerCluster) -> None:
    topic = fresh_name()
    here = [*server(embedded), "--topic", topic]

    def topics(*arguments: str, refused: bool = False) -> Tool:
        return Tool("TopicCommand", [*here, *arguments], refused=refused)

    sizes = ["--partitions", "3", "--replication-factor", "1"]
    assert f"Created topic {topic}." in run_tool(
        "TopicCommand", *here, "--create", *sizes, "--config", "retention.ms=1000"
    )
    again, tolerated, described, overridden, listed = run_tools(
        topics("--create", refused=True),
        topics("--create", "--if-not-exists"),
        topics("--describe"),
        topics("--describe", "--topics-with-overrides"),
        Tool("TopicCommand", [*server(embedded), "--list"]),
    )
    assert f"topic '{topic}' already exists" in again
    assert "Created" not in tolerated
    assert re.search(rf"Topic: {topic}\s.*PartitionCount: 3\s.*Configs: retention.ms=1000", described)
    assert re.search(rf"Topic: {topic}\s.*retention.ms=1000", overridden)
    assert topic in listed.split()

    run_tool("TopicCommand", *here, "--alter", "--partitions", "5")
    grown, smaller, healthy = run_tools(
        topics("--describe"),
        topics("--alter", "--partitions", "2", refused=True),
        topics("--describe", "--unavailable-partitions"),
    )
    brokers = f"(?:{embedded.a.node_id}|{embedded.b.node_id})"
    partitions = re.findall(rf"Partition: (\d)\tLeader: ({brokers})\tReplicas: ({brokers})\tIsr:", grown)
    assert [int(number) for number, _, _ in partitions] == list(range(5))
    assert all(leader == replica for _, leader, replica in partitions)
    assert "cannot have 2 partitions" in smaller
    assert topic not in healthy

    run_tool("TopicCommand", *here, "--delete")
    assert "does not exist as expected" in run_tool("TopicCommand", *here, "--describe", refused=True)


def group_rows(described: str) -> list[list[str]]:
    """Of a table of `kafka-consumer-groups`, without its head."""
    return [line.split() for line in described.splitlines() if line.strip()][1:]


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_groups_are_described_reset_and_deleted(embedded: BrokerCluster, protocol: str) -> None:
    topic = create_topic(embedded.a.address, partitions=2)
    for partition in (0, 1):
        send_all(embedded.a.address, topic, [b"%d" % number for number in range(10)], partition)
    group = fresh_name("group")
    here = [*server(embedded), "--group", group]

    def groups(*arguments: str, refused: bool = False) -> Tool:
        return Tool("consumer.group.ConsumerGroupCommand", [*here, *arguments], refused=refused)

    def reset(*arguments: str, refused: bool = False) -> Tool:
        return groups("--reset-offsets", "--topic", topic, *arguments, "--execute", refused=refused)

    conf = {**QUIET, "bootstrap.servers": embedded.b.address, "group.id": group, "group.protocol": protocol}
    with closing(
        Consumer({**conf, "auto.offset.reset": "earliest", "enable.auto.commit": False})
    ) as consumer:
        consumer.subscribe([topic])
        read = 0
        while read < 20:
            read += len(consumer.consume(20, TIMEOUT_S))
        ends = [TopicPartition(topic, 0, 10), TopicPartition(topic, 1, 7)]
        consumer.commit(offsets=ends, asynchronous=False)
        listed, offsets, members, state, busy_reset, busy_delete = run_tools(
            Tool("consumer.group.ConsumerGroupCommand", [*server(embedded), "--list", "--type"]),
            groups("--describe"),
            groups("--describe", "--members"),
            groups("--describe", "--state"),
            reset("--to-earliest"),
            groups("--delete"),
        )
    assert [group, protocol.capitalize()] in group_rows(listed)
    rows = group_rows(offsets)
    assert sorted(row[:6] for row in rows) == [
        [group, topic, "0", "10", "10", "0"],
        [group, topic, "1", "7", "10", "3"],
    ]
    assert [row[:2] + row[-1:] for row in group_rows(members)] == [[group, rows[0][6], "2"]]
    assert "Stable" in group_rows(state)[0]
    assert "the current state is Stable" in busy_reset
    assert "The group is not empty" in busy_delete

    (earliest,) = run_tools(reset("--to-earliest"))
    assert sorted(row[:4] for row in group_rows(earliest)) == [[group, topic, str(n), "0"] for n in (0, 1)]
    (shifted,) = run_tools(reset("--shift-by", "4"))
    assert sorted(row[:4] for row in group_rows(shifted)) == [[group, topic, str(n), "4"] for n in (0, 1)]
    without_members, forgotten = run_tools(
        groups("--describe"), groups("--delete-offsets", "--topic", f"{topic}:1")
    )
    assert "has no active members" in without_members
    assert re.search(rf"{topic}\s+1\s+Successful", forgotten)
    (left,) = run_tools(groups("--describe", "--offsets"))
    assert [row[1:4] for row in group_rows(left) if group in row] == [[topic, "0", "4"]]
    (deleted,) = run_tools(groups("--delete"))
    assert "was successful" in deleted
    (gone,) = run_tools(groups("--describe"))
    assert "GroupIdNotFoundException" in gone


def last_sequences(described: str) -> list[int]:
    """Of all producers of a partition."""
    _, *rows = described.strip().splitlines()
    return [int(row.split()[3]) for row in rows]


def test_producers_write_idempotently_unless_they_choose_not_to(
    embedded: BrokerCluster, tmp_path: Path
) -> None:
    """By default, but for the verifiable one: it wants no retries, and so the client no idempotence."""
    many, checked, retried, typed = (create_topic(embedded.a.address) for _ in range(4))
    here = server(embedded)
    retrying = tmp_path / "retries.properties"
    retrying.write_text("retries=9\n")
    lines = [f"key-{number}\tvalue {number}" for number in range(50)]
    sent, verified, verified_with_retries, _ = run_tools(
        Tool(
            "ProducerPerformance",
            [*here, "--topic", many, "--num-records=20000", "--record-size=100", "--throughput=-1"],
        ),
        Tool("VerifiableProducer", [*here, "--topic", checked, "--max-messages", "500"]),
        Tool(
            "VerifiableProducer",
            [*here, "--topic", retried, "--max-messages", "500", "--command-config", str(retrying)],
        ),
        Tool(
            "ConsoleProducer",
            [*here, "--topic", typed, "--reader-property", "parse.key=true"],
            "\n".join(lines),
        ),
    )
    assert "20000 records sent" in sent
    for topic, said in ((checked, verified), (retried, verified_with_retries)):
        events = [json.loads(line) for line in said.splitlines()]
        sends = [event for event in events if event["name"] == "producer_send_success"]
        assert {each["offset"]: each["value"] for each in sends} == {n: str(n) for n in range(500)}
        assert list(read_values(embedded.b.address, topic).values()) == [b"%d" % n for n in range(500)]

    printed = [f"--formatter-property=print.{what}=true" for what in ("key", "offset", "partition")]
    where = ["--topic", typed, "--partition", "0", "--max-messages"]
    offsets, largest, consumed, rest, *producers = run_tools(
        Tool("GetOffsetShell", [*here, "--topic", f"{many}|{checked}|{typed}"]),
        Tool("GetOffsetShell", [*here, "--topic", checked, "--time", "max-timestamp"]),
        Tool("consumer.ConsoleConsumer", [*here, *where, "50", "--offset", "earliest", *printed]),
        Tool("consumer.ConsoleConsumer", [*here, *where, "2", "--offset", "48"]),
        *(
            Tool("TransactionsCommand", [*here, "describe-producers", "--topic", topic, "--partition", "0"])
            for topic in (many, checked, retried, typed)
        ),
    )
    assert set(offsets.split()) == {f"{many}:0:20000", f"{checked}:0:500", f"{typed}:0:50"}
    assert re.fullmatch(rf"{checked}:0:\d+", largest.strip())
    assert [line for line in consumed.splitlines() if line.startswith("Partition")] == [
        f"Partition:0\tOffset:{number}\t{line}" for number, line in enumerate(lines)
    ]
    assert "value 48\nvalue 49\n" in rest
    assert [last_sequences(each) for each in producers] == [[19_999], [], [499], [49]]


def test_what_brokers_and_cluster_are(embedded: BrokerCluster) -> None:
    here = server(embedded)
    one_record = ["--topic=unused", "--num-records=1", "--record-size=1", "--throughput=-1"]
    nodes = {embedded.a.node_id, embedded.b.node_id}
    with Wire(embedded.a.address) as wire:
        cluster_id = wire.metadata().cluster_id
    versions, named, endpoints, features, configs, transactions, hanging, transactional = run_tools(
        Tool("BrokerApiVersionsCommand", here),
        Tool("ClusterTool", ["cluster-id", *here]),
        Tool("ClusterTool", ["list-endpoints", *here]),
        Tool("FeatureCommand", [*here, "describe"]),
        Tool(
            "kafka.admin.ConfigCommand", [*here, "--describe", "--all", "--broker", str(embedded.b.node_id)]
        ),
        Tool("TransactionsCommand", [*here, "list"], refused=True),
        Tool("TransactionsCommand", [*here, "find-hanging", "--broker-id", str(embedded.b.node_id)]),
        Tool(
            "ProducerPerformance",
            [*here, *one_record, "--transactional-id=t", "--transaction-duration-ms=100"],
            refused=True,
        ),
    )
    told = {int(number): f"{name}: {what}" for name, number, what in API_LINE.findall(versions)}
    assert told == {key: f"{kafka.name}: {usable(key)}" for key, kafka in KAFKA.items()}
    assert {int(each) for each in re.findall(r"\(id: (\d+) ", versions)} >= nodes
    assert f"Cluster ID: {cluster_id}" in named
    assert {int(line.split()[0]) for line in endpoints.splitlines()[1:]} >= nodes
    assert "Feature:" not in features, "there are none"
    assert "message.max.bytes=1048588" in configs
    assert f"listen={embedded.b.address} " in configs
    assert "does not support LIST_TRANSACTIONS" in transactions
    assert len(hanging.splitlines()) == 1, "nothing but the head of the table"
    assert "TransactionalIdAuthorizationException" in transactional


API_LINE = re.compile(r"^\t(\w+)\((\d+)\): (.*?)(?: \[.*)?,?$", re.MULTILINE)


def usable(key: int) -> str:
    """As the tool says it, from what the page of compatibility is made of."""
    api = APIS.get(key)
    if api is None or not api.is_advertised:
        return "UNSUPPORTED"
    _, first, last = api.versions(key)
    return str(first) if first == last else f"{first} to {last}"


def test_records_replicas_and_directories(embedded: BrokerCluster, tmp_path: Path) -> None:
    topic = create_topic(embedded.a.address)
    send_all(embedded.a.address, topic, [b"%03d" % number for number in range(30)])
    here = server(embedded)
    wanted = tmp_path / "delete.json"
    partition = {"topic": topic, "partition": 0, "offset": 10}
    wanted.write_text(json.dumps({"version": 1, "partitions": [partition]}))
    deleted = run_tool("DeleteRecordsCommand", *here, "--offset-json-file", str(wanted))
    assert f"partition: {topic}-0\tlow_watermark: 10" in deleted

    election = ["--election-type", "preferred", "--topic", topic, "--partition", "0"]
    earliest, directories, elected, moved = run_tools(
        Tool("GetOffsetShell", [*here, "--topic", topic, "--time", "-2"]),
        Tool("LogDirsCommand", [*here, "--describe", "--topic-list", topic]),
        Tool("LeaderElectionCommand", [*here, *election]),
        Tool("reassign.ReassignPartitionsCommand", [*here, "--list"]),
    )
    assert f"{topic}:0:10" in earliest
    assert directories.count(f'"partition":"{topic}-0"') == 1
    assert '"error":null' in directories
    assert f"Valid replica already elected for partitions {topic}-0" in elected
    assert "No partition reassignments found." in moved
