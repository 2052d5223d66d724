"""Configs of topics that are altered, with everything going wrong between any two calls to the store."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping

import pytest

from dray.altering import Alteration, Change, Operation, change_some, replace_all
from dray.errors import InvalidTopicConfig, NotAListConfig, OutcomeUnknown, UnknownTopic
from dray.metadata.memory import MemoryData, MemoryStore
from dray.metadata.store import Limits
from dray.topics.catalog import TopicCatalog
from dray.topics.record import topic_key
from tests.topic_store import DiedError, Fault, FaultyStore, Script, broker, catalog, check_answer, stored

both = pytest.mark.parametrize("aborts", [True, False], ids=["aborting", "each-alone"])
REPLICAS = "leader.replication.throttled.replicas"
# The put of an alteration: before it are a barrier and a read, after it the same.
PUT = 3
AFTER_PUT = 4


def setting(**values: str) -> Alteration:
    changes = [Change(name.replace("_", "."), Operation.SET, value) for name, value in values.items()]
    return change_some(changes, {})


def appending(value: str) -> Alteration:
    return change_some([Change(REPLICAS, Operation.APPEND, value)], {REPLICAS: ""})


@pytest.fixture
def data() -> MemoryData:
    return MemoryData()


async def with_topic(data: MemoryData, aborts: bool = True, **configs: str) -> MemoryStore:
    store = MemoryStore(data, conditions_abort=aborts)
    await catalog(store).create("t", 2, {name.replace("_", "."): text for name, text in configs.items()})
    return store


def overrides(data: MemoryData) -> Mapping[str, str]:
    (record,) = stored(data)
    return record.configs


def faulty(data: MemoryData, aborts: bool, script: Script) -> tuple[TopicCatalog, FaultyStore]:
    store = FaultyStore.scripted(data, aborts, script)
    return catalog(store), store


@both
async def test_altered_configs_hold_here_at_once_and_elsewhere_when_the_watch_tells(
    data: MemoryData, aborts: bool
) -> None:
    store = await with_topic(data, aborts, retention_ms="5")
    async with broker(store) as one, broker(MemoryStore(data, conditions_abort=aborts)) as other:
        told = asyncio.Event()
        before = other.get("t")
        other._directory.subscribe(lambda _: told.set())
        await one.alter_configs("t", setting(max_message_bytes=" 77 "))
        topic = one.get("t")
        assert topic is not None
        assert topic.configs.max_message_bytes == 77
        assert topic.overrides == {"retention.ms": "5", "max.message.bytes": "77"}
        await told.wait()
        assert other.get("t") == topic
        assert before is not None
        assert (topic.topic_id, topic.streams) == (before.topic_id, before.streams)
        await other.alter_configs("t", replace_all({"max.message.bytes": "78"}))
        assert overrides(data) == {"max.message.bytes": "78"}


async def test_validating_and_changing_nothing_write_nothing(data: MemoryData) -> None:
    store = await with_topic(data, retention_ms="5")
    topics, before = catalog(store), data.last_version
    await topics.alter_configs("t", setting(retention_ms="6"), validate_only=True)
    with pytest.raises(InvalidTopicConfig):
        await topics.alter_configs("t", setting(retention_ms="soon"), validate_only=True)
    with pytest.raises(UnknownTopic):
        await topics.alter_configs("missing", setting(retention_ms="6"), validate_only=True)
    await topics.alter_configs("t", setting(retention_ms=" 5"))
    await topics.alter_configs("t", change_some([Change("nope", Operation.DELETE, "")], {}))
    assert data.last_version == before


@pytest.mark.parametrize("name", ["missing", "", "..", "no/slash", "a\0", "x" * 250, "ü"])
async def test_topics_that_are_not_there_cannot_be_altered(data: MemoryData, name: str) -> None:
    with pytest.raises(UnknownTopic):
        await catalog(MemoryStore(data)).alter_configs(name, replace_all({}))
    assert data.last_version == 0


BAD = [
    ("max.message.bytes", ""),
    ("max.message.bytes", "x"),
    ("max.message.bytes", "-1"),
    ("max.message.bytes", "2147483648"),
    ("max.message.bytes", "1" * 2**20),
    ("max.message.bytes", "5\0005"),
    ("max.message.bytes", "٥"),
    ("cleanup.policy", "compact"),
    ("cleanup.policy", "delete" + " " * 2**20 + "x"),
    ("message.timestamp.type", "\ud83d"),
    ("compression.type", "brotli"),
    (REPLICAS, "0:1," * 2**18),
    ("nope", "1"),
    ("", "1"),
    ("max.message.bytes\0", "1"),
    ("MAX.MESSAGE.BYTES", "1"),
    ("ü" * 2**20, "1"),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda text: repr(text[:20]))
async def test_one_bad_config_leaves_all_as_they_were(data: MemoryData, name: str, value: str) -> None:
    store = await with_topic(data, retention_ms="5")
    before = data.last_version
    good = Change("segment.ms", Operation.SET, "9")
    bad = Change(name, Operation.SET, value)
    for alteration in (
        change_some([good, bad], {}),
        change_some([bad, good], {}),
        replace_all({"segment.ms": "9", name: value}),
    ):
        with pytest.raises(InvalidTopicConfig) as raised:
            await catalog(store).alter_configs("t", alteration)
        assert raised.value.config == name
        assert len(str(raised.value)) < 1_000
    assert data.last_version == before
    assert overrides(data) == {"retention.ms": "5"}


async def test_what_only_lists_can_is_refused_for_others(data: MemoryData) -> None:
    store = await with_topic(data)
    with pytest.raises(NotAListConfig):
        await catalog(store).alter_configs(
            "t", change_some([Change("retention.ms", Operation.APPEND, "1")], {REPLICAS: ""})
        )


async def test_contradiction_with_what_was_set_before_is_refused(data: MemoryData) -> None:
    store = await with_topic(data, max_compaction_lag_ms="5")
    with pytest.raises(InvalidTopicConfig, match=r"min\.compaction\.lag\.ms"):
        await catalog(store).alter_configs("t", setting(min_compaction_lag_ms="6"))
    await catalog(store).alter_configs("t", setting(min_compaction_lag_ms="6", max_compaction_lag_ms="6"))


async def test_record_that_the_store_would_not_take_is_refused(data: MemoryData) -> None:
    class Narrow(MemoryStore):
        limits = Limits(max_operations=10, max_bytes=3_000)

    topics = catalog(Narrow(data))
    await topics.create("t", 50, {})
    with pytest.raises(InvalidTopicConfig, match="metadata store"):
        await topics.alter_configs("t", appending(",".join(f"{n}:1" for n in range(200))))
    await topics.alter_configs("t", appending("1:1"))


async def test_lists_that_grow_by_appending_have_an_end(data: MemoryData) -> None:
    topics = catalog(await with_topic(data))
    with pytest.raises(InvalidTopicConfig, match="131072"):
        for start in range(0, 100_000, 4_000):
            await topics.alter_configs("t", appending(",".join(f"{start + n}:1" for n in range(4_000))))
    assert len(overrides(data)[REPLICAS]) <= 131_072


@both
@pytest.mark.parametrize("fault", list(Fault))
@pytest.mark.parametrize("call", range(1, 7))
async def test_answer_is_true_whatever_goes_wrong(
    data: MemoryData, aborts: bool, call: int, fault: Fault
) -> None:
    await with_topic(data, aborts, retention_ms="5")
    topics, store = faulty(data, aborts, {call: fault})
    old = {"retention.ms": "5"}
    new = {**old, "segment.ms": "9"}
    change = topics.alter_configs("t", setting(segment_ms="9"))
    await check_answer(change, store, lambda: overrides(data), old=old, new=new)
    if call == PUT and fault in (Fault.LOST, Fault.DONE, Fault.LATE):
        assert overrides(data) == new, "a lost answer is made up for"


@both
@pytest.mark.parametrize("fault", [Fault.LOST, Fault.DONE, Fault.LATE])
async def test_change_is_not_made_again_over_what_others_changed_since(
    data: MemoryData, aborts: bool, fault: Fault
) -> None:
    store = await with_topic(data, aborts)

    async def other() -> None:
        await catalog(store).alter_configs("t", setting(retention_ms="2"))

    topics, late = faulty(data, aborts, {PUT: fault, AFTER_PUT: other})
    with pytest.raises(OutcomeUnknown):
        await topics.alter_configs("t", replace_all({"retention.ms": "1"}))
    await late.land()
    assert overrides(data) == {"retention.ms": "2"}


@both
async def test_lost_answer_is_known_again_though_the_topic_grew(data: MemoryData, aborts: bool) -> None:
    store = await with_topic(data, aborts)

    async def other() -> None:
        await catalog(store).grow("t", 5)

    topics, _ = faulty(data, aborts, {PUT: Fault.DONE, AFTER_PUT: other})
    await topics.alter_configs("t", setting(retention_ms="1"))
    assert overrides(data) == {"retention.ms": "1"}
    (record,) = stored(data)
    assert len(record.streams) == 5


@both
async def test_lost_answer_and_a_store_that_stays_away_are_told_as_unknown(
    data: MemoryData, aborts: bool
) -> None:
    await with_topic(data, aborts)
    topics, _ = faulty(data, aborts, {PUT: Fault.LOST, AFTER_PUT: Fault.NOT_SENT})
    with pytest.raises(OutcomeUnknown):
        await topics.alter_configs("t", setting(retention_ms="1"))


@both
async def test_what_was_done_is_told_so_though_it_cannot_be_read_back(data: MemoryData, aborts: bool) -> None:
    await with_topic(data, aborts)
    topics, _ = faulty(data, aborts, {AFTER_PUT: Fault.NOT_SENT})
    await topics.alter_configs("t", setting(retention_ms="1"))
    assert overrides(data) == {"retention.ms": "1"}


@both
async def test_topic_deleted_meanwhile_is_not_brought_back(data: MemoryData, aborts: bool) -> None:
    store = await with_topic(data, aborts)

    async def other() -> None:
        await catalog(store).delete("t")

    topics, _ = faulty(data, aborts, {PUT: other})
    with pytest.raises(UnknownTopic):
        await topics.alter_configs("t", setting(retention_ms="1"))
    assert stored(data) == []


@both
async def test_nothing_is_lost_where_many_alter_one_topic_at_once(data: MemoryData, aborts: bool) -> None:
    await with_topic(data, aborts)
    brokers = [catalog(MemoryStore(data, conditions_abort=aborts)) for _ in range(3)]
    await asyncio.gather(
        *(
            topics.alter_configs("t", appending(f"{number}:{who}"))
            for number in range(30)
            for who, topics in enumerate(brokers)
        )
    )
    expected = {f"{number}:{who}" for number in range(30) for who in range(3)}
    assert set(overrides(data)[REPLICAS].split(",")) == expected


async def test_half_made_partitions_are_finished_first(data: MemoryData) -> None:
    store = await with_topic(data)
    growing, _ = faulty(data, True, {PUT + 1: Fault.DIES_BEFORE})
    with pytest.raises(DiedError):
        await growing.grow("t", 4)
    await catalog(store).alter_configs("t", setting(retention_ms="1"))
    (record,) = stored(data)
    assert record.at_rest
    assert len(record.streams) == 4
    assert record.configs == {"retention.ms": "1"}


async def test_config_of_a_newer_broker_can_be_deleted_but_not_kept(data: MemoryData) -> None:
    """As in Kafka, which checks all that a topic will have."""
    store = await with_topic(data)
    found = await store.get(0, topic_key("t"))
    assert found is not None
    fields = json.loads(found.value)
    fields["configs"] = {"future": "x"}
    await store.put(0, topic_key("t"), json.dumps(fields).encode())
    with pytest.raises(InvalidTopicConfig, match="future"):
        await catalog(store).alter_configs("t", setting(retention_ms="1"))
    changes = [Change("future", Operation.DELETE, ""), Change("retention.ms", Operation.SET, "1")]
    await catalog(store).alter_configs("t", change_some(changes, {}))
    assert overrides(data) == {"retention.ms": "1"}


async def test_other_defaults_hold_for_all_that_is_not_overridden(data: MemoryData) -> None:
    store = await with_topic(data, max_compaction_lag_ms="5", max_message_bytes="7")
    topics = catalog(store)
    await topics.create("u", -1, {})
    for name in ("t", "u"):
        assert await topics.find(name) is not None  # kept as they were made from the first defaults
    topics.set_defaults(3, {"max.message.bytes": "9", "min.compaction.lag.ms": "6"})
    own, other = topics.get("t"), topics.get("u")
    assert own is not None
    assert own.configs.max_message_bytes == 7, "kept, though another of its configs contradicts the default"
    assert own.overrides == {"max.compaction.lag.ms": "5", "max.message.bytes": "7"}
    assert other is not None
    assert other.configs.max_message_bytes == 9
    assert len((await topics.create("v", -1, {})).streams) == 3
    with pytest.raises(InvalidTopicConfig):
        topics.set_defaults(3, {"max.message.bytes": "x"})
