"""The verdict fold: Kafka's own cases where it has them, and the rules of the protocol where it has not.

Snapshots that were stored once must be read for ever, and written the same while version 1 is current.
`golden/fold/manifest.json` says what each file holds. `python -m tests.unit.test_fold --rewrite` makes all of
them anew, for a diff that somebody reviews; a new version adds files instead.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from dray.errors import CorruptStore, IncompatibleStore, ReadAgain
from dray.index import fold as fold_module
from dray.index.entry import BatchIndex, IndexEntry, Kind, Placed, Producer, WalChunk
from dray.index.fold import (
    LEFT_OUT,
    OK,
    OUT_OF_ORDER,
    STALE_EPOCH,
    UNKNOWN_PRODUCER,
    Fold,
    OkBatch,
    ProducerState,
    Verdict,
    decode,
    encode,
)
from tests.index_entries import INCARNATION, STREAM, parquet_entry, truncated_entry, void_entry

DIRECTORY = Path(__file__).parents[2] / "golden" / "fold"
MANIFEST = DIRECTORY / "manifest.json"
NAMES = sorted(path.stem for path in DIRECTORY.glob("*.bin"))

MAX = 2**31 - 1
DAY_MS = 86_400_000
NOW = 1_700_000_000_000


def duplicate_of(offset: int) -> Verdict:
    return Verdict(Kind.DUPLICATE, offset)


def chunk(*batches: tuple[Producer | None, int], at_ms: int = NOW) -> IndexEntry:
    index = tuple(BatchIndex(records, 100, 1, 2, producer) for producer, records in batches)
    where = WalChunk(UUID(int=1), "wal/1", 49, 104 * len(batches), index)
    return IndexEntry(STREAM, sum(b.records for b in index), at_ms, 1, 2, INCARNATION, where)


def place(entry: IndexEntry, start: int) -> Placed:
    return Placed(entry, start + entry.records, 0, 1)


def append(fold: Fold, *batches: tuple[Producer | None, int], at_ms: int = NOW) -> tuple[Verdict, ...]:
    """As an entry at the end of the fold."""
    verdicts = fold.advance(place(chunk(*batches, at_ms=at_ms), fold.end))
    assert verdicts is not None
    return verdicts


def one(
    fold: Fold, sequence: int, records: int = 1, *, id: int = 1, epoch: int = 0, at_ms: int = NOW
) -> Verdict:
    """One batch in one entry. What was said before the append is what comes of it."""
    said = fold.check(Producer(id, epoch, sequence), records, at_ms)
    (verdict,) = append(fold, (Producer(id, epoch, sequence), records), at_ms=at_ms)
    assert verdict == said
    return verdict


def near_the_wrap(epoch: int = 15) -> Fold:
    """A producer whose next sequence is 2^31-11."""
    fold = Fold()
    assert one(fold, 0, MAX - 10, epoch=epoch) == OK
    return fold


class TestVerdicts:
    def test_basic_id_mapping(self) -> None:
        """ProducerStateManagerTest.testBasicIdMapping."""
        fold = Fold()
        assert one(fold, 0) == OK
        assert one(fold, 1) == OK
        assert one(fold, 1) == duplicate_of(1)
        assert one(fold, 5) == OUT_OF_ORDER
        assert one(fold, 0, epoch=1) == OK
        assert one(fold, 0, epoch=0) == STALE_EPOCH

    def test_duplicate_appends(self) -> None:
        """UnifiedLogTest.testDuplicateAppends."""
        fold = Fold()
        for sequence in range(6):
            assert one(fold, sequence) == OK
        assert one(fold, 6, 3) == OK  # at offset 6
        assert one(fold, 6, 3) == duplicate_of(6)
        assert one(fold, 7, 2) == OUT_OF_ORDER, "a part of a batch is no duplicate"
        assert one(fold, 2) == duplicate_of(2), "the fifth from the end"
        assert one(fold, 1) == OUT_OF_ORDER, "more than five back"
        at = fold.end
        assert one(fold, 9) == OK
        assert one(fold, 9) == duplicate_of(at)

    def test_old_producer_epoch(self) -> None:
        """UnifiedLogTest.testOldProducerEpoch."""
        fold = Fold()
        assert one(fold, 0, epoch=1) == OK
        assert one(fold, 0, epoch=0) == STALE_EPOCH

    def test_a_higher_epoch_begins_at_0(self) -> None:
        """ProducerStateManagerTest.testOutOfSequenceAfterControlRecordEpochBump, without its marker."""
        fold = Fold()
        assert one(fold, 0) == OK
        assert one(fold, 1) == OK
        assert one(fold, 2, epoch=1) == OUT_OF_ORDER
        assert one(fold, 2) == OK, "the refused bump has not bumped"
        assert one(fold, 0, epoch=2) == OK
        assert one(fold, 1, epoch=1) == STALE_EPOCH
        assert one(fold, 1, epoch=2) == OK

    def test_a_higher_epoch_forgets_the_batches_of_the_lower(self) -> None:
        fold = Fold()
        assert one(fold, 0) == OK
        assert one(fold, 1, 2) == OK
        assert one(fold, 0, epoch=1) == OK
        assert one(fold, 1, 2, epoch=1) == OK, "and not a duplicate of that of epoch 0"

    def test_an_unknown_producer_begins_at_0(self) -> None:
        """Protocol 9. Kafka takes any sequence here."""
        fold = Fold()
        assert one(fold, 1) == UNKNOWN_PRODUCER
        assert one(fold, MAX) == UNKNOWN_PRODUCER
        assert one(fold, 0, epoch=7) == OK

    def test_sequence_wraps_around(self) -> None:
        """ProducerStateManagerTest.testProducerSequenceWrapAround."""
        fold = near_the_wrap()
        assert one(fold, MAX - 10, 11, epoch=15) == OK
        assert fold.producers[1].batches[-1].last_sequence == MAX
        assert one(fold, 0, epoch=15) == OK
        assert fold.producers[1].batches[-1].last_sequence == 0

    def test_wrap_inside_a_batch(self) -> None:
        """ProducerStateManagerTest.testProducerSequenceWithWrapAroundBatchRecord."""
        fold = near_the_wrap()
        at = fold.end
        assert one(fold, MAX - 10, 21, epoch=15) == OK
        last = fold.producers[1].batches[-1]
        assert (last.first_sequence, last.last_sequence) == (MAX - 10, 9)
        assert (last.start_offset, last.records) == (at, 21)
        assert one(fold, MAX - 10, 21, epoch=15) == duplicate_of(at)
        assert one(fold, 9, epoch=15) == OUT_OF_ORDER
        assert one(fold, 10, epoch=15) == OK

    def test_wrap_to_another_number_than_0(self) -> None:
        """ProducerStateManagerTest.testProducerSequenceInvalidWrapAround."""
        fold = near_the_wrap()
        assert one(fold, MAX - 10, 11, epoch=15) == OK
        assert one(fold, 1, epoch=15) == OUT_OF_ORDER

    def test_producers_do_not_disturb_each_other(self) -> None:
        """UnifiedLogTest.testMultipleProducersWithDuplicatesInSingleAppend, as a leader sees it."""
        fold = Fold()
        batches = [(1, 0), (2, 0), (1, 1), (2, 1), (1, 1)]
        verdicts = append(fold, *((Producer(id, 0, sequence), 1) for id, sequence in batches))
        assert verdicts == (OK, OK, OK, OK, duplicate_of(2))

    def test_batches_without_producer_are_ok(self) -> None:
        fold = Fold()
        assert append(fold, (None, 3), (None, 3)) == (OK, OK)
        assert fold.check(None, 1, NOW) == OK
        assert not fold.producers

    def test_void_changes_no_state_and_keeps_its_offsets(self) -> None:
        fold = Fold()
        assert append(fold, (Producer(1, 0, 0), 2), (Producer(1, 0, 7), 5), (Producer(1, 0, 2), 1)) == (
            OK,
            OUT_OF_ORDER,
            OK,
        )
        assert fold.producers[1].batches == (OkBatch(0, 2, 0), OkBatch(2, 1, 7))
        assert fold.end == 8

    def test_a_batch_that_was_left_out_is_not_there(self) -> None:
        fold = Fold()
        assert append(fold, (Producer(1, 0, 0), 0), (None, 0), (Producer(1, 0, 0), 1)) == (
            LEFT_OUT,
            LEFT_OUT,
            OK,
        )
        assert fold.check(Producer(1, 0, 1), 0, NOW) == LEFT_OUT

    @pytest.mark.parametrize("sequence", [-1, -(2**31)])
    def test_a_sequence_that_is_none(self, sequence: int) -> None:
        fold = Fold()
        assert one(fold, sequence) == UNKNOWN_PRODUCER
        assert one(fold, 0) == OK
        assert one(fold, sequence) == OUT_OF_ORDER


class TestExpiry:
    def test_above_the_limit_and_not_at_it(self) -> None:
        """Protocol 20; Kafka's ProducerStateManagerTest.testPidExpirationTimeout takes sequence 1 then."""
        fold = Fold()
        assert one(fold, 0, epoch=5) == OK
        assert fold.check(Producer(1, 5, 1), 1, NOW + DAY_MS) == OK
        assert fold.check(Producer(1, 5, 1), 1, NOW + DAY_MS + 1) == UNKNOWN_PRODUCER
        assert one(fold, 1, epoch=5, at_ms=NOW + DAY_MS + 1) == UNKNOWN_PRODUCER
        assert one(fold, 0, epoch=4, at_ms=NOW) == OK, "the clock stays: it begins anew, in any epoch"
        assert fold.producers[1] == ProducerState(4, NOW + DAY_MS + 1, (OkBatch(0, 1, 2),))

    def test_the_clock_never_goes_back(self) -> None:
        fold = Fold(100)
        assert one(fold, 0, at_ms=1_000) == OK
        assert one(fold, 0, id=2, at_ms=50) == OK
        assert fold.producers[2].clock_ms == 1_000
        assert fold.clock_ms == 1_000

    def test_every_entry_moves_the_clock(self) -> None:
        fold = Fold(100)
        assert one(fold, 0, at_ms=1_000) == OK
        assert one(fold, 0, id=2, at_ms=1_050) == OK
        fold.advance(place(replace(void_entry(3), created_at_ms=1_101), fold.end))
        assert list(fold.producers) == [2]
        append(fold, (None, 1), at_ms=1_151)
        assert not fold.producers

    def test_only_an_ok_batch_keeps_a_producer(self) -> None:
        fold = Fold(100)
        assert one(fold, 0, at_ms=1_000) == OK
        assert one(fold, 0, at_ms=1_090) == duplicate_of(0)
        assert one(fold, 7, at_ms=1_090) == OUT_OF_ORDER
        assert one(fold, 1, at_ms=1_101) == UNKNOWN_PRODUCER

    def test_timestamps_of_records_are_no_clock(self) -> None:
        fold = Fold(100)
        assert one(fold, 0, at_ms=1_000) == OK
        late = replace(chunk((None, 1), at_ms=1_000), min_timestamp_ms=9_999_999, max_timestamp_ms=9_999_999)
        fold.advance(place(late, fold.end))
        assert one(fold, 1, at_ms=1_000) == OK


class TestBound:
    @pytest.fixture(autouse=True)
    def _small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fold_module, "MAX_PRODUCERS", 2)

    def test_the_longest_silent_goes_first(self) -> None:
        fold = Fold()
        for id, sequence in [(1, 0), (2, 0), (1, 1), (3, 0)]:
            assert one(fold, sequence, id=id) == OK
        assert list(fold.producers) == [1, 3]
        assert one(fold, 1, id=2) == UNKNOWN_PRODUCER

    def test_only_between_entries(self) -> None:
        """So that a draft of an entry need not know what else it pushes out."""
        fold = Fold()
        batches = [(Producer(id, 0, 0), 1) for id in (1, 2, 3)] + [(Producer(1, 0, 1), 1)]
        assert append(fold, *batches) == (OK, OK, OK, OK)
        assert list(fold.producers) == [3, 1]

    def test_a_draft_of_several_entries_pushes_out_as_they_will(self) -> None:
        fold = Fold()
        assert one(fold, 0, id=1) == OK
        assert one(fold, 0, id=2) == OK
        draft = fold.draft()
        assert draft.add([(Producer(3, 0, 0), 1)], NOW) == (OK,)
        assert draft.add([(Producer(1, 0, 1), 1), (Producer(2, 0, 1), 1)], NOW) == (UNKNOWN_PRODUCER, OK)
        assert draft.add([(Producer(id, 0, 0), 1) for id in (4, 5)], NOW) == (OK, OK)
        assert draft.add([(Producer(id, 0, 1), 1) for id in (3, 4, 5)], NOW) == (UNKNOWN_PRODUCER, OK, OK)
        assert list(fold.producers) == [1, 2]

    def test_a_draft_counts_a_producer_once(self) -> None:
        fold = Fold()
        assert one(fold, 0, id=2) == OK
        assert one(fold, 0, id=1) == OK
        draft = fold.draft()
        assert draft.add([(Producer(1, 0, 1), 1)], NOW) == (OK,)
        assert draft.add([(Producer(2, 0, 1), 1)], NOW) == (OK,)

    def test_a_draft_knows_who_wrote_last(self) -> None:
        draft = Fold().draft()
        for id, sequence in [(3, 0), (4, 0), (3, 1), (5, 0)]:
            assert draft.add([(Producer(id, 0, sequence), 1)], NOW) == (OK,)
        assert draft.check(Producer(3, 0, 2), 1, NOW) == OK
        assert draft.check(Producer(4, 0, 1), 1, NOW) == UNKNOWN_PRODUCER


class TestOrder:
    def test_what_was_folded_before_is_nothing(self) -> None:
        fold = Fold()
        first = place(chunk((Producer(1, 0, 0), 2)), 0)
        second = place(chunk((Producer(1, 0, 2), 2)), 2)
        assert fold.advance(first) == (OK,)
        assert fold.advance(first) is None
        assert fold.advance(second) == (OK,)
        state = encode(fold)
        assert fold.advance(second) is None
        assert fold.advance(first) is None
        assert fold.advance(place(parquet_entry(4), 0)) is None
        assert encode(fold) == state

    @pytest.mark.parametrize("start", [3, 5, 100])
    def test_only_adjacent_entries(self, start: int) -> None:
        fold = Fold()
        append(fold, (None, 4))
        state = encode(fold)
        with pytest.raises(ReadAgain, match="folded up to 4"):
            fold.advance(place(chunk((Producer(1, 0, 0), 2), at_ms=NOW + 1), start))
        assert encode(fold) == state

    @pytest.mark.parametrize("entry", [parquet_entry(2), truncated_entry(2)])
    def test_batches_that_are_gone_cannot_be_folded(self, entry: IndexEntry) -> None:
        fold = Fold()
        with pytest.raises(ReadAgain):
            fold.advance(place(entry, 0))
        assert fold.end == 0

    def test_a_fenced_entry_moves_the_end(self) -> None:
        fold = Fold()
        assert fold.advance(place(void_entry(3), 0)) == ()
        assert fold.end == 3

    def test_a_copy_goes_its_own_way(self) -> None:
        fold = Fold()
        assert one(fold, 0) == OK
        state, copy = encode(fold), fold.copy()
        assert encode(copy) == state
        assert one(copy, 1) == OK
        assert encode(fold) == state


class TestDraft:
    def test_what_is_not_ok_takes_no_offsets_and_changes_nothing(self) -> None:
        fold = Fold()
        assert one(fold, 0, 10) == OK
        state, draft = encode(fold), fold.draft()
        batches: list[tuple[Producer | None, int]] = [
            (Producer(1, 0, 0), 10),
            (Producer(1, 0, 10), 1),
            (None, 5),
            (Producer(1, 0, 11), 2),
            (Producer(1, 0, 11), 2),
        ]
        assert draft.add(batches, NOW) == (duplicate_of(0), OK, OK, OK, duplicate_of(16))
        assert (draft.start, draft.end) == (10, 18)
        assert draft.check(Producer(1, 0, 13), 1, NOW) == OK
        assert encode(fold) == state
        kept = [batches[i] for i in (1, 2, 3)]
        assert append(fold, *kept) == (OK, OK, OK)

    def test_an_entry_that_is_not_written_moves_no_clock(self) -> None:
        fold = Fold(100)
        assert one(fold, 0, at_ms=1_000) == OK
        draft = fold.draft()
        assert draft.add([(Producer(2, 0, 7), 1)], 2_000) == (UNKNOWN_PRODUCER,)
        assert draft.add([(Producer(1, 0, 1), 1)], 1_050) == (OK,)

    def test_it_is_of_no_use_once_the_fold_moved_on(self) -> None:
        fold = Fold()
        draft = fold.draft()
        append(fold, (None, 1))
        with pytest.raises(AssertionError):
            draft.add([(None, 1)], NOW)


class TestSnapshots:
    def test_ten_thousand_producers_fit_into_a_value(self) -> None:
        rng = random.Random(4)
        fold = Fold()
        for sequence in range(0, 50, 10):
            for start in range(0, 10_000, 100):
                ids = range(start, start + 100)
                append(
                    fold, *((Producer(id, 0, sequence), 10) for id in ids), at_ms=NOW + rng.randrange(10**6)
                )
        assert len(fold.producers) == 10_000
        size = len(encode(fold))
        assert size < 300_000
        assert encode(decode(encode(fold))) == encode(fold)

    def test_the_largest_fit_into_every_store(self) -> None:
        """One producer with the largest numbers that the index can hold; 1,310,720 is Oxia's limit."""
        fold = Fold()
        records, gap = 2**32 - 1, 2**60
        batches = tuple(OkBatch(MAX, records, i * gap) for i in range(5))
        empty = len(encode(fold))
        fold._put(-(2**63), ProducerState(2**15 - 1, 2**63 - 1, batches))
        assert (len(encode(fold)) - empty) * 10_000 < 1_310_720

    def test_a_newer_version_is_left_alone(self) -> None:
        value = encode(Fold())
        with pytest.raises(IncompatibleStore, match="fold 2"):
            decode(b"\x02" + value[1:])

    def test_another_expiration_is_refused(self) -> None:
        """Two brokers that differ in it would give different verdicts."""
        with pytest.raises(IncompatibleStore, match="100, and not 86400000"):
            decode(encode(Fold(100)))

    def test_damaged_snapshots_are_refused_or_another_state(self) -> None:
        value = (DIRECTORY / "several.bin").read_bytes()
        rng = random.Random(7)
        for cut in range(len(value)):
            with pytest.raises(CorruptStore):
                decode(value[:cut])
        for _ in range(500):
            damaged = bytearray(value)
            damaged[rng.randrange(len(value))] = rng.randrange(256)
            try:
                assert encode(decode(bytes(damaged))) == damaged
            except (CorruptStore, IncompatibleStore):
                continue
        for extra in (b"\0", b"\x80", b"\xff" * 100_000):
            with pytest.raises(CorruptStore):
                decode(value + extra)

    @pytest.mark.parametrize(
        "numbers",
        [
            [0, DAY_MS, 0, 0, 0],  # version 0
            [1, DAY_MS, 9, 5, 1, 2, 0, 5, 0, 0, 0, 1],  # no batches
            [1, DAY_MS, 9, 5, 1, 2, 0, 5, 1, 0, 0, 0],  # a batch of none
            [1, DAY_MS, 9, 5, 1, 2, 0, 5, 1, 0, 9, 1],  # behind the end
            [1, DAY_MS, 9, 5, 1, 2, 0, 6, 1, 0, 0, 1],  # after the clock
            [1, DAY_MS, 9, DAY_MS + 6, 1, 2, 0, 5, 1, 0, 0, 1],  # expired
            [1, DAY_MS, 9, 5, 1, 2, 0, 5, 2, 0, 0, 1, 0, 1],  # before the start
            [1, DAY_MS, 9, 5, 1, 2, 0, 5, 6, 0, 5, 1, *[0, 1] * 5],  # six of them
            [1, DAY_MS, 9, 5, 2, 2, 0, 5, 1, 0, 0, 1, 2, 0, 0, 1, 0, 1, 1],  # one producer twice
            [1, DAY_MS, 9, 5, 2, 2, 0, 5, 1, 0, 0, 1, 4, 0, 0, 1, 0, 0, 1],  # one offset twice
        ],
    )
    def test_what_no_fold_can_be(self, numbers: list[int]) -> None:
        with pytest.raises(CorruptStore):
            decode(varints(*numbers))

    def test_what_a_fold_can_be(self) -> None:
        """The sound one that those above differ from, by its numbers."""
        fold = decode(varints(1, DAY_MS, 9, 5, 1, 2, 0, 5, 1, 0, 0, 1))
        assert (fold.end, fold.clock_ms) == (9, 5)
        assert dict(fold.producers) == {1: ProducerState(0, 5, (OkBatch(0, 1, 0),))}


def test_every_file_is_in_the_manifest() -> None:
    assert set(cases()) <= set(NAMES)
    assert sorted(json.loads(MANIFEST.read_text())) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_golden_decodes_to_what_the_manifest_says(name: str) -> None:
    manifest = json.loads(MANIFEST.read_text())[name]
    fold = decode((DIRECTORY / f"{name}.bin").read_bytes(), int(manifest["expiration_ms"]))
    assert describe(fold) == manifest


@pytest.mark.parametrize("name", NAMES)
def test_golden_encodes_to_the_same_bytes(name: str) -> None:
    value = (DIRECTORY / f"{name}.bin").read_bytes()
    expiration_ms = int(json.loads(MANIFEST.read_text())[name]["expiration_ms"])
    assert encode(decode(value, expiration_ms)) == value


def varints(*numbers: int) -> bytes:
    """As protobuf has them."""
    out = b""
    for number in numbers:
        while number >= 128:
            out += bytes([128 + number % 128])
            number //= 128
        out += bytes([number])
    return out


def cases() -> dict[str, Fold]:
    plain = Fold()
    append(plain, (None, 7), (None, 1))

    several = Fold()
    for sequence in range(0, 28, 4):  # the first two of them are forgotten
        append(several, (Producer(4711, 3, sequence), 4), (None, 100), (Producer(4711, 3, 77), 2))
    append(several, (Producer(0, 0, 0), 1), (Producer(9, 1, 0), 300), at_ms=NOW + 1_234)
    append(several, (Producer(0, 0, 1), 1), at_ms=NOW + 999)

    wrapped = near_the_wrap()
    append(wrapped, (Producer(1, 15, MAX - 10), 21), (Producer(1, 15, 10), 1))

    expired = Fold(100)
    append(expired, (Producer(1, 0, 0), 1), at_ms=1_000)
    append(expired, (Producer(2, 0, 0), 1), at_ms=1_001)
    append(expired, (None, 1), at_ms=1_101)

    largest = Fold(2**63 - 1)
    append(largest, (Producer(2**63 - 1, 2**15 - 1, 0), MAX), at_ms=2**63 - 1)
    append(largest, (None, 2**62), at_ms=2**63 - 1)
    append(largest, (Producer(2**63 - 1, 2**15 - 1, MAX), MAX), at_ms=2**63 - 1)

    return {
        "empty": Fold(),
        "plain": plain,
        "several": several,
        "wrapped": wrapped,
        "expired": expired,
        "largest": largest,
    }


def describe(fold: Fold) -> dict[str, Any]:
    """As JSON. Numbers above 2^53, where JSON's end in many languages, are strings."""

    def plain(value: Any) -> Any:
        if isinstance(value, tuple):
            return [plain(one) for one in value]
        return value if abs(value) < 2**53 else str(value)

    return {
        "expiration_ms": plain(fold.expiration_ms),
        "end": plain(fold.end),
        "clock_ms": plain(fold.clock_ms),
        "producers": [[plain(id), *plain(state)] for id, state in fold.producers.items()],
    }


def rewrite() -> None:
    DIRECTORY.mkdir(exist_ok=True)
    folds = cases()
    for name, fold in folds.items():
        (DIRECTORY / f"{name}.bin").write_bytes(encode(fold))
    rows = [f"{json.dumps(name)}: {json.dumps(describe(fold))}" for name, fold in folds.items()]
    MANIFEST.write_text("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    if sys.argv[1:] != ["--rewrite"]:
        sys.exit("this replaces golden files; say --rewrite if that is meant")
    rewrite()
