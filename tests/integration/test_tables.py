"""Whatever a broker takes is the same afterwards: over the wire, and in the table as three engines read it.

Batches go to a real broker as requests of bytes and are decoded by `tests.naive_records`, which shares no
code with Dray. After compaction the WAL objects are deleted, so what is read then comes from Parquet.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import pyarrow.compute as pc
import pytest
from confluent_kafka import Consumer
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from kio.schema.errors import ErrorCode

from tests.batches import end_of
from tests.integration.conftest import store_urls
from tests.integration.local_compactor import LocalCompactor
from tests.integration.rdkafka import QUIET, TIMEOUT_S, Sender, create_topic
from tests.integration.spark_child import SparkReader
from tests.integration.topics_as_tables import MIB, Place, by_partition, decoded, fetched, tables_of
from tests.integration.waiting import eventually
from tests.integration.wire import EARLIEST, LATEST, Wire, fetch_request, produce_request
from tests.naive_records import CODECS, Plan, Record, build, parse
from tests.record_plans import plans
from tests.servers.iceberg_rest import IcebergRestServer
from tests.servers.s3 import S3Server

# A JVM on a machine where several others start takes its time.
pytestmark = pytest.mark.timeout(600)

PARTITIONS = 2
NEWEST = -3  # asks ListOffsets for the record with the highest timestamp
NO_PRODUCER = (-1, -1, -1)
# Timestamp, key, value, headers.
Row: TypeAlias = tuple[int, bytes | None, bytes | None, tuple[tuple[str, bytes | None], ...]]
ANY_TIME = {"message.timestamp.after.max.ms": str(2**63 - 1), "max.message.bytes": str(64 * MIB)}


@dataclass(frozen=True)
class Send:
    """A batch on its way: of no producer, or the producer's next, its last one again, or one out of order."""

    plan: Plan
    partition: int = 0
    how: str = "plain"
    producer_id: int = 0


HOW = ("plain", "next", "next", "again", "out of order", "new epoch")


@st.composite
def sends(draw: st.DrawFn) -> list[Send]:
    return [
        Send(
            takeable(plan),
            draw(st.integers(0, PARTITIONS - 1)),
            draw(st.sampled_from(HOW)),
            draw(st.sampled_from([0, 2**63 - 1])),
        )
        for plan in draw(plans())
    ]


def takeable(plan: Plan) -> Plan:
    """A client leaves LogAppendTime to the broker, and neither first nor newest time is before 1970."""
    (timestamp, key, value, headers), *others = plan.records
    return replace(
        plan,
        records=[(max(timestamp, -1), key, value, headers), *others],
        append_time=None,
        base_timestamp=max(plan.base_timestamp, -1),
    )


def of_every_kind() -> list[Send]:
    """What the strategy is about, once each."""
    many = (("a", b"1"), ("a", None), ("", b""), ("a", b"1"), ("ü", b"\xff"))
    records: list[Row] = [
        (1_700_000_000_000, b"k", b"v", many),
        (-1, None, None, ()),
        (1_600_000_000_000, b"", b"", ()),
        (253_402_300_800_000, b"late", b"v", (("h", None),)),
        (2**63 - 1, None, b"later", ()),
        (-(2**63), b"early", b"v" * 5_000, ()),
    ]
    found = [
        Send(Plan(records, codec, producer=NO_PRODUCER), n % PARTITIONS)
        for n, codec in enumerate(sorted(CODECS))
    ]
    big: list[Row] = [(1_700_000_000_000, None, bytes(MIB), ()), (1_700_000_000_001, b"k" * MIB, None, ())]
    found += [Send(Plan(big, codec)) for codec in ("none", "zstd")]
    found += [Send(Plan(records, "lz4"), 1, how, 7) for how in HOW for _ in range(2)]
    return found


# --- the world


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """The embedded default."""
    directory = tmp_path_factory.mktemp("tables")
    stores = (f"sqlite:///{directory}/metadata.db", f"file://{directory}/objects")
    place = Place(directory, *stores, f"sqlite:///{directory}/catalog.db")
    place.start()
    yield place
    place.kill()


@pytest.fixture(scope="module")
def compactor(place: Place) -> Iterator[LocalCompactor]:
    with LocalCompactor(place.settings()) as compactor:
        yield compactor


# --- what is in a topic


def send_all(topic: str, some: Sequence[Send], first: Wire, second: Wire | None = None) -> list[list[Record]]:
    """Those that were acknowledged, by partition. With `second`, producers send everything to both."""
    batches: list[tuple[int, bytes]] = []
    # The epoch, the next sequence and the last batch of each.
    known: dict[tuple[int, int], tuple[int, int, bytes | None]] = defaultdict(lambda: (0, 0, None))
    for each in some:
        who = (each.partition, each.producer_id)
        epoch, sequence, last = known[who]
        producer = NO_PRODUCER
        match each.how:
            case "next" | "new epoch":
                if each.how == "new epoch":
                    epoch, sequence = epoch + 1, 0
                producer = (each.producer_id, epoch, sequence)
            case "out of order":
                producer = (each.producer_id, epoch, sequence + 5)
            case "again" if last is not None:
                batches.append((each.partition, last))
                continue
        batch = build(replace(each.plan, producer=producer))
        batches.append((each.partition, batch))
        if each.how in ("next", "new epoch"):
            known[who] = (epoch, sequence + len(each.plan.records), batch)
    found: list[dict[int, Record]] = [{} for _ in range(PARTITIONS)]
    twice = [second is not None and parse(batch)[0].producer is not None for _, batch in batches]
    for (partition, batch), both in zip(batches, twice, strict=True):
        for wire in (first, second) if both else (first,):
            assert wire is not None
            wire.send(produce_request(topic, partition, batch))
    for (partition, batch), both in zip(batches, twice, strict=True):
        for wire in (first, second) if both else (first,):
            assert wire is not None
            answer = wire.receive_produced()
            if answer.error is ErrorCode.none:
                for record in parse(batch, answer.base_offset):
                    assert found[partition].setdefault(record.offset, record) == record
    return [[by_offset[offset] for offset in sorted(by_offset)] for by_offset in found]


def offsets_by_time(wire: Wire, topic: str, logs: Sequence[Sequence[Record]]) -> list[object]:
    times = {max(record.timestamp + more, 0) for log in logs for record in log for more in (0, 1)}
    chosen = [EARLIEST, LATEST, NEWEST, *sorted(time for time in times if time < 2**63)[:20]]
    return [wire.list_offset(topic, n, time) for n in range(PARTITIONS) for time in chosen]


def spark_query(topics: Sequence[str]) -> str:
    parts = (f"SELECT '{topic}' AS topic, * FROM dray.kafka.`{topic}`" for topic in topics)
    return " UNION ALL ".join(parts)


# --- the tests


class Compared:
    """A topic with batches in it, before and after it was compacted."""

    def __init__(self, place: Place, some: Sequence[Send], *, append_time: bool = False) -> None:
        configs = dict(ANY_TIME)
        if append_time:
            configs["message.timestamp.type"] = "LogAppendTime"
        self.place = place
        self.name = create_topic(place.a.address, partitions=PARTITIONS, configs=configs)
        with Wire(place.a.address) as wire:
            sent = send_all(self.name, some, wire)
            self.before = [fetched(wire, self.name, number) for number in range(PARTITIONS)]
            self.by_time = offsets_by_time(wire, self.name, self.before)
        if append_time:
            assert [as_sent(log) for log in self.before] == [as_sent(log) for log in sent]
            assert all(record.attributes == 8 for log in self.before for record in log)
        else:
            assert self.before == sent

    def check_wire(self) -> None:
        for broker in (self.place.b, self.place.a):
            with Wire(broker.address) as wire:
                assert [fetched(wire, self.name, number) for number in range(PARTITIONS)] == self.before
                assert offsets_by_time(wire, self.name, self.before) == self.by_time
                for number, log in enumerate(self.before):
                    for at, record in enumerate(log[:10]):
                        answer = wire.fetch(self.name, number, record.offset, partition_max_bytes=1)
                        got = [each for each in decoded(answer.records) if each.offset >= record.offset]
                        assert got == log[at : at + len(got)]
                        assert got


def as_sent(log: Sequence[Record]) -> list[Record]:
    return [replace(record, timestamp=0, attributes=0) for record in log]


SETTINGS = settings(
    deadline=None,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.large_base_example,
        HealthCheck.function_scoped_fixture,
    ],
)


@settings(SETTINGS, max_examples=20)
@given(sends(), st.booleans())
@example(of_every_kind(), False)
@example(of_every_kind(), True)
def test_a_topic_and_its_table_are_what_was_sent(
    place: Place, compactor: LocalCompactor, some: list[Send], append_time: bool
) -> None:
    topic = Compared(place, some, append_time=append_time)
    before = compactor.counts.records
    compactor.compact()
    assert compactor.counts.records == before + sum(map(len, topic.before))
    place.remove_wal()
    topic.check_wire()
    if any(topic.before):
        with tables_of(place) as read:
            for engine in ("PyIceberg", "DuckDB"):
                assert by_partition(read(engine, topic.name), PARTITIONS) == topic.before, engine


@pytest.fixture(scope="module")
def spark(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkReader]:
    with SparkReader(place.stores, tmp_path_factory.mktemp("spark")) as spark:
        yield spark


@settings(SETTINGS, max_examples=2)
@given(st.lists(sends(), min_size=3, max_size=3))
@example([of_every_kind(), of_every_kind()[:3]])
def test_spark_reads_what_was_sent(
    place: Place, compactor: LocalCompactor, spark: SparkReader, lists: list[list[Send]]
) -> None:
    made = [Compared(place, some, append_time=number == 0) for number, some in enumerate(lists)]
    topics = [topic for topic in made if any(topic.before)]
    compactor.compact()
    if topics:
        found = spark.query(spark_query([topic.name for topic in topics]))
        for topic in topics:
            rows = found.filter(pc.equal(found["topic"], topic.name)).drop(["topic"])
            assert by_partition(rows, PARTITIONS) == topic.before


def test_compaction_on_spark_is_the_same(place: Place) -> None:
    """The command as people run it, with workers that are Spark's."""
    topics = [Compared(place, of_every_kind()), Compared(place, of_every_kind(), append_time=True)]
    stores = [f"--{name}={url}" for name, url in place.stores.items()]
    argv = [sys.executable, "-m", "dray", "compactor", *stores, "--master=local[2]", "--once", "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert counts["records"] == sum(len(log) for topic in topics for log in topic.before)
    assert (counts["failures"], counts["undecodable"], counts["waiting_tasks"]) == (0, 0, 0)
    place.remove_wal()
    for topic in topics:
        topic.check_wire()
    with tables_of(place) as read:
        for topic in topics:
            assert by_partition(read("DuckDB", topic.name), PARTITIONS) == topic.before


def test_rest_catalog_and_s3_with_producers_at_two_brokers(
    request: pytest.FixtureRequest, tmp_path: Path, s3_server: S3Server
) -> None:
    """On Oxia nobody can keep a duplicate out of the index: it is there, void, and in no table."""
    catalog = IcebergRestServer(tmp_path / "rest", s3_server)
    metadata, objects = store_urls(request, "oxia and S3", tmp_path)
    secret = (
        f"CREATE SECRET (TYPE s3, KEY_ID '{s3_server.access_key}', SECRET '{s3_server.secret_key}',"
        f" REGION '{s3_server.region}', ENDPOINT '{s3_server.address}', URL_STYLE 'path', USE_SSL false)"
    )
    place = Place(tmp_path, metadata, objects, catalog.url(), [secret])
    catalog.start()
    try:
        place.start()
        topic = create_topic(place.a.address, partitions=PARTITIONS, configs=ANY_TIME)
        sent: list[list[Record]] = [[] for _ in range(PARTITIONS)]
        with Wire(place.a.address) as a, Wire(place.b.address) as b:

            def has_void() -> bool:
                """Each time there are producers of other ids."""
                some = [replace(each, producer_id=len(sent[1])) for each in of_every_kind()]
                for log, more in zip(sent, send_all(topic, some, a, b), strict=True):
                    log += more
                ends = [a.list_offset(topic, n, LATEST)[1] for n in range(PARTITIONS)]
                return ends != [len(log) for log in sent]

            eventually(has_void, "a duplicate in the index")
            before = [fetched(b, topic, number) for number in range(PARTITIONS)]
            by_time = offsets_by_time(b, topic, before)
            assert before == sent
            with LocalCompactor(place.settings()) as compactor:
                compactor.compact()
                assert compactor.counts.records == sum(map(len, before))
            after = [fetched(a, topic, number) for number in range(PARTITIONS)]
            assert after == before
            assert offsets_by_time(a, topic, before) == by_time
        with tables_of(place) as read:
            for engine in ("PyIceberg", "DuckDB"):
                assert by_partition(read(engine, topic), PARTITIONS) == before, engine
        with SparkReader(place.stores, tmp_path) as spark:
            assert by_partition(spark.query(spark_query([topic])).drop(["topic"]), PARTITIONS) == before
    finally:
        place.kill()
        catalog.kill()


def test_a_group_reads_on_while_its_topic_is_compacted(place: Place, compactor: LocalCompactor) -> None:
    topic = create_topic(place.a.address, partitions=PARTITIONS)
    sender = Sender(place.a.address)
    stopping = threading.Event()

    def send() -> None:
        number = 0
        while not stopping.wait(0.002):
            sender.send(topic, b"%d" % number, number % PARTITIONS)
            number += 1
        sender.flush()

    compacted = 0

    def compact() -> None:
        nonlocal compacted
        while not stopping.is_set():
            before = compactor.counts.records
            compactor.round()
            compacted += compactor.counts.records > before

    got: list[tuple[int, int, bytes | None]] = []

    def consume(enough: Callable[[], bool]) -> None:
        """A member that joins, reads on and leaves."""
        conf = {"bootstrap.servers": place.b.address, "group.id": topic, "auto.offset.reset": "earliest"}
        with closing(Consumer({**QUIET, **conf, "enable.auto.commit": False})) as consumer:
            consumer.subscribe([topic])
            deadline = time.monotonic() + TIMEOUT_S
            while not enough():
                assert time.monotonic() < deadline, f"only {len(got)} records came"
                for message in consumer.consume(100, timeout=0.2):
                    assert message.error() is None, message.error()
                    partition, offset = message.partition(), message.offset()
                    assert partition is not None
                    assert offset is not None
                    got.append((partition, offset, message.value()))
            consumer.commit(asynchronous=False)

    with ThreadPoolExecutor(2) as threads:
        running = [threads.submit(send), threads.submit(compact)]
        try:
            eventually(lambda: compacted >= 2 or running[1].done(), "a compaction")
            consume(lambda: len(got) > 0)
            before = compacted
            consume(lambda: compacted >= before + 3 and len(got) > 200)
        finally:
            stopping.set()
        for each in running:
            each.result(TIMEOUT_S)
    assert not sender.failed
    consume(lambda: len(got) >= len(sender.acked))
    for number in range(PARTITIONS):
        sent = sorted(acked for acked in sender.acked if acked.partition == number)
        assert [each for each in got if each[0] == number] == sent


def test_limits_of_a_fetch_hold_in_parquet_too(place: Place, compactor: LocalCompactor) -> None:
    records = [(1_700_000_000_000 + n, None, random.Random(n).randbytes(1_000), ()) for n in range(200)]
    large = [(1_700_000_000_000, None, bytes(MIB), ())]
    topic = Compared(place, [Send(Plan(records)), Send(Plan(large)), Send(Plan(records[:10]))])
    compactor.compact()
    place.remove_wal()
    with Wire(place.b.address) as wire:
        for limits in ({"partition_max_bytes": 40_000}, {"max_bytes": 40_000}):
            at = 0
            while at < 180:
                answer = wire.fetch(topic.name, 0, at, **limits)
                assert 20_000 < len(answer.records) <= 40_000
                assert decoded(answer.records)[0].offset <= at
                at = end_of(answer.records)
        least = wire.fetch(topic.name, 0, 50, partition_max_bytes=1).records
        assert len(least) < 20_000
        # One batch comes, however large.
        assert [len(each.value or b"") for each in decoded(wire.fetch(topic.name, 0, 200).records)] == [MIB]
        waiting = fetch_request(topic.name, 0, 0, min_bytes=150_000, max_wait_ms=20_000)
        began = time.monotonic()
        wire.send(waiting)
        assert len(wire.receive_fetched().records) > 150_000
        assert time.monotonic() - began < 15, "it waited although there is enough"


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def without_end(data: bytes) -> bytes:
    return data[:-3] + bytes(3)


def flipped(data: bytes) -> bytes:
    """Among the values, which are most of it."""
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def with_another_footer(data: bytes) -> bytes:
    size = int.from_bytes(data[-8:-4], "little")
    return data[: -8 - size] + b"\xff" * size + data[-8:]


def removed(data: bytes) -> None:
    return None


def emptied(data: bytes) -> bytes:
    return b""


def test_a_data_file_that_is_gone_or_damaged_is_an_error_to_try_again(
    place: Place, compactor: LocalCompactor
) -> None:
    kinds = (removed, cut, without_end, flipped, with_another_footer, emptied)
    values = [random.Random(n).randbytes(100) + b"value-%d" % n for n in range(100)]
    plan = Plan([(1_700_000_000_000 + n, None, value, ()) for n, value in enumerate(values)])
    topics = [Compared(place, [Send(plan)]) for _ in kinds]
    compactor.compact()
    place.remove_wal()
    with Wire(place.b.address) as wire:
        for damage, topic in zip(kinds, topics, strict=True):
            (path,) = (place.directory / "objects").glob(f"warehouse/kafka/{topic.name}-*/data/*/*.parquet")
            data = path.read_bytes()
            damaged = damage(data)
            if damaged is None:
                path.unlink()
            else:
                path.write_bytes(damaged)
            for _ in range(2):
                assert wire.fetch(topic.name, 0, 50).error is ErrorCode.kafka_storage_error, damage
                error, _ = wire.list_offset(topic.name, 0, 1_700_000_000_050)
                assert error is ErrorCode.kafka_storage_error, damage
            path.write_bytes(data)
            assert fetched(wire, topic.name, 0) == topic.before[0], damage
    assert ErrorCode.kafka_storage_error.retriable
    assert "Traceback" not in place.b.log_text()
