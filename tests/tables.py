"""Tables of topics for tests: real Parquet files of the schema, and what readers find in a table.

DuckDB is the reader that shares no code with PyIceberg.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from importlib import import_module
from pathlib import Path
from uuid import UUID, uuid4

import duckdb
import pyarrow as pa
from pyiceberg.table import Table

from compactor.catalog import TopicTable
from compactor.commit import NewFile
from dray.columns.parquet import write_parquet
from dray.columns.schema import SCHEMA

TOPIC_ID = UUID(int=7)
START = datetime(2026, 3, 1, 12, tzinfo=UTC)


def make_rows(
    partition: int,
    start: int,
    end: int,
    *,
    at: datetime | None = START,
    step: timedelta = timedelta(seconds=1),
) -> pa.Table:
    """Record n has the value `<partition>/<n>` and is from `at` plus n - `start` steps; or from no time."""
    rows = [
        {
            "partition": partition,
            "offset": offset,
            "timestamp": None if at is None else at + (offset - start) * step,
            "raw_timestamp": -1 if at is None else None,
            "value": f"{partition}/{offset}".encode(),
            "attributes": 0,
            "headers": [{"key": "h", "value": None}],
        }
        for offset in range(start, end)
    ]
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def write_file(
    table: TopicTable,
    partition: int,
    start: int,
    end: int,
    *,
    rows: pa.Table | None = None,
    task_id: UUID | None = None,
    follows: int = 0,
) -> NewFile:
    """Into the table's place, and not yet in the table."""
    task_id = task_id or uuid4()
    location = table.table.location()
    path = f"{location}/data/partition={partition}/{start:020d}-{end:020d}-{task_id.hex}.parquet"
    with table.table.io.new_output(path).create() as sink:
        made = make_rows(partition, start, end) if rows is None else rows
        stats = write_parquet([made], pa.PythonFile(sink, mode="w"), partition=partition)
    return NewFile(task_id, partition, start, end, path, stats, follows)


def read_iceberg(table: Table) -> list[tuple[int, int, bytes]]:
    """As PyIceberg finds the table now, in order."""
    rows = table.refresh().scan().to_arrow().to_pylist()
    return sorted((row["partition"], row["offset"], row["value"]) for row in rows)


def read_duckdb(table: Table, settings: Sequence[str] = ()) -> list[tuple[int, int, bytes]]:
    with duckdb.connect() as connection:
        load_extensions(connection)
        for setting in settings:
            connection.execute(setting)
        location = table.refresh().metadata_location
        found = connection.execute(
            f"SELECT partition, \"offset\", value FROM iceberg_scan('{location}') ORDER BY 1, 2"
        )
        return found.fetchall()


def load_extensions(connection: duckdb.DuckDBPyConnection) -> None:
    """As their packages have them: DuckDB would look for them on the net."""
    for name in ("avro", "httpfs", "iceberg"):
        module = import_module(f"duckdb_extension_{name}")
        path = next(Path(module.__path__[0]).rglob("*.duckdb_extension"))
        connection.execute(f"LOAD '{path}'")


def expected(*ranges: tuple[int, int, int]) -> list[tuple[int, int, bytes]]:
    """What readers find of (partition, start, end)."""
    return sorted(
        (partition, offset, f"{partition}/{offset}".encode())
        for partition, start, end in ranges
        for offset in range(start, end)
    )
