"""Which entries count, on a store where the entries of a fenced append land (protocol 12)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from dray.errors import CorruptStore, OutcomeUnknown, Unavailable, VersionConflict
from dray.index.changes import carry_out, replace_run, void
from dray.index.entry import IndexEntry, Placed, Void, encode, place_all, sequence_of
from dray.index.witness import Witness
from dray.metadata.memory import MemoryData, MemoryStore
from dray.metadata.store import Expect, Expectation, NewEntry, Position, Put, Record
from dray.objectstore.memory import MemoryObjectStore
from dray.wal.objects import ObjectRecord, State, encode_record, record_key, reference_key
from dray.wal.orphans import OrphanCollector
from tests.index_entries import STREAM, parquet_entry, truncated_entry, void_entry, wal_entry

D = 5
SEQUENCE = sequence_of(STREAM)


class Store(MemoryStore):
    """A client of the weaker store, with what can happen on the way to it."""

    def __init__(self, data: MemoryData | None = None) -> None:
        self.data = data or MemoryData()
        super().__init__(self.data, conditions_abort=False)
        self.calls: Counter[str] = Counter()
        self.unseen: set[str] = set()  # keys that reads do not show before the next barrier
        self.at_get: Callable[[], Awaitable[None]] | None = None
        self.at_swap: Callable[[], Awaitable[None]] | None = None
        self.at_barrier: Callable[[], Awaitable[None]] | None = None
        self.swaps_lost: list[str] = []  # "before" or "after" taking effect, one for each call
        self.at_delete: Callable[[], Awaitable[None]] | None = None

    async def get(self, domain: int, key: str) -> Record | None:
        self.calls["get"] += 1
        if self.at_get is not None:
            await self.at_get()
        return None if key in self.unseen else await super().get(domain, key)

    async def swap(self, *args: Any) -> int:
        self.calls["swap"] += 1
        if self.at_swap is not None:
            act, self.at_swap = self.at_swap, None
            await act()
        lost = self.swaps_lost.pop(0) if self.swaps_lost else ""
        if lost == "before":
            raise OutcomeUnknown("lost on the way")
        version = await super().swap(*args)
        if lost == "after":
            raise OutcomeUnknown("its answer was lost")
        return version

    async def delete(self, domain: int, key: str, expect: Expectation = Expect.ANY) -> bool:
        self.calls["delete"] += 1
        if self.at_delete is not None:
            await self.at_delete()
        return await super().delete(domain, key, expect)

    async def barrier(self, domain: int) -> None:
        self.calls["barrier"] += 1
        if self.at_barrier is not None:
            act, self.at_barrier = self.at_barrier, None
            await act()
        self.unseen.clear()
        await super().barrier(domain)

    def writes(self) -> int:
        return self.data.last_version


@pytest.fixture
def store() -> Store:
    return Store()


def witness(store: MemoryStore, **options: int) -> Witness:
    return Witness(store, lambda stream_id: D, **options)


def number_of(number: int) -> UUID:
    return UUID(int=number)


async def fence(store: MemoryStore, number: int) -> None:
    record = ObjectRecord(State.FENCED, f"wal/{number}", 1, 0)
    await store.put(D, record_key(number_of(number)), encode_record(record), Expect.ABSENT)


async def land(store: MemoryStore, *entries: IndexEntry, number: int) -> None:
    """The append of one object, as a writer sends it."""
    record = ObjectRecord(State.COMMITTED, f"wal/{number}", 1, 0)
    puts = [Put(record_key(number_of(number)), encode_record(record), Expect.ABSENT)]
    puts += [Put(reference_key(number_of(number), entry.stream_id), b"") for entry in entries]
    new = [NewEntry(sequence_of(e.stream_id), e.records, 104, encode(e)) for e in entries]
    await store.append(D, new, puts)


async def committed(store: MemoryStore, *batches: int, number: int) -> None:
    await land(store, wal_entry(*batches, number=number), number=number)


async def fenced(store: MemoryStore, *batches: int, number: int) -> None:
    await fence(store, number)
    await committed(store, *batches, number=number)


async def read(store: MemoryStore, stream_id: int = STREAM) -> list[Placed]:
    return place_all(await store.entries(D, sequence_of(stream_id), 0, 1_000))


def as_void(placed: Placed) -> Placed:
    """As it has to be stored, written down here once more; the version is the store's."""
    entry = placed.entry
    assert hasattr(entry.where, "object_id")
    where = Void(entry.where.object_id)
    return replace(placed, entry=replace(entry, min_timestamp_ms=-1, max_timestamp_ms=-1, where=where))


def ranges(entries: list[Placed]) -> list[tuple[int, int]]:
    return [(placed.start_offset, placed.end_offset) for placed in entries]


async def forget_fences(store: MemoryStore) -> int:
    return (await OrphanCollector(store, MemoryObjectStore()).forget_fences(D, 10**12, 0)).fences_removed


async def test_everything_counts_where_a_fenced_append_leaves_nothing() -> None:
    store = MemoryStore(conditions_abort=True)
    await committed(store, 1, 2, number=1)
    await store.delete(D, record_key(number_of(1)))
    entries = await read(store)
    judge = witness(store)
    assert judge.known(entries) == entries
    assert await judge.judge(entries) == entries


async def test_what_was_committed_counts_and_is_asked_for_once(store: Store) -> None:
    await committed(store, 1, 2, number=1)
    await committed(store, 3, number=2)
    entries = await read(store)
    judge = witness(store)
    assert judge.known(entries) is None
    assert await judge.judge(entries) == entries
    assert judge.known(entries) == entries
    assert await judge.judge(entries) == entries
    assert store.calls == {"get": 2}


async def test_an_own_acknowledged_append_needs_no_asking(store: Store) -> None:
    await committed(store, 1, number=1)
    entries = await read(store)
    judge = witness(store)
    judge.know(number_of(1))
    assert judge.known(entries) == entries
    assert await judge.judge(entries) == entries
    assert store.calls == {}


async def test_a_fenced_entry_is_marked_in_the_index(store: Store) -> None:
    await committed(store, 1, number=1)
    await fenced(store, 2, 3, number=2)
    await committed(store, 4, number=3)
    before = await read(store)
    judge = witness(store)
    judged = await judge.judge(before)
    stored = await read(store)
    assert judged == stored
    assert judged == [before[0], replace(as_void(before[1]), version=stored[1].version), before[2]]
    assert stored[1].version != before[1].version
    assert judge.known(judged) == judged


async def test_every_kind_keeps_its_place(store: Store) -> None:
    for number in range(1, 7):
        await (fenced if number in (4, 6) else committed)(store, number, number=number)
    entries = await read(store)
    await carry_out(store, D, replace_run(entries[:1], truncated_entry(1)))
    await carry_out(store, D, replace_run(entries[1:2], parquet_entry(2)))
    await carry_out(store, D, void(entries[3]))
    before = await read(store)
    judged = await witness(store).judge(before)
    assert ranges(judged) == ranges(before) == [(0, 1), (1, 3), (3, 6), (6, 10), (10, 15), (15, 21)]
    kinds = [type(placed.entry.where).__name__ for placed in judged]
    assert kinds == ["Truncated", "ParquetFile", "WalChunk", "Void", "WalChunk", "Void"]
    assert judged[:5] == before[:5]
    assert judged == await read(store)


async def test_nothing_is_judged_from_no_entries(store: Store) -> None:
    assert await witness(store).judge([]) == []
    assert witness(store).known([]) == []


@pytest.mark.parametrize("is_fenced", [False, True])
async def test_a_record_that_is_not_there_is_read_again(store: Store, is_fenced: bool) -> None:
    """It became visible with its entry: the read was stale."""
    await (fenced if is_fenced else committed)(store, 2, number=1)
    entries = await read(store)
    store.unseen.add(record_key(number_of(1)))
    (judged,) = await witness(store).judge(entries)
    assert store.calls["barrier"] == 1
    assert isinstance(judged.entry.where, Void) == is_fenced
    assert [judged] == await read(store)


async def test_an_object_that_nobody_decided_about_is_an_error_and_never_void(store: Store) -> None:
    await committed(store, 2, number=1)
    await store.delete(D, record_key(number_of(1)))
    entries, writes = await read(store), store.writes()
    judge = witness(store)
    with pytest.raises(CorruptStore, match="of an object that has no record: read 4 times"):
        await judge.judge(entries)
    assert await read(store) == entries
    assert store.writes() == writes
    assert judge.known(entries) is None


async def test_a_stale_entry_whose_fence_was_forgotten_is_void(store: Store) -> None:
    await fenced(store, 2, number=1)
    stale = await read(store)
    marked = await witness(Store(store.data)).judge(stale)
    assert await forget_fences(store) == 1
    assert await witness(store).judge(stale) == marked


@pytest.mark.parametrize("by", [parquet_entry(2), truncated_entry(2)])
async def test_a_stale_entry_that_was_replaced_is_what_it_is_now(store: Store, by: IndexEntry) -> None:
    await committed(store, 2, number=1)
    stale = await read(store)
    now = await carry_out(store, D, replace_run(stale, by))
    await store.delete(D, reference_key(number_of(1), STREAM))
    await store.delete(D, record_key(number_of(1)))
    assert await witness(store).judge(stale) == [now]


@pytest.mark.parametrize("position", [0, 1])
async def test_what_a_swap_took_into_a_longer_range_has_to_be_looked_up(store: Store, position: int) -> None:
    for number in (1, 2):
        await committed(store, 2, number=number)
    stale = await read(store)
    await carry_out(store, D, replace_run(stale, parquet_entry(4)))
    for number in (1, 2):
        await store.delete(D, record_key(number_of(number)))
    with pytest.raises(VersionConflict):
        await witness(store).judge(stale[position : position + 1])


async def test_the_next_entry_is_not_taken_for_one_that_is_gone(store: Store) -> None:
    """As a swap that died half-way leaves them: the first is removed, the second is not yet."""
    for number in (1, 2, 3):
        await committed(store, 2, number=number)
    stale = await read(store)
    swap = replace_run(stale, parquet_entry(6))
    await carry_out(store, D, replace(swap, deletes=swap.deletes[:1]))
    await store.delete(D, record_key(number_of(1)))
    with pytest.raises(VersionConflict):
        await witness(store).judge(stale[:1])


async def test_another_broker_marks_first(store: Store) -> None:
    await fenced(store, 2, number=1)
    entries = await read(store)
    theirs: list[Placed] = []

    async def mark() -> None:
        theirs.extend(await witness(Store(store.data)).judge(entries))

    store.at_swap = mark
    judged = await witness(store).judge(entries)
    assert judged == theirs == await read(store)
    assert store.calls["swap"] == 1


async def test_another_broker_marks_and_dies(store: Store) -> None:
    """Whoever finds the mark takes the reference away."""
    await fenced(store, 2, number=1)
    entries = await read(store)

    async def mark() -> None:
        await carry_out(MemoryStore(store.data, conditions_abort=False), D, void(entries[0]))

    store.at_swap = mark
    assert await witness(store).judge(entries) == await read(store)
    assert await store.get(D, reference_key(number_of(1), STREAM)) is None


@pytest.mark.parametrize("by", [parquet_entry(2), truncated_entry(2)])
async def test_another_replaces_the_entry_first(store: Store, by: IndexEntry) -> None:
    await fenced(store, 2, number=1)
    entries = await read(store)

    async def swap() -> None:
        await carry_out(MemoryStore(store.data, conditions_abort=False), D, replace_run(entries, by))

    store.at_swap = swap
    judged = await witness(store).judge(entries)
    assert judged == await read(store)
    assert judged[0].entry == by


async def test_another_changes_the_entry_and_leaves_it_a_chunk(store: Store) -> None:
    """As a verdict will: the mark is put at the version that is there then."""
    await fenced(store, 2, number=1)
    (placed,) = entries = await read(store)

    async def touch() -> None:
        position = Position(placed.end_offset, placed.end_bytes)
        other = MemoryStore(store.data, conditions_abort=False)
        await other.swap(D, SEQUENCE, position, placed.version, encode(placed.entry), [])

    store.at_swap = touch
    (judged,) = await witness(store).judge(entries)
    assert [judged] == await read(store)
    assert isinstance(judged.entry.where, Void)
    assert store.calls["swap"] == 2


async def test_two_at_once_write_one_mark(store: Store) -> None:
    await fenced(store, 2, number=1)
    await committed(store, 2, number=2)
    entries, writes = await read(store), store.writes()
    judges = [witness(store), witness(store), witness(Store(store.data))]
    asked = [judge.judge(entries) for judge in (*judges, judges[0])]
    for judged in await asyncio.gather(*asked):
        assert judged == await read(store)
    (marked, _) = await read(store)
    assert marked.version == writes + 1
    assert await store.get(D, reference_key(number_of(1), STREAM)) is None


async def test_those_who_ask_at_once_share_one_read(store: Store) -> None:
    await committed(store, 2, number=1)
    entries = await read(store)
    judge = witness(store)
    asked = [judge.judge(entries) for _ in range(10)]
    assert await asyncio.gather(*asked) == [entries] * 10
    assert store.calls == {"get": 1}


async def test_one_who_is_cancelled_does_not_take_the_read_from_the_others(store: Store) -> None:
    await committed(store, 2, number=1)
    entries = await read(store)
    judge = witness(store)
    reached, released = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        reached.set()
        await released.wait()

    store.at_get = hold
    first, second = (asyncio.create_task(judge.judge(entries)) for _ in range(2))
    await reached.wait()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    released.set()
    assert await second == entries
    assert store.calls == {"get": 1}


async def test_a_read_from_before_the_barrier_does_not_count_behind_it(store: Store) -> None:
    await committed(store, 2, number=1)
    entries = await read(store)
    judge = witness(store)
    store.unseen.add(record_key(number_of(1)))
    reached, released = asyncio.Event(), asyncio.Event()
    others: list[asyncio.Task[list[Placed]]] = []

    async def hold() -> None:
        store.at_get = None
        reached.set()
        await released.wait()

    async def begin_another() -> None:
        store.at_get = hold
        others.append(asyncio.create_task(judge.judge(entries)))
        await reached.wait()

    store.at_barrier = begin_another
    assert await judge.judge(entries) == entries
    assert not others[0].done()
    released.set()
    assert await others[0] == entries


async def test_a_failed_read_is_told_and_not_remembered(store: Store) -> None:
    await committed(store, 2, number=1)
    entries = await read(store)
    judge = witness(store)

    async def fail() -> None:
        raise Unavailable("no connection")

    store.at_get = fail
    outcomes = await asyncio.gather(*(judge.judge(entries) for _ in range(2)), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [Unavailable, Unavailable]
    assert store.calls == {"get": 1}
    store.at_get = None
    assert await judge.judge(entries) == entries


@pytest.mark.parametrize("lost", [["before"], ["after"], ["before", "before", "after"]])
async def test_a_mark_whose_outcome_is_unknown_is_looked_for(store: Store, lost: list[str]) -> None:
    await fenced(store, 2, number=1)
    store.swaps_lost = lost
    judged = await witness(store).judge(await read(store))
    assert judged == await read(store)
    assert isinstance(judged[0].entry.where, Void)
    assert await store.get(D, reference_key(number_of(1), STREAM)) is None


async def test_what_could_not_be_marked_is_not_void_and_keeps_its_fence(store: Store) -> None:
    await fenced(store, 2, number=1)
    entries = await read(store)
    store.swaps_lost = ["before"] * 4
    with pytest.raises(OutcomeUnknown):
        await witness(store).judge(entries)
    assert await read(store) == entries
    assert await forget_fences(store) == 0
    assert isinstance((await witness(store).judge(entries))[0].entry.where, Void)


async def test_a_fence_is_forgotten_once_every_stream_has_its_mark(store: Store) -> None:
    other = STREAM + 1
    await fence(store, 1)
    chunks = [wal_entry(2, number=1, stream_id=stream) for stream in (STREAM, other)]
    await land(store, *chunks, number=1)
    judge = witness(store)
    assert await forget_fences(store) == 0
    first = await judge.judge(await read(store))
    assert await forget_fences(store) == 0
    second = await judge.judge(await read(store, other))
    assert await forget_fences(store) == 1
    assert await witness(store).judge(first) == first
    assert await witness(store).judge(second) == second


async def test_one_that_dies_behind_its_mark_leaves_a_fence_and_no_harm(store: Store) -> None:
    await fenced(store, 2, number=1)
    entries = await read(store)
    reached = asyncio.Event()

    async def die() -> None:
        reached.set()
        await asyncio.get_running_loop().create_future()

    store.at_delete = die
    dying = asyncio.create_task(witness(store).judge(entries))
    await reached.wait()
    dying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await dying
    store.at_delete = None
    (marked,) = await read(store)
    assert marked.entry.where == Void(number_of(1))
    assert await forget_fences(store) == 0
    # Whoever holds the old entry finds the mark, and the reference it left.
    assert await witness(store).judge(entries) == [marked]
    assert await forget_fences(store) == 1


async def test_a_reference_that_cannot_be_deleted_does_not_fail_the_reader(store: Store) -> None:
    await fenced(store, 2, number=1)

    async def fail() -> None:
        raise Unavailable("no connection")

    store.at_delete = fail
    assert await witness(store).judge(await read(store)) == await read(store)
    assert await store.get(D, reference_key(number_of(1), STREAM)) is not None


async def test_a_mark_that_was_read_costs_nothing(store: Store) -> None:
    marked = [Placed(void_entry(2), 2, 104, 1)]
    await committed(store, 1, number=1)
    entries = marked + [replace(placed, end_offset=3) for placed in await read(store)]
    assert await witness(store).judge(entries) == entries
    assert store.calls == {"get": 1}


async def test_only_so_many_objects_are_remembered(store: Store) -> None:
    for number in (1, 2, 3):
        await committed(store, 1, number=number)
    entries = await read(store)
    judge = witness(store, max_objects=2)
    assert await judge.judge(entries[:2]) == entries[:2]
    assert judge.known(entries[:1]) is not None  # asked for last
    assert await judge.judge(entries[2:]) == entries[2:]
    assert [judge.known([placed]) is not None for placed in entries] == [True, False, True]
    assert await judge.judge(entries) == entries


async def test_many_objects_are_read_side_by_side_within_bounds(store: Store) -> None:
    for number in range(1, 101):
        await committed(store, 1, number=number)
    entries = await read(store)
    running, most = 0, 0

    async def pause() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1

    store.at_get = pause
    assert await witness(store).judge(entries) == entries
    assert most == 32
