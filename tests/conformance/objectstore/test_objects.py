"""Puts, gets, ranges, heads and deletes, as every object store keeps them."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from dray.errors import (
    InvalidObjectRequest,
    ObjectExists,
    ObjectNotFound,
    ObjectStoreUnavailable,
    ObjectTooShort,
)
from dray.objectstore.health import Health
from dray.objectstore.store import ObjectStore

MIB = 2**20
# Puts in parts begin above 16 MiB; one byte into the third part.
SEVERAL_PARTS = 16 * MIB + 1

NAMES = [
    "wal/v1/zone=a/domain=3/date=2026/11/18/0123.wo",
    "with space/and+plus",
    "per%cent/%2F/100%",
    "é/日本/😀",
    "quo'te\"s/<&>;:?#[]@!$()*,~`^|\\{}",
    "..a/b../...",
    "line\nbreak",
    "-",
    ".hidden/.file",
    "s" * 255,
]
BAD_NAMES = [
    "",
    "/a",
    "a/",
    "a//b",
    "..",
    "a/../b",
    "../a",
    "a/..",
    ".",
    "a/./b",
    "a\0b",
    "\ud800",
    "s" * 256,
    "a/" * 512 + "b",
    ".dray-staging/x",
]


def noise(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


@pytest.mark.parametrize(
    "size",
    [0, 1, 8 * MIB, 16 * MIB, SEVERAL_PARTS],
    ids=["empty", "1 byte", "8 MiB", "16 MiB", "several parts"],
)
async def test_what_was_put_is_read(objects: ObjectStore, other_objects: ObjectStore, size: int) -> None:
    body = noise(size)
    await objects.put("a/b", body)
    assert await other_objects.get("a/b") == body
    assert (await other_objects.head("a/b")).size == size


@pytest.mark.parametrize("size", [100, SEVERAL_PARTS], ids=["whole", "several parts"])
async def test_any_buffer_can_be_put(objects: ObjectStore, size: int) -> None:
    body = noise(size)
    await objects.put("bytearray", bytearray(body))
    await objects.put("memoryview", memoryview(b"before" + body + b"after")[6:-5])
    assert await objects.get("bytearray") == body
    assert await objects.get("memoryview") == body


async def test_names_are_kept_as_they_are(objects: ObjectStore) -> None:
    for key in NAMES:
        await objects.put(key, key.encode(), if_absent=True)
        assert await objects.get(key) == key.encode()
        assert await objects.get_range(key, 0, 1) == key.encode()[:1]
        assert (await objects.head(key)).key == key
        assert [info.key for info in await objects.list()] == [key]
        assert await objects.delete_many([key]) == {}
        assert await objects.list() == []


async def test_a_bad_key_is_refused_by_every_call(objects: ObjectStore) -> None:
    for key in BAD_NAMES:
        for call in (
            objects.put(key, b"x"),
            objects.get(key),
            objects.get_range(key, 0, 1),
            objects.get_ranges(key, [(0, 1)]),
            objects.head(key),
            objects.delete(key),
            objects.delete_many(["good", key]),
        ):
            with pytest.raises(InvalidObjectRequest):
                await call
    assert await objects.list() == []


async def test_an_absent_object_is_not_found(objects: ObjectStore) -> None:
    await objects.put("a/b", b"x")
    for key in ("nothing", "a", "a/bb", "a/b/c"):
        for call in (objects.get(key), objects.get_range(key, 0, 1), objects.head(key)):
            with pytest.raises(ObjectNotFound) as caught:
                await call
            assert caught.value.key == key


async def test_the_time_of_a_put_is_known(objects: ObjectStore) -> None:
    before_ms = time.time() * 1000
    await objects.put("k", b"x")
    head = await objects.head("k")
    [listed] = await objects.list()
    for info in (head, listed):
        assert before_ms - 2000 <= info.modified_ms <= time.time() * 1000 + 2000


async def test_a_range_is_exact(objects: ObjectStore) -> None:
    await objects.put("k", b"0123456789")
    for start in range(10):
        for end in range(start + 1, 11):
            assert await objects.get_range("k", start, end) == b"0123456789"[start:end]


async def test_a_range_beyond_the_end_says_so(objects: ObjectStore) -> None:
    """S3 answers what there is of it; a caller that decodes it would take that for the whole."""
    await objects.put("k", b"0123456789")
    await objects.put("empty", b"")
    for start, end in [(0, 11), (9, 11), (10, 11), (11, 12), (100, 200)]:
        with pytest.raises(ObjectTooShort, match=f"bytes {start} to {end}"):
            await objects.get_range("k", start, end)
        with pytest.raises(ObjectTooShort):
            await objects.get_ranges("k", [(0, 1), (start, end)])
    with pytest.raises(ObjectTooShort):
        await objects.get_range("empty", 0, 1)


async def test_a_clipped_range_ends_with_the_object(objects: ObjectStore) -> None:
    """For who reads blocks and does not know where the object ends."""
    await objects.put("k", b"0123456789")
    for start in range(10):
        for end in (start + 1, 9, 10, 11, 1000, 2**40):
            if start < end:
                assert await objects.get_range("k", start, end, clip=True) == b"0123456789"[start:end]


async def test_a_clipped_range_has_at_least_one_byte(objects: ObjectStore) -> None:
    await objects.put("k", b"0123456789")
    await objects.put("empty", b"")
    for key, start in [("k", 10), ("k", 11), ("k", 100), ("empty", 0), ("empty", 1)]:
        with pytest.raises(ObjectTooShort, match=f"bytes {start} to 1000"):
            await objects.get_range(key, start, 1000, clip=True)
    with pytest.raises(ObjectNotFound):
        await objects.get_range("nothing", 0, 1000, clip=True)
    for start, end in [(0, 0), (5, 4), (-1, 4)]:
        with pytest.raises(InvalidObjectRequest):
            await objects.get_range("k", start, end, clip=True)


async def test_a_range_that_is_none_is_refused(objects: ObjectStore) -> None:
    await objects.put("k", b"0123456789")
    for start, end in [(0, 0), (5, 5), (5, 4), (-1, 4), (-5, -1)]:
        with pytest.raises(InvalidObjectRequest):
            await objects.get_range("k", start, end)
        with pytest.raises(InvalidObjectRequest):
            await objects.get_ranges("k", [(0, 1), (start, end)])


async def test_several_ranges_come_in_the_order_asked_for(objects: ObjectStore) -> None:
    body = noise(3 * MIB)
    await objects.put("k", body)
    ranges = [
        (3 * MIB - 1, 3 * MIB),
        (0, 10),
        (10, 20),  # adjacent
        (5, 15),  # overlapping
        (2 * MIB, 2 * MIB + 100),  # far
        (0, 10),  # twice
        (100_000, 100_010),  # near
    ]
    assert await objects.get_ranges("k", ranges) == [body[start:end] for start, end in ranges]
    assert await objects.get_ranges("k", []) == []


@pytest.mark.parametrize("size", [1000, SEVERAL_PARTS], ids=["whole", "several parts"])
async def test_of_many_puts_if_absent_one_wins(
    objects: ObjectStore, other_objects: ObjectStore, size: int
) -> None:
    writers = 40 if size == 1000 else 4
    bodies = [noise(size, seed) for seed in range(writers)]

    async def put(number: int) -> int | None:
        try:
            await (objects, other_objects)[number % 2].put("k", bodies[number], if_absent=True)
        except ObjectExists as error:
            assert error.key == "k"
            return None
        return number

    outcomes = await asyncio.gather(*(put(number) for number in range(writers)))
    [winner] = [outcome for outcome in outcomes if outcome is not None]
    assert await objects.get("k") == bodies[winner]


async def test_put_if_absent_changes_nothing(objects: ObjectStore) -> None:
    await objects.put("k", b"first")
    with pytest.raises(ObjectExists):
        await objects.put("k", b"first", if_absent=True)
    with pytest.raises(ObjectExists):
        await objects.put("k", noise(SEVERAL_PARTS), if_absent=True)
    assert await objects.get("k") == b"first"
    await objects.delete("k")
    await objects.put("k", b"second", if_absent=True)
    assert await objects.get("k") == b"second"


async def test_readers_of_an_overwritten_object_get_the_old_or_the_new(
    objects: ObjectStore, other_objects: ObjectStore
) -> None:
    bodies = [b"a" * MIB, b"b" * (MIB // 2)]
    await objects.put("k", bodies[0])
    writing = True

    async def read() -> int:
        reads = 0
        while writing:
            assert await other_objects.get("k") in bodies
            assert len(set(await other_objects.get_range("k", 1000, 100_000))) == 1
            reads += 1
        return reads

    readers = [asyncio.create_task(read()) for _ in range(3)]
    for number in range(20):
        await objects.put("k", bodies[number % 2])
    writing = False
    assert all(await asyncio.gather(*readers))


async def test_a_cancelled_put_leaves_the_whole_or_nothing(objects: ObjectStore) -> None:
    body = noise(2 * MIB)

    async def put_and_cancel(number: int) -> None:
        put = asyncio.create_task(objects.put(f"cancelled/{number:02}", body))
        for _ in range(number * 3):
            await asyncio.sleep(0)
        put.cancel()
        await asyncio.wait([put])

    await asyncio.gather(*(put_and_cancel(number) for number in range(20)))
    await objects.put("cancelled/replaced", b"old")
    put = asyncio.create_task(objects.put("cancelled/replaced", body))
    await asyncio.sleep(0)
    put.cancel()
    await asyncio.wait([put])

    for info in await objects.list("cancelled/"):
        assert await objects.get(info.key) in (body, b"old")
    await objects.put("after", b"works")
    assert await objects.get("after") == b"works"


async def test_deleting_what_is_absent_is_no_error(objects: ObjectStore) -> None:
    await objects.put("a/b", b"x")
    await objects.delete("a/b")
    await objects.delete("a/b")
    await objects.delete("never/was")
    with pytest.raises(ObjectNotFound):
        await objects.get("a/b")
    assert await objects.delete_many(["a/b", "never/was"]) == {}
    assert await objects.delete_many([]) == {}


async def test_a_used_store_is_healthy(objects: ObjectStore) -> None:
    await objects.check()
    for _ in range(5):
        with pytest.raises(ObjectNotFound):
            await objects.get("missing")
    assert objects.health is Health.HEALTHY


async def test_a_closed_store_answers_nothing(objects: ObjectStore) -> None:
    await objects.put("k", b"x")
    await objects.close()
    await objects.close()
    for call in (
        objects.put("k", b"x"),
        objects.get("k"),
        objects.get_range("k", 0, 1),
        objects.head("k"),
        objects.delete("k"),
        objects.list(),
        objects.check(),
    ):
        with pytest.raises(ObjectStoreUnavailable):
            await call
