"""Lists and batched deletes: order, continuation, many keys."""

from __future__ import annotations

import asyncio

import pytest

from dray.errors import InvalidObjectRequest
from dray.objectstore.store import ObjectStore

# In the order of their bytes, which is neither that of directories ("a-b" before "a/b") nor of UTF-16.
ORDERED = ["A", "a-b", "a/a", "a/b-c", "a/b/c", "a/b0", "a0", "b", "z/z/z", "é", "日本", "\uffee", "😀"]


async def put_all(objects: ObjectStore, keys: list[str]) -> None:
    waiting = iter(keys)

    async def put() -> None:
        for key in waiting:
            await objects.put(key, key.encode()[-3:])

    await asyncio.gather(*(put() for _ in range(16)))


async def test_objects_are_listed_in_the_order_of_their_bytes(objects: ObjectStore) -> None:
    await put_all(objects, sorted(ORDERED, reverse=True))
    assert [info.key for info in await objects.list()] == ORDERED
    assert [info.size for info in await objects.list("a/")] == [3, 3, 3, 3]


async def test_a_list_goes_on_where_it_stopped(objects: ObjectStore) -> None:
    await put_all(objects, ORDERED)
    for limit in (1, 2, 5):
        found: list[str] = []
        while page := await objects.list(after=found[-1] if found else "", limit=limit):
            assert len(page) <= limit
            found += [info.key for info in page]
        assert found == ORDERED


async def test_a_prefix_is_one_of_characters(objects: ObjectStore) -> None:
    await put_all(objects, ORDERED)
    expected: dict[str, list[str]] = {
        "a": ["a-b", "a/a", "a/b-c", "a/b/c", "a/b0", "a0"],
        "a/": ["a/a", "a/b-c", "a/b/c", "a/b0"],
        "a/b": ["a/b-c", "a/b/c", "a/b0"],
        "a/b/": ["a/b/c"],
        "a/b/c": ["a/b/c"],
        "a/b/c/": [],
        "日": ["日本"],
        "nothing": [],
        "../": [],
        "/": [],
    }
    for prefix, keys in expected.items():
        assert [info.key for info in await objects.list(prefix)] == keys


async def test_after_need_not_be_a_key(objects: ObjectStore) -> None:
    await put_all(objects, ORDERED)
    expected: dict[str, list[str]] = {
        "a/b-c": ["a/b/c", "a/b0"],
        "a/b": ["a/b-c", "a/b/c", "a/b0"],
        "a/b/": ["a/b/c", "a/b0"],
        "a/b/c/d": ["a/b0"],
        "a/b1": [],
        "A": ["a/a", "a/b-c", "a/b/c", "a/b0"],
        "b": [],
    }
    for after, keys in expected.items():
        assert [info.key for info in await objects.list("a/", after=after)] == keys


async def test_thousands_are_listed_and_deleted(objects: ObjectStore, other_objects: ObjectStore) -> None:
    """More than one page of S3, which is 1000."""
    keys = [f"many/{number % 3}/{number:04}" for number in range(1100)]
    await put_all(objects, keys)
    ordered = sorted(keys)
    assert [info.key for info in await objects.list(limit=1050)] == ordered[:1050]
    assert [info.key for info in await objects.list(limit=3000)] == ordered
    assert [info.key for info in await objects.list(after=ordered[49])] == ordered[50:1050]
    assert await objects.delete_many(keys[:-1]) == {}
    assert [info.key for info in await other_objects.list()] == keys[-1:]


async def test_a_senseless_list_is_refused(objects: ObjectStore) -> None:
    for prefix, after, limit in [("a\0", "", 1), ("", "\0", 1), ("", "", 0), ("", "", -1)]:
        with pytest.raises(InvalidObjectRequest):
            await objects.list(prefix, after=after, limit=limit)
