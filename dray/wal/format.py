"""DRAYWO1, version 1: the bytes of a WAL object. Pure.

    header (49) | chunk bodies | chunk index (44 per chunk) | CRC-32C of all before it (4)

All is big-endian; `docs/wal-format.md` has every field. Ursa's objects hold rows; these hold Kafka record
batches as clients sent them, so a batch is neither decompressed nor rebuilt on its way in or out. Only its
base offset, which its checksum leaves out, is set to 0: the real one is known after the commit, and readers
patch it in (`dray.protocol.records.patched`).

Invariants, which decoding checks and encoding keeps:

- Chunks lie one behind the other in the order of the index, from the end of the header to the start of the
  index. No byte is outside of them or in two of them. Hence a damaged position cannot pass unnoticed, even
  where the checksum is out of reach: in a range read, or where a changed position makes the checksum look
  absent.
- The index is sorted by stream id, unsigned, without duplicates. No chunk is without batches, no batch
  shorter than a Kafka batch header or longer or shorter than it says of itself.

Decoding returns slices of what it was given. What it allocates is bounded by the bytes it was given: no
count or length is believed before there are enough bytes to hold what it promises.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from struct import Struct
from typing import NamedTuple
from uuid import UUID

from crc32c import crc32c

from dray.errors import DamagedWal, UnknownWalVersion, WrongDomain
from dray.metadata.keys import escape
from dray.protocol import records
from dray.protocol.records import Buffer

MAGIC = b"DRAYWO1"
VERSION = 1
HEADER_BYTES = 49
ENTRY_BYTES = 44
PREFIX_BYTES = 4
FOOTER_BYTES = 4

_HEADER = Struct(">7sH16sIqIQ")
_ENTRY = Struct(">QQIIIqq")
_PREFIX = Struct(">I")
_FOOTER = Struct(">I")
# The prefix of a batch, its base offset (0) and its own length: what encoding writes instead of copying.
_BATCH_START = Struct(">IqI")
_BATCH_LENGTH = Struct(">8xI")
_BATCH_LENGTH_ENDS_AT = 12

_VERSION_AT, _DOMAIN_AT, _CHUNK_COUNT_AT, _INDEX_OFFSET_AT = 7, 25, 37, 41
# Of one batch without records.
_SMALLEST_CHUNK_BYTES = PREFIX_BYTES + records.HEADER_BYTES
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class ChunkInput(NamedTuple):
    """One stream's Kafka record batches to be stored, and what the chunk index says of them."""

    stream_id: int
    batches: Sequence[Buffer]
    records: int
    min_timestamp_ms: int
    max_timestamp_ms: int


class EncodedChunk(NamedTuple):
    """Where a chunk is in its object, and its batches in the chunk: (offset, length) of each one's bytes.

    The offset points behind the prefix, at the batch itself; the length is without the prefix.
    """

    offset: int
    length: int
    batches: list[tuple[int, int]]


class EncodedObject(NamedTuple):
    body: bytearray
    chunks: list[EncodedChunk]  # in the order of the index


class Header(NamedTuple):
    wal_id: UUID
    domain: int
    created_at_ms: int
    chunk_count: int
    index_offset: int

    @property
    def index_end(self) -> int:
        """Where the chunk index ends, and the footer begins."""
        return self.index_offset + self.chunk_count * ENTRY_BYTES


class ChunkEntry(NamedTuple):
    """One stream's part of an object, as the chunk index has it."""

    stream_id: int
    offset: int
    length: int
    records: int
    batch_count: int
    min_timestamp_ms: int
    max_timestamp_ms: int


class WalObject(NamedTuple):
    """A whole object. Batches are slices of the buffer that was decoded, in the order of the index."""

    header: Header
    chunks: list[tuple[ChunkEntry, list[memoryview]]]
    has_checksum: bool  # if so, it was right


def encode_object(
    wal_id: UUID, domain: int, created_at_ms: int, chunks: Iterable[ChunkInput]
) -> EncodedObject:
    """One object of these chunks, which may come in any order.

    The same arguments give the same bytes. Batch bytes are copied once. Raises `ValueError` for what the
    format cannot hold: that is the caller's mistake, since batches were checked when they came in.
    """
    ordered = sorted(chunks, key=lambda chunk: chunk.stream_id)
    parts: list[Buffer] = [b""]  # the header, which needs the size of the bodies
    index: list[ChunkEntry] = []
    encoded: list[EncodedChunk] = []
    position, previous_id = HEADER_BYTES, None
    for stream_id, batches, counted, low_ms, high_ms in ordered:
        if stream_id == previous_id:
            raise ValueError(f"stream {stream_id} comes twice")
        if not 0 < len(batches) <= counted or low_ms > high_ms:
            raise ValueError(f"{len(batches)} batches, {counted} records, time {low_ms} to {high_ms}")
        spans = _append_batches(parts, batches)
        length = sum(spans[-1])  # where its last batch ends
        index.append(ChunkEntry(stream_id, position, length, counted, len(batches), low_ms, high_ms))
        encoded.append(EncodedChunk(position, length, spans))
        position, previous_id = position + length, stream_id
    try:
        parts[0] = _HEADER.pack(MAGIC, VERSION, wal_id.bytes, domain, created_at_ms, len(index), position)
        parts.extend(_ENTRY.pack(*entry) for entry in index)
    except struct.error as error:
        raise ValueError(f"a domain, id, count, length or time does not fit its field: {error}") from None
    parts.append(bytes(FOOTER_BYTES))
    # Joining fills fresh memory; a bytearray of the right size would be zeroed first.
    body = bytearray().join(parts)
    end = len(body) - FOOTER_BYTES
    with memoryview(body) as view, view[:end] as covered:
        _FOOTER.pack_into(view, end, crc32c(covered))
    return EncodedObject(body, encoded)


def decode_header(data: Buffer, expected_domain: int | None = None) -> Header:
    """The header from the first bytes of an object, at least 49. The first of two range reads."""
    if len(data) < HEADER_BYTES:
        raise DamagedWal(f"it ends inside the header, which has {HEADER_BYTES} bytes", len(data))
    magic, version, wal_id, domain, created_at_ms, chunk_count, index_offset = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise DamagedWal(f"it begins with {magic!r} instead of {MAGIC!r}: not a WAL object", 0)
    if version != VERSION:
        raise UnknownWalVersion(f"version {version}; this program reads version {VERSION}", _VERSION_AT)
    header = Header(UUID(bytes=wal_id), domain, created_at_ms, chunk_count, index_offset)
    _check_bodies_room(header)
    if expected_domain is not None and domain != expected_domain:
        raise WrongDomain(f"MetaDomain {domain} instead of {expected_domain}", _DOMAIN_AT)
    return header


def decode_index(header: Header, data: Buffer) -> list[ChunkEntry]:
    """The chunk index from the bytes [index_offset, index_end) of the object. The second range read."""
    return list(iter_index(header, data))


def iter_index(header: Header, data: Buffer) -> Iterator[ChunkEntry]:
    """The same, entry by entry: those before the first that is wrong can be looked at."""
    expected = header.index_end - header.index_offset
    if len(data) != expected:
        raise DamagedWal(
            f"{header.chunk_count} chunks have an index of {expected} bytes, and {len(data)} are there",
            header.index_offset + min(len(data), expected),
        )
    at, body_end, previous_id = header.index_offset, HEADER_BYTES, -1
    for fields in _ENTRY.iter_unpack(data):
        entry = ChunkEntry._make(fields)
        if entry.stream_id <= previous_id:
            order = "twice" if entry.stream_id == previous_id else f"behind {previous_id}"
            raise DamagedWal(f"stream {entry.stream_id} is in the index {order}", at)
        _check_position(entry, body_end, header.index_offset, at)
        yield entry
        at += ENTRY_BYTES
        body_end, previous_id = entry.offset + entry.length, entry.stream_id
    if body_end != header.index_offset:
        raise DamagedWal(
            f"chunks end at byte {body_end}, but the index begins at byte {header.index_offset}", body_end
        )


def decode_chunk(entry: ChunkEntry, data: Buffer) -> list[memoryview]:
    """The batches of a chunk from the bytes [offset, offset + length) of the object."""
    view = memoryview(data)
    if len(view) != entry.length:
        raise DamagedWal(
            f"chunk of stream {entry.stream_id} has {entry.length} bytes, and {len(view)} are there",
            entry.offset + min(len(view), entry.length),
        )
    batches = []
    position = 0
    for number in range(entry.batch_count):
        at = entry.offset + position
        if position + PREFIX_BYTES > len(view):
            raise DamagedWal(
                f"chunk of stream {entry.stream_id} ends behind {number} of {entry.batch_count} batches", at
            )
        (length,) = _PREFIX.unpack_from(view, position)
        position += PREFIX_BYTES
        batches.append(_batch(view, position, length, at))
        position += length
    if position != len(view):
        raise DamagedWal(
            f"chunk of stream {entry.stream_id} goes on for {len(view) - position} bytes"
            f" behind its {entry.batch_count} batches",
            entry.offset + position,
        )
    return batches


def decode_run(lengths: Sequence[int], data: Buffer, at: int) -> list[memoryview]:
    """Neighbouring batches of a chunk, by the lengths that the offset index has of them; often just one.

    `data` goes from the first byte of the first batch to the last byte of the last, and begins at byte `at`
    of the object. The prefixes in between are checked and left out.
    """
    view = memoryview(data)
    expected = sum(lengths) + PREFIX_BYTES * max(len(lengths) - 1, 0)
    if len(view) != expected:
        raise DamagedWal(
            f"{len(lengths)} batches have {expected} bytes, and {len(view)} are there",
            at + min(len(view), expected),
        )
    batches: list[memoryview] = []
    position = 0
    for length in lengths:
        if batches:
            (prefix,) = _PREFIX.unpack_from(view, position)
            if prefix != length:
                raise DamagedWal(
                    f"a batch of {prefix} bytes where the index has one of {length}", at + position
                )
            position += PREFIX_BYTES
        batches.append(_batch(view, position, length, at + position))
        position += length
    return batches


def decode_object(data: Buffer, expected_domain: int | None = None) -> WalObject:
    """A whole object; nothing is returned of one that is damaged anywhere."""
    view = memoryview(data)
    header = decode_header(view, expected_domain)
    has_checksum = check_end(header, len(view))
    entries = decode_index(header, view[header.index_offset : header.index_end])
    if has_checksum:
        check_checksum(header, view)
    chunks = [
        (entry, decode_chunk(entry, view[entry.offset : entry.offset + entry.length])) for entry in entries
    ]
    return WalObject(header, chunks, has_checksum)


def check_end(header: Header, size: int) -> bool:
    """Whether an object of `size` bytes has a footer. It may be absent; nothing may be behind it."""
    if size == header.index_end:
        return False
    if size == header.index_end + FOOTER_BYTES:
        return True
    if size < header.index_end:
        problem = f"it ends inside the chunk index, which goes to byte {header.index_end}"
        raise DamagedWal(problem, size)
    raise DamagedWal(
        f"{size - header.index_end} bytes behind the index, and a checksum has {FOOTER_BYTES}",
        header.index_end,
    )


def check_checksum(header: Header, data: Buffer) -> None:
    """Compare the footer, which is there, with the bytes before it."""
    view = memoryview(data)
    (stored,) = _FOOTER.unpack_from(view, header.index_end)
    computed = crc32c(view[: header.index_end])
    if stored != computed:
        raise DamagedWal(
            f"checksum is {computed:#010x}, but the footer says {stored:#010x}", header.index_end
        )


def object_path(zone: str, domain: int, created_at_ms: int, wal_id: UUID) -> str:
    """The key of an object, below the cluster's prefix.

    The zone says who wrote it and means nothing to readers. The date is that of `created_at_ms`, in UTC.
    """
    created = _EPOCH + timedelta(milliseconds=created_at_ms)
    return f"{objects_of_domain(zone, domain)}date={created:%Y/%m/%d}/{wal_id}.wo"


def objects_of_domain(zone: str, domain: int) -> str:
    """What the keys of all objects begin with that were written for this domain in this zone."""
    return f"wal/v1/zone={escape(zone)}/domain={domain}/"


def object_id_of(path: str) -> UUID | None:
    """The id of the object at such a key; None if it is no WAL object's."""
    match = re.fullmatch(r"wal/v1/.*/([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\.wo", path, re.DOTALL)
    return UUID(match[1]) if match else None


def _append_batches(parts: list[Buffer], batches: Sequence[Buffer]) -> list[tuple[int, int]]:
    spans = []
    position = 0
    for data in batches:
        size = len(data)
        rest = size - _BATCH_LENGTH_ENDS_AT
        if size < records.HEADER_BYTES or _BATCH_LENGTH.unpack_from(data)[0] != rest:
            raise ValueError(f"{size} bytes are not one Kafka record batch")
        parts.append(_BATCH_START.pack(size, 0, rest))
        parts.append(memoryview(data)[_BATCH_LENGTH_ENDS_AT:])
        position += PREFIX_BYTES
        spans.append((position, size))
        position += size
    return spans


def _check_bodies_room(header: Header) -> None:
    room = header.index_offset - HEADER_BYTES
    if room < 0:
        raise DamagedWal(f"chunk index at byte {header.index_offset}, in the header", _INDEX_OFFSET_AT)
    if header.chunk_count * _SMALLEST_CHUNK_BYTES > room:
        raise DamagedWal(f"{header.chunk_count} chunks cannot be in {room} bytes", _CHUNK_COUNT_AT)


def _check_position(entry: ChunkEntry, body_end: int, index_offset: int, at: int) -> None:
    """Whether a chunk begins where the one before it ends, and can hold what it says. `at` is its entry."""
    start, end = entry.offset, entry.offset + entry.length
    if start < HEADER_BYTES or end > index_offset:
        bodies = f"[{HEADER_BYTES}, {index_offset})"
        raise DamagedWal(
            f"chunk of stream {entry.stream_id} is at [{start}, {end}), outside of the bodies {bodies}",
            at + 8,
        )
    if start != body_end:
        how = "overlaps the one before it" if start < body_end else "leaves a gap"
        raise DamagedWal(
            f"chunk of stream {entry.stream_id} begins at {start} instead of {body_end}: it {how}", at + 8
        )
    if not entry.batch_count or entry.batch_count * _SMALLEST_CHUNK_BYTES > entry.length:
        raise DamagedWal(f"{entry.batch_count} batches cannot be in {entry.length} bytes", at + 24)
    if entry.records < entry.batch_count:
        raise DamagedWal(f"{entry.batch_count} batches with {entry.records} records", at + 20)
    if entry.min_timestamp_ms > entry.max_timestamp_ms:
        raise DamagedWal(f"timestamps from {entry.min_timestamp_ms} to {entry.max_timestamp_ms}", at + 28)


def _batch(view: memoryview, position: int, length: int, at: int) -> memoryview:
    """The batch at `position`, if it is there, and as long as it says itself. `at` is for the error."""
    data = view[position : position + length]
    if len(data) != length:
        raise DamagedWal(f"a batch of {length} bytes, of which {len(data)} are there", at)
    if length < records.HEADER_BYTES:
        raise DamagedWal(f"a batch of {length} bytes, and its header alone has {records.HEADER_BYTES}", at)
    own = _BATCH_LENGTH.unpack_from(data)[0] + _BATCH_LENGTH_ENDS_AT
    if own != length:
        raise DamagedWal(f"a batch of {length} bytes that has {own} by its own header", at)
    return data
