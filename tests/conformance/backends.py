"""What the suite needs to know of a backend: how to reach it, alone or through a proxy.

A `Backend` is one empty store (a file, or an unused prefix on a server). Tests open as many clients of
it as they like, as processes would.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

import grpc.aio

from dray.metadata.etcd import EtcdStore
from dray.metadata.memory import MemoryData, MemorySession, MemoryStore
from dray.metadata.opening import EtcdUrl, OxiaUrl, open_store, parse_metadata_url
from dray.metadata.oxia import OxiaStore
from dray.metadata.proto import oxia_pb2, oxia_pb2_grpc
from dray.metadata.store import MetadataStore
from tests.servers.proxy import TcpProxy


class Owner(Protocol):
    """Somebody else's process that holds a session with one ephemeral key."""

    async def die(self) -> None: ...
    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def wait_lost(self) -> None: ...


class Backend(Protocol):
    name: str

    async def open(self, timeout_s: float = 5.0) -> MetadataStore: ...
    async def owner(self, domain: int, key: str, ttl_ms: int) -> Owner: ...


class Network:
    """Proxies in front of every address of a server, faulted together."""

    def __init__(self) -> None:
        self.proxies: dict[str, TcpProxy] = {}

    async def add(self, address: str) -> str:
        if address not in self.proxies:
            proxy = TcpProxy(address)
            await proxy.start()
            self.proxies[address] = proxy
        return self.proxies[address].address

    def dial(self, address: str) -> str:
        return self.proxies[address].address

    def each(self) -> list[TcpProxy]:
        return list(self.proxies.values())

    def cut(self) -> None:
        for proxy in self.each():
            proxy.cut()

    async def stop(self) -> None:
        for proxy in self.each():
            await proxy.stop()


class MemoryBackend:
    def __init__(self, name: str, conditions_abort: bool) -> None:
        self.name = name
        self._conditions_abort = conditions_abort
        self._data = MemoryData()

    async def open(self, timeout_s: float = 5.0) -> MetadataStore:
        return MemoryStore(self._data, conditions_abort=self._conditions_abort)

    async def owner(self, domain: int, key: str, ttl_ms: int) -> Owner:
        session = MemorySession(self._data)
        await session.put_ephemeral(domain, key, b"mine")
        return _MemoryOwner(session)


class _MemoryOwner:
    """A pause outlives every time-to-live: there is no clock here."""

    def __init__(self, session: MemorySession) -> None:
        self._session = session

    async def die(self) -> None:
        self._session.expire()

    async def pause(self) -> None:
        self._session.expire()

    async def resume(self) -> None:
        pass

    async def wait_lost(self) -> None:
        await self._session.wait_lost()


class UrlBackend:
    """A store that other processes can open too, by its URL."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self.url = url

    async def open(self, timeout_s: float = 5.0) -> MetadataStore:
        return await open_store(self.url, timeout_s)

    async def owner(self, domain: int, key: str, ttl_ms: int) -> Owner:
        child = await spawn("hold", self.url, str(domain), key, str(ttl_ms))
        assert await read_line(child) == "holding"
        return _ProcessOwner(child)


class ServerBackend(UrlBackend):
    """A store behind a network."""

    def __init__(
        self, name: str, url: str, through: Callable[[Network, float], Awaitable[MetadataStore]]
    ) -> None:
        super().__init__(name, url)
        self._through = through

    async def open_through(self, network: Network, timeout_s: float = 5.0) -> MetadataStore:
        return await self._through(network, timeout_s)


def sqlite_backend(directory: Path) -> UrlBackend:
    return UrlBackend("sqlite", f"sqlite:///{directory}/metadata.db")


def etcd_backend(address: str) -> ServerBackend:
    url = f"etcd://{address}/test-{secrets.token_hex(6)}"
    parsed = parse_metadata_url(url)
    assert isinstance(parsed, EtcdUrl)

    async def through(network: Network, timeout_s: float) -> MetadataStore:
        return await EtcdStore.open([await network.add(address)], parsed.prefix, timeout_s=timeout_s)

    return ServerBackend("etcd", url, through)


def oxia_backend(address: str) -> ServerBackend:
    url = f"oxia://{address}/default?prefix=test-{secrets.token_hex(6)}"
    parsed = parse_metadata_url(url)
    assert isinstance(parsed, OxiaUrl)

    async def through(network: Network, timeout_s: float) -> MetadataStore:
        for leader in {address, *await _leaders(address, parsed.namespace)}:
            await network.add(leader)
        return await OxiaStore.open(
            address, parsed.namespace, parsed.root, timeout_s=timeout_s, dial=network.dial
        )

    return ServerBackend("oxia", url, through)


async def _leaders(address: str, namespace: str) -> set[str]:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = oxia_pb2_grpc.OxiaClientStub(channel)
        request = oxia_pb2.ShardAssignmentsRequest(namespace=namespace)
        async for answer in stub.GetShardAssignments(request, wait_for_ready=True, timeout=10):
            return {shard.leader for shard in answer.namespaces[namespace].assignments}
    raise AssertionError("no shard assignments")


class _ProcessOwner:
    def __init__(self, child: asyncio.subprocess.Process) -> None:
        self._child = child

    async def die(self) -> None:
        self._child.kill()
        await self._child.wait()

    async def pause(self) -> None:
        self._child.send_signal(signal.SIGSTOP)

    async def resume(self) -> None:
        self._child.send_signal(signal.SIGCONT)

    async def wait_lost(self) -> None:
        assert await read_line(self._child) == "lost"
        await self._child.wait()


async def spawn(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.conformance.child", *arguments, stdout=asyncio.subprocess.PIPE
    )


async def read_line(child: asyncio.subprocess.Process) -> str:
    assert child.stdout is not None
    return (await child.stdout.readline()).decode().strip()
