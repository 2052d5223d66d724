"""A server in front of S3 that passes requests on, except those that a test spoils.

It reads each request whole, so a fault hits one request exactly; `TcpProxy` is for faults of the network.
Every request has a connection of its own.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias


class Forward(Protocol):
    """Asks the real server, with the body changed on the way or not; may be left out."""

    def __call__(self, change: Callable[[bytes], bytes] = ...) -> Awaitable[bytes]: ...


# What the client receives before the connection is closed.
Fault: TypeAlias = Callable[[Forward], Awaitable[bytes]]


def answer(status: int, code: str) -> Fault:
    """S3's error document, without asking S3."""

    async def fault(_: Forward) -> bytes:
        body = f"<Error><Code>{code}</Code><Message>on purpose</Message></Error>".encode()
        head = f"HTTP/1.1 {status} Spoilt\r\nContent-Type: application/xml\r\nConnection: close\r\n"
        return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body

    return fault


async def lost(forward: Forward) -> bytes:
    """The request is done, but its answer never arrives."""
    await forward()
    return b""


async def truncated(forward: Forward) -> bytes:
    return (await forward())[:-1]


async def flipped(forward: Forward) -> bytes:
    whole = await forward()
    return whole[:-1] + bytes([whole[-1] ^ 1])


async def stalled(_: Forward) -> bytes:
    await asyncio.Event().wait()
    raise AssertionError


@dataclass
class _Planned:
    pattern: str
    fault: Fault
    times: int


class Front:
    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._planned: list[_Planned] = []
        self._arrived = asyncio.Condition()
        self.requests: list[str] = []  # "PUT /bucket/key?query", in the order of arrival
        self.address = ""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def spoil(self, pattern: str, fault: Fault, times: int = 1) -> None:
        """Do this to the next so many requests whose "METHOD path" begins with a match."""
        self._planned.append(_Planned(pattern, fault, times))

    def heal(self) -> None:
        self._planned.clear()

    async def wait_for(self, pattern: str, times: int = 1) -> None:
        """Return when so many requests that match have arrived."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: self.count(pattern) >= times)

    def count(self, pattern: str) -> int:
        return sum(re.search(pattern, request) is not None for request in self.requests)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)

        def done(ended: asyncio.Task[None]) -> None:
            self._tasks.discard(ended)
            writer.close()

        task.add_done_callback(done)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if re.search(rb"\r\nexpect: 100-continue\r\n", head, re.IGNORECASE):
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            length = re.search(rb"\r\ncontent-length: *(\d+)\r\n", head, re.IGNORECASE)
            body = await reader.readexactly(int(length[1])) if length else b""
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        method, path, _ = head.split(b"\r\n", 1)[0].decode().split(" ")
        async with self._arrived:
            self.requests.append(f"{method} {path}")
            self._arrived.notify_all()

        async def forward(change: Callable[[bytes], bytes] = bytes) -> bytes:
            return await self._ask(head, change(body))

        fault = self._fault_of(f"{method} {path}")
        try:
            writer.write(await fault(forward) if fault else await forward())
            await writer.drain()
        except ConnectionError:
            pass  # the client did not wait, or there is no server

    def _fault_of(self, request: str) -> Fault | None:
        for planned in self._planned:
            if re.match(planned.pattern, request) and planned.times > 0:
                planned.times -= 1
                return planned.fault
        return None

    async def _ask(self, head: bytes, body: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(*self._target)
        lines = [
            line
            for line in head.removesuffix(b"\r\n\r\n").split(b"\r\n")
            if not re.match(rb"(expect|connection):", line, re.IGNORECASE)
        ]
        try:
            writer.write(b"\r\n".join([*lines, b"Connection: close", b"", b""]) + body)
            await writer.drain()
            return await reader.read()
        finally:
            writer.close()
