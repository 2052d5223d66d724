"""Producers of whom this broker failed a batch, so that those behind it fail alike. Pure.

What follows a batch that was not committed is a gap in the log, but not one of the client's making: told so,
the client would give up. Whoever answers callers says here which batches failed and which were committed, and
asks before a gap is told.

Bounded twice: the oldest producers are forgotten, and each is good for as many answers as batches can have
been on their way behind the one that failed. Whoever is forgotten is told of a gap, which is true as well.
"""

from __future__ import annotations

from collections import OrderedDict

from dray.index.entry import Producer

MAX_BROKEN = 10_000
# As many as a client may have in flight.
FAIL_ALIKE = 5


class Broken:
    def __init__(self) -> None:
        self._left: OrderedDict[tuple[int, int], int] = OrderedDict()  # answers, by stream and producer

    def add(self, stream_id: int, producer: Producer | None) -> None:
        """A batch was not committed, or nobody knows. Without a producer it has no sequence to break."""
        if producer is None:
            return
        key = stream_id, producer.id
        self._left[key] = FAIL_ALIKE
        self._left.move_to_end(key)
        if len(self._left) > MAX_BROKEN:
            self._left.popitem(last=False)

    def mend(self, stream_id: int, producer: Producer | None) -> None:
        """A batch is committed: what follows it has no gap before it."""
        if producer is not None:
            self._left.pop((stream_id, producer.id), None)

    def fails_alike(self, stream_id: int, producer: Producer) -> bool:
        """Whether a gap is of this broker's making. Each yes is one answer, and they run out."""
        key = stream_id, producer.id
        left = self._left.pop(key, 0)
        if left > 1:
            self._left[key] = left - 1
        return left > 0
