"""The change feed: complete from the subscription on, or a gap is announced (D-META-06, D-META-12)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from dray.metadata.feed import Feed
from dray.metadata.store import (
    Change,
    Changes,
    Delete,
    EntryChange,
    Expect,
    Gap,
    KeyChange,
    MetadataStore,
    NewEntry,
    Position,
    Put,
    Watch,
)
from tests.conformance.backends import Network, ServerBackend
from tests.servers.proxy import Mode

D = 4


async def until(watch: Watch, enough: Callable[[list[Change]], bool]) -> list[Change]:
    """Changes up to and including the one that is enough; a gap is a failure."""
    seen: list[Change] = []
    async with asyncio.timeout(20):
        while not enough(seen):
            event = await anext(aiter(watch))
            assert isinstance(event, Changes), "no gap was expected"
            seen += event.changes
    return seen


def mentions(key: str) -> Callable[[list[Change]], bool]:
    return lambda seen: any(isinstance(c, KeyChange) and c.key == key for c in seen)


async def test_every_kind_of_change_is_named(store: MetadataStore, another: MetadataStore) -> None:
    async with store.watch(D) as watch:
        first = await another.put(D, "k", b"1")
        second = await another.put(D, "k", b"2")
        await another.delete(D, "k")
        [assigned] = (await another.append(D, [NewEntry("s", 3, 30, b"")])).entries
        [more] = (await another.append(D, [NewEntry("s", 1, 10, b"")])).entries
        replaced = await another.swap(D, "s", more.position, more.version, b"", [assigned.position])
        await another.put(D, "end", b"")
        seen = await until(watch, mentions("end"))
    assert seen[:5] == [
        KeyChange("k", first),
        KeyChange("k", second),
        KeyChange("k", None),
        EntryChange("s", Position(3, 30), assigned.version),
        EntryChange("s", Position(4, 40), more.version),
    ]
    assert set(seen[5:-1]) == {
        EntryChange("s", Position(4, 40), replaced),
        EntryChange("s", Position(3, 30), None),
    }


async def test_an_append_arrives_whole(store: MetadataStore, another: MetadataStore) -> None:
    """Protocol 12 relies on seeing an object's record together with its entries."""
    marker = await another.put(D, "marker", b"")
    async with store.watch(D) as watch:
        result = await another.append(
            D,
            [NewEntry("s1", 1, 1, b""), NewEntry("s2", 2, 2, b"")],
            [Put("wal/o", b"", Expect.ABSENT)],
            [Delete("marker")],
        )
        async for event in watch:
            assert isinstance(event, Changes)
            if event.changes != (KeyChange("marker", marker),):  # from before the watch: may come, or not
                break
    assert isinstance(event, Changes)
    assert set(event.changes) == {
        EntryChange("s1", Position(1, 1), result.entries[0].version),
        EntryChange("s2", Position(2, 2), result.entries[1].version),
        KeyChange("wal/o", result.puts[0]),
        KeyChange("marker", None),
    }


async def test_only_the_watched_domain_and_prefix(store: MetadataStore, another: MetadataStore) -> None:
    async with store.watch(D) as everything, store.watch(D, "groups/a") as some, store.watch(D + 1) as other:
        await another.put(D + 1, "groups/a", b"")
        await another.append(
            D, [NewEntry("groups/a", 1, 1, b"")], [Put("topics/x", b""), Put("groups/b", b"")]
        )
        await another.put(D, "groups/a1/deeper", b"")
        await another.put(D, "groups/a", b"")
        await another.put(D + 1, "end", b"")
        assert [c.key for c in await until(some, mentions("groups/a")) if isinstance(c, KeyChange)] == [
            "groups/a1/deeper",
            "groups/a",
        ]
        assert len(await until(everything, mentions("groups/a"))) == 5
        assert len(await until(other, mentions("end"))) == 2


async def test_failed_writes_are_not_announced(store: MetadataStore) -> None:
    before = await store.put(D, "k", b"")
    async with store.watch(D) as watch:
        for attempt in (store.put(D, "k", b"x", Expect.ABSENT), store.delete(D, "k", 10**9)):
            await asyncio.gather(attempt, return_exceptions=True)
        await store.delete(D, "absent")
        await store.put(D, "end", b"")
        seen = await until(watch, mentions("end"))
    # What was written before the watch may be told, or not.
    assert len([change for change in seen if change != KeyChange("k", before)]) == 1


async def test_many_writers_nothing_missed(store: MetadataStore, another: MetadataStore) -> None:
    async with store.watch(D) as watch:

        async def write(client: MetadataStore, name: str) -> set[Change]:
            made: set[Change] = set()
            for i in range(100):
                result = await client.append(D, [NewEntry(f"s{i % 3}", 1, 1, b"")], [Put(f"{name}/{i}", b"")])
                made |= {
                    EntryChange(f"s{i % 3}", result.entries[0].position, result.entries[0].version),
                    KeyChange(f"{name}/{i}", result.puts[0]),
                }
            return made

        made = set.union(*await asyncio.gather(write(store, "a"), write(another, "b")))
        seen = await until(watch, lambda seen: len(seen) >= len(made))
    assert set(seen) == made
    for sequence in ("s0", "s1", "s2"):
        ends = [c.position.end_records for c in seen if isinstance(c, EntryChange) and c.sequence == sequence]
        assert ends == sorted(ends), "changes of one sequence arrive in their order"


async def test_watches_that_end_together(store: MetadataStore, another: MetadataStore) -> None:
    """And one that goes on."""
    together = asyncio.Barrier(12)

    async def watch(domain: int) -> None:
        async with store.watch(domain):
            await together.wait()

    async with asyncio.timeout(20), store.watch(D) as left:
        await asyncio.gather(*(watch(domain % 6) for domain in range(12)))
        await another.put(D, "end", b"")
        await until(left, mentions("end"))


async def test_closing_the_store_ends_the_watch(store: MetadataStore, another: MetadataStore) -> None:
    async with another.watch(D) as watch:
        await another.close()
        async with asyncio.timeout(5):
            assert [event async for event in watch] == []


async def test_a_reader_that_falls_behind_gets_a_gap() -> None:
    """The bound is the feed's, the same for every store."""
    feed = Feed(max_pending=10)
    changes = tuple(KeyChange(f"{i}", i) for i in range(4))
    for _ in range(3):
        feed.offer(changes)
    feed.offer((KeyChange("after", 1),))
    assert await anext(feed) == Gap()
    assert await anext(feed) == Changes((KeyChange("after", 1),))


async def test_a_watch_goes_on_after_cuts(server_backend: ServerBackend, network: Network) -> None:
    writer = await server_backend.open()
    reader = await server_backend.open_through(network)
    async with reader.watch(D) as watch:
        for i in range(30):
            await writer.append(D, [NewEntry("s", 1, 1, b"%d" % i)])
            if i % 7 == 3:
                network.cut()
        await writer.put(D, "end", b"")
        seen = await until(watch, mentions("end"))
    ends = [c.position.end_records for c in seen if isinstance(c, EntryChange)]
    assert ends == list(range(1, 31))
    await reader.close()
    await writer.close()


async def test_a_watch_goes_on_after_a_black_hole(server_backend: ServerBackend, network: Network) -> None:
    writer = await server_backend.open()
    reader = await server_backend.open_through(network)
    async with reader.watch(D) as watch:
        await writer.put(D, "before", b"")
        await until(watch, mentions("before"))
        for proxy in network.each():
            await proxy.set_mode(Mode.BLACK_HOLE)
        for i in range(10):
            await writer.append(D, [NewEntry("s", 1, 1, b"%d" % i)])
        for proxy in network.each():
            await proxy.set_mode(Mode.PASS)
        await writer.put(D, "end", b"")
        seen = await until(watch, mentions("end"))
    assert [c.position.end_records for c in seen if isinstance(c, EntryChange)] == list(range(1, 11))
    await reader.close()
    await writer.close()
