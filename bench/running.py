"""What benchmarks of brokers share: clients as processes, brokers while they run, topics while in use.

A client that fails, or takes too long, raises `ClientFailed`; whoever measures makes a `Failure` of it and
goes on.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Protocol

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from bench.clients import Consume, Produce, Result

# For one client, however slow the broker: far above what any case takes when it works.
CLIENT_TIMEOUT_S = 150
# A broker that does not end by itself is killed.
STOP_TIMEOUT_S = 15


@dataclass(frozen=True)
class Failure:
    message: str


class Broker(Protocol):
    @property
    def address(self) -> str: ...
    @property
    def pid(self) -> int: ...
    def start(self) -> None: ...
    def stop(self, how: signal.Signals = signal.SIGTERM) -> None: ...
    def signal(self, how: signal.Signals) -> None: ...


class ClientFailed(Exception):
    """One case has no figures; the others may have."""


class Client:
    """A process of `bench.clients`."""

    def __init__(self, task: Produce | Consume) -> None:
        role = "produce" if isinstance(task, Produce) else "consume"
        self._argv = [sys.executable, "-m", "bench.clients", json.dumps({"role": role, **asdict(task)})]
        self._process = popen(self._argv)

    def wait_ready(self) -> None:
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            self.result()

    def result(self) -> Result:
        return Result(**json.loads(finish(self._process, None).splitlines()[-1]))

    def close(self) -> None:
        reap(self._process)


@contextmanager
def client(task: Produce | Consume) -> Iterator[Client]:
    with contextlib.closing(Client(task)) as started:
        yield started


def run_client(task: Produce | Consume) -> Result:
    with client(task) as started:
        return started.result()


def run(command: Sequence[str], given: str | None = None) -> str:
    process = popen(command)
    try:
        return finish(process, given)
    finally:
        reap(process)


def popen(command: Sequence[str]) -> subprocess.Popen[str]:
    # Not in our process group: on Ctrl-C we end it ourselves, without its traceback.
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def finish(process: subprocess.Popen[str], given: str | None) -> str:
    try:
        output, errors = process.communicate(given, timeout=CLIENT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise ClientFailed(f"not finished after {CLIENT_TIMEOUT_S} s") from None
    if process.returncode != 0:
        raise ClientFailed(" ".join((errors + output).split())[-300:])
    return output


def reap(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


@contextmanager
def running(broker: Broker) -> Iterator[Broker]:
    try:
        broker.start()
        yield broker
    finally:
        killer = threading.Timer(STOP_TIMEOUT_S, broker.signal, [signal.SIGKILL])
        killer.start()
        broker.stop()
        killer.cancel()


@contextmanager
def topic_on(broker: Broker, name: str, partitions: int) -> Iterator[str]:
    admin = AdminClient({"bootstrap.servers": broker.address, "log_level": 0})
    for created in admin.create_topics([NewTopic(name, partitions, 1)]).values():
        created.result()
    yield name
    try:
        for deleted in admin.delete_topics([name]).values():
            deleted.result()
    except KafkaException as error:  # costs disk, not the figures
        print(f"topic {name} stays: {error}", file=sys.stderr)
