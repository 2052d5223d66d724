"""Every API and version that the broker offers, asked in several ways; and those that it does not offer."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
import socket
import struct
import sys
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias
from uuid import UUID, uuid4

import pytest
from kio.index import load_request_schema
from kio.schema.errors import ErrorCode

from dray.broker import Broker, open_broker
from dray.config import Given, load_settings
from dray.handlers import dispatch, kept
from dray.handlers.rejected import REJECTED
from dray.handlers.table import ADVERTISED, APIS
from dray.log.read import LogReader
from dray.protocol.codec import encode_response
from tests import wire
from tests.batches import build_batch

# Requirements, A12: what Kafka 4.1 offers of these, written down here once more.
OFFERED = {
    "Produce": (0, 0, 13),
    "Fetch": (1, 4, 17),
    "ListOffsets": (2, 1, 10),
    "Metadata": (3, 0, 13),
    "OffsetCommit": (8, 2, 9),
    "OffsetFetch": (9, 1, 9),
    "FindCoordinator": (10, 0, 6),
    "JoinGroup": (11, 0, 9),
    "Heartbeat": (12, 0, 4),
    "LeaveGroup": (13, 0, 5),
    "SyncGroup": (14, 0, 5),
    "DescribeGroups": (15, 0, 6),
    "ListGroups": (16, 0, 5),
    "ApiVersions": (18, 0, 4),
    "CreateTopics": (19, 2, 7),
    "DeleteTopics": (20, 1, 6),
    "DeleteRecords": (21, 0, 2),
    "InitProducerId": (22, 0, 5),
    "OffsetForLeaderEpoch": (23, 2, 4),
    "DescribeConfigs": (32, 1, 4),
    "AlterConfigs": (33, 0, 2),
    "DescribeLogDirs": (35, 1, 4),
    "CreatePartitions": (37, 0, 3),
    "DeleteGroups": (42, 0, 2),
    "ElectLeaders": (43, 0, 2),
    "IncrementalAlterConfigs": (44, 0, 1),
    "AlterPartitionReassignments": (45, 0, 1),
    "ListPartitionReassignments": (46, 0, 0),
    "OffsetDelete": (47, 0, 0),
    "UpdateFeatures": (57, 0, 2),
    "DescribeCluster": (60, 0, 2),
    "DescribeProducers": (61, 0, 0),
    "ConsumerGroupHeartbeat": (68, 0, 1),
    "ConsumerGroupDescribe": (69, 0, 1),
    "ListConfigResources": (74, 0, 1),
    "DescribeTopicPartitions": (75, 0, 0),
}
# Kafka without a receiver of telemetry does not tell of these, and answers them.
UNTOLD = {"GetTelemetrySubscriptions": (71, 0, 0), "PushTelemetry": (72, 0, 0)}
SERVED = [
    (key, version)
    for key, first, last in [*OFFERED.values(), *UNTOLD.values()]
    for version in range(3 if key == 0 else first, last + 1)  # Produce 0 to 2 are only said to be there
]
NOWHERE = UUID(int=77)
OK = ErrorCode.none
UNKNOWN = ErrorCode.unknown_topic_or_partition
UNKNOWN_ID = ErrorCode.unknown_topic_id
BAD = ErrorCode.invalid_request
NO_GROUP_ID = ErrorCode.invalid_group_id
NO_GROUP = ErrorCode.group_id_not_found
NO_MEMBER = ErrorCode.unknown_member_id


class Client:
    def __init__(self, broker: Broker) -> None:
        assert broker.address is not None
        self._port = broker.address.port
        self.topic_id = NOWHERE
        self.member_id = ""  # of the one member of the group `classic`

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self._port)

    async def exchange(self, payload: bytes) -> bytes | None:
        reader, writer = await self.connect()
        try:
            writer.write(wire.framed(payload))
            async with asyncio.timeout(20):
                return await wire.read_frame(reader)
        finally:
            writer.close()
            await asyncio.gather(writer.wait_closed(), return_exceptions=True)

    async def ask(self, api_key: int, version: int, fields: wire.Fields) -> Any:
        fit = wire.fitting(load_request_schema(api_key, version), fields)
        answer = await self.exchange(wire.request(api_key, version, fit, correlation_id=-5))
        assert answer is not None, "the connection was closed"
        correlation_id, body = wire.decode(api_key, version, answer)
        assert correlation_id == -5
        return body


@pytest.fixture(scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Client]:
    async with open_broker(_settings(tmp_path_factory.mktemp("broker"))) as broker:
        one = Client(broker)
        created = await one.ask(19, 7, {"topics": [new_topic("known", 2)]})
        assert created.topics[0].error_code is OK
        one.topic_id = created.topics[0].topic_id
        joined = await one.ask(11, 3, join("classic"))
        one.member_id = joined.member_id
        synced = await one.ask(14, 3, sync("classic", one.member_id, joined.generation_id))
        beaten = await one.ask(68, 1, beat("consumer", "m", subscribed_topic_names=["known"]))
        codes = [answer.error_code for answer in (joined, synced, beaten)]
        assert (codes, joined.generation_id, beaten.member_epoch) == ([OK] * 3, 1, 1)
        yield one


def join(group: str, member: str = "", session_ms: int = 1_800_000, **more: Any) -> dict[str, Any]:
    """Members of a test that do not say otherwise live for half an hour without a heartbeat."""
    timeouts = {"session_timeout": _ms(session_ms), "rebalance_timeout": _ms(60_000)}
    protocols = [{"name": "range", "metadata": b"\0" * 10}]
    fields = {"group_id": group, "member_id": member, "protocol_type": "consumer", "protocols": protocols}
    return {**timeouts, **fields, **more}


def sync(group: str, member: str, generation: int, **more: Any) -> dict[str, Any]:
    named = {"protocol_type": "consumer", "protocol_name": "range"}
    return {"group_id": group, "member_id": member, "generation_id": generation, **named, **more}


def beat(group: str, member: str, epoch: int = 0, **more: Any) -> dict[str, Any]:
    """One that joins does so with a subscription to nothing; others stay with theirs."""
    who = {"group_id": group, "member_id": member, "member_epoch": epoch, "topic_partitions": ()}
    subscribed = None if epoch else ()
    return {**who, "subscribed_topic_names": subscribed, "rebalance_timeout": _ms(60_000), **more}


def _ms(milliseconds: int) -> timedelta:
    return timedelta(milliseconds=milliseconds)


def _settings(data: Path, **more: str) -> Any:
    given = {"data": str(data), "listen": "127.0.0.1:0", "auto.create.topics.enable": "false"}
    given |= {"group.initial.rebalance.delay.ms": "0", **more}
    return load_settings(arguments=[Given(name, text, "test") for name, text in given.items()], environ={})


@pytest.fixture(autouse=True)
def nothing_unexpected(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Whatever is asked, nothing happens that nobody thought of."""
    yield
    logged = caplog.get_records("call")
    assert [record.getMessage() for record in logged if record.levelno >= logging.ERROR] == []


def codes_in(body: Any) -> set[ErrorCode]:
    if isinstance(body, ErrorCode):
        return {body}
    if isinstance(body, tuple):
        return set().union(*map(codes_in, body))
    if dataclasses.is_dataclass(body):
        return set().union(*(codes_in(getattr(body, each.name)) for each in dataclasses.fields(body)))
    return set()


def test_what_is_offered_is_what_was_promised() -> None:
    assert {tuple(versions) for versions in ADVERTISED} == set(OFFERED.values())
    served = OFFERED | UNTOLD
    assert {api.name: key for key, api in APIS.items()} == {name: row[0] for name, row in served.items()}


@pytest.mark.parametrize("version", range(5))
async def test_clients_are_told_what_is_offered(client: Client, version: int) -> None:
    software = {"client_software_name": "wire", "client_software_version": "1.0"}
    body = await client.ask(18, version, software)
    assert body.error_code is OK
    offered = {(each.api_key, each.min_version, each.max_version) for each in body.api_keys}
    assert offered == set(OFFERED.values())


# A Kafka 4.2 broker says so of empty names.
OF_NOTHING = {
    **{key: {NO_GROUP_ID} for key in (11, 12, 13, 14, 47)},
    68: {BAD},
    72: {BAD},
}


@pytest.mark.parametrize(("api_key", "version"), SERVED)
async def test_every_version_answers_an_empty_request(client: Client, api_key: int, version: int) -> None:
    codes = codes_in(await client.ask(api_key, version, {"acks": 1, "topics": (), "transactional_id": None}))
    if (api_key, version) in ((18, 3), (18, 4)):
        expected = {BAD}
    elif (api_key, version) == (14, 5):
        expected = {ErrorCode.inconsistent_group_protocol}
    else:
        expected = OF_NOTHING.get(api_key, {OK})
    assert codes == expected or (codes == set() and OK in expected)


def new_topic(name: str, partitions: int) -> dict[str, Any]:
    return {"name": name, "num_partitions": partitions, "replication_factor": 1}


def by_name_or_id(name: str, topic_id: UUID, **more: Any) -> dict[str, Any]:
    return {"name": name, "topic": name, "topic_id": topic_id, **more}


Shape: TypeAlias = tuple[dict[str, Any], set[ErrorCode]]


def alterations(alter: Callable[..., dict[str, Any]]) -> list[Shape]:
    """Of both APIs that alter configs; the codes are those of a Kafka 4.2 broker, but for what it can and
    Dray cannot."""
    good = ("retention.ms", "5")
    once, unknown = alter(2, "known", good), alter(2, "missing", good)
    return [
        (alter(2, "known", good), {OK}),
        (alter(2, "known", ("retention.ms", "6"), validate_only=True), {OK}),
        (alter(2, "known"), {OK}),
        (alter(2, "known", good, ("nope", "1")), {ErrorCode.invalid_config}),
        (alter(2, "known", ("max.message.bytes", "x")), {ErrorCode.invalid_config}),
        (alter(2, "known", ("max.message.bytes", "x"), validate_only=True), {ErrorCode.invalid_config}),
        (alter(2, "known", ("max.message.bytes", "1" * 32_000)), {ErrorCode.invalid_config}),
        (alter(2, "known", ("", "1")), {ErrorCode.invalid_config}),
        (alter(2, "known", ("retention.ms\0", "1")), {ErrorCode.invalid_config}),
        (alter(2, "known", ("\U0001f40d" * 8_000, "1")), {ErrorCode.invalid_config}),
        (alter(2, "known", ("retention.ms", None)), {BAD}),
        (alter(2, "known", good, good), {BAD}),
        ({"resources": once["resources"] * 2}, {BAD}),
        (unknown, {UNKNOWN}),
        ({"resources": [*once["resources"], *unknown["resources"]]}, {OK, UNKNOWN}),
        (alter(2, "", good), {BAD}),
        (alter(2, "no/name", good), {ErrorCode.invalid_topic_exception}),
        (alter(4, "", ("log.retention.ms", "5")), {OK}),
        (alter(4, "", ("log.retention.ms", "x")), {BAD}),
        (alter(4, "", ("node.id", "5")), {BAD}),
        (alter(4, "", ("nope", "5")), {BAD}),
        (alter(4, "0", ("log.retention.ms", "5")), {BAD}),
        (alter(4, "x", ("log.retention.ms", "5")), {BAD}),
        (alter(8, "0", ("root", "DEBUG")), {BAD}),
        (alter(16, "metrics", ("interval.ms", "100")), {BAD}),
        (alter(32, "group", ("consumer.session.timeout.ms", "45000")), {BAD}),
        (alter(0, "x"), {BAD}),
        (alter(99, "x"), {BAD}),
    ]


def group_shapes(client: Client) -> dict[int, list[Shape]]:
    """Of the APIs of groups. Codes that come of some versions only are among those of the others."""
    member, long_id = client.member_id, "/" * 1001
    mixed, generation = ErrorCode.inconsistent_group_protocol, ErrorCode.illegal_generation
    timeout, told_an_id = ErrorCode.invalid_session_timeout, ErrorCode.member_id_required
    largest, smallest = 2**31 - 1, -(2**31)

    def fresh() -> str:
        return f"fresh/{uuid4()}"

    def lives(group: str, member_id: str, number: int, **more: Any) -> dict[str, Any]:
        return {"group_id": group, "member_id": member_id, "generation_id": number, **more}

    def leave(group: str, *members: tuple[str, str | None]) -> dict[str, Any]:
        leaving = [{"member_id": each, "group_instance_id": instance} for each, instance in members]
        return {"group_id": group, "member_id": members[0][0] if members else "", "members": leaving}

    def commit(
        group: str, member_id: str, age: int, *offsets: tuple[str, int, int], **more: Any
    ) -> dict[str, Any]:
        topics = [
            {"name": name, "partitions": [{"partition_index": index, "committed_offset": offset, **more}]}
            for name, index, offset in offsets
        ]
        who = {"group_id": group, "member_id": member_id, "generation_id_or_member_epoch": age}
        return {**who, "retention_time": _ms(-1), "topics": topics}

    def fetch(group: str, *asked: tuple[str, list[int]], **more: Any) -> dict[str, Any]:
        topics = [{"name": name, "partition_indexes": indexes} for name, indexes in asked]
        one = {"group_id": group, "topics": topics, **more}
        return {"group_id": group, "topics": topics, "groups": [one, one], "require_stable": True}

    def delete(group: str, *offsets: tuple[str, int]) -> dict[str, Any]:
        topics = [{"name": name, "partitions": [{"partition_index": index}]} for name, index in offsets]
        return {"group_id": group, "topics": topics}

    def owns(partitions: list[int], topic_id: UUID = client.topic_id) -> dict[str, Any]:
        return {"topic_partitions": [{"topic_id": topic_id, "partitions": partitions}] * 2}

    def by_pattern(regex: str) -> dict[str, Any]:
        return beat(fresh(), "m", subscribed_topic_names=None, subscribed_topic_regex=regex)

    of_known, too_long = ("known", 0, 5), ErrorCode.offset_metadata_too_large
    stale, fenced = ErrorCode.stale_member_epoch, ErrorCode.fenced_member_epoch
    no_epochs = ErrorCode.unsupported_version  # before OffsetCommit 9
    no_pattern = {BAD, ErrorCode.invalid_regular_expression}  # version 0 has none, and so no subscription
    return {
        8: [
            (commit("classic", member, 1, of_known), {OK}),
            (commit("classic", member, 1, of_known, ("missing", 0, 1)), {OK, UNKNOWN}),
            (commit("classic", member, 1, ("known", 0, -(2**63)), ("known", 1, 2**63 - 1)), {OK}),
            (commit("classic", member, 1, ("known", -1, 0), ("known", largest, 0)), {UNKNOWN}),
            (commit("classic", member, 1, ("", 0, 0), ("no/name", 0, 0)), {UNKNOWN}),
            (commit("classic", member, 1, of_known, committed_metadata="x" * 4097), {too_long}),
            (commit("classic", member, 1, of_known, committed_metadata=None), {OK}),
            (commit("classic", member, 2, of_known), {generation}),
            (commit("classic", member, -1, of_known), {generation}),
            (commit("classic", member, smallest, of_known), {generation}),
            (commit("classic", "nobody", 1, of_known), {NO_MEMBER}),
            (commit("classic", "", -1, of_known), {NO_MEMBER}),
            ({**commit("classic", member, 1, of_known), "group_instance_id": "i"}, {OK, NO_MEMBER}),
            (commit("consumer", "m", 1, of_known), {OK, no_epochs}),
            (commit("consumer", "m", 2, of_known), {stale, no_epochs}),
            (commit("consumer", "nobody", 1, of_known), {NO_MEMBER}),
            (commit("consumer", "", -1, of_known), {NO_MEMBER}),
            (commit("simple", "", -1, of_known), {OK}),
            (commit("simple", "nobody", -1, of_known), {OK}),
            (commit("simple", "nobody", 0, of_known), {NO_MEMBER}),
            (commit(fresh(), "nobody", 0, of_known), {generation, NO_GROUP}),
            (commit("", "", -1, of_known), {OK}),
            (commit("a\0b %/\U0001f40d", "", -1, of_known), {OK}),
            (commit(long_id, "", -1, of_known), {NO_GROUP_ID}),
        ],
        9: [
            (fetch("classic", ("known", [0, 1, 0, -1, largest]), ("missing", [0]), ("", [0])), {OK}),
            (fetch("classic", ("known", []), ("known", [0])), {OK}),
            (fetch(fresh(), ("known", [0])), {OK}),
            (fetch("", ("known", [0])), {OK}),
            (fetch(long_id, ("known", [0])), {NO_GROUP_ID}),
            (fetch("classic", ("known", [0]), member_id="nobody", member_epoch=-7), {OK}),
            (fetch("consumer", ("known", [0]), member_id="m", member_epoch=1), {OK}),
            (fetch("consumer", ("known", [0]), member_id="m", member_epoch=2), {OK, stale}),
            (fetch("consumer", ("known", [0]), member_id="nobody", member_epoch=1), {OK, NO_MEMBER}),
        ],
        11: [
            (join(fresh()), {OK, told_an_id}),
            (join(fresh(), group_instance_id="/\0"), {OK, told_an_id}),
            (join(fresh(), rebalance_timeout=_ms(smallest)), {OK, told_an_id}),
            (join(fresh(), rebalance_timeout=_ms(largest)), {OK, told_an_id}),
            (
                join(fresh(), protocols=[{"name": f"p{n}", "metadata": b"x"} for n in range(999)]),
                {OK, told_an_id},
            ),
            (join(fresh(), protocols=[{"name": "", "metadata": b""}] * 2), {OK, told_an_id}),
            (join("a\0b %%/\U0001f40d", "nobody"), {NO_MEMBER}),
            (join(fresh(), "nobody"), {NO_MEMBER}),
            (join("classic", "nobody"), {NO_MEMBER}),
            (join(""), {NO_GROUP_ID}),
            (join(long_id), {NO_GROUP_ID}),
            (join(fresh(), protocol_type=""), {mixed}),
            (join(fresh(), protocols=()), {mixed}),
            (join("classic", protocol_type="connect"), {mixed}),
            (join("classic", protocols=[{"name": "other", "metadata": b""}]), {mixed}),
            (join("consumer"), {mixed}),
            *((join(fresh(), "", ms), {timeout}) for ms in (smallest, -1, 0, 5_999, 1_800_001, largest)),
        ],
        12: [
            (lives("classic", member, 1), {OK}),
            (lives("classic", member, 1, group_instance_id="i"), {OK, NO_MEMBER}),
            *((lives("classic", member, number), {generation}) for number in (2, 0, -1, smallest, largest)),
            (lives("classic", "nobody", 1), {NO_MEMBER}),
            (lives("classic", "", 1), {NO_MEMBER}),
            (lives("consumer", "m", 1), {NO_MEMBER}),
            (lives(fresh(), "nobody", 1), {NO_MEMBER}),
            (lives(long_id, "nobody", 1), {NO_GROUP_ID}),
        ],
        13: [
            (leave("classic", ("nobody", None), ("nobody", None), ("", "i")), {OK, NO_MEMBER}),
            (leave(fresh(), ("nobody", None)), {OK, NO_MEMBER}),
            (leave("consumer", ("nobody", None)), {OK, NO_MEMBER}),
            (leave("classic"), {OK, NO_MEMBER}),
            (leave(long_id, ("nobody", None)), {NO_GROUP_ID}),
        ],
        14: [
            (sync("classic", member, 1), {OK}),
            (sync("classic", member, 1, assignments=[{"member_id": "x", "assignment": b"y"}] * 2), {OK}),
            (sync("classic", member, 2), {generation}),
            (sync("classic", member, smallest), {generation}),
            (sync("classic", "nobody", 1), {NO_MEMBER}),
            (sync("classic", member, 1, protocol_type="connect"), {OK, mixed}),
            (sync("classic", member, 1, protocol_name=""), {OK, mixed}),
            (sync("classic", member, 1, protocol_name=None), {OK, mixed}),
            (sync("consumer", "m", 1), {NO_MEMBER}),
            (sync(long_id, "m", 1), {NO_GROUP_ID}),
        ],
        15: [
            ({"groups": ["classic"], "include_authorized_operations": True}, {OK}),
            ({"groups": ["classic", fresh(), "", "consumer", "classic"]}, {OK, NO_GROUP}),
            ({"groups": [long_id]}, {NO_GROUP_ID}),
        ],
        16: [
            ({"states_filter": [], "types_filter": []}, {OK}),
            ({"states_filter": ["", "STABLE", "x" * 30_000], "types_filter": ["nope"]}, {OK}),
        ],
        42: [
            ({"groups_names": ["classic", "consumer"]}, {ErrorCode.non_empty_group}),
            ({"groups_names": [fresh(), fresh()]}, {NO_GROUP}),
            ({"groups_names": [long_id]}, {NO_GROUP_ID}),
        ],
        47: [
            (delete("simple", ("known", 0), ("known", 0), ("known", 1)), {OK}),
            (delete("simple", ("known", -1), ("missing", 0), ("", 0)), {OK, UNKNOWN}),
            (delete("consumer", ("known", 0)), {OK, ErrorCode.group_subscribed_to_topic}),  # OK of the whole
            (delete(fresh(), ("known", 0)), {NO_GROUP}),
            (delete(fresh(), ("missing", 0)), {NO_GROUP}),
            (delete("", ("known", 0)), {NO_GROUP_ID}),
            (delete(long_id, ("known", 0)), {NO_GROUP_ID}),
        ],
        68: [
            (beat("consumer", "m", 1), {OK}),
            (beat("consumer", "m", 1, **owns([0, 1, 1])), {OK}),
            (beat("consumer", "m", 1, **owns([-1, smallest, largest])), {OK}),
            (beat("consumer", "m", 1, **owns([0], NOWHERE)), {OK}),
            (beat("consumer", "m", 2), {fenced}),
            (beat("consumer", "m", largest), {fenced}),
            (beat("consumer", "m", 1, instance_id="i"), {NO_MEMBER}),
            (beat("consumer", "nobody", 1), {NO_MEMBER}),
            (beat("consumer", "nobody", -1), {NO_MEMBER}),
            (beat("consumer", "nobody", -2, instance_id="i"), {NO_MEMBER}),
            (beat("consumer", "m", -2), {BAD}),
            (beat("consumer", "m", -3), {BAD}),
            (beat("consumer", "m", smallest), {BAD}),
            (beat("classic", "m"), {NO_GROUP}),
            (beat(fresh(), "m", 1), {NO_GROUP}),
            (beat("", "m"), {BAD}),
            (beat(long_id, "m"), {NO_GROUP_ID}),
            (beat(fresh(), ""), {OK, BAD}),
            (beat(fresh(), "m", subscribed_topic_names=["known", "known", "", "no/name"]), {OK}),
            (beat(fresh(), "m", subscribed_topic_names=None), {BAD}),
            (beat(fresh(), "m", topic_partitions=None), {BAD}),
            (beat(fresh(), "m", **owns([0])), {BAD}),
            (beat(fresh(), "m", instance_id=""), {BAD}),
            (beat(fresh(), "m", rack_id=""), {BAD}),
            (beat(fresh(), "m", rebalance_timeout=_ms(-1)), {BAD}),
            (beat(fresh(), "m", rebalance_timeout=_ms(largest)), {OK}),
            (beat(fresh(), "m", rebalance_timeout=_ms(smallest)), {OK}),
            (beat(fresh(), "m", server_assignor="nope"), {ErrorCode.unsupported_assignor}),
            (by_pattern("known|[a-z]+"), {OK, BAD}),
            *((by_pattern(regex), no_pattern) for regex in ("[", "*", r"(a)\1", "(?=a)", "a{1001}")),
        ],
        69: [
            ({"group_ids": ["consumer", "consumer"], "include_authorized_operations": True}, {OK}),
            ({"group_ids": [fresh(), "classic"]}, {NO_GROUP}),
            ({"group_ids": [""]}, {NO_GROUP_ID}),
            ({"group_ids": [long_id]}, {NO_GROUP_ID}),
        ],
    }


def shapes(client: Client) -> dict[int, list[Shape]]:
    """Per API, what to ask and the errors to expect; where ids came in, their error stands for the name's."""
    known = ("known", client.topic_id)
    missing = ("missing", NOWHERE)
    batch = build_batch()
    corrupt = batch[:-1] + bytes([batch[-1] ^ 1])

    def produce(topic: tuple[str, UUID], index: int, records: bytes | None, acks: int = -1) -> dict[str, Any]:
        data = by_name_or_id(*topic, partition_data=[{"index": index, "records": records}])
        return {"acks": acks, "timeout": timedelta(seconds=10), "topic_data": [data]}

    def fetch(topic: tuple[str, UUID], partition: int, offset: int, **more: Any) -> dict[str, Any]:
        part = {"partition": partition, "fetch_offset": offset, "partition_max_bytes": 1000, **more}
        return {"max_bytes": 1000, "topics": [by_name_or_id(*topic, partitions=[part])]}

    def offsets(name: str, partition: int, timestamp: int) -> dict[str, Any]:
        part = {"partition_index": partition, "timestamp": timestamp, "current_leader_epoch": -1}
        return {"replica_id": -1, "topics": [{"name": name, "partitions": [part]}]}

    def configs(kind: int, name: str, keys: list[str] | None) -> dict[str, Any]:
        resource = {"resource_type": kind, "resource_name": name, "configuration_keys": keys}
        return {"resources": [resource]}

    def alter(kind: int, name: str, *configs: tuple[Any, ...], **more: Any) -> dict[str, Any]:
        """Each config is its name, its value and, where there is one, its operation."""
        altered = [{"name": each[0], "value": each[1], "config_operation": (*each, 0)[2]} for each in configs]
        return {"resources": [{"resource_type": kind, "resource_name": name, "configs": altered}], **more}

    def grow(name: str, count: int, **more: Any) -> dict[str, Any]:
        return {"topics": [{"name": name, "count": count, "assignments": None}], **more}

    def delete(name: str, *offsets: tuple[int, int]) -> dict[str, Any]:
        parts = [{"partition_index": partition, "offset": offset} for partition, offset in offsets]
        return {"topics": [{"name": name, "partitions": parts}], "timeout": timedelta(seconds=10)}

    def epoch(name: str, partition: int, asked: int, current: int = -1) -> dict[str, Any]:
        part = {"partition": partition, "leader_epoch": asked, "current_leader_epoch": current}
        return {"replica_id": -1, "topics": [{"topic": name, "partitions": [part]}]}

    def elect(name: str, partition: int, kind: int = 0) -> dict[str, Any]:
        return {"election_type": kind, "topic_partitions": [{"topic": name, "partitions": [partition]}]}

    def reassign(name: str, partition: int, replicas: list[int] | None) -> dict[str, Any]:
        part = {"partition_index": partition, "replicas": replicas}
        return {"topics": [{"name": name, "partitions": [part]}]}

    def producer(producer_id: int, epoch: int, name: str | None = None) -> dict[str, Any]:
        known = {"producer_id": producer_id, "producer_epoch": epoch}
        return {"transactional_id": name, "transaction_timeout": timedelta(seconds=60), **known}

    def producers(*topics: tuple[str, list[int]]) -> dict[str, Any]:
        return {"topics": [{"name": name, "partition_indexes": indexes} for name, indexes in topics]}

    update = {"feature": "metadata.version", "max_version_level": 1}
    misplaced = ErrorCode.invalid_replica_assignment
    return {
        **group_shapes(client),
        0: [
            (produce(known, 0, batch), {OK}),
            (produce(known, 1, batch, acks=1), {OK}),
            (produce(missing, 0, batch), {UNKNOWN}),
            (produce(known, -1, batch), {UNKNOWN}),
            (produce(known, 2, batch), {UNKNOWN}),
            (produce(known, 0, corrupt), {ErrorCode.corrupt_message}),
            (produce(known, 0, b"rubbish"), {ErrorCode.invalid_record}),
            (produce(known, 0, batch, acks=5), {ErrorCode.invalid_required_acks}),
        ],
        1: [
            (fetch(known, 0, 0), {OK}),
            (fetch(known, 0, 10**9), {ErrorCode.offset_out_of_range, OK}),
            (fetch(known, 0, -7), {ErrorCode.offset_out_of_range, OK}),
            (fetch(missing, 0, 0), {UNKNOWN, OK}),
            (fetch(known, -1, 0), {UNKNOWN, OK}),
            ({"session_id": 5, **fetch(known, 0, 0)}, {ErrorCode.fetch_session_id_not_found, OK}),
        ],
        2: [
            (offsets("known", 0, -1), {OK}),
            (offsets("known", 0, -2), {OK}),
            (offsets("known", 0, -3), {OK, ErrorCode.unsupported_version}),  # from version 7 on
            (offsets("known", 1, 1_700_000_000_000), {OK}),
            (offsets("missing", 0, -1), {UNKNOWN}),
            (offsets("known", -1, -1), {UNKNOWN}),
        ],
        3: [
            ({"topics": [by_name_or_id("known", UUID(int=0))]}, {OK}),
            ({"topics": [{"name": "missing"}]}, {OK, UNKNOWN}),
            ({"topics": [{"name": "no/name"}]}, {OK, UNKNOWN, ErrorCode.invalid_topic_exception}),
        ],
        10: [
            ({"key": "group", "coordinator_keys": ["group", "other"]}, {OK}),
            (
                {"key": "t", "coordinator_keys": ["t"], "key_type": 1},
                {OK, ErrorCode.transactional_id_authorization_failed},
            ),
            ({"key": "t", "coordinator_keys": ["t"], "key_type": 99}, {OK, ErrorCode.invalid_request}),
        ],
        18: [({"client_software_name": "a", "client_software_version": "b"}, {OK})],
        19: [
            ({"topics": [new_topic("new", 1)], "validate_only": True}, {OK}),
            ({"topics": [new_topic("known", 1)]}, {ErrorCode.topic_already_exists}),
            ({"topics": [new_topic("", 1)]}, {ErrorCode.invalid_topic_exception}),
            ({"topics": [new_topic("new", 0)]}, {ErrorCode.invalid_partitions}),
        ],
        20: [
            ({"topics": [{"name": "missing"}], "topic_names": ["missing"]}, {UNKNOWN}),
            ({"topics": [{"name": None, "topic_id": NOWHERE}], "topic_names": ["missing"]}, {UNKNOWN}),
        ],
        21: [
            (delete("known", (0, 0), (1, -1)), {OK}),
            (delete("known", (0, 10**9)), {ErrorCode.offset_out_of_range}),
            (delete("known", (0, -2)), {ErrorCode.offset_out_of_range}),
            (delete("known", (0, 10**9), (0, 0)), {OK}),
            (delete("known", (2, 0)), {UNKNOWN}),
            (delete("missing", (0, 0)), {UNKNOWN}),
        ],
        22: [
            (producer(-1, -1), {OK}),
            (producer(0, 0), {OK}),
            (producer(2**63 - 1, 2**15 - 1), {OK}),
            (producer(-1, 0), {OK, BAD}),  # versions before 3 have neither
            (producer(0, -1), {OK, BAD}),
            (producer(-1, -1, "transactional"), {BAD}),
            (producer(-1, -1, ""), {BAD}),
        ],
        23: [
            (epoch("known", 0, 0), {OK}),
            (epoch("known", 0, 0, current=0), {OK}),
            (epoch("known", 0, 1), {OK}),
            (epoch("known", 0, 0, current=1), {ErrorCode.unknown_leader_epoch}),
            (epoch("known", -1, 0), {UNKNOWN}),
            (epoch("missing", 0, 0), {UNKNOWN}),
        ],
        35: [
            ({"topics": None}, {OK}),
            ({"topics": [{"topic": "known", "partitions": [0, 0, 5, -1]}]}, {OK}),
            ({"topics": [{"topic": "missing", "partitions": [0]}]}, {OK}),
        ],
        43: [
            ({"topic_partitions": None}, {OK}),
            (elect("known", 0), {OK, ErrorCode.election_not_needed}),
            (elect("known", 0, kind=1), {OK, ErrorCode.election_not_needed}),
            (elect("known", 0, kind=7), {ErrorCode.invalid_request, ErrorCode.election_not_needed}),
            (elect("known", 2), {OK, UNKNOWN}),
            (elect("missing", 0), {OK, UNKNOWN}),
        ],
        45: [
            (reassign("known", 0, [0]), {OK}),
            (reassign("known", 0, [1]), {OK, misplaced}),
            (reassign("known", 0, []), {OK, misplaced}),
            (reassign("known", 0, None), {OK, ErrorCode.no_reassignment_in_progress}),
            (reassign("known", 2, [0]), {OK, UNKNOWN}),
            (reassign("missing", 0, None), {OK, UNKNOWN}),
        ],
        46: [
            ({"topics": None}, {OK}),
            ({"topics": [{"name": "missing", "partition_indexes": [7]}]}, {OK}),
        ],
        57: [
            ({"feature_updates": []}, {OK}),
            ({"feature_updates": [update]}, {ErrorCode.invalid_update_version}),
        ],
        71: [
            ({"client_instance_id": None}, {OK}),
            ({"client_instance_id": NOWHERE}, {OK}),
        ],
        72: [
            ({"client_instance_id": NOWHERE, "metrics": b"x"}, {ErrorCode.unknown_subscription_id}),
            ({"client_instance_id": None}, {ErrorCode.invalid_request}),
        ],
        32: [
            (configs(2, "known", None), {OK}),
            (configs(2, "known", ["retention.ms"]), {OK}),
            (configs(2, "missing", None), {UNKNOWN}),
            (configs(99, "?", None), {ErrorCode.invalid_request}),
            (configs(4, "", None), {OK}),
            (configs(4, "0", None), {OK}),
            (configs(4, "99", None), {BAD}),
            (configs(4, "x", None), {BAD}),
            (configs(8, "0", None), {BAD}),
            (configs(16, "metrics", None), {BAD}),
            (configs(32, "group", None), {BAD}),
        ],
        33: alterations(alter),
        37: [
            (grow("known", 3, validate_only=True), {OK}),
            (grow("known", 1), {ErrorCode.invalid_partitions}),
            (grow("missing", 3), {UNKNOWN}),
        ],
        44: [
            *alterations(alter),
            (alter(2, "known", ("retention.ms", None, 1), ("nope", "x", 1)), {OK}),
            (alter(2, "known", ("retention.ms", "1", 2)), {ErrorCode.invalid_config}),
            (alter(2, "known", ("nope", "1", 3)), {ErrorCode.invalid_config}),
            (alter(2, "known", ("cleanup.policy", "delete", 2)), {OK}),
            (alter(2, "known", ("cleanup.policy", "compact", 2)), {ErrorCode.invalid_config}),
            (alter(2, "known", ("cleanup.policy", None, 3)), {BAD}),
            (alter(2, "known", ("retention.ms", "1", 4)), {BAD}),
            (alter(2, "known", ("retention.ms", "1", -1)), {BAD}),
            (alter(4, "", ("node.id", None, 1)), {OK}),
            (alter(4, "", ("num.partitions", "1", 2)), {ErrorCode.invalid_config}),
        ],
        60: [
            ({"endpoint_type": 1}, {OK}),
            ({"endpoint_type": 2}, {OK, ErrorCode.mismatched_endpoint_type}),
        ],
        61: [
            (producers(("known", [0, 1])), {OK}),
            (producers(("known", [0]), ("missing", [0])), {OK, UNKNOWN}),
            (producers(("known", [2, -1, 2**31 - 1])), {UNKNOWN}),
            (producers(("missing", [0])), {UNKNOWN}),
            (producers(("", [0])), {UNKNOWN, ErrorCode.invalid_topic_exception}),
        ],
        74: [
            ({"resource_types": (2, 4, 2)}, {OK}),
            ({"resource_types": (8, 16, 32)}, {OK}),
            ({"resource_types": (99,)}, {OK, ErrorCode.unsupported_version}),  # without types in version 0
        ],
        75: [
            ({"topics": [{"name": "known"}], "response_partition_limit": 1}, {OK}),
            ({"topics": [{"name": "known"}], "cursor": {"topic_name": "known", "partition_index": 1}}, {OK}),
            ({"topics": [{"name": "missing"}]}, {UNKNOWN}),
        ],
    }


@pytest.mark.parametrize(("api_key", "version"), SERVED)
async def test_every_version_answers_in_its_schema(client: Client, api_key: int, version: int) -> None:
    """What is known, what is not, and what makes no sense."""
    for fields, expected in shapes(client)[api_key]:
        names_by_id = "topic_id" in str(wire.fitting(load_request_schema(api_key, version), fields))
        if names_by_id and UNKNOWN in expected and ("missing" in str(fields) or NOWHERE in fields.values()):
            expected = (expected - {UNKNOWN}) | {UNKNOWN_ID} | ({UNKNOWN} if api_key == 3 else set())
        codes = codes_in(await client.ask(api_key, version, fields))
        assert codes <= expected, f"{fields}: {codes}"
        empty = api_key == 18 or fields in ({"topic_partitions": None}, {"topics": None})
        assert codes or empty, f"{fields}: no error field at all"


@pytest.mark.parametrize(("api_key", "version"), SERVED)
async def test_any_values_of_the_fields_are_answered(client: Client, api_key: int, version: int) -> None:
    """Negative numbers, the largest ones, names with zero bytes in them, nulls: an error, but an answer."""
    rng = random.Random(api_key * 100 + version)
    for _ in range(15):
        body = wire.random_entity(load_request_schema(api_key, version), rng)
        if api_key == 0:
            body = dataclasses.replace(body, acks=rng.choice((-1, 1, 2)))
        elif api_key == 3 and version in (10, 11) and body.topics:
            named = [dataclasses.replace(topic, name=topic.name or "") for topic in body.topics]
            body = dataclasses.replace(body, topics=tuple(named))
        elif api_key == 1:
            body = dataclasses.replace(body, max_wait=timedelta(milliseconds=rng.choice((-(2**31), 0, 5))))
        answer = await client.exchange(wire.encode(api_key, version, body, 3))
        assert answer is not None, f"closed after {body}"
        assert wire.decode(api_key, version, answer)[0] == 3
        assert ErrorCode.unknown_server_error not in codes_in(wire.decode(api_key, version, answer)[1]), body


@pytest.mark.parametrize("api_key", [33, 44])
async def test_each_resource_is_altered_whole_or_not_at_all(client: Client, api_key: int) -> None:
    """X-51: one result for each, in their order, and nothing of one with a bad config."""
    names = [f"altered-{api_key}-{number}" for number in range(40)]
    await client.ask(19, 7, {"topics": [new_topic(name, 1) for name in names]})
    resources = []
    for number, name in enumerate(names):
        configs = [{"name": "segment.ms", "value": "9"}]
        if number % 2:
            configs.insert(number % 4 // 2, {"name": "no.such", "value": "1"})
        resources.append({"resource_type": 2, "resource_name": name, "configs": configs})
    body = await client.ask(api_key, 1, {"resources": resources})
    assert [each.resource_name for each in body.responses] == names
    codes = [each.error_code for each in body.responses]
    assert codes == [OK, ErrorCode.invalid_config] * 20
    asked = [
        {"resource_type": 2, "resource_name": name, "configuration_keys": ["segment.ms"]} for name in names
    ]
    described = (await client.ask(32, 4, {"resources": asked})).results
    assert [each.configs[0].value for each in described] == ["9", "604800000"] * 20
    assert [each.configs[0].config_source for each in described] == [1, 5] * 20


async def test_what_is_asked_for_many_times_is_described_once(client: Client) -> None:
    """A request of 100 kB would have an answer of many megabytes, and all of them in memory."""
    resource = {"resource_type": 4, "resource_name": "0", "configuration_keys": None}
    other = {**resource, "configuration_keys": ["num.partitions"]}
    body = await client.ask(32, 4, {"resources": [resource, other] * 10_000})
    assert [len(each.configs) > 1 for each in body.results] == [True, False]


async def test_producers_asked_for_many_times_are_described_once(client: Client) -> None:
    """A partition is four bytes of a request, and up to 10,000 producers in the answer."""
    topic = {"name": "known", "partition_indexes": [1, 0] * 10_000}
    body = await client.ask(61, 0, {"topics": [topic, {"name": "missing", "partition_indexes": [0]}, topic]})
    assert [each.name for each in body.topics] == ["known", "missing"]
    assert [part.partition_index for part in body.topics[0].partitions] == [1, 0]


@pytest.mark.parametrize("version", [10, 11])
async def test_topics_without_names_before_there_were_ids(client: Client, version: int) -> None:
    body = await client.ask(3, version, {"topics": [{"name": None, "topic_id": NOWHERE}]})
    assert codes_in(body) == {ErrorCode.invalid_request}


@pytest.mark.parametrize("version", [5, 6, 99, 32_767, -1, -32_768])
async def test_unknown_versions_of_api_versions_get_the_first(client: Client, version: int) -> None:
    """KIP-511: the client learns which version to ask in, whatever it put into the rest."""
    start = (18).to_bytes(2, "big") + version.to_bytes(2, "big", signed=True) + (9).to_bytes(4, "big")
    for rest in (b"", b"\xff\xff", b"\0\x04wire\0\x05abcd\x02x\0", b"\xff" * 50):
        answer = await client.exchange(start + rest)
        assert answer is not None
        correlation_id, body = wire.decode(18, 0, answer)
        assert correlation_id == 9
        assert body.error_code is ErrorCode.unsupported_version
        assert [(each.api_key, each.min_version, each.max_version) for each in body.api_keys] == [(18, 0, 4)]


@pytest.mark.parametrize(
    ("api_key", "version"),
    [
        *((key, last + 1) for key, _, last in OFFERED.values() if key != 18),
        *((key, -1) for key, _, _ in OFFERED.values() if key != 18),
        (0, 2),
        (1, 3),
        (1, 32_767),
        (4, 0),  # LeaderAndIsr is between brokers
        (7, 0),
        (999, 0),
        (-1, 0),
        (32_767, 32_767),
        *((key, 99) for key in REJECTED),
        (27, 0),
    ],
)
async def test_what_is_not_served_closes_the_connection_with_one_line(
    client: Client, caplog: pytest.LogCaptureFixture, api_key: int, version: int
) -> None:
    start = api_key.to_bytes(2, "big", signed=True) + version.to_bytes(2, "big", signed=True)
    assert await client.exchange(start + bytes(30)) is None
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO]
    assert line.startswith("connection closed: ")


TRANSACTIONAL = (24, 25, 26, 27, 28, 65, 66)
NOT_OFFERED = [(key, version) for key in TRANSACTIONAL for version in wire.versions_of(key)]


def named_things(api_key: int, version: int) -> dict[str, Any]:
    topics = [{"name": "t", "partitions": [3, 4], "partition_indexes": [3, 4]}]
    if api_key == 28:
        topics = [{"name": "t", "partitions": [{"partition_index": 3}, {"partition_index": 4}]}]
    transactions = [{"transactional_id": "x", "topics": [{"name": "t", "partitions": [3, 4]}]}]
    return {
        "topics": topics,
        "v3_and_below_topics": topics,
        "transactions": transactions,
        "markers": [{"producer_id": 5, "topics": topics}],
        "transactional_ids": ["x", "y"],
    }


@pytest.mark.parametrize(("api_key", "version"), NOT_OFFERED)
async def test_what_is_known_but_not_offered_is_refused_in_its_own_schema(
    client: Client, caplog: pytest.LogCaptureFixture, api_key: int, version: int
) -> None:
    """D-PROTO-30 to 32: nobody is left waiting, and everything that was named is refused."""
    body = await client.ask(api_key, version, named_things(api_key, version))
    assert codes_in(body) == {ErrorCode.unsupported_version}
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1
    refused = str(body)
    if api_key in (24, 27, 28) and not (api_key == 24 and version > 3):
        assert refused.count("partition_index=") == 2
    if api_key == 65:
        assert "'x'" in refused
        assert "'y'" in refused


@pytest.mark.parametrize(("api_key", "version"), NOT_OFFERED)
async def test_any_request_that_is_not_offered_is_refused(client: Client, api_key: int, version: int) -> None:
    rng = random.Random(api_key)
    for _ in range(5):
        body = wire.random_entity(load_request_schema(api_key, version), rng)
        answer = await client.exchange(wire.encode(api_key, version, body))
        assert answer is not None
        assert codes_in(wire.decode(api_key, version, answer)[1]) <= {ErrorCode.unsupported_version}


async def test_an_answer_that_waits_for_its_turn_keeps_no_memory_from_those_before_it(tmp_path: Path) -> None:
    """The first fetch has to look for a topic, the second has not, and there is memory for one at a time."""
    async with open_broker(_settings(tmp_path, **{"fetch.buffer.bytes": str(2**20)})) as broker:
        client = Client(broker)
        await client.ask(19, 7, {"topics": [new_topic("large", 1)]})
        record = build_batch(large_record(900_000))
        part = {"index": 0, "records": record}
        produced = await client.ask(
            0, 9, {"acks": -1, "topic_data": [{"name": "large", "partition_data": [part]}]}
        )
        assert codes_in(produced) == {OK}
        large = {"topic": "large", "partitions": [{"partition": 0, "partition_max_bytes": 2**20}]}
        missing = {"topic": "missing", "partitions": [{"partition": 0}]}
        reader, writer = await client.connect()
        for number, topics in enumerate(([missing, large], [large], [missing, large], [large])):
            fetch = wire.request(1, 12, {"max_bytes": 2**20, "topics": topics}, correlation_id=number)
            writer.write(wire.framed(fetch))
        async with asyncio.timeout(20):
            for number in range(4):
                answer = await wire.read_frame(reader)
                assert answer is not None
                correlation_id, body = wire.decode(1, 12, answer)
                assert correlation_id == number
                assert len(body.responses[-1].partitions[0].records) == len(record)
        writer.close()
        await writer.wait_closed()


def large_record(size: int) -> bytes:
    """One record with a value of so many bytes, as it stands in a batch."""
    inner = b"\0\0\0\1" + _zigzag(size) + bytes(size) + b"\0"
    return _zigzag(len(inner)) + inner


def _zigzag(number: int) -> bytes:
    left, written = number * 2, bytearray()
    while left > 0x7F:
        written.append(left & 0x7F | 0x80)
        left >>= 7
    return bytes([*written, left])


@pytest.mark.parametrize("version", [1, 13])
async def test_metadata_that_is_kept_is_that_of_now(client: Client, version: int) -> None:
    """Encoding it takes long; answering with what it was before a change would send clients astray."""
    name, asked = f"kept-{version}", {"topics": [{"name": f"kept-{version}"}]}
    await client.ask(19, 7, {"topics": [new_topic(name, 600)]})
    fit = wire.fitting(load_request_schema(3, version), asked)
    answers = []
    for correlation_id in (1, 2):
        answer = await client.exchange(wire.request(3, version, fit, correlation_id=correlation_id))
        assert answer is not None
        told, body = wire.decode(3, version, answer)
        assert told == correlation_id
        answers.append(body)
    assert answers[0] == answers[1]
    assert len(answers[0].topics[0].partitions) == 600

    await client.ask(37, 3, {"topics": [{"name": name, "count": 601, "assignments": None}]})
    assert len((await client.ask(3, version, asked)).topics[0].partitions) == 601
    await client.ask(20, 6, {"topics": [{"name": name, "topic_id": None}]})
    gone = (await client.ask(3, version, asked)).topics[0]
    assert gone.error_code is ErrorCode.unknown_topic_or_partition


async def test_clients_that_start_together_share_one_answer(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made for each of them, it would keep all others waiting for seconds where there are many partitions."""
    await client.ask(19, 7, {"topics": [new_topic("shared", 600)]})
    encoded = []

    def counted(*args: Any) -> Any:
        encoded.append(args)
        return encode_response(*args)

    monkeypatch.setattr(dispatch, "encode_response", counted)
    fields = wire.fitting(load_request_schema(3, 9), {"topics": [{"name": "shared"}]})
    named = ("one", "another", None, "zone_id=z")
    asked = [wire.request(3, 9, fields, correlation_id=n, client_id=name) for n, name in enumerate(named)]
    answers = await asyncio.gather(*map(client.exchange, asked))
    told = [wire.decode(3, 9, answer or b"") for answer in answers]
    assert [correlation_id for correlation_id, _ in told] == [0, 1, 2, 3]
    assert all(len(body.topics[0].partitions) == 600 for _, body in told)
    assert len(encoded) == 2  # one more for those of the zone


async def test_metadata_that_is_kept_is_bounded_whatever_its_requests_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request differs from all others, and is 50 times as large as its response."""
    monkeypatch.setattr(kept, "MAX_KEPT_BYTES", 2**20)
    async with open_broker(_settings(tmp_path)) as broker:
        reader, writer = await Client(broker).connect()
        held = []
        tracemalloc.start()
        try:
            for number in range(2_000):
                asked = wire.request(3, 1, {"topics": []}, client_id=f"zone_id={number:03900}")
                writer.write(wire.framed(asked))
                assert await wire.read_frame(reader) is not None
                held.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
        assert held[-1] - held[0] < 3 * 2**20
        writer.close()
        await writer.wait_closed()


async def test_a_request_that_has_to_look_for_its_topic_is_not_overtaken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D-PROD-31: the batches of one connection keep their order into offsets."""
    async with open_broker(_settings(tmp_path)) as broker:
        client = Client(broker)
        await client.ask(19, 7, {"topics": [new_topic("ordered", 1)]})
        part = {"index": 0, "records": build_batch()}
        data = [{"name": "ordered", "partition_data": [part]}]
        body = {"acks": -1, "timeout": timedelta(seconds=10), "topic_data": data}
        known = broker._topics.get
        misses = iter([True, False, True, True, False, False, True])
        # Every other request finds nothing in the view, as after a creation elsewhere, and reads the store.
        monkeypatch.setattr(broker._topics, "get", lambda name: None if next(misses, False) else known(name))
        reader, writer = await client.connect()
        for number in range(10):
            writer.write(wire.framed(wire.request(0, 9, body, correlation_id=number)))
        offsets = []
        for number in range(10):
            answer = await wire.read_frame(reader)
            assert answer is not None
            told, produced = wire.decode(0, 9, answer)
            assert told == number
            offsets.append(produced.responses[0].partition_responses[0].base_offset)
        assert offsets == list(range(10))
        writer.close()
        await writer.wait_closed()


NEVER_MS = 2**31 - 1


async def test_a_fetch_does_not_wait_for_more_once_its_client_sends_no_more(client: Client) -> None:
    """A socket that was closed at the other end looks like that, until something is sent."""
    reader, writer = await client.connect()
    writer.write(wire.framed(long_fetch()))
    writer.write_eof()
    async with asyncio.timeout(20):
        assert await wire.read_frame(reader) is not None
        assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()


async def test_fetches_whose_client_has_gone_are_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: asyncio.Queue[None] = asyncio.Queue()
    fetch = LogReader.fetch

    async def counted(*args: Any, **more: Any) -> Any:
        begun.put_nowait(None)
        return await fetch(*args, **more)

    monkeypatch.setattr(LogReader, "fetch", counted)
    async with open_broker(_settings(tmp_path)) as broker:
        client = Client(broker)
        await client.ask(19, 7, {"topics": [new_topic("known", 2)]})
        _, writer = await client.connect()
        writer.write(wire.framed(long_fetch()) * 100)
        async with asyncio.timeout(20):
            await begun.get()
            reset = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            writer.transport.abort()
            assert broker._server is not None
            await asyncio.gather(*(connection.closed for connection in broker._server._connections))
    assert begun.empty()


def long_fetch() -> bytes:
    topic = {"topic": "known", "partitions": [{"partition": 0, "partition_max_bytes": 2**20}]}
    fields = {"max_wait": timedelta(milliseconds=NEVER_MS), "min_bytes": 1, "max_bytes": 2**20}
    return wire.request(1, 12, {**fields, "topics": [topic]})


async def test_a_request_that_waits_is_not_held_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its records were copied out of the frame: keeping that as well would double what producers take."""
    async with open_broker(_settings(tmp_path)) as broker:
        client = Client(broker)
        await client.ask(19, 7, {"topics": [new_topic("once", 1)]})
        server = broker._server
        assert server is not None
        frames: list[bytes] = []
        holders: list[int] = []
        handle, append = server.handle, broker._writer.submit

        async def watched(frame: bytes, connection: Any) -> Any:
            frames.append(frame)
            work = handle(frame, connection)
            del frame
            return await work

        def submit(*arguments: Any) -> Any:
            done = append(*arguments)
            done.add_done_callback(lambda _: holders.append(sys.getrefcount(frames[-1])))
            return done

        monkeypatch.setattr(server, "handle", watched)
        monkeypatch.setattr(broker._writer, "submit", submit)
        part = {"index": 0, "records": build_batch()}
        data = [{"name": "once", "partition_data": [part]}]
        await client.ask(0, 9, {"acks": -1, "timeout": timedelta(seconds=10), "topic_data": data})
        assert holders == [2]  # the list, and the call that counts
