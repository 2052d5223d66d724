"""Four Kafka clients behind one face, so that each test runs with all of them.

What to send and to read, and what came, are the values of `java_clients`. A client never retries here: a test
sees the first answer. Apart from that, idempotent producers of two of them, which do.
"""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer  # type: ignore[import-untyped]
from aiokafka import TopicPartition as AioPartition
from aiokafka.errors import KafkaError as AioKafkaError  # type: ignore[import-untyped]
from aiokafka.errors import OffsetOutOfRangeError as AioOutOfRange
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from tests.integration import java_clients
from tests.integration.aio import in_own_loop
from tests.integration.java_clients import JavaClientError, JavaConsumer, Received, Sent, ToRead, ToSend
from tests.integration.rdkafka import QUIET

with warnings.catch_warnings():
    # kafka-python reads its schemas in a way that Python wants to drop.
    warnings.simplefilter("ignore", DeprecationWarning)
    import kafka  # type: ignore[import-untyped]
    import kafka.errors  # type: ignore[import-untyped]

TIMEOUT_S = 40.0
# Above every record that a test sends.
FETCH_BYTES = 16 * 2**20
OFFSET_OUT_OF_RANGE = 1
TIMESTAMP_TYPES = ("CreateTime", "LogAppendTime")

Reset: TypeAlias = Literal["earliest", "latest", "none"]


class OutOfRange(Exception):
    """The consumer was told not to look for another offset."""


@dataclass(frozen=True)
class Refusal:
    code: int  # Kafka's number


class KafkaClient(Protocol):
    name: str
    codecs: tuple[str, ...]  # that it has at hand
    takes_nulls: bool  # for key and value at once, and in headers

    def produce(
        self,
        address: str,
        records: Sequence[ToSend],
        *,
        codec: str = "none",
        acks: Literal["0", "1", "all"] = "all",
        max_bytes: int = 2**20,
    ) -> list[int | Refusal | None]:
        """Offsets, none with acks=0."""

    def consume(self, address: str, partitions: Sequence[ToRead], reset: Reset = "none") -> list[Received]:
        """In the order they came. Raises `OutOfRange`."""

    def tail(
        self, address: str, topic: str, count: int, when_started: Callable[[], object]
    ) -> list[Received]:
        """So many records of partition 0 that come after the consumer stands at its end."""


class Librdkafka:
    name = "librdkafka"
    codecs: tuple[str, ...] = ("none", "gzip", "snappy", "lz4", "zstd")
    takes_nulls = True

    def produce(
        self,
        address: str,
        records: Sequence[ToSend],
        *,
        codec: str = "none",
        acks: Literal["0", "1", "all"] = "all",
        max_bytes: int = 2**20,
    ) -> list[int | Refusal | None]:
        answers: list[int | Refusal | None] = [None] * len(records)

        def answered(number: int, error: KafkaError | None, message: Message) -> None:
            offset = message.offset()
            if error is not None:
                answers[number] = Refusal(error.code())
            elif offset is not None and offset >= 0:
                answers[number] = offset

        producer = Producer(
            {
                **QUIET,
                "bootstrap.servers": address,
                "compression.type": codec,
                "acks": acks,
                "message.max.bytes": max_bytes,
                "retries": 0,
            }
        )
        for number, record in enumerate(records):
            producer.produce(
                record.topic,
                record.value,
                key=record.key,
                partition=record.partition or 0,
                timestamp=record.timestamp or 0,
                headers=list(record.headers),
                on_delivery=partial(answered, number),
            )
        assert producer.flush(TIMEOUT_S) == 0
        return answers

    def consume(self, address: str, partitions: Sequence[ToRead], reset: Reset = "none") -> list[Received]:
        got: list[Received] = []
        with closing(self._consumer(address, reset)) as consumer:
            for one in partitions:
                where = TopicPartition(one.topic, one.partition)
                low, high = consumer.get_watermark_offsets(where, timeout=TIMEOUT_S)

                def find(at_ms: int, where: TopicPartition = where) -> int:
                    asked = [TopicPartition(where.topic, where.partition, at_ms)]
                    return consumer.offsets_for_times(asked, timeout=TIMEOUT_S)[0].offset

                start = _start(one, low, high, find)
                consumer.assign([TopicPartition(one.topic, one.partition, start)])
                got += self._read(consumer, _end(one, start, high))
        return got

    def tail(
        self, address: str, topic: str, count: int, when_started: Callable[[], object]
    ) -> list[Received]:
        with closing(self._consumer(address, "none")) as consumer:
            _, high = consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=TIMEOUT_S)
            consumer.assign([TopicPartition(topic, 0, high)])
            consumer.poll(0.2)
            when_started()
            return self._read(consumer, high + count)

    def _consumer(self, address: str, reset: Reset) -> Consumer:
        return Consumer(
            {
                **QUIET,
                "bootstrap.servers": address,
                "group.id": "unused",
                "enable.auto.commit": False,
                "auto.offset.reset": "error" if reset == "none" else reset,
                "fetch.message.max.bytes": FETCH_BYTES,
                "check.crcs": True,
                "fetch.wait.max.ms": 50,  # a new assignment waits for the fetch that is under way
            }
        )

    def _read(self, consumer: Consumer, end: int) -> list[Received]:
        got: list[Received] = []
        deadline = _Deadline(got)
        while not got or got[-1].offset < end - 1:
            deadline.check()
            message = consumer.poll(0.2)
            if message is None:
                continue
            error = message.error()
            if error is not None:
                if error.code() in (OFFSET_OUT_OF_RANGE, KafkaError._AUTO_OFFSET_RESET):
                    raise OutOfRange
                raise KafkaException(error)
            kind, timestamp = message.timestamp()
            headers: Any = message.headers() or ()
            topic, partition, offset = message.topic(), message.partition(), message.offset()
            assert topic is not None
            assert partition is not None
            assert offset is not None
            got.append(
                Received(
                    topic,
                    partition,
                    offset,
                    timestamp,
                    TIMESTAMP_TYPES[kind - 1],
                    None,
                    message.key(),
                    message.value(),
                    tuple((str(name), value) for name, value in headers),
                )
            )
        return got


class Aiokafka:
    name = "aiokafka"
    codecs: tuple[str, ...] = ("none", "gzip", "snappy", "lz4", "zstd")
    takes_nulls = False

    def produce(
        self,
        address: str,
        records: Sequence[ToSend],
        *,
        codec: str = "none",
        acks: Literal["0", "1", "all"] = "all",
        max_bytes: int = 2**20,
    ) -> list[int | Refusal | None]:
        async def send() -> list[int | Refusal | None]:
            async with AIOKafkaProducer(
                bootstrap_servers=address,
                compression_type=None if codec == "none" else codec,
                acks="all" if acks == "all" else int(acks),
                max_request_size=max_bytes,
                linger_ms=5,
            ) as producer:
                sent = [
                    await producer.send(
                        record.topic,
                        record.value,
                        key=record.key,
                        partition=record.partition or 0,
                        timestamp_ms=record.timestamp,
                        headers=list(record.headers),
                    )
                    for record in records
                ]
                await producer.flush()
                done = await asyncio.gather(*sent, return_exceptions=True)
            return [_answer(one, AioKafkaError) for one in done]

        return in_own_loop(send())

    def consume(self, address: str, partitions: Sequence[ToRead], reset: Reset = "none") -> list[Received]:
        async def receive() -> list[Received]:
            got: list[Received] = []
            async with self._consumer(address, reset) as consumer:
                for one in partitions:
                    where = AioPartition(one.topic, one.partition)
                    consumer.assign([where])
                    low = (await consumer.beginning_offsets([where]))[where]
                    high = (await consumer.end_offsets([where]))[where]
                    if isinstance(one.start, str) and one.start.startswith("@"):
                        found = (await consumer.offsets_for_times({where: int(one.start[1:])}))[where]
                        one = replace(one, start=high if found is None else found.offset)
                    start = _start(one, low, high, int)
                    consumer.seek(where, start)
                    got += await self._read(consumer, _end(one, start, high))
            return got

        return in_own_loop(receive())

    def tail(
        self, address: str, topic: str, count: int, when_started: Callable[[], object]
    ) -> list[Received]:
        async def receive() -> list[Received]:
            async with self._consumer(address, "none") as consumer:
                where = AioPartition(topic, 0)
                consumer.assign([where])
                high = (await consumer.end_offsets([where]))[where]
                consumer.seek(where, high)
                await consumer.getmany(timeout_ms=200)
                await asyncio.to_thread(when_started)
                return await self._read(consumer, high + count)

        return in_own_loop(receive())

    def _consumer(self, address: str, reset: Reset) -> Any:
        return AIOKafkaConsumer(
            bootstrap_servers=address,
            group_id=None,
            enable_auto_commit=False,
            auto_offset_reset=reset,
            max_partition_fetch_bytes=FETCH_BYTES,
        )

    async def _read(self, consumer: Any, end: int) -> list[Received]:
        got: list[Received] = []
        deadline = _Deadline(got)
        while not got or got[-1].offset < end - 1:
            deadline.check()
            try:
                polled = await consumer.getmany(timeout_ms=200)
            except AioOutOfRange:
                raise OutOfRange from None
            got += [_received(record) for records in polled.values() for record in records]
        return got


class KafkaPython:
    name = "kafka-python"
    codecs: tuple[str, ...] = ("none", "gzip", "lz4", "zstd")  # snappy wants a package more
    takes_nulls = False

    def produce(
        self,
        address: str,
        records: Sequence[ToSend],
        *,
        codec: str = "none",
        acks: Literal["0", "1", "all"] = "all",
        max_bytes: int = 2**20,
    ) -> list[int | Refusal | None]:
        producer = kafka.KafkaProducer(
            bootstrap_servers=address,
            compression_type=None if codec == "none" else codec,
            acks="all" if acks == "all" else int(acks),
            enable_idempotence=False,
            retries=0,
            max_request_size=max_bytes,
            linger_ms=5,
        )
        with closing(producer):
            sent = [
                producer.send(
                    record.topic,
                    record.value,
                    key=record.key,
                    partition=record.partition or 0,
                    timestamp_ms=record.timestamp,
                    headers=list(record.headers),
                )
                for record in records
            ]
            producer.flush(TIMEOUT_S)
            done: list[Any] = []
            for future in sent:
                try:
                    done.append(future.get(TIMEOUT_S))
                except kafka.errors.KafkaError as error:
                    done.append(error)
        return [_answer(one, kafka.errors.KafkaError) for one in done]

    def consume(self, address: str, partitions: Sequence[ToRead], reset: Reset = "none") -> list[Received]:
        got: list[Received] = []
        with closing(self._consumer(address, reset)) as consumer:
            for one in partitions:
                where = kafka.TopicPartition(one.topic, one.partition)
                consumer.assign([where])
                low, high = consumer.beginning_offsets([where])[where], consumer.end_offsets([where])[where]

                def find(at_ms: int, where: Any = where, high: int = high) -> int:
                    found = consumer.offsets_for_times({where: at_ms})[where]
                    return high if found is None else int(found.offset)

                start = _start(one, low, high, find)
                consumer.seek(where, start)
                got += self._read(consumer, _end(one, start, high))
        return got

    def tail(
        self, address: str, topic: str, count: int, when_started: Callable[[], object]
    ) -> list[Received]:
        with closing(self._consumer(address, "none")) as consumer:
            where = kafka.TopicPartition(topic, 0)
            consumer.assign([where])
            high = consumer.end_offsets([where])[where]
            consumer.seek(where, high)
            consumer.poll(timeout_ms=200)
            when_started()
            return self._read(consumer, high + count)

    def _consumer(self, address: str, reset: Reset) -> Any:
        return kafka.KafkaConsumer(
            bootstrap_servers=address,
            group_id=None,
            enable_auto_commit=False,
            auto_offset_reset=reset,
            max_partition_fetch_bytes=FETCH_BYTES,
        )

    def _read(self, consumer: Any, end: int) -> list[Received]:
        got: list[Received] = []
        deadline = _Deadline(got)
        while not got or got[-1].offset < end - 1:
            deadline.check()
            try:
                polled = consumer.poll(timeout_ms=200)
            except kafka.errors.OffsetOutOfRangeError:
                raise OutOfRange from None
            got += [_received(record) for records in polled.values() for record in records]
        return got


class Java:
    name = "Java"
    codecs: tuple[str, ...] = ("none", "gzip", "snappy", "lz4", "zstd")
    takes_nulls = True

    # What its exceptions stand for.
    CODES = {"RecordTooLargeException": 10, "InvalidTimestampException": 32}  # noqa: RUF012

    def produce(
        self,
        address: str,
        records: Sequence[ToSend],
        *,
        codec: str = "none",
        acks: Literal["0", "1", "all"] = "all",
        max_bytes: int = 2**20,
    ) -> list[int | Refusal | None]:
        answers = java_clients.produce(
            address,
            records,
            {
                "compression.type": codec,
                "acks": acks,
                "enable.idempotence": False,
                "max.request.size": max_bytes,
                "buffer.memory": 4 * FETCH_BYTES,
                "retries": 0,
            },
        )
        return [
            one.offset if isinstance(one, Sent) else Refusal(self.CODES.get(one.error, -1)) for one in answers
        ]

    def consume(self, address: str, partitions: Sequence[ToRead], reset: Reset = "none") -> list[Received]:
        try:
            return java_clients.consume(address, partitions, self._properties(reset))
        except JavaClientError as error:
            if error.error == "OffsetOutOfRangeException":
                raise OutOfRange from None
            raise

    def tail(
        self, address: str, topic: str, count: int, when_started: Callable[[], object]
    ) -> list[Received]:
        wanted = [ToRead(topic, 0, "latest", f"+{count}")]
        with JavaConsumer(address, wanted, self._properties("none")) as consumer:
            consumer.wait_started()
            when_started()
            return consumer.records()

    def _properties(self, reset: Reset) -> dict[str, object]:
        return {"auto.offset.reset": reset, "max.partition.fetch.bytes": FETCH_BYTES}


CLIENTS: tuple[KafkaClient, ...] = (Librdkafka(), Aiokafka(), KafkaPython(), Java())


def send_with_aiokafka(address: str, records: Sequence[ToSend]) -> list[tuple[int, int]]:
    """Idempotently, in small batches, and again until it is acknowledged: partitions and offsets."""

    async def send() -> list[tuple[int, int]]:
        async with AIOKafkaProducer(
            bootstrap_servers=address, enable_idempotence=True, max_batch_size=128, retry_backoff_ms=20
        ) as producer:
            sent = [await producer.send(one.topic, one.value, partition=one.partition) for one in records]
            await producer.flush()
            async with asyncio.timeout(TIMEOUT_S):
                done = await asyncio.gather(*sent)
        return [(one.partition, one.offset) for one in done]

    return in_own_loop(send())


def send_with_kafka_python(address: str, records: Sequence[ToSend]) -> list[tuple[int, int]]:
    """As `send_with_aiokafka`."""
    producer = kafka.KafkaProducer(
        bootstrap_servers=address,
        enable_idempotence=True,
        batch_size=128,
        retry_backoff_ms=20,
        reconnect_backoff_ms=20,
    )
    with closing(producer):
        sent = [producer.send(one.topic, one.value, partition=one.partition) for one in records]
        producer.flush(TIMEOUT_S)
        done = [future.get(TIMEOUT_S) for future in sent]
    return [(one.partition, one.offset) for one in done]


class _Deadline:
    def __init__(self, got: list[Received]) -> None:
        self._got = got
        self._at = time.monotonic() + TIMEOUT_S

    def check(self) -> None:
        if time.monotonic() > self._at:
            raise TimeoutError(f"only {len(self._got)} records came: {self._got[-1:]}")


def _start(one: ToRead, low: int, high: int, find: Callable[[int], int]) -> int:
    if isinstance(one.start, int):
        return one.start
    if one.start == "earliest":
        return low
    return high if one.start == "latest" else find(int(one.start[1:]))


def _end(one: ToRead, start: int, high: int) -> int:
    if isinstance(one.end, int):
        return one.end
    return high if one.end == "end" else start + int(one.end[1:])


def _answer(one: Any, errors: type[Exception]) -> int | Refusal | None:
    if isinstance(one, errors):
        return Refusal(int(one.errno))  # type: ignore[attr-defined]
    if isinstance(one, BaseException):
        raise one
    return int(one.offset) if one is not None and one.offset is not None and one.offset >= 0 else None


def _received(record: Any) -> Received:
    """aiokafka's and kafka-python's records have the same fields."""
    return Received(
        record.topic,
        record.partition,
        record.offset,
        record.timestamp,
        TIMESTAMP_TYPES[record.timestamp_type],
        None,
        record.key,
        record.value,
        tuple((name, value) for name, value in record.headers),
    )
