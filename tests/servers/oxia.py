"""An Oxia for tests: one that is already running, one that is installed, or the stand-in.

`find_oxia` takes the first that there is. `DRAY_TEST_OXIA=host:port` names a running server, which
tests share with others: they cannot stop it and must not wreck it. Tests that need the stand-in's
tricks start a `StandInServer` of their own.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeAlias

from tests.servers.process import ServerProcess, accepts_connections, free_port

Kind: TypeAlias = Literal["external", "binary", "stand-in"]

_ROOT = Path(__file__).parents[2]
_STAND_IN = "tests.servers.oxia_standin"
_SHARDS = 4


def find_oxia(data_dir: Path) -> OxiaServer:
    """A server, not yet started. `data_dir` is used only by one of our own."""
    kind, where = _choose()
    if kind == "external":
        return OxiaServer(kind, where, None)
    return _installed(where, data_dir) if kind == "binary" else StandInServer(data_dir)


@contextmanager
def start_oxia(data_dir: Path) -> Iterator[OxiaServer]:
    server = find_oxia(data_dir)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def describe_oxia() -> str:
    """Which one `find_oxia` takes, for the header of a test run."""
    kind, where = _choose()
    return f"{kind}, {where}"


def _choose() -> tuple[Kind, str]:
    """The kind, and its address, path or module."""
    external = os.environ.get("DRAY_TEST_OXIA")
    if external:
        return "external", external
    binary = shutil.which("oxia")
    return ("binary", binary) if binary else ("stand-in", _STAND_IN)


class OxiaServer:
    """A server under test; `start` after `kill` or `stop` brings it back with the same data."""

    def __init__(self, kind: Kind, address: str, process: ServerProcess | None) -> None:
        self.kind = kind
        self.address = address
        self._process = process

    @property
    def owned(self) -> bool:
        """Whether this may be killed; `kill` of one that is not is a bug in the test."""
        return self._process is not None

    @property
    def control(self) -> StandInControl | None:
        return None

    @property
    def pid(self) -> int:
        assert self._process is not None, "not our process"
        return self._process.pid

    def start(self) -> None:
        """Return when it serves; does nothing with one that was there before us."""
        if self._process is not None:
            self._process.start()

    def kill(self) -> None:
        assert self._process is not None, "not ours to kill"
        self._process.kill()

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()


def _installed(binary: str, data_dir: Path) -> OxiaServer:
    port = free_port()
    data_dir.mkdir(parents=True, exist_ok=True)
    argv = [
        binary,
        "standalone",
        f"--shards={_SHARDS}",
        f"--public-addr=127.0.0.1:{port}",
        f"--metrics-addr=127.0.0.1:{free_port()}",
        f"--data-dir={data_dir / 'db'}",
        f"--wal-dir={data_dir / 'wal'}",
    ]
    process = ServerProcess(argv, data_dir / "oxia.log", lambda: accepts_connections(port))
    return OxiaServer("binary", f"127.0.0.1:{port}", process)


class StandInServer(OxiaServer):
    """`tests.servers.oxia_standin` as a process. With `follower`, leadership can move to a second address."""

    def __init__(
        self,
        data_dir: Path,
        *,
        follower: bool = False,
        namespaces: Sequence[str] = (),
        notifications_kept: int | None = None,
    ) -> None:
        data_dir.mkdir(parents=True, exist_ok=True)
        port = free_port()
        address, control = f"127.0.0.1:{port}", f"127.0.0.1:{free_port()}"
        self.follower_address = f"127.0.0.1:{free_port()}" if follower else None
        argv = [
            sys.executable,
            "-m",
            _STAND_IN,
            f"--listen={address}",
            f"--control={control}",
            f"--data={data_dir / 'log'}",
            f"--shards={_SHARDS}",
            *(f"--namespace={name}" for name in namespaces),
        ]
        if follower:
            argv.append(f"--follower={self.follower_address}")
        if notifications_kept is not None:
            argv.append(f"--notifications-kept={notifications_kept}")
        # Tests may run from anywhere; the stand-in is a module of this repository.
        path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
        process = ServerProcess(
            argv, data_dir / "standin.log", lambda: accepts_connections(port), {"PYTHONPATH": path}
        )
        super().__init__("stand-in", address, process)
        self._control = StandInControl(control)

    @property
    def control(self) -> StandInControl:
        return self._control


class StandInControl:
    """Commands to a running stand-in. Each takes effect before it returns."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._address = (host, int(port))

    def move(self) -> None:
        """The other address leads from now on, and the assignment streams say so."""
        self._send("move")

    def stale(self) -> None:
        """The other address leads, but the former leader does not know.

        It answers reads as of now and renews the sessions it has.
        """
        self._send("stale")

    def settle(self) -> None:
        """The former leader of `stale` notices."""
        self._send("settle")

    def checksum(self) -> None:
        """Every shard logs an entry of the server's own: it takes an offset, and the feed skips it."""
        self._send("checksum")

    def forget_batches(self) -> None:
        """The notifications up to here are kept no longer."""
        self._send("forget-batches")

    def calls(self) -> dict[str, int]:
        """Calls by RPC name since the start or `forget_calls`; `DeleteRange` counts operations in writes."""
        answer = self._send("calls")
        assert isinstance(answer, dict)
        return {str(name): int(count) for name, count in answer.items()}

    def forget_calls(self) -> None:
        self._send("forget-calls")

    def _send(self, command: str) -> object:
        with socket.create_connection(self._address, timeout=5) as connection:
            connection.sendall(command.encode() + b"\n")
            with connection.makefile("r") as lines:
                answer: object = json.loads(lines.readline())
        if isinstance(answer, dict) and "error" in answer:
            raise RuntimeError(f"{command}: {answer['error']}")
        return answer
