"""Sequences: positions assigned by the store, and reads by position."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise

import pytest

from dray.errors import InvalidRequest, TooLarge
from dray.metadata.store import Entry, Expect, MetadataStore, NewEntry, Position, Put
from tests.conformance.backends import Backend

D = 5


async def append_one(store: MetadataStore, sequence: str, records: int, size: int, value: bytes) -> Position:
    result = await store.append(D, [NewEntry(sequence, records, size, value)])
    return result.entries[0].position


async def test_positions_are_cumulative_ends(store: MetadataStore, another: MetadataStore) -> None:
    assert await append_one(store, "s", 3, 100, b"a") == (3, 100)
    assert await append_one(another, "s", 1, 0, b"b") == (4, 100)
    assert await append_one(store, "s", 10, 7, b"c") == (14, 107)
    read = await another.entries(D, "s", 0, 10)
    assert [(e.position, e.value) for e in read] == [((3, 100), b"a"), ((4, 100), b"b"), ((14, 107), b"c")]


async def test_the_assigned_version_is_the_one_that_reads_show(store: MetadataStore) -> None:
    result = await store.append(D, [NewEntry("s", 3, 100, b"a")], [Put("k", b"v")])
    [assigned] = result.entries
    assert await store.tail(D, "s") == Entry(assigned.position, b"a", assigned.version)
    record = await store.get(D, "k")
    assert record is not None
    assert result.puts == (record.version,)


async def test_one_append_over_many_sequences_and_several_entries_each(store: MetadataStore) -> None:
    await append_one(store, "s1", 100, 1000, b"before")
    result = await store.append(
        D,
        [
            NewEntry("s1", 1, 10, b"s1-first"),
            NewEntry("s2", 2, 20, b"s2-first"),
            NewEntry("s1", 3, 30, b"s1-second"),
            NewEntry("s2", 4, 40, b"s2-second"),
        ],
    )
    assert [a.position for a in result.entries] == [(101, 1010), (2, 20), (104, 1040), (6, 60)]
    assert [e.value for e in await store.entries(D, "s1", 101, 9)] == [b"s1-first", b"s1-second"]


async def test_reads_at_every_boundary(store: MetadataStore) -> None:
    """Entries end at 3, 4 and 14: the offsets 0–2, 3 and 4–13."""
    for records, value in [(3, b"a"), (1, b"b"), (10, b"c")]:
        await append_one(store, "s", records, 1, value)

    async def ceiling(n: int) -> bytes | None:
        entry = await store.ceiling(D, "s", n)
        return entry.value if entry else None

    async def floor(n: int) -> bytes | None:
        entry = await store.floor(D, "s", n)
        return entry.value if entry else None

    assert [await ceiling(n) for n in (0, 1, 2, 3, 4, 5, 13, 14)] == [*[b"a"] * 4, b"b", *[b"c"] * 3]
    assert await ceiling(15) is None
    assert await ceiling(2**62) is None
    assert [await floor(n) for n in (3, 4, 5, 13, 14, 15, 2**62)] == [b"a", *[b"b"] * 3, *[b"c"] * 3]
    assert await floor(2) is None
    assert await floor(0) is None
    tail = await store.tail(D, "s")
    assert tail is not None
    assert (tail.position, tail.value) == ((14, 3), b"c")
    assert [e.value for e in await store.entries(D, "s", 4, 10)] == [b"b", b"c"]
    assert [e.value for e in await store.entries(D, "s", 0, 2)] == [b"a", b"b"]
    assert await store.entries(D, "s", 15, 10) == []


async def test_floor_reaches_far_below(store: MetadataStore) -> None:
    await append_one(store, "s", 1, 1, b"low")
    await append_one(store, "s", 2**31 - 1, 1, b"high")
    assert (await store.floor(D, "s", 2**31 - 1)) == await store.ceiling(D, "s", 0)
    high = await store.floor(D, "s", 2**40)
    assert high is not None
    assert high.value == b"high"


async def test_an_unknown_sequence_is_empty(store: MetadataStore) -> None:
    await append_one(store, "other", 1, 1, b"x")
    await store.put(D, "s", b"a key is no sequence")
    assert await store.tail(D, "s") is None
    assert await store.ceiling(D, "s", 0) is None
    assert await store.floor(D, "s", 100) is None
    assert await store.entries(D, "s", 0, 10) == []


# Each of these stands beside others in some store's key order, or looks like a position.
NEIGHBOURS = [
    "s",
    "s-",
    "s-1",
    "s/",
    "s+",
    "s+q",
    "s 1",
    "s/1",
    "s/1/2",
    "s1",
    "s10",
    "S",
    "sé",
    "s%2F",
    "ss",
    "r",
    "t",
]


async def test_neighbouring_names_do_not_touch_each_other(store: MetadataStore) -> None:
    """Names that are prefixes of one another: what one reads must never be its neighbour's."""
    names = [name for name in NEIGHBOURS if not name.endswith("/")]
    for absent in names:
        assert await store.tail(D, absent) is None
        assert await store.ceiling(D, absent, 0) is None
        assert await store.floor(D, absent, 10**6) is None
        assert await store.entries(D, absent, 0, 5) == []
        size = 1 + len(absent.encode())
        await append_one(store, absent, size, 1, absent.encode())
    for name in names:
        assert await append_one(store, name, 1, 1, b"2") == (2 + len(name.encode()), 2)
        assert [e.value for e in await store.entries(D, name, 0, 9)] == [name.encode(), b"2"]
        assert await store.ceiling(D, name, 10**6) is None
    for name in names:
        await store.put(D, f"{name}/x", b"a key in a directory of that name")
        assert await append_one(store, name, 1, 1, b"3") == (3 + len(name.encode()), 3)


async def test_the_same_name_in_two_domains_is_two_sequences(store: MetadataStore) -> None:
    await append_one(store, "s", 7, 7, b"")
    result = await store.append(D + 1, [NewEntry("s", 1, 1, b"")])
    assert result.entries[0].position == (1, 1)


@pytest.mark.parametrize(
    "entry",
    [
        NewEntry("s", 0, 1, b""),
        NewEntry("s", -1, 1, b""),
        NewEntry("s", 2**31, 1, b""),
        NewEntry("s", 1, -1, b""),
        NewEntry("s", 1, 2**41, b""),
        NewEntry("", 1, 1, b""),
        NewEntry("s/", 1, 1, b""),
        NewEntry("/s", 1, 1, b""),
    ],
    ids=str,
)
async def test_a_malformed_entry_is_refused_whole(store: MetadataStore, entry: NewEntry) -> None:
    with pytest.raises(InvalidRequest):
        await store.append(D, [NewEntry("s", 1, 1, b"good"), entry], [Put("k", b"v")])
    assert await store.tail(D, "s") is None
    assert await store.get(D, "k") is None
    assert await append_one(store, "s", 1, 1, b"later appends are right") == (1, 1)


async def test_a_key_named_twice_is_refused(store: MetadataStore) -> None:
    with pytest.raises(InvalidRequest):
        await store.append(D, [NewEntry("s", 1, 1, b"")], [Put("k", b"1"), Put("k", b"2")])
    assert await store.tail(D, "s") is None


async def test_an_append_at_the_limits_and_one_beyond(store: MetadataStore) -> None:
    most = store.limits.max_operations // store.limits.operations_per_entry
    full = [NewEntry(f"s{i}", 1 + i, i, b"%d" % i) for i in range(most)]
    result = await store.append(D, full)
    assert [a.position for a in result.entries] == [(1 + i, i) for i in range(most)]
    with pytest.raises(TooLarge) as caught:
        await store.append(D, full, [Put(f"k{i}", b"") for i in range(store.limits.operations_per_entry)])
    assert caught.value.limit == store.limits.max_operations
    assert await append_one(store, "s0", 1, 0, b"") == (2, 0)


async def test_an_append_at_the_byte_limit_and_one_beyond(store: MetadataStore) -> None:
    room = store.limits.max_bytes - store.limits.size([NewEntry("s", 1, 1, b"")], [Put("k", b"")], [])
    result = await store.append(
        D, [NewEntry("s", 1, 1, bytes(room // 2))], [Put("k", bytes(room - room // 2))]
    )
    assert result.entries[0].position == (1, 1)
    with pytest.raises(TooLarge):
        await store.append(
            D, [NewEntry("s", 1, 1, bytes(room // 2 + 1))], [Put("k", bytes(room - room // 2))]
        )
    tail = await store.tail(D, "s")
    assert tail is not None
    assert tail.position == (1, 1)


async def test_entries_of_a_mebibyte_come_back(store: MetadataStore) -> None:
    for _ in range(6):
        await append_one(store, "s", 1, 1, b"x" * 2**20)
    assert [len(e.value) for e in await store.entries(D, "s", 0, 10)] == [2**20] * 6


async def test_eight_writers_leave_no_gap_and_no_overlap(backend: Backend) -> None:
    """Offset allocation: eight clients, 200 appends each, over shared streams."""
    writers, appends, streams = 8, 200, 4
    clients = [await backend.open(timeout_s=30) for _ in range(writers)]
    acknowledged: dict[str, list[tuple[int, int, bytes]]] = {f"shared-{i}": [] for i in range(streams)}

    async def write(writer: int) -> None:
        for n in range(appends):
            # Two streams of four, so that every pair of writers meets in some and not in others.
            touched = [f"shared-{(writer + n) % streams}", f"shared-{(writer + n + 1 + n % 2) % streams}"]
            value = b"%d/%d" % (writer, n)
            new = [NewEntry(s, 1 + (writer + n) % 7, n, value) for s in touched]
            result = await clients[writer].append(
                D, new, [Put(f"wal/{writer}-{n}", b"COMMITTED", Expect.ABSENT)]
            )
            for entry, assigned in zip(new, result.entries, strict=True):
                end = assigned.position.end_records
                acknowledged[entry.sequence].append((end - entry.records, end, value))

    await asyncio.gather(*(write(i) for i in range(writers)))
    assert sum(len(a) for a in acknowledged.values()) == writers * appends * 2
    for sequence, claims in acknowledged.items():
        claims.sort()
        assert claims[0][0] == 0
        assert all(before[1] == after[0] for before, after in pairwise(claims))
        for client in clients[:2]:
            read = [(e.position.end_records, e.value) for e in await client.entries(D, sequence, 0, 5000)]
            assert read == [(end, value) for _, end, value in claims]
    for client in clients:
        await client.close()


async def test_a_reader_sees_all_of_an_append_or_nothing(
    store: MetadataStore, another: MetadataStore
) -> None:
    done = asyncio.Event()

    async def write() -> None:
        for _ in range(100):
            await store.append(D, [NewEntry("s", 1, 1, b"first"), NewEntry("s", 1, 1, b"second")])
        done.set()

    async def read() -> None:
        end = 0
        while not done.is_set():
            read = await another.entries(D, "s", 0, 1000)
            assert len(read) % 2 == 0
            assert [e.position.end_records for e in read] == list(range(1, len(read) + 1))
            assert len(read) >= end, "a reader went back"
            end = len(read)
            tail = await another.tail(D, "s")
            assert tail is None or tail.value == b"second"
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        group.create_task(read())
        group.create_task(write())


async def test_concurrent_appends_of_one_client_stay_dense(store: MetadataStore) -> None:
    results = await asyncio.gather(*(append_one(store, "s", 1, 1, b"%d" % i) for i in range(64)))
    assert sorted(position.end_records for position in results) == list(range(1, 65))
    read = await store.entries(D, "s", 0, 100)
    assert {(p, b"%d" % i) for i, p in enumerate(results)} == {(e.position, e.value) for e in read}


async def test_barrier_shows_what_another_client_wrote(store: MetadataStore, another: MetadataStore) -> None:
    for i in range(20):
        await store.put(D, "k", b"%d" % i)
        await append_one(store, "s", 1, 1, b"%d" % i)
        await another.barrier(D)
        record, tail = await another.get(D, "k"), await another.tail(D, "s")
        assert record is not None
        assert tail is not None
        assert record.value == tail.value == b"%d" % i


@pytest.mark.parametrize(
    "call",
    [
        lambda s: s.entries(D, "s", 0, 0),
        lambda s: s.entries(D, "s", 0, -1),
        lambda s: s.tail(-1, "s"),
        lambda s: s.get(2**32, "k"),
        lambda s: s.put(D, "k", b"", 2**63),
        lambda s: s.delete(D, "k", -1),
        lambda s: s.append(D, (), [Put("k", b"", 2**70)]),
        lambda s: s.swap(D, "s", Position(1, 1), 2**70, b"", []),
        lambda s: s.swap(D, "s", Position(2**63, 1), 1, b"", []),
        lambda s: s.scan(D, "d", start="\ud800", limit=1),
        lambda s: s.watch(-1).__aenter__(),
    ],
    ids=range(11),
)
async def test_numbers_and_names_out_of_range_are_refused_everywhere(
    store: MetadataStore, call: Callable[[MetadataStore], Awaitable[object]]
) -> None:
    with pytest.raises(InvalidRequest):
        await call(store)
