"""Requests that no client sends, for `golden/protocol/`: made by hand, with kio, still without answers."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from uuid import UUID

from kio.index import load_request_schema
from kio.serial import entity_writer

from dray.protocol.codec import build
from tests.batches import build_batch, captured
from tests.integration.golden_protocol import Exchange, Golden, api_name, asks
from tests.unit import test_broker_stages as stages


def stages_and_ids() -> Golden:
    """The requests of the broker stages, an unknown version, topics by id."""
    foo = UUID("00112233-4455-6677-8899-aabbccddeeff")
    describe, hello = payload(stages.DESCRIBE_FOO), payload(stages.PRODUCE_HELLO)
    fetch, no_wait = payload(stages.FETCH_UNKNOWN), (500).to_bytes(4, "big")
    known = fetch.replace(stages.FOO_ID.bytes, foo.bytes).replace(no_wait, bytes(4))
    from_0 = known.replace((7).to_bytes(8, "big"), bytes(8))
    three = {"num_partitions": 3, "replication_factor": 1, "assignments": (), "configs": ()}
    ids = [{"topic_id": each, "name": None} for each in (foo, stages.FOO_ID)]
    requests = [
        ("stages: the manual test", payload(stages.MANUAL_TEST)),
        ("a version that does not exist", struct.pack(">hhih", 18, 99, 1, -1) + b"\0\1\1\0"),
        ("stages: unknown topic", describe),
        ("stages: unknown topic id", fetch),
        ("stages: to an unknown topic", hello),
        ("three partitions", request(19, 7, topics=[{"name": "foo", **three}])),
        ("stages: known topic", describe),
        ("stages: all topics, from a cursor on", payload(stages.DESCRIBE_FROM_A_CURSOR)),
        ("by id, known and unknown", request(3, 12, topics=ids, include_topic_authorized_operations=False)),
        ("stages: nothing in it yet, and out of range", known),
        ("stages: nothing in it yet", from_0),
        ("stages: Hello World", hello),
        ("stages: to an unknown partition", hello.replace(b"\0\0\0\2\x50", b"\0\0\0\3\x50")),
        ("stages: Hello World", from_0),
    ]
    return unanswered({"foo": foo}, requests)


def mistakes() -> Golden:
    """What clients do not do, or only by mistake."""
    foo, nobody = UUID("00112233-4455-6677-8899-aabbccddeeff"), UUID("11" * 16)
    second = timedelta(seconds=1)
    operations = ("include_cluster_authorized_operations", "include_topic_authorized_operations")
    no_operations = dict.fromkeys(operations, False)

    def topic(name: str, partitions: int = 1, factor: int = 1, **more: Any) -> dict[str, Any]:
        sizes = {"num_partitions": partitions, "replication_factor": factor}
        return {"name": name, **sizes, "assignments": (), "configs": (), **more}

    def create(*topics: dict[str, Any], **more: Any) -> bytes:
        return request(19, 7, topics=topics, **more)

    def produce(
        records: bytes | None, acks: int = -1, partition: int = 0, name: str = "foo", **more: Any
    ) -> bytes:
        data = [{"name": name, "partition_data": [{"index": partition, "records": records}]}]
        return request(0, 11, acks=acks, timeout=second, topic_data=data, **more)

    def fetch(
        offset: int = 0, partition: int = 0, topic_id: UUID = foo, epoch: int = -1, **more: Any
    ) -> bytes:
        part = {"partition": partition, "fetch_offset": offset, "partition_max_bytes": 2**20}
        part["current_leader_epoch"] = epoch
        topics = [{"topic_id": topic_id, "partitions": [part]}]
        fields = {"max_wait": timedelta(0), "min_bytes": 1, "topics": topics, "forgotten_topics_data": ()}
        return request(1, 16, **{**fields, **more})

    def offsets(
        timestamp: int,
        partition: int = 0,
        name: str = "foo",
        epoch: int = -1,
        version: int = 7,
        times: int = 1,
    ) -> bytes:
        part = {"partition_index": partition, "timestamp": timestamp, "current_leader_epoch": epoch}
        topics = [{"name": name, "partitions": [part] * times}]
        return request(2, version, replica_id=-1, isolation_level=0, topics=topics, timeout=second)

    def describe(*names: str, limit: int = 2000, cursor: dict[str, Any] | None = None) -> bytes:
        topics = [{"name": name} for name in names]
        return request(75, 0, topics=topics, response_partition_limit=limit, cursor=cursor)

    def configs(kind: int, name: str, *keys: str) -> bytes:
        asked = {"resource_type": kind, "resource_name": name, "configuration_keys": keys or None}
        return request(32, 4, resources=[asked])

    def grow(name: str, count: int, assigned: Sequence[Sequence[int]] | None = None, **more: Any) -> bytes:
        rows = None if assigned is None else [{"broker_ids": each} for each in assigned]
        topics = [{"name": name, "count": count, "assignments": rows}]
        return request(37, 3, topics=topics, timeout=second, **{"validate_only": False, **more})

    def delete(*topics: tuple[str | None, UUID | None]) -> bytes:
        rows = [{"name": name, "topic_id": topic_id} for name, topic_id in topics]
        return request(20, 6, topics=rows, timeout=second)

    hello = stages.spelled(stages.HELLO_WORLD)
    corrupt = hello[:-2] + b"!" + hello[-1:]
    requests = [
        (
            "a software name that is none",
            request(18, 3, client_software_name="a b", client_software_version="1"),
        ),
        ("nothing", create()),
        ("two partitions", create(topic("foo", 2, configs=[{"name": "max.message.bytes", "value": "100"}]))),
        ("replication factor 0", create(topic("a", factor=0))),
        ("replication factor 3", create(topic("three", factor=3), validate_only=True)),
        ("twice in one request", create(topic("a"), topic("a"))),
        ("an unknown config", create(topic("a", configs=[{"name": "no.such", "value": "1"}]))),
        ("a config that is null", create(topic("a", configs=[{"name": "retention.ms", "value": None}]))),
        ("names: empty, dots, too long", create(topic(""), topic(".."), topic("x" * 250))),
        (
            "assigned",
            create(topic("assigned", -1, -1, assignments=[{"partition_index": 0, "broker_ids": (1,)}])),
        ),
        (
            "assigned with a hole",
            create(topic("a", -1, -1, assignments=[{"partition_index": 1, "broker_ids": (1,)}])),
        ),
        (
            "assigned and counted",
            create(topic("a", 1, -1, assignments=[{"partition_index": 0, "broker_ids": (1,)}])),
        ),
        ("a name with a dot", create(topic("x.y"))),
        ("a name that collides", create(topic("x_y"))),
        ("an unknown name, as an old client", request(3, 1, topics=[{"name": "a/b"}])),
        (
            "an empty name",
            request(
                3, 12, topics=[{"name": "", "topic_id": None}], include_topic_authorized_operations=False
            ),
        ),
        (
            "a name that cannot be, not to be made",
            request(3, 9, topics=[{"name": "a/b"}], allow_auto_topic_creation=False, **no_operations),
        ),
        ("twice the same", request(3, 9, topics=[{"name": "foo"}] * 2, **no_operations)),
        ("to an empty name", produce(hello, name="")),
        ("no records", produce(None)),
        ("empty records", produce(b"")),
        ("a wrong checksum", produce(corrupt)),
        ("magic 1", produce(captured("kafka-python-magic1"))),
        ("acks=2", produce(hello, acks=2)),
        ("an unknown partition", produce(hello, partition=2)),
        ("partition -1", produce(hello, partition=-1)),
        ("above max.message.bytes", produce(captured("librdkafka-none"))),
        ("cut off", produce(hello[:-5])),
        ("a codec that is not assigned", produce(build_batch(attributes=5))),
        ("a control batch", produce(build_batch(attributes=0x20))),
        ("more records than offsets", produce(build_batch(last_offset_delta=3))),
        (
            "a transactional batch",
            produce(build_batch(attributes=0x10, producer_id=1, producer_epoch=0, base_sequence=0)),
        ),
        ("good", produce(hello)),
        ("two batches", produce(hello * 2)),
        ("offset -1", fetch(-1)),
        ("an unknown partition", fetch(partition=2)),
        ("partition -1", fetch(partition=-1)),
        ("an unknown topic id", fetch(topic_id=nobody)),
        ("a topic id of zeros", fetch(topic_id=UUID(int=0))),
        ("a leader epoch to come", fetch(epoch=5)),
        ("an unknown session", fetch(session_id=77, session_epoch=1)),
        ("negative sizes", fetch(min_bytes=-1, max_bytes=-1)),
        ("less than one batch", fetch(max_bytes=1)),
        ("an unknown topic", offsets(-1, name="nowhere")),
        ("an unknown partition", offsets(-1, partition=2)),
        ("a leader epoch to come", offsets(-1, epoch=5)),
        ("-4, the earliest local one", offsets(-4, version=8)),
        ("-5, the latest tiered one", offsets(-5, version=9)),
        ("-6", offsets(-6)),
        ("-3, before there was such", offsets(-3, version=6)),
        ("-4, before there was such", offsets(-4, version=7)),
        ("the same partition twice", offsets(-1, times=2)),
        ("time 0", offsets(0)),
        ("highest timestamp, of nothing", offsets(-3, partition=1)),
        ("earliest, of nothing", offsets(-2, partition=1)),
        ("an unknown kind", request(10, 4, key_type=9, coordinator_keys=("a",))),
        ("of an empty group", request(10, 4, key_type=0, coordinator_keys=("",))),
        ("of a transaction", request(10, 4, key_type=1, coordinator_keys=("a",))),
        ("of no groups", request(10, 4, key_type=0, coordinator_keys=())),
        ("an unknown kind of resource", configs(99, "a")),
        ("another broker's", configs(4, "77", "num.partitions")),
        ("no broker's", configs(4, "x")),
        ("a name that cannot be", configs(2, "a/b")),
        ("keys that are not there", configs(2, "foo", "no.such")),
        (
            "controllers",
            request(
                60,
                2,
                include_cluster_authorized_operations=False,
                endpoint_type=2,
                include_fenced_brokers=False,
            ),
        ),
        ("a limit of 0", describe("foo", limit=0)),
        ("a name that cannot be", describe("a/b")),
        ("a cursor at partition -1", describe("foo", cursor={"topic_name": "foo", "partition_index": -1})),
        (
            "a cursor at a partition too many",
            describe("foo", cursor={"topic_name": "foo", "partition_index": 9}),
        ),
        ("twice the same", describe("foo", "foo")),
        ("as many as there are", grow("foo", 2)),
        ("negative", grow("foo", -1)),
        ("assigned too few", grow("foo", 4, [(1,)])),
        ("validate only", grow("foo", 3, validate_only=True)),
        ("unknown id", delete((None, nobody))),
        ("by name and by id", delete(("foo", foo))),
        ("twice in one request", delete(("foo", None), ("foo", None))),
        ("neither name nor id", delete((None, None))),
        ("by id", delete((None, foo))),
        ("deleted", fetch()),
        ("deleted, by name", offsets(-1)),
    ]
    return unanswered({"foo": foo}, requests)


def idempotence() -> Golden:
    """What an idempotent producer does when all goes well, and when not; and who knows of it."""
    second = timedelta(seconds=1)

    def init(producer_id: int = -1, epoch: int = -1, transactional_id: str | None = None) -> bytes:
        known = {"producer_id": producer_id, "producer_epoch": epoch}
        return request(22, 4, transactional_id=transactional_id, transaction_timeout=second, **known)

    def produce(sequence: int, count: int = 1, epoch: int = 0, producer_id: int = 0, times: int = 1) -> bytes:
        batch = build_batch(
            b"".join(bytes((12, 0, 0, 2 * number, 0, 0, 0)) for number in range(count)),
            records=count,
            producer_id=producer_id,
            producer_epoch=epoch,
            base_sequence=sequence,
        )
        data = [{"name": "foo", "partition_data": [{"index": 0, "records": batch * times}]}]
        return request(0, 11, acks=-1, timeout=second, topic_data=data)

    def producers(*partitions: int, name: str = "foo") -> bytes:
        return request(61, 0, topics=[{"name": name, "partition_indexes": partitions}])

    part = {"partition": 0, "fetch_offset": 0, "partition_max_bytes": 2**20, "current_leader_epoch": -1}
    fetch = {"max_wait": timedelta(0), "min_bytes": 1, "forgotten_topics_data": ()}
    sizes = {"num_partitions": 2, "replication_factor": 1, "assignments": (), "configs": ()}
    delete = [{"name": "foo", "partitions": [{"partition_index": 0, "offset": 3}]}]
    requests = [
        ("two partitions", request(19, 7, topics=[{"name": "foo", **sizes}])),
        ("a new one", init()),
        ("another", init()),
        ("one that has an id, for a higher epoch", init(0, 0)),
        ("one that never had that id", init(77, 3)),
        ("an id without an epoch", init(0, -1)),
        ("an epoch without an id", init(-1, 0)),
        ("nobody yet", producers(0, 1)),
        ("the first batch", produce(0)),
        ("three records", produce(1, 3)),
        ("the first again", produce(0)),
        ("the second again", produce(1, 3)),
        ("the second with less in it", produce(1, 2)),
        ("within the second", produce(2)),
        ("two together", produce(1, 4)),
        ("a gap", produce(7)),
        ("no sequence", produce(-1)),
        ("the next", produce(4)),
        ("two batches in a request", produce(5, times=2)),
        ("one", producers(0, 1, 0)),
        ("a new epoch, not from 0 on", produce(5, epoch=1)),
        ("a new epoch", produce(0, epoch=1)),
        ("an old epoch", produce(5)),
        ("an old epoch from 0 on", produce(0)),
        *((f"number {number} of the new epoch", produce(number, epoch=1)) for number in range(1, 6)),
        ("the fifth before the last again", produce(1, epoch=1)),
        ("the sixth before the last again", produce(0, epoch=1)),
        ("another producer", produce(0, 2, producer_id=1)),
        ("an id that was never given out", produce(0, producer_id=10**15)),
        ("an unknown producer, not from 0 on", produce(3, producer_id=2)),
        ("no epoch", produce(0, epoch=-1, producer_id=3)),
        ("all of it", request(1, 12, **fetch, topics=[{"topic": "foo", "partitions": [part]}])),
        ("what is before 3", request(21, 2, topics=delete, timeout=second)),
        ("the last again, after a deletion", produce(5, epoch=1)),
        ("an unknown partition", producers(2)),
        ("an unknown topic", producers(0, name="nowhere")),
    ]
    return unanswered({}, requests)


def administration() -> Golden:
    """APIs that tools use, asked well and badly."""
    second = timedelta(seconds=1)
    part = {"index": 0, "records": stages.spelled(stages.HELLO_WORLD)}
    produce = [{"name": "foo", "partition_data": [part]}]
    sizes = {"num_partitions": 2, "replication_factor": 1, "assignments": (), "configs": ()}

    def delete(*offsets: tuple[int, int], name: str = "foo") -> bytes:
        parts = [{"partition_index": partition, "offset": offset} for partition, offset in offsets]
        return request(21, 2, topics=[{"name": name, "partitions": parts}], timeout=second)

    def epoch(asked: int, current: int = -1, partition: int = 0, name: str = "foo") -> bytes:
        part = {"partition": partition, "leader_epoch": asked, "current_leader_epoch": current}
        return request(23, 4, replica_id=-1, topics=[{"topic": name, "partitions": [part]}])

    def replace(kind: int, name: str, *configs: tuple[str, str | None], validate_only: bool = False) -> bytes:
        rows = [{"name": key, "value": value} for key, value in configs]
        resource = {"resource_type": kind, "resource_name": name, "configs": rows}
        return request(33, 2, resources=[resource], validate_only=validate_only)

    def change(
        kind: int, name: str, *configs: tuple[str, int, str | None], validate_only: bool = False
    ) -> bytes:
        rows = [{"name": key, "config_operation": how, "value": value} for key, how, value in configs]
        resource = {"resource_type": kind, "resource_name": name, "configs": rows}
        return request(44, 1, resources=[resource], validate_only=validate_only)

    def configs(kind: int, name: str, *keys: str) -> bytes:
        asked = {"resource_type": kind, "resource_name": name, "configuration_keys": keys}
        return request(32, 4, resources=[asked])

    def elect(*partitions: int, kind: int = 0, name: str = "foo") -> bytes:
        topics = [{"topic": name, "partitions": partitions}]
        return request(43, 2, election_type=kind, topic_partitions=topics, timeout=second)

    def reassign(partition: int, replicas: Sequence[int] | None, name: str = "foo") -> bytes:
        topics = [{"name": name, "partitions": [{"partition_index": partition, "replicas": replicas}]}]
        return request(45, 1, timeout=second, topics=topics)

    def moving(topics: Sequence[dict[str, Any]] | None) -> bytes:
        return request(46, 0, timeout=second, topics=topics)

    def resources(*types: int) -> bytes:
        return request(74, 1, resource_types=types)

    requests = [
        ("two partitions", request(19, 7, topics=[{"name": "foo", **sizes}])),
        *[("a batch", request(0, 11, acks=-1, timeout=second, topic_data=produce))] * 3,
        ("the first", delete((0, 1))),
        ("none", delete((0, 0), (1, 0))),
        ("behind the end", delete((0, 4))),
        ("offset -2", delete((0, -2))),
        ("all", delete((0, -1))),
        ("an unknown partition", delete((2, 0))),
        ("an unknown topic", delete((0, 0), name="nowhere")),
        ("the only one", epoch(0)),
        ("the only one, of nothing", epoch(0, partition=1)),
        ("one to come", epoch(1)),
        ("one to come as the current one", epoch(0, current=1)),
        ("none", epoch(-1)),
        ("an unknown partition", epoch(0, partition=2)),
        ("an unknown topic", epoch(0, name="nowhere")),
        ("of a topic", replace(2, "foo", ("retention.ms", "5"), ("segment.ms", "6"))),
        ("of a topic, validate only", replace(2, "foo", validate_only=True)),
        ("to a topic that has it not", replace(2, "foo", ("no.such", "5"))),
        ("with a value that cannot be", replace(2, "foo", ("retention.ms", "soon"))),
        ("with null", replace(2, "foo", ("retention.ms", None))),
        ("with a config twice", replace(2, "foo", ("retention.ms", "5"), ("retention.ms", "5"))),
        ("of an unknown topic", replace(2, "nowhere", ("retention.ms", "5"))),
        ("as they were replaced", configs(2, "foo", "retention.ms", "segment.ms")),
        ("one away, one added", change(2, "foo", ("retention.ms", 1, None), ("flush.ms", 0, "7"))),
        ("of a list", change(2, "foo", ("cleanup.policy", 2, "delete"))),
        ("appended to no list", change(2, "foo", ("retention.ms", 2, "5"))),
        ("by an unknown operation", change(2, "foo", ("retention.ms", 9, "5"))),
        ("validate only", change(2, "foo", ("retention.ms", 0, "5"), validate_only=True)),
        ("of an unknown topic", change(2, "nowhere", ("retention.ms", 0, "5"))),
        ("of no topic", change(2, "", ("retention.ms", 0, "5"))),
        ("as they were changed", configs(2, "foo", "retention.ms", "segment.ms", "flush.ms")),
        ("of all brokers", change(4, "", ("log.retention.ms", 0, "99"))),
        ("that a broker cannot change", change(4, "", ("node.id", 0, "99"))),
        ("with a value that a broker cannot have", change(4, "", ("num.partitions", 0, "x"))),
        ("of all brokers", configs(4, "")),
        ("what brokers have been changed to", configs(2, "foo", "retention.ms")),
        ("of nobody knows what", change(99, "foo", ("a", 0, "b"))),
        ("topics and brokers", resources(2, 4)),
        ("groups and metrics", resources(16, 32)),
        ("of an unknown type", resources(99)),
        ("of each partition", elect(0, 1)),
        ("unclean", elect(0, kind=1)),
        ("an unknown partition", elect(2)),
        ("an unknown topic", elect(0, name="nowhere")),
        ("all", request(43, 2, election_type=0, topic_partitions=None, timeout=second)),
        ("to where it is", reassign(0, (1,))),
        ("to another broker", reassign(0, (77,))),
        ("to nobody", reassign(0, ())),
        ("not any more", reassign(0, None)),
        ("an unknown partition", reassign(2, (1,))),
        ("an unknown topic", reassign(0, (1,), name="nowhere")),
        ("all", moving(None)),
        ("some", moving([{"name": "foo", "partition_indexes": (0, 7)}])),
        ("nothing", request(57, 2, timeout=second, feature_updates=(), validate_only=False)),
        (
            "an unknown one",
            request(
                57,
                2,
                timeout=second,
                feature_updates=[{"feature": "no.such", "max_version_level": 1, "upgrade_type": 1}],
                validate_only=False,
            ),
        ),
        ("of a topic", request(35, 4, topics=[{"topic": "foo", "partitions": (0, 1, 2)}])),
        ("of an unknown topic", request(35, 4, topics=[{"topic": "nowhere", "partitions": (0,)}])),
    ]
    return unanswered({}, requests)


def payload(text: str) -> bytes:
    return stages.spelled(text)[4:]


def request(api_key: int, version: int, **fields: Any) -> bytes:
    schema: Any = load_request_schema(api_key, version)
    header = schema.__header_schema__
    out = io.BytesIO()
    named = {"request_api_key": api_key, "request_api_version": version, "correlation_id": 7}
    entity_writer(header)(out, build(header, {**named, "client_id": "golden"}))
    entity_writer(schema)(out, build(schema, fields))
    return out.getvalue()


def unanswered(topic_ids: dict[str, UUID], requests: Sequence[tuple[str, bytes]]) -> Golden:
    exchanges = [
        Exchange(name, api_name(sent), sent, asks(sent, topic_ids), answer={}) for name, sent in requests
    ]
    return Golden("requests made by hand", topic_ids, exchanges)


BY_HAND: dict[str, Callable[[], Golden]] = {
    "by-hand": stages_and_ids,
    "mistakes": mistakes,
    "idempotence": idempotence,
    "administration": administration,
}
