"""Idempotent producers where something fails, or comes in an awkward order: who is told and sees what."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dray.errors import CommitUnknown, NotCommitted, Unavailable
from dray.index import decided
from dray.index.entry import Placed
from dray.index.fold import Verdict
from dray.metadata.store import AppendResult
from dray.producers.folds import INLINE_BYTES, snapshot_key
from dray.wal import judging
from dray.wal.objects import ObjectRecord, State, encode_record, record_key
from dray.wal.writer import Committed
from tests.idempotence_world import Broker, S, World, world_fixture
from tests.index_entries import INCARNATION
from tests.log_node import CONFIGS, DOMAIN, Gate, payload, settle, soon

world = world_fixture(True, False)
weak = world_fixture(False)
strong = world_fixture(True)


async def all_of(*writing: Any) -> list[Committed | BaseException]:
    return await soon(asyncio.gather(*writing, return_exceptions=True))


class TestARetryBesideItsOriginal:
    """In another object, but where the store allows it in the same append."""

    async def both(self, a: Broker, before: Any) -> list[Committed | BaseException]:
        """`before` happens right before the append that carries the original."""
        gate = Gate()
        gate.close()

        async def hold() -> None:
            a.store.before = before
            await gate()

        a.store.before = hold
        other = a.writing(0, stream_id=S + 1)
        await settle()
        first, again = a.writing(1), a.writing(1)
        await settle()
        gate.open()
        await soon(other)
        return await all_of(first, again)

    @pytest.fixture
    async def a(self, world: World) -> Broker:
        a = await world.broker(target_bytes=100)
        await a.write(0)
        return a

    async def test_nothing_is_acknowledged_that_is_not_there(self, a: Broker) -> None:
        async def away() -> None:
            raise Unavailable("away")

        told = await self.both(a, away)
        assert isinstance(told[0], NotCommitted)
        there = await a.offsets()
        assert all(one.start_offset in there for one in told if isinstance(one, Committed))

    async def test_its_offset_is_where_the_original_landed(self, a: Broker, world: World) -> None:
        b = await world.broker()
        told = await self.both(a, lambda: b.append(S, payload(b"x", b"y")))
        assert told == [Committed(3, 4), Committed(3, 4)]

    async def test_it_stands_in_for_an_original_that_was_fenced(self, a: Broker, world: World) -> None:
        async def fence() -> None:
            original = a.writer._pipelines[DOMAIN]._on_way[0]
            record = ObjectRecord(State.FENCED, original.path, 1, 1)
            await a.store.put(DOMAIN, record_key(original.id), encode_record(record))

        first, again = await self.both(a, fence)
        assert isinstance(first, NotCommitted)
        assert isinstance(again, Committed)
        assert again.start_offset in await (await world.broker()).offsets()


class TestOneStreamFailsAlone:
    """Others are in the same objects and appends."""

    async def three(self, a: Broker, sequence: int) -> list[Committed | BaseException]:
        plain = asyncio.ensure_future(a.append(S + 2, payload(b"x")))
        return await all_of(a.writing(sequence), a.writing(0, stream_id=S + 1), plain)

    async def test_where_its_fold_is_not_at_hand(self, world: World) -> None:
        a = await world.broker()
        await a.store.put(DOMAIN, snapshot_key(S), b"\x63")  # of a newer Dray
        bad, *good = await self.three(a, 0)
        assert isinstance(bad, NotCommitted)
        assert good == [Committed(0, 1)] * 2
        await a.store.delete(DOMAIN, snapshot_key(S))
        assert await a.write(0) == 0

    async def test_where_there_is_too_much_to_fold(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        a, b = await world.broker(), await world.broker()
        await a.write(0)
        monkeypatch.setattr(judging, "CATCH_UP_S", 0.0)
        b.store.read_gate.close()
        for _ in range(2):
            plain = asyncio.ensure_future(b.append(S + 2, payload(b"x")))
            bad, good = await all_of(b.writing(1), plain)
            assert isinstance(bad, NotCommitted)
            assert isinstance(good, Committed)
        assert b.store.reads.count(f"get {snapshot_key(S)}") == 1, "the first one goes on"
        b.store.read_gate.open()
        await settle()
        assert b.folds.fold(S) is not None
        assert await b.write(1) == 1

    async def test_where_others_are_always_faster(self, strong: World) -> None:
        a, b = await strong.broker(), await strong.broker()
        await a.write(0)
        a.writer.settle_s = 0.0
        a.store.before = lambda: b.append(S, payload(b"x"))
        bad, *good = await self.three(a, 1)
        assert isinstance(bad, NotCommitted)
        assert good == [Committed(0, 1)] * 2
        assert await a.write(1) == 2

    async def test_where_it_cannot_be_found_out_how_it_landed(self, weak: World) -> None:
        a, b = await weak.broker(), await weak.broker()
        await a.write(0)

        async def away(_: AppendResult) -> None:
            async def fail(placed: Placed) -> tuple[Verdict | None, ...]:
                a.folds.settle = kept  # type: ignore[method-assign]
                raise Unavailable("away")

            kept, a.folds.settle = a.folds.settle, fail  # type: ignore[method-assign]

        a.store.before = lambda: b.append(S, payload(b"x"))
        a.store.after = away
        unknown, *good = await self.three(a, 1)
        assert isinstance(unknown, CommitUnknown)
        assert good == [Committed(0, 1)] * 2
        assert await a.write(1) == 2, "it was there"


async def test_8_whoever_wrote_beside_a_batch_whose_verdict_is_gone(weak: World) -> None:
    """A reader resolved the entry, and what became of the void batch in it is not remembered."""
    a, b = await weak.broker(), await weak.broker()
    await a.write(0)
    a.store.before = lambda: b.write(0, epoch=1)
    kept = a.folds.settle

    async def late(placed: Placed) -> tuple[Verdict | None, ...]:
        await a.index.resolve(placed)
        return await kept(placed)

    a.folds.settle = late  # type: ignore[method-assign]
    stale = a.writing(1)
    plain, again = (a.appender.append(S, CONFIGS, payload(b"x")).committed for _ in range(2))
    unknown, *others = await all_of(stale, plain, again)
    assert isinstance(unknown, CommitUnknown)
    assert others == [Committed(3, 4), Committed(4, 5)]
    assert await b.offsets() == [0, 1, 3, 4]


async def test_19_an_end_below_the_expected_start_is_an_alarm(
    strong: World, caplog: pytest.LogCaptureFixture
) -> None:
    a = await strong.broker()
    await a.write(0)
    await a.write(1)

    async def rewind() -> None:
        strong.data.domain(DOMAIN).sequences.clear()

    a.store.before = rewind
    appends = a.store.appends
    with pytest.raises(NotCommitted):
        await a.write(2)
    assert any(record.levelname == "CRITICAL" for record in caplog.records)
    assert a.store.appends <= appends + 3, "trying again is no use"


class TestDecided:
    async def test_18_the_high_watermark_does_not_go_back_where_a_read_is_stale(self, weak: World) -> None:
        """It was told by entries that were resolved between looking for the end and reading them."""
        a, b = await weak.broker(), await weak.broker()
        await a.write(0)
        readable = asyncio.Event()

        async def later(placed: Placed) -> None:
            await readable.wait()
            await a.index.resolve(placed)

        a.writer.resolve = later
        b.index._resolve_after_s = 3600.0
        a.store.before = lambda: b.append(S, payload(b"x"))
        await a.write(1)
        await settle()
        assert (await b.read()).high_watermark == 2
        b.store.fall_behind()
        past, b.store._past = b.store._past, None
        read = b.index.range

        async def resolved_meanwhile(*args: Any, **more: Any) -> list[Placed]:
            readable.set()
            await settle()
            return await read(*args, **more)

        b.index.range = resolved_meanwhile  # type: ignore[method-assign]
        assert (await b.read()).high_watermark == 3
        b.index.range = read  # type: ignore[method-assign]
        b.cache.close(DOMAIN)
        b.store._past = past
        assert (await b.read()).high_watermark == 3

    async def test_a_snapshot_that_cannot_be_prepared_is_no_matter_to_a_reader(
        self, weak: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        a, b = await weak.broker(), await weak.broker()
        monkeypatch.setattr(decided, "SNAPSHOT_ENTRIES", 2)
        for n in range(4):
            await a.write(n)
        await a.store.put(DOMAIN, snapshot_key(S), b"\x63")  # of a newer Dray
        assert await b.offsets() == [0, 1, 2, 3]

    async def test_snapshots_where_all_is_decided_whatever_the_incarnation(self, strong: World) -> None:
        a, late = await strong.broker(), await strong.broker()
        await a.write(0)
        late.index._incarnation = late.folds.incarnation = late.writer.incarnation = INCARNATION[::-1]
        late.folds._snapshot_entries = 3
        for n in range(1, 5):
            await late.write(n)
            await late.folds.close()
        assert await late.store.get(DOMAIN, snapshot_key(S)) is not None

    async def test_a_snapshot_of_many_producers(self, world: World) -> None:
        a = await world.broker()
        a.folds._snapshot_entries = 1
        await all_of(*(a.writing(0, producer=n) for n in range(1_000)))
        await a.folds.close()
        b = await world.broker()
        record = await b.store.get(DOMAIN, snapshot_key(S))
        assert record is not None
        assert len(record.value) > INLINE_BYTES
        assert await b.write(0, producer=0) == 0
        assert await b.write(1, producer=999) == 1_000
