"""Commits to tables on the embedded catalog: once, whatever others do in between."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from dataclasses import replace as changed
from datetime import timedelta
from pathlib import Path
from uuid import UUID, uuid4

import pytest
from pyiceberg.io.pyarrow import pyarrow_to_schema
from pyiceberg.manifest import ManifestContent
from pyiceberg.schema import Schema
from pyiceberg.table.snapshots import Operation
from pyiceberg.types import IntegerType, LongType, NestedField, StringType

from compactor.catalog import (
    BY_PARTITION_AND_DAY,
    PROPERTIES,
    TOPIC_ID,
    TopicTable,
    TopicTables,
    objects_uri,
    open_catalog,
)
from compactor.commit import Applied, NewFile, Rewrite, append, expire, replace, still_needed
from dray.columns.schema import FIELD_IDS, SCHEMA
from dray.errors import (
    CatalogMisconfigured,
    CatalogUnavailable,
    ClaimLost,
    InputsGone,
    TableAltered,
    TableBehind,
    TableGone,
    TableOfAnotherTopic,
)
from tests.tables import (
    START,
    expected,
    make_rows,
    read_duckdb,
    read_iceberg,
    write_file,
)
from tests.tables import (
    TOPIC_ID as TOPIC,
)

Opener = Callable[[], TopicTables]


@pytest.fixture
def open_tables(tmp_path: Path) -> Iterator[Opener]:
    """Each call is another process, as far as the catalog can tell."""
    opened: list[TopicTables] = []

    def open_one() -> TopicTables:
        opened.append(open_catalog(f"sqlite:///{tmp_path}/catalog.db", f"file://{tmp_path}/objects"))
        return opened[-1]

    yield open_one
    for tables in opened:
        tables.close()


@pytest.fixture
def table(open_tables: Opener) -> TopicTable:
    return open_tables().ensure_table("kafka", "orders.eu", TOPIC)


@pytest.fixture
def other(open_tables: Opener, table: TopicTable) -> TopicTable:
    """The same table, for somebody else."""
    return open_tables().ensure_table("kafka", "orders.eu", TOPIC)


def at_once(seconds: float) -> None:
    """Instead of a pause between attempts."""


def now_ms() -> int:
    return time.time_ns() // 1_000_000 + 1


def metadata_files(table: TopicTable) -> set[str]:
    directory = Path(table.table.location().removeprefix("file://")) / "metadata"
    return {f"file://{path}" for path in directory.iterdir() if path.suffix == ".avro"}


def reachable_files(table: TopicTable) -> set[str]:
    snapshots = table.table.refresh().snapshots()
    manifests = {each.manifest_path for snapshot in snapshots for each in snapshot.manifests(table.table.io)}
    return manifests | {snapshot.manifest_list for snapshot in snapshots}


# --- the table


def test_a_new_table_has_our_columns_under_our_ids(table: TopicTable) -> None:
    assert table.created
    schema = table.table.schema()
    assert {name: schema.find_field(name).field_id for name in FIELD_IDS} == FIELD_IDS
    assert str(schema.find_type("timestamp")) == "timestamptz"
    assert [(each.name, str(each.transform)) for each in table.table.spec().fields] == [
        ("partition", "identity")
    ]
    properties = table.table.properties
    assert properties[TOPIC_ID] == str(TOPIC)
    assert properties["gc.enabled"] == "false"
    # It would stop the retries of everybody else as well.
    assert "commit.retry.num-retries" not in properties
    assert table.table.location().endswith(f"/objects/warehouse/kafka/orders.eu-{TOPIC.hex[:8]}")


def test_the_second_to_ask_gets_the_same_table(table: TopicTable, other: TopicTable) -> None:
    assert not other.created
    assert other.table.metadata.table_uuid == table.table.metadata.table_uuid


def test_a_table_of_another_topic_is_left_alone(open_tables: Opener, table: TopicTable) -> None:
    with pytest.raises(TableOfAnotherTopic, match="rename the table") as raised:
        open_tables().ensure_table("kafka", "orders.eu", UUID(int=8))
    assert raised.value.found == str(TOPIC)


def test_a_table_that_somebody_made_is_left_alone(open_tables: Opener) -> None:
    tables = open_tables()
    tables.catalog.create_namespace("kafka")
    tables.catalog.create_table("kafka.mine", Schema(NestedField(1, "a", StringType(), required=False)))
    with pytest.raises(TableOfAnotherTopic, match="was not made by Dray") as raised:
        tables.ensure_table("kafka", "mine", TOPIC)
    assert raised.value.found is None


@pytest.mark.parametrize(
    ("column", "problem"),
    [
        (NestedField(5, "key", StringType(), required=False), "'key' has type string, not binary"),
        (NestedField(2, "offset", IntegerType(), required=True), "'offset' has type int, not long"),
        (NestedField(4, "raw_timestamp", LongType(), required=True), "'raw_timestamp' is required"),
    ],
)
def test_a_table_that_cannot_take_our_records(open_tables: Opener, column: NestedField, problem: str) -> None:
    """As somebody made it who gave it the topic's id."""
    tables = open_tables()
    tables.catalog.create_namespace("kafka")
    ours = pyarrow_to_schema(SCHEMA).fields
    fields = [column if field.field_id == column.field_id else field for field in ours]
    properties = {**PROPERTIES, TOPIC_ID: str(TOPIC)}
    tables.catalog.create_table("kafka.odd", Schema(*fields), properties=properties)
    with pytest.raises(TableAltered, match=problem):
        tables.ensure_table("kafka", "odd", TOPIC)


def test_a_column_that_we_have_no_values_for(table: TopicTable) -> None:
    with table.table.update_schema(allow_incompatible_changes=True) as change:
        change.add_column("country", StringType(), required=True)
    with pytest.raises(TableAltered, match="'country' is required, and we have no values; make it optional"):
        append(table, [write_file(table, 0, 0, 5)])
    with table.table.update_schema() as change:
        change.make_column_optional("country")
    append(table, [write_file(table, 0, 0, 5)])


def test_a_topic_of_a_nested_namespace(open_tables: Opener) -> None:
    table = open_tables().ensure_table("lake.kafka", "orders", TOPIC)
    append(table, [write_file(table, 0, 0, 3)])
    assert read_iceberg(table.table) == expected((0, 0, 3))


# --- files, once


def test_files_of_many_partitions_are_one_commit(table: TopicTable) -> None:
    files = [write_file(table, partition, 0, 5) for partition in range(20)]
    applied = append(table, reversed(files))
    snapshot = table.table.current_snapshot()
    assert snapshot is not None
    assert applied == [Applied(file.task_id, file.path, snapshot.snapshot_id, before=False) for file in files]
    assert len(table.table.snapshots()) == 1
    assert [table.end_offset(partition) for partition in range(21)] == [5] * 20 + [0]
    rows = expected(*((partition, 0, 5) for partition in range(20)))
    assert read_iceberg(table.table) == rows
    assert read_duckdb(table.table) == rows


def test_what_is_in_the_table_is_not_added_again(table: TopicTable) -> None:
    files = [write_file(table, 0, 0, 5), write_file(table, 1, 0, 5)]
    first = append(table, files)
    later = write_file(table, 1, 5, 9, follows=5)
    assert append(table, [*files, later])[:2] == [changed(each, before=True) for each in first]
    assert len(table.table.snapshots()) == 2
    assert read_duckdb(table.table) == expected((0, 0, 5), (1, 0, 9))


def test_two_committers_of_the_same_files(table: TopicTable, other: TopicTable) -> None:
    """The other one is faster by just so much that this one has looked already.

    PyIceberg's own commit would be tried again at this point, and add the files once more.
    """
    files = [write_file(table, 0, 0, 5), write_file(table, 1, 0, 5)]
    raced: list[Applied] = []

    def touch() -> None:
        if not raced:
            raced.extend(append(other, files))

    applied = append(table, files, touch=touch, pause=at_once)
    assert applied == [changed(each, before=True) for each in raced]
    assert not any(each.before for each in raced)
    assert len(table.table.snapshots()) == 1
    assert read_duckdb(table.table) == expected((0, 0, 5), (1, 0, 5))


def test_two_committers_of_different_files(table: TopicTable, other: TopicTable) -> None:
    mine, theirs = write_file(table, 0, 0, 5), [write_file(table, 1, 0, 5)]

    def touch() -> None:
        if theirs:
            append(other, [theirs.pop()])

    applied = append(table, [mine], touch=touch, pause=at_once)
    assert [each.before for each in applied] == [False]
    assert read_duckdb(table.table) == expected((0, 0, 5), (1, 0, 5))
    # What was written for the attempt that lost is gone.
    assert metadata_files(table) == reachable_files(table)


def test_half_of_the_files_are_committed_by_another(table: TopicTable, other: TopicTable) -> None:
    files = [write_file(table, partition, 0, 5) for partition in range(4)]
    theirs = files[:2]

    def touch() -> None:
        if theirs:
            append(other, theirs)
            theirs.clear()

    applied = append(table, files, touch=touch, pause=at_once)
    assert [each.before for each in applied] == [True, True, False, False]
    assert read_duckdb(table.table) == expected(*((partition, 0, 5) for partition in range(4)))


def test_nothing_is_committed_by_whoever_lost_the_claim(table: TopicTable) -> None:
    def touch() -> None:
        raise ClaimLost(1)

    with pytest.raises(ClaimLost):
        append(table, [write_file(table, 0, 0, 5)], touch=touch)
    assert table.table.refresh().current_snapshot() is None


def test_commits_of_people_in_between(table: TopicTable, other: TopicTable) -> None:
    """Those of people are none of ours, and ours does not undo them."""
    pending = [make_rows(3, 0, 2), make_rows(3, 2, 4)]

    def touch() -> None:
        if pending:
            other.table.refresh().append(pending.pop(0).cast(other.table.schema().as_arrow()))

    append(table, [write_file(table, 0, 0, 5)], touch=touch, pause=at_once)
    assert read_duckdb(table.table) == expected((0, 0, 5), (3, 0, 4))


def test_somebody_who_is_faster_each_time(table: TopicTable, other: TopicTable) -> None:
    count = 0

    def touch() -> None:
        nonlocal count
        append(other, [write_file(other, 1, count, count + 1)])
        count += 1

    with pytest.raises(CatalogUnavailable, match="no commit in 10 attempts"):
        append(table, [write_file(table, 0, 0, 5)], touch=touch, pause=at_once)
    assert read_iceberg(table.table) == expected((1, 0, 10))


@pytest.mark.parametrize("witness", ["property", "commit id", "path"])
def test_each_witness_alone_is_enough(table: TopicTable, witness: str) -> None:
    """Also after snapshots were expired, and where somebody has unset the property."""
    files = [write_file(table, partition, 0, 5) for partition in range(2)]
    append(table, files)
    if witness != "property":
        with table.table.transaction() as transaction:
            transaction.remove_properties("dray.end-offset.0", "dray.end-offset.1")
    if witness != "commit id":
        append(table, [write_file(table, 2, 0, 5)])
        assert expire(table, keep=1, older_than_ms=now_ms()).snapshots == 1
    applied = append(table, files)
    assert [each.before for each in applied] == [True, True]
    assert [each.snapshot_id is None for each in applied] == [witness != "commit id"] * 2
    assert [row for row in read_iceberg(table.table) if row[0] < 2] == expected((0, 0, 5), (1, 0, 5))


def test_a_commit_that_was_rolled_back_is_not_in_the_table(table: TopicTable) -> None:
    """The property stays as it is: whoever takes records out of a table has meant it."""
    append(table, [write_file(table, 0, 0, 5)])
    first = table.table.current_snapshot()
    assert first is not None
    file = write_file(table, 0, 5, 9)
    append(table, [file])
    table.table.manage_snapshots().rollback_to_snapshot(first.snapshot_id).commit()
    assert append(table, [file])[0].before
    assert read_iceberg(table.table) == expected((0, 0, 5))


# --- dropped and altered


def test_a_dropped_table_is_made_anew_with_all_files(open_tables: Opener, table: TopicTable) -> None:
    old = [write_file(table, 0, 0, 5), write_file(table, 0, 5, 9, follows=5), write_file(table, 1, 0, 3)]
    append(table, old)
    table.tables.catalog.drop_table(table.table.name())
    new = write_file(table, 0, 9, 12, follows=9)
    with pytest.raises(TableGone):
        append(table, [new])

    again = open_tables().ensure_table("kafka", "orders.eu", TOPIC)
    assert again.created
    assert again.end_offset(0) == 0
    with pytest.raises(TableGone):  # for whoever has the old one in hand: it is another
        append(table, [new])
    with pytest.raises(TableBehind) as raised:
        append(again, [new])
    assert (raised.value.partition, raised.value.end_offset, raised.value.expected) == (0, 0, 9)

    append(again, old[:1])
    append(again, [new, *old])
    assert append(again, [*old, new])[0].before
    assert read_duckdb(again.table) == expected((0, 0, 12), (1, 0, 3))


@pytest.mark.parametrize("what", ["add", "rename", "drop", "widen"])
def test_columns_that_somebody_changed(table: TopicTable, what: str) -> None:
    append(table, [write_file(table, 0, 0, 5)])
    with table.table.update_schema() as change:
        match what:
            case "add":
                change.add_column("note", StringType())
            case "rename":
                change.rename_column("value", "payload")
            case "drop":
                change.delete_column("attributes")
            case "widen":
                change.update_column("partition", LongType())
    file = write_file(table, 0, 5, 9)
    append(table, [file])
    if what == "rename":
        found = table.table.scan(selected_fields=("offset", "payload")).to_arrow().to_pylist()
        assert sorted(row["payload"] for row in found) == [f"0/{n}".encode() for n in range(9)]
    else:
        assert read_iceberg(table.table) == expected((0, 0, 9))
        assert read_duckdb(table.table) == expected((0, 0, 9))
    assert append(table, [file])[0].before


def test_a_partitioning_that_somebody_changed(table: TopicTable) -> None:
    """A file cannot be in one bucket of its keys: it goes where the table had such files before."""
    append(table, [write_file(table, 0, 0, 5)])
    with table.table.update_spec() as change:
        change.add_field("key", "bucket[4]", "key_bucket")
    append(table, [write_file(table, 0, 5, 9)])
    assert read_iceberg(table.table) == expected((0, 0, 9))
    assert read_duckdb(table.table) == expected((0, 0, 9))


def test_a_property_that_somebody_set_wrong(table: TopicTable) -> None:
    append(table, [write_file(table, 0, 0, 5)])
    with table.table.transaction() as transaction:
        transaction.set_properties({"dray.end-offset.0": "7"})
    with pytest.raises(TableAltered, match=r"dray\.end-offset\.0 is 7"):
        append(table, [write_file(table, 0, 5, 9)])


def test_days(open_tables: Opener) -> None:
    """A file of one day is in that day's partition; one of several is not, and is found all the same."""
    table = open_tables().ensure_table("kafka", "days", TOPIC, partition_by=BY_PARTITION_AND_DAY)
    rows = [
        make_rows(0, 0, 4),
        make_rows(0, 4, 8, at=START + timedelta(days=1), step=timedelta(days=1)),
        make_rows(0, 8, 10, at=None),
    ]
    files = [
        write_file(table, 0, each["offset"][0].as_py(), each["offset"][-1].as_py() + 1, rows=each)
        for each in rows
    ]
    append(table, files)
    assert read_iceberg(table.table) == read_duckdb(table.table) == expected((0, 0, 10))
    noon, later = START.isoformat(), (START + timedelta(hours=1)).isoformat()
    wanted = f"partition = 0 and timestamp >= '{noon}' and timestamp < '{later}'"
    scan = table.table.scan(row_filter=wanted)
    assert [task.file.file_path for task in scan.plan_files()] == [files[0].path]
    assert sorted(scan.to_arrow()["offset"].to_pylist()) == [0, 1, 2, 3]
    days = table.table.inspect.partitions().to_pylist()
    assert sorted(str(each["partition"].get("timestamp_day")) for each in days) == [
        "2026-03-01",
        "None",
        "None",
    ]


def test_days_of_a_table_that_was_made_without(open_tables: Opener, table: TopicTable) -> None:
    append(table, [write_file(table, 0, 0, 5)])
    again = open_tables().ensure_table("kafka", "orders.eu", TOPIC, partition_by=BY_PARTITION_AND_DAY)
    assert [each.name for each in again.table.spec().fields] == ["partition", "timestamp_day"]
    append(again, [write_file(again, 0, 5, 9)])
    append(table, [write_file(table, 0, 9, 12)])
    assert read_duckdb(again.table) == expected((0, 0, 12))


# --- rewrites


def merge(table: TopicTable, files: list[NewFile]) -> Rewrite:
    partition, start, end = files[0].partition, files[0].start_offset, files[-1].end_offset
    made = write_file(table, partition, start, end)
    return Rewrite(made.task_id, partition, tuple(file.path for file in files), (made,))


def test_small_files_become_one(table: TopicTable) -> None:
    small = [write_file(table, partition, n, n + 2) for partition in (0, 1) for n in range(0, 6, 2)]
    append(table, small)
    append(table, [write_file(table, 0, 6, 8)])
    rewrites = [merge(table, small[:3]), merge(table, small[3:])]
    applied = replace(table, rewrites)
    snapshot = table.table.current_snapshot()
    assert snapshot is not None
    assert applied == [
        Applied(each.task_id, each.add[0].path, snapshot.snapshot_id, before=False) for each in rewrites
    ]
    assert snapshot.summary is not None
    assert snapshot.summary.operation is Operation.REPLACE
    totals = {
        name: snapshot.summary[name] for name in ("total-data-files", "total-records", "deleted-data-files")
    }
    assert totals == {"total-data-files": "3", "total-records": "14", "deleted-data-files": "6"}
    assert {task.file.file_path for task in table.table.scan().plan_files()} >= {
        each.add[0].path for each in rewrites
    }
    rows = expected((0, 0, 8), (1, 0, 6))
    assert read_iceberg(table.table) == read_duckdb(table.table) == rows
    assert table.end_offset(0) == 8
    assert replace(table, rewrites) == [changed(each, before=True) for each in applied]
    append(table, [write_file(table, 0, 8, 9)])
    assert read_duckdb(table.table) == expected((0, 0, 9), (1, 0, 6))


@pytest.mark.parametrize("witness", ["property", "commit id", "path"])
def test_each_witness_of_a_rewrite_alone_is_enough(table: TopicTable, witness: str) -> None:
    small = [write_file(table, 0, 0, 2), write_file(table, 0, 2, 4)]
    append(table, small)
    rewrite = merge(table, small)
    replace(table, [rewrite])
    if witness != "property":
        with table.table.transaction() as transaction:
            transaction.remove_properties("dray.rewrite.0")
    if witness != "commit id":
        append(table, [write_file(table, 2, 0, 5)])
        expire(table, keep=1, older_than_ms=now_ms())
    assert replace(table, [rewrite])[0].before
    assert read_iceberg(table.table)[:4] == expected((0, 0, 4))


def test_two_committers_of_one_rewrite(table: TopicTable, other: TopicTable) -> None:
    small = [write_file(table, 0, 0, 2), write_file(table, 0, 2, 4)]
    append(table, small)
    rewrite = merge(table, small)
    raced: list[Applied] = []

    def touch() -> None:
        if not raced:
            raced.extend(replace(other, [rewrite]))

    assert replace(table, [rewrite], touch=touch, pause=at_once) == [changed(raced[0], before=True)]
    assert read_duckdb(table.table) == expected((0, 0, 4))
    assert metadata_files(table) >= reachable_files(table)


def test_a_rewrite_of_what_somebody_has_rewritten(table: TopicTable) -> None:
    small = [write_file(table, 0, 0, 2), write_file(table, 0, 2, 4)]
    append(table, small)
    rewrite = merge(table, small)
    table.table.refresh().delete("offset = 3")
    with pytest.raises(InputsGone, match="somebody else removed files") as raised:
        replace(table, [rewrite])
    assert raised.value.paths == (small[1].path,)
    assert raised.value.task_id == rewrite.task_id
    assert read_iceberg(table.table) == expected((0, 0, 3))

    def touch() -> None:
        raise ClaimLost(1)

    with pytest.raises(ClaimLost):
        replace(table, [rewrite], touch=touch)


# --- expiry


def test_expired_snapshots_take_their_metadata_along(table: TopicTable) -> None:
    small = [write_file(table, 0, n, n + 1) for n in range(6)]
    for file in small:
        append(table, [file])
    rewrite = merge(table, small)
    replace(table, [rewrite])
    assert still_needed(table, [small[0].path, rewrite.add[0].path]) == {small[0].path, rewrite.add[0].path}

    expired = expire(table, keep=2, older_than_ms=now_ms())
    assert expired.snapshots == 5
    assert expired.data_files == ()  # the snapshot before the rewrite has them all
    assert metadata_files(table) == reachable_files(table)
    expired = expire(table, keep=1, older_than_ms=now_ms())
    assert (expired.snapshots, expired.data_files) == (1, tuple(file.path for file in small))
    assert metadata_files(table) == reachable_files(table)
    assert still_needed(table, [small[0].path, rewrite.add[0].path]) == {rewrite.add[0].path}
    assert read_duckdb(table.table) == expected((0, 0, 6))
    assert expire(table, keep=1, older_than_ms=now_ms()).snapshots == 0


def test_young_and_tagged_snapshots_are_kept(table: TopicTable) -> None:
    small = [write_file(table, 0, n, n + 1) for n in range(4)]
    for file in small:
        append(table, [file])
    history = [each.snapshot_id for each in table.table.snapshots()]
    table.table.manage_snapshots().create_tag(history[1], "audit").commit()
    assert expire(table, keep=1, older_than_ms=0).snapshots == 0
    assert expire(table, keep=1, older_than_ms=now_ms()).snapshots == 1  # the tag leads to two
    assert {each.snapshot_id for each in table.table.snapshots()} == {history[0], history[1], history[3]}
    assert metadata_files(table) == reachable_files(table)


def test_an_expiry_beside_a_commit(table: TopicTable, other: TopicTable) -> None:
    for n in range(3):
        append(table, [write_file(table, 0, n, n + 1)])
    pending = [write_file(table, 0, 3, 4)]

    def touch() -> None:
        if pending:
            append(other, [pending.pop()])

    expired = expire(table, keep=1, older_than_ms=now_ms(), touch=touch, pause=at_once)
    assert expired.snapshots == 3
    assert metadata_files(table) == reachable_files(table)
    assert read_duckdb(table.table) == expected((0, 0, 4))


def test_many_commits_merge_their_manifests(table: TopicTable) -> None:
    with table.table.transaction() as transaction:
        transaction.set_properties({"commit.manifest.min-count-to-merge": "5"})
    for n in range(12):
        append(table, [write_file(table, 0, n, n + 1)])
    snapshot = table.table.current_snapshot()
    assert snapshot is not None
    manifests = snapshot.manifests(table.table.io)
    assert len(manifests) < 6
    assert {each.content for each in manifests} == {ManifestContent.DATA}
    assert read_duckdb(table.table) == expected((0, 0, 12))


# --- opening


def _commit_partition(directory: str, partition: int) -> None:
    tables = open_catalog(f"sqlite:///{directory}/catalog.db", f"file://{directory}/objects")
    table = tables.ensure_table("kafka", "orders.eu", TOPIC, partition_by=BY_PARTITION_AND_DAY)
    for start in range(0, 9, 3):
        append(table, [write_file(table, partition, start, start + 3)])
    tables.close()


def test_processes_that_make_catalog_and_table_at_the_same_time(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_commit_partition, args=(str(tmp_path), n)) for n in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 3
    tables = open_catalog(f"sqlite:///{tmp_path}/catalog.db", f"file://{tmp_path}/objects")
    table = tables.ensure_table("kafka", "orders.eu", TOPIC)
    assert not table.created
    assert len(table.table.snapshots()) == 9
    assert read_duckdb(table.table) == expected(*((n, 0, 9) for n in range(3)))
    tables.close()


def test_a_path_with_odd_characters(tmp_path: Path) -> None:
    place = tmp_path / "a b%20ü"
    tables = open_catalog(f"sqlite:///{tmp_path}/cat%20a%25%3F.db", f"file://{tmp_path}/a%20b%2520ü")
    table = tables.ensure_table("kafka", "orders", TOPIC)
    append(table, [write_file(table, 0, 0, 3)])
    assert read_iceberg(table.table) == expected((0, 0, 3))
    assert (place / "warehouse" / "kafka" / f"orders-{TOPIC.hex[:8]}" / "metadata").is_dir()
    assert (tmp_path / "cat a%?.db").is_file()
    tables.close()


def test_a_file_that_is_no_catalog(tmp_path: Path) -> None:
    (tmp_path / "catalog.db").write_bytes(b"not a database" * 100)
    with pytest.raises(CatalogMisconfigured, match="name another file, or restore this one"):
        open_catalog(f"sqlite:///{tmp_path}/catalog.db", f"file://{tmp_path}/objects")


def test_a_place_that_tables_cannot_name(tmp_path: Path) -> None:
    with pytest.raises(CatalogMisconfigured, match="cannot lie below a name with"):
        objects_uri(f"file://{tmp_path}/what%3F")


def test_the_place_of_objects() -> None:
    assert objects_uri("file:///a/b") == "file:///a/b"
    assert objects_uri("s3://bucket") == "s3://bucket"
    assert objects_uri("s3://bucket/some/prefix?endpoint=http://127.0.0.1:1") == "s3://bucket/some/prefix"


def test_metadata_that_is_gone(tmp_path: Path, table: TopicTable, open_tables: Opener) -> None:
    """Somebody has deleted the files of a table; the catalog still names it."""
    append(table, [write_file(table, 0, 0, 5)])
    Path(table.table.metadata_location.removeprefix("file://")).unlink()
    with pytest.raises(CatalogUnavailable, match="metadata is gone"):
        open_tables().ensure_table("kafka", "orders.eu", TOPIC)


def test_a_task_of_several_files(table: TopicTable) -> None:
    task_id = uuid4()
    files = [write_file(table, 0, 0, 2, task_id=task_id), write_file(table, 0, 4, 6, task_id=task_id)]
    append(table, files)
    assert all(each.before for each in append(table, files))
    assert read_duckdb(table.table) == expected((0, 0, 2), (0, 4, 6))


def test_a_file_without_records(table: TopicTable) -> None:
    """A range of which all records are void: the table says how far it is, all the same."""
    files = [write_file(table, 0, 0, 3, rows=make_rows(0, 0, 0)), write_file(table, 0, 3, 5, follows=3)]
    append(table, files[:1])
    assert table.end_offset(0) == 3
    append(table, files)
    assert read_iceberg(table.table) == read_duckdb(table.table) == expected((0, 3, 5))
