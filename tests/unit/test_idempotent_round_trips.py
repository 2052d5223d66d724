"""What idempotence costs at the metadata store: nothing, as long as a broker writes its streams alone.

Plain and idempotent batches go through two brokers' worth of the same parts, over stores that write down
every call and its size. Only what is said while nobody else writes is compared: the first batch of a stream
loads its fold.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import pytest

from dray.log.read import Want
from dray.metadata.memory import MemoryData, MemoryStore
from dray.metadata.store import MetadataStore
from dray.objectstore.memory import MemoryObjectStore
from tests.batches import build_batch
from tests.log_node import CONFIGS, Node, settle, soon

STREAMS = (0x51, 0x52, 0x53)
ROUNDS = 40
IN_FLIGHT = 5
# Everything that goes to the store and back.
CALLS = {name for name, member in vars(MetadataStore).items() if inspect.iscoroutinefunction(member)}

both = pytest.mark.parametrize("conditions_abort", [True, False], ids=["strong", "weak"])


class CountingStore(MemoryStore):
    """Writes down each call, and of an append how much it carries."""

    def __init__(self, data: MemoryData, *, conditions_abort: bool) -> None:
        super().__init__(data, conditions_abort=conditions_abort)
        self.calls: list[tuple[object, ...]] = []

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        return self._counted(name, found) if name in CALLS else found

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(domain: int, *arguments: Any, **named: Any) -> Any:
            sizes = [len(each) for each in arguments if isinstance(each, list | tuple)]
            self.calls.append((name, *sizes))
            return call(domain, *arguments, **named)

        return counted


class Client:
    """A producer that counts on, for each stream; with an id or without."""

    def __init__(self, producer_id: int) -> None:
        self._id = producer_id
        self._sequence = dict.fromkeys(STREAMS, 0)

    def batch(self, stream_id: int) -> bytes:
        if self._id < 0:
            return build_batch()
        sequence = self._sequence[stream_id]
        self._sequence[stream_id] += 1
        return build_batch(producer_id=self._id, producer_epoch=0, base_sequence=sequence)


Calls: TypeAlias = list[tuple[object, ...]]
# One round, by number.
Play: TypeAlias = Callable[[Node, list[Client], int], Awaitable[None]]


@asynccontextmanager
async def _started(conditions_abort: bool) -> AsyncIterator[tuple[Node, CountingStore]]:
    store = CountingStore(MemoryData(), conditions_abort=conditions_abort)
    node = Node(store, MemoryObjectStore())
    await node.start()
    try:
        yield node, store
    finally:
        await node.stop()


async def plain_and_idempotent(conditions_abort: bool, play: Play, producers: int = 1) -> tuple[Calls, Calls]:
    """What is asked of the store while rounds are played by such producers, but for the first round."""

    async def calls(ids: Iterable[int]) -> Calls:
        clients = [Client(producer_id) for producer_id in ids]
        async with _started(conditions_abort) as (node, store):
            for number in range(ROUNDS):
                if number == 1:
                    store.calls.clear()
                await play(node, clients, number)
            return store.calls.copy()

    return await calls([-1] * producers), await calls(range(producers))


def test_every_call_is_counted() -> None:
    assert {"append", "get", "put", "delete", "scan", "entries", "tail", "floor", "ceiling", "swap"} <= CALLS
    assert "barrier" in CALLS


@both
@pytest.mark.parametrize("producers", [1, 3])
async def test_one_batch_after_the_other(conditions_abort: bool, producers: int) -> None:
    async def play(node: Node, clients: list[Client], number: int) -> None:
        for client in clients:
            for stream_id in STREAMS:
                await soon(node.append(stream_id, client.batch(stream_id)))

    plain, idempotent = await plain_and_idempotent(conditions_abort, play, producers)
    assert idempotent == plain
    assert {name for name, *_ in plain} == {"append"}
    assert len(plain) == (ROUNDS - 1) * producers * len(STREAMS)


@both
async def test_five_in_flight_on_several_streams(conditions_abort: bool) -> None:
    async def play(node: Node, clients: list[Client], number: int) -> None:
        (client,) = clients
        sent = [
            node.appender.append(stream_id, CONFIGS, client.batch(stream_id)).committed
            for _ in range(IN_FLIGHT)
            for stream_id in STREAMS
        ]
        await soon(asyncio.gather(*sent))

    plain, idempotent = await plain_and_idempotent(conditions_abort, play)
    assert idempotent == plain
    assert {name for name, *_ in plain} == {"append"}


@both
async def test_objects_that_are_uploaded_while_one_is_appended(conditions_abort: bool) -> None:
    """Where each record of an append passes or fails alone, those with producers of a stream share none."""

    async def play(node: Node, clients: list[Client], number: int) -> None:
        (client,) = clients
        sent = []
        for _ in range(IN_FLIGHT):
            sent.append(node.appender.append(STREAMS[0], CONFIGS, client.batch(STREAMS[0])).committed)
            for _ in range(number % 4):
                await asyncio.sleep(0)
        await soon(asyncio.gather(*sent))

    plain, idempotent = await plain_and_idempotent(conditions_abort, play)
    assert {name for name, *_ in idempotent} == {name for name, *_ in plain}
    if conditions_abort:
        assert idempotent == plain


@both
async def test_readers_at_the_end_cost_nothing_more(conditions_abort: bool) -> None:
    async def play(node: Node, clients: list[Client], number: int) -> None:
        (client,) = clients
        await soon(node.append(STREAMS[0], client.batch(STREAMS[0])))
        want = Want(STREAMS[0], number, 2**20)
        fetched = await soon(node.reader.fetch([want], min_bytes=1, max_bytes=2**20, max_wait_s=0))
        assert fetched.partitions[0].high_watermark == number + 1
        fetched.release()

    plain, idempotent = await plain_and_idempotent(conditions_abort, play)
    assert idempotent == plain


@both
async def test_duplicates_and_old_epochs_ask_nobody(conditions_abort: bool) -> None:
    async with _started(conditions_abort) as (node, store):
        client = Client(7)
        sent = [client.batch(STREAMS[0]) for _ in range(IN_FLIGHT)]
        committed = [await soon(node.append(STREAMS[0], batch)) for batch in sent]
        store.calls.clear()
        assert [await soon(node.append(STREAMS[0], batch)) for batch in sent] == committed
        assert store.calls == []


@both
async def test_brokers_in_turn_hear_of_each_other_by_the_watch(conditions_abort: bool) -> None:
    """What another has written is read before the append, and not only once that has failed for it."""
    data, objects = MemoryData(), MemoryObjectStore()
    stores = [CountingStore(data, conditions_abort=conditions_abort) for _ in range(2)]
    nodes = [Node(store, objects) for store in stores]
    for node in nodes:
        await node.start()
    try:
        clients = [Client(1), Client(2)]
        for number in range(ROUNDS):
            if number == 1:
                for store in stores:
                    store.calls.clear()
            for node, client in zip(nodes, clients, strict=True):
                await soon(node.append(STREAMS[0], client.batch(STREAMS[0])))
                await settle()
        for store in stores:
            reads = ["entries"] if conditions_abort else ["entries", "get"]  # the object's record counts too
            assert [name for name, *_ in store.calls] == [*reads, "append"] * (ROUNDS - 1)
    finally:
        for node in nodes:
            await node.stop()
