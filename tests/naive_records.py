"""Record batches as a plain loop over Kafka's documentation of them; shares no code with Dray.

What `dray.columns` does by the million is compared with this. Numbers that a client would read differently
from what they should be (too long, beyond their type) are read as Kafka's Java client does.
"""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import cramjam
import lz4.frame  # type: ignore[import-untyped]  # has no stubs
import pyarrow as pa
import zstandard
from aiokafka.codec import snappy_encode  # type: ignore[import-untyped]  # has no stubs
from crc32c import crc32c

from tests.batches import build_batch

HEADER = struct.Struct(">qiibIhiqqqhii")
LOG_APPEND_TIME = 8


def xerial(data: bytes) -> bytes:
    return bytes(snappy_encode(data))


def bare_snappy(data: bytes) -> bytes:
    return bytes(cramjam.snappy.compress_raw(data))


def zstd_stream(data: bytes) -> bytes:
    """Without a content size, as Java's clients write it."""
    compressor = zstandard.ZstdCompressor().compressobj()
    return compressor.compress(data) + compressor.flush()


# By name, with the code in the attributes.
CODECS: dict[str, tuple[int, Callable[[bytes], bytes]]] = {
    "none": (0, bytes),
    "gzip": (1, gzip.compress),
    "snappy": (2, xerial),
    "snappy, bare": (2, bare_snappy),
    "lz4": (3, lz4.frame.compress),
    "zstd": (4, zstandard.ZstdCompressor().compress),
    "zstd, unknown size": (4, zstd_stream),
}


@dataclass(frozen=True)
class Record:
    """What a consumer gets to see."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    producer: tuple[int, int, int] | None = None  # id, epoch, sequence
    attributes: int = 0


@dataclass(frozen=True)
class Plan:
    """A batch to be built."""

    records: Sequence[tuple[int, bytes | None, bytes | None, tuple[tuple[str, bytes | None], ...]]]
    codec: str = "none"
    base_timestamp: int = 1_700_000_000_000
    producer: tuple[int, int, int] = (-1, -1, -1)
    append_time: int | None = None
    gap: int = 0  # offsets left out before it
    extra_bits: int = field(default=0)


def varint(number: int) -> bytes:
    bits = (number << 1) if number >= 0 else (-number << 1) - 1
    out = bytearray()
    while bits >= 0x80:
        out.append(bits & 0x7F | 0x80)
        bits >>= 7
    out.append(bits)
    return bytes(out)


def sized(data: bytes | None) -> bytes:
    return varint(-1) if data is None else varint(len(data)) + data


def wrapped(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


def record(
    delta: int,
    timestamp_delta: int,
    key: bytes | None,
    value: bytes | None,
    headers: Sequence[tuple[str, bytes | None]] = (),
) -> bytes:
    body = b"\x00" + varint(timestamp_delta) + varint(delta) + sized(key) + sized(value)
    body += varint(len(headers))
    for name, content in headers:
        body += sized(name.encode()) + sized(content)
    return varint(len(body)) + body


def build(plan: Plan) -> bytes:
    """The batch with base offset 0."""
    records = b"".join(
        record(delta, wrapped(timestamp - plan.base_timestamp), key, value, headers)
        for delta, (timestamp, key, value, headers) in enumerate(plan.records)
    )
    code, compress = CODECS[plan.codec]
    newest = max(timestamp for timestamp, *_ in plan.records)
    attributes = code | plan.extra_bits
    if plan.append_time is not None:
        attributes, newest = attributes | LOG_APPEND_TIME, plan.append_time
    producer_id, epoch, sequence = plan.producer
    return build_batch(
        compress(records),
        attributes=attributes,
        base_timestamp=plan.base_timestamp,
        max_timestamp=newest,
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=sequence,
        records=len(plan.records),
    )


class Refused(Exception):
    """Nobody should make anything of this batch."""


def decompressed(code: int, body: bytes) -> bytes:
    """Of one frame, as the tests write them."""
    if code == 0:
        return body
    if code == 1:
        return gzip.decompress(body)
    if code == 2:
        if body[:8] != b"\x82SNAPPY\x00":
            return bytes(cramjam.snappy.decompress_raw(body))
        at, out = 16, b""
        while at < len(body):
            length = int.from_bytes(body[at : at + 4])
            out += bytes(cramjam.snappy.decompress_raw(body[at + 4 : at + 4 + length]))
            at += 4 + length
        return out
    if code == 3:
        return bytes(lz4.frame.decompress(body))
    return bytes(zstandard.ZstdDecompressor().stream_reader(body).read())


class Reader:
    def __init__(self, data: bytes, at: int, end: int) -> None:
        self.data, self.at, self.end = data, at, end

    def number(self, most: int) -> int:
        bits = 0
        for index in range(most):
            (byte,) = self.take(1)
            bits |= (byte & 0x7F) << 7 * index
            if byte < 0x80:
                bits &= 0xFFFF_FFFF if most == 5 else 0xFFFF_FFFF_FFFF_FFFF
                return bits >> 1 if bits % 2 == 0 else -(bits >> 1) - 1
        raise Refused("number")

    def take(self, length: int) -> bytes:
        if length > self.end - self.at:
            raise Refused("length")
        self.at += length
        return self.data[self.at - length : self.at]

    def bytes_or_null(self) -> bytes | None:
        length = self.number(5)
        return None if length < 0 else self.take(length)


def parse(batch: bytes, base_offset: int | None = None) -> list[Record]:
    """The records of one uncompressed or compressed batch; `Refused` if it is not sound."""
    if len(batch) < HEADER.size:
        raise Refused("size")
    (
        offset,
        length,
        _,
        magic,
        crc,
        attributes,
        last_delta,
        base_timestamp,
        newest,
        producer_id,
        epoch,
        sequence,
        count,
    ) = HEADER.unpack_from(batch)
    if magic != 2 or length + 12 != len(batch) or crc != crc32c(batch[21:]):
        raise Refused("header")
    if count < 1 or last_delta != count - 1 or attributes & 7 > 4 or attributes & ~0x1F:
        raise Refused("header")
    if producer_id >= 0 and (epoch < 0 or sequence < 0):
        raise Refused("producer")
    data = decompressed(attributes & 7, batch[HEADER.size :])
    first = offset if base_offset is None else base_offset
    records = []
    at = 0
    for delta in range(count):
        reader = Reader(data, at, len(data))
        size = reader.number(5)
        if size <= 0 or size > len(data) - reader.at:
            raise Refused("record")
        reader.end = at = reader.at + size
        reader.take(1)
        timestamp = wrapped(base_timestamp + reader.number(10))
        if reader.number(5) != delta:
            raise Refused("delta")
        key, value = reader.bytes_or_null(), reader.bytes_or_null()
        headers = []
        header_count = reader.number(5)
        if not 0 <= header_count <= size:
            raise Refused("headers")
        for _ in range(header_count):
            name = reader.bytes_or_null()
            if name is None:
                raise Refused("header key")
            try:
                text = name.decode()
            except UnicodeDecodeError:
                raise Refused("header key") from None
            headers.append((text, reader.bytes_or_null()))
        if reader.at != at:
            raise Refused("rest of record")
        records.append(
            Record(
                first + delta,
                newest if attributes & LOG_APPEND_TIME else timestamp,
                key,
                value,
                tuple(headers),
                None if producer_id < 0 else (producer_id, epoch, (sequence + delta) % 2**31),
                attributes & ~7,
            )
        )
    if at != len(data):
        raise Refused("rest of batch")
    return records


def rows_as_records(table: pa.Table) -> list[Record]:
    """Rows of Dray's table schema, as its description in `dray.columns.schema` says."""
    microseconds = table["timestamp"].cast(pa.int64()).to_pylist()
    records = []
    for time, row in zip(microseconds, table.drop(["timestamp"]).to_pylist(), strict=True):
        assert (time is None) != (row["raw_timestamp"] is None)
        producer = (row["producer_id"], row["producer_epoch"], row["sequence"])
        assert producer.count(None) in (0, 3)
        records.append(
            Record(
                row["offset"],
                row["raw_timestamp"] if time is None else time // 1_000,
                row["key"],
                row["value"],
                tuple((header["key"], header["value"]) for header in row["headers"]),
                None if None in producer else producer,
                row["attributes"],
            )
        )
    return records
