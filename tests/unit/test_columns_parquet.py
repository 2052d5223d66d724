"""Parquet files of topics: what goes in comes out, the same bytes each time, and their numbers are right."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from pyiceberg.conversions import from_bytes
from pyiceberg.io.pyarrow import (
    compute_statistics_plan,
    data_file_statistics_from_parquet_metadata,
    parquet_path_to_id_mapping,
    pyarrow_to_schema,
)
from pyiceberg.types import IntegerType, LongType, PrimitiveType, TimestamptzType

from dray.columns.decode import decode_batches
from dray.columns.encode import encode_batches
from dray.columns.parquet import FileStats, read_row_group, row_groups, write_parquet
from dray.columns.schema import SCHEMA
from tests.naive_records import Plan, Record, build, parse, rows_as_records
from tests.record_plans import plans

MIB = 2**20
NOW = 1_700_000_000_000
NO_HEADERS: tuple[tuple[str, bytes | None], ...] = ()


def table_of(*batches: Plan) -> tuple[pa.Table, list[Record]]:
    placed, expected, offset = [], list[Record](), 0
    for plan in batches:
        offset += plan.gap
        data = build(plan)
        placed.append((memoryview(data), offset))
        expected += parse(data, offset)
        offset += len(plan.records)
    return decode_batches(placed, 7, max_bytes=2**30), expected


def written(*tables: pa.Table, partition: int = 7) -> tuple[bytes, FileStats]:
    sink = io.BytesIO()
    stats = write_parquet(tables, sink, partition=partition)
    return sink.getvalue(), stats


def footer_of(body: bytes) -> pq.FileMetaData:
    return pq.read_metadata(pa.BufferReader(body))


def read_back(body: bytes) -> list[pa.Table]:
    metadata = footer_of(body)
    return [
        read_row_group(metadata, number, body[group.byte_start : group.byte_end])
        for number, group in enumerate(row_groups(metadata))
    ]


def many(count: int, value: bytes = b"value") -> Plan:
    return Plan([(NOW + n, b"key %d" % n, value, (("h", b"x"),) * (n % 3)) for n in range(count)])


@settings(max_examples=100, deadline=None)
@given(plans())
def test_any_batches_survive_the_whole_way(batches: Sequence[Plan]) -> None:
    """Batches, columns, Parquet, row groups, columns, batches."""
    table, expected = table_of(*batches)
    body, stats = written(table)
    found = list[Record]()
    for group in read_back(body):
        assert group.schema.equals(SCHEMA, check_metadata=True)
        for batch in encode_batches(group, target_bytes=100_000):
            found += parse(batch.data)
    assert found == expected
    assert stats.records == len(expected)
    assert (stats.start_offset, stats.end_offset) == (expected[0].offset, expected[-1].offset + 1)
    times = [record.timestamp for record in expected if record.timestamp != -1]
    assert (stats.min_timestamp_ms, stats.max_timestamp_ms) == (
        min(times, default=None),
        max(times, default=None),
    )


def test_any_reader_of_parquet_reads_it() -> None:
    table, expected = table_of(many(100), Plan([(-1, None, b"", NO_HEADERS)], gap=5))
    read = pq.read_table(pa.BufferReader(written(table)[0]))
    assert read.schema.equals(SCHEMA, check_metadata=True)
    assert rows_as_records(read) == expected


def test_an_independent_reader_reads_it(tmp_path: Path) -> None:
    """Its encodings, nested columns and times, and rows found through the statistics."""
    table, expected = table_of(
        many(25_000), Plan([(-1, None, b"", (("h", None),))], gap=5, producer=(1, 2, 3)), many(3)
    )
    path = tmp_path / "x.parquet"
    path.write_bytes(written(table)[0])
    rows = duckdb.execute(
        """select "offset", coalesce(raw_timestamp, epoch_ms("timestamp")), key, value,
                  list_transform(headers, lambda h: h.key), list_transform(headers, lambda h: h.value),
                  producer_id, producer_epoch, sequence, attributes
           from read_parquet(?) where "offset" >= 24990 order by "offset" """,
        [str(path)],
    ).fetchall()
    found = []
    for offset, time, key, value, names, contents, producer_id, epoch, sequence, attributes in rows:
        producer = None if producer_id is None else (producer_id, epoch, sequence)
        headers = tuple(zip(names, contents, strict=True))
        found.append(Record(offset, time, key, value, headers, producer, attributes))
    assert found == expected[24_990:]


def test_row_groups_are_small_and_say_where_they_are() -> None:
    body, stats = written(table_of(many(45_000), Plan(many(10).records, gap=3))[0])
    groups = row_groups(footer_of(body))
    assert [(group.first_offset, group.end_offset, group.rows) for group in groups] == [
        (0, 20_000, 20_000),
        (20_000, 40_000, 20_000),
        (40_000, 45_013, 5_010),
    ]
    assert groups[0].byte_start == 4
    assert all(one.byte_end == other.byte_start for one, other in pairwise(groups))
    assert groups[-1].byte_end < len(body) == stats.size_bytes
    assert stats.split_offsets == [group.byte_start for group in groups]


def test_row_groups_are_of_8_mib_or_one_record() -> None:
    records = [(NOW, None, bytes(size), NO_HEADERS) for size in (MIB, 9 * MIB, *[MIB] * 9, 9 * MIB, 10)]
    body, stats = written(table_of(Plan(records))[0])
    assert [group.rows for group in row_groups(footer_of(body))] == [1, 1, 7, 2, 1, 1]
    assert 28 * MIB < stats.raw_bytes < 28 * MIB + 1_000


def test_the_same_rows_give_the_same_bytes() -> None:
    table, _ = table_of(many(30_000), many(3_000))
    body, stats = written(table)
    rng = random.Random(5)
    for _ in range(3):
        cuts = sorted(rng.sample(range(table.num_rows), 5))
        pieces = [table.slice(a, b - a) for a, b in zip([0, *cuts], [*cuts, table.num_rows], strict=True)]
        assert written(*pieces) == (body, stats)
        assert written(SCHEMA.empty_table(), pa.concat_tables(pieces)) == (body, stats)
    assert written(*read_back(body)) == (body, stats)


def test_columns_are_stored_as_their_readers_want_them() -> None:
    metadata = footer_of(written(table_of(many(100))[0])[0])
    group = metadata.row_group(0)
    columns = {group.column(n).path_in_schema: group.column(n) for n in range(group.num_columns)}
    assert list(columns)[-2:] == ["headers.list.element.key", "headers.list.element.value"]
    for name, column in columns.items():
        assert column.compression == "ZSTD"
        assert column.is_stats_set == (name in ("partition", "offset", "timestamp"))
        assert column.has_offset_index
        assert column.has_column_index == (name in ("partition", "offset", "timestamp"))
    for name in ("offset", "timestamp", "sequence"):
        assert "DELTA_BINARY_PACKED" in columns[name].encodings
        assert not columns[name].has_dictionary_page
    assert not columns["value"].has_dictionary_page
    assert not columns["key"].has_dictionary_page


def test_statistics_are_those_that_pyiceberg_would_take_from_the_footer() -> None:
    """Bounds of other columns and counts of nulls inside of headers are left out: they are optional."""
    old = Plan([(253_402_300_799_999, None, b"", NO_HEADERS), (-1, b"k", None, NO_HEADERS)], gap=10)
    body, stats = written(table_of(many(25_000), old)[0])
    schema = pyarrow_to_schema(SCHEMA)
    theirs = data_file_statistics_from_parquet_metadata(
        parquet_metadata=footer_of(body),
        stats_columns=compute_statistics_plan(schema, {"write.metadata.metrics.default": "full"}),
        parquet_column_mapping=parquet_path_to_id_mapping(schema),
    )
    assert stats.records == theirs.record_count
    assert stats.column_sizes == theirs.column_sizes
    assert stats.value_counts == theirs.value_counts
    assert stats.split_offsets == theirs.split_offsets
    assert theirs.null_value_counts == {field: stats.null_value_counts[field] for field in (1, 2, 3)}
    bounds = theirs.to_serialized_dict()
    for name, ours in (("lower_bounds", stats.lower_bounds), ("upper_bounds", stats.upper_bounds)):
        assert set(ours) == {1, 2, 3}
        assert {field: bytes.fromhex(bound) for field, bound in ours.items()} == bounds[name]


def test_bounds_are_icebergs_single_values() -> None:
    _, stats = written(
        table_of(Plan([(NOW, None, b"", NO_HEADERS), (NOW - 5, None, None, NO_HEADERS)], gap=9))[0]
    )
    kinds: dict[int, PrimitiveType] = {1: IntegerType(), 2: LongType(), 3: TimestamptzType()}
    expected = {1: (7, 7), 2: (9, 10), 3: ((NOW - 5) * 1_000, NOW * 1_000)}
    for field, kind in kinds.items():
        low, high = (bytes.fromhex(each[field]) for each in (stats.lower_bounds, stats.upper_bounds))
        found: tuple[object, object] = from_bytes(kind, low), from_bytes(kind, high)
        assert found == expected[field]
    assert stats.null_value_counts == {1: 0, 2: 0, 3: 0, 4: 2, 5: 2, 6: 1, 7: 2, 8: 2, 9: 2, 10: 0}


def test_no_time_is_no_bound() -> None:
    _, stats = written(table_of(Plan([(-1, None, None, NO_HEADERS)] * 2))[0])
    assert (stats.min_timestamp_ms, stats.max_timestamp_ms) == (None, None)
    assert set(stats.lower_bounds) == set(stats.upper_bounds) == {1, 2}


def test_statistics_are_kept_as_json() -> None:
    _, stats = written(table_of(many(10))[0])
    assert FileStats.from_json(json.loads(json.dumps(stats.to_json()))) == stats


def test_a_file_without_records_is_a_file() -> None:
    body, stats = written()
    assert pq.read_table(pa.BufferReader(body)).num_rows == 0
    assert row_groups(footer_of(body)) == []
    assert (stats.records, stats.start_offset, stats.end_offset, stats.lower_bounds) == (0, 0, 0, {})
    assert stats.size_bytes == len(body)


def test_it_is_written_to_files_and_to_memory(tmp_path: Path) -> None:
    table, _ = table_of(many(10))
    body, stats = written(table)
    with (tmp_path / "x.parquet").open("wb") as file:
        assert write_parquet([table], file, partition=7) == stats
    assert (tmp_path / "x.parquet").read_bytes() == body
    sink = pa.BufferOutputStream()
    assert write_parquet([table], sink, partition=7) == stats
    assert sink.getvalue().to_pybytes() == body


def test_rows_of_another_partition_or_out_of_order_are_a_mistake() -> None:
    table, _ = table_of(many(10))
    with pytest.raises(ValueError, match="another partition"):
        written(table, partition=8)
    with pytest.raises(ValueError, match="ascend"):
        written(table, table)
    with pytest.raises(ValueError, match="ascend"):
        written(pa.concat_tables([table.slice(5), table.slice(0, 5)]))


def test_damaged_row_groups_are_noticed() -> None:
    """Pages have checksums, and whatever else is wrong is one kind of error."""
    body, _ = written(table_of(many(3_000))[0])
    metadata = footer_of(body)
    (group,) = row_groups(metadata)
    good = body[group.byte_start : group.byte_end]
    expected = read_row_group(metadata, 0, good)
    rng = random.Random(1)
    for _ in range(300):
        at = rng.randrange(len(good))
        bad = good[:at] + bytes([good[at] ^ 1 << rng.randrange(8)]) + good[at + 1 :]
        try:
            found = read_row_group(metadata, 0, bad)
        except ValueError:
            continue
        assert found.equals(expected)  # something in a page header that nobody needs
    with pytest.raises(ValueError, match="bytes of a row group"):
        read_row_group(metadata, 0, good[:-1])


def test_a_file_of_somebody_else_is_refused() -> None:
    sink = io.BytesIO()
    pq.write_table(pa.table({"offset": ["a"], "x": [1]}), sink, write_statistics=False)
    with pytest.raises(ValueError, match="range of its offsets"):
        row_groups(footer_of(sink.getvalue()))
