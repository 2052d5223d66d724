"""The jars that Spark needs to read the tables: pinned, fetched once, checked each time.

A jar is looked for in Dray's cache, then in Maven's own (`~/.m2`), then fetched: from the repository that the
setting `maven.url` names, or, where there is none, by Spark itself, which knows Maven Central. Whatever its
origin, it counts only with the bytes that are pinned here, so one that somebody puts into the cache by hand
serves too.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import pyspark

from dray import __version__
from dray.errors import JarsMissing

# Of one read from the network. A mirror that is slower than this is as good as none.
_TIMEOUT_S = 30
_ATTEMPTS = 3
_CHUNK_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Jar:
    group: str
    artifact: str
    version: str
    sha256: str

    @property
    def name(self) -> str:
        return f"{self.artifact}-{self.version}.jar"

    @property
    def coordinates(self) -> str:
        return f"{self.group}:{self.artifact}:{self.version}"

    @property
    def path(self) -> str:
        """In a Maven repository, remote or local."""
        return f"{self.group.replace('.', '/')}/{self.artifact}/{self.version}/{self.name}"


# They go with the version of PySpark in pyproject.toml: a runtime for another one fails on it.
ICEBERG = Jar(
    "org.apache.iceberg",
    "iceberg-spark-runtime-4.1_2.13",
    "1.12.0",
    "3123c3798af642dd537230923548e013ef41cc28b6626e5225808cf5670a0f82",
)
# S3 and Glue, with Amazon's own client in it.
ICEBERG_AWS = Jar(
    "org.apache.iceberg",
    "iceberg-aws-bundle",
    "1.12.0",
    "dd7e49ffa4ac9b215bed846581991259e3aec9bb2fa08d6cec029c46cd66d957",
)
SQLITE = Jar(
    "org.xerial",
    "sqlite-jdbc",
    "3.50.3.0",
    "a3f53a2aa15ae9425a9e793bbe9c8e5288febeb4b65ef5c1a4e80d4c2045cf08",
)


def ensure_jars(jars: Iterable[Jar], cache: Path, maven_url: str | None) -> list[Path]:
    """Where they lie in `cache/jars`, once all of them do. Raises `JarsMissing`."""
    wanted = {jar: cache / "jars" / jar.name for jar in jars}
    missing = [jar for jar, path in wanted.items() if not _is(jar, path)]
    if missing:
        (cache / "jars").mkdir(parents=True, exist_ok=True)
        missing = [jar for jar in missing if not _take(jar, _maven_place(jar), wanted[jar])]
    if missing and maven_url is None:
        _let_spark_fetch(missing, cache)
    elif maven_url is not None:
        for jar in missing:
            _fetch(jar, f"{maven_url}/{jar.path}", wanted[jar])
    return list(wanted.values())


def _maven_place(jar: Jar) -> Path:
    return Path.home() / ".m2" / "repository" / jar.path


def _take(jar: Jar, source: Path, wanted: Path) -> bool:
    """Copy what is there already, if it is that jar."""
    if not _is(jar, source):
        return False
    with source.open("rb") as file:
        _put(jar, file, wanted)
    return True


def _let_spark_fetch(jars: Sequence[Jar], cache: Path) -> None:
    """`spark-submit` resolves packages before it runs a program: one that does nothing."""
    submit = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    home = cache / "ivy"
    with tempfile.NamedTemporaryFile("w", suffix=".py") as nothing:
        argv = [str(submit), "--master", "local[1]", "--packages", ",".join(jar.coordinates for jar in jars)]
        argv += [
            "--exclude-packages",
            "org.slf4j:slf4j-api",
            "--conf",
            f"spark.jars.ivy={home}",
            nothing.name,
        ]
        environment = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
        done = subprocess.run(argv, capture_output=True, text=True, env=environment, check=False)
    for jar in jars:
        found = home / "jars" / f"{jar.group}_{jar.name}"
        if not _take(jar, found, cache / "jars" / jar.name):
            problems = [
                line.strip()
                for line in done.stderr.splitlines()
                if "not found" in line or "Exception" in line
            ]
            reason = problems[0] if problems else "what came is not what is pinned"
            raise JarsMissing(cache / "jars" / jar.name, jar.coordinates, reason)


def _is(jar: Jar, path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == jar.sha256
    except OSError:
        return False


def _fetch(jar: Jar, url: str, wanted: Path) -> None:
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            # Some mirrors refuse Python's own name.
            request = urllib.request.Request(url, headers={"User-Agent": f"dray/{__version__}"})
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
                _put(jar, answer, wanted)
            return
        except (OSError, http.client.HTTPException, _WrongBytesError) as error:
            is_final = isinstance(error, urllib.error.HTTPError) and error.code < 500
            if isinstance(error, urllib.error.HTTPError):
                error.close()
            if is_final or attempt == _ATTEMPTS:
                raise JarsMissing(wanted, url, _reason(error)) from error


def _put(jar: Jar, source: BinaryIO, wanted: Path) -> None:
    """Whole and checked, or not at all: several processes may do this at once."""
    with tempfile.NamedTemporaryFile(dir=wanted.parent, prefix=f"{jar.name}.", delete=False) as file:
        scratch = Path(file.name)
        try:
            shutil.copyfileobj(source, file, _CHUNK_BYTES)
            file.flush()
            if not _is(jar, scratch):
                raise _WrongBytesError
            scratch.chmod(0o644)
            os.replace(scratch, wanted)
        except BaseException:
            scratch.unlink(missing_ok=True)
            raise


class _WrongBytesError(Exception):
    """Not what is pinned: cut off on the way, or another file."""


def _reason(error: Exception) -> str:
    match error:
        case _WrongBytesError():
            return "what came has another SHA-256 than the one that is pinned"
        case urllib.error.HTTPError():
            return f"the server answers {error.code}"
        case urllib.error.URLError():
            return str(error.reason)
        case OSError():
            return error.strerror or str(error)
        case _:
            return repr(error)
