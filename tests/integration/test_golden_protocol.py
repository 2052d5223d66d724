"""What real clients sent once is answered as it was: `golden/protocol/` has their bytes and the fields.

A new broker for each client comes to the same state by the same requests. `golden/protocol/README.md` says
how the files are made, and where Apache Kafka answers otherwise.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dray.broker import open_broker
from dray.config import Given, load_settings
from dray.errors import UnsupportedRequest
from dray.protocol.codec import decode_request
from tests.integration.golden_protocol import (
    DIRECTORY,
    NODE_ID,
    Exchange,
    Fields,
    Golden,
    load,
    replay,
    shown,
)

NAMES = sorted(path.stem for path in DIRECTORY.glob("*.json"))
SERVED = {
    "AlterConfigs",
    "AlterPartitionReassignments",
    "ApiVersions",
    "CreatePartitions",
    "CreateTopics",
    "DeleteRecords",
    "DeleteTopics",
    "DescribeCluster",
    "DescribeConfigs",
    "DescribeLogDirs",
    "DescribeProducers",
    "DescribeTopicPartitions",
    "ElectLeaders",
    "Fetch",
    "FindCoordinator",
    "IncrementalAlterConfigs",
    "InitProducerId",
    "ListConfigResources",
    "ListOffsets",
    "ListPartitionReassignments",
    "Metadata",
    "OffsetForLeaderEpoch",
    "Produce",
    "UpdateFeatures",
}


def of(name: str) -> Golden:
    return load(DIRECTORY / f"{name}.json")


def test_all_clients_and_apis_are_there() -> None:
    assert set(NAMES) >= {"librdkafka", "java", "kafka-python", "aiokafka", "by-hand", "mistakes"}
    asked = {exchange.api.split()[0] for name in NAMES for exchange in of(name).exchanges}
    assert asked >= SERVED


@pytest.mark.parametrize("name", NAMES)
async def test_answers_are_what_they_were(name: str, tmp_path: Path) -> None:
    given = {"data": tmp_path, "listen": "127.0.0.1:0", "node.id": NODE_ID}
    settings = load_settings(None, [Given(key, str(value), "test") for key, value in given.items()], {})
    golden = of(name)
    async with open_broker(settings) as broker:
        address = broker.address
        assert address is not None
        answered = await asyncio.to_thread(_replay, golden, (address.host, address.port), tmp_path)
    assert len(answered) == len(golden.exchanges)
    for exchange, answer in answered:
        assert answer == exchange.answer, f"{exchange.api}, {exchange.name}"


def _replay(golden: Golden, address: tuple[str, int], directory: Path) -> list[tuple[Exchange, Fields]]:
    return list(replay(golden, address, directory))


@pytest.mark.parametrize("name", NAMES)
def test_requests_decode_to_what_they_ask(name: str) -> None:
    golden = of(name)
    for exchange in golden.exchanges:
        if exchange.asks is None:
            with pytest.raises(UnsupportedRequest):
                decode_request(exchange.request)
            continue
        decoded = decode_request(exchange.request)
        assert shown(decoded.body, golden.topic_ids) == exchange.asks, f"{exchange.api}, {exchange.name}"
