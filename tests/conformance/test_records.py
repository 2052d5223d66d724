"""Single records: reads, compare-and-put, compare-and-delete, scans (D-META-01…04, 08, 10, 13)."""

from __future__ import annotations

import asyncio

import pytest

from dray.errors import InvalidRequest, TooLarge, VersionConflict
from dray.metadata.keys import escape, unescape
from dray.metadata.store import Expect, MetadataStore, Put, Record

D = 3
NAUGHTY = ["a/b", "%2F", "ä ö/ü", "日本", "..", "-1", "x\ny", "a" * 249, "~", "__oxia"]


async def test_what_was_put_is_read(store: MetadataStore, another: MetadataStore) -> None:
    version = await store.put(D, "topics/orders", b"v1")
    assert await store.get(D, "topics/orders") == Record("topics/orders", b"v1", version)
    assert await another.get(D, "topics/orders") == Record("topics/orders", b"v1", version)


async def test_absent_is_none_and_other_domains_are_other_records(store: MetadataStore) -> None:
    await store.put(D, "k", b"here")
    assert await store.get(D + 1, "k") is None
    assert await store.get(D, "k/k") is None
    await store.put(D + 1, "k", b"there")
    first, second = await store.get(D, "k"), await store.get(D + 1, "k")
    assert first is not None
    assert first.value == b"here"
    assert second is not None
    assert second.value == b"there"


@pytest.mark.parametrize("value", [b"", b"\x00\xff", b"x" * 2**20], ids=["empty", "binary", "1 MiB"])
async def test_values_come_back_as_they_were(store: MetadataStore, value: bytes) -> None:
    version = await store.put(D, "value", value)
    assert await store.get(D, "value") == Record("value", value, version)


@pytest.mark.parametrize("name", NAUGHTY)
async def test_any_name_can_be_escaped_into_a_key(store: MetadataStore, name: str) -> None:
    """D-KEY-24: group and member ids are chosen by users."""
    assert unescape(escape(name)) == name
    await store.put(D, f"groups/{escape(name)}", name.encode())
    [found] = await store.scan(D, "groups", limit=10)
    assert found.value == name.encode()


@pytest.mark.parametrize("key", ["é/日本", "a b/c+d", "..", "a%2Fb/😀"])
async def test_keys_may_be_unicode_paths(store: MetadataStore, key: str) -> None:
    version = await store.put(D, key, b"x")
    assert await store.get(D, key) == Record(key, b"x", version)


@pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "a\0b", "\ud800", "k" * 5000])
async def test_a_bad_key_is_refused_before_anything_is_sent(store: MetadataStore, key: str) -> None:
    with pytest.raises(InvalidRequest):
        await store.put(D, key, b"x")
    with pytest.raises(InvalidRequest):
        await store.get(D, key)
    with pytest.raises(InvalidRequest):
        await store.delete(D, key)


async def test_a_value_above_the_limit_is_refused_and_nothing_is_written(store: MetadataStore) -> None:
    with pytest.raises(TooLarge) as caught:
        await store.put(D, "big", bytes(store.limits.max_bytes + 1))
    assert caught.value.limit == store.limits.max_bytes
    assert await store.get(D, "big") is None
    await store.put(D, "big", b"small")


async def test_put_if_absent_wins_once(store: MetadataStore, another: MetadataStore) -> None:
    await store.put(D, "k", b"first", Expect.ABSENT)
    with pytest.raises(VersionConflict):
        await another.put(D, "k", b"second", Expect.ABSENT)
    found = await store.get(D, "k")
    assert found is not None
    assert found.value == b"first"


async def test_a_stale_version_is_rejected_and_changes_nothing(store: MetadataStore) -> None:
    stale = await store.put(D, "k", b"1")
    current = await store.put(D, "k", b"2", stale)
    assert current != stale
    with pytest.raises(VersionConflict):
        await store.put(D, "k", b"3", stale)
    with pytest.raises(VersionConflict):
        await store.delete(D, "k", stale)
    assert await store.get(D, "k") == Record("k", b"2", current)


async def test_a_version_is_not_reused_after_delete_and_recreate(store: MetadataStore) -> None:
    old = await store.put(D, "k", b"1")
    assert await store.delete(D, "k") is True
    new = await store.put(D, "k", b"1", Expect.ABSENT)
    assert new != old
    with pytest.raises(VersionConflict):
        await store.put(D, "k", b"2", old)


async def test_put_at_a_version_of_an_absent_key_conflicts(store: MetadataStore) -> None:
    gone = await store.put(D, "k", b"1")
    await store.delete(D, "k", gone)
    with pytest.raises(VersionConflict):
        await store.put(D, "k", b"2", gone)
    assert await store.get(D, "k") is None


async def test_deletes_say_what_they_found(store: MetadataStore) -> None:
    assert await store.delete(D, "k") is False
    assert await store.delete(D, "k", Expect.ABSENT) is False
    version = await store.put(D, "k", b"1")
    with pytest.raises(VersionConflict):
        await store.delete(D, "k", Expect.ABSENT)
    assert await store.delete(D, "k", version) is True
    with pytest.raises(VersionConflict):
        await store.delete(D, "k", version)


async def test_of_many_compare_and_puts_one_wins(store: MetadataStore, another: MetadataStore) -> None:
    version = await store.put(D, "k", b"start")
    attempts = [client.put(D, "k", f"{i}".encode(), version) for i, client in enumerate([store, another] * 8)]
    outcomes = await asyncio.gather(*attempts, return_exceptions=True)
    wins = [i for i, outcome in enumerate(outcomes) if isinstance(outcome, int)]
    assert len(wins) == 1
    assert all(isinstance(o, VersionConflict) for i, o in enumerate(outcomes) if i != wins[0])
    assert await another.get(D, "k") == Record("k", f"{wins[0]}".encode(), outcomes[wins[0]])  # type: ignore[arg-type]


class TestScan:
    async def test_lists_direct_children_in_order_of_their_bytes(self, store: MetadataStore) -> None:
        """X-12: Oxia sorts by depth first; within one directory its order is everybody's."""
        for key in ["a/z", "a/B", "a/é", "a/a", "a/a/deeper", "a+b/x", "a", "ab/x", "b/x", "a/a.b", "a/a-b"]:
            await store.put(D, key, key.encode())
        found = await store.scan(D, "a", limit=100)
        assert [r.key for r in found] == ["a/B", "a/a", "a/a-b", "a/a.b", "a/z", "a/é"]
        assert [r.value for r in found] == [r.key.encode() for r in found]
        assert [r.key for r in await store.scan(D, "a/a", limit=100)] == ["a/a/deeper"]

    async def test_the_top_is_a_directory_too(self, store: MetadataStore) -> None:
        for key in ["cluster", "topics/a", "z"]:
            await store.put(D, key, b"")
        await store.put(D + 1, "elsewhere", b"")
        assert [r.key for r in await store.scan(D, "", limit=10)] == ["cluster", "z"]

    async def test_bounds_are_half_open(self, store: MetadataStore) -> None:
        for name in ["a", "b", "ba", "c", "d"]:
            await store.put(D, f"t/{name}", b"")

        async def names(start: str, end: str | None, limit: int = 10) -> list[str]:
            return [r.key[2:] for r in await store.scan(D, "t", start=start, end=end, limit=limit)]

        assert await names("b", "c") == ["b", "ba"]
        assert await names("b", "c\0") == ["b", "ba", "c"]
        assert await names("bb", None) == ["c", "d"]
        assert await names("", "b") == ["a"]
        assert await names("c", "c") == []
        assert await names("d", "a") == []
        assert await names("", None, limit=2) == ["a", "b"]
        assert await names("b\0", None, limit=2) == ["ba", "c"]

    async def test_absent_directories_are_empty(self, store: MetadataStore) -> None:
        await store.put(D, "t/a", b"")
        assert await store.scan(D, "nothing", limit=10) == []
        assert await store.scan(D, "t/a", limit=10) == []

    async def test_pages_cover_a_large_directory(self, store: MetadataStore) -> None:
        names = [f"{i:05d}" for i in range(2500)]
        for i in range(0, len(names), 100):
            await store.append(D, (), [Put(f"many/{n}", b"v" * 50) for n in names[i : i + 100]])
        seen: list[str] = []
        while page := await store.scan(D, "many", start=seen[-1] + "\0" if seen else "", limit=1000):
            seen += [r.key.removeprefix("many/") for r in page]
        assert seen == names

    @pytest.mark.parametrize(
        ("directory", "start", "end", "limit"),
        [
            ("/t", "", None, 1),
            ("t/", "", None, 1),
            ("t", "a/b", None, 1),
            ("t", "", "a/b", 1),
            ("t", "", None, 0),
        ],
    )
    async def test_a_scan_that_leaves_its_directory_is_refused(
        self, store: MetadataStore, directory: str, start: str, end: str | None, limit: int
    ) -> None:
        with pytest.raises(InvalidRequest):
            await store.scan(D, directory, start=start, end=end, limit=limit)

    async def test_a_scan_is_one_snapshot(self, store: MetadataStore, another: MetadataStore) -> None:
        """Protocol 14 decides on one scan: two records written together are never seen apart."""
        done = asyncio.Event()

        async def write() -> None:
            for i in range(150):
                value = b"%d" % i
                await store.append(D, (), [Put("pair/a", value), Put("pair/m", value), Put("pair/z", value)])
            done.set()

        async def read() -> int:
            scans = 0
            while not done.is_set():
                values = {r.value for r in await another.scan(D, "pair", limit=10)}
                assert len(values) <= 1, values
                scans += 1
                await asyncio.sleep(0)
            return scans

        async with asyncio.TaskGroup() as group:
            reader = group.create_task(read())
            group.create_task(write())
        assert reader.result() > 0
