"""Offsets by time, over a real index and real objects, against a plain list of all records."""

from __future__ import annotations

import asyncio
import logging
import random
import struct
from collections.abc import Sequence
from itertools import pairwise
from uuid import UUID

import pytest
import zstandard
from aiokafka.record.default_records import (  # type: ignore[import-untyped]  # has no stubs
    DefaultRecordBatchBuilder,
)

from dray.errors import ObjectNotFound
from dray.index import times
from dray.index.changes import carry_out, replace_run
from dray.index.deletion import RecordDeleter
from dray.index.entry import BatchIndex, IndexEntry, Placed, WalChunk, encode, sequence_of
from dray.index.lookup import OffsetIndex
from dray.index.times import TimeIndex
from dray.log.compacted import CompactedReader
from dray.metadata.memory import MemoryStore
from dray.metadata.store import NewEntry
from dray.objectstore.memory import MemoryObjectStore
from dray.protocol.records import Batch, read_batch, stamp_append_time
from dray.wal.reader import WalReader
from tests.batches import build_batch
from tests.compaction import compacted
from tests.index_entries import INCARNATION, STREAM, truncated_entry, void_entry

D = 3
T = 1_700_000_000_000
CHUNK_OFFSET = 49


class World:
    """A stream whose batches stand in objects, and every record's time in a list."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.objects = MemoryObjectStore()
        self.index = OffsetIndex(self.store, lambda stream_id: D)
        wal = WalReader(self.objects, cache_bytes=2**24)
        self.times = TimeIndex(self.index, self.read, CompactedReader(wal, cache_bytes=2**20))
        self.reads: list[tuple[int, int]] = []
        self.expected: list[int | None] = []  # by offset; None is no record

    async def read(self, placed: Placed, number: int) -> Batch:
        chunk = placed.entry.where
        assert isinstance(chunk, WalChunk)
        self.reads.append((placed.start_offset, number))
        start = chunk.batch_offset(number)
        end = start + chunk.batches[number].size_bytes
        return read_batch(memoryview(await self.objects.get_range(chunk.path, start, end)))

    async def add(self, *batches: bytes | Sequence[int], codec: int = 0) -> None:
        """One entry, of batches or the times of their records."""
        index, chunk = [], b""
        for given in batches:
            data = given if isinstance(given, bytes) else made(given, codec)
            batch = read_batch(memoryview(data))
            index.append(BatchIndex(batch.records, len(data), *batch.timestamp_range_ms))
            chunk += struct.pack(">I", len(data)) + data
            self.expected += [T] * batch.records if isinstance(given, bytes) else list(given)
        path = f"wal/{len(self.expected)}"
        await self.objects.put(path, bytes(CHUNK_OFFSET) + chunk)
        where = WalChunk(UUID(int=0), path, CHUNK_OFFSET, len(chunk), tuple(index))
        low = min(batch.min_timestamp_ms for batch in index)
        high = max(batch.max_timestamp_ms for batch in index)
        records = sum(batch.records for batch in index)
        await self.append(IndexEntry(STREAM, records, 5_000, low, high, INCARNATION, where))

    async def add_empty(self, entry: IndexEntry) -> None:
        self.expected += [None] * entry.records
        await self.append(entry)

    async def append(self, entry: IndexEntry) -> None:
        await self.store.append(D, [NewEntry(sequence_of(STREAM), entry.records, 104, encode(entry))])

    async def compact(self, count: int) -> None:
        """The first entries."""
        run = await self.index.range(STREAM, 0, count)
        new = await compacted(self.objects, run, "data/9.parquet")
        await carry_out(self.store, D, replace_run(run, new))

    async def by_time(self, wanted: int, end_offset: int | None = None) -> tuple[int, int] | None:
        return await self.times.find_by_time(STREAM, wanted, end_offset=end_offset)

    async def newest(self, end_offset: int | None = None) -> tuple[int, int] | None:
        return await self.times.find_latest_time(STREAM, end_offset=end_offset)

    async def delete_before(self, offset: int) -> None:
        assert await RecordDeleter(self.store, lambda stream_id: D, self.index).delete_before(STREAM, offset)
        self.expected[:offset] = [None] * offset

    async def check(self, end_offset: int | None = None) -> None:
        """Every time there is, and those beside it."""
        records = [
            (offset, time) for offset, time in enumerate(self.expected[:end_offset]) if time is not None
        ]
        for wanted in {0} | {time + step for _, time in records for step in (-1, 0, 1)}:
            first = next(((offset, time) for offset, time in records if time >= wanted), None)
            assert await self.by_time(wanted, end_offset) == first
        newest = max(records, key=lambda record: (record[1], -record[0]), default=None)
        assert await self.newest(end_offset) == newest


def made(record_times: Sequence[int], codec: int) -> bytes:
    builder = DefaultRecordBatchBuilder(
        magic=2,
        compression_type=codec,
        is_transactional=False,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=-1,
        batch_size=16 * 2**20,
    )
    for number, time in enumerate(record_times):
        assert builder.append(number, time, b"key", b"value " * 10, [])
    return bytes(builder.build())


def rubbish(max_timestamp: int, records: int = 3) -> bytes:
    """A sound header over a body that is no gzip."""
    return build_batch(
        b"rubbish", attributes=1, records=records, base_timestamp=T, max_timestamp=max_timestamp
    )


def overstated(record_time: int, claimed: int) -> bytes:
    return build_batch(base_timestamp=record_time, max_timestamp=claimed)


@pytest.fixture
def world() -> World:
    return World()


async def test_an_empty_stream_has_no_times(world: World) -> None:
    await world.check()
    assert await world.by_time(T) is None
    assert await world.newest() is None


async def test_times_that_rise(world: World) -> None:
    await world.add([T, T + 1], [T + 2])
    await world.add([T + 2, T + 5, T + 9])
    await world.check()


async def test_times_need_not_rise(world: World) -> None:
    await world.add([T + 50, T - 7, T + 3], [T + 80, T + 2])
    await world.add([T + 10, T + 60])
    await world.add([T - 20], [T + 80, T + 80], [T + 1])
    await world.check()


async def test_records_without_a_time_are_older_than_all(world: World) -> None:
    await world.add([-1, -1], [-1])
    assert await world.by_time(0) is None
    assert await world.newest() == (0, -1)
    await world.add([T, -1], [-1])
    await world.check()


async def test_under_append_time_a_batch_is_found_by_its_first_record(world: World) -> None:
    stamped = bytearray(made([T + 5, T + 9, T], 0))
    stamp_append_time(memoryview(stamped), T)
    await world.add([T - 1], bytes(stamped))
    await world.check()


@pytest.mark.parametrize("codec", range(5))
@pytest.mark.parametrize("seed", range(8))
async def test_any_mix_of_times(world: World, seed: int, codec: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(times, "PAGE_ENTRIES", 3)
    rng = random.Random(seed)
    if rng.random() < 0.5:
        await world.add_empty(truncated_entry(rng.randint(1, 5)))
    for _ in range(rng.randint(1, 12)):
        if rng.random() < 0.2:
            await world.add_empty(void_entry(rng.randint(1, 4)))
        else:
            sizes = [rng.randint(1, 6) for _ in range(rng.randint(1, 4))]
            await world.add(*([T + rng.randint(-5, 5) for _ in range(n)] for n in sizes), codec=codec)
    await world.check()


@pytest.mark.parametrize("codec", [0, 4])
async def test_what_is_deleted_does_not_count_though_its_batch_is_there(world: World, codec: int) -> None:
    """The log starts in the middle of a batch, of an entry with others."""
    await world.add([T, T + 90, T + 1], [T + 2, T + 80, T + 3, T + 4, T + 3], [T + 4], codec=codec)
    await world.add([T + 3, T + 5], codec=codec)
    for log_start in range(1, 12):
        await world.delete_before(log_start)
        await world.check()
        await world.check(end_offset=9)


async def test_under_append_time_the_first_that_is_not_deleted_is_found(world: World) -> None:
    data = bytearray(made([T, T, T], 0))
    stamp_append_time(memoryview(data), T + 5)
    await world.add(bytes(data))
    await world.delete_before(1)
    assert await world.by_time(T + 1) == (1, T + 5)
    assert await world.newest() == (1, T + 5)


async def test_a_batch_that_cannot_be_read_counts_from_the_log_start_on(world: World) -> None:
    await world.add(rubbish(T + 7))
    await world.delete_before(2)
    assert await world.by_time(T) == (2, T + 7)
    assert await world.newest() == (2, T + 7)


async def test_what_is_at_or_behind_the_end_does_not_count(world: World) -> None:
    """An entry that is not decided yet lies behind the high watermark."""
    await world.add([T, T + 1], [T + 4, T + 2])
    await world.add([T + 9])
    for end in (0, 2, 4, 5):
        await world.check(end)


async def test_one_batch_is_read_however_many_there_are(world: World) -> None:
    for n in range(30):
        await world.add([T + 10 * n, T + 10 * n + 1], [T + 10 * n + 5])
    assert await world.by_time(T + 203) == (62, T + 205)
    assert world.reads == [(60, 1)]
    assert await world.newest() == (89, T + 295)
    assert world.reads == [(60, 1), (87, 1)]


async def test_nothing_is_read_where_nothing_can_be(world: World) -> None:
    await world.add([T, T + 1], [T + 2])
    assert await world.by_time(T + 3) is None
    assert world.reads == []


async def test_where_a_header_says_too_much_the_next_batch_is_tried(world: World) -> None:
    await world.add(overstated(T, T + 100), [T + 1])
    await world.add(overstated(T, T + 100))
    await world.add([T + 50, T + 60])
    assert await world.by_time(T + 40) == (3, T + 50)
    assert await world.by_time(T + 61) is None
    assert await world.newest() == (4, T + 60)


async def test_an_overstated_batch_may_still_have_the_newest_record(world: World) -> None:
    """With the same time in another batch before it, which then wins."""
    await world.add([T])
    await world.add(overstated(T + 50, T + 100))
    assert await world.newest() == (1, T + 50)
    world = World()
    await world.add([T + 50])
    await world.add(overstated(T + 50, T + 100))
    assert await world.newest() == (0, T + 50)


async def test_wrong_headers_cannot_make_it_read_everything(world: World) -> None:
    for _ in range(100):
        await world.add(overstated(T, T + 100))
    await world.add([T + 1])
    assert await world.newest() == (0, T)
    assert len(world.reads) == 16


async def test_a_batch_that_cannot_be_read_counts_by_its_header(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    await world.add([T, T + 1], rubbish(T + 10), [T + 20])
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert await world.by_time(T + 5) == (2, T + 10)
            assert await world.by_time(T + 11) == (5, T + 20)
    [line] = caplog.messages
    assert "000000000000001f" in line
    assert "offset 2" in line
    await world.add(rubbish(T + 30))
    assert await world.newest() == (6, T + 30)


async def test_a_bomb_counts_by_its_header(world: World) -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(65 * 2**20))
    await world.add([T], build_batch(bomb, attributes=4, base_timestamp=T, max_timestamp=T + 7))
    assert await world.by_time(T + 1) == (1, T + 7)
    assert await world.newest() == (1, T + 7)


async def test_large_batches_are_found_too(world: World) -> None:
    """Above the size that is decoded in place."""
    rising = [T + n for n in range(3_000)]
    assert len(made(rising, 0)) > 64 * 2**10
    await world.add(rising)
    assert await world.by_time(T + 2_345) == (2_345, T + 2_345)
    assert await world.newest() == (2_999, T + 2_999)


async def test_lookups_at_once_do_not_mix(world: World) -> None:
    for n in range(20):
        await world.add([T + 100 * n + 2, T + 100 * n + 7], codec=1)
    found = await asyncio.gather(*(world.by_time(T + 100 * n + 3) for n in range(20)))
    assert found == [(2 * n + 1, T + 100 * n + 7) for n in range(20)]


async def test_the_loop_goes_on_between_pages(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if no page has to be waited for."""
    monkeypatch.setattr(times, "PAGE_ENTRIES", 1)
    pages = 0

    class Immediate(OffsetIndex):
        async def log_start(self, stream_id: int, *, fresh: bool = False) -> int:
            return 0

        async def range(
            self, stream_id: int, start: int, max_entries: int, *, fresh: bool = False
        ) -> list[Placed]:
            nonlocal pages
            pages += 1
            return entries[start : start + max_entries]

    for n in range(50):
        await world.add([T + n])
    entries = await world.index.range(STREAM, 0, 50)
    lookup = asyncio.create_task(
        TimeIndex(Immediate(world.store, lambda stream_id: D), world.read, world.times._files).find_by_time(
            STREAM, T + 99
        )
    )
    turns = []
    while not lookup.done():
        turns.append(pages)
        await asyncio.sleep(0)
    assert lookup.result() is None
    assert max(after - before for before, after in pairwise(turns)) == 1


async def test_parquet_files_are_looked_into(world: World) -> None:
    await world.add([T, T + 9], [T - 5, -1, T + 20])
    await world.add([T + 20, T + 3])
    await world.add([T + 30])
    await world.compact(2)
    await world.check()
    await world.check(end_offset=3)
    await world.delete_before(1)
    await world.check()


async def test_an_object_that_is_gone_is_the_callers_to_handle(world: World) -> None:
    await world.add([T])
    await world.objects.delete("wal/1")
    with pytest.raises(ObjectNotFound):
        await world.by_time(T)
