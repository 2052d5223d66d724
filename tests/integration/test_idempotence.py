"""Idempotent producers of real clients: every record that was acknowledged is there once, in order (I3).

Two producers write the same partitions, each through the broker of its zone, so both brokers write every
partition at once; a proxy before each broker loses answers and cuts connections, and the brokers are killed
in turn. Nothing may be there twice, whatever was retried, wherever.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.clients import send_with_aiokafka, send_with_kafka_python
from tests.integration.conftest import STACKS, store_urls
from tests.integration.java_clients import ToSend
from tests.integration.numbered import JavaNumberWriter, NumberWriter, RdkafkaNumbers, read_logs
from tests.integration.rdkafka import create_topic, in_zone, send_all
from tests.integration.waiting import eventually_async
from tests.integration.wire import Wire
from tests.servers.dray import DrayBroker
from tests.servers.lossy import RESETS, Fate, LossyProxy
from tests.servers.proxy import Mode, TcpProxy

ZONES = ("a", "b")
PARTITIONS = 4
# Of each producer: before and after each kill, and after each return.
ACKED_BETWEEN = 1_000
ONE_IN = 30
SILENCES = 1
OTHER_RECORDS = 2_000
# A client that hears nothing gives up after this; an answer takes a few hundredths of it.
REQUEST_TIMEOUT_MS = 2_000


@dataclass
class LossyPair:
    brokers: dict[str, DrayBroker]
    proxies: dict[str, LossyProxy]

    @property
    def address(self) -> str:
        return ",".join(proxy.address for proxy in self.proxies.values())

    @property
    def happened(self) -> Counter[Fate]:
        return sum((proxy.happened for proxy in self.proxies.values()), Counter())


@asynccontextmanager
async def _start_pair(
    directory: Path, metadata: str, objects: str, chances: random.Random, one_in: int, silences: int
) -> AsyncIterator[LossyPair]:
    proxies = {zone: LossyProxy(chances, one_in, silences) for zone in ZONES}
    brokers = {}
    for zone, proxy in proxies.items():
        await proxy.start()
        # A short session, so that the clients of one who dies are sent to the other soon.
        settings = {"advertise": proxy.address, "broker.session.timeout.ms": 2000, "log.level": "debug"}
        broker = DrayBroker(directory, metadata=metadata, objects=objects, zone=zone, settings=settings)
        proxy.target = broker.address
        brokers[zone] = broker
    try:
        for broker in brokers.values():
            broker.launch()
        for broker in brokers.values():
            await asyncio.to_thread(broker.wait_started)
        yield LossyPair(brokers, proxies)
    finally:
        for broker in brokers.values():
            broker.kill()
        for proxy in proxies.values():
            await proxy.stop()


@pytest.mark.parametrize("stack", STACKS)
async def test_every_acknowledged_record_is_there_once_and_in_order(
    request: pytest.FixtureRequest, stack: str, tmp_path: Path
) -> None:
    seed = random.randrange(2**32)
    metadata, objects = store_urls(request, stack, tmp_path)
    async with _start_pair(tmp_path, metadata, objects, random.Random(seed), ONE_IN, SILENCES) as pair:
        topic = await asyncio.to_thread(create_topic, pair.address, partitions=PARTITIONS)
        writers: list[NumberWriter] = [
            RdkafkaNumbers(
                pair.address,
                topic,
                PARTITIONS,
                {
                    "client.id": in_zone("a"),
                    "batch.num.messages": 20,
                    "linger.ms": 5,
                    "socket.timeout.ms": REQUEST_TIMEOUT_MS,
                    "request.timeout.ms": REQUEST_TIMEOUT_MS,
                    "reconnect.backoff.max.ms": 500,
                },
            ),
            JavaNumberWriter(
                pair.address,
                topic,
                PARTITIONS,
                {"client.id": in_zone("b"), "batch.size": 512, "request.timeout.ms": REQUEST_TIMEOUT_MS},
            ),
        ]
        for writer in writers:
            writer.start()

        async def go_on(what: str) -> None:
            goals = [len(writer.acked) + ACKED_BETWEEN for writer in writers]

            def is_reached() -> bool:
                return all(
                    len(writer.acked) >= goal or writer.failed
                    for writer, goal in zip(writers, goals, strict=True)
                )

            await eventually_async(is_reached, f"seed {seed}: records acknowledged {what}", limit_s=60)

        try:
            await go_on("at first")
            for zone, broker in pair.brokers.items():
                await asyncio.to_thread(broker.kill)
                await go_on(f"without {zone}")
                await asyncio.to_thread(broker.start)
                await go_on(f"with {zone} again")
            for writer in writers:
                assert not writer.failed, f"seed {seed}"
        finally:
            for writer in writers:
                await asyncio.to_thread(writer.end)
        for broker in pair.brokers.values():
            assert broker.log_text().count("registered as broker") == 2
        happened = pair.happened
        assert all(happened[fate] > 0 for fate in (*RESETS, Fate.SILENCE)), f"seed {seed}: {happened}"

        for proxy in pair.proxies.values():
            proxy.is_lossy = False
        ends = await asyncio.to_thread(_ends, pair, topic)
        logs, of_the_other = await asyncio.gather(
            *(asyncio.to_thread(_read_logs, pair, topic, zone, ends) for zone in ZONES)
        )
        assert logs == of_the_other, f"seed {seed}"
        for writer in writers:
            _check(writer, logs, seed)


async def test_producers_that_gave_up_on_records_go_on(tmp_path: Path) -> None:
    """Their batches arrive, but no answer comes until they have given up: then they go on under a higher
    epoch, or as somebody else (KIP-360). What they gave up is there at most once."""
    proxy = TcpProxy("")
    await proxy.start()
    broker = DrayBroker(tmp_path, settings={"advertise": proxy.address})
    proxy.target = broker.address
    try:
        await asyncio.to_thread(broker.start)
        topic = await asyncio.to_thread(create_topic, proxy.address, partitions=PARTITIONS)
        writers: list[NumberWriter] = [
            RdkafkaNumbers(
                proxy.address,
                topic,
                PARTITIONS,
                {"batch.num.messages": 20, "message.timeout.ms": 1500, "socket.timeout.ms": 1000},
            ),
            JavaNumberWriter(
                proxy.address,
                topic,
                PARTITIONS,
                {"batch.size": 512, "delivery.timeout.ms": 1500, "request.timeout.ms": 1000},
            ),
        ]
        for writer in writers:
            writer.start()
        try:
            await eventually_async(lambda: all(len(writer.acked) > 500 for writer in writers), "acknowledged")
            await proxy.set_mode(Mode.DROP_ANSWERS)
            await eventually_async(lambda: all(writer.failed for writer in writers), "given up")
            before = [len(writer.acked) for writer in writers]
            await proxy.set_mode(Mode.PASS)
            proxy.cut()

            def go_on() -> bool:
                return all(len(writer.acked) > n + 500 for writer, n in zip(writers, before, strict=True))

            await eventually_async(go_on, "acknowledged again")
        finally:
            for writer in writers:
                await asyncio.to_thread(writer.end)
        ends = [
            (await asyncio.to_thread(send_all, broker.address, topic, [b"last"], partition))[0].offset
            for partition in range(PARTITIONS)
        ]
        logs = await asyncio.to_thread(read_logs, broker.address, topic, ends)
        for writer in writers:
            _check(writer, logs, 0)
        with Wire(broker.address) as wire:
            producers = wire.producers(topic, 0)
        assert isinstance(producers, dict)
        assert len(producers) > 2 or max(epoch for epoch, _ in producers.values()) > 0
    finally:
        broker.kill()
        await proxy.stop()


@pytest.mark.parametrize("send", [send_with_aiokafka, send_with_kafka_python])
async def test_retries_of_other_clients_leave_no_duplicates(
    send: Callable[[str, Sequence[ToSend]], list[tuple[int, int]]],
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    seed = random.randrange(2**32)
    metadata, objects = store_urls(request, STACKS[0], tmp_path)
    async with _start_pair(tmp_path, metadata, objects, random.Random(seed), one_in=5, silences=0) as pair:
        topic = await asyncio.to_thread(create_topic, pair.address, partitions=PARTITIONS)
        records = [
            ToSend(topic, b"%d" % number, partition=number % PARTITIONS) for number in range(OTHER_RECORDS)
        ]
        places = await asyncio.to_thread(send, pair.address, records)
        happened = pair.happened
        assert all(happened[fate] > 0 for fate in RESETS), f"seed {seed}: {happened}"
        expected: list[dict[int, bytes | None]] = [{} for _ in range(PARTITIONS)]
        for record, (partition, offset) in zip(records, places, strict=True):
            expected[partition][offset] = record.value
        each = OTHER_RECORDS // PARTITIONS
        for log in expected:
            assert list(log) == list(range(each)), f"seed {seed}"

        for proxy in pair.proxies.values():
            proxy.is_lossy = False
        ends = await asyncio.to_thread(_ends, pair, topic)
        assert ends == [each + 1] * PARTITIONS, f"seed {seed}: the last of zone a, and nothing else"
        logs = await asyncio.to_thread(_read_logs, pair, topic, "a", [each] * PARTITIONS)
        assert logs == expected, f"seed {seed}"


def _read_logs(pair: LossyPair, topic: str, zone: str, ends: Sequence[int]) -> list[dict[int, bytes]]:
    return read_logs(pair.address, topic, ends, client_id=in_zone(zone))


def _ends(pair: LossyPair, topic: str) -> list[int]:
    """What a broker still had to commit is before the last record that it takes now."""
    ends = [0] * PARTITIONS
    for zone in ZONES:
        for partition in range(PARTITIONS):
            (last,) = send_all(pair.address, topic, [b"last"], partition, client_id=in_zone(zone))
            ends[partition] = last.offset
    return ends


def _check(writer: NumberWriter, logs: Sequence[dict[int, bytes]], seed: int) -> None:
    found: dict[int, dict[int, int]] = defaultdict(dict)  # offset by number, by partition
    for partition, log in enumerate(logs):
        for offset, value in log.items():
            name, *rest = value.decode().split()
            if name != writer.name:
                continue
            number = int(rest[0])
            where = f"seed {seed}: {writer.name} {number} at {partition}/{offset}"
            assert number % PARTITIONS == partition, where
            assert number not in found[partition], (
                f"{where} is there twice, first at {found[partition][number]}"
            )
            found[partition][number] = offset
    for number, (partition, offset) in writer.acked.items():
        where = f"seed {seed}: {writer.name} {number} in partition {partition}"
        assert number in found[partition], f"{where} was acknowledged at {offset} and is gone"
        assert found[partition][number] == offset, where
    assert {*writer.acked, *writer.failed} == set(range(len(writer.acked) + len(writer.failed)))
    for partition, offsets in found.items():
        numbers = [number for number in offsets if number in writer.acked]
        assert numbers == sorted(numbers), f"seed {seed}: {writer.name}, partition {partition}"
