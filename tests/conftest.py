"""The servers that tests share: brought by the tests, on loopback, named in pytest's header."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.servers.etcd import EtcdServer, ensure_etcd
from tests.servers.oxia import describe_oxia, start_oxia


def pytest_report_header() -> list[str]:
    return [f"etcd: {ensure_etcd()}", f"oxia: {describe_oxia()}"]


@pytest.fixture(scope="session")
def etcd_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    server.start()
    yield server.address
    server.kill()


@pytest.fixture(scope="session")
def oxia_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with start_oxia(tmp_path_factory.mktemp("oxia")) as server:
        yield server.address
