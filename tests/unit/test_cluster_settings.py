"""Settings that are altered for all brokers: one record, followed by each, changed once by each change."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from dray.altering import Alteration, Change, Operation, change_some, replace_all
from dray.cluster_settings import DYNAMIC_SETTINGS, LIST_SETTINGS, ClusterSettings
from dray.errors import BadRequest, CorruptStore, IncompatibleStore, OutcomeUnknown
from dray.metadata.memory import MemoryData, MemoryStore
from dray.metadata.store import MetadataStore
from dray.topics.configs import ConfigSource, ConfigType
from tests.conformance.backends import sqlite_backend
from tests.topic_store import Fault, FaultyStore, Script, check_answer

both = pytest.mark.parametrize("aborts", [True, False], ids=["aborting", "each-alone"])
KEY = "configs/brokers"
PUT = 3
AFTER_PUT = 4


@pytest.fixture
def data() -> MemoryData:
    return MemoryData()


def setting(name: str, value: str) -> Alteration:
    return change_some([Change(name, Operation.SET, value)], {})


def deleting(name: str) -> Alteration:
    return change_some([Change(name, Operation.DELETE, "")], {})


def stored(data: MemoryData) -> dict[str, str]:
    record = data.domain(0).records.get(KEY)
    if record is None:
        return {}
    fields = json.loads(record.value)
    assert fields["format"] == 1
    configs: dict[str, str] = fields["configs"]
    return configs


@asynccontextmanager
async def following(store: MetadataStore, **given: str) -> AsyncIterator[ClusterSettings]:
    settings = ClusterSettings(store, {name.replace("_", "."): text for name, text in given.items()})
    task = asyncio.create_task(settings.run())
    try:
        await settings.loaded()
        yield settings
    finally:
        task.cancel()
        await asyncio.wait([task])


def faulty(data: MemoryData, aborts: bool, script: Script) -> tuple[ClusterSettings, FaultyStore]:
    store = FaultyStore.scripted(data, aborts, script)
    return ClusterSettings(store, {}), store


def test_what_can_be_altered() -> None:
    """The broker's synonyms of topic configs, as in Kafka, and how topics are created, which is ours."""
    assert {"auto.create.topics.enable", "num.partitions"} <= DYNAMIC_SETTINGS.keys()
    # Of Kafka's documentation, what its "update mode" calls cluster-wide.
    for name in (
        "compression.type",
        "log.cleaner.delete.retention.ms",
        "log.cleanup.policy",
        "log.flush.interval.ms",
        "log.message.timestamp.after.max.ms",
        "log.message.timestamp.type",
        "log.retention.bytes",
        "log.retention.ms",
        "log.roll.ms",
        "log.segment.bytes",
        "message.max.bytes",
        "min.insync.replicas",
        "unclean.leader.election.enable",
    ):
        assert name in DYNAMIC_SETTINGS
    for name in ("listen", "node.id", "wal.linger.ms", "metadata", "log.level", "retention.ms"):
        assert name not in DYNAMIC_SETTINGS
    assert LIST_SETTINGS == {"log.cleanup.policy": "delete"}


@both
async def test_what_one_altered_holds_everywhere_over_what_brokers_were_started_with(
    data: MemoryData, aborts: bool
) -> None:
    async with (
        following(MemoryStore(data, conditions_abort=aborts), num_partitions="4") as one,
        following(MemoryStore(data, conditions_abort=aborts), message_max_bytes="9") as other,
    ):
        assert (one.num_partitions, other.num_partitions) == (4, 1)
        assert (one.topic_defaults, other.topic_defaults) == ({}, {"max.message.bytes": "9"})
        assert one.auto_create_topics
        told = asyncio.Event()
        other.subscribe(told.set)
        changes = [
            Change("num.partitions", Operation.SET, " 6 "),
            Change("auto.create.topics.enable", Operation.SET, "false"),
            Change("message.max.bytes", Operation.SET, "77"),
            Change("log.retention.ms", Operation.SET, "5"),
        ]
        await one.alter(change_some(changes, {}))
        await told.wait()
        for settings in (one, other):
            assert settings.num_partitions == 6
            assert not settings.auto_create_topics
            assert settings.topic_defaults == {"max.message.bytes": "77", "retention.ms": "5"}
        told.clear()
        await one.alter(replace_all({"log.retention.ms": "5"}))
        await told.wait()
        assert (one.num_partitions, other.num_partitions) == (4, 1)
        assert other.topic_defaults == {"max.message.bytes": "9", "retention.ms": "5"}
    async with following(MemoryStore(data, conditions_abort=aborts)) as late:
        assert late.topic_defaults == {"retention.ms": "5"}


async def test_in_a_real_store(tmp_path: Path) -> None:
    backend = sqlite_backend(tmp_path)
    async with following(await backend.open()) as one, following(await backend.open()) as other:
        told = asyncio.Event()
        other.subscribe(told.set)
        await one.alter(setting("num.partitions", "3"))
        await told.wait()
        assert other.num_partitions == 3


def test_descriptions_show_where_values_come_from(data: MemoryData) -> None:
    settings = ClusterSettings(MemoryStore(data), {"message.max.bytes": "9", "listen": "x:1"})
    settings.altered = {"message.max.bytes": "7", "num.partitions": "5"}
    rows = {row.name: row for row in settings.describe()}
    row = rows["message.max.bytes"]
    assert (row.value, row.source, row.type, row.read_only) == (
        "7",
        ConfigSource.CLUSTER,
        ConfigType.INT,
        False,
    )
    assert [(each.value, each.source) for each in row.synonyms] == [
        ("7", ConfigSource.CLUSTER),
        ("9", ConfigSource.BROKER),
        ("1048588", ConfigSource.DEFAULT),
    ]
    assert [each.source for each in rows["num.partitions"].synonyms] == [
        ConfigSource.CLUSTER,
        ConfigSource.DEFAULT,
    ]
    assert (rows["log.retention.ms"].value, rows["log.retention.ms"].source) == (
        "604800000",
        ConfigSource.DEFAULT,
    )
    assert "listen" not in rows
    # As Kafka answers where no broker is named.
    assert [
        (row.name, row.value, [each.source for each in row.synonyms]) for row in settings.describe_altered()
    ] == [
        ("message.max.bytes", "7", [ConfigSource.CLUSTER]),
        ("num.partitions", "5", [ConfigSource.CLUSTER]),
    ]


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("node.id", "5", "Cannot update these configs dynamically: node.id"),
        ("wal.linger.ms", "5", "Cannot update these configs dynamically: wal.linger.ms"),
        ("nope", "5", "no setting"),
        ("retention.ms", "5", "no setting"),  # of topics
        ("", "5", "no setting"),
        ("num.partitions\0", "5", "no setting"),
        ("ü" * 2**20, "5", "no setting"),
        ("num.partitions", "0", "from 1"),
        ("num.partitions", "", "from 1"),
        ("num.partitions", "10001", "from 1"),
        ("num.partitions", "x", "from 1"),
        ("num.partitions", "1" * 2**20, "from 1"),
        ("num.partitions", "5\0005", "from 1"),
        ("auto.create.topics.enable", "perhaps", "true or false"),
        ("message.max.bytes", "-1", "from 0"),
        ("log.cleanup.policy", "compact", "does not compact"),
        ("log.message.timestamp.type", "Never", "one of"),
        ("log.retention.ms", "٥", "whole number"),
    ],
    ids=lambda text: repr(text[:20]),
)
async def test_what_cannot_be_altered_leaves_all_as_it_was(
    data: MemoryData, name: str, value: str, says: str
) -> None:
    settings = ClusterSettings(MemoryStore(data), {})
    await settings.alter(setting("log.roll.ms", "8"))
    before = data.last_version
    good = Change("log.roll.ms", Operation.SET, "9")
    bad = Change(name, Operation.SET, value)
    for alteration in (change_some([good, bad], {}), replace_all({"log.roll.ms": "9", name: value})):
        for validate_only in (False, True):
            with pytest.raises(BadRequest, match=says) as raised:
                await settings.alter(alteration, validate_only=validate_only)
            assert len(str(raised.value)) < 1_000
    assert data.last_version == before
    # As in Kafka: that it is not set is what was asked for.
    await settings.alter(deleting(name))
    assert data.last_version == before


async def test_settings_that_contradict_each_other_are_refused(data: MemoryData) -> None:
    settings = ClusterSettings(MemoryStore(data), {})
    await settings.alter(setting("log.cleaner.min.compaction.lag.ms", "6"))
    with pytest.raises(BadRequest, match="contradict"):
        await settings.alter(setting("log.cleaner.max.compaction.lag.ms", "5"))


async def test_validating_and_changing_nothing_write_nothing(data: MemoryData) -> None:
    settings = ClusterSettings(MemoryStore(data), {})
    await settings.alter(setting("num.partitions", "3"), validate_only=True)
    await settings.alter(replace_all({}))
    assert data.last_version == 0
    await settings.alter(setting("num.partitions", "3"))
    before = data.last_version
    await settings.alter(setting("num.partitions", " 3"))
    assert data.last_version == before
    assert settings.num_partitions == 3, "at once, without a watch"


@both
@pytest.mark.parametrize("first", [True, False], ids=["first change", "later change"])
@pytest.mark.parametrize("fault", list(Fault))
@pytest.mark.parametrize("call", range(1, 7))
async def test_answer_is_true_whatever_goes_wrong(
    data: MemoryData, aborts: bool, call: int, fault: Fault, first: bool
) -> None:
    plain = ClusterSettings(MemoryStore(data, conditions_abort=aborts), {})
    if not first:
        await plain.alter(setting("log.roll.ms", "8"))
    old = stored(data)
    new = {**old, "num.partitions": "3"}
    settings, store = faulty(data, aborts, {call: fault})
    change = settings.alter(setting("num.partitions", "3"))
    await check_answer(change, store, lambda: stored(data), old=old, new=new)
    if call == PUT and fault in (Fault.LOST, Fault.DONE, Fault.LATE):
        assert stored(data) == new, "a lost answer is made up for"


@both
@pytest.mark.parametrize("fault", [Fault.LOST, Fault.DONE, Fault.LATE])
async def test_change_is_not_made_again_over_what_others_changed_since(
    data: MemoryData, aborts: bool, fault: Fault
) -> None:
    plain = ClusterSettings(MemoryStore(data, conditions_abort=aborts), {})

    async def other() -> None:
        await plain.alter(setting("num.partitions", "2"))

    settings, store = faulty(data, aborts, {PUT: fault, AFTER_PUT: other})
    with pytest.raises(OutcomeUnknown):
        await settings.alter(setting("num.partitions", "1"))
    await store.land()
    assert stored(data) == {"num.partitions": "2"}


@both
async def test_nothing_is_lost_where_many_alter_at_once(data: MemoryData, aborts: bool) -> None:
    numbers = [each.name for each in DYNAMIC_SETTINGS.values() if each.type is ConfigType.LONG]
    names = [name for name in numbers if "compaction.lag" not in name]
    brokers = [ClusterSettings(MemoryStore(data, conditions_abort=aborts), {}) for _ in range(3)]
    await asyncio.gather(*(brokers[i % 3].alter(setting(name, str(i + 1))) for i, name in enumerate(names)))
    assert stored(data) == {name: str(i + 1) for i, name in enumerate(names)}
    assert len(names) > 9


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (b"\xff", CorruptStore),
        (b"[]", CorruptStore),
        (b"{}", CorruptStore),
        (b'{"format":true,"configs":{}}', CorruptStore),
        (b'{"format":0,"configs":{}}', CorruptStore),
        (b'{"format":1}', CorruptStore),
        (b'{"format":1,"configs":{"num.partitions":3}}', CorruptStore),
        (b'{"format":2}', IncompatibleStore),
    ],
)
async def test_record_that_cannot_be_read_is_left_alone(
    data: MemoryData, value: bytes, error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore(data)
    await store.put(0, KEY, value)
    async with following(store) as settings:
        assert settings.num_partitions == 1
        with pytest.raises(error):
            await settings.alter(setting("num.partitions", "3"))
    assert data.domain(0).records[KEY].value == value
    assert "left out" in caplog.text


async def test_what_another_version_took_is_used_as_far_as_it_is_understood(
    data: MemoryData, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore(data)
    configs = {
        "future": "x",
        "log.cleaner.max.compaction.lag.ms": "5",
        "log.cleaner.min.compaction.lag.ms": "6",
        "log.cleanup.policy": "compact",
        "message.max.bytes": "7",
        "node.id": "3",
        "num.partitions": "3",
    }
    await store.put(0, KEY, json.dumps({"format": 1, "configs": configs}).encode())
    async with following(store) as settings:
        assert settings.num_partitions == 3
        assert settings.topic_defaults == {"max.message.bytes": "7", "max.compaction.lag.ms": "5"}
        assert len([record for record in caplog.records if "not used here" in record.message]) == 4
