"""What `drayd admin wal inspect` tells about one WAL object: for people a table, for scripts JSON.

Unlike a reader, which refuses a damaged object as a whole, this goes on where it can: what is readable is
shown, and every problem is listed. It looks deeper, too: at the checksum of every batch, and whether
batches and chunk index agree on the number of records.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from dray.errors import InvalidBatch, InvalidObjectRequest, WalFormatError
from dray.metadata.opening import redact
from dray.objectstore.opening import FileUrl, open_object_store, parse_objects_url
from dray.protocol.records import Batch, read_batch
from dray.wal.format import (
    PREFIX_BYTES,
    VERSION,
    ChunkEntry,
    Header,
    check_checksum,
    check_end,
    decode_chunk,
    decode_header,
    iter_index,
)

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(slots=True)
class Chunk:
    entry: ChunkEntry
    batches: list[tuple[int, Batch]] = field(default_factory=list)  # with the byte each begins at


@dataclass(slots=True)
class Inspection:
    size_bytes: int
    header: Header | None = None
    checksum: str = "unknown"  # or ok, wrong, absent
    chunks: list[Chunk] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


async def read_object(name: str, objects: str) -> bytes:
    """The bytes of a local file, of an object by its URL, or of a key in the object store `objects`.

    Raises `OSError` for a file, `ObjectStoreError` for an object.
    """
    if "://" in name:
        if isinstance(where := parse_objects_url(name), FileUrl):
            return await asyncio.to_thread(_read_file, where.path)
        if not where.prefix:
            raise InvalidObjectRequest(f"{redact(name)}: name an object in the bucket")
        path, mark, options = name.partition("?")
        store, _, key = path.rpartition("/")
        return await _get(store + mark + options, unquote(key))
    if await asyncio.to_thread(Path(name).exists):
        return await asyncio.to_thread(_read_file, Path(name))
    # Not through the store, which would make a directory that is not there.
    if isinstance(where := parse_objects_url(objects), FileUrl):
        try:
            return await asyncio.to_thread(_read_file, where.path / name)
        except FileNotFoundError:
            problem = f"neither a file nor a key in {redact(objects)}"
            raise FileNotFoundError(errno.ENOENT, problem) from None
    return await _get(objects, name)


def inspect_object(data: bytes) -> Inspection:
    found = Inspection(len(data))
    view = memoryview(data)
    try:
        found.header = header = decode_header(view)
    except WalFormatError as error:
        found.problems.append(str(error))
        return found
    found.checksum = _checksum(header, view, found.problems)
    try:
        for entry in iter_index(header, view[header.index_offset : header.index_end]):
            found.chunks.append(chunk := Chunk(entry))
            _inspect_chunk(chunk, view, found.problems)
    except WalFormatError as error:
        found.problems.append(str(error))
    return found


def as_json(found: Inspection) -> dict[str, Any]:
    """Stream ids are hexadecimal: JSON's numbers end at 2^53 in many languages."""
    header = found.header
    return {
        "size_bytes": found.size_bytes,
        "header": None
        if header is None
        else {"version": VERSION, **header._asdict(), "wal_id": str(header.wal_id)},
        "checksum": found.checksum,
        "chunks": [
            {
                **chunk.entry._asdict(),
                "stream_id": f"{chunk.entry.stream_id:016x}",
                "batches": [
                    {"at": at, "size_bytes": len(batch.data), "codec": batch.codec, **_header_fields(batch)}
                    for at, batch in chunk.batches
                ],
            }
            for chunk in found.chunks
        ],
        "problems": found.problems,
    }


def as_table(found: Inspection) -> Iterator[str]:
    """Line by line."""
    header = found.header
    if header is not None:
        yield f"wal id    {header.wal_id}"
        yield f"version   {VERSION}"
        yield f"domain    {header.domain}"
        yield f"created   {_time(header.created_at_ms)}"
        yield f"chunks    {header.chunk_count}, index at byte {header.index_offset}"
    yield f"size      {found.size_bytes} bytes"
    yield f"checksum  {found.checksum}"
    for chunk in found.chunks:
        entry = chunk.entry
        yield ""
        yield (
            f"stream {entry.stream_id:016x}  records {entry.records}  batches {entry.batch_count}"
            f"  bytes {entry.length}  at byte {entry.offset}"
        )
        yield f"  {_time(entry.min_timestamp_ms)} to {_time(entry.max_timestamp_ms)}"
        if chunk.batches:
            yield (
                f"  {'at':>10} {'bytes':>9} {'records':>8} {'codec':<6} {'producer':>20} {'epoch':>5}"
                f" {'sequence':>10}  newest record"
            )
        for at, batch in chunk.batches:
            who = (batch.producer_id, batch.producer_epoch, batch.base_sequence)
            producer, epoch, sequence = who if batch.producer_id >= 0 else ("-", "-", "-")
            yield (
                f"  {at:>10} {len(batch.data):>9} {batch.records:>8} {batch.codec:<6} {producer:>20}"
                f" {epoch:>5} {sequence:>10}  {_time(batch.timestamp_range_ms[1])}"
            )
    if found.problems:
        yield ""
    for problem in found.problems:
        yield f"problem: {problem}"


def _read_file(path: Path) -> bytes:
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "Not a file")
    return path.read_bytes()


async def _get(store_url: str, key: str) -> bytes:
    store = await open_object_store(store_url)
    try:
        return await store.get(key)
    finally:
        await store.close()


def _checksum(header: Header, view: memoryview, problems: list[str]) -> str:
    try:
        if not check_end(header, len(view)):
            return "absent"
    except WalFormatError as error:
        problems.append(str(error))
        return "unknown"
    try:
        check_checksum(header, view)
    except WalFormatError as error:
        problems.append(str(error))
        return "wrong"
    return "ok"


def _inspect_chunk(chunk: Chunk, view: memoryview, problems: list[str]) -> None:
    entry = chunk.entry
    try:
        batches = decode_chunk(entry, view[entry.offset : entry.offset + entry.length])
    except WalFormatError as error:
        problems.append(str(error))
        return
    at = entry.offset
    for data in batches:
        at += PREFIX_BYTES
        try:
            chunk.batches.append((at, read_batch(data)))
        except InvalidBatch as error:
            problems.append(f"WAL object, byte {at}: batch of stream {entry.stream_id:016x}: {error.problem}")
        at += len(data)
    counted = sum(batch.records for _, batch in chunk.batches)
    if len(chunk.batches) == entry.batch_count and counted != entry.records:
        problems.append(
            f"WAL object, byte {entry.offset}: the batches of stream {entry.stream_id:016x}"
            f" have {counted} records, but the index says {entry.records}"
        )


def _header_fields(batch: Batch) -> dict[str, Any]:
    fields = batch._asdict()
    del fields["data"]
    return fields


def _time(ms: int) -> str:
    try:
        return (_EPOCH + timedelta(milliseconds=ms)).isoformat(timespec="milliseconds")
    except OverflowError:  # beyond what a calendar has
        return f"{ms} ms"
