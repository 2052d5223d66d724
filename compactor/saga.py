"""What a compaction does, step by step: each ends in a compare-and-put of the stream's record.

    CREATED            the claim: range, inputs and files are fixed. Workers write the files
    PARQUET_WRITTEN    they are there, with their statistics
    ICEBERG_COMMITTED  they are in the table (`commit`); left out where there is no catalog
    INDEX_SWAPPED      the index names them instead of what they were made from
    WAL_GC_READY       nothing refers to the inputs any more, and the collector knows of them
    DONE               the stream is free for another task

A crash anywhere leaves a record that says where to go on. Every step may be done twice, also by two
compactors at the same time: files are written with the same bytes, the table says what it has (protocol 21),
a swap that was made is found. Whoever loses the compare-and-put raises `ClaimLost` and leaves the stream
alone.

**Before a swap** (protocol 15) the stream's producer snapshot stands at the end of the range or above, and
everything below it is decided and marked. Then the entry at the end of the range is replaced, at its version,
and only then are the others deleted; references go in a request of their own, after that.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from uuid import UUID

from compactor.task import Part, State, StreamState, Task, encode, state_key
from dray.errors import ClaimLost, CorruptStore, OutcomeUnknown, ReadAgain, Unavailable, VersionConflict
from dray.index.changes import NO_TIMESTAMP, carry_out, replace_run
from dray.index.decided import DecidedIndex
from dray.index.entry import (
    IndexEntry,
    ParquetFile,
    Placed,
    Void,
    WalChunk,
    is_decided,
    place_all,
    sequence_of,
)
from dray.index.fold import Fold
from dray.index.fold import decode as decode_fold
from dray.index.fold import encode as encode_fold
from dray.metadata.store import Delete, Expect, MetadataStore, Put
from dray.producers.folds import snapshot_key
from dray.wal.objects import reference_key

log = logging.getLogger(__name__)

# Each was foiled by a lost answer or by somebody else's write: so many in a row are an outage.
ATTEMPTS = 8
FOLD_PAGE = 256
WAL_GARBAGE = "garbage/wal"
FILE_GARBAGE = "garbage/files"


@dataclass(slots=True)
class Claim:
    """A stream's record, as this compactor put it last."""

    stream_id: int
    domain: int
    version: int | None
    state: StreamState

    @property
    def task(self) -> Task:
        assert self.state.task is not None
        return self.state.task


@dataclass(frozen=True, slots=True)
class FileGarbage:
    """A data file that its stream's index does not name, or soon will not."""

    file_id: UUID
    stream_id: int
    key: str
    iceberg_file: str
    namespace: str
    topic: str
    topic_id: UUID
    end_offset: int
    at_ms: int


class Saga:
    def __init__(
        self,
        store: MetadataStore,
        index: DecidedIndex,
        *,
        incarnation: str,
        file_uri: Callable[[str], str],
        wall_clock_ms: Callable[[], int],
    ) -> None:
        """`file_uri` says what a table calls an object of the store."""
        self._store = store
        self._index = index
        self._incarnation = incarnation
        self._file_uri = file_uri
        self._now_ms = wall_clock_ms

    # --- the record

    async def put(self, claim: Claim, state: StreamState) -> None:
        """Raises `ClaimLost` if another compactor has changed it."""
        claim.version = await self._put(claim, encode(state))
        claim.state = state

    async def advance(self, claim: Claim, state: State, **changes: object) -> None:
        task = replace(claim.task, state=state, **changes)  # type: ignore[arg-type]
        await self.put(claim, replace(claim.state, task=task))
        log.debug("stream %016x: %s", claim.stream_id, state.value)

    async def touch(self, claims: Iterable[Claim]) -> None:
        """Still the owner of all of these, as of now: whoever reads them later cannot have been faster."""
        puts = [self.put(claim, claim.state) for claim in claims]
        for result in await asyncio.gather(*puts, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    async def _put(self, claim: Claim, value: bytes) -> int:
        key = state_key(claim.stream_id)
        may_be_there = False
        for _ in range(ATTEMPTS):
            try:
                expect = Expect.ABSENT if claim.version is None else claim.version
                return await self._store.put(claim.domain, key, value, expect)
            except VersionConflict:
                if not may_be_there:
                    raise ClaimLost(claim.stream_id) from None
            except OutcomeUnknown as error:
                log.info("stream %016x: looking whether its record was put: %s", claim.stream_id, error)
                may_be_there = True
            await self._store.barrier(claim.domain)
            found = await self._store.get(claim.domain, key)
            version = None if found is None else found.version
            if found is not None and version != claim.version:
                if found.value != value:
                    raise ClaimLost(claim.stream_id)
                # Either this put landed, or a successor put the very same: with the same bytes comes the
                # same owner, so it was this one.
                assert version is not None
                return version
        raise Unavailable(f"{key}: no answer {ATTEMPTS} times in a row")

    # --- before the swap

    async def store_snapshot(self, claim: Claim) -> None:
        """Bring the producer snapshot up to the end of the task (protocol 15, 16)."""
        end = claim.task.end_offset
        key = snapshot_key(claim.stream_id)
        failure: Exception | None = None
        for _ in range(ATTEMPTS):
            await self._store.barrier(claim.domain)
            found = await self._store.get(claim.domain, key)
            fold = Fold() if found is None else decode_fold(found.value)
            if fold.end >= end:
                return
            try:
                await self._fold_to(claim.stream_id, fold, end)
                value = await asyncio.to_thread(encode_fold, fold)
                expect = Expect.ABSENT if found is None else found.version
                await self._store.put(claim.domain, key, value, expect)
                return
            except (VersionConflict, OutcomeUnknown, ReadAgain) as error:
                failure = error
        assert failure is not None
        raise failure

    async def _fold_to(self, stream_id: int, fold: Fold, end: int) -> None:
        while fold.end < end:
            page = await self._index.counted(stream_id, fold.end, FOLD_PAGE, fresh=True)
            before = fold.end
            for placed in page:
                if placed.end_offset > end:
                    break
                if not is_decided(placed, self._incarnation) and not self._store.conditions_abort:
                    raise ReadAgain(f"stream {stream_id:016x}: {placed.end_offset} is not decided")
                fold.advance(placed)
            if fold.end == before:
                raise ReadAgain(f"stream {stream_id:016x}: nothing goes on from {before} to {end}")

    # --- the swap

    async def swap(self, claim: Claim) -> None:
        for part in claim.task.parts:
            await self._swap(claim, part)

    async def _swap(self, claim: Claim, part: Part) -> None:
        failure: Exception | None = None
        for _ in range(ATTEMPTS):
            stored = await self._stored(claim, part)
            last = stored[-1]
            new = last.entry
            if not _is_file(last, part.file_id):
                await self._check(claim, part, stored)
                new = self._new_entry(claim, part, last)
            elif len(stored) == 1:
                return
            try:
                await carry_out(self._store, claim.domain, replace_run(stored, new))
                return
            except (VersionConflict, OutcomeUnknown) as error:
                failure = error
        raise failure or AssertionError("it fails or returns")

    async def _stored(self, claim: Claim, part: Part) -> list[Placed]:
        """The entries of the range as they are in the store, those that a crash has left among them."""
        await self._store.barrier(claim.domain)
        found = await self._store.entries(
            claim.domain, sequence_of(claim.stream_id), part.start_offset + 1, len(part.inputs) + 1
        )
        stored = [placed for placed in place_all(found) if placed.end_offset <= part.end_offset]
        if not stored or stored[-1].end_offset != part.end_offset:
            # Whoever took the claim over has finished, and later tasks have changed the range again.
            raise ClaimLost(claim.stream_id)
        return stored

    async def _check(self, claim: Claim, part: Part, stored: Sequence[Placed]) -> None:
        """The entries are those that the file was made from: nothing else may change them meanwhile."""
        inputs = [(each.end_offset, each.records, each.object_id) for each in part.inputs]
        found = [(placed.end_offset, placed.entry.records, _object_of(placed)) for placed in stored]
        if inputs != found:
            # A file of a later task may end where this part does: then the claim is somebody else's.
            await self.put(claim, claim.state)
            raise CorruptStore(
                f"stream {claim.stream_id:016x}: entries from {part.start_offset} to {part.end_offset} have"
                f" changed although task {claim.task.task_id} has the claim on them"
            )

    def _new_entry(self, claim: Claim, part: Part, last: Placed) -> IndexEntry:
        stats = part.stats
        assert stats is not None, "a file that is swapped in was written"
        low, high = stats.min_timestamp_ms, stats.max_timestamp_ms
        return IndexEntry(
            stream_id=claim.stream_id,
            records=part.end_offset - part.start_offset,
            created_at_ms=last.entry.created_at_ms,
            min_timestamp_ms=NO_TIMESTAMP if low is None else low,
            max_timestamp_ms=NO_TIMESTAMP if high is None else high,
            incarnation=self._incarnation,
            where=ParquetFile(part.file_id, part.key, stats.size_bytes, self._file_uri(part.key)),
        )

    # --- after the swap

    async def release(self, claim: Claim) -> None:
        """Remove the references of the inputs, and tell the collector of them."""
        puts: list[Put] = []
        deletes: list[Delete] = []
        for part in claim.task.parts:
            for each in part.inputs:
                if each.iceberg_file:
                    puts.append(self._file_garbage(claim, each.object_id, each.path, each.end_offset))
                else:
                    deletes.append(Delete(reference_key(each.object_id, claim.stream_id)))
                    puts.append(Put(wal_garbage_key(each.object_id), encode_wal_garbage(self._now_ms())))
        await self._write(claim.domain, puts, deletes)

    async def give_up_files(self, claim: Claim) -> None:
        """Tell the collector of files that may have been written and will not be used."""
        parts = claim.task.parts
        await self._write(
            claim.domain,
            [self._file_garbage(claim, part.file_id, part.key, part.end_offset) for part in parts],
            [],
        )

    def _file_garbage(self, claim: Claim, file_id: UUID, key: str, end_offset: int) -> Put:
        task = claim.task
        garbage = FileGarbage(
            file_id,
            claim.stream_id,
            key,
            self._file_uri(key),
            task.namespace,
            task.topic,
            task.topic_id,
            end_offset,
            self._now_ms(),
        )
        return Put(file_garbage_key(file_id), encode_file_garbage(garbage))

    async def _write(self, domain: int, puts: Sequence[Put], deletes: Sequence[Delete]) -> None:
        """All of them, however often: in requests that any store takes."""
        writes: list[Put | Delete] = [*deletes, *puts]
        size = min(self._store.limits.max_operations, 100)
        for at in range(0, len(writes), size):
            some = writes[at : at + size]
            await self._write_some(
                domain,
                [each for each in some if isinstance(each, Put)],
                [each for each in some if isinstance(each, Delete)],
            )

    async def _write_some(self, domain: int, puts: Sequence[Put], deletes: Sequence[Delete]) -> None:
        for _ in range(ATTEMPTS):
            try:
                await self._store.append(domain, (), puts, deletes)
                return
            except OutcomeUnknown as error:
                log.info("domain %d: writing once more what may be written: %s", domain, error)
        raise Unavailable(f"domain {domain}: no answer {ATTEMPTS} times in a row")


def wal_garbage_key(object_id: UUID) -> str:
    return f"{WAL_GARBAGE}/{object_id.hex}"


def file_garbage_key(file_id: UUID) -> str:
    return f"{FILE_GARBAGE}/{file_id.hex}"


def encode_wal_garbage(at_ms: int) -> bytes:
    return json.dumps({"at": at_ms}).encode()


def encode_file_garbage(garbage: FileGarbage) -> bytes:
    return json.dumps(
        {
            "stream": f"{garbage.stream_id:016x}",
            "key": garbage.key,
            "icebergFile": garbage.iceberg_file,
            "namespace": garbage.namespace,
            "topic": garbage.topic,
            "topicId": garbage.topic_id.hex,
            "end": garbage.end_offset,
            "at": garbage.at_ms,
        }
    ).encode()


def decode_file_garbage(key: str, value: bytes) -> FileGarbage:
    try:
        fields = json.loads(value)
        return FileGarbage(
            UUID(hex=key.rpartition("/")[2]),
            int(fields["stream"], 16),
            str(fields["key"]),
            str(fields["icebergFile"]),
            str(fields["namespace"]),
            str(fields["topic"]),
            UUID(hex=fields["topicId"]),
            int(fields["end"]),
            int(fields["at"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptStore(f"{key} names no data file: {error!r}") from None


def decode_wal_garbage(key: str, value: bytes) -> int:
    try:
        return int(json.loads(value)["at"])
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptStore(f"{key} is no garbage record: {error!r}") from None


def _is_file(placed: Placed, file_id: UUID) -> bool:
    where = placed.entry.where
    return isinstance(where, ParquetFile) and where.file_id == file_id


def _object_of(placed: Placed) -> UUID | None:
    where = placed.entry.where
    if isinstance(where, WalChunk | Void):
        return where.object_id
    return where.file_id if isinstance(where, ParquetFile) else None
