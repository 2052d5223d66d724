"""The verdict fold against a model that keeps every batch for ever and judges each by all of them.

The model forgets nothing, so it shows that forgetting changes no verdict. It shares no code with the fold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from unittest.mock import patch
from uuid import UUID

from hypothesis import given, settings
from hypothesis import strategies as st

from dray.index import fold as fold_module
from dray.index.entry import BatchIndex, IndexEntry, Kind, Placed, Producer, Void, WalChunk
from dray.index.fold import Fold, Verdict, decode, encode
from tests.index_entries import INCARNATION, STREAM

LIMIT_MS = 100
LAST_SEQUENCE = 2**31 - 1
# So large that three of them wrap, and never twice within five batches.
HUGE = 2**30 - 3

Batch = tuple[Producer | None, int]


@dataclass(frozen=True)
class Written:
    """An entry as drawn. `fenced`: its batches do not count."""

    batches: tuple[Batch, ...]
    stamp_ms: int
    fenced: bool

    @property
    def records(self) -> int:
        return sum(records for _, records in self.batches)


@dataclass(frozen=True)
class OkOnce:
    """A batch that was ok, as the model remembers it."""

    entry: int
    id: int
    epoch: int
    first: int
    last: int
    offset: int
    clock_ms: int
    begins: bool


def model(entries: Sequence[Written], max_producers: int) -> list[list[str]]:
    """The verdicts, as words."""
    history: list[OkOnce] = []
    answers: list[list[str]] = []
    offset = 0
    for number, entry in enumerate(entries):
        clock_ms = max([0] + [before.stamp_ms for before in entries[: number + 1]])
        words: list[str] = []
        for producer, records in () if entry.fenced else entry.batches:
            if records == 0:
                words.append("left out")
                continue
            if producer is None:
                words.append("ok")
                offset += records
                continue
            first, last = producer.base_sequence, producer.base_sequence + records - 1
            if last > LAST_SEQUENCE:
                last -= LAST_SEQUENCE + 1
            own = [batch for batch in history if batch.id == producer.id]
            others = {
                batch.id
                for batch in history
                if own and batch.offset > own[-1].offset and batch.entry < number and batch.id != producer.id
            }
            begins = word = None
            if not own or clock_ms - own[-1].clock_ms > LIMIT_MS or len(others) >= max_producers:
                begins, word = True, "ok" if first == 0 else "unknown producer"
            elif producer.epoch != own[-1].epoch:
                begins = True
                if producer.epoch < own[-1].epoch:
                    word = "stale epoch"
                else:
                    word = "ok" if first == 0 else "out of order"
            else:
                while not own[0].begins or any(batch.begins for batch in own[1:]):
                    del own[0]
                same = [batch for batch in own[-5:] if (batch.first, batch.last) == (first, last)]
                follows = first == own[-1].last + 1 or (first == 0 and own[-1].last == LAST_SEQUENCE)
                word = f"duplicate {same[0].offset}" if same else "ok" if follows else "out of order"
            if word == "ok":
                once = (number, producer.id, producer.epoch, first, last, offset, clock_ms, bool(begins))
                history.append(OkOnce(*once))
            words.append(word)
            offset += records
        if entry.fenced:
            offset += entry.records
        answers.append(words)
    return answers


def word_of(verdict: Verdict) -> str:
    return f"duplicate {verdict.offset}" if verdict.kind is Kind.DUPLICATE else verdict.kind.value


@st.composite
def written(draw: st.DrawFn, max_entries: int = 14) -> list[Written]:
    """What clients send that mostly behave: the next batch, often an old one, sometimes nonsense."""
    sent: dict[int, list[tuple[int, int, int]]] = {}
    entries: list[Written] = []
    stamp_ms = 1_000
    for _ in range(draw(st.integers(1, max_entries))):
        stamp_ms += draw(st.sampled_from([0, 0, 1, 10, 60, 100, 101, -30]))
        batches: list[Batch] = []
        for _ in range(draw(st.integers(1, 5))):
            id = draw(st.sampled_from([None, 1, 1, 1, 2, 2, 3, 4]))
            records = draw(st.sampled_from([1, 1, 2, 3, HUGE, 0]))
            if id is None or records == 0:
                batches.append((None if id is None else Producer(id, 0, 0), records))
                continue
            mine = sent.setdefault(id, [])
            epoch, sequence, size = mine[-1] if mine else (0, 0, 0)
            after = (sequence + size) % 2**31
            match draw(st.sampled_from(["next", "next", "next", "again", "anew", "bump", "jump", "other"])):
                case "next":
                    batch = (epoch, after, records)
                case "again":
                    batch = draw(st.sampled_from(mine[-8:])) if mine else (0, 0, records)
                case "anew":
                    batch = (epoch, 0, records)
                case "bump":
                    batch = (epoch + 1, draw(st.sampled_from([0, 0, after])), records)
                case "jump":
                    batch = (epoch, draw(st.sampled_from([after + 1, 1, 5, LAST_SEQUENCE])), records)
                case _:
                    batch = (draw(st.integers(0, 2)), draw(st.integers(0, 3)), records)
            batch = (batch[0], batch[1] % 2**31, batch[2])
            mine.append(batch)
            batches.append((Producer(id, batch[0], batch[1]), batch[2]))
        if not any(records for _, records in batches):
            batches.append((None, 1))
        entries.append(Written(tuple(batches), stamp_ms, draw(st.integers(0, 9)) == 0))
    return entries


def placed(entries: Sequence[Written], start: int = 0) -> list[Placed]:
    run = []
    for entry in entries:
        index = tuple(BatchIndex(records, 100, 1, 2, producer) for producer, records in entry.batches)
        object_id = UUID(int=1)
        where = Void(object_id) if entry.fenced else WalChunk(object_id, "wal/1", 0, 104 * len(index), index)
        start += entry.records
        stored = IndexEntry(STREAM, entry.records, entry.stamp_ms, 1, 2, INCARNATION, where)
        run.append(Placed(stored, start, 0, 1))
    return run


def advance(fold: Fold, one: Placed) -> list[str]:
    verdicts = fold.advance(one)
    assert verdicts is not None
    return [word_of(verdict) for verdict in verdicts]


CHECKED = settings(max_examples=150, deadline=None, print_blob=True)
BOUNDS = st.sampled_from([1, 2, 3, 10_000])


@CHECKED
@given(written(), BOUNDS)
def test_verdicts_are_those_of_the_model(entries: list[Written], max_producers: int) -> None:
    with patch.object(fold_module, "MAX_PRODUCERS", max_producers):
        fold = Fold(LIMIT_MS)
        assert [advance(fold, one) for one in placed(entries)] == model(entries, max_producers)


@CHECKED
@given(written(), BOUNDS)
def test_from_any_snapshot_the_same_bytes_and_verdicts(entries: list[Written], max_producers: int) -> None:
    with patch.object(fold_module, "MAX_PRODUCERS", max_producers):
        run = placed(entries)
        fold, snapshots, verdicts = Fold(LIMIT_MS), [encode(Fold(LIMIT_MS))], []
        for one in run:
            verdicts.append(advance(fold, one))
            snapshots.append(encode(fold))
        for cut in range(len(snapshots)):
            again = decode(snapshots[cut], LIMIT_MS)
            assert dict(again.producers) == dict(decode(encode(again), LIMIT_MS).producers)
            for number in range(cut, len(run)):
                assert advance(again, run[number]) == verdicts[number]
                assert encode(again) == snapshots[number + 1]


@CHECKED
@given(written(), BOUNDS, st.data())
def test_what_comes_twice_or_late_changes_nothing(
    entries: list[Written], max_producers: int, data: st.DataObject
) -> None:
    """Own answer and watch, in either order: the first that brings an entry folds it."""
    with patch.object(fold_module, "MAX_PRODUCERS", max_producers):
        run = placed(entries)
        fold, again = Fold(LIMIT_MS), Fold(LIMIT_MS)
        for number, one in enumerate(run):
            assert advance(fold, one) == advance(again, one)
            for old in data.draw(st.lists(st.integers(0, number), max_size=3)):
                assert again.advance(run[old]) is None
            assert encode(again) == encode(fold)


@CHECKED
@given(written(), written(max_entries=4), BOUNDS)
def test_a_draft_says_what_comes_of_it(
    before: list[Written], drafted: list[Written], max_producers: int
) -> None:
    """What it finds ok is ok for everyone if it lands there; the rest would be void, for the same reason."""
    with patch.object(fold_module, "MAX_PRODUCERS", max_producers):
        fold = Fold(LIMIT_MS)
        for one in placed(before):
            advance(fold, one)
        state, draft, kept = encode(fold), fold.draft(), fold.copy()
        for entry in drafted:
            stamp_ms = fold.clock_ms + entry.stamp_ms - 1_000
            verdicts = draft.add(entry.batches, stamp_ms)
            (whole,) = placed([Written(entry.batches, stamp_ms, False)], kept.end)
            unshortened = kept.copy().advance(whole)
            assert unshortened is not None
            assert [one.kind for one in verdicts] == [one.kind for one in unshortened]
            ok = [batch for batch, verdict in zip(entry.batches, verdicts, strict=True) if verdict.ok]
            if ok:
                (landed,) = placed([Written(tuple(ok), stamp_ms, False)], kept.end)
                assert set(advance(kept, landed)) == {"ok"}
            assert draft.end == kept.end
        assert encode(fold) == state
