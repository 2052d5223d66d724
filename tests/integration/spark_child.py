"""A Spark session of `dray.spark` in a process of its own: a JVM takes jars when it starts, and never again.

Arguments are settings, `name=value`. On stdin comes a line of JSON for each query, with the file that its
rows are to be written to, as Arrow has them; on stdout goes a line when they are there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import pyarrow as pa

from tests.integration.local_compactor import settings_of


class SparkReader:
    """The other side. The JVM starts with the first query, when there are tables."""

    def __init__(self, settings: Mapping[str, object], directory: Path) -> None:
        self._directory = directory
        self._log = directory / "spark.log"
        self._queries = 0
        self._process: subprocess.Popen[str] | None = None
        given = [f"{name}={value}" for name, value in settings.items()]
        self._argv = [sys.executable, "-m", "tests.integration.spark_child", *given]

    def __enter__(self) -> Self:
        with self._log.open("ab") as errors:
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(
                self._argv, stdin=pipe, stdout=pipe, stderr=errors, text=True, env=dict(os.environ)
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def query(self, sql: str) -> pa.Table:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._queries += 1
        path = self._directory / f"rows-{self._queries}.arrow"
        self._process.stdin.write(json.dumps([sql, str(path)]) + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n", self._log.read_text()[-3000:]
        with pa.OSFile(str(path)) as file, pa.ipc.open_file(file) as reader:
            return reader.read_all()


def main(settings: Sequence[str]) -> None:
    from dray.spark import open_session

    # Spark's own programs write to stdout, too.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    loaded = settings_of(dict(each.split("=", 1) for each in settings))
    spark = None
    for line in sys.stdin:
        sql, path = json.loads(line)
        if spark is None:
            spark = open_session(loaded, master="local[1]")
        table = spark.sql(sql).toArrow()
        with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
        answers.write("done\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
