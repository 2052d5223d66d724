"""The writer on stores in memory: when it seals, in which order it commits, what it holds back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any
from uuid import UUID

import pytest

from dray.config import load_settings
from dray.errors import (
    CorruptStore,
    NotCommitted,
    ObjectStoreDenied,
    ObjectStoreError,
    ObjectStoreFull,
    ObjectStoreMisconfigured,
    ObjectStoreUnavailable,
    OutcomeUnknown,
    TooLarge,
)
from dray.index.entry import WalChunk, place_all, sequence_of
from dray.metadata.memory import MemoryStore
from dray.metadata.store import AppendResult, Expect, Expectation, Limits, NewEntry, Put
from dray.objectstore.memory import MemoryObjectStore
from dray.objectstore.store import Body
from dray.wal import writer as writer_module
from dray.wal.assemble import Assembled, Identity, assemble
from dray.wal.batcher import Pending, PendingBatch, SegmentBatcher
from dray.wal.format import decode_object
from dray.wal.objects import (
    OBJECTS,
    STAGING,
    Marker,
    ObjectRecord,
    State,
    decode_marker,
    encode_marker,
    encode_record,
    marker_key,
    record_key,
    reference_key,
)
from dray.wal.orphans import OrphanCollector
from dray.wal.writer import MAX_UPLOADS, Committed, CommittedObject, WalWriter
from tests.batches import build_batch
from tests.pending import pending

D = 2
LIMITS = Limits(max_operations=1_000, max_bytes=1_000_000)


def raw(stream_id: int, size: int = 100) -> Pending:
    return Pending([PendingBatch(stream_id, memoryview(bytes(size)), 1, 0, 0)], None)


class TestBatcher:
    def test_an_idle_pipeline_waits_for_no_timer(self) -> None:
        batcher = SegmentBatcher(1_000, 250, LIMITS)
        assert not batcher.is_due(0, idle=True)
        assert batcher.deadline_ms() is None
        batcher.add(raw(1), 10)
        assert batcher.is_due(10, idle=True)
        assert not batcher.is_due(10, idle=False)

    def test_a_busy_one_waits_for_bytes_or_time(self) -> None:
        batcher = SegmentBatcher(1_000, 250, LIMITS)
        batcher.add(raw(1), 10)
        batcher.add(raw(1), 200)
        assert batcher.deadline_ms() == 260
        assert not batcher.is_due(259, idle=False)
        assert batcher.is_due(260, idle=False)
        batcher.add(raw(1, 800), 201)
        assert batcher.is_due(201, idle=False)

    def test_sealing_empties_it_in_the_order_things_came(self) -> None:
        batcher = SegmentBatcher(1_000, 250, LIMITS)
        first, second = raw(2), raw(1)
        batcher.add(first, 10)
        batcher.add(second, 20)
        assert batcher.seal() == [first, second]
        assert batcher.seal() == []
        batcher.add(raw(1), 1_000)
        assert batcher.deadline_ms() == 1_250

    def test_an_object_does_not_outgrow_its_target_except_by_one_large_write(self) -> None:
        batcher = SegmentBatcher(1_000, 250, LIMITS)
        assert batcher.fits(raw(1, 5_000))
        batcher.add(raw(1, 600), 0)
        assert batcher.fits(raw(1, 400))
        assert not batcher.fits(raw(1, 401))

    def test_an_object_is_one_append(self) -> None:
        """Protocol 19: an entry and a reference per stream, a record, a marker."""
        batcher = SegmentBatcher(
            10**9, 250, Limits(max_operations=12, max_bytes=10**6, operations_per_entry=1)
        )
        for stream in range(5):
            assert batcher.fits(raw(stream))
            batcher.add(raw(stream), 0)
        assert batcher.fits(raw(4))
        assert not batcher.fits(raw(5))

    def test_many_small_batches_fill_an_append_before_they_fill_an_object(self) -> None:
        batcher = SegmentBatcher(10**9, 250, Limits(max_operations=1_000, max_bytes=5_000))
        added = 0
        while batcher.fits(raw(1, 70)):
            batcher.add(raw(1, 70), 0)
            added += 1
        assert 50 < added < 120


class SlowObjects(MemoryObjectStore):
    """Puts wait until they are let go, or fail."""

    def __init__(self) -> None:
        super().__init__()
        self.gates: list[asyncio.Future[None]] = []
        self.started = asyncio.Event()

    async def put(self, key: str, body: Body, *, if_absent: bool = False) -> None:
        gate = asyncio.get_running_loop().create_future()
        self.gates.append(gate)
        self.started.set()
        await gate
        await super().put(key, body, if_absent=if_absent)

    async def wait_for(self, puts: int) -> None:
        while len(self.gates) < puts:
            self.started.clear()
            await self.started.wait()


@pytest.fixture
def metadata() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def slow() -> SlowObjects:
    return SlowObjects()


@pytest.fixture
async def writer(metadata: MemoryStore, slow: SlowObjects) -> AsyncIterator[WalWriter]:
    made = WalWriter(
        metadata, slow, zone="z", incarnation="00" * 16, target_bytes=2_000, max_buffer_bytes=4_000
    )
    yield made
    for gate in slow.gates:
        if not gate.done():
            gate.cancel()
    await made.close()


def start(writer: WalWriter, batches: list[PendingBatch]) -> asyncio.Task[Committed]:
    return asyncio.create_task(writer.write(D, batches))


async def ends(metadata: MemoryStore, stream: int) -> list[int]:
    return [p.end_offset for p in place_all(await metadata.entries(D, sequence_of(stream), 0, 100))]


async def test_what_was_written_can_be_read_back(metadata: MemoryStore) -> None:
    objects = MemoryObjectStore()
    writer = WalWriter(metadata, objects, zone="z", incarnation="00" * 16)
    one, two = pending(1, "librdkafka-zstd"), pending(2, "kafka-python-gzip", copies=3)
    first, second = await asyncio.gather(writer.write(D, one), writer.write(D, two))
    assert (first.start_offset, second.start_offset) == (0, 0)
    assert second.end_offset == sum(batch.records for batch in two)
    [info] = await objects.list()  # both in one object: they were written in the same tick
    stored = decode_object(await objects.get(info.key), D)
    assert [entry.stream_id for entry, _ in stored.chunks] == [1, 2]
    [placed] = place_all(await metadata.entries(D, sequence_of(2), 0, 10))
    chunk = placed.entry.where
    assert isinstance(chunk, WalChunk)
    body = await objects.get(chunk.path)
    for number, batch in enumerate(two):
        at = chunk.batch_offset(number)
        assert body[at + 8 : at + len(batch.data)] == batch.data[8:]  # all but the base offset, which is 0
    assert len(await metadata.scan(D, OBJECTS, limit=10)) == 3  # the record and two references
    await writer.close()
    assert await metadata.scan(D, STAGING, limit=10) == []


async def test_an_append_brings_the_marker_of_the_next_object_along(metadata: MemoryStore) -> None:
    """So that only the first of an idle writer waits for one (protocol 13: the marker is there first)."""
    marked = []

    class Looking(MemoryObjectStore):
        async def put(self, key: str, body: Body, *, if_absent: bool = False) -> None:
            staged = await metadata.scan(D, STAGING, limit=10)
            marked.append(key in [decode_marker(record.key, record.value).path for record in staged])
            await super().put(key, body, if_absent=if_absent)

    class Counting(MemoryStore):
        puts = 0

        async def put(self, *arguments: Any, **more: Any) -> int:
            self.puts += 1
            return await super().put(*arguments, **more)

    counting = Counting(metadata._data, conditions_abort=metadata.conditions_abort)
    writer = WalWriter(counting, Looking(), zone="z", incarnation="00" * 16)
    for _ in range(3):
        await writer.write(D, pending(1))
    assert (counting.puts, marked) == (1, [True] * 3)
    await writer.close()
    assert await metadata.scan(D, STAGING, limit=10) == []


async def test_readers_are_told_of_an_append_whose_answer_was_lost(metadata: MemoryStore) -> None:
    """Protocol 18: what is acknowledged is readable here at once."""

    class Silent(MemoryStore):
        async def append(self, domain: int, entries: Sequence[NewEntry], *more: Any) -> AppendResult:
            result = await super().append(domain, entries, *more)
            if entries:
                raise OutcomeUnknown("its answer was lost")
            return result

    told: list[CommittedObject] = []
    silent = Silent(metadata._data, conditions_abort=metadata.conditions_abort)
    objects = MemoryObjectStore()
    writer = WalWriter(silent, objects, zone="z", incarnation="00" * 16, on_commit=told.append)
    done = await writer.write(D, pending(1))
    [committed] = told
    assert committed.body == await objects.get(committed.path)
    assert list(committed.entries) == place_all(await metadata.entries(D, sequence_of(1), 0, 10))
    assert committed.entries[0].start_offset == done.start_offset


async def test_a_marker_that_was_put_long_ago_is_not_used(
    metadata: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collector might be about to fence it."""
    monkeypatch.setattr(writer_module, "SPARE_S", 0.0)
    writer = WalWriter(metadata, MemoryObjectStore(), zone="z", incarnation="00" * 16)
    for _ in range(3):
        await writer.write(D, pending(1))
    assert len(await metadata.scan(D, STAGING, limit=10)) == 3  # left to the collector


async def test_objects_grow_while_others_are_on_their_way(
    writer: WalWriter, slow: SlowObjects, metadata: MemoryStore
) -> None:
    size = sum(len(b.data) for b in pending(1))
    writes = [start(writer, pending(1))]
    await slow.wait_for(1)
    for _ in range(5):
        writes.append(start(writer, pending(1)))
        await asyncio.sleep(0)
    await asyncio.sleep(0.01)
    assert len(slow.gates) == 1 + (5 * size) // 2_000  # full ones leave, the rest waits for the first
    for _ in range(3):
        for gate in slow.gates:
            if not gate.done():
                gate.set_result(None)
        await asyncio.sleep(0.02)
    starts = [done.start_offset for done in await asyncio.gather(*writes)]
    assert starts == sorted(starts)
    assert len(await slow.list()) <= 4


async def test_uploads_overtake_each_other_but_commits_do_not(
    writer: WalWriter, slow: SlowObjects, metadata: MemoryStore
) -> None:
    first = start(writer, pending(1))
    await slow.wait_for(1)
    big = pending(1, copies=10)
    second = start(writer, big[: len(big) // 2])
    third = start(writer, big[len(big) // 2 :])
    await slow.wait_for(2)
    slow.gates[1].set_result(None)
    await asyncio.sleep(0.02)
    assert await ends(metadata, 1) == []
    slow.gates[0].set_result(None)
    assert (await first).start_offset == 0
    done = await second
    assert done.start_offset == (await first).end_offset
    await slow.wait_for(3)
    slow.gates[2].set_result(None)
    assert (await third).start_offset == done.end_offset


async def test_an_object_that_cannot_be_stored_fails_alone(
    writer: WalWriter, slow: SlowObjects, metadata: MemoryStore
) -> None:
    first = start(writer, pending(1))
    await slow.wait_for(1)
    second = start(writer, pending(1, copies=5))
    await slow.wait_for(2)
    slow.gates[0].set_exception(ObjectStoreUnavailable("no"))
    slow.gates[1].set_result(None)
    with pytest.raises(NotCommitted):
        await first
    assert (await second).start_offset == 0
    await writer.close()
    assert len(await metadata.scan(D, STAGING, limit=10)) == 1  # the collector finds the other


async def test_callers_wait_while_the_buffers_are_full_and_keep_their_order(
    writer: WalWriter, slow: SlowObjects
) -> None:
    size = sum(len(b.data) for b in pending(1))
    room = 4_000 // size
    writes = [start(writer, pending(1)) for _ in range(room + 4)]
    await slow.wait_for(1)
    await asyncio.sleep(0.01)
    assert len(writer._waiting) == 4
    writes[room + 1].cancel()  # one that waits gives up its place, and nobody else's
    await asyncio.sleep(0.01)
    assert len(writer._waiting) == 3  # its bytes are not held until there is room: that may be long
    while not all(task.done() for task in writes):
        for gate in slow.gates:
            if not gate.done():
                gate.set_result(None)
        await asyncio.sleep(0.005)
    starts = [task.result().start_offset for task in writes if not task.cancelled()]
    assert starts == sorted(starts)
    assert len(starts) == room + 3
    assert writer._free_bytes == 4_000


async def test_what_was_given_up_before_its_upload_is_not_written(
    metadata: MemoryStore, slow: SlowObjects
) -> None:
    """Its caller writes it again. All there is room for may be such, after a store was away for long."""
    writer = WalWriter(metadata, slow, zone="z", incarnation="00" * 16, target_bytes=1)
    writes = [writer.submit(D, pending(1)) for _ in range(MAX_UPLOADS + 3)]  # each an object of its own
    await slow.wait_for(MAX_UPLOADS)
    writes[-3].cancel()
    writes[-2].cancel()
    while not writes[-1].done():
        for gate in slow.gates:
            if not gate.done():
                gate.set_result(None)
        await asyncio.sleep(0)
    await writer.close()
    assert len(slow.gates) == MAX_UPLOADS + 1
    assert len(await ends(metadata, 1)) == MAX_UPLOADS + 1
    assert writer._free_bytes == writer._max_buffer_bytes
    assert await metadata.scan(D, STAGING, limit=10) == []


async def test_more_than_fits_at_all_is_refused(writer: WalWriter) -> None:
    with pytest.raises(TooLarge):
        await writer.write(D, pending(1, copies=100))


async def test_closing_commits_what_was_accepted(metadata: MemoryStore) -> None:
    writer = WalWriter(metadata, MemoryObjectStore(), zone="z", incarnation="00" * 16)
    writes = [start(writer, pending(stream)) for stream in range(20)]
    await asyncio.sleep(0)
    await writer.close()
    assert all(done.start_offset == 0 for done in await asyncio.gather(*writes))
    with pytest.raises(NotCommitted):
        await writer.write(D, pending(1))


def built(stream: int, low: int, high: int, records: int = 1) -> list[PendingBatch]:
    return [PendingBatch(stream, memoryview(build_batch()), records, low, high)]


async def test_timestamps_of_two_clients_may_be_worlds_apart(metadata: MemoryStore) -> None:
    writer = WalWriter(metadata, MemoryObjectStore(), zone="z", incarnation="00" * 16)
    writes = [writer.write(D, built(1, -1, -1)), writer.write(D, built(1, 0, 2**63 - 1))]
    assert [done.start_offset for done in await asyncio.gather(*writes)] == [0, 1]
    [placed] = place_all(await metadata.entries(D, sequence_of(1), 0, 10))
    assert isinstance(placed.entry.where, WalChunk)
    assert [batch.max_timestamp_ms for batch in placed.entry.where.batches] == [-1, 2**63 - 1]
    await writer.close()


async def test_counts_that_do_not_fit_one_entry_go_into_several_objects(metadata: MemoryStore) -> None:
    writer = WalWriter(metadata, MemoryObjectStore(), zone="z", incarnation="00" * 16)
    writes = [writer.write(D, built(1, 0, 0, records=2**31 - 1)) for _ in range(3)]
    starts = [done.start_offset for done in await asyncio.gather(*writes)]
    assert starts == [n * (2**31 - 1) for n in range(3)]
    await writer.close()


async def test_an_object_that_cannot_be_made_fails_alone(
    metadata: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks_for_stream_7(identity: Identity, sealed: Sequence[Pending]) -> Assembled:
        if any(each.stream_id == 7 for each in sealed):
            raise ZeroDivisionError
        return assemble(identity, sealed)

    monkeypatch.setattr(writer_module, "assemble", breaks_for_stream_7)
    writer = WalWriter(metadata, MemoryObjectStore(), zone="z", incarnation="00" * 16)
    with pytest.raises(NotCommitted):
        await writer.write(D, pending(7))
    assert (await writer.write(D, pending(1))).start_offset == 0
    assert writer._free_bytes == writer_module.MAX_BUFFER_BYTES
    await writer.close()


async def test_an_answer_that_nobody_understands_is_not_taken_for_a_failure() -> None:
    class Garbled(MemoryStore):
        async def append(self, *arguments: Any) -> AppendResult:
            await super().append(*arguments)
            raise CorruptStore("the append was applied, and then answered with nonsense")

        async def put(self, domain: int, key: str, value: bytes, expect: Expectation = Expect.ANY) -> int:
            result = await MemoryStore.append(self, domain, (), (Put(key, value, expect),))
            assert result.puts[0] is not None
            return result.puts[0]

    writer = WalWriter(Garbled(), MemoryObjectStore(), zone="z", incarnation="00" * 16)
    assert (await writer.write(D, pending(1))).start_offset == 0
    await writer.close()


async def test_batches_are_let_go_of_once_they_are_in_an_object(writer: WalWriter, slow: SlowObjects) -> None:
    write = start(writer, pending(1))
    await slow.wait_for(1)
    assert [each.batches for each in writer._pipelines[D]._on_way[0].pending] == [()]
    slow.gates[0].set_result(None)
    await write


async def test_thousands_of_waiting_callers_hear_that_the_writer_was_stopped(
    writer: WalWriter, slow: SlowObjects
) -> None:
    writes = [start(writer, pending(1)) for _ in range(3_000)]
    await slow.wait_for(1)
    for task in writer._pipelines[D]._tasks:
        task.cancel()
    outcomes = await asyncio.gather(*writes, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {NotCommitted}


async def test_a_write_that_fits_no_append_is_refused_before_anything_is_stored(
    metadata: MemoryStore,
) -> None:
    objects = MemoryObjectStore()
    writer = WalWriter(metadata, objects, zone="z", incarnation="00" * 16)
    tiny = built(1, 0, 0) * (metadata.limits.max_bytes // 50)
    with pytest.raises(TooLarge):
        await writer.write(D, tiny)
    assert await objects.list() == []
    await writer.close()


@pytest.mark.parametrize(
    "error",
    [
        ObjectStoreFull("no space left"),
        ObjectStoreDenied("the credentials have expired"),
        ObjectStoreMisconfigured("the bucket is gone"),
        ObjectStoreMisconfigured("the clock is off"),
        ObjectStoreUnavailable("no answer"),
    ],
    ids=str,
)
async def test_trouble_with_the_object_store_loses_nothing_and_leaves_nothing(
    writer: WalWriter, slow: SlowObjects, metadata: MemoryStore, error: ObjectStoreError
) -> None:
    write = start(writer, pending(1))
    await slow.wait_for(1)
    slow.gates[0].set_exception(error)
    with pytest.raises(NotCommitted) as caught:
        await write
    assert caught.value.__cause__ is error  # says which setting, or what to do
    assert await metadata.tail(D, sequence_of(1)) is None
    await OrphanCollector(metadata, slow).collect(D, 10**15, 0)
    assert await metadata.scan(D, STAGING, limit=10) == []
    again = start(writer, pending(1))
    await slow.wait_for(2)
    slow.gates[1].set_result(None)
    assert (await again).start_offset == 0


class TestOrphans:
    async def test_one_that_cannot_be_read_does_not_keep_the_others(self, metadata: MemoryStore) -> None:
        objects, now_ms = MemoryObjectStore(), 10**6
        await metadata.put(D, f"{STAGING}/000", b"rubbish")
        marker = Marker(UUID(int=5), "wal/v1/x.wo", 10, 0)
        await metadata.put(D, marker_key(marker.object_id), encode_marker(marker))
        await objects.put(marker.path, b"orphan")
        done = await OrphanCollector(metadata, objects).collect(D, now_ms, 0)
        assert (done.failed, done.objects_deleted, done.markers_removed) == (1, 1, 1)
        assert await objects.list() == []

    async def test_a_fence_stays_as_long_as_entries_refer_to_its_object(self, metadata: MemoryStore) -> None:
        collector = OrphanCollector(metadata, MemoryObjectStore())
        kept, gone = UUID(int=1), UUID(int=2)
        fence = encode_record(ObjectRecord(State.FENCED, "wal/v1/x.wo", 1, 0))
        for object_id in (kept, gone):
            await metadata.put(D, record_key(object_id), fence)
        await metadata.put(D, reference_key(kept, 9), b"")
        assert (await collector.forget_fences(D, 10**6, 0)).fences_removed == 1
        assert await metadata.get(D, record_key(kept)) is not None
        await metadata.delete(D, reference_key(kept, 9))
        assert (await collector.forget_fences(D, 10**6, 0)).fences_removed == 1


def test_the_settings_are_the_defaults_of_the_writer() -> None:
    settings = load_settings(environ={})
    assert settings.wal_segment_bytes == writer_module.TARGET_BYTES == 8 * 2**20
    assert settings.wal_linger_ms == writer_module.LINGER_MS == 250
    assert settings.wal_buffer_bytes == writer_module.MAX_BUFFER_BYTES
