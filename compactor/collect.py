"""Collects what compaction has left: WAL objects that nothing refers to, and data files that nothing names.

Whoever removes the last reference of an object cannot know that it was the last. So everybody who removes
one leaves a garbage record, and the collector looks: one scan that shows the object's record and no reference
beside it is the decision (protocol 14), and the record goes last. A reference that is left means that
somebody will remove it later, and leave a garbage record again.

A data file is garbage when its stream's index does not name it, no unfinished task makes it or reads it, and
no snapshot of its table has it. Snapshots expire by settings (`commit`); until then the file stays for
whoever travels in time.

`grace_ms` is for readers who looked a place up a moment ago, and for executors that nobody waits for any
more: they get to their end in peace. Nothing else rests on it: who finds an object gone looks it up again.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from uuid import UUID

from compactor.saga import (
    FILE_GARBAGE,
    WAL_GARBAGE,
    FileGarbage,
    decode_file_garbage,
    decode_wal_garbage,
)
from compactor.task import Task, decode, state_key
from dray.errors import DrayError, VersionConflict
from dray.index.entry import ParquetFile, place, sequence_of
from dray.metadata.pages import records_of
from dray.metadata.store import MetadataStore, Record
from dray.objectstore.store import ObjectStore
from dray.wal.objects import OBJECTS, State, decode_record

log = logging.getLogger(__name__)

# A writer that does not know what became of its append fences its own object within seconds (ADR 5). Until
# then its record is a witness and has to stay.
MIN_RECORD_AGE_MS = 60_000

# Of files of one topic that its index does not name, those that some snapshot of a table may have.
InTables = Callable[[str, str, UUID, Collection[str]], Awaitable[Collection[str]]]


@dataclass(slots=True)
class Collected:
    """What one round did. What failed is logged, left as it is, and tried again by the next round."""

    objects: int = 0
    object_bytes: int = 0
    files: int = 0
    failed: int = 0


class GarbageCollector:
    def __init__(
        self,
        store: MetadataStore,
        objects: ObjectStore,
        in_tables: InTables,
        *,
        grace_ms: int,
        min_record_age_ms: int = MIN_RECORD_AGE_MS,
    ) -> None:
        self._store = store
        self._objects = objects
        self._in_tables = in_tables
        self._grace_ms = grace_ms
        self._min_record_age_ms = min_record_age_ms

    async def collect_objects(self, domain: int, now_ms: int) -> Collected:
        done = Collected()
        async for found in records_of(self._store, domain, WAL_GARBAGE):
            await self._guarded(self._collect_object(domain, found, now_ms, done), found.key, done)
        return done

    async def collect_files(self, domain: int, now_ms: int) -> Collected:
        """Reads all manifests of tables that have garbage, so for now and then."""
        done = Collected()
        unnamed: dict[tuple[str, str, UUID], list[tuple[Record, FileGarbage]]] = defaultdict(list)
        async for found in records_of(self._store, domain, FILE_GARBAGE):
            await self._guarded(self._look_at_file(domain, found, now_ms, unnamed), found.key, done)
        for table, files in unnamed.items():
            await self._guarded(
                self._delete_files(domain, table, files, done), f"{table[0]}.{table[1]}", done
            )
        return done

    async def _guarded(self, work: Awaitable[None], what: str, done: Collected) -> None:
        """One that cannot be dealt with must not keep the others."""
        try:
            await work
        except VersionConflict:
            pass  # it was written again meanwhile: another time
        except DrayError as error:
            log.warning("collecting %s: %s", what, error)
            done.failed += 1

    async def _collect_object(self, domain: int, found: Record, now_ms: int, done: Collected) -> None:
        if now_ms - decode_wal_garbage(found.key, found.value) < self._grace_ms:
            return
        name = found.key.rpartition("/")[2]
        await self._store.barrier(domain)
        # References are `<id>-…`, so they lie between the record and `<id>.`: one scan, one moment.
        beside = await self._store.scan(domain, OBJECTS, start=name, end=f"{name}.", limit=2)
        if len(beside) == 1 and beside[0].key == f"{OBJECTS}/{name}":
            record = decode_record(beside[0].key, beside[0].value)
            if record.state is State.COMMITTED:
                if now_ms - record.at_ms < self._min_record_age_ms:
                    return
                await self._objects.delete(record.path)
                await self._store.delete(domain, beside[0].key)
                done.objects += 1
                done.object_bytes += record.size_bytes
        await self._store.delete(domain, found.key, found.version)

    async def _look_at_file(
        self,
        domain: int,
        found: Record,
        now_ms: int,
        unnamed: dict[tuple[str, str, UUID], list[tuple[Record, FileGarbage]]],
    ) -> None:
        garbage = decode_file_garbage(found.key, found.value)
        if now_ms - garbage.at_ms < self._grace_ms:
            return
        await self._store.barrier(domain)
        task = await self._task(domain, garbage.stream_id)
        if task is not None and garbage.file_id in _files_of(task):
            return
        # The index as it was when that task was over, or later: an older one may not name its files yet.
        await self._store.barrier(domain)
        if await self._is_named(domain, garbage):
            await self._store.delete(domain, found.key, found.version)
        else:
            unnamed[garbage.namespace, garbage.topic, garbage.topic_id].append((found, garbage))

    async def _delete_files(
        self,
        domain: int,
        table: tuple[str, str, UUID],
        files: Sequence[tuple[Record, FileGarbage]],
        done: Collected,
    ) -> None:
        needed = await self._in_tables(*table, [garbage.iceberg_file for _, garbage in files])
        for found, garbage in files:
            if garbage.iceberg_file not in needed:
                await self._objects.delete(garbage.key)
                done.files += 1
                await self._store.delete(domain, found.key, found.version)

    async def _task(self, domain: int, stream_id: int) -> Task | None:
        key = state_key(stream_id)
        record = await self._store.get(domain, key)
        return None if record is None else decode(key, record.value).unfinished

    async def _is_named(self, domain: int, garbage: FileGarbage) -> bool:
        entry = await self._store.ceiling(domain, sequence_of(garbage.stream_id), garbage.end_offset)
        where = None if entry is None else place(entry).entry.where
        return isinstance(where, ParquetFile) and where.file_id == garbage.file_id


def _files_of(task: Task) -> set[UUID]:
    inputs = {each.object_id for part in task.parts for each in part.inputs}
    return inputs | {part.file_id for part in task.parts}
