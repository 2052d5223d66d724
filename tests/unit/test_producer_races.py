"""What the simulation of producers found, each as small as it can be shown."""

from __future__ import annotations

import asyncio

import pytest

from dray.errors import NotCommitted, Unavailable
from dray.index import decided as decided_module
from dray.index.entry import Placed, is_decided
from dray.index.fold import Fold, decode
from dray.producers import folds as folds_module
from dray.producers.folds import snapshot_key
from tests.idempotence_world import Broker, S, World, world_fixture
from tests.index_entries import INCARNATION
from tests.log_node import DOMAIN, payload, settle, soon

world = world_fixture(True, False)
weak = world_fixture(False)
strong = world_fixture(True)


async def never(_: Placed) -> None: ...


async def undecided(a: Broker, b: Broker, *sequences: int) -> None:
    """Broker A writes these in one entry, and B comes before it. Nobody resolves that."""
    a.writer.resolve = never
    a.store.before = lambda: b.append(S, payload(b"between"))
    for answer in [a.writing(sequence) for sequence in sequences]:
        await soon(answer)


async def test_7_a_retry_in_the_same_append_as_its_original_shares_its_fate(strong: World) -> None:
    """It was answered before the append was sent."""
    a = await strong.broker(target_bytes=100)
    released = asyncio.Event()

    async def fail() -> None:
        raise Unavailable("the store is away")

    async def hold() -> None:
        await released.wait()
        a.store.before = fail

    a.store.before = hold
    first = a.writing(0)
    await settle()
    original, again = a.writing(1), a.writing(1)
    await settle()
    released.set()
    assert (await soon(first)).start_offset == 0
    for answer in (original, again):
        with pytest.raises(NotCommitted):
            await soon(answer)
    assert await a.write(1) == 1
    assert await a.offsets() == [0, 1]


async def test_16_a_snapshot_that_is_far_ahead_is_left_alone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever begins far back meets it early, and may not take its version for leave to replace it."""
    monkeypatch.setattr(folds_module, "PAGE_ENTRIES", 4)
    a, b = await world.broker(), await world.broker()
    a.folds._snapshot_entries = 9
    for sequence in range(9):
        await a.write(sequence)
    await a.folds.close()
    b.folds._snapshot_entries = 4
    b.folds._streams[S] = folds_module._Stream(Fold(), None, 0)
    await b.folds.catch_up(S)
    await b.folds.close()
    record = await a.store.get(DOMAIN, snapshot_key(S))
    assert record is not None
    assert decode(record.value).end == 9


async def test_more_undecided_entries_than_are_remembered_are_resolved(
    weak: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first one on: its verdicts are the ones to remember."""
    monkeypatch.setattr(folds_module, "MAX_UNDECIDED", 2)
    a, b = await weak.broker(), await weak.broker()
    for sequence in range(5):
        await undecided(a, b, sequence)
    assert not all(is_decided(placed, INCARNATION) for placed in weak.stored())
    c = await weak.broker()
    for _ in range(20):
        await c.index.end(S)
        await settle()
    assert all(is_decided(placed, INCARNATION) for placed in weak.stored())
    assert (await c.index.end(S)).end_records == weak.stored()[-1].end_offset


async def test_18_a_duplicate_in_the_midst_of_an_undecided_entry_can_be_read(weak: World) -> None:
    a, b = await weak.broker(), await weak.broker()
    b.index._resolve_after_s = 3600.0
    await undecided(a, b, 0, 1)
    assert await b.write(0) == 1, "as A has written it"
    assert 1 in await b.offsets()


async def test_18_a_duplicate_that_only_a_snapshot_tells_of_can_be_read(world: World) -> None:
    """The snapshot is ahead of the watch."""
    a, b = await world.broker(), await world.broker()
    a.folds._snapshot_entries = 6
    await a.write(0)
    assert await b.offsets() == [0]
    b.store.watch_gate.close()
    for sequence in range(1, 6):
        await a.write(sequence)
    await a.folds.close()
    b.folds.drop(S)
    assert await b.write(5) == 5
    assert await b.offsets() == list(range(6))
    b.store.watch_gate.open()


async def test_a_snapshot_that_is_ahead_of_the_watch_is_no_high_watermark(
    weak: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it covers would not be found."""
    monkeypatch.setattr(decided_module, "PAGE_ENTRIES", 2)
    a, b = await weak.broker(), await weak.broker()
    a.folds._snapshot_entries = 2
    for sequence in range(3):
        await a.write(sequence)
    await b.index.tail(S)
    b.store.watch_gate.close()
    for sequence in range(3, 8):
        await a.write(sequence)
    await a.folds.close()
    end = (await b.index.end(S)).end_records
    assert [placed.end_offset for placed in await b.index.range(S, end - 1, 1)] == [end]
    b.store.watch_gate.open()
