"""The one thread of a process that writes to the SQLite file, and its group commit.

Every write that waits when the thread gets the lock goes into one transaction, with one fsync. Jobs
check all of their conditions before they change anything, so a refused job leaves nothing behind and
the others of its group commit. If the transaction itself fails, all of them fail.

Processes take turns by `flock` on a file beside the database: waiters wake at once, where SQLite's own
busy handler would sleep for up to 100 ms. A process that dies gives the lock back.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import queue
import sqlite3
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from dray.errors import (
    CorruptStore,
    IncompatibleStore,
    OutcomeUnknown,
    StoreFull,
    Unavailable,
)
from dray.metadata.bell import ring_all

T = TypeVar("T")

# "DRAY": tells our file from another program's before anything is changed.
APPLICATION_ID = 0x44524159
SCHEMA_VERSION = 1

# A key is split at its last slash, so that the children of a directory are one range of the index.
# The tail of a sequence is its last row; `log` has one row for each revision, `changes` as JSON, and in
# `total_bytes` what all changes up to it took. `identity` tells this file from another in its place.
SCHEMA = """
CREATE TABLE records (
    domain INTEGER NOT NULL, parent TEXT NOT NULL, name TEXT NOT NULL,
    value BLOB NOT NULL, version INTEGER NOT NULL, session INTEGER,
    PRIMARY KEY (domain, parent, name)
) WITHOUT ROWID;
CREATE INDEX ephemeral ON records (session) WHERE session IS NOT NULL;
CREATE TABLE entries (
    domain INTEGER NOT NULL, sequence TEXT NOT NULL, end_records INTEGER NOT NULL, end_bytes INTEGER NOT NULL,
    value BLOB NOT NULL, version INTEGER NOT NULL,
    PRIMARY KEY (domain, sequence, end_records)
) WITHOUT ROWID;
CREATE TABLE log (
    revision INTEGER PRIMARY KEY, domain INTEGER NOT NULL, total_bytes INTEGER NOT NULL, changes TEXT NOT NULL
);
CREATE TABLE identity (id TEXT NOT NULL);
CREATE TABLE sessions (id INTEGER PRIMARY KEY AUTOINCREMENT, boot TEXT NOT NULL, expires_ms INTEGER NOT NULL);
"""

# A watcher this many writes behind gets a gap: at 2,000 writes/s that is half a minute of history.
KEPT_REVISIONS = 65_536
KEPT_BYTES = 64 * 2**20
# Trim now and then, not with every commit.
TRIM_EVERY = 1_024
# Enough to fill an fsync with work, few enough that a group stays in the millisecond range.
MAX_GROUP = 256


# Jobs that wait, withdrawn ones included, beyond which a call is refused at once.
MAX_QUEUED = 10_000


def connect(path: Path, timeout_s: float, *, create: bool = False) -> sqlite3.Connection:
    """A connection in autocommit: transactions are begun by hand. Used by one thread at a time."""
    mode = "rwc" if create else "rw"
    connection = sqlite3.connect(
        f"file:{quote(str(path))}?mode={mode}",
        uri=True,
        timeout=timeout_s,
        isolation_level=None,
        check_same_thread=False,
    )
    connection.execute("PRAGMA synchronous = FULL")
    return connection


def check_identity(connection: sqlite3.Connection, path: Path, expected: str) -> None:
    """Raise `CorruptStore` if the file is another than the one this process has opened."""
    row = connection.execute("SELECT id FROM identity").fetchone()
    if row != (expected,):
        raise CorruptStore(f"{path} was replaced by another database while it was in use; start anew")


class Transaction:
    """What a job works with: the connection inside a transaction, and the revision of its write."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.execute = connection.execute
        self.executemany = connection.executemany
        last = connection.execute("SELECT revision, total_bytes FROM log ORDER BY revision DESC LIMIT 1")
        row: tuple[int, int] = last.fetchone() or (0, 0)
        self._total_bytes = row[1]
        self.revision = row[0] + 1  # the version of everything that the current write writes
        self.changed = False

    def log(self, domain: int, changes: str) -> None:
        """End a write: every revision has one row, without a gap, or watchers would see one."""
        self._total_bytes += len(changes)
        self.execute(
            "INSERT INTO log VALUES (?, ?, ?, ?)", (self.revision, domain, self._total_bytes, changes)
        )
        if self.revision % TRIM_EVERY == 0:
            self.execute(
                "DELETE FROM log WHERE revision < ? AND (revision <= ? OR total_bytes <= ?)",
                (self.revision, self.revision - KEPT_REVISIONS, self._total_bytes - KEPT_BYTES),
            )
        self.revision += 1
        self.changed = True

    def attempt(self, run: Callable[[Transaction], T]) -> T:
        """Run a job so that nothing of it stays when it fails."""
        before = self.revision, self._total_bytes, self.changed
        self.execute("SAVEPOINT job")
        try:
            return run(self)
        except sqlite3.Error:
            raise  # of the database, not of the job: the whole transaction has failed
        except BaseException:
            self.execute("ROLLBACK TO job")
            self.revision, self._total_bytes, self.changed = before
            raise
        finally:
            with contextlib.suppress(sqlite3.Error):  # the transaction may be over already
                self.execute("RELEASE job")


class _Job:
    """A write that waits. Whoever comes first decides: the writer takes it, or the caller withdraws it."""

    def __init__(self, run: Callable[[Transaction], Any], future: asyncio.Future[Any]) -> None:
        self.run: Callable[[Transaction], Any] | None = run
        self.future = future
        self.result: Any = None
        self.error: Exception | None = None
        self._decide = threading.Lock()
        self._decided: str | None = None

    def take(self) -> bool:
        return self._settle("taken") == "taken"

    def withdraw(self) -> bool:
        if self._settle("withdrawn") != "withdrawn":
            return False
        self.run = None  # it stays in the queue, but what it would have written does not
        return True

    def _settle(self, decision: str) -> str:
        with self._decide:
            self._decided = self._decided or decision
            return self._decided


class SqliteWriter:
    """Runs jobs on its thread. Used from one event loop."""

    def __init__(self, path: Path, bells: Path, timeout_s: float) -> None:
        self._path = path
        self._bells = bells
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._identity: str | None = None
        self._file = (0, 0)  # device and inode of what is open
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        # A daemon: a process must be able to exit while another, stopped one, holds the lock.
        self._thread = threading.Thread(target=self._run, name="dray-sqlite-writer", daemon=True)
        self._thread.start()

    async def write(self, run: Callable[[Transaction], T]) -> T:
        """Run a job in the next transaction; return when that is on disk."""
        if self._closed:
            raise Unavailable(f"{self._path}: the store was closed")
        if self._jobs.qsize() >= MAX_QUEUED:
            raise Unavailable(f"{self._path}: {MAX_QUEUED} writes wait already")
        job = _Job(run, self._loop.create_future())
        self._jobs.put(job)
        try:
            async with asyncio.timeout(self._timeout_s):
                result: T = await job.future
                return result
        except TimeoutError:
            if job.withdraw():
                raise Unavailable(
                    f"{self._path} stayed locked by another process for {self._timeout_s:g} s"
                ) from None
            raise OutcomeUnknown(f"{self._path}: no answer to a commit for {self._timeout_s:g} s") from None
        except asyncio.CancelledError:
            job.withdraw()
            raise

    async def close(self) -> None:
        """Commit what waits, then end the thread."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
        await asyncio.to_thread(self._thread.join, self._timeout_s)

    @property
    def identity(self) -> str:
        assert self._identity is not None, "known once a write has returned"
        return self._identity

    def _run(self) -> None:
        connection: sqlite3.Connection | None = None
        lock = -1
        closing = False
        while not closing:
            group = self._next_group()
            closing = group[-1] is None
            jobs = [job for job in group if job is not None]
            try:
                if connection is None:
                    lock = os.open(f"{self._path}-lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
                    connection = self._open(lock)
                changed = self._commit(connection, lock, jobs)
            except Exception as error:  # whatever it was, the callers must hear it and the thread go on
                changed = False
                for job in jobs:
                    job.error = translate(error, self._path)
                if connection is not None:
                    connection.close()
                    connection = None
                if lock >= 0:
                    os.close(lock)
                    lock = -1
            self._deliver(jobs)
            if changed:
                with contextlib.suppress(OSError):  # committed all the same; watchers also look by themselves
                    ring_all(self._bells)
        if connection is not None:
            connection.close()
            os.close(lock)

    def _next_group(self) -> list[_Job | None]:
        group: list[_Job | None] = [self._jobs.get()]
        while group[-1] is not None and len(group) < MAX_GROUP:
            try:
                group.append(self._jobs.get_nowait())
            except queue.Empty:
                break
        return group

    def _open(self, lock: int) -> sqlite3.Connection:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            # Only the first time: where the file has gone since, a new one would be an empty log.
            connection = connect(self._path, self._timeout_s, create=self._identity is None)
            try:
                if self._identity is None:
                    self._identity = ensure_schema(connection, self._path)
                    self._file = _file(self._path)
                self._check_file()
                check_identity(connection, self._path, self._identity)
            except BaseException:
                connection.close()
                raise
            return connection
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)

    def _commit(self, connection: sqlite3.Connection, lock: int, jobs: list[_Job]) -> bool:
        """One transaction for all jobs; whether it changed anything. Raises when it failed as a whole."""
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            self._check_file()
            connection.execute("BEGIN IMMEDIATE")
            try:
                transaction = Transaction(connection)
                for job in jobs:
                    if job.take():
                        assert job.run is not None
                        try:
                            job.result = transaction.attempt(job.run)
                        except sqlite3.Error:
                            raise
                        except Exception as error:  # its own caller's affair, not the others'
                            job.error = error
            except BaseException:
                _roll_back(connection)
                raise
            self._commit_transaction(connection)
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)
        return transaction.changed

    def _check_file(self) -> None:
        """What is committed to a file that was deleted or replaced is lost, or a ruin of two."""
        if _file(self._path) != self._file:
            raise CorruptStore(f"{self._path} is no longer the file that was opened; start anew")

    def _commit_transaction(self, connection: sqlite3.Connection) -> None:
        try:
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            _roll_back(connection)
            if error.sqlite_errorname.startswith("SQLITE_IOERR"):
                raise OutcomeUnknown(f"{self._path}: {error} while committing") from error
            raise

    def _deliver(self, jobs: list[_Job]) -> None:
        def settle() -> None:
            for job in jobs:
                if job.future.done():
                    continue
                if job.error is not None:
                    job.future.set_exception(job.error)
                else:
                    job.future.set_result(job.result)

        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(settle)


def _roll_back(connection: sqlite3.Connection) -> None:
    """Some errors (a full disk) have ended the transaction already; after others it cannot be ended."""
    with contextlib.suppress(sqlite3.Error):
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def _file(path: Path) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_dev, found.st_ino


def ensure_schema(connection: sqlite3.Connection, path: Path) -> str:
    """Create the tables in a new file; refuse a file that is not ours or newer than this program.

    Returns the identity of the file.
    """
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if tables == 0 and application == 0:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.executescript(
            f"BEGIN IMMEDIATE; {SCHEMA} INSERT INTO identity VALUES ('{uuid.uuid4().hex}');"
            f" PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {SCHEMA_VERSION}; COMMIT"
        )
    elif application != APPLICATION_ID:
        raise IncompatibleStore(f"{path} is a database of another program; choose another path")
    elif version > SCHEMA_VERSION:
        raise IncompatibleStore(
            f"{path} has schema version {version}, this Dray knows up to {SCHEMA_VERSION}: use a newer Dray"
        )
    (identity,) = connection.execute("SELECT id FROM identity").fetchone()
    assert isinstance(identity, str)
    return identity


def translate(error: Exception, path: Path) -> Exception:
    """What a failure of SQLite or of the file system means to the caller; nothing was committed."""
    name = getattr(error, "sqlite_errorname", "")
    if name == "SQLITE_FULL":
        return StoreFull(f"{path}: {error}; free disk space")
    if name == "SQLITE_NOTADB":
        return IncompatibleStore(f"{path} is not a SQLite database; choose another path")
    if name.startswith("SQLITE_CORRUPT"):
        return CorruptStore(f"{path}: {error}")
    if isinstance(error, (sqlite3.OperationalError, OSError)):
        return Unavailable(f"{path}: {error}")
    return error
