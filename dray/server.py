"""Sockets around the Kafka protocol: frames in, answers out, and the bounds of both.

A connection is read on while earlier requests are worked on, and answers leave in the order of the requests.
What a request means is for `handle`.

Memory is bounded. A large frame is admitted before it is read: where there is no room, the connection is
not read until there is. What was admitted keeps its room until its answer has left. So the
bytes of all requests together stay below `max_inflight_bytes` (a single larger one is let in alone), and a
client that does not take its answers is dropped after `send_timeout_s`.

What cannot be a Kafka request closes the connection, with one line in the log; others notice nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from struct import Struct
from typing import TypeAlias, cast

from dray.errors import MalformedRequest
from dray.protocol.codec import Buffer

log = logging.getLogger(__name__)

# Frames up to this size are read without being admitted first: they fit into what a connection holds anyway.
SMALL_FRAME_BYTES = 16 * 2**10
# Requests of one connection that are worked on at once. Clients have 5 or so in flight; none needs more.
MAX_PIPELINED = 1_000
WRITE_HIGH_BYTES = 2**20
# How often to look for idle connections, as a part of the time they may be idle.
IDLE_CHECKS = 4

_LENGTH = Struct(">i")


@dataclass(slots=True)
class Answer:
    """What goes back for one request. `on_sent` is called once it has left, or never will."""

    buffers: Sequence[Buffer]
    on_sent: Callable[[], None] | None = None


# None is for requests that are not answered.
Handle: TypeAlias = Callable[[bytes, "Connection"], Awaitable[Answer | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkLimits:
    max_request_bytes: int = 100 * 2**20
    max_connections: int = 10_000
    max_inflight_bytes: int = 128 * 2**20
    max_connection_inflight_bytes: int = 64 * 2**20
    max_idle_s: float = 600.0
    send_timeout_s: float = 30.0


class Server:
    def __init__(self, handle: Handle, limits: NetworkLimits) -> None:
        self.handle = handle
        self.limits = limits
        self.room = _Room(limits.max_inflight_bytes)
        self._connections: set[Connection] = set()
        self._listener: asyncio.Server | None = None
        self._idle_check: asyncio.TimerHandle | None = None
        self.refused = 0

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen; returns where. Port 0 takes a free one. Raises `OSError`."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(
            lambda: Connection(self), host, port, backlog=1024, reuse_address=True
        )
        self._check_idle()
        address: tuple[str, int] = self._listener.sockets[0].getsockname()[:2]
        return address

    def __len__(self) -> int:
        return len(self._connections)

    async def stop(self, grace_s: float) -> None:
        """Take no more, answer what was read, close. What is not answered in time is cut off."""
        if self._listener is None:
            return
        self._listener.close()
        if self._idle_check is not None:
            self._idle_check.cancel()
        for connection in list(self._connections):
            connection.finish()
        deadline = asyncio.get_running_loop().time() + grace_s
        while self._connections and (left := deadline - asyncio.get_running_loop().time()) > 0:
            waiting = [connection.closed for connection in self._connections]
            await asyncio.wait(waiting, timeout=left)
        for connection in list(self._connections):
            connection.abort("the broker stops and its requests are not done")

    def admit(self, connection: Connection) -> bool:
        if len(self._connections) >= self.limits.max_connections:
            self.refused += 1
            log.warning(
                "connection refused: max.connections is reached",
                extra={"peer": connection.peer, "max_connections": self.limits.max_connections},
            )
            return False
        self._connections.add(connection)
        return True

    def forget(self, connection: Connection) -> None:
        self._connections.discard(connection)

    def _check_idle(self) -> None:
        loop = asyncio.get_running_loop()
        oldest = loop.time() - self.limits.max_idle_s
        for connection in list(self._connections):
            connection.close_if_idle_since(oldest)
        self._idle_check = loop.call_later(self.limits.max_idle_s / IDLE_CHECKS, self._check_idle)


class _Room:
    """Bytes that all requests may take together. First come, first served."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._taken = 0
        self._waiting: deque[tuple[Connection, int]] = deque()

    def take(self, connection: Connection, size: int) -> bool:
        """False: `connection.admitted` will be called when it has its turn."""
        if size > SMALL_FRAME_BYTES and (self._waiting or not self._fits(size)):
            self._waiting.append((connection, size))
            return False
        self._taken += size
        return True

    def give_back(self, size: int) -> None:
        self._taken -= size
        while self._waiting and self._fits(self._waiting[0][1]):
            connection, wanted = self._waiting.popleft()
            if connection.is_open:
                self._taken += wanted
                connection.admitted(wanted)

    def _fits(self, size: int) -> bool:
        return self._taken + size <= self._total or self._taken == 0


@dataclass(slots=True, eq=False)
class _Pending:
    task: asyncio.Future[Answer | None]
    size: int


@dataclass(slots=True, eq=False)
class _Incoming:
    """A frame of which the length is known."""

    size: int
    admitted: bool
    received: int = 0
    chunks: list[bytes] = field(default_factory=list)


class Connection(asyncio.Protocol):
    def __init__(self, server: Server) -> None:
        self._server = server
        self._limits = server.limits
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._rest = b""  # received, not yet looked at
        self._incoming: _Incoming | None = None
        self._pending: deque[_Pending] = deque()  # requests in the order they came
        self._inflight_bytes = 0
        self._unsent: list[Callable[[], None]] = []
        self._write_paused = False
        self._read_paused = False
        self._finishing = False  # nothing more is taken, not even what has come already
        self._eof = False  # nothing more will come
        self._send_timer: asyncio.TimerHandle | None = None
        self._active_at = 0.0
        self.peer = "?"
        self.closed: asyncio.Future[None] = self._loop.create_future()
        # Who holds it may begin to write to partitions: batches keep the order of their requests.
        self.produce_turn = asyncio.Lock()

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    # --- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        host, port, *_ = transport.get_extra_info("peername") or ("?", 0)
        self.peer = f"{host}:{port}"
        self._active_at = self._loop.time()
        if not self._server.admit(self):
            transport.abort()
            return
        transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)

    def data_received(self, data: bytes) -> None:
        self._active_at = self._loop.time()
        self._rest = self._rest + data if self._rest else data
        self._take_frames()

    def eof_received(self) -> bool:
        # Half-closed: what a client sent before is worked on and answered.
        self._eof = True
        self._close_if_done()
        return True

    def connection_lost(self, error: Exception | None) -> None:
        self._server.forget(self)
        if self._send_timer is not None:
            self._send_timer.cancel()
        if self._incoming is not None and self._incoming.admitted:
            self._server.room.give_back(self._incoming.size)
        self._incoming = None
        self._rest = b""
        self._sent()
        # Nobody waits for the answers. What has been accepted goes on all the same: acks=0 counts on it.
        for pending in self._pending:
            pending.task.add_done_callback(self._give_back_unsent(pending.size))
        self._pending.clear()
        if not self.closed.done():
            self.closed.set_result(None)

    def pause_writing(self) -> None:
        self._write_paused = True
        self._send_timer = self._loop.call_later(
            self._limits.send_timeout_s, self.abort, "it does not take its answers"
        )

    def resume_writing(self) -> None:
        self._write_paused = False
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None
        self._sent()
        self._flush()

    # --- reading

    def _take_frames(self) -> None:
        """Cut what has come into frames, as far as there is room for them."""
        data, at = self._rest, 0
        while self.is_open and not self._finishing:
            if self._incoming is None:
                if self._full() or len(data) - at < _LENGTH.size:
                    break
                (size,) = _LENGTH.unpack_from(data, at)
                if not self._is_plausible(size, data[at : at + _LENGTH.size]):
                    return
                at += _LENGTH.size
                self._incoming = _Incoming(size, self._server.room.take(self, size))
            incoming = self._incoming
            if not incoming.admitted:
                break
            part = data[at : at + incoming.size - incoming.received]
            if part:
                incoming.chunks.append(part)
                incoming.received += len(part)
                at += len(part)
            if incoming.received < incoming.size:
                break
            self._incoming = None
            self._begin(b"".join(incoming.chunks), incoming.size)
        self._rest = data[at:]
        self._pause_or_resume()

    def _is_plausible(self, size: int, raw: bytes) -> bool:
        if 0 < size <= self._limits.max_request_bytes:
            return True
        looks_like = _foreign_protocol(raw)
        limit = self._limits.max_request_bytes
        self.abort(f"a request of {size} bytes, where 1 to {limit} are taken{looks_like}")
        return False

    def admitted(self, size: int) -> None:
        """There is room now for the frame that waits."""
        if self._incoming is None:
            self._server.room.give_back(size)
            return
        self._incoming.admitted = True
        self._take_frames()

    def _full(self) -> bool:
        return (
            self._inflight_bytes >= self._limits.max_connection_inflight_bytes
            or len(self._pending) >= MAX_PIPELINED
        )

    def _pause_or_resume(self) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        waits = self._incoming is not None and not self._incoming.admitted
        should_pause = waits or self._full()
        if should_pause and not self._read_paused:
            self._transport.pause_reading()
        elif self._read_paused and not should_pause:
            self._transport.resume_reading()
        self._read_paused = should_pause

    def _begin(self, frame: bytes, size: int) -> None:
        self._inflight_bytes += size
        task = asyncio.ensure_future(self._server.handle(frame, self))
        self._pending.append(_Pending(task, size))
        task.add_done_callback(self._flush)

    # --- answering

    def _flush(self, _done: object = None) -> None:
        """Send the answers that are there, up to the first request that is not done."""
        if self._transport is None or self._write_paused or self._transport.is_closing():
            return
        took = False
        while self._pending and self._pending[0].task.done() and not self._write_paused:
            pending = self._pending.popleft()
            took = True
            self._inflight_bytes -= pending.size
            try:
                answer = pending.task.result()
            except MalformedRequest as error:
                self._server.room.give_back(pending.size)
                self.abort(str(error))
                return
            except Exception:
                self._server.room.give_back(pending.size)
                log.exception("a request could not be answered", extra={"peer": self.peer})
                self.abort("a request could not be answered")
                return
            self._send(pending.size, answer)
        if took:
            self._active_at = self._loop.time()
            if self._read_paused or self._rest:
                self._take_frames()
            self._close_if_done()

    def _send(self, size: int, answer: Answer | None) -> None:
        assert self._transport is not None
        self._unsent.append(lambda: self._server.room.give_back(size))
        if answer is not None:
            if answer.on_sent is not None:
                self._unsent.append(answer.on_sent)
            self._transport.writelines(answer.buffers)
        if not self._write_paused:
            self._sent()

    def _sent(self) -> None:
        """What was written has left, but for a little in the transport's buffer."""
        unsent, self._unsent = self._unsent, []
        for callback in unsent:
            callback()

    def _give_back_unsent(self, size: int) -> Callable[[asyncio.Future[Answer | None]], None]:
        def give_back(task: asyncio.Future[Answer | None]) -> None:
            self._server.room.give_back(size)
            if not task.cancelled() and task.exception() is None:
                answer = task.result()
                if answer is not None and answer.on_sent is not None:
                    answer.on_sent()

        return give_back

    # --- closing

    def finish(self) -> None:
        """Read nothing more, and close when all that was read is answered."""
        self._finishing = True
        self._close_if_done()

    def close_if_idle_since(self, oldest: float) -> None:
        if not self._pending and self._active_at < oldest:
            self.abort("it was idle for connections.max.idle.ms", level=logging.INFO)

    def abort(self, reason: str, level: int = logging.WARNING) -> None:
        if self._transport is not None and not self._transport.is_closing():
            log.log(level, "connection closed: %s", reason, extra={"peer": self.peer})
            self._transport.abort()

    def _close_if_done(self) -> None:
        waits = self._incoming is not None and not self._incoming.admitted
        is_over = self._finishing or (self._eof and not waits)
        if is_over and not self._pending and self._transport is not None:
            self._transport.close()


def _foreign_protocol(start: bytes) -> str:
    if start[:4] in (b"GET ", b"POST", b"PUT ", b"HEAD", b"OPTI", b"DELE"):
        return ": this looks like HTTP, and the port speaks Kafka's protocol"
    if start[:2] == b"\x16\x03":
        return ": this looks like TLS, which this listener does not speak"
    return ""
