"""What is particular to the embedded store: its file, its lock, its group commit, its bell."""

from __future__ import annotations

import asyncio
import fcntl
import os
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dray.errors import CorruptStore, IncompatibleStore, StoreFull, Unavailable
from dray.metadata import sqlite, sqlite_writer
from dray.metadata.bell import Bell, ring_all
from dray.metadata.lease import Lease
from dray.metadata.sqlite import SqliteStore
from dray.metadata.store import Changes, EntryChange, Expect, Gap, KeyChange, NewEntry, Put
from tests.conformance.backends import spawn

D = 0


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    opened = await SqliteStore.open(tmp_path / "deep" / "er" / "metadata.db", timeout_s=2)
    yield opened
    await opened.close()


@contextmanager
def held_lock(path: Path) -> Iterator[None]:
    """Another process in the middle of its commit, or stopped there."""
    fd = os.open(f"{path}-lock", os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(fd)


async def test_waiting_appends_share_one_commit(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    commits = 0
    commit = sqlite_writer.SqliteWriter._commit_transaction

    def counted(self: sqlite_writer.SqliteWriter, connection: sqlite3.Connection) -> None:
        nonlocal commits
        commits += 1
        commit(self, connection)

    monkeypatch.setattr(sqlite_writer.SqliteWriter, "_commit_transaction", counted)
    with held_lock(store._path):
        appends = [asyncio.create_task(store.append(D, [NewEntry("s", 1, 1, b"")])) for _ in range(101)]
        ticks = 0
        while ticks < 20:  # the event loop runs on while the writer waits for the lock
            await asyncio.sleep(0.005)
            ticks += 1
        assert not any(task.done() for task in appends)
    ends = [result.entries[0].position.end_records for result in await asyncio.gather(*appends)]
    assert sorted(ends) == list(range(1, 102))
    # The first was alone when the writer took it up; the others came while that waited for the lock.
    assert commits <= 2


async def test_a_refused_append_does_not_disturb_its_group(store: SqliteStore) -> None:
    await store.put(D, "k", b"")
    with held_lock(store._path):
        first = asyncio.create_task(store.append(D, [NewEntry("s", 1, 1, b"")]))
        refused = asyncio.create_task(
            store.append(D, [NewEntry("s", 5, 5, b"")], [Put("k", b"", Expect.ABSENT)])
        )
        last = asyncio.create_task(store.append(D, [NewEntry("s", 1, 1, b"")]))
        await asyncio.sleep(0.01)
    outcomes = await asyncio.gather(first, refused, last, return_exceptions=True)
    assert [type(o).__name__ for o in outcomes] == ["AppendResult", "VersionConflict", "AppendResult"]
    tail = await store.tail(D, "s")
    assert tail is not None
    assert tail.position == (2, 2)


async def test_a_lock_held_too_long_is_unavailable_and_the_write_never_happens(store: SqliteStore) -> None:
    with held_lock(store._path):
        with pytest.raises(Unavailable, match="locked by another process"):
            await store.put(D, "late", b"")
        assert await store.get(D, "late") is None  # readers do not wait for writers
    await store.put(D, "next", b"")  # behind this, the withdrawn one would have been committed
    assert await store.get(D, "late") is None


async def test_another_program_holding_the_database_is_unavailable(store: SqliteStore) -> None:
    other = sqlite3.connect(store._path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(Unavailable):
        await store.put(D, "k", b"")
    other.execute("ROLLBACK")
    other.close()
    await store.put(D, "next", b"")
    assert await store.get(D, "k") is None


async def test_a_full_disk_is_said_and_nothing_is_half_written(store: SqliteStore) -> None:
    """SQLite's own page limit gives the same error at the same places as a full disk."""
    await store._writer.write(
        lambda transaction: transaction.execute("PRAGMA max_page_count = 60").fetchall()
    )
    written = 0
    with pytest.raises(StoreFull, match="free disk space"):
        for written in range(1000):
            await store.append(D, [NewEntry("s", 1, 1, bytes(4096))], [Put(f"w/{written}", b"")])
    entries = await store.entries(D, "s", 0, 1000)
    assert len(entries) == written == len(await store.scan(D, "w", limit=1000))
    result = await store.append(D, [NewEntry("s", 1, 1, b"")])
    assert result.entries[0].position.end_records == written + 1


async def test_a_newer_schema_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "metadata.db"
    store = await SqliteStore.open(path)
    await store.put(D, "k", b"v")
    await store.close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 2")
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()
    before = path.read_bytes()
    with pytest.raises(IncompatibleStore, match="schema version 2"):
        await SqliteStore.open(path)
    assert path.read_bytes() == before


async def test_files_of_others_are_refused_and_left_alone(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("not a database " * 100)
    with pytest.raises(IncompatibleStore, match="not a SQLite database"):
        await SqliteStore.open(text)
    assert text.read_text() == "not a database " * 100
    other = tmp_path / "other.db"
    with sqlite3.connect(other) as db:
        db.execute("CREATE TABLE t (x)")
    db.close()
    before = other.read_bytes()
    with pytest.raises(IncompatibleStore, match="another program"):
        await SqliteStore.open(other)
    assert other.read_bytes() == before


async def test_a_path_that_cannot_be_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match="cannot create"):
        await SqliteStore.open(tmp_path / "file" / "metadata.db")
    with pytest.raises(Unavailable):
        await SqliteStore.open(tmp_path)  # a directory


async def test_a_closed_store_refuses_writes_at_once(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path / "metadata.db")
    await store.close()
    await store.close()
    with pytest.raises(Unavailable, match="closed"):
        await store.put(D, "k", b"")


async def test_a_watcher_behind_the_kept_log_gets_a_gap(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_writer, "KEPT_REVISIONS", 5)
    monkeypatch.setattr(sqlite_writer, "TRIM_EVERY", 1)
    async with store.watch(D) as watch:
        # One transaction, so that the watcher cannot read in between.
        with held_lock(store._path):
            puts = [asyncio.create_task(store.put(D, f"k{i}", b"")) for i in range(20)]
            await asyncio.sleep(0.01)
        await asyncio.gather(*puts)
        events: list[Changes | Gap] = []
        async with asyncio.timeout(5):
            while not (events and isinstance(events[-1], Changes) and _names(events[-1], "k19")):
                events.append(await anext(watch))
    assert Gap() in events


async def test_a_watch_that_begins_while_the_log_is_read_misses_nothing(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That read leaves out what nobody watched when it was begun, and may bring what came after."""
    begun, go_on = asyncio.Event(), asyncio.Event()
    read = store._read

    async def held(work: Any) -> Any:
        begun.set()
        await go_on.wait()
        return await read(work)

    monkeypatch.setattr(store, "_read", held)
    await store.put(D + 1, "elsewhere", b"")
    await begun.wait()
    async with store.watch(D) as watch, asyncio.timeout(10):
        version = await store.put(D, "k", b"")
        go_on.set()
        assert await anext(watch) in (Gap(), Changes((KeyChange("k", version),)))


def _names(event: Changes, key: str) -> bool:
    return any(isinstance(change, KeyChange) and change.key == key for change in event.changes)


async def test_a_writer_that_died_before_ringing_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metadata.db"
    reader, writer = await SqliteStore.open(path), await SqliteStore.open(path)
    monkeypatch.setattr(sqlite_writer, "ring_all", lambda _: None)
    async with reader.watch(D) as watch, asyncio.timeout(10):
        version = await writer.put(D, "unrung", b"")
        assert await anext(watch) == Changes((KeyChange("unrung", version),))
    await reader.close()
    await writer.close()


async def test_a_watch_is_woken_by_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "LOOK_EVERY_S", 3600)  # by the bell, or not at all
    store = await SqliteStore.open(tmp_path / "metadata.db")
    async with store.watch(D) as watch:
        child = await spawn("append", f"sqlite:///{tmp_path}/metadata.db", str(D), "s", "child")
        ends: list[int] = []
        async with asyncio.timeout(20):
            while len(ends) < 20:
                event = await anext(watch)
                assert isinstance(event, Changes)
                ends += [c.position.end_records for c in event.changes if isinstance(c, EntryChange)]
        child.kill()
        await child.communicate()
    assert ends == sorted(set(ends))
    await store.close()


def test_bells_of_the_dead_are_taken_away(tmp_path: Path) -> None:
    alive, dead, unready = Bell(tmp_path), Bell(tmp_path), tmp_path / ".unready"
    os.close(dead.fd)  # as the kernel does for a killed process
    os.mkfifo(unready)
    for _ in range(70_000):  # more than a FIFO holds: ringing never blocks
        ring_all(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {alive._path.name, ".unready"}
    alive.drain()
    alive.close()


async def test_a_file_that_vanished_is_not_made_anew(store: SqliteStore) -> None:
    """A volume that was unmounted, a directory that was moved: an empty log would give offsets out again."""
    await store.append(D, [NewEntry("s", 30, 30, b"")])
    for file in [f"{store._path}{suffix}" for suffix in ("", "-wal", "-shm")]:
        os.unlink(file)
    for _ in range(3):  # also after the writer has dropped its connection and tries again
        with pytest.raises((CorruptStore, Unavailable)):
            await store.append(D, [NewEntry("s", 1, 1, b"")])
    assert not store._path.exists()


async def test_a_file_that_was_replaced_is_not_written_to(store: SqliteStore, tmp_path: Path) -> None:
    await store.put(D, "k", b"mine")
    other = await SqliteStore.open(tmp_path / "other.db")
    await other.put(D, "k", b"theirs")
    await other.close()
    (tmp_path / "other.db").replace(store._path)
    for _ in range(2):
        with pytest.raises(CorruptStore):
            await store.put(D, "k", b"mine again")


async def test_the_path_stays_when_the_working_directory_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = await SqliteStore.open(Path("metadata.db"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    await store.put(D, "k", b"v")
    assert await store.get(D, "k") is not None
    await store.close()
    assert list((tmp_path / "elsewhere").iterdir()) == []


async def test_a_job_that_breaks_breaks_alone(store: SqliteStore) -> None:
    def broken(transaction: sqlite_writer.Transaction) -> None:
        transaction.execute("INSERT INTO records VALUES (0, '', 'half', x'00', 1, NULL)")
        transaction.log(D, "[]")
        raise ZeroDivisionError

    async with store.watch(D) as watch:
        with held_lock(store._path):
            jobs = [
                asyncio.create_task(store.put(D, "before", b"")),
                asyncio.create_task(store._writer.write(broken)),
                asyncio.create_task(store.put(D, "after", b"")),
            ]
            await asyncio.sleep(0.01)
        before, failed, after = await asyncio.gather(*jobs, return_exceptions=True)
        assert isinstance(failed, ZeroDivisionError)
        assert {record.key for record in await store.scan(D, "", limit=9)} == {"before", "after"}
        events = [await anext(watch), await anext(watch)]
    assert events == [Changes((KeyChange("before", before),)), Changes((KeyChange("after", after),))]  # type: ignore[arg-type]


async def test_a_locked_store_does_not_hoard_what_was_withdrawn(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_writer, "MAX_QUEUED", 5)
    with held_lock(store._path):
        waiting = [asyncio.create_task(store.put(D, "first", b""))]  # the writer takes it and waits
        await asyncio.sleep(0.05)
        waiting += [asyncio.create_task(store.put(D, f"k{i}", bytes(1000))) for i in range(5)]
        await asyncio.sleep(0.01)
        with pytest.raises(Unavailable, match="wait already"):
            await store.put(D, "one more", b"")
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    monkeypatch.undo()
    await store._writer.write(lambda _: None)  # behind all that was queued
    assert await store.scan(D, "", limit=10) == []


async def test_the_log_is_bounded_by_bytes_too(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_writer, "KEPT_BYTES", 1_000)
    monkeypatch.setattr(sqlite_writer, "TRIM_EVERY", 1)
    versions = [await store.put(D, "k" * 100, b"") for _ in range(50)]
    assert versions == sorted(set(versions))
    kept = await store._read(lambda db: db.execute("SELECT count(*) FROM log").fetchone())
    assert 5 < kept[0] < 12


async def test_a_session_whose_renewal_breaks_is_lost() -> None:
    async def broken() -> bool:
        raise ZeroDivisionError

    lease = Lease(2_000, broken, asyncio.get_running_loop().time())
    async with asyncio.timeout(5):
        await lease.wait_lost()
    assert lease.lost
    await lease.stop()
