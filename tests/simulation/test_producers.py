"""Idempotent producers on seeded schedules of faults: each batch once, in order, and where it was said to be.

Three brokers run the real writer, folds, index, witness and resolver over a store of Oxia's promises or of
etcd's; they crash and come back with nothing in memory, beside a collector that fences far too early.
Producers behave like Java's. Readers on every broker write down what they see, all the time (`producers`).

Each rule of the protocol that this rests on is taken out once: then somebody notices (`BROKEN`). What two
brokers can show without faults is in `tests/unit/test_log_idempotence.py`: there are rules 2, 18, 19 and 22.

`SIMULATIONS` in the environment is how many times as many schedules are to be run.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from dray.errors import CorruptStore, DrayError
from dray.index import decided as decided_module
from dray.index import fold as fold_module
from dray.index.changes import resolve
from dray.index.decided import DecidedIndex
from dray.index.entry import Kind, Placed, Producer, WalChunk
from dray.index.fold import LEFT_OUT, OK, Draft, Fold, ProducerState, Verdict
from dray.metadata.store import Position
from dray.producers import folds as folds_module
from dray.producers.folds import StreamFolds, snapshot_key
from dray.wal import judging as judging_module
from dray.wal import writer as writer_module
from tests.simulation.producers import Plot, Rules, play
from tests.simulation.test_readers import CountsEverything, TakesAbsentForCommitted
from tests.simulation.test_wal import (
    AcknowledgesFenced,
    AppendsSideBySide,
    D,
    DecidesByReading,
    LosesCallers,
    Resends,
    Violation,
)

TIMES = int(os.environ.get("SIMULATIONS", "1"))
WEAK = Plot()
STRONG = Plot(strong=True)
TRUNCATING = Plot(truncates=True, epochs=3)
CONTENDED = Plot(producers=4, batches=6, crashes=4, trouble=0.25, patience=0.3, streams=(1,))
EXPIRING = Plot(expiration_ms=3_000, skew_ms=2_000, crashes=1)
REAL = Rules()


# --- what producers and readers were told is so


@pytest.mark.parametrize(
    ("plot", "seeds", "what_happened"),
    [
        (WEAK, 60, ("unresolved", "duplicate", "void", "snapshots", "CommitUnknown")),
        (CONTENDED, 30, ("unresolved", "duplicate", "OutOfOrderSequence")),
        (STRONG, 60, ("snapshots", "CommitUnknown", "OutOfOrderSequence")),
        (TRUNCATING, 30, ("truncated", "unresolved")),
        (EXPIRING, 30, ("expired", "unresolved")),
    ],
    ids=["weak", "contended", "strong", "truncating", "expiring"],
)
def test_every_batch_is_there_once_and_where_it_was_said_to_be(
    plot: Plot, seeds: int, what_happened: Sequence[str]
) -> None:
    told: Counter[str] = Counter()
    for seed in range(seeds * TIMES):
        try:
            told += play(seed, plot, REAL)
        except (Violation, CorruptStore) as violation:
            raise AssertionError(f"seed {seed}: {violation}") from violation
    assert told["acknowledged"] > 10 * seeds, told
    assert all(told[each] for each in what_happened), told


# --- the rules, and what happens without each


class KeepsTheLastBatch:
    """Without protocol 1: another fold from a snapshot than from the beginning."""

    @staticmethod
    def decode(value: bytes, expiration_ms: int) -> Fold:
        fold = fold_module.decode(value, expiration_ms)
        for producer_id, state in fold.producers.items():
            fold._producers[producer_id] = state._replace(batches=state.batches[-1:])
        return fold


def stores_all_ok(placed: Placed, verdicts: Sequence[Kind]) -> Any:
    """Without protocol 2: other verdicts than the fold's."""
    return resolve(placed, [Kind.OK if kind is not Kind.LEFT_OUT else kind for kind in verdicts])


def changes_the_stamp_too(placed: Placed, verdicts: Sequence[Kind]) -> Any:
    """Without protocol 23."""
    swap = resolve(placed, verdicts)
    return replace(swap, new=replace(swap.new, created_at_ms=swap.new.created_at_ms + 1))


class PredictsItsStart(writer_module._Pipeline):
    """Without protocol 3: an append without an answer is taken to be where it was expected."""

    async def _settle(self, sent, unknown):  # type: ignore[no-untyped-def]
        assert self._writer.folds is not None
        for _, part in sent:
            for entry in part.indexed:
                if entry.expected_start is not None:
                    self._writer.folds.own(Placed(entry, entry.expected_start + entry.records, 0, 0))
        await super()._settle(sent, unknown)


class ChecksOnArrivalOnly(Draft):
    """Without protocol 4: takes everything that was let in."""

    def add(self, batches: Iterable[tuple[Producer | None, int]], created_at_ms: int) -> tuple[Verdict, ...]:
        sizes = [records for _, records in batches]
        self.end += sum(sizes)
        return tuple(OK if size else LEFT_OUT for size in sizes)


class MovesByTheKeys(StreamFolds):
    """Without protocol 5: takes what the watch names for folded."""

    def current(self, stream_id: int) -> Fold | None:
        fold = self.fold(stream_id)
        told = self._index.followed_end(stream_id)
        if fold is not None and told is not None and told > fold.end:
            fold = fold.copy()
            fold.end = told
        return fold


class MovesOverGaps(StreamFolds):
    """Without protocol 5: goes on behind its own entries, whatever others wrote before them."""

    def own(self, placed: Placed) -> None:
        fold = self.fold(placed.entry.stream_id)
        if fold is not None:
            fold.end = max(fold.end, placed.start_offset)
        super().own(placed)

    async def settle(self, placed: Placed) -> tuple[Verdict | None, ...]:
        fold = self.fold(placed.entry.stream_id)
        if fold is not None:
            fold.end = max(fold.end, placed.start_offset)
        return await super().settle(placed)


class AnswersWithoutFolding(StreamFolds):
    """Without protocol 8: an entry that others came before is answered as it was judged."""

    async def settle(self, placed: Placed) -> tuple[Verdict, ...]:
        await super().settle(placed)
        chunk = placed.entry.where
        assert isinstance(chunk, WalChunk)
        return tuple(OK if batch.records else LEFT_OUT for batch in chunk.batches)


class VoidChangesState:
    """Without protocol 9: a batch out of order moves the sequence."""

    @staticmethod
    def judge(known: ProducerState | None, producer: Producer, records: int) -> Verdict:
        verdict = REAL_JUDGE(known, producer, records)
        if verdict.kind is Kind.OUT_OF_ORDER and known is not None and producer.epoch == known.epoch:
            return OK if producer.base_sequence > known.batches[-1].last_sequence else verdict
        return verdict


REAL_JUDGE = fold_module._judge


def takes_any_beginning(known: ProducerState | None, producer: Producer, records: int) -> Verdict:
    """Without protocol 9: an unknown producer may begin anywhere."""
    return OK if known is None else REAL_JUDGE(known, producer, records)


def takes_older_epochs(known: ProducerState | None, producer: Producer, records: int) -> Verdict:
    """Without protocol 9: an epoch that is over."""
    verdict = REAL_JUDGE(known, producer, records)
    return OK if verdict.kind is Kind.STALE_EPOCH else verdict


def forgets_duplicates(known: ProducerState | None, producer: Producer, records: int) -> Verdict:
    """Without the fold."""
    verdict = REAL_JUDGE(known, producer, records)
    return OK if verdict.kind is Kind.DUPLICATE else verdict


class TwoObjectsOfOneStream(writer_module._Pipeline):
    """The second is judged as though the first counted, which may be fenced."""

    def _next_append(self) -> list[writer_module._Object]:
        weak, self._metadata.conditions_abort = self._metadata.conditions_abort, True  # type: ignore[misc]
        try:
            return super()._next_append()
        finally:
            self._metadata.conditions_abort = weak  # type: ignore[misc]


class SnapshotsTheUndecided(StreamFolds):
    """Without protocol 15."""

    def _advance(self, stream_id: int, stream: folds_module._Stream, placed: Placed) -> None:
        super()._advance(stream_id, stream, placed)
        if stream.entries >= self._snapshot_entries:
            self._begin_snapshot(stream_id, stream)


class SnapshotsGoBack(StreamFolds):
    """Without protocol 16: puts its own over whatever is there."""

    async def _put_snapshot(self, stream_id: int, stream: folds_module._Stream, fold: Fold) -> None:
        try:
            await self._store.put(D, snapshot_key(stream_id), fold_module.encode(fold))
        except DrayError:
            return


REAL_ADVANCE = Fold.advance


def starts_anywhere(self: Fold, placed: Placed) -> tuple[Verdict, ...] | None:
    """Without protocol 17: passes over what an older snapshot has no continuation for."""
    if placed.end_offset > self.end and not isinstance(placed.entry.where, WalChunk):
        self.end = placed.end_offset
        return ()
    return REAL_ADVANCE(self, placed)


class NeverResolvesForItsOwn(StreamFolds):
    """Without protocol 18: what was acknowledged here waits behind what others have not resolved."""

    def acknowledged(self, stream_id: int) -> int:
        return 0


class ForgetsWhatItTold(DecidedIndex):
    """Without protocol 18: the high watermark is what a read says."""

    async def end(self, stream_id: int, *, fresh: bool = False) -> Position:
        self._told.clear()
        self._decided.clear()
        return await super().end(stream_id, fresh=fresh)


class PassesTheUndecided(DecidedIndex):
    """Without the decided prefix: readers see what nobody has judged."""

    async def end(self, stream_id: int, *, fresh: bool = False) -> Position:
        return await self.tail(stream_id, fresh=fresh)

    async def range(
        self, stream_id: int, start: int, max_entries: int, *, fresh: bool = False
    ) -> list[Placed]:
        return await self.counted(stream_id, start, max_entries, fresh=fresh)


def expires_by_the_records(self: Fold, placed: Placed) -> tuple[Verdict, ...] | None:
    """Without protocol 20."""
    stamped = replace(placed.entry, created_at_ms=max(placed.entry.max_timestamp_ms, 0))
    return REAL_ADVANCE(self, replace(placed, entry=stamped))


def expires_by_its_own_clock(self: Fold, placed: Placed) -> tuple[Verdict, ...] | None:
    """Without protocol 20."""
    now_ms = int(asyncio.get_running_loop().time() * 1000)
    return REAL_ADVANCE(self, replace(placed, entry=replace(placed.entry, created_at_ms=now_ms)))


def patched(owner: Any, name: str, value: Any, **others: Any) -> Rules:
    return Rules(patches=((owner, name, value),), **others)


BROKEN: dict[str, tuple[Plot, Rules]] = {
    "1 KeepsTheLastBatch": (WEAK, patched(folds_module, "decode", KeepsTheLastBatch.decode)),
    "2 StoresAllOk": (CONTENDED, patched(decided_module, "resolve", stores_all_ok)),
    "3 PredictsItsStart": (WEAK, Rules(pipeline=PredictsItsStart)),
    "3 AppendsSideBySide": (WEAK, Rules(pipeline=AppendsSideBySide)),
    "4 ChecksOnArrivalOnly": (WEAK, patched(Fold, "draft", lambda self: ChecksOnArrivalOnly(self))),
    "5 MovesByTheKeys": (WEAK, Rules(folds=MovesByTheKeys)),
    "5 MovesOverGaps": (WEAK, Rules(folds=MovesOverGaps)),
    "6 Resends": (WEAK, Rules(pipeline=Resends)),
    "6 DecidesByReading": (WEAK, Rules(pipeline=DecidesByReading)),
    "7 AnswersFromTheDraft": (STRONG, patched(writer_module, "rests_on", lambda part, sent: False)),
    "7 LosesCallers": (WEAK, Rules(pipeline=LosesCallers)),
    "8 AnswersWithoutFolding": (CONTENDED, Rules(folds=AnswersWithoutFolding)),
    "9 VoidChangesState": (STRONG, patched(fold_module, "_judge", VoidChangesState.judge)),
    "9 TakesAnyBeginning": (STRONG, patched(fold_module, "_judge", takes_any_beginning)),
    "9 TakesOlderEpochs": (CONTENDED, patched(fold_module, "_judge", takes_older_epochs)),
    "9 ForgetsDuplicates": (STRONG, patched(fold_module, "_judge", forgets_duplicates)),
    "10 TellsGapsAtOnce": (WEAK, patched(judging_module, "DOUBTFUL", ())),
    "11 AcknowledgesFenced": (WEAK, Rules(pipeline=AcknowledgesFenced)),
    "11 TwoObjectsOfOneStream": (WEAK, Rules(pipeline=TwoObjectsOfOneStream)),
    "12 CountsEverything": (WEAK, Rules(witness=CountsEverything)),
    "12 TakesAbsentForCommitted": (WEAK, Rules(witness=TakesAbsentForCommitted)),
    "15 SnapshotsTheUndecided": (WEAK, Rules(folds=SnapshotsTheUndecided)),
    "15 TruncatesAboveTheSnapshot": (TRUNCATING, Rules(truncates_above=True)),
    "16 SnapshotsGoBack": (WEAK, Rules(folds=SnapshotsGoBack)),
    "17 StartsAnywhere": (TRUNCATING, patched(Fold, "advance", starts_anywhere)),
    "18 NeverResolvesForItsOwn": (WEAK, Rules(folds=NeverResolvesForItsOwn)),
    "18 ForgetsWhatItTold": (WEAK, Rules(index=ForgetsWhatItTold)),
    "18 PassesTheUndecided": (WEAK, Rules(index=PassesTheUndecided)),
    "20 ExpiresByTheRecords": (EXPIRING, patched(Fold, "advance", expires_by_the_records)),
    "20 ExpiresByItsOwnClock": (EXPIRING, patched(Fold, "advance", expires_by_its_own_clock)),
    "23 ChangesTheStampToo": (WEAK, patched(decided_module, "resolve", changes_the_stamp_too)),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_without_a_rule_somebody_is_told_what_is_not_so(rule: str) -> None:
    plot, rules = BROKEN[rule]

    def fails(seed: int) -> bool:
        try:
            play(seed, plot, rules)
        except (Violation, CorruptStore):
            return True
        return False

    assert any(fails(seed) for seed in range(300)), f"{rule} makes no difference in 300 schedules"
