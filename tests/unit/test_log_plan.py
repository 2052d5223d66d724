"""Which batches answer a fetch: Kafka's limits (KIP-74) on whatever the index may hold."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from dray.index.entry import BatchIndex, Kind, ParquetFile, Placed, Truncated, Void, WalChunk, Where
from dray.log.plan import Available, Span, share
from tests.index_entries import of

EMPTY_BATCH_BYTES = 61


def chunk(*sizes: int, records: int = 2) -> Where:
    batches = tuple(BatchIndex(records, size, 1, 2) for size in sizes)
    return WalChunk(UUID(int=1), "wal/1", 49, sum(sizes) + 4 * len(sizes), batches)


def placed_all(*stored: Where, records: int = 2, start: int = 0) -> list[Placed]:
    """Adjacent entries; so many records has each entry without batches."""
    placed = []
    at = start
    for version, where in enumerate(stored, 1):
        count = sum(b.records for b in where.batches) if isinstance(where, WalChunk) else records
        at += count
        placed.append(Placed(of(where, count), at, 0, version))
    return placed


def sizes_of(spans: list[Span]) -> list[int]:
    """The sizes of the batches chosen, one by one; fails where a span says otherwise."""
    sizes = []
    for span in spans:
        ours = seen(span.placed.entry.where)
        assert span.first < span.last <= len(ours)
        assert span.size_bytes == sum(ours[span.first : span.last])
        assert all(ours[span.first : span.last]), "what was left out is passed over"
        if span.chunk is None:
            assert span.last == span.first + 1, "each void batch is an empty one"
        else:
            assert all(span.chunk.is_served(number) for number in range(span.first, span.last))
        sizes += ours[span.first : span.last]
    return sizes


def seen(where: Where) -> list[int]:
    """The bytes that a reader gets of each batch."""
    if not isinstance(where, WalChunk):
        return [EMPTY_BATCH_BYTES]
    verdicts = where.verdicts or (Kind.OK,) * len(where.batches)
    return [
        0 if batch.records == 0 else batch.size_bytes if verdict is Kind.OK else EMPTY_BATCH_BYTES
        for batch, verdict in zip(where.batches, verdicts, strict=True)
    ]


def there(available: Available) -> list[tuple[int, int]]:
    """First offset and size of every batch from the one on that holds the offset."""
    batches = []
    for placed in available.entries:
        at = placed.start_offset
        where = placed.entry.where
        if isinstance(where, WalChunk):
            for batch, size in zip(where.batches, seen(where), strict=True):
                if size and at + batch.records > available.offset:
                    batches.append((at, size))
                at += batch.records
        else:
            batches.append((at, EMPTY_BATCH_BYTES))
    return batches


def firsts_of(spans: list[Span]) -> list[int]:
    firsts = []
    for span in spans:
        where = span.placed.entry.where
        for number in range(span.first, span.last):
            within = where.batch_start(number) if isinstance(where, WalChunk) else 0
            firsts.append(span.placed.start_offset + within)
    return firsts


@st.composite
def wheres(draw: st.DrawFn) -> Where:
    kind = draw(st.sampled_from(["wal", "wal", "wal", "void", "truncated"]))
    if kind == "void":
        return Void(UUID(int=2))
    if kind == "truncated":
        return Truncated()
    whole = chunk(*draw(st.lists(st.integers(61, 400), min_size=1, max_size=4)), records=3)
    assert isinstance(whole, WalChunk)
    left_out = draw(st.sets(st.integers(1, len(whole.batches))))
    batches = [replace(b, records=0) if n in left_out else b for n, b in enumerate(whole.batches)]
    verdicts = [draw(st.sampled_from([Kind.OK, Kind.DUPLICATE])) for _ in batches]
    return replace(whole, batches=tuple(batches), verdicts=tuple(verdicts) if draw(st.booleans()) else ())


@st.composite
def availables(draw: st.DrawFn) -> Available:
    start = draw(st.integers(0, 50))
    entries = placed_all(*draw(st.lists(wheres(), max_size=4)), records=3, start=start)
    inside = entries[0].entry.records - 1 if entries else 0
    offset = start + draw(st.integers(0, inside))
    return Available(entries, offset, draw(st.one_of(st.integers(0, 1_500), st.just(2**31 - 1))))


@given(st.lists(availables(), max_size=6), st.integers(0, 3_000))
def test_the_limits_of_kafka_hold(partitions: list[Available], max_bytes: int) -> None:
    chosen = share(partitions, max_bytes)
    assert len(chosen) == len(partitions)
    sizes = [sizes_of(spans) for spans in chosen]
    total = sum(map(sum, sizes))
    having = [number for number, one in enumerate(partitions) if one.entries]
    for number, (one, spans) in enumerate(zip(partitions, chosen, strict=True)):
        batches = there(one)
        count = len(sizes[number])
        assert firsts_of(spans) == [at for at, _ in batches[:count]], (
            "whole, adjacent, from the wanted one on"
        )
        may_exceed = having[:1] == [number] and count == 1
        assert sum(sizes[number]) <= one.max_bytes or may_exceed
        if count < len(batches):
            more = batches[count][1]
            full = sum(sizes[number]) + more > one.max_bytes or total + more > max_bytes
            assert full, "room was left that could be used"
    if having:
        assert sizes[having[0]], "at least one batch overall"
        assert total <= max_bytes or [sum(map(len, sizes)), len(sizes[having[0]])] == [1, 1]


@given(
    st.lists(
        st.lists(st.integers(61, 300), min_size=1, max_size=12).map(lambda sizes: (chunk(*sizes),)),
        min_size=1,
        max_size=6,
    ),
    st.integers(0, 3_000),
)
def test_no_busy_partition_pushes_out_another(stored: list[tuple[Where]], max_bytes: int) -> None:
    """Each gets its share but for less than a batch; what the first batch has above its own, all lack."""
    partitions = [Available(placed_all(*one), 0, 2**31 - 1) for one in stored]
    sizes = [sizes_of(spans) for spans in share(partitions, max_bytes)]
    first = there(partitions[0])[0][1]
    share_bytes = max_bytes // len(partitions)
    if first > share_bytes:
        share_bytes = max(max_bytes - first, 0) // max(len(partitions) - 1, 1)
    for one, got in zip(partitions, sizes, strict=True):
        batches = [size for _, size in there(one)]
        if len(got) < len(batches):
            assert sum(got) > share_bytes - batches[len(got)]


def test_a_first_batch_above_its_share_is_taken_from_the_others() -> None:
    one = Available(placed_all(chunk(900)), 0, 10_000)
    others = [Available(placed_all(chunk(100, 100, 100)), 0, 10_000) for _ in range(3)]
    sizes = [sizes_of(spans) for spans in share([one, *others], 1_000)]
    assert sizes == [[900], [100], [], []]


def test_nothing_else_is_sent_behind_a_first_batch_above_the_limit() -> None:
    one = Available(placed_all(chunk(5_000)), 0, 10_000)
    other = Available(placed_all(chunk(100)), 0, 10_000)
    assert [sizes_of(spans) for spans in share([one, other], 1_000)] == [[5_000], []]


def test_one_batch_is_sent_though_every_limit_is_nothing() -> None:
    empty = Available([], 7, 0)
    one = Available(placed_all(chunk(100, 100)), 3, 0)
    assert [sizes_of(spans) for spans in share([empty, one, one], 0)] == [[], [100], []]
    assert firsts_of(share([one], 0)[0]) == [2], "the one that holds offset 3"


def test_what_others_leave_is_used() -> None:
    idle = Available(placed_all(chunk(100)), 0, 10_000)
    busy = Available(placed_all(*[chunk(100)] * 20), 0, 10_000)
    sizes = [sum(sizes_of(spans)) for spans in share([idle, busy, idle], 1_000)]
    assert sizes == [100, 800, 100]


def test_a_void_entry_is_one_empty_batch() -> None:
    entries = placed_all(Void(UUID(int=1)), chunk(100), Void(UUID(int=1)), chunk(100))
    one = Available(entries, 1, 61 + 100 + 61)
    (spans,) = share([one], 10_000)
    assert sizes_of(spans) == [61, 100, 61]
    assert firsts_of(spans) == [0, 2, 4]


def test_no_partitions_give_nothing() -> None:
    assert share([], 1_000) == []
    assert share([Available([], 0, 10)], 1_000) == [[]]


PARQUET = ParquetFile(UUID(int=3), "data/3.parquet", 10_000)
SMALLEST_READ = 16 * 1024


def test_a_parquet_file_gets_the_room_that_is_left_and_ends_the_answer() -> None:
    """How many bytes its batches have is not known before it is read."""
    placed = placed_all(chunk(100), PARQUET, chunk(100))
    (spans,) = share([Available(placed, 0, 50_000)], 60_000)
    assert [(span.placed, span.size_bytes) for span in spans] == [(placed[0], 100), (placed[1], 49_900)]


def test_a_parquet_file_is_for_the_next_fetch_if_little_room_is_left() -> None:
    placed = placed_all(chunk(100), PARQUET)
    (spans,) = share([Available(placed, 0, 100 + SMALLEST_READ - 1)], 60_000)
    assert [span.placed for span in spans] == placed[:1]


def test_a_parquet_file_that_comes_first_gives_a_batch_whatever_the_limits() -> None:
    placed = placed_all(PARQUET)
    first, second = share([Available(placed, 0, 1), Available(placed, 0, 1)], 10)
    assert [span.size_bytes for span in first] == [SMALLEST_READ]
    assert second == []
