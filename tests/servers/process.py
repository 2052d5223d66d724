"""Child processes for tests: started on loopback, waited for, killed by their own id."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path


def free_port() -> int:
    """A port that was free a moment ago. The server that takes it is retried by nobody: keep it short."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def accepts_connections(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=0.5):
            return True
    except OSError:
        return False


class ServerProcess:
    """One server; `start` after `kill` brings it back on the same address with the same data."""

    def __init__(
        self,
        argv: Sequence[str],
        log: Path,
        ready: Callable[[], bool],
        env: Mapping[str, str] | None = None,
        start_timeout_s: float = 30,
    ) -> None:
        self._argv = list(argv)
        self._log = log
        self._ready = ready
        self._env = {**os.environ, **(env or {})}
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    def start(self) -> None:
        self.launch()
        self.wait_started()

    def launch(self) -> None:
        """Start without waiting, for members of a cluster that are ready only when others run too."""
        assert self._process is None, "already running"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._env
            )

    def wait_started(self) -> None:
        assert self._process is not None, "not started"
        deadline = time.monotonic() + self._start_timeout_s
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                code = self._process.poll()
                self.kill()
                tail = self._log.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"{self._argv[0]} did not start (exit {code}):\n{tail}")
            time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL, and wait until the process is gone. Harmless when it is not running."""
        self.stop(signal.SIGKILL)

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        if self._process is None:
            return
        self._process.send_signal(how)
        self._process.wait()
        self._process = None

    def signal(self, how: signal.Signals) -> None:
        assert self._process is not None, "not started"
        self._process.send_signal(how)
