"""librdkafka, as most tests of the broker use it: topics, producers that remember their answers, readers."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple

from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

# Errors reach the tests through the API; lines on stderr tell them once more.
QUIET = {"log_level": 0}
# None of these waits for something that takes long: it is how long a test that fails does.
TIMEOUT_S = 40.0


class Acked(NamedTuple):
    partition: int
    offset: int
    value: bytes


def fresh_name(prefix: str = "topic") -> str:
    return f"{prefix}-{secrets.token_hex(4)}"


def in_zone(zone: str) -> str:
    """The client id of one who sees only the brokers of a zone."""
    return f"zone_id={zone}"


def create_topic(
    address: str, name: str | None = None, partitions: int = 1, configs: Mapping[str, str] | None = None
) -> str:
    name = name or fresh_name()
    admin = AdminClient({**QUIET, "bootstrap.servers": address})
    topic = NewTopic(name, partitions, 1, config=dict(configs or {}))
    admin.create_topics([topic])[name].result(TIMEOUT_S)
    return name


class Sender:
    """A producer that remembers what became of each record. As by default, acks=all, no idempotence."""

    def __init__(self, address: str, **conf: Any) -> None:
        """Settings of librdkafka, with `_` for the dots."""
        named = {name.replace("_", "."): value for name, value in conf.items()}
        self._producer = Producer({**QUIET, "bootstrap.servers": address, "linger.ms": 0, **named})
        self.acked: list[Acked] = []
        self.failed: list[tuple[bytes, KafkaError]] = []

    def send(self, topic: str, value: bytes, partition: int = 0, **more: Any) -> None:
        self._producer.produce(topic, value, partition=partition, on_delivery=self._answered, **more)
        self._producer.poll(0)

    def flush(self, timeout_s: float = TIMEOUT_S) -> None:
        left = self._producer.flush(timeout_s)
        assert left == 0, f"{left} records without an answer"

    def __len__(self) -> int:
        """Records without an answer."""
        return len(self._producer)

    def poll(self, timeout_s: float = 0) -> None:
        self._producer.poll(timeout_s)

    def _answered(self, error: KafkaError | None, message: Message) -> None:
        value = message.value() or b""
        if error is not None:
            self.failed.append((value, error))
            return
        partition, offset = message.partition(), message.offset()
        assert partition is not None
        assert offset is not None
        self.acked.append(Acked(partition, offset, value))


def send_all(
    address: str, topic: str, values: Sequence[bytes], partition: int = 0, **conf: Any
) -> list[Acked]:
    """All of them, acknowledged."""
    sender = Sender(address, **conf)
    for value in values:
        sender.send(topic, value, partition)
    sender.flush()
    assert not sender.failed
    return sender.acked


def read(
    address: str, topic: str, partition: int = 0, start: int = 0, end: int | None = None, **conf: Any
) -> list[Message]:
    """Records [start, end), or as many as there are now."""
    named = {name.replace("_", "."): value for name, value in conf.items()}
    consumer = Consumer(
        {
            **QUIET,
            "bootstrap.servers": address,
            "group.id": "unused",
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            **named,
        }
    )
    with closing(consumer):
        if end is None:
            _, end = consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=TIMEOUT_S)
        got: list[Message] = []
        consumer.assign([TopicPartition(topic, partition, start)])
        deadline = time.monotonic() + TIMEOUT_S
        while start + len(got) < end:
            for message in consumer.consume(end - start - len(got), timeout=0.2):
                error = message.error()
                assert error is None, error
                got.append(message)
            assert time.monotonic() < deadline, f"only {len(got)} of {end - start} records came"
        return got


def read_values(
    address: str, topic: str, partition: int = 0, start: int = 0, end: int | None = None, **conf: Any
) -> dict[int, bytes | None]:
    """By offset. Every offset is there once, in order."""
    messages = read(address, topic, partition, start, end, **conf)
    offsets = [message.offset() for message in messages]
    assert offsets == list(range(start, start + len(messages)))
    return {start + number: message.value() for number, message in enumerate(messages)}
