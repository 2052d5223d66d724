"""Deleting records from the front of a stream, whatever becomes of a call or of its answer."""

from __future__ import annotations

import asyncio
import random

import pytest

from dray.errors import MetadataError, OffsetOutOfRange, OutcomeUnknown
from dray.index.deletion import ATTEMPTS, RecordDeleter
from dray.index.entry import encode, sequence_of
from dray.index.lookup import OffsetIndex
from dray.metadata.memory import MemoryData, MemoryStore
from dray.metadata.store import NewEntry, Record
from tests.index_entries import STREAM, wal_entry
from tests.topic_store import DiedError, Fault, FaultyStore

D = 3
KEY = f"log-start/{STREAM:016x}"


@pytest.fixture(params=[True, False], ids=["abort", "each-alone"])
def conditions_abort(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def deleter_of(store: MemoryStore) -> RecordDeleter:
    return RecordDeleter(store, lambda stream_id: D, OffsetIndex(store, lambda stream_id: D))


async def filled(store: MemoryStore, records: int = 10) -> None:
    entry = wal_entry(records)
    await store.append(D, [NewEntry(sequence_of(STREAM), records, 104, encode(entry))])


async def stored(store: MemoryStore) -> bytes | None:
    record = await MemoryStore.get(store, D, KEY)
    return None if record is None else record.value


async def test_the_log_start_only_grows(conditions_abort: bool) -> None:
    store = MemoryStore(conditions_abort=conditions_abort)
    await filled(store)
    deleter, other = deleter_of(store), deleter_of(store)
    assert await deleter.delete_before(STREAM, 4) == 4
    assert await stored(store) == b'{"format":1,"offset":4}'
    assert await other.delete_before(STREAM, 2) == 4, "success, with where the log starts"
    assert await other.delete_before(STREAM, 0) == 4
    assert await other.delete_before(STREAM, 7) == 7
    assert await deleter.delete_before(STREAM, 5) == 7
    assert await stored(store) == b'{"format":1,"offset":7}'
    assert await deleter.delete_before(STREAM, None) == 10
    await filled(store, 5)
    assert await other.delete_before(STREAM, None) == 15


async def test_nothing_is_written_where_nothing_is_deleted() -> None:
    store = MemoryStore()
    assert await deleter_of(store).delete_before(STREAM, None) == 0
    assert await deleter_of(store).delete_before(STREAM, 0) == 0
    await filled(store)
    assert await deleter_of(store).delete_before(STREAM, 0) == 0
    assert await stored(store) is None


@pytest.mark.parametrize("offset", [11, 2**63 - 1, -1, -2, -(2**63)])
async def test_offsets_that_are_not_there(offset: int) -> None:
    store = MemoryStore()
    await filled(store)
    with pytest.raises(OffsetOutOfRange):
        await deleter_of(store).delete_before(STREAM, offset)
    assert await stored(store) is None


async def test_who_deleted_sees_it_before_the_watch_tells() -> None:
    store = MemoryStore()
    await filled(store)
    index = OffsetIndex(store, lambda stream_id: D)
    assert await index.log_start(STREAM) == 0
    await RecordDeleter(store, lambda stream_id: D, index).delete_before(STREAM, 4)
    assert index.told_log_start(STREAM) == 4


class StaleStore(MemoryStore):
    """Reads of the record, and of the end, are old until a barrier."""

    is_stale = False
    old: Record | None = None

    async def barrier(self, domain: int) -> None:
        self.is_stale = False

    async def get(self, domain: int, key: str) -> Record | None:
        return self.old if self.is_stale else await super().get(domain, key)


async def test_a_stale_read_costs_an_attempt_only(conditions_abort: bool) -> None:
    store = StaleStore(conditions_abort=conditions_abort)
    await filled(store)
    deleter = deleter_of(store)
    await deleter.delete_before(STREAM, 2)
    store.old = await store.get(D, KEY)
    await deleter_of(store).delete_before(STREAM, 6)
    old_barrier, stale_again = store.barrier, [True, False]

    async def barrier(domain: int) -> None:
        await old_barrier(domain)
        store.is_stale = stale_again.pop(0)  # the first is that of the end: the record is read stale after it

    store.barrier = barrier  # type: ignore[method-assign]
    assert await deleter.delete_before(STREAM, 4) == 6
    assert await stored(store) == b'{"format":1,"offset":6}'
    assert stale_again == []


@pytest.mark.parametrize("fault", list(Fault))
@pytest.mark.parametrize("call", range(1, 12))
async def test_a_fault_at_each_call(fault: Fault, call: int, conditions_abort: bool) -> None:
    """It is done, or said not to be certain; asked once more, it is done; and it never goes back."""

    async def before(number: int) -> Fault | None:
        return fault if number == call else None

    data = MemoryData()
    await filled(MemoryStore(data))
    store = FaultyStore(data, conditions_abort=conditions_abort, before=before)
    sound = deleter_of(MemoryStore(data, conditions_abort=conditions_abort))
    try:
        assert await deleter_of(store).delete_before(STREAM, 4) == 4
    except (MetadataError, DiedError):
        assert await stored(MemoryStore(data)) in (None, b'{"format":1,"offset":4}')
    else:
        assert await stored(MemoryStore(data)) == b'{"format":1,"offset":4}'
    assert await sound.delete_before(STREAM, 6) == 6
    await store.land()
    assert await stored(MemoryStore(data)) == b'{"format":1,"offset":6}'


async def test_an_outage_behind_a_lost_answer_is_not_said_to_be_nothing() -> None:
    async def before(number: int) -> Fault | None:
        return None if number < 4 else Fault.DONE  # barrier, get; get, and the put

    data = MemoryData()
    await filled(MemoryStore(data))
    with pytest.raises(OutcomeUnknown):
        await deleter_of(FaultyStore(data, before=before)).delete_before(STREAM, 4)
    assert await stored(MemoryStore(data)) is not None


async def test_attempts_are_bounded() -> None:
    class Lost(MemoryStore):
        puts = 0

        async def put(self, *_args: object, **_more: object) -> int:
            self.puts += 1
            raise OutcomeUnknown("lost")

    store = Lost()
    await filled(store)
    with pytest.raises(OutcomeUnknown):
        await deleter_of(store).delete_before(STREAM, 4)
    assert store.puts == ATTEMPTS


@pytest.mark.parametrize("seed", range(20))
async def test_brokers_at_once_with_faults_agree_in_the_end(seed: int, conditions_abort: bool) -> None:
    rng = random.Random(seed)
    data = MemoryData()
    await filled(MemoryStore(data), 100)

    async def before(number: int) -> Fault | None:
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
        return rng.choice([Fault.DONE, Fault.LOST, Fault.NOT_SENT]) if rng.random() < 0.1 else None

    acknowledged: list[int] = []

    async def broker() -> None:
        store = FaultyStore(data, conditions_abort=conditions_abort, before=before)
        deleter, told = deleter_of(store), 0
        for _ in range(15):
            wanted = rng.randrange(101)
            try:
                answer = await deleter.delete_before(STREAM, wanted)
            except MetadataError:
                continue
            assert max(told, wanted) <= answer
            told = answer
            acknowledged.append(answer)

    await asyncio.gather(*(broker() for _ in range(3)))
    log_start = await OffsetIndex(MemoryStore(data), lambda stream_id: D).log_start(STREAM)
    assert log_start >= max(acknowledged)
