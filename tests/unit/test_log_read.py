"""Reading partitions: from memory, from the object store, waiting for more, and when things go wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from dray.errors import (
    DamagedFile,
    DamagedWal,
    NotCommitted,
    ObjectNotFound,
    ObjectStoreUnavailable,
    OffsetOutOfRange,
)
from dray.index.changes import carry_out, replace_run, truncate
from dray.index.entry import Placed, WalChunk, place_all, sequence_of
from dray.log.read import Fetched, Got, Want
from dray.metadata.memory import MemoryData
from dray.objectstore.memory import MemoryObjects, MemoryObjectStore
from tests.compaction import compacted
from tests.index_entries import INCARNATION
from tests.log_node import DOMAIN, HeldObjects, HeldStore, Node, payload, records_of, settle, soon

S, OTHER = 0x51, 0x52
MANY = 2**31 - 1
FILE = "data/9.parquet"


@dataclass
class World:
    """One store of each kind, and as many brokers as are asked for."""

    conditions_abort: bool
    data: MemoryData
    objects: MemoryObjects
    nodes: list[Node]

    async def node(self, **settings: Any) -> HeldNode:
        store = HeldStore(self.data, conditions_abort=self.conditions_abort)
        node = HeldNode(store, HeldObjects(self.objects), **settings)
        self.nodes.append(node)
        await node.start()
        return node

    def stored(self, stream_id: int = S) -> list[Placed]:
        return place_all(self.data.domain(DOMAIN).sequences.get(sequence_of(stream_id), []))

    def paths(self, stream_id: int = S) -> list[str]:
        chunks = [placed.entry.where for placed in self.stored(stream_id)]
        return [chunk.path for chunk in chunks if isinstance(chunk, WalChunk)]

    async def truncate(self, before: int) -> None:
        swap = truncate(self.stored(), before, 1, INCARNATION)
        assert swap is not None
        await carry_out(self.nodes[0].store, DOMAIN, swap)

    async def compact(self, count: int, first: int = 0) -> None:
        run = self.stored()[first : first + count]
        new = await compacted(MemoryObjectStore(self.objects), run, FILE)
        await carry_out(self.nodes[0].store, DOMAIN, replace_run(run, new))


class HeldNode(Node):
    store: HeldStore
    objects: HeldObjects

    async def fetch(self, *wants: Want, **limits: Any) -> Fetched:
        return await soon(self.reader.fetch(wants, **with_defaults(limits)))

    async def fetch_one(self, offset: int, stream_id: int = S, max_bytes: int = MANY, **limits: Any) -> Got:
        fetched = await self.fetch(Want(stream_id, offset, max_bytes), **limits)
        fetched.release()
        return fetched.partitions[0]

    def fetching(self, *wants: Want, **limits: Any) -> asyncio.Task[Fetched]:
        limits = with_defaults({"max_wait_s": 60.0, **limits})
        return asyncio.create_task(self.reader.fetch(wants, **limits))

    @property
    def taken(self) -> int:
        return self.reader._budget.taken

    async def forget(self) -> None:
        """As a broker that has just started."""
        for path in list(self.wal._own):
            self.wal.forget(path)
        await settle()
        self.store.reads.clear()
        self.objects.gets.clear()


def with_defaults(limits: dict[str, Any]) -> dict[str, Any]:
    return {"min_bytes": 1, "max_bytes": MANY, "max_wait_s": 0.0, **limits}


@pytest.fixture(params=[True, False], ids=["aborts", "each-alone"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    world = World(request.param, MemoryData(), MemoryObjects(), [])
    yield world
    for node in world.nodes:
        await node.stop()
    assert not [task for task in asyncio.all_tasks() if "read" in repr(task.get_coro())], "left behind"


class TestTail:
    async def test_own_writes_are_read_from_memory_alone(self, world: World) -> None:
        node = await world.node()
        await node.append(S, payload(b"a"))
        await node.fetch_one(1)  # learns where the stream begins
        node.store.watch_gate.close()  # told by nobody but the writer
        for number in range(1, 5):
            await node.append(S, payload(b"b"))
            node.store.reads.clear()
            node.objects.gets.clear()
            got = await node.fetch_one(number)
            assert records_of(got) == [(number, b"b")]
            assert (got.high_watermark, got.log_start) == (number + 1, 0)
            assert (node.store.reads, node.objects.gets) == ([], [])

    async def test_nor_is_the_store_asked_once_the_watch_has_told(self, world: World) -> None:
        node = await world.node()
        await node.append(S, payload(b"a"))
        await settle()
        await node.fetch_one(0)
        await node.append(S, payload(b"b"))
        await settle()
        node.store.reads.clear()
        assert records_of(await node.fetch_one(1)) == [(1, b"b")]
        assert node.store.reads == []

    async def test_another_broker_reads_it_from_the_object_store(self, world: World) -> None:
        writer, reader = await world.node(), await world.node()
        await writer.append(S, payload(b"a", b"b"))
        await writer.append(S, payload(b"c"))
        assert records_of(await reader.fetch_one(0)) == [(0, b"a"), (1, b"b"), (2, b"c")]
        assert sorted(set(reader.objects.gets)) == sorted(world.paths())
        reader.objects.gets.clear()
        assert records_of(await reader.fetch_one(0)) == [(0, b"a"), (1, b"b"), (2, b"c")]
        assert reader.objects.gets == []

    async def test_an_offset_inside_a_batch_brings_all_of_it(self, world: World) -> None:
        node = await world.node()
        await node.append(S, payload(b"a") + payload(b"b", b"c", b"d") + payload(b"e"))
        assert [offset for offset, _ in records_of(await node.fetch_one(2))] == [1, 2, 3, 4]

    async def test_batches_are_patched_and_nothing_else_is_changed(self, world: World) -> None:
        node = await world.node()
        first, second = payload(b"a"), payload(b"x" * 20_000)
        await node.append(S, first)
        await node.append(S, second)
        records = (await node.fetch_one(0)).records
        assert records is not None
        sent = b"".join(records.buffers)
        assert records.size == len(sent) == len(first + second)
        assert sent[: len(first)] == first[:8] + first[8:12] + bytes(4) + first[16:]
        assert sent[len(first) :] == (1).to_bytes(8) + second[8:12] + bytes(4) + second[16:]

    async def test_nothing_wanted_is_nothing_fetched(self, world: World) -> None:
        node = await world.node()
        assert (await node.fetch(max_wait_s=60.0)).partitions == []


class TestLimits:
    async def test_a_partition_with_no_limit_left_still_gives_the_first_batch(self, world: World) -> None:
        node = await world.node()
        await node.append(S, payload(b"a"))
        await node.append(S, payload(b"b"))
        assert records_of(await node.fetch_one(0, max_bytes=0)) == [(0, b"a")]
        assert records_of(await node.fetch_one(0, max_bytes=0, max_wait_s=60.0, min_bytes=10)) == [(0, b"a")]

    async def test_many_tiny_batches_are_served_in_parts(self, world: World) -> None:
        node = await world.node()
        for _ in range(1_100):
            await node.append(S, payload(b"a"))
        # Not waiting for more, although it is less than the minimum: what is behind will not be looked at.
        got = records_of(await node.fetch_one(0, min_bytes=200_000, max_wait_s=60.0))
        assert [offset for offset, _ in got] == list(range(1_024))
        rest = records_of(await node.fetch_one(1_024))
        assert [offset for offset, _ in rest] == list(range(1_024, 1_100))

    async def test_whole_batches_may_stay_below_the_minimum(self, world: World) -> None:
        """Two batches of 1,000 bytes, of which one fits: 1,400 are there to be had, as Kafka counts."""
        node = await world.node()
        for _ in range(2):
            await node.append(S, payload(b"x" * 930))
        got = await node.fetch_one(0, max_bytes=1_400, min_bytes=1_300, max_wait_s=60.0)
        assert len(records_of(got)) == 1
        got = await node.fetch_one(0, min_bytes=MANY, max_bytes=MANY, max_wait_s=0.001)
        assert len(records_of(got)) == 2

    async def test_a_batch_above_the_limit_of_its_partition_is_enough(self, world: World) -> None:
        node = await world.node()
        await node.append(S, payload(b"x" * 5_000))
        got = await node.fetch_one(0, max_bytes=1_000, min_bytes=2_000, max_wait_s=60.0)
        assert len(records_of(got)) == 1


class TestBounds:
    async def test_out_of_range_is_said_behind_a_barrier_only(self, world: World) -> None:
        """The watch is late and the store stale: the other broker's record is there all the same."""
        writer, reader = await world.node(), await world.node()
        await writer.append(S, payload(b"a"))
        await settle()
        await reader.fetch_one(0)
        reader.store.watch_gate.close()
        reader.store.fall_behind()
        await writer.append(S, payload(b"b"))
        await writer.append(S, payload(b"c"))
        assert records_of(await reader.fetch_one(2)) == [(2, b"c")]
        reader.store.watch_gate.open()

    @pytest.mark.parametrize("offset", [-1, 2, 10**15])
    async def test_offsets_that_do_not_exist(self, world: World, offset: int) -> None:
        node = await world.node()
        await node.append(S, payload(b"a"))
        before = node.store.barriers
        got = await node.fetch_one(offset, max_wait_s=60.0)
        assert isinstance(got.error, OffsetOutOfRange)
        assert (got.error.log_start, got.error.end) == (0, 1)
        assert node.store.barriers > before

    async def test_the_end_is_in_range(self, world: World) -> None:
        node = await world.node()
        assert (await node.fetch_one(0)).high_watermark == 0
        await node.append(S, payload(b"a"))
        got = await node.fetch_one(1)
        assert (got.high_watermark, records_of(got)) == (1, [])

    async def test_a_high_watermark_never_goes_back(self, world: World) -> None:
        node = await world.node()
        node.store.watch_gate.close()
        await node.append(S, payload(b"a"))
        await node.append(S, payload(b"b"))
        assert (await node.fetch_one(2)).high_watermark == 2
        node.cache.close(DOMAIN)  # a gap in the watch
        await node.append(S, payload(b"c"))
        node.store.fall_behind()
        for _ in range(3):
            await node.append(S, payload(b"d"))
        assert (await node.fetch_one(6)).high_watermark == 6
        node.store.watch_gate.open()

    async def test_a_high_watermark_is_not_below_what_is_sent(self, world: World) -> None:
        writer, reader = await world.node(), await world.node()
        await writer.append(S, payload(b"a"))
        await settle()
        assert (await reader.fetch_one(1)).high_watermark == 1
        reader.store.watch_gate.close()
        await writer.append(S, payload(b"b"))
        got = await reader.fetch_one(0)  # the entry was not looked at before: it is read from the store
        assert got.high_watermark == len(records_of(got))
        reader.store.watch_gate.open()

    async def test_what_is_truncated_is_out_of_range(self, world: World) -> None:
        node = await world.node()
        for value in (b"a", b"b", b"c"):
            await node.append(S, payload(value))
        await node.fetch_one(0)
        await world.truncate(2)
        await settle()
        got = await node.fetch_one(1)
        assert isinstance(got.error, OffsetOutOfRange)
        assert got.error.log_start == 2
        got = await node.fetch_one(2)
        assert (got.log_start, records_of(got)) == (2, [(2, b"c")])

    async def test_a_truncation_that_the_watch_has_not_told_of(self, world: World) -> None:
        """Its range has no records, so it must not pass for one that was voided."""
        node, other = await world.node(), await world.node()
        for value in (b"a", b"b", b"c"):
            await other.append(S, payload(value))
        await settle()
        await node.fetch_one(3)
        forget_entries(node)
        node.store.watch_gate.close()
        await world.truncate(2)
        got = await node.fetch_one(1)
        assert isinstance(got.error, OffsetOutOfRange)
        assert got.error.log_start == 2
        assert await node.index.log_start(S) == 2, "nobody is sent back to 0"
        node.store.watch_gate.open()

    async def test_a_truncation_that_was_read_before_the_watch_tells_of_it(self, world: World) -> None:
        other = await world.node()
        for value in (b"a", b"b", b"c"):
            await other.append(S, payload(value))
        node = await world.node()
        assert (await node.fetch_one(3)).log_start == 0
        node.store.watch_gate.close()
        await world.truncate(2)
        await node.index.range(S, 0, 10)
        node.store.watch_gate.open()
        await settle()
        assert (await node.fetch_one(3)).log_start == 2


class TestWaiting:
    async def test_own_writes_wake(self, world: World) -> None:
        node = await world.node()
        node.store.watch_gate.close()
        task = node.fetching(Want(OTHER, 0, MANY), Want(S, 0, MANY))
        await settle()
        assert not task.done()
        await node.append(S, payload(b"a"))
        nothing, got = (await soon(task)).partitions
        assert (records_of(nothing), records_of(got)) == ([], [(0, b"a")])
        node.store.watch_gate.open()

    async def test_writes_of_another_broker_wake(self, world: World) -> None:
        writer, reader = await world.node(), await world.node()
        task = reader.fetching(Want(OTHER, 0, MANY), Want(S, 0, MANY))
        await settle()
        assert not task.done()
        await writer.append(S, payload(b"a"))
        assert records_of((await soon(task)).partitions[1]) == [(0, b"a")]

    async def test_a_write_while_looking_is_not_missed(self, world: World) -> None:
        """It lands after the end of the stream was read and before anybody waits."""
        writer, reader = await world.node(), await world.node()
        reader.store.read_gate.close()
        task = reader.fetching(Want(S, 0, MANY))
        await settle()
        assert reader.store.read_gate.held
        reader.store.fall_behind()
        await writer.append(S, payload(b"a"))
        await settle()
        reader.store.read_gate.open()
        assert records_of((await soon(task)).partitions[0]) == [(0, b"a")]

    async def test_too_little_is_waited_on_without_reading_it(self, world: World) -> None:
        node = await world.node()
        task = node.fetching(Want(S, 0, MANY), min_bytes=300)
        one = payload(b"x" * 30)
        for number in range(4):
            await settle()
            assert task.done() == (number * len(one) >= 300), number
            await node.append(S, one)
        got = records_of((await soon(task)).partitions[0])
        assert [offset for offset, _ in got] == list(range(len(got)))

    async def test_who_waits_does_not_look_unless_something_changes(self, world: World) -> None:
        node = await world.node()
        await node.append(S, payload(b"a"))
        looked = 0
        locate = node.reader._locate

        async def counted(*args: Any, **options: Any) -> Any:
            nonlocal looked
            looked += 1
            return await locate(*args, **options)

        node.reader._locate = counted  # type: ignore[method-assign]
        task = node.fetching(Want(S, 0, MANY), min_bytes=10_000)
        for _ in range(10):
            await settle()
        before = looked
        for _ in range(10):
            await settle()
        assert looked == before <= 2
        node.wakeups.stop()
        await soon(task)

    async def test_what_has_come_is_sent_when_time_is_up(self, world: World) -> None:
        node = await world.node()
        await node.append(S, payload(b"a"))
        got = await node.fetch_one(0, min_bytes=10_000, max_wait_s=0.001)
        assert records_of(got) == [(0, b"a")]
        assert records_of(await node.fetch_one(1, max_wait_s=0.001)) == []

    async def test_nobody_waits_for_a_client_that_has_gone(self, world: World) -> None:
        node = await world.node()
        gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = node.fetching(Want(S, 0, MANY), gone=gone)
        await settle()
        assert not task.done()
        gone.set_result(None)
        await soon(task)
        await soon(node.fetching(Want(S, 0, MANY), gone=gone))

    async def test_a_broker_that_stops_answers_at_once(self, world: World) -> None:
        node = await world.node()
        task = node.fetching(Want(S, 0, MANY))
        await settle()
        node.wakeups.stop()
        assert records_of((await soon(task)).partitions[0]) == []
        await soon(node.fetching(Want(S, 0, MANY)))

    async def test_an_error_is_not_waited_on(self, world: World) -> None:
        node = await world.node()
        await node.append(S, payload(b"a"))
        got = (await node.fetch(Want(OTHER, 0, MANY), Want(S, 7, MANY), max_wait_s=60.0)).partitions
        assert got[0].error is None
        assert isinstance(got[1].error, OffsetOutOfRange)

    async def test_nobody_is_registered_afterwards(self, world: World) -> None:
        node = await world.node()
        await node.fetch_one(0, max_wait_s=0.001)
        task = node.fetching(Want(S, 0, MANY))
        await settle()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert not node.wakeups._by_stream
        assert not node.wakeups._waiters

    async def test_a_gap_in_the_watch_wakes_everybody(self, world: World) -> None:
        writer, reader = await world.node(), await world.node()
        task = reader.fetching(Want(S, 0, MANY), Want(OTHER, 0, MANY))
        await settle()
        reader.store.watch_gate.close()
        await writer.append(S, payload(b"a"))
        for feed in reader.store._feeds:
            feed.gap()
        reader.store.watch_gate.open()
        assert records_of((await soon(task)).partitions[0]) == [(0, b"a")]


class TestObjectsThatFail:
    async def test_one_that_was_compacted_away_is_looked_up_again(self, world: World) -> None:
        node, other = await world.node(), await world.node()
        await other.append(S, payload(b"a"))
        await other.append(S, payload(b"b"))
        await settle()
        await node.fetch_one(2)
        await node.index.range(S, 0, 10)
        node.store.watch_gate.close()
        gone, _ = world.paths()
        await world.compact(1)
        del world.objects.objects[gone]
        assert records_of(await node.fetch_one(0)) == [(0, b"a")]
        assert node.taken == 0
        node.store.watch_gate.open()

    async def test_one_that_was_truncated_away_is_out_of_range(self, world: World) -> None:
        node, other = await world.node(), await world.node()
        for value in (b"a", b"b", b"c"):
            await other.append(S, payload(value))
        await settle()
        await node.index.range(S, 0, 10)
        await node.fetch_one(3)
        node.store.watch_gate.close()
        for path in world.paths()[:2]:
            del world.objects.objects[path]
        await world.truncate(2)
        got = await node.fetch_one(0)
        assert isinstance(got.error, OffsetOutOfRange)
        assert got.error.log_start == 2
        node.store.watch_gate.open()

    async def test_one_that_is_gone_for_no_reason(self, world: World) -> None:
        node, other = await world.node(), await world.node()
        await other.append(S, payload(b"a"))
        await other.append(OTHER, payload(b"b"))
        del world.objects.objects[world.paths()[0]]
        fetched = await node.fetch(Want(S, 0, MANY), Want(OTHER, 0, MANY))
        assert isinstance(fetched.partitions[0].error, ObjectNotFound)
        assert records_of(fetched.partitions[1]) == [(0, b"b")]
        fetched.release()
        assert node.taken == 0

    async def test_what_stands_in_front_of_it_is_served(self, world: World) -> None:
        """Otherwise how far a reader gets would depend on how much it asks for."""
        node, other = await world.node(), await world.node()
        for value in (b"a", b"b", b"c"):
            await other.append(S, payload(value))
        path = world.paths()[1]
        kept, modified = world.objects.objects.pop(path)
        assert records_of(await node.fetch_one(0)) == [(0, b"a")]
        assert isinstance((await node.fetch_one(1)).error, ObjectNotFound)
        world.objects.objects[path] = bytes(len(kept)), modified
        assert records_of(await node.fetch_one(0)) == [(0, b"a")]
        assert isinstance((await node.fetch_one(1)).error, DamagedWal)
        assert records_of(await node.fetch_one(2)) == [(2, b"c")]

    async def test_a_damaged_parquet_file_behind_does_not_hide_what_is_in_front(self, world: World) -> None:
        node = await world.node()
        for value in (b"a", b"b", b"c"):
            await node.append(S, payload(value))
        await world.compact(1, first=1)
        await settle()
        kept, modified = world.objects.objects[FILE]
        world.objects.objects[FILE] = bytes(len(kept)), modified
        assert records_of(await node.fetch_one(0)) == [(0, b"a")]
        assert isinstance((await node.fetch_one(1)).error, DamagedFile)
        assert records_of(await node.fetch_one(2)) == [(2, b"c")]
        world.objects.objects[FILE] = kept, modified
        assert records_of(await node.fetch_one(1)) == [(1, b"b")]

    @pytest.mark.parametrize("damage", ["zeros", "short"])
    async def test_a_damaged_one_hurts_its_partition_only_and_not_for_ever(
        self, world: World, damage: str
    ) -> None:
        node, other = await world.node(), await world.node()
        await other.append(S, payload(b"a"))
        await other.append(OTHER, payload(b"b"))
        (path,) = world.paths()
        kept, modified = world.objects.objects[path]
        world.objects.objects[path] = bytes(len(kept)) if damage == "zeros" else kept[:60], modified
        fetched = await node.fetch(Want(S, 0, MANY), Want(OTHER, 0, MANY))
        assert isinstance(fetched.partitions[0].error, DamagedWal)
        assert records_of(fetched.partitions[1]) == [(0, b"b")]
        world.objects.objects[path] = kept, modified
        assert records_of(await node.fetch_one(0)) == [(0, b"a")]

    async def test_a_store_that_is_away_is_an_error_of_the_partition(self, world: World) -> None:
        node, other = await world.node(), await world.node()
        await other.append(S, payload(b"a"))
        await node.objects.close()
        assert isinstance((await node.fetch_one(0)).error, ObjectStoreUnavailable)
        assert node.taken == 0

    async def test_memory_that_goes_while_others_are_read(self, world: World) -> None:
        """The cache holds one object: reading the second partition pushes out what the first was given."""
        node = await world.node(cache_bytes=8_000, block_bytes=2_000)
        other = await world.node()
        await other.append(OTHER, payload(b"y" * 5_000))
        await node.append(S, payload(b"x" * 5_000))
        await settle()
        fetched = await node.fetch(Want(S, 0, MANY), Want(OTHER, 0, MANY))
        assert [records_of(got)[0][1][:1] for got in fetched.partitions] == [b"x", b"y"]
        assert not node.wal._own


class TestVoid:
    async def test_void_offsets_are_empty_batches(self) -> None:
        world = World(False, MemoryData(), MemoryObjects(), [])
        node, other = await world.node(), await world.node()
        await node.append(S, payload(b"a"))
        node.objects.fence_next = node.store
        with pytest.raises(NotCommitted):
            await node.append(S, payload(b"lost", b"lost", b"lost"))
        await node.append(S, payload(b"b"))
        for reader in (node, other):
            assert records_of(await reader.fetch_one(0)) == [(0, b"a"), (4, b"b")]
            got = await reader.fetch_one(2, max_bytes=70)
            assert (got.high_watermark, records_of(got)) == (5, [])
            assert got.records is not None
            (only,) = got.records.buffers
            assert len(only) == 61
            assert int.from_bytes(only[:8]) + int.from_bytes(only[23:27]) == 3, (
                "leads behind the last of them"
            )
            assert records_of(await reader.fetch_one(3)) == [(4, b"b")]
        for each in world.nodes:
            await each.stop()


class TestBudget:
    async def fill(self, world: World, **settings: Any) -> HeldNode:
        """A reader with room for two answers of 1,000 bytes, and three partitions of another's."""
        node = await world.node(buffer_bytes=2_500, **settings)
        other = await world.node()
        for stream_id in (1, 2, 3):
            await other.append(stream_id, payload(b"x" * 930))
        await settle()
        return node

    async def test_answers_wait_for_their_turn(self, world: World) -> None:
        node = await self.fill(world)
        first = await node.fetch(Want(1, 0, MANY))
        second = await node.fetch(Want(2, 0, MANY))
        assert 1_900 < node.taken <= 2_500
        third = node.fetching(Want(3, 0, MANY))
        small = node.fetching(Want(3, 0, MANY))
        await settle()
        assert (third.done(), small.done()) == (False, False)
        second.release()
        await soon(third)
        await settle()
        assert not small.done()
        first.release()
        (await soon(small)).release()
        third.result().release()
        assert node.taken == 0

    async def test_an_answer_above_the_bound_goes_alone(self, world: World) -> None:
        node = await world.node(buffer_bytes=10)
        await node.append(S, payload(b"x" * 100))
        first = await node.fetch(Want(S, 0, MANY))
        second = node.fetching(Want(S, 0, MANY))
        await settle()
        assert not second.done()
        first.release()
        (await soon(second)).release()
        assert node.taken == 0

    async def test_an_answer_of_nothing_waits_for_nobody(self, world: World) -> None:
        node = await self.fill(world)
        held = [await node.fetch(Want(stream_id, 0, MANY)) for stream_id in (1, 2)]
        waiting = node.fetching(Want(3, 0, MANY))
        await settle()
        assert (await node.fetch_one(1, stream_id=1)).high_watermark == 1
        held[0].release()
        await soon(waiting)

    async def test_who_is_cancelled_while_waiting_takes_nothing(self, world: World) -> None:
        node = await self.fill(world)
        held = [await node.fetch(Want(stream_id, 0, MANY)) for stream_id in (1, 2)]
        waiting = [node.fetching(Want(3, 0, MANY)) for _ in range(2)]
        await settle()
        waiting[0].cancel()
        await settle()
        held[0].release()
        held[1].release()
        (await soon(waiting[1])).release()
        assert node.taken == 0

    async def test_who_is_cancelled_in_the_moment_of_its_turn_gives_it_back(self, world: World) -> None:
        node = await self.fill(world)
        held = [await node.fetch(Want(stream_id, 0, MANY)) for stream_id in (1, 2)]
        waiting = node.fetching(Want(3, 0, MANY))
        await settle()
        held[0].release()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        held[1].release()
        assert node.taken == 0

    async def test_a_small_one_behind_a_large_one_that_gave_up(self, world: World) -> None:
        node = await self.fill(world)
        first = await node.fetch(Want(1, 0, MANY))
        large = node.fetching(Want(2, 0, MANY), Want(3, 0, MANY))
        await settle()
        small = node.fetching(Want(2, 0, MANY))
        await settle()
        assert not small.done()
        large.cancel()
        (await soon(small)).release()
        first.release()
        assert node.taken == 0

    async def test_who_is_cancelled_while_reading_leaves_nothing_running(self, world: World) -> None:
        node = await self.fill(world)
        node.objects.gate.close()
        before = asyncio.all_tasks()
        task = node.fetching(Want(1, 0, MANY), Want(2, 0, MANY))
        await settle()
        assert node.taken > 1_900
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert node.taken == 0
        left = [repr(each) for each in asyncio.all_tasks() - before]
        assert all("get_range" in each for each in left), "the GETs go on, for the cache"
        node.objects.gate.open()

    async def test_a_bug_while_reading_gives_back_too(self, world: World) -> None:
        node = await self.fill(world)
        node.objects.gate.close()
        task = node.fetching(Want(1, 0, MANY), Want(2, 0, MANY))
        await settle()
        for unit in list(node.wal._reading):
            if not unit.ended.done():
                unit.ended.set_exception(RuntimeError("a bug"))
                break
        node.objects.gate.open()
        with pytest.raises(RuntimeError):
            await soon(task)
        assert node.taken == 0


class TestReadAhead:
    async def test_what_follows_is_read_before_it_is_asked_for(self, world: World) -> None:
        node, other = await world.node(), await world.node()
        for value in (b"a", b"b", b"c"):
            await other.append(S, payload(value))
        await settle()
        assert records_of(await node.fetch_one(0, max_bytes=10)) == [(0, b"a")]
        await settle()
        assert sorted(node.objects.gets) == sorted(world.paths())
        node.objects.gets.clear()
        assert records_of(await node.fetch_one(1)) == [(1, b"b"), (2, b"c")]
        assert node.objects.gets == []

    async def test_the_rest_of_an_object_comes_first(self, world: World) -> None:
        node, other = await world.node(block_bytes=1_000), await world.node()
        await other.append(S, payload(b"x" * 3_000) + payload(b"y" * 3_000))
        await settle()
        assert len(records_of(await node.fetch_one(0, max_bytes=10))) == 1
        await settle()
        node.objects.gets.clear()
        assert len(records_of(await node.fetch_one(1))) == 1
        assert node.objects.gets == []


def forget_entries(node: Node) -> None:
    """As the index cache does under pressure: bounds stay."""
    for stream in node.cache._streams.values():
        node.cache._bytes -= stream.drop(0, len(stream.placed))


async def test_the_bounds_of_a_thousand_partitions_are_looked_up_side_by_side(world: World) -> None:
    """Bounds that are known do not make entries known: readers that are behind are not served in a row."""
    writer, reader = await world.node(), await world.node()
    streams = range(100, 130)
    await asyncio.gather(*(writer.append(stream_id, payload(b"a")) for stream_id in streams))
    await settle()
    await reader.fetch(*(Want(stream_id, 1, MANY) for stream_id in streams))
    forget_entries(reader)  # all bounds, no entry
    reader.store.read_gate.close()
    task = reader.fetching(*(Want(stream_id, 0, MANY) for stream_id in streams))
    await settle()
    assert reader.store.read_gate.held > 10
    reader.store.read_gate.open()
    fetched = await soon(task)
    assert all(records_of(got) == [(0, b"a")] for got in fetched.partitions)


async def test_a_wrong_length_in_the_index_is_damage(world: World) -> None:
    node = await world.node()
    await node.append(S, payload(b"a"))
    (placed,) = world.stored()
    where = placed.entry.where
    assert isinstance(where, WalChunk)
    (batch,) = where.batches
    short = replace(where, batches=(replace(batch, size_bytes=12),), chunk_length=16)
    wrong = replace(placed, entry=replace(placed.entry, where=short))
    node.cache.close(DOMAIN)
    node.cache.open(DOMAIN)
    node.index.add(wrong, node.index.now())
    assert isinstance((await node.fetch_one(0)).error, DamagedWal)
