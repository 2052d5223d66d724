"""Makes a WAL object and its commit out of what was buffered. Pure, and the costly part of writing: for large
objects it runs on a thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from dray.index.entry import BatchIndex, IndexEntry, WalChunk, encode, sequence_of
from dray.metadata.store import Delete, Expect, NewEntry, Put
from dray.wal.batcher import Pending, PendingBatch
from dray.wal.format import ChunkInput, EncodedChunk, encode_object
from dray.wal.objects import ObjectRecord, State, encode_record, marker_key, record_key, reference_key


@dataclass(frozen=True, slots=True)
class Identity:
    """Which object it will be."""

    id: UUID
    path: str
    domain: int
    created_at_ms: int
    incarnation: str


@dataclass(frozen=True, slots=True)
class Assembled:
    """The object's bytes, and its part of an append: record first, then a reference per entry."""

    body: bytearray
    indexed: tuple[IndexEntry, ...]  # what `entries` hold
    entries: tuple[NewEntry, ...]
    puts: tuple[Put, ...]
    deletes: tuple[Delete, ...]


def assemble(identity: Identity, sealed: Sequence[Pending]) -> Assembled:
    by_stream: dict[int, list[PendingBatch]] = {}
    for pending in sealed:
        by_stream.setdefault(pending.stream_id, []).extend(pending.batches)
    chunks = [
        ChunkInput(
            stream_id,
            [batch.data for batch in batches],
            sum(batch.records for batch in batches),
            min(batch.min_timestamp_ms for batch in batches),
            max(batch.max_timestamp_ms for batch in batches),
        )
        for stream_id, batches in sorted(by_stream.items())
    ]
    encoded = encode_object(identity.id, identity.domain, identity.created_at_ms, chunks)
    record = ObjectRecord(State.COMMITTED, identity.path, len(encoded.body), identity.created_at_ms)
    puts = [Put(record_key(identity.id), encode_record(record), Expect.ABSENT)]
    indexed = []
    entries = []
    for chunk, placed in zip(chunks, encoded.chunks, strict=True):
        entry = _index_entry(identity, chunk, placed, by_stream[chunk.stream_id])
        indexed.append(entry)
        entries.append(NewEntry(sequence_of(chunk.stream_id), chunk.records, placed.length, encode(entry)))
        puts.append(Put(reference_key(identity.id, chunk.stream_id), b""))
    return Assembled(
        encoded.body,
        tuple(indexed),
        tuple(entries),
        tuple(puts),
        (Delete(marker_key(identity.id)),),
    )


def _index_entry(
    identity: Identity, chunk: ChunkInput, placed: EncodedChunk, batches: Sequence[PendingBatch]
) -> IndexEntry:
    return IndexEntry(
        stream_id=chunk.stream_id,
        records=chunk.records,
        created_at_ms=identity.created_at_ms,
        min_timestamp_ms=chunk.min_timestamp_ms,
        max_timestamp_ms=chunk.max_timestamp_ms,
        incarnation=identity.incarnation,
        where=WalChunk(
            identity.id,
            identity.path,
            placed.offset,
            placed.length,
            tuple(
                BatchIndex(b.records, len(b.data), b.min_timestamp_ms, b.max_timestamp_ms, b.producer)
                for b in batches
            ),
        ),
    )
