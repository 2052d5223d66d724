"""kill -9 of a broker while groups rebalance: members of both brokers go on, nothing is lost or had by two.

Each group has members of several clients, in both zones, so either broker hears some of them.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.integration.conftest import STACKS, store_urls
from tests.integration.group_members import Client, Groups, Kind, member_hosts, two_brokers

_CLASSIC: dict[str, tuple[Client, ...]] = {
    "range": ("librdkafka", "Java", "aiokafka", "kafka-python", "librdkafka"),
    "sticky": ("aiokafka", "kafka-python", "aiokafka", "Java", "kafka-python"),
    "cooperative-sticky": ("Java", "librdkafka", "kafka-python", "librdkafka", "Java"),
}
_CONSUMER: dict[str, tuple[Client, ...]] = {
    "uniform": ("librdkafka", "Java", "librdkafka", "Java", "librdkafka"),
    "range": ("Java", "librdkafka", "Java", "librdkafka", "Java"),
}
KINDS = {
    **{
        f"classic {name}": [Kind(one, "classic", name) for one in clients]
        for name, clients in _CLASSIC.items()
    },
    **{
        f"consumer {name}": [Kind(one, "consumer", name) for one in clients]
        for name, clients in _CONSUMER.items()
    },
}


@pytest.mark.parametrize(("stack", "returns"), [*((stack, True) for stack in STACKS), (STACKS[0], False)])
def test_a_broker_is_killed_while_groups_rebalance(
    request: pytest.FixtureRequest, tmp_path: Path, stack: str, returns: bool
) -> None:
    """One when members come. If it returns, the other when members go: by then it has heard some of them for
    long, and one of those that it heard dies with it."""
    metadata, objects = store_urls(request, stack, tmp_path)
    with two_brokers(tmp_path, metadata, objects) as brokers, member_hosts() as hosts:
        address = ",".join(broker.address for broker in brokers.values())
        groups = Groups(address, KINDS, hosts)
        try:
            groups.start([1])
            groups.settle([1], 0)
            began = time.monotonic_ns()
            groups.start([2, 4, 5])
            groups.start([3], "mortal")
            groups.wait_rebalancing(began)
            brokers["a"].kill()
            groups.settle([1, 2, 3, 4, 5], time.monotonic_ns())
            if returns:
                brokers["a"].start()
                groups.consume([1, 2, 3, 4, 5])
                groups.wait_known([1, 2, 3, 4, 5])
            began = time.monotonic_ns()
            groups.close([4, 5])
            hosts.kill("mortal")
            if returns:
                groups.wait_rebalancing(began)
                brokers["b"].kill()
            groups.settle([1, 2], time.monotonic_ns())
            groups.finish()
        finally:
            groups.stop_writing()
