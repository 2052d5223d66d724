"""A store that is away: retriable errors in time, bounded memory, and a broker that recovers by itself.

What was acknowledged, before or after, is there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from kio.schema.errors import ErrorCode

from tests.batches import build_batch
from tests.integration.rdkafka import Sender, create_topic, read_values, send_all
from tests.integration.wire import LATEST, Wire, produce_request
from tests.servers.dray import DrayBroker
from tests.servers.proxy import Mode, TcpProxy
from tests.servers.s3 import S3Server

MIB = 2**20
# What Kafka's table calls retriable, of what a produce may be answered with.
RETRIABLE = {
    ErrorCode.request_timed_out,
    ErrorCode.kafka_storage_error,
    ErrorCode.not_leader_or_follower,
    ErrorCode.unknown_topic_or_partition,
}
BUFFER_BYTES = 16 * MIB
INFLIGHT_BYTES = 32 * MIB
# Beside the two buffers: their second copy while objects are assembled, and what an allocator keeps.
SLACK_BYTES = 64 * MIB
# Requests give the broker a second and a half: whoever has no answer by then will have none.
ANSWER_S = 15
STOP_S = 10
PRODUCERS = 40
ROUNDS = 4


@dataclass
class Away:
    """A broker whose stores are each behind a proxy."""

    broker: DrayBroker
    proxies: dict[str, TcpProxy]


@asynccontextmanager
async def _start(directory: Path, etcd_address: str, s3: S3Server) -> AsyncIterator[Away]:
    proxies = {"etcd": TcpProxy(etcd_address), "S3": TcpProxy(s3.address)}
    for proxy in proxies.values():
        await proxy.start()
    broker = DrayBroker(
        directory,
        metadata=f"etcd://{proxies['etcd'].address}/{directory.name}",
        objects=s3.url(directory.name, address=proxies["S3"].address),
        settings={
            "metadata.timeout.ms": 1000,
            "broker.session.timeout.ms": 2000,  # over before the store is back
            "wal.buffer.bytes": BUFFER_BYTES,
            "network.max_inflight_bytes": INFLIGHT_BYTES,
        },
    )
    try:
        await asyncio.to_thread(broker.start)
        yield Away(broker, proxies)
    finally:
        broker.kill()
        for proxy in proxies.values():
            await proxy.stop()


@pytest.mark.parametrize("store", ["etcd", "S3"])
async def test_a_store_that_is_away(
    store: str, tmp_path_factory: pytest.TempPathFactory, etcd_address: str, s3_server: S3Server
) -> None:
    async with _start(tmp_path_factory.mktemp("away"), etcd_address, s3_server) as away:
        address, proxy = away.broker.address, away.proxies[store]
        topic = await asyncio.to_thread(create_topic, address, partitions=4)
        acked = await asyncio.to_thread(send_all, address, topic, [b"%d" % n for n in range(50)])
        before = away.broker.rss_bytes()

        for mode in (Mode.BLACK_HOLE, Mode.REFUSE):
            await proxy.set_mode(mode)
            if mode is Mode.REFUSE:
                proxy.cut()
            patient = Sender(address, message_timeout_ms=100_000)
            for number in range(50):
                patient.send(topic, b"%s %d" % (mode.name.encode(), number), partition=1)
            for code in await asyncio.to_thread(_produce_in_vain, address, topic):
                assert code in RETRIABLE
            assert await asyncio.to_thread(_read_what_can_be_read, address, topic) <= {
                ErrorCode.none,
                *RETRIABLE,
            }
            if mode is Mode.BLACK_HOLE:
                await asyncio.to_thread(_push, address, topic)
                assert away.broker.peak_rss_bytes() < before + BUFFER_BYTES + INFLIGHT_BYTES + SLACK_BYTES
            assert not patient.acked

            await proxy.set_mode(Mode.PASS)
            await asyncio.to_thread(patient.flush, 100)
            assert not patient.failed
            acked += patient.acked

        acked += await asyncio.to_thread(send_all, address, topic, [b"after"])
        log = {0: await asyncio.to_thread(read_values, address, topic, 0)}
        log[1] = await asyncio.to_thread(read_values, address, topic, 1)
        for each in acked:
            assert log[each.partition][each.offset] == each.value
        assert away.broker.is_running


@pytest.mark.parametrize("stores", [["S3"], ["etcd", "S3"]], ids=" and ".join)
async def test_a_stop_does_not_wait_for_stores_that_are_away(
    stores: list[str], tmp_path_factory: pytest.TempPathFactory, etcd_address: str, s3_server: S3Server
) -> None:
    async with _start(tmp_path_factory.mktemp("stop"), etcd_address, s3_server) as away:
        topic = await asyncio.to_thread(create_topic, away.broker.address)
        for store in stores:
            await away.proxies[store].set_mode(Mode.BLACK_HOLE)
        with Wire(away.broker.address) as wire:
            wire.send(produce_request(topic, 0, build_batch(), timeout_ms=60_000))
            with Wire(away.broker.address) as other:  # served after the request was read
                await asyncio.to_thread(other.metadata, topic)
            assert await asyncio.to_thread(away.broker.terminate, STOP_S) == 0


def _produce_in_vain(address: str, topic: str) -> list[ErrorCode]:
    """Several of one connection, one after the other and at once; each is answered."""
    with Wire(address, timeout_s=ANSWER_S) as wire:
        codes = [wire.produce(topic, 2, build_batch(), timeout_ms=1500).error]
        for partition in range(3):
            wire.send(produce_request(topic, partition, build_batch(), timeout_ms=1500))
        return codes + [wire.receive_produced().error for _ in range(3)]


def _read_what_can_be_read(address: str, topic: str) -> set[ErrorCode]:
    """Readers are answered too. What the broker has in memory it may give out."""
    with Wire(address, timeout_s=ANSWER_S) as wire:
        found, _ = wire.list_offset(topic, 0, LATEST)
        fetched = wire.fetch(topic, 0, 0, max_wait_ms=500)
        assert fetched.records or fetched.error is not ErrorCode.none
        return {found, fetched.error, wire.fetch(topic, 3, 0, max_wait_ms=500).error}


def _push(address: str, topic: str) -> None:
    """Many producers that are refused in time, and try the next record: far more than all buffers hold."""
    value = bytes(900_000)
    record = b"\0\0\0" + _varint(-1) + _varint(len(value)) + value + b"\0"
    batch = build_batch(_varint(len(record)) + record)
    with ExitStack() as stack:
        wires = [stack.enter_context(Wire(address)) for _ in range(PRODUCERS)]
        for _ in range(ROUNDS):
            for wire in wires:
                wire.send(produce_request(topic, 3, batch, timeout_ms=1000))
            for wire in wires:
                assert wire.receive_produced().error in RETRIABLE


def _varint(value: int) -> bytes:
    """Kafka's: zigzag, then seven bits a byte, the lowest first."""
    value = value << 1 ^ value >> 63
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])
