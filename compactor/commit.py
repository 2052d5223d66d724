"""Commits to the table of a topic: files added, files replaced, snapshots expired. Each holds once.

A commit goes round a loop of ours (protocol 21), never through PyIceberg's, which replays an append without
looking whether it was applied:

    load → is it in the table? → `touch` the claims → commit, asserting the snapshot that was loaded

Everything that may have failed begins the loop anew. Two commits that assert the same snapshot exclude each
other, so of all attempts, those whose answer was lost among them, at most one holds; and the next look says
which. `touch` raises if another compactor has the claim by now: then nothing is sent.

**Is it in the table?** Three witnesses, the surest first. The property `dray.end-offset.<partition>` is set
in the transaction that adds the files; tasks of a stream have growing end offsets, so one number says it all,
also where snapshots were expired or the catalog shows only the current one. Somebody may have unset it: then
the task ids in the summaries (`dray.commit-id`) and the paths in the current manifests are asked. A
replacement has the property `dray.rewrite.<partition>`, which is the id of the last one, then the same two.

Everything here blocks: call it in a thread.
"""

from __future__ import annotations

import logging
import random
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar
from uuid import UUID

from pyiceberg.conversions import from_bytes, to_bytes
from pyiceberg.exceptions import (
    AuthorizationExpiredError,
    BadRequestError,
    CommitFailedException,
    ForbiddenError,
    NoSuchTableError,
    UnauthorizedError,
)
from pyiceberg.io import FileIO
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
)
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.table import Table, Transaction
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.refs import MAIN_BRANCH
from pyiceberg.table.snapshots import (
    Operation,
    Snapshot,
    SnapshotSummaryCollector,
    Summary,
    update_snapshot_summaries,
)
from pyiceberg.table.update import (
    AssertRefSnapshotId,
    AssertTableUUID,
    RemoveSnapshotsUpdate,
    SetPropertiesUpdate,
    TableRequirement,
    TableUpdate,
)
from pyiceberg.table.update.snapshot import _MergeAppendFiles
from pyiceberg.transforms import DayTransform, IdentityTransform, VoidTransform
from pyiceberg.typedef import EMPTY_DICT, Record
from pyiceberg.types import IntegerType, LongType

from compactor.catalog import END_OFFSET, TopicTable, end_offset_of, talking
from dray.columns.schema import FIELD_IDS
from dray.errors import (
    CatalogError,
    CatalogUnavailable,
    InputsGone,
    TableAltered,
    TableBehind,
    TableCommitUnknown,
    TableGone,
)

log = logging.getLogger(__name__)

COMMIT_ID = "dray.commit-id"
REWRITE = "dray.rewrite."

# Commits of others to one table are seconds apart: so many lost races are a catalog that is not well.
ATTEMPTS = 10
# The limit of the first pause, which doubles up to the last; each is uniform between nothing and the limit.
FIRST_PAUSE_S = 0.05
LAST_PAUSE_S = 5.0
# Small files of metadata that are read, or deleted, at a time.
PARALLEL = 8
DAY_US = 24 * 3600 * 1_000_000

_PARTITION = FIELD_IDS["partition"]
_TIMESTAMP = FIELD_IDS["timestamp"]

T = TypeVar("T")


class DataStats(Protocol):
    """What a table is told of a data file, by field id. Bounds are hex of Iceberg's single-value binary.

    `dray.columns.parquet.FileStats`, or what says the same.
    """

    @property
    def records(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def column_sizes(self) -> Mapping[int, int]: ...
    @property
    def value_counts(self) -> Mapping[int, int]: ...
    @property
    def null_value_counts(self) -> Mapping[int, int]: ...
    @property
    def lower_bounds(self) -> Mapping[int, str]: ...
    @property
    def upper_bounds(self) -> Mapping[int, str]: ...
    @property
    def split_offsets(self) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class NewFile:
    """A data file that a task wrote.

    `follows` is the end offset of the file before it in the partition's index, which the table has to have;
    0 where there is none.
    """

    task_id: UUID
    partition: int
    start_offset: int
    end_offset: int
    path: str
    stats: DataStats
    follows: int = 0


@dataclass(frozen=True, slots=True)
class Rewrite:
    """Files of one partition that take the place of others, with the same records."""

    task_id: UUID
    partition: int
    remove: tuple[str, ...]
    add: tuple[NewFile, ...]


@dataclass(frozen=True, slots=True)
class Applied:
    """A task, or one of its files, is in the table."""

    task_id: UUID
    path: str  # of a rewrite: of the first file that it added
    snapshot_id: int | None  # None if the table does not show that snapshot any more
    before: bool  # it was there already: an earlier call, or another compactor, committed it


@dataclass(frozen=True, slots=True)
class Expired:
    """Snapshots that are gone, and data files that no snapshot needs now."""

    snapshots: int
    metadata_files: int  # deleted with them
    data_files: tuple[str, ...]


def _nobody() -> None:
    """For callers without claims."""


def append(
    table: TopicTable,
    files: Iterable[NewFile],
    *,
    touch: Callable[[], None] = _nobody,
    pause: Callable[[float], None] = time.sleep,
) -> list[Applied]:
    """Have all files in the table, those that are not there yet by one commit.

    A table that was made anew has nothing: give it the files that the index names, oldest first, and the new
    ones, by one call or by several. Those that it has are left out.

    Returns one for each file, in order of partition and offset. Raises what `touch` raises; `TableBehind` if
    there is a hole before a file; `TableGone`, `TableAltered` and `TableOfAnotherTopic`; `CatalogUnavailable`
    and `CatalogDenied` if nothing was committed, nor will be; and `TableCommitUnknown`.
    """
    ordered = sorted(files, key=lambda file: (file.partition, file.end_offset))

    def decide(loaded: Table, mine: Collection[int]) -> list[Applied] | _Change:
        pending = _pending(table.name, loaded, ordered)
        if not pending:
            snapshots = _snapshots_by_task(loaded.metadata)
            found = [(file, snapshots.get(file.task_id.hex)) for file in ordered]
            return [Applied(file.task_id, file.path, at, at not in mine) for file, at in found]
        ends = {f"{END_OFFSET}{file.partition}": str(file.end_offset) for file in pending}
        return _Change(Operation.APPEND, pending, {}, ends, [file.task_id for file in pending])

    return _commit(table, decide, touch, pause)


def replace(
    table: TopicTable,
    rewrites: Sequence[Rewrite],
    *,
    touch: Callable[[], None] = _nobody,
    pause: Callable[[float], None] = time.sleep,
) -> list[Applied]:
    """Have all rewrites in the table, those that are not there yet by one commit, which changes no record.

    Raises `InputsGone` for a rewrite, named by its task, of which an input is not in the table, or has rows
    that somebody deleted without touching the file; then nothing is committed. Otherwise as `append`.
    """

    def decide(loaded: Table, mine: Collection[int]) -> list[Applied] | _Change:
        snapshots = _snapshots_by_task(loaded.metadata)
        properties = loaded.metadata.properties
        open_ = [
            each
            for each in rewrites
            if properties.get(f"{REWRITE}{each.partition}") != each.task_id.hex
            and each.task_id.hex not in snapshots
        ]
        if open_:
            live = _Live(loaded, {path for each in open_ for path in (*each.remove, *_paths(each.add))})
            open_ = [each for each in open_ if not live.has(_paths(each.add))]
        if not open_:
            found = [(each, snapshots.get(each.task_id.hex)) for each in rewrites]
            return [Applied(each.task_id, each.add[0].path, at, at not in mine) for each, at in found]
        for each in open_:
            gone = [path for path in each.remove if path not in live.found]
            why = "somebody else removed files"
            if not gone and live.deletes_rows_of(each.partition):
                gone, why = list(each.remove), "rows of it were deleted by files of their own"
            if gone:
                raise InputsGone(table.name, each.task_id, gone, why)
        return _Change(
            Operation.REPLACE,
            [file for each in open_ for file in each.add],
            live.entries({path for each in open_ for path in each.remove}),
            {f"{REWRITE}{each.partition}": each.task_id.hex for each in open_},
            [each.task_id for each in open_],
        )

    return _commit(table, decide, touch, pause)


def expire(
    table: TopicTable,
    *,
    keep: int,
    older_than_ms: int,
    touch: Callable[[], None] = _nobody,
    pause: Callable[[float], None] = time.sleep,
) -> Expired:
    """Forget snapshots of before `older_than_ms`, all but the last `keep`, and delete their metadata.

    What a branch or a tag leads to is kept. Data files are not deleted: the index may name them. Nor are
    those found again that a crash has left over: ask `still_needed` of files that are to go.
    """
    expired: set[int] = set()
    before: _Reachable | None = None

    def decide(loaded: Table, mine: Collection[int]) -> Table | _Removal:
        nonlocal before
        # What an attempt without an answer has removed still has its files.
        if before is not None and not expired & {each.snapshot_id for each in loaded.metadata.snapshots}:
            return loaded
        expired.clear()
        expired.update(_expirable(loaded.metadata, keep, older_than_ms))
        if not expired:
            return loaded
        before = _Reachable(loaded, expired)
        return _Removal(sorted(expired))

    loaded: Table = _commit(table, decide, touch, pause)
    if before is None or not expired:
        return Expired(0, 0, ())
    with talking(table.tables.place):
        after = _Reachable(loaded, {each.snapshot_id for each in loaded.metadata.snapshots})
        files = before.metadata - after.metadata
        candidates = _data_files(loaded.io, [before.manifests[path] for path in before.only(after)])
        if candidates:
            candidates -= _data_files(loaded.io, after.manifests.values(), live=True)
        _delete(loaded.io, files)
    log.info("table %s: %d snapshots expired, with %d files", table.name, len(expired), len(files))
    return Expired(len(expired), len(files), tuple(sorted(candidates)))


def still_needed(table: TopicTable, paths: Collection[str]) -> set[str]:
    """Which of these data files some snapshot of the table leads to."""
    table.load()
    with talking(table.tables.place):
        loaded = table.table
        reachable = _Reachable(loaded, {each.snapshot_id for each in loaded.metadata.snapshots})
        return _data_files(loaded.io, reachable.manifests.values(), live=True) & set(paths)


def current_files(table: TopicTable) -> set[str]:
    """The paths of all data files of the table as it is."""
    table.load()
    with talking(table.tables.place):
        snapshot = table.table.metadata.current_snapshot()
        manifests = [] if snapshot is None else snapshot.manifests(table.table.io)
        return _data_files(table.table.io, manifests, live=True)


# --- the loop


class _Step(Protocol):
    """What is to be sent to the catalog, made for one loaded table."""

    def make(self, loaded: Table) -> _Attempt: ...


@dataclass(slots=True)
class _Attempt:
    snapshot_id: int | None
    updates: tuple[TableUpdate, ...]
    requirements: tuple[TableRequirement, ...]
    written: list[str] = field(default_factory=list)


def _commit(
    table: TopicTable,
    decide: Callable[[Table, Collection[int]], T | Any],
    touch: Callable[[], None],
    pause: Callable[[float], None],
) -> T:
    """`decide` gets what was loaded and the snapshots of this call; it ends the loop or says what to send."""
    place = table.tables.place
    mine: set[int] = set()
    refused: list[str] = []  # written for attempts that another commit excluded
    unknown: Exception | None = None
    failure: Exception | None = None
    try:
        for attempt in range(ATTEMPTS):
            if attempt:
                pause(random.uniform(0, min(FIRST_PAUSE_S * 2**attempt, LAST_PAUSE_S)))
            try:
                table.load()
                with talking(place):
                    step = decide(table.table, mine)
                    if not isinstance(step, _Change | _Removal):
                        return step
                    # It is not in the table, so what was refused was so for good.
                    _delete(table.table.io, refused)
                    refused.clear()
                    made = step.make(table.table)
            except CatalogUnavailable as error:
                failure = error
                continue
            touch()
            if made.snapshot_id is not None:
                mine.add(made.snapshot_id)
            try:
                _send(table, made)
            except CommitFailedException as error:
                log.debug("table %s: another commit was faster: %s", table.name, error)
                failure = error
                refused += made.written
            except NoSuchTableError:
                raise TableGone(table.name) from None
            except (UnauthorizedError, ForbiddenError, AuthorizationExpiredError, BadRequestError) as error:
                with talking(place):
                    raise error
            except Exception as error:  # whatever it was, it does not say that nothing was done
                log.info("table %s: looking whether a commit holds: %r", table.name, error)
                failure = unknown = error
            else:
                with talking(place):
                    step = decide(table.table, mine)
                assert not isinstance(step, _Change | _Removal), "what was committed is in the table"
                return step
    except CatalogError as error:
        if isinstance(error, InputsGone):
            touch()  # whoever lost the claim is told that, and not what came of it
        if unknown is None:
            raise
        raise TableCommitUnknown(
            f"table {table.name}: a commit may hold ({unknown}), and now {error}"
        ) from error
    if unknown is not None:
        raise TableCommitUnknown(f"table {table.name}: a commit may hold: {unknown}") from unknown
    assert failure is not None
    raise CatalogUnavailable(
        f"table {table.name}: no commit in {ATTEMPTS} attempts, the last one: {failure}"
    ) from failure


def _send(table: TopicTable, attempt: _Attempt) -> None:
    """Once. Sets `table` to what it has become."""
    loaded = table.table
    before = loaded.metadata
    requirements = (*attempt.requirements, AssertTableUUID(uuid=before.table_uuid))
    response = loaded.catalog.commit_table(loaded, requirements, attempt.updates)
    table.table = Table(
        loaded.name(), response.metadata, response.metadata_location, loaded.io, loaded.catalog, loaded.config
    )
    # As PyIceberg does; engines write the same property and mean the same files.
    kept = {entry.metadata_file for entry in response.metadata.metadata_log}
    old = [entry.metadata_file for entry in before.metadata_log if entry.metadata_file not in kept]
    with suppress(OSError):  # they are in nobody's way
        _delete(loaded.io, old)


# --- what is sent


@dataclass(slots=True)
class _Change:
    """One snapshot: files added, entries of manifests removed, properties set."""

    operation: Operation
    add: Sequence[NewFile]
    remove: Mapping[str, Sequence[ManifestEntry]]  # by manifest
    properties: dict[str, str]
    task_ids: Sequence[UUID]

    def make(self, loaded: Table) -> _Attempt:
        producer = _Producer(self, loaded)
        updates, requirements = producer._commit()
        return _Attempt(
            producer.snapshot_id,
            (*updates, SetPropertiesUpdate(updates=self.properties)),
            requirements,
            [*producer._written_manifests, *producer._written_manifest_lists],
        )


@dataclass(slots=True)
class _Removal:
    """Snapshots are forgotten; the current one may not change meanwhile."""

    snapshot_ids: list[int]

    def make(self, loaded: Table) -> _Attempt:
        current = loaded.metadata.current_snapshot_id
        return _Attempt(
            None,
            (RemoveSnapshotsUpdate(snapshot_ids=self.snapshot_ids),),  # type: ignore[call-arg]  # its alias
            (AssertRefSnapshotId(ref=MAIN_BRANCH, snapshot_id=current),),  # type: ignore[call-arg]
        )


class _AsLoaded(Transaction):
    """Has no updates of its own: PyIceberg's copies all metadata each time that it is asked for them."""

    @property
    def table_metadata(self) -> TableMetadata:
        return self._table.metadata


class _Producer(_MergeAppendFiles):
    """Writes the manifests of one change: files of any spec, removal by path, and REPLACE beyond PyIceberg's.

    Its updates are sent by `_send` and nobody else. It is not registered with a transaction, which would
    make it anew for a table that has the files already.
    """

    def __init__(self, change: _Change, loaded: Table) -> None:
        super().__init__(
            change.operation,
            _AsLoaded(loaded),
            loaded.io,
            snapshot_properties={COMMIT_ID: ",".join(dict.fromkeys(each.hex for each in change.task_ids))},
        )
        self._change = change
        self._metadata = loaded.metadata
        self._new = [data_file(loaded, file) for file in change.add]

    def _refresh_for_retry(self) -> None:
        raise AssertionError("a commit is not replayed: whether it is in the table has to be looked up")

    def _manifests(self) -> list[ManifestFile]:
        groups: dict[tuple[bool, int], list[ManifestEntry]] = defaultdict(list)
        for added in self._new:
            groups[False, added.spec_id].append(
                ManifestEntry.from_args(
                    status=ManifestEntryStatus.ADDED,
                    snapshot_id=self._snapshot_id,
                    sequence_number=None,
                    file_sequence_number=None,
                    data_file=added,
                )
            )
        for entry in self._removed():
            groups[True, entry.data_file.spec_id].append(self._copy(entry, ManifestEntryStatus.DELETED))
        written = [self._write(spec_id, entries) for (_, spec_id), entries in groups.items()]
        return self._process_manifests(written + self._existing_manifests())

    def _existing_manifests(self) -> list[ManifestFile]:
        existing = []
        for manifest in super()._existing_manifests():
            entries = self._change.remove.get(manifest.manifest_path, ())
            removed = {entry.data_file.file_path for entry in entries}
            if not removed:
                existing.append(manifest)
                continue
            live = self.fetch_manifest_entry(manifest)
            kept = [entry for entry in live if entry.data_file.file_path not in removed]
            if kept:
                copies = [self._copy(entry, ManifestEntryStatus.EXISTING) for entry in kept]
                existing.append(self._write(manifest.partition_spec_id, copies))
        return existing

    def _summary(self, snapshot_properties: dict[str, str] = EMPTY_DICT) -> Summary:
        collector = SnapshotSummaryCollector()
        schema, specs = self._metadata.schema(), self._metadata.specs()
        for added in self._new:
            collector.add_file(added, schema, specs[added.spec_id])
        for entry in self._removed():
            collector.remove_file(entry.data_file, schema, specs[entry.data_file.spec_id])
        parent = self._metadata.current_snapshot()
        # Totals change as in an overwrite; PyIceberg knows no replacement.
        counted = Operation.APPEND if self._operation is Operation.APPEND else Operation.OVERWRITE
        summary = update_snapshot_summaries(
            Summary(counted, **collector.build(), **snapshot_properties),
            None if parent is None else parent.summary,
        )
        return summary.model_copy(update={"operation": self._operation})

    def _removed(self) -> list[ManifestEntry]:
        return [entry for entries in self._change.remove.values() for entry in entries]

    def _copy(self, entry: ManifestEntry, status: ManifestEntryStatus) -> ManifestEntry:
        deleted = status is ManifestEntryStatus.DELETED
        return ManifestEntry.from_args(
            status=status,
            snapshot_id=self._snapshot_id if deleted else entry.snapshot_id,
            sequence_number=entry.sequence_number,
            file_sequence_number=entry.file_sequence_number,
            data_file=entry.data_file,
        )

    def _write(self, spec_id: int, entries: Iterable[ManifestEntry]) -> ManifestFile:
        with self.new_manifest_writer(self.spec(spec_id)) as writer:
            for entry in entries:
                writer.add_entry(entry)
        return writer.to_manifest_file()


def data_file(loaded: Table, file: NewFile) -> DataFile:
    """As the table wants it now, from its statistics alone. Raises `TableAltered` if no spec takes it."""
    metadata, stats = loaded.metadata, file.stats
    specs = metadata.specs()
    for spec_id in (metadata.default_spec_id, *sorted(specs, reverse=True)):
        partition = _partition_of(specs[spec_id], file)
        if partition is not None:
            break
    else:
        raise TableAltered(
            ".".join(loaded.name()),
            "none of its partition specs can hold a file with all of its records in one partition",
            "add the partition field `partition` to it, alone or with day(timestamp)",
        )
    made = DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=file.path,
        file_format=FileFormat.PARQUET,
        partition=partition,
        record_count=stats.records,
        file_size_in_bytes=stats.size_bytes,
        column_sizes=dict(stats.column_sizes),
        value_counts=dict(stats.value_counts),
        null_value_counts=dict(stats.null_value_counts),
        nan_value_counts={},
        lower_bounds=_bounds(metadata, stats.lower_bounds),
        upper_bounds=_bounds(metadata, stats.upper_bounds),
        key_metadata=None,
        split_offsets=list(stats.split_offsets) or None,
        equality_ids=None,
        sort_order_id=None,
    )
    made.spec_id = spec_id
    return made


def _partition_of(spec: PartitionSpec, file: NewFile) -> Record | None:
    """The values of a spec's fields that all records of the file share; None if they do not share one."""
    values: list[int | None] = []
    for each in spec.fields:
        match each.source_id, each.transform:
            case _, VoidTransform():
                values.append(None)
            case source, IdentityTransform() if source == _PARTITION:
                values.append(file.partition)
            case source, DayTransform() if source == _TIMESTAMP:
                bounds = file.stats.lower_bounds, file.stats.upper_bounds
                days = {_day(each[_TIMESTAMP]) for each in bounds if _TIMESTAMP in each}
                if len(days) > 1 or (days and file.stats.null_value_counts.get(_TIMESTAMP)):
                    return None
                values.append(days.pop() if days else None)
            case _:
                return None
    return Record(*values)


def _day(bound: str) -> int:
    return int.from_bytes(bytes.fromhex(bound), "little", signed=True) // DAY_US


def _bounds(metadata: TableMetadata, bounds: Mapping[int, str]) -> dict[int, bytes]:
    """In the binary form of the column's type, which somebody may have widened."""
    schema = metadata.schema()
    made = {}
    for field_id, text in bounds.items():
        value = bytes.fromhex(text)
        if len(value) == 4 and field_id in schema.field_ids:
            kind = schema.find_type(field_id)
            if isinstance(kind, LongType):
                value = to_bytes(kind, from_bytes(IntegerType(), value))
        made[field_id] = value
    return made


# --- what is in a table


def _pending(name: str, loaded: Table, files: Sequence[NewFile]) -> list[NewFile]:
    """Those that the table lacks, of files in order. Raises `TableBehind` and `TableAltered`."""
    metadata = loaded.metadata
    pending: list[NewFile] = []
    ends: dict[int, int] = {}  # of partitions, with what is pending
    doubtful: list[NewFile] = []
    for file in files:
        known = end_offset_of(metadata, file.partition)
        if not known and metadata.current_snapshot() is not None:
            doubtful.append(file)
    present = _present(loaded, doubtful)
    for file in files:
        known = ends.setdefault(file.partition, end_offset_of(metadata, file.partition))
        if file.end_offset > known and file.path not in present:
            if file.follows > known:
                raise TableBehind(name, file.partition, known, file.follows)
            if file.start_offset < known:
                raise TableAltered(
                    name,
                    f"its property {END_OFFSET}{file.partition} is {known}, which is inside of {file.path}",
                    "set it to the end of the last file of that partition",
                )
            pending.append(file)
        ends[file.partition] = max(known, file.end_offset)
    return pending


def _present(loaded: Table, files: Sequence[NewFile]) -> set[str]:
    """Paths of those that the table has, as it says by other means than its properties."""
    if not files:
        return set()
    snapshots = _snapshots_by_task(loaded.metadata)
    present = {file.path for file in files if file.task_id.hex in snapshots}
    rest = {file.path for file in files} - present
    return present | set(_Live(loaded, rest).found) if rest else present


def _snapshots_by_task(metadata: TableMetadata) -> dict[str, int]:
    """Among those that led to the current state: one that was rolled back has applied nothing."""
    found: dict[str, int] = {}
    for snapshot in _ancestors(metadata, metadata.current_snapshot_id):
        ids = snapshot.summary.get(COMMIT_ID) if snapshot.summary is not None else None
        for task_id in ids.split(",") if ids else ():
            found.setdefault(task_id, snapshot.snapshot_id)
    return found


def _ancestors(metadata: TableMetadata, snapshot_id: int | None) -> Iterator[Snapshot]:
    """The snapshot and those that led to it. PyIceberg's looks through all of them for each."""
    by_id = {each.snapshot_id: each for each in metadata.snapshots}
    snapshot = None if snapshot_id is None else by_id.get(snapshot_id)
    while snapshot is not None:
        yield snapshot
        parent = snapshot.parent_snapshot_id
        snapshot = None if parent is None else by_id.get(parent)


class _Live:
    """Entries of the current snapshot's manifests that have one of some paths, and files that delete rows."""

    def __init__(self, loaded: Table, paths: set[str]) -> None:
        self.found: dict[str, ManifestEntry] = {}
        self._manifest_of: dict[str, str] = {}
        self._deletes: list[DataFile] = []
        self._specs = loaded.metadata.specs()
        snapshot = loaded.metadata.current_snapshot()
        for manifest in () if snapshot is None else snapshot.manifests(loaded.io):
            for entry in manifest.fetch_manifest_entry(loaded.io, discard_deleted=True):
                path = entry.data_file.file_path
                if manifest.content is ManifestContent.DELETES:
                    self._deletes.append(entry.data_file)
                elif path in paths:
                    self.found[path] = entry
                    self._manifest_of[path] = manifest.manifest_path

    def has(self, paths: Sequence[str]) -> bool:
        return all(path in self.found for path in paths)

    def deletes_rows_of(self, partition: int) -> bool:
        return any(self._may_be_of(partition, each) for each in self._deletes)

    def entries(self, paths: Iterable[str]) -> dict[str, list[ManifestEntry]]:
        entries: dict[str, list[ManifestEntry]] = defaultdict(list)
        for path in paths:
            entries[self._manifest_of[path]].append(self.found[path])
        return entries

    def _may_be_of(self, partition: int, deletes: DataFile) -> bool:
        for at, each in enumerate(self._specs[deletes.spec_id].fields):
            if each.source_id == _PARTITION and isinstance(each.transform, IdentityTransform):
                return bool(deletes.partition[at] == partition)
        return True


def _paths(files: Iterable[NewFile]) -> list[str]:
    return [file.path for file in files]


# --- what no snapshot needs


def _expirable(metadata: TableMetadata, keep: int, older_than_ms: int) -> list[int]:
    history = [each.snapshot_id for each in _ancestors(metadata, metadata.current_snapshot_id)]
    kept = set(history[: max(keep, 1)])
    for name, ref in metadata.refs.items():
        if name != MAIN_BRANCH:
            kept.update(each.snapshot_id for each in _ancestors(metadata, ref.snapshot_id))
    return [
        each.snapshot_id
        for each in metadata.snapshots
        if each.timestamp_ms < older_than_ms and each.snapshot_id not in kept
    ]


class _Reachable:
    """Files of metadata that some snapshots lead to."""

    def __init__(self, loaded: Table, snapshot_ids: Collection[int]) -> None:
        wanted = [each for each in loaded.metadata.snapshots if each.snapshot_id in snapshot_ids]

        def manifests(snapshot: Snapshot) -> list[ManifestFile]:
            return snapshot.manifests(loaded.io)

        with ThreadPoolExecutor(PARALLEL) as pool:
            found = [manifest for some in pool.map(manifests, wanted) for manifest in some]
        self.manifests = {manifest.manifest_path: manifest for manifest in found}
        self.metadata = {each.manifest_list for each in wanted} | self.manifests.keys()

    def only(self, other: _Reachable) -> set[str]:
        return self.manifests.keys() - other.manifests.keys()


def _data_files(io: FileIO, manifests: Iterable[ManifestFile], *, live: bool = False) -> set[str]:
    def paths(manifest: ManifestFile) -> list[str]:
        entries = manifest.fetch_manifest_entry(io, discard_deleted=live)
        return [entry.data_file.file_path for entry in entries]

    with ThreadPoolExecutor(PARALLEL) as pool:
        return {path for some in pool.map(paths, manifests) for path in some}


def _delete(io: FileIO, paths: Collection[str]) -> None:
    def delete(path: str) -> None:
        with suppress(FileNotFoundError):
            io.delete(path)

    if paths:
        with ThreadPoolExecutor(PARALLEL) as pool:
            list(pool.map(delete, paths))
