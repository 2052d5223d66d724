"""Idempotent producers that send numbers for as long as the test goes on, and remember every answer.

Number n goes to partition n modulo their count; no record is sent twice by the test, so whatever is there
twice is the doing of client or broker. `end` gives up what is on its way: those may be there, once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple, Protocol

from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition

from tests.integration.java_clients import JavaNumbers, Numbered
from tests.integration.rdkafka import QUIET, TIMEOUT_S

# Many batches of each partition. The Java client is the faster one, and the test waits for both.
RDKAFKA_UNANSWERED = 400
JAVA_UNANSWERED = 100


class Place(NamedTuple):
    partition: int
    offset: int


class NumberWriter(Protocol):
    name: str  # values are the name, a space and the number
    acked: dict[int, Place]  # in the order of the answers
    failed: dict[int, str]

    def start(self) -> None: ...

    def end(self) -> None:
        """When this returns, everything has its answer."""


class RdkafkaNumbers:
    name = "librdkafka"

    def __init__(self, address: str, topic: str, partitions: int, conf: Mapping[str, Any]) -> None:
        self.acked: dict[int, Place] = {}
        self.failed: dict[int, str] = {}
        self._topic = topic
        self._partitions = partitions
        self._producer = Producer(
            {
                **QUIET,
                "bootstrap.servers": address,
                "enable.idempotence": True,
                **conf,
            }  # so: acks=all, 5 in flight
        )
        self._thread = threading.Thread(target=self._run, name=self.name)
        self._ended = threading.Event()

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        number = 0
        while not self._ended.is_set():
            if len(self._producer) < RDKAFKA_UNANSWERED:
                value = f"{self.name} {number}".encode()
                self._producer.produce(
                    self._topic, value, partition=number % self._partitions, on_delivery=self._answered
                )
                number += 1
                self._producer.poll(0)
            else:
                self._producer.poll(0.01)
        self._producer.purge()
        assert self._producer.flush(TIMEOUT_S) == 0

    def _answered(self, error: KafkaError | None, message: Message) -> None:
        number = int((message.value() or b"").split()[1])
        if error is not None:
            self.failed[number] = str(error)
            return
        partition, offset = message.partition(), message.offset()
        assert partition is not None
        assert offset is not None
        self.acked[number] = Place(partition, offset)


class JavaNumberWriter:
    name = "java"

    def __init__(self, address: str, topic: str, partitions: int, properties: Mapping[str, object]) -> None:
        self.acked: dict[int, Place] = {}
        self.failed: dict[int, str] = {}
        self._numbers = JavaNumbers(address, topic, partitions, JAVA_UNANSWERED, properties)
        self._thread = threading.Thread(target=self._run, name=self.name)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._numbers.end()
        self._thread.join(TIMEOUT_S)
        self._numbers.close()
        assert not self._thread.is_alive()

    def _run(self) -> None:
        for answer in self._numbers.answers():
            if isinstance(answer, Numbered):
                # Without an offset: it was there already, and the broker did not say where.
                self.acked[answer.number] = Place(
                    answer.partition, -1 if answer.offset is None else answer.offset
                )
            else:
                number, refused = answer
                self.failed[number] = f"{refused.error}: {refused.message}"


def read_logs(address: str, topic: str, ends: Sequence[int], **conf: Any) -> list[dict[int, bytes]]:
    """Of each partition what is below its end, by offset.

    Offsets may be missing: of batches that were written in vain.
    """
    consumer = Consumer(
        {
            **QUIET,
            "bootstrap.servers": address,
            "group.id": "unused",
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "enable.partition.eof": True,
            "check.crcs": True,
            **{name.replace("_", "."): value for name, value in conf.items()},
        }
    )
    logs: list[dict[int, bytes]] = [{} for _ in ends]
    read_to = [0] * len(ends)
    deadline = time.monotonic() + TIMEOUT_S
    with closing(consumer):
        consumer.assign([TopicPartition(topic, partition, 0) for partition in range(len(ends))])
        while any(at < end for at, end in zip(read_to, ends, strict=True)):
            assert time.monotonic() < deadline, f"nothing comes behind {read_to} of {ends}"
            for message in consumer.consume(10_000, timeout=0.1):
                partition, offset = message.partition(), message.offset()
                assert partition is not None
                assert offset is not None
                error = message.error()
                if error is not None:
                    assert error.code() == KafkaError._PARTITION_EOF, error
                    read_to[partition] = max(read_to[partition], offset)
                    continue
                assert offset >= read_to[partition], "a record again, or out of order"
                read_to[partition] = offset + 1
                if offset < ends[partition]:
                    logs[partition][offset] = message.value() or b""
    return logs
