"""A real etcd for tests: built once by Go from the module beside this file, run on loopback.

One member (`EtcdServer`) or several (`EtcdCluster`); each keeps its ports and data over `kill` and
`start`, so a test can take a server away and bring it back.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from tests.servers.process import ServerProcess, free_port

_MODULE = Path(__file__).parent / "etcd"
# A cold build takes a minute or two; a module download that hangs must not hang the tests for ever.
_BUILD_TIMEOUT_S = 900


def ensure_etcd() -> Path:
    """The etcd binary at the version in `etcd/go.mod`, built into the cache if it is not there."""
    match = re.search(r"go\.etcd\.io/etcd/server/v3 v(\S+)", (_MODULE / "go.mod").read_text())
    assert match is not None, "go.mod names no etcd version"
    cache = Path(os.environ.get("DRAY_CACHE") or Path.home() / ".cache" / "dray")
    binary = cache / f"etcd-{match[1]}"
    if binary.exists():
        return binary
    cache.mkdir(parents=True, exist_ok=True)
    sys.stderr.write(f"building etcd {match[1]} into {cache} (once; about a minute)\n")
    with tempfile.TemporaryDirectory(dir=cache, prefix="build-") as scratch:
        built = Path(scratch) / binary.name
        command = ["go", "build", "-trimpath", "-o", str(built), "."]
        done = subprocess.run(command, cwd=_MODULE, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S)
        if done.returncode != 0:
            raise RuntimeError(f"etcd does not build:\n{done.stderr[-2000:]}")
        # Two test runs may build at once: each renames a whole binary into place.
        built.replace(binary)
    return binary


class EtcdServer:
    """One member on loopback. `scheme` is that of its client address."""

    def __init__(
        self,
        data_dir: Path,
        flags: Sequence[str] = (),
        *,
        name: str = "solo",
        scheme: str = "http",
        peer_port: int | None = None,
        peers: str | None = None,
    ) -> None:
        """`peers` is the whole cluster in etcd's `name=url,…` form; without it the member is alone."""
        self.name = name
        self.port = free_port()
        self._health_port = free_port()
        client_url = f"{scheme}://127.0.0.1:{self.port}"
        peer_url = f"http://127.0.0.1:{peer_port or free_port()}"
        data_dir.mkdir(parents=True, exist_ok=True)
        argv = [
            str(ensure_etcd()),
            f"--name={name}",
            f"--data-dir={data_dir / 'data'}",
            f"--listen-client-urls={client_url}",
            f"--advertise-client-urls={client_url}",
            f"--listen-peer-urls={peer_url}",
            f"--initial-advertise-peer-urls={peer_url}",
            f"--initial-cluster={peers or f'{name}={peer_url}'}",
            "--initial-cluster-token=dray-tests",
            f"--listen-metrics-urls=http://127.0.0.1:{self._health_port}",
            # A test that kills the leader waits for the next one: elect it in well under a second.
            "--heartbeat-interval=50",
            "--election-timeout=500",
            "--logger=zap",
            "--log-level=warn",
            *flags,
        ]
        self._process = ServerProcess(argv, data_dir / "etcd.log", self._ready)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def revision(self) -> int:
        """How many writes it has taken, counting each transaction once."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._health_port}/metrics", timeout=5) as answer:
            metrics = answer.read().decode()
        match = re.search(r"^etcd_debugging_mvcc_current_revision (\S+)$", metrics, re.MULTILINE)
        assert match is not None
        return int(float(match[1]))

    def start(self) -> None:
        self._process.start()

    def kill(self) -> None:
        self._process.kill()

    def stop(self) -> None:
        self._process.stop()

    def signal(self, how: signal.Signals) -> None:
        self._process.signal(how)

    def launch(self) -> None:
        """Start without waiting: the first members of a cluster serve only when a majority runs."""
        self._process.launch()

    def wait_started(self) -> None:
        self._process.wait_started()

    def is_leader(self) -> bool:
        return "\netcd_server_is_leader 1\n" in self._ask("metrics")

    def _ready(self) -> bool:
        """Whether it answers linearizable reads. Its client port is open long before that."""
        try:
            self._ask("readyz")
        except OSError:
            return False
        return True

    def _ask(self, page: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._health_port}/{page}", timeout=2) as answer:
            return str(answer.read(), "utf-8")


class EtcdCluster:
    """Several members; each is controlled like an `EtcdServer`."""

    def __init__(self, directory: Path, members: int = 3, flags: Sequence[str] = ()) -> None:
        names = [f"m{i}" for i in range(members)]
        ports = [free_port() for _ in names]
        peers = ",".join(f"{name}=http://127.0.0.1:{port}" for name, port in zip(names, ports, strict=True))
        self.members = [
            EtcdServer(directory / name, flags, name=name, peer_port=port, peers=peers)
            for name, port in zip(names, ports, strict=True)
        ]

    @property
    def addresses(self) -> list[str]:
        return [member.address for member in self.members]

    def start(self) -> None:
        for member in self.members:
            member.launch()
        for member in self.members:
            member.wait_started()

    def stop(self) -> None:
        """Kill them all: stopping one by one waits for elections among those that remain."""
        for member in self.members:
            member.kill()
