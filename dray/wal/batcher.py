"""Decides when buffered batches become one WAL object. Pure: no I/O, no clock.

An object is sealed when it is large enough, when its first batch has waited long enough, or at once when
the pipeline behind it is idle: on a fast store a lone request waits for no timer, while under load the
next object grows as long as the one before is on its way.

One object is one append (protocol 19), so a buffer is also full when its entries would not fit into the
metadata store's limits together with their references, record and marker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dray.errors import TooLarge
from dray.index.entry import Producer
from dray.metadata.store import MAX_ENTRY_RECORDS, Limits

# What an index entry takes besides its batches: ids, path, counters, the names of entry and reference.
ENTRY_BYTES = 512
# What a batch adds to it: seven varints, of which timestamps and producer id can take ten bytes each.
BATCH_BYTES = 56


@dataclass(frozen=True, slots=True)
class PendingBatch:
    """A validated Kafka batch on its way. `data` is not copied: whoever passes it leaves it alone."""

    stream_id: int
    data: memoryview
    records: int
    min_timestamp_ms: int
    max_timestamp_ms: int
    producer: Producer | None = None


@dataclass(slots=True)
class Pending:
    """Batches of one stream that one caller wrote together, and the caller's own handle.

    `batches` is emptied once they are in an object; the rest stays true.
    """

    batches: Sequence[PendingBatch]
    handle: Any
    stream_id: int = field(init=False)
    records: int = field(init=False)
    size_bytes: int = field(init=False)
    count: int = field(init=False)  # of batches
    producer: Producer | None = field(init=False)  # of an idempotent one, who writes one batch at a time

    def __post_init__(self) -> None:
        self.stream_id = self.batches[0].stream_id
        self.records = sum(batch.records for batch in self.batches)
        self.size_bytes = sum(len(batch.data) for batch in self.batches)
        self.count = len(self.batches)
        self.producer = self.batches[0].producer


class SegmentBatcher:
    """One open buffer. Callers supply `now_ms` and upload what `seal` returns."""

    def __init__(self, target_bytes: int, linger_ms: int, limits: Limits) -> None:
        self._target_bytes = target_bytes
        self._linger_ms = linger_ms
        self._limits = limits
        self._clear()

    def fits(self, pending: Pending) -> bool:
        """Whether it may join the buffer. An empty one takes whatever `check_pending` lets through."""
        if not self._pending:
            return True
        streams = len(self._records) + (pending.stream_id not in self._records)
        batches = self._batches + len(pending.batches)
        return (
            self._bytes + pending.size_bytes <= self._target_bytes
            # An entry and a reference per stream, the record, the marker.
            and self._limits.operations(streams, streams + 1, 1) <= self._limits.max_operations
            and index_bytes(streams, batches) <= self._limits.max_bytes
            and self._records.get(pending.stream_id, 0) + pending.records <= MAX_ENTRY_RECORDS
        )

    def add(self, pending: Pending, now_ms: float) -> None:
        if not self._pending:
            self._first_ms = now_ms
        self._pending.append(pending)
        self._records[pending.stream_id] = self._records.get(pending.stream_id, 0) + pending.records
        self._batches += len(pending.batches)
        self._bytes += pending.size_bytes

    def is_due(self, now_ms: float, idle: bool) -> bool:
        """Whether to seal now. `idle`: no object of this pipeline is being uploaded."""
        if not self._pending:
            return False
        return idle or self._bytes >= self._target_bytes or now_ms >= self._first_ms + self._linger_ms

    def deadline_ms(self) -> float | None:
        """When to ask again at the latest."""
        return self._first_ms + self._linger_ms if self._pending else None

    def seal(self) -> list[Pending]:
        """Everything buffered, in the order it came."""
        sealed = self._pending
        self._clear()
        return sealed

    def _clear(self) -> None:
        self._pending: list[Pending] = []
        self._records: dict[int, int] = {}  # by stream
        self._batches = 0
        self._bytes = 0
        self._first_ms = 0.0


def index_bytes(streams: int, batches: int) -> int:
    """What the entries and records of an object take in an append, at most."""
    return streams * ENTRY_BYTES + batches * BATCH_BYTES


def check_pending(pending: Pending, limits: Limits) -> None:
    """Raise `TooLarge` for what would not fit into one append even alone: retrying it is no use."""
    if pending.records > MAX_ENTRY_RECORDS:
        raise TooLarge("records written at once", pending.records, MAX_ENTRY_RECORDS)
    needed = index_bytes(1, len(pending.batches))
    if needed > limits.max_bytes:
        raise TooLarge("bytes of index for one write", needed, limits.max_bytes)
