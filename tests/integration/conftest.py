"""Clusters of brokers that tests share: two brokers in zones `a` and `b`, on each kind of stores."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.servers.dray import DrayBroker

STACKS = ["sqlite and files", "etcd and S3", "oxia and S3"]


@dataclass
class BrokerCluster:
    """Brokers over the same stores. More may be added; who adds one stops it."""

    directory: Path
    metadata: str
    objects: str
    a: DrayBroker = field(init=False)
    b: DrayBroker = field(init=False)

    def broker(self, zone: str, **more: Any) -> DrayBroker:
        """Another one, not yet started."""
        return DrayBroker(self.directory, metadata=self.metadata, objects=self.objects, zone=zone, **more)

    def start(self) -> None:
        self.a, self.b = self.broker("a"), self.broker("b")
        # One after the other: the first creates the cluster in the store, whichever it is.
        for broker in (self.a, self.b):
            broker.launch()
        for broker in (self.a, self.b):
            broker.wait_started()

    def kill(self) -> None:
        self.a.kill()
        self.b.kill()


@pytest.fixture(scope="session")
def _clusters(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], BrokerCluster]]:
    """Started when first asked for."""
    running: dict[str, BrokerCluster] = {}

    def get(stack: str) -> BrokerCluster:
        if stack not in running:
            directory = tmp_path_factory.mktemp("cluster")
            cluster = BrokerCluster(directory, *store_urls(request, stack, directory))
            cluster.start()
            running[stack] = cluster
        return running[stack]

    yield get
    for cluster in running.values():
        cluster.kill()


def store_urls(request: pytest.FixtureRequest, stack: str, directory: Path) -> tuple[str, str]:
    """Of metadata and objects, for a cluster that is not there yet."""
    name, fresh = stack.split()[0], f"test-{secrets.token_hex(6)}"
    if name == "sqlite":
        return f"sqlite:///{directory}/metadata.db", f"file://{directory}/objects"
    address = request.getfixturevalue(f"{name}_address")
    objects = request.getfixturevalue("s3_server").url(fresh)
    if name == "etcd":
        return f"etcd://{address}/{fresh}", objects
    return f"oxia://{address}/default?prefix={fresh}", objects


@pytest.fixture(params=STACKS)
def cluster(request: pytest.FixtureRequest, _clusters: Callable[[str], BrokerCluster]) -> BrokerCluster:
    """On each kind of stores."""
    return _clusters(request.param)


@pytest.fixture(scope="session")
def embedded(_clusters: Callable[[str], BrokerCluster]) -> BrokerCluster:
    """On SQLite and local files, for what does not depend on the stores."""
    return _clusters("sqlite and files")
