"""What the metadata store knows of a WAL object: its marker, its record, its references. Pure.

    wal/staging/<id>             the marker: put before the object, removed by the append that commits it
    wal/objects/<id>             the record: COMMITTED or FENCED, only ever put expecting ABSENT
    wal/objects/<id>-<stream>    a reference: one per stream that has an entry in the object

The record decides whether the object counts (protocol 11): the append that commits an object puts COMMITTED,
whoever wants to be rid of it puts FENCED first, and exactly one of them wins. Record and references are
neighbours, so that one scan shows them at one moment (protocol 14).
"""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from uuid import UUID

from dray.errors import CorruptStore

STAGING = "wal/staging"
OBJECTS = "wal/objects"


class State(enum.Enum):
    COMMITTED = "COMMITTED"
    FENCED = "FENCED"


@dataclass(frozen=True, slots=True)
class Marker:
    """An object that is on its way. `created_at_ms` is for liveness only: nothing is decided by it."""

    object_id: UUID
    path: str
    size_bytes: int
    created_at_ms: int


@dataclass(frozen=True, slots=True)
class ObjectRecord:
    """`at_ms`: when it was committed or fenced, by the clock of whoever did it."""

    state: State
    path: str
    size_bytes: int
    at_ms: int


def marker_key(object_id: UUID) -> str:
    return f"{STAGING}/{object_id.hex}"


def record_key(object_id: UUID) -> str:
    return f"{OBJECTS}/{object_id.hex}"


def reference_key(object_id: UUID, stream_id: int) -> str:
    return f"{OBJECTS}/{object_id.hex}-{stream_id:016x}"


def encode_marker(marker: Marker) -> bytes:
    return json.dumps(
        {"path": marker.path, "sizeBytes": marker.size_bytes, "createdAt": marker.created_at_ms}
    ).encode()


def decode_marker(key: str, value: bytes) -> Marker:
    try:
        fields = json.loads(value)
        object_id = UUID(hex=key.removeprefix(f"{STAGING}/"))
        return Marker(object_id, str(fields["path"]), int(fields["sizeBytes"]), int(fields["createdAt"]))
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptStore(f"{key} is no staging marker: {error!r}") from None


def encode_record(record: ObjectRecord) -> bytes:
    return json.dumps(
        {
            "state": record.state.value,
            "path": record.path,
            "sizeBytes": record.size_bytes,
            "at": record.at_ms,
        }
    ).encode()


def decode_record(key: str, value: bytes) -> ObjectRecord:
    try:
        fields = json.loads(value)
        return ObjectRecord(
            State(fields["state"]), str(fields["path"]), int(fields["sizeBytes"]), int(fields["at"])
        )
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptStore(f"{key} is no record of a WAL object: {error!r}") from None
