"""The servers that tests share: brought by the tests, on loopback, named in pytest's header."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.servers.etcd import EtcdServer, ensure_etcd
from tests.servers.iceberg_rest import ensure_iceberg_rest_jars
from tests.servers.kafka import ensure_kafka_jars
from tests.servers.oxia import describe_oxia, start_oxia
from tests.servers.s3 import S3Server, ensure_versitygw


def pytest_report_header() -> list[str]:
    return [
        f"etcd: {ensure_etcd()}",
        f"oxia: {describe_oxia()}",
        f"s3: {ensure_versitygw()}",
        f"kafka: {ensure_kafka_jars()}",
        f"iceberg rest catalog: {ensure_iceberg_rest_jars()}",
    ]


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


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = S3Server(tmp_path_factory.mktemp("s3"))
    server.start()
    with pytest.MonkeyPatch.context() as environment:
        for name, value in server.credentials().items():
            environment.setenv(name, value)
        yield server
    server.kill()
