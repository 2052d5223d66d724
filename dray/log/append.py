"""Appends a client's batches to a partition: checks them, stamps them, hands them to the WAL."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dray.errors import InvalidRecords, InvalidTimestamp, UnsupportedCodec
from dray.index.entry import Producer, stream_domain
from dray.protocol.records import NO_TIMESTAMP, Batch, split_batches, stamp_append_time
from dray.topics.configs import TimestampType, TopicConfigs
from dray.wal.batcher import PendingBatch
from dray.wal.writer import Committed, WalWriter


@dataclass(frozen=True, slots=True)
class Appending:
    """Batches on their way. `append_time_ms` is set where the broker's time is that of the records."""

    stream_id: int
    committed: asyncio.Future[Committed]
    append_time_ms: int | None


class LogAppender:
    def __init__(
        self,
        writer: WalWriter,
        num_domains: int,
        wall_clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._writer = writer
        self._num_domains = num_domains
        self._wall_clock_ms = wall_clock_ms

    def append(
        self, stream_id: int, configs: TopicConfigs, payload: bytes, *, allows_zstd: bool = True
    ) -> Appending:
        """Accept a partition's part of a Produce request; it is committed when the future says so.

        Calls keep their order. Raises `InvalidBatch` for what cannot be taken, and what `submit` raises.
        """
        batches = split_batches(payload, configs.max_message_bytes)
        now_ms = self._wall_clock_ms()
        stamps = configs.timestamp_type is TimestampType.LOG_APPEND_TIME
        at = 0
        for batch in batches:
            _check(batch, at, allows_zstd)
            if not stamps:
                _check_time(batch, at, now_ms, configs)
            at += len(batch.data)
        append_time_ms = now_ms if stamps else None
        if stamps:
            batches = _stamped(payload, batches, now_ms)
        if len(batches) > 1 and any(batch.producer_id >= 0 for batch in batches):
            # One answer stands for one batch: whether it is a duplicate, and of which offset.
            raise InvalidRecords("an idempotent producer sends one batch per partition and request", 0)
        pending = [
            PendingBatch(
                stream_id, batch.data, batch.records, *_time_range(batch, append_time_ms), _producer(batch)
            )
            for batch in batches
        ]
        domain = stream_domain(stream_id, self._num_domains)
        return Appending(stream_id, self._writer.submit(domain, pending), append_time_ms)


def _check(batch: Batch, at: int, allows_zstd: bool) -> None:
    if not allows_zstd and batch.codec == "zstd":
        raise UnsupportedCodec("zstd needs Produce version 7 or later (KIP-110)", at)


def _producer(batch: Batch) -> Producer | None:
    if batch.producer_id < 0:
        return None
    return Producer(batch.producer_id, batch.producer_epoch, batch.base_sequence)


def _check_time(batch: Batch, at: int, now_ms: int, configs: TopicConfigs) -> None:
    """Kafka's `message.timestamp.before.max.ms` and `.after.max.ms`, by what the header says."""
    low, high = batch.timestamp_range_ms
    if low != NO_TIMESTAMP and now_ms - low > configs.timestamp_before_max_ms:
        raise InvalidTimestamp(f"{low} is more than {configs.timestamp_before_max_ms} ms ago", at)
    if high != NO_TIMESTAMP and high - now_ms > configs.timestamp_after_max_ms:
        raise InvalidTimestamp(f"{high} is more than {configs.timestamp_after_max_ms} ms ahead", at)


def _stamped(payload: bytes, batches: Sequence[Batch], now_ms: int) -> list[Batch]:
    """The batches with the broker's time, in a copy: the client's bytes cannot be written to."""
    copy = memoryview(bytearray(payload))
    stamped = []
    at = 0
    for batch in batches:
        data = copy[at : at + len(batch.data)]
        stamp_append_time(data, now_ms)
        stamped.append(batch._replace(data=data))
        at += len(data)
    return stamped


def _time_range(batch: Batch, append_time_ms: int | None) -> tuple[int, int]:
    return batch.timestamp_range_ms if append_time_ms is None else (append_time_ms, append_time_ms)
