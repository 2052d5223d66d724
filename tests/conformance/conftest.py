"""One fixture, `backend`, through which every test of the suite meets every store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dray.metadata.store import MetadataStore
from tests.conformance.backends import (
    Backend,
    MemoryBackend,
    Network,
    ServerBackend,
    UrlBackend,
    etcd_backend,
    oxia_backend,
    sqlite_backend,
)

SHARED = ["sqlite", "etcd", "oxia"]  # other processes can open them
NETWORKED = ["etcd", "oxia"]


def make_backend(name: str, request: pytest.FixtureRequest, directory: Path) -> Backend:
    if name == "memory":
        return MemoryBackend(name, conditions_abort=True)
    if name == "memory-each-alone":
        return MemoryBackend(name, conditions_abort=False)
    return make_shared(name, request, directory)


def make_shared(name: str, request: pytest.FixtureRequest, directory: Path) -> UrlBackend:
    if name == "sqlite":
        return sqlite_backend(directory)
    if name == "etcd":
        return etcd_backend(request.getfixturevalue("etcd_address"))
    return oxia_backend(request.getfixturevalue("oxia_address"))


@pytest.fixture(params=["memory", "memory-each-alone", *SHARED])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    return make_backend(request.param, request, tmp_path)


@pytest.fixture(params=SHARED)
def shared_backend(request: pytest.FixtureRequest, tmp_path: Path) -> UrlBackend:
    return make_shared(request.param, request, tmp_path)


@pytest.fixture(params=NETWORKED)
def server_backend(request: pytest.FixtureRequest, tmp_path: Path) -> ServerBackend:
    made = make_shared(request.param, request, tmp_path)
    assert isinstance(made, ServerBackend)
    return made


@pytest.fixture
async def store(backend: Backend) -> AsyncIterator[MetadataStore]:
    opened = await backend.open()
    yield opened
    await opened.close()


@pytest.fixture
async def another(backend: Backend) -> AsyncIterator[MetadataStore]:
    """A second client of the same store."""
    opened = await backend.open()
    yield opened
    await opened.close()


@pytest.fixture
async def network() -> AsyncIterator[Network]:
    made = Network()
    yield made
    await made.stop()
