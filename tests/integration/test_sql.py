"""`drayd sql` and `dray.spark.session` on real tables that PyIceberg made: Spark reads another's."""

from __future__ import annotations

import datetime as dt
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.catalog import Catalog
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.catalog.sql import SqlCatalog

from dray.columns.schema import SCHEMA
from tests.servers.iceberg_rest import IcebergRestServer
from tests.servers.s3 import S3Server

# A JVM on a busy machine takes its time.
TIMEOUT_S = 300
pytestmark = pytest.mark.timeout(600)


@dataclass(frozen=True)
class Tables:
    """A directory with a catalog of one table, and what `drayd` is told of it."""

    directory: Path
    arguments: Sequence[str]
    env: dict[str, str]

    def sql(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        return drayd("sql", *self.arguments, *arguments, cwd=self.directory, **{**self.env, **env})

    def sql_by_one(self, *commands: Sequence[str]) -> list[Answer]:
        """Several commands, in one process."""
        given = json.dumps([[*self.arguments, *command] for command in commands])
        done = run(["-c", SEVERAL, given], self.directory, self.env)
        assert done.returncode == 0, done.stderr
        return [Answer(*json.loads(line)) for line in done.stdout.splitlines()]

    def rows(self, query: str) -> list[dict[str, object]]:
        done = self.sql("--json", query)
        assert (done.returncode, done.stderr) == (0, "")
        return [json.loads(line) for line in done.stdout.splitlines()]


@dataclass(frozen=True)
class Answer:
    code: int
    stdout: str
    stderr: str


# The JVM outlives the first of several commands in one process, which then take a second each.
SEVERAL = """
import contextlib, io, json, sys
from dray.cli import main
for arguments in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["sql", *arguments])
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""


def drayd(*arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return run(["-m", "dray", *arguments], cwd, env)


def run(arguments: Sequence[str], cwd: Path, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DRAY_")}
    if "DRAY_CACHE" in os.environ:
        clean["DRAY_CACHE"] = os.environ["DRAY_CACHE"]
    return subprocess.run(
        # PySpark leaves sockets and pipes to the garbage collector.
        [sys.executable, "-W", "error", "-W", "ignore::ResourceWarning", *arguments],
        cwd=cwd,
        env={**clean, **env},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        stdin=subprocess.DEVNULL,
    )


def make_table(directory: Path, location: str, **properties: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    fill(
        SqlCatalog("dray", uri=f"sqlite:///{directory}/catalog.db", warehouse=location, **properties),
        location,
    )


def fill(catalog: Catalog, location: str) -> None:
    catalog.create_namespace("kafka")
    table = catalog.create_table("kafka.orders", SCHEMA.remove_metadata(), f"{location}/kafka/orders")
    table.append(pa.Table.from_pylist([_row(number) for number in range(150)], SCHEMA))
    catalog.close()


def _row(number: int) -> dict[str, object]:
    return {
        "partition": number % 3,
        "offset": number,
        "timestamp": dt.datetime(2026, 1, 2, 3, 4, 5, number * 1000, dt.UTC) if number else None,
        "key": f"k{number}".encode() if number % 2 else None,
        "value": b"\xff\x00" if number == 1 else b'{"n": %d}' % number,
        "attributes": 0,
        "headers": [{"key": "h", "value": b"v"}, {"key": "h", "value": None}] if number == 2 else [],
    }


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Tables:
    """The default: everything in a directory, here with characters that URLs and options trip over."""
    directory = tmp_path_factory.mktemp("sql")
    data = directory / "my data 50%"
    make_table(data, f"file://{data}/objects/warehouse")
    return Tables(directory, ["--data", str(data)], {})


def test_a_topic_is_shown_as_a_table(embedded: Tables) -> None:
    query = "SHOW TABLES IN dray.kafka; SELECT * FROM dray.kafka.orders ORDER BY offset LIMIT 3"
    done = embedded.sql(query)
    assert (done.returncode, done.stderr) == (0, "")
    shown, asked = done.stdout.split("\n\n")
    assert [line.split() for line in shown.splitlines()[2:]] == [["kafka", "orders", "false"]]
    lines = [line.split() for line in asked.splitlines()]
    assert lines[0] == SCHEMA.names
    assert lines[3] == [
        *["1", "1", "2026-01-02T03:04:05.001+00:00", "NULL", "k1", "0xff00"],
        *["NULL", "NULL", "NULL", "0", "[]"],
    ]
    assert lines[4][4:7] == ["NULL", '{"n":', "2}"]
    assert asked.splitlines()[4].endswith('[{"key": "h", "value": "v"}, {"key": "h", "value": null}]')


def test_rows_are_cut_at_a_limit_and_that_is_said(embedded: Tables) -> None:
    first, second = embedded.sql_by_one(
        ["--json", "SELECT offset FROM orders ORDER BY offset; SELECT count(*) AS n FROM orders"],
        ["--json", "--limit", "150", "SELECT offset FROM orders"],
    )
    assert first.code == 0
    assert first.stderr == "only the first 100 rows are shown; --limit N shows more\n"
    rows = [json.loads(line) for line in first.stdout.splitlines()]
    assert rows == [*({"offset": number} for number in range(100)), {"n": 150}]
    assert (second.code, second.stderr, second.stdout.count("\n")) == (0, "", 150)


def test_a_file_of_statements_goes_on_to_the_first_that_fails(embedded: Tables) -> None:
    """What was shown stays, and what went wrong is one line."""
    file = embedded.directory / "query.sql"
    file.write_text(
        "CREATE TEMPORARY VIEW texts AS SELECT offset, CAST(value AS STRING) AS text FROM orders; -- it;\n"
        "SELECT text, get_json_object(text, '$.n') AS n FROM texts WHERE offset = 7;\n"
        "SELECT * FROM dray.kafka.`not-yet`;\n"
        "SELECT 1;\n"
    )
    done = embedded.sql("--json", "-f", str(file))
    assert done.returncode == 1
    assert done.stdout == '{"text": "{\\"n\\": 7}", "n": "7"}\n'
    assert done.stderr == (
        "drayd: there is no table dray.kafka.not-yet (a topic is a table once drayd compactor has been at it;"
        " SHOW TABLES IN dray.kafka lists them)\n"
    )


def test_a_query_that_fails_says_so_in_one_line(embedded: Tables) -> None:
    complaints = {
        "SELEC 1": r"Syntax error at or near 'SELEC'.* \(names with dots or dashes stand in backquotes: .*\)",
        "SELECT colour FROM orders": "A column, variable, or function parameter with name `colour` .*",
        "SHOW TABLES IN dray.nowhere": r"there is no namespace nowhere \(it is made with .*\)",
        "SELECT raise_error('so it is')": ".*so it is.*",
    }
    answers = embedded.sql_by_one(*([query] for query in complaints))
    for answer, complaint in zip(answers, complaints.values(), strict=True):
        assert (answer.code, answer.stdout) == (1, "")
        assert re.fullmatch(f"drayd: {complaint}\n", answer.stderr), answer.stderr
        assert "SQLSTATE" not in answer.stderr


def test_properties_of_spark_are_taken(embedded: Tables) -> None:
    conf = ["spark.sql.shuffle.partitions=7", "spark.driver.extraJavaOptions=-Dmine=yes"]
    ask = (
        "SET spark.sql.shuffle.partitions; SELECT java_method('java.lang.System', 'getProperty', 'mine') AS m"
    )
    done = embedded.sql("--conf", conf[0], "--conf", conf[1], "--json", ask)
    assert (done.returncode, done.stderr) == (0, "")
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"key": "spark.sql.shuffle.partitions", "value": "7"},
        {"m": "yes"},
    ]


def test_a_spark_that_does_not_start_says_why(embedded: Tables) -> None:
    done = embedded.sql("--conf", "spark.driver.memory=nonsense", "SELECT 1")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("drayd: Spark does not start: ")
    assert "nonsense" in done.stderr
    assert done.stderr.count("\n") == 1


def test_without_a_catalog_nothing_is_made_and_no_spark_is_started(tmp_path: Path) -> None:
    done = drayd("sql", "--data", "elsewhere", "SELECT 1", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == (
        f"drayd: there is no catalog at {tmp_path}/elsewhere/catalog.db: drayd compactor makes the tables\n"
    )
    assert not (tmp_path / "elsewhere").exists()


def test_no_java_and_an_old_one_are_named(embedded: Tables, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    done = embedded.sql("SELECT 1", PATH=str(empty), JAVA_HOME="")
    assert done.returncode == 1
    assert done.stderr.startswith("drayd: there is no java on PATH: Spark needs Java 17 or newer")

    old = tmp_path / "old" / "bin" / "java"
    old.parent.mkdir(parents=True)
    old.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\" 2019-01-15' >&2\n")
    old.chmod(0o755)
    done = embedded.sql("SELECT 1", JAVA_HOME=str(tmp_path / "old"))
    assert done.returncode == 1
    assert done.stderr.startswith(f"drayd: {old} is Java 11: Spark needs Java 17 or newer")
    assert done.stderr.count("\n") == 1


def test_a_jar_that_cannot_be_fetched_is_named(embedded: Tables, tmp_path: Path) -> None:
    settings = ["--set", f"cache={tmp_path}/cache", "--set", "maven.url=http://127.0.0.1:9/m2"]
    done = embedded.sql(*settings, "SELECT 1", HOME=str(tmp_path), no_proxy="*")
    assert done.returncode == 1
    assert "Connection refused; put it there by hand: " in done.stderr
    assert f"{tmp_path}/cache/jars/iceberg-spark-runtime" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "drayd: give a query, or a file with -f"),
        (["-f", "a.sql", "SELECT 1"], "drayd: give a query, or a file with -f"),
        (["-f", "missing.sql"], "drayd: -f missing.sql: No such file or directory"),
        (["--conf", "memory=1g", "SELECT 1"], "drayd: spark.conf: 'memory=1g' is not usable"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    tmp_path: Path, arguments: Sequence[str], complaint: str
) -> None:
    done = drayd("sql", *arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(complaint)


def test_tables_on_s3_are_read_with_the_credentials_of_the_environment(
    tmp_path: Path, s3_server: S3Server
) -> None:
    properties = {
        "s3.endpoint": s3_server.endpoint,
        "s3.access-key-id": s3_server.access_key,
        "s3.secret-access-key": s3_server.secret_key,
        "s3.region": s3_server.region,
    }
    make_table(tmp_path / "data", f"s3://{s3_server.bucket}/sql/warehouse", **properties)
    tables = Tables(tmp_path, ["--data", "data", "--objects", s3_server.url("sql")], s3_server.credentials())
    assert tables.rows("SELECT count(*) AS n, max(offset) AS last FROM orders") == [{"n": 150, "last": 149}]


def test_tables_of_a_rest_catalog_are_read_from_s3(tmp_path: Path, s3_server: S3Server) -> None:
    server = IcebergRestServer(tmp_path / "rest", s3_server)
    server.start()
    try:
        properties = {
            "uri": f"http://127.0.0.1:{server.port}",
            "s3.endpoint": s3_server.endpoint,
            "s3.access-key-id": s3_server.access_key,
            "s3.secret-access-key": s3_server.secret_key,
            "s3.region": s3_server.region,
        }
        fill(RestCatalog("dray", **properties), f"s3://{s3_server.bucket}/sql-rest/warehouse")
        arguments = ["--catalog", f"rest+http://127.0.0.1:{server.port}/", "--objects"]
        arguments.append(s3_server.url("sql-rest"))
        tables = Tables(tmp_path, arguments, s3_server.credentials())
        query = "SELECT count(*) AS n, max(offset) AS last FROM dray.kafka.orders"
        assert tables.rows(query) == [{"n": 150, "last": 149}]
    finally:
        server.kill()


SESSIONS = """
from dray.spark import session
first = session("one")
second = session("two", conf={"spark.sql.shuffle.partitions": "3"})
print(first.table("dray.kafka.orders").count(), second.sql("SHOW TABLES IN dray.kafka").count())
print(second.conf.get("spark.sql.shuffle.partitions"), first.conf.get("spark.sql.session.timeZone"))
"""


def test_a_session_is_had_in_one_line_and_again_for_another_cluster(embedded: Tables, tmp_path: Path) -> None:
    shutil.copytree(Path(embedded.arguments[1]), tmp_path / "one")
    make_table(tmp_path / "two", f"file://{tmp_path}/two/objects/warehouse")
    other = SqlCatalog("dray", uri=f"sqlite:///{tmp_path}/two/catalog.db", warehouse=f"file://{tmp_path}")
    other.drop_table("kafka.orders")
    other.close()
    done = subprocess.run(
        [sys.executable, "-c", SESSIONS], cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["150 0", "3 UTC"]
