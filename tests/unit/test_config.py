"""Settings: where they come from, which one counts, and how a bad one is reported."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from dray.config import SETTINGS, Address, Given, Settings, load_settings
from dray.errors import ConfigError


def load(config: Path | None = None, env: Mapping[str, str] | None = None, **arguments: str) -> Settings:
    given = [Given(name.replace("_", "."), text, "--set") for name, text in arguments.items()]
    return load_settings(config, given, env or {})


def yaml_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "dray.yaml"
    path.write_text(text)
    return path


def test_defaults_are_embedded_below_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    settings = load()
    assert settings.data == Path("data")
    assert settings.metadata == "sqlite:///data/metadata.db"
    assert settings.objects == f"file://{tmp_path}/data/objects"
    assert settings.catalog == "sqlite:///data/catalog.db"


def test_defaults_are_what_is_documented_and_kafkas_where_kafka_has_them() -> None:
    """People leave these out of their files: a change is a change of behaviour."""
    settings = load()
    assert [settings.metadata_timeout_ms, settings.metadata_domains] == [5000, None]
    assert [settings.wal_segment_bytes, settings.wal_linger_ms] == [8 * 2**20, 250]
    assert settings.wal_buffer_bytes == 128 * 2**20
    assert [str(settings.listen), settings.advertise, settings.zone] == ["127.0.0.1:9092", None, ""]
    assert [settings.node_id, settings.workers] == [None, 1]
    assert [settings.log_format, settings.log_level] == ["text", "info"]
    assert [settings.auto_create_topics_enable, settings.num_partitions] == [True, 1]
    assert [settings.message_max_bytes, settings.fetch_max_bytes] == [1048588, 55 * 2**20]
    assert settings.network_max_request_bytes == 100 * 2**20
    assert settings.network_max_inflight_bytes == 128 * 2**20
    assert settings.network_max_connection_inflight_bytes == 64 * 2**20
    assert [settings.network_send_timeout_ms, settings.max_connections] == [30_000, 10_000]
    assert settings.connections_max_idle_ms == 600_000
    assert settings.broker_session_timeout_ms == 9_000
    assert settings.routing_enforce_owner is False
    assert [settings.group_min_session_timeout_ms, settings.group_max_session_timeout_ms] == [6000, 1_800_000]
    assert [settings.group_initial_rebalance_delay_ms, settings.group_max_size] == [3000, 2**31 - 1]
    assert [settings.group_consumer_session_timeout_ms, settings.group_consumer_max_size] == [
        45_000,
        2**31 - 1,
    ]
    assert settings.group_consumer_heartbeat_interval_ms == 5000
    assert settings.group_consumer_assignors == ("uniform", "range")
    assert settings.offset_metadata_max_bytes == 4096
    assert settings.offsets_retention_minutes == 7 * 24 * 60
    assert settings.offsets_retention_check_interval_ms == 600_000
    caches = [settings.fetch_buffer_bytes, settings.fetch_cache_bytes, settings.index_cache_bytes]
    assert caches == [64 * 2**20] * 3


def test_embedded_places_follow_data_and_are_escaped() -> None:
    settings = load(data="/srv/50%?")
    assert settings.metadata == "sqlite:////srv/50%25%3F/metadata.db"
    assert settings.objects == "file:///srv/50%25%3F/objects"
    assert settings.catalog == "sqlite:////srv/50%25%3F/catalog.db"


def test_later_sources_override_earlier_ones(tmp_path: Path) -> None:
    config = yaml_file(
        tmp_path, "metadata.timeout.ms: 1000\nmetadata.domains: '4'\ncatalog: none\ndata: /from/file\n"
    )
    env = {"DRAY_METADATA_TIMEOUT_MS": "2000", "DRAY_METADATA_DOMAINS": "8"}
    settings = load(config, env, metadata_timeout_ms="3000")
    assert settings.data == Path("/from/file")
    assert settings.catalog == "none"
    assert settings.metadata_domains == 8
    assert settings.metadata_timeout_ms == 3000


def test_last_argument_counts() -> None:
    arguments = [Given("metadata.domains", "4", "--set"), Given("metadata.domains", "8", "--set")]
    assert load_settings(None, arguments, {}).metadata_domains == 8


def test_names_of_settings_and_variables() -> None:
    """People have these in their files: they do not change."""
    assert {name: setting.env for name, setting in SETTINGS.items()} == {
        "data": "DRAY_DATA",
        "metadata": "DRAY_METADATA",
        "objects": "DRAY_OBJECTS",
        "catalog": "DRAY_CATALOG",
        "metadata.timeout.ms": "DRAY_METADATA_TIMEOUT_MS",
        "metadata.domains": "DRAY_METADATA_DOMAINS",
        "wal.segment.bytes": "DRAY_WAL_SEGMENT_BYTES",
        "wal.linger.ms": "DRAY_WAL_LINGER_MS",
        "wal.buffer.bytes": "DRAY_WAL_BUFFER_BYTES",
        "listen": "DRAY_LISTEN",
        "advertise": "DRAY_ADVERTISE",
        "zone": "DRAY_ZONE",
        "node.id": "DRAY_NODE_ID",
        "workers": "DRAY_WORKERS",
        "log.format": "DRAY_LOG_FORMAT",
        "log.level": "DRAY_LOG_LEVEL",
        "auto.create.topics.enable": "DRAY_AUTO_CREATE_TOPICS_ENABLE",
        "num.partitions": "DRAY_NUM_PARTITIONS",
        "message.max.bytes": "DRAY_MESSAGE_MAX_BYTES",
        "fetch.max.bytes": "DRAY_FETCH_MAX_BYTES",
        "fetch.buffer.bytes": "DRAY_FETCH_BUFFER_BYTES",
        "fetch.cache.bytes": "DRAY_FETCH_CACHE_BYTES",
        "fetch.compacted.cache.bytes": "DRAY_FETCH_COMPACTED_CACHE_BYTES",
        "index.cache.bytes": "DRAY_INDEX_CACHE_BYTES",
        "network.max_request_bytes": "DRAY_NETWORK_MAX_REQUEST_BYTES",
        "network.max_inflight_bytes": "DRAY_NETWORK_MAX_INFLIGHT_BYTES",
        "network.max_connection_inflight_bytes": "DRAY_NETWORK_MAX_CONNECTION_INFLIGHT_BYTES",
        "network.send_timeout_ms": "DRAY_NETWORK_SEND_TIMEOUT_MS",
        "max.connections": "DRAY_MAX_CONNECTIONS",
        "connections.max.idle.ms": "DRAY_CONNECTIONS_MAX_IDLE_MS",
        "broker.session.timeout.ms": "DRAY_BROKER_SESSION_TIMEOUT_MS",
        "group.min.session.timeout.ms": "DRAY_GROUP_MIN_SESSION_TIMEOUT_MS",
        "group.max.session.timeout.ms": "DRAY_GROUP_MAX_SESSION_TIMEOUT_MS",
        "group.initial.rebalance.delay.ms": "DRAY_GROUP_INITIAL_REBALANCE_DELAY_MS",
        "group.max.size": "DRAY_GROUP_MAX_SIZE",
        "group.consumer.session.timeout.ms": "DRAY_GROUP_CONSUMER_SESSION_TIMEOUT_MS",
        "group.consumer.heartbeat.interval.ms": "DRAY_GROUP_CONSUMER_HEARTBEAT_INTERVAL_MS",
        "group.consumer.max.size": "DRAY_GROUP_CONSUMER_MAX_SIZE",
        "group.consumer.assignors": "DRAY_GROUP_CONSUMER_ASSIGNORS",
        "offset.metadata.max.bytes": "DRAY_OFFSET_METADATA_MAX_BYTES",
        "offsets.retention.minutes": "DRAY_OFFSETS_RETENTION_MINUTES",
        "offsets.retention.check.interval.ms": "DRAY_OFFSETS_RETENTION_CHECK_INTERVAL_MS",
        "routing.enforce_owner": "DRAY_ROUTING_ENFORCE_OWNER",
        "http": "DRAY_HTTP",
        "table.namespace": "DRAY_TABLE_NAMESPACE",
        "table.iceberg.partitioning": "DRAY_TABLE_ICEBERG_PARTITIONING",
        "spark.master": "DRAY_SPARK_MASTER",
        "spark.conf": "DRAY_SPARK_CONF",
        "cache": "DRAY_CACHE",
        "maven.url": "DRAY_MAVEN_URL",
        "compaction.interval.ms": "DRAY_COMPACTION_INTERVAL_MS",
        "compaction.wal.max.age.ms": "DRAY_COMPACTION_WAL_MAX_AGE_MS",
        "compaction.task.bytes": "DRAY_COMPACTION_TASK_BYTES",
        "compaction.target.file.size.bytes": "DRAY_COMPACTION_TARGET_FILE_SIZE_BYTES",
        "compaction.parquet.max.files.per.partition": "DRAY_COMPACTION_PARQUET_MAX_FILES_PER_PARTITION",
        "wal.gc.grace.ms": "DRAY_WAL_GC_GRACE_MS",
        "table.snapshots.keep": "DRAY_TABLE_SNAPSHOTS_KEEP",
        "table.snapshots.max.age.ms": "DRAY_TABLE_SNAPSHOTS_MAX_AGE_MS",
    }


def test_empty_file_sets_nothing(tmp_path: Path) -> None:
    assert load(yaml_file(tmp_path, "# nothing yet\n")) == load()


def test_variables_of_the_tests_are_ignored() -> None:
    env = {"DRAY_TEST_OXIA": "127.0.0.1:6648", "PATH": "/bin"}
    assert load(env=env) == load()


def test_properties_of_spark_add_up_and_the_last_of_each_counts(tmp_path: Path) -> None:
    """One for the cluster stands in the file, another is given for once."""
    file = "spark.conf: |\n  spark.executor.memory=2g\n  spark.driver.extraJavaOptions=-Da=b -Dc=d\n"
    given = [Given("spark.conf", text, "--conf") for text in ("spark.ui.port=0", "spark.executor.memory=4g")]
    assert load_settings(yaml_file(tmp_path, file), given, {}).spark_conf == {
        "spark.executor.memory": "4g",
        "spark.driver.extraJavaOptions": "-Da=b -Dc=d",
        "spark.ui.port": "0",
    }
    assert load().spark_conf == {}


def test_tables_and_what_is_fetched_for_them_have_defaults() -> None:
    settings = load()
    assert [settings.table_namespace, settings.table_iceberg_partitioning] == ["kafka", "partition"]
    assert settings.spark_master == "local[*]"
    assert settings.cache == Path.home() / ".cache" / "dray"
    assert load(maven_url="http://127.0.0.1:1/m2/").maven_url == "http://127.0.0.1:1/m2"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("listen", "9092"),
        ("listen", "host:70000"),
        ("listen", "::1:9092"),
        ("advertise", "a b:1"),
        ("zone", "a,b"),
        ("node.id", "-1"),
        ("workers", "0"),
        ("auto.create.topics.enable", "yes"),
        ("log.level", "loud"),
        ("group.consumer.assignors", "uniform,sticky"),
        ("group.consumer.assignors", "range,range"),
        ("group.consumer.assignors", ""),
        ("table.namespace", "a..b"),
        ("table.namespace", "a b"),
        ("table.iceberg.partitioning", "day(timestamp)"),
        ("spark.master", "cluster:7077"),
        ("spark.conf", "spark.executor.memory"),
        ("spark.conf", "executor.memory=4g"),
        ("maven.url", "ftp://127.0.0.1/"),
    ],
)
def test_a_broker_setting_that_cannot_be_used_is_named(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{name}: {text!r}")):
        load_settings(None, [Given(name, text, "--set")], {})


def test_addresses_keep_the_brackets_of_ipv6() -> None:
    assert load(listen="[::1]:9092").listen == Address("::1", 9092)
    assert str(Address("::1", 9092)) == "[::1]:9092"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("metdata: x\n", r"metdata: 'x' .*did you mean metadata\? \(from .*dray\.yaml line 1\)"),
        ("\nmetadata.timeout: 5\n", r"did you mean metadata\.timeout\.ms\? .*line 2"),
        ("metadata.domains: 0\n", r"metadata\.domains: '0' .*from 1 to 65536 \(from .*dray\.yaml line 1\)"),
        ("metadata.domains:\n", r"metadata\.domains: '' .*whole number"),
        ("metadata:\n  timeout.ms: 5\n", r"metadata: 'a list or mapping' .*one value.*line 1"),
        ("metadata: [a]\n", r"metadata: 'a list or mapping'"),
        ("data: a\ndata: b\n", r"data: 'b' .*given twice.*line 2"),
        ("- data\n", "--config: .*'name: value'"),
        ("data: [\n", "--config: .*must be a YAML file"),
        ("a: 1\n---\nb: 2\n", "--config: .*must be a YAML file"),
    ],
)
def test_bad_file_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load(yaml_file(tmp_path, text))


def test_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--config: .*missing\.yaml.* No such file"):
        load(tmp_path / "missing.yaml")


def test_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "dray.yaml"
    path.write_bytes(b"data: \xff\n")
    with pytest.raises(ConfigError, match=r"--config: .*UTF-8"):
        load(path)


@pytest.mark.parametrize(
    ("env", "complaint"),
    [
        (
            {"DRAY_METADTA": "x"},
            r"DRAY_METADTA: 'x' .*did you mean DRAY_METADATA\? \(from the environment\)",
        ),
        ({"DRAY_": "x"}, "DRAY_: 'x' .*no such setting"),
        ({"DRAY_CACHED": "x"}, "DRAY_CACHED: 'x' .*no such setting"),
        (
            {"DRAY_METADATA_TIMEOUT_MS": "5s"},
            r"metadata\.timeout\.ms: '5s' .*100 to 60000 \(from DRAY_METADATA_TIMEOUT_MS\)",
        ),
        ({"DRAY_METADATA": ""}, r"metadata: '' .*scheme://"),
    ],
)
def test_bad_variable_is_refused(env: Mapping[str, str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load(env=env)


def test_error_carries_the_setting_and_the_value() -> None:
    with pytest.raises(ConfigError) as caught:
        load(metadata_timeout_ms="99")
    assert caught.value.setting == "metadata.timeout.ms"
    assert caught.value.value == "99"
    assert caught.value.expected == "it must be a whole number from 100 to 60000 (from --set)"


@pytest.mark.parametrize(
    "text", ["", "five", "5.0", "5_000", "0x100", "60001", "99", "-5000", "٥٠٠٠", " 5000"]
)
def test_timeout_is_a_whole_number_in_range(text: str) -> None:
    with pytest.raises(ConfigError, match="100 to 60000"):
        load(metadata_timeout_ms=text)


@pytest.mark.parametrize("text", ["0", "65537", "-1", "99999999999999999999"])
def test_domains_are_in_range(text: str) -> None:
    with pytest.raises(ConfigError, match="1 to 65536"):
        load(metadata_domains=text)


@pytest.mark.parametrize("text", ["1", "65536"])
def test_domains_may_be_at_the_ends_of_the_range(text: str) -> None:
    assert str(load(metadata_domains=text).metadata_domains) == text


@pytest.mark.parametrize(
    "url",
    [
        "file:///srv/objects",
        "s3://bucket",
        "s3://my.bucket-1/some/prefix",
        "s3://bucket/prefix?endpoint=http://127.0.0.1:7070&region=eu-central-1",
    ],
)
def test_objects_url_is_accepted(url: str) -> None:
    assert load(objects=url).objects == url


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("objects", "scheme://"),
        ("gs://bucket", "file:/// or s3://"),
        ("file://", "absolute directory"),
        ("file:///", "absolute directory"),
        ("file://relative/path", "absolute directory"),
        ("s3://", "name a bucket"),
        ("s3:///prefix", "name a bucket"),
        ("s3://ab", "name a bucket"),
        ("s3://key:secret@bucket", "name a bucket"),
        ("s3://bucket?endpont=http://h", "no option 'endpont'; the options are endpoint, region"),
        ("s3://bucket?endpoint=127.0.0.1:7070", "endpoint is the http://"),
        ("s3://bucket?endpoint=http://h/path", "endpoint is the http://"),
    ],
)
def test_bad_objects_url_is_refused(url: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=f"^objects: .*{complaint}"):
        load(objects=url)


@pytest.mark.parametrize(
    "url",
    [
        "none",
        "sqlite:///catalog.db",
        "rest+http://127.0.0.1:8181/?warehouse=s3://bucket/warehouse",
        "rest+https://catalog.example.com/api/catalog",
        "glue://123456789012?region=eu-central-1",
        "glue://",
    ],
)
def test_catalog_url_is_accepted(url: str) -> None:
    assert load(catalog=url).catalog == url


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("None", "scheme://"),
        ("http://h:8181", r"sqlite:///, rest\+http://"),
        ("rest+http://", r"name the server as rest\+http://host:port/"),
        ("rest+https:///path", r"name the server as rest\+https://host:port/"),
        ("sqlite:///", "name a file"),
    ],
)
def test_bad_catalog_url_is_refused(url: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=f"^catalog: .*{complaint}"):
        load(catalog=url)


def test_memory_store_is_refused_as_a_setting() -> None:
    with pytest.raises(ConfigError, match=r"metadata: 'memory:' .*tests only"):
        load(metadata="memory:")


def test_no_password_is_shown() -> None:
    assert "secret" not in repr(load(metadata="etcd://me:secret@h1"))
    for bad in ("etcd://me:secret@h1:port", "etcd://me:sec/secret@h1", "etcd:me:secret@h1"):
        with pytest.raises(ConfigError) as caught:
            load(metadata=bad)
        assert "secret" not in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        load(metdata="etcd://me:secret@h1")
    assert "secret" not in str(caught.value)
