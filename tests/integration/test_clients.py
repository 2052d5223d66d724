"""Four real clients: what they send is what all of them read, from wherever they start to read."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from functools import partial

import pytest
from kio.schema.errors import ErrorCode

from tests.integration.clients import CLIENTS, Java, KafkaClient, Librdkafka, OutOfRange, Refusal
from tests.integration.conftest import BrokerCluster
from tests.integration.java_clients import Headers, Received, ToRead, ToSend
from tests.integration.rdkafka import create_topic
from tests.integration.waiting import eventually
from tests.integration.wire import LATEST, Wire

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
# Which acks each codec is tried with: every codec and every acks, not every pair.
ACKS = {"none": "all", "gzip": "1", "snappy": "0", "lz4": "0", "zstd": "all"}
MESSAGE_TOO_LARGE = 10
INVALID_TIMESTAMP = 32
NOISE = random.Random(1).randbytes(10 * 2**20)

with_each_client = pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)


def _records(topic: str, partition: int, client: KafkaClient) -> list[ToSend]:
    at_ms = 1_700_000_000_000
    headers: Headers = (("h", b"1"), ("h", b"2"), ("h", b"1"), ("empty", b""), ("ü", b"\xff\x00"))
    records = [
        ToSend(topic, b"value", b"key", partition, at_ms),
        ToSend(topic, b"v", None, partition, at_ms + 10),
        ToSend(topic, None, b"k", partition, at_ms + 5),  # a tombstone; and time goes back
        ToSend(topic, b"", b"", partition, at_ms + 20),
        ToSend(topic, b"with headers", b"key", partition, at_ms + 30, headers),
        ToSend(topic, b"x" * 100_000, None, partition, at_ms + 40),
        ToSend(topic, NOISE[:100_000], b"noise", partition, at_ms + 50),
    ]
    records += [ToSend(topic, f"{n}".encode() * 10, None, partition, at_ms + 100 + n) for n in range(50)]
    if client.takes_nulls:
        headers = (*headers, ("null", None), ("h", None))
        records.append(ToSend(topic, None, None, partition, at_ms + 200, headers))
    return records


@pytest.fixture(scope="module")
def written(embedded: BrokerCluster) -> dict[str, list[ToSend]]:
    """What each client has sent to the topic of that key, a partition per codec; acknowledged and checked."""
    address = embedded.a.address
    sent: dict[str, list[ToSend]] = {}
    for client in CLIENTS:
        topic = create_topic(address, partitions=len(CODECS))
        sent[topic] = []
        for codec in client.codecs:
            partition, acks = CODECS.index(codec), ACKS[codec]
            records = _records(topic, partition, client)
            answers = client.produce(address, records, codec=codec, acks=acks)  # type: ignore[arg-type]
            if acks != "0":  # some make up offsets then
                assert answers == list(range(len(records)))
            eventually(partial(_ends_at, address, topic, partition, len(records)), "all is there")
            sent[topic] += records
    return sent


@with_each_client
def test_what_any_client_wrote_this_one_reads(
    client: KafkaClient, embedded: BrokerCluster, written: dict[str, list[ToSend]]
) -> None:
    wanted = {
        (record.topic, record.partition)
        for records in written.values()
        for record in records
        if CODECS[record.partition or 0] in client.codecs
    }
    got = client.consume(embedded.b.address, [ToRead(topic, part or 0) for topic, part in wanted])
    for topic, partition in wanted:
        expected = [record for record in written[topic] if record.partition == partition]
        here = [one for one in got if (one.topic, one.partition) == (topic, partition)]
        assert [one.offset for one in here] == list(range(len(expected)))
        for one, record in zip(here, expected, strict=True):
            assert _content(one) == record
            assert one.timestamp_type == "CreateTime"


@with_each_client
def test_records_from_one_byte_to_ten_mebibytes(client: KafkaClient, embedded: BrokerCluster) -> None:
    sizes = (1, 1000, 2**20, 10 * 2**20)
    topic = create_topic(embedded.a.address, configs={"max.message.bytes": str(12 * 2**20)})
    small = create_topic(embedded.a.address)  # takes a mebibyte, as by default
    records = [ToSend(topic, NOISE[:size], None, 0, 1_700_000_000_000) for size in sizes]
    too_large = ToSend(small, NOISE[: 2 * 2**20], None, 0)
    answers = client.produce(embedded.a.address, [*records, too_large], max_bytes=12 * 2**20)
    assert answers == [0, 1, 2, 3, Refusal(MESSAGE_TOO_LARGE)]
    assert [one.value for one in client.consume(embedded.b.address, [ToRead(topic)])] == [
        NOISE[:size] for size in sizes
    ]
    assert _ends_at(embedded.a.address, small, 0, 0)


@with_each_client
def test_the_broker_s_time_where_a_topic_wants_it(client: KafkaClient, embedded: BrokerCluster) -> None:
    configs = {"message.timestamp.type": "LogAppendTime"}
    topic = create_topic(embedded.a.address, configs=configs)
    began = time.time_ns() // 1_000_000
    records = [ToSend(topic, b"%d" % number, None, 0, 1000 + number) for number in range(5)]
    assert client.produce(embedded.a.address, records, codec="gzip") == list(range(5))
    ended = time.time_ns() // 1_000_000
    got = client.consume(embedded.b.address, [ToRead(topic)])
    assert [one.value for one in got] == [record.value for record in records]
    assert {one.timestamp_type for one in got} == {"LogAppendTime"}
    assert all(began <= one.timestamp <= ended for one in got)


@pytest.fixture(scope="module")
def by_time(embedded: BrokerCluster) -> str:
    """A topic with a hundred records in two batches, whose times are 1,000 + 10 × offset."""
    topic = create_topic(embedded.a.address)
    records = [ToSend(topic, b"%d" % n, None, 0, 1000 + 10 * n) for n in range(100)]
    for half in (records[:60], records[60:]):
        Librdkafka().produce(embedded.a.address, half, codec="zstd")
    with Wire(embedded.a.address) as wire:
        # Whoever asks for the middle of a batch is given all of it, and finds its own record.
        assert wire.fetch(topic, 0, 37).records[:8] == bytes(8)
    return topic


@with_each_client
def test_reading_begins_where_it_is_asked_to(
    client: KafkaClient, embedded: BrokerCluster, by_time: str
) -> None:
    starts: dict[int | str, int] = {
        0: 0,
        "earliest": 0,
        37: 37,  # inside a batch
        60: 60,
        99: 99,
        "@0": 0,
        "@1370": 37,
        "@1371": 38,
        "@1599": 60,
        "@1990": 99,
    }
    reads = [ToRead(by_time, 0, start, "+1") for start in starts]
    if isinstance(client, Java):  # each time it starts a JVM
        reads = [read for read in reads if read.start in (37, "@1371")]
    # One record is asked for, and more may come at once: the first is what counts.
    got = [client.consume(embedded.b.address, [read])[0] for read in reads]
    assert [(one.offset, one.value) for one in got] == [
        (starts[read.start], b"%d" % starts[read.start]) for read in reads
    ]


@with_each_client
def test_a_reader_at_the_end_gets_what_comes(client: KafkaClient, embedded: BrokerCluster) -> None:
    topic = create_topic(embedded.a.address)
    records = [ToSend(topic, b"%d" % number, None, 0) for number in range(20)]
    Librdkafka().produce(embedded.a.address, records[:10])
    got = client.tail(
        embedded.b.address, topic, 10, lambda: Librdkafka().produce(embedded.a.address, records[10:])
    )
    assert [(one.offset, one.value) for one in got] == [(n, b"%d" % n) for n in range(10, 20)]


@with_each_client
def test_an_offset_that_is_not_there(client: KafkaClient, embedded: BrokerCluster, by_time: str) -> None:
    with pytest.raises(OutOfRange):
        client.consume(embedded.b.address, [ToRead(by_time, 0, 101, 102)])
    if not isinstance(client, Java):  # whose harness takes a start behind the end for the end
        got = client.consume(embedded.b.address, [ToRead(by_time, 0, 101, 100)], reset="earliest")
        assert [one.offset for one in got] == list(range(100))


def test_a_time_too_far_ahead_is_refused(embedded: BrokerCluster) -> None:
    topic = create_topic(embedded.a.address, configs={"message.timestamp.after.max.ms": "60000"})
    now_ms = time.time_ns() // 1_000_000
    good = ToSend(topic, b"good", None, 0, now_ms)
    assert Librdkafka().produce(embedded.a.address, [good]) == [0]
    bad = replace(good, timestamp=now_ms + 3_600_000)
    assert Librdkafka().produce(embedded.a.address, [bad]) == [Refusal(INVALID_TIMESTAMP)]


def _content(one: Received) -> ToSend:
    return ToSend(one.topic, one.value, one.key, one.partition, one.timestamp, one.headers)


def _ends_at(address: str, topic: str, partition: int, end: int) -> bool:
    with Wire(address) as wire:
        return wire.list_offset(topic, partition, LATEST) == (ErrorCode.none, end)
