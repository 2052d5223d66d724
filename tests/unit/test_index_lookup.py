"""Lookups in the index, on a store whose reads may be old and whose runs may be half removed."""

from __future__ import annotations

import pytest

from dray.errors import CorruptStore, IncompatibleStore, InvalidRequest
from dray.index import lookup
from dray.index.cache import IndexCache
from dray.index.entry import IndexEntry, Placed, encode, sequence_of
from dray.index.lookup import OffsetIndex
from dray.metadata.memory import MemoryData, MemoryStore
from dray.metadata.store import Entry, KeyChange, NewEntry, Position, Record
from tests.index_entries import STREAM, parquet_entry, truncated_entry, wal_entry

D = 3
SEQUENCE = sequence_of(STREAM)


class PausedStore(MemoryStore):
    """Reads like a paused leader of Oxia: after `pause` what was there at a moment, until a barrier."""

    def __init__(self, data: MemoryData) -> None:
        super().__init__(data)
        self.reads = self.barriers = 0
        self._old: dict[str, list[Entry]] | None = None
        self.old_record: Record | None = None  # of the log start; read until a barrier

    def moment(self) -> dict[str, list[Entry]]:
        return {SEQUENCE: list(super()._entries(D, SEQUENCE))}

    def pause(self, moment: dict[str, list[Entry]]) -> None:
        self._old = moment

    async def barrier(self, domain: int) -> None:
        self.barriers += 1
        self._old = self.old_record = None

    async def get(self, domain: int, key: str) -> Record | None:
        return self.old_record or await super().get(domain, key)

    def _entries(self, domain: int, sequence: str) -> list[Entry]:
        self.reads += 1
        if self._old is not None:
            return self._old.get(sequence, [])
        return super()._entries(domain, sequence)


class World:
    """A writer, and a reader of the same store."""

    def __init__(self) -> None:
        data = MemoryData()
        self.writer = MemoryStore(data)
        self.store = PausedStore(data)
        self.cache = IndexCache()
        self.index = OffsetIndex(self.store, lambda stream_id: D, self.cache)

    async def delete_before(self, offset: int) -> Record:
        key = f"log-start/{STREAM:016x}"
        version = await self.writer.put(D, key, b'{"format":1,"offset":%d}' % offset)
        return Record(key, b'{"format":1,"offset":%d}' % offset, version)

    async def append(self, *entries: IndexEntry) -> list[Position]:
        positions = []
        for entry in entries:
            new = NewEntry(sequence_of(entry.stream_id), entry.records, 104, encode(entry))
            positions.append((await self.writer.append(D, [new])).entries[0].position)
        return positions

    async def swap(self, at: Position, new: IndexEntry, *deletes: Position) -> None:
        """As a store may leave it: with as many of the deletes as it came to."""
        [entry] = await self.writer.entries(D, SEQUENCE, at.end_records, 1)
        await self.writer.swap(D, SEQUENCE, at, entry.version, encode(new), deletes)


@pytest.fixture
def world() -> World:
    return World()


def covers(placed: Placed | None) -> tuple[int, int] | None:
    return None if placed is None else (placed.start_offset, placed.end_offset)


async def test_every_offset_is_found_and_none_at_the_end(world: World) -> None:
    await world.append(wal_entry(1, 2), wal_entry(1), wal_entry(4))
    found = [covers(await world.index.find(STREAM, offset)) for offset in range(9)]
    assert found == [(0, 3)] * 3 + [(3, 4)] + [(4, 8)] * 4 + [None]


async def test_an_empty_stream(world: World) -> None:
    assert await world.index.find(STREAM, 0) is None
    assert await world.index.range(STREAM, 0, 10) == []
    assert await world.index.end(STREAM) == (0, 0)
    assert await world.index.log_start(STREAM) == 0


async def test_an_answer_above_the_offset_goes_on_to_the_entry_that_covers_it(world: World) -> None:
    """Protocol 22: of the run only the middle is left, and its end, which covers it all."""
    a, _, c, d = await world.append(wal_entry(2), wal_entry(2), wal_entry(2), wal_entry(2))
    await world.append(wal_entry(1))
    await world.swap(d, parquet_entry(8), a, c)
    assert [covers(await world.index.find(STREAM, offset)) for offset in (0, 1, 3, 5, 8)] == [
        (0, 8),
        (0, 8),
        (2, 4),  # superseded, but still there, with the same records
        (0, 8),
        (8, 9),
    ]
    for limit in (1, 2, 5):
        run = [covers(placed) for placed in await world.index.range(STREAM, 1, limit)]
        assert run == [(0, 8), (8, 9)][:limit]
    assert world.store.barriers == 0


async def test_the_covering_entry_may_be_many_pages_ahead(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "PAGE_ENTRIES", 2)
    positions = await world.append(*[wal_entry(1)] * 20)
    await world.swap(positions[-1], parquet_entry(20), positions[0])
    assert covers(await world.index.find(STREAM, 0)) == (0, 20)


async def test_adjacent_entries_in_order(world: World) -> None:
    await world.append(*[wal_entry(2)] * 5)
    for start, limit, expected in [
        (0, 3, [0, 2, 4]),
        (3, 2, [2, 4]),
        (7, 9, [6, 8]),
        (9, 1, [8]),
        (10, 5, []),
        (0, 5, [0, 2, 4, 6, 8]),
    ]:
        run = await world.index.range(STREAM, start, limit)
        assert [placed.start_offset for placed in run] == expected


async def test_a_stale_read_is_not_taken_for_the_end(world: World) -> None:
    """Protocol 17: a failed check means "read again"."""
    await world.append(wal_entry(2))
    world.store.pause(world.store.moment())
    [second] = await world.append(wal_entry(3))
    world.index.add(Placed(wal_entry(3), *second, 9), began=world.index.now())
    assert covers(await world.index.find(STREAM, 4)) == (2, 5)
    assert world.store.barriers == 1
    world.store.pause({})
    assert [covers(one) for one in await world.index.range(STREAM, 0, 9)] == [(0, 2), (2, 5)]
    assert world.store.barriers == 2


async def test_a_fresh_lookup_reads_behind_a_barrier(world: World) -> None:
    await world.append(wal_entry(2))
    world.store.pause(world.store.moment())
    await world.append(wal_entry(3))
    assert await world.index.find(STREAM, 2) is None
    assert covers(await world.index.find(STREAM, 2, fresh=True)) == (2, 5)
    world.store.pause({})
    assert await world.index.end(STREAM, fresh=True) == (5, 208)
    world.store.pause({})
    assert len(await world.index.range(STREAM, 0, 9, fresh=True)) == 2


async def test_a_hole_that_stays_is_corruption_never_out_of_range(world: World) -> None:
    a, b, c = await world.append(wal_entry(2), wal_entry(2), wal_entry(2))
    await world.swap(c, parquet_entry(2), b)
    assert covers(await world.index.find(STREAM, 1)) == (0, 2)
    for call in (
        world.index.find(STREAM, 2),
        world.index.range(STREAM, 2, 1),
        world.index.range(STREAM, 0, 9),
    ):
        with pytest.raises(CorruptStore, match="has a hole"):
            await call
    assert len(await world.index.range(STREAM, 0, 1)) == 1, "what comes before the hole is there"
    await world.swap(c, parquet_entry(2), a, b)
    with pytest.raises(CorruptStore, match="has a hole"):
        await world.index.log_start(STREAM)


async def test_an_entry_of_another_stream_is_corruption(world: World) -> None:
    [a] = await world.append(wal_entry(2))
    await world.swap(a, parquet_entry(2, stream_id=8))
    with pytest.raises(CorruptStore, match="has an entry of 0000000000000008"):
        await world.index.find(STREAM, 0)


async def test_no_offset_below_zero(world: World) -> None:
    with pytest.raises(InvalidRequest):
        await world.index.find(STREAM, -1)
    with pytest.raises(InvalidRequest):
        await world.index.range(STREAM, -1, 1)


async def test_the_log_starts_behind_what_was_truncated(world: World) -> None:
    a, b, c = await world.append(wal_entry(2), wal_entry(2), wal_entry(2))
    assert await world.index.log_start(STREAM) == 0
    await world.swap(a, truncated_entry(2))
    assert await world.index.log_start(STREAM) == 2
    await world.swap(b, truncated_entry(4), a)
    assert await world.index.log_start(STREAM) == 4
    await world.swap(c, truncated_entry(6), b)
    assert await world.index.log_start(STREAM) == 6
    assert await world.index.end(STREAM) == (6, 312), "the sequence goes on where it was"


async def test_the_log_starts_where_its_record_says_if_that_is_further(world: World) -> None:
    _, b, _ = await world.append(wal_entry(2), wal_entry(2), wal_entry(2, 2))
    await world.delete_before(1)
    assert await world.index.log_start(STREAM) == 1
    await world.swap(b, truncated_entry(4))
    assert await world.index.log_start(STREAM) == 4
    await world.delete_before(7)
    assert await world.index.log_start(STREAM) == 7
    assert world.store.barriers == 0


async def test_a_stale_log_start_record_does_not_take_back_what_was_told(world: World) -> None:
    await world.append(wal_entry(9))
    old = await world.delete_before(2)
    await world.delete_before(5)
    assert await world.index.log_start(STREAM) == 5
    world.store.old_record = old
    assert await world.index.log_start(STREAM) == 5
    world.store.old_record = old
    assert await world.index.log_start(STREAM, fresh=True) == 5


async def test_a_record_older_than_the_watch_told_is_read_again(world: World) -> None:
    """Who was woken by the watch reads once: from a leader that stands still, the value of before."""
    await world.append(wal_entry(9))
    world.cache.open(D)
    old = await world.delete_before(2)
    assert await world.index.log_start(STREAM) == 2
    new = await world.delete_before(5)
    assert await world.index.log_start(STREAM) == 2, "as late as the watch"
    world.cache.apply(D, [KeyChange(new.key, new.version)])
    world.store.old_record = old
    assert await world.index.log_start(STREAM) == 5
    assert world.store.barriers == 1
    reads = world.store.reads
    assert await world.index.log_start(STREAM) == 5
    assert world.store.reads == reads, "it is kept"


async def test_a_front_older_than_the_record_is_no_empty_stream(world: World) -> None:
    moment = world.store.moment()
    await world.append(wal_entry(9))
    await world.delete_before(5)
    world.store.pause(moment)
    assert await world.index.log_start(STREAM) == 5


@pytest.mark.parametrize(
    "value", [b"", b"7", b'{"format":1}', b'{"format":1,"offset":0}', b'{"format":true,"offset":3}']
)
async def test_a_log_start_that_nobody_wrote_is_said_to_be_corrupt(world: World, value: bytes) -> None:
    await world.append(wal_entry(9))
    await world.writer.put(D, f"log-start/{STREAM:016x}", value)
    with pytest.raises(CorruptStore, match="log-start"):
        await world.index.log_start(STREAM)


async def test_a_log_start_of_a_newer_format_is_left_alone(world: World) -> None:
    await world.append(wal_entry(9))
    await world.writer.put(D, f"log-start/{STREAM:016x}", b'{"format":2,"at":"x"}')
    with pytest.raises(IncompatibleStore):
        await world.index.log_start(STREAM)


async def test_a_stream_holds_the_batches_from_its_log_start_on(world: World) -> None:
    """Each entry counts 104 bytes here, and each batch of it 104 with its length."""
    assert await world.index.size_bytes(STREAM) == 0
    await world.append(wal_entry(2), wal_entry(2))
    sizes = [await world.index.size_bytes(STREAM)]
    for offset in (1, 2, 3, 4):
        await world.delete_before(offset)
        sizes.append(await world.index.size_bytes(STREAM))
    assert sizes == [208, 208, 104, 104, 0]


async def test_an_entry_that_is_cut_by_the_log_start_counts_from_that_batch_on(world: World) -> None:
    entry = wal_entry(1, 2, 3)
    await world.writer.append(D, [NewEntry(SEQUENCE, 6, 3 * 104, encode(entry))])
    await world.append(wal_entry(1))
    sizes = []
    for offset in (1, 2, 3, 5, 6, 7):
        await world.delete_before(offset)
        sizes.append(await world.index.size_bytes(STREAM))
    assert sizes == [312, 312, 208, 208, 104, 0]


async def test_an_interrupted_truncation_counts(world: World) -> None:
    positions = await world.append(*[wal_entry(1)] * 120)
    await world.append(wal_entry(1))
    await world.swap(positions[-1], truncated_entry(120))
    assert await world.index.log_start(STREAM) == 120


async def test_an_interrupted_compaction_leaves_the_log_start(world: World) -> None:
    positions = await world.append(*[wal_entry(1)] * 200)
    await world.swap(positions[4], truncated_entry(5), *positions[:4])
    await world.swap(positions[-1], parquet_entry(195))
    assert await world.index.log_start(STREAM) == 5


@pytest.mark.parametrize("entries", [130, 300, 2_000])
@pytest.mark.parametrize("deleted", [1, 100])
async def test_a_compaction_whose_deletes_have_begun_leaves_the_log_start(
    world: World, entries: int, deleted: int
) -> None:
    """The entry that covers offset 0 stands behind all that are not deleted yet."""
    positions = await world.append(*[wal_entry(1)] * entries)
    await world.append(wal_entry(1))
    await world.swap(positions[-1], parquet_entry(entries), *positions[:deleted])
    assert await world.index.log_start(STREAM) == 0
    assert world.store.barriers == 0


async def test_what_was_told_never_goes_back(world: World) -> None:
    a, b = await world.append(wal_entry(2), wal_entry(2))
    before = world.store.moment()
    await world.swap(b, truncated_entry(4), a)
    await world.append(wal_entry(2))
    assert await world.index.end(STREAM) == (6, 312)
    assert await world.index.log_start(STREAM) == 4
    for moment in (before, {}):
        world.store.pause(moment)
        assert await world.index.end(STREAM) == (6, 312)
        assert await world.index.log_start(STREAM) == 4


async def test_what_a_lookup_showed_is_part_of_the_end(world: World) -> None:
    await world.append(wal_entry(2))
    assert await world.index.find(STREAM, 0) is not None
    world.store.pause({})
    assert await world.index.end(STREAM) == (2, 104)


@pytest.mark.parametrize("ask", ["find", "range", "end", "log_start"])
async def test_a_stream_no_longer_remembered_is_read_behind_a_barrier(
    world: World, monkeypatch: pytest.MonkeyPatch, ask: str
) -> None:
    """What was told of it is at most what a read behind a barrier shows."""
    monkeypatch.setattr(lookup, "MAX_TOLD_STREAMS", 1)
    a, b = await world.append(wal_entry(2), wal_entry(2))
    before = world.store.moment()
    await world.swap(b, truncated_entry(4), a)
    await world.append(wal_entry(2), wal_entry(2, stream_id=8))
    assert await world.index.end(STREAM) == (6, 312)
    assert await world.index.end(8) == (2, 104)
    assert world.store.barriers == 0
    world.store.pause(before)
    match ask:
        case "find":
            assert covers(await world.index.find(STREAM, 5)) == (4, 6)
        case "range":
            assert [covers(one) for one in await world.index.range(STREAM, 0, 5)] == [(0, 4), (4, 6)]
        case "end":
            assert await world.index.end(STREAM) == (6, 312)
        case "log_start":
            assert await world.index.log_start(STREAM) == 4
