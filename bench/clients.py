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
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import cycle
from statistics import median
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
# librdkafka's word for: by its partitioner.
ANY_PARTITION = -1
STATISTICS_MS = 500


@dataclass(frozen=True)
class Produce:
    """Sends as fast as it can, or with `rate` so many records per second, each with the time it was due.

    `partitions` take turns; without them librdkafka chooses. `timed` tells how long requests took, which is
    all a producer at full speed can tell of latency: the rest is the length of its own queue. `primed` sends
    one record before the clock runs: librdkafka may take half a second to get an idempotent producer its id.
    """

    address: str
    topic: str
    size: int
    seconds: float | None = None  # whichever of the two ends first
    records: int | None = None
    rate: float | None = None
    partitions: Sequence[int] = ()
    timed: bool = False
    primed: bool = False
    properties: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Consume:
    """Reads so many records from the beginning of all partitions; `stamped` measures how old they are.

    With `to_end` it goes on until it has that many and is at the end of every partition: it may get more.
    """

    address: str
    topic: str
    partitions: int
    records: int
    stamped: bool = False
    to_end: bool = False
    timeout_s: float = 60.0  # without any record
    properties: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    records: int
    bytes: int
    started_ns: int
    ended_ns: int
    latencies_ms: dict[str, float] = field(default_factory=dict)  # p50, p99, max
    primed: int = 0  # records before the clock ran, besides `records`

    @property
    def seconds(self) -> float:
        return (self.ended_ns - self.started_ns) / 1e9


def produce(task: Produce) -> Result:
    errors: list[KafkaError] = []
    statistics: list[str] = []

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
            # A listener alone costs nothing.
            "stats_cb": statistics.append,
            "statistics.interval.ms": STATISTICS_MS if task.timed else 0,
            **task.properties,
        }
    )
    producer.list_topics(task.topic, timeout=30)
    if task.primed:
        producer.produce(task.topic, _payload(task.size), partition=(task.partitions or (ANY_PARTITION,))[0])
        producer.flush(60)
    started = time.monotonic_ns()
    sent = _send_paced(producer, task, started) if task.rate else _send(producer, task, started)
    left = producer.flush(120)
    ended = time.monotonic_ns()
    if errors or left:
        raise SystemExit(f"{len(errors)} records failed, {left} got no answer: {errors[:1]}")
    return Result(sent, sent * task.size, started, ended, round_trips(statistics), int(task.primed))


def round_trips(statistics: Sequence[str]) -> dict[str, float]:
    """Of librdkafka's windows: the median of their medians, and of the rest the worst."""
    windows = [
        broker["rtt"]
        for told in statistics
        for broker in json.loads(told)["brokers"].values()
        if broker["rtt"]["cnt"]
    ]
    if not windows:
        return {}
    return {
        "p50": median(window["p50"] for window in windows) / 1e3,
        "p99": max(window["p99"] for window in windows) / 1e3,
        "max": max(window["max"] for window in windows) / 1e3,
    }


def _send(producer: Producer, task: Produce, started_ns: int) -> int:
    value = _payload(task.size)
    records = task.records or sys.maxsize
    end_ns = started_ns + int(task.seconds * 1e9) if task.seconds else sys.maxsize
    sent = 0
    turns = cycle(task.partitions or (ANY_PARTITION,))
    while sent < records and time.monotonic_ns() < end_ns:
        partition = next(turns)
        for _ in range(min(PRODUCE_ROUND, records - sent)):
            try:
                producer.produce(task.topic, value, partition=partition)
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
            "enable.partition.eof": task.to_end,
            **task.properties,
        }
    )
    consumer.list_topics(task.topic, timeout=30)
    started = time.monotonic_ns()
    consumer.assign([TopicPartition(task.topic, p, OFFSET_BEGINNING) for p in range(task.partitions)])
    print("ready", flush=True)
    receive = _receive_to_end if task.to_end else _receive_stamped if task.stamped else _receive
    result = receive(consumer, task, started)
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


def _receive_to_end(consumer: Consumer, task: Consume, started_ns: int) -> Result:
    received = size = 0
    at_end: set[int | None] = set()
    last_ns = time.monotonic_ns()
    while received < task.records or len(at_end) < task.partitions:
        message = consumer.poll(1)
        last_ns = _still_alive(message is not None, last_ns, task, f"{received} of {task.records} so far")
        if message is None:
            continue
        if (error := message.error()) is None:
            at_end.discard(message.partition())
            received += 1
            size += len(message)
        elif error.code() == KafkaError._PARTITION_EOF:
            at_end.add(message.partition())
        else:
            raise SystemExit(f"consumer failed: {error}")
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


def _still_alive(got_some: bool, last_ns: int, task: Consume, so_far: str = "") -> int:
    now_ns = time.monotonic_ns()
    if not got_some and now_ns - last_ns > task.timeout_s * 1e9:
        raise SystemExit(f"no record for {task.timeout_s} s {so_far}")
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
