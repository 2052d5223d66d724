"""Sockets around the Kafka protocol: frames in, answers out, and the bounds of both.

A connection is read on while earlier requests are worked on, and answers leave in the order of the requests.
What a request means is for `handle`.

Memory is bounded. A large frame is admitted before it is read, a small one when it is complete: where there
is no room, the connection is not read until there is. What was admitted keeps its room until its answer has
left. So the bytes of all requests together stay below `max_inflight_bytes` (a single larger one is let in
alone). A client that does not take its answers, or stops within a large request, is dropped after
`send_timeout_s`: it holds room that others wait for. One that takes a large answer slowly is not, as long as
it takes `LEAST_SENT_BYTES` in that time: it would ask for the same again, and never get further.

What cannot be a Kafka request closes the connection, with one line in the log; others notice nothing.
"""

from __future__ import annotations

import asyncio
import logging
from asyncio import CancelledError
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from struct import Struct
from typing import TypeAlias, cast

from dray.errors import MalformedRequest
from dray.protocol.codec import Buffer, may_be_request

log = logging.getLogger(__name__)

# Frames up to this size are read without being admitted first: they fit into what a connection holds anyway.
SMALL_FRAME_BYTES = 16 * 2**10
# Pieces of a frame below this are joined as they come: kept one by one, they would be mostly overhead.
SMALL_PIECE_BYTES = 2**10
# Requests of one connection that are worked on at once. Clients have 5 or so in flight; none needs more.
MAX_PIPELINED = 1_000
WRITE_HIGH_BYTES = 2**20
# With the default timeout 140 KB/s, so that an answer of 50 MiB has left after six minutes.
LEAST_SENT_BYTES = 4 * 2**20
# How often to look for idle connections, as a part of the time they may be idle.
IDLE_CHECKS = 4

_LENGTH = Struct(">i")
# Of a large frame, what is looked at before there is room for it.
_START_BYTES = 4


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
        self._stopping = False
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
        self._stopping = True
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
        while self._connections:
            await asyncio.wait([connection.closed for connection in self._connections])

    def admit(self, connection: Connection) -> bool:
        if self._stopping:
            return False
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
    """Bytes that all requests may take together. First come, first served, and small ones before large ones.

    A small request does not wait behind a large one that finds no room: heartbeats and the like go on.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._taken = 0
        # In the order they came; a connection waits for one frame at a time.
        self._small: dict[Connection, int] = {}
        self._large: dict[Connection, int] = {}

    @property
    def taken(self) -> int:
        return self._taken

    def take(self, connection: Connection, size: int) -> bool:
        """False: `connection.admitted` will be called when it has its turn."""
        queue = self._small if size <= SMALL_FRAME_BYTES else self._large
        if queue or not self._fits(size):
            queue[connection] = size
            return False
        self._taken += size
        return True

    def give_back(self, size: int) -> None:
        self._taken -= size
        self._admit()

    def withdraw(self, connection: Connection) -> None:
        """It waits no more. Those behind it may fit where it did not."""
        self._small.pop(connection, None)
        self._large.pop(connection, None)
        self._admit()

    def _admit(self) -> None:
        for queue in (self._small, self._large):
            while queue:
                connection, wanted = next(iter(queue.items()))
                if connection.is_open and not self._fits(wanted):
                    break
                del queue[connection]
                if connection.is_open:
                    self._taken += wanted
                    connection.admitted()

    def _fits(self, size: int) -> bool:
        return self._taken + size <= self._total or self._taken == 0


class _Admission(Enum):
    NEW = auto()
    WAITING = auto()
    ADMITTED = auto()


@dataclass(slots=True, eq=False)
class _Pending:
    task: asyncio.Future[Answer | None]
    size: int


@dataclass(slots=True, eq=False)
class _Incoming:
    """A frame of which the length is known."""

    size: int
    admission: _Admission = _Admission.NEW
    received: int = 0
    pieces: list[bytes | bytearray] = field(default_factory=list)

    @property
    def is_large(self) -> bool:
        return self.size > SMALL_FRAME_BYTES

    def add(self, piece: bytes) -> None:
        self.received += len(piece)
        if len(piece) >= SMALL_PIECE_BYTES or not self.pieces:
            self.pieces.append(piece)
        elif isinstance(last := self.pieces[-1], bytearray):
            last += piece
        else:
            self.pieces.append(bytearray(piece))


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
        self._aborted = False
        self._send_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._received_bytes = 0
        self._active_at = 0.0
        self.peer = "?"
        self.closed: asyncio.Future[None] = self._loop.create_future()
        # Done when the client will send nothing more. It may have closed its end: that looks the same from
        # here, until something is sent to it. So nothing is held back for it any longer.
        self.ended: asyncio.Future[None] = self._loop.create_future()
        # Who holds it may begin to write to partitions: batches keep the order of their requests.
        self.produce_turn = asyncio.Lock()
        # Who holds it may wait for memory for its answer: see `handlers.table.Api.in_turn`.
        self.answer_turn = asyncio.Lock()

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
        if self._finishing:
            return
        self._active_at = self._loop.time()
        self._received_bytes += len(data)
        self._rest = self._rest + data if self._rest else data
        self._take_frames()

    def eof_received(self) -> bool:
        # Half-closed: what a client sent before is worked on and answered.
        self._eof = True
        self._end()
        self._close_if_done()
        return True

    def connection_lost(self, error: Exception | None) -> None:
        self._server.forget(self)
        for timer in (self._send_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        self._drop_incoming()
        self._sent()
        # Nobody waits for the answers. What has been accepted goes on all the same: acks=0 counts on it.
        for pending in self._pending:
            pending.task.add_done_callback(self._give_back_unsent(pending.size))
        self._pending.clear()
        self._end()
        if not self.closed.done():
            self.closed.set_result(None)

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def pause_writing(self) -> None:
        self._write_paused = True
        self._pause_or_resume()
        self._watch_sending()

    def resume_writing(self) -> None:
        self._write_paused = False
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None
        self._sent()
        self._flush()
        self._take_frames()

    def _watch_sending(self) -> None:
        assert self._transport is not None
        unsent_bytes = self._transport.get_write_buffer_size()
        self._send_timer = self._loop.call_later(
            self._limits.send_timeout_s, self._check_sending, unsent_bytes
        )

    def _check_sending(self, unsent_bytes: int) -> None:
        assert self._transport is not None
        if unsent_bytes - self._transport.get_write_buffer_size() < LEAST_SENT_BYTES:
            self.abort("it does not take its answers")
        else:
            self._watch_sending()

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
                self._incoming = _Incoming(size)
            incoming = self._incoming
            if incoming.is_large and incoming.admission is _Admission.NEW:
                if len(data) - at < _START_BYTES:
                    break
                if not may_be_request(data[at : at + _START_BYTES]):
                    self.abort(f"{incoming.size} bytes are announced that do not begin as a request")
                    return
                self._ask_for_room(incoming)
            if incoming.admission is _Admission.WAITING:
                break
            piece = data[at : at + incoming.size - incoming.received]
            if piece:
                incoming.add(piece)
                at += len(piece)
            if incoming.received < incoming.size:
                break
            if incoming.admission is _Admission.NEW and not self._ask_for_room(incoming):
                break
            self._incoming = None
            self._begin(b"".join(incoming.pieces), incoming.size)
        self._rest = data[at:]
        self._pause_or_resume()
        self._watch_for_stall()

    def _is_plausible(self, size: int, raw: bytes) -> bool:
        if 0 < size <= self._limits.max_request_bytes:
            return True
        looks_like = _foreign_protocol(raw)
        limit = self._limits.max_request_bytes
        self.abort(f"a request of {size} bytes, where 1 to {limit} are taken{looks_like}")
        return False

    def _ask_for_room(self, incoming: _Incoming) -> bool:
        has_room = self._server.room.take(self, incoming.size)
        incoming.admission = _Admission.ADMITTED if has_room else _Admission.WAITING
        return has_room

    def admitted(self) -> None:
        """There is room now for the frame that waits."""
        assert self._incoming is not None, "what does not wait is withdrawn"
        self._incoming.admission = _Admission.ADMITTED
        self._take_frames()
        self._close_if_done()

    def _drop_incoming(self) -> None:
        incoming, self._incoming, self._rest = self._incoming, None, b""
        if incoming is None:
            return
        if incoming.admission is _Admission.ADMITTED:
            self._server.room.give_back(incoming.size)
        elif incoming.admission is _Admission.WAITING:
            self._server.room.withdraw(self)

    def _watch_for_stall(self) -> None:
        """A large frame has its room before it has come. So it has to come."""
        if self._stall_timer is None and self._holds_room():
            self._stall_timer = self._loop.call_later(
                self._limits.send_timeout_s, self._check_stall, self._received_bytes
            )

    def _check_stall(self, received_bytes: int) -> None:
        self._stall_timer = None
        if self._holds_room() and self._received_bytes == received_bytes:
            self.abort("it stopped in the middle of a request")
        else:
            self._watch_for_stall()

    def _holds_room(self) -> bool:
        return self._incoming is not None and self._incoming.admission is _Admission.ADMITTED

    def _full(self) -> bool:
        return (
            self._inflight_bytes >= self._limits.max_connection_inflight_bytes
            or len(self._pending) >= MAX_PIPELINED
            # Who does not take its answers is not asked for more: each would wait in memory.
            or self._write_paused
        )

    def _pause_or_resume(self) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        should_pause = not self._finishing and (self._waits() or self._full())
        if should_pause and not self._read_paused:
            self._transport.pause_reading()
        elif self._read_paused and not should_pause:
            self._transport.resume_reading()
        self._read_paused = should_pause

    def _waits(self) -> bool:
        return self._incoming is not None and self._incoming.admission is _Admission.WAITING

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
            error = CancelledError() if pending.task.cancelled() else pending.task.exception()
            if error is not None:
                if isinstance(error, MalformedRequest):
                    self.abort(str(error))
                else:
                    self.abort("a request could not be answered", logging.ERROR, error)
                self._server.room.give_back(pending.size)
                return
            self._send(pending.size, pending.task.result())
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
        # What comes from now on is read and thrown away: closing a socket with something unread in it would
        # cut off the answers that are on their way.
        self._drop_incoming()
        self._pause_or_resume()
        self._close_if_done()

    def close_if_idle_since(self, oldest: float) -> None:
        if not self._pending and self._active_at < oldest:
            self.abort("it was idle for connections.max.idle.ms", level=logging.INFO)

    def abort(self, reason: str, level: int = logging.WARNING, error: BaseException | None = None) -> None:
        """Close at once, also where a slow reader keeps an orderly end from coming about."""
        if self._transport is None or self._aborted or self.closed.done():
            return
        self._aborted = True
        log.log(level, "connection closed: %s", reason, extra={"peer": self.peer}, exc_info=error)
        self._transport.abort()

    def _close_if_done(self) -> None:
        is_over = self._finishing or (self._eof and not self._waits())
        if is_over and not self._pending and self._transport is not None:
            self._transport.close()


def _foreign_protocol(start: bytes) -> str:
    if start[:4] in (b"GET ", b"POST", b"PUT ", b"HEAD", b"OPTI", b"DELE"):
        return ": this looks like HTTP, and the port speaks Kafka's protocol"
    if start[:2] == b"\x16\x03":
        return ": this looks like TLS, which this listener does not speak"
    return ""
