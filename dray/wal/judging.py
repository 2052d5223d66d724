"""Judges the batches of idempotent producers right before an append, and again where others came before it.

The fold of a stream says what its batches are (`dray/index/fold.py`). `Judge` asks it at the right moment,
and when it has seen enough. It sends and stores nothing, and answers nobody: that is the writer's.

- Between taking the drafts and handing out the parts nothing is awaited, so whoever sends them at once has
  them judged by all that this broker knows (protocol 4).
- A gap or an unknown producer is told only behind a barrier: a stale fold may be wrong about these.
- A stream whose fold is not at hand fails alone: others are in the same objects and appends.
- A stream is folded by one task at a time. Where that takes long it goes on, and until it is done all that is
  written to the stream fails at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from functools import partial

from dray.errors import CorruptStore, DrayError, NotCommitted, StartConflict
from dray.index.entry import Kind, Placed, stream_of
from dray.index.fold import Fold, Verdict
from dray.producers.folds import StreamFolds
from dray.wal.assemble import Assembled
from dray.wal.draft import Part, as_it_landed, draft_part, producer_streams

log = logging.getLogger(__name__)

# How long an append waits for the folds of its streams: the others in it wait too.
CATCH_UP_S = 3.0
# Verdicts that a stale fold may give wrongly.
DOUBTFUL = (Kind.OUT_OF_ORDER, Kind.UNKNOWN_PRODUCER)


class Judge:
    """Of one domain, which has one append in flight. Without `folds` everything passes."""

    def __init__(self, folds: StreamFolds | None) -> None:
        self._folds = folds
        self._loop = asyncio.get_running_loop()
        self._behind: dict[int, asyncio.Task[Fold]] = {}  # streams that are being folded

    async def judged(self, objects: Sequence[Assembled], failed: dict[int, DrayError]) -> list[Part]:
        """What of each object is to be sent. Between taking the drafts and returning nothing is awaited.

        Nothing of the streams of `failed`, to which those are added whose folds are not at hand.
        """
        folds = self._folds
        streams = {stream for each in objects for stream in producer_streams(each)} - failed.keys()
        if folds is None or not streams:
            return [draft_part(each, {}, failed) for each in objects]
        held = {
            stream: fold
            for stream in streams
            if stream not in self._behind and (fold := folds.current(stream)) is not None
        }
        behind = [stream for stream in streams if stream not in held]
        if behind:
            await self._catch_up(folds, behind, held, failed)
        certain: set[int] = set()
        while True:
            drafts = {stream: fold.draft() for stream, fold in held.items()}
            parts = [draft_part(each, drafts, failed) for each in objects]
            doubtful = {
                stream
                for part in parts
                for stream, verdicts in part.verdicts.items()
                if any(verdict.kind in DOUBTFUL for verdict in verdicts)
            } - certain
            if not doubtful:
                return parts
            await self._catch_up(folds, doubtful, held, failed, fresh=True)
            certain |= doubtful

    async def follow(self, conflict: StartConflict, deadline: float, failed: dict[int, DrayError]) -> None:
        """Fold what came in between. A stream that others are always faster in fails alone, in the end."""
        stream_id = stream_of(conflict.sequence)
        folds = self._folds
        assert stream_id is not None, "nothing else states a start"
        assert folds is not None, "without them no start is stated"
        if conflict.actual > conflict.expected and self._loop.time() < deadline:
            await self._catch_up(folds, [stream_id], {}, failed, to=conflict.actual)
            return
        if conflict.actual < conflict.expected:
            folds.drop(stream_id)
            log.critical("stream %016x ends at %d, not %d", stream_id, conflict.actual, conflict.expected)
        failed[stream_id] = because(NotCommitted("the append failed"), conflict)

    async def fold(self, part: Part, placed: Placed) -> tuple[Verdict | None, ...] | None:
        """Fold an entry of `part` that was committed. Where others came before it, the verdicts on it."""
        folds = self._folds
        if folds is None:
            return None
        stream_id, start, expected = placed.entry.stream_id, placed.start_offset, placed.entry.expected_start
        if stream_id not in part.verdicts or start == expected:
            folds.own(placed)
            return None
        if expected is not None and start < expected:
            folds.drop(stream_id)
            log.critical("stream %016x began again at %d, not %d", stream_id, start, expected)
            raise CorruptStore(f"stream {stream_id:016x} began again at {start}")
        return as_it_landed(placed, part.verdicts[stream_id], await folds.settle(placed))

    def close(self) -> None:
        """Nobody waits any more for what is still being folded."""
        for read in self._behind.values():
            read.cancel()

    async def _catch_up(
        self,
        folds: StreamFolds,
        streams: Collection[int],
        held: dict[int, Fold],
        failed: dict[int, DrayError],
        *,
        to: int = 0,
        fresh: bool = False,
    ) -> None:
        """Side by side, into `held`, or into `failed` what cannot be folded or takes too long."""
        reads = {}
        for stream in streams:
            if stream not in self._behind:
                reads[stream] = self._loop.create_task(folds.catch_up(stream, to=to, fresh=fresh))
                self._behind[stream] = reads[stream]
                reads[stream].add_done_callback(partial(self._has_caught_up, stream))
        if reads:
            await asyncio.wait(reads.values(), timeout=CATCH_UP_S)
        for stream in streams:
            read = reads.get(stream)
            if read is None or not read.done():
                failure: DrayError = NotCommitted("what was written before is still being read")
            elif (error := read.exception()) is None:
                held[stream] = read.result()
                continue
            elif isinstance(error, DrayError):
                failure = because(NotCommitted("what was written before is not at hand"), error)
            else:
                raise error
            held.pop(stream, None)
            failed[stream] = failure

    def _has_caught_up(self, stream_id: int, done: asyncio.Task[Fold]) -> None:
        del self._behind[stream_id]
        if not done.cancelled():
            done.exception()  # nobody may be left who waits for it


def because(error: DrayError, cause: DrayError) -> DrayError:
    """The error, with what it is due to."""
    told = type(error)(f"{error}: {cause}")
    told.__cause__ = cause
    return told
