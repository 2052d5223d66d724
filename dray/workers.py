"""`drayd broker --workers N`: N brokers on one host, as processes of their own on consecutive ports.

Each is an ordinary broker with its own node id, so that routing spreads partitions over them. This process
starts them, starts again what dies, and stops them all; it serves nothing itself.
"""

from __future__ import annotations

import ctypes
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from dray import logs
from dray.config import Address, Settings

log = logging.getLogger(__name__)

# A worker that dies at once is not started over and over at full speed.
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 30.0
# One that ran so long has recovered.
STABLE_S = 60.0
# A broker stops within ten seconds.
STOP_S = 15.0
TICK_S = 0.2
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


@dataclass(slots=True)
class _Worker:
    number: int
    command: list[str]
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    pause_s: float = FIRST_PAUSE_S
    start_at: float = 0.0


def run_workers(settings: Settings, arguments: Sequence[str]) -> int:
    """Until a signal ends it: 0. 1 if a worker refused to start because of its settings."""
    logs.set_up(settings.log_format, settings.log_level)
    stopping: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda got, _frame: stopping.append(got))
    workers = [_Worker(n, worker_command(settings, arguments, n)) for n in range(settings.workers)]
    try:
        while not stopping:
            for worker in workers:
                if not _tend(worker):
                    return 1
            time.sleep(TICK_S)
    finally:
        _stop(workers)
    return 0


def worker_command(settings: Settings, arguments: Sequence[str], number: int) -> list[str]:
    """The command of one worker: the given one, with what differs between them said last."""
    own = ["--workers", "1", "--listen", str(_moved(settings.listen, number))]
    if settings.advertise is not None:
        own += ["--advertise", str(_moved(settings.advertise, number))]
    if settings.node_id is not None:
        own += ["--node-id", str(settings.node_id + number)]
    return [sys.executable, "-m", "dray", *arguments, *own]


def _moved(address: Address, number: int) -> Address:
    """Port 0 stays: each takes a free one."""
    return Address(address.host, address.port + number if address.port else 0)


def _tend(worker: _Worker) -> bool:
    """Start it, or start it again if it died. False: there is no use in trying."""
    now = time.monotonic()
    if worker.process is None:
        if now >= worker.start_at:
            # Its own process group, so that Ctrl-C reaches it by way of this process, once.
            worker.process = subprocess.Popen(
                worker.command, start_new_session=True, preexec_fn=_stop_with_parent
            )
            worker.started_at = now
        return True
    code = worker.process.poll()
    if code is None:
        return True
    if code == 2:
        log.error("worker %d cannot use its settings", worker.number)
        return False
    worker.process = None
    worker.pause_s = FIRST_PAUSE_S if now - worker.started_at > STABLE_S else worker.pause_s
    worker.start_at = now + worker.pause_s
    log.error(
        "worker %d died; starting it again in %g s",
        worker.number,
        worker.pause_s,
        extra={"exit_code": code},
    )
    worker.pause_s = min(worker.pause_s * 2, MAX_PAUSE_S)
    return True


def _stop_with_parent() -> None:
    """Runs in the child. If this process is killed, its workers stop too: they would keep its ports.

    Only Linux can do that.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _stop(workers: Sequence[_Worker]) -> None:
    running = [worker.process for worker in workers if worker.process is not None]
    for process in running:
        process.terminate()
    deadline = time.monotonic() + STOP_S
    for process in running:
        try:
            process.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
