"""Dray itself for tests: `drayd broker` as a process on loopback.

It keeps its port over `kill` and `start`, so a test can take a broker away and bring it back. It answers
ApiVersions only when it is registered and serves, so that is what starting waits for.
"""

from __future__ import annotations

import re
import signal
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.servers.process import ServerProcess, free_port

_ROOT = Path(__file__).parents[2]
# ApiVersions version 0, correlation id 7, no client id.
_API_VERSIONS = struct.pack(">hhih", 18, 0, 7, -1)
_PROBE_TIMEOUT_S = 2


def answers_api_versions(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=_PROBE_TIMEOUT_S) as probe:
            probe.sendall(struct.pack(">i", len(_API_VERSIONS)) + _API_VERSIONS)
            return probe.recv(10)[4:8] == struct.pack(">i", 7)
    except OSError:
        return False


class DrayBroker(ServerProcess):
    """One broker, or with `workers` several on consecutive ports under one process."""

    def __init__(
        self,
        directory: Path,
        *,
        metadata: str | None = None,
        objects: str | None = None,
        zone: str = "",
        node_id: int | None = None,
        workers: int = 1,
        settings: Mapping[str, object] | None = None,
        program: Sequence[str] = ("-m", "dray"),
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Without URLs everything is below `directory`; brokers with the same one are one cluster."""
        directory.mkdir(parents=True, exist_ok=True)
        self.port = free_port() if workers == 1 else _consecutive_ports(workers)
        self.ports = range(self.port, self.port + workers)
        self.log = directory / f"broker-{self.port}.log"
        argv = [sys.executable, *program, "broker", f"--data={directory}", f"--listen=127.0.0.1:{self.port}"]
        options = {"metadata": metadata, "objects": objects, "zone": zone or None, "node-id": node_id}
        argv += [f"--{name}={value}" for name, value in options.items() if value is not None]
        if workers > 1:
            argv.append(f"--workers={workers}")
        for name, value in (settings or {}).items():
            argv.append(f"--set={name}={str(value).lower() if isinstance(value, bool) else value}")
        super().__init__(
            argv,
            self.log,
            lambda: all(map(answers_api_versions, self.ports)),
            env={"PYTHONPATH": str(_ROOT), **(env or {})},
            start_timeout_s=60,
        )

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def node_id(self) -> int:
        """The one it was last registered with."""
        return int(re.findall(r"registered as broker (\d+)", self.log_text())[-1])

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def rss_bytes(self) -> int:
        return _memory_of(self.pid, "VmRSS")

    def peak_rss_bytes(self) -> int:
        return _memory_of(self.pid, "VmHWM")

    def wait_ended(self, timeout_s: float = 30) -> int:
        """The exit code of one that ends by itself. Negative: the signal that ended it."""
        assert self._process is not None, "not started"
        code = self._process.wait(timeout_s)
        self._process = None
        return code

    def terminate(self, timeout_s: float = 30) -> int:
        """SIGTERM; the exit code."""
        self.signal(signal.SIGTERM)
        return self.wait_ended(timeout_s)


def _memory_of(pid: int, name: str) -> int:
    match = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert match is not None, f"no {name}"
    return int(match[1]) * 1024


def _consecutive_ports(count: int) -> int:
    """The first of so many that were free a moment ago."""
    while True:
        first = free_port()
        if first + count < 65_536 and all(_is_free(port) for port in range(first, first + count)):
            return first


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
