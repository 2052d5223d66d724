"""The log-start record of a stream: which offsets were deleted by a client (DeleteRecords). Pure.

One JSON record per stream, `log-start/<stream>` in the stream's own domain; none where nothing was deleted.
Every put names the version it replaces and a higher offset, so **the offset only grows**: a stale read of it
is too low and never too high, and a put that lands late is refused or raises it all the same.

The record hides what is below its offset at once. Entries, bytes and references go later, by retention, which
keeps the order of protocol 15. A log starts where this record or the truncated front of its index says,
whichever is further (`OffsetIndex.log_start`).

Deleting a topic leaves the record, as it leaves all else that its streams have: it goes with them, when
`deleted-topics/` is worked off. No other stream ever has that id.
"""

from __future__ import annotations

import json

from dray.errors import CorruptStore, IncompatibleStore
from dray.metadata.store import MAX_POSITION

FORMAT = 1
_DIRECTORY = "log-start/"


def log_start_key(stream_id: int) -> str:
    return f"{_DIRECTORY}{stream_id:016x}"


def stream_of_key(key: str) -> int | None:
    """The stream whose log start this key holds; None for a key of another kind."""
    return int(key[len(_DIRECTORY) :], 16) if key.startswith(_DIRECTORY) else None


def encode(offset: int) -> bytes:
    return json.dumps({"format": FORMAT, "offset": offset}, separators=(",", ":")).encode()


def decode(key: str, value: bytes) -> int:
    """Raises `IncompatibleStore` for a newer format, `CorruptStore` for what nobody can have written."""
    try:
        fields = json.loads(value)
    except ValueError:
        raise CorruptStore(f"{key}: not JSON: {value[:80]!r}") from None
    version, offset = (fields.get("format"), fields.get("offset")) if isinstance(fields, dict) else (0, 0)
    if type(version) is int and version > FORMAT:  # not isinstance: True is no number here
        raise IncompatibleStore(f"{key} has format {version}, and this Dray knows those up to {FORMAT}")
    if type(version) is not int or version < 1 or type(offset) is not int or not 0 < offset <= MAX_POSITION:
        raise CorruptStore(f"{key}: nobody can have written {value[:80]!r}")
    return offset
