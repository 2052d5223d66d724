"""`drayd admin fsck`: whether what the three stores say of each other is so. Reads only.

A finding is a problem (an acknowledged record cannot be read, or is in the wrong place) or a note (a range
that nobody can decode, a task that is under way, bytes that nobody needs). What changes while it is looked at
may be told as it was, so `run_twice` looks again where something was found, and believes what it finds twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from compactor.catalog import TopicTables
from compactor.commit import current_files
from compactor.saga import FILE_GARBAGE, WAL_GARBAGE, decode_file_garbage
from compactor.task import DIRECTORY, StreamState, decode, stream_of_key
from dray.errors import DrayError, ObjectNotFound, TableGone
from dray.index.entry import (
    ParquetFile,
    Placed,
    Void,
    WalChunk,
    is_decided,
    live,
    place_all,
    sequence_of,
    stream_domain,
)
from dray.metadata.cluster import Cluster
from dray.metadata.keys import CLUSTER_DOMAIN
from dray.metadata.pages import records_of
from dray.metadata.store import MetadataStore
from dray.objectstore.store import ObjectStore
from dray.topics.record import TOPICS, TopicRecord, decode_topic
from dray.wal.format import object_id_of
from dray.wal.objects import OBJECTS, STAGING, State, decode_record, reference_key

PAGE = 500
# Objects that are asked for side by side.
PARALLEL = 16


class Finding(NamedTuple):
    is_problem: bool
    where: str
    what: str


@dataclass(slots=True)
class Report:
    """What was looked at, and what was found."""

    partitions: int = 0
    entries: int = 0
    records: int = 0
    wal_objects: int = 0
    data_files: int = 0
    findings: list[Finding] = field(default_factory=list)

    @property
    def problems(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.is_problem]


class Fsck:
    """`progress` is told how many partitions were looked at, of how many."""

    def __init__(
        self,
        cluster: Cluster,
        store: MetadataStore,
        objects: ObjectStore,
        tables: TopicTables | None,
        namespace: str,
        progress: Callable[[int, int], None] = lambda done, of: None,
    ) -> None:
        self._cluster = cluster
        self._store = store
        self._objects = objects
        self._tables = tables
        self._namespace = namespace
        self._progress = progress
        self._report = Report()
        self._sizes: dict[str, int | None] = {}  # of objects that were looked at; None where there is none
        self._named: set[str] = set()  # objects that the index names, or that something else will see to
        self._staged: set[str] = set()  # ids of objects that are on their way
        self._turns = asyncio.Semaphore(PARALLEL)

    async def run(self) -> Report:
        keys: dict[int, set[str]] = {}
        for domain in range(self._cluster.num_domains):
            keys[domain] = await self._look_at_objects(domain)
        states = await self._states()
        topics = [
            decode_topic(found.key, found.value)
            async for found in records_of(self._store, CLUSTER_DOMAIN, TOPICS)
        ]
        visible = [topic for topic in topics if topic.visible]
        total, done = sum(len(topic.streams) for topic in visible), 0
        for topic in visible:
            in_table = await self._table_files(topic)
            for partition, stream_id in enumerate(topic.streams):
                domain = stream_domain(stream_id, self._cluster.num_domains)
                state = states.get(stream_id, StreamState())
                where = f"{topic.name}-{partition}"
                await self._look_at_stream(where, stream_id, domain, state, keys[domain], in_table)
                done += 1
                self._progress(done, total)
        await self._look_for_strays()
        return self._report

    def _problem(self, where: str, what: str) -> None:
        self._report.findings.append(Finding(True, where, what))

    def _note(self, where: str, what: str) -> None:
        self._report.findings.append(Finding(False, where, what))

    # --- what the metadata store knows of objects

    async def _look_at_objects(self, domain: int) -> set[str]:
        """The keys of records of committed objects, and of references."""
        keys: set[str] = set()
        async for found in records_of(self._store, domain, OBJECTS):
            name = found.key.rpartition("/")[2]
            if "-" not in name:
                record = decode_record(found.key, found.value)
                self._named.add(record.path)
                if record.state is State.FENCED:
                    continue
                self._report.wal_objects += 1
            keys.add(found.key)
        self._staged |= {
            found.key.rpartition("/")[2] async for found in records_of(self._store, domain, STAGING)
        }
        waiting = [found.key async for found in records_of(self._store, domain, WAL_GARBAGE)]
        files = [
            decode_file_garbage(found.key, found.value)
            async for found in records_of(self._store, domain, FILE_GARBAGE)
        ]
        self._named |= {file.key for file in files}
        if waiting or files:
            what = f"{len(waiting)} WAL objects and {len(files)} data files wait for the collector"
            self._note(f"domain {domain}", what)
        return keys

    async def _states(self) -> dict[int, StreamState]:
        states = {}
        for domain in range(self._cluster.num_domains):
            async for found in records_of(self._store, domain, DIRECTORY):
                try:
                    states[stream_of_key(found.key)] = decode(found.key, found.value)
                except DrayError as error:
                    self._problem(found.key, str(error))
        return states

    # --- a stream

    async def _look_at_stream(
        self,
        where: str,
        stream_id: int,
        domain: int,
        state: StreamState,
        keys: set[str],
        in_table: set[str] | None,
    ) -> None:
        self._report.partitions += 1
        entries = [placed async for placed in self._entries(domain, stream_id)]
        kept = live(entries)
        at = 0
        for placed in kept:
            if placed.start_offset != at:
                self._problem(where, f"offsets {at} to {placed.start_offset} are nowhere")
            at = placed.end_offset
        if len(kept) < len(entries):
            self._note(where, f"{len(entries) - len(kept)} entries are superseded and not removed yet")
        self._report.entries += len(kept)
        self._report.records += sum(placed.entry.records for placed in kept)
        task = state.unfinished
        if task is not None:
            self._note(
                where, f"offsets {task.start_offset} to {task.end_offset}: a task is {task.state.value}"
            )
            self._named |= {part.key for part in task.parts}
        for bad in state.undecodable:
            start = bad.end_offset - bad.records
            self._note(where, f"offsets {start} to {bad.end_offset} stay in the WAL: {bad.problem}")
        checks = [self._look_at_entry(where, stream_id, placed, keys, in_table) for placed in kept]
        await asyncio.gather(*checks)

    async def _look_at_entry(
        self, where: str, stream_id: int, placed: Placed, keys: set[str], in_table: set[str] | None
    ) -> None:
        place = f"offsets {placed.start_offset} to {placed.end_offset}"
        match placed.entry.where:
            case WalChunk() as chunk:
                if not is_decided(placed, self._cluster.incarnation) and not self._store.conditions_abort:
                    self._note(where, f"{place}: it is not decided yet which batches count")
                if f"{OBJECTS}/{chunk.object_id.hex}" not in keys:
                    self._problem(where, f"{place}: object {chunk.path} has no record that it is committed")
                elif reference_key(chunk.object_id, stream_id) not in keys:
                    self._problem(where, f"{place}: nothing keeps object {chunk.path} from being collected")
                await self._look_at_bytes(
                    where, place, chunk.path, chunk.chunk_offset + chunk.chunk_length, False
                )
            case ParquetFile() as file:
                self._report.data_files += 1
                self._named.add(file.path)
                await self._look_at_bytes(where, place, file.path, file.size_bytes, True)
                if in_table is not None and file.iceberg_file not in in_table:
                    self._problem(where, f"{place}: {file.iceberg_file} is not in the table")
            case Void():
                self._note(where, f"{place} have no records: the append that took them was fenced")
            case _:
                pass

    async def _look_at_bytes(self, where: str, place: str, path: str, size: int, exactly: bool) -> None:
        if path not in self._sizes:
            async with self._turns:
                try:
                    self._sizes[path] = (await self._objects.head(path)).size
                except ObjectNotFound:
                    self._sizes[path] = None
        found = self._sizes[path]
        if found is None:
            self._problem(where, f"{place}: object {path} is gone")
        elif found < size or (exactly and found != size):
            self._problem(where, f"{place}: object {path} has {found} bytes, not {size}")

    # --- tables and strays

    async def _table_files(self, topic: TopicRecord) -> set[str] | None:
        """The files of the topic's table now; None where there is no table to ask."""
        if self._tables is None:
            return None
        try:
            table = await asyncio.to_thread(
                self._tables.find_table, self._namespace, topic.name, topic.topic_id
            )
            return await asyncio.to_thread(current_files, table)
        except TableGone:
            return set()
        except DrayError as error:
            self._problem(f"table {self._namespace}.{topic.name}", str(error))
            return None

    async def _look_for_strays(self) -> None:
        """Bytes that nothing names: no harm, and worth knowing of."""
        await self._look_for_strays_in("wal/", self._is_wal_stray)
        await self._look_for_strays_in("warehouse/", self._is_data_stray)

    async def _look_for_strays_in(self, prefix: str, is_stray: Callable[[str], bool]) -> None:
        sizes: list[int] = []
        after = ""
        while page := await self._objects.list(prefix, after=after, limit=PAGE):
            sizes += [found.size for found in page if is_stray(found.key)]
            after = page[-1].key
        if sizes:
            self._note(prefix, f"{len(sizes)} objects of {sum(sizes)} bytes belong to nothing")

    def _is_wal_stray(self, key: str) -> bool:
        object_id = object_id_of(key)
        is_staged = object_id is not None and object_id.hex in self._staged
        return key not in self._named and not is_staged

    def _is_data_stray(self, key: str) -> bool:
        return key.endswith(".parquet") and key not in self._named

    async def _entries(self, domain: int, stream_id: int) -> AsyncIterator[Placed]:
        at = 1
        while page := place_all(await self._store.entries(domain, sequence_of(stream_id), at, PAGE)):
            for placed in page:
                yield placed
            at = page[-1].end_offset + 1


async def run_twice(make: Callable[[], Fsck]) -> Report:
    first = await make().run()
    if not first.problems:
        return first
    second = await make().run()
    found = set(first.problems)
    second.findings = [each for each in second.findings if not each.is_problem or each in found]
    return second


def as_table(report: Report) -> str:
    counts = (
        f"{report.partitions:,} partitions, {report.entries:,} entries, {report.records:,} offsets,"
        f" {report.wal_objects:,} WAL objects, {report.data_files:,} data files"
    )
    return "\n".join([*map(_line, report.findings), counts])


def as_json(report: Report) -> dict[str, object]:
    findings: Sequence[Finding] = report.findings
    return {
        "partitions": report.partitions,
        "entries": report.entries,
        "records": report.records,
        "walObjects": report.wal_objects,
        "dataFiles": report.data_files,
        "problems": [{"where": each.where, "what": each.what} for each in findings if each.is_problem],
        "notes": [{"where": each.where, "what": each.what} for each in findings if not each.is_problem],
    }


def _line(finding: Finding) -> str:
    return f"{'PROBLEM' if finding.is_problem else 'note':<8} {finding.where}: {finding.what}"
