"""What the store holds for a topic: versioned JSON records and their keys. Pure.

| key | domain | what it is |
|---|---|---|
| `topics/<name>` | the cluster's | the topic; its versions decide all that happens to it |
| `streams/<16 hex digits>` | the stream's own | the claim of a stream id by one partition of one topic |
| `deleted-topics/<32 hex digits>` | the cluster's | a topic that is gone, for whoever frees its space |

What happens to these records, and in which order, is for `catalog`. A topic is visible if it is active and
has streams. Its number of partitions only grows: partition p is `streams[p]`, for ever.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar
from uuid import UUID, uuid5

from dray.errors import CorruptStore, IncompatibleStore
from dray.metadata.keys import escape

TOPICS = "topics"
DELETED_TOPICS = "deleted-topics"
STREAMS = "streams"
FORMAT = 1

_STREAM_ID = re.compile("[0-9a-f]{16}")

Value = TypeVar("Value")


class TopicState(enum.Enum):
    ACTIVE = "active"
    DELETING = "deleting"  # gone for everybody; whoever meets it removes it


@dataclass(frozen=True, slots=True)
class TopicRecord:
    name: str
    topic_id: UUID
    state: TopicState
    streams: tuple[int, ...]  # the stream of each partition; claimed
    planned: tuple[int, ...]  # those of the partitions that are being added; perhaps not yet claimed
    configs: Mapping[str, str]  # only what differs from the defaults on purpose
    created_at_ms: int

    @property
    def visible(self) -> bool:
        return self.state is TopicState.ACTIVE and bool(self.streams)

    @property
    def at_rest(self) -> bool:
        """Nothing is left to be done by whoever meets it."""
        return self.visible and not self.planned


@dataclass(frozen=True, slots=True)
class StreamRecord:
    topic_id: UUID
    topic: str
    partition: int
    created_at_ms: int


def topic_key(name: str) -> str:
    return f"{TOPICS}/{escape(name)}"


def deleted_key(topic_id: UUID) -> str:
    return f"{DELETED_TOPICS}/{topic_id.hex}"


def stream_key(stream_id: int) -> str:
    return f"{STREAMS}/{stream_id:016x}"


def partition_uuid(topic_id: UUID, partition: int) -> UUID:
    """The id that a partition has outside of Dray."""
    return uuid5(topic_id, str(partition))


def encode_topic(record: TopicRecord) -> bytes:
    return _dump(
        {
            "format": FORMAT,
            "name": record.name,
            "topic_id": str(record.topic_id),
            "state": record.state.value,
            "streams": [f"{stream:016x}" for stream in record.streams],
            "planned": [f"{stream:016x}" for stream in record.planned],
            "configs": dict(sorted(record.configs.items())),
            "created_at_ms": record.created_at_ms,
        }
    )


def decode_topic(key: str, value: bytes) -> TopicRecord:
    """Raises `IncompatibleStore` for a newer format, `CorruptStore` for what nobody can have written."""
    fields = _load(key, value)
    configs = _field(key, fields, "configs", dict)
    if not all(isinstance(text, str) for text in configs.values()):
        raise CorruptStore(f"{key}: a config is no text: {value[:200]!r}")
    record = TopicRecord(
        name=_field(key, fields, "name", str),
        topic_id=_uuid(key, fields, "topic_id"),
        state=_state(key, fields),
        streams=_streams(key, fields, "streams"),
        planned=_streams(key, fields, "planned"),
        configs=configs,
        created_at_ms=_field(key, fields, "created_at_ms", int),
    )
    if not record.streams and not record.planned:
        raise CorruptStore(f"{key}: a topic without partitions")
    return record


def encode_stream(record: StreamRecord) -> bytes:
    return _dump(
        {
            "format": FORMAT,
            "topic_id": str(record.topic_id),
            "topic": record.topic,
            "partition": record.partition,
            "created_at_ms": record.created_at_ms,
        }
    )


def decode_stream(key: str, value: bytes) -> StreamRecord:
    """Raises like `decode_topic`."""
    fields = _load(key, value)
    return StreamRecord(
        topic_id=_uuid(key, fields, "topic_id"),
        topic=_field(key, fields, "topic", str),
        partition=_field(key, fields, "partition", int),
        created_at_ms=_field(key, fields, "created_at_ms", int),
    )


def _dump(fields: dict[str, object]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()


def _load(key: str, value: bytes) -> dict[str, object]:
    """The format is looked at before anything else: a newer one may change all the rest."""
    try:
        fields = json.loads(value)
    except ValueError:
        raise CorruptStore(f"{key}: not JSON: {value[:80]!r}") from None
    if not isinstance(fields, dict):
        raise CorruptStore(f"{key}: not a JSON object: {value[:80]!r}")
    version = _field(key, fields, "format", int)
    if version > FORMAT:
        raise IncompatibleStore(f"{key} has format {version}, and this Dray knows those up to {FORMAT}")
    if version < 1:
        raise CorruptStore(f"{key}: there is no format {version}")
    return fields


def _field(key: str, fields: dict[str, object], name: str, kind: type[Value]) -> Value:
    value = fields.get(name)
    if type(value) is not kind:  # not isinstance: True is no number here
        raise CorruptStore(f"{key}: no usable {name}: {str(value)[:80]!r}")
    return value


def _uuid(key: str, fields: dict[str, object], name: str) -> UUID:
    try:
        return UUID(_field(key, fields, name, str))
    except ValueError:
        raise CorruptStore(f"{key}: {name} is no UUID: {fields[name]!r}") from None


def _state(key: str, fields: dict[str, object]) -> TopicState:
    try:
        return TopicState(_field(key, fields, "state", str))
    except ValueError:
        raise CorruptStore(f"{key}: there is no state {fields['state']!r}") from None


def _streams(key: str, fields: dict[str, object], name: str) -> tuple[int, ...]:
    texts = _field(key, fields, name, list)
    if not all(isinstance(text, str) and _STREAM_ID.fullmatch(text) for text in texts):
        raise CorruptStore(f"{key}: {name} are not all of 16 hex digits: {str(texts)[:80]!r}")
    return tuple(int(text, 16) for text in texts)
