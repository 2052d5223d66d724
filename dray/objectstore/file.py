"""Objects as files below one directory, for one host or a shared file system.

A put writes a file of its own in `.dray-staging/`, syncs it, and gives it its name by `rename`, or by
`link`, which fails if the name is taken; then it syncs the directories up to the root, because another
process may have made them and not yet synced them. So a name always stands for a whole, durable object.
What a killed process leaves in `.dray-staging/` is never listed, and is removed a day later by whoever opens
the store; beside the objects, where it could be found only by walking over all of them, it would stay.

Directories are made when needed and removed when a delete leaves them empty, except the root: one that is
gone was unmounted, and must not be made anew on the disk below.

There are no checksums of whole objects here: formats that need them carry their own.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import TypeVar

from dray.errors import (
    InvalidObjectRequest,
    ObjectDamaged,
    ObjectExists,
    ObjectNotFound,
    ObjectStoreDenied,
    ObjectStoreError,
    ObjectStoreFull,
    ObjectStoreMisconfigured,
    ObjectStoreUnavailable,
    ObjectTooShort,
)
from dray.objectstore.health import Health, HealthTracker
from dray.objectstore.store import RESERVED, Body, ObjectInfo, check_key, check_list, check_range, is_key
from dray.objectstore.threads import ThreadPool, stop_if

T = TypeVar("T")

STAGING = f"{RESERVED}staging"
# Enough to keep a disk busy; writes and reads apart, so that neither waits for the other's queue.
WRITE_THREADS = 8
READ_THREADS = 8
# What is written or read between two looks at whether anybody still waits.
STEP_BYTES = 8 * 1024 * 1024
# No put takes this long, whatever hangs.
STALE_S = 24 * 3600
# A directory that a delete removes between its making and its use is made again; each time is a lost race.
PLACE_ATTEMPTS = 100
# WAL objects of a day have one directory per domain; a cluster has 16 domains unless told otherwise.
MAX_OPEN_DIRECTORIES = 64

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class FileObjectStore:
    def __init__(self, root: Path, place: str, timeout_s: float) -> None:
        """`place` is the store's URL, for errors."""
        self._root = root
        self._staging = root / STAGING
        self._place = place
        self._timeout_s = timeout_s
        self._health = HealthTracker()
        self._writes = ThreadPool("dray-file-write", WRITE_THREADS)
        self._reads = ThreadPool("dray-file-read", READ_THREADS)
        self._durable = _DurableDirectories(root)

    @classmethod
    async def open(cls, root: Path, place: str, *, timeout_s: float, opening_s: float) -> FileObjectStore:
        """Makes the directory if it is not there."""
        store = cls(root, place, timeout_s)
        try:
            await store._write(lambda _: store._prepare(), opening_s)
            await store._write(lambda abandoned: store._try_out(abandoned), opening_s)
        except BaseException:
            await store.close()
            raise
        return store

    async def put(self, key: str, body: Body, *, if_absent: bool = False) -> None:
        check_key(key)
        view = memoryview(body).cast("B")
        await self._write(lambda abandoned: self._put(key, view, if_absent, abandoned))

    async def get(self, key: str) -> bytes:
        check_key(key)

        def work(abandoned: threading.Event) -> bytes:
            with self._opened(key) as (file, size):
                return self._bytes_of(key, file, 0, size, abandoned)

        return await self._read(work)

    async def get_range(self, key: str, start: int, end: int, *, clip: bool = False) -> bytes:
        check_key(key)
        check_range(start, end)

        def work(abandoned: threading.Event) -> bytes:
            with self._opened(key) as (file, size):
                stop = min(end, size) if clip else end
                if not start < stop <= size:
                    raise ObjectTooShort(key, start, end, size)
                return self._bytes_of(key, file, start, stop, abandoned)

        return await self._read(work)

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        check_key(key)
        for start, end in ranges:
            check_range(start, end)

        def work(abandoned: threading.Event) -> list[bytes]:
            with self._opened(key) as (file, size):
                for start, end in ranges:
                    if end > size:
                        raise ObjectTooShort(key, start, end, size)
                return [self._bytes_of(key, file, start, end, abandoned) for start, end in ranges]

        return await self._read(work)

    async def head(self, key: str) -> ObjectInfo:
        check_key(key)

        def work(_: threading.Event) -> ObjectInfo:
            try:
                found = os.stat(self._root / key)
            except (FileNotFoundError, NotADirectoryError):
                raise self._absent(key) from None
            if not stat.S_ISREG(found.st_mode):
                raise ObjectNotFound(key)
            return _info(key, found)

        return await self._read(work)

    async def delete(self, key: str) -> None:
        failed = await self.delete_many([key])
        if failed:
            raise failed[key]

    async def delete_many(self, keys: Sequence[str]) -> dict[str, ObjectStoreError]:
        for key in keys:
            check_key(key)
        return await self._write(lambda abandoned: self._delete(keys, abandoned))

    async def list(self, prefix: str = "", *, after: str = "", limit: int = 1000) -> list[ObjectInfo]:
        check_list(prefix, after, limit)

        def work(abandoned: threading.Event) -> list[ObjectInfo]:
            if not self._staging.is_dir():
                raise self._gone()
            found = self._walk(self._root, "", prefix.encode(), after.encode(), abandoned)
            return list(islice(found, limit))

        return await self._read(work)

    async def check(self) -> None:
        await self._write(self._try_out)

    @property
    def health(self) -> Health:
        return self._health.state

    async def close(self) -> None:
        await self._writes.close()
        await self._reads.close()
        self._durable.close()

    async def _write(self, work: Callable[[threading.Event], T], timeout_s: float | None = None) -> T:
        return await self._run(self._writes, work, timeout_s or self._timeout_s)

    async def _read(self, work: Callable[[threading.Event], T]) -> T:
        return await self._run(self._reads, work, self._timeout_s)

    async def _run(self, pool: ThreadPool, work: Callable[[threading.Event], T], timeout_s: float) -> T:
        def translated(abandoned: threading.Event) -> T:
            try:
                return work(abandoned)
            except OSError as error:
                raise self._translate(error) from error

        began_s = time.monotonic()
        try:
            result = await pool.run(translated, timeout_s)
        except TimeoutError:
            self._health.failed(began_s)
            raise ObjectStoreUnavailable(
                f"objects {self._place}: the file system did not answer within {timeout_s:g} s"
            ) from None
        except (ObjectStoreUnavailable, ObjectStoreDenied, ObjectStoreMisconfigured):
            self._health.failed(began_s)
            raise
        except ObjectStoreError:
            self._health.succeeded()
            raise
        self._health.succeeded()
        return result

    def _prepare(self) -> None:
        new = [path for path in (self._root, *self._root.parents) if not path.exists()]
        self._staging.mkdir(parents=True, exist_ok=True)
        for path in new:
            _sync_directory(path.parent)
        for entry in os.scandir(self._staging):
            with suppress(FileNotFoundError):  # others sweep too
                if entry.stat().st_mtime < time.time() - STALE_S:
                    os.unlink(entry.path)

    def _try_out(self, abandoned: threading.Event) -> None:
        self._stage(memoryview(b"dray"), abandoned).unlink()

    def _put(self, key: str, body: memoryview, if_absent: bool, abandoned: threading.Event) -> None:
        path = self._root / key
        staged = self._stage(body, abandoned)
        try:
            self._name(key, staged, path, if_absent, abandoned)
        finally:
            staged.unlink(missing_ok=True)  # `rename` took it away already
        with suppress(FileNotFoundError):  # a delete of the object was quick
            self._durable.sync(path.parent)

    def _stage(self, body: memoryview, abandoned: threading.Event) -> Path:
        """A durable file without a name that anybody knows."""
        staged = self._staging / secrets.token_hex(16)
        try:
            file = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except (FileNotFoundError, NotADirectoryError):
            raise self._gone() from None
        try:
            try:
                while body:
                    stop_if(abandoned)
                    body = body[os.write(file, body[:STEP_BYTES]) :]
                os.fsync(file)
            finally:
                os.close(file)
        except BaseException:
            staged.unlink(missing_ok=True)
            raise
        return staged

    def _name(self, key: str, staged: Path, path: Path, if_absent: bool, abandoned: threading.Event) -> None:
        for _ in range(PLACE_ATTEMPTS):
            stop_if(abandoned)
            try:
                if if_absent:
                    os.link(staged, path)
                else:
                    os.rename(staged, path)
                return
            except FileExistsError:
                if not path.is_dir():
                    raise ObjectExists(key) from None
                raise _nested(key) from None
            except FileNotFoundError:
                self._make_directories(path.parent)
            except (NotADirectoryError, IsADirectoryError):
                raise _nested(key) from None
        raise ObjectStoreUnavailable(
            f"objects {self._place}: the directory of {key} is removed again and again"
        )

    def _make_directories(self, directory: Path) -> None:
        path = self._root
        if not self._staging.is_dir():
            raise self._gone()
        for segment in directory.relative_to(self._root).parts:
            path /= segment
            with suppress(FileExistsError, FileNotFoundError):  # others make and remove them too
                path.mkdir()

    def _delete(self, keys: Sequence[str], abandoned: threading.Event) -> dict[str, ObjectStoreError]:
        failed: dict[str, ObjectStoreError] = {}
        directories: dict[Path, list[str]] = {}
        for key in keys:
            stop_if(abandoned)
            path = self._root / key
            try:
                path.unlink()
                directories.setdefault(path.parent, []).append(key)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                if not self._staging.is_dir():
                    failed[key] = self._gone()
            except OSError as error:
                failed[key] = self._translate(error)
        for directory, those in directories.items():
            try:
                with suppress(FileNotFoundError):
                    _sync_directory(directory)
            except OSError as error:
                failed.update(dict.fromkeys(those, self._translate(error)))
            self._prune(directory)
        return failed

    def _prune(self, directory: Path) -> None:
        while directory != self._root:
            try:
                directory.rmdir()
            except OSError:  # in use, or removed by another: both are as well
                return
            directory = directory.parent

    @contextmanager
    def _opened(self, key: str) -> Iterator[tuple[int, int]]:
        """An open file and its size."""
        try:
            file = os.open(self._root / key, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            raise self._absent(key) from None
        try:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode):
                raise ObjectNotFound(key)
            yield file, found.st_size
        finally:
            os.close(file)

    def _bytes_of(self, key: str, file: int, start: int, end: int, abandoned: threading.Event) -> bytes:
        pieces = []
        at = start
        while at < end:
            stop_if(abandoned)
            piece = os.pread(file, min(end - at, STEP_BYTES), at)
            if not piece:
                raise ObjectDamaged(f"{key}: the file was cut off at byte {at} while it was read")
            pieces.append(piece)
            at += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _walk(
        self, directory: Path, above: str, prefix: bytes, after: bytes, abandoned: threading.Event
    ) -> Iterator[ObjectInfo]:
        stop_if(abandoned)
        try:
            with os.scandir(directory) as entries:
                # "a-b" comes before "a/b": directories are sorted with the slash that follows them in keys.
                found = [(e.name + "/" if e.is_dir(follow_symlinks=False) else e.name, e) for e in entries]
        except (FileNotFoundError, NotADirectoryError):
            return
        for name, entry in sorted(found, key=lambda pair: os.fsencode(pair[0])):
            key = above + name
            if not is_key(key.removesuffix("/")):
                continue
            encoded = key.encode()
            if name.endswith("/"):
                within = encoded.startswith(prefix) or prefix.startswith(encoded)
                if within and (after < encoded or after.startswith(encoded)):
                    yield from self._walk(directory / entry.name, key, prefix, after, abandoned)
            elif encoded.startswith(prefix) and encoded > after:
                with suppress(FileNotFoundError):
                    found_file = entry.stat()
                    if stat.S_ISREG(found_file.st_mode):
                        yield _info(key, found_file)

    def _absent(self, key: str) -> ObjectStoreError:
        return ObjectNotFound(key) if self._staging.is_dir() else self._gone()

    def _gone(self) -> ObjectStoreError:
        return ObjectStoreMisconfigured(
            f"objects {self._place}: the directory is gone; mount it, or correct the setting and restart"
        )

    def _translate(self, error: OSError) -> ObjectStoreError:
        says = f"objects {self._place}: {error.strerror or error}"
        match error.errno:
            case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
                return ObjectStoreFull(f"{says}; free space and try again")
            case errno.EACCES | errno.EPERM | errno.EROFS:
                return ObjectStoreDenied(f"{says}; make {error.filename or 'it'} writable for this process")
            case errno.ENOTDIR | errno.ENOENT | errno.ENAMETOOLONG | errno.ELOOP | errno.EXDEV:
                return ObjectStoreMisconfigured(
                    f"{says}: {error.filename}; name a directory on one file system with the setting objects"
                )
            case _:
                return ObjectStoreUnavailable(says)


class _DurableDirectories:
    """Makes the names in a directory survive the loss of power, and the directory itself.

    A directory is as durable as all those above it, so the first time all of them are synced. It is kept
    open from then on: as long as its path leads to the same inode, which cannot be given to another one
    meanwhile, nobody has removed it or any above it, and syncing it alone is enough.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._opened: OrderedDict[Path, int] = OrderedDict()  # the one used last is last

    def sync(self, directory: Path) -> None:
        """Raises `FileNotFoundError` where it has been removed."""
        known = self._known(directory)
        if known is not None:
            try:
                os.fsync(known)
            finally:
                os.close(known)
            return
        opened = os.open(directory, _DIRECTORY)
        try:
            for above in (directory, *directory.parents):
                _sync_directory(above)
                if above == self._root:
                    break
            self._keep(directory, os.dup(opened))
        finally:
            os.close(opened)

    def close(self) -> None:
        with self._lock:
            while self._opened:
                os.close(self._opened.popitem()[1])

    def _known(self, directory: Path) -> int | None:
        """A descriptor of its own for the caller, as another thread may close the one kept."""
        with self._lock:
            kept = self._opened.get(directory)
            if kept is None:
                return None
            if not os.path.samestat(os.fstat(kept), os.stat(directory)):
                os.close(self._opened.pop(directory))
                return None
            self._opened.move_to_end(directory)
            return os.dup(kept)

    def _keep(self, directory: Path, opened: int) -> None:
        with self._lock:
            replaced = self._opened.pop(directory, None)
            self._opened[directory] = opened
            dropped = [] if replaced is None else [replaced]
            if len(self._opened) > MAX_OPEN_DIRECTORIES:
                dropped.append(self._opened.popitem(last=False)[1])
            for each in dropped:
                os.close(each)


def _nested(key: str) -> InvalidObjectRequest:
    return InvalidObjectRequest(f"key {key!r}: an object cannot lie below another")


def _info(key: str, found: os.stat_result) -> ObjectInfo:
    return ObjectInfo(key, found.st_size, found.st_mtime_ns // 1_000_000)


def _sync_directory(directory: Path) -> None:
    opened = os.open(directory, _DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
