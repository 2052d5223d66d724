"""The embedded metadata store: one SQLite file, shared by the processes of one host.

Writes go through `sqlite_writer` (group commit, one fsync for all that wait); reads run on a few threads
with connections of their own and see the last commit of any process. Watchers follow the `log` table,
woken across processes by a bell. Nothing blocks the event loop.

The file must be on a local disk: SQLite's locks and shared memory do not work over a network.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

from dray.errors import (
    CorruptStore,
    MetadataError,
    SessionLost,
    StartConflict,
    TooLarge,
    Unavailable,
    VersionConflict,
)
from dray.metadata.bell import Bell
from dray.metadata.feed import Feed
from dray.metadata.lease import Lease
from dray.metadata.sqlite_writer import SqliteWriter, Transaction, check_identity, connect, translate
from dray.metadata.store import (
    MAX_POSITION,
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

T = TypeVar("T")

# Reads are short; more threads would only take turns on the interpreter lock.
READ_THREADS = 4
# A writer that dies between commit and ring leaves watchers asleep; sessions end without a ring at all.
LOOK_EVERY_S = 1.0
# Writes that a watcher reads from the log at a time: of a thousand streams each, about 6 MB.
LOG_PAGE = 100

# Stores that could not be opened, while they give up what they had begun.
_ABANDONED: set[asyncio.Task[None]] = set()

_ENTRY = "SELECT end_records, end_bytes, value, version FROM entries WHERE domain = ? AND sequence = ?"


class SqliteStore:
    # One transaction could hold far more; this keeps a group commit short and memory bounded.
    limits = Limits(max_operations=10_000, max_bytes=16 * 2**20)
    conditions_abort = True

    def __init__(self, path: Path, timeout_s: float) -> None:
        self._path = path
        self._timeout_s = timeout_s
        self._bells = path.with_name(path.name + "-bells")
        self._writer = SqliteWriter(path, self._bells, timeout_s)
        self._readers = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="dray-sqlite-reader")
        self._local = threading.local()
        self._connections: list[sqlite3.Connection] = []
        self._feeds: list[tuple[int, str | None, Feed]] = []
        self._sessions: set[SqliteSession] = set()
        self._rung = asyncio.Event()
        self._bell: Bell | None = None
        self._seen_revision = 0
        self._looking: asyncio.Task[None] | None = None
        self._closed = False

    @classmethod
    async def open(cls, path: Path, *, timeout_s: float = 5.0) -> SqliteStore:
        """Open the file, creating it and its directory if need be."""
        try:
            path = await asyncio.to_thread(_prepared, path)
        except OSError as error:
            raise Unavailable(f"cannot create {path.parent}: {error}") from error
        store = cls(path, timeout_s)
        try:
            # The writer checks the file and makes the tables before its first job.
            await store._writer.write(lambda _: None)
            store._bell = Bell(store._bells)
            asyncio.get_running_loop().add_reader(store._bell.fd, store._ring)
            store._seen_revision = await store._read(_last_revision)
            await store._end_dead_sessions()  # those of an earlier boot, before anybody meets their keys
        except BaseException as error:
            # Not waited for: the writer may stand before a lock that another process never gives back.
            abandoned = asyncio.create_task(store.close())
            _ABANDONED.add(abandoned)
            abandoned.add_done_callback(_ABANDONED.discard)
            if isinstance(error, OSError):
                raise Unavailable(f"{store._bells}: {error}") from error
            raise
        store._looking = asyncio.create_task(store._look())
        return store

    async def close(self) -> None:
        self._closed = True
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
            self._looking = None
        await asyncio.gather(*(session.close() for session in self._sessions))
        for _, _, feed in self._feeds:
            feed.close()
        if self._bell is not None:
            asyncio.get_running_loop().remove_reader(self._bell.fd)
            self._bell.close()
            self._bell = None
        await self._writer.close()
        await asyncio.to_thread(self._readers.shutdown)
        for connection in self._connections:
            connection.close()
        self._connections.clear()

    # Reads

    async def get(self, domain: int, key: str) -> Record | None:
        check_record(domain, key)
        parent, name = _split(key)
        sql = "SELECT value, version FROM records WHERE domain = ? AND parent = ? AND name = ?"
        row = await self._read(lambda db: db.execute(sql, (domain, parent, name)).fetchone())
        return Record(key, *row) if row else None

    async def scan(
        self, domain: int, directory: str, *, start: str = "", end: str | None = None, limit: int
    ) -> list[Record]:
        check_scan(domain, directory, start, end, limit)
        sql = "SELECT name, value, version FROM records WHERE domain = ? AND parent = ? AND name >= ?"
        values: list[int | str] = [domain, directory, start]
        if end is not None:
            sql += " AND name < ?"
            values.append(end)
        sql += " ORDER BY name LIMIT ?"
        rows = await self._read(lambda db: db.execute(sql, (*values, limit)).fetchall())
        return [Record(_join(directory, name), value, version) for name, value, version in rows]

    async def ceiling(self, domain: int, sequence: str, n: int) -> Entry | None:
        return next(iter(await self.entries(domain, sequence, n, 1)), None)

    async def entries(self, domain: int, sequence: str, start: int, limit: int) -> list[Entry]:
        check_sequence(domain, sequence, limit)
        sql = f"{_ENTRY} AND end_records >= ? ORDER BY end_records LIMIT ?"
        return await self._read_entries(sql, domain, sequence, _clamp(start), limit)

    async def floor(self, domain: int, sequence: str, n: int) -> Entry | None:
        sql = f"{_ENTRY} AND end_records <= ? ORDER BY end_records DESC LIMIT 1"
        return next(iter(await self._read_entries(sql, domain, sequence, _clamp(n))), None)

    async def tail(self, domain: int, sequence: str) -> Entry | None:
        return await self.floor(domain, sequence, MAX_POSITION)

    async def barrier(self, domain: int) -> None:
        """A read begins at the last commit, whichever process made it: there is nothing to wait for."""
        self._check_open()

    async def _read_entries(self, sql: str, domain: int, sequence: str, *values: int) -> list[Entry]:
        check_sequence(domain, sequence)
        rows = await self._read(lambda db: db.execute(sql, (domain, sequence, *values)).fetchall())
        return [Entry(Position(records, size), value, version) for records, size, value, version in rows]

    async def _read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        def run() -> T:
            try:
                return query(self._reader())
            except (sqlite3.Error, OSError) as error:
                raise translate(error, self._path) from error

        self._check_open()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await loop.run_in_executor(self._readers, run)
        except TimeoutError:
            raise Unavailable(f"{self._path}: no answer to a read for {self._timeout_s:g} s") from None

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable(f"{self._path}: the store was closed")

    def _reader(self) -> sqlite3.Connection:
        """This thread's connection. All are closed together, by another thread, when none is in use."""
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = connect(self._path, self._timeout_s)
            try:
                check_identity(connection, self._path, self._writer.identity)
                connection.execute("PRAGMA query_only = ON")
            except BaseException:
                connection.close()
                raise
            self._local.connection = connection
            self._connections.append(connection)
        return connection

    # Writes

    async def put(self, domain: int, key: str, value: bytes, expect: Expectation = Expect.ANY) -> int:
        result = await self.append(domain, (), (Put(key, value, expect),))
        version = result.puts[0]
        assert version is not None, "a failed expectation raises here"
        return version

    async def delete(self, domain: int, key: str, expect: Expectation = Expect.ANY) -> bool:
        check_record(domain, key, expect)

        def run(transaction: Transaction) -> bool:
            _check_expectation(transaction, domain, key, expect)
            if not _delete(transaction, domain, key):
                return False
            _log(transaction, domain, [KeyChange(key, None)])
            return True

        return await self._writer.write(run)

    async def append(
        self,
        domain: int,
        entries: Sequence[NewEntry],
        puts: Sequence[Put] = (),
        deletes: Sequence[Delete] = (),
    ) -> AppendResult:
        check_append(domain, entries, puts, deletes)
        self.limits.check(entries, puts, deletes)
        return await self._writer.write(
            lambda transaction: _append(transaction, domain, entries, puts, deletes)
        )

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

        def run(transaction: Transaction) -> int:
            revision = transaction.revision
            replaced = transaction.execute(
                "UPDATE entries SET value = ?, version = ? WHERE domain = ? AND sequence = ?"
                " AND end_records = ? AND end_bytes = ? AND version = ?",
                (value, revision, domain, sequence, *at, version),
            )
            if replaced.rowcount == 0:
                raise VersionConflict(f"{sequence} at {at}", version)
            changes: list[Change] = [EntryChange(sequence, at, revision)]
            changes += [
                EntryChange(sequence, position, None)
                for position in deletes
                if _delete_entry(transaction, domain, sequence, position)
            ]
            _log(transaction, domain, changes)
            return revision

        return await self._writer.write(run)

    # Watching

    @asynccontextmanager
    async def watch(self, domain: int, prefix: str | None = None) -> AsyncIterator[Feed]:
        check_watch(domain, prefix)
        self._check_open()
        feed = Feed()
        watcher = (domain, prefix, feed)
        self._feeds.append(watcher)
        try:
            yield feed
        finally:
            self._feeds.remove(watcher)

    def _ring(self) -> None:
        assert self._bell is not None
        self._bell.drain()
        self._rung.set()

    async def _look(self) -> None:
        """Follow the log and end the sessions whose owners are gone; one task for the store's life."""
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_EVERY_S):
                        await self._rung.wait()
                self._rung.clear()
                # The store may be away for a while (a full disk, a lock held long): look again next time.
                with contextlib.suppress(MetadataError):
                    await self._follow_log()
                    await self._end_dead_sessions()
        except Exception as error:  # a bug: nobody may go on waiting for a feed that has ended
            for _, _, feed in self._feeds:
                feed.close(CorruptStore(f"{self._path}: the change feed broke: {error!r}"))
            raise

    async def _follow_log(self) -> None:
        while True:
            watched = {domain for domain, _, _ in self._feeds}
            first, rows = await self._read(lambda db: _page_of_log(db, self._seen_revision, watched))  # noqa: B023
            if first is None:
                return
            for domain, _, feed in self._feeds:
                # Also for those that came while this was read: it left out what is for them.
                if first != self._seen_revision + 1 or domain not in watched:
                    feed.gap()
            for revision, domain, changes in rows:
                self._publish(domain, changes)
                self._seen_revision = revision

    def _publish(self, domain: int, changes: tuple[Change, ...]) -> None:
        for watched, prefix, feed in self._feeds:
            if watched != domain:
                continue
            if prefix is None:
                feed.offer(changes)
            else:
                feed.offer(tuple(c for c in changes if isinstance(c, KeyChange) and c.key.startswith(prefix)))

    # Sessions

    @asynccontextmanager
    async def session(self, ttl_ms: int) -> AsyncIterator[SqliteSession]:
        check_session_ttl(ttl_ms)
        asked_at = asyncio.get_running_loop().time()
        session_id = await self._writer.write(lambda t: _new_session(t, ttl_ms))
        session = SqliteSession(self._writer, session_id, ttl_ms, asked_at)
        self._sessions.add(session)
        try:
            yield session
        finally:
            self._sessions.discard(session)
            await session.close()

    async def _end_dead_sessions(self) -> None:
        sql = "SELECT id FROM sessions WHERE boot <> ? OR expires_ms < ?"
        dead = await self._read(lambda db: db.execute(sql, _boot_time(0)).fetchall())
        for (session,) in dead:
            # Asked again inside the transaction: the owner may have renewed it meanwhile.
            await self._writer.write(partial(_end_session, session=session, only_if_dead=True))


class SqliteSession:
    """A row in `sessions` that this process renews; whoever finds it expired ends it."""

    def __init__(self, writer: SqliteWriter, session: int, ttl_ms: int, asked_at: float) -> None:
        self._writer = writer
        self._id = session
        self._ttl_ms = ttl_ms
        self._lease = Lease(ttl_ms, self._renew, asked_at)
        self._closed = False

    @property
    def lost(self) -> bool:
        return self._lease.lost

    async def wait_lost(self) -> None:
        await self._lease.wait_lost()

    async def put_ephemeral(
        self, domain: int, key: str, value: bytes, expect: Expectation = Expect.ANY
    ) -> int:
        self._lease.check()
        put = Put(key, value, expect)
        check_append(domain, (), (put,), ())
        SqliteStore.limits.check((), (put,), ())

        def run(transaction: Transaction) -> int:
            if transaction.execute("SELECT 1 FROM sessions WHERE id = ?", (self._id,)).fetchone() is None:
                raise SessionLost("the session expired; make a new one")
            version = _append(transaction, domain, (), (put,), (), session=self._id).puts[0]
            assert version is not None, "a failed expectation raises here"
            return version

        try:
            return await self._writer.write(run)
        except SessionLost:
            self._lease.lose()
            raise

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await self._lease.stop()
        with contextlib.suppress(MetadataError):  # else it expires
            await self._writer.write(lambda transaction: _end_session(transaction, self._id))

    async def _renew(self) -> bool:
        sql = "UPDATE sessions SET boot = ?, expires_ms = ? WHERE id = ?"
        return await self._writer.write(
            lambda transaction: transaction.execute(sql, (*_boot_time(self._ttl_ms), self._id)).rowcount > 0
        )


# What jobs do inside a transaction. All conditions first, then the changes.


def _append(
    transaction: Transaction,
    domain: int,
    entries: Sequence[NewEntry],
    puts: Sequence[Put],
    deletes: Sequence[Delete],
    session: int | None = None,
) -> AppendResult:
    for put in puts:
        _check_expectation(transaction, domain, put.key, put.expect)
    for delete in deletes:
        _check_expectation(transaction, domain, delete.key, delete.expect)
    ends: dict[str, Position] = {}
    positions = []
    for new in entries:
        end = ends.get(new.sequence) or _end_of(transaction, domain, new.sequence)
        if new.expected_start is not None and new.expected_start != end.end_records:
            raise StartConflict(new.sequence, new.expected_start, end.end_records)
        ends[new.sequence] = end = Position(end.end_records + new.records, end.end_bytes + new.size_bytes)
        if max(end) > MAX_POSITION:
            raise TooLarge(f"end of sequence {new.sequence}", max(end), MAX_POSITION)
        positions.append(end)

    revision = transaction.revision
    transaction.executemany(
        "INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?)",
        [
            (domain, new.sequence, *end, new.value, revision)
            for new, end in zip(entries, positions, strict=True)
        ],
    )
    transaction.executemany(
        "INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?, ?, ?)",
        [(domain, *_split(put.key), put.value, revision, session) for put in puts],
    )
    changes: list[Change] = [
        EntryChange(new.sequence, end, revision) for new, end in zip(entries, positions, strict=True)
    ]
    changes += [KeyChange(put.key, revision) for put in puts]
    changes += [KeyChange(d.key, None) for d in deletes if _delete(transaction, domain, d.key)]
    _log(transaction, domain, changes)
    return AppendResult(
        tuple(Assigned(position, revision) for position in positions),
        (revision,) * len(puts),
        (True,) * len(deletes),
    )


def _check_expectation(transaction: Transaction, domain: int, key: str, expect: Expectation) -> None:
    if expect is Expect.ANY:
        return
    found = transaction.execute(
        "SELECT version FROM records WHERE domain = ? AND parent = ? AND name = ?", (domain, *_split(key))
    ).fetchone()
    if found != (None if expect is Expect.ABSENT else (expect,)):
        raise VersionConflict(key, expect)


def _end_of(transaction: Transaction, domain: int, sequence: str) -> Position:
    row = transaction.execute(
        "SELECT end_records, end_bytes FROM entries WHERE domain = ? AND sequence = ?"
        " ORDER BY end_records DESC LIMIT 1",
        (domain, sequence),
    ).fetchone()
    return Position(*row) if row else Position(0, 0)


def _delete(transaction: Transaction, domain: int, key: str) -> bool:
    sql = "DELETE FROM records WHERE domain = ? AND parent = ? AND name = ?"
    return transaction.execute(sql, (domain, *_split(key))).rowcount > 0


def _delete_entry(transaction: Transaction, domain: int, sequence: str, position: Position) -> bool:
    sql = "DELETE FROM entries WHERE domain = ? AND sequence = ? AND end_records = ? AND end_bytes = ?"
    return transaction.execute(sql, (domain, sequence, *position)).rowcount > 0


def _new_session(transaction: Transaction, ttl_ms: int) -> int:
    created = transaction.execute(
        "INSERT INTO sessions (boot, expires_ms) VALUES (?, ?)", _boot_time(ttl_ms)
    ).lastrowid
    assert created is not None
    return created


def _end_session(transaction: Transaction, session: int, only_if_dead: bool = False) -> None:
    condition = " AND (boot <> ? OR expires_ms < ?)" if only_if_dead else ""
    values = _boot_time(0) if only_if_dead else ()
    ended = transaction.execute(f"DELETE FROM sessions WHERE id = ?{condition}", (session, *values))
    if ended.rowcount == 0:
        return
    owned = transaction.execute(
        "SELECT domain, parent, name FROM records WHERE session = ?", (session,)
    ).fetchall()
    for domain, parent, name in owned:
        key = _join(parent, name)
        _delete(transaction, domain, key)
        _log(transaction, domain, [KeyChange(key, None)])


def _boot_time(from_now_ms: int) -> tuple[str, int]:
    """A moment on the one clock that the host's processes share and nobody sets, and which boot it is of."""
    return _boot_id(), time.monotonic_ns() // 1_000_000 + from_now_ms


@cache
def _boot_id() -> str:
    """Where the system does not tell (not Linux), a session may outlive a reboot by its time-to-live."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""


def _page_of_log(
    db: sqlite3.Connection, seen: int, watched: set[int]
) -> tuple[int | None, list[tuple[int, int, tuple[Change, ...]]]]:
    """The first revision behind `seen`, if any, and a page from there on; of watched domains, unpacked.

    Unpacked here, on a reader's thread: an append over a thousand streams takes a millisecond.
    """
    sql = "SELECT revision, domain, changes FROM log WHERE revision > ? ORDER BY revision LIMIT ?"
    rows = db.execute(sql, (seen, LOG_PAGE)).fetchall()
    return (rows[0][0] if rows else None), [
        (revision, domain, tuple(_unpack(packed, revision)) if domain in watched else ())
        for revision, domain, packed in rows
    ]


def _prepared(path: Path) -> Path:
    """The path for good, whatever the working directory will be, and its directory there."""
    path = path.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _last_revision(db: sqlite3.Connection) -> int:
    (revision,) = db.execute("SELECT coalesce(max(revision), 0) FROM log").fetchone()
    assert isinstance(revision, int)
    return revision


def _log(transaction: Transaction, domain: int, changes: Iterable[Change]) -> None:
    """Changes of one write as JSON: `[key, alive]` or `[sequence, end_records, end_bytes, alive]`."""
    packed = [
        [c.key, c.version is not None]
        if isinstance(c, KeyChange)
        else [c.sequence, *c.position, c.version is not None]
        for c in changes
    ]
    transaction.log(domain, json.dumps(packed, separators=(",", ":")))


def _unpack(packed: str, revision: int) -> Iterable[Change]:
    for change in json.loads(packed):
        version = revision if change[-1] else None
        if len(change) == 2:
            yield KeyChange(change[0], version)
        else:
            yield EntryChange(change[0], Position(change[1], change[2]), version)


def _split(key: str) -> tuple[str, str]:
    parent, _, name = key.rpartition("/")
    return parent, name


def _join(parent: str, name: str) -> str:
    return f"{parent}/{name}" if parent else name


def _clamp(n: int) -> int:
    return max(0, min(n, MAX_POSITION))
