"""Record batches for tests: as a real client sent them (`golden/records/`), and what the writer takes."""

from __future__ import annotations

from pathlib import Path

from dray.protocol.records import split_batches
from dray.wal.batcher import PendingBatch

RECORDS = Path(__file__).parent.parent / "golden" / "records"


def pending(stream_id: int, name: str = "librdkafka-none", copies: int = 1) -> list[PendingBatch]:
    """The batches of one captured produce request, `copies` times over."""
    payload = (RECORDS / f"{name}.bin").read_bytes()
    batches = []
    for batch in split_batches(payload * copies):
        low, high = batch.timestamp_range_ms
        batches.append(PendingBatch(stream_id, batch.data, batch.records, low, high))
    return batches
