"""Every setting, and the one place that reads the environment.

`Settings` is the table: each field carries its name, parser, default and one line of documentation, and
environment variables, command-line flags and reference pages are derived from it. A value comes from the
defaults, a YAML file, the environment or the command line, each overriding those before it, as the same
text everywhere: quoting in YAML changes nothing.

Whatever is wrong raises `ConfigError` before anything is opened.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from dray.errors import ConfigError, InvalidObjectRequest, InvalidRequest
from dray.metadata.cluster import MAX_NUM_DOMAINS
from dray.metadata.opening import (
    MemoryUrl,
    UrlParts,
    parse_metadata_url,
    parse_sqlite_url,
    redact,
    split_url,
)
from dray.metadata.store import MAX_SESSION_MS, MIN_SESSION_MS
from dray.objectstore.opening import parse_objects_url

ENV_PREFIX = "DRAY_"
# Read by the test suite and its tools, not by Dray.
FOREIGN_VARIABLES = re.compile(r"DRAY_TEST_.*")


@dataclass(frozen=True, slots=True)
class Given:
    """A value as somebody wrote it, and where: `origin` is for people, such as "dray.yaml line 3"."""

    name: str
    text: str
    origin: str


def _directory(text: str) -> Path:
    if not text or "\0" in text:
        raise ValueError("it must be the path of a directory")
    return Path(text)


def _home_directory(text: str) -> Path:
    """As the shell would have it: a file and a variable do not pass through one."""
    try:
        return _directory(text).expanduser()
    except RuntimeError:
        raise ValueError("whose home '~' is cannot be found out; write it in full") from None


def _int_between(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"-?[0-9]{1,18}", text) or not low <= int(text) <= high:
            raise ValueError(f"it must be a whole number from {low} to {high}")
        return int(text)

    return parse


def _boolean(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError("it must be true or false")
    return text == "true"


def _one_of(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"it must be one of {', '.join(allowed)}")
        return text

    return parse


def _some_of(*allowed: str) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        chosen = tuple(each.strip() for each in text.split(","))
        if not set(chosen) <= set(allowed) or len(set(chosen)) != len(chosen):
            raise ValueError(f"it must be some of {', '.join(allowed)}, with commas between them")
        return chosen

    return parse


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _address(text: str) -> Address:
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+)):([0-9]{1,5})", text)
    if match is None or int(match[3]) > 65_535:
        raise ValueError("it must be host:port, or [address]:port for IPv6")
    return Address(match[1] or match[2], int(match[3]))


def _zone(text: str) -> str:
    """What a client can name in `client.id`: a comma would end it there."""
    if not re.fullmatch(r"[A-Za-z0-9._-]{0,128}", text):
        raise ValueError("it must be letters, digits, '.', '_' and '-', at most 128 of them")
    return text


def _namespace(text: str) -> str:
    """Levels of characters that SQL takes, at least in backquotes."""
    if not re.fullmatch(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", text) or len(text) > 128:
        raise ValueError("it must be letters, digits, '_' and '-', with dots between levels, at most 128")
    return text


def _http_url(text: str) -> str:
    if not re.fullmatch(r"https?://[^/?#@\s]+(/[^?#\s]*)?", text):
        raise ValueError("it must be an http:// or https:// address")
    return text.rstrip("/")


def _spark_master(text: str) -> str:
    if not re.fullmatch(r"local(\[[^\]]+\])?|yarn|(spark|k8s)://\S+", text):
        raise ValueError("it must be local, local[N], local[*], spark://host:port, yarn or k8s://URL")
    return text


def _spark_conf(text: str) -> Mapping[str, str]:
    """Lines of key=value, of which the last of a key counts. Values are Spark's to judge."""
    conf: dict[str, str] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        key, equals, value = line.partition("=")
        if not equals or not re.fullmatch(r"spark\.\S+", key.rstrip()):
            raise ValueError("write spark.key=value, one to a line")
        conf[key.rstrip()] = value.strip()
    return conf


def _metadata_url(text: str) -> str:
    if parse_metadata_url(text) == MemoryUrl():
        raise ValueError("a memory store dies with its process and is for tests only; use sqlite:///path")
    return text


def _objects_url(text: str) -> str:
    parse_objects_url(text)
    return text


def _catalog_url(text: str) -> str:
    if text == "none":
        return text
    parts = split_url(text)
    match parts.scheme:
        case "sqlite":
            parse_sqlite_url(parts)
        case "rest+http" | "rest+https":  # its options are the catalog's own properties
            _check_server(parts)
        case "glue":
            pass
        case _:
            raise parts.bad(
                "a catalog URL begins with sqlite:///, rest+http://, rest+https:// or glue://, or is none"
            )
    return text


def _check_server(parts: UrlParts) -> None:
    if not re.fullmatch(r"([^@]*@)?(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?", parts.authority):
        raise parts.bad(f"name the server as {parts.scheme}://host:port/")


@dataclass(frozen=True, slots=True)
class Setting:
    """What the table says about one setting."""

    name: str
    parse: Callable[[str], object]
    default: str | None  # may refer to {data} and {absolute_data}; None leaves it unset
    doc: str
    flag: str | None = None  # placeholder of a command-line option of its own
    only: str | None = None  # the commands that have this option, with spaces; None: all have it
    short: str | None = None  # what the option is called, if not as the setting is
    adds: bool = False  # whether a further value is a line more, instead of taking the place of those before

    @property
    def field(self) -> str:
        return self.name.replace(".", "_")

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.field.upper()

    @property
    def option(self) -> str:
        return "--" + (self.short or self.name.replace(".", "-"))


def _about(*row: Any, **more: Any) -> dict[str, Setting]:
    return {"setting": Setting(*row, **more)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The URLs may hold passwords, so they are not in the `repr`."""

    data: Path = field(
        metadata=_about(
            "data",
            _directory,
            "./data",
            "Directory of everything embedded: metadata, objects and catalog.",
            flag="DIR",
        )
    )
    metadata: str = field(
        repr=False,
        metadata=_about(
            "metadata",
            _metadata_url,
            "sqlite:///{data}/metadata.db",
            "Metadata store: sqlite:///path, etcd://h1:2379,h2:2379/prefix or oxia://host:6648/namespace.",
            flag="URL",
        ),
    )
    objects: str = field(
        repr=False,
        metadata=_about(
            "objects",
            _objects_url,
            "file://{absolute_data}/objects",
            "Object store: file:///path or s3://bucket/prefix?endpoint=…&region=….",
            flag="URL",
        ),
    )
    catalog: str = field(
        repr=False,
        metadata=_about(
            "catalog",
            _catalog_url,
            "sqlite:///{data}/catalog.db",
            "Iceberg catalog: sqlite:///path, rest+http(s)://host:8181/?warehouse=…, glue://… or none.",
            flag="URL",
        ),
    )
    metadata_timeout_ms: int = field(
        metadata=_about(
            "metadata.timeout.ms",
            _int_between(100, 60_000),
            "5000",
            "Time within which a call to the metadata store ends, in a result or an error.",
        )
    )
    metadata_domains: int | None = field(
        metadata=_about(
            "metadata.domains",
            _int_between(1, MAX_NUM_DOMAINS),
            None,
            "Number of MetaDomains, fixed when the cluster is created: 16 unless set. May be left out later.",
        )
    )
    wal_segment_bytes: int = field(
        metadata=_about(
            "wal.segment.bytes",
            _int_between(64 * 2**10, 2**30),
            "8388608",
            "Size at which a WAL object is sealed.",
        )
    )
    wal_linger_ms: int = field(
        metadata=_about(
            "wal.linger.ms",
            _int_between(0, 60_000),
            "250",
            "Longest time that a batch waits for its WAL object to fill while another is on its way.",
        )
    )
    wal_buffer_bytes: int = field(
        metadata=_about(
            "wal.buffer.bytes",
            _int_between(2**20, 2**40),
            "134217728",
            "Most bytes of batches between acceptance and answer; above it, connections are not read.",
        )
    )
    listen: Address = field(
        metadata=_about(
            "listen",
            _address,
            "127.0.0.1:9092",
            "Where Kafka clients connect. Port 0 takes a free one.",
            flag="HOST:PORT",
            only="broker",
        )
    )
    advertise: Address | None = field(
        metadata=_about(
            "advertise",
            _address,
            None,
            "Where clients are told to connect; as --listen unless set. Port 0 is that of --listen.",
            flag="HOST:PORT",
            only="broker",
        )
    )
    zone: str = field(
        metadata=_about(
            "zone",
            _zone,
            "",
            "The broker's zone. Clients with zone_id=ZONE in their client.id are kept within it.",
            flag="ZONE",
            only="broker",
        )
    )
    node_id: int | None = field(
        metadata=_about(
            "node.id",
            _int_between(0, 2**31 - 1),
            None,
            "The broker's number among its peers; the first free one unless set.",
            flag="N",
            only="broker",
        )
    )
    workers: int = field(
        metadata=_about(
            "workers",
            _int_between(1, 256),
            "1",
            "Brokers to start, as processes on consecutive ports and node ids.",
            flag="N",
            only="broker",
        )
    )
    log_format: str = field(
        metadata=_about("log.format", _one_of("text", "json"), "text", "How log lines are written to stderr.")
    )
    log_level: str = field(
        metadata=_about(
            "log.level", _one_of("debug", "info", "warning", "error"), "info", "The least that is logged."
        )
    )
    auto_create_topics_enable: bool = field(
        metadata=_about(
            "auto.create.topics.enable",
            _boolean,
            "true",
            "Whether a topic comes into being when a client asks for its metadata.",
        )
    )
    num_partitions: int = field(
        metadata=_about(
            "num.partitions",
            _int_between(1, 10_000),
            "1",
            "Partitions of a topic that does not say.",
        )
    )
    message_max_bytes: int = field(
        metadata=_about(
            "message.max.bytes",
            _int_between(0, 2**31 - 1),
            "1048588",
            "Largest record batch, for topics that do not set max.message.bytes.",
        )
    )
    fetch_max_bytes: int = field(
        metadata=_about(
            "fetch.max.bytes",
            _int_between(1024, 2**31 - 1),
            "57671680",
            "Most bytes of one fetch response, but for a single larger batch.",
        )
    )
    fetch_buffer_bytes: int = field(
        metadata=_about(
            "fetch.buffer.bytes",
            _int_between(2**20, 2**40),
            "67108864",
            "Most bytes of fetch responses that are being read or sent; above it, fetches wait.",
        )
    )
    fetch_cache_bytes: int = field(
        metadata=_about(
            "fetch.cache.bytes",
            _int_between(2 * 2**20, 2**40),  # a block of the object store's, and what is around it
            "67108864",
            "Memory for WAL objects that were written here or read lately.",
        )
    )
    fetch_compacted_cache_bytes: int = field(
        metadata=_about(
            "fetch.compacted.cache.bytes",
            _int_between(0, 2**40),
            "67108864",
            "Memory for batches that were rebuilt from Parquet files.",
        )
    )
    index_cache_bytes: int = field(
        metadata=_about(
            "index.cache.bytes",
            _int_between(2**20, 2**40),
            "67108864",
            "Memory for the offset index.",
        )
    )
    network_max_request_bytes: int = field(
        metadata=_about(
            "network.max_request_bytes", _int_between(1024, 2**31 - 1), "104857600", "Largest request."
        )
    )
    network_max_inflight_bytes: int = field(
        metadata=_about(
            "network.max_inflight_bytes",
            _int_between(2**20, 2**40),
            "134217728",
            "Most bytes of requests that are not answered yet; above it, connections are not read.",
        )
    )
    network_max_connection_inflight_bytes: int = field(
        metadata=_about(
            "network.max_connection_inflight_bytes",
            _int_between(2**16, 2**40),
            "67108864",
            "The same for one connection.",
        )
    )
    network_send_timeout_ms: int = field(
        metadata=_about(
            "network.send_timeout_ms",
            _int_between(100, 3_600_000),
            "30000",
            "A client that takes no responses, or stops within a large request, for so long is dropped.",
        )
    )
    max_connections: int = field(
        metadata=_about("max.connections", _int_between(1, 1_000_000), "10000", "Most connections at once.")
    )
    connections_max_idle_ms: int = field(
        metadata=_about(
            "connections.max.idle.ms",
            _int_between(100, 2**40),
            "600000",
            "A connection without requests for so long is closed.",
        )
    )
    broker_session_timeout_ms: int = field(
        metadata=_about(
            "broker.session.timeout.ms",
            _int_between(MIN_SESSION_MS, MAX_SESSION_MS),
            "9000",
            "How long a broker that died is still named to clients.",
        )
    )
    group_min_session_timeout_ms: int = field(
        metadata=_about(
            "group.min.session.timeout.ms",
            _int_between(1, 2**31 - 1),
            "6000",
            "Shortest session timeout that a member of a classic group may choose.",
        )
    )
    group_max_session_timeout_ms: int = field(
        metadata=_about(
            "group.max.session.timeout.ms",
            _int_between(1, 2**31 - 1),
            "1800000",
            "Longest session timeout that a member of a classic group may choose.",
        )
    )
    group_initial_rebalance_delay_ms: int = field(
        metadata=_about(
            "group.initial.rebalance.delay.ms",
            _int_between(0, 2**31 - 1),
            "3000",
            "How long the first rebalance of a classic group waits for more members.",
        )
    )
    group_max_size: int = field(
        metadata=_about(
            "group.max.size", _int_between(1, 2**31 - 1), "2147483647", "Most members of a classic group."
        )
    )
    group_consumer_session_timeout_ms: int = field(
        metadata=_about(
            "group.consumer.session.timeout.ms",
            _int_between(1, 2**31 - 1),
            "45000",
            "A member of a consumer group that is silent for so long is expelled.",
        )
    )
    group_consumer_heartbeat_interval_ms: int = field(
        metadata=_about(
            "group.consumer.heartbeat.interval.ms",
            _int_between(1, 2**31 - 1),
            "5000",
            "How often members of consumer groups are told to send a heartbeat.",
        )
    )
    group_consumer_max_size: int = field(
        metadata=_about(
            "group.consumer.max.size",
            _int_between(1, 2**31 - 1),
            "2147483647",
            "Most members of a consumer group.",
        )
    )
    group_consumer_assignors: tuple[str, ...] = field(
        metadata=_about(
            "group.consumer.assignors",
            _some_of("uniform", "range"),
            "uniform,range",
            "Assignors of consumer groups; the first is used where members do not choose.",
        )
    )
    offset_metadata_max_bytes: int = field(
        metadata=_about(
            "offset.metadata.max.bytes",
            _int_between(0, 65_536),
            "4096",
            "Longest text that a member may commit with an offset.",
        )
    )
    offsets_retention_minutes: int = field(
        metadata=_about(
            "offsets.retention.minutes",
            _int_between(1, 2**31 - 1),
            "10080",
            "How long the offsets of a group are kept when it has no members.",
        )
    )
    offsets_retention_check_interval_ms: int = field(
        metadata=_about(
            "offsets.retention.check.interval.ms",
            _int_between(1, 2**31 - 1),
            "600000",
            "How often offsets that are too old are looked for.",
        )
    )
    routing_enforce_owner: bool = field(
        metadata=_about(
            "routing.enforce_owner",
            _boolean,
            "false",
            "Refuse partitions of another broker (NOT_LEADER_OR_FOLLOWER) instead of serving them.",
        )
    )
    http: Address | None = field(
        metadata=_about(
            "http",
            _address,
            None,
            "Where a compactor serves its metrics, at /metrics. Unset: nowhere.",
            flag="HOST:PORT",
            only="compactor",
        )
    )
    table_namespace: str = field(
        metadata=_about("table.namespace", _namespace, "kafka", "Iceberg namespace of the topics' tables.")
    )
    table_iceberg_partitioning: str = field(
        metadata=_about(
            "table.iceberg.partitioning",
            _one_of("partition", "partition,day(timestamp)"),
            "partition",
            "How new tables are partitioned: partition, or partition,day(timestamp).",
        )
    )
    spark_master: str = field(
        metadata=_about(
            "spark.master",
            _spark_master,
            "local[*]",
            "Where the compactor's work runs: local[N], spark://host:port, yarn or k8s://URL.",
            flag="URL",
            only="compactor",
            short="master",
        )
    )
    spark_conf: Mapping[str, str] = field(
        repr=False,
        metadata=_about(
            "spark.conf",
            _spark_conf,
            "",
            "A property of Spark, as spark.executor.memory=4g; repeatable.",
            flag="KEY=VALUE",
            only="compactor sql",
            short="conf",
            adds=True,
        ),
    )
    cache: Path = field(
        metadata=_about(
            "cache", _home_directory, "~/.cache/dray", "Directory of what is fetched once: Spark's jars."
        )
    )
    maven_url: str | None = field(
        metadata=_about(
            "maven.url",
            _http_url,
            None,
            "Maven repository to fetch Spark's jars from; unless set, Spark asks Maven Central.",
        )
    )
    compaction_interval_ms: int = field(
        metadata=_about(
            "compaction.interval.ms",
            _int_between(100, 2**40),
            "10000",
            "Pause between two rounds of the compactor.",
        )
    )
    compaction_wal_max_age_ms: int = field(
        metadata=_about(
            "compaction.wal.max.age.ms",
            _int_between(0, 2**40),
            "60000",
            "How long records wait at most to be in their table; a stream that fills a file does not wait.",
        )
    )
    compaction_task_bytes: int = field(
        metadata=_about(
            "compaction.task.bytes",
            _int_between(2**16, 2**40),
            "134217728",
            "Most WAL bytes that become one data file. An executor needs about five times as much memory.",
        )
    )
    compaction_target_file_size_bytes: int = field(
        metadata=_about(
            "compaction.target.file.size.bytes",
            _int_between(2**16, 2**40),
            "268435456",
            "Size that small data files are rewritten to.",
        )
    )
    compaction_parquet_max_files_per_partition: int = field(
        metadata=_about(
            "compaction.parquet.max.files.per.partition",
            _int_between(2, 2**31 - 1),
            "64",
            "Data files of a partition above which small ones are rewritten.",
        )
    )
    wal_gc_grace_ms: int = field(
        metadata=_about(
            "wal.gc.grace.ms",
            _int_between(0, 2**40),
            "600000",
            "How long objects stay that nothing refers to any more, for readers that are on their way.",
        )
    )
    table_snapshots_keep: int = field(
        metadata=_about(
            "table.snapshots.keep",
            _int_between(1, 2**31 - 1),
            "100",
            "Snapshots of a table that never expire: the newest.",
        )
    )
    table_snapshots_max_age_ms: int = field(
        metadata=_about(
            "table.snapshots.max.age.ms",
            _int_between(0, 2**50),
            "432000000",
            "Age at which the other snapshots of a table expire.",
        )
    )


def _table() -> dict[str, Setting]:
    rows: list[Setting] = [of.metadata["setting"] for of in fields(Settings)]
    return {row.name: row for row in rows}


SETTINGS: Mapping[str, Setting] = _table()


def load_settings(
    config: Path | None = None,
    arguments: Iterable[Given] = (),
    environ: Mapping[str, str] = os.environ,
) -> Settings:
    """Bring all sources together. `arguments` are in command-line order: the last one counts."""
    given: dict[str, Given] = {}
    sources = [_from_environment(environ), arguments]
    if config is not None:
        sources.insert(0, _from_file(config))
    for source in sources:
        for value in source:
            _check_name(value.name, value, SETTINGS)
            before = given.get(value.name)
            if before is not None and SETTINGS[value.name].adds:
                value = Given(value.name, f"{before.text}\n{value.text}", value.origin)
            given[value.name] = value

    values = {name: _parse(SETTINGS[name], value) for name, value in given.items()}
    data = values.setdefault("data", _directory(SETTINGS["data"].default or ""))
    places = {"data": quote(str(data)), "absolute_data": quote(str(Path(str(data)).absolute()))}
    for setting in SETTINGS.values():
        if setting.name not in values:
            text = setting.default
            values[setting.name] = None if text is None else setting.parse(text.format_map(places))
    return Settings(**{SETTINGS[name].field: value for name, value in values.items()})  # type: ignore[arg-type]


def _from_file(path: Path) -> Iterator[Given]:
    """The settings of a YAML file: one flat mapping of names to plain values.

    Composed, not loaded, so that each value is the text that was written and knows its line.
    """
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise ConfigError("--config", str(path), f"{error.strerror}; it must be a readable file") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        problem = " ".join(str(error).split())
        raise ConfigError("--config", str(path), f"it must be a YAML file in UTF-8: {problem}") from None
    if root is None:
        return
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError("--config", str(path), "it must hold lines of the form 'name: value'")
    seen: set[str] = set()
    for key, value in root.value:
        origin = f"{path} line {key.start_mark.line + 1}"
        name = str(key.value)
        if not isinstance(value, yaml.ScalarNode):
            raise ConfigError(
                name,
                "a list or mapping",
                f"it must be one value, and names are written in full: metadata.timeout.ms (from {origin})",
            )
        if name in seen:
            raise ConfigError(name, redact(value.value), f"it is given twice in one file (from {origin})")
        seen.add(name)
        yield Given(name, value.value, origin)


def _from_environment(environ: Mapping[str, str]) -> Iterator[Given]:
    names = {setting.env: setting.name for setting in SETTINGS.values()}
    for variable, text in sorted(environ.items()):
        if variable.startswith(ENV_PREFIX) and not FOREIGN_VARIABLES.fullmatch(variable):
            _check_name(variable, Given(variable, text, "the environment"), names)
            yield Given(names[variable], text, variable)


def _check_name(name: str, given: Given, known: Iterable[str]) -> None:
    names = list(known)
    if name not in names:
        nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
        raise ConfigError(
            name,
            redact(given.text),
            f"there is no such setting; did you mean {nearest}? (from {given.origin})",
        )


def _parse(setting: Setting, given: Given) -> object:
    try:
        return setting.parse(given.text)
    except (ValueError, InvalidRequest, InvalidObjectRequest) as error:
        # What `bad_url` writes begins with the URL, which `ConfigError` names anyway.
        expected = str(error).removeprefix(f"{redact(given.text)}: ")
        raise ConfigError(setting.name, redact(given.text), f"{expected} (from {given.origin})") from None
