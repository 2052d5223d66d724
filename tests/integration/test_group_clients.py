"""Members of real clients in consumer groups on two brokers, on SQLite. What brokers' deaths do to them is in
`test_group_crashes.py`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

import pytest

from tests.integration.conftest import STACKS, store_urls
from tests.integration.group_members import Client, Groups, Kind, Protocol, member_hosts, two_brokers
from tests.servers.dray import DrayBroker

# Each client's, in one group each.
KINDS: dict[Client, list[tuple[Protocol, str | None]]] = {
    "librdkafka": [
        ("classic", "range"),
        ("classic", "roundrobin"),
        ("classic", "cooperative-sticky"),
        ("consumer", "uniform"),
        ("consumer", "range"),
    ],
    "aiokafka": [("classic", "range"), ("classic", "roundrobin"), ("classic", "sticky")],
    "kafka-python": [
        ("classic", "range"),
        ("classic", "roundrobin"),
        ("classic", "sticky"),
        ("classic", "cooperative-sticky"),
    ],
    "Java": [
        ("classic", "range"),
        ("classic", "roundrobin"),
        ("classic", "sticky"),
        ("classic", "cooperative-sticky"),
        ("consumer", None),
        ("consumer", "range"),
    ],
}


@pytest.fixture(scope="module")
def brokers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, DrayBroker]]:
    directory = tmp_path_factory.mktemp("groups")
    with two_brokers(directory, *store_urls(request, STACKS[0], directory)) as brokers:
        yield brokers


@pytest.fixture
def address(brokers: Mapping[str, DrayBroker]) -> str:
    return ",".join(broker.address for broker in brokers.values())


def come_and_go(address: str, kinds: Mapping[str, Sequence[Kind]]) -> None:
    """From one member to five and to two: two leave, one is killed."""
    with member_hosts() as hosts:
        groups = Groups(address, kinds, hosts)
        try:
            began = time.monotonic_ns()
            groups.start([1])
            groups.settle([1], began)
            groups.start([2, 4, 5])
            groups.start([3], "mortal")
            groups.settle([1, 2, 3, 4, 5], began)
            began = time.monotonic_ns()
            groups.close([4, 5])
            hosts.kill("mortal")
            groups.settle([1, 2], began)
            groups.finish()
        finally:
            groups.stop_writing()


@pytest.mark.parametrize("client", KINDS)
def test_members_come_and_go(address: str, client: Client) -> None:
    come_and_go(
        address,
        {
            f"{client} {protocol} {assignor}": [Kind(client, protocol, assignor)] * 5
            for protocol, assignor in KINDS[client]
        },
    )
