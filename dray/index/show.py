"""A stream's index as people and scripts see it: `drayd admin index show`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from dray.index.entry import (
    ParquetFile,
    Placed,
    Truncated,
    Void,
    WalChunk,
    is_decided,
    live,
    place_all,
    sequence_of,
    stream_domain,
)
from dray.index.lookup import OffsetIndex
from dray.metadata.store import MetadataStore, Position


@dataclass(frozen=True, slots=True)
class StreamIndex:
    stream_id: int
    domain: int
    log_start: int
    end: Position
    # Superseded ones too: they are what one looks for after a crash. By what is shown, that is.
    stored: Sequence[Placed]
    has_more: bool


async def read_index(store: MetadataStore, stream_id: int, num_domains: int, limit: int) -> StreamIndex:
    """The first `limit` entries. A stream that nobody has written to is empty."""
    domain = stream_domain(stream_id, num_domains)
    index = OffsetIndex(store, lambda _: domain)
    stored = place_all(await store.entries(domain, sequence_of(stream_id), 1, limit + 1))
    log_start, end = await index.log_start(stream_id), await index.end(stream_id)
    return StreamIndex(stream_id, domain, log_start, end, stored[:limit], len(stored) > limit)


def as_json(shown: StreamIndex) -> dict[str, object]:
    return {
        "stream": f"{shown.stream_id:016x}",
        "domain": shown.domain,
        "log_start_offset": shown.log_start,
        "end_offset": shown.end.end_records,
        "end_bytes": shown.end.end_bytes,
        "entries": _rows(shown),
        "has_more": shown.has_more,
    }


def as_table(shown: StreamIndex) -> str:
    lines = [
        f"stream     {shown.stream_id:016x}",
        f"domain     {shown.domain}",
        f"log start  {shown.log_start}",
        f"end        {shown.end.end_records} ({shown.end.end_bytes} bytes)",
        "",
        f"{'start':>12}{'end':>12}{'records':>10}{'bytes':>12}{'batches':>9}"
        f"  {'created':<26}{'kind':<11}path",
    ]
    for row in _rows(shown):
        path = row["path"] if row["live"] else f"{row['path']} (superseded)"
        lines.append(
            f"{row['start_offset']:>12}{row['end_offset']:>12}{row['records']:>10}{row['bytes']:>12}"
            f"{row['batches']:>9}  {row['created']:<26}{row['kind']:<11}{path}".rstrip()
        )
    if shown.has_more:
        lines.append("more entries follow; --limit shows more")
    return "\n".join(lines)


def _rows(shown: StreamIndex) -> list[dict[str, object]]:
    alive = {placed.end_offset for placed in live(shown.stored)}
    return [_row(placed, placed.end_offset in alive) for placed in shown.stored]


def _row(placed: Placed, is_live: bool) -> dict[str, object]:
    path, size_bytes, batches, served = "", 0, 0, 0
    match placed.entry.where:
        case WalChunk() as chunk:
            kind = "wal" if is_decided(placed, placed.entry.incarnation) else "unresolved"
            path, size_bytes, batches = chunk.path, chunk.chunk_length, len(chunk.batches)
            served = sum(map(chunk.is_served, range(batches)))
        case ParquetFile() as file:
            kind, path, size_bytes = "parquet", file.path, file.size_bytes
        case Truncated():
            kind = "truncated"
        case Void():
            kind = "void"
    return {
        "start_offset": placed.start_offset,
        "end_offset": placed.end_offset,
        "records": placed.entry.records,
        "bytes": size_bytes,
        "end_bytes": placed.end_bytes,
        "kind": kind,
        "path": path,
        "batches": batches,
        "served_batches": served,
        "expected_start": placed.entry.expected_start,
        "created": _time(placed.entry.created_at_ms),
        "live": is_live,
    }


def _time(ms: int) -> str:
    """ISO 8601; a number that is no date, as any 64 bits may be, stays a number."""
    try:
        return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="seconds")
    except (OverflowError, ValueError, OSError):
        return str(ms)
