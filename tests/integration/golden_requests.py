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


BY_HAND: dict[str, Callable[[], Golden]] = {"by-hand": stages_and_ids, "mistakes": mistakes}
