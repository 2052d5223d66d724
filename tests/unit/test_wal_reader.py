"""The reader's cache: one GET per block, a bound that holds, and bytes that are those of the object."""

from __future__ import annotations

import asyncio
import gc
import random
import tracemalloc
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dray.errors import (
    DamagedWal,
    InvalidObjectRequest,
    ObjectNotFound,
    ObjectStoreError,
    ObjectStoreUnavailable,
)
from dray.objectstore.memory import MemoryObjectStore
from dray.objectstore.opening import open_object_store
from dray.objectstore.store import ObjectStore
from dray.wal.reader import WalReader

B = 1_000  # bytes of a block
AROUND = 1_024  # what a unit weighs beside its bytes


class Gets:
    """Passes ranges on to a store when the test lets it, and remembers them. The reader asks nothing else."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._go_on = asyncio.Event()
        self._go_on.set()
        self._changed = asyncio.Condition()
        self._idle = asyncio.Event()
        self.asked: list[tuple[str, int, int]] = []
        self.under_way: list[tuple[str, int, int]] = []
        self.fails: list[ObjectStoreError] = []  # one for each of the next GETs
        self.on_change: Callable[[], None] = lambda: None

    async def get_range(self, key: str, start: int, end: int, *, clip: bool = False) -> bytes:
        asked = key, start, end
        self.asked.append(asked)
        self.under_way.append(asked)
        self._idle.clear()
        self.on_change()
        try:
            async with self._changed:
                self._changed.notify_all()
            await self._go_on.wait()
            if self.fails:
                raise self.fails.pop(0)
            return await self._objects.get_range(key, start, end, clip=clip)
        finally:
            self.under_way.remove(asked)
            if not self.under_way:
                self._idle.set()

    def hold(self) -> None:
        self._go_on.clear()

    def let_go(self) -> None:
        self._go_on.set()

    async def wait_for(self, count: int) -> None:
        """Return when so many are under way."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.under_way) >= count)

    async def wait_for_the_end(self) -> None:
        """Return when none is under way, and what they brought has been taken in."""
        await settle()
        if self.under_way:
            await self._idle.wait()
        await settle()

    def blocks(self) -> list[tuple[int, int]]:
        """What was asked for, in blocks."""
        return [(start // B, end // B) for _, start, end in self.asked]


def noise(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


@pytest.fixture(params=["memory", "file"])
async def objects(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ObjectStore]:
    opened = (
        MemoryObjectStore() if request.param == "memory" else await open_object_store(f"file://{tmp_path}/o")
    )
    yield opened
    await opened.close()


@pytest.fixture
def gets(objects: ObjectStore) -> Gets:
    return Gets(objects)


def make_reader(gets: Gets, cache_bytes: int = 10**6, max_reads: int = 8) -> WalReader:
    return WalReader(gets, cache_bytes=cache_bytes, block_bytes=B, max_reads=max_reads)  # type: ignore[arg-type]  # it is all that the reader uses


@pytest.fixture
async def reader(gets: Gets) -> AsyncIterator[WalReader]:
    made = make_reader(gets)
    yield made
    await made.close()


async def settle() -> None:
    """Let everything run that can."""
    for _ in range(20):
        await asyncio.sleep(0)


class TestBytes:
    async def test_any_range_is_that_of_the_object(
        self, objects: ObjectStore, gets: Gets, reader: WalReader
    ) -> None:
        body = noise(3 * B + 17)
        await objects.put("o", body)
        edges = [0, 1, B - 1, B, B + 1, 2 * B, 3 * B - 1, 3 * B, 3 * B + 16, 3 * B + 17]
        for start in edges:
            for end in edges:
                if start < end:
                    assert b"".join(await reader.read("o", start, end)) == body[start:end]
                    assert b"".join(reader.try_read("o", start, end) or []) == body[start:end]
        assert gets.blocks() == [(0, 1), (1, 2), (2, 3), (3, 4)]

    async def test_pieces_are_slices_of_what_came(self, objects: ObjectStore, reader: WalReader) -> None:
        await objects.put("o", noise(3 * B))
        [first] = await reader.read("o", 0, 3 * B)
        [second] = await reader.read("o", B + 1, 2 * B + 1)
        assert second.obj is first.obj
        assert second.readonly

    async def test_try_read_reads_nothing(self, objects: ObjectStore, gets: Gets, reader: WalReader) -> None:
        await objects.put("o", noise(3 * B))
        assert reader.try_read("o", 0, 1) is None
        await reader.read("o", 0, 1)
        assert reader.try_read("o", 0, B + 1) is None
        assert reader.try_read("o", 0, B) is not None
        assert gets.blocks() == [(0, 1)]

    async def test_a_range_that_is_none_is_refused(self, reader: WalReader) -> None:
        reader.add("own", noise(100))
        for path in ("own", "o"):
            for start, end in [(0, 0), (5, 4), (-1, 4), (-5, -1)]:
                with pytest.raises(InvalidObjectRequest):
                    await reader.read(path, start, end)
                with pytest.raises(InvalidObjectRequest):
                    reader.try_read(path, start, end)
                with pytest.raises(InvalidObjectRequest):
                    reader.prefetch(path, start, end)


class TestOwnObjects:
    async def test_they_need_no_get(self, gets: Gets, reader: WalReader) -> None:
        body = noise(5 * B + 3)
        reader.add("o", bytearray(body))
        for start, end in [(0, 1), (B - 1, 3 * B), (0, 5 * B + 3)]:
            [piece] = await reader.read("o", start, end)
            assert piece == body[start:end]
            assert piece.readonly
            assert reader.try_read("o", start, end) == [piece]
        reader.prefetch("o", 0, 5 * B + 3)
        await settle()
        assert gets.asked == []

    async def test_one_that_gave_way_is_read_from_the_store(self, objects: ObjectStore, gets: Gets) -> None:
        reader = make_reader(gets, cache_bytes=2 * (3 * B + AROUND))
        body = noise(3 * B)
        await objects.put("0", body)
        for number in range(3):
            reader.add(f"{number}", body)
        assert reader.try_read("0", 0, 1) is None
        assert reader.try_read("1", 0, 1) is not None
        assert b"".join(await reader.read("0", 0, 3 * B)) == body
        assert len(gets.asked) == 3  # a cache this small reads single blocks

    async def test_what_does_not_fit_pushes_nothing_out(self, gets: Gets) -> None:
        reader = make_reader(gets, cache_bytes=5 * B)
        reader.add("small", noise(B))
        reader.add("large", noise(5 * B))
        assert reader.try_read("small", 0, B) is not None
        assert reader.try_read("large", 0, B) is None

    async def test_small_ones_weigh_what_they_take(self, gets: Gets) -> None:
        """An idle broker's objects have a few hundred bytes; their bookkeeping must not outgrow them."""
        count = 2_000
        bodies = [noise(100, seed) for seed in range(count)]
        paths = [f"wal/v1/zone=a/domain=3/date=2026/11/18/{number:032x}.wo" for number in range(count)]
        reader = make_reader(gets, cache_bytes=10**8)
        tracemalloc.start()
        for path, body in zip(paths, bodies, strict=True):
            reader.add(path + "", bytes(bytearray(body)))
        taken, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert taken + sum(len(path) + 49 for path in paths) <= reader.size_bytes


class TestSingleFlight:
    async def test_fifty_readers_are_one_get(
        self, objects: ObjectStore, gets: Gets, reader: WalReader
    ) -> None:
        body = noise(B)
        await objects.put("o", body)
        gets.hold()
        reads = [asyncio.create_task(reader.read("o", at, B)) for at in range(50)]
        await gets.wait_for(1)
        await settle()
        gets.let_go()
        for at, pieces in enumerate(await asyncio.gather(*reads)):
            assert b"".join(pieces) == body[at:]
        assert len(gets.asked) == 1

    async def test_overlapping_reads_wait_for_each_others_blocks(
        self, objects: ObjectStore, gets: Gets, reader: WalReader
    ) -> None:
        body = noise(6 * B)
        await objects.put("o", body)
        gets.hold()
        ranges = [(2 * B, 3 * B), (B + 1, 5 * B), (0, 6 * B)]
        reads = [asyncio.create_task(reader.read("o", start, end)) for start, end in ranges]
        await settle()
        gets.let_go()
        for (start, end), read in zip(ranges, reads, strict=True):
            assert b"".join(await read) == body[start:end]
        assert gets.blocks() == [(2, 3), (1, 2), (3, 5), (0, 1), (5, 6)]

    async def test_a_cancelled_reader_cancels_no_other(
        self, objects: ObjectStore, gets: Gets, reader: WalReader
    ) -> None:
        body = noise(B)
        await objects.put("o", body)
        gets.hold()
        first, second = (asyncio.create_task(reader.read("o", 0, B)) for _ in range(2))
        await gets.wait_for(1)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        gets.let_go()
        assert b"".join(await second) == body
        assert len(gets.asked) == 1

    async def test_a_get_that_nobody_waits_for_fills_the_cache(
        self, objects: ObjectStore, gets: Gets, reader: WalReader
    ) -> None:
        await objects.put("o", noise(B))
        gets.hold()
        read = asyncio.create_task(reader.read("o", 0, B))
        await gets.wait_for(1)
        read.cancel()
        await asyncio.wait([read])
        gets.let_go()
        assert b"".join(await reader.read("o", 0, B)) == noise(B)
        assert len(gets.asked) == 1

    async def test_a_get_that_nobody_waits_for_does_not_begin(self, objects: ObjectStore, gets: Gets) -> None:
        reader = make_reader(gets, max_reads=1)
        for name in "abc":
            await objects.put(name, noise(B))
        gets.hold()
        reads = [asyncio.create_task(reader.read(name, 0, B)) for name in "abc"]
        await gets.wait_for(1)
        reads[1].cancel()
        await asyncio.wait([reads[1]])
        gets.let_go()
        await asyncio.gather(reads[0], reads[2])
        assert [name for name, _, _ in gets.asked] == ["a", "c"]
        assert b"".join(await reader.read("b", 0, B)) == noise(B)

    async def test_an_error_goes_to_all_and_is_not_remembered(
        self, objects: ObjectStore, gets: Gets, reader: WalReader
    ) -> None:
        await objects.put("o", noise(B))
        gets.fails.append(ObjectStoreUnavailable("on purpose"))
        gets.hold()
        reads = [asyncio.create_task(reader.read("o", 0, B)) for _ in range(5)]
        await gets.wait_for(1)
        gets.let_go()
        for outcome in await asyncio.gather(*reads, return_exceptions=True):
            assert isinstance(outcome, ObjectStoreUnavailable)
        assert reader.size_bytes == 0
        assert b"".join(await reader.read("o", 0, B)) == noise(B)
        assert len(gets.asked) == 2

    async def test_one_of_several_gets_that_fails_fails_the_read_at_once(
        self, objects: ObjectStore, gets: Gets, reader: WalReader
    ) -> None:
        await objects.put("o", noise(3 * B))
        await reader.read("o", B, 2 * B)
        gets.hold()
        read = asyncio.create_task(reader.read("o", 0, 3 * B))
        await gets.wait_for(2)
        gets.fails.append(ObjectStoreUnavailable("on purpose"))
        gets.let_go()
        with pytest.raises(ObjectStoreUnavailable):
            await read
        assert b"".join(await reader.read("o", 0, 3 * B)) == noise(3 * B)

    async def test_an_absent_object_is_asked_for_each_time(
        self, objects: ObjectStore, gets: Gets, reader: WalReader
    ) -> None:
        for _ in range(2):
            with pytest.raises(ObjectNotFound):
                await reader.read("o", 0, B)
        await objects.put("o", noise(B))
        assert b"".join(await reader.read("o", 0, B)) == noise(B)
        assert len(gets.asked) == 3


class TestMerging:
    async def test_adjacent_blocks_are_one_get(self, objects: ObjectStore) -> None:
        """8 MiB at most, in a cache that is large enough for 16 such."""
        mib = 2**20
        body = noise(10 * mib)
        await objects.put("o", body)
        gets = Gets(objects)
        reader = WalReader(gets, cache_bytes=128 * mib)  # type: ignore[arg-type]
        assert b"".join(await reader.read("o", mib + 5, 10 * mib)) == body[mib + 5 :]
        assert gets.asked == [("o", mib, 9 * mib), ("o", 9 * mib, 10 * mib)]

    async def test_only_missing_blocks_are_read(
        self, objects: ObjectStore, gets: Gets, reader: WalReader
    ) -> None:
        body = noise(7 * B)
        await objects.put("o", body)
        await reader.read("o", 2 * B, 4 * B)
        await reader.read("o", 6 * B, 7 * B)
        assert b"".join(await reader.read("o", 0, 7 * B)) == body
        assert gets.blocks() == [(2, 4), (6, 7), (0, 2), (4, 6)]

    async def test_gets_of_one_read_run_at_once_up_to_the_limit(
        self, objects: ObjectStore, gets: Gets
    ) -> None:
        reader = make_reader(gets, cache_bytes=7 * (B + AROUND), max_reads=4)  # single blocks
        await objects.put("o", noise(10 * B))
        gets.hold()
        read = asyncio.create_task(reader.read("o", 0, 10 * B))
        await gets.wait_for(4)
        await settle()
        assert len(gets.under_way) == 4
        gets.let_go()
        assert b"".join(await read) == noise(10 * B)
        assert len(gets.asked) == 10


class TestBound:
    async def test_what_was_used_longest_ago_gives_way(self, objects: ObjectStore, gets: Gets) -> None:
        reader = make_reader(gets, cache_bytes=3 * (B + AROUND))
        for name in "abcd":
            await objects.put(name, noise(B))
        for name in "abcad":
            await reader.read(name, 0, B)
        assert [name for name in "abcd" if reader.try_read(name, 0, B)] == ["a", "c", "d"]
        assert reader.size_bytes == 3 * (B + AROUND)

    async def test_what_a_caller_has_stays(self, objects: ObjectStore, gets: Gets) -> None:
        reader = make_reader(gets, cache_bytes=B + AROUND)
        await objects.put("a", noise(B, 1))
        await objects.put("b", noise(B, 2))
        [a] = await reader.read("a", 0, B)
        [b] = await reader.read("b", 0, B)
        assert reader.try_read("a", 0, B) is None
        assert [bytes(a), bytes(b)] == [noise(B, 1), noise(B, 2)]

    async def test_a_get_waits_while_all_is_being_read(self, objects: ObjectStore, gets: Gets) -> None:
        reader = make_reader(gets, cache_bytes=2 * (B + AROUND))
        for name in "abc":
            await objects.put(name, noise(B))
        gets.hold()
        reads = [asyncio.create_task(reader.read(name, 0, B)) for name in "abc"]
        await gets.wait_for(2)
        await settle()
        assert len(gets.under_way) == 2
        reader.add("own", noise(1))
        assert reader.try_read("own", 0, 1) is None  # no room, and adding does not wait
        gets.let_go()
        await asyncio.gather(*reads)
        assert len(gets.asked) == 3

    async def test_a_read_larger_than_the_cache_is_whole(self, objects: ObjectStore, gets: Gets) -> None:
        reader = make_reader(gets, cache_bytes=2 * (B + AROUND))
        await objects.put("o", noise(9 * B))
        assert b"".join(await reader.read("o", 3, 9 * B)) == noise(9 * B)[3:]

    def test_a_cache_without_room_for_a_block_is_refused(self) -> None:
        with pytest.raises(ValueError, match="cannot hold"):
            WalReader(MemoryObjectStore(), cache_bytes=2**20)


OBJECTS = {f"{number}": noise(size, number) for number, size in enumerate((1, B - 1, 4 * B, 7 * B + 500))}
PATHS = st.sampled_from(sorted(OBJECTS))
PLACES = st.integers(0, 8 * B)
STEPS = st.one_of(
    st.tuples(st.sampled_from(["read", "prefetch", "cancelled"]), PATHS, PLACES, PLACES),
    st.tuples(st.sampled_from(["add", "forget", "fail", "hold", "let go", "turn"]), PATHS, PLACES, PLACES),
)


@settings(max_examples=150, deadline=None)
@given(
    steps=st.lists(STEPS, max_size=40),
    cache_bytes=st.integers(B + AROUND, 12 * (B + AROUND)),
    max_reads=st.integers(1, 4),
)
def test_any_reads_return_the_bytes_within_the_bound(
    steps: list[tuple[str, str, int, int]], cache_bytes: int, max_reads: int
) -> None:
    async def run() -> None:
        objects = MemoryObjectStore()
        for path, body in OBJECTS.items():
            await objects.put(path, body)
        gets = Gets(objects)
        reader = make_reader(gets, cache_bytes, max_reads)

        def check() -> None:
            """By what can be read and what was asked for, not by the reader's own count alone."""
            held = sum(
                sum(map(len, reader.try_read(path, at, min(at + B, len(body))) or []))
                for path, body in OBJECTS.items()
                for at in range(0, len(body), B)
            )
            being_read = sum(end - start for _, start, end in gets.under_way)
            assert held + being_read <= reader.size_bytes <= cache_bytes
            assert len(gets.under_way) <= max_reads

        def watch() -> None:
            try:
                check()
            except AssertionError as error:  # as the failure of a GET it might go unnoticed
                broken.append(error)

        broken: list[AssertionError] = []
        gets.on_change = watch
        reads: list[tuple[asyncio.Task[list[memoryview]], bytes]] = []
        for what, path, one, other in steps:
            body = OBJECTS[path]
            start = min(one, other) % len(body)
            end = max(start + 1, min(max(one, other), len(body)))
            match what:
                case "read" | "cancelled":
                    read = asyncio.create_task(reader.read(path, start, end))
                    if what == "read":
                        reads.append((read, body[start:end]))
                    else:
                        await asyncio.sleep(0)
                        read.cancel()
                case "prefetch":
                    reader.prefetch(path, start, end + 2 * B)
                case "add":
                    reader.add(path, body)
                case "forget":
                    reader.forget(path)
                case "fail":
                    gets.fails.append(ObjectStoreUnavailable("on purpose"))
                case "hold":
                    gets.hold()
                case "let go":
                    gets.let_go()
                case "turn":
                    await settle()
            check()
        gets.let_go()
        for read, expected in reads:
            try:
                assert b"".join(await read) == expected
            except ObjectStoreUnavailable as error:
                assert str(error) == "on purpose"
            check()
        await settle()
        gets.fails.clear()
        for path, body in OBJECTS.items():
            assert b"".join(await reader.read(path, 0, len(body))) == body
            check()
        await reader.close()
        assert reader.size_bytes == 0
        assert broken == []

    asyncio.run(run())


class TestPrefetch:
    async def test_what_was_read_ahead_needs_no_get(
        self, objects: ObjectStore, gets: Gets, reader: WalReader
    ) -> None:
        await objects.put("o", noise(4 * B))
        reader.prefetch("o", B, 4 * B)
        assert b"".join(await reader.read("o", B, 4 * B)) == noise(4 * B)[B:]
        reader.prefetch("o", B, 4 * B)
        await settle()
        assert gets.blocks() == [(1, 4)]

    async def test_it_uses_half_of_the_gets(self, objects: ObjectStore, gets: Gets) -> None:
        reader = make_reader(gets, max_reads=4)
        for number in range(8):
            await objects.put(f"{number}", noise(B))
        gets.hold()
        for number in range(4):
            reader.prefetch(f"{number}", 0, B)
        await gets.wait_for(2)
        await settle()
        assert len(gets.under_way) == 2
        reads = [asyncio.create_task(reader.read(f"{number}", 0, B)) for number in (4, 5, 6)]
        await gets.wait_for(4)
        reader.prefetch("7", 0, B)
        await settle()
        assert len(gets.under_way) == 4
        gets.let_go()
        await asyncio.gather(*reads)
        assert sorted(name for name, _, _ in gets.asked) == ["0", "1", "4", "5", "6"]

    async def test_one_that_a_reader_waits_for_is_no_longer_read_ahead(
        self, objects: ObjectStore, gets: Gets
    ) -> None:
        reader = make_reader(gets, max_reads=2)
        for name in "ab":
            await objects.put(name, noise(B))
        gets.hold()
        reader.prefetch("a", 0, B)
        read = asyncio.create_task(reader.read("a", 0, B))
        await gets.wait_for(1)
        await settle()
        reader.prefetch("b", 0, B)
        await gets.wait_for(2)
        gets.let_go()
        await read
        assert len(gets.asked) == 2

    async def test_what_nobody_asked_for_takes_a_quarter_of_the_cache(
        self, objects: ObjectStore, gets: Gets
    ) -> None:
        reader = make_reader(gets, cache_bytes=8 * (B + AROUND))
        for name in "abcd":
            await objects.put(name, noise(B))
        for name in "abc":
            reader.prefetch(name, 0, B)
            await gets.wait_for_the_end()
        assert [name for name, _, _ in gets.asked] == ["a", "b"]
        await reader.read("a", 0, B)
        for name in "cd":
            reader.prefetch(name, 0, B)
        await reader.read("c", 0, B)
        assert [name for name, _, _ in gets.asked] == ["a", "b", "c"]

    async def test_it_never_goes_before_readers_that_wait(self, objects: ObjectStore, gets: Gets) -> None:
        reader = make_reader(gets, cache_bytes=2 * (B + AROUND), max_reads=8)
        for name in "abcd":
            await objects.put(name, noise(B))
        gets.hold()
        reads = [asyncio.create_task(reader.read(name, 0, B)) for name in "abc"]
        await gets.wait_for(2)
        reader.prefetch("d", 0, B)
        gets.let_go()
        await asyncio.gather(*reads)
        await settle()
        assert [name for name, _, _ in gets.asked] == ["a", "b", "c"]

    async def test_it_leaves_alone_what_waits_for_a_get(self, objects: ObjectStore, gets: Gets) -> None:
        reader = make_reader(gets, max_reads=2)
        for name in "abc":
            await objects.put(name, noise(B))
        gets.hold()
        reads = [asyncio.create_task(reader.read(name, 0, B)) for name in "abc"]
        await gets.wait_for(2)
        reader.prefetch("c", 0, B)
        reads.append(asyncio.create_task(reader.read("c", 0, B)))
        await settle()
        gets.let_go()
        await asyncio.gather(*reads)
        assert [name for name, _, _ in gets.asked] == ["a", "b", "c"]

    async def test_a_failure_that_nobody_waits_for_is_silent(
        self, gets: Gets, reader: WalReader, caplog: pytest.LogCaptureFixture
    ) -> None:
        reader.prefetch("missing", 0, B)
        await gets.wait_for_the_end()
        gc.collect()
        assert gets.asked == [("missing", 0, B)]
        assert caplog.records == []

    async def test_reading_ahead_beyond_the_end_is_no_error(
        self, objects: ObjectStore, gets: Gets, reader: WalReader
    ) -> None:
        body = noise(B + 10)
        await objects.put("o", body)
        reader.prefetch("o", 0, 9 * B)
        assert b"".join(await reader.read("o", 0, B + 10)) == body
        reader.prefetch("o", 0, 9 * B)
        reader.prefetch("o", 5 * B, 9 * B)
        reader.prefetch("missing", 0, B)
        await gets.wait_for_the_end()
        assert gets.blocks() == [(0, 9), (5, 9), (0, 1)]
        assert b"".join(reader.try_read("o", 0, B + 10) or []) == body
        assert reader.size_bytes == B + 10 + AROUND


class TestDamage:
    async def test_an_object_that_ends_too_early_is_damaged(
        self, objects: ObjectStore, gets: Gets, reader: WalReader
    ) -> None:
        await objects.put("o", noise(2 * B + 10))
        for start, end in [
            (0, 2 * B + 11),
            (2 * B, 3 * B),
            (B, 6 * B),
            (2 * B + 10, 2 * B + 11),
            (7 * B, 8 * B),
        ]:
            with pytest.raises(DamagedWal):
                await reader.read("o", start, end)
        assert b"".join(await reader.read("o", 0, 2 * B + 10)) == noise(2 * B + 10)
        assert reader.try_read("o", 0, 2 * B + 11) is None

    async def test_an_object_that_ends_with_a_block_is_damaged_too(
        self, objects: ObjectStore, reader: WalReader
    ) -> None:
        await objects.put("o", noise(2 * B))
        with pytest.raises(DamagedWal):
            await reader.read("o", 0, 2 * B + 1)
        await reader.read("o", 0, 2 * B)
        with pytest.raises(DamagedWal, match="byte 2000"):
            await reader.read("o", 0, 2 * B + 1)

    async def test_damage_is_not_remembered(
        self, objects: ObjectStore, gets: Gets, reader: WalReader
    ) -> None:
        await objects.put("o", noise(2 * B)[: B + 1])
        with pytest.raises(DamagedWal):
            await reader.read("o", 0, 2 * B)
        await objects.put("o", noise(2 * B))
        assert b"".join(await reader.read("o", 0, 2 * B)) == noise(2 * B)

    async def test_what_was_forgotten_is_read_again(
        self, objects: ObjectStore, gets: Gets, reader: WalReader
    ) -> None:
        await objects.put("o", noise(B, 1))
        await objects.put("other", noise(B))
        reader.add("own", noise(B))
        await reader.read("o", 0, B)
        await reader.read("other", 0, B)
        await objects.put("o", noise(B, 2))
        reader.forget("o")
        reader.forget("own")
        reader.forget("never seen")
        assert b"".join(await reader.read("o", 0, B)) == noise(B, 2)
        assert reader.try_read("other", 0, B) is not None
        assert reader.try_read("own", 0, B) is None

    async def test_what_is_being_read_when_it_is_forgotten_is_not_kept(
        self, objects: ObjectStore, gets: Gets, reader: WalReader
    ) -> None:
        await objects.put("o", noise(B))
        gets.hold()
        before = asyncio.create_task(reader.read("o", 0, B))
        await gets.wait_for(1)
        reader.forget("o")
        after = asyncio.create_task(reader.read("o", 0, B))
        await gets.wait_for(2)
        gets.let_go()
        assert b"".join(await before) == b"".join(await after) == noise(B)
        assert reader.size_bytes == B + AROUND
        assert len(gets.asked) == 2


class TestClose:
    async def test_who_waits_is_told(self, objects: ObjectStore, gets: Gets) -> None:
        reader = make_reader(gets, max_reads=2)
        for name in "abc":
            await objects.put(name, noise(B))
        gets.hold()
        reads = [asyncio.create_task(reader.read(name, 0, B)) for name in "abc"]
        await gets.wait_for(2)
        await reader.close()
        for outcome in await asyncio.gather(*reads, return_exceptions=True):
            assert isinstance(outcome, ObjectStoreUnavailable)
        assert gets.under_way == []
        assert len(gets.asked) == 2

    async def test_a_get_that_has_not_run_yet_is_told_too(self, gets: Gets) -> None:
        reader = make_reader(gets)
        read = asyncio.create_task(reader.read("o", 0, B))
        await asyncio.sleep(0)
        await reader.close()
        with pytest.raises(ObjectStoreUnavailable):
            await read

    async def test_a_closed_reader_holds_and_reads_nothing(self, objects: ObjectStore, gets: Gets) -> None:
        reader = make_reader(gets)
        await objects.put("o", noise(B))
        await reader.read("o", 0, B)
        await reader.close()
        await reader.close()
        reader.add("own", noise(B))
        reader.prefetch("o", 0, B)
        assert reader.size_bytes == 0
        assert reader.try_read("own", 0, B) is None
        with pytest.raises(ObjectStoreUnavailable):
            await reader.read("o", 0, B)
        assert len(gets.asked) == 1
        assert await objects.get("o") == noise(B)
