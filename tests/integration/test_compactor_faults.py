"""What goes wrong around a compactor: it says what to do, loses nothing, and goes on when that is done.

Brokers serve all the while; what they serve is looked at before, during and after.
"""

from __future__ import annotations

import json
import logging
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient
from kio.schema.errors import ErrorCode
from pyiceberg.table import Table
from pyiceberg.types import IntegerType, LongType, StringType

from compactor.catalog import open_catalog
from compactor.spark import SparkRunner
from compactor.task import DIRECTORY, StreamState, decode
from dray.metadata.opening import open_store
from tests.batches import build_batch
from tests.integration.aio import in_own_loop
from tests.integration.local_compactor import LocalCompactor
from tests.integration.rdkafka import QUIET, TIMEOUT_S, create_topic
from tests.integration.topics_as_tables import MIB, Place, by_partition, decoded, fetched, tables_of
from tests.integration.waiting import eventually
from tests.integration.wire import Wire
from tests.naive_records import CODECS, Plan, Record, Refused, build
from tests.servers.iceberg_rest import IcebergRestServer, Relay
from tests.servers.process import free_port

# A JVM on a machine where several others start takes its time. PySpark leaves sockets to be collected.
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
DOMAINS = 2


def embedded(directory: Path, catalog: str | None = None) -> Place:
    stores = (f"sqlite:///{directory}/metadata.db", f"file://{directory}/objects")
    return Place(directory, *stores, catalog or f"sqlite:///{directory}/catalog.db")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    place = embedded(tmp_path_factory.mktemp("faults"))
    place.start()
    yield place
    place.kill()


@pytest.fixture(scope="module")
def compactor(place: Place) -> Iterator[LocalCompactor]:
    with LocalCompactor(place.settings()) as compactor:
        yield compactor


class Topic:
    """Of one partition, with batches of two records, each in a WAL object of its own."""

    def __init__(self, place: Place, name: str | None = None) -> None:
        self.place = place
        self.name = create_topic(place.a.address, name)
        self._sent = 0

    def send(self, batches: int = 3) -> list[Path]:
        """The WAL objects of these batches."""
        made: list[Path] = []
        for _ in range(batches):
            records = [(1_700_000_000_000 + n, b"k", b"%s %d" % (self.name.encode(), n), ()) for n in (0, 1)]
            made.append(self.send_batch(build(Plan(records))))
        return made

    def send_batch(self, batch: bytes) -> Path:
        before = set(wal(self.place))
        with Wire(self.place.a.address) as wire:
            assert wire.produce(self.name, 0, batch).error is ErrorCode.none
        (made,) = set(wal(self.place)) - before
        return made

    def log(self) -> list[Record]:
        """As the broker has it that did not write it."""
        with Wire(self.place.b.address) as wire:
            return fetched(wire, self.name, 0)

    def rows(self, engine: str = "PyIceberg") -> list[Record]:
        with tables_of(self.place) as read:
            return by_partition(read(engine, self.name), 1)[0]

    def check(self) -> None:
        """Log and table are one."""
        log = self.log()
        assert log
        for engine in ("PyIceberg", "DuckDB"):
            assert self.rows(engine) == log, engine

    @contextmanager
    def table(self) -> Iterator[Table]:
        """For somebody who alters it."""
        with closing(open_catalog(self.place.stores["catalog"], self.place.stores["objects"])) as tables:
            yield tables.catalog.load_table(("kafka", self.name))

    def state(self) -> StreamState:
        """The stream's record. A topic has one stream, and what its task or ranges say is the topic's."""

        async def look() -> StreamState:
            metadata = await open_store(self.place.stores["metadata"])
            try:
                states = [
                    decode(record.key, record.value)
                    for domain in range(DOMAINS)
                    for record in await metadata.scan(domain, DIRECTORY, limit=10_000)
                ]
            finally:
                await metadata.close()
            mine = [each for each in states if each.task is not None and each.task.topic == self.name]
            return mine[0] if mine else StreamState()

        return in_own_loop(look())


def wal(place: Place) -> list[Path]:
    return list((place.directory / "objects" / "wal").rglob("*.wo"))


def said(caplog: pytest.LogCaptureFixture, level: int, about: str) -> str:
    lines = [record.getMessage() for record in caplog.records if record.levelno >= level]
    found = [line for line in lines if about in line]
    assert found, lines
    return found[-1]


# --- the WAL


def gone(path: Path) -> None:
    path.unlink()


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:60])


def corrupt(path: Path) -> None:
    data = bytearray(path.read_bytes())
    at = data.index(b"topic-")
    data[at] ^= 1
    path.write_bytes(data)


def without_length(path: Path) -> None:
    """The length of the batch, before it, is beyond the chunk."""
    data = path.read_bytes()
    at = data.index(b"topic-") - 80
    path.write_bytes(data[:at] + bytes([255]) * 40 + data[at + 40 :])


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (gone, "ObjectNotFound"),
        (truncated, "ObjectTooShort"),
        (corrupt, "checksum is"),
        (without_length, ""),
    ],
)
def test_a_range_that_cannot_be_read_stays_in_the_wal_and_the_rest_is_compacted(
    place: Place,
    compactor: LocalCompactor,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], None],
    problem: str,
) -> None:
    topic, other = Topic(place), Topic(place)
    paths = topic.send(5)
    other.send()
    whole = paths[2].read_bytes()
    damage(paths[2])
    before = compactor.counts.undecodable
    compactor.compact()
    assert compactor.counts.undecodable == before + 1
    line = said(caplog, logging.ERROR, topic.name)
    assert "offsets 4 to 6 stay as they are, they cannot be decoded" in line
    assert problem in line
    other.check()
    (known,) = topic.state().undecodable
    assert (known.end_offset, known.records) == (6, 2)
    assert known.problem in line
    # Without it the log goes on to be a log, and the table to be a table.
    topic.send(1)
    compactor.compact()
    offsets = [0, 1, 2, 3, 6, 7, 8, 9, 10, 11]
    rows = topic.rows()
    assert [row.offset for row in rows] == offsets
    with Wire(place.b.address) as wire:
        assert fetched(wire, topic.name, 0, 6) == rows[4:]
        answer = wire.fetch(topic.name, 0, 4)
        if damage is corrupt:  # as in Kafka, consumers compare checksums
            with pytest.raises(Refused):
                decoded(answer.records)
        else:
            assert answer.error is ErrorCode.kafka_storage_error
    paths[2].parent.mkdir(parents=True, exist_ok=True)
    paths[2].write_bytes(whole)
    if damage is corrupt:  # what was read before may be in memory still
        place.b.kill()
        place.b.start()
    log = topic.log()
    assert [record.offset for record in log] == list(range(12))
    assert [record for record in log if record.offset in offsets] == rows


@pytest.mark.parametrize("codec", sorted({code for code, _ in CODECS.values()}))
def test_rubbish_that_a_client_sends_stays_what_it_is(
    place: Place, compactor: LocalCompactor, caplog: pytest.LogCaptureFixture, codec: int
) -> None:
    """Its checksum is right, so a broker takes it; who is to read it, nobody knows."""
    topic = Topic(place)
    topic.send(1)
    rubbish = build_batch(random.Random(codec).randbytes(500), attributes=codec, records=3)
    topic.send_batch(rubbish)
    topic.send(1)
    compactor.compact()
    assert "offsets 2 to 5 stay as they are" in said(caplog, logging.ERROR, topic.name)
    assert [row.offset for row in topic.rows()] == [0, 1, 5, 6]
    with Wire(place.b.address) as wire:
        served = wire.fetch(topic.name, 0, 2).records
        assert rubbish[17:] in served  # as it was sent, behind the base offset
        assert [record.offset for record in fetched(wire, topic.name, 0, 5)] == [5, 6]


# --- the table


def test_columns_that_people_change_are_no_trouble(place: Place, compactor: LocalCompactor) -> None:
    topic = Topic(place)
    topic.send()
    compactor.compact()
    with topic.table() as table, table.update_schema() as update:
        update.rename_column("value", "payload")
        update.add_column("note", StringType())
        update.update_column("partition", LongType())
        update.delete_column("attributes")
    topic.send()
    compactor.compact()
    log = topic.log()
    with tables_of(place) as read:
        for engine in ("PyIceberg", "DuckDB"):
            rows = read(engine, topic.name).sort_by("offset").to_pylist()
            assert [(row["offset"], row["key"], row["payload"]) for row in rows] == [
                (record.offset, record.key, record.value) for record in log
            ]
            assert {row["note"] for row in rows} == {None}
            assert "attributes" not in rows[0]
    # A column of the old name is another column.
    with topic.table() as table, table.update_schema() as update:
        update.add_column("value", IntegerType())
    topic.send()
    compactor.compact()
    rows = topic_rows(topic)
    assert len(rows) == 18
    assert {row["value"] for row in rows} == {None}


def topic_rows(topic: Topic) -> list[dict[str, object]]:
    with tables_of(topic.place) as read:
        rows: list[dict[str, object]] = read("DuckDB", topic.name).to_pylist()
        return rows


def test_a_table_that_cannot_take_records_waits_until_it_can(
    place: Place, compactor: LocalCompactor, caplog: pytest.LogCaptureFixture
) -> None:
    topic, other = Topic(place), Topic(place)
    topic.send()
    compactor.compact()
    with topic.table() as table, table.update_schema(allow_incompatible_changes=True) as update:
        update.add_column("customer", StringType(), required=True)
    topic.send()
    other.send()
    compactor.round()
    line = said(caplog, logging.WARNING, topic.name)
    assert "column 'customer' is required, and we have no values; make it optional" in line
    assert compactor.counts.waiting_tasks == 1
    other.check()
    assert len(topic.log()) == 12
    with topic.table() as table, table.update_schema() as update:
        update.update_column("customer", required=False)
    compactor.compact()
    assert [row["offset"] for row in sorted(topic_rows(topic), key=by_offset)] == list(range(12))


def by_offset(row: dict[str, object]) -> int:
    offset = row["offset"]
    assert isinstance(offset, int)
    return offset


def test_a_table_that_was_dropped_comes_back_whole(
    place: Place, compactor: LocalCompactor, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    topic = Topic(place)
    for _ in range(3):
        topic.send()
        compactor.compact()
    with topic.table() as table:
        table.catalog.drop_table(table.name())
    topic.send()
    compactor.compact()
    assert "3 files of partition 0 are added again" in said(caplog, logging.INFO, topic.name)
    assert len(topic.log()) == 24
    topic.check()


def test_a_table_that_is_not_the_topics_is_left_alone(
    place: Place, compactor: LocalCompactor, caplog: pytest.LogCaptureFixture
) -> None:
    first, topic = Topic(place), Topic(place)
    first.send()
    compactor.compact()
    with first.table() as table:
        theirs = table.catalog.create_table(("kafka", topic.name), table.schema())
        topic.send()
        compactor.round()
        line = said(caplog, logging.WARNING, topic.name)
        assert "was not made by Dray" in line
        assert "rename the table, or drop it" in line
        assert compactor.counts.waiting_tasks == 1
        assert theirs.refresh().current_snapshot() is None
        assert len(topic.log()) == 6
        table.catalog.rename_table(theirs.name(), ("kafka", f"{topic.name}-theirs"))
    compactor.compact()
    topic.check()


def test_the_table_of_a_deleted_topic_is_set_aside(
    place: Place, compactor: LocalCompactor, caplog: pytest.LogCaptureFixture
) -> None:
    old = Topic(place)
    old.send()
    compactor.compact()
    rows = old.rows()
    with old.table() as table:
        topic_id = table.properties["dray.topic-id"]
    delete_topic(old)
    new = Topic(place, old.name)
    new.send(1)
    compactor.compact()
    new.check()
    aside = f"{old.name}_deleted_{topic_id[:8]}"
    assert f"kafka.{aside}" in said(caplog, logging.WARNING, old.name)
    with tables_of(place) as read:
        for engine in ("PyIceberg", "DuckDB"):
            assert by_partition(read(engine, aside), 1)[0] == rows


def delete_topic(topic: Topic) -> None:
    admin = AdminClient({**QUIET, "bootstrap.servers": topic.place.a.address})
    admin.delete_topics([topic.name])[topic.name].result(TIMEOUT_S)
    with Wire(topic.place.a.address) as a, Wire(topic.place.b.address) as b:

        def is_gone() -> bool:
            answers = [wire.metadata(topic.name).topics[0].error_code for wire in (a, b)]
            return answers == [ErrorCode.unknown_topic_or_partition] * 2

        eventually(is_gone, "the end of the topic at both brokers")


# --- the catalog


def test_a_catalog_that_is_away_stops_nothing_but_tables(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """From the start of the compactor; and later it answers 500 to what it has committed."""
    catalog = IcebergRestServer(tmp_path / "rest")
    relay = Relay(catalog.address)
    place = embedded(tmp_path, catalog.url(address=relay.address))
    relay.start()
    try:
        place.start()
        topic = Topic(place)
        topic.send()
        with LocalCompactor(place.settings()) as compactor:
            compactor.round()
            assert (compactor.counts.waiting_tasks, compactor.counts.failures) == (1, 1)
            line = said(caplog, logging.WARNING, topic.name)
            assert "its table waits, and reading and writing go on" in line
            assert relay.address in line
            assert topic.state().task is not None
            assert topic.state().unfinished is not None
            (data,) = (tmp_path / "objects" / "warehouse").rglob("*.parquet")
            topic.send()
            assert len(topic.log()) == 12
            catalog.start()
            compactor.compact()
            topic.check()
            assert data.exists()

            relay.answer_commits(500)
            topic.send()
            compactor.compact()
            topic.check()
    finally:
        relay.stop()
        place.kill()
        catalog.kill()


# --- whatever runs out


def test_a_disk_that_is_full_while_files_are_written(tmp_path: Path, place: Place) -> None:
    topic = Topic(place)
    values = [(1_700_000_000_000, None, random.Random(n).randbytes(1_000_000), ()) for n in range(3)]
    for value in values:
        topic.send_batch(build(Plan([value])))
    wanted = place.settings(**{"compaction.task.bytes": 8 * MIB})
    settings = [f"{name}={value}" for name, value in wanted.items()]
    argv = [sys.executable, "-m", "tests.integration.local_compactor", str(2 * MIB), *settings]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert (counts["waiting_tasks"], counts["failures"], counts["records"]) == (1, 1, 0)
    (line,) = [line for line in done.stderr.splitlines() if topic.name in line]
    assert "files are to be written again: ObjectStoreFull" in line
    assert "free space and try again" in line
    assert len(topic.log()) == 3
    left = list((place.directory / "objects" / ".dray-staging").iterdir())
    assert not left, "what was written in part takes room"
    with LocalCompactor(place.settings()) as compactor:
        compactor.compact()
    topic.check()


def test_a_worker_without_memory_says_what_to_do(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """A batch of zeros takes a few bytes until it is decoded."""
    topic = Topic(place)
    zeros = (1_700_000_000_000, None, bytes(300 * MIB), ())
    topic.send_batch(build(Plan([zeros], "zstd")))
    few = SparkRunner("local[1]", {"spark.executor.pyspark.memory": "1g"})
    try:
        with LocalCompactor(place.settings(), few) as compactor:
            compactor.round()
            assert compactor.counts.waiting_tasks == 1
    finally:
        few.close()
    line = said(caplog, logging.WARNING, topic.name)
    assert "out of memory: make compaction.task.bytes smaller, or give executors more memory" in line
    with LocalCompactor(place.settings()) as compactor:
        compactor.compact()
    assert [len(row.value or b"") for row in topic.rows()] == [300 * MIB]


def test_the_command_says_that_something_waits(place: Place) -> None:
    """And ends with 1, so that whoever runs it by the clock is told."""
    topic = Topic(place)
    topic.send()
    stores = {**place.stores, "catalog": f"rest+http://127.0.0.1:{free_port()}/"}
    argv = [sys.executable, "-m", "dray", "compactor", "--once", "--master=local[1]"]
    argv += [f"--{name}={url}" for name, url in stores.items()]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1, done.stderr
    assert "unfinished" in done.stdout
    last = done.stderr.splitlines()[-1]
    assert last.startswith("drayd: 1 tasks are unfinished, 1 things failed")
    assert "nothing is lost, run it again" in last
    assert "its table waits, and reading and writing go on" in done.stderr
    assert "Traceback" not in done.stderr
    with LocalCompactor(place.settings()) as compactor:
        compactor.compact()
    topic.check()
