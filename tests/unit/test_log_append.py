"""What is taken from producers, what is refused with which code, and what is stored of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from itertools import pairwise

import pytest
from aiokafka.record.default_records import DefaultRecordBatch  # type: ignore[import-untyped]  # has no stubs
from crc32c import crc32c

from dray.errors import (
    BatchTooLarge,
    CorruptBatch,
    InvalidBatch,
    InvalidRecords,
    InvalidTimestamp,
    LegacyBatch,
    NotCommitted,
    TransactionalBatch,
    UnsupportedCodec,
)
from dray.handlers.errors import code_of
from dray.index.entry import WalChunk, place_all, sequence_of
from dray.log.append import LogAppender
from dray.log.read import Want
from dray.metadata.memory import MemoryData, MemoryStore
from dray.objectstore.memory import MemoryObjectStore
from dray.topics.configs import parse_configs
from tests.batches import build_batch, captured
from tests.log_node import CONFIGS, DOMAIN, Node, payload, records_of, soon

S = 0x51
NOW = 1_700_000_000_000
STAMPED = parse_configs({"message.timestamp.type": "LogAppendTime"})


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    node = Node(MemoryStore(MemoryData()), MemoryObjectStore(), now_ms=lambda: NOW)
    await node.start()
    yield node
    await node.stop()


async def read(node: Node, stream_id: int = S) -> bytes:
    fetched = await soon(
        node.reader.fetch([Want(stream_id, 0, 2**31 - 1)], min_bytes=1, max_bytes=2**31 - 1, max_wait_s=0)
    )
    fetched.release()
    (got,) = fetched.partitions
    assert got.records is not None
    return b"".join(got.records.buffers)


def damaged(batch: bytes) -> bytes:
    return batch[:-1] + bytes([batch[-1] ^ 1])


REFUSED: dict[str, tuple[Callable[[], bytes], type[InvalidBatch], int]] = {
    # Codes of Kafka's protocol guide.
    "nothing": (lambda: b"", InvalidRecords, 87),
    "too short": (lambda: build_batch()[:16], InvalidRecords, 87),
    "cut short": (lambda: build_batch()[:-1], InvalidRecords, 87),
    "wrong checksum": (lambda: damaged(build_batch()), CorruptBatch, 2),
    "magic 0": (lambda: build_batch(magic=0), LegacyBatch, 87),
    "magic 1": (lambda: build_batch(magic=1), LegacyBatch, 87),
    "magic 3": (lambda: build_batch(magic=3), CorruptBatch, 2),
    "unknown codec": (lambda: build_batch(attributes=5), UnsupportedCodec, 76),
    "too large": (lambda: build_batch(bytes(1_048_588)), BatchTooLarge, 10),
    "transactional": (
        lambda: build_batch(attributes=0x10, producer_id=1, producer_epoch=0, base_sequence=0),
        TransactionalBatch,
        42,
    ),
    "control": (lambda: build_batch(attributes=0x20), InvalidRecords, 87),
    "several of an idempotent producer": (
        lambda: captured("librdkafka-idempotent") + build_batch(),
        InvalidRecords,
        87,
    ),
    "no records": (lambda: build_batch(b"", records=0), InvalidRecords, 87),
    "stamped by the client": (lambda: build_batch(attributes=0x08), InvalidTimestamp, 32),
    "second is bad": (lambda: build_batch() + damaged(build_batch()), CorruptBatch, 2),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_refused(node: Node, name: str) -> None:
    make, error, code = REFUSED[name]
    with pytest.raises(InvalidBatch) as caught:
        node.appender.append(S, CONFIGS, make())
    assert type(caught.value) is error
    assert code_of(caught.value) == code
    await node.writer.close()
    assert await node.store.tail(DOMAIN, sequence_of(S)) is None, "nothing of it was stored"


async def test_zstd_is_for_clients_that_know_it(node: Node) -> None:
    zstd = captured("librdkafka-zstd")
    with pytest.raises(UnsupportedCodec) as caught:
        node.appender.append(S, CONFIGS, zstd, allows_zstd=False)
    assert code_of(caught.value) == 76
    for codec in ("none", "gzip", "snappy", "lz4"):
        await node.appender.append(S, CONFIGS, captured(f"librdkafka-{codec}"), allows_zstd=False).committed
    await node.appender.append(S, CONFIGS, zstd).committed


async def test_the_limit_is_that_of_the_topic(node: Node) -> None:
    batch = payload(b"x" * 1_000)
    exactly = parse_configs({"max.message.bytes": str(len(batch))})
    below = parse_configs({"max.message.bytes": str(len(batch) - 1)})
    await node.append(S, batch + batch, exactly)
    with pytest.raises(BatchTooLarge):
        await node.append(S, batch, below)


async def test_calls_and_batches_keep_their_order(node: Node) -> None:
    values = [f"{number}".encode() for number in range(40)]
    calls = [payload(*values[at : at + 2]) + payload(*values[at + 2 : at + 4]) for at in range(0, 40, 4)]
    committed = [await each.committed for each in [node.appender.append(S, CONFIGS, call) for call in calls]]
    assert committed[0].start_offset == 0
    assert all(before.end_offset == after.start_offset for before, after in pairwise(committed))
    fetched = await node.reader.fetch([Want(S, 0, 2**31 - 1)], min_bytes=1, max_bytes=2**31 - 1, max_wait_s=0)
    assert records_of(fetched.partitions[0]) == list(enumerate(values))
    fetched.release()


async def test_a_closed_writer_takes_nothing(node: Node) -> None:
    await node.writer.close()
    with pytest.raises(NotCommitted):
        node.appender.append(S, CONFIGS, payload(b"a"))


class TestAppendTime:
    async def test_every_record_has_the_time_of_the_broker(self, node: Node) -> None:
        sent = payload(b"a", b"b", timestamp_ms=5) + payload(b"c", timestamp_ms=6)
        kept = bytes(sent)
        appending = node.appender.append(S, STAMPED, sent)
        assert appending.append_time_ms == NOW
        await appending.committed
        assert sent == kept, "the bytes of the client are its own"
        stored = await read(node)
        at = 0
        offsets = []
        while at < len(stored):
            size = 12 + int.from_bytes(stored[at + 8 : at + 12])
            data = stored[at : at + size]
            assert int.from_bytes(data[17:21]) == crc32c(data[21:])
            batch = DefaultRecordBatch(data)
            assert batch.validate_crc()
            assert batch.timestamp_type == 1
            assert batch.max_timestamp == NOW
            offsets += [(record.offset, record.timestamp, record.value) for record in batch]
            at += size
        assert offsets == [(0, NOW, b"a"), (1, NOW, b"b"), (2, NOW, b"c")]

    async def test_the_index_has_it_too(self, node: Node) -> None:
        await node.append(S, payload(b"a", timestamp_ms=5), STAMPED)
        await node.append(S, payload(b"a", timestamp_ms=5))
        entries = place_all(await node.store.entries(DOMAIN, sequence_of(S), 0, 10))
        ranges = []
        for placed in entries:
            assert isinstance(placed.entry.where, WalChunk)
            (batch,) = placed.entry.where.batches
            ranges.append((batch.min_timestamp_ms, batch.max_timestamp_ms))
        assert ranges == [(NOW, NOW), (5, 5)]

    async def test_no_time_of_the_client_is_checked(self, node: Node) -> None:
        strict = parse_configs(
            {
                "message.timestamp.type": "LogAppendTime",
                "message.timestamp.before.max.ms": "1",
                "message.timestamp.after.max.ms": "1",
            }
        )
        await node.append(S, payload(b"a", timestamp_ms=0), strict)
        await node.append(S, payload(b"a", timestamp_ms=2 * NOW), strict)

    async def test_compressed_batches_are_stamped_as_they_are(self, node: Node) -> None:
        await node.append(S, captured("librdkafka-gzip"), STAMPED)
        batch = DefaultRecordBatch(await read(node))
        assert batch.validate_crc()
        assert batch.max_timestamp == NOW
        assert len(list(batch)) == 3


class TestCreateTime:
    configs = parse_configs(
        {"message.timestamp.before.max.ms": "1000", "message.timestamp.after.max.ms": "500"}
    )

    @pytest.mark.parametrize("timestamp", [NOW - 1_000, NOW, NOW + 500, -1])
    async def test_times_within_the_limits(self, node: Node, timestamp: int) -> None:
        batch = build_batch(base_timestamp=timestamp, max_timestamp=timestamp)
        appending = node.appender.append(S, self.configs, batch)
        await appending.committed
        assert appending.append_time_ms is None
        assert (await read(node))[16:] == batch[16:]

    @pytest.mark.parametrize(
        ("base", "highest"),
        [
            (NOW - 1_001, NOW),
            (NOW, NOW - 1_001),
            (NOW, NOW + 501),
            (NOW + 501, NOW + 501),
            (NOW + 501, -1),  # old Sarama
            (NOW - 1_001, -1),
        ],
    )
    async def test_times_beyond_them(self, node: Node, base: int, highest: int) -> None:
        with pytest.raises(InvalidTimestamp) as caught:
            node.appender.append(S, self.configs, build_batch(base_timestamp=base, max_timestamp=highest))
        assert code_of(caught.value) == 32

    async def test_kafkas_defaults(self, node: Node) -> None:
        """As old as can be, and one hour ahead."""
        await node.append(S, payload(b"a", timestamp_ms=0))
        await node.append(S, payload(b"a", timestamp_ms=NOW + 3_600_000))
        with pytest.raises(InvalidTimestamp):
            await node.append(S, payload(b"a", timestamp_ms=NOW + 3_600_001))


async def test_the_error_says_which_batch_it_is(node: Node) -> None:
    good = build_batch()
    late = build_batch(max_timestamp=2 * NOW)
    zstd = captured("librdkafka-zstd")
    for bad in (late, zstd, damaged(good)):
        with pytest.raises(InvalidBatch) as caught:
            node.appender.append(S, CONFIGS, good + bad, allows_zstd=False)
        assert caught.value.at == len(good)


async def test_streams_go_to_their_domains() -> None:
    """As many domains as the cluster has; where a stream belongs is part of the stored format."""
    store = MemoryStore(MemoryData())
    node = Node(store, MemoryObjectStore())
    appender = LogAppender(node.writer, 4)
    for stream_id in range(20):
        await appender.append(stream_id, CONFIGS, payload(b"a")).committed
    homes = [
        [domain for domain in range(4) if await store.tail(domain, sequence_of(stream_id))]
        for stream_id in range(20)
    ]
    assert all(len(home) == 1 for home in homes)
    assert {home[0] for home in homes} == {0, 1, 2, 3}
    await node.stop()
