"""Clusters that are being compacted: producers that go on, a reader that begins again and again, and what has
to be so in the end.

What was acknowledged is known record by record, so the log and the table are compared with that, and with
each other.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias
from uuid import UUID

import duckdb
from confluent_kafka import Consumer, KafkaError, TopicPartition
from kio.schema.errors import ErrorCode

from compactor.catalog import TopicTable, objects_uri, open_catalog
from compactor.task import DIRECTORY, State, Task, decode
from dray.errors import TableGone
from dray.index.entry import ParquetFile, WalChunk, live, place_all, sequence_of, stream_domain
from dray.metadata.keys import CLUSTER_DOMAIN
from dray.metadata.opening import open_store
from dray.metadata.store import MetadataStore, Record
from dray.objectstore.opening import open_object_store
from dray.objectstore.store import ObjectStore
from dray.topics.record import TOPICS, TopicRecord, decode_topic
from dray.wal.objects import OBJECTS, STAGING, decode_record, record_key, reference_key
from dray.wal.orphans import OrphanCollector
from tests.integration.conftest import BrokerCluster
from tests.integration.rdkafka import QUIET, TIMEOUT_S, create_topic
from tests.integration.waiting import eventually
from tests.integration.wire import Produced, Wire, produce_request
from tests.naive_records import CODECS, Plan, build, rows_as_records

DOMAINS = 2
PARTITIONS = 2
TOPICS_MADE = 2
NAMESPACE = "kafka"
# What a consumer sees of a record, without its offset.
Seen: TypeAlias = tuple[int, bytes | None, bytes | None, tuple[tuple[str, bytes | None], ...]]
Log: TypeAlias = dict[int, Seen]
Place: TypeAlias = tuple[str, int]


class CompactedCluster:
    """Two brokers, topics, and compactors whenever somebody asks for one."""

    def __init__(self, directory: Path, metadata: str, objects: str, catalog: str | None = None) -> None:
        self.metadata, self.objects = metadata, objects
        self.catalog = catalog or f"sqlite:///{directory}/catalog.db"
        self._cluster = BrokerCluster(directory, metadata, objects)
        settings = {"metadata.domains": DOMAINS, "wal.linger.ms": 10}
        self.a = self._cluster.broker("a", settings=settings)
        self.b = self._cluster.broker("b", settings=settings)
        self.topics: list[str] = []

    def start(self) -> None:
        self.a.start()
        self.b.start()
        self.topics = [create_topic(self.a.address, partitions=PARTITIONS) for _ in range(TOPICS_MADE)]

    def kill(self) -> None:
        self.a.kill()
        self.b.kill()

    @property
    def places(self) -> list[Place]:
        return [(topic, partition) for topic in self.topics for partition in range(PARTITIONS)]

    def settings(self, **more: object) -> list[str]:
        """Of a compactor that keeps nothing for latecomers, so that all is collected at once."""
        given = {
            "metadata": self.metadata,
            "objects": self.objects,
            "catalog": self.catalog,
            "wal.gc.grace.ms": 0,
            "table.snapshots.keep": 1,
            "table.snapshots.max.age.ms": 0,
            **{name.replace("_", "."): value for name, value in more.items()},
        }
        return [f"{name}={value}" for name, value in given.items()]


# --- compactors


class Child:
    """Compactors one after the other, in processes of their own: see `compactor_child`."""

    def __init__(self, settings: Sequence[str], log: Path) -> None:
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.integration.compactor_child", *settings],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        self.effects: list[str] = []  # of the compactor that runs, or ran last, since it was armed
        self.rounds: list[dict[str, int]] = []
        self.owner = ""  # as it is registered
        self.pid = 0
        self.is_ready = self.is_stopped = False

    def begin(self, **orders: object) -> None:
        self.effects, self.rounds, self.owner = [], [], ""
        self.is_ready = self.is_stopped = False
        self._say(json.dumps(orders))
        self.pid = self._hear()["pid"]

    def ready(self) -> bool:
        """It has finished what others left, and waits. False: it is gone."""
        while not self.is_ready:
            if self._next() is not None:
                return False
        return True

    def go(self) -> None:
        self._say("go")

    def ended(self) -> int:
        """How it ended: 0, or the signal, negative."""
        while (code := self._next()) is None:
            pass
        return code

    def stopped(self) -> bool:
        """It is stopped now; False: it ended."""
        while not self.is_stopped:
            if self._next() is not None:
                return False
        return True

    def round_done(self, count: int = 1) -> dict[str, int]:
        """What it has done after so many more rounds."""
        wanted = len(self.rounds) + count
        while len(self.rounds) < wanted:
            code = self._next()
            assert code is None, f"the compactor ended with {code}"
        return self.rounds[-1]

    def signal(self, which: signal.Signals) -> None:
        os.kill(self.pid, which)

    def close(self) -> None:
        if self.pid:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()

    def _next(self) -> int | None:
        said = self._hear()
        if "effect" in said:
            self.effects.append(said["effect"])
        elif "owner" in said:
            self.owner = said["owner"]
        elif "ready" in said:
            self.is_ready = True
        elif "stopped" in said:
            self.is_stopped = True
        elif "round" in said:
            self.rounds.append(said["round"])
        elif "exit" in said:
            self.pid = 0
            return int(said["exit"])
        return None

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the children's parent is gone: see its log"
        said: dict[str, Any] = json.loads(line)
        return said

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()


# --- who writes


class Traffic:
    """Writes batches of all kinds to one place after the other, through both brokers, until it is stopped.

    Half of them are of idempotent producers, who send each to both brokers at the same time and at times once
    more: all but one are duplicates. Some come of nowhere in their sequence, and are void or refused.
    """

    def __init__(self, cluster: CompactedCluster, seed: int, pause_s: float) -> None:
        self._chance = random.Random(seed)
        self._cluster = cluster
        self._pause_s = pause_s
        self._place = cluster.places[0]
        self._thread = threading.Thread(target=self._run, name="traffic")
        self._ended = threading.Event()
        self._sequences: dict[Place, int] = defaultdict(int)
        self._number = 0
        self.known: dict[Place, Log] = defaultdict(dict)  # what was acknowledged
        self.batches = 0
        self.failure: BaseException | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join(TIMEOUT_S)
        self.check()

    def check(self) -> None:
        if self.failure is not None:
            raise AssertionError("a producer failed") from self.failure

    def more(self, batches: int, place: Place | None = None) -> None:
        """Go on at another place, and wait until so many more batches are acknowledged."""
        self._place = place or self._chance.choice(self._cluster.places)
        goal = self.batches + batches
        eventually(lambda: self.batches >= goal or self.failure, "batches acknowledged")
        self.check()

    def _run(self) -> None:
        try:
            with Wire(self._cluster.a.address) as a, Wire(self._cluster.b.address) as b:
                while not self._ended.wait(self._pause_s):
                    place = self._place
                    if self._chance.random() < 0.5:
                        self._plain(self._chance.choice((a, b)), place)
                    else:
                        self._idempotent(a, b, place)
                    self.batches += 1
        except BaseException as error:
            self.failure = error

    def _plain(self, wire: Wire, place: Place) -> None:
        plan = self._plan((-1, -1, -1))
        answer = wire.produce(*place, build(plan))
        assert answer.error is ErrorCode.none, answer
        self._acknowledged(place, answer.base_offset, plan)

    def _idempotent(self, a: Wire, b: Wire, place: Place) -> None:
        producer_id = 1_000 + self._cluster.places.index(place)
        plan = self._plan((producer_id, 0, self._sequences[place]))
        self._sequences[place] += len(plan.records)
        batch = build(plan)
        self._send_to_both(a, b, place, batch)
        answers = self._send_to_both(a, b, place, batch) if self._chance.random() < 0.3 else []
        answers += [wire.produce(*place, batch) for wire in (a, b)]
        # It is the next one, so whatever became of it before, now it is there: once.
        offsets = {answer.base_offset for answer in answers if answer.error is ErrorCode.none}
        assert len(offsets) == 1, answers
        self._acknowledged(place, offsets.pop(), plan)
        if self._chance.random() < 0.2:
            from_nowhere = self._plan((producer_id, 0, self._sequences[place] + 7))
            for answer in self._send_to_both(a, b, place, build(from_nowhere)):
                assert answer.error is not ErrorCode.none, answer

    def _send_to_both(self, a: Wire, b: Wire, place: Place, batch: bytes) -> list[Produced]:
        for wire in (a, b):
            wire.send(produce_request(*place, batch))
        return [wire.receive_produced() for wire in (a, b)]

    def _plan(self, producer: tuple[int, int, int]) -> Plan:
        chance = self._chance
        now = time.time_ns() // 1_000_000
        records = []
        for _ in range(chance.randrange(1, 5)):
            self._number += 1
            value = chance.choice([None, b"", b"%d" % self._number, b"%d" % self._number * 100])
            headers = tuple((name, chance.choice([None, b"", b"x"])) for name in "aab"[: chance.randrange(4)])
            key = chance.choice([None, b"k%d" % self._number])
            records.append((now + chance.randrange(-5_000, 5), key, value, headers))
        return Plan(records, chance.choice(sorted(CODECS)), base_timestamp=records[0][0], producer=producer)

    def _acknowledged(self, place: Place, offset: int, plan: Plan) -> None:
        for number, (timestamp, key, value, headers) in enumerate(plan.records):
            self.known[place][offset + number] = (timestamp, key, value, headers)


# --- who reads


class Rereader:
    """Reads everything from offset 0 on, again and again: it never gets anything else than before."""

    def __init__(self, cluster: CompactedCluster) -> None:
        self._places = cluster.places
        self._conf = {
            **QUIET,
            "bootstrap.servers": cluster.b.address,
            "group.id": "unused",
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "enable.partition.eof": True,
            "check.crcs": True,
            "fetch.wait.max.ms": 20,
        }
        self._thread = threading.Thread(target=self._run, name="reader")
        self._ended = threading.Event()
        self.logs: dict[Place, Log] = {place: {} for place in self._places}
        self._ends = dict.fromkeys(self._places, 0)
        self.passes = 0
        self.failure: BaseException | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join(TIMEOUT_S)
        self.check()

    def check(self) -> None:
        if self.failure is not None:
            raise AssertionError(f"a reader failed: {self.failure}") from self.failure

    def again(self) -> None:
        """Wait until everything that there is now was read once more."""
        goal = self.passes + 2  # one is under way
        eventually(lambda: self.passes >= goal or self.failure, "read once more", limit_s=60)
        self.check()

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                # A new one each time: librdkafka takes answers without a record, which void batches are, for
                # records that are too large, and after ten of them says so.
                with closing(Consumer(self._conf)) as consumer:
                    self._read(consumer)
        except BaseException as error:
            self.failure = error

    def _read(self, consumer: Consumer) -> None:
        consumer.assign([TopicPartition(topic, partition, 0) for topic, partition in self._places])
        got: dict[Place, Log] = {place: {} for place in self._places}
        ends: dict[Place, int] = {}
        deadline = time.monotonic() + TIMEOUT_S
        while len(ends) < len(self._places):
            assert time.monotonic() < deadline, f"nothing comes any more, at {ends}"
            for message in consumer.consume(10_000, timeout=0.1):
                topic, partition, offset = message.topic(), message.partition(), message.offset()
                assert topic is not None
                assert partition is not None
                assert offset is not None
                place, error = (topic, partition), message.error()
                if error is not None:
                    assert error.code() == KafkaError._PARTITION_EOF, error
                    ends.setdefault(place, offset)
                    continue
                log = got[place]
                assert offset > max(log, default=-1), f"{place}: {offset} again, or out of order"
                headers: Any = tuple(message.headers() or ())
                log[offset] = (message.timestamp()[1], message.key(), message.value(), headers)
        for place, end in ends.items():
            before = self.logs[place]
            assert end >= self._ends[place], f"{place} ended at {self._ends[place]}, and then at {end}"
            now = {offset: seen for offset, seen in got[place].items() if offset < self._ends[place]}
            assert now == before, f"{place}: {_difference(before, now)}"
            self.logs[place], self._ends[place] = (
                {offset: seen for offset, seen in got[place].items() if offset < end},
                end,
            )
        self.passes += 1


def _difference(before: Log, now: Log) -> str:
    lacks = sorted(before.keys() - now.keys())
    added = sorted(now.keys() - before.keys())
    other = [(at, before[at], now[at]) for at in before.keys() & now.keys() if before[at] != now[at]]
    return f"lacks {lacks[:9]}, has in addition {added[:9]}, has otherwise {other[:3]}"


@contextmanager
def traffic_and_reader(
    cluster: CompactedCluster, seed: int, pause_s: float = 0.05
) -> Iterator[tuple[Traffic, Rereader]]:
    traffic, reader = Traffic(cluster, seed, pause_s), Rereader(cluster)
    traffic.start()
    reader.start()
    try:
        yield traffic, reader
    finally:
        traffic._ended.set()
        reader._ended.set()
        traffic._thread.join(TIMEOUT_S)
        reader._thread.join(TIMEOUT_S)


# --- what has to be so in the end


def check_records(cluster: CompactedCluster, traffic: Traffic, reader: Rereader) -> None:
    """Everything acknowledged is in the log, and nothing else; and the table is the log."""
    reader.again()
    for place in cluster.places:
        known, log = traffic.known[place], reader.logs[place]
        assert log == known, _difference(known, log)
    written = {topic for (topic, _), log in reader.logs.items() if log}
    for (topic, partition), log in reader.logs.items():
        if topic not in written:
            continue  # the chance that chooses where to write may leave a topic out: it has no table
        with opened_table(cluster, topic) as table:
            # What DuckDB and PyIceberg read is one thing, row by row; so a row that is there twice shows.
            for found in (read_table(table), read_with_duckdb(table, cluster.objects)):
                rows = [row for row in found if row[0] == partition]
                assert len(rows) == len(log), f"{topic}-{partition}: {len(rows)} rows, {len(log)} records"
                assert {row[1]: row[2] for row in rows} == log, _difference(
                    log, {row[1]: row[2] for row in rows}
                )


@contextmanager
def opened_table(cluster: CompactedCluster, topic: str) -> Iterator[TopicTable]:
    tables = open_catalog(cluster.catalog, cluster.objects)
    with closing(tables):
        topic_id = asyncio.run(_topic(cluster, topic)).topic_id
        yield tables.find_table(NAMESPACE, topic, topic_id)


async def _topic(cluster: CompactedCluster, topic: str) -> TopicRecord:
    async with _stores(cluster) as (metadata, _):
        return next(each for each in await _topics(metadata) if each.name == topic)


async def _topics(metadata: MetadataStore) -> list[TopicRecord]:
    records = await _all(metadata, CLUSTER_DOMAIN, TOPICS)
    return [decode_topic(record.key, record.value) for record in records]


Row: TypeAlias = tuple[int, int, Seen]


def read_table(table: TopicTable) -> list[Row]:
    found = table.table.refresh().scan().to_arrow()
    return [
        (partition, each.offset, (each.timestamp, each.key, each.value, each.headers))
        for partition, each in zip(found["partition"].to_pylist(), rows_as_records(found), strict=True)
    ]


def read_with_duckdb(table: TopicTable, objects: str) -> list[Row]:
    with duckdb.connect() as connection:
        for extension in ("avro", "httpfs", "iceberg"):
            module = __import__(f"duckdb_extension_{extension}")
            connection.load_extension(str(next(Path(module.__path__[0]).rglob("*.duckdb_extension"))))
        for setting in _duckdb_settings(objects):
            connection.execute(setting)
        location = table.table.metadata_location
        found = connection.execute(
            'SELECT partition, "offset", epoch_us("timestamp") // 1000, raw_timestamp, key, value, headers'
            f" FROM iceberg_scan('{location}')"
        ).fetchall()
    return [
        (
            partition,
            offset,
            (
                raw if timestamp is None else timestamp,
                key,
                value,
                tuple((header["key"], header["value"]) for header in headers),
            ),
        )
        for partition, offset, timestamp, raw, key, value, headers in found
    ]


def _duckdb_settings(objects: str) -> list[str]:
    if not objects.startswith("s3:"):
        return []
    endpoint = objects.rpartition("endpoint=")[2].partition("&")[0].replace("%3A", ":").replace("%2F", "/")
    named = {
        "s3_endpoint": endpoint.removeprefix("http://"),
        "s3_url_style": "path",
        "s3_use_ssl": "false",
        "s3_region": os.environ.get("AWS_REGION", "us-east-1"),
        "s3_access_key_id": os.environ["AWS_ACCESS_KEY_ID"],
        "s3_secret_access_key": os.environ["AWS_SECRET_ACCESS_KEY"],
    }
    return [f"SET {name}='{value}'" for name, value in named.items()]


def check_stores(cluster: CompactedCluster, *, has_tables: bool = True) -> None:
    """All is finished, and every object is one that something leads to."""
    asyncio.run(_check_stores(cluster, has_tables))


async def _check_stores(cluster: CompactedCluster, has_tables: bool) -> None:
    async with _stores(cluster) as (metadata, objects):
        reachable: set[str] = set()
        topics = await _topics(metadata)
        for domain in range(DOMAINS):
            for record in await _all(metadata, domain, DIRECTORY):
                task = decode(record.key, record.value).task
                assert task is None or task.state is State.DONE, record
            assert await _all(metadata, domain, "garbage/wal") == []
            assert await _all(metadata, domain, "garbage/files") == []
            # Objects of which every batch turned out to be a duplicate were never committed.
            orphans = OrphanCollector(metadata, objects)
            now_ms = time.time_ns() // 1_000_000 + 1
            await orphans.collect(domain, now_ms, 0)
            await orphans.forget_fences(domain, now_ms, 0)
            assert await _all(metadata, domain, STAGING) == []
        referenced: dict[int, set[str]] = defaultdict(set)
        for topic in topics:
            for stream in topic.streams:
                domain = stream_domain(stream, DOMAINS)
                entries = place_all(await metadata.entries(domain, sequence_of(stream), 0, 100_000))
                assert live(entries) == entries, "what was swapped out is still there"
                at = 0
                for placed in entries:
                    assert placed.start_offset == at, f"{topic.name}: a hole at {at}"
                    at = placed.end_offset
                    where = placed.entry.where
                    if isinstance(where, WalChunk):
                        referenced[domain] |= {
                            record_key(where.object_id),
                            reference_key(where.object_id, stream),
                        }
                        reachable.add(where.path)
                    elif isinstance(where, ParquetFile):
                        reachable.add(where.path)
        for domain in range(DOMAINS):
            records = await _all(metadata, domain, OBJECTS)
            assert {record.key for record in records} ^ referenced[domain] == set(), records
            paths = {decode_record(r.key, r.value).path for r in records if "-" not in r.key}
            assert paths <= reachable
        if has_tables:
            uri = objects_uri(cluster.objects) + "/"
            for topic in topics:
                reachable |= {
                    path.removeprefix(uri)
                    for path in await asyncio.to_thread(_files_of_table, cluster, topic.name, topic.topic_id)
                }
        found = {info.key for info in await _listed(objects)}
        assert reachable <= found, f"missing: {reachable - found}"
        leaked = {key for key in found - reachable if "/metadata/" not in key}
        assert not leaked, f"leaked: {sorted(leaked)}"


def _files_of_table(cluster: CompactedCluster, topic: str, topic_id: UUID) -> set[str]:
    with closing(open_catalog(cluster.catalog, cluster.objects)) as tables:
        try:
            table = tables.find_table(NAMESPACE, topic, topic_id).table
        except TableGone:  # nobody wrote to the topic
            return set()
        return set(table.inspect.all_data_files()["file_path"].to_pylist())


@asynccontextmanager
async def _stores(cluster: CompactedCluster) -> AsyncIterator[tuple[MetadataStore, ObjectStore]]:
    metadata = await open_store(cluster.metadata)
    objects = await open_object_store(cluster.objects)
    try:
        yield metadata, objects
    finally:
        await objects.close()
        await metadata.close()


async def _all(metadata: MetadataStore, domain: int, directory: str) -> list[Record]:
    await metadata.barrier(domain)
    return await metadata.scan(domain, directory, limit=100_000)


async def _listed(objects: ObjectStore) -> list[Any]:
    found: list[Any] = []
    after = ""
    while page := await objects.list("", after=after, limit=1_000):
        found += page
        after = page[-1].key
    return found


def unfinished(cluster: CompactedCluster) -> list[Task]:
    async def look() -> list[Task]:
        async with _stores(cluster) as (metadata, _):
            records = [each for domain in range(DOMAINS) for each in await _all(metadata, domain, DIRECTORY)]
        tasks = [decode(record.key, record.value).unfinished for record in records]
        return [task for task in tasks if task is not None]

    return asyncio.run(look())
