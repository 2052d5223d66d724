"""A Kafka client of nothing but a socket: requests by kio's classes or of any bytes, and frames back.

Shares no code with Dray. Fields that are not given are zero, empty, or what the schema has as default.
"""

from __future__ import annotations

import asyncio
import dataclasses
import io
import random
import socket
import struct
import typing
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import cache
from types import NoneType, TracebackType
from typing import Any, Self
from uuid import UUID

from kio.index import KioIndexError, load_request_schema, load_response_schema
from kio.serial import entity_reader, entity_writer

Fields = Mapping[str, Any]


def versions_of(api_key: int) -> list[int]:
    """The versions of requests that kio knows."""
    known = []
    for version in range(50):
        try:
            load_request_schema(api_key, version)
        except KioIndexError:
            continue
        known.append(version)
    return known


def request(
    api_key: int,
    version: int,
    fields: Fields | None = None,
    *,
    correlation_id: int = 0,
    client_id: str | None = "wire",
) -> bytes:
    """A request without its length. Structures inside it are mappings too."""
    return encode(
        api_key,
        version,
        entity(load_request_schema(api_key, version), fields or {}),
        correlation_id,
        client_id,
    )


def encode(
    api_key: int, version: int, body: Any, correlation_id: int = 0, client_id: str | None = "wire"
) -> bytes:
    header = typing.cast(Any, type(body)).__header_schema__
    out = io.BytesIO()
    about = {
        "request_api_key": api_key,
        "request_api_version": version,
        "correlation_id": correlation_id,
        "client_id": client_id,
    }
    entity_writer(header)(out, entity(header, about))
    entity_writer(type(body))(out, body)
    return out.getvalue()


def decode(api_key: int, version: int, payload: bytes) -> tuple[int, Any]:
    """Correlation id and body of a response; all of it is read."""
    schema: Any = load_response_schema(api_key, version)
    header, at = entity_reader(schema.__header_schema__)(payload, 0)
    body, size = entity_reader(schema)(payload, at)
    assert at + size == len(payload), f"{len(payload) - at - size} bytes are left over"
    return header.correlation_id, body


def framed(payload: bytes) -> bytes:
    return struct.pack(">i", len(payload)) + payload


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """None: the other side has closed."""
    try:
        (size,) = struct.unpack(">i", await reader.readexactly(4))
        return await reader.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


class Wire:
    """One blocking connection."""

    def __init__(self, port: int, timeout_s: float = 30) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close()

    def send(self, payload: bytes) -> None:
        self.socket.sendall(framed(payload))

    def receive(self) -> bytes | None:
        """The next frame; None: the broker has closed the connection."""
        start = self._exactly(4)
        return None if start is None else self._exactly(struct.unpack(">i", start)[0])

    def ask(self, api_key: int, version: int, fields: Fields | None = None, correlation_id: int = 7) -> Any:
        self.send(request(api_key, version, fields, correlation_id=correlation_id))
        answer = self.receive()
        assert answer is not None, f"no answer to {api_key} v{version}"
        answered_to, body = decode(api_key, version, answer)
        assert answered_to == correlation_id
        return body

    def _exactly(self, size: int) -> bytes | None:
        received = bytearray()
        while len(received) < size:
            try:
                part = self.socket.recv(size - len(received))
            except ConnectionError:
                return None
            if not part:
                return None
            received += part
        return bytes(received)


class _Shape(typing.NamedTuple):
    name: str
    kafka_type: str | None
    structure: Any
    is_array: bool
    is_nullable: bool
    is_tagged: bool
    default: Any


@cache
def _shapes(schema: Any) -> tuple[_Shape, ...]:
    shapes = []
    for field in dataclasses.fields(schema):
        hint: Any = field.type
        assert not isinstance(hint, str), "kio's annotations are types"
        choices = [each for each in typing.get_args(hint) if each is not NoneType]
        is_nullable = NoneType in typing.get_args(hint)
        if is_nullable:
            (hint,) = choices
        is_array = typing.get_origin(hint) is tuple
        element = typing.get_args(hint)[0] if is_array else hint
        shapes.append(
            _Shape(
                field.name,
                field.metadata.get("kafka_type"),
                element if dataclasses.is_dataclass(element) else None,
                is_array,
                is_nullable,
                "tag" in field.metadata,
                field.default,
            )
        )
    return tuple(shapes)


_ZERO: dict[str, Any] = {
    "string": "",
    "bytes": b"",
    "records": None,
    "uuid": None,
    "bool": False,
    "timedelta_i32": timedelta(0),
    "timedelta_i64": timedelta(0),
}


def entity(schema: Any, fields: Fields) -> Any:
    values: dict[str, Any] = {}
    for shape in _shapes(schema):
        if shape.name not in fields:
            if shape.default is not dataclasses.MISSING:
                values[shape.name] = shape.default
            elif shape.is_array:
                values[shape.name] = ()
            elif shape.structure is not None:
                values[shape.name] = None if shape.is_nullable else entity(shape.structure, {})
            else:
                values[shape.name] = _ZERO.get(str(shape.kafka_type), 0)
            continue
        value = fields[shape.name]
        if shape.structure is not None and value is not None:
            value = (
                tuple(entity(shape.structure, each) for each in value)
                if shape.is_array
                else entity(shape.structure, value)
            )
        elif shape.is_array and value is not None:
            value = tuple(value)
        values[shape.name] = value
    unknown = set(fields) - set(values)
    assert not unknown, f"{schema} has no {unknown}"
    return schema(**values)


def fitting(schema: Any, fields: Fields) -> Fields:
    """The fields that this version has."""
    shapes = {shape.name: shape for shape in _shapes(schema)}
    fit: dict[str, Any] = {}
    for name, value in fields.items():
        shape = shapes.get(name)
        if shape is None:
            continue
        if shape.structure is None or value is None:
            fit[name] = value
        elif shape.is_array:
            fit[name] = [fitting(shape.structure, each) for each in value]
        else:
            fit[name] = fitting(shape.structure, value)
    return fit


def random_entity(schema: Any, rng: random.Random) -> Any:
    """Any entity that the schema allows, often with the values at its ends."""
    values: dict[str, Any] = {}
    for shape in _shapes(schema):
        if shape.is_tagged and rng.random() < 0.5:
            continue
        may_be_null = shape.is_nullable and not (shape.is_tagged and shape.kafka_type == "string")
        if may_be_null and rng.random() < 0.3:
            values[shape.name] = None
        elif shape.is_array:
            values[shape.name] = tuple(_random_element(shape, rng) for _ in range(rng.choice((0, 1, 2, 5))))
        else:
            values[shape.name] = _random_element(shape, rng)
    return schema(**values)


def _random_element(shape: _Shape, rng: random.Random) -> Any:
    if shape.structure is not None:
        return random_entity(shape.structure, rng)
    return _RANDOM[str(shape.kafka_type)](rng)


def _integer(bits: int) -> Callable[[random.Random], int]:
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    return lambda rng: rng.choice((low, -1, 0, 1, high, rng.randint(low, high)))


def _text(rng: random.Random) -> str:
    return rng.choice(("", "a", "topic", "ü" * 70, "\U0001f40d" * rng.randint(1, 99), "x" * 300, "\0"))


_RANDOM: dict[str, Callable[[random.Random], Any]] = {
    "bool": lambda rng: rng.random() < 0.5,
    "int8": _integer(8),
    "int16": _integer(16),
    "int32": _integer(32),
    "int64": _integer(64),
    "string": _text,
    "bytes": lambda rng: rng.randbytes(rng.choice((0, 1, 127, 128, 20_000))),
    "records": lambda rng: rng.randbytes(rng.choice((0, 1, 127, 128, 20_000))),
    "uuid": lambda rng: rng.choice((UUID(int=rng.getrandbits(128)), UUID(int=1))),
    "timedelta_i32": lambda rng: timedelta(milliseconds=_integer(32)(rng)),
    "timedelta_i64": lambda rng: timedelta(milliseconds=_integer(53)(rng)),  # kio reads no more
}
