"""Index entries for tests."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from dray.index.entry import BatchIndex, IndexEntry, ParquetFile, Producer, Truncated, Void, WalChunk, Where

INCARNATION = "00112233445566778899aabbccddeeff"
STREAM = 0x1F


def wal_entry(
    *batches: int, stream_id: int = STREAM, number: int = 0, producers: Sequence[Producer | None] = ()
) -> IndexEntry:
    """A chunk with batches of so many records, of 100 bytes each, in object `number`."""
    owners = producers or [None] * len(batches)
    index = tuple(
        BatchIndex(records, 100, 1_000 + i, 2_000 + i, owner)
        for i, (records, owner) in enumerate(zip(batches, owners, strict=True))
    )
    length = 104 * len(batches)
    chunk = WalChunk(UUID(int=number), f"wal/{number}", 49, length, index)
    return of(chunk, sum(batches), stream_id)


def parquet_entry(records: int, *, stream_id: int = STREAM, number: int = 0) -> IndexEntry:
    return of(ParquetFile(UUID(int=number), f"data/{number}.parquet", 77), records, stream_id)


def truncated_entry(records: int, *, stream_id: int = STREAM) -> IndexEntry:
    return of(Truncated(), records, stream_id)


def void_entry(records: int, *, stream_id: int = STREAM, number: int = 0) -> IndexEntry:
    return of(Void(UUID(int=number)), records, stream_id)


def of(where: Where, records: int, stream_id: int = STREAM) -> IndexEntry:
    return IndexEntry(stream_id, records, 5_000, 1_000, 3_000, INCARNATION, where)
