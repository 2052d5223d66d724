"""What the WAL writer takes, made of batches that a real client sent (`golden/records/`)."""

from __future__ import annotations

from dray.protocol.records import split_batches
from dray.wal.batcher import PendingBatch
from tests.batches import captured


def pending(stream_id: int, name: str = "librdkafka-none", copies: int = 1) -> list[PendingBatch]:
    """The batches of one captured produce request, `copies` times over."""
    batches = []
    for batch in split_batches(captured(name) * copies):
        low, high = batch.timestamp_range_ms
        batches.append(PendingBatch(stream_id, batch.data, batch.records, low, high))
    return batches
