"""One fixture, `place`, through which every test of the suite meets every object store."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

import pytest

from dray.objectstore.memory import MemoryObjects, MemoryObjectStore
from dray.objectstore.opening import open_object_store
from dray.objectstore.store import ObjectStore
from tests.conformance.objectstore.front import Front
from tests.servers.proxy import TcpProxy
from tests.servers.s3 import S3Server


class Place(Protocol):
    """Where one empty store is. Tests open as many clients of it as they like, as processes would."""

    async def open(self) -> ObjectStore: ...


class MemoryPlace:
    def __init__(self) -> None:
        self._data = MemoryObjects()

    async def open(self) -> ObjectStore:
        return MemoryObjectStore(self._data)


class UrlPlace:
    def __init__(self, url: str) -> None:
        self.url = url

    async def open(self) -> ObjectStore:
        return await open_object_store(self.url)


def make_url(kind: str, request: pytest.FixtureRequest, directory: Path) -> str:
    if kind == "file":
        return f"file://{directory}/objects"
    server: S3Server = request.getfixturevalue("s3_server")
    return server.url(f"test/{secrets.token_hex(6)}")


@pytest.fixture(params=["memory", "file", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return (
        MemoryPlace() if request.param == "memory" else UrlPlace(make_url(request.param, request, tmp_path))
    )


@pytest.fixture(params=["file", "s3"])
def shared_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store that other processes can open too."""
    return make_url(request.param, request, tmp_path)


@pytest.fixture
async def objects(place: Place) -> AsyncIterator[ObjectStore]:
    opened = await place.open()
    yield opened
    await opened.close()


@pytest.fixture
async def other_objects(place: Place) -> AsyncIterator[ObjectStore]:
    """A second client of the same store."""
    opened = await place.open()
    yield opened
    await opened.close()


@pytest.fixture
async def front(s3_server: S3Server) -> AsyncIterator[Front]:
    made = Front(s3_server.address)
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def proxy(s3_server: S3Server) -> AsyncIterator[TcpProxy]:
    made = TcpProxy(s3_server.address)
    await made.start()
    yield made
    await made.stop()
