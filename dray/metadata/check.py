"""Exercise a store: every primitive of the contract, in a scratch area, timed and verified.

For somebody who has just pointed Dray at a store and wants to know that it works and how fast it
answers. The conformance suite is what holds stores to the contract; this asks each primitive once or a
few times. Keys are removed afterwards. A sequence cannot be: one fixed name is used per cluster, and cut
down to its last entry.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
import uuid
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import TypeVar

from dray.errors import MetadataError, Unavailable, VersionConflict
from dray.metadata.keys import domain_of
from dray.metadata.store import (
    MIN_SESSION_MS,
    Delete,
    Expect,
    Gap,
    KeyChange,
    MetadataStore,
    NewEntry,
    Position,
    Put,
    Record,
    Watch,
)

SCRATCH = "drayd-check"
# Enough for a median that means something, few enough for a second on a slow store.
ROUNDS = 10
# Earlier checks that were killed leave entries behind: this many are removed at a time.
PAGE = 1_000

T = TypeVar("T")


@dataclass(slots=True)
class Finding:
    """How one primitive did. `problem` is the first answer that the contract does not allow."""

    primitive: str
    elapsed_ms: list[float] = field(default_factory=list)
    problem: str | None = None

    @property
    def median_ms(self) -> float:
        return statistics.median(self.elapsed_ms)

    @property
    def worst_ms(self) -> float:
        return max(self.elapsed_ms)


async def check_store(store: MetadataStore, num_domains: int, timeout_s: float) -> list[Finding]:
    """Raises what the store raises when it cannot be used at all; wrong answers become problems.

    One check at a time per cluster, as they share a sequence: `Unavailable` while another one runs.
    """
    check = _Check(store, domain_of(SCRATCH, num_domains), timeout_s)
    await check.run()
    return list(check.findings.values())


class _Check:
    def __init__(self, store: MetadataStore, domain: int, timeout_s: float) -> None:
        self.store = store
        self.domain = domain
        self.timeout_s = timeout_s
        self.directory = f"{SCRATCH}/{uuid.uuid4().hex}"
        self.keys = [f"{self.directory}/{n:02d}" for n in range(ROUNDS)]
        self.findings: dict[str, Finding] = {}

    async def run(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            session = self.store.session(MIN_SESSION_MS)
            owner = await self.timed("session", stack.enter_async_context(session))
            lock = owner.put_ephemeral(self.domain, f"{SCRATCH}/lock", b"", Expect.ABSENT)
            try:
                await self.timed("put_ephemeral", lock)
            except VersionConflict:
                raise Unavailable("another check is running, or was killed a moment ago") from None
            try:
                await self.records()
                await self.sequence()
            finally:
                with contextlib.suppress(MetadataError):  # what went wrong before is what matters
                    await self.store.append(self.domain, (), deletes=[Delete(key) for key in self.keys])

    async def timed(self, primitive: str, call: Awaitable[T]) -> T:
        finding = self.findings.setdefault(primitive, Finding(primitive))
        started = time.perf_counter()
        try:
            return await call
        finally:
            finding.elapsed_ms.append((time.perf_counter() - started) * 1000)

    def require(self, primitive: str, holds: bool, problem: str) -> None:
        finding = self.findings[primitive]
        if not holds and finding.problem is None:
            finding.problem = problem

    async def records(self) -> None:
        store, domain = self.store, self.domain
        versions: list[int] = []
        async with store.watch(domain, self.directory + "/") as watch:
            for key in self.keys:
                versions.append(await self.timed("put", store.put(domain, key, key.encode(), Expect.ABSENT)))
                if "watch" not in self.findings or self.findings["watch"].problem is None:
                    seen = await self.timed("watch", self.sees(watch, KeyChange(key, versions[-1])))
                    self.require("watch", seen, f"a change was not delivered within {self.timeout_s:g} s")
        with contextlib.suppress(VersionConflict):
            await self.timed("put", store.put(domain, self.keys[0], b"", Expect.ABSENT))
            self.require("put", False, "it replaced a record where none was expected")
        await self.timed("barrier", store.barrier(domain))
        for key, version in zip(self.keys, versions, strict=True):
            record = await self.timed("get", store.get(domain, key))
            self.require("get", record == Record(key, key.encode(), version), f"it returned {record}")
        for _ in self.keys:
            found = [r.key for r in await self.timed("scan", store.scan(domain, self.directory, limit=PAGE))]
            self.require("scan", found == self.keys, f"it returned {found}")
        for key, version in zip(self.keys, versions, strict=True):
            existed = await self.timed("delete", store.delete(domain, key, version))
            self.require("delete", existed, "it did not find what was written")

    async def sees(self, watch: Watch, change: KeyChange) -> bool:
        try:
            async with asyncio.timeout(self.timeout_s):
                async for event in watch:
                    if isinstance(event, Gap) or change in event.changes:
                        return True
        except TimeoutError:
            pass
        return False

    async def sequence(self) -> None:
        store, domain = self.store, self.domain
        before = await self.timed("tail", store.tail(domain, SCRATCH))
        end = start = before.position if before else Position(0, 0)
        positions: list[Position] = []
        for size, key in enumerate(self.keys, start=1):
            entry = NewEntry(SCRATCH, records=size, size_bytes=100 * size, value=key.encode())
            appended = await self.timed(
                "append", store.append(domain, [entry], [Put(key, b"", Expect.ABSENT)])
            )
            end = Position(end.end_records + size, end.end_bytes + 100 * size)
            positions.append(appended.entries[0].position)
            self.require("append", positions[-1] == end, f"it assigned {positions[-1]} instead of {end}")
            self.require("append", None not in appended.puts, "it did not write the record beside the entry")
        await self.timed("barrier", store.barrier(domain))

        first = start.end_records + 1
        for position in positions:
            at = await self.timed("ceiling", store.ceiling(domain, SCRATCH, first))
            self.require("ceiling", at is not None and at.position == position, f"it returned {at}")
            first = position.end_records + 1
            at = await self.timed("floor", store.floor(domain, SCRATCH, first - 1))
            self.require("floor", at is not None and at.position == position, f"it returned {at}")
            at = await self.timed("tail", store.tail(domain, SCRATCH))
            self.require("tail", at is not None and at.position == end, f"it returned {at}")
            run = store.entries(domain, SCRATCH, start.end_records + 1, PAGE)
            found = [entry.position for entry in await self.timed("entries", run)]
            self.require("entries", found == positions, f"it returned {found}")

        while len(page := await store.entries(domain, SCRATCH, 0, PAGE)) > 1:
            *lower, last = page
            swap = store.swap(domain, SCRATCH, last.position, last.version, b"", [e.position for e in lower])
            await self.timed("swap", swap)
            left = await store.ceiling(domain, SCRATCH, 0)
            if left is None or left.position != last.position:
                self.require("swap", False, f"it left {left} below {last.position}")
                break
