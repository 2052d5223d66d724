"""Decides when buffered batches become one WAL object. Pure: no I/O, no clock.

An object is sealed when it is large enough, when its first batch has waited long enough, or at once when
the pipeline behind it is idle: on a fast store a lone request waits for no timer, while under load the
next object grows as long as the one before is on its way.

One object is one append (protocol 19), so a buffer is also full when its entries would not fit into the
metadata store's limits together with their references, record and marker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dray.index.entry import Producer
from dray.metadata.store import Limits

# What an index entry takes besides its batches: ids, path, counters, the names of entry and reference.
ENTRY_BYTES = 512
# What a batch adds to it: seven varints, the timestamps among them.
BATCH_BYTES = 48


@dataclass(frozen=True, slots=True)
class PendingBatch:
    """A validated Kafka batch on its way. `data` is not copied: whoever passes it leaves it alone."""

    stream_id: int
    data: memoryview
    records: int
    min_timestamp_ms: int
    max_timestamp_ms: int
    producer: Producer | None = None


@dataclass(frozen=True, slots=True)
class Pending:
    """Batches of one stream that one caller wrote together, and the caller's own handle."""

    batches: Sequence[PendingBatch]
    handle: Any

    @property
    def size_bytes(self) -> int:
        return sum(len(batch.data) for batch in self.batches)


class SegmentBatcher:
    """One open buffer. Callers supply `now_ms` and upload what `seal` returns."""

    def __init__(self, target_bytes: int, linger_ms: int, limits: Limits) -> None:
        self._target_bytes = target_bytes
        self._linger_ms = linger_ms
        self._limits = limits
        self._clear()

    def fits(self, pending: Pending) -> bool:
        """Whether it may join the buffer. An empty one takes anything."""
        if not self._pending:
            return True
        streams = self._streams | {batch.stream_id for batch in pending.batches}
        batches = self._batches + len(pending.batches)
        return (
            self._bytes + pending.size_bytes <= self._target_bytes
            # An entry and a reference per stream, the record, the marker.
            and self._limits.operations(len(streams), len(streams) + 1, 1) <= self._limits.max_operations
            and len(streams) * ENTRY_BYTES + batches * BATCH_BYTES <= self._limits.max_bytes
        )

    def add(self, pending: Pending, now_ms: float) -> None:
        if not self._pending:
            self._first_ms = now_ms
        self._pending.append(pending)
        self._streams.update(batch.stream_id for batch in pending.batches)
        self._batches += len(pending.batches)
        self._bytes += pending.size_bytes

    def is_due(self, now_ms: float, idle: bool) -> bool:
        """Whether to seal now. `idle`: no object of this pipeline is on its way."""
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
        self._streams: set[int] = set()
        self._batches = 0
        self._bytes = 0
        self._first_ms = 0.0
