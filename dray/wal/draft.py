"""An object's part of an append, as its producers' batches are judged right before it is sent. Pure.

What is not ok is left out: its batch stays in the chunk, but the entry gives it no records. Of a stream with
nothing left there is no entry and no reference, and of an object with nothing left nothing at all; it is
garbage like any object that was never committed.

Entries of streams that have producers state where they expect to start: the end of the draft they were judged
by. Within one append they follow each other, so the second of a stream expects to start behind the first.
A part that has nothing to send may still have to wait for one that has: `rests_on`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from dray.errors import DrayError
from dray.index.entry import (
    BatchIndex,
    IndexEntry,
    Kind,
    Placed,
    WalChunk,
    encode,
    encoded_expecting,
    expecting,
)
from dray.index.fold import Draft, Verdict
from dray.metadata.store import Delete, NewEntry, Put
from dray.wal.assemble import Assembled

NOTHING_FAILED: Mapping[int, DrayError] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Part:
    """As in `Assembled`. `verdicts`: of each batch in the chunks of the streams that were judged.

    `failed`: streams of which nothing is sent, and what to tell those who wrote to them.
    """

    indexed: Sequence[IndexEntry]
    entries: Sequence[NewEntry]
    puts: Sequence[Put]
    deletes: Sequence[Delete]
    verdicts: Mapping[int, tuple[Verdict, ...]] = field(default_factory=dict)
    failed: Mapping[int, DrayError] = field(default_factory=dict)


def producer_streams(assembled: Assembled) -> Iterable[int]:
    """The streams in which it has batches of idempotent producers."""
    return (
        entry.stream_id
        for entry in assembled.indexed
        if isinstance(entry.where, WalChunk) and entry.where.has_producers
    )


def draft_part(
    assembled: Assembled, drafts: Mapping[int, Draft], failed: Mapping[int, DrayError] = NOTHING_FAILED
) -> Part:
    """Judge its entries of the streams of `drafts`, which go on behind them. Leave the failed ones out."""
    if not drafts and not failed:
        return Part(assembled.indexed, assembled.entries, assembled.puts, assembled.deletes)
    record, *references = assembled.puts
    indexed: list[IndexEntry] = []
    entries: list[NewEntry] = []
    puts = [record]
    verdicts: dict[int, tuple[Verdict, ...]] = {}
    for entry, new, reference in zip(assembled.indexed, assembled.entries, references, strict=True):
        if entry.stream_id in failed:
            continue
        draft = drafts.get(entry.stream_id)
        chunk = entry.where
        if draft is not None and isinstance(chunk, WalChunk):
            start = draft.end
            judged = draft.add([(b.producer, b.records) for b in chunk.batches], entry.created_at_ms)
            verdicts[entry.stream_id] = judged
            if draft.end == start:
                continue
            value = new.value
            if draft.end - start != entry.records:
                entry = _without(entry, chunk, judged)
                value = encode(entry)
            entry = expecting(entry, start)
            value = encoded_expecting(value, start)
            new = NewEntry(new.sequence, entry.records, new.size_bytes, value, start)
        indexed.append(entry)
        entries.append(new)
        puts.append(reference)
    if not entries:
        return Part((), (), (), (), verdicts, failed)
    return Part(indexed, entries, puts, assembled.deletes, verdicts, failed)


def rests_on(part: Part, sent: Iterable[Part]) -> bool:
    """Whether some batch of it is a duplicate of one that is about to be sent, and may yet fail with it."""
    starts: dict[int, int] = {}
    for before in sent:
        for entry in before.indexed:
            if entry.expected_start is not None:
                starts.setdefault(entry.stream_id, entry.expected_start)
    return any(
        verdict.offset is not None and stream_id in starts and verdict.offset >= starts[stream_id]
        for stream_id, verdicts in part.verdicts.items()
        for verdict in verdicts
    )


def as_it_landed(
    placed: Placed, drafted: Sequence[Verdict], folded: Sequence[Verdict | None]
) -> tuple[Verdict | None, ...]:
    """The verdicts on the batches of an entry that others came before: the draft's on those it left out.

    A duplicate of a batch in the same entry is where that one landed, or shares its fate. None is a verdict
    that is not known any more.
    """
    chunk, expected = placed.entry.where, placed.entry.expected_start
    assert isinstance(chunk, WalChunk), "nothing else is written"
    assert expected is not None, "whoever judged it has stated it"
    verdicts: list[Verdict | None] = []
    for judged, landed in zip(drafted, folded, strict=True):
        if judged.ok:
            verdicts.append(landed)
        elif judged.offset is None or judged.offset < expected:
            verdicts.append(judged)
        else:
            delta = judged.offset - expected
            original = folded[chunk.batch_at(delta)]
            found = Verdict(Kind.DUPLICATE, placed.start_offset + delta)
            verdicts.append(found if original is not None and original.ok else original)
    return tuple(verdicts)


def _without(entry: IndexEntry, chunk: WalChunk, verdicts: Sequence[Verdict]) -> IndexEntry:
    """The entry without the batches that are not ok."""
    batches: list[BatchIndex] = []
    kept: list[BatchIndex] = []
    for batch, verdict in zip(chunk.batches, verdicts, strict=True):
        batches.append(batch if verdict.ok else replace(batch, records=0))
        if verdict.ok:
            kept.append(batch)
    return replace(
        entry,
        records=sum(batch.records for batch in kept),
        min_timestamp_ms=min(batch.min_timestamp_ms for batch in kept),
        max_timestamp_ms=max(batch.max_timestamp_ms for batch in kept),
        where=replace(chunk, batches=tuple(batches)),
    )
