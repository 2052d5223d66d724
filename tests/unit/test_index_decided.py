"""The index as readers see it: what counts, what is void, and what changes while it is judged."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from uuid import UUID

import pytest

from dray.errors import Unavailable
from dray.index.cache import IndexCache
from dray.index.changes import carry_out, replace_run
from dray.index.decided import DecidedIndex
from dray.index.entry import IndexEntry, Placed, Void, encode, place_all, sequence_of
from dray.index.witness import Witness
from dray.metadata.memory import MemoryData
from dray.metadata.store import EntryChange, NewEntry, Position, Put, Record
from dray.wal.objects import ObjectRecord, State, encode_record, record_key
from tests.index_entries import INCARNATION, STREAM, parquet_entry, wal_entry
from tests.log_node import HeldStore

D = 5
SEQUENCE = sequence_of(STREAM)


class Store(HeldStore):
    at_get: Callable[[], Awaitable[None]] | None = None

    async def get(self, domain: int, key: str) -> Record | None:
        if self.at_get is not None:
            await self.at_get()
        return await super().get(domain, key)

    def stored(self) -> list[Placed]:
        return place_all(self._data.domain(D).sequences[SEQUENCE])


@pytest.fixture
def store() -> Store:
    return Store(MemoryData(), conditions_abort=False)


@pytest.fixture
def cache() -> IndexCache:
    cache = IndexCache()
    cache.open(D)
    return cache


@pytest.fixture
def index(store: Store, cache: IndexCache) -> DecidedIndex:
    return index_of(store, cache)


def index_of(store: HeldStore, cache: IndexCache) -> DecidedIndex:
    return DecidedIndex(
        store, lambda stream_id: D, cache, Witness(store, lambda stream_id: D), incarnation=INCARNATION
    )


async def append(
    store: HeldStore, number: int, *batches: int, state: State | None = State.COMMITTED
) -> Position:
    entry: IndexEntry = wal_entry(*batches, number=number)
    record = ObjectRecord(state or State.COMMITTED, f"wal/{number}", 1, 1)
    puts = [Put(record_key(UUID(int=number)), encode_record(record))] if state else []
    new = NewEntry(SEQUENCE, entry.records, 104 * len(batches), encode(entry))
    return (await store.append(D, [new], puts)).entries[0].position


async def test_what_is_committed_counts_and_what_is_fenced_is_void(store: Store, index: DecidedIndex) -> None:
    await append(store, 1, 2)
    await append(store, 2, 3, state=State.FENCED)
    await append(store, 3, 1)
    first, second, third = await index.range(STREAM, 0, 10)
    assert [placed.start_offset for placed in (first, second, third)] == [0, 2, 5]
    assert isinstance(second.entry.where, Void)
    assert (second.entry.records, second.end_offset) == (3, 5)
    assert await index.find(STREAM, 4) == second
    assert await index.find(STREAM, 6) is None
    assert (await index.end(STREAM)).end_records == 6
    assert store.stored() == [first, second, third], "the mark is in the store"


async def test_a_store_that_aborts_is_asked_for_no_record(cache: IndexCache) -> None:
    store = Store(MemoryData())
    index = index_of(store, cache)
    await append(store, 1, 2)
    await append(store, 2, 2)
    assert len(await index.range(STREAM, 0, 10)) == 2
    assert not [read for read in store.reads if read.startswith("get")]


async def test_what_is_known_is_not_asked_for_again(store: Store, index: DecidedIndex) -> None:
    await append(store, 1, 2)
    await index.range(STREAM, 0, 10)
    await index.end(STREAM)
    store.reads.clear()
    await index.range(STREAM, 0, 10)
    await index.find(STREAM, 1)
    assert store.reads == []


async def compact(store: Store, number: int) -> None:
    run = store.stored()
    await carry_out(store, D, replace_run(run, parquet_entry(run[-1].end_offset, number=number)))


async def test_a_swap_while_it_was_judged_is_looked_up_again(store: Store, index: DecidedIndex) -> None:
    await append(store, 1, 2, state=None)
    await append(store, 2, 2, state=None)

    async def swap() -> None:
        store.at_get = None
        await compact(store, 7)

    store.at_get = swap
    found = await index.range(STREAM, 0, 10)
    assert found == store.stored()
    assert found[0].entry.where == parquet_entry(4, number=7).where


async def test_an_index_that_never_holds_still_may_pass(store: Store, index: DecidedIndex) -> None:
    """Its entry is another each time that its record is asked for."""
    await append(store, 1, 1, state=None)
    number = 1

    async def swap() -> None:
        nonlocal number
        number += 1
        data = store._data.domain(D)
        data.sequences[SEQUENCE] = []
        await append(store, number, number, state=None)

    store.at_get = swap
    with pytest.raises(Unavailable):
        await index.range(STREAM, 0, 10)


async def test_what_the_watch_told_is_not_taken_back_by_a_stale_read(
    store: Store, cache: IndexCache, index: DecidedIndex
) -> None:
    store.fall_behind()
    position = await append(store, 1, 2)
    cache.apply(D, [EntryChange(SEQUENCE, position, 1)])
    assert await index.end(STREAM) == position
    assert [placed.end_offset for placed in await index.range(STREAM, 0, 10)] == [2]


class TestKnows:
    async def test_nothing_of_a_stream_that_was_not_looked_at(
        self, store: Store, index: DecidedIndex
    ) -> None:
        await append(store, 1, 2)
        assert not index.knows(STREAM, 0)
        await index.end(STREAM)
        assert not index.knows(STREAM, 2)

    async def test_the_end_once_both_bounds_are_known(self, store: Store, index: DecidedIndex) -> None:
        await append(store, 1, 2)
        await index.end(STREAM)
        await index.log_start(STREAM)
        assert index.knows(STREAM, 2)
        assert index.knows(STREAM, 1), "whether it is decided was to be found out"
        assert not index.knows(STREAM, 3), "only a barrier can say"

    async def test_an_entry_that_was_read_and_judged(self, store: Store, index: DecidedIndex) -> None:
        await append(store, 1, 2)
        await index.end(STREAM)
        await index.log_start(STREAM)
        [placed] = await index.range(STREAM, 0, 1)
        assert index.knows(STREAM, 1)
        other = index_of(store, index._cache)
        assert other._cache.find(STREAM, 1) == placed
        assert not other.knows(STREAM, 1), "nobody told this one that it counts"
