"""The batch without records that stands for a void range: real clients read nothing and go on behind it."""

from __future__ import annotations

import struct
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import TypeAlias

import pytest
from crc32c import crc32c

from dray.errors import InvalidRecords
from dray.protocol.records import empty_batch, patched, read_batch, split_batches
from tests.batches import captured

# By name, since neither library has types.
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # kafka-python, as it is imported
    aiokafka, aiokafka_batches = map(
        import_module, ("aiokafka.consumer.fetcher", "aiokafka.record.memory_records")
    )
    kafka_python, kafka_python_batches = map(
        import_module, ("kafka.consumer.fetcher", "kafka.record.memory_records")
    )

# The offsets that a client hands out, and the one it goes on at.
Read: TypeAlias = tuple[list[int], int]
TP = aiokafka.TopicPartition("t", 0)
MOST = 2**31 - 1  # that one index entry, and one batch, can cover
RANGES = [(0, 1), (7, 3), (2**40, MOST), (2**63 - 1 - MOST, MOST)]


def aiokafka_reads(data: bytes, fetch_offset: int) -> Read:
    records = aiokafka.PartitionRecords(
        tp=TP,
        records=aiokafka_batches.MemoryRecords(data),
        aborted_transactions=None,
        fetch_offset=fetch_offset,
        key_deserializer=None,
        value_deserializer=None,
        check_crcs=True,
        isolation_level=1,  # read_committed, which looks at more fields
    )
    return [record.offset for record in records], records.next_fetch_offset


def kafka_python_reads(data: bytes, fetch_offset: int) -> Read:
    records = kafka_python.Fetcher.PartitionRecords(
        fetch_offset, TP, kafka_python_batches.MemoryRecords(data)
    )
    return [record.offset for record in records.take()], records.next_fetch_offset


@pytest.mark.parametrize(("base", "records"), RANGES)
@pytest.mark.parametrize("client", [aiokafka_reads, kafka_python_reads])
def test_a_client_reads_nothing_and_goes_on_behind_it(
    client: Callable[[bytes, int], Read], base: int, records: int
) -> None:
    for fetch_offset in (base, base + records - 1):
        assert client(empty_batch(base, records, 3), fetch_offset) == ([], base + records)


@pytest.mark.parametrize("client", [aiokafka_reads, kafka_python_reads])
def test_a_client_reads_what_stands_around_it(client: Callable[[bytes, int], Read]) -> None:
    written = captured("librdkafka-none")
    count = split_batches(written)[0].records
    before = b"".join(patched(memoryview(written), 0, 3))
    after = b"".join(patched(memoryview(written), count + 5, 3))
    offsets, following = client(before + empty_batch(count, 5, 3) + after, 0)
    assert offsets == [*range(count), *range(count + 5, 2 * count + 5)]
    assert following == 2 * count + 5


@pytest.mark.parametrize(("base", "records"), RANGES)
def test_its_header_says_that_it_is_empty_and_whose(base: int, records: int) -> None:
    data = empty_batch(base, records, 42)
    assert len(data) == 61
    assert struct.unpack_from(">qiib", data) == (base, 49, 42, 2)
    assert struct.unpack_from(">I", data, 17) == (crc32c(data[21:]),)
    # Attributes, last offset delta, both timestamps, producer id, epoch and sequence, count.
    assert struct.unpack_from(">hiqqqhii", data, 21) == (0, records - 1, -1, -1, -1, -1, -1, 0)
    assert read_batch(memoryview(data)).last_offset_delta == records - 1


def test_no_client_can_produce_one() -> None:
    with pytest.raises(InvalidRecords):
        split_batches(empty_batch(0, 1, 0))


@pytest.mark.parametrize("records", [0, -1, MOST + 1])
def test_what_no_batch_can_cover_is_refused(records: int) -> None:
    with pytest.raises(ValueError, match="offsets"):
        empty_batch(0, records, 0)
