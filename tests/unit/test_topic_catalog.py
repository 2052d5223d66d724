"""The topic catalog on both kinds of stores, with everything going wrong between any two calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from itertools import chain, count, repeat
from pathlib import Path
from uuid import uuid4

import pytest

from dray.errors import (
    InvalidPartitions,
    InvalidTopicConfig,
    InvalidTopicName,
    OutcomeUnknown,
    TopicExists,
    Unavailable,
    UnknownTopic,
)
from dray.metadata.memory import MemoryData, MemoryStore
from dray.metadata.store import Limits
from dray.topics.catalog import Topic, TopicCatalog, check_name, topic_directory
from dray.topics.configs import TimestampType
from dray.topics.record import StreamRecord, encode_stream, stream_key, topic_key
from tests.conformance.backends import sqlite_backend
from tests.topic_store import (
    DOMAINS,
    DiedError,
    Fault,
    FaultyStore,
    broker,
    catalog,
    check_sound,
    deleted,
    stored,
)

both = pytest.mark.parametrize("aborts", [True, False], ids=["aborting", "each-alone"])


@pytest.fixture
def data() -> MemoryData:
    return MemoryData()


@both
async def test_new_topic_is_found_by_name_and_id_on_every_broker(data: MemoryData, aborts: bool) -> None:
    async with (
        broker(MemoryStore(data, conditions_abort=aborts)) as one,
        broker(MemoryStore(data, conditions_abort=aborts)) as other,
    ):
        topic = await one.create("orders", 3, {"max.message.bytes": " 100 "})
        assert topic.name == "orders"
        assert len(set(topic.streams)) == 3
        assert all(0 < stream < 2**63 for stream in topic.streams)
        assert topic.configs.max_message_bytes == 100
        assert topic.overrides == {"max.message.bytes": "100"}
        assert one.get("orders") == topic
        assert one.by_id(topic.topic_id) == topic
        assert await other.find("orders") == topic
        assert await other.find_id(topic.topic_id) == topic
        assert other.get("orders") is other.get("orders"), "a lookup makes nothing"
    check_sound(data)


async def test_life_of_a_topic_in_a_real_store(tmp_path: Path) -> None:
    backend = sqlite_backend(tmp_path)
    stores = [await backend.open(), await backend.open()]
    async with broker(stores[0]) as one, broker(stores[1]) as other:
        topic = await one.create("t", 20, {})
        assert await other.find("t") == topic
        grown = await other.grow("t", 25)
        assert grown.streams[:20] == topic.streams
        await one.delete(topic.topic_id)
        again = await other.create("t", 1, {})
        assert await one.find_id(again.topic_id) == again
        assert await one.find_id(topic.topic_id) is None
    for store in stores:
        await store.close()


async def test_topic_unknown_to_the_view_is_found_by_its_id(data: MemoryData) -> None:
    topic = await catalog(MemoryStore(data)).create("t", 1, {})
    behind = catalog(MemoryStore(data))
    assert behind.by_id(topic.topic_id) is None
    assert await behind.find_id(topic.topic_id) == topic


async def test_id_looked_for_in_vain_is_not_looked_for_again(data: MemoryData) -> None:
    scans = 0

    class Counting(MemoryStore):
        async def scan(self, *args: object, **more: object) -> list:  # type: ignore[type-arg]
            nonlocal scans
            scans += 1
            return await super().scan(*args, **more)  # type: ignore[arg-type]

    topics = catalog(Counting(data))
    unknown = uuid4()
    assert await asyncio.gather(*(topics.find_id(unknown) for _ in range(20))) == [None] * 20
    assert scans <= 2, "those that ask at the same time share the answer"
    before = scans
    assert await topics.find_id(unknown) is None
    assert scans == before


async def test_lookups_of_one_name_share_their_reads(data: MemoryData) -> None:
    async def before(number: int) -> None:
        await asyncio.sleep(0)

    store = FaultyStore(data, before=before)
    topics = catalog(store)
    assert await asyncio.gather(*(topics.find("nowhere") for _ in range(50))) == [None] * 50
    assert store.calls == 4, (
        "two lookups of a barrier and a get: the one that was under way, and one after it"
    )


async def test_lookup_outlives_those_who_wait_for_it(data: MemoryData) -> None:
    gate = asyncio.Event()

    async def before(number: int) -> None:
        await gate.wait()

    topics = catalog(FaultyStore(data, before=before))
    first, second = asyncio.create_task(topics.find("t")), asyncio.create_task(topics.find("t"))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    gate.set()
    assert await second is None


async def test_all_topics_come_in_order_of_their_names(data: MemoryData) -> None:
    topics = catalog(MemoryStore(data))
    for name in ("b", "a", "Z", "a-1", "a.1"):
        await topics.create(name, 1, {})
    await topics.delete("b")
    assert [topic.name for topic in topics.all()] == ["Z", "a", "a-1", "a.1"]


@both
async def test_second_creator_is_told(data: MemoryData, aborts: bool) -> None:
    one = catalog(MemoryStore(data, conditions_abort=aborts))
    topic = await one.create("t", 1, {})
    for topics in (one, catalog(MemoryStore(data, conditions_abort=aborts))):
        with pytest.raises(TopicExists):
            await topics.create("t", 5, {})
    assert one.get("t") == topic


@both
async def test_of_creators_at_once_exactly_one_wins(data: MemoryData, aborts: bool) -> None:
    async def slowly(number: int) -> None:
        await asyncio.sleep(0)

    brokers = [catalog(FaultyStore(data, conditions_abort=aborts, before=slowly)) for _ in range(8)]
    results = await asyncio.gather(*(b.create("t", 5, {}) for b in brokers), return_exceptions=True)
    won = [result for result in results if not isinstance(result, BaseException)]
    assert len(won) == 1
    assert sum(isinstance(result, TopicExists) for result in results) == 7
    assert [record.topic_id for record in stored(data)] == [won[0].topic_id]
    check_sound(data)


@both
async def test_deleted_topic_is_hidden_kept_for_cleaning_and_its_name_free(
    data: MemoryData, aborts: bool
) -> None:
    store = MemoryStore(data, conditions_abort=aborts)
    one, other = catalog(store), catalog(store)
    first = await one.create("t", 2, {"retention.ms": "5"})
    assert await other.find("t") == first
    await other.delete("t")
    assert other.get("t") is None
    assert other.by_id(first.topic_id) is None
    assert stored(data) == []
    (kept,) = deleted(data)
    assert (kept.topic_id, kept.streams, kept.configs) == (
        first.topic_id,
        first.streams,
        {"retention.ms": "5"},
    )
    with pytest.raises(UnknownTopic):
        await one.delete("t")
    again = await one.create("t", 2, {})
    assert again.topic_id != first.topic_id
    assert set(again.streams).isdisjoint(first.streams)
    check_sound(data)


async def test_topic_is_deleted_by_its_id_and_not_its_successor(data: MemoryData) -> None:
    topics = catalog(MemoryStore(data))
    first = await topics.create("t", 1, {})
    await topics.delete(first.topic_id)
    second = await topics.create("t", 1, {})
    with pytest.raises(UnknownTopic) as raised:
        await topics.delete(first.topic_id)
    assert raised.value.topic == first.topic_id
    assert topics.get("t") == second


@both
async def test_growing_keeps_the_streams_there_are(data: MemoryData, aborts: bool) -> None:
    topics = catalog(MemoryStore(data, conditions_abort=aborts))
    small = await topics.create("t", 2, {})
    large = await topics.grow("t", 5)
    assert len(large.streams) == 5
    assert large.streams[:2] == small.streams
    assert large.topic_id == small.topic_id
    assert topics.get("t") == large
    check_sound(data)


async def test_growing_to_less_or_to_nothing_new_is_refused(data: MemoryData) -> None:
    topics = catalog(MemoryStore(data))
    await topics.create("t", 2, {})
    for total in (2, 1, 0, -1, 50_001):
        with pytest.raises(InvalidPartitions, match="it has 2"):
            await topics.grow("t", total)
    for name in ("u", "", "a/b"):
        with pytest.raises(UnknownTopic):
            await topics.grow(name, 3)
        with pytest.raises(UnknownTopic):
            await topics.delete(name)


async def test_validating_writes_nothing(data: MemoryData) -> None:
    topics = catalog(MemoryStore(data))
    assert len((await topics.create("t", 3, {}, validate_only=True)).streams) == 3
    assert data.last_version == 0
    await topics.create("t", 3, {})
    before = data.last_version
    with pytest.raises(TopicExists):
        await topics.create("t", 3, {}, validate_only=True)
    assert len((await topics.grow("t", 4, validate_only=True)).streams) == 4
    with pytest.raises(InvalidPartitions):
        await topics.grow("t", 3, validate_only=True)
    assert data.last_version == before
    topic = await topics.find("t")
    assert topic is not None
    assert len(topic.streams) == 3


async def test_number_of_partitions_is_checked(data: MemoryData) -> None:
    store = MemoryStore(data)
    topics = TopicCatalog(store, DOMAINS, topic_directory(store), wall_clock_ms=lambda: 0, num_partitions=6)
    for partitions in (0, -2, 50_001, 2**31 - 1):
        with pytest.raises(InvalidPartitions):
            await topics.create("t", partitions, {})
    assert len((await topics.create("t", -1, {})).streams) == 6


async def test_largest_topic_fits_in_every_store(data: MemoryData) -> None:
    """MemoryStore has the limits of Oxia; etcd takes a little more."""
    store = MemoryStore(data)
    topics = catalog(store, new_stream_id=count(2**63 - 100_000).__next__)
    replicas = ",".join("12345:1" for _ in range(16_000))
    name = "x" * 249
    topic = await topics.create(name, 50_000, {"leader.replication.throttled.replicas": replicas})
    assert len(topic.streams) == 50_000
    await topics.delete(name)


async def test_record_that_the_store_would_not_take_is_refused_at_once(data: MemoryData) -> None:
    class Narrow(MemoryStore):
        limits = Limits(max_operations=10, max_bytes=3_000)

    topics = catalog(Narrow(data))
    assert len((await topics.create("t", 50, {})).streams) == 50, "claimed in several appends"
    with pytest.raises(InvalidPartitions, match="metadata store"):
        await topics.create("u", 100, {})
    with pytest.raises(InvalidPartitions, match="metadata store"):
        await topics.grow("t", 100)
    check_sound(data)


async def test_bad_configs_are_refused_and_broker_settings_hold(data: MemoryData) -> None:
    store = MemoryStore(data)
    settings = {"message.timestamp.type": "LogAppendTime"}
    directory = topic_directory(store)
    topics = TopicCatalog(store, DOMAINS, directory, wall_clock_ms=lambda: 0, defaults=settings)
    with pytest.raises(InvalidTopicConfig):
        await topics.create("t", 1, {"cleanup.policy": "compact"})
    with pytest.raises(InvalidTopicConfig):
        await topics.create("t", 1, {"retention.ms": None})
    assert data.last_version == 0
    topic = await topics.create("t", 1, {})
    assert topic.configs.timestamp_type is TimestampType.LOG_APPEND_TIME
    with pytest.raises(InvalidTopicConfig):
        TopicCatalog(store, DOMAINS, directory, wall_clock_ms=lambda: 0, defaults={"retention.ms": "-7"})


async def test_stored_config_that_is_not_understood_does_not_hide_the_topic(data: MemoryData) -> None:
    store = MemoryStore(data)
    await catalog(store).create("t", 1, {"max.message.bytes": "7"})
    record = await store.get(0, topic_key("t"))
    assert record is not None
    newer = record.value.replace(b'"configs":{', b'"configs":{"cleanup.policy":"compact","future":"x",')
    await store.put(0, topic_key("t"), newer)
    topic = await catalog(store).find("t")
    assert topic is not None
    assert topic.configs.max_message_bytes == 7
    assert topic.overrides["future"] == "x"


# Kafka's Topic.validate: at most 249 of [a-zA-Z0-9._-], and not "." or "..".
@pytest.mark.parametrize(
    "name", ["a", "A", "0", "_", "-", "...", "a.b", "a_b", "__consumer_offsets", "x" * 249]
)
def test_names_that_kafka_allows(name: str) -> None:
    check_name(name)


@pytest.mark.parametrize("name", ["", ".", "..", "a b", "a/b", "a:b", "ä", "a\n", "a\0", "*", "x" * 250])
async def test_names_that_kafka_refuses(name: str, data: MemoryData) -> None:
    topics = catalog(MemoryStore(data))
    with pytest.raises(InvalidTopicName):
        await topics.create(name, 1, {})
    assert await topics.find(name) is None
    assert data.last_version == 0


async def test_names_that_differ_only_in_dots_and_underscores_are_refused(data: MemoryData) -> None:
    topics = catalog(MemoryStore(data))
    await topics.create("a.b_c", 1, {})
    for name in ("a_b_c", "a.b.c", "a_b.c"):
        with pytest.raises(InvalidTopicName, match=r"a\.b_c"):
            await topics.create(name, 1, {})
    with pytest.raises(TopicExists):
        await topics.create("a.b_c", 1, {})
    await topics.create("a.b-c", 1, {})
    elsewhere = catalog(MemoryStore(data))
    await elsewhere.delete("a.b_c")
    assert topics.get("a.b_c") is not None, "this view has not heard of it"
    await topics.create("a_b_c", 1, {})


@both
async def test_stream_ids_in_use_are_not_used_again(data: MemoryData, aborts: bool) -> None:
    store = MemoryStore(data, conditions_abort=aborts)
    first = await catalog(store, new_stream_id=iter([1, 2, 3]).__next__).create("a", 3, {})
    ids = iter([2, 4, 4, 5, 3, 1, 6, 7])
    second = await catalog(store, new_stream_id=ids.__next__).create("b", 4, {})
    assert first.streams == (1, 2, 3)
    assert len(set(second.streams)) == 4
    assert set(second.streams) <= {4, 5, 6, 7}
    third = await catalog(store, new_stream_id=chain([4, 1, 5, 8], count(9)).__next__).grow("b", 6)
    assert third.streams[:4] == second.streams
    assert set(third.streams).isdisjoint(first.streams)
    check_sound(data)


async def test_running_out_of_free_ids_ends(data: MemoryData) -> None:
    store = MemoryStore(data)
    await catalog(store, new_stream_id=repeat(1).__next__).create("a", 1, {})
    with pytest.raises(OutcomeUnknown, match="attempts"):
        await catalog(store, new_stream_id=repeat(1).__next__).create("b", 1, {})
    with pytest.raises(TopicExists):
        await catalog(store).create("b", 1, {})
    check_sound(data)


@both
async def test_claim_of_our_own_counts(data: MemoryData, aborts: bool) -> None:
    """A finisher before us may have claimed some."""
    topic_id, stream_ids = uuid4(), [11, 12, 13, 14, 15, 16]
    store = MemoryStore(data, conditions_abort=aborts)
    topics = TopicCatalog(
        store,
        1,
        topic_directory(store),
        wall_clock_ms=lambda: 0,
        new_id=lambda: topic_id,
        new_stream_id=iter([*stream_ids, 17, 18]).__next__,
    )
    await store.put(0, stream_key(12), encode_stream(StreamRecord(topic_id, "t", 1, 0)))
    await store.put(0, stream_key(14), encode_stream(StreamRecord(topic_id, "t", 0, 0)))
    await store.put(0, stream_key(15), encode_stream(StreamRecord(uuid4(), "t", 4, 0)))
    topic = await topics.create("t", 6, {})
    assert topic.streams == (11, 12, 13, 17, 18, 16)


@both
async def test_store_that_is_away_is_told_from_one_that_went_away(data: MemoryData, aborts: bool) -> None:
    """Only before anything was written may it be said that nothing happened."""
    topics, _ = faulty(data, aborts, {1: Fault.NOT_SENT})
    with pytest.raises(Unavailable):
        await topics.create("t", 1, {})
    assert data.last_version == 0
    topics, _ = faulty(data, aborts, {2: Fault.NOT_SENT})
    with pytest.raises(OutcomeUnknown):
        await topics.create("t", 1, {})


@both
async def test_answers_lost_all_the_time_end(data: MemoryData, aborts: bool) -> None:
    async def before(number: int) -> Fault | None:
        return Fault.LOST if store.losing else None

    class Losing(FaultyStore):
        losing = True

        async def _read(self) -> None:
            pass

    store = Losing(data, conditions_abort=aborts, before=before)
    with pytest.raises(OutcomeUnknown):
        await catalog(store).create("t", 1, {})
    store.losing = False
    await catalog(store).create("t", 1, {})
    store.losing = True
    with pytest.raises(OutcomeUnknown):
        await catalog(store).grow("t", 2)
    with pytest.raises(OutcomeUnknown):
        await catalog(store).delete("t")


def faulty(data: MemoryData, aborts: bool, faults: dict[int, Fault]) -> tuple[TopicCatalog, FaultyStore]:
    """A catalog whose call number n ends as told."""

    async def before(number: int) -> Fault | None:
        return faults.get(number)

    store = FaultyStore(data, conditions_abort=aborts, before=before, after=lambda: check_sound(data))
    return catalog(store), store


Operation = Callable[[TopicCatalog], Awaitable[object]]
OPERATIONS: dict[str, Operation] = {
    "create": lambda topics: topics.create("t", 5, {}),
    "grow": lambda topics: topics.grow("t", 7),
    "delete": lambda topics: topics.delete("t"),
}


def each_fault() -> Iterator[tuple[Fault, int]]:
    # More than any of the operations makes; the test says if that is no longer so.
    for number in range(1, 31):
        for fault in Fault:
            yield fault, number


@both
@pytest.mark.parametrize("operation", list(OPERATIONS))
async def test_whatever_happens_between_two_calls_is_mended_by_another(operation: str, aborts: bool) -> None:
    """Every call of the operation, every way it can end; then another broker starts, and then what was late
    comes.
    """
    ended = 0
    for fault, number in each_fault():
        data = MemoryData()
        plain = MemoryStore(data, conditions_abort=aborts)
        first = None if operation == "create" else await catalog(plain).create("t", 5, {})
        topics, store = faulty(data, aborts, {number: fault})
        told: BaseException | None = None
        try:
            await OPERATIONS[operation](topics)
        except (DiedError, OutcomeUnknown, Unavailable) as error:
            told = error
        if store.calls < number:
            ended += 1
            continue
        check_sound(data)
        before = [record for record in stored(data) if record.visible]
        if operation != "delete" and told is None:
            assert before, "what was acknowledged can be seen"
        async with broker(plain) as other:
            await other.sweep()
            assert all(record.at_rest for record in stored(data))
            check_sound(data)
            result = await other.find("t")
            if told is None:
                assert (result is None) == (operation == "delete")
            if isinstance(told, Unavailable):
                assert result == first, "nothing happened"
            if result is not None:
                assert len(result.streams) in {"create": [5], "grow": [5, 7], "delete": [5]}[operation]
                assert first is None or result.streams[:5] == first.streams
            # The winner's record stands whatever comes late, and the name can be used on.
            await store.land()
            await other.sweep()
            check_sound(data)
            if result is not None:
                again = await other.find("t")
                if operation != "delete":
                    assert again is not None
                    assert again.topic_id == result.topic_id
                with pytest.raises(TopicExists) if again is not None else pytest.raises(UnknownTopic):
                    await (other.create("t", 5, {}) if again is not None else other.delete("t"))
            elif operation == "delete":
                assert await other.find("t") is None, "deleted stays deleted"
                assert len((await other.create("t", 1, {})).streams) == 1
            assert all(record.at_rest for record in stored(data))
            check_sound(data)
    assert ended > 0, "there are calls that were not made to fail"


@both
@pytest.mark.parametrize("operation", ["grow", "delete"])
async def test_topic_made_anew_meanwhile_is_not_harmed(operation: str, aborts: bool) -> None:
    """Before each call of the operation in turn, the name goes to another topic. What the operation read of
    the old one must not be written over the new one.
    """
    number = 1
    while await recreate_before_call(number, operation, aborts):
        number += 1
    assert number > 5


async def recreate_before_call(number: int, operation: str, aborts: bool) -> bool:
    """False if the operation makes fewer calls."""
    data = MemoryData()
    plain = MemoryStore(data, conditions_abort=aborts)
    others: list[Topic] = []

    async def before(call: int) -> None:
        if call == number:
            other = catalog(plain)
            with suppress(UnknownTopic):
                await other.delete("t")
            others.append(await other.create("t", 2, {}))

    first = await catalog(plain).create("t", 2, {})
    store = FaultyStore(data, conditions_abort=aborts, after=lambda: check_sound(data))
    topics = catalog(store)
    await topics.find("t")
    store.calls, store.before = 0, before
    with suppress(UnknownTopic):
        await (topics.grow("t", 9) if operation == "grow" else topics.delete(first.topic_id))
    if not others:
        return False
    (record,) = stored(data)
    assert record.topic_id == others[0].topic_id
    assert record.streams[:2] == others[0].streams
    assert [record.topic_id for record in deleted(data)] == [first.topic_id]
    return True


async def test_creation_that_lands_late_does_not_bring_a_deleted_topic_back(data: MemoryData) -> None:
    """The first put is held back, the second creates the topic, it is deleted: then the first arrives."""
    topics, store = faulty(data, True, {1: Fault.LATE})
    topic = await topics.create("t", 3, {})
    other = catalog(MemoryStore(data))
    await other.delete("t")
    await store.land()
    assert [record.topic_id for record in stored(data)] == [topic.topic_id], "the put did land"
    assert await other.find("t") is None
    again = await other.create("t", 3, {})
    assert again.topic_id != topic.topic_id
    assert [record.topic_id for record in stored(data)] == [again.topic_id]
    check_sound(data)


async def test_creator_whose_topic_was_deleted_meanwhile_did_create_it(data: MemoryData) -> None:
    other = catalog(MemoryStore(data))

    async def before(number: int) -> None:
        if number == 2:
            await other.delete("t")

    topic = await catalog(FaultyStore(data, before=before)).create("t", 2, {})
    assert topic.topic_id == deleted(data)[0].topic_id
    assert stored(data) == []


@both
async def test_half_created_topic_is_not_seen_and_is_finished_by_the_next(
    data: MemoryData, aborts: bool
) -> None:
    dying, _ = faulty(data, aborts, {2: Fault.DIES_BEFORE})
    with pytest.raises(DiedError):
        await dying.create("t", 3, {"retention.ms": "9"})
    async with broker(MemoryStore(data, conditions_abort=aborts)) as other:
        assert await other.find("t") is None
        assert other.all() == []
        with pytest.raises(TopicExists):
            await other.create("t", 8, {})
        topic = other.get("t")
        assert topic is not None
        assert (len(topic.streams), topic.configs.retention_ms) == (3, 9)


async def test_sweep_goes_on_behind_what_it_cannot_finish(data: MemoryData) -> None:
    for name in ("a", "b"):
        dying, _ = faulty(data, True, {2: Fault.DIES_BEFORE})
        with pytest.raises(DiedError):
            await dying.create(name, 1, {})

    class Refusing(MemoryStore):
        async def put(self, domain: int, key: str, *args: object, **more: object) -> int:
            if key == topic_key("a"):
                raise Unavailable("not this one")
            return await super().put(domain, key, *args, **more)  # type: ignore[arg-type]

    async with broker(Refusing(data)) as topics:
        await topics.sweep()
        assert [topic.name for topic in topics.all()] == ["b"]
