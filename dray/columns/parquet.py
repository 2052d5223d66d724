"""Columns in Parquet files: how they are written, and how a part of one is read back.

The file is made for three readers. A query engine skips by the statistics of `partition`, `offset` and
`timestamp`, and by the page index. A broker that serves a fetch reads whole row groups by their byte ranges,
so these are small: a random fetch out of groups of 20,000 rows takes 6 ms, of a million 165 ms. Iceberg gets
`FileStats`, so that nobody reads the footer again to commit the file.

The same rows give the same bytes, whatever tables they come in: a task that ran twice wrote the same file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dray.columns.schema import FIELD_IDS, SCHEMA
from dray.protocol.records import NO_TIMESTAMP

MAX_GROUP_ROWS = 20_000
# Of keys, values, headers and what is around them. One more record than fits does not begin a group.
GROUP_BYTES = 2**23
# About what a record takes in a batch beside its bytes.
_RECORD_BYTES = 10
# Level 6 takes 2.5 times as long for 3 % less.
_COMPRESSION_LEVEL = 1
_COUNTED = ("offset", "timestamp", "raw_timestamp", "sequence")
_FEW_VALUES = ("partition", "producer_id", "producer_epoch", "attributes", "headers.list.element.key")
_BOUNDED = ("partition", "offset", "timestamp")
_AS_NUMBER = {"partition": pa.int32(), "offset": pa.int64(), "timestamp": pa.int64()}
# What Parquet calls the columns that are not at the top.
_PATHS = {
    "headers.list.element.key": "headers.element.key",
    "headers.list.element.value": "headers.element.value",
}


@dataclass(frozen=True, slots=True)
class FileStats:
    """What Iceberg and the index are told of a file. Columns are those of Iceberg's field ids.

    Without records there are no bounds, and both offsets are 0.
    """

    records: int
    size_bytes: int
    start_offset: int
    end_offset: int
    min_timestamp_ms: int | None  # also of times that no table can hold; None if no record has one
    max_timestamp_ms: int | None
    raw_bytes: int  # about what the records are in batches that are not compressed
    column_sizes: dict[int, int]
    value_counts: dict[int, int]
    null_value_counts: dict[int, int]
    lower_bounds: dict[int, str]  # Iceberg's single-value serialization, in hexadecimal digits
    upper_bounds: dict[int, str]
    split_offsets: list[int]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> FileStats:
        """JSON knows no numbers as keys."""
        values = {field.name: stored[field.name] for field in fields(cls)}
        for name, value in values.items():
            if isinstance(value, dict):
                values[name] = {int(key): entry for key, entry in value.items()}
        return cls(**values)


class RowGroup(NamedTuple):
    """Offsets may be missing in between; nothing is outside of them. Its bytes are without gaps."""

    first_offset: int
    end_offset: int
    byte_start: int
    byte_end: int
    rows: int


def write_parquet(
    tables: Iterable[pa.Table], sink: IO[bytes] | pa.NativeFile, *, partition: int
) -> FileStats:
    """One file of all rows, which are of this partition and in the order of their offsets.

    Holds one row group and one table at a time. `ValueError` is the caller's mistake.
    """
    output = sink if isinstance(sink, pa.NativeFile) else pa.PythonFile(sink, mode="w")
    collected: list[pq.FileMetaData] = []
    seen = _Seen(partition)
    with pq.ParquetWriter(
        output,
        SCHEMA,
        metadata_collector=collected,
        compression="zstd",
        compression_level=_COMPRESSION_LEVEL,
        use_dictionary=list(_FEW_VALUES),
        column_encoding=dict.fromkeys(_COUNTED, "DELTA_BINARY_PACKED"),
        write_statistics=list(_BOUNDED),
        write_page_index=True,
        write_page_checksum=True,
        store_schema=False,
    ) as writer:
        for group, raw_bytes in _groups(tables):
            seen.add(group, raw_bytes)
            writer.write_table(group, row_group_size=MAX_GROUP_ROWS)
    return seen.stats(collected[0], output.tell())


def stats_of_file(body: bytes) -> FileStats:
    """What `write_parquet` returned when it wrote this file. Raises `ValueError` if it did not."""
    try:
        with pq.ParquetFile(pa.BufferReader(body), page_checksum_verification=True) as file:
            groups = [file.read_row_group(number).cast(SCHEMA) for number in range(file.num_row_groups)]
            seen = _Seen(groups[0]["partition"][0].as_py() if groups else -1)
            for group in groups:
                raw_bytes = sum(int(_raw_sizes(block).sum()) for block in group.to_batches())
                seen.add(group, raw_bytes)
            return seen.stats(file.metadata, len(body))
    except (OSError, KeyError, pa.ArrowException) as error:
        raise ValueError(f"no data file: {error}") from error


def row_groups(metadata: pq.FileMetaData) -> list[RowGroup]:
    """What is where in a file, by its footer. Raises `ValueError` if that is not one of `write_parquet`."""
    return [_row_group(metadata.row_group(number)) for number in range(metadata.num_row_groups)]


def read_row_group(metadata: pq.FileMetaData, number: int, data: bytes) -> pa.Table:
    """A row group out of its bytes, [byte_start, byte_end). Raises `ValueError` if they are damaged."""
    where = _row_group(metadata.row_group(number))
    if len(data) != where.byte_end - where.byte_start:
        raise ValueError(f"{len(data)} bytes of a row group of {where.byte_end - where.byte_start}")
    try:
        source = pa.PythonFile(_Excerpt(data, where.byte_start), mode="r")
        with pq.ParquetFile(source, metadata=metadata, page_checksum_verification=True) as file:
            table = file.read_row_group(number, use_threads=False)
        return table.select(SCHEMA.names).cast(SCHEMA)
    except (OSError, KeyError, pa.ArrowException) as error:
        raise ValueError(f"row group {number}: {error}") from error


def _row_group(group: pq.RowGroupMetaData) -> RowGroup:
    columns = [group.column(index) for index in range(group.num_columns)]
    starts = [_start(column) for column in columns]
    ends = [start + column.total_compressed_size for start, column in zip(starts, columns, strict=True)]
    statistics = next((column.statistics for column in columns if column.path_in_schema == "offset"), None)
    if statistics is None or not statistics.has_min_max:
        raise ValueError("a row group without the range of its offsets")
    if not 0 <= min(starts) < max(ends):
        raise ValueError(f"a row group from byte {min(starts)} to {max(ends)}")
    return RowGroup(statistics.min, statistics.max + 1, min(starts), max(ends), group.num_rows)


def _start(column: pq.ColumnChunkMetaData) -> int:
    data: int = column.data_page_offset
    dictionary: int | None = column.dictionary_page_offset
    return data if dictionary is None else min(dictionary, data)


def _groups(tables: Iterable[pa.Table]) -> Iterator[tuple[pa.Table, int]]:
    """The rows as row groups, and how many bytes there are in each."""
    pending: list[pa.RecordBatch] = []
    rows = size = 0
    for block in (block for table in tables for block in table.to_batches()):
        ends = np.cumsum(_raw_sizes(block))
        at = taken = 0
        while at < block.num_rows:
            fitting = int(np.searchsorted(ends, taken + GROUP_BYTES - size, side="right"))
            end = min(fitting, at + MAX_GROUP_ROWS - rows)
            if end <= at and not pending:
                end = at + 1  # a record that is larger than a group
            if end > at:
                pending.append(block.slice(at, end - at))
                rows, size = rows + end - at, size + int(ends[end - 1]) - taken
                at, taken = end, int(ends[end - 1])
            if at < block.num_rows:
                yield _combined(pending), size
                pending, rows, size = [], 0, 0
    if pending:
        yield _combined(pending), size


def _combined(blocks: list[pa.RecordBatch]) -> pa.Table:
    """In one piece, since where pages end depends on it."""
    return pa.Table.from_batches(blocks).combine_chunks()


def _raw_sizes(block: pa.RecordBatch) -> npt.NDArray[np.int64]:
    headers = block["headers"]
    flat = headers.flatten()
    in_headers = np.zeros(len(flat) + 1, np.int64)
    np.cumsum(_lengths(flat.field("key")) + _lengths(flat.field("value")), out=in_headers[1:])
    bounds = np.zeros(len(block["key"]) + 1, np.int64)
    np.cumsum(pc.list_value_length(headers).to_numpy(), out=bounds[1:])
    sizes: npt.NDArray[np.int64] = np.diff(in_headers[bounds]) + _RECORD_BYTES
    return sizes + _lengths(block["key"]) + _lengths(block["value"])


def _lengths(column: pa.Array) -> npt.NDArray[np.int64]:
    if column.null_count == len(column):
        return np.zeros(len(column), np.int64)
    lengths: npt.NDArray[np.int64] = pc.binary_length(column).fill_null(0).to_numpy().astype(np.int64)
    return lengths


class _Seen:
    """What the rows that were written so far have in common, and their extremes."""

    def __init__(self, partition: int) -> None:
        self._partition = partition
        self._raw_bytes = self._records = 0
        self._offsets = _Range()
        self._milliseconds = _Range()
        self._bounds = {name: _Range() for name in _BOUNDED}
        self._nulls = dict.fromkeys(SCHEMA.names[:-1], 0)

    def add(self, group: pa.Table, raw_bytes: int) -> None:
        offsets = group["offset"].to_numpy()
        before = -1 if self._offsets.high is None else self._offsets.high
        if offsets[0] <= before or not (offsets[1:] > offsets[:-1]).all():
            raise ValueError(f"offsets that do not ascend behind {before}")
        self._offsets.add(int(offsets[0]), int(offsets[-1]))
        for name, bounds in self._bounds.items():
            bounds.add(*_extremes(group[name].cast(_AS_NUMBER[name])))
        if self._bounds["partition"] != _Range(self._partition, self._partition):
            raise ValueError(f"records of another partition than {self._partition}")
        self._add_times(group)
        for name in self._nulls:
            self._nulls[name] += group[name].null_count
        self._records += group.num_rows
        self._raw_bytes += raw_bytes

    def _add_times(self, group: pa.Table) -> None:
        low, high = _extremes(group["timestamp"].cast(pa.int64()))
        if low is not None and high is not None:
            self._milliseconds.add(low // 1000, high // 1000)
        raw = group["raw_timestamp"]
        if raw.null_count < len(raw):
            self._milliseconds.add(*_extremes(raw.filter(pc.not_equal(raw, NO_TIMESTAMP))))

    def stats(self, metadata: pq.FileMetaData, size_bytes: int) -> FileStats:
        sizes: dict[int, int] = {}
        counts: dict[int, int] = {}
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        for column in (group.column(index) for group in groups for index in range(group.num_columns)):
            field = FIELD_IDS[_PATHS.get(column.path_in_schema, column.path_in_schema)]
            sizes[field] = sizes.get(field, 0) + column.total_compressed_size
            counts[field] = counts.get(field, 0) + column.num_values
        bounds = {name: each for name, each in self._bounds.items() if each.low is not None}
        return FileStats(
            records=self._records,
            size_bytes=size_bytes,
            start_offset=self._offsets.low or 0,
            end_offset=0 if self._offsets.high is None else self._offsets.high + 1,
            min_timestamp_ms=self._milliseconds.low,
            max_timestamp_ms=self._milliseconds.high,
            raw_bytes=self._raw_bytes,
            column_sizes=sizes,
            value_counts=counts,
            null_value_counts={FIELD_IDS[name]: count for name, count in self._nulls.items()},
            lower_bounds={FIELD_IDS[name]: _single_value(name, each.low) for name, each in bounds.items()},
            upper_bounds={FIELD_IDS[name]: _single_value(name, each.high) for name, each in bounds.items()},
            split_offsets=[_row_group(group).byte_start for group in groups],
        )


@dataclass(slots=True)
class _Range:
    low: int | None = None
    high: int | None = None

    def add(self, low: int | None, high: int | None) -> None:
        if low is not None:
            self.low = low if self.low is None else min(self.low, low)
        if high is not None:
            self.high = high if self.high is None else max(self.high, high)


def _extremes(column: pa.ChunkedArray) -> tuple[int | None, int | None]:
    found = pc.min_max(column).as_py()
    return found["min"], found["max"]


def _single_value(name: str, number: int | None) -> str:
    """Iceberg specification, appendix D: little-endian; a timestamptz is its microseconds."""
    return struct.pack("<i" if name == "partition" else "<q", number).hex()


class _Excerpt:
    """A file of which only one range is there."""

    closed = False

    def __init__(self, data: bytes, start: int) -> None:
        self._data = memoryview(data)
        self._start = start
        self._at = 0

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._start + len(self._data))[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> memoryview:
        first = self._at - self._start
        last = len(self._data) if size < 0 else min(first + size, len(self._data))
        if first < 0:
            raise OSError(f"byte {self._at} is before the range that was read")
        self._at = self._start + max(last, first)
        return self._data[first:last]

    def close(self) -> None: ...
