"""Two brokers append to and read from the same partitions, on every kind of store.

The model is one list per stream: the value of every offset, or None where it is void. What a client decodes
from a fetch must be that list, from the batch that holds the wanted offset on.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from dray.errors import NotCommitted, OffsetOutOfRange, VersionConflict
from dray.index.changes import carry_out, truncate
from dray.index.entry import Placed, WalChunk, place_all, sequence_of
from dray.log.read import Got, Want
from dray.metadata.store import EntryChange
from dray.objectstore.memory import MemoryObjects
from tests.batches import end_of
from tests.conformance.backends import Backend, MemoryBackend
from tests.index_entries import INCARNATION
from tests.log_node import DOMAIN, HeldObjects, HeldStore, Node, payload, records_of, soon
from tests.stateful.running import run_on

T = TypeVar("T")

STREAMS = (0x51, 0x52, 0x53)
MANY = 2**31 - 1


class Machine(RuleBasedStateMachine):
    backend_factory: Any  # set by the test: makes an empty store

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.directory = tempfile.TemporaryDirectory()
        self.backend: Backend = type(self).backend_factory(Path(self.directory.name))
        self.objects = MemoryObjects()
        self.nodes: list[Node] = [self.call(self.start()) for _ in range(2)]
        self.model: dict[int, list[bytes | None]] = {stream_id: [] for stream_id in STREAMS}
        self.firsts: dict[int, list[int]] = {stream_id: [] for stream_id in STREAMS}  # of batches
        self.log_starts = dict.fromkeys(STREAMS, 0)
        self.told: list[Counter[tuple[str, int]]] = [Counter(), Counter()]
        self.written = 0

    def call(self, work: Awaitable[T]) -> T:
        return self.runner.run(soon(work))

    async def start(self) -> Node:
        store = await self.backend.open()
        if isinstance(self.backend, MemoryBackend):
            store = HeldStore(self.backend._data, conditions_abort=store.conditions_abort)
        # So little memory that entries, objects and blocks give way all the time.
        node = Node(
            store,
            HeldObjects(self.objects),
            index_bytes=8_000,
            cache_bytes=4_000,
            block_bytes=500,
            buffer_bytes=2_000,
        )
        await node.start()
        return node

    def open_gate(self, who: int) -> None:
        store = self.nodes[who].store
        if isinstance(store, HeldStore):
            store.watch_gate.open()

    def teardown(self) -> None:
        for node in self.nodes:
            self.call(node.stop())
            self.call(node.store.close())
        self.runner.close()
        self.directory.cleanup()

    def stored(self, stream_id: int) -> list[Placed]:
        return place_all(self.call(self.nodes[0].store.entries(DOMAIN, sequence_of(stream_id), 0, 10_000)))

    def values(self, count: int, size: int) -> list[bytes]:
        self.written += count
        return [b"%d" % number + b"." * size for number in range(self.written - count, self.written)]

    def add(self, stream_id: int, batch: list[bytes]) -> None:
        self.firsts[stream_id].append(len(self.model[stream_id]))
        self.model[stream_id] += batch

    @rule(
        who=st.integers(0, 1),
        to=st.lists(
            st.tuples(
                st.sampled_from(STREAMS),
                st.lists(st.tuples(st.integers(1, 4), st.integers(0, 600)), min_size=1, max_size=3),
            ),
            min_size=1,
            max_size=4,
        ),
    )
    def append(self, who: int, to: list[tuple[int, list[tuple[int, int]]]]) -> None:
        node = self.nodes[who]

        async def append_all(payloads: list[tuple[int, bytes]]) -> list[tuple[int, int]]:
            under_way = [node.append(stream_id, batches) for stream_id, batches in payloads]
            return [(done.start_offset, done.end_offset) for done in await asyncio.gather(*under_way)]

        payloads, expected = [], []
        for stream_id, shapes in to:
            start = len(self.model[stream_id])
            data = b""
            for count, size in shapes:
                batch = self.values(count, size)
                self.add(stream_id, batch)
                data += payload(*batch)
            payloads.append((stream_id, data))
            expected.append((start, len(self.model[stream_id])))
        assert self.call(append_all(payloads)) == expected
        for stream_id, _ in to:
            self.told[who]["end", stream_id] = len(self.model[stream_id])

    @rule(who=st.integers(0, 1), stream_id=st.sampled_from(STREAMS), count=st.integers(1, 3))
    def append_what_is_fenced(self, who: int, stream_id: int, count: int) -> None:
        node = self.nodes[who]
        assert isinstance(node.objects, HeldObjects)
        node.objects.fence_next = node.store
        with pytest.raises(NotCommitted):
            self.call(node.append(stream_id, payload(*self.values(count, 0))))
        if not node.store.conditions_abort:
            self.firsts[stream_id].append(len(self.model[stream_id]))
            self.model[stream_id] += [None] * count

    @rule(who=st.integers(0, 1), how=st.sampled_from(["late", "stale", "caught up"]))
    def delay(self, who: int, how: str) -> None:
        """Where the watch is late or reads are stale, less may show, but nothing wrong."""
        store = self.nodes[who].store
        if isinstance(store, HeldStore):
            self.open_gate(who)
            if how == "late":
                store.watch_gate.close()
            elif how == "stale":
                store.fall_behind()

    @rule(stream_id=st.sampled_from(STREAMS), data=st.data(), collect=st.booleans())
    def truncate(self, stream_id: int, data: st.DataObject, collect: bool) -> None:
        self.call(self.nodes[0].store.barrier(DOMAIN))
        stored = self.stored(stream_id)
        before = data.draw(st.integers(0, len(self.model[stream_id])))
        swap = truncate(stored, before, 1, INCARNATION)
        if swap is None:
            return
        try:
            self.call(carry_out(self.nodes[0].store, DOMAIN, swap))
        except VersionConflict:
            return  # somebody marked a void entry
        self.log_starts[stream_id] = swap.at.end_records
        if collect:
            kept = {
                placed.entry.where.path
                for each in STREAMS
                for placed in self.stored(each)
                if isinstance(placed.entry.where, WalChunk)
            }
            for path in set(self.objects.objects) - kept:
                del self.objects.objects[path]

    @rule(
        who=st.integers(0, 1),
        data=st.data(),
        streams=st.lists(st.sampled_from(STREAMS), min_size=1, max_size=4),
        max_bytes=st.one_of(st.integers(0, 4_000), st.just(MANY)),
    )
    def fetch(self, who: int, data: st.DataObject, streams: list[int], max_bytes: int) -> None:
        wants = []
        for stream_id in streams:
            offset = data.draw(st.integers(-1, len(self.model[stream_id]) + 1))
            limit = data.draw(st.one_of(st.integers(0, 3_000), st.just(MANY)))
            wants.append(Want(stream_id, offset, limit))
        self.check(who, wants, self.fetched(who, wants, max_bytes), max_bytes)

    def fetched(self, who: int, wants: list[Want], max_bytes: int, max_wait_s: float = 0.0) -> list[Got]:
        reader = self.nodes[who].reader
        done = self.call(reader.fetch(wants, min_bytes=1, max_bytes=max_bytes, max_wait_s=max_wait_s))
        for got in done.partitions:
            if got.records is not None:  # before it is released, as it is sent
                got.records.buffers = [b"".join(got.records.buffers)]
        done.release()
        assert reader._budget.taken == 0
        return done.partitions

    def check(self, who: int, wants: list[Want], answers: list[Got], max_bytes: int) -> None:
        total = batches = 0
        served = 0
        for want, got in zip(wants, answers, strict=True):
            if got.error is None:
                size, count = self.check_one(who, want, got)
                total += size
                batches += count
                served += want.offset < got.high_watermark
                assert size <= want.max_bytes or count == 1
            else:
                assert isinstance(got.error, OffsetOutOfRange)
                in_range = self.log_starts[want.stream_id] <= want.offset <= len(self.model[want.stream_id])
                assert not in_range
        assert total <= max_bytes or batches == 1
        assert batches > 0 or served == 0, "at least one batch, however small the limits are"

    def check_one(self, who: int, want: Want, got: Got) -> tuple[int, int]:
        """Size and number of the batches, once they are known to be those of the model."""
        model, told = self.model[want.stream_id], self.told[who]
        assert 0 <= want.offset <= got.high_watermark <= len(model)
        assert told["end", want.stream_id] <= got.high_watermark
        assert told["start", want.stream_id] <= got.log_start <= self.log_starts[want.stream_id]
        assert got.log_start <= want.offset
        told["end", want.stream_id] = got.high_watermark
        told["start", want.stream_id] = got.log_start
        assert got.records is not None
        data = b"".join(got.records.buffers)
        at = 0
        firsts = []
        end = want.offset
        while at < len(data):
            firsts.append(int.from_bytes(data[at : at + 8]))
            end = firsts[-1] + int.from_bytes(data[at + 23 : at + 27]) + 1
            at += 12 + int.from_bytes(data[at + 8 : at + 12])
        assert at == len(data)
        if firsts:
            assert firsts[0] <= want.offset < end <= got.high_watermark
            assert firsts == [first for first in self.firsts[want.stream_id] if firsts[0] <= first < end]
            expected = [(n, model[n]) for n in range(firsts[0], end) if model[n] is not None]
            assert records_of(got) == expected
        return len(data), len(firsts)

    @rule(
        who=st.integers(0, 1),
        stream_id=st.sampled_from(STREAMS),
        writers=st.lists(st.integers(0, 1), min_size=1, max_size=4),
        size=st.integers(0, 300),
    )
    def wait_for_all_of_these(self, who: int, stream_id: int, writers: list[int], size: int) -> None:
        self.open_gate(who)
        end = len(self.model[stream_id])
        values = self.values(len(writers), size)
        batches = [payload(value) for value in values]

        async def both() -> Got:
            reading = asyncio.create_task(
                self.nodes[who].reader.fetch(
                    [Want(stream_id, end, MANY)],
                    min_bytes=sum(map(len, batches)),
                    max_bytes=MANY,
                    max_wait_s=60.0,
                )
            )
            for writer, batch in zip(writers, batches, strict=True):
                await asyncio.sleep(0)
                assert not reading.done()
                await self.nodes[writer].append(stream_id, batch)
            done = await reading
            done.release()
            return done.partitions[0]

        got = self.call(both())
        for value in values:
            self.add(stream_id, [value])
        assert got.high_watermark == len(self.model[stream_id])
        assert records_of(got) == list(enumerate(values, end))

    @rule(who=st.integers(0, 1))
    def catch_up(self, who: int) -> None:
        """Once the watch has told all, everything is there to the record, and nothing else is."""
        self.open_gate(who)
        node = self.nodes[who]
        self.call(node.store.barrier(DOMAIN))  # a stale read may still show an older log start
        stream_id = STREAMS[0]
        (value,) = self.values(1, 0)

        async def wait() -> None:
            seen = asyncio.Event()
            sequence, end = sequence_of(stream_id), len(self.model[stream_id]) + 1
            apply = node.cache.apply

            def noted(domain: int, changes: Any) -> None:
                changes = list(changes)
                apply(domain, changes)
                if any(
                    isinstance(change, EntryChange)
                    and (change.sequence, change.position.end_records) == (sequence, end)
                    for change in changes
                ):
                    seen.set()

            node.cache.apply = noted  # type: ignore[method-assign]
            try:
                await self.nodes[1 - who].append(stream_id, payload(value))
                await seen.wait()
            finally:
                node.cache.apply = apply  # type: ignore[method-assign]

        self.call(wait())
        self.add(stream_id, [value])
        for each in STREAMS:
            log_start, model = self.log_starts[each], self.model[each]
            at, records = log_start, []
            while at < len(model):
                want = Want(each, at, 700)
                answers = self.fetched(who, [want], MANY)
                self.check(who, [want], answers, MANY)
                (got,) = answers
                assert (got.high_watermark, got.log_start) == (len(model), log_start)
                found = records_of(got)
                records += [record for record in found if record[0] >= at]
                assert got.records is not None
                (data,) = got.records.buffers
                at = end_of(bytes(data))
            expected = [(n, model[n]) for n in range(log_start, len(model)) if model[n] is not None]
            assert records == expected
            for gone in range(log_start):
                (got,) = self.fetched(who, [Want(each, gone, MANY)], MANY)
                assert isinstance(got.error, OffsetOutOfRange)

    @precondition(lambda self: self.written)
    @rule(who=st.integers(0, 1))
    def restart(self, who: int) -> None:
        """All memory is gone."""
        self.call(self.nodes[who].stop())
        self.call(self.nodes[who].store.close())
        self.nodes[who] = self.call(self.start())
        self.told[who] = Counter()


@pytest.mark.parametrize("name", ["memory", "memory-each-alone", "sqlite"])
def test_both_brokers_read_what_either_wrote(name: str, request: pytest.FixtureRequest) -> None:
    run_on(Machine, name, request, examples=15, in_memory=120, steps=30)
