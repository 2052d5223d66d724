"""A standalone Spark cluster for tests: a master and workers, as processes on loopback.

Its classes are those that PySpark brings. `executors` are the workers' children, so that a test can kill one.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import pyspark

from tests.servers.process import ServerProcess, free_port

_OPTIONS = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx256m")
# A JVM on a machine where several others start.
_START_TIMEOUT_S = 120


class SparkCluster:
    def __init__(self, directory: Path, workers: int = 2) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        port = free_port()
        self.url = f"spark://127.0.0.1:{port}"
        self._master_log = directory / "master.log"
        deploy = "org.apache.spark.deploy"
        master = [f"{deploy}.master.Master", "--host", "127.0.0.1", "--port", str(port), "--webui-port", "0"]
        self._master = self._process(master, self._master_log, "started at|New state: ALIVE")
        self._workers = []
        for number in range(workers):
            argv = [f"{deploy}.worker.Worker", "--host", "127.0.0.1", "--webui-port", "0", "--cores", "1"]
            argv += ["--memory", "1g", "--work-dir", str(directory / f"work-{number}"), self.url]
            log = directory / f"worker-{number}.log"
            self._workers.append(self._process(argv, log, "Successfully registered with master"))

    def start(self) -> None:
        self._master.start()
        for worker in self._workers:
            worker.launch()
        for worker in self._workers:
            worker.wait_started()

    def kill(self) -> None:
        """Executors end by themselves when their worker is gone."""
        for process in [*self._workers, self._master]:
            process.kill()

    def executors(self) -> list[int]:
        """Process ids."""
        return [child for worker in self._workers for child in _children(worker.pid)]

    def _process(self, argv: list[str], log: Path, ready: str) -> ServerProcess:
        jars = Path(pyspark.__file__).parent / "jars"
        # Spark's own way to log at INFO, which says when a process is ready.
        logging = "-Dlog4j2.configurationFile=org/apache/spark/log4j2-defaults.properties"
        command = ["java", *_OPTIONS, logging, "-cp", f"{jars}/*", *argv]
        # As Spark's own scripts set them.
        environment = {"SPARK_HOME": str(jars.parent), "SPARK_SCALA_VERSION": "2.13"}
        environment["SPARK_LOCAL_IP"] = "127.0.0.1"
        return ServerProcess(
            command,
            log,
            lambda: log.exists() and re.search(ready, log.read_text(errors="replace")) is not None,
            env=environment,
            start_timeout_s=_START_TIMEOUT_S,
        )


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (task / "children").read_text().split())
    return found


def processes_connected_to(port: int) -> list[int]:
    """Of this machine's, those with a connection to that port of loopback."""
    wanted = f"0100007F:{port:04X}"
    connected = {
        fields[9]
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
        if (fields := line.split())[2] == wanted and fields[3] == "01"
    }
    return [pid for pid in _pids() if not connected.isdisjoint(_sockets(pid))]


def _pids() -> list[int]:
    return [int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit()]


def _sockets(pid: int) -> set[str]:
    """Inodes. A process that has ended meanwhile has none."""
    found: set[str] = set()
    with suppress(OSError):
        for each in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                found.add(str(each.readlink()).removeprefix("socket:[").removesuffix("]"))
    return found
