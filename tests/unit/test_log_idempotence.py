"""Idempotent producers over one or several brokers, on both kinds of stores: who is told and sees what.

The rules are those of the commit protocol; the numbers in the names are theirs.
"""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

import pytest

from dray.errors import (
    CommitUnknown,
    CorruptStore,
    NotCommitted,
    ObjectStoreError,
    OutcomeUnknown,
    OutOfOrderSequence,
    SequenceError,
    StaleEpoch,
    Unavailable,
    UnknownProducer,
)
from dray.index.changes import carry_out, replace_run, resolve
from dray.index.entry import Kind, ParquetFile, Placed, WalChunk, is_decided, sequence_of
from dray.index.fold import EXPIRATION_MS, Fold, decode, encode
from dray.metadata.store import AppendResult
from dray.producers.folds import snapshot_key
from tests.idempotence_world import Broker, P, S, World, world_fixture
from tests.index_entries import INCARNATION, of
from tests.log_node import DOMAIN, payload, records_of, settle, soon

world = world_fixture(True, False)
weak = world_fixture(False)


class TestVerdicts:
    async def test_in_order(self, world: World) -> None:
        a = await world.broker()
        assert [await a.write(n) for n in range(7)] == list(range(7))
        assert await a.offsets() == list(range(7))

    async def test_a_duplicate_has_its_old_offset_wherever_it_is_sent(self, world: World) -> None:
        a, b = await world.broker(), await world.broker()
        assert await a.write(0, 3) == 0
        assert await a.write(3, 2) == 3
        assert await a.write(0, 3) == 0
        assert await b.write(3, 2) == 3
        assert await (await world.broker()).write(0, 3) == 0, "one that has just started"
        assert len(world.stored()) == 2

    async def test_the_last_five_are_known(self, world: World) -> None:
        a = await world.broker()
        for n in range(6):
            await a.write(n)
        for n in range(1, 6):
            assert await a.write(n) == n
        with pytest.raises(OutOfOrderSequence):
            await a.write(0)

    async def test_a_gap(self, world: World) -> None:
        a = await world.broker()
        await a.write(0)
        with pytest.raises(OutOfOrderSequence):
            await a.write(2)
        assert await a.write(1) == 1
        assert await a.write(2) == 2

    async def test_an_unknown_producer_begins_at_0(self, world: World) -> None:
        a = await world.broker()
        with pytest.raises(UnknownProducer):
            await a.write(1)
        assert await a.write(0) == 0

    async def test_epochs(self, world: World) -> None:
        a = await world.broker()
        await a.write(0, epoch=3)
        with pytest.raises(StaleEpoch):
            await a.write(1, epoch=2)
        with pytest.raises(OutOfOrderSequence):
            await a.write(1, epoch=4)
        assert await a.write(0, epoch=4) == 1
        with pytest.raises(StaleEpoch):
            await a.write(1, epoch=3)

    async def test_sequences_wrap(self, world: World) -> None:
        a = await world.broker()
        fold = Fold()
        await a.write(0, producer=P + 1)
        # A state that takes two thousand million records to reach is put there.
        placed = world.stored()[0]
        chunk = placed.entry.where
        assert isinstance(chunk, WalChunk)
        fold.advance(placed)
        state = fold.producers[P + 1]
        last = state.batches[-1]._replace(first_sequence=2**31 - 2)
        fold._producers[P + 1] = state._replace(batches=(last,))
        await a.store.put(DOMAIN, snapshot_key(S), encode(fold))
        b = await world.broker()
        assert await b.write(2**31 - 1, 3, producer=P + 1) == 1
        assert await b.write(2, producer=P + 1) == 4
        assert await b.write(2**31 - 1, 3, producer=P + 1) == 1

    async def test_20_expiry_is_by_the_stamps_of_those_who_wrote(self, world: World) -> None:
        a, b = await world.broker(), await world.broker()
        now = 1_700_000_000_000
        a.writer.wall_clock_ms = lambda: now
        b.writer.wall_clock_ms = lambda: now + EXPIRATION_MS + 1
        await a.write(0)
        await a.write(0, producer=P + 1)
        assert await b.write(0, producer=P + 2) == 2, "which moves the clock of the stream"
        with pytest.raises(UnknownProducer):
            await a.write(1)
        assert await a.write(0) == 3, "it begins anew"
        with pytest.raises(UnknownProducer):
            await b.write(1, producer=P + 1)

    async def test_plain_batches_go_between(self, world: World) -> None:
        a, b = await world.broker(), await world.broker()
        for n in range(4):
            assert await a.write(n) == 2 * n
            assert (await b.append(S, payload(b"x"))).start_offset == 2 * n + 1
        assert await b.offsets() == list(range(8))

    async def test_producers_take_turns_on_two_brokers(self, world: World) -> None:
        a, b = await world.broker(), await world.broker()
        for n in range(6):
            await asyncio.gather(a.write(n), b.write(n, producer=P + 1))
        await settle()
        assert await a.offsets() == await b.offsets() == list(range(12))

    async def test_one_producer_changes_brokers(self, world: World) -> None:
        a, b = await world.broker(), await world.broker()
        for n in range(8):
            assert await (a, b)[n % 2].write(n) == n
        assert await a.offsets() == list(range(8))

    async def test_a_retry_behind_its_original_in_one_append(self, world: World) -> None:
        a = await world.broker()
        first, again, after, other = (
            a.writing(0, 2),
            a.writing(0, 2),
            a.writing(2),
            a.writing(0, producer=P + 1),
        )
        found = [(await soon(one)).start_offset for one in (first, again, after, other)]
        assert found == [0, 0, 2, 3]
        assert [batch.records for batch in world.chunks()[0].batches] == [2, 0, 1, 1]
        assert await a.offsets() == [0, 1, 2, 3]
        cold = await world.broker()
        assert await cold.offsets(1) == [0, 1, 2, 3]
        assert await cold.offsets(2) == [2, 3], "what was left out is passed over"

    async def test_what_is_refused_takes_no_offsets_and_is_not_stored(self, world: World) -> None:
        a = await world.broker()
        ahead, plain = a.writing(5), asyncio.ensure_future(a.append(S, payload(b"x")))
        with pytest.raises(UnknownProducer):
            await soon(ahead)
        assert (await soon(plain)).start_offset == 0
        with pytest.raises(OutOfOrderSequence):
            await a.write(0)
            await a.write(7)
        assert await a.offsets() == [0, 1]

    async def test_an_object_of_nothing_new_is_not_committed(self, world: World) -> None:
        a, b = await world.broker(), await world.broker()
        await a.write(0)
        a.folds.drop(S)
        appends = a.store.appends
        assert await a.write(0) == 0
        assert a.store.appends == appends
        assert len(world.stored()) == 1
        assert await b.offsets() == [0]


class TestBetween:
    """Protocol 4: others write between the check on arrival and the append."""

    async def test_a_retry_that_another_broker_commits_first(self, world: World) -> None:
        a, b = await world.broker(), await world.broker()
        await a.write(0)
        await b.write(0, producer=P + 1)
        a.store.before = lambda: b.write(1)
        assert await a.write(1) == 2, "where the other broker wrote it"
        await settle()
        assert await a.offsets() == await b.offsets() == [0, 1, 2]
        assert await b.write(1) == 2

    async def test_batches_of_others_in_between(self, world: World) -> None:
        a, b = await world.broker(), await world.broker()
        await a.write(0)
        await b.write(0, 2, producer=P + 1)
        a.store.before = lambda: b.write(2, 3, producer=P + 1)
        assert await a.write(1) == 6
        await settle()
        assert await a.offsets() == await b.offsets() == list(range(7))

    async def test_a_newer_epoch_in_between(self, world: World) -> None:
        a, b = await world.broker(), await world.broker()
        await a.write(0)
        await b.append(S, payload(b"x"))
        a.store.before = lambda: b.write(0, epoch=1)
        with pytest.raises(StaleEpoch):
            await a.write(1)
        await settle()
        assert await b.offsets() == [0, 1, 2]

    async def test_a_duplicate_of_a_batch_in_the_same_entry(self, weak: World) -> None:
        """The draft gave it an offset that the entry did not get."""
        a, b = await weak.broker(), await weak.broker()
        await a.write(0)
        await b.append(S, payload(b"x"))
        a.store.before = lambda: b.append(S, payload(b"y", b"z"))
        first, again = a.writing(1, 2), a.writing(1, 2)
        assert (await soon(first)).start_offset == (await soon(again)).start_offset == 4


class TestResolution:
    """Where entries land all the same."""

    async def collide(self, world: World) -> tuple[Broker, Broker]:
        """Broker A writes a batch that B commits first: A's copy is void at offset 2."""
        a, b = await world.broker(), await world.broker()
        await a.write(0)
        await b.write(0, producer=P + 1)
        a.store.before = lambda: b.write(1)
        return a, b

    async def test_void_batches_keep_their_offsets_and_are_not_served(self, weak: World) -> None:
        a, b = await self.collide(weak)
        assert await a.write(1) == 2
        assert await a.write(2) == 4
        await settle()
        assert weak.chunks()[3].verdicts == (Kind.DUPLICATE,)
        for broker in (a, b, await weak.broker()):
            assert await broker.offsets() == [0, 1, 2, 4]
            got = await broker.read(3)
            assert got.high_watermark == 5
            assert [at for at, _ in records_of(got)] == [4]

    async def test_readers_stop_in_front_of_what_is_undecided(self, weak: World) -> None:
        a, b = await self.collide(weak)

        async def never(_: Placed) -> None: ...

        a.writer.resolve = never
        b.index._resolve_after_s = 3600.0
        await a.write(1)
        await settle()
        assert not is_decided(weak.stored()[3], INCARNATION)
        got = await b.read(0)
        assert got.high_watermark == 3
        assert [at for at, _ in records_of(got)] == [0, 1, 2]
        beyond = await b.read(4)
        assert (beyond.error, beyond.high_watermark) == (None, 3), "not out of range: it may be decided yet"

    async def test_any_broker_resolves_what_a_dead_one_left(self, weak: World) -> None:
        a, b = await self.collide(weak)

        async def never(_: Placed) -> None: ...

        a.writer.resolve = never
        await a.write(1)
        await settle()
        waiting = asyncio.create_task(b.read(3, max_wait_s=60.0))
        got = await soon(waiting)
        assert (got.high_watermark, records_of(got)) == (4, [])
        assert weak.chunks()[3].verdicts == (Kind.DUPLICATE,)

    async def test_18_what_was_acknowledged_here_can_be_read_here(self, weak: World) -> None:
        a, b = await self.collide(weak)

        async def never(_: Placed) -> None: ...

        a.writer.resolve = never
        for broker in (a, b):
            broker.index._resolve_after_s = 3600.0
        await a.write(1)
        assert (await b.append(S, payload(b"mine"))).start_offset == 4
        assert [at for at, _ in records_of(await b.read(3))] == [4]

    async def test_2_whoever_loses_checks_what_the_other_stored(self, weak: World) -> None:
        a, b = await self.collide(weak)

        async def wrong(placed: Placed) -> None:
            await carry_out(b.store, DOMAIN, resolve(placed, [Kind.OK]))
            with pytest.raises(CorruptStore, match="was resolved as"):
                await a.index.resolve(placed)

        a.writer.resolve = wrong
        await a.write(1)
        await settle()
        assert weak.chunks()[3].verdicts == (Kind.OK,)

    async def test_2_two_resolve_at_once(self, weak: World) -> None:
        a, b = await self.collide(weak)

        async def both(placed: Placed) -> None:
            await asyncio.gather(a.index.resolve(placed), b.index.resolve(placed))

        a.writer.resolve = both
        await a.write(1)
        await settle()
        assert weak.chunks()[3].verdicts == (Kind.DUPLICATE,)

    async def test_19_another_incarnation_is_not_trusted(self, weak: World) -> None:
        a = await weak.broker()
        await a.write(0)
        placed = weak.stored()[0]
        assert is_decided(placed, INCARNATION)
        assert not is_decided(placed, INCARNATION[::-1])
        late = await weak.broker()
        late.index._incarnation = late.folds.incarnation = INCARNATION[::-1]
        late.index._resolve_after_s = 3600.0
        assert (await late.read(0)).high_watermark == 0
        await late.index.resolve(placed)
        assert weak.chunks()[0].verdicts == (Kind.OK,)
        assert await late.offsets() == [0]

    async def test_19_a_start_below_the_expected_one_is_an_alarm(
        self, weak: World, caplog: pytest.LogCaptureFixture
    ) -> None:
        a = await weak.broker()
        await a.write(0)
        await a.write(1)

        async def rewind() -> None:
            weak.data.domain(DOMAIN).sequences[sequence_of(S)].clear()

        a.store.before = rewind
        with pytest.raises(CommitUnknown, match="began again at 0"):
            await a.write(2)
        assert any(record.levelname == "CRITICAL" for record in caplog.records)

    async def test_two_objects_with_producers_of_one_stream_are_two_appends(self, weak: World) -> None:
        """Each record passes or fails alone, and the second was judged as though the first counted."""
        a = await weak.broker(target_bytes=100)
        await a.write(0)
        a.objects.fence_next = a.store
        writing = [a.writing(n) for n in (1, 2, 3)]
        results = await soon(asyncio.gather(*writing, return_exceptions=True))
        assert isinstance(results[0], NotCommitted)
        assert all(isinstance(one, NotCommitted) for one in results), "behind one that failed"
        assert [await a.write(n) for n in (1, 2, 3)] == [2, 3, 4]
        assert await (await weak.broker()).offsets() == [0, 2, 3, 4]


class TestFailures:
    async def test_what_follows_a_batch_that_failed_here_fails_alike(self, world: World) -> None:
        """A gap of our making must not make a client give its producer up."""
        a = await world.broker(target_bytes=100)

        async def fail(*_: Any, **__: Any) -> None:
            a.objects.put = put  # type: ignore[method-assign]
            raise ObjectStoreError("full")

        put, a.objects.put = a.objects.put, fail  # type: ignore[method-assign]
        results = await soon(asyncio.gather(*(a.writing(n) for n in range(4)), return_exceptions=True))
        assert [type(one) for one in results] == [NotCommitted] * 4
        assert [await a.write(n) for n in range(4)] == [0, 1, 2, 3]

    async def test_but_not_for_ever(self, world: World) -> None:
        a = await world.broker()
        await a.write(0)
        cancelled = a.writing(1)
        cancelled.cancel()
        await settle()
        for _ in range(5):
            with pytest.raises(NotCommitted):
                await a.write(2)
        with pytest.raises(OutOfOrderSequence):
            await a.write(2)

    async def test_10_a_stale_read_makes_no_gap(self, world: World) -> None:
        a, b = await world.broker(), await world.broker()
        await a.write(0)
        b.store.watch_gate.close()
        b.store.fall_behind()
        await a.write(1)
        assert await b.write(2) == 2
        c = await world.broker()
        c.store.fall_behind()
        await b.write(3)
        assert await c.write(4) == 4

    async def test_the_store_is_away_while_it_is_judged(self, world: World) -> None:
        a = await world.broker()

        async def away(*_: Any) -> None:
            raise Unavailable("away")

        get, a.store.get = a.store.get, away  # type: ignore[method-assign, assignment]
        with pytest.raises(NotCommitted, match="away"):
            await a.write(0)
        a.store.get = get  # type: ignore[method-assign]
        assert await a.write(0) == 0

    async def test_an_answer_that_was_lost(self, world: World) -> None:
        a, b = await world.broker(), await world.broker()
        await a.write(0)
        await b.append(S, payload(b"x"))

        async def lose(_: AppendResult) -> None:
            raise OutcomeUnknown("lost")

        a.store.after = lose
        assert await a.write(1) == 2
        a.store.after = lose
        a.store.before = lambda: b.write(2)
        assert await a.write(2) == 3
        await settle()
        assert await b.offsets() == [0, 1, 2, 3]


class TestSnapshots:
    async def fill(self, world: World, count: int, every: int) -> Broker:
        a = await world.broker()
        a.folds._snapshot_entries = every
        for n in range(count):
            await a.write(n)
            await a.folds.close()
        return a

    async def test_15_16_after_so_many_entries_a_snapshot_is_put(self, world: World) -> None:
        a = await self.fill(world, 25, 10)
        record = await a.store.get(DOMAIN, snapshot_key(S))
        assert record is not None
        assert decode(record.value).end == 20
        b = await world.broker()
        b.store.reads.clear()
        assert await b.write(25) == 25
        assert f"entries {sequence_of(S)} 21" in b.store.reads
        assert f"entries {sequence_of(S)} 1" not in b.store.reads

    async def test_16_its_end_only_grows(self, world: World) -> None:
        a = await self.fill(world, 12, 5)
        b = await world.broker()
        b.folds._snapshot_entries = 5
        await b.folds.catch_up(S)
        old = Fold()
        for placed in world.stored()[:5]:
            old.advance(placed)
        stream = b.folds._streams[S]
        stream.snapshot_version = None
        await b.folds._put_snapshot(S, stream, old)
        record = await a.store.get(DOMAIN, snapshot_key(S))
        assert record is not None
        assert decode(record.value).end == 10

    async def test_17_a_stale_snapshot_is_read_again(self, world: World) -> None:
        """Compaction took what continues it: that says nothing about any producer."""
        a = await self.fill(world, 12, 5)
        b = await world.broker()
        b.store.fall_behind()
        for n in range(12, 15):
            await a.write(n)
            await a.folds.close()
        run = world.stored()[:13]
        await carry_out(a.store, DOMAIN, replace_run(run, of(ParquetFile(UUID(int=9), "p", 1), 13, S)))
        record = await a.store.get(DOMAIN, snapshot_key(S))
        assert record is not None
        assert decode(record.value).end == 15
        assert await b.write(15) == 15
        assert await b.write(14) == 14

    async def test_15_none_above_what_is_undecided(self, weak: World) -> None:
        a, b = await weak.broker(), await weak.broker()
        a.folds._snapshot_entries = 3

        async def never(_: Placed) -> None: ...

        a.writer.resolve = never
        a.index._resolve_after_s = 3600.0
        await a.write(0)
        a.store.before = lambda: b.append(S, payload(b"x"))
        for n in range(1, 8):
            await a.write(n)
            await a.folds.close()
        assert await a.store.get(DOMAIN, snapshot_key(S)) is None
        assert await a.offsets() == list(range(9)), "which decides it"
        await a.write(8)
        await a.folds.close()
        assert await a.store.get(DOMAIN, snapshot_key(S)) is not None

    async def test_one_that_is_damaged_is_replaced(self, world: World) -> None:
        a = await self.fill(world, 12, 5)
        await a.store.put(DOMAIN, snapshot_key(S), encode(Fold())[:-1])
        b = await world.broker()
        b.folds._snapshot_entries = 5
        assert await b.write(11) == 11
        assert await b.write(12) == 12
        await b.folds.close()
        record = await b.store.get(DOMAIN, snapshot_key(S))
        assert record is not None
        assert decode(record.value).end >= 5

    async def test_one_that_cannot_be_put_does_no_harm(self, world: World) -> None:
        a = await world.broker()
        a.folds._snapshot_entries = 1

        async def away(*_: Any) -> int:
            raise Unavailable("away")

        await a.append(S, payload(b"x"))
        put, a.store.put = a.store.put, away  # type: ignore[method-assign, assignment]
        await a.folds.catch_up(S)
        await a.folds.close()
        a.store.put = put  # type: ignore[method-assign]
        assert await a.write(0) == 1


class TestBounds:
    async def test_folds_are_forgotten_the_oldest_first(self, world: World) -> None:
        a = await world.broker()
        a.folds._max_producers = 20
        for stream_id in range(20):
            await a.write(0, stream_id=stream_id)
        assert a.folds.fold(19) is not None
        assert a.folds.fold(0) is None
        assert a.folds._weight <= 20
        assert await a.write(0, stream_id=0) == 0, "loaded anew"

    async def test_an_append_whose_folds_do_not_fit(self, world: World) -> None:
        a = await world.broker()
        a.folds._max_producers = 4
        assert [
            one.start_offset
            for one in await soon(asyncio.gather(*(a.writing(0, stream_id=n) for n in range(9))))
        ] == [0] * 9
        assert [
            one.start_offset
            for one in await soon(asyncio.gather(*(a.writing(1, stream_id=n) for n in range(9))))
        ] == [1] * 9

    async def test_the_state_of_others_is_not_touched_by_what_is_refused(self, world: World) -> None:
        a = await world.broker()
        await a.write(0)
        before = encode(await a.folds.catch_up(S))
        for producer in range(50):
            with pytest.raises(SequenceError):
                await a.write(7, producer=producer)
        assert encode(await a.folds.catch_up(S, fresh=True)) == before

    async def test_locks_go_when_nobody_waits(self, world: World) -> None:
        a = await world.broker()
        await asyncio.gather(*(a.folds.catch_up(S) for _ in range(5)))
        assert not a.folds._locks
