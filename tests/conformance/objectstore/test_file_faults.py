"""What can go wrong with a directory, and the order of the calls that make a put durable."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from dray.errors import (
    ObjectNotFound,
    ObjectStoreDenied,
    ObjectStoreError,
    ObjectStoreFull,
    ObjectStoreMisconfigured,
    ObjectStoreUnavailable,
)
from dray.objectstore import file as file_module
from dray.objectstore.health import Health
from dray.objectstore.opening import open_object_store
from dray.objectstore.store import ObjectStore


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "objects"


@pytest.fixture
async def store(root: Path) -> AsyncIterator[ObjectStore]:
    opened = await open_object_store(f"file://{root}")
    yield opened
    await opened.close()


@pytest.fixture
def public_directory() -> Iterator[Path]:
    """pytest's own directories are closed to other users."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


async def child_says(*arguments: str) -> str:
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.conformance.objectstore.child", *arguments),
        stdout=asyncio.subprocess.PIPE,
    )
    said, _ = await child.communicate()
    assert child.returncode == 0
    return said.decode().strip()


async def test_an_object_is_a_file_of_its_name(store: ObjectStore, root: Path) -> None:
    await store.put("wal/v1/x.wo", b"content")
    assert (root / "wal/v1/x.wo").read_bytes() == b"content"
    assert files(root) == ["wal/v1/x.wo"]
    await store.delete("wal/v1/x.wo")
    assert not (root / "wal").exists()


@pytest.mark.parametrize("if_absent", [False, True])
async def test_a_put_is_synced_before_and_after_it_is_named(
    store: ObjectStore, root: Path, monkeypatch: pytest.MonkeyPatch, if_absent: bool
) -> None:
    """Power cannot be cut here; the order of the system calls is what keeps objects when it is."""
    calls: list[tuple[str, str]] = []

    def spy(name: str, describe: Callable[..., str]) -> None:
        real = getattr(os, name)

        def called(*arguments: object, **more: object) -> object:
            result = real(*arguments, **more)
            calls.append((name, describe(*arguments)))
            return result

        monkeypatch.setattr(os, name, called)

    spy("fsync", lambda file: "staged" if ".dray-" in (at := os.readlink(f"/proc/self/fd/{file}")) else at)
    spy("rename", lambda _, to: str(to))
    spy("link", lambda _, to: str(to))
    spy("mkdir", lambda path, *_: str(path))
    await store.put("a/b/c", b"x", if_absent=if_absent)
    assert calls == [
        ("fsync", "staged"),
        ("mkdir", f"{root}/a"),
        ("mkdir", f"{root}/a/b"),
        ("link" if if_absent else "rename", f"{root}/a/b/c"),
        ("fsync", f"{root}/a/b"),
        ("fsync", f"{root}/a"),
        ("fsync", f"{root}"),
    ]
    calls.clear()
    await store.delete("a/b/c")
    assert calls == [("fsync", f"{root}/a/b")]


async def test_directories_above_are_synced_once_and_again_when_they_are_new(
    store: ObjectStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight levels of WAL paths would cost eight syncs for every object."""
    synced: list[str] = []
    real = os.fsync

    def fsync(file: int) -> None:
        real(file)
        synced.append(os.readlink(f"/proc/self/fd/{file}"))

    async def synced_by_a_put(key: str) -> list[str]:
        synced.clear()
        await store.put(key, b"x")
        return [path for path in synced if ".dray-" not in path]

    monkeypatch.setattr(os, "fsync", fsync)
    everything = [f"{root}/a/b", f"{root}/a", f"{root}"]
    assert await synced_by_a_put("a/b/1") == everything
    assert await synced_by_a_put("a/b/2") == everything[:1]
    shutil.rmtree(root / "a")  # as another process may, when the last object has gone
    (root / "a" / "b").mkdir(parents=True)
    assert await synced_by_a_put("a/b/3") == everything
    assert await synced_by_a_put("a/b/4") == everything[:1]


async def test_few_directories_are_kept_open(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_module, "MAX_OPEN_DIRECTORIES", 3)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(20):
        await store.put(f"d{number}/x", b"x")
    assert len(os.listdir("/proc/self/fd")) <= before + 3
    await store.close()
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize(
    ("number", "error", "health"),
    [
        (errno.ENOSPC, ObjectStoreFull, Health.HEALTHY),
        (errno.EDQUOT, ObjectStoreFull, Health.HEALTHY),
        (errno.EROFS, ObjectStoreDenied, Health.UNAVAILABLE),
        (errno.EIO, ObjectStoreUnavailable, Health.UNAVAILABLE),
    ],
)
async def test_a_put_that_fails_leaves_nothing(
    store: ObjectStore,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    error: type[ObjectStoreError],
    health: Health,
) -> None:
    clock_s = [time.monotonic()]

    def fail(*_: object) -> None:
        clock_s[0] += 1.0
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(store._health, "_clock_s", lambda: clock_s[0])  # type: ignore[attr-defined]
    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", fail)
        for _ in range(3):
            with pytest.raises(error, match=r"^objects file://"):
                await store.put("k", b"x")
    assert store.health is health
    assert files(root) == []
    for _ in range(3):
        await store.put("k", b"x")
    assert store.health is Health.HEALTHY


async def test_a_file_above_what_is_allowed_is_full(root: Path) -> None:
    said = await child_says("limit", f"file://{root}", "100000")
    assert said.startswith("ObjectStoreFull: objects file://")
    assert files(root) == ["fits"]


async def test_a_directory_without_rights_is_denied(public_directory: Path) -> None:
    (public_directory / "closed").mkdir(mode=0o555)
    said = await child_says(
        "nobody", f"file://{public_directory}/closed/objects", f"file://{public_directory}/open"
    )
    assert said.startswith("ObjectStoreDenied: objects file://")
    assert f"{public_directory}/closed" in said


async def test_a_place_below_a_file_is_misconfigured(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ObjectStoreMisconfigured, match="setting objects"):
        await open_object_store(f"file://{tmp_path}/file/objects")


async def test_a_root_that_is_gone_is_not_made_anew(store: ObjectStore, root: Path) -> None:
    """It was unmounted: the disk below it is the wrong place, and "not found" would be a lie."""
    await store.put("k", b"x")
    os.rename(root, root.with_name("elsewhere"))
    for call in (store.put("k", b"x"), store.get("k"), store.head("k"), store.delete("k"), store.list()):
        with pytest.raises(ObjectStoreMisconfigured, match="the directory is gone"):
            await call
    os.mkdir(root)  # the mount point, empty
    for call in (store.put("k", b"x"), store.get("k"), store.head("k"), store.delete("k"), store.list()):
        with pytest.raises(ObjectStoreMisconfigured, match="the directory is gone"):
            await call
    assert files(root) == []


async def test_leftovers_are_invisible_and_swept_later(store: ObjectStore, root: Path) -> None:
    await store.put("k", b"x")
    old, new = root / ".dray-staging/old", root / ".dray-staging/new"
    for leftover in (old, new):
        leftover.write_bytes(b"half")
    os.utime(old, (time.time() - 25 * 3600,) * 2)
    assert [info.key for info in await store.list()] == ["k"]
    again = await open_object_store(f"file://{root}")
    await again.close()
    assert not old.exists()
    assert new.exists()


async def test_files_of_others_are_not_objects(store: ObjectStore, root: Path) -> None:
    await store.put("k", b"x")
    (root / os.fsdecode(b"not-\xff-unicode")).write_text("")
    (root / "to-nowhere").symlink_to("nowhere")
    os.mkfifo(root / "pipe")
    assert [info.key for info in await store.list()] == ["k"]


async def test_reads_that_hang_do_not_hold_up_writes(store: ObjectStore, root: Path) -> None:
    """Consumers catching up must not starve producers. Opening a pipe hangs until somebody writes to it."""
    os.mkfifo(root / "pipe")
    reads = [asyncio.create_task(store.get_range("pipe", 0, 1)) for _ in range(40)]
    await asyncio.sleep(0)  # they come first
    await store.put("k", b"x")
    assert not any(read.done() for read in reads)
    writer = os.open(root / "pipe", os.O_RDWR)
    outcomes = await asyncio.gather(*reads, return_exceptions=True)
    os.close(writer)
    assert all(isinstance(outcome, ObjectNotFound) for outcome in outcomes)
    assert await store.get("k") == b"x"


async def test_directories_are_made_and_removed_under_each_others_puts(
    store: ObjectStore, root: Path
) -> None:
    another = await open_object_store(f"file://{root}")

    async def put_and_delete(client: ObjectStore, name: str) -> None:
        for _ in range(30):
            await client.put(f"deep/er/{name}", b"x", if_absent=True)
            assert await client.get(f"deep/er/{name}") == b"x"
            await client.delete(f"deep/er/{name}")

    clients = [store, another] * 3
    await asyncio.gather(*(put_and_delete(client, str(name)) for name, client in enumerate(clients)))
    await another.close()
    assert os.listdir(root) == [".dray-staging"]
