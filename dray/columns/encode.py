"""Columns back to record batches, as consumers had them before. Pure.

A batch that is built here has the offsets, timestamps, keys, values, headers and producer of its records; it
is not compressed, and it need not begin or end where the one did that a client sent. What a batch says once
for all its records is the same for all of them: it is cut where offsets are not adjacent, where the producer,
its epoch or the attributes change, where the sequence does not go on, where a LogAppendTime changes, and when
it is large enough.

Numbers are written as varints column by column, and Arrow joins the pieces of each record.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from crc32c import crc32c

from dray.columns.schema import LOG_APPEND_TIME
from dray.protocol.records import HEADER_BYTES

Ints: TypeAlias = npt.NDArray[np.int64]
Numbers: TypeAlias = npt.NDArray[Any]

# Bytes that are joined at once, or one batch: Arrow's offsets are of 32 bits.
_PART_BYTES = 2**25
# There are no leaders, so there is one epoch for ever.
_LEADER_EPOCH = 0
_MAGIC = 2
_BEFORE_CRC = Struct(">qiibI")
_COVERED = Struct(">hiqqqhii")
# What `batchLength` counts in front of what the checksum covers: leader epoch, magic and checksum.
_UNCOVERED_BYTES = 9
_MAX_VARINT_BYTES = 5
_MAX_VARLONG_BYTES = 10
_SEQUENCES = 2**31
_NONE = -1
_EMPTY = pa.scalar(b"", pa.binary())
_NO_HEADERS = pa.scalar(b"\x00", pa.binary())


class Rebuilt(NamedTuple):
    """A batch, header included, with its real base offset."""

    base_offset: int
    end_offset: int
    data: bytes


def encode_batches(table: pa.Table, *, target_bytes: int) -> list[Rebuilt]:
    """The rows, in order, as batches of at most `target_bytes`; larger only for a single record.

    The rows are those of `dray.columns.schema.SCHEMA`, of one partition.
    """
    blocks = table.combine_chunks().to_batches()
    return [rebuilt for block in blocks if block.num_rows for rebuilt in _encode(block, target_bytes)]


@dataclass(frozen=True, slots=True)
class _Columns:
    """What a record has beside its bytes."""

    offsets: Ints
    timestamps: Ints  # milliseconds
    producer_ids: Ints
    epochs: Ints
    sequences: Ints
    attributes: Ints


@dataclass(frozen=True, slots=True)
class _Pieces:
    """What a record has behind its numbers: arrays of bytes to be joined, and how long each record's are."""

    key_lengths: Ints  # -1 for null
    arrays: Sequence[pa.Array | pa.Scalar]
    sizes: Ints


def _encode(block: pa.RecordBatch, target_bytes: int) -> Iterator[Rebuilt]:
    columns = _columns(block)
    pieces = _pieces(block)
    cuts = _cuts(columns, pieces, target_bytes)
    firsts, counts = cuts[:-1], np.diff(cuts)
    deltas = np.arange(block.num_rows) - np.repeat(firsts, counts)
    # A difference beyond 64 bits wraps, and wraps back when it is added again.
    timestamp_deltas = columns.timestamps - np.repeat(columns.timestamps[firsts], counts)
    numbers = [_varint(timestamp_deltas), _varint(deltas), _varint(pieces.key_lengths)]
    body_sizes = 1 + sum(number.sizes for number in numbers) + pieces.sizes
    length = _varint(body_sizes)
    heads = _flat([length, _ATTRIBUTES, *numbers])
    ends = np.cumsum(length.sizes + body_sizes)[cuts[1:] - 1]
    newest = np.maximum.reduceat(columns.timestamps, firsts)
    for first_batch, last_batch in _parts(ends):
        rows = slice(int(cuts[first_batch]), int(cuts[last_batch]))
        data = _join([_sliced(piece, rows) for piece in (heads, *pieces.arrays)])
        start = int(ends[first_batch - 1]) if first_batch else 0
        for number in range(first_batch, last_batch):
            at = int(ends[number - 1]) - start if number else 0
            records = data[at : int(ends[number]) - start]
            yield _batch(columns, int(firsts[number]), int(counts[number]), int(newest[number]), records)


def _batch(columns: _Columns, first: int, count: int, newest: int, records: memoryview) -> Rebuilt:
    covered = _COVERED.pack(
        columns.attributes[first],
        count - 1,
        columns.timestamps[first],
        newest,
        columns.producer_ids[first],
        columns.epochs[first],
        columns.sequences[first],
        count,
    )
    base_offset = int(columns.offsets[first])
    length = _UNCOVERED_BYTES + len(covered) + len(records)
    crc = crc32c(records, crc32c(covered))
    before = _BEFORE_CRC.pack(base_offset, length, _LEADER_EPOCH, _MAGIC, crc)
    return Rebuilt(base_offset, base_offset + count, b"".join((before, covered, records)))


# What is in the rows.


def _columns(block: pa.RecordBatch) -> _Columns:
    timestamp = block["timestamp"]
    timestamps = _ints(timestamp.view(pa.int64()), 0) // 1000
    if timestamp.null_count:
        absent = timestamp.is_null().to_numpy(zero_copy_only=False)
        timestamps[absent] = _ints(block["raw_timestamp"], _NONE)[absent]
    return _Columns(
        _ints(block["offset"], _NONE),
        timestamps,
        _ints(block["producer_id"], _NONE),
        _ints(block["producer_epoch"], _NONE),
        _ints(block["sequence"], _NONE),
        _ints(block["attributes"], 0),
    )


def _ints(column: pa.Array, null: int) -> Ints:
    if column.null_count == len(column):
        return np.full(len(column), null, np.int64)
    numbers: Numbers = column.fill_null(null).to_numpy()
    return numbers.astype(np.int64, copy=False)


def _pieces(block: pa.RecordBatch) -> _Pieces:
    key_lengths, value_lengths = _lengths(block["key"]), _lengths(block["value"])
    value_length = _varint(value_lengths)
    sizes = value_length.sizes + np.maximum(key_lengths, 0) + np.maximum(value_lengths, 0)
    arrays: list[pa.Array | pa.Scalar] = [block["key"], _flat([value_length]), block["value"]]
    counts = _lengths(block["headers"])
    if not counts.any():
        return _Pieces(key_lengths, [*arrays, _NO_HEADERS], sizes + 1)
    count = _varint(counts)
    headers = _headers(block["headers"].flatten(), counts)
    sizes += count.sizes + _lengths(headers)
    return _Pieces(key_lengths, [*arrays, _flat([count]), headers], sizes)


def _headers(flat: pa.StructArray, counts: Ints) -> pa.Array:
    """The headers of each record, one behind the other."""
    keys, values = flat.field("key").cast(pa.binary()), flat.field("value")
    lengths = [_flat([_varint(_lengths(column))]) for column in (keys, values)]
    data = _join_array([lengths[0], keys, lengths[1], values])
    ends = np.concatenate(([0], np.cumsum(counts)))
    _, offsets, content = data.buffers()
    bounds = np.frombuffer(offsets, np.int32, len(data) + 1, data.offset * 4)[ends]
    return pa.Array.from_buffers(pa.binary(), len(counts), [None, pa.py_buffer(bounds), content])


def _lengths(column: pa.Array) -> Ints:
    """Of bytes or lists; -1 for null."""
    is_list = pa.types.is_list(column.type)
    return _ints(pc.list_value_length(column) if is_list else pc.binary_length(column), _NONE)


# Where batches end.


def _cuts(columns: _Columns, pieces: _Pieces, target_bytes: int) -> Ints:
    """The rows where batches begin, and the end."""
    runs = _runs(columns)
    ends = np.cumsum(_most(columns, pieces, runs))
    room = target_bytes - HEADER_BYTES
    cuts = [0]
    for run_end in runs[1:]:
        while cuts[-1] < run_end:
            first = cuts[-1]
            full = int(ends[first - 1]) + room if first else room
            fitting = int(np.searchsorted(ends, full, side="right"))
            cuts.append(min(max(fitting, first + 1), int(run_end)))
    return np.array(cuts, np.int64)


def _runs(columns: _Columns) -> Ints:
    """The rows that cannot be in one batch with the row before, and the end."""

    def changes(column: Ints) -> npt.NDArray[np.bool_]:
        changed: npt.NDArray[np.bool_] = column[1:] != column[:-1]
        return changed

    new = columns.offsets[1:] != columns.offsets[:-1] + 1
    for column in (columns.producer_ids, columns.epochs, columns.attributes):
        new |= changes(column)
    has_producer = columns.producer_ids[1:] != _NONE
    new |= has_producer & (columns.sequences[1:] != (columns.sequences[:-1] + 1) % _SEQUENCES)
    stamped = columns.attributes[1:] & LOG_APPEND_TIME != 0
    new |= stamped & changes(columns.timestamps)
    return np.concatenate(([0], np.flatnonzero(new) + 1, [len(columns.offsets)]))


def _most(columns: _Columns, pieces: _Pieces, runs: Ints) -> Ints:
    """How many bytes a record takes at most: how many exactly depends on where its batch begins."""
    firsts = runs[:-1]
    spread = np.maximum.reduceat(columns.timestamps, firsts) - np.minimum.reduceat(columns.timestamps, firsts)
    # Of a spread beyond 64 bits only that is known.
    delta_bytes = np.where(spread < 0, _MAX_VARLONG_BYTES, _varint(spread).sizes)
    counts = np.diff(runs)
    per_run = 1 + delta_bytes + _varint(counts).sizes
    most = np.repeat(per_run, counts) + _varint(pieces.key_lengths).sizes + pieces.sizes
    return most + _varint(most).sizes


def _parts(ends: Ints) -> Iterator[tuple[int, int]]:
    """Runs of batches that are joined together."""
    first = 0
    while first < len(ends):
        full = (int(ends[first - 1]) if first else 0) + _PART_BYTES
        last = max(first + 1, int(np.searchsorted(ends, full, side="right")))
        yield first, last
        first = last


# Numbers as bytes.


@dataclass(frozen=True, slots=True)
class _Written:
    """A number of every record: the first, second … byte of each, and how many bytes it has."""

    columns: Sequence[Numbers]
    sizes: Ints


def _varint(values: Ints) -> _Written:
    bits = ((values << 1) ^ (values >> 63)).view(np.uint64)
    sizes = np.ones(len(bits), np.int64)
    most = int(bits.max(initial=0))
    width = max(1, -(-most.bit_length() // 7))
    for index in range(1, width):
        sizes += bits >> (7 * index) != 0
    columns = []
    for index in range(width):
        low = (bits >> (7 * index) & 0x7F).astype(np.uint8)
        columns.append(low | ((sizes > index + 1).view(np.uint8) << 7) if index + 1 < width else low)
    return _Written(columns, sizes)


# Of single records. Kafka: "currently unused".
_ATTRIBUTES = _Written([np.zeros(1, np.uint8)], np.ones(1, np.int64))


def _flat(numbers: Sequence[_Written]) -> pa.Array:
    """Each record's numbers, one behind the other."""
    count = max(len(number.sizes) for number in numbers)
    width = sum(len(number.columns) for number in numbers)
    matrix = np.empty((count, width), np.uint8)
    mask = np.empty((count, width), bool)
    sizes = np.zeros(count, np.int64)
    at = 0
    for number in numbers:
        sizes += number.sizes
        for index, column in enumerate(number.columns):
            matrix[:, at] = column
            mask[:, at] = number.sizes > index
            at += 1
    offsets = np.zeros(count + 1, np.int32)
    np.cumsum(sizes, out=offsets[1:])
    content = matrix if offsets[-1] == matrix.size else matrix[mask]
    return pa.Array.from_buffers(
        pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(content.reshape(-1))]
    )


def _sliced(piece: pa.Array | pa.Scalar, rows: slice) -> pa.Array | pa.Scalar:
    return piece if isinstance(piece, pa.Scalar) else piece.slice(rows.start, rows.stop - rows.start)


def _join(pieces: Sequence[pa.Array | pa.Scalar]) -> memoryview:
    joined = _join_array(pieces)
    return memoryview(joined.buffers()[2])


def _join_array(pieces: Sequence[pa.Array | pa.Scalar]) -> pa.Array:
    return pc.binary_join_element_wise(*pieces, _EMPTY, null_handling="replace", null_replacement=b"")
