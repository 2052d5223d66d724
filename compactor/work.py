"""One part of a task, on a worker: WAL chunks, or small Parquet files, become one Parquet file.

A worker knows the object store and nothing else. It decides nothing: the same part gives the same bytes at
the same key, whoever writes it and however often, so retries and speculation are harmless.

**What cannot be decoded** is told, entry by entry, and then nothing is written: the driver leaves those
entries as they are and plans the rest anew. An object that is gone, too short or damaged counts as well: the
entry's range stays as readable, or not, as it was. A store that is away is another matter: it is `problem`,
and the part is tried again.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from compactor.task import Input, Kind, Part, Undecodable
from dray.columns.decode import decode_batches
from dray.columns.parquet import FileStats, write_parquet
from dray.columns.schema import SCHEMA
from dray.errors import DamagedWal, DrayError, InvalidBatch, ObjectDamaged, ObjectNotFound, ObjectTooShort
from dray.objectstore.opening import open_object_store
from dray.objectstore.store import ObjectStore
from dray.wal.format import PREFIX_BYTES

# Read while those before are decoded. Enough batches to be decoded side by side, and little to hold.
GROUP_BYTES = 16 * 2**20
# Chunks of one group that are read at once.
MAX_READS = 8
# What batches of one call may become: a group that compresses well is decoded entry by entry instead.
MAX_DECODED_BYTES = 512 * 2**20

# Of one entry, told once and for all by its bytes.
_HOPELESS = (InvalidBatch, DamagedWal, ObjectNotFound, ObjectTooShort, ObjectDamaged)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Work:
    """A part, and what a worker has to know of its task. Pickled on its way."""

    objects: str  # the URL of the store
    kind: Kind
    partition: int
    log_start: int
    part: Part


@dataclass(frozen=True, slots=True)
class Done:
    """One of the three is there."""

    key: str
    stats: FileStats | None = None
    undecodable: tuple[Undecodable, ...] = ()
    problem: str | None = None


class _Undecodable(Exception):
    def __init__(self, found: Sequence[Undecodable]) -> None:
        self.found = tuple(found)


def carry_out(work: Work) -> Done:
    part = work.part
    try:
        objects = _open(work.objects)
        sink = pa.BufferOutputStream()
        tables = _of_files(objects, work) if work.kind is Kind.REWRITE else _of_chunks(objects, work)
        stats = write_parquet(tables, sink, partition=work.partition)
        objects.call(objects.store.put(part.key, memoryview(sink.getvalue()))).result()
    except _Undecodable as error:
        return Done(part.key, undecodable=error.found)
    except DrayError as error:
        return Done(part.key, problem=f"{type(error).__name__}: {error}")
    return Done(part.key, stats=stats)


class _Objects:
    """An object store on a loop of its own, for code that waits."""

    def __init__(self, url: str) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="objects", daemon=True).start()
        self.store: ObjectStore = self.call(open_object_store(url)).result()

    def call(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)


@lru_cache(maxsize=4)
def _open(url: str) -> _Objects:
    """One for all parts that a worker process is given."""
    return _Objects(url)


def _of_chunks(objects: _Objects, work: Work) -> Iterator[pa.Table]:
    groups = list(_groups(work.part.inputs))
    bad: list[Undecodable] = []
    reading = objects.call(_read_all(objects.store, groups[0]))
    for number, group in enumerate(groups):
        chunks = reading.result()
        if number + 1 < len(groups):
            reading = objects.call(_read_all(objects.store, groups[number + 1]))
        for table in _decode(group, chunks, work.partition, bad):
            if not bad:
                yield _from(table, work.log_start)
    if bad:
        raise _Undecodable(bad)


def _decode(
    group: Sequence[Input], chunks: Sequence[bytes | DrayError], partition: int, bad: list[Undecodable]
) -> Iterator[pa.Table]:
    """All at once, as that is fastest; one by one where something is wrong, to find out with which."""
    try:
        yield _decoded(group, chunks, partition)
    except _HOPELESS:
        for each, chunk in zip(group, chunks, strict=True):
            try:
                yield _decoded([each], [chunk], partition)
            except _HOPELESS as error:
                bad.append(Undecodable(each.end_offset, each.records, f"{type(error).__name__}: {error}"))


def _decoded(group: Sequence[Input], chunks: Sequence[bytes | DrayError], partition: int) -> pa.Table:
    batches: list[tuple[memoryview, int]] = []
    for each, chunk in zip(group, chunks, strict=True):
        if isinstance(chunk, DrayError):
            raise chunk
        batches += served_batches(each, chunk)
    return decode_batches(batches, partition, max_bytes=MAX_DECODED_BYTES)


def served_batches(each: Input, chunk: bytes) -> list[tuple[memoryview, int]]:
    """The batches of a chunk that are for readers, each with its offset. Raises `DamagedWal`."""
    view = memoryview(chunk)
    served: list[tuple[memoryview, int]] = []
    offset, at, number = each.start_offset, 0, 0
    while at < len(view):
        size = int.from_bytes(view[at : at + PREFIX_BYTES])
        at += PREFIX_BYTES
        batch = view[at : at + size]
        if len(batch) < size or size < 61:
            raise DamagedWal(f"{each.path}: batch {number} does not fit into its chunk", each.offset + at)
        if number not in each.left_out:
            if number not in each.void:
                served.append((batch, offset))
            offset += int.from_bytes(batch[57:61])
        at += size
        number += 1
    if offset != each.end_offset:
        raise DamagedWal(
            f"{each.path}: {offset - each.start_offset} records, and the index has {each.records}",
            each.offset,
        )
    return served


async def _read_all(store: ObjectStore, group: Sequence[Input]) -> list[bytes | DrayError]:
    """What is hopeless is returned, as it says something of one entry only."""
    turns = asyncio.Semaphore(MAX_READS)

    async def read(each: Input) -> bytes | DrayError:
        if not each.length:
            return b""
        async with turns:
            try:
                return await store.get_range(each.path, each.offset, each.offset + each.length)
            except _HOPELESS as error:
                return error

    return list(await asyncio.gather(*map(read, group)))


def _groups(inputs: Sequence[Input]) -> Iterator[list[Input]]:
    group: list[Input] = []
    size = 0
    for each in inputs:
        if not each.length:
            continue  # a void entry has offsets only
        if group and size + each.length > GROUP_BYTES:
            yield group
            group, size = [], 0
        group.append(each)
        size += each.length
    yield group


def _of_files(objects: _Objects, work: Work) -> Iterator[pa.Table]:
    for each in work.part.inputs:
        try:
            body = objects.call(objects.store.get(each.path)).result()
            file = pq.ParquetFile(pa.BufferReader(body))
            for number in range(file.num_row_groups):
                table = file.read_row_group(number)
                yield _from(table.select(SCHEMA.names).cast(SCHEMA), work.log_start)
        except (*_HOPELESS, pa.ArrowException, OSError, ValueError, KeyError) as error:
            why = f"{type(error).__name__}: {error}"
            raise _Undecodable([Undecodable(each.end_offset, each.records, why)]) from error


def _from(table: pa.Table, log_start: int) -> pa.Table:
    """Without what was deleted."""
    if not table.num_rows or table["offset"][0].as_py() >= log_start:
        return table
    offsets = table["offset"].to_numpy()
    return table.slice(int(offsets.searchsorted(log_start)))
