"""Topic configs against Kafka's table, written out here as literals."""

from __future__ import annotations

import pytest

from dray.errors import InvalidTopicConfig
from dray.topics.configs import (
    TOPIC_CONFIGS,
    ConfigSource,
    ConfigType,
    Synonym,
    TimestampType,
    as_topic_configs,
    describe,
    normalize,
    parse_configs,
)

# From the topic configs of the documentation of Kafka 4: name, type, default, setting of the broker.
KAFKA = """
cleanup.policy | list | delete | log.cleanup.policy
compression.gzip.level | int | -1 | compression.gzip.level
compression.lz4.level | int | 9 | compression.lz4.level
compression.type | string | producer | compression.type
compression.zstd.level | int | 3 | compression.zstd.level
delete.retention.ms | long | 86400000 | log.cleaner.delete.retention.ms
file.delete.delay.ms | long | 60000 | log.segment.delete.delay.ms
flush.messages | long | 9223372036854775807 | log.flush.interval.messages
flush.ms | long | 9223372036854775807 | log.flush.interval.ms
follower.replication.throttled.replicas | list | |
index.interval.bytes | int | 4096 | log.index.interval.bytes
leader.replication.throttled.replicas | list | |
local.retention.bytes | long | -2 | log.local.retention.bytes
local.retention.ms | long | -2 | log.local.retention.ms
max.compaction.lag.ms | long | 9223372036854775807 | log.cleaner.max.compaction.lag.ms
max.message.bytes | int | 1048588 | message.max.bytes
message.timestamp.after.max.ms | long | 3600000 | log.message.timestamp.after.max.ms
message.timestamp.before.max.ms | long | 9223372036854775807 | log.message.timestamp.before.max.ms
message.timestamp.type | string | CreateTime | log.message.timestamp.type
min.cleanable.dirty.ratio | double | 0.5 | log.cleaner.min.cleanable.ratio
min.compaction.lag.ms | long | 0 | log.cleaner.min.compaction.lag.ms
min.insync.replicas | int | 1 | min.insync.replicas
preallocate | boolean | false | log.preallocate
remote.log.copy.disable | boolean | false |
remote.log.delete.on.disable | boolean | false |
remote.storage.enable | boolean | false |
retention.bytes | long | -1 | log.retention.bytes
retention.ms | long | 604800000 | log.retention.ms
segment.bytes | int | 1073741824 | log.segment.bytes
segment.index.bytes | int | 10485760 | log.index.size.max.bytes
segment.jitter.ms | long | 0 | log.roll.jitter.ms
segment.ms | long | 604800000 | log.roll.ms
unclean.leader.election.enable | boolean | false | unclean.leader.election.enable
"""


def test_table_is_kafkas() -> None:
    ours = [
        f"{c.name} | {c.type.value} | {c.default} | {c.setting or ''}".replace("  ", " ").rstrip()
        for c in TOPIC_CONFIGS.values()
    ]
    assert ours == KAFKA.strip().splitlines()


def test_docs_say_what_has_no_effect() -> None:
    for config in TOPIC_CONFIGS.values():
        honest = any(said in config.doc for said in ("without effect", "refused", "Only false"))
        assert honest == (not config.effective), config.name


def test_defaults_are_what_the_broker_uses() -> None:
    configs = parse_configs({})
    assert configs.max_message_bytes == 1_048_588
    assert configs.timestamp_type is TimestampType.CREATE_TIME
    assert configs.timestamp_before_max_ms == 2**63 - 1
    assert configs.timestamp_after_max_ms == 3_600_000
    assert configs.compression_type == "producer"
    assert configs.retention_ms == 604_800_000
    assert configs.retention_bytes == -1


def test_override_beats_setting_beats_default() -> None:
    settings = {"max.message.bytes": "100", "retention.ms": "7"}
    configs = parse_configs({"retention.ms": "9"}, settings)
    assert configs.max_message_bytes == 100
    assert configs.retention_ms == 9


def test_empty_cleanup_policy_keeps_everything() -> None:
    configs = parse_configs({"cleanup.policy": "", "retention.ms": "1", "retention.bytes": "1"})
    assert (configs.retention_ms, configs.retention_bytes) == (-1, -1)


@pytest.mark.parametrize(
    ("name", "text", "stored"),
    [
        ("cleanup.policy", "delete", "delete"),
        ("cleanup.policy", " delete ", "delete"),
        ("cleanup.policy", "", ""),
        ("compression.type", "zstd", "zstd"),
        ("compression.type", "uncompressed", "uncompressed"),
        ("compression.gzip.level", "-1", "-1"),
        ("compression.gzip.level", "9", "9"),
        ("compression.zstd.level", "-131072", "-131072"),
        ("max.message.bytes", "0", "0"),
        ("max.message.bytes", " +5\t", "5"),
        ("max.message.bytes", "2147483647", "2147483647"),
        ("message.timestamp.type", "LogAppendTime", "LogAppendTime"),
        ("min.cleanable.dirty.ratio", "1", "1.0"),
        ("min.cleanable.dirty.ratio", "1e-2", "0.01"),
        ("preallocate", " TRUE", "true"),
        ("retention.bytes", "-5", "-5"),
        ("retention.ms", "-1", "-1"),
        ("local.retention.ms", "-2", "-2"),
        ("segment.bytes", "1048576", "1048576"),
        ("leader.replication.throttled.replicas", "*", "*"),
        ("leader.replication.throttled.replicas", "0:1 , 1:2", "0:1,1:2"),
        ("leader.replication.throttled.replicas", "", ""),
        ("remote.storage.enable", "false", "false"),
        ("unclean.leader.election.enable", "true", "true"),
    ],
)
def test_what_kafka_takes_is_taken(name: str, text: str, stored: str) -> None:
    parse_configs({name: text})
    assert normalize({name: text}) == {name: stored}
    assert normalize({name: stored}) == {name: stored}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("cleanup.policy", "compact"),
        ("cleanup.policy", "compact,delete"),
        ("cleanup.policy", "delete,delete"),
        ("cleanup.policy", "Delete"),
        ("cleanup.policy", "forget"),
        ("compression.type", "none"),
        ("compression.type", "gzip "),
        ("compression.type", ""),
        ("compression.gzip.level", "0"),
        ("compression.gzip.level", "10"),
        ("compression.lz4.level", "0"),
        ("compression.lz4.level", "18"),
        ("compression.zstd.level", "23"),
        ("max.message.bytes", "-1"),
        ("max.message.bytes", "2147483648"),
        ("max.message.bytes", ""),
        ("max.message.bytes", "1e6"),
        ("max.message.bytes", "1_000"),
        ("max.message.bytes", "١"),
        ("max.message.bytes", "9" * 5_000),
        ("max.message.bytes", None),
        ("message.timestamp.type", "createtime"),
        ("message.timestamp.before.max.ms", "-1"),
        ("min.cleanable.dirty.ratio", "1.1"),
        ("min.cleanable.dirty.ratio", "NaN"),
        ("min.insync.replicas", "0"),
        ("preallocate", "yes"),
        ("retention.ms", "-2"),
        ("retention.ms", "9223372036854775808"),
        ("local.retention.ms", "-3"),
        ("segment.bytes", "1048575"),
        ("segment.ms", "0"),
        ("leader.replication.throttled.replicas", "1"),
        ("leader.replication.throttled.replicas", "*,1:1"),
        ("remote.storage.enable", "true"),
        ("retention", "1"),
        ("", "1"),
        # Gone in Kafka 4.
        ("message.format.version", "3.0"),
        ("message.timestamp.difference.max.ms", "1"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(name: str, text: str | None) -> None:
    for check in (parse_configs, normalize):
        with pytest.raises(InvalidTopicConfig) as raised:
            check({"retention.ms": "5", name: text})
        assert (raised.value.config, raised.value.value) == (name, text)
        assert len(str(raised.value)) < 600


def test_refusing_compact_says_why() -> None:
    with pytest.raises(InvalidTopicConfig, match="does not compact by key"):
        parse_configs({"cleanup.policy": "compact"})


def test_compaction_lags_that_contradict_each_other_are_refused() -> None:
    parse_configs({"min.compaction.lag.ms": "5", "max.compaction.lag.ms": "5"})
    with pytest.raises(InvalidTopicConfig, match=r"min\.compaction\.lag\.ms"):
        parse_configs({"min.compaction.lag.ms": "6", "max.compaction.lag.ms": "5"})


def test_contradiction_with_a_setting_names_the_topic_s_own_config() -> None:
    """Whoever leaves it out then serves the topic with all its other configs."""
    with pytest.raises(InvalidTopicConfig) as raised:
        parse_configs({"max.compaction.lag.ms": "5"}, {"min.compaction.lag.ms": "6"})
    assert raised.value.config == "max.compaction.lag.ms"
    with pytest.raises(InvalidTopicConfig) as raised:
        parse_configs({"min.compaction.lag.ms": "6"}, {"max.compaction.lag.ms": "5"})
    assert raised.value.config == "min.compaction.lag.ms"


def test_overrides_have_room_in_a_record() -> None:
    short, long = ("1:1," * 1_000)[:-1], ("1:1," * 40_000)[:-1]
    assert normalize({"leader.replication.throttled.replicas": short})
    with pytest.raises(InvalidTopicConfig, match="131072"):
        normalize({"leader.replication.throttled.replicas": long})


def test_description_shows_where_each_value_comes_from() -> None:
    rows = {row.name: row for row in describe({"retention.ms": "9"}, {"retention.ms": "8"})}
    assert sorted(rows) == sorted(TOPIC_CONFIGS)
    row = rows["retention.ms"]
    assert (row.value, row.source, row.type) == ("9", ConfigSource.TOPIC, ConfigType.LONG)
    assert (row.read_only, row.sensitive) == (False, False)
    assert row.synonyms == (
        Synonym("retention.ms", "9", ConfigSource.TOPIC),
        Synonym("log.retention.ms", "8", ConfigSource.BROKER),
        Synonym("log.retention.ms", "604800000", ConfigSource.DEFAULT),
    )
    assert rows["max.message.bytes"].source is ConfigSource.DEFAULT
    assert rows["max.message.bytes"].value == "1048588"
    assert rows["remote.storage.enable"].synonyms == ()
    by_setting = {row.name: row for row in describe({}, {"max.message.bytes": "7"})}
    assert by_setting["max.message.bytes"].source is ConfigSource.BROKER
    assert by_setting["max.message.bytes"].value == "7"


def test_what_was_altered_for_all_brokers_comes_before_what_this_one_was_started_with() -> None:
    given, altered = {"retention.ms": "8"}, {"retention.ms": "7", "max.message.bytes": "6"}
    rows = {row.name: row for row in describe({"segment.ms": "9"}, given, altered)}
    assert rows["retention.ms"].synonyms == (
        Synonym("log.retention.ms", "7", ConfigSource.CLUSTER),
        Synonym("log.retention.ms", "8", ConfigSource.BROKER),
        Synonym("log.retention.ms", "604800000", ConfigSource.DEFAULT),
    )
    assert (rows["max.message.bytes"].value, rows["max.message.bytes"].source) == ("6", ConfigSource.CLUSTER)


def test_settings_by_the_names_of_topic_configs() -> None:
    settings = {"log.retention.ms": "5", "message.max.bytes": "6", "num.partitions": "7"}
    assert as_topic_configs(settings) == {"max.message.bytes": "6", "retention.ms": "5"}
