"""What the admin APIs answer and what they change, over a socket; expectations are those of Kafka 4.2.1."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from kio.index import load_request_schema
from kio.schema.errors import ErrorCode

from dray.broker import Broker, open_broker
from dray.config import Given, load_settings
from tests import wire
from tests.batches import build_batch

OK = ErrorCode.none
OUT_OF_RANGE = ErrorCode.offset_out_of_range
UNKNOWN = ErrorCode.unknown_topic_or_partition
T = 1_700_000_000_000
PARTITIONS = {"a": 3, "b": 2, "c": 4}


class Asker:
    def __init__(self, broker: Broker) -> None:
        assert broker.address is not None
        self._port = broker.address.port

    async def ask(self, api_key: int, version: int, fields: wire.Fields) -> Any:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            fit = wire.fitting(load_request_schema(api_key, version), fields)
            writer.write(wire.framed(wire.request(api_key, version, fit)))
            async with asyncio.timeout(20):
                answer = await wire.read_frame(reader)
            assert answer is not None, "the connection was closed"
            return wire.decode(api_key, version, answer)[1]
        finally:
            writer.close()
            await asyncio.gather(writer.wait_closed(), return_exceptions=True)

    async def create(self, **partitions: int) -> None:
        topics = [
            {"name": name, "num_partitions": count, "replication_factor": 1}
            for name, count in partitions.items()
        ]
        created = await self.ask(19, 7, {"topics": topics, "timeout": timedelta(seconds=10)})
        assert {topic.error_code for topic in created.topics} == {OK}

    async def produce(self, topic: str, batch: bytes) -> Any:
        data = [{"name": topic, "partition_data": [{"index": 0, "records": batch}]}]
        body = await self.ask(0, 9, {"acks": -1, "timeout": timedelta(seconds=10), "topic_data": data})
        return body.responses[0].partition_responses[0]

    async def delete(
        self, topic: str, *wanted: tuple[int, int], version: int = 2
    ) -> list[tuple[int, Any, int]]:
        parts = [{"partition_index": partition, "offset": offset} for partition, offset in wanted]
        body = await self.ask(
            21, version, {"topics": [{"name": topic, "partitions": parts}], "timeout": timedelta(seconds=10)}
        )
        assert [each.name for each in body.topics] == [topic]
        return [(p.partition_index, p.error_code, p.low_watermark) for p in body.topics[0].partitions]

    async def fetch(self, topic: str, offset: int, max_wait_s: float = 0, min_bytes: int = 1) -> Any:
        part = {"partition": 0, "fetch_offset": offset, "partition_max_bytes": 10**6}
        body = await self.ask(
            1,
            12,
            {
                "max_bytes": 10**6,
                "min_bytes": min_bytes,
                "max_wait": timedelta(seconds=max_wait_s),
                "topics": [{"topic": topic, "partitions": [part]}],
            },
        )
        return body.responses[0].partitions[0]

    async def offset(self, topic: str, timestamp: int) -> tuple[Any, int]:
        part = {"partition_index": 0, "timestamp": timestamp, "current_leader_epoch": -1}
        body = await self.ask(2, 7, {"replica_id": -1, "topics": [{"name": topic, "partitions": [part]}]})
        found = body.topics[0].partitions[0]
        return found.error_code, found.offset

    async def size(self, topic: str, version: int = 4) -> int:
        body = await self.ask(35, version, {"topics": [{"topic": topic, "partitions": [0]}]})
        (directory,) = body.results
        ((part,),) = [each.partitions for each in directory.topics]
        assert (part.partition_index, part.offset_lag, part.is_future_key) == (0, 0, False)
        size: int = part.partition_size
        return size


def settings(data: Path, **more: str) -> Any:
    given = {"data": str(data), "listen": "127.0.0.1:0", "auto.create.topics.enable": "false", **more}
    return load_settings(arguments=[Given(name, text, "test") for name, text in given.items()], environ={})


@pytest.fixture(scope="module")
async def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("broker")


@pytest.fixture(scope="module")
async def asker(data: Path) -> AsyncIterator[Asker]:
    async with open_broker(settings(data)) as broker:
        one = Asker(broker)
        await one.create(**PARTITIONS)
        yield one


def batch_of(*times: int) -> bytes:
    """One record for each time; the smallest that Kafka takes: no key, no value, no headers."""
    body = b"".join(
        _sized(b"\0" + _zigzag(time - times[0]) + _zigzag(number) + b"\1\1\0")
        for number, time in enumerate(times)
    )
    return build_batch(body, records=len(times), base_timestamp=times[0], max_timestamp=max(times))


def _sized(fields: bytes) -> bytes:
    return _zigzag(len(fields)) + fields


def _zigzag(number: int) -> bytes:
    left, written = number * 2 if number >= 0 else -number * 2 - 1, bytearray()
    while left > 0x7F:
        written.append(left & 0x7F | 0x80)
        left >>= 7
    return bytes([*written, left])


# --- DeleteRecords


async def test_deleted_records_are_gone_for_every_api(asker: Asker) -> None:
    await asker.create(gone=1)
    for second in range(3):
        await asker.produce("gone", batch_of(*(T + 1_000 * second + n for n in range(4))))
    assert await asker.delete("gone", (0, 6)) == [(0, OK, 6)]

    below = await asker.fetch("gone", 5)
    assert below.error_code is OUT_OF_RANGE
    inside = await asker.fetch("gone", 6)
    assert (inside.error_code, inside.log_start_offset, inside.high_watermark) == (OK, 6, 12)
    assert int.from_bytes(inside.records[:8]) == 4, "the whole batch in which the log starts"
    assert await asker.offset("gone", -2) == (OK, 6)
    assert await asker.offset("gone", -1) == (OK, 12)
    assert await asker.offset("gone", T) == (OK, 6)
    assert await asker.offset("gone", T + 1_003) == (OK, 7)
    assert (await asker.produce("gone", batch_of(T))).log_start_offset == 6


async def test_what_is_below_the_log_start_is_deleted_already(asker: Asker) -> None:
    await asker.create(below=1)
    await asker.produce("below", batch_of(*[T] * 5))
    assert await asker.delete("below", (0, 3)) == [(0, OK, 3)]
    assert await asker.delete("below", (0, 0)) == [(0, OK, 3)]
    assert await asker.delete("below", (0, 2)) == [(0, OK, 3)]
    assert await asker.delete("below", (0, -1)) == [(0, OK, 5)]
    assert (await asker.fetch("below", 5)).error_code is OK
    assert await asker.offset("below", -2) == await asker.offset("below", -1) == (OK, 5)
    assert await asker.offset("below", T) == (OK, -1)


@pytest.mark.parametrize("version", range(3))
async def test_what_cannot_be_deleted(asker: Asker, version: int) -> None:
    wanted = [(0, 10**9), (1, -2), (2, -(2**63)), (3, 0), (-1, 0)]
    assert await asker.delete("a", *wanted, version=version) == [
        (0, OUT_OF_RANGE, -1),
        (1, OUT_OF_RANGE, -1),
        (2, OUT_OF_RANGE, -1),
        (3, UNKNOWN, -1),
        (-1, UNKNOWN, -1),
    ]
    assert await asker.delete("nope", (0, 0), version=version) == [(0, UNKNOWN, -1)]
    assert await asker.delete("a", (0, 0), (1, -1), version=version) == [(0, OK, 0), (1, OK, 0)]


async def test_of_a_partition_that_is_named_twice_the_last_counts(asker: Asker) -> None:
    assert await asker.delete("a", (0, 0), (0, 77)) == [(0, OUT_OF_RANGE, -1)]
    assert await asker.delete("a", (0, 77), (0, 0)) == [(0, OK, 0)]


async def test_a_waiting_fetch_hears_that_its_records_are_deleted(
    asker: Asker, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the watch, at another broker of the cluster, which has everything in memory."""
    await asker.create(waiting=1)
    async with open_broker(settings(data)) as broker:
        waits = asyncio.Event()
        register = broker._wakeups.register

        def registered(*args: Any) -> None:
            register(*args)
            waits.set()

        monkeypatch.setattr(broker._wakeups, "register", registered)
        other = Asker(broker)
        await other.produce("waiting", batch_of(T, T))
        assert (await other.fetch("waiting", 0)).error_code is OK
        waiting = asyncio.create_task(other.fetch("waiting", 1, max_wait_s=15, min_bytes=10**6))
        await waits.wait()
        assert await asker.delete("waiting", (0, -1)) == [(0, OK, 2)]
        assert (await waiting).error_code is OUT_OF_RANGE, "and not what was there before, when time is up"
        at_end = await other.fetch("waiting", 2)
        assert (at_end.error_code, at_end.log_start_offset) == (OK, 2)
        assert (await other.produce("waiting", batch_of(T))).log_start_offset == 2


# --- DescribeLogDirs


async def test_sizes_go_down_with_the_log_start(asker: Asker) -> None:
    await asker.create(sized=1)
    assert await asker.size("sized") == 0
    one, two = batch_of(T, T), batch_of(T, T, T)
    await asker.produce("sized", one)
    await asker.produce("sized", two)
    assert await asker.size("sized") == len(one) + len(two) + 2 * 4, "with their lengths, as they are stored"
    for offset, expected in ((1, len(one) + len(two) + 8), (2, len(two) + 4), (4, len(two) + 4), (5, 0)):
        await asker.delete("sized", (0, offset))
        assert await asker.size("sized") == expected


async def test_all_partitions_are_described(asker: Asker, data: Path) -> None:
    for version in range(1, 5):
        (directory,) = (await asker.ask(35, version, {"topics": None})).results
        described = {topic.name: [p.partition_index for p in topic.partitions] for topic in directory.topics}
        assert {name: described[name] for name in PARTITIONS} == {
            name: list(range(count)) for name, count in PARTITIONS.items()
        }
        assert directory.log_dir == f"file://{data}/objects"
        assert directory.error_code is OK
        if version >= 4:
            assert (directory.total_bytes, directory.usable_bytes) == (-1, -1)
    asked = [
        {"topic": "a", "partitions": [1, 0, 0, 9, -1]},
        {"topic": "nope", "partitions": [0]},
        {"topic": "b", "partitions": []},
        {"topic": "a", "partitions": [2]},
    ]
    (directory,) = (await asker.ask(35, 4, {"topics": asked})).results
    assert [(t.name, [p.partition_index for p in t.partitions]) for t in directory.topics] == [
        ("a", [0, 1, 2])
    ]
    assert (await asker.ask(35, 4, {"topics": []})).results[0].topics == ()


async def test_brokers_describe_each_partition_once_between_them(asker: Asker, data: Path) -> None:
    await asker.create(shared=40)
    async with open_broker(settings(data)) as broker:
        while len((await asker.ask(60, 0, {})).brokers) < 2:
            pass  # each has to know of the other
        found = []
        for each in (asker, Asker(broker)):
            everything = [{"topic": "shared", "partitions": list(range(40))}]
            (directory,) = (await each.ask(35, 4, {"topics": everything})).results
            parts = [p.partition_index for topic in directory.topics for p in topic.partitions]
            assert parts
            found += parts
        assert sorted(found) == list(range(40))


# --- OffsetForLeaderEpoch


@pytest.mark.parametrize("version", [2, 3, 4])
async def test_the_one_epoch_ends_at_the_high_watermark(asker: Asker, version: int) -> None:
    topic = f"epochs-{version}"
    await asker.create(**{topic: 1})
    await asker.produce(topic, batch_of(T, T, T))

    async def ask(name: str, partition: int, current: int, epoch: int) -> tuple[Any, int, int]:
        part = {"partition": partition, "current_leader_epoch": current, "leader_epoch": epoch}
        topics = [{"topic": name, "partitions": [part]}]
        (found,) = (await asker.ask(23, version, {"replica_id": -1, "topics": topics})).topics[0].partitions
        return found.error_code, found.leader_epoch, found.end_offset

    assert await ask(topic, 0, 0, 0) == (OK, 0, 3)
    assert await ask(topic, 0, -1, 0) == (OK, 0, 3)
    assert await ask(topic, 0, -1, 1) == (OK, -1, -1)
    assert await ask(topic, 0, -1, -1) == (OK, -1, -1)
    assert await ask(topic, 0, 5, 0) == (ErrorCode.unknown_leader_epoch, -1, -1)
    assert await ask(topic, 9, -1, 0) == (UNKNOWN, -1, -1)
    assert await ask("nope", 0, -1, 0) == (UNKNOWN, -1, -1)


# --- DescribeTopicPartitions


Page = tuple[list[tuple[str, Any, list[int]]], tuple[str, int] | None]


async def page(asker: Asker, names: Sequence[str], limit: int, cursor: tuple[str, int] | None = None) -> Page:
    at = None if cursor is None else {"topic_name": cursor[0], "partition_index": cursor[1]}
    topics = [{"name": name} for name in names]
    body = await asker.ask(75, 0, {"topics": topics, "response_partition_limit": limit, "cursor": at})
    following = body.next_cursor and (body.next_cursor.topic_name, body.next_cursor.partition_index)
    described = [(t.name, t.error_code, [p.partition_index for p in t.partitions]) for t in body.topics]
    return described, following


INVALID = ErrorCode.invalid_request


@pytest.mark.parametrize(
    ("names", "limit", "cursor", "expected"),
    [
        ("c nope b a", 4, None, ([("a", OK, [0, 1, 2]), ("b", OK, [0])], ("b", 1))),
        ("a b", 3, None, ([("a", OK, [0, 1, 2])], ("b", 0))),
        ("a b", 0, None, ([("a", OK, [0])], ("a", 1))),
        ("a b", -3, None, ([("a", OK, [0])], ("a", 1))),
        ("b b", 10, None, ([("b", OK, [0, 1])], None)),
        ("a b", 100, ("b", 1), ([("b", OK, [1])], None)),
        ("a b", 100, ("b", 9), ([("b", OK, [])], None)),
        ("a c", 100, ("b", 1), ([("a", INVALID, []), ("c", INVALID, [])], None)),
        ("a b", 100, ("b", -1), ([("a", INVALID, []), ("b", INVALID, [])], None)),
        ("", 100, ("b", -1), ([], None)),
        ("", 100, ("zz", 0), ([], None)),
        ("a nope", 3, None, ([("a", OK, [0, 1, 2])], ("nope", 0))),
        ("a nope", 3, ("nope", 0), ([("nope", UNKNOWN, [])], None)),
        (
            "nope no/pe",
            100,
            ("no/pe", 1),
            ([("no/pe", ErrorCode.invalid_topic_exception, []), ("nope", UNKNOWN, [])], None),
        ),
    ],
)
async def test_topics_come_in_pages(
    asker: Asker, names: str, limit: int, cursor: tuple[str, int] | None, expected: Page
) -> None:
    assert await page(asker, names.split(), limit, cursor) == expected


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 100])
async def test_pages_make_up_the_whole(asker: Asker, limit: int) -> None:
    found: dict[str, list[int]] = {}
    cursor: tuple[str, int] | None = None
    while True:
        described, cursor = await page(asker, [], limit, cursor)
        assert sum(len(numbers) for _, _, numbers in described) <= limit
        for name, code, numbers in described:
            assert code is OK
            found.setdefault(name, []).extend(numbers)
        if cursor is None:
            break
    assert list(found) == sorted(found)
    assert {name: found[name] for name in PARTITIONS} == {n: list(range(c)) for n, c in PARTITIONS.items()}


async def test_a_cursor_whose_topic_is_gone_goes_on_with_the_next(asker: Asker) -> None:
    described, _ = await page(asker, [], 100, ("bb", 1))
    assert described[0][0] not in ("a", "b", "bb")
    assert ("c", OK, [0, 1, 2, 3]) in described


# --- what there is nothing of


async def test_no_election_is_needed(asker: Asker) -> None:
    for version in range(3):
        whole = await asker.ask(43, version, {"topic_partitions": None})
        assert whole.replica_election_results == ()
    asked = [{"topic": "a", "partitions": [0, 9]}, {"topic": "nope", "partitions": [0]}]
    body = await asker.ask(43, 2, {"topic_partitions": asked})
    codes = [
        (result.topic, [(p.partition_id, p.error_code) for p in result.partition_result])
        for result in body.replica_election_results
    ]
    not_needed = ErrorCode.election_not_needed
    assert codes == [("a", [(0, not_needed), (9, UNKNOWN)]), ("nope", [(0, UNKNOWN)])]
    assert body.error_code is OK
    odd = await asker.ask(43, 2, {"topic_partitions": asked, "election_type": 7})
    assert odd.error_code is INVALID


async def test_partitions_stay_where_they_are(asker: Asker) -> None:
    async def reassign(topic: str, partition: int, replicas: list[int] | None) -> tuple[Any, str | None]:
        part = {"partition_index": partition, "replicas": replicas}
        body = await asker.ask(45, 1, {"topics": [{"name": topic, "partitions": [part]}]})
        assert body.error_code is OK
        (answer,) = body.responses[0].partitions
        return answer.error_code, answer.error_message

    leader = (await asker.ask(75, 0, {"topics": [{"name": "a"}], "response_partition_limit": 1})).topics[0]
    here = leader.partitions[0].leader_id
    assert await reassign("a", 0, [here]) == (OK, None)
    for elsewhere in ([here + 1], [], [here, here], [-1]):
        code, message = await reassign("a", 0, elsewhere)
        assert code is ErrorCode.invalid_replica_assignment
        assert message is not None
        assert f"broker {here}" in message
    assert (await reassign("a", 0, None))[0] is ErrorCode.no_reassignment_in_progress
    assert (await reassign("a", 9, [here]))[0] is UNKNOWN
    assert (await reassign("nope", 0, None))[0] is UNKNOWN
    for topics in (None, [{"name": "a", "partition_indexes": [0]}]):
        assert (await asker.ask(46, 0, {"topics": topics})).topics == ()


async def test_there_are_no_features_and_none_can_be_had(asker: Asker) -> None:
    named = {"client_software_name": "x", "client_software_version": "1"}
    told = await asker.ask(18, 4, named)
    assert (told.supported_features, told.finalized_features, told.finalized_features_epoch) == ((), (), -1)
    for version in range(3):
        update = {"feature": "group.version", "max_version_level": 1}
        refused = await asker.ask(57, version, {"feature_updates": [update]})
        assert refused.error_code is ErrorCode.invalid_update_version
        assert "group.version" in refused.error_message
        assert (await asker.ask(57, version, {"feature_updates": []})).error_code is OK


async def test_no_metrics_of_clients_are_wanted(asker: Asker) -> None:
    told = await asker.ask(18, 3, {"client_software_name": "x", "client_software_version": "1"})
    assert not {71, 72} & {each.api_key for each in told.api_keys}, "as Kafka without a receiver"
    first = await asker.ask(71, 0, {"client_instance_id": None})
    assert first.client_instance_id.int != 0
    assert (first.error_code, first.requested_metrics) == (OK, ())
    assert first.push_interval == timedelta(minutes=5)
    again = await asker.ask(71, 0, {"client_instance_id": UUID(int=5)})
    assert again.client_instance_id == UUID(int=5)
    pushed = await asker.ask(72, 0, {"client_instance_id": UUID(int=5), "metrics": b"x"})
    assert pushed.error_code is ErrorCode.unknown_subscription_id
