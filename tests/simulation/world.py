"""A world for the real code to run in: virtual time, a metadata store and an object store with every fault
that a network and a paused leader can cause, all of it decided by one seed.

The metadata store keeps Oxia's weaker promises: each operation of an append passes or fails alone; a call may
be lost, may be applied though its answer is lost, may be applied long after its caller gave up; a read may
be of an earlier moment, unless it stands behind a barrier of the same client. A watch is late, breaks, and
has gaps. A `strong` world has a store like etcd: a failed condition fails the append, and no read is stale.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any, NoReturn, TypeVar

from dray.errors import DrayError, ObjectStoreUnavailable, OutcomeUnknown, Unavailable
from dray.metadata.feed import Feed
from dray.metadata.memory import MemoryData, MemoryStore
from dray.metadata.store import (
    AppendResult,
    Delete,
    Entry,
    Expect,
    Expectation,
    Limits,
    NewEntry,
    Position,
    Put,
    Record,
    Session,
    Watch,
    WatchEvent,
)
from dray.objectstore.memory import MemoryObjects, MemoryObjectStore
from dray.objectstore.store import Body, ObjectInfo

T = TypeVar("T")

CALL_TIMEOUT_S = 5.0
# How long after its caller gave up a call may still land.
LATEST_S = 30.0


class VirtualTime(asyncio.SelectorEventLoop):
    """Waiting takes no time: when nothing can run, the clock jumps to the next timer."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self._now

    def jump(self, seconds: float) -> None:
        self._now += seconds

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        """At once: a thread would run in real time."""
        done = self.create_future()
        done.set_result(func(*args))
        return done


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self, loop: VirtualTime) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("nothing can ever happen again: the simulated system hangs")
        if timeout > 0:
            self._loop.jump(timeout)
        return []


def simulate(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    async def run() -> T:
        try:
            return await main()
        finally:  # of machines that crashed
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        return runner.run(run())


class World:
    """What the simulated machines share. `calm()` ends the faults, for the reckoning afterwards."""

    def __init__(self, seed: int, *, trouble: float = 0.15, strong: bool = False) -> None:
        self.chance = random.Random(seed)
        self.trouble = trouble
        self.strong = strong
        self.data = MemoryData()
        self.objects = MemoryObjects(clock_ms=self.now_ms)
        self.history: list[MemoryData] = []  # before each write, oldest first
        self.violations: list[str] = []  # what the stores saw that may not be
        self._late: set[asyncio.Task[None]] = set()

    def open_store(self) -> MemoryStore:
        """What applies the calls of one client."""
        return MemoryStore(self.data, conditions_abort=self.strong)

    def now_ms(self) -> int:
        return int(asyncio.get_running_loop().time() * 1000)

    async def calm(self) -> None:
        """No new faults; what was on its way late has landed when this returns."""
        self.trouble = 0.0
        while self._late:
            await asyncio.wait(self._late)

    def strikes(self, share: float = 1.0) -> bool:
        return self.chance.random() < self.trouble * share

    async def delay(self, at_most_s: float = 0.05) -> None:
        await asyncio.sleep(self.chance.uniform(0, at_most_s))

    def later(self, act: Callable[[], Awaitable[object]]) -> None:
        async def wait_and_act() -> None:
            await asyncio.sleep(CALL_TIMEOUT_S + self.chance.uniform(0, LATEST_S))
            with suppress(DrayError):  # nobody is there to hear it
                await act()

        task = asyncio.get_running_loop().create_task(wait_and_act())
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    def remember(self) -> None:
        """Called before a write is applied. Now and then is enough: a copy of everything takes its time."""
        if self.chance.random() < 0.3:
            moment = MemoryData()
            moment.last_version = self.data.last_version
            for number, now in self.data._domains.items():
                then = moment.domain(number)
                then.records, then.keys = dict(now.records), list(now.keys)
                then.sequences = {name: list(entries) for name, entries in now.sequences.items()}
            self.history.append(moment)
            del self.history[:-8]


class Machine:
    """Where a process runs. When it crashes, none of its calls returns, and no new one is made."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.crashed = False
        self._oldest_seen = 0  # index into all of history, which a read may not go behind

    async def check_alive(self) -> None:
        if self.crashed:
            await asyncio.get_running_loop().create_future()

    async def write(self, apply: Callable[[], Awaitable[T]]) -> T:
        world = self.world
        await self.check_alive()
        if world.strikes(0.3):
            raise Unavailable("simulated: no connection")
        await world.delay()
        if world.strikes(0.4):
            await asyncio.sleep(CALL_TIMEOUT_S)
            await self._unknown("lost on the way")
        if world.strikes(0.4):
            world.later(lambda: self._applied(apply))
            await asyncio.sleep(CALL_TIMEOUT_S)
            await self._unknown("late")
        if self.crashed and world.chance.random() < 0.5:
            with suppress(DrayError):  # it was sent before the crash
                await self._applied(apply)
        await self.check_alive()
        result = await self._applied(apply)
        if world.strikes(0.4):
            await asyncio.sleep(CALL_TIMEOUT_S)
            await self._unknown("its answer was lost")
        await world.delay()
        await self.check_alive()
        return result

    async def _applied(self, apply: Callable[[], Awaitable[T]]) -> T:
        self.world.remember()
        return await apply()

    async def _unknown(self, why: str) -> NoReturn:
        await self.check_alive()
        raise OutcomeUnknown(f"simulated: {why}")

    async def read(self, query: Callable[[MemoryStore], Awaitable[T]]) -> T:
        world = self.world
        await self.check_alive()
        await world.delay()
        if world.strikes(0.3):
            raise Unavailable("simulated: no connection")
        data = world.data
        recent = world.history[self._behind_barrier() :]
        if recent and not world.strong and world.strikes():
            data = world.chance.choice(recent)
        answer = await query(MemoryStore(data, conditions_abort=world.strong))
        await world.delay()
        await self.check_alive()
        return answer

    def _behind_barrier(self) -> int:
        """How many of the remembered moments a read may not show."""
        return next(
            (i for i, moment in enumerate(self.world.history) if moment.last_version >= self._oldest_seen),
            len(self.world.history),
        )

    async def barrier(self) -> None:
        await self.write(self._note_now)

    async def _note_now(self) -> None:
        self._oldest_seen = self.world.data.last_version


class SimulatedMetadata:
    """A machine's client of the metadata store."""

    limits = Limits(max_operations=60, max_bytes=100_000)

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.conditions_abort = machine.world.strong
        self._real = machine.world.open_store()
        self._appending = False

    async def get(self, domain: int, key: str) -> Record | None:
        return await self._machine.read(lambda store: store.get(domain, key))

    async def scan(
        self, domain: int, directory: str, *, start: str = "", end: str | None = None, limit: int
    ) -> list[Record]:
        return await self._machine.read(
            lambda store: store.scan(domain, directory, start=start, end=end, limit=limit)
        )

    async def put(self, domain: int, key: str, value: bytes, expect: Expectation = Expect.ANY) -> int:
        return await self._machine.write(lambda: self._real.put(domain, key, value, expect))

    async def delete(self, domain: int, key: str, expect: Expectation = Expect.ANY) -> bool:
        return await self._machine.write(lambda: self._real.delete(domain, key, expect))

    async def append(
        self,
        domain: int,
        entries: Sequence[NewEntry],
        puts: Sequence[Put] = (),
        deletes: Sequence[Delete] = (),
    ) -> AppendResult:
        self.limits.check(entries, puts, deletes)
        if self._appending:
            self._machine.world.violations.append("two appends of one machine are in flight (protocol 3)")
        self._appending = True
        try:
            return await self._machine.write(lambda: self._real.append(domain, entries, puts, deletes))
        finally:
            self._appending = False

    async def ceiling(self, domain: int, sequence: str, n: int) -> Entry | None:
        return await self._machine.read(lambda store: store.ceiling(domain, sequence, n))

    async def floor(self, domain: int, sequence: str, n: int) -> Entry | None:
        return await self._machine.read(lambda store: store.floor(domain, sequence, n))

    async def entries(self, domain: int, sequence: str, start: int, limit: int) -> list[Entry]:
        return await self._machine.read(lambda store: store.entries(domain, sequence, start, limit))

    async def tail(self, domain: int, sequence: str) -> Entry | None:
        return await self._machine.read(lambda store: store.tail(domain, sequence))

    async def swap(
        self,
        domain: int,
        sequence: str,
        at: Position,
        version: int,
        value: bytes,
        deletes: Sequence[Position],
    ) -> int:
        return await self._machine.write(
            lambda: self._real.swap(domain, sequence, at, version, value, deletes)
        )

    async def barrier(self, domain: int) -> None:
        await self._machine.barrier()

    @asynccontextmanager
    async def watch(self, domain: int, prefix: str | None = None) -> AsyncIterator[Watch]:
        async with self._real.watch(domain, prefix) as feed:
            yield _LateFeed(feed, self._machine)

    def session(self, ttl_ms: int) -> AbstractAsyncContextManager[Session]:
        return self._real.session(ttl_ms)

    async def close(self) -> None:
        await self._real.close()


class _LateFeed(Feed):
    """Tells in order what the store told, some of it much later, and some of it as a gap."""

    def __init__(self, feed: Feed, machine: Machine) -> None:
        super().__init__()
        self._feed = feed
        self._machine = machine

    async def __anext__(self) -> WatchEvent:
        world = self._machine.world
        event = await self._feed.__anext__()
        await world.delay(3.0 if world.strikes(0.5) else 0.02)
        await self._machine.check_alive()
        if world.strikes(0.1):
            raise Unavailable("simulated: the watch broke")
        if world.strikes(0.1):
            self._feed.gap()
            event = await self._feed.__anext__()
        return event


class SimulatedObjects(MemoryObjectStore):
    """A machine's client of the object store: slow, failing at times, late at times, and never half-done."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine.world.objects)
        self._machine = machine

    async def put(self, key: str, body: Body, *, if_absent: bool = False) -> None:
        real = super().put
        await self._call(lambda: real(key, body, if_absent=if_absent))

    async def delete(self, key: str) -> None:
        real = super().delete
        await self._call(lambda: real(key))

    async def list(self, prefix: str = "", *, after: str = "", limit: int = 1000) -> list[ObjectInfo]:
        real = super().list
        return await self._call(lambda: real(prefix, after=after, limit=limit))

    async def _call(self, act: Callable[[], Awaitable[T]]) -> T:
        world = self._machine.world
        await self._machine.check_alive()
        await world.delay(0.3)
        await self._machine.check_alive()
        if world.strikes(0.3):
            raise ObjectStoreUnavailable("simulated: no answer, and nothing done")
        if world.strikes(0.2):
            world.later(act)
            raise ObjectStoreUnavailable("simulated: no answer, and done later")
        result = await act()
        if world.strikes(0.3):
            raise ObjectStoreUnavailable("simulated: done, but the answer was lost")
        await world.delay(0.1)
        await self._machine.check_alive()
        return result
