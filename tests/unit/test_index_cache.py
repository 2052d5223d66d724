"""The index cache: what it serves, what it must not serve, and how little it keeps."""

from __future__ import annotations

import asyncio
import contextlib
import tracemalloc
from collections.abc import AsyncIterator

import pytest

from dray.index import cache as cache_module
from dray.index.cache import IndexCache
from dray.index.entry import IndexEntry, Placed, Producer, decode, encode, sequence_of
from dray.index.lookup import OffsetIndex
from dray.metadata.memory import MemoryData, MemoryStore
from dray.metadata.store import Entry, EntryChange, KeyChange, NewEntry, Position
from tests.index_entries import STREAM, parquet_entry, truncated_entry, wal_entry

D = 3
SEQUENCE = sequence_of(STREAM)


def at(end: int, version: int, entry: IndexEntry | None = None) -> Placed:
    """An entry of 10 records that ends there, unless told otherwise."""
    return Placed(entry or wal_entry(10), end, end * 10, version)


def told(end: int, version: int | None, sequence: str = SEQUENCE) -> EntryChange:
    return EntryChange(sequence, Position(end, end * 10), version)


@pytest.fixture
def cache() -> IndexCache:
    made = IndexCache()
    made.open(D)
    return made


def add(cache: IndexCache, *entries: Placed) -> None:
    cache.add(D, cache.now(), entries)


def test_an_entry_is_found_by_each_of_its_offsets(cache: IndexCache) -> None:
    first, third = at(10, 1), at(30, 3)
    add(cache, third, first)
    found = [cache.find(STREAM, offset) for offset in (0, 9, 10, 19, 20, 29, 30)]
    assert found == [first, first, None, None, third, third, None]
    assert cache.find(8, 0) is None


def test_a_run_stops_at_what_is_not_here(cache: IndexCache) -> None:
    entries = [at(10, 1), at(20, 2), at(40, 4)]
    add(cache, *entries)
    assert cache.run(STREAM, 5, 9) == entries[:2]
    assert cache.run(STREAM, 5, 1) == entries[:1]
    assert cache.run(STREAM, 25, 9) == []
    assert cache.run(STREAM, 30, 9) == entries[2:]


def test_nothing_is_kept_of_a_domain_that_nobody_follows() -> None:
    cache = IndexCache()
    add(cache, at(10, 1))
    cache.learn_end(D, cache.now(), STREAM, Position(10, 100))
    cache.learn_log_start(D, cache.now(), STREAM, 0, [at(10, 1)], None)
    cache.apply(D, [told(10, 1)])
    assert (cache.find(STREAM, 0), cache.end(STREAM), cache.log_start(STREAM)) == (None, None, None)
    assert cache.size_bytes == 0


@pytest.mark.parametrize("order", ["add first", "watch first", "twice"])
def test_own_answer_and_watch_may_come_in_either_order(cache: IndexCache, order: str) -> None:
    """Protocol 5."""
    own = at(10, 1)
    if order == "watch first":
        cache.apply(D, [told(10, 1)])
    add(cache, own)
    size = cache.size_bytes
    if order == "add first":
        cache.apply(D, [told(10, 1)])
    else:
        add(cache, own)
    assert cache.find(STREAM, 0) is own
    assert cache.size_bytes == size


@pytest.mark.parametrize("version", [2, None])
def test_what_the_watch_says_is_changed_is_not_served(cache: IndexCache, version: int | None) -> None:
    add(cache, at(10, 1), at(20, 1))
    cache.apply(D, [KeyChange("streams", 5), told(10, 7, "other/1"), told(10, version)])
    assert cache.find(STREAM, 0) is None
    assert cache.find(STREAM, 10) == at(20, 1)


@pytest.mark.parametrize("version", [2, None])
def test_a_read_begun_before_a_change_does_not_bring_the_old_entry_back(
    cache: IndexCache, version: int | None
) -> None:
    began = cache.now()
    cache.apply(D, [told(10, version)])
    cache.add(D, began, [at(10, 1), at(20, 1)])
    assert cache.find(STREAM, 0) is None
    assert cache.find(STREAM, 10) == at(20, 1), "the others of that read are as good as ever"


def test_a_stale_read_begun_after_a_change_does_not_either(cache: IndexCache) -> None:
    """A paused leader of Oxia may answer with what its watchers know is outdated."""
    cache.apply(D, [told(10, 2)])
    add(cache, at(10, 1))
    assert cache.find(STREAM, 0) is None
    add(cache, at(10, 2))
    assert cache.find(STREAM, 0) == at(10, 2)


def test_a_read_that_is_newer_than_the_watch_is_kept_out_until_the_watch_is_there(cache: IndexCache) -> None:
    """Versions have no order, so it cannot be told from an older one."""
    cache.apply(D, [told(10, 1)])
    add(cache, at(10, 1))
    add(cache, at(10, 2))
    assert cache.find(STREAM, 0) is None
    cache.apply(D, [told(10, 2)])
    add(cache, at(10, 2))
    assert cache.find(STREAM, 0) == at(10, 2)


def test_a_read_older_than_what_is_remembered_counts_for_nothing(
    cache: IndexCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "MAX_REMEMBERED", 4)
    began = cache.now()
    cache.apply(D, [told(10, 2)])
    during = cache.now()
    cache.apply(D, [told(end, 2, sequence_of(8)) for end in (10, 20, 10, 30)])
    cache.add(D, began, [at(10, 1)])
    cache.learn_end(D, began, STREAM, Position(10, 100))
    assert (cache.find(STREAM, 0), cache.end(STREAM)) == (None, None)
    cache.add(D, during, [at(10, 1)])
    assert cache.find(STREAM, 0) == at(10, 1), "this one began behind the change"


def test_a_position_told_twice_is_remembered_by_the_second(
    cache: IndexCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "MAX_REMEMBERED", 2)
    cache.apply(D, [told(10, 2), told(10, 3), told(20, 1)])
    add(cache, at(10, 2))
    assert cache.find(STREAM, 0) is None


def test_after_a_gap_nothing_from_before_is_served(cache: IndexCache) -> None:
    cache.open(D + 1)
    other = Placed(wal_entry(10, stream_id=8), 10, 100, 1)
    cache.add(D + 1, cache.now(), [other])
    add(cache, at(10, 1))
    cache.learn_end(D, cache.now(), STREAM, Position(10, 100))
    began = cache.now()
    cache.close(D)
    cache.open(D)
    cache.add(D, began, [at(20, 1)])
    cache.learn_end(D, began, STREAM, Position(20, 200))
    cache.learn_log_start(D, began, STREAM, 0, [at(20, 1)], None)
    assert [cache.find(STREAM, offset) for offset in (0, 10)] == [None, None]
    assert (cache.end(STREAM), cache.log_start(STREAM)) == (None, None)
    assert cache.find(8, 0) is other


def test_an_entry_takes_out_those_that_it_supersedes(cache: IndexCache) -> None:
    add(cache, at(10, 1), at(20, 1), at(30, 1), at(40, 1))
    size = cache.size_bytes
    merged = at(30, 2, parquet_entry(20))
    add(cache, merged)
    assert [cache.find(STREAM, offset) for offset in (9, 10, 29)] == [at(10, 1), merged, merged]
    add(cache, at(20, 1))
    assert cache.find(STREAM, 10) is merged, "what is superseded does not come back"
    assert cache.size_bytes < size


def test_an_entry_that_may_be_outdated_takes_out_what_it_would_replace(cache: IndexCache) -> None:
    """A fresh read that is ahead of the watch: the next lookup must not find the old entry again."""
    cache.apply(D, [told(10, 1), told(20, 1)])
    add(cache, at(10, 1), at(20, 1))
    add(cache, at(20, 2, parquet_entry(20)))
    assert [cache.find(STREAM, offset) for offset in (0, 10)] == [None, None]


def test_the_watch_moves_a_known_end(cache: IndexCache) -> None:
    cache.apply(D, [told(10, 1)])
    assert cache.end(STREAM) is None, "a change of one entry does not say that it is the last"
    cache.learn_end(D, cache.now(), STREAM, Position(10, 100))
    cache.apply(D, [told(30, 1), told(20, 2)])
    assert cache.end(STREAM) == (30, 300)
    add(cache, at(40, 1))
    assert cache.end(STREAM) == (40, 400)


def test_a_stale_end_is_corrected_by_what_the_watch_told(cache: IndexCache) -> None:
    cache.apply(D, [told(20, 1), told(10, None)])
    cache.learn_end(D, cache.now(), STREAM, Position(10, 100))
    assert cache.end(STREAM) == (20, 200)


def test_what_was_added_before_the_watch_told_of_it_leaves_the_log_start(cache: IndexCache) -> None:
    """Or every fetch behind an own write would read the front of the index again."""
    cache.learn_end(D, cache.now(), STREAM, Position(10, 100))
    cache.learn_log_start(D, cache.now(), STREAM, 3, [at(10, 1)], None)
    add(cache, at(20, 2))
    cache.apply(D, [told(20, 2)])
    assert cache.log_start(STREAM) == 3
    cache.apply(D, [told(20, 5)])
    assert cache.log_start(STREAM) is None


def test_a_truncation_that_was_read_before_the_watch_told_of_it_still_moves_the_log_start(
    cache: IndexCache,
) -> None:
    cache.learn_end(D, cache.now(), STREAM, Position(20, 200))
    cache.learn_log_start(D, cache.now(), STREAM, 0, [at(10, 1), at(20, 2)], None)
    add(cache, at(10, 7, truncated_entry(10)))
    cache.apply(D, [told(10, 7)])
    assert cache.log_start(STREAM) is None


def test_appends_leave_the_log_start_and_replacements_do_not(cache: IndexCache) -> None:
    cache.learn_end(D, cache.now(), STREAM, Position(20, 200))
    cache.learn_log_start(D, cache.now(), STREAM, 0, [at(10, 1), at(20, 1)], None)
    cache.apply(D, [told(30, 1)])
    assert cache.log_start(STREAM) == 0
    cache.apply(D, [told(20, 2)])
    assert cache.log_start(STREAM) is None


@pytest.mark.parametrize(
    "change", [told(20, 2), told(20, None), told(15, 4)], ids=["replaced", "removed", "not there"]
)
def test_a_log_start_from_a_stale_read_is_not_kept(cache: IndexCache, change: EntryChange) -> None:
    stored = [at(10, 1), at(20, 1)]
    cache.apply(D, [change])
    cache.learn_log_start(D, cache.now(), STREAM, 0, stored, None)
    assert cache.log_start(STREAM) is None


def test_changes_behind_what_was_read_for_a_log_start_do_not_matter(cache: IndexCache) -> None:
    cache.apply(D, [told(10, 1), told(5, None), told(90, 7)])
    cache.learn_log_start(D, cache.now(), STREAM, 0, [at(10, 1)], None)
    assert cache.log_start(STREAM) == 0


def test_a_log_start_from_a_read_begun_before_a_change_is_not_kept(cache: IndexCache) -> None:
    began = cache.now()
    cache.apply(D, [told(90, 2)])
    cache.learn_log_start(D, began, STREAM, 0, [at(10, 1)], None)
    assert cache.log_start(STREAM) is None


def deleted_at(version: int | None, stream_id: int = STREAM) -> KeyChange:
    return KeyChange(f"log-start/{stream_id:016x}", version)


def test_a_change_of_the_log_start_record_moves_the_log_start(cache: IndexCache) -> None:
    cache.learn_log_start(D, cache.now(), STREAM, 0, [at(10, 1)], None)
    cache.apply(D, [deleted_at(4, STREAM + 1), KeyChange(f"log-starts/{STREAM:016x}", 5)])
    assert cache.log_start(STREAM) == 0
    cache.apply(D, [deleted_at(4)])
    assert cache.log_start(STREAM) is None
    cache.learn_log_start(D, cache.now(), STREAM, 7, [at(10, 1)], 4)
    assert cache.log_start(STREAM) == 7


@pytest.mark.parametrize("stale", [None, 3])
def test_a_log_start_from_a_stale_record_is_not_kept(cache: IndexCache, stale: int | None) -> None:
    began = cache.now()
    assert not cache.doubts_record(D, STREAM, stale)
    cache.apply(D, [deleted_at(4)])
    assert cache.doubts_record(D, STREAM, stale)
    for when in (began, cache.now()):
        cache.learn_log_start(D, when, STREAM, 0, [at(10, 1)], stale)
        assert cache.log_start(STREAM) is None
    cache.learn_log_start(D, began, STREAM, 7, [at(10, 1)], 4)
    assert cache.log_start(STREAM) == 7, "read before it was told, but the same version"


def test_changes_of_records_give_way_like_those_of_entries(
    cache: IndexCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dray.index.cache.MAX_REMEMBERED", 2)
    began = cache.now()
    cache.apply(D, [deleted_at(4), deleted_at(5), told(20, 1), told(30, 1)])
    cache.learn_log_start(D, began, STREAM, 0, [at(10, 1)], 4)
    assert cache.log_start(STREAM) is None, "what it may have missed is not remembered"
    cache.learn_log_start(D, cache.now(), STREAM, 7, [at(10, 1)], 5)
    assert cache.log_start(STREAM) == 7


def test_the_stream_not_asked_for_longest_gives_way_from_its_lowest_offsets() -> None:
    cache = IndexCache(max_bytes=60_000)
    cache.open(D)
    for stream_id in (1, 2, 3):
        entry = wal_entry(10, stream_id=stream_id)
        cache.add(D, cache.now(), [Placed(entry, end, end, 1) for end in range(10, 130, 10)])
    assert cache.find(1, 0) is not None
    cache.add(D, cache.now(), [Placed(wal_entry(10, stream_id=4), end, end, 1) for end in range(10, 90, 10)])
    assert cache.size_bytes <= 60_000
    assert cache.find(2, 0) is None
    assert [cache.find(stream_id, 79) is None for stream_id in (1, 3, 4)] == [False, False, False]


def test_one_long_stream_keeps_its_highest_offsets() -> None:
    cache = IndexCache(max_bytes=50_000)
    cache.open(D)
    for end in range(10, 10_000, 10):
        add(cache, at(end, 1))
        assert cache.size_bytes <= 50_000
    assert cache.find(STREAM, 0) is None
    assert cache.find(STREAM, 9_985) is not None
    assert cache.size_bytes > 40_000


def test_what_is_counted_is_what_it_takes() -> None:
    producers = [Producer(10**12 + i, 3, 10**6 + i) for i in range(10)]
    values = [encode(wal_entry(*range(1_000, 1_010), number=n, producers=producers)) for n in range(500)]
    cache = IndexCache()
    cache.open(D)
    tracemalloc.start()
    try:
        for number, value in enumerate(values, 1):
            add(cache, Placed(decode(value), number * 10**5, number * 10**6, number))
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert taken <= cache.size_bytes <= 2 * taken


# --- with an index in front and a watch behind


class SlowStore(MemoryStore):
    """Answers a read with what was there when it began, once `gate` is open."""

    def __init__(self, data: MemoryData) -> None:
        super().__init__(data)
        self.gate = asyncio.Event()
        self.gate.set()
        self.reads = 0

    async def ceiling(self, domain: int, sequence: str, n: int) -> Entry | None:
        self.reads += 1
        found = await super().ceiling(domain, sequence, n)
        await self.gate.wait()
        return found

    async def entries(self, domain: int, sequence: str, start: int, limit: int) -> list[Entry]:
        self.reads += 1
        found = await super().entries(domain, sequence, start, limit)
        await self.gate.wait()
        return found


class Followed:
    def __init__(self) -> None:
        self.data = MemoryData()
        self.writer = MemoryStore(self.data)
        self.store = SlowStore(self.data)
        self.cache = IndexCache()
        self.index = OffsetIndex(self.store, lambda stream_id: D, self.cache)

    async def append(self, entry: IndexEntry) -> Position:
        [done] = (
            await self.writer.append(D, [NewEntry(SEQUENCE, entry.records, 104, encode(entry))])
        ).entries
        return done.position

    async def swap(self, at: Position, new: IndexEntry, *deletes: Position) -> None:
        [stored] = await self.writer.entries(D, SEQUENCE, at.end_records, 1)
        await self.writer.swap(D, SEQUENCE, at, stored.version, encode(new), deletes)


async def settle() -> None:
    """Let all that can run do so: nothing here waits for more than the event loop."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
async def followed() -> AsyncIterator[Followed]:
    made = Followed()
    task = asyncio.create_task(made.cache.follow(made.store, D))
    await settle()
    yield made
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_a_second_lookup_reads_nothing(followed: Followed) -> None:
    await followed.append(wal_entry(10))
    await followed.append(wal_entry(10))
    await settle()
    assert len(await followed.index.range(STREAM, 0, 2)) == 2
    reads = followed.store.reads
    assert len(await followed.index.range(STREAM, 0, 2)) == 2
    assert await followed.index.find(STREAM, 15) is not None
    assert await followed.index.end(STREAM) == (20, 208)
    assert await followed.index.find(STREAM, 20) is None
    assert await followed.index.range(STREAM, 20, 5) == []
    assert len(await followed.index.range(STREAM, 0, 9)) == 2
    assert followed.store.reads == reads


async def test_a_swap_is_seen_as_soon_as_it_is_told(followed: Followed) -> None:
    a, b = await followed.append(wal_entry(10)), await followed.append(wal_entry(10))
    await settle()
    for offset in (0, 10):
        await followed.index.find(STREAM, offset)
    await followed.swap(b, parquet_entry(20), a)
    await settle()
    found = await followed.index.find(STREAM, 0)
    assert found is not None
    assert found.entry == parquet_entry(20)
    await followed.swap(b, truncated_entry(20))
    await settle()
    assert await followed.index.log_start(STREAM) == 20


async def test_a_log_start_is_read_once_while_others_append(followed: Followed) -> None:
    await followed.append(wal_entry(10))
    await settle()
    await followed.index.end(STREAM)
    assert await followed.index.log_start(STREAM) == 0
    reads = followed.store.reads
    await followed.append(wal_entry(10))
    await settle()
    assert await followed.index.log_start(STREAM) == 0
    assert await followed.index.end(STREAM) == (20, 208)
    assert followed.store.reads == reads


async def test_a_slow_read_does_not_bring_back_what_was_swapped_meanwhile(followed: Followed) -> None:
    """The read began before the swap, the watch told of the swap, then the read came back."""
    a = await followed.append(wal_entry(10))
    await settle()
    followed.store.gate.clear()
    slow = asyncio.create_task(followed.index.find(STREAM, 0))
    await settle()
    await followed.swap(a, parquet_entry(10))
    await settle()
    followed.store.gate.set()
    found = await slow
    assert found is not None
    assert found.entry == wal_entry(10), "the reader itself may see it: it asked before"
    found = await followed.index.find(STREAM, 0)
    assert found is not None
    assert found.entry == parquet_entry(10)


async def test_a_gap_makes_everything_be_read_again(followed: Followed) -> None:
    await followed.append(wal_entry(10))
    await settle()
    await followed.index.find(STREAM, 0)
    [(_, feed)] = followed.data.domain(D).watchers
    feed.gap()
    await settle()
    assert followed.cache.find(STREAM, 0) is None
    await followed.index.find(STREAM, 0)
    assert followed.cache.find(STREAM, 0) is not None, "and is kept again"


async def test_fresh_goes_around_the_cache_and_corrects_it(followed: Followed) -> None:
    """An object that is gone, while the watch is late: every later lookup must find the new one."""
    a, b = await followed.append(wal_entry(10)), await followed.append(wal_entry(10))
    await settle()
    for offset in (0, 10):
        await followed.index.find(STREAM, offset)
    [watcher] = followed.data.domain(D).watchers
    followed.data.domain(D).watchers.clear()
    await followed.swap(b, parquet_entry(20), a)
    stale = await followed.index.find(STREAM, 0)
    assert stale is not None
    assert stale.entry == wal_entry(10)
    for fresh in (True, False):
        found = await followed.index.find(STREAM, 0, fresh=fresh)
        assert found is not None
        assert found.entry == parquet_entry(20)
    followed.data.domain(D).watchers.append(watcher)


async def test_when_the_watch_ends_nothing_is_served(followed: Followed) -> None:
    await followed.append(wal_entry(10))
    await settle()
    await followed.index.find(STREAM, 0)
    await followed.store.close()
    await settle()
    assert followed.cache.find(STREAM, 0) is None
    assert followed.cache.size_bytes == 0
