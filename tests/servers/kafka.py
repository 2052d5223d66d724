"""Apache Kafka for tests and benchmarks: jars fetched once by Maven, a broker on loopback, the Java clients.

`kafka/pom.xml` pins the version. `KafkaServer` is one KRaft node that is broker and controller; it keeps its
ports and data over `kill` and `start`. `kafka/Clients.java` is ours: it drives Kafka's own clients, and
`tests/integration/java_clients.py` drives it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from tests.servers.process import ServerProcess, accepts_connections, free_port

_HERE = Path(__file__).parent / "kafka"
# A cold download takes half a minute; one that hangs must not hang the tests for ever.
_FETCH_TIMEOUT_S = 900
_RUN_TIMEOUT_S = 120
# What Kafka's own start script passes.
_SERVER_OPTIONS = (
    "-server",
    "-XX:+UseG1GC",
    "-XX:MaxGCPauseMillis=20",
    "-XX:InitiatingHeapOccupancyPercent=35",
    "-XX:+ExplicitGCInvokesConcurrent",
)
# A client of a test lives for a second or two: starting soon matters, the last bit of speed does not.
SHORT_LIVED_OPTIONS = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx768m")


def kafka_version() -> str:
    match = re.search(r"<kafka\.version>([^<]+)<", (_HERE / "pom.xml").read_text())
    assert match is not None, "pom.xml names no Kafka version"
    return match[1]


def ensure_kafka_jars() -> Path:
    """A directory of all jars at the version in `kafka/pom.xml`, filled by Maven if it is not there."""
    version = kafka_version()
    announcement = f"fetching Kafka {version} (once; about half a minute)"
    return ensure_jars(f"kafka-{version}", _HERE / "pom.xml", announcement)


def ensure_jars(name: str, pom: Path, announcement: str) -> Path:
    """The directory `name` of the cache, with all jars that a Maven project runs with."""
    command = ["mvn", "-q", "-B", "-f", str(pom), "dependency:copy-dependencies", "-DincludeScope=runtime"]

    def fetch(target: Path) -> None:
        _ensure_tool("mvn", "maven")
        _run([*command, f"-DoutputDirectory={target}"], _FETCH_TIMEOUT_S)

    return _ensure(name, announcement, fetch)


def ensure_client_classes() -> Path:
    """A directory with `kafka/Clients.java` compiled, one for each state of the source."""
    source = _HERE / "Clients.java"
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:12]

    def compile_(target: Path) -> None:
        _ensure_tool("javac", "openjdk-17-jdk-headless")
        classpath = f"{ensure_kafka_jars()}/*"
        _run(["javac", "-Xlint:all,-processing", "-Werror", "-cp", classpath, "-d", str(target), str(source)])

    return _ensure(f"kafka-{kafka_version()}-clients-{digest}", "compiling the Java clients (once)", compile_)


def _ensure_tool(tool: str, package: str) -> None:
    """Where only a Java runtime is there, Debian has the rest."""
    if shutil.which(tool) is not None:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise RuntimeError(f"{tool} is needed for Kafka's own clients: install the package {package}")
    sys.stderr.write(f"installing {package} (once)\n")
    _run(["apt-get", "update", "-qq"], _FETCH_TIMEOUT_S)
    _run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", package], _FETCH_TIMEOUT_S)


def java_command(
    main: str, arguments: Sequence[str], options: Sequence[str] = (), classes: Path | None = None
) -> list[str]:
    """Runs a class of the jars, or with `classes` one of ours."""
    classpath = ":".join([*([str(classes)] if classes else []), f"{ensure_kafka_jars()}/*"])
    logging = f"-Dlog4j2.configurationFile={_HERE / 'log4j2.properties'}"
    return ["java", *options, logging, "-cp", classpath, main, *arguments]


class KafkaServer:
    """A single node. `settings` go on top of Kafka's defaults."""

    def __init__(
        self,
        directory: Path,
        settings: Mapping[str, str] | None = None,
        heap: Sequence[str] = ("-Xms256m", "-Xmx512m"),
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        controller_port = free_port()
        self._data = directory / "data"
        self._config = directory / "server.properties"
        properties = {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.bootstrap.servers": f"127.0.0.1:{controller_port}",
            "controller.listener.names": "CONTROLLER",
            "listeners": f"PLAINTEXT://{self.address},CONTROLLER://127.0.0.1:{controller_port}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "log.dirs": str(self._data),
            # Defaults that need three nodes, or wait for more members than tests have.
            "offsets.topic.replication.factor": "1",
            "offsets.topic.num.partitions": "1",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "group.initial.rebalance.delay.ms": "0",
            **(settings or {}),
        }
        self._config.write_text("".join(f"{name}={value}\n" for name, value in properties.items()))
        argv = java_command("kafka.Kafka", [str(self._config)], [*_SERVER_OPTIONS, *heap])
        self._process = ServerProcess(
            argv, directory / "kafka.log", lambda: answers_metadata(self.port), start_timeout_s=60
        )

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self) -> None:
        if not (self._data / "meta.properties").exists():
            self._format()
        self._process.start()

    def kill(self) -> None:
        self._process.kill()

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        self._process.stop(how)

    def signal(self, how: signal.Signals) -> None:
        self._process.signal(how)

    def _format(self) -> None:
        arguments = ["format", "--config", str(self._config), "--standalone"]
        arguments += ["--cluster-id", "ZHJheS10ZXN0cy1rYWZrYQ"]  # any 16 bytes in Kafka's base64
        _run(java_command("kafka.tools.StorageTool", arguments, SHORT_LIVED_OPTIONS))


def answers_metadata(port: int) -> bool:
    """Whether a Kafka broker serves there. Its port may be open long before it does."""
    if not accepts_connections(port):
        return False
    client = AdminClient({"bootstrap.servers": f"127.0.0.1:{port}", "log_level": 0})
    try:
        return bool(client.list_topics(timeout=2).brokers)
    except KafkaException:
        return False


def _ensure(name: str, announcement: str, fill: Callable[[Path], None]) -> Path:
    """The directory `name` of the cache; `fill` makes it once, however many processes ask at a time."""
    cache = Path(os.environ.get("DRAY_CACHE") or Path.home() / ".cache" / "dray")
    wanted = cache / name
    if wanted.exists():
        return wanted
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / f"{name}.lock"):
        if wanted.exists():
            return wanted
        sys.stderr.write(f"{announcement} into {cache}\n")
        with tempfile.TemporaryDirectory(dir=cache, prefix="build-") as scratch:
            made = Path(scratch) / name
            made.mkdir()
            fill(made)
            made.rename(wanted)
    return wanted


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Among processes. Maven's own cache is not safe for two at once; the lock ends with its holder."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _run(command: Sequence[str], timeout_s: float = _RUN_TIMEOUT_S) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} failed:\n{(done.stdout + done.stderr)[-2000:]}")
