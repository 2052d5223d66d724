"""Which batches answer a fetch, decided on the index alone. Pure.

Kafka's rules (KIP-74): whole batches only; the batch that holds the wanted offset comes first, however far in
front of it that batch begins; and at least one batch is sent, even if it is larger than every limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dray.index.entry import Placed, WalChunk
from dray.protocol.records import HEADER_BYTES


class Span(NamedTuple):
    """Adjacent batches of one entry: [first, last). An entry without a chunk is one batch of nothing."""

    placed: Placed
    first: int
    last: int
    size_bytes: int


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
        if isinstance(where, WalChunk):
            first = where.batch_at(max(available.offset - placed.start_offset, 0))
            last, size = first, 0
            for batch in where.batches[first:]:
                if size + batch.size_bytes > left and not (at_least_one and not spans and last == first):
                    break
                size += batch.size_bytes
                last += 1
            whole = last == len(where.batches)
        else:
            first, last, size = 0, 1, HEADER_BYTES
            whole = size <= left or (at_least_one and not spans)
            last = 1 if whole else 0
        if last > first:
            spans.append(Span(placed, first, last, size))
            left -= size
        if not whole:
            break
    return spans
