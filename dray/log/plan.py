"""Which batches answer a fetch, decided on the index alone. Pure.

Kafka's rules (KIP-74): whole batches only; the batch that holds the wanted offset comes first, however far in
front of it that batch begins; and at least one batch is sent, even if it is larger than every limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dray.index.entry import ParquetFile, Placed, WalChunk
from dray.log.compacted import BATCH_BYTES
from dray.protocol.records import HEADER_BYTES


class Span(NamedTuple):
    """Adjacent batches of one entry: [first, last). All of them are served, or it is one of nothing.

    Of nothing are a void batch, and an entry without bytes: a range of offsets that has no records. How many
    batches a Parquet file gives is not known before it is read: `size_bytes` is what they may have.
    """

    placed: Placed
    first: int
    last: int
    size_bytes: int

    @property
    def chunk(self) -> WalChunk | None:
        """Where its bytes are; None for nothing."""
        where = self.placed.entry.where
        return where if isinstance(where, WalChunk) and where.is_served(self.first) else None

    @property
    def start_offset(self) -> int:
        where = self.placed.entry.where
        skipped = where.batch_start(self.first) if isinstance(where, WalChunk) else 0
        return self.placed.start_offset + skipped

    @property
    def records(self) -> int:
        """Of a span of nothing: how many offsets it stands for."""
        where = self.placed.entry.where
        return where.batches[self.first].records if isinstance(where, WalChunk) else self.placed.entry.records


@dataclass(frozen=True, slots=True)
class Available:
    """What a partition could give: entries from the one that holds `offset` on, and its own limit."""

    entries: Sequence[Placed]
    offset: int
    max_bytes: int


def share(partitions: Sequence[Available], max_bytes: int) -> list[list[Span]]:
    """What each partition gives, together at most `max_bytes` but for the first batch of all.

    Each may fill an equal share first, then what others left goes in the order of the request. So one busy
    partition does not push out the rest.
    """
    having = [number for number, one in enumerate(partitions) if one.entries]
    chosen: list[list[Span]] = [[] for _ in partitions]
    used = [0] * len(partitions)
    limits = [0] * len(partitions)
    left = max_bytes
    shares = max_bytes // max(len(having), 1)
    for place, number in enumerate(having):
        if place == 1:  # the first batch may have taken more than its share
            shares = min(shares, max(left, 0) // (len(having) - 1))
        one = partitions[number]
        limits[number] = min(one.max_bytes, shares)
        chosen[number] = cut(one, limits[number], at_least_one=place == 0)
        used[number] = size_of(chosen[number])
        left -= used[number]
    for place, number in enumerate(having):
        one = partitions[number]
        limit = min(one.max_bytes, used[number] + left)
        if limit > limits[number]:
            chosen[number] = cut(one, limit, at_least_one=place == 0)
            left -= size_of(chosen[number]) - used[number]
    return chosen


def size_of(spans: Iterable[Span]) -> int:
    return sum(span.size_bytes for span in spans)


def cut(available: Available, max_bytes: int, *, at_least_one: bool) -> list[Span]:
    """Batches from the one that holds the offset on, as many as fit."""
    spans: list[Span] = []
    left = max_bytes
    for placed in available.entries:
        where = placed.entry.where
        if isinstance(where, ParquetFile):
            if left >= BATCH_BYTES or (at_least_one and not spans):
                spans.append(Span(placed, 0, 1, max(left, BATCH_BYTES)))
            break  # what follows is for the next fetch
        if not isinstance(where, WalChunk):
            whole = left >= HEADER_BYTES or (at_least_one and not spans)
            of_entry = [Span(placed, 0, 1, HEADER_BYTES)] if whole else []
        else:
            first = where.batch_at(max(available.offset - placed.start_offset, 0))
            of_entry, whole = _cut_chunk(placed, where, first, left, at_least_one and not spans)
        spans += of_entry
        left -= size_of(of_entry)
        if not whole:
            break
    return spans


def batch_bytes(chunk: WalChunk, number: int) -> int:
    """What a reader gets of a batch."""
    batch = chunk.batches[number]
    if chunk.is_served(number):
        return batch.size_bytes
    return HEADER_BYTES if batch.records else 0


def _cut_chunk(
    placed: Placed, chunk: WalChunk, first: int, left: int, at_least_one: bool
) -> tuple[list[Span], bool]:
    """The batches from `first` on that fit, and whether these are all. Those left out are passed over."""
    spans: list[Span] = []
    begin, size = first, 0  # of the span that is growing
    for number in range(first, len(chunk.batches)):
        is_served = chunk.serves_all or chunk.is_served(number)
        added = chunk.batches[number].size_bytes if is_served else batch_bytes(chunk, number)
        if size + added > left and not (at_least_one and not spans and size == 0):
            if size:
                spans.append(Span(placed, begin, number, size))
            return spans, False
        if is_served:
            size += added
            continue
        if size:
            spans.append(Span(placed, begin, number, size))
        if added:
            spans.append(Span(placed, number, number + 1, added))
        left -= size + added
        begin, size = number + 1, 0
    if size:
        spans.append(Span(placed, begin, len(chunk.batches), size))
    return spans, True
