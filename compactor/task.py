"""What is stored of the compaction of a stream: its task, and the ranges that nobody can decode. Pure.

One JSON record per stream, `compaction/<stream>` in the stream's own domain, changed by compare-and-put only.
An unfinished task in it is the claim on the stream: as long as it is there, nothing else changes the
structure of that index (design §3). It names range, entries, objects and files, so that whoever finds it can
finish it without guessing (protocol 16).

A task has parts. Each becomes one Parquet file and one index entry; all of them are one commit of the table
and one claim. What a task does, state by state, is in `saga`.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

from dray.columns.parquet import FileStats
from dray.errors import CorruptStore, IncompatibleStore

FORMAT = 1
DIRECTORY = "compaction"
# Of one stream that are remembered. Each is a range that nobody can ever decode; a producer that goes on
# sending such batches has its stream left as it is from there on.
MAX_UNDECODABLE = 256


class State(enum.Enum):
    CREATED = "CREATED"
    PARQUET_WRITTEN = "PARQUET_WRITTEN"
    ICEBERG_COMMITTED = "ICEBERG_COMMITTED"
    INDEX_SWAPPED = "INDEX_SWAPPED"
    WAL_GC_READY = "WAL_GC_READY"
    DONE = "DONE"


class Kind(enum.Enum):
    COMPACT = "compact"  # WAL chunks become Parquet
    REWRITE = "rewrite"  # small Parquet files become a larger one


@dataclass(frozen=True, slots=True)
class Input:
    """An index entry of the range, and where its bytes are.

    `object_id` is that of a chunk's or void entry's WAL object, or of a Parquet file. A void entry has
    offsets and no bytes: `length` 0. Batches are told by their number in the chunk.
    """

    end_offset: int
    end_bytes: int
    records: int
    object_id: UUID
    path: str
    offset: int
    length: int
    left_out: tuple[int, ...] = ()  # they have no offsets
    void: tuple[int, ...] = ()  # they have offsets, and are not for readers
    iceberg_file: str = ""

    @property
    def start_offset(self) -> int:
        return self.end_offset - self.records


@dataclass(frozen=True, slots=True)
class Part:
    """A range without a hole that becomes one file. `stats` are there once it is written."""

    inputs: tuple[Input, ...]
    file_id: UUID
    key: str
    stats: FileStats | None = None

    @property
    def start_offset(self) -> int:
        return self.inputs[0].start_offset

    @property
    def end_offset(self) -> int:
        return self.inputs[-1].end_offset

    @property
    def input_bytes(self) -> int:
        return sum(each.length for each in self.inputs)


@dataclass(frozen=True, slots=True)
class Task:
    task_id: UUID
    kind: Kind
    state: State
    owner: str  # the compactor that works at it, as it is registered
    namespace: str
    topic: str
    topic_id: UUID
    partition: int
    follows: int  # where the last file before these ends, in the index; 0 if there is none
    log_start: int  # what was deleted before it is not in the table
    created_at_ms: int
    parts: tuple[Part, ...]
    snapshot_id: int | None = None  # of the commit, once there is one

    @property
    def start_offset(self) -> int:
        return self.parts[0].start_offset

    @property
    def end_offset(self) -> int:
        return self.parts[-1].end_offset


@dataclass(frozen=True, slots=True)
class Undecodable:
    """An entry that stays in the WAL for good, and why."""

    end_offset: int
    records: int
    problem: str


@dataclass(frozen=True, slots=True)
class StreamState:
    """What the record of a stream says."""

    task: Task | None = None
    undecodable: tuple[Undecodable, ...] = ()

    @property
    def unfinished(self) -> Task | None:
        return None if self.task is None or self.task.state is State.DONE else self.task


def state_key(stream_id: int) -> str:
    return f"{DIRECTORY}/{stream_id:016x}"


def stream_of_key(key: str) -> int:
    return int(key.rpartition("/")[2], 16)


def file_key(table: str, partition: int, start: int, end: int, file_id: UUID) -> str:
    """Where a data file lies in the object store; `table` is the table's own place, `table_key`."""
    return f"{table}/data/partition={partition}/{start:020d}-{end:020d}-{file_id.hex}.parquet"


def with_stats(task: Task, stats: Sequence[FileStats]) -> Task:
    parts = tuple(replace(part, stats=each) for part, each in zip(task.parts, stats, strict=True))
    return replace(task, parts=parts, state=State.PARQUET_WRITTEN)


def encode(state: StreamState) -> bytes:
    fields = {
        "format": FORMAT,
        "task": None if state.task is None else _task_to_json(state.task),
        "undecodable": [[each.end_offset, each.records, each.problem] for each in state.undecodable],
    }
    return json.dumps(fields, separators=(",", ":")).encode()


def decode(key: str, value: bytes) -> StreamState:
    """Raises `IncompatibleStore` for a newer format, `CorruptStore` for what nobody can have written."""
    try:
        fields = json.loads(value)
        version = fields["format"]
        if type(version) is int and version > FORMAT:
            raise IncompatibleStore(f"{key} has format {version}, and this Dray knows those up to {FORMAT}")
        if type(version) is not int or version != FORMAT:
            raise ValueError(f"format {version!r}")
        task = None if fields["task"] is None else _task_from_json(fields["task"])
        undecodable = tuple(Undecodable(int(e), int(n), str(why)) for e, n, why in fields["undecodable"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptStore(f"{key} is no record of a compaction: {error!r}") from None
    return StreamState(task, undecodable)


def _task_to_json(task: Task) -> dict[str, Any]:
    return {
        "id": task.task_id.hex,
        "kind": task.kind.value,
        "state": task.state.value,
        "owner": task.owner,
        "namespace": task.namespace,
        "topic": task.topic,
        "topicId": task.topic_id.hex,
        "partition": task.partition,
        "follows": task.follows,
        "logStart": task.log_start,
        "createdAt": task.created_at_ms,
        "snapshot": task.snapshot_id,
        "parts": [_part_to_json(part) for part in task.parts],
    }


def _part_to_json(part: Part) -> dict[str, Any]:
    return {
        "file": part.file_id.hex,
        "key": part.key,
        "stats": None if part.stats is None else part.stats.to_json(),
        "inputs": [_input_to_json(each) for each in part.inputs],
    }


def _input_to_json(each: Input) -> list[Any]:
    """A list, as there may be thousands; what is rare is left out at the end."""
    fields: list[Any] = [
        each.end_offset,
        each.end_bytes,
        each.records,
        each.object_id.hex,
        each.path,
        each.offset,
        each.length,
        list(each.left_out),
        list(each.void),
        each.iceberg_file,
    ]
    while not fields[-1] and len(fields) > 7:
        fields.pop()
    return fields


def _task_from_json(fields: Mapping[str, Any]) -> Task:
    task = Task(
        task_id=UUID(hex=fields["id"]),
        kind=Kind(fields["kind"]),
        state=State(fields["state"]),
        owner=str(fields["owner"]),
        namespace=str(fields["namespace"]),
        topic=str(fields["topic"]),
        topic_id=UUID(hex=fields["topicId"]),
        partition=int(fields["partition"]),
        follows=int(fields["follows"]),
        log_start=int(fields["logStart"]),
        created_at_ms=int(fields["createdAt"]),
        snapshot_id=None if fields["snapshot"] is None else int(fields["snapshot"]),
        parts=tuple(_part_from_json(part) for part in fields["parts"]),
    )
    if not task.parts and task.state is not State.DONE:  # what is done need not be remembered in full
        raise ValueError("a task without parts")
    if task.state not in (State.CREATED, State.DONE) and any(part.stats is None for part in task.parts):
        raise ValueError("a file that was written and has no statistics")
    return task


def _part_from_json(fields: Mapping[str, Any]) -> Part:
    inputs = tuple(_input_from_json(each) for each in fields["inputs"])
    if not inputs:
        raise ValueError("a part without inputs")
    stats = None if fields["stats"] is None else FileStats.from_json(fields["stats"])
    return Part(inputs, UUID(hex=fields["file"]), str(fields["key"]), stats)


def _input_from_json(fields: Sequence[Any]) -> Input:
    end_offset, end_bytes, records, object_id, path, offset, length, *rest = fields
    rare: list[Any] = [(), (), ""]
    left_out, void, iceberg_file = rest + rare[len(rest) :]
    return Input(
        int(end_offset),
        int(end_bytes),
        int(records),
        UUID(hex=object_id),
        str(path),
        int(offset),
        int(length),
        tuple(map(int, left_out)),
        tuple(map(int, void)),
        str(iceberg_file),
    )
