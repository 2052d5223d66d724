"""Kafka record batches, as far as their 61-byte headers tell. Pure; never looks at a single record.

Layout and meaning are those of Kafka's documentation, "Record Batch" (magic 2, since 0.11, KIP-98). All is
big-endian:

    0 baseOffset i64 | 8 batchLength i32 | 12 partitionLeaderEpoch i32 | 16 magic i8 | 17 crc u32
    | 21 attributes i16 | 23 lastOffsetDelta i32 | 27 baseTimestamp i64 | 35 maxTimestamp i64
    | 43 producerId i64 | 51 producerEpoch i16 | 53 baseSequence i32 | 57 recordCount i32 | 61 records

`batchLength` counts from byte 12. The checksum covers byte 21 to the end, so that a broker can set the base
offset and the leader epoch without reading the rest.

Every batch is a slice of the buffer it came in. Whether the records inside agree with the header (offset
deltas 0 … n-1, decompression) shows only when somebody reads them: whoever decodes records checks that.
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple, TypeAlias

from crc32c import crc32c

from dray.errors import (
    BatchTooLarge,
    CorruptBatch,
    InvalidRecords,
    InvalidTimestamp,
    LegacyBatch,
    TransactionalBatch,
    UnsupportedCodec,
)

Buffer: TypeAlias = bytes | bytearray | memoryview

HEADER_BYTES = 61
# Indexed by the compression code.
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
NO_TIMESTAMP = -1

CODEC_BITS = 0x07
LOG_APPEND_TIME_BIT = 0x08
TRANSACTIONAL_BIT = 0x10
CONTROL_BIT = 0x20

_HEADER = Struct(">qiibIhiqqqhii")
_BEFORE_CRC = Struct(">qii")
_BEHIND_CRC = Struct(">hiqqqhii")
_CRC = Struct(">I")
_ATTRIBUTES = Struct(">h")
_MAX_TIMESTAMP = Struct(">q")

# Id, epoch and base sequence.
_NO_PRODUCER = (-1, -1, -1)
_LENGTH_ENDS_AT = 12
_MAGIC_AT = 16
_CRC_AT = 17
_ATTRIBUTES_AT = 21
_MAX_TIMESTAMP_AT = 35
# Six one-byte fields behind a one-byte length: no key, no value, no headers.
_SMALLEST_RECORD_BYTES = 7
# How many records one byte of a compressed body may stand for. How far a codec can expand (gzip 1,032 times,
# zstd without limit) does not matter: offset deltas 0, 1, 2 … keep even empty records from being alike. The
# most that was measured is 2.5 (zstd -5, 100,000 empty records; gzip 0.7, lz4 0.25). And 64 times the 8 MiB
# of a WAL object are fewer than the 2^31-1 records that an index entry can cover.
_MAX_RECORDS_PER_BYTE = 64
# Uncompressed, so many empty records are 150 MiB, which a client and all its consumers would have to hold.
_MAX_RECORDS = 2**24


class Batch(NamedTuple):
    """A batch and what its header says. `data` is all of it, header included."""

    data: memoryview
    base_offset: int
    leader_epoch: int
    attributes: int
    last_offset_delta: int
    base_timestamp_ms: int
    max_timestamp_ms: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    records: int

    @property
    def codec(self) -> str:
        return CODECS[self.attributes & CODEC_BITS]

    @property
    def timestamp_range_ms(self) -> tuple[int, int]:
        """Lowest and highest timestamp, as well as a header can know them.

        Records may be older than the base timestamp, which is the first record's; none is newer than the
        maximum. Old Sarama versions leave the maximum unset, and Kafka takes that.
        """
        if self.max_timestamp_ms == NO_TIMESTAMP:
            return self.base_timestamp_ms, self.base_timestamp_ms
        return min(self.base_timestamp_ms, self.max_timestamp_ms), self.max_timestamp_ms


def split_batches(payload: Buffer, max_batch_bytes: int = 2**31 - 1) -> list[Batch]:
    """The batches of one partition of a Produce request, each fit to be stored. At least one.

    Takes more than the one batch that Kafka allows, since nothing here depends on it; takes any base
    offset, since the WAL sets its own. Raises `InvalidBatch` for the first that cannot be taken.
    """
    view = memoryview(payload)
    if not view:
        raise InvalidRecords("there is none; a produced partition has at least one", 0)
    batches = []
    at = 0
    while at < len(view):
        batch = read_batch(view, at, max_batch_bytes)
        _check_produced(batch, at)
        batches.append(batch)
        at += len(batch.data)
    return batches


def read_batch(view: memoryview, at: int = 0, max_batch_bytes: int = 2**31 - 1) -> Batch:
    """The batch that begins at `at`, sound by its sizes and checksum, in a known codec."""
    size = _batch_size(view, at)
    if size > max_batch_bytes:
        raise BatchTooLarge(f"{size} bytes are above the limit of {max_batch_bytes}", at)
    data = view[at : at + size]
    base_offset, _, leader_epoch, _, crc, *rest = _HEADER.unpack_from(data)
    computed = crc32c(data[_ATTRIBUTES_AT:])
    if computed != crc:
        raise CorruptBatch(f"checksum is {computed:#010x}, but the header says {crc:#010x}", at)
    batch = Batch(data, base_offset, leader_epoch, *rest)
    if (code := batch.attributes & CODEC_BITS) >= len(CODECS):
        raise UnsupportedCodec(f"compression code {code} is not assigned", at)
    return batch


def patched(data: memoryview, base_offset: int, leader_epoch: int) -> tuple[bytes, memoryview]:
    """The batch at its place in the log, as two buffers to be sent one after the other.

    Leaves `data` alone, which others may be reading, and does not copy its body.
    """
    _, length, _ = _BEFORE_CRC.unpack_from(data)
    return _BEFORE_CRC.pack(base_offset, length, leader_epoch), data[_BEFORE_CRC.size :]


def patch(data: memoryview, base_offset: int, leader_epoch: int) -> None:
    """Set both in place. `data` is writable and nobody else's."""
    _, length, _ = _BEFORE_CRC.unpack_from(data)
    _BEFORE_CRC.pack_into(data, 0, base_offset, length, leader_epoch)


def stamp_append_time(data: memoryview, now_ms: int) -> None:
    """Make `now_ms` the time of every record, in place: LogAppendTime. `data` is writable and nobody else's.

    Unlike offsets this is under the checksum, which is made anew.
    """
    (attributes,) = _ATTRIBUTES.unpack_from(data, _ATTRIBUTES_AT)
    _ATTRIBUTES.pack_into(data, _ATTRIBUTES_AT, attributes | LOG_APPEND_TIME_BIT)
    _MAX_TIMESTAMP.pack_into(data, _MAX_TIMESTAMP_AT, now_ms)
    _CRC.pack_into(data, _CRC_AT, crc32c(data[_ATTRIBUTES_AT:]))


def empty_batch(base_offset: int, records: int, leader_epoch: int) -> bytes:
    """What stands for `records` offsets that have no record: a reader goes on behind them (protocol 22).

    Kafka's log cleaner leaves the same where it took all records of a batch, so clients know it.
    """
    if not 1 <= records <= 2**31 - 1:
        raise ValueError(f"a batch covers 1 to 2^31-1 offsets, not {records}")
    fields = (0, records - 1, NO_TIMESTAMP, NO_TIMESTAMP, *_NO_PRODUCER, 0)
    length = HEADER_BYTES - _LENGTH_ENDS_AT
    return _HEADER.pack(base_offset, length, leader_epoch, 2, crc32c(_BEHIND_CRC.pack(*fields)), *fields)


def _batch_size(view: memoryview, at: int) -> int:
    """How many bytes from `at` on are the batch: at least a header, and all there."""
    remaining = len(view) - at
    if remaining <= _MAGIC_AT:
        raise InvalidRecords(f"{remaining} bytes are left, too few for a batch", at)
    magic = view[at + _MAGIC_AT]
    if magic in (0, 1):  # message sets have it at the same place
        raise LegacyBatch(f"message format {magic}; only format 2 is taken", at)
    if magic != 2:
        raise CorruptBatch(f"magic {magic} is no message format", at)
    _, length, _ = _BEFORE_CRC.unpack_from(view, at)
    size: int = length + _LENGTH_ENDS_AT
    if size < HEADER_BYTES:
        raise CorruptBatch(f"a length of {length} leaves no room for the header", at)
    if size > remaining:
        # As Kafka says of what is cut off. CORRUPT_MESSAGE would make clients send the same again.
        raise InvalidRecords(f"{size} bytes by its length, but {remaining} are left", at)
    return size


def _check_produced(batch: Batch, at: int) -> None:
    """Refuse what is whole but not a client's to send; the rules are Kafka's `LogValidator`."""
    attributes, count = batch.attributes, batch.records
    if count <= 0:
        raise InvalidRecords(f"a record count of {count}", at)
    if batch.last_offset_delta != count - 1:
        raise InvalidRecords(f"{count} records, but the last offset delta is {batch.last_offset_delta}", at)
    if attributes & CONTROL_BIT:
        raise InvalidRecords("a control batch, which only a broker writes", at)
    if attributes & TRANSACTIONAL_BIT:
        raise TransactionalBatch("transactions are not supported", at)
    if attributes & LOG_APPEND_TIME_BIT:
        raise InvalidTimestamp("timestamp type LogAppendTime, which only a broker sets", at)
    if attributes & ~CODEC_BITS:
        # Bit 6 is the log cleaner's delete horizon, which changes what the base timestamp means.
        raise InvalidRecords(f"attributes {attributes & 0xFFFF:#06x} have bits that are not a client's", at)
    if batch.max_timestamp_ms < NO_TIMESTAMP:
        raise InvalidTimestamp(f"a maximum timestamp of {batch.max_timestamp_ms}", at)
    if batch.base_timestamp_ms < NO_TIMESTAMP:
        raise InvalidTimestamp(f"a base timestamp of {batch.base_timestamp_ms}", at)
    if batch.producer_id >= 0 and (batch.producer_epoch < 0 or batch.base_sequence < 0):
        raise InvalidRecords(
            f"producer {batch.producer_id} with epoch {batch.producer_epoch}"
            f" and base sequence {batch.base_sequence}",
            at,
        )
    # Offsets are given out by this count, so a lie would burn up to 2^31 of them with every small batch.
    room = len(batch.data) - HEADER_BYTES
    compressed = attributes & CODEC_BITS
    fitting = room * _MAX_RECORDS_PER_BYTE if compressed else room // _SMALLEST_RECORD_BYTES
    if count > fitting:
        raise InvalidRecords(f"{count} records cannot be in {room} bytes", at)
    if count > _MAX_RECORDS:
        raise InvalidRecords(f"{count} records are above the limit of {_MAX_RECORDS}", at)
