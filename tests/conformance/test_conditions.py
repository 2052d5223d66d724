"""Appends whose expectations fail: the whole append where the store can, each part alone where not."""

from __future__ import annotations

import asyncio

import pytest

from dray.errors import StartConflict, VersionConflict
from dray.metadata.store import Delete, Expect, MetadataStore, NewEntry, Put

D = 1


async def end_of(store: MetadataStore, sequence: str) -> int:
    tail = await store.tail(D, sequence)
    return tail.position.end_records if tail else 0


async def test_conditions_that_hold(store: MetadataStore) -> None:
    at = await store.put(D, "at", b"1")
    goes = await store.put(D, "goes", b"1")
    await store.append(D, [NewEntry("s", 5, 50, b"")])
    result = await store.append(
        D,
        [NewEntry("s", 1, 1, b"a", expected_start=5), NewEntry("s", 2, 2, b"b", expected_start=6)],
        [Put("new", b"n", Expect.ABSENT), Put("at", b"2", at), Put("any", b"a")],
        [Delete("goes", goes), Delete("never was"), Delete("nor this", Expect.ABSENT)],
    )
    assert [a.position.end_records for a in result.entries] == [6, 8]
    assert None not in result.puts
    assert result.deletes == (True, True, True)
    assert await store.get(D, "goes") is None
    values = {r.key: r.value for r in await store.scan(D, "", limit=10)}
    assert values == {"new": b"n", "at": b"2", "any": b"a"}


async def test_a_failed_put_expectation(store: MetadataStore) -> None:
    """Protocol 11: the record of a fenced object. Whoever appends learns that it may not acknowledge."""
    await store.put(D, "wal/o", b"FENCED")
    await store.put(D, "marker/o", b"")
    append = store.append(
        D,
        [NewEntry("s1", 1, 1, b"x"), NewEntry("s2", 1, 1, b"x")],
        [Put("wal/o", b"COMMITTED", Expect.ABSENT), Put("other", b"o")],
        [Delete("marker/o")],
    )
    if store.conditions_abort:
        with pytest.raises(VersionConflict) as caught:
            await append
        assert caught.value.key == "wal/o"
        assert await end_of(store, "s1") == await end_of(store, "s2") == 0
        assert await store.get(D, "other") is None
        assert await store.get(D, "marker/o") is not None
    else:
        result = await append
        assert result.puts[0] is None
        assert result.puts[1] is not None
        assert result.deletes == (True,)
        assert [a.position.end_records for a in result.entries] == [1, 1]
        assert await end_of(store, "s1") == await end_of(store, "s2") == 1
        assert await store.get(D, "other") is not None
        assert await store.get(D, "marker/o") is None
    fenced = await store.get(D, "wal/o")
    assert fenced is not None
    assert fenced.value == b"FENCED"


@pytest.mark.parametrize(
    "case", ["put at a stale version", "delete at a stale version", "delete of a present key"]
)
async def test_other_failed_expectations(store: MetadataStore, case: str) -> None:
    stale = await store.put(D, "k", b"1")
    await store.put(D, "k", b"2")
    puts = [Put("k", b"3", stale)] if case.startswith("put") else []
    expect = Expect.ABSENT if case.endswith("key") else stale
    deletes = [] if puts else [Delete("k", expect)]
    append = store.append(D, [NewEntry("s", 1, 1, b"x")], puts, deletes)
    if store.conditions_abort:
        with pytest.raises(VersionConflict):
            await append
        assert await end_of(store, "s") == 0
    else:
        result = await append
        assert (result.puts, result.deletes) == (((None,), ()) if puts else ((), (False,)))
        assert await end_of(store, "s") == 1
    kept = await store.get(D, "k")
    assert kept is not None
    assert kept.value == b"2"


async def test_a_stale_expected_start(store: MetadataStore, another: MetadataStore) -> None:
    """The writer folded up to 5, then somebody else came in between."""
    await store.append(D, [NewEntry("s", 5, 50, b"")])
    await another.append(D, [NewEntry("s", 2, 20, b"between")])
    append = store.append(
        D, [NewEntry("t", 1, 1, b""), NewEntry("s", 1, 1, b"late", expected_start=5)], [Put("k", b"")]
    )
    if store.conditions_abort:
        with pytest.raises(StartConflict) as caught:
            await append
        assert (caught.value.sequence, caught.value.expected, caught.value.actual) == ("s", 5, 7)
        assert await end_of(store, "s") == 7
        assert await end_of(store, "t") == 0
        assert await store.get(D, "k") is None
    else:
        result = await append
        assert [a.position.end_records for a in result.entries] == [1, 8]
        assert await end_of(store, "s") == 8
    retried = await store.append(D, [NewEntry("s", 1, 1, b"", expected_start=await end_of(store, "s"))])
    assert retried.entries[0].position.end_records == await end_of(store, "s")


@pytest.mark.parametrize("expected_start", [1, 4, 6, 2**40])
async def test_an_expected_start_that_never_was(store: MetadataStore, expected_start: int) -> None:
    await store.append(D, [NewEntry("s", 5, 50, b"")])
    append = store.append(D, [NewEntry("s", 1, 1, b"", expected_start=expected_start)])
    if store.conditions_abort:
        with pytest.raises(StartConflict):
            await append
        assert await end_of(store, "s") == 5
    else:
        assert (await append).entries[0].position.end_records == 6


async def test_a_wrong_start_within_one_append(store: MetadataStore) -> None:
    append = store.append(D, [NewEntry("s", 2, 1, b"", 0), NewEntry("s", 1, 1, b"", 1)])
    if store.conditions_abort:
        with pytest.raises(StartConflict):
            await append
        assert await end_of(store, "s") == 0
    else:
        assert [a.position.end_records for a in (await append).entries] == [2, 3]


async def test_racing_expected_starts_have_one_winner_each(
    store: MetadataStore, another: MetadataStore
) -> None:
    """The optimistic writer loop of design §4.1: a conflict says where the sequence is now."""

    async def write(client: MetadataStore, name: bytes) -> None:
        start = 0
        for _ in range(40):
            while True:
                try:
                    result = await client.append(D, [NewEntry("s", 1, 1, name, start)])
                except StartConflict as conflict:
                    assert conflict.actual > start
                    start = conflict.actual
                else:
                    start = result.entries[0].position.end_records
                    break

    await asyncio.gather(write(store, b"a"), write(another, b"b"))
    read = await store.entries(D, "s", 0, 1000)
    assert [e.position.end_records for e in read] == list(range(1, 81))
    assert sorted(e.value for e in read) == [b"a"] * 40 + [b"b"] * 40
