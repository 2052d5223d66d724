"""Exchanges with real clients, as they are kept in `golden/protocol/`: recording them, and replaying them.

A file has the exchanges of one client in their order: the exact bytes of each request, what it asks, and the
fields of the answer. What differs from run to run stands in angle brackets: ids of topics, the port, the
cluster id, times, directories. A replay puts the ids of its own topics into the requests.

Only the fields of an answer are kept, and not its bytes: `tests/unit/test_broker_stages.py` has bytes of
responses. `golden_clients.py` has the clients, and the commands that make the files.
"""

from __future__ import annotations

import dataclasses
import json
import socket
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from uuid import UUID

from kio.index import load_request_schema, load_response_schema
from kio.serial import entity_reader

DIRECTORY = Path(__file__).parents[2] / "golden" / "protocol"
NODE_ID = 1

Fields: TypeAlias = dict[str, Any]

_API_VERSIONS = 18
# Answered in version 0 where the asked one does not exist (KIP-511).
_NEWEST_API_VERSIONS = 4
_NOBODY = UUID(int=0)
# Nothing here takes a second; a broker that does not answer at all is one that differs.
_TIMEOUT_S = 10.0


class Exchange(NamedTuple):
    name: str
    api: str  # name and version
    request: bytes
    asks: Fields | None  # none where there is no such version
    answer: Fields


class Golden(NamedTuple):
    """One file."""

    client: str
    topic_ids: dict[str, UUID]  # as they stand in the requests
    exchanges: list[Exchange]


def load(path: Path) -> Golden:
    stored = json.loads(path.read_text())
    exchanges = [
        Exchange(each["name"], each["api"], bytes.fromhex(each["request"]), each["asks"], each["answer"])
        for each in stored["exchanges"]
    ]
    return Golden(
        stored["client"], {name: UUID(hex_) for name, hex_ in stored["topic_ids"].items()}, exchanges
    )


def save(path: Path, golden: Golden) -> None:
    exchanges = [{**each._asdict(), "request": each.request.hex()} for each in golden.exchanges]
    ids = {name: str(topic_id) for name, topic_id in golden.topic_ids.items()}
    stored = {"client": golden.client, "topic_ids": ids, "exchanges": exchanges}
    path.write_text(json.dumps(stored, indent=1, ensure_ascii=False) + "\n")


class Rendering:
    """Answers as JSON, without what differs from run to run."""

    def __init__(self, port: int, directory: Path, topic_ids: dict[str, UUID] | None = None) -> None:
        self._port = port
        self._directory = str(directory)
        self._cluster_id: str | None = None
        self.topic_ids = topic_ids or {}

    def learn(self, entity: Any) -> None:
        """Note the cluster id, and the ids of topics that stand beside their names."""
        if isinstance(entity, tuple):
            for each in entity:
                self.learn(each)
        elif dataclasses.is_dataclass(entity):
            name, topic_id = getattr(entity, "name", None), getattr(entity, "topic_id", None)
            if name is not None and topic_id not in (None, _NOBODY):
                self.topic_ids[name] = topic_id
            self._cluster_id = getattr(entity, "cluster_id", None) or self._cluster_id
            for field in dataclasses.fields(entity):
                self.learn(getattr(entity, field.name))

    def fields(self, entity: Any) -> Fields:
        rendered: Fields = self._value("", entity)
        return rendered

    def _value(self, name: str, value: Any) -> Any:
        if dataclasses.is_dataclass(value):
            return {
                field.name: self._value(field.name, getattr(value, field.name))
                for field in dataclasses.fields(value)
            }
        if isinstance(value, tuple):
            return [self._value(name, each) for each in value]
        if isinstance(value, Enum):
            return value.name
        if isinstance(value, timedelta):
            return value // timedelta(milliseconds=1)
        if isinstance(value, datetime):
            return "<time>"
        if isinstance(value, UUID):
            return self._topic_id(value)
        if isinstance(value, bytes | memoryview):
            return bytes(value).hex()
        if isinstance(value, str):
            return self._text(value)
        if name == "last_timestamp" and value >= 0:
            return "<time>"
        return "<port>" if name == "port" and value == self._port else value

    def _topic_id(self, value: UUID) -> str:
        for name, topic_id in self.topic_ids.items():
            if topic_id == value:
                return f"<id of {name}>"
        return str(value)

    def _text(self, value: str) -> str:
        value = value.replace(f":{self._port}", ":<port>").replace(self._directory, "<directory>")
        for name, topic_id in self.topic_ids.items():
            value = value.replace(str(topic_id), f"<id of {name}>")
        return value.replace(self._cluster_id, "<cluster id>") if self._cluster_id else value


def api_of(request: bytes) -> tuple[int, int]:
    key, version = struct.unpack_from(">hh", request)
    return key, version


def api_name(request: bytes) -> str:
    key, version = api_of(request)
    schema = load_request_schema(key, 0 if key == _API_VERSIONS else version)
    return f"{schema.__name__.removesuffix('Request')} {version}"


def read_request(request: bytes) -> Any:
    """By kio alone, without Dray. None where there is no such version."""
    key, version = api_of(request)
    if key == _API_VERSIONS and version > _NEWEST_API_VERSIONS:
        return None
    schema: Any = load_request_schema(key, version)
    _, size = entity_reader(schema.__header_schema__)(request, 0)
    return entity_reader(schema)(request, size)[0]


def read_answer(request: bytes, answer: bytes) -> Any:
    """The entity of the answer. It must be all of the frame, and carry the correlation id."""
    key, version = api_of(request)
    if key == _API_VERSIONS and version > _NEWEST_API_VERSIONS:
        version = 0
    schema: Any = load_response_schema(key, version)
    header, size = entity_reader(schema.__header_schema__)(answer, 0)
    assert struct.pack(">i", header.correlation_id) == request[4:8]
    entity, rest = entity_reader(schema)(answer, size)
    assert size + rest == len(answer), "there is more than the answer"
    return entity


def replay(golden: Golden, address: tuple[str, int], directory: Path) -> Iterator[tuple[Exchange, Fields]]:
    """Each exchange with the fields of the answer that this broker gives, one after the other."""
    rendering = Rendering(address[1], directory)
    connection = socket.create_connection(address, _TIMEOUT_S)
    try:
        for exchange in golden.exchanges:
            request = exchange.request
            for name, topic_id in golden.topic_ids.items():
                if topic_id.bytes in request:
                    request = request.replace(topic_id.bytes, rendering.topic_ids[name].bytes)
            try:
                connection.sendall(_framed(request))
                entity = read_answer(request, _read_frame(connection))
            except (ConnectionError, TimeoutError) as error:
                yield exchange, {"connection": type(error).__name__}
                connection.close()
                connection = socket.create_connection(address, _TIMEOUT_S)
            else:
                rendering.learn(entity)
                yield exchange, rendering.fields(entity)
    finally:
        connection.close()


def _framed(frame: bytes) -> bytes:
    return struct.pack(">i", len(frame)) + frame


def _read_frame(connection: socket.socket) -> bytes:
    (size,) = struct.unpack(">i", _read(connection, 4))
    return _read(connection, size)


def _read(connection: socket.socket, size: int) -> bytes:
    chunks = []
    while size:
        chunk = connection.recv(size)
        if not chunk:
            raise ConnectionError("the other side closed the connection")
        chunks.append(chunk)
        size -= len(chunk)
    return b"".join(chunks)


class Tape:
    """A proxy before a broker that remembers what went through it."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.broker_port = 0
        self._heard: list[tuple[bytes, bytes]] = []
        self.kept: list[tuple[str, bytes, bytes]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @contextmanager
    def step(self, *names: str, only: Callable[[Any], bool] = lambda _: True) -> Iterator[None]:
        """Keep what is answered within, of the APIs that are named "API: what it is about".

        Of an API that is named twice, the first two exchanges; `only` looks at requests.
        """
        before = len(self._heard)
        yield
        left = list(names)
        for request, answer in self._heard[before:]:
            api = api_name(request).split()[0]
            name = next((name for name in left if name.startswith(f"{api}: ")), None)
            if name is not None and only(read_request(request)):
                left.remove(name)
                self.kept.append((name.partition(": ")[2], request, answer))
        for name in left:
            sys.stderr.write(f"missing: {name}\n")

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        broker = socket.create_connection(("127.0.0.1", self.broker_port))
        waiting: deque[bytes] = deque()
        threading.Thread(target=self._answer, args=(broker, client, waiting), daemon=True).start()
        with broker, suppress(OSError):
            while True:
                frame = _read_frame(client)
                waiting.append(frame)
                broker.sendall(_framed(frame))

    def _answer(self, broker: socket.socket, client: socket.socket, waiting: deque[bytes]) -> None:
        with client, suppress(OSError):
            while True:
                frame = _read_frame(broker)
                self._heard.append((waiting.popleft(), frame))
                client.sendall(_framed(frame))


def golden_of(client: str, tape: Tape, directory: Path) -> Golden:
    rendering = Rendering(tape.port, directory)
    entities = [(what, request, read_answer(request, answer)) for what, request, answer in tape.kept]
    for *_, entity in entities:
        rendering.learn(entity)
    used = {
        name: topic_id
        for name, topic_id in rendering.topic_ids.items()
        if any(topic_id.bytes in request for _, request, _ in tape.kept)
    }
    exchanges = [
        Exchange(what, api_name(request), request, asks(request, used), rendering.fields(entity))
        for what, request, entity in entities
    ]
    return Golden(client, used, exchanges)


def asks(request: bytes, topic_ids: dict[str, UUID]) -> Fields | None:
    entity = read_request(request)
    return None if entity is None else shown(entity, topic_ids)


def shown(entity: Any, topic_ids: dict[str, UUID]) -> Fields:
    """The fields of a request. Records are told by their size: they are among its bytes already."""
    fields = Rendering(0, Path("/nowhere"), topic_ids).fields(entity)
    for topic in fields.get("topic_data", ()):
        for partition in topic["partition_data"]:
            if partition["records"] is not None:
                partition["records"] = f"<{len(partition['records']) // 2} bytes>"
    return fields
