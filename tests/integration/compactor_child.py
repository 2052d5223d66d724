"""Compactors that kill themselves with SIGKILL right before or right after one of their effects.

Arguments are settings, `name=value`. On stdin comes a line of JSON for each compactor, `Orders`; on stdout go
lines of JSON: what it does (`effect`), what it has done after a round, that it waits for a line (`ready`) and
how it ended. Each is a process of its own, forked from one that has imported everything.

An effect changes something that others can see: a write of the metadata store (on Oxia each of the two
requests of a swap), an object put or deleted, a file of a table's metadata, a commit of the catalog.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any

from sqlalchemy.orm import Session

from compactor import catalog, command, service
from compactor.catalog import ObjectsFileIO, _Rest
from compactor.spark import LocalRunner
from dray.config import Given, Settings, load_settings
from dray.errors import DrayError
from dray.metadata.etcd import EtcdStore
from dray.metadata.oxia import OxiaStore
from dray.metadata.sqlite import SqliteStore
from dray.objectstore.file import FileObjectStore
from dray.objectstore.s3 import S3ObjectStore

BEFORE, AFTER = "before", "after"
# Of a catalog that answers at all.
ANSWER_S = 3.0
# Of one that goes round for ever.
PAUSE_S = 0.05
KINDS = ("compaction", "producers", "garbage", "wal/objects", "streams", "compactors")


@dataclass
class Orders:
    """`kill_at` counts effects of the name `effect`, or all of them, from when the compactor is armed.

    It is armed at once, or once it has finished what others left, said `ready` and read a line. With `stop`
    it says so and waits, stopped, instead of being killed. It ends when it finds nothing more to do; with
    `forever` when it is told to, by a signal. With `alone` it takes all others for gone.
    """

    kill_at: int | None = None
    side: str = BEFORE
    effect: str | None = None
    at_once: bool = False
    stop: bool = False
    forever: bool = False
    rounds: int = 3  # at most, unless `forever`
    max_files: int = 1
    alone: bool = True
    session_ttl_ms: int = 2_000


class Doom:
    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._count = 0
        self._lock = threading.Lock()
        self.is_armed = orders.at_once

    def before(self, name: str) -> int | None:
        """The number of an effect that may be fatal."""
        with self._lock:
            if not self.is_armed:
                return None
            say(effect=name)
            if self._orders.effect not in (None, name):
                return None
            self._count += 1
            self._reach(BEFORE, self._count)
            return self._count

    def after(self, number: int | None) -> None:
        with self._lock:
            if number is not None:
                self._reach(AFTER, number)

    def _reach(self, side: str, number: int) -> None:
        if self._orders.kill_at != number or self._orders.side != side:
            return
        if self._orders.stop:
            say(stopped=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            os.kill(os.getpid(), signal.SIGKILL)


def say(**fields: object) -> None:
    os.write(1, json.dumps(fields).encode() + b"\n")


def hear() -> str:
    """A line of stdin, and not a byte more: the next one may be for somebody else."""
    line = b""
    while not line.endswith(b"\n"):
        read = os.read(0, 1)
        if not read:
            break
        line += read
    return line.decode().strip()


def doom(orders: Orders) -> Doom:
    """From here on, effects are counted."""
    made = Doom(orders)
    inside = ContextVar("inside", default=False)

    def watch(owner: type, method: str, name: Callable[..., str]) -> None:
        real = getattr(owner, method)

        @wraps(real)
        async def act(*arguments: Any, **more: Any) -> Any:
            if inside.get():  # one effect made of another
                return await real(*arguments, **more)
            number = made.before(name(*arguments[1:], **more))
            token = inside.set(True)
            try:
                result = await real(*arguments, **more)
            finally:
                inside.reset(token)
            made.after(number)
            return result

        @wraps(real)
        def act_here(*arguments: Any, **more: Any) -> Any:
            number = made.before(name(*arguments[1:], **more))
            result = real(*arguments, **more)
            made.after(number)
            return result

        setattr(owner, method, act if asyncio.iscoroutinefunction(real) else act_here)

    for store in (SqliteStore, EtcdStore):
        watch(store, "put", lambda domain, key, value, *_: f"put {_kind(key, value)}")
        watch(store, "append", lambda domain, entries, puts=(), deletes=(): f"append {_batch(puts, deletes)}")
        watch(store, "swap", lambda *_: "swap")
        watch(store, "delete", lambda domain, key, *_: f"delete {_kind(key)}")
    watch(OxiaStore, "_write", lambda domain, request, *_: _of_request(request))
    for objects in (FileObjectStore, S3ObjectStore):
        watch(objects, "put", lambda key, *_, **more: f"put {_kind_of_object(key)}")
        watch(objects, "delete", lambda key: f"delete {_kind_of_object(key)}")
    watch(ObjectsFileIO, "new_output", lambda location: f"write {_kind_of_object(location)}")
    watch(ObjectsFileIO, "delete", lambda location: f"delete {_kind_of_object(str(location))}")
    watch(Session, "commit", lambda: "catalog commit")
    for method in ("commit_table", "create_table", "create_namespace"):
        watch(_Rest, method, lambda *_, **more: "catalog commit")
    return made


def _kind(key: str, value: bytes = b"") -> str:
    kind = next((each for each in KINDS if each in key), key)
    if kind == "compaction" and value:
        task = json.loads(value)["task"]
        return f"{kind} none" if task is None else f"{kind} {task['kind']} {task['state']}"
    return kind


def _batch(puts: Sequence[Any], deletes: Sequence[Any]) -> str:
    return " ".join(sorted({_kind(each.key) for each in (*puts, *deletes)}))


def _of_request(request: Any) -> str:
    puts, deletes = request.puts, request.deletes
    if len(puts) == 1 and not deletes:
        kind = _kind(puts[0].key, puts[0].value)
        return "swap" if kind == "streams" else f"put {kind}"
    if not puts and "streams" in deletes[0].key:
        return "swap's deletes"
    if not puts and len(deletes) == 1:
        return f"delete {_kind(deletes[0].key)}"
    return f"append {_batch(puts, deletes)}"


def _kind_of_object(key: str) -> str:
    return next((each for each in (".parquet", ".metadata.json", ".avro", ".wo") if key.endswith(each)), key)


async def run(given: Sequence[str], orders: Orders) -> None:
    pairs = [each.partition("=") for each in given]
    loaded = load_settings(arguments=[Given(name, text, "the test") for name, _, text in pairs], environ={})
    made = doom(orders)
    real = command.options_of

    def options_of(settings: Settings) -> service.Options:
        options = real(settings)
        limits = replace(options.limits, max_files=orders.max_files)
        return replace(options, limits=limits, session_ttl_ms=orders.session_ttl_ms, min_record_age_ms=0)

    async def only_itself(compactor: service.Compactor) -> set[str]:
        return {compactor.owner}

    if orders.alone:
        service.Compactor._owners = only_itself  # type: ignore[assignment, method-assign]
    command.options_of = options_of
    service.MAINTAIN_EVERY_S = 0.0
    catalog.ANSWER_S = ANSWER_S
    async with command.opened(loaded, runner=LocalRunner()) as compactor:
        say(owner=compactor.owner)
        go_on = partial(compactor.round, everything=True)
        if not orders.at_once:
            await go_on()
            say(ready=True)
            await asyncio.to_thread(hear)
        made.is_armed = True
        rounds = 0
        while True:
            failures = compactor.counts.failures
            try:
                more = await go_on()
            except DrayError as error:
                say(failed=repr(error))
                more = True
            is_idle = not more and compactor.counts.failures == failures and not compactor.counts.undecided
            say(round=vars_of(compactor.counts))
            rounds += 1
            if not orders.forever and (is_idle or rounds == orders.rounds):
                return
            if orders.forever or not more:
                await asyncio.sleep(PAUSE_S)


def vars_of(counts: service.Counts) -> dict[str, object]:
    return {name: getattr(counts, name) for name in ("tasks", "rewritten_files", "failures", "waiting_tasks")}


def main(settings: Sequence[str]) -> None:
    while line := hear():
        orders = Orders(**json.loads(line))
        pid = os.fork()
        if not pid:
            asyncio.run(run(settings, orders))
            os._exit(0)
        say(pid=pid)
        _, status = os.waitpid(pid, 0)
        say(exit=os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main(sys.argv[1:])
