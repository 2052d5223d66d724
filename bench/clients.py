"""librdkafka as a program: one measured producer or consumer in a process of its own.

    python -m bench.clients '{"role": "produce", "address": "127.0.0.1:9092", "topic": "t", "size": 100, ...}'

`bench.broker` runs it, so that neither memory nor CPU time of a client mixes with another's. The last line
on stdout is the result as JSON. A consumer first prints `ready`, when it waits for records. Consumers take
partitions by `assign`: they need no group. Times are of the monotonic clock, which all processes of
a machine share.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, Message, Producer, TopicPartition

# Between two looks at the clock; small beside what a client queues.
PRODUCE_ROUND = 500
# Taken at once; more makes no consumer faster.
CONSUME_ROUND = 10_000
# Shorter sleeps end late anyway. What was due meanwhile goes out together, stamped with when it was due.
SHORTEST_SLEEP_S = 0.0005
# The first latencies are those of connections and caches.
LATENCY_WARM_UP_S = 1.0
STAMP_BYTES = 8


@dataclass(frozen=True)
class Produce:
    """Sends as fast as it can, or with `rate` so many records per second, each with the time it was due."""

    address: str
    topic: str
    size: int
    seconds: float | None = None  # whichever of the two ends first
    records: int | None = None
    rate: float | None = None
    properties: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Consume:
    """Reads so many records from the beginning of all partitions; `stamped` measures how old they are."""

    address: str
    topic: str
    partitions: int
    records: int
    stamped: bool = False
    timeout_s: float = 60.0  # without any record
    properties: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    records: int
    bytes: int
    started_ns: int
    ended_ns: int
    latencies_ms: dict[str, float] = field(default_factory=dict)  # p50, p99, max

    @property
    def seconds(self) -> float:
        return (self.ended_ns - self.started_ns) / 1e9


def produce(task: Produce) -> Result:
    errors: list[KafkaError] = []

    def delivered(error: KafkaError | None, message: Message) -> None:
        if error is not None:
            errors.append(error)

    producer = Producer(
        {
            "bootstrap.servers": task.address,
            "acks": "all",
            "enable.idempotence": False,
            # A call into Python for each record would be the slowest part of the client.
            "delivery.report.only.error": True,
            "on_delivery": delivered,
            **task.properties,
        }
    )
    producer.list_topics(task.topic, timeout=30)
    started = time.monotonic_ns()
    sent = _send_paced(producer, task, started) if task.rate else _send(producer, task, started)
    left = producer.flush(120)
    ended = time.monotonic_ns()
    if errors or left:
        raise SystemExit(f"{len(errors)} records failed, {left} got no answer: {errors[:1]}")
    return Result(sent, sent * task.size, started, ended)


def _send(producer: Producer, task: Produce, started_ns: int) -> int:
    value = _payload(task.size)
    records = task.records or sys.maxsize
    end_ns = started_ns + int(task.seconds * 1e9) if task.seconds else sys.maxsize
    sent = 0
    while sent < records and time.monotonic_ns() < end_ns:
        for _ in range(min(PRODUCE_ROUND, records - sent)):
            try:
                producer.produce(task.topic, value)
            except BufferError:  # the queue is full: this is what limits a fast producer
                producer.poll(0.005)
                break
            sent += 1
        producer.poll(0)
    return sent


def _send_paced(producer: Producer, task: Produce, started_ns: int) -> int:
    assert task.rate is not None
    assert task.records is not None
    rest = _payload(task.size - STAMP_BYTES)
    for number in range(task.records):
        due = started_ns + int(number * 1e9 / task.rate)
        wait_s = (due - time.monotonic_ns()) / 1e9
        if wait_s > 0:
            producer.poll(0)
            time.sleep(max(wait_s, SHORTEST_SLEEP_S))
        producer.produce(task.topic, due.to_bytes(STAMP_BYTES, "big") + rest)
    return task.records


def _payload(size: int) -> bytes:
    return (b"0123456789abcdef" * (size // 16 + 1))[:size]


def consume(task: Consume) -> Result:
    consumer = Consumer(
        {
            "bootstrap.servers": task.address,
            "group.id": "unused",  # librdkafka wants one, and asks the broker nothing about it
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            **task.properties,
        }
    )
    consumer.list_topics(task.topic, timeout=30)
    started = time.monotonic_ns()
    consumer.assign([TopicPartition(task.topic, p, OFFSET_BEGINNING) for p in range(task.partitions)])
    print("ready", flush=True)
    result = (_receive_stamped if task.stamped else _receive)(consumer, task, started)
    consumer.close()
    return result


def _receive(consumer: Consumer, task: Consume, started_ns: int) -> Result:
    received = size = 0
    last_ns = time.monotonic_ns()
    while received < task.records:
        # Returns when it has that many, or when the time is over: never ask for more than will come.
        messages = consumer.consume(min(CONSUME_ROUND, task.records - received), timeout=1)
        last_ns = _still_alive(bool(messages), last_ns, task)
        for message in messages:
            if (error := message.error()) is not None:
                raise SystemExit(f"consumer failed: {error}")
        received += len(messages)
        size += sum(map(len, messages))
    return Result(received, size, started_ns, time.monotonic_ns())


def _receive_stamped(consumer: Consumer, task: Consume, started_ns: int) -> Result:
    ages: list[tuple[int, int]] = []  # when it was due, how long it took
    size = 0
    last_ns = time.monotonic_ns()
    while len(ages) < task.records:
        message = consumer.poll(1)
        last_ns = _still_alive(message is not None, last_ns, task)
        if message is None:
            continue
        now_ns = time.monotonic_ns()
        if (error := message.error()) is not None:
            raise SystemExit(f"consumer failed: {error}")
        value = message.value()
        assert value is not None
        due = int.from_bytes(value[:STAMP_BYTES], "big")
        ages.append((due, now_ns - due))
        size += len(value)
    first = min(due for due, _ in ages) + LATENCY_WARM_UP_S * 1e9
    counted = [age / 1e6 for due, age in ages if due >= first]
    latencies = {"p50": quantile(counted, 0.5), "p99": quantile(counted, 0.99), "max": max(counted)}
    return Result(len(ages), size, started_ns, time.monotonic_ns(), latencies)


def _still_alive(got_some: bool, last_ns: int, task: Consume) -> int:
    now_ns = time.monotonic_ns()
    if not got_some and now_ns - last_ns > task.timeout_s * 1e9:
        raise SystemExit(f"no record for {task.timeout_s} s")
    return now_ns if got_some else last_ns


def quantile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(q * len(ordered)), len(ordered) - 1)]


def main() -> None:
    task = json.loads(sys.argv[1])
    role = task.pop("role")
    result = produce(Produce(**task)) if role == "produce" else consume(Consume(**task))
    print(json.dumps(asdict(result)), flush=True)


if __name__ == "__main__":
    main()
