"""The timestamps of the single records inside a batch. Pure.

Reads of every record its length, its timestamp and its offset delta, and nothing else. The layout is that of
Kafka's documentation, "Record":

    length varint | attributes i8 | timestampDelta varlong | offsetDelta varint | key, value, headers

Varints are zigzag-encoded, of at most 5 bytes, varlongs of at most 10. What does not parse, and records that
are not numbered 0 … n-1, raise `InvalidRecords`; what does not decompress, see `compression.py`.

A header may say too much or too little about its records: what is answered here comes from the records.
Under LogAppendTime the header alone has the time, and it is every record's.
"""

from __future__ import annotations

from collections.abc import Iterator

from dray.errors import InvalidRecords
from dray.protocol.compression import decompress
from dray.protocol.records import HEADER_BYTES, LOG_APPEND_TIME_BIT, Batch, Buffer

_MAX_VARINT_SHIFT = 28
_MAX_VARLONG_SHIFT = 63


def first_at_or_after(
    batch: Batch, timestamp_ms: int, max_bytes: int, first: int = 0
) -> tuple[int, int] | None:
    """Offset delta and timestamp of the first record that is not older, in offset order.

    Reads no further than that record. `max_bytes` is for the decompressed records. Those before number
    `first` do not count.
    """
    for delta, timestamp in _timestamps(batch, max_bytes, first):
        if timestamp >= timestamp_ms:
            return delta, timestamp
    return None


def latest(batch: Batch, max_bytes: int, first: int = 0) -> tuple[int, int]:
    """Offset delta and timestamp of the newest record: the first of several, as Kafka has it.

    (`RecordBatch.offsetOfMaxTimestamp`, KAFKA-16310.) Those before number `first` do not count.
    """
    best: tuple[int, int] | None = None
    for delta, timestamp in _timestamps(batch, max_bytes, first):
        if best is None or timestamp > best[1]:
            best = delta, timestamp
    if best is None:
        raise InvalidRecords("there are none", 0)
    return best


def _timestamps(batch: Batch, max_bytes: int, first: int) -> Iterator[tuple[int, int]]:
    """Number and timestamp of each record from `first` on, checked as far as it is read.

    Of that one alone, if its time is everyone's.
    """
    if batch.attributes & LOG_APPEND_TIME_BIT:
        yield first, batch.max_timestamp_ms
        return
    data = decompress(batch.codec, batch.data[HEADER_BYTES:], max_bytes)
    base = batch.base_timestamp_ms
    size = len(data)
    at = 0
    for number in range(batch.records):
        length, at = _varint(data, at, _MAX_VARINT_SHIFT)
        end = at + length
        if not at < end <= size:
            raise InvalidRecords(f"record {number} has {length} bytes where {size - at} are left", 0)
        timestamp_delta, at = _varint(data, at + 1, _MAX_VARLONG_SHIFT)
        offset_delta, at = _varint(data, at, _MAX_VARINT_SHIFT)
        if at > end:
            raise InvalidRecords(f"record {number} is too short for its fields", 0)
        if offset_delta != number:
            raise InvalidRecords(f"record {number} has offset delta {offset_delta}", 0)
        if number >= first:
            yield number, _int64(base + timestamp_delta)
        at = end
    if at != size:
        raise InvalidRecords(f"{size - at} bytes behind the last of {batch.records} records", 0)


def _varint(data: Buffer, at: int, max_shift: int) -> tuple[int, int]:
    """The number that begins at `at`, and where it ends."""
    encoded = shift = 0
    while shift <= max_shift:
        if at >= len(data):
            raise InvalidRecords("the last record is cut short", 0)
        byte = data[at]
        at += 1
        encoded |= (byte & 0x7F) << shift
        if byte < 0x80:
            # The last byte can have bits beyond the 32 or 64. Readers in Java and C drop them.
            encoded &= 0xFFFF_FFFF if max_shift == _MAX_VARINT_SHIFT else 0xFFFF_FFFF_FFFF_FFFF
            return (encoded >> 1) ^ -(encoded & 1), at
        shift += 7
    raise InvalidRecords("a number does not end where it has to", 0)


def _int64(timestamp: int) -> int:
    """A sum beyond 64 bits wraps, as it does for consumers; no answer could carry it."""
    if -(2**63) <= timestamp < 2**63:
        return timestamp
    return (timestamp + 2**63) % 2**64 - 2**63
