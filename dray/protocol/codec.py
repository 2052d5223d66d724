"""Kafka requests out of frames, and responses into buffers, by kio's classes. Pure.

A response is built from a mapping with the fields of the newest version: what the asked version lacks is
dropped, what is missing and has a default takes it. Bytes of records are not copied: `Pieces` stand in a
response for what they are made of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from struct import Struct
from typing import Any, NamedTuple, TypeAlias

from kio.index import KioIndexError, load_request_schema, load_response_schema
from kio.serial import entity_reader, entity_writer
from kio.serial.errors import SerialError

from dray.errors import MalformedRequest, UnsupportedRequest
from dray.protocol.guard import Walked, walker
from dray.protocol.schema import EntityType, fields_of

Buffer: TypeAlias = bytes | bytearray | memoryview
Fields: TypeAlias = Mapping[str, Any]

# Key and version stand first in every header, whatever its version.
_KEY_AND_VERSION = Struct(">hh")
_CORRELATION = Struct(">i")
_LENGTH = Struct(">i")
_SMALLEST_HEADER_BYTES = 8
# Kafka is at 92 and 18 after fifteen years.
_KEYS = 1024
_VERSIONS = 128


class Target(NamedTuple):
    """Which API a request is for, and what it is answered to."""

    api_key: int
    version: int
    correlation_id: int


class Request(NamedTuple):
    api_key: int
    version: int
    correlation_id: int
    client_id: str | None
    body: Any  # kio's entity of that API and version


def peek(frame: bytes) -> Target:
    """What can be known of a request of any API and version. Raises `MalformedRequest`."""
    if len(frame) < _SMALLEST_HEADER_BYTES:
        raise MalformedRequest(f"a request of {len(frame)} bytes has no header", 0)
    return Target(*_KEY_AND_VERSION.unpack_from(frame), *_CORRELATION.unpack_from(frame, 4))


def may_be_request(start: bytes) -> bool:
    """Whether a large request can begin with these four bytes. Keys and versions are small numbers."""
    key, version = _KEY_AND_VERSION.unpack(start)
    return key in range(_KEYS) and version in range(_VERSIONS)


def decode_request(frame: bytes) -> Request:
    """Raises `UnsupportedRequest` where there is no such API or version, `MalformedRequest` for rubbish."""
    target = peek(frame)
    walk_header, read_header, walk_body, read_body = _reading(target.api_key, target.version)
    walked = Walked()
    walk_body(frame, walk_header(frame, 0, walked), walked)  # what follows is ignored, as Kafka does
    frame = walked.without_cuts(frame)
    try:
        header, size = read_header(frame, 0)
        body, _ = read_body(frame, size)
    except (SerialError, ValueError, OverflowError, TypeError) as error:
        raise MalformedRequest(f"{type(error).__name__}: {error}", 0) from None
    return Request(*target, header.client_id, body)


class Pieces:
    """Bytes in several buffers, to be sent one after the other."""

    __slots__ = ("buffers", "size")

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self.buffers = buffers
        self.size = sum(map(len, buffers))

    def __len__(self) -> int:
        return self.size


def encode_response(target: Target, fields: Fields) -> list[Buffer]:
    """A framed response: buffers to be sent one after the other. Their total is in the first."""
    entity, write_header, header, write_body = _writing(target.api_key, target.version)
    out = _Output()
    write_header(out, header(correlation_id=target.correlation_id))
    write_body(out, build(entity, fields))
    return out.framed()


def build(entity: EntityType, fields: Fields) -> Any:
    """An instance of one of kio's classes, structures inside it given as mappings too."""
    values: dict[str, Any] = {}
    for field in fields_of(entity):
        if field.name not in fields:
            if not field.has_default:
                raise TypeError(f"{entity.__module__}.{entity.__qualname__} needs {field.name}")
            continue
        value = fields[field.name]
        if value is not None:
            if field.is_array:
                nested = field.entity
                value = tuple(value) if nested is None else tuple([build(nested, each) for each in value])
            elif field.entity is not None:
                value = build(field.entity, value)
        values[field.name] = value
    return entity(**values)


class _Output:
    """What kio writes to. Many small writes are joined; large ones stay the buffers they are."""

    def __init__(self) -> None:
        self._buffers: list[Buffer] = []
        self._small: list[bytes] = [b"\0\0\0\0"]  # room for the length
        self._size = 0

    def write(self, data: bytes | Pieces) -> int:
        size = len(data)
        self._size += size
        if isinstance(data, Pieces):
            self._flush()
            self._buffers.extend(data.buffers)
        else:
            self._small.append(data)
        return size

    def framed(self) -> list[Buffer]:
        self._flush()
        first = self._buffers[0]
        self._buffers[0] = _LENGTH.pack(self._size) + first[_LENGTH.size :]
        return self._buffers

    def _flush(self) -> None:
        if self._small:
            self._buffers.append(b"".join(self._small))
            self._small = []


def size_of(buffers: Iterable[Buffer]) -> int:
    return sum(map(len, buffers))


@cache
def _reading(api_key: int, version: int) -> tuple[Any, Any, Any, Any]:
    try:
        schema: Any = load_request_schema(api_key, version)
    except KioIndexError:
        raise UnsupportedRequest(api_key, version) from None
    header = schema.__header_schema__
    return walker(header), entity_reader(header), walker(schema), entity_reader(schema)


@cache
def _writing(api_key: int, version: int) -> tuple[EntityType, Any, EntityType, Any]:
    schema: Any = load_response_schema(api_key, version)
    header: Any = schema.__header_schema__
    return schema, entity_writer(header), header, entity_writer(schema)
