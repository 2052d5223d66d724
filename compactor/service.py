"""A compactor: finds what is to be done, has it done, and goes on with what others have left half done.

One round looks at every stream once:

1. what is unfinished is taken on: this compactor's own, and that of compactors that are gone;
2. what is due is planned (`plan`) and claimed: the record of the stream says so from now on (`task`);
3. workers write the files of all claims, as one job (`work`, `spark`);
4. the files of a topic are committed to its table at once (`commit`);
5. each stream is swapped and let go (`saga`); small files are planned to be rewritten; garbage is collected.

What fails stays as it is and is tried by the next round: a stream waits for its own trouble only. A catalog
that is away stops nothing but step 4 and what follows it. Any number of compactors may run: they share the
streams by who is first, and do each other's work when one is gone. A registration, `compactors/<id>`, says
who is there; it only saves work, as every step is a compare-and-put.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import NamedTuple, Protocol, TypeVar
from uuid import UUID, uuid4

from compactor import commit
from compactor.catalog import TopicTable, TopicTables, table_key
from compactor.collect import Collected, GarbageCollector
from compactor.plan import MAX_TASK_ENTRIES, PlanLimits, has_rows, input_of, plan_parts, plan_rewrite
from compactor.saga import Claim, Saga
from compactor.task import (
    DIRECTORY,
    MAX_UNDECODABLE,
    Kind,
    Part,
    State,
    StreamState,
    Task,
    decode,
    file_key,
    stream_of_key,
    with_stats,
)
from compactor.work import Done, Work
from dray.columns.parquet import FileStats, stats_of_file
from dray.errors import (
    CatalogError,
    ClaimLost,
    CorruptStore,
    DrayError,
    IncompatibleStore,
    InputsGone,
    SessionLost,
    TableBehind,
    TableGone,
    TableOfAnotherTopic,
)
from dray.index.cache import IndexCache
from dray.index.decided import DecidedIndex
from dray.index.entry import ParquetFile, Placed, WalChunk, stream_domain
from dray.index.witness import Witness
from dray.metadata.cluster import Cluster
from dray.metadata.keys import CLUSTER_DOMAIN
from dray.metadata.pages import records_of
from dray.metadata.store import Expect, MetadataStore, Record, Session
from dray.objectstore.store import ObjectStore
from dray.topics.record import TOPICS, TopicRecord, decode_topic, deleted_key

log = logging.getLogger(__name__)

COMPACTORS = "compactors"
# Of records of tasks, which may be large.
PAGE = 200
# Streams that are looked at, or finished, side by side: a few round trips each.
PARALLEL = 32
# Every file of a commit is named in the summary of its snapshot.
RESTORE_FILES = 500
# Expiry reads every manifest of a table: now and then is enough.
MAINTAIN_EVERY_S = 600.0

T = TypeVar("T")
R = TypeVar("R")


class Runner(Protocol):
    """Carries out parts. Blocks: it is called in a thread."""

    def run(self, works: Sequence[Work], on_done: Callable[[Done], None] | None = None) -> list[Done]: ...


@dataclass(frozen=True, slots=True)
class Options:
    objects_url: str
    namespace: str
    partition_by: str
    limits: PlanLimits
    grace_ms: int
    keep_snapshots: int
    snapshot_age_ms: int
    session_ttl_ms: int = 10_000
    min_record_age_ms: int = 60_000


class Stream(NamedTuple):
    stream_id: int
    topic: TopicRecord
    partition: int


@dataclass(slots=True)
class Counts:
    """What was done since this compactor began, and what waits."""

    tasks: int = 0
    files: int = 0
    records: int = 0
    wal_bytes: int = 0
    file_bytes: int = 0
    rewritten_files: int = 0
    undecodable: int = 0
    failures: int = 0
    waiting_tasks: int = 0  # unfinished after the last round
    waiting_for_catalog: int = 0  # of these, those that are written and not in their table
    backlog_bytes: int = 0  # of WAL that was not planned in the last round
    undecided: int = 0  # streams that had entries in the last round of which nobody had decided what counts
    collected: Collected = field(default_factory=Collected)

    def told(self) -> dict[str, int]:
        """For a line of the log."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.type == "int"}


@dataclass(slots=True)
class _Known:
    """What is remembered of a stream between rounds. Nothing rests on it."""

    cursor: int = 0  # everything before it is in files, or stays as it is
    follows: int = 0  # where the last file before the cursor ends
    files: int = 0  # before the cursor
    has_grown: bool = True  # since small files were looked for


class Watcher(Protocol):
    """Told of what happens, for whoever shows it; `written` in the thread that runs the work."""

    def planned(self, streams: int, sizes: dict[str, int]) -> None:
        """What workers are about to write: of how many streams, and input bytes by the key of the file."""
        ...

    def written(self, done: Done) -> None: ...


class Compactor:
    """`start`, then `run` or single `round`s, then `stop`."""

    def __init__(
        self,
        cluster: Cluster,
        store: MetadataStore,
        objects: ObjectStore,
        open_tables: Callable[[], TopicTables] | None,
        runner: Runner,
        options: Options,
        *,
        file_uri: Callable[[str], str],
        wall_clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        watcher: Watcher | None = None,
    ) -> None:
        """`open_tables` is called when tables are needed, and again if it failed; None: no catalog."""
        self.owner = uuid4().hex
        self.counts = Counts()
        self._cluster = cluster
        self._store = store
        self._open_tables = open_tables
        self._opened: TopicTables | None = None
        self._runner = runner
        self._options = options
        self._now_ms = wall_clock_ms
        self._watcher = watcher
        self._index = DecidedIndex(
            store,
            self._domain_of,
            IndexCache(),  # nobody follows it: every read is fresh
            Witness(store, self._domain_of),
            incarnation=cluster.incarnation,
        )
        self._saga = Saga(
            store,
            self._index,
            incarnation=cluster.incarnation,
            file_uri=file_uri,
            wall_clock_ms=wall_clock_ms,
        )
        self._collector = GarbageCollector(
            store,
            objects,
            self._in_tables,
            grace_ms=options.grace_ms,
            min_record_age_ms=options.min_record_age_ms,
        )
        self._objects = objects
        self._file_uri = file_uri
        self._known: dict[int, _Known] = defaultdict(_Known)
        self._maintained_at = -MAINTAIN_EVERY_S
        self._session: Session | None = None
        self._leaving = AsyncExitStack()

    async def start(self) -> None:
        await self._register()

    async def stop(self) -> None:
        """What is unfinished is taken on by the next compactor, at once."""
        await self._leaving.aclose()
        await self._index.close()
        if self._opened is not None:
            await asyncio.to_thread(self._opened.close)

    async def run(self, interval_s: float) -> None:
        """Round after round, until cancelled."""
        while True:
            try:
                await self.round()
            except DrayError as error:
                self.counts.failures += 1
                log.warning("compaction: this round failed, and the next begins anew: %s", error)
            await asyncio.sleep(interval_s * (0.75 + random.random() / 2))

    async def ends(self) -> dict[int, int]:
        """Where streams end now."""
        streams = await self._streams()
        ends = await self._each(streams, lambda stream: self._index.tail(stream.stream_id, fresh=True))
        pairs = zip(streams, ends, strict=True)
        return {stream.stream_id: end.end_records for stream, end in pairs if end is not None}

    async def round(self, *, everything: bool = False, until: Mapping[int, int] | None = None) -> bool:
        """Look at every stream once; with `everything` however young its records are.

        With `until` a stream is done with that has come so far: what is written meanwhile can wait. Whether
        there may be more to do at once: something was done, and nothing of it failed.
        """
        await self._register()
        claims = await self._claims()
        streams = await self._streams()  # after the claims: a topic that is not there then was deleted
        mine = await self._take_on(claims)
        failures, done = self.counts.failures, self.counts.tasks + self.counts.undecodable
        busy = {claim.stream_id for claim in mine}
        busy |= {claim.stream_id for claim in claims.values() if claim.state.unfinished is not None}
        self.counts.backlog_bytes = self.counts.undecided = 0
        free = [stream for stream in streams if stream.stream_id not in busy]
        planned = await self._each(free, lambda stream: self._plan(stream, claims, everything, until))
        mine += [claim for claim in planned if claim is not None]
        await self._write(mine)
        await self._commit(mine, {stream.topic.topic_id for stream in streams})
        finished = await self._each(mine, self._finish)
        self.counts.waiting_tasks = len(mine) - sum(1 for each in finished if each)
        self.counts.waiting_for_catalog = sum(_is_written(claim.state) for claim in mine)
        await self._maintain(streams)
        await self._collect()
        if mine:
            log.info("a round of %d tasks", len(mine), extra=self.counts.told())
        return self.counts.tasks + self.counts.undecodable > done and self.counts.failures == failures

    # --- who is there

    async def _register(self) -> None:
        if self._session is not None and not self._session.lost:
            return
        await self._leaving.aclose()
        self._session = session = await self._leaving.enter_async_context(
            self._store.session(self._options.session_ttl_ms)
        )
        with contextlib.suppress(SessionLost):
            await session.put_ephemeral(CLUSTER_DOMAIN, f"{COMPACTORS}/{self.owner}", b"{}", Expect.ANY)

    async def _owners(self) -> set[str]:
        records = await self._scan(CLUSTER_DOMAIN, COMPACTORS)
        return {found.key.rpartition("/")[2] for found in records} | {self.owner}

    async def others(self) -> bool:
        """Whether another compactor is registered that has a claim on some stream."""
        owners = await self._owners() - {self.owner}
        claims = await self._claims()
        tasks = [claim.state.unfinished for claim in claims.values()]
        return any(task is not None and task.owner in owners for task in tasks)

    # --- what there is

    async def _streams(self) -> list[Stream]:
        streams = []
        for found in await self._scan(CLUSTER_DOMAIN, TOPICS):
            topic = decode_topic(found.key, found.value)
            if topic.visible:
                streams += [Stream(each, topic, number) for number, each in enumerate(topic.streams)]
        return streams

    async def _claims(self) -> dict[int, Claim]:
        claims: dict[int, Claim] = {}
        for domain in range(self._cluster.num_domains):
            for found in await self._scan(domain, DIRECTORY):
                stream_id = stream_of_key(found.key)
                try:
                    state = decode(found.key, found.value)
                    claims[stream_id] = Claim(stream_id, domain, found.version, state)
                except (CorruptStore, IncompatibleStore) as error:
                    log.error("stream %016x is left alone: %s", stream_id, error)
                    self.counts.failures += 1
        return claims

    async def _scan(self, domain: int, directory: str) -> list[Record]:
        await self._store.barrier(domain)
        return [found async for found in records_of(self._store, domain, directory, page_records=PAGE)]

    async def _take_on(self, claims: Mapping[int, Claim]) -> list[Claim]:
        """Unfinished tasks of this compactor, and of those that are gone."""
        unfinished = [claim for claim in claims.values() if claim.state.unfinished is not None]
        if not unfinished:
            return []
        owners = await self._owners()
        mine: list[Claim] = []
        for claim in unfinished:
            task = claim.task
            if task.owner == self.owner:
                mine.append(claim)
            elif task.owner not in owners:
                with contextlib.suppress(ClaimLost):
                    await self._saga.put(claim, replace(claim.state, task=replace(task, owner=self.owner)))
                    log.info(
                        "%s-%d: going on with a task that is %s",
                        task.topic,
                        task.partition,
                        task.state.value,
                    )
                    mine.append(claim)
        return mine

    # --- planning

    async def _plan(
        self,
        stream: Stream,
        claims: Mapping[int, Claim],
        everything: bool,
        until: Mapping[int, int] | None,
    ) -> Claim | None:
        stream_id = stream.stream_id
        claim = claims.get(stream_id) or Claim(stream_id, self._domain_of(stream_id), None, StreamState())
        undecodable = {each.end_offset for each in claim.state.undecodable}
        if len(undecodable) >= MAX_UNDECODABLE:
            return None  # said when the last of them was found
        known = self._known[stream_id]
        log_start = await self._index.log_start(stream_id, fresh=True)
        known.cursor = max(known.cursor, log_start)
        entries = await self._uncompacted(stream_id, known, undecodable, log_start)
        await self._have_decided(stream_id, entries[-1].end_offset if entries else known.cursor)
        if until is not None and known.cursor >= until.get(stream_id, 0):
            entries = []
        limits = self._options.limits
        if everything:
            limits = replace(limits, max_age_ms=-(2**62))
        now_ms = self._now_ms()
        runs = plan_parts(entries, undecodable=undecodable, log_start=log_start, limits=limits, now_ms=now_ms)
        taken = {placed.end_offset for run in runs for placed in run}
        self.counts.backlog_bytes += sum(
            placed.entry.where.chunk_length
            for placed in entries
            if isinstance(placed.entry.where, WalChunk) and placed.end_offset not in taken
        )
        kind = Kind.COMPACT
        if not runs and known.has_grown and known.files > limits.max_files:
            known.has_grown = False
            files = [placed async for placed in self._entries(stream_id, log_start, known.cursor)]
            runs, kind = plan_rewrite(files, limits, undecodable), Kind.REWRITE
        if not runs:
            return None
        return await self._claim(stream, claim, kind, runs, log_start)

    async def _uncompacted(
        self, stream_id: int, known: _Known, undecodable: Collection[int], log_start: int
    ) -> list[Placed]:
        """What may be compacted, from the cursor on; the cursor moves over what comes before that.

        Void entries wait for what comes behind them, unless that is a file already or stays as it is.
        """
        while True:
            page = await self._index.range(stream_id, known.cursor, MAX_TASK_ENTRIES, fresh=True)
            first = 0
            for number, placed in enumerate(page):
                is_file = isinstance(placed.entry.where, ParquetFile)
                if is_file or placed.end_offset in undecodable:
                    first = number + 1
                    known.cursor = placed.end_offset
                    known.follows = placed.end_offset if is_file else known.follows
                    known.files += is_file
                    known.has_grown |= is_file
                elif has_rows(placed, log_start):
                    return page[first:]
            if len(page) < MAX_TASK_ENTRIES:
                return page[first:]
            known.cursor = page[-1].end_offset

    async def _have_decided(self, stream_id: int, end: int) -> None:
        """What follows may be undecided, and nobody there who reads it: then it is resolved here, soon."""
        if not self._store.conditions_abort and (await self._index.tail(stream_id)).end_records > end:
            decided = await self._index.end(stream_id)
            self.counts.undecided += decided.end_records <= end

    async def _entries(self, stream_id: int, start: int, end: int) -> AsyncIterator[Placed]:
        while start < end:
            page = await self._index.range(stream_id, start, MAX_TASK_ENTRIES, fresh=True)
            for placed in page:
                if placed.start_offset < end:
                    yield placed
            if not page:
                return
            start = page[-1].end_offset

    async def _claim(
        self, stream: Stream, claim: Claim, kind: Kind, runs: Sequence[Sequence[Placed]], log_start: int
    ) -> Claim | None:
        namespace = self._options.namespace
        table = table_key(namespace, stream.topic.name, stream.topic.topic_id)
        parts = []
        for run in runs:
            file_id = uuid4()
            bounds = run[0].start_offset, run[-1].end_offset
            key = file_key(table, stream.partition, *bounds, file_id)
            parts.append(Part(tuple(map(input_of, run)), file_id, key))
        task = Task(
            task_id=uuid4(),
            kind=kind,
            state=State.CREATED,
            owner=self.owner,
            namespace=namespace,
            topic=stream.topic.name,
            topic_id=stream.topic.topic_id,
            partition=stream.partition,
            follows=self._known[stream.stream_id].follows,
            log_start=log_start if kind is Kind.COMPACT else 0,  # a rewrite changes no row
            created_at_ms=self._now_ms(),
            parts=tuple(parts),
        )
        try:
            await self._saga.put(claim, replace(claim.state, task=task))
        except ClaimLost:
            return None
        return claim

    # --- files

    async def _write(self, claims: Iterable[Claim]) -> None:
        created = [claim for claim in claims if claim.task.state is State.CREATED]
        works: list[Work] = []
        for claim in created:
            task = claim.task
            works += [
                Work(self._options.objects_url, task.kind, task.partition, task.log_start, part)
                for part in task.parts
            ]
        if not works:
            return
        watcher = self._watcher
        if watcher is not None:
            watcher.planned(len(created), {work.part.key: work.part.input_bytes for work in works})
        on_done = None if watcher is None else watcher.written
        done = {each.key: each for each in await asyncio.to_thread(self._runner.run, works, on_done)}
        await self._each(created, lambda claim: self._written(claim, done))

    async def _written(self, claim: Claim, done: Mapping[str, Done]) -> None:
        try:
            await self._note_results(claim, done)
        except ClaimLost:
            # Somebody else may have been through with these files, and had them collected, before they were
            # written here: the collector looks once more.
            await self._saga.give_up_files(claim)
            raise

    async def _note_results(self, claim: Claim, done: Mapping[str, Done]) -> None:
        task = claim.task
        results = [done.get(part.key) for part in task.parts]
        bad = [each for result in results if result is not None for each in result.undecodable]
        if bad:
            for each in bad:
                log.error(
                    "%s-%d: offsets %d to %d stay as they are, they cannot be decoded: %s",
                    task.topic,
                    task.partition,
                    each.end_offset - each.records,
                    each.end_offset,
                    each.problem,
                )
            self.counts.undecodable += len(bad)
            await self._saga.give_up_files(claim)
            known = sorted({*claim.state.undecodable, *bad}, key=lambda each: each.end_offset)
            if len(known) >= MAX_UNDECODABLE:
                log.error(
                    "%s-%d: %d ranges cannot be decoded: it is left as it is from here on",
                    task.topic,
                    task.partition,
                    len(known),
                )
            await self._saga.put(claim, StreamState(None, tuple(known[:MAX_UNDECODABLE])))
            return
        stats = [result.stats for result in results if result is not None and result.stats is not None]
        if len(stats) < len(task.parts):
            problems = [result.problem for result in results if result is not None and result.problem]
            why = problems[0] if problems else "a worker was lost"
            log.warning("%s-%d: files are to be written again: %s", task.topic, task.partition, why)
            self.counts.failures += 1
            await self._saga.touch([claim])
            return
        await self._saga.put(claim, replace(claim.state, task=with_stats(task, stats)))

    # --- the table

    async def _commit(self, claims: Iterable[Claim], topics: Collection[UUID]) -> None:
        by_table: dict[tuple[str, str, UUID], list[Claim]] = defaultdict(list)
        for claim in claims:
            if not _is_written(claim.state):
                continue
            task = claim.task
            if task.topic_id not in topics:
                await self._each([claim], lambda claim: self._give_up(claim, "its topic was deleted"))
            elif self._open_tables is not None:
                by_table[task.namespace, task.topic, task.topic_id].append(claim)
        for (namespace, topic, topic_id), some in by_table.items():
            try:
                await self._commit_topic(namespace, topic, topic_id, some)
            except CatalogError as error:
                self.counts.failures += 1
                log.warning(
                    "%s.%s: its table waits, and reading and writing go on: %s", namespace, topic, error
                )
            except DrayError as error:
                self.counts.failures += 1
                log.warning("%s.%s: not committed yet: %s", namespace, topic, error)

    async def _commit_topic(self, namespace: str, topic: str, topic_id: UUID, claims: list[Claim]) -> None:
        for _ in range(len(claims) + 3):  # a claim may drop out, a table be behind or in the way
            # Some may be done with: committed, or given up.
            claims = [claim for claim in claims if _is_written(claim.state)]
            if not claims:
                return
            appends = [claim for claim in claims if claim.task.kind is Kind.COMPACT]
            rewrites = [claim for claim in claims if claim.task.kind is Kind.REWRITE]
            table = await self._ensure_table(namespace, topic, topic_id)
            try:
                if appends:
                    await self._append(table, appends)
                for claim in rewrites:
                    await self._replace(table, claim)
                return
            except ClaimLost as lost:
                log.info("%s", lost)
                claims = [claim for claim in claims if claim.stream_id != lost.stream_id]
            except (TableBehind, TableGone) as error:
                log.warning("%s", error)
                await self._restore(claims)

    async def _ensure_table(self, namespace: str, topic: str, topic_id: UUID) -> TopicTable:
        """Made if there is none; that of a deleted topic of the same name makes room."""
        tables = await self._tables()
        ensure = partial(
            tables.ensure_table, namespace, topic, topic_id, partition_by=self._options.partition_by
        )
        try:
            return await asyncio.to_thread(ensure)
        except TableOfAnotherTopic as error:
            if error.found is None or not await self._was_deleted(error.found):
                raise
            aside = await asyncio.to_thread(tables.set_aside, namespace, topic, error.found)
            log.warning(
                "table %s.%s is that of a topic that was deleted: it is %s.%s from now on",
                namespace,
                topic,
                namespace,
                aside,
            )
            return await asyncio.to_thread(ensure)

    async def _was_deleted(self, topic_id: str) -> bool:
        try:
            key = deleted_key(UUID(topic_id))
        except ValueError:  # somebody wrote something else there
            return False
        return await self._store.get(CLUSTER_DOMAIN, key) is not None

    async def _append(self, table: TopicTable, claims: Sequence[Claim]) -> None:
        files = [file for claim in claims for file in self._new_files(claim.task)]
        applied = await asyncio.to_thread(commit.append, table, files, touch=self._toucher(claims))
        at = {each.task_id: each.snapshot_id for each in applied}
        await self._each(
            claims,
            lambda claim: self._saga.advance(
                claim, State.ICEBERG_COMMITTED, snapshot_id=at.get(claim.task.task_id)
            ),
        )

    async def _replace(self, table: TopicTable, claim: Claim) -> None:
        task = claim.task
        gone = tuple(each.iceberg_file for part in task.parts for each in part.inputs)
        rewrite = commit.Rewrite(task.task_id, task.partition, gone, tuple(self._new_files(task)))
        try:
            applied = await asyncio.to_thread(commit.replace, table, [rewrite], touch=self._toucher([claim]))
        except InputsGone as error:
            log.warning("%s", error)
            await self._give_up(claim, "its files were changed by somebody else")
            return
        await self._saga.advance(claim, State.ICEBERG_COMMITTED, snapshot_id=applied[0].snapshot_id)

    def _new_files(self, task: Task) -> list[commit.NewFile]:
        files = []
        follows = task.follows
        for part in task.parts:
            assert part.stats is not None, "it is written"
            path = self._file_uri(part.key)
            files.append(
                commit.NewFile(
                    task.task_id,
                    task.partition,
                    part.start_offset,
                    part.end_offset,
                    path,
                    part.stats,
                    follows,
                )
            )
            follows = part.end_offset
        return files

    def _toucher(self, claims: Sequence[Claim]) -> Callable[[], None]:
        """For a thread that commits: nothing is sent unless all of these are still this compactor's."""
        loop = asyncio.get_running_loop()
        return lambda: asyncio.run_coroutine_threadsafe(self._saga.touch(claims), loop).result()

    async def _restore(self, claims: Sequence[Claim]) -> None:
        """The table was dropped: give it the files that the index names, before what is new."""
        namespace, topic, topic_id = claims[0].task.namespace, claims[0].task.topic, claims[0].task.topic_id
        table = await self._ensure_table(namespace, topic, topic_id)
        for claim in claims:
            files = []
            follows = start = table.end_offset(claim.task.partition)
            async for placed in self._entries(claim.stream_id, start, claim.task.start_offset):
                where = placed.entry.where
                if isinstance(where, ParquetFile) and placed.start_offset >= start:
                    stats = await self._stats_of(where)
                    bounds = placed.start_offset, placed.end_offset
                    files.append(
                        commit.NewFile(
                            where.file_id, claim.task.partition, *bounds, where.iceberg_file, stats, follows
                        )
                    )
                    follows = placed.end_offset
            if files:
                log.info(
                    "%s: %d files of partition %d are added again", topic, len(files), claim.task.partition
                )
            touch = self._toucher([claim])
            for at in range(0, len(files), RESTORE_FILES):
                await asyncio.to_thread(commit.append, table, files[at : at + RESTORE_FILES], touch=touch)

    async def _stats_of(self, file: ParquetFile) -> FileStats:
        body = await self._objects.get(file.path)
        return await asyncio.to_thread(stats_of_file, body)

    async def _give_up(self, claim: Claim, why: str) -> None:
        log.info("%s-%d: a task is given up: %s", claim.task.topic, claim.task.partition, why)
        await self._saga.give_up_files(claim)
        await self._saga.put(claim, replace(claim.state, task=None))

    # --- the index

    async def _finish(self, claim: Claim) -> bool:
        """Whether the task is done."""
        task = claim.state.unfinished
        if task is None:
            return True
        is_committed = task.state is State.ICEBERG_COMMITTED
        if is_committed or (task.state is State.PARQUET_WRITTEN and self._open_tables is None):
            if task.kind is Kind.COMPACT:
                await self._saga.store_snapshot(claim)
            await self._saga.swap(claim)
            await self._saga.advance(claim, State.INDEX_SWAPPED)
        if claim.task.state is State.INDEX_SWAPPED:
            await self._saga.release(claim)
            await self._saga.advance(claim, State.WAL_GC_READY)
        if claim.task.state is not State.WAL_GC_READY:
            return False
        await self._saga.advance(claim, State.DONE, parts=())
        self._count(task)
        known = self._known[claim.stream_id]
        if task.kind is Kind.REWRITE:
            known.cursor = known.follows = known.files = 0  # counted anew
            known.has_grown = False
        return True

    def _count(self, task: Task) -> None:
        counts = self.counts
        counts.tasks += 1
        if task.kind is Kind.REWRITE:
            counts.rewritten_files += sum(len(part.inputs) for part in task.parts)
            return
        counts.files += len(task.parts)
        for part in task.parts:
            assert part.stats is not None, "it is written"
            counts.records += part.stats.records
            counts.file_bytes += part.stats.size_bytes
            counts.wal_bytes += part.input_bytes

    # --- keeping house

    async def _maintain(self, streams: Iterable[Stream]) -> None:
        """Let snapshots of tables expire, and then files go that no snapshot has: now and then."""
        now = asyncio.get_running_loop().time()
        if now - self._maintained_at < MAINTAIN_EVERY_S:
            return
        self._maintained_at = now
        for topic in {stream.topic.topic_id: stream.topic for stream in streams}.values():
            if self._open_tables is None or not any(
                self._known[stream_id].files for stream_id in topic.streams
            ):
                continue
            try:
                await asyncio.to_thread(self._expire, await self._tables(), topic)
            except CatalogError as error:
                log.warning("%s: snapshots expire later: %s", topic.name, error)
        for domain in range(self._cluster.num_domains):
            self._add(await self._collector.collect_files(domain, self._now_ms()))

    def _expire(self, tables: TopicTables, topic: TopicRecord) -> None:
        options = self._options
        table = tables.ensure_table(
            options.namespace, topic.name, topic.topic_id, partition_by=options.partition_by
        )
        older_than_ms = self._now_ms() - options.snapshot_age_ms
        commit.expire(table, keep=options.keep_snapshots, older_than_ms=older_than_ms)

    async def _collect(self) -> None:
        for domain in range(self._cluster.num_domains):
            self._add(await self._collector.collect_objects(domain, self._now_ms()))

    def _add(self, done: Collected) -> None:
        total = self.counts.collected
        total.objects += done.objects
        total.object_bytes += done.object_bytes
        total.files += done.files
        total.failed += done.failed

    async def _in_tables(
        self, namespace: str, topic: str, topic_id: UUID, paths: Collection[str]
    ) -> Collection[str]:
        """Where the table is not there, or another topic's, somebody may have renamed it: all are kept."""
        if self._open_tables is None:
            return ()
        tables = await self._tables()
        try:
            return await asyncio.to_thread(_still_needed, tables, namespace, topic, topic_id, paths)
        except (TableGone, TableOfAnotherTopic) as error:
            log.info("files are kept: %s", error)
            return paths

    # --- helpers

    async def _tables(self) -> TopicTables:
        """Raises `CatalogError` as long as the catalog cannot be opened."""
        assert self._open_tables is not None, "whoever has no catalog does not ask"
        if self._opened is None:
            self._opened = await asyncio.to_thread(self._open_tables)
        return self._opened

    def _domain_of(self, stream_id: int) -> int:
        return stream_domain(stream_id, self._cluster.num_domains)

    async def _each(self, many: Iterable[T], work: Callable[[T], Awaitable[R]]) -> list[R | None]:
        """Side by side; what fails is logged, and None."""
        turns = asyncio.Semaphore(PARALLEL)

        async def one(item: T) -> R | None:
            async with turns:
                try:
                    return await work(item)
                except ClaimLost as error:
                    log.info("%s", error)
                except DrayError as error:
                    self.counts.failures += 1
                    log.warning("compaction: tried again later: %s", error)
            return None

        return list(await asyncio.gather(*map(one, many)))


def _is_written(state: StreamState) -> bool:
    return state.task is not None and state.task.state is State.PARQUET_WRITTEN


def _still_needed(
    tables: TopicTables, namespace: str, topic: str, topic_id: UUID, paths: Collection[str]
) -> set[str]:
    return commit.still_needed(tables.find_table(namespace, topic, topic_id), paths)
