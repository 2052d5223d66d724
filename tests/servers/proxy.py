"""A TCP proxy on loopback that can cut, delay and black-hole what passes through it."""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import Coroutine
from typing import Any


class Mode(enum.Enum):
    PASS = "pass"
    BLACK_HOLE = "black hole"  # connections stay open and new ones are taken, but no byte arrives
    DROP_ANSWERS = "drop answers"  # requests arrive, nothing comes back
    REFUSE = "refuse"  # new connections are closed at once


class TcpProxy:
    """`await start()`, connect clients to `address`, then change `mode`, `delay_s` or call `cut`.

    `target` may be set later too, for a server that is told the proxy's address.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._mode = Mode.PASS
        self._mode_changed = asyncio.Condition()
        self.delay_s = 0.0
        self._cut_after: int | None = None
        self.address = ""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.address = f"127.0.0.1:{port}"

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    @property
    def mode(self) -> Mode:
        return self._mode

    async def set_mode(self, mode: Mode) -> None:
        async with self._mode_changed:
            self._mode = mode
            self._mode_changed.notify_all()

    def cut(self) -> None:
        """Reset every connection that is open now."""
        self._cut_after = None
        for writer in list(self._writers):
            writer.transport.abort()

    def cut_after(self, request_bytes: int) -> None:
        """Reset everything once this many more bytes went towards the server: inside a request."""
        self._cut_after = request_bytes

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def done(task: asyncio.Task[None]) -> None:
            # Not left to the task: one that is cancelled before its first step runs no `finally`.
            self._tasks.discard(task)
            self._writers.discard(writer)
            writer.transport.abort()

        self._writers.add(writer)
        task = asyncio.create_task(self._connect(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(done)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward: asyncio.StreamWriter | None = None
        try:
            if self._mode is Mode.REFUSE:
                return
            host, _, port = self.target.rpartition(":")
            back, onward = await asyncio.open_connection(host, int(port))
            self._writers.add(onward)
            there, and_back = self._pumps(reader, onward, back, writer)
            async with asyncio.TaskGroup() as group:
                group.create_task(there)
                group.create_task(and_back)
        except* (OSError, Cut):
            pass
        finally:
            if onward is not None:
                self._writers.discard(onward)
                onward.transport.abort()

    def _pumps(
        self,
        reader: asyncio.StreamReader,
        onward: asyncio.StreamWriter,
        back: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> tuple[Coroutine[Any, Any, None], Coroutine[Any, Any, None]]:
        """Of one connection: from the client to the server, and back. Either ends it by raising `Cut`."""
        return self._pump(reader, onward, towards_server=True), self._pump(back, writer, towards_server=False)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, towards_server: bool
    ) -> None:
        stopped = {Mode.BLACK_HOLE} if towards_server else {Mode.BLACK_HOLE, Mode.DROP_ANSWERS}
        while data := await reader.read(65_536):
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            if self._mode in stopped:
                async with self._mode_changed:
                    await self._mode_changed.wait_for(lambda: self._mode not in stopped)
            if towards_server and self._cut_after is not None:
                passed = data[: self._cut_after]
                self._cut_after -= len(passed)
                if self._cut_after == 0:
                    writer.write(passed)
                    with contextlib.suppress(OSError):
                        await writer.drain()
                    self.cut()
                    raise Cut
            writer.write(data)
            await writer.drain()
        raise Cut  # one side closed: close the other


class Cut(Exception):
    pass
