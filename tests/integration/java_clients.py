"""Kafka's Java producer, consumer and admin client, for tests against any broker.

Each call starts a JVM, about a second: give it everything at once. Properties go to the client as they are;
without any the producer has acks=all and no idempotence, the consumer has no group, never commits and
fails where its offset is out of range. What the broker refused is part of the answer (`Refused`); what
keeps the client from working at all raises `JavaClientError`.
"""

from __future__ import annotations

import base64
import json
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any, Self

from tests.servers.kafka import SHORT_LIVED_OPTIONS, ensure_client_classes, java_command

Headers = tuple[tuple[str, bytes | None], ...]

# A client gives up by itself well before: this is for one that hangs.
_PROCESS_TIMEOUT_S = 100


class JavaClientError(Exception):
    """The client threw. `error` is the simple name of the Java class."""

    def __init__(self, error: str, message: str | None) -> None:
        super().__init__(f"{error}: {message}")
        self.error = error


@dataclass(frozen=True)
class Refused:
    """The answer to one record or one operation that failed."""

    error: str  # simple name of the Java class, such as RecordTooLargeException
    message: str | None


@dataclass(frozen=True)
class ToSend:
    topic: str
    value: bytes | None
    key: bytes | None = None
    partition: int | None = None  # None leaves it to the partitioner
    timestamp: int | None = None  # None is now
    headers: Headers = ()


@dataclass(frozen=True)
class Sent:
    topic: str
    partition: int
    offset: int | None  # none with acks=0
    timestamp: int | None


@dataclass(frozen=True)
class Received:
    topic: str
    partition: int
    offset: int
    timestamp: int
    timestamp_type: str  # CreateTime, LogAppendTime or NoTimestampType
    leader_epoch: int | None
    key: bytes | None
    value: bytes | None
    headers: Headers


@dataclass(frozen=True)
class ToRead:
    """One partition, from `start` until `end`.

    `start` is an offset, "earliest", "latest", or "@" and a time in milliseconds; `end` is an offset, "end"
    for where the partition ends when the consumer starts, or "+" and a number of offsets.
    """

    topic: str
    partition: int = 0
    start: int | str = "earliest"
    end: int | str = "end"


def produce(
    address: str,
    records: Iterable[ToSend],
    properties: Mapping[str, object] | None = None,
    flush_every: int | None = None,
) -> list[Sent | Refused]:
    """One answer for each record, in their order. `flush_every` so many records the client waits for all
    before, so that batches end there."""
    lines = []
    for number, record in enumerate(records, 1):
        fields = [
            record.topic,
            "-" if record.partition is None else str(record.partition),
            "-" if record.timestamp is None else str(record.timestamp),
            _encode(record.key),
            _encode(record.value),
        ]
        for name, value in record.headers:
            fields += [_encode(name.encode()), _encode(value)]
        lines.append("\t".join(fields))
        if flush_every and number % flush_every == 0:
            lines.append("")
    with _Client("produce", address, [], properties, lines) as client:
        answers = client.read_all()
    return [_refused(answer) or Sent(**answer) for answer in answers]


@dataclass(frozen=True)
class Numbered:
    number: int
    partition: int
    offset: int | None


class JavaNumbers:
    """A producer that sends `java 0`, `java 1`, … round robin to a topic's partitions while the test goes on.

    It has Kafka's defaults: idempotent, acks=all, five requests in flight. Read its `answers` in a thread.
    """

    def __init__(
        self, address: str, topic: str, partitions: int, unanswered: int, properties: Mapping[str, object]
    ) -> None:
        self._client = _Client("number", address, [topic, str(partitions), str(unanswered)], properties, None)

    def answers(self) -> Iterator[Numbered | tuple[int, Refused]]:
        """As they come, until it was told to end and has."""
        while (line := self._client.read()) is not None:
            if "number" not in line:
                _raise_error(line)
            number = line.pop("number")
            refused = _refused(line)
            yield Numbered(number, **line) if refused is None else (number, refused)

    def end(self) -> None:
        """Send nothing more, and give up what is on its way."""
        self._client.end_input()

    def close(self) -> None:
        self._client.close()


def consume(
    address: str,
    partitions: Sequence[ToRead],
    properties: Mapping[str, object] | None = None,
    timeout_s: float = 30,
) -> list[Received]:
    """Records in the order in which the consumer gave them out. Raises `TimeoutError` when not all came."""
    with JavaConsumer(address, partitions, properties, timeout_s) as consumer:
        return consumer.records()


class JavaConsumer:
    """A consumer that runs while the test goes on: for reading what is produced after it has started."""

    def __init__(
        self,
        address: str,
        partitions: Sequence[ToRead],
        properties: Mapping[str, object] | None = None,
        timeout_s: float = 30,
    ) -> None:
        lines = [f"{one.topic}\t{one.partition}\t{one.start}\t{one.end}" for one in partitions]
        self._client = _Client("consume", address, [str(int(timeout_s * 1000))], properties, lines)

    def wait_started(self) -> dict[tuple[str, int], int]:
        """Where it starts, once it knows: what is produced from then on is behind a "latest"."""
        line = self._client.read()
        if line is None:
            raise RuntimeError(f"the consumer said nothing:\n{self._client.complaints()}")
        _raise_error(line)
        return {(topic, partition): offset for topic, partition, offset in line["start"]}

    def records(self) -> list[Received]:
        """All of them, when they have come. Call it once."""
        *lines, last = self._client.read_all()
        _raise_error(last)
        received = [_received(line) for line in lines if "start" not in line]
        if not last["done"]:
            raise TimeoutError(f"the consumer got only {len(received)} records: {received[-1:]}")
        return received

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()


class Admin:
    """Operations collected first and done one after another by `run`, in one JVM."""

    def __init__(self, address: str, properties: Mapping[str, object] | None = None) -> None:
        self._address = address
        self._properties = properties
        self._lines: list[str] = []

    def create_topic(
        self,
        name: str,
        partitions: int | None = None,
        replication_factor: int | None = None,
        configs: Mapping[str, str] | None = None,
        validate_only: bool = False,
    ) -> Self:
        sizes = ["-" if size is None else str(size) for size in (partitions, replication_factor)]
        pairs = [f"{key}={value}" for key, value in (configs or {}).items()]
        return self._add("createTopic", name, *sizes, "true" if validate_only else "false", *pairs)

    def delete_topic(self, name: str) -> Self:
        return self._add("deleteTopic", name)

    def create_partitions(self, name: str, total: int) -> Self:
        return self._add("createPartitions", name, str(total))

    def list_topics(self) -> Self:
        return self._add("listTopics")

    def describe_topic(self, name: str) -> Self:
        return self._add("describeTopic", name)

    def describe_cluster(self) -> Self:
        return self._add("describeCluster")

    def describe_configs(self, kind: str, name: str) -> Self:
        """`kind` is TOPIC or BROKER."""
        return self._add("describeConfigs", kind, name)

    def list_offsets(self, topic: str, partition: int, which: int | str) -> Self:
        """`which` is "earliest", "latest", "max" (timestamp) or a time in milliseconds."""
        return self._add("listOffsets", topic, str(partition), str(which))

    def run(self) -> list[dict[str, Any] | Refused]:
        """The answer to each operation: what Java's result says, under its names in snake_case."""
        with _Client("admin", self._address, [], self._properties, self._lines) as client:
            answers = client.read_all()
        if len(answers) < len(self._lines):
            _raise_error(answers[-1])
        self._lines = []
        return [_refused(answer) or answer for answer in answers]

    def _add(self, *fields: str) -> Self:
        self._lines.append("\t".join(fields))
        return self


class _Client:
    """The process. Its input is a file, so that neither side waits for the other to read; without lines it is
    open until `end_input`."""

    def __init__(
        self,
        command: str,
        address: str,
        arguments: Sequence[str],
        properties: Mapping[str, object] | None,
        lines: Sequence[str] | None,
    ) -> None:
        pairs = [f"{name}={_property(value)}" for name, value in (properties or {}).items()]
        classes = ensure_client_classes()
        argv = java_command("Clients", [command, address, *arguments, *pairs], SHORT_LIVED_OPTIONS, classes)
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - `close` does
        if lines is None:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors
            )
            return
        with tempfile.TemporaryFile() as given:
            given.write("".join(f"{line}\n" for line in lines).encode())
            given.seek(0)
            self._process = subprocess.Popen(argv, stdin=given, stdout=subprocess.PIPE, stderr=self._errors)

    def read(self) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return dict(json.loads(line)) if line else None

    def read_all(self) -> list[dict[str, Any]]:
        """What it has still to say. Its last line is the error when it ended with one."""
        output, _ = self._process.communicate(timeout=_PROCESS_TIMEOUT_S)
        lines = [json.loads(line) for line in output.splitlines()]
        if self._process.returncode != 0:
            if not lines:
                raise RuntimeError(f"the Java client died:\n{self.complaints()}")
            _raise_error(lines[-1])
        return lines

    def end_input(self) -> None:
        assert self._process.stdin is not None, "its input is a file"
        self._process.stdin.close()

    def complaints(self) -> str:
        self._errors.seek(0)
        return self._errors.read()[-4000:].decode(errors="replace")

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _encode(data: bytes | None) -> str:
    return "-" if data is None else base64.b64encode(data).decode()


def _decode(text: str | None) -> bytes | None:
    return None if text is None else base64.b64decode(text)


def _property(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _refused(answer: dict[str, Any]) -> Refused | None:
    return Refused(**answer) if "error" in answer else None


def _raise_error(answer: dict[str, Any]) -> None:
    if "error" in answer:
        raise JavaClientError(answer["error"], answer["message"])


def _received(line: dict[str, Any]) -> Received:
    headers = tuple((name, _decode(value)) for name, value in line["headers"])
    return Received(
        **{**line, "key": _decode(line["key"]), "value": _decode(line["value"]), "headers": headers}
    )
