"""What of an object is sent: what is left out, what it expects, and where duplicates of itself are."""

from __future__ import annotations

from uuid import UUID

import pytest

from dray.index.entry import IndexEntry, Kind, Placed, Producer, WalChunk, decode, encode, encoded_expecting
from dray.index.fold import OK, OUT_OF_ORDER, UNKNOWN_PRODUCER, Fold, Verdict
from dray.wal.assemble import Assembled, Identity, assemble
from dray.wal.batcher import Pending, PendingBatch
from dray.wal.draft import Part, as_it_landed, draft_part, producer_streams
from tests.batches import build_batch

A, B = 1, 2
IDENTITY = Identity(UUID(int=5), "wal/5", 0, 1_000, "00" * 16)


def batch(stream_id: int, records: int, producer: Producer | None = None, at_ms: int = 7) -> PendingBatch:
    return PendingBatch(stream_id, memoryview(build_batch()), records, at_ms, at_ms, producer)


def assembled(*batches: PendingBatch) -> Assembled:
    return assemble(IDENTITY, [Pending([one], None) for one in batches])


def chunk(entry: IndexEntry) -> WalChunk:
    assert isinstance(entry.where, WalChunk)
    return entry.where


def check(part: Part) -> None:
    """The parts say the same, and each entry is what its bytes say."""
    assert [decode(new.value) for new in part.entries] == list(part.indexed)
    assert [new.records for new in part.entries] == [entry.records for entry in part.indexed]
    assert [new.expected_start for new in part.entries] == [entry.expected_start for entry in part.indexed]
    assert len(part.puts) == (len(part.entries) + 1 if part.entries else 0)


def test_without_producers_nothing_changes() -> None:
    made = assembled(batch(A, 2), batch(B, 1))
    part = draft_part(made, {})
    assert (part.entries, part.puts, part.deletes) == (made.entries, made.puts, made.deletes)
    assert list(producer_streams(made)) == []
    check(part)


def test_what_is_ok_states_where_it_expects_to_start() -> None:
    made = assembled(batch(A, 2, Producer(9, 0, 0)), batch(A, 3, Producer(9, 0, 2)), batch(B, 1))
    assert list(producer_streams(made)) == [A]
    part = draft_part(made, {A: Fold().draft()})
    check(part)
    assert [entry.expected_start for entry in part.indexed] == [0, None]
    assert part.verdicts == {A: (OK, OK)}


def test_the_second_object_of_an_append_follows_the_first() -> None:
    drafts = {A: Fold().draft()}
    draft_part(assembled(batch(A, 2, Producer(9, 0, 0))), drafts)
    part = draft_part(assembled(batch(A, 1, Producer(9, 0, 2)), batch(A, 1)), drafts)
    check(part)
    assert part.indexed[0].expected_start == 2
    assert part.verdicts == {A: (OK, OK)}


def test_what_is_not_ok_is_left_out() -> None:
    made = assembled(
        batch(A, 5, Producer(9, 0, 4), at_ms=1),
        batch(A, 2, Producer(8, 0, 0), at_ms=50),
        batch(A, 2, Producer(8, 0, 0), at_ms=99),
    )
    part = draft_part(made, {A: Fold().draft()})
    check(part)
    (entry,) = part.indexed
    assert [one.records for one in chunk(entry).batches] == [0, 2, 0]
    assert [one.size_bytes for one in chunk(entry).batches] == [68, 68, 68], "its bytes are there"
    assert (entry.records, entry.min_timestamp_ms, entry.max_timestamp_ms) == (2, 50, 50)
    assert part.verdicts == {A: (UNKNOWN_PRODUCER, OK, Verdict(Kind.DUPLICATE, 0))}


def test_a_stream_of_nothing_has_no_entry_and_no_reference() -> None:
    made = assembled(batch(A, 5, Producer(9, 0, 4)), batch(B, 1))
    part = draft_part(made, {A: Fold().draft()})
    check(part)
    assert [entry.stream_id for entry in part.indexed] == [B]
    assert [put.key for put in part.puts] == [made.puts[0].key, made.puts[2].key]


def test_an_object_of_nothing_is_nothing() -> None:
    part = draft_part(assembled(batch(A, 5, Producer(9, 0, 4))), {A: Fold().draft()})
    assert (part.indexed, part.entries, part.puts, part.deletes) == ((), (), (), ())
    assert part.verdicts == {A: (UNKNOWN_PRODUCER,)}


@pytest.mark.parametrize("start", [0, 1, 127, 128, 2**31, 2**63 - 1])
def test_stating_a_start_is_the_same_as_encoding_it(start: int) -> None:
    made = assembled(batch(A, 2, Producer(9, 0, 0)))
    stated = decode(encoded_expecting(made.entries[0].value, start))
    assert stated.expected_start == start
    assert len(encoded_expecting(made.entries[0].value, start)) - len(made.entries[0].value) <= 11
    assert encode(stated) == encode(decode(encode(stated)))


class TestAsItLanded:
    def landed(self, shift: int, *folded: Verdict) -> tuple[Verdict | None, ...]:
        """Two records, the same again, one more; the entry lands `shift` behind what it expected."""
        made = assembled(
            batch(A, 2, Producer(9, 0, 0)), batch(A, 2, Producer(9, 0, 0)), batch(A, 1, Producer(9, 0, 2))
        )
        part = draft_part(made, {A: Fold().draft()})
        placed = Placed(part.indexed[0], 3 + shift, 0, 1)
        return as_it_landed(placed, part.verdicts[A], folded)

    def test_a_duplicate_is_where_its_original_landed(self) -> None:
        assert self.landed(4, OK, Verdict(Kind.LEFT_OUT), OK) == (OK, Verdict(Kind.DUPLICATE, 4), OK)

    def test_or_where_that_one_was_before(self) -> None:
        before = Verdict(Kind.DUPLICATE, 1)
        assert self.landed(4, before, Verdict(Kind.LEFT_OUT), OK) == (before, before, OK)

    def test_or_shares_its_fate(self) -> None:
        assert self.landed(4, OUT_OF_ORDER, Verdict(Kind.LEFT_OUT), OUT_OF_ORDER) == (OUT_OF_ORDER,) * 3
