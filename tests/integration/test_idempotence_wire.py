"""What idempotent producers are told, batch by batch, by whichever broker, and what Apache Kafka tells them.

The cases run against two brokers in turn on each kind of stores, and against a real Kafka: where its answers
differ, the case says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from kio.index import load_request_schema
from kio.schema.errors import ErrorCode

from tests import wire as frames
from tests.batches import build_batch
from tests.integration.conftest import BrokerCluster
from tests.integration.numbered import read_logs
from tests.integration.rdkafka import create_topic
from tests.integration.waiting import eventually
from tests.integration.wire import LATEST, Wire, produce_request
from tests.servers.dray import DrayBroker
from tests.servers.kafka import KafkaServer

MAX_SEQUENCE = 2**31 - 1
# About 1 KiB a producer, and the index of as many batches; the rest is what an allocator keeps.
MANY_PRODUCERS_BYTES = 64 * 2**20
INIT_PRODUCER_ID = 22

NONE = ErrorCode.none
OUT_OF_ORDER = ErrorCode.out_of_order_sequence_number
INVALID_EPOCH = ErrorCode.invalid_producer_epoch
UNKNOWN_PRODUCER = ErrorCode.unknown_producer_id


class Step(NamedTuple):
    """A batch, and what it is answered: an error, or the offset it has."""

    sequence: int
    answer: ErrorCode | int
    records: int = 1
    epoch: int = 0
    kafka: ErrorCode | int | None = None  # where Kafka answers something else


FIVE_BACK = "five batches back and six"
CASES: dict[str, Sequence[Step]] = {
    "in sequence": [Step(0, 0), Step(1, 1, records=3), Step(4, 4)],
    "a duplicate has the offset of the original": [
        Step(0, 0, records=2),
        Step(2, 2, records=3),
        Step(0, 0, records=2),
        Step(2, 2, records=3),
        Step(5, 5),
    ],
    "a duplicate is told by both ends": [
        Step(0, 0, records=2),
        Step(0, OUT_OF_ORDER, records=1),
        Step(0, OUT_OF_ORDER, records=3),
        Step(1, OUT_OF_ORDER, records=1),
        Step(2, 2),
    ],
    "a gap, and on where it was": [Step(0, 0), Step(2, OUT_OF_ORDER), Step(3, OUT_OF_ORDER), Step(1, 1)],
    FIVE_BACK: [
        *(Step(number, number) for number in range(6)),
        *(Step(number, number) for number in range(1, 6)),
        Step(0, OUT_OF_ORDER),
        Step(6, 6),
        Step(1, OUT_OF_ORDER),
        Step(2, 2),
    ],
    "an old epoch": [
        Step(0, 0, epoch=1),
        Step(1, INVALID_EPOCH),
        Step(0, INVALID_EPOCH),
        Step(1, 1, epoch=1),
    ],
    "a higher epoch begins at 0": [
        Step(0, 0),
        Step(1, OUT_OF_ORDER, epoch=1),
        Step(0, 1, epoch=1),
        Step(1, 2, epoch=1),
        Step(1, INVALID_EPOCH),
    ],
    "an epoch of the future": [
        Step(0, 0),
        Step(0, 1, epoch=32_767),
        Step(1, INVALID_EPOCH),
        Step(0, INVALID_EPOCH, epoch=32_766),
        Step(0, 1, epoch=32_767),
        Step(1, 2, epoch=32_767),
    ],
    # Kafka takes any sequence of a producer that it does not know: its state may have gone with the log.
    "an unknown producer begins at 0": [
        Step(7, UNKNOWN_PRODUCER, kafka=0),
        Step(MAX_SEQUENCE, UNKNOWN_PRODUCER, kafka=OUT_OF_ORDER),
        Step(0, 0, kafka=OUT_OF_ORDER),
        Step(1, 1, kafka=OUT_OF_ORDER),
    ],
}


class Producer:
    """Batches of one id. Each record says which batch it is of."""

    def __init__(self, producer_id: int) -> None:
        self.id = producer_id

    def batch(
        self, sequence: int, records: int = 1, epoch: int = 0, value: bytes = b"", **more: Any
    ) -> bytes:
        body = b"".join(_record(number, value) for number in range(records))
        return build_batch(
            body,
            records=records,
            producer_id=self.id,
            producer_epoch=epoch,
            base_sequence=sequence,
            **more,
        )


def _record(delta: int, value: bytes) -> bytes:
    """No key, no headers, no time of its own."""
    assert delta < 64
    assert len(value) < 32
    record = bytes([0, 0, delta * 2, 1, len(value) * 2]) + value + b"\0"
    return bytes([len(record) * 2]) + record


def _new_producer(wire: Wire, version: int = 5, **fields: Any) -> Producer:
    answer = _init(wire, version, **fields)
    assert answer.error_code is NONE
    assert answer.producer_epoch == 0
    return Producer(answer.producer_id)


def _init(wire: Wire, version: int, **fields: Any) -> Any:
    asked: dict[str, Any] = {"transactional_id": None, "producer_id": -1, "producer_epoch": -1, **fields}
    schema = load_request_schema(INIT_PRODUCER_ID, version)
    return wire.ask(frames.entity(schema, frames.fitting(schema, asked)))


def _new_topic(address: str) -> str:
    """One that can be written: Kafka's takes a moment to have a leader."""
    topic = create_topic(address)
    with Wire(address) as wire:
        eventually(lambda: wire.list_offset(topic, 0, LATEST) == (NONE, 0), "a leader")
    return topic


def _produce(wire: Wire, topic: str, batch: bytes) -> ErrorCode | int:
    error, offset = wire.produce(topic, 0, batch)
    if error is NONE:
        return offset
    assert offset == -1
    return error


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaServer]:
    server = KafkaServer(tmp_path_factory.mktemp("kafka"))
    server.start()
    with Wire(server.address) as wire:
        # Its first block of ids takes a moment.
        eventually(lambda: _init(wire, 5).error_code is NONE, "ids")
    yield server
    server.kill()


@pytest.mark.parametrize("name", CASES)
def test_whoever_is_asked(cluster: BrokerCluster, name: str) -> None:
    topic = _new_topic(cluster.a.address)
    with Wire(cluster.a.address) as first, Wire(cluster.b.address) as second:
        producer = _new_producer(first)
        # One who has not heard of the latest batch yet still knows the one that is six back.
        wires = (first,) if name == FIVE_BACK else (first, second)
        for step, wire in zip(CASES[name], cycle(wires)):
            batch = producer.batch(step.sequence, step.records, step.epoch)
            assert _produce(wire, topic, batch) == step.answer, step


@pytest.mark.parametrize("name", CASES)
def test_what_kafka_tells(kafka: KafkaServer, name: str) -> None:
    topic = _new_topic(kafka.address)
    with Wire(kafka.address) as wire:
        producer = _new_producer(wire)
        for step in CASES[name]:
            batch = producer.batch(step.sequence, step.records, step.epoch)
            expected = step.answer if step.kafka is None else step.kafka
            assert _produce(wire, topic, batch) == expected, step


def test_other_content_with_the_same_sequences_is_a_duplicate(cluster: BrokerCluster) -> None:
    """As in Kafka, nobody looks into it: the first one stays."""
    topic = _new_topic(cluster.a.address)
    with Wire(cluster.a.address) as first, Wire(cluster.b.address) as second:
        producer = _new_producer(first)
        assert _produce(first, topic, producer.batch(0, value=b"original")) == 0
        for wire in (second, first):
            assert _produce(wire, topic, producer.batch(0, value=b"another")) == 0
            assert wire.list_offset(topic, 0, LATEST) == (NONE, 1)
            assert b"original" in wire.fetch(topic, 0, 0).records


def test_many_requests_ahead_and_each_of_them_twice(cluster: BrokerCluster) -> None:
    """Without waiting, to both brokers at once: each batch is there once, at the offset that all are told."""
    topic = _new_topic(cluster.a.address)
    with Wire(cluster.a.address) as first, Wire(cluster.b.address) as second:
        producer = _new_producer(first)
        # As many as are remembered: either broker may be the one that comes too late for all of them.
        for start in range(0, 50, 5):
            for sequence in range(start, start + 5):
                for wire in (first, second, first):
                    wire.send(produce_request(topic, 0, producer.batch(sequence, value=b"%d" % sequence)))
            # Each broker gets all of them, in order: nobody has a reason to see a gap.
            for sequence in range(start, start + 5):
                answers = {wire.receive_produced() for wire in (first, second, first)}
                assert len(answers) == 1, (sequence, answers)
                assert answers.pop().error is NONE
        _, end = first.list_offset(topic, 0, LATEST)
        (log,) = read_logs(cluster.b.address, topic, [end])
        assert list(log.values()) == [b"%d" % sequence for sequence in range(50)]


class TestIds:
    @pytest.mark.parametrize("version", range(6))
    def test_each_is_new(self, cluster: BrokerCluster, kafka: KafkaServer, version: int) -> None:
        """Also with the id and epoch of a producer that goes on (KIP-360): it begins anew."""
        for addresses in ((cluster.a.address, cluster.b.address), (kafka.address,)):
            seen: set[int] = set()
            for address in addresses:
                with Wire(address) as wire:
                    ids = [_new_producer(wire, version).id for _ in range(3)]
                    ids += [_new_producer(wire, version, producer_id=ids[0], producer_epoch=0).id]
                    ids += [_new_producer(wire, version, producer_id=ids[0], producer_epoch=32_767).id]
                assert len(set(ids)) == len(ids)
                assert not seen & set(ids)
                seen |= set(ids)

    @pytest.mark.parametrize("version", range(6))
    def test_none_for_transactions(self, cluster: BrokerCluster, version: int) -> None:
        with Wire(cluster.a.address) as wire:
            for name in ("", "my-transaction"):
                refused = _init(wire, version, transactional_id=name)
                assert refused.error_code is ErrorCode.invalid_request
                assert (refused.producer_id, refused.producer_epoch) == (-1, -1)

    @pytest.mark.parametrize("half", [{"producer_id": 4}, {"producer_epoch": 4}], ids=str)
    def test_half_a_producer_is_none(
        self, cluster: BrokerCluster, kafka: KafkaServer, half: dict[str, int]
    ) -> None:
        for address in (cluster.a.address, kafka.address):
            with Wire(address) as wire:
                assert _init(wire, 5, **half).error_code is ErrorCode.invalid_request


# By what Dray and Kafka answer: bytes that no client makes of a sound producer.
ODD: dict[str, tuple[Callable[[Producer], bytes], ErrorCode | int, ErrorCode | int]] = {
    "an id that nobody was given": (lambda _: Producer(2**62).batch(0), 0, 0),
    "transactional": (
        lambda producer: producer.batch(0, attributes=0x10),
        ErrorCode.invalid_request,
        ErrorCode.transactional_id_authorization_failed,
    ),
    "two batches in one partition": (
        lambda producer: producer.batch(0) + producer.batch(1),
        ErrorCode.invalid_record,
        ErrorCode.invalid_record,
    ),
    "one of it and one of nobody": (
        lambda producer: producer.batch(0) + build_batch(),
        ErrorCode.invalid_record,
        ErrorCode.invalid_record,
    ),
    "no sequence": (lambda producer: producer.batch(-1), ErrorCode.invalid_record, ErrorCode.invalid_record),
    "a sequence below none": (
        lambda producer: producer.batch(-2),
        ErrorCode.invalid_record,
        ErrorCode.invalid_record,
    ),
    "no epoch": (lambda producer: producer.batch(0, epoch=-1), ErrorCode.invalid_record, 0),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_batches(embedded: BrokerCluster, kafka: KafkaServer, name: str) -> None:
    make, dray_answer, kafka_answer = ODD[name]
    for address, answer in ((embedded.a.address, dray_answer), (kafka.address, kafka_answer)):
        topic = _new_topic(address)
        with Wire(address) as wire:
            producer = _new_producer(wire)
            assert _produce(wire, topic, make(producer)) == answer, address
            # Nothing of it is there, and nobody is the worse for it.
            if isinstance(answer, ErrorCode):
                assert _produce(wire, topic, producer.batch(0)) == 0


def test_sequences_wrap(embedded: BrokerCluster) -> None:
    """At 2^31-1, in a batch and between two. Getting there takes 128 batches of as many records as can be."""
    topic = _new_topic(embedded.a.address)
    largest = 2**24

    def claim(producer: Producer, sequence: int, records: int) -> bytes:
        """Compressed, says the header, and nobody looks."""
        return build_batch(
            bytes(largest // 64),
            attributes=1,
            records=records,
            producer_id=producer.id,
            producer_epoch=0,
            base_sequence=sequence,
        )

    with Wire(embedded.a.address) as wire:
        for in_a_batch in (True, False):
            producer = _new_producer(wire)
            at = 0
            while at < MAX_SEQUENCE - 1:
                records = min(largest, MAX_SEQUENCE - 1 - at)
                wire.send(produce_request(topic, 0, claim(producer, at, records)))
                at += records
            for _ in range(128):
                assert wire.receive_produced().error is NONE
            assert at == MAX_SEQUENCE - 1
            _, end = wire.list_offset(topic, 0, LATEST)
            if in_a_batch:
                steps = [(MAX_SEQUENCE - 1, 3, end), (1, 1, end + 3), (MAX_SEQUENCE - 1, 3, end)]
            else:
                steps = [
                    (at, 1, end),
                    (MAX_SEQUENCE, 1, end + 1),
                    (0, 2, end + 2),
                    (MAX_SEQUENCE, 1, end + 1),
                ]
            for sequence, records, offset in steps:
                assert _produce(wire, topic, producer.batch(sequence, records)) == offset
            assert _produce(wire, topic, producer.batch(MAX_SEQUENCE, 4)) is OUT_OF_ORDER


def test_sequences_wrap_in_kafka(kafka: KafkaServer) -> None:
    topic = _new_topic(kafka.address)
    with Wire(kafka.address) as wire:
        producer = _new_producer(wire)
        steps = [(MAX_SEQUENCE - 1, 3, 0), (1, 1, 3), (MAX_SEQUENCE - 1, 3, 0), (2, 1, 4)]
        for sequence, records, offset in steps:
            assert _produce(wire, topic, producer.batch(sequence, records)) == offset


def test_producers_are_described(cluster: BrokerCluster, kafka: KafkaServer) -> None:
    for addresses in ((cluster.a.address, cluster.b.address), (kafka.address, kafka.address)):
        topic = _new_topic(addresses[0])
        with Wire(addresses[0]) as wire, Wire(addresses[1]) as other:
            assert other.producers(topic, 0) == {}
            first, second = _new_producer(wire), _new_producer(wire)
            _produce(wire, topic, first.batch(0, records=5))
            _produce(wire, topic, second.batch(0))
            _produce(wire, topic, build_batch())
            _produce(wire, topic, second.batch(0, epoch=3, records=2))
            _produce(wire, topic, second.batch(1))
            expected = {first.id: (0, 4), second.id: (3, 1)}
            assert wire.producers(topic, 0) == expected
            assert other.producers(topic, 0) == expected
            assert wire.producers(topic, 1) is ErrorCode.unknown_topic_or_partition
            assert wire.producers("no-such-topic", 0) is ErrorCode.unknown_topic_or_partition


def test_one_who_has_just_started_knows_it_all(cluster: BrokerCluster) -> None:
    topic = _new_topic(cluster.a.address)
    with Wire(cluster.a.address) as wire:
        producer = _new_producer(wire)
        for sequence in range(7):
            assert _produce(wire, topic, producer.batch(sequence)) == sequence
    late = cluster.broker("late")
    late.start()
    try:
        with Wire(late.address) as wire:
            _check_seven(wire, topic, producer)
        assert late.terminate() == 0
    finally:
        late.kill()


def test_all_of_it_outlives_both_brokers(tmp_path: Path) -> None:
    brokers = [DrayBroker(tmp_path), DrayBroker(tmp_path)]
    try:
        for broker in brokers:
            broker.launch()
        for broker in brokers:
            broker.wait_started()
        topics = [_new_topic(brokers[0].address) for _ in brokers]
        with Wire(brokers[0].address) as wire:
            producer = _new_producer(wire)
            for sequence in range(7):
                for topic in topics:
                    assert _produce(wire, topic, producer.batch(sequence)) == sequence
        for broker in brokers:
            broker.kill()
            broker.launch()
        for broker, topic in zip(brokers, topics, strict=True):
            broker.wait_started()
            with Wire(broker.address) as wire:
                _check_seven(wire, topic, producer)
                assert _new_producer(wire).id > producer.id
    finally:
        for broker in brokers:
            broker.kill()


def _check_seven(wire: Wire, topic: str, producer: Producer) -> None:
    """Of a partition in which a producer has written seven batches of a record."""
    assert _produce(wire, topic, producer.batch(8)) is OUT_OF_ORDER
    assert _produce(wire, topic, producer.batch(1)) is OUT_OF_ORDER
    for sequence in range(2, 7):
        assert _produce(wire, topic, producer.batch(sequence)) == sequence
    assert _produce(wire, topic, producer.batch(7)) == 7
    assert _produce(wire, topic, producer.batch(0, epoch=1)) == 8
    assert _produce(wire, topic, producer.batch(8)) is INVALID_EPOCH
    assert wire.list_offset(topic, 0, LATEST) == (NONE, 9)


def test_more_producers_than_are_kept(embedded: BrokerCluster) -> None:
    """Twelve thousand write a batch each: the ten thousand that wrote last are known, and no memory goes."""
    topic = _new_topic(embedded.a.address)
    count, kept, ahead = 12_000, 10_000, 400
    first_id = 2**40
    before = embedded.a.rss_bytes()
    with Wire(embedded.a.address) as wire:
        for start in range(0, count, ahead):
            for number in range(start, start + ahead):
                wire.send(produce_request(topic, 0, Producer(first_id + number).batch(0)))
            for number in range(start, start + ahead):
                assert wire.receive_produced() == (NONE, number)
        assert embedded.a.rss_bytes() < before + MANY_PRODUCERS_BYTES
        known = wire.producers(topic, 0)
        assert isinstance(known, dict)
        assert set(known) == set(range(first_id + count - kept, first_id + count))
    for address in (embedded.a.address, embedded.b.address):
        with Wire(address) as wire:
            for number in (0, count - kept - 1):
                answer = _produce(wire, topic, Producer(first_id + number).batch(1))
                assert answer is UNKNOWN_PRODUCER, number
            for number in (count - kept, count - 1):
                assert _produce(wire, topic, Producer(first_id + number).batch(0)) == number
    with Wire(embedded.b.address) as wire:
        assert _produce(wire, topic, Producer(first_id + count - 1).batch(1)) == count
        assert _produce(wire, topic, Producer(first_id).batch(0)) == count + 1  # as though it were new
