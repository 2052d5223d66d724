"""Brokers over one store, written to by idempotent producers, for tests that say what happens in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from dray.index.entry import Placed, WalChunk, place_all, sequence_of
from dray.log.read import Got, Want
from dray.metadata.memory import MemoryData
from dray.metadata.store import AppendResult
from dray.objectstore.memory import MemoryObjects
from dray.producers.folds import StreamFolds
from dray.wal.writer import Committed
from tests.batches import build_batch
from tests.log_node import CONFIGS, DOMAIN, HeldObjects, HeldStore, Node, records_of, soon

S = 0x51
P = 4_000
MANY = 2**31 - 1


class Store(HeldStore):
    """Lets a test act right before and right after an append."""

    before: Any = None
    after: Any = None
    appends = 0

    async def append(self, domain: int, entries: Any, puts: Any = (), deletes: Any = ()) -> AppendResult:
        self.appends += 1
        if self.before is not None and entries:
            act, self.before = self.before, None
            await act()
        result = await super().append(domain, entries, puts, deletes)
        if self.after is not None and entries:
            act, self.after = self.after, None
            await act(result)
        return result


class Broker(Node):
    """A node that is written to as an idempotent producer does, one batch at a time."""

    store: Store
    objects: HeldObjects

    async def write(
        self, sequence: int, records: int = 1, *, producer: int = P, epoch: int = 0, stream_id: int = S
    ) -> int:
        return (
            await soon(self.writing(sequence, records, producer=producer, epoch=epoch, stream_id=stream_id))
        ).start_offset

    def writing(
        self, sequence: int, records: int = 1, *, producer: int = P, epoch: int = 0, stream_id: int = S
    ) -> asyncio.Future[Committed]:
        body = b"".join(bytes([0x0C, 0, 0, 2 * delta, 0, 0, 0]) for delta in range(records))
        batch = build_batch(
            body, producer_id=producer, producer_epoch=epoch, base_sequence=sequence, records=records
        )
        return self.appender.append(stream_id, CONFIGS, batch).committed

    async def read(self, offset: int = 0, stream_id: int = S, **limits: Any) -> Got:
        limits = {"min_bytes": 1, "max_bytes": MANY, "max_wait_s": 0.0, **limits}
        fetched = await soon(self.reader.fetch([Want(stream_id, offset, MANY)], **limits))
        fetched.release()
        return fetched.partitions[0]

    async def offsets(self, offset: int = 0) -> list[int]:
        """The offsets that have a record."""
        return [at for at, _ in records_of(await self.read(offset))]

    @property
    def folds(self) -> StreamFolds:
        return self.index.folds


@dataclass
class World:
    """Brokers over one metadata store, of one kind or the other, and one object store."""

    conditions_abort: bool
    data: MemoryData = field(default_factory=MemoryData)
    objects: MemoryObjects = field(default_factory=MemoryObjects)
    brokers: list[Broker] = field(default_factory=list)

    async def broker(self, **settings: Any) -> Broker:
        store = Store(self.data, conditions_abort=self.conditions_abort)
        broker = Broker(store, HeldObjects(self.objects), **settings)
        broker.index._resolve_after_s = 0.0
        self.brokers.append(broker)
        await broker.start()
        return broker

    async def close(self) -> None:
        for broker in self.brokers:
            await broker.stop()
            await broker.index.close()

    def stored(self) -> list[Placed]:
        return place_all(self.data.domain(DOMAIN).sequences.get(sequence_of(S), []))

    def chunks(self) -> list[WalChunk]:
        return [placed.entry.where for placed in self.stored() if isinstance(placed.entry.where, WalChunk)]


def world_fixture(*conditions_abort: bool) -> Any:
    """A fixture of worlds, one over each of these kinds of stores.

    On one, an entry that would not start where it expects fails its append; on the other it lands.
    """

    @pytest.fixture(params=conditions_abort, ids=lambda aborts: "whole" if aborts else "each-alone")
    async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
        world = World(request.param)
        yield world
        await world.close()

    return world
