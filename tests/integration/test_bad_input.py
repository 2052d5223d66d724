"""What no client sends, against a real broker, while a real client is at work and must notice nothing.

Whatever comes gets a Kafka error, or its connection is closed with one line in the log.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any
from uuid import UUID

import pytest
import zstandard
from confluent_kafka import Consumer, Producer, TopicPartition
from kio.schema.errors import ErrorCode

from dray.errors import DrayError
from dray.protocol.codec import decode_request
from tests import wire
from tests.batches import GOLDEN, build_batch
from tests.integration.rdkafka import QUIET, create_topic, send_all
from tests.integration.waiting import eventually
from tests.mutation import mutated
from tests.servers.dray import DrayBroker

MIB = 2**20
MAX_CONNECTIONS = 200
# Until then, those who take no answers may hold the memory that others wait for.
SEND_TIMEOUT_MS = 1_000
# A broker at rest takes about a fifth of this; 128 MiB of it are for requests.
MAX_RSS_BYTES = 450 * MIB


class Bystander:
    """Produces a record and reads it back, again and again, over connections that it keeps."""

    def __init__(self, address: str) -> None:
        self._topic = create_topic(address)
        self.problems: list[str] = []
        self.rounds = 0
        self._stop = threading.Event()
        conf = {**QUIET, "bootstrap.servers": address, "error_cb": self._failed}
        self._producer = Producer({**conf, "linger.ms": 0, "message.send.max.retries": 0})
        self._consumer = Consumer({**conf, "group.id": "unused", "enable.auto.commit": False})
        self._consumer.assign([TopicPartition(self._topic, 0, 0)])
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        with closing(self._consumer):
            while not self._stop.is_set() and not self.problems:
                value = b"record %d" % self.rounds
                self._producer.produce(self._topic, value, partition=0, on_delivery=self._delivered)
                if self._producer.flush(30):
                    self.problems.append("a record was not acknowledged in 30 s")
                message = self._consumer.poll(30)
                if message is None or message.error() or message.value() != value:
                    got = message and (message.error() or message.value())
                    self.problems.append(f"read {got!r}, not {value!r}")
                self.rounds += 1

    def _failed(self, error: object) -> None:
        self.problems.append(str(error))

    def _delivered(self, error: object, _message: object) -> None:
        if error is not None:
            self.problems.append(str(error))

    def goes_on(self) -> bool:
        """Two more rounds: one may have begun before."""
        before = self.rounds
        eventually(lambda: self.rounds >= before + 2 or self.problems, "the bystander's next record")
        return not self.problems

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DrayBroker, Bystander]]:
    settings = {"max.connections": MAX_CONNECTIONS, "network.send_timeout_ms": SEND_TIMEOUT_MS}
    broker = DrayBroker(tmp_path_factory.mktemp("bad-input"), settings=settings)
    broker.start()
    bystander = Bystander(broker.address)
    yield broker, bystander
    bystander.stop()
    assert broker.terminate() == 0


@pytest.fixture
def broker(running: tuple[DrayBroker, Bystander]) -> Iterator[DrayBroker]:
    """Afterwards it lives, has met nothing unexpected, is not large, and its other client is at work."""
    broker, bystander = running
    yield broker
    assert broker.is_running
    assert bystander.goes_on(), bystander.problems
    assert [line for line in broker.log_text().splitlines() if " ERROR " in line or "Traceback" in line] == []
    assert broker.peak_rss_bytes() < MAX_RSS_BYTES


@pytest.fixture(scope="module")
def topic(running: tuple[DrayBroker, Bystander]) -> str:
    return create_topic(running[0].address, partitions=2)


class Attack(wire.Wire):
    """A connection, and what the broker says of it."""

    def __init__(self, broker: DrayBroker) -> None:
        self._broker = broker
        self._log_start = broker.log.stat().st_size  # ports are used again
        super().__init__(broker.port)
        self._peer = f"peer='127.0.0.1:{self.socket.getsockname()[1]}'"

    def lines(self) -> list[str]:
        return [line for line in log_since(self._broker, self._log_start) if self._peer in line]

    def assert_closed(self) -> None:
        assert self.receive() is None
        (line,) = self.lines()
        assert "connection closed" in line


def log_since(broker: DrayBroker, start: int) -> list[str]:
    return broker.log.read_bytes()[start:].decode(errors="replace").splitlines()


# --- bytes that are no request


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(505),
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"\x03\x00\x00\x13\x0e\xe0\x00\x00\x00\x00\x00\x01\x00\x08\x00\x03\x00\x00\x00",  # RDP: 48 MiB of it
        struct.pack(">i", 0),
        struct.pack(">i", -1),
        struct.pack(">i", -(2**31)),
        struct.pack(">i", 2**31 - 1),
        struct.pack(">i", 100 * MIB + 1),
        wire.framed(b"\0"),
        wire.framed(b"\xff" * 100),
        wire.framed(bytes(8)),
        wire.framed(bytes(16 * 1024)),
    ],
    ids=lambda sent: sent[:12].hex(),
)
def test_what_is_no_request(broker: DrayBroker, sent: bytes) -> None:
    with Attack(broker) as connection:
        connection.socket.sendall(sent)
        connection.assert_closed()


def test_random_bytes(broker: DrayBroker) -> None:
    """Of every length; those that look like the beginning of something are told that nothing follows."""
    rng = random.Random(5)
    for _ in range(200):
        with Attack(broker) as connection:
            connection.socket.sendall(rng.randbytes(rng.choice((1, 3, 4, 8, 100, 10_000))))
            try:
                connection.socket.shutdown(socket.SHUT_WR)
            except OSError:
                continue  # closed already
            assert connection.receive() is None
            assert len(connection.lines()) <= 1


# --- requests that contradict themselves


def flexible(api_key: int, version: int) -> bytes:
    return struct.pack(">hhih", api_key, version, 1, -1) + b"\0"


def old(api_key: int, version: int) -> bytes:
    return struct.pack(">hhih", api_key, version, 1, -1)


MALFORMED = {
    "an array of 2**31-1": old(3, 4) + struct.pack(">i", 2**31 - 1),
    "a compact array of 2**32-2": flexible(3, 9) + b"\xff\xff\xff\xff\x0f",
    "partitions of 2**31-1": old(1, 4) + bytes(17) + struct.pack(">ih1si", 1, 1, b"t", 2**31 - 1),
    "very many structures": flexible(3, 9) + b"\x81\x80\x40" + b"\x02x\0" * (2**20) + bytes(3),
    "very many tags": flexible(18, 3)[:-1] + b"\x80\x80\x40" + b"\x63\0" * (2**20) + b"\2a\2b\0",
    "a length of -2": old(10, 0) + struct.pack(">h", -2),
    "text beyond the end": old(10, 0) + struct.pack(">h", 30_000) + b"short",
    "no UTF-8": old(10, 0) + struct.pack(">h", 2) + b"\xc3\x28",
    "no UTF-8 for a client": struct.pack(">hhih", 10, 0, 1, 2) + b"\xc3\x28" + struct.pack(">h", 1) + b"g",
    "null for a list": flexible(20, 4) + b"\0" + bytes(5),
    "no body": old(0, 8),
    "half a header": struct.pack(">hhi", 3, 9, 1),
    "an unknown API": old(31_000, 0),
    "an unknown version": old(3, 99),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_requests_that_cannot_be_read(broker: DrayBroker, name: str) -> None:
    with Attack(broker) as connection:
        assert connection.ask(18, 0).error_code is ErrorCode.none
        connection.send(MALFORMED[name])
        connection.assert_closed()


def produce(topic: str, partition: int, records: bytes | None) -> dict[str, Any]:
    data = [{"name": topic, "partition_data": [{"index": partition, "records": records}]}]
    return {"acks": -1, "topic_data": data}


def test_requests_that_ask_for_what_is_not_there(broker: DrayBroker, topic: str) -> None:
    """All on one connection: they are errors, not reasons to close it."""
    nowhere = {"topic_id": UUID(int=5), "partitions": [{"partition": 0, "partition_max_bytes": 100}]}
    with Attack(broker) as connection:
        fetched = connection.ask(1, 13, {"topics": [nowhere]})
        assert fetched.responses[0].partitions[0].error_code is ErrorCode.unknown_topic_id
        for partition in (-1, 2, 2**31 - 1, -(2**31)):
            parts = [{"partition": partition, "partition_max_bytes": 100}]
            fetched = connection.ask(1, 12, {"topics": [{"topic": topic, "partitions": parts}]})
            assert fetched.responses[0].partitions[0].error_code is ErrorCode.unknown_topic_or_partition
            produced = connection.ask(0, 9, produce(topic, partition, build_batch()))
            code = produced.responses[0].partition_responses[0].error_code
            assert code is ErrorCode.unknown_topic_or_partition
        for offset in (-1, 10**15):
            parts = [{"partition": 0, "fetch_offset": offset, "partition_max_bytes": 100}]
            fetched = connection.ask(1, 12, {"topics": [{"topic": topic, "partitions": parts}]})
            assert fetched.responses[0].partitions[0].error_code is ErrorCode.offset_out_of_range
        assert connection.lines() == []


GOOD = build_batch()
BAD_BATCHES = {
    "nothing": b"",
    "null": None,
    "too short": GOOD[:40],
    "one byte less": GOOD[:-1],
    "another checksum": GOOD[:-1] + bytes([GOOD[-1] ^ 1]),
    "a negative length": GOOD[:8] + struct.pack(">i", -1) + GOOD[12:],
    "a length of 2**31-1": GOOD[:8] + struct.pack(">i", 2**31 - 1) + GOOD[12:],
    "magic 3": build_batch(magic=3),
    "magic 1": build_batch(magic=1),
    "codec 7": build_batch(attributes=7),
    "many records claimed": build_batch(records=2**31 - 1),
    "a negative count": build_batch(records=-1, last_offset_delta=0),
    "rubbish in gzip": build_batch(b"rubbish", attributes=1),
    "rubbish in snappy": build_batch(b"rubbish", attributes=2),
    "rubbish in lz4": build_batch(b"rubbish", attributes=3),
    "rubbish in zstd": build_batch(b"rubbish", attributes=4),
    "control batch": build_batch(attributes=0x20),
    "transactional": build_batch(attributes=0x10, producer_id=1, producer_epoch=0, base_sequence=0),
}


@pytest.mark.parametrize("name", BAD_BATCHES)
def test_batches_that_are_none(broker: DrayBroker, topic: str, name: str) -> None:
    """Refused, or stored as they are where only readers look inside; what comes after them is served."""
    with Attack(broker) as connection:
        answer = connection.ask(0, 9, produce(topic, 1, BAD_BATCHES[name]))
        code = answer.responses[0].partition_responses[0].error_code
        assert code is not ErrorCode.unknown_server_error
        if not name.startswith("rubbish"):
            assert code is not ErrorCode.none
        answer = connection.ask(0, 9, produce(topic, 0, GOOD))
        assert answer.responses[0].partition_responses[0].error_code is ErrorCode.none
        assert connection.lines() == []


@pytest.mark.parametrize("timestamp_type", ["CreateTime", "LogAppendTime"])
def test_a_batch_that_would_be_very_large(broker: DrayBroker, timestamp_type: str) -> None:
    """Half a gigabyte of zeros in some kilobytes: nobody unpacks it whole."""
    bombed = create_topic(broker.address, configs={"message.timestamp.type": timestamp_type})
    bomb = zstandard.compress(bytes(512 * MIB))
    with Attack(broker) as connection:
        answer = connection.ask(0, 9, produce(bombed, 0, build_batch(bomb, attributes=4)))
        assert answer.responses[0].partition_responses[0].error_code is not ErrorCode.unknown_server_error
        offsets = [{"partition_index": 0, "current_leader_epoch": -1, "timestamp": 1}]
        connection.ask(2, 7, {"replica_id": -1, "topics": [{"name": bombed, "partitions": offsets}]})


# --- too much


def test_connections_beyond_the_limit(broker: DrayBroker) -> None:
    with ExitStack() as held:
        connections = [held.enter_context(Attack(broker)) for _ in range(MAX_CONNECTIONS + 20)]
        refused = [each for each in connections[-20:] if each.receive() is None]
        assert len(refused) == 20
        assert all(len(each.lines()) == 1 for each in refused)
        assert connections[0].ask(18, 0).error_code is ErrorCode.none


def test_large_requests_that_never_end(broker: DrayBroker) -> None:
    """Together they announce gigabytes, and send as much of it as they can."""
    start = struct.pack(">i", 90 * MIB) + old(0, 3)
    piece = bytes(MIB)
    with ExitStack() as held:
        connections = [held.enter_context(Attack(broker)) for _ in range(30)]
        for connection in connections:
            connection.socket.sendall(start)
            connection.socket.setblocking(False)
        blocked: set[Attack] = set()
        for _ in range(89):
            for connection in connections:
                try:
                    connection.socket.send(piece)
                except BlockingIOError:
                    blocked.add(connection)
        assert len(blocked) >= 28, "there is room for one of them"
        with Attack(broker) as other:
            assert other.ask(18, 0).error_code is ErrorCode.none


def test_answers_that_nobody_takes(broker: DrayBroker) -> None:
    """Many large answers are asked for, and none is read."""
    name = create_topic(broker.address)
    send_all(broker.address, name, [bytes(900_000)] * 8)
    fetch = wire.request(
        1,
        12,
        {
            "max_bytes": 50 * MIB,
            "topics": [{"topic": name, "partitions": [{"partition": 0, "partition_max_bytes": 50 * MIB}]}],
        },
    )
    with ExitStack() as held:
        for _ in range(50):
            connection = held.enter_context(Attack(broker))
            connection.socket.sendall(wire.framed(fetch) * 20)
        with Attack(broker) as other:
            assert other.ask(18, 0).error_code is ErrorCode.none


# --- real requests, changed


def real_requests() -> list[bytes]:
    found = []
    for name in ("librdkafka", "java", "kafka-python", "aiokafka"):
        exchanges = json.loads((GOLDEN / "protocol" / f"{name}.json").read_text())["exchanges"]
        found += [bytes.fromhex(exchange["request"]) for exchange in exchanges]
    return found


def makes_large_topics(request: bytes) -> bool:
    """A topic may have 50,000 partitions. To tell all about them takes a while, which is another matter."""
    try:
        body = decode_request(request).body
    except DrayError:
        return False
    topics = getattr(body, "topics", None) or ()
    counts = [getattr(topic, "num_partitions", getattr(topic, "count", 0)) for topic in topics]
    return any(count > 100 for count in counts)


CASES = 4_000
AT_ONCE = 20
FETCH = 1
SENTINEL = 0x5EA1


async def test_mutated_real_requests(broker: DrayBroker) -> None:
    """Each is followed by a request that is right: it is answered, or the connection closed with one line."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")  # noqa: T201 (shown when the test fails)
    rng = random.Random(seed)
    requests = real_requests()
    cases: list[bytes] = []
    while len(cases) < CASES:
        case = mutated(rng.choice(requests), rng, requests)
        if not makes_large_topics(case):
            cases.append(case)
    sentinel = wire.framed(wire.request(18, 0, correlation_id=SENTINEL))
    outcomes = {"answered": 0, "closed": 0, "waits": 0}
    log_start = broker.log.stat().st_size

    async def try_out(case: bytes) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", broker.port)
        try:
            writer.write(wire.framed(case) + sentinel)
            # A fetch may be told to wait for weeks.
            async with asyncio.timeout(0.5 if case[:2] == struct.pack(">h", FETCH) else 20):
                while (frame := await wire.read_frame(reader)) is not None:
                    if frame[:4] == struct.pack(">i", SENTINEL):
                        outcomes["answered"] += 1
                        return
            outcomes["closed"] += 1
        except TimeoutError:
            assert case[:2] == struct.pack(">h", FETCH), f"seed {seed}: no answer to {case.hex()}"
            outcomes["waits"] += 1
        finally:
            writer.transport.abort()

    queue = iter(cases)

    async def work() -> None:
        for case in queue:
            await try_out(case)

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(work())
    assert outcomes["answered"] > CASES / 10, f"seed {seed}: {outcomes}"
    assert outcomes["closed"] > CASES / 10, f"seed {seed}: {outcomes}"
    lines = log_since(broker, log_start)
    assert not [line for line in lines if " ERROR " in line or "Traceback" in line], f"seed {seed}"
    closed = sum("connection closed: " in line for line in lines)
    # Those whose answer was not waited for may have been closed later.
    assert closed - outcomes["closed"] in range(outcomes["waits"] + 1), f"seed {seed}: {closed}, {outcomes}"
