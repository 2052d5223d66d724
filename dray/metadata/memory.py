"""A metadata store in memory, for unit tests: the contract in its plainest form.

`MemoryStore` is one client of a `MemoryData`; several may share one, as processes share a server.
With `conditions_abort=False` it keeps only Oxia's weaker promise for appends.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, insort
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from dray.errors import SessionLost, StartConflict, Unavailable, VersionConflict
from dray.metadata.feed import Feed
from dray.metadata.store import (
    AppendResult,
    Assigned,
    Change,
    Delete,
    Entry,
    EntryChange,
    Expect,
    Expectation,
    KeyChange,
    Limits,
    NewEntry,
    Position,
    Put,
    Record,
    check_append,
    check_record,
    check_scan,
    check_sequence,
    check_session_ttl,
    check_swap,
    check_watch,
)


@dataclass(slots=True)
class _Domain:
    records: dict[str, Record] = field(default_factory=dict)
    keys: list[str] = field(default_factory=list)  # those of `records`, sorted by their bytes
    sequences: dict[str, list[Entry]] = field(default_factory=dict)  # never empty, sorted by end
    owners: dict[str, MemorySession] = field(default_factory=dict)
    watchers: list[tuple[str | None, Feed]] = field(default_factory=list)

    def matches(self, key: str, expect: Expectation) -> bool:
        record = self.records.get(key)
        if expect is Expect.ANY:
            return True
        if expect is Expect.ABSENT:
            return record is None
        return record is not None and record.version == expect

    def put(self, key: str, value: bytes, version: int, owner: MemorySession | None = None) -> KeyChange:
        if key not in self.records:
            insort(self.keys, key, key=str.encode)
        self.records[key] = Record(key, value, version)
        self.owners.pop(key, None)
        if owner is not None:
            self.owners[key] = owner
        return KeyChange(key, version)

    def delete(self, key: str) -> list[Change]:
        if key not in self.records:
            return []
        del self.records[key]
        self.keys.remove(key)
        self.owners.pop(key, None)
        return [KeyChange(key, None)]

    def end_of(self, sequence: str) -> Position:
        entries = self.sequences.get(sequence)
        return entries[-1].position if entries else Position(0, 0)

    def publish(self, changes: Iterable[Change]) -> None:
        changes = tuple(changes)
        for prefix, feed in self.watchers:
            if prefix is None:
                feed.offer(changes)
            else:
                feed.offer(tuple(c for c in changes if isinstance(c, KeyChange) and c.key.startswith(prefix)))


class MemoryData:
    """What the clients of one in-memory store share."""

    def __init__(self) -> None:
        self._domains: dict[int, _Domain] = {}
        self.last_version = 0

    def domain(self, domain: int) -> _Domain:
        return self._domains.setdefault(domain, _Domain())

    def domains(self) -> list[_Domain]:
        return list(self._domains.values())

    def next_version(self) -> int:
        self.last_version += 1
        return self.last_version


class MemorySession:
    """Expires when `expire` is called: there is no process that could die without its store."""

    def __init__(self, data: MemoryData) -> None:
        self._data = data
        self._over = asyncio.Event()

    @property
    def lost(self) -> bool:
        return self._over.is_set()

    async def wait_lost(self) -> None:
        await self._over.wait()

    async def put_ephemeral(
        self, domain: int, key: str, value: bytes, expect: Expectation = Expect.ANY
    ) -> int:
        if self.lost:
            raise SessionLost("the session is over; make a new one")
        check_record(domain, key, expect)
        in_domain = self._data.domain(domain)
        if not in_domain.matches(key, expect):
            raise VersionConflict(key, expect)
        version = self._data.next_version()
        in_domain.publish([in_domain.put(key, value, version, owner=self)])
        return version

    def expire(self) -> None:
        self._over.set()
        for domain in self._data.domains():
            for key in [key for key, owner in domain.owners.items() if owner is self]:
                domain.publish(domain.delete(key))

    async def close(self) -> None:
        self.expire()


class MemoryStore:
    limits = Limits(max_operations=1_000, max_bytes=1_310_720)

    def __init__(self, data: MemoryData | None = None, *, conditions_abort: bool = True) -> None:
        self._data = data or MemoryData()
        self._conditions_abort = conditions_abort
        self._feeds: set[Feed] = set()
        self._closed = False

    @property
    def conditions_abort(self) -> bool:
        return self._conditions_abort

    async def get(self, domain: int, key: str) -> Record | None:
        check_record(domain, key)
        return self._inside(domain).records.get(key)

    async def scan(
        self, domain: int, directory: str, *, start: str = "", end: str | None = None, limit: int
    ) -> list[Record]:
        check_scan(domain, directory, start, end, limit)
        inside = self._inside(domain)
        parent = directory + "/" if directory else ""
        found: list[Record] = []
        for key in inside.keys[bisect_left(inside.keys, (parent + start).encode(), key=str.encode) :]:
            if len(found) == limit or not key.startswith(parent):
                break
            name = key[len(parent) :]
            if "/" not in name and (end is None or name.encode() < end.encode()):
                found.append(inside.records[key])
        return found

    async def put(self, domain: int, key: str, value: bytes, expect: Expectation = Expect.ANY) -> int:
        result = await self.append(domain, (), (Put(key, value, expect),))
        if result.puts[0] is None:
            raise VersionConflict(key, expect)
        return result.puts[0]

    async def delete(self, domain: int, key: str, expect: Expectation = Expect.ANY) -> bool:
        check_record(domain, key, expect)
        existed = key in self._inside(domain).records
        result = await self.append(domain, (), (), (Delete(key, expect),))
        if not result.deletes[0]:
            raise VersionConflict(key, expect)
        return existed

    async def append(
        self,
        domain: int,
        entries: Sequence[NewEntry],
        puts: Sequence[Put] = (),
        deletes: Sequence[Delete] = (),
    ) -> AppendResult:
        check_append(domain, entries, puts, deletes)
        self.limits.check(entries, puts, deletes)
        inside = self._inside(domain)
        if self._conditions_abort:
            self._check_conditions(inside, entries, puts, deletes)
        version = self._data.next_version()
        changes: list[Change] = []
        assigned = []
        for new in entries:
            end = inside.end_of(new.sequence)
            position = Position(end.end_records + new.records, end.end_bytes + new.size_bytes)
            inside.sequences.setdefault(new.sequence, []).append(Entry(position, new.value, version))
            assigned.append(Assigned(position, version))
            changes.append(EntryChange(new.sequence, position, version))
        versions: list[int | None] = []
        for put in puts:
            passes = inside.matches(put.key, put.expect)
            versions.append(version if passes else None)
            if passes:
                changes.append(inside.put(put.key, put.value, version))
        held = []
        for delete in deletes:
            held.append(inside.matches(delete.key, delete.expect))
            if held[-1]:
                changes += inside.delete(delete.key)
        inside.publish(changes)
        return AppendResult(tuple(assigned), tuple(versions), tuple(held))

    @staticmethod
    def _check_conditions(
        inside: _Domain, entries: Sequence[NewEntry], puts: Sequence[Put], deletes: Sequence[Delete]
    ) -> None:
        writes: list[Put | Delete] = [*puts, *deletes]
        for write in writes:
            if not inside.matches(write.key, write.expect):
                raise VersionConflict(write.key, write.expect)
        starts: dict[str, int] = {}
        for new in entries:
            start = starts.get(new.sequence, inside.end_of(new.sequence).end_records)
            if new.expected_start is not None and new.expected_start != start:
                raise StartConflict(new.sequence, new.expected_start, start)
            starts[new.sequence] = start + new.records

    async def ceiling(self, domain: int, sequence: str, n: int) -> Entry | None:
        return next(iter(await self.entries(domain, sequence, n, 1)), None)

    async def floor(self, domain: int, sequence: str, n: int) -> Entry | None:
        entries = self._entries(domain, sequence)
        index = _first_at_or_after(entries, n + 1)
        return entries[index - 1] if index else None

    async def entries(self, domain: int, sequence: str, start: int, limit: int) -> list[Entry]:
        check_sequence(domain, sequence, limit)
        entries = self._entries(domain, sequence)
        index = _first_at_or_after(entries, start)
        return entries[index : index + limit]

    async def tail(self, domain: int, sequence: str) -> Entry | None:
        entries = self._entries(domain, sequence)
        return entries[-1] if entries else None

    async def swap(
        self,
        domain: int,
        sequence: str,
        at: Position,
        version: int,
        value: bytes,
        deletes: Sequence[Position],
    ) -> int:
        check_swap(domain, sequence, at, version, deletes)
        self.limits.check((), (Put(sequence, value),), ())
        entries = self._entries(domain, sequence)
        index = next((i for i, entry in enumerate(entries) if entry.position == at), None)
        if index is None or entries[index].version != version:
            raise VersionConflict(f"{sequence} at {at}", version)
        new_version = self._data.next_version()
        gone = set(deletes) & {entry.position for entry in entries}
        entries[index] = Entry(at, value, new_version)
        inside = self._inside(domain)
        inside.sequences[sequence] = [entry for entry in entries if entry.position not in gone]
        changes = [EntryChange(sequence, at, new_version)]
        inside.publish(changes + [EntryChange(sequence, position, None) for position in gone])
        return new_version

    async def barrier(self, domain: int) -> None:
        """Reads here are never stale."""
        self._inside(domain)

    @asynccontextmanager
    async def watch(self, domain: int, prefix: str | None = None) -> AsyncIterator[Feed]:
        check_watch(domain, prefix)
        feed = Feed()
        watcher = (prefix, feed)
        watchers = self._inside(domain).watchers
        watchers.append(watcher)
        self._feeds.add(feed)
        try:
            yield feed
        finally:
            watchers.remove(watcher)
            self._feeds.discard(feed)

    @asynccontextmanager
    async def session(self, ttl_ms: int) -> AsyncIterator[MemorySession]:
        check_session_ttl(ttl_ms)
        self._inside(0)
        session = MemorySession(self._data)
        try:
            yield session
        finally:
            await session.close()

    async def close(self) -> None:
        self._closed = True
        for feed in self._feeds:
            feed.close()

    def _inside(self, domain: int) -> _Domain:
        if self._closed:
            raise Unavailable("the store was closed")
        return self._data.domain(domain)

    def _entries(self, domain: int, sequence: str) -> list[Entry]:
        check_sequence(domain, sequence)
        return self._inside(domain).sequences.get(sequence, [])


def _first_at_or_after(entries: Sequence[Entry], n: int) -> int:
    return bisect_left(entries, n, key=lambda entry: entry.position.end_records)
