"""Topic configs: one table of all that a topic can be given, and what the broker makes of them. Pure.

Names, types, defaults and valid values are those of Kafka 4 (`LogConfig`, `ServerTopicConfigSynonyms`), so
that what creates topics for Kafka creates them here. What Kafka refuses is refused, and so is what Dray does
not do (compaction by key, tiered storage). Configs about leaders, replicas, segments and local disks, none of
which Dray has, are kept and shown but change nothing: they are not `effective`, and their text says so.

A topic stores only its overrides. What it does not override is the broker's setting, where there is one, else
Kafka's default.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from dray.errors import InvalidTopicConfig

MAX_INT = 2**31 - 1
MAX_LONG = 2**63 - 1
# Only the lists of throttled replicas can be long. Together with the ids of the most partitions that a topic
# can have (`catalog.MAX_PARTITIONS`), so much still fits into one record of every store.
MAX_OVERRIDES_CHARS = 131_072

Parsed: TypeAlias = bool | int | float | str | tuple[str, ...]


class ConfigType(enum.Enum):
    """Kafka's types of configs, by name."""

    BOOLEAN = "boolean"
    STRING = "string"
    INT = "int"
    LONG = "long"
    DOUBLE = "double"
    LIST = "list"


class TimestampType(enum.Enum):
    CREATE_TIME = "CreateTime"
    LOG_APPEND_TIME = "LogAppendTime"


class ConfigSource(enum.Enum):
    """Where a value comes from, the strongest first."""

    TOPIC = "topic"
    CLUSTER = "cluster"  # altered for all brokers
    BROKER = "broker"  # what this broker was started with
    DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class TopicConfig:
    name: str
    type: ConfigType
    default: str
    # The value as it is used. Raises ValueError, whose text says what would be right.
    parse: Callable[[str], Parsed]
    setting: str | None  # the broker's setting that stands in for it where a topic has none
    doc: str
    effective: bool = False  # whether Dray acts on it


@dataclass(frozen=True, slots=True)
class TopicConfigs:
    """What the broker uses. -1 is no limit to retention."""

    max_message_bytes: int
    timestamp_type: TimestampType
    timestamp_before_max_ms: int
    timestamp_after_max_ms: int
    compression_type: str
    retention_ms: int
    retention_bytes: int


@dataclass(frozen=True, slots=True)
class Synonym:
    """One of the places that a value may come from."""

    name: str
    value: str
    source: ConfigSource


@dataclass(frozen=True, slots=True)
class ConfigRow:
    """A config of one topic as it is shown. `synonyms` begins with the one that holds."""

    name: str
    value: str
    source: ConfigSource
    type: ConfigType
    synonyms: tuple[Synonym, ...]
    doc: str
    read_only: bool = False
    sensitive: bool = False


def parse_configs(
    overrides: Mapping[str, str | None], defaults: Mapping[str, str] = MappingProxyType({})
) -> TopicConfigs:
    """What these overrides mean on a broker with these settings, which are named as topic configs are.

    Raises `InvalidTopicConfig`.
    """
    values = {name: config.parse(config.default) for name, config in TOPIC_CONFIGS.items()}
    values |= _parse_all(defaults)
    values |= _parse_all(overrides)
    lowest, highest = values["min.compaction.lag.ms"], values["max.compaction.lag.ms"]
    assert isinstance(lowest, int)
    assert isinstance(highest, int)
    if lowest > highest:
        # The one to be named is the topic's own: that can be corrected, or left out.
        if "max.compaction.lag.ms" in overrides and "min.compaction.lag.ms" not in overrides:
            expected = f"at least min.compaction.lag.ms, which is {lowest}"
            raise InvalidTopicConfig("max.compaction.lag.ms", str(highest), expected)
        expected = f"at most max.compaction.lag.ms, which is {highest}"
        raise InvalidTopicConfig("min.compaction.lag.ms", str(lowest), expected)
    keeps_all = values["cleanup.policy"] == ()
    return TopicConfigs(
        max_message_bytes=_int(values["max.message.bytes"]),
        timestamp_type=TimestampType(values["message.timestamp.type"]),
        timestamp_before_max_ms=_int(values["message.timestamp.before.max.ms"]),
        timestamp_after_max_ms=_int(values["message.timestamp.after.max.ms"]),
        compression_type=str(values["compression.type"]),
        retention_ms=-1 if keeps_all else _int(values["retention.ms"]),
        retention_bytes=-1 if keeps_all else max(_int(values["retention.bytes"]), -1),
    )


def normalize(overrides: Mapping[str, str | None]) -> dict[str, str]:
    """The overrides as they are stored: each value in its shortest form. Raises `InvalidTopicConfig`."""
    normal = {name: shortest(value) for name, value in _parse_all(overrides).items()}
    size = 0
    for name, text in normal.items():
        size += len(name) + len(text)
        if size > MAX_OVERRIDES_CHARS:
            raise InvalidTopicConfig(
                name, text, f"all configs of a topic together have at most {MAX_OVERRIDES_CHARS} characters"
            )
    return normal


def describe(
    overrides: Mapping[str, str],
    given: Mapping[str, str] = MappingProxyType({}),
    altered: Mapping[str, str] = MappingProxyType({}),
) -> list[ConfigRow]:
    """Every config of a topic with these overrides, by name.

    `given` is what the broker was started with and `altered` what holds for all brokers, both named as topic
    configs are.
    """
    return [_describe(config, overrides, given, altered) for config in TOPIC_CONFIGS.values()]


def as_topic_configs(settings: Mapping[str, str]) -> dict[str, str]:
    """Settings of brokers by the names of the topic configs that they stand in for; others are left out."""
    return {
        config.name: settings[config.setting]
        for config in TOPIC_CONFIGS.values()
        if config.setting is not None and config.setting in settings
    }


def shortest(value: Parsed) -> str:
    """A value in its shortest form, as it is stored."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return ",".join(value) if isinstance(value, tuple) else str(value)


def _describe(
    config: TopicConfig, overrides: Mapping[str, str], given: Mapping[str, str], altered: Mapping[str, str]
) -> ConfigRow:
    synonyms = []
    if config.name in overrides:
        synonyms.append(Synonym(config.name, overrides[config.name], ConfigSource.TOPIC))
    # As in Kafka, what has no setting of the broker has no synonyms besides itself.
    if config.setting is not None:
        if config.name in altered:
            synonyms.append(Synonym(config.setting, altered[config.name], ConfigSource.CLUSTER))
        if config.name in given:
            synonyms.append(Synonym(config.setting, given[config.name], ConfigSource.BROKER))
        synonyms.append(Synonym(config.setting, config.default, ConfigSource.DEFAULT))
    first = synonyms[0] if synonyms else Synonym(config.name, config.default, ConfigSource.DEFAULT)
    return ConfigRow(config.name, first.value, first.source, config.type, tuple(synonyms), config.doc)


def _parse_all(texts: Mapping[str, str | None]) -> dict[str, Parsed]:
    values: dict[str, Parsed] = {}
    for name, text in texts.items():
        config = TOPIC_CONFIGS.get(name)
        if config is None:
            raise InvalidTopicConfig(name, text, "there is no topic config of this name")
        if text is None:
            raise InvalidTopicConfig(name, text, "it needs a value")
        try:
            values[name] = config.parse(text)
        except ValueError as error:
            raise InvalidTopicConfig(name, text, str(error)) from None
    return values


def _int(value: Parsed) -> int:
    assert isinstance(value, int)
    return value


# As Java's `trim` and `parseInt` have it; Kafka trims all but strings.
BLANK = "".join(map(chr, range(0x21)))
_WHOLE = re.compile("[+-]?[0-9]{1,30}")
_DECIMAL = re.compile(r"[+-]?([0-9]{1,30}\.?[0-9]{0,30}|\.[0-9]{1,30})([eE][+-]?[0-9]{1,3})?")
_THROTTLED = re.compile("[0-9]+:[0-9]+")


def _boolean(text: str) -> bool:
    folded = text.strip(BLANK).lower()
    if folded not in ("true", "false"):
        raise ValueError("true or false")
    return folded == "true"


def _never(why: str) -> Callable[[str], bool]:
    def parse(text: str) -> bool:
        if _boolean(text):
            raise ValueError(f"only false: {why}")
        return False

    return parse


def _between(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        trimmed = text.strip(BLANK)
        if not _WHOLE.fullmatch(trimmed) or not low <= int(trimmed) <= high:
            raise ValueError(f"a whole number from {low} to {high}")
        return int(trimmed)

    return parse


def _gzip_level(text: str) -> int:
    level = _between(-1, 9)(text)
    if level == 0:
        raise ValueError("a whole number from 1 to 9, or -1")
    return level


def _ratio(text: str) -> float:
    trimmed = text.strip(BLANK)
    if not _DECIMAL.fullmatch(trimmed) or not 0 <= float(trimmed) <= 1:
        raise ValueError("a number from 0 to 1")
    return float(trimmed)


def _one_of(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"one of {', '.join(allowed)}")
        return text

    return parse


def _list(text: str) -> tuple[str, ...]:
    trimmed = text.strip(BLANK)
    # Not `re.split` with blanks on both sides: that is quadratic in how many blanks there are.
    return tuple(part.strip(BLANK) for part in trimmed.split(",")) if trimmed else ()


def _cleanup_policy(text: str) -> tuple[str, ...]:
    policies = _list(text)
    if "compact" in policies and set(policies) <= {"compact", "delete"}:
        raise ValueError("delete, or nothing to keep all: Dray does not compact by key")
    if policies not in ((), ("delete",)):
        raise ValueError("delete, or nothing to keep all")
    return policies


def _throttled_replicas(text: str) -> tuple[str, ...]:
    replicas = _list(text)
    if replicas != ("*",) and not all(_THROTTLED.fullmatch(replica) for replica in replicas):
        raise ValueError("* or a list of partition:broker")
    return replicas


_NO_SEGMENTS = "Kept but without effect: Dray has no segment files."
_NO_REPLICAS = (
    "Kept but without effect: Dray has no replicas; the object store and the metadata store keep copies."
)
_NO_KEY_COMPACTION = "Kept but without effect: Dray does not compact by key."
_NO_TIERS = "Kept but without effect: all data is in object storage, there is no local tier."
_NO_RECOMPRESSION = "Kept but without effect: batches stay as their producer compressed them."
_NO_RETENTION = "Kept but without effect yet: nothing is removed by age or size."
_FOR_EVER = str(MAX_LONG)


_B, _S, _I, _L, _D, _LIST = (
    ConfigType.BOOLEAN,
    ConfigType.STRING,
    ConfigType.INT,
    ConfigType.LONG,
    ConfigType.DOUBLE,
    ConfigType.LIST,
)
_AT_LEAST_0 = _between(0, MAX_LONG)
_AT_LEAST_1 = _between(1, MAX_LONG)
_CLEANER = "log.cleaner."

_ROWS = [
    TopicConfig(
        "cleanup.policy",
        _LIST,
        "delete",
        _cleanup_policy,
        "log.cleanup.policy",
        "What happens to old records: delete, or nothing to keep them whatever the retention says."
        " compact is refused, because Dray does not compact by key.",
    ),
    TopicConfig("compression.gzip.level", _I, "-1", _gzip_level, "compression.gzip.level", _NO_RECOMPRESSION),
    TopicConfig(
        "compression.lz4.level", _I, "9", _between(1, 17), "compression.lz4.level", _NO_RECOMPRESSION
    ),
    TopicConfig(
        "compression.type",
        _S,
        "producer",
        _one_of("uncompressed", "zstd", "lz4", "snappy", "gzip", "producer"),
        "compression.type",
        _NO_RECOMPRESSION,
    ),
    TopicConfig(
        "compression.zstd.level", _I, "3", _between(-131_072, 22), "compression.zstd.level", _NO_RECOMPRESSION
    ),
    TopicConfig(
        "delete.retention.ms",
        _L,
        "86400000",
        _AT_LEAST_0,
        _CLEANER + "delete.retention.ms",
        _NO_KEY_COMPACTION,
    ),
    TopicConfig(
        "file.delete.delay.ms", _L, "60000", _AT_LEAST_0, "log.segment.delete.delay.ms", _NO_SEGMENTS
    ),
    TopicConfig(
        "flush.messages",
        _L,
        _FOR_EVER,
        _AT_LEAST_1,
        "log.flush.interval.messages",
        "Kept but without effect: Dray acknowledges a record only when it is stored.",
    ),
    TopicConfig(
        "flush.ms",
        _L,
        _FOR_EVER,
        _AT_LEAST_0,
        "log.flush.interval.ms",
        "Kept but without effect: Dray acknowledges a record only when it is stored.",
    ),
    TopicConfig(
        "follower.replication.throttled.replicas", _LIST, "", _throttled_replicas, None, _NO_REPLICAS
    ),
    TopicConfig(
        "index.interval.bytes", _I, "4096", _between(0, MAX_INT), "log.index.interval.bytes", _NO_SEGMENTS
    ),
    TopicConfig("leader.replication.throttled.replicas", _LIST, "", _throttled_replicas, None, _NO_REPLICAS),
    TopicConfig(
        "local.retention.bytes", _L, "-2", _between(-2, MAX_LONG), "log.local.retention.bytes", _NO_TIERS
    ),
    TopicConfig("local.retention.ms", _L, "-2", _between(-2, MAX_LONG), "log.local.retention.ms", _NO_TIERS),
    TopicConfig(
        "max.compaction.lag.ms",
        _L,
        _FOR_EVER,
        _AT_LEAST_1,
        _CLEANER + "max.compaction.lag.ms",
        _NO_KEY_COMPACTION,
    ),
    TopicConfig(
        "max.message.bytes",
        _I,
        "1048588",
        _between(0, MAX_INT),
        "message.max.bytes",
        "The largest record batch that is taken, as the producer compressed it.",
        effective=True,
    ),
    TopicConfig(
        "message.timestamp.after.max.ms",
        _L,
        "3600000",
        _AT_LEAST_0,
        "log.message.timestamp.after.max.ms",
        "How far a record's timestamp may lie ahead of the broker's clock; not asked for LogAppendTime.",
        effective=True,
    ),
    TopicConfig(
        "message.timestamp.before.max.ms",
        _L,
        _FOR_EVER,
        _AT_LEAST_0,
        "log.message.timestamp.before.max.ms",
        "How far a record's timestamp may lie behind the broker's clock; not asked for LogAppendTime.",
        effective=True,
    ),
    TopicConfig(
        "message.timestamp.type",
        _S,
        "CreateTime",
        _one_of("CreateTime", "LogAppendTime"),
        "log.message.timestamp.type",
        "Whether a record has the time its producer gave it (CreateTime) or that of its arrival"
        " (LogAppendTime).",
        effective=True,
    ),
    TopicConfig(
        "min.cleanable.dirty.ratio", _D, "0.5", _ratio, _CLEANER + "min.cleanable.ratio", _NO_KEY_COMPACTION
    ),
    TopicConfig(
        "min.compaction.lag.ms", _L, "0", _AT_LEAST_0, _CLEANER + "min.compaction.lag.ms", _NO_KEY_COMPACTION
    ),
    TopicConfig("min.insync.replicas", _I, "1", _between(1, MAX_INT), "min.insync.replicas", _NO_REPLICAS),
    TopicConfig("preallocate", _B, "false", _boolean, "log.preallocate", _NO_SEGMENTS),
    TopicConfig("remote.log.copy.disable", _B, "false", _boolean, None, _NO_TIERS),
    TopicConfig("remote.log.delete.on.disable", _B, "false", _boolean, None, _NO_TIERS),
    TopicConfig(
        "remote.storage.enable",
        _B,
        "false",
        _never("all data is in object storage already"),
        None,
        "Only false is taken: all data is in object storage already, there is no second tier.",
    ),
    TopicConfig(
        "retention.bytes",
        _L,
        "-1",
        # Kafka takes any number here, and any below 0 as no limit.
        _between(-(2**63), MAX_LONG),
        "log.retention.bytes",
        "How large a partition may grow before its oldest records go; -1 is no limit. " + _NO_RETENTION,
    ),
    TopicConfig(
        "retention.ms",
        _L,
        "604800000",
        _between(-1, MAX_LONG),
        "log.retention.ms",
        "How long records are kept; -1 is for ever. " + _NO_RETENTION,
    ),
    TopicConfig(
        "segment.bytes", _I, "1073741824", _between(2**20, MAX_INT), "log.segment.bytes", _NO_SEGMENTS
    ),
    TopicConfig(
        "segment.index.bytes", _I, "10485760", _between(4, MAX_INT), "log.index.size.max.bytes", _NO_SEGMENTS
    ),
    TopicConfig("segment.jitter.ms", _L, "0", _AT_LEAST_0, "log.roll.jitter.ms", _NO_SEGMENTS),
    TopicConfig("segment.ms", _L, "604800000", _AT_LEAST_1, "log.roll.ms", _NO_SEGMENTS),
    TopicConfig(
        "unclean.leader.election.enable",
        _B,
        "false",
        _boolean,
        "unclean.leader.election.enable",
        "Kept but without effect: Dray has no leaders, every broker serves every partition.",
    ),
]

TOPIC_CONFIGS: Mapping[str, TopicConfig] = MappingProxyType({config.name: config for config in _ROWS})
