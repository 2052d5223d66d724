"""Index entries: what the metadata store holds for a range of a stream's offsets. Pure.

An entry's position is its end; how many records it covers is in its value, so it can be written before
its position is known. `Placed` is an entry together with where it stands.

The superseding rule (`live`): an entry is dead when a later one starts at or before its start. A swap
replaces the end of a run first and deletes the rest afterwards, so readers that apply the rule get the same
answer whatever a crash has left.

Not every batch of a chunk is there for readers (`WalChunk.is_served`): one of 0 records was left out when the
object was committed, and one with a stored verdict other than ok is void, but keeps its offsets. Whether an
entry says all of that already is `is_decided`.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple, TypeAlias
from uuid import UUID

from google.protobuf.message import DecodeError

from dray.errors import CorruptStore, IncompatibleStore
from dray.index import entry_pb2 as pb
from dray.metadata.keys import domain_of
from dray.metadata.store import Entry

FORMAT = 1
# Each batch in a chunk stands behind its length (`dray.wal.format`).
BATCH_PREFIX_BYTES = 4
NO_PRODUCER = -1
_SEQUENCES = "streams/"


class Kind(enum.Enum):
    """What the fold says of a batch (`dray.index.fold`)."""

    OK = "ok"
    DUPLICATE = "duplicate"
    OUT_OF_ORDER = "out of order"
    STALE_EPOCH = "stale epoch"
    UNKNOWN_PRODUCER = "unknown producer"
    LEFT_OUT = "left out"


# As they are stored, from 1 on: add at the end, never reorder.
KINDS = (
    Kind.OK,
    Kind.DUPLICATE,
    Kind.OUT_OF_ORDER,
    Kind.STALE_EPOCH,
    Kind.UNKNOWN_PRODUCER,
    Kind.LEFT_OUT,
)
_CODES = {kind: number for number, kind in enumerate(KINDS, 1)}


class Producer(NamedTuple):
    """Who wrote a batch, and where it belongs in that producer's sequence."""

    id: int
    epoch: int
    base_sequence: int


@dataclass(frozen=True, slots=True)
class BatchIndex:
    """One batch of a chunk."""

    records: int
    size_bytes: int
    min_timestamp_ms: int
    max_timestamp_ms: int
    producer: Producer | None = None


@dataclass(frozen=True, slots=True)
class WalChunk:
    object_id: UUID
    path: str
    chunk_offset: int
    chunk_length: int
    batches: tuple[BatchIndex, ...]
    verdicts: tuple[Kind, ...] = ()  # one per batch, or none where they are not stored
    # Derived: whether some batch has a producer; whether every batch is there for readers; the end of each
    # batch, in records from the start of the entry; what finds a batch.
    has_producers: bool = field(init=False, repr=False, compare=False)
    serves_all: bool = field(init=False, repr=False, compare=False)
    _ends: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _offsets: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        has_producers = any(b.producer is not None for b in self.batches)
        object.__setattr__(self, "has_producers", has_producers)
        serves_all = all(b.records for b in self.batches) and all(v is Kind.OK for v in self.verdicts)
        object.__setattr__(self, "serves_all", serves_all)
        object.__setattr__(self, "_ends", tuple(accumulate(b.records for b in self.batches)))
        sizes = accumulate((BATCH_PREFIX_BYTES + b.size_bytes for b in self.batches), initial=0)
        object.__setattr__(self, "_offsets", tuple(at + BATCH_PREFIX_BYTES for at in sizes)[:-1])

    def is_served(self, number: int) -> bool:
        """Whether readers get that batch, as far as is decided."""
        return self.batches[number].records > 0 and (not self.verdicts or self.verdicts[number] is Kind.OK)

    def batch_at(self, delta: int) -> int:
        """The number of the batch that holds the record `delta` behind the start of the entry."""
        return bisect_right(self._ends, delta)

    def batch_start(self, number: int) -> int:
        """Records of the entry before that batch."""
        return self._ends[number] - self.batches[number].records

    def batch_offset(self, number: int) -> int:
        """Where its bytes begin in the object, behind their length."""
        return self.chunk_offset + self._offsets[number]


@dataclass(frozen=True, slots=True)
class ParquetFile:
    file_id: UUID
    path: str
    size_bytes: int
    iceberg_file: str = ""


@dataclass(frozen=True, slots=True)
class Truncated:
    """What it covers is gone; the log starts behind it."""


@dataclass(frozen=True, slots=True)
class Void:
    """Its object was fenced: it keeps its offsets, and no record has them (protocol 12).

    The object is named for its reference only: whoever removes the entry removes that too, if it is still
    there (protocol 15).
    """

    object_id: UUID


Where: TypeAlias = WalChunk | ParquetFile | Truncated | Void


@dataclass(frozen=True, slots=True)
class IndexEntry:
    stream_id: int
    records: int
    created_at_ms: int
    min_timestamp_ms: int
    max_timestamp_ms: int
    incarnation: str
    where: Where
    expected_start: int | None = None


@dataclass(frozen=True, slots=True)
class Placed:
    """An entry and the range it covers: [start_offset, end_offset)."""

    entry: IndexEntry
    end_offset: int
    end_bytes: int
    version: int

    @property
    def start_offset(self) -> int:
        return self.end_offset - self.entry.records


def is_decided(placed: Placed, incarnation: str) -> bool:
    """Whether the entry says of each batch if it is void. `incarnation` is the cluster's.

    It does if it starts where its writer expected, who then had folded all before it and left out what was
    not ok; or if verdicts were stored since; or if the question does not arise.
    """
    entry, where = placed.entry, placed.entry.where
    if not isinstance(where, WalChunk) or where.verdicts or not where.has_producers:
        return True
    return entry.expected_start == placed.start_offset and entry.incarnation == incarnation


def live(entries: Sequence[Placed]) -> list[Placed]:
    """Those that no later one supersedes, in order."""
    kept: list[Placed] = []
    lowest = None  # start of all that come later
    for placed in reversed(entries):
        if lowest is None or placed.start_offset < lowest:
            kept.append(placed)
            lowest = placed.start_offset
    kept.reverse()
    return kept


def sequence_of(stream_id: int) -> str:
    """The name of a stream's index in its domain."""
    return f"{_SEQUENCES}{stream_id:016x}"


def stream_of(sequence: str) -> int | None:
    """The stream whose index has this name; None for a sequence of another kind."""
    return int(sequence[len(_SEQUENCES) :], 16) if sequence.startswith(_SEQUENCES) else None


def stream_domain(stream_id: int, num_domains: int) -> int:
    """The MetaDomain of a stream. Part of the stored format, like `domain_of`."""
    return domain_of(f"{stream_id:016x}", num_domains)


def encode(entry: IndexEntry) -> bytes:
    message = pb.IndexEntry(
        format=FORMAT,
        stream_id=entry.stream_id,
        records=entry.records,
        created_at_ms=entry.created_at_ms,
        min_timestamp_ms=entry.min_timestamp_ms,
        max_timestamp_ms=entry.max_timestamp_ms,
        expected_start=entry.expected_start,
        incarnation=bytes.fromhex(entry.incarnation),
    )
    match entry.where:
        case WalChunk() as chunk:
            wal = message.wal
            wal.object_id = chunk.object_id.bytes
            wal.path = chunk.path
            wal.chunk_offset = chunk.chunk_offset
            wal.chunk_length = chunk.chunk_length
            batches = chunk.batches
            wal.batch_bytes.extend([b.size_bytes for b in batches])
            wal.batch_records.extend([b.records for b in batches])
            base = entry.min_timestamp_ms
            wal.batch_min_timestamp.extend([_int64(b.min_timestamp_ms - base) for b in batches])
            wal.batch_max_timestamp.extend([_int64(b.max_timestamp_ms - base) for b in batches])
            if any(b.producer is not None for b in batches):
                producers = [b.producer or Producer(NO_PRODUCER, -1, -1) for b in batches]
                wal.producer_id.extend([p.id for p in producers])
                wal.producer_epoch.extend([p.epoch for p in producers])
                wal.base_sequence.extend([p.base_sequence for p in producers])
            wal.verdict.extend([_CODES[kind] for kind in chunk.verdicts])
        case ParquetFile() as file:
            message.parquet.file_id = file.file_id.bytes
            message.parquet.path = file.path
            message.parquet.size_bytes = file.size_bytes
            message.parquet.iceberg_file = file.iceberg_file
        case Truncated():
            message.truncated.SetInParent()
        case Void() as void:
            message.void.object_id = void.object_id.bytes
    return message.SerializeToString(deterministic=True)


def expecting(entry: IndexEntry, start: int) -> IndexEntry:
    """The entry, stating where it expects to start. `replace` would do, in five times the time."""
    return IndexEntry(
        entry.stream_id,
        entry.records,
        entry.created_at_ms,
        entry.min_timestamp_ms,
        entry.max_timestamp_ms,
        entry.incarnation,
        entry.where,
        start,
    )


def encoded_expecting(value: bytes, start: int) -> bytes:
    """The same for an encoded entry that states none: fields of protobuf may come in any order."""
    return value + pb.IndexEntry(expected_start=start).SerializeToString()


def decode(value: bytes) -> IndexEntry:
    """Raises `IncompatibleStore` for a newer format, `CorruptStore` for what nobody can have written."""
    try:
        message = pb.IndexEntry.FromString(value)
    except DecodeError as error:
        raise CorruptStore(f"an index entry of {len(value)} bytes cannot be read: {error}") from None
    if message.format > FORMAT:
        raise IncompatibleStore(f"an index entry has format {message.format}, this Dray knows up to {FORMAT}")
    if message.format < 1 or message.records < 1 or len(message.incarnation) != 16:
        raise CorruptStore(f"an index entry of stream {message.stream_id:016x} lacks what all have")
    where: Where
    match message.WhichOneof("where"):
        case "wal":
            where = _wal_chunk(message)
        case "parquet":
            file = message.parquet
            where = ParquetFile(_uuid(file.file_id), file.path, file.size_bytes, file.iceberg_file)
        case "truncated":
            where = Truncated()
        case "void":
            where = Void(_uuid(message.void.object_id))
        case _:
            raise CorruptStore(f"an index entry of stream {message.stream_id:016x} points nowhere")
    return IndexEntry(
        stream_id=message.stream_id,
        records=message.records,
        created_at_ms=message.created_at_ms,
        min_timestamp_ms=message.min_timestamp_ms,
        max_timestamp_ms=message.max_timestamp_ms,
        incarnation=message.incarnation.hex(),
        where=where,
        expected_start=message.expected_start if message.HasField("expected_start") else None,
    )


def place(entry: Entry) -> Placed:
    """An entry as it was read from the store."""
    decoded = decode(entry.value)
    if decoded.records > entry.position.end_records:
        raise CorruptStore(
            f"an index entry of stream {decoded.stream_id:016x} at {entry.position.end_records}"
            f" covers {decoded.records} records"
        )
    return Placed(decoded, *entry.position, entry.version)


def place_all(entries: Iterable[Entry]) -> list[Placed]:
    return [place(entry) for entry in entries]


def _wal_chunk(message: pb.IndexEntry) -> WalChunk:
    wal, base = message.wal, message.min_timestamp_ms
    count = len(wal.batch_bytes)
    columns = [wal.batch_records, wal.batch_min_timestamp, wal.batch_max_timestamp]
    producers = [wal.producer_id, wal.producer_epoch, wal.base_sequence]
    owned = count if any(producers) else 0
    if any(len(column) != count for column in columns) or any(len(column) != owned for column in producers):
        raise CorruptStore(f"an index entry of stream {message.stream_id:016x} has uneven columns")
    if sum(wal.batch_records) != message.records:
        raise CorruptStore(
            f"an index entry of stream {message.stream_id:016x} covers {message.records} records,"
            f" but its batches have {sum(wal.batch_records)}"
        )
    if sum(wal.batch_bytes) + count * BATCH_PREFIX_BYTES != wal.chunk_length:
        raise CorruptStore(f"an index entry of stream {message.stream_id:016x} has batches of another length")
    if len(wal.verdict) not in (0, count):
        raise CorruptStore(
            f"an index entry of stream {message.stream_id:016x} has {len(wal.verdict)} verdicts"
        )
    if any(not 1 <= code <= len(KINDS) for code in wal.verdict):
        raise IncompatibleStore(
            f"an index entry of stream {message.stream_id:016x} has a verdict that this Dray does not know"
        )
    verdicts = tuple(KINDS[code - 1] for code in wal.verdict)
    owners: Iterable[Producer | None] = [None] * count
    if wal.producer_id:
        columns_of_producers = zip(wal.producer_id, wal.producer_epoch, wal.base_sequence, strict=True)
        owners = [None if row[0] == NO_PRODUCER else Producer(*row) for row in columns_of_producers]
    batches = tuple(
        BatchIndex(records, size, _int64(base + low), _int64(base + high), owner)
        for records, size, low, high, owner in zip(
            wal.batch_records,
            wal.batch_bytes,
            wal.batch_min_timestamp,
            wal.batch_max_timestamp,
            owners,
            strict=True,
        )
    )
    return WalChunk(_uuid(wal.object_id), wal.path, wal.chunk_offset, wal.chunk_length, batches, verdicts)


def _int64(number: int) -> int:
    """`number` modulo 2^64, signed.

    The distance of two timestamps of clients may not fit in 64 bits; wrapped both ways, it comes out exact.
    """
    return (number + 2**63) % 2**64 - 2**63


def _uuid(raw: bytes) -> UUID:
    if len(raw) != 16:
        raise CorruptStore(f"an id of {len(raw)} bytes in an index entry")
    return UUID(bytes=raw)
