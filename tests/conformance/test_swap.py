"""Swap: a run of entries becomes one, and no reader ever sees less than the whole."""

from __future__ import annotations

import asyncio

import pytest

from dray.errors import InvalidRequest, TooLarge, VersionConflict
from dray.metadata.store import Entry, MetadataStore, NewEntry, Position

D = 2


def covers(start: int, end: int, name: str) -> bytes:
    return f"{start} {end} {name}".encode()


def live(entries: list[Entry]) -> list[tuple[int, int, str]]:
    """The reader's rule (design §3): an entry is dead when a later one starts at or before its start."""
    parsed = []
    for entry in entries:
        start, end, name = entry.value.decode().split()
        assert int(end) == entry.position.end_records
        parsed.append((int(start), int(end), name))
    return [e for i, e in enumerate(parsed) if not any(later[0] <= e[0] for later in parsed[i + 1 :])]


async def fill(store: MetadataStore, count: int, records: int = 10) -> list[Entry]:
    for i in range(count):
        value = covers(i * records, (i + 1) * records, f"wal{i}")
        await store.append(D, [NewEntry("s", records, 100, value)])
    return await store.entries(D, "s", 0, count)


async def test_a_run_becomes_one_entry_at_its_end(store: MetadataStore, another: MetadataStore) -> None:
    entries = await fill(store, 5)
    gone = [e.position for e in entries[1:3]]
    merged = covers(10, 40, "parquet")
    version = await store.swap(D, "s", entries[3].position, entries[3].version, merged, gone)
    assert version != entries[3].version
    read = await another.entries(D, "s", 0, 10)
    assert read == [entries[0], Entry(Position(40, 400), merged, version), entries[4]]
    assert await another.ceiling(D, "s", 11) == read[1]
    assert await another.floor(D, "s", 39) == entries[0]


async def test_a_swap_up_to_the_tail_leaves_the_end_where_it_was(store: MetadataStore) -> None:
    """The sequence goes on after its older entries were deleted: never again from a lower position."""
    entries = await fill(store, 4)
    tail = entries[-1]
    await store.swap(
        D, "s", tail.position, tail.version, covers(0, 40, "all"), [e.position for e in entries[:-1]]
    )
    assert len(await store.entries(D, "s", 0, 10)) == 1
    result = await store.append(D, [NewEntry("s", 1, 1, covers(40, 41, "next"), expected_start=40)])
    assert result.entries[0].position == (41, 401)
    last = await store.tail(D, "s")
    assert last is not None
    assert last.position == (41, 401)


async def test_a_stale_swap_changes_nothing(store: MetadataStore, another: MetadataStore) -> None:
    entries = await fill(store, 3)
    at, gone = entries[2], [entries[0].position, entries[1].position]
    winner = await another.swap(D, "s", at.position, at.version, covers(20, 30, "resolved"), [])
    before = await store.entries(D, "s", 0, 10)
    with pytest.raises(VersionConflict):
        await store.swap(D, "s", at.position, at.version, covers(0, 30, "lost"), gone)
    assert await store.entries(D, "s", 0, 10) == before
    assert before[2].version == winner


async def test_a_swap_at_a_position_that_is_not_there_changes_nothing(store: MetadataStore) -> None:
    entries = await fill(store, 3)
    for at in [Position(25, 250), Position(30, 301), Position(40, 400)]:
        with pytest.raises(VersionConflict):
            await store.swap(D, "s", at, entries[2].version, b"x", [entries[0].position])
    with pytest.raises(VersionConflict):
        await store.swap(D, "unknown", entries[2].position, entries[2].version, b"x", [])
    assert await store.entries(D, "s", 0, 10) == entries


async def test_the_end_of_a_sequence_cannot_be_swapped_away(store: MetadataStore) -> None:
    entries = await fill(store, 3)
    for position in [entries[1].position, entries[2].position]:
        with pytest.raises(InvalidRequest):
            await store.swap(D, "s", entries[1].position, entries[1].version, b"x", [position])
    assert await store.entries(D, "s", 0, 10) == entries


async def test_a_value_above_the_limit_changes_nothing(store: MetadataStore) -> None:
    entries = await fill(store, 2)
    value = bytes(store.limits.max_bytes + 1)
    with pytest.raises(TooLarge):
        await store.swap(D, "s", entries[1].position, entries[1].version, value, [entries[0].position])
    assert await store.entries(D, "s", 0, 10) == entries


async def test_readers_get_the_same_answer_at_every_intermediate_state(store: MetadataStore) -> None:
    """What a crash between replacing and deleting leaves, in every order the deletes may go (D-INV-09)."""
    entries = await fill(store, 5)
    at = entries[3]
    expected = [(0, 10, "wal0"), (10, 40, "parquet"), (40, 50, "wal4")]
    version = await store.swap(D, "s", at.position, at.version, covers(10, 40, "parquet"), [])
    assert live(await store.entries(D, "s", 0, 10)) == expected
    for gone in [entries[2], entries[1]]:  # and one of them twice: already gone is fine
        for _ in range(2):
            version = await store.swap(
                D, "s", at.position, version, covers(10, 40, "parquet"), [gone.position]
            )
            assert live(await store.entries(D, "s", 0, 10)) == expected
    assert len(await store.entries(D, "s", 0, 10)) == 3


async def test_concurrent_readers_never_see_a_hole(store: MetadataStore, another: MetadataStore) -> None:
    entries = await fill(store, 60)
    done = asyncio.Event()

    async def compact() -> None:
        for i in range(0, 60, 4):
            run = entries[i : i + 4]
            value = covers(i * 10, (i + 4) * 10, "parquet")
            await store.swap(D, "s", run[3].position, run[3].version, value, [e.position for e in run[:3]])
        done.set()

    async def read() -> None:
        while not done.is_set():
            seen = live(await another.entries(D, "s", 0, 100))
            assert [s for s, _, _ in seen] == [0, *[e for _, e, _ in seen][:-1]]
            assert seen[-1][1] == 600
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        group.create_task(read())
        group.create_task(compact())
    assert len(await store.entries(D, "s", 0, 100)) == 15


async def test_a_swap_of_more_entries_than_fit_one_request(store: MetadataStore) -> None:
    count = 1_200
    for i in range(0, count, 50):
        await store.append(
            D, [NewEntry("s", 10, 100, covers(j * 10, j * 10 + 10, "w")) for j in range(i, i + 50)]
        )
    entries = await store.entries(D, "s", 0, count)
    tail = entries[-1]
    value = covers(0, count * 10, "parquet")
    await store.swap(D, "s", tail.position, tail.version, value, [e.position for e in entries[:-1]])
    assert [e.value for e in await store.entries(D, "s", 0, count)] == [value]


async def test_of_two_compactors_one_wins(store: MetadataStore, another: MetadataStore) -> None:
    entries = await fill(store, 6)
    at, gone = entries[5], [e.position for e in entries[:5]]
    outcomes = await asyncio.gather(
        store.swap(D, "s", at.position, at.version, covers(0, 60, "one"), gone),
        another.swap(D, "s", at.position, at.version, covers(0, 60, "two"), gone),
        return_exceptions=True,
    )
    won = ["one", "two"][next(i for i, o in enumerate(outcomes) if isinstance(o, int))]
    assert sum(isinstance(o, VersionConflict) for o in outcomes) == 1
    assert live(await store.entries(D, "s", 0, 10)) == [(0, 60, won)]
