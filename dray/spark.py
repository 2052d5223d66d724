"""Spark sessions in which every topic is a table.

    from dray.spark import session

    spark = session("./data")
    spark.sql("SELECT * FROM dray.kafka.orders").show()

`dray` is the catalog of the setting `catalog`, and the one that is meant where a name has no other; its
namespace is that of `table.namespace`. Objects on S3 are read with the endpoint and region of the setting
`objects` and the credentials that the AWS tools find.

`spark_conf` is the pure part, for sessions that are made otherwise: give it to a Spark of your own, with the
jars of `needed_jars`. Of a catalog, nothing is said when the JVM starts: it may hold secrets, and what a JVM
starts with is seen by everybody who can list processes.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dray.config import Given, Settings, load_settings
from dray.errors import JavaMissing, NoTables, SparkInUse, SparkNotStarted
from dray.jars import ICEBERG, ICEBERG_AWS, SQLITE, Jar, ensure_jars
from dray.metadata.opening import parse_sqlite_url, split_url
from dray.objectstore.opening import FileUrl, parse_objects_url

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

CATALOG = "dray"
OLDEST_JAVA = 17
_EXTENSIONS = "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions"
_PREFIX = f"spark.sql.catalog.{CATALOG}"
# Properties that the JVM is told once it runs: its command line is for everybody to see.
_SECRET = re.compile(r"(?i)^spark\.executorEnv\.|secret|password|token|credential|access.?key")
# What a session for people gains by starting early is more than it loses by code that is compiled less well.
_QUICK_START = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")


def session(
    data: str | Path | None = None,
    *,
    config: str | Path | None = None,
    objects: str | None = None,
    catalog: str | None = None,
    master: str = "local[*]",
    conf: Mapping[str, str] | None = None,
) -> SparkSession:
    """A session that knows the topics of a cluster as tables.

    Where they are is said as to `drayd`: by `data`, the directory of everything embedded (default ./data), or
    by the URLs `objects` and `catalog`, or in a file of settings, or by DRAY_… variables. `conf` are more
    properties of Spark. Calling it again gives another session of the same Spark. Raises `SparkError`, and
    `ConfigError` for a setting.
    """
    places = {"data": data, "objects": objects, "catalog": catalog}
    given = [Given(name, str(text), f"{name}=") for name, text in places.items() if text is not None]
    settings = load_settings(None if config is None else Path(config), given)
    return open_session(settings, master=master, conf=conf or {})


def open_session(
    settings: Settings,
    *,
    master: str = "local[*]",
    conf: Mapping[str, str] | None = None,
    stderr: int | None = None,
) -> SparkSession:
    """As `session`. What the JVM writes goes to the file descriptor `stderr`, or to ours."""
    of_catalog = spark_conf(settings)
    java = check_java()
    jars = ensure_jars(needed_jars(settings), settings.cache, settings.maven_url)
    classpath = ":".join(map(str, jars))
    wanted = {**settings.spark_conf, **(conf or {})}
    master = wanted.pop("spark.master", master)
    java_options = [*_QUICK_START, *_archive_options(settings.cache, java, classpath)]
    launch = {
        "spark.app.name": "dray",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.extraClassPath": classpath,
        "spark.sql.extensions": _EXTENSIONS,
        **({} if is_local(master) else {"spark.jars": ",".join(map(str, jars))}),
    }
    start_context(master, launch, wanted, java_options, classpath=classpath, stderr=stderr)
    from pyspark.sql import SparkSession

    active = SparkSession.getActiveSession()
    spark = SparkSession.builder.getOrCreate() if active is None else active.newSession()
    for key, value in {**of_catalog, **wanted}.items():
        if spark.conf.isModifiable(key) or key.startswith(_PREFIX):
            spark.conf.set(key, value)
    return spark


def spark_conf(settings: Settings) -> dict[str, str]:
    """What makes `dray` the catalog of these settings. Raises `NoTables`, and what a bad URL raises.

    All of it can be set while a session runs, until the catalog is used.
    """
    if settings.catalog == "none":
        raise NoTables("the setting catalog is none: topics of this cluster are no tables")
    files = _file_properties(settings.objects)
    warehouse = f"{_objects_uri(settings.objects)}/warehouse"
    parts = split_url(settings.catalog)
    match parts.scheme:
        case "sqlite":
            path = parse_sqlite_url(parts).path.absolute()
            if not path.exists():  # the driver would make an empty one
                raise NoTables(f"there is no catalog at {path}: drayd compactor makes the tables")
            kind = {
                "type": "jdbc",
                "uri": f"jdbc:sqlite:{path}",
                "warehouse": warehouse,
                "jdbc.schema-version": "V1",
                "jdbc.busy_timeout": "30000",
            }
        case "rest+http" | "rest+https":
            server = f"{parts.scheme.removeprefix('rest+')}://{parts.authority}/{parts.path}".rstrip("/")
            kind = {"type": "rest", "uri": server}
        case _:
            region = {"client.region": parts.authority} if parts.authority else {}
            kind = {"type": "glue", "warehouse": warehouse, **region}
    options = {_JAVA_NAMES.get(name, name): value for name, value in parts.options.items()}
    properties = {
        **files,
        **kind,
        # What others commit is seen by the next query.
        "cache-enabled": "false",
        "default-namespace": settings.table_namespace,
        **options,
    }
    return {
        _PREFIX: "org.apache.iceberg.spark.SparkCatalog",
        **{f"{_PREFIX}.{name}": value for name, value in properties.items()},
        "spark.sql.defaultCatalog": CATALOG,
        "spark.sql.session.timeZone": "UTC",
    }


# Iceberg's Java calls these otherwise than PyIceberg does, whose names stand in the URL of a catalog.
_JAVA_NAMES = {"s3.region": "client.region", "glue.region": "client.region"}


def needed_jars(settings: Settings) -> list[Jar]:
    jars = [ICEBERG]
    scheme = split_url(settings.catalog).scheme
    if scheme == "sqlite":
        jars.append(SQLITE)
    # A REST catalog may hand out credentials of S3 wherever our own objects are.
    if scheme != "sqlite" or not isinstance(parse_objects_url(settings.objects), FileUrl):
        jars.append(ICEBERG_AWS)
    return jars


def _objects_uri(url: str) -> str:
    """Without an end slash, and not percent-encoded: Iceberg's paths are taken as they are."""
    match parse_objects_url(url):
        case FileUrl(path):
            return f"file://{path}"
        case s3:
            return f"s3://{s3.bucket}/{s3.prefix}".rstrip("/")


def _file_properties(url: str) -> dict[str, str]:
    s3 = parse_objects_url(url)
    if isinstance(s3, FileUrl):
        return {}
    import boto3

    properties = {
        "io-impl": "org.apache.iceberg.aws.s3.S3FileIO",
        "s3.path-style-access": "true" if s3.path_style else "false",
        # Servers that are not AWS have no regions, but signatures need one.
        "client.region": s3.region or boto3.Session().region_name or "us-east-1",
    }
    if s3.endpoint is not None:
        properties["s3.endpoint"] = s3.endpoint
    if not s3.checksums:
        properties["s3.checksum-enabled"] = "false"
    return properties


# --- what the compactor's sessions need as well


def is_local(master: str) -> bool:
    return master.startswith("local")


def check_java() -> str:
    """What `java -version` says. Raises `JavaMissing`."""
    # Spark itself looks there first.
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    wanted = f"Spark needs Java {OLDEST_JAVA} or newer; install it (on Debian: openjdk-17-jre-headless)"
    if java is None:
        raise JavaMissing(f"there is no java on PATH: {wanted}, or set JAVA_HOME")
    try:
        done = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise JavaMissing(f"{java} does not run ({error}): {wanted}, or correct JAVA_HOME") from error
    said = done.stderr + done.stdout
    found = re.search(r'version "(?:1\.)?(\d+)', said)
    if done.returncode != 0 or found is None:
        raise JavaMissing(f"{java} is no Java that says its version: {wanted}, or correct JAVA_HOME")
    if int(found[1]) < OLDEST_JAVA:
        raise JavaMissing(f"{java} is Java {found[1]}: {wanted}, and set JAVA_HOME to it")
    return said


def start_context(
    master: str,
    launch: Mapping[str, str],
    wanted: Mapping[str, str],
    java_options: Sequence[str] = (),
    *,
    classpath: str = "",
    stderr: int | None = None,
) -> SparkContext:
    """This process's Spark, started with `launch` and what the user wants if there is none."""
    # Loaded here: it takes half a second, which `drayd` does not want to wait for each time.
    from py4j.protocol import Py4JError
    from pyspark import SparkConf, SparkContext
    from pyspark.errors import PySparkException
    from pyspark.java_gateway import launch_gateway

    # It would print every failed query a second time, as JSON.
    logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL + 1)
    os.environ["PYSPARK_PYTHON"] = _python(wanted)
    if is_local(master):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    conf = SparkConf(loadDefaults=False).setMaster(master)
    conf.setAll([*launch.items(), *wanted.items()])
    options = [_log_option(), *java_options, wanted.get("spark.driver.extraJavaOptions", "")]
    conf.set("spark.driver.extraJavaOptions", " ".join(filter(None, options)))
    try:
        if SparkContext._gateway is None:
            shown = SparkConf(loadDefaults=False)
            shown.setAll([each for each in conf.getAll() if not _SECRET.search(each[0])])
            gateway = launch_gateway(  # type: ignore[no-untyped-call]
                shown, {} if stderr is None else {"stderr": stderr}
            )
            SparkContext._ensure_initialized(gateway=gateway)
        else:
            _check_classpath(SparkContext._gateway, classpath)
        return SparkContext.getOrCreate(conf)
    except (Py4JError, PySparkException, OSError) as error:
        raise SparkNotStarted(f"Spark does not start: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """What a Java exception says, without its way through the code."""
    java = getattr(error, "java_exception", None)
    text = str(java.toString() if java is not None else error)
    return text.strip().partition("\n")[0]


def _python(wanted: Mapping[str, str]) -> str:
    """Workers run the very Python that has Dray's packages, unless somebody knows better."""
    return wanted.get("spark.pyspark.python") or os.environ.get("PYSPARK_PYTHON") or sys.executable


def _check_classpath(gateway: Any, classpath: str) -> None:
    running = str(gateway.jvm.System.getProperty("java.class.path")).split(":")
    missing = [jar for jar in classpath.split(":") if jar and jar not in running]
    if missing:
        raise SparkInUse(
            f"this process has a Spark without {Path(missing[0]).name}, and a running one takes no jars:"
            " begin anew, with dray.spark.session() as the first session of the process"
        )


@functools.cache
def _log_option() -> str:
    return _quoted(f"-Dlog4j2.configurationFile={(Path(__file__).parent / 'log4j2.properties').as_uri()}")


def _archive_options(cache: Path, java: str, classpath: str) -> list[str]:
    """The JVM's classes as it had them the last time, which makes its start several times as fast.

    Made by the first session that ends. The JVM ignores an archive that does not fit or is not whole.
    """
    of = hashlib.sha256("\n".join([java, version("pyspark"), classpath]).encode()).hexdigest()[:16]
    archive = cache / f"spark-classes-{of}.jsa"
    option = "SharedArchiveFile" if archive.exists() else "ArchiveClassesAtExit"
    return [_quoted(f"-XX:{option}={archive}"), "-Xlog:disable", "-Xlog:all=off"]


def _quoted(option: str) -> str:
    return f'"{option}"' if re.search(r"\s", option) else option
