"""Topics that are tables, too: brokers for them, what a topic holds over the wire, and what its table does.

What comes over the wire is decoded by `tests.naive_records`, which shares no code with Dray.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
from kio.schema.errors import ErrorCode

from compactor.catalog import open_catalog
from tests.batches import end_of
from tests.integration.wire import Wire
from tests.naive_records import Record, parse, rows_as_records
from tests.servers.dray import DrayBroker
from tests.tables import load_extensions

MIB = 2**20


class Place:
    """Two brokers, of which the second has not seen what the first has, and a compactor."""

    def __init__(
        self, directory: Path, metadata: str, objects: str, catalog: str, duckdb_settings: Sequence[str] = ()
    ) -> None:
        self.directory = directory
        self.stores = {"metadata": metadata, "objects": objects, "catalog": catalog}
        self.duckdb_settings = duckdb_settings
        of_brokers = {"metadata.domains": 2, "wal.linger.ms": 10}
        self.a, self.b = (
            DrayBroker(directory, metadata=metadata, objects=objects, zone=zone, settings=of_brokers)
            for zone in "ab"
        )

    def start(self) -> None:
        self.a.start()
        self.b.start()

    def kill(self) -> None:
        self.a.kill()
        self.b.kill()

    def settings(self, **more: object) -> dict[str, object]:
        """Of compactors. Parts are small, so that a topic has several files."""
        return {**self.stores, "compaction.task.bytes": MIB, **more}

    def remove_wal(self) -> None:
        """Everything in it was compacted."""
        for path in (self.directory / "objects" / "wal").rglob("*.wo"):
            path.unlink()


def fetched(wire: Wire, topic: str, partition: int, start: int = 0) -> list[Record]:
    """Everything from there on, and with nothing missing between two answers."""
    found: list[Record] = []
    at, end = start, start + 1
    while at < end:
        answer = wire.fetch(topic, partition, at)
        assert answer.error is ErrorCode.none
        end = answer.high_watermark
        if at == end:
            break
        found += [record for record in decoded(answer.records) if record.offset >= at]
        behind = end_of(answer.records)
        assert behind > at
        at = behind
    return found


def decoded(data: bytes) -> list[Record]:
    """Of adjacent batches. Those without records stand for offsets only."""
    found: list[Record] = []
    at = 0
    while at < len(data):
        end = at + 12 + int.from_bytes(data[at + 8 : at + 12])
        if int.from_bytes(data[at + 57 : at + 61]):
            found += parse(data[at:end])
        at = end
    offsets = [record.offset for record in found]
    assert offsets == sorted(set(offsets))
    return found


def by_partition(table: pa.Table, partitions: int) -> list[list[Record]]:
    """Rows of a whole table, in whatever order they come; one that is there twice shows."""
    assert set(table["partition"].to_pylist()) <= set(range(partitions))
    parts = (table.filter(pc.equal(table["partition"], n)).sort_by("offset") for n in range(partitions))
    return [rows_as_records(part) for part in parts]


@contextmanager
def tables_of(place: Place) -> Iterator[Callable[[str, str], pa.Table]]:
    """Reads the table of a topic with an engine. All columns, as they are."""
    tables = open_catalog(place.stores["catalog"], place.stores["objects"])
    with closing(tables), duckdb.connect() as connection:
        load_extensions(connection)
        connection.execute("SET TimeZone = 'UTC'")
        for setting in place.duckdb_settings:
            connection.execute(setting)

        def read(engine: str, topic: str) -> pa.Table:
            table = tables.catalog.load_table(("kafka", topic))
            if engine == "PyIceberg":
                return table.scan().to_arrow()
            found = connection.execute(f"SELECT * FROM iceberg_scan('{table.metadata_location}')")
            return found.to_arrow_table()

        yield read
