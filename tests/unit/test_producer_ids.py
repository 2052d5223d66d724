"""Producer ids: no two alike, whatever becomes of a broker, a call or an answer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator

import pytest

from dray.errors import CorruptStore, IncompatibleStore, OutcomeUnknown, Unavailable, VersionConflict
from dray.metadata.memory import MemoryData
from dray.metadata.store import Record
from dray.producers.ids import ProducerIds
from tests.topic_store import DiedError, Fault, FaultyStore

KEY = "producer-ids"


@pytest.fixture(params=[True, False], ids=["abort", "each-alone"])
def conditions_abort(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def faults(*given: Fault | None) -> Callable[[int], Awaitable[Fault | None]]:
    """Those for the first calls, one after the other; then none."""
    left: Iterator[Fault | None] = iter(given)

    async def before(number: int) -> Fault | None:
        return next(left, None)

    return before


async def stored(store: FaultyStore) -> bytes:
    record = await store.get(0, KEY)
    assert record is not None
    return record.value


async def test_ids_come_in_blocks_of_1000(conditions_abort: bool) -> None:
    data = MemoryData()
    store = FaultyStore(data, conditions_abort=conditions_abort)
    ids, others = ProducerIds(store), ProducerIds(store)
    assert [await ids.next() for _ in range(3)] == [0, 1, 2]
    assert await stored(store) == b'{"format":1,"next":1000}'
    assert await others.next() == 1_000
    assert [await ids.next() for _ in range(997)] == list(range(3, 1_000))
    assert await stored(store) == b'{"format":1,"next":2000}', (
        "the next block is not taken before it is needed"
    )
    assert await ids.next() == 2_000


async def test_a_block_is_one_read_and_one_write() -> None:
    store = FaultyStore(MemoryData())
    ids = ProducerIds(store)
    for _ in range(1_000):
        await ids.next()
    assert store.calls == 2


async def test_many_that_wait_take_one_block() -> None:
    store = FaultyStore(MemoryData(), before=yields())
    ids = ProducerIds(store)
    given = await asyncio.gather(*(ids.next() for _ in range(2_500)))
    assert sorted(given) == list(range(2_500))
    assert store.calls == 6


async def test_who_is_cancelled_takes_nothing_from_others() -> None:
    at_put, go_on = asyncio.Event(), asyncio.Event()

    async def before(number: int) -> None:
        if number == 2:
            at_put.set()
            await go_on.wait()

    ids = ProducerIds(FaultyStore(MemoryData(), before=before))
    first, second = (asyncio.create_task(ids.next()) for _ in range(2))
    await at_put.wait()
    first.cancel()
    await asyncio.wait([first])
    go_on.set()
    assert await second == 0
    assert first.cancelled()


async def test_all_who_wait_hear_of_a_failure_and_may_ask_again() -> None:
    async def before(number: int) -> Fault | None:
        await asyncio.sleep(0)
        return Fault.NOT_SENT if number == 2 else None

    ids = ProducerIds(FaultyStore(MemoryData(), before=before))
    for answer in await asyncio.gather(*(ids.next() for _ in range(3)), return_exceptions=True):
        assert isinstance(answer, Unavailable)
    assert await ids.next() == 0


@pytest.mark.parametrize("fault", [Fault.LOST, Fault.DONE, Fault.LATE])
async def test_a_block_with_unknown_outcome_is_never_used(fault: Fault, conditions_abort: bool) -> None:
    data = MemoryData()
    store = FaultyStore(data, conditions_abort=conditions_abort, before=faults(None, fault))
    ids = ProducerIds(store)
    assert await ids.next() == 1_000
    await store.land()
    other = ProducerIds(FaultyStore(data, conditions_abort=conditions_abort))
    assert await other.next() == 2_000


async def test_a_block_with_unknown_outcome_is_not_used_later_either() -> None:
    """Nor when the call that had it was given up."""
    unknown = [None, Fault.LOST, None] * 3  # read, put, barrier
    ids = ProducerIds(FaultyStore(MemoryData(), before=faults(*unknown[:-1])))
    with pytest.raises(Unavailable) as raised:
        await ids.next()
    assert isinstance(raised.value.__cause__, OutcomeUnknown)
    assert await ids.next() == 3_000


async def test_a_store_that_went_back_gives_no_id_again() -> None:
    """This broker's own at least; the ids of others are for whoever restores a backup."""
    ids = ProducerIds(FaultyStore(MemoryData()))
    assert await ids.next() == 0
    ids._store = FaultyStore(MemoryData())
    assert [await ids.next() for _ in range(1_000)][-1] == 1_000


async def test_a_stale_read_costs_an_attempt_only(conditions_abort: bool) -> None:
    data = MemoryData()

    class Stale(FaultyStore):
        """Until a barrier, reads are as old as the store."""

        old: Record | None = None
        fresh = False

        async def get(self, domain: int, key: str) -> Record | None:
            return await super().get(domain, key) if self.fresh else self.old

        async def barrier(self, domain: int) -> None:
            self.fresh = True

    stale = Stale(data, conditions_abort=conditions_abort)
    assert await ProducerIds(FaultyStore(data, conditions_abort=conditions_abort)).next() == 0
    stale.old = data.domain(0).records[KEY]
    assert await ProducerIds(FaultyStore(data, conditions_abort=conditions_abort)).next() == 1_000
    assert await ProducerIds(stale).next() == 2_000
    stale.old, stale.fresh = None, False
    assert await ProducerIds(stale).next() == 3_000


async def test_attempts_are_bounded() -> None:
    data = MemoryData()
    rival = FaultyStore(data)

    async def before(number: int) -> None:
        await rival.put(0, KEY, b'{"format":1,"next":5000}')

    store = FaultyStore(data, before=before)
    with pytest.raises(Unavailable, match="64 conflicts") as raised:
        await ProducerIds(store).next()
    assert isinstance(raised.value.__cause__, VersionConflict)


@pytest.mark.parametrize("fault", Fault)
@pytest.mark.parametrize("call", range(1, 5))
@pytest.mark.parametrize("crowded", [False, True])
async def test_a_fault_at_each_call(fault: Fault, call: int, crowded: bool, conditions_abort: bool) -> None:
    """At the first read and put of a broker, or behind a conflict; it goes on, or another in its place."""
    data = MemoryData()
    rival = ProducerIds(FaultyStore(data, conditions_abort=conditions_abort))
    given: list[int] = []

    async def before(number: int) -> Fault | None:
        if crowded and number == 2:
            given.extend([await rival.next() for _ in range(1_000)])
        return fault if number == call else None

    store = FaultyStore(data, conditions_abort=conditions_abort, before=before)
    ids = ProducerIds(store)
    for _ in range(3):
        try:
            given.extend([await ids.next() for _ in range(500)])
        except Unavailable:
            continue
        except DiedError:
            ids = ProducerIds(store)
    await store.land()
    given.extend([await rival.next() for _ in range(1_500)])
    assert len(given) >= 2_500
    assert len(set(given)) == len(given)


@pytest.mark.parametrize("seed", range(5))
async def test_brokers_at_once_with_faults_never_give_an_id_twice(seed: int, conditions_abort: bool) -> None:
    rng = random.Random(seed)
    data = MemoryData()
    given: list[int] = []
    stores: list[FaultyStore] = []

    async def before(number: int) -> Fault | None:
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
        for store in stores:
            if rng.random() < 0.05:
                await store.land()
        return rng.choice(list(Fault)) if rng.random() < 0.15 else None

    async def broker() -> None:
        store = FaultyStore(data, conditions_abort=conditions_abort, before=before)
        stores.append(store)
        ids = ProducerIds(store)
        for _ in range(4):
            wanted = (ids.next() for _ in range(rng.choice([1, 700, 1_000])))
            for answer in await asyncio.gather(*wanted, return_exceptions=True):
                if isinstance(answer, DiedError):
                    ids = ProducerIds(store)
                elif isinstance(answer, int):
                    given.append(answer)
                else:
                    assert isinstance(answer, Unavailable)

    await asyncio.gather(*(broker() for _ in range(8)))
    assert len(set(given)) == len(given)
    assert given
    assert all(0 <= one < 2**63 for one in given)


async def test_as_many_brokers_as_start_at_once() -> None:
    """Each wins in the end; none is told to come back."""
    data = MemoryData()
    brokers = [ProducerIds(FaultyStore(data, before=yields())) for _ in range(50)]
    given = await asyncio.gather(*(ids.next() for ids in brokers))
    assert sorted(given) == [1_000 * i for i in range(50)]


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"7",
        b"{}",
        b'{"format":0,"next":0}',
        b'{"format":true,"next":0}',
        b'{"format":1}',
        b'{"format":1,"next":-1}',
        b'{"format":1,"next":"0"}',
        b'{"format":1,"next":true}',
        b'{"format":1,"next":9223372036854775808}',
        b'{"format":1,"next":9223372036854774808}',  # no room for a block
    ],
)
async def test_a_record_that_nobody_wrote(value: bytes) -> None:
    store = FaultyStore(MemoryData())
    await store.put(0, KEY, value)
    with pytest.raises(CorruptStore):
        await ProducerIds(store).next()
    assert await stored(store) == value


async def test_a_newer_format_is_left_alone() -> None:
    store = FaultyStore(MemoryData())
    await store.put(0, KEY, b'{"format":2,"after":0}')
    with pytest.raises(IncompatibleStore):
        await ProducerIds(store).next()
    assert await stored(store) == b'{"format":2,"after":0}'


async def test_the_last_ids_there_are() -> None:
    store = FaultyStore(MemoryData())
    await store.put(0, KEY, b'{"format":1,"next":9223372036854774807}')
    ids = ProducerIds(store)
    assert [await ids.next() for _ in range(1_000)][-1] == 2**63 - 2
    with pytest.raises(CorruptStore):
        await ids.next()


def yields() -> Callable[[int], Awaitable[None]]:
    """Lets others run before each call."""

    async def before(number: int) -> None:
        await asyncio.sleep(0)

    return before
