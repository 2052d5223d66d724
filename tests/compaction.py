"""Entries made of what compaction makes, without a compactor."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

import pyarrow as pa

from compactor.plan import input_of
from compactor.work import served_batches
from dray.columns.decode import decode_batches
from dray.columns.parquet import write_parquet
from dray.index.entry import IndexEntry, ParquetFile, Placed
from dray.objectstore.store import ObjectStore


async def compacted(objects: ObjectStore, run: Sequence[Placed], path: str, number: int = 9) -> IndexEntry:
    """What replaces a run of chunks: its file is written."""
    batches: list[tuple[memoryview, int]] = []
    for each in map(input_of, run):
        if each.length:
            chunk = await objects.get_range(each.path, each.offset, each.offset + each.length)
            batches += served_batches(each, chunk)
    sink = pa.BufferOutputStream()
    stats = write_parquet([decode_batches(batches, 0, max_bytes=2**28)], sink, partition=0)
    await objects.put(path, sink.getvalue().to_pybytes())
    last = run[-1]
    return IndexEntry(
        stream_id=last.entry.stream_id,
        records=last.end_offset - run[0].start_offset,
        created_at_ms=last.entry.created_at_ms,
        min_timestamp_ms=-1 if stats.min_timestamp_ms is None else stats.min_timestamp_ms,
        max_timestamp_ms=-1 if stats.max_timestamp_ms is None else stats.max_timestamp_ms,
        incarnation=last.entry.incarnation,
        where=ParquetFile(UUID(int=number), path, stats.size_bytes),
    )
