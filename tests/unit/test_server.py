"""The server on real sockets, under asyncio's loop and under uvloop: order, bounds, and ends of all kinds.

Requests here are a number and some filling; the handler answers with the number, when the test says so.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeAlias

import pytest
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dray.errors import MalformedRequest
from dray.server import LEAST_SENT_BYTES, SMALL_FRAME_BYTES, Answer, Connection, NetworkLimits, Server
from tests.wire import framed, read_frame

KIB = 2**10
LARGE = SMALL_FRAME_BYTES + 1
# A lost wakeup fails the test instead of hanging it.
PATIENCE_S = 20

Streams: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Run: TypeAlias = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    factory = asyncio.new_event_loop if request.param == "asyncio" else uvloop.new_event_loop

    def run_in_new_loop(scenario: Coroutine[Any, Any, None]) -> None:
        async def in_time() -> None:
            async with asyncio.timeout(PATIENCE_S):
                await scenario

        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(in_time())

    return run_in_new_loop


def payload(number: int, size: int = 8) -> bytes:
    """Begins as a request: key 0, version 0, and the number as correlation id."""
    return struct.pack(">hhi", 0, 0, number).ljust(size, b"x")


def number_of(frame: bytes | None) -> int | None:
    return None if frame is None else int(struct.unpack(">i", frame[:4])[0])


class Bench:
    """A server whose requests are done when the test lets them."""

    def __init__(self, limits: NetworkLimits, holds: bool = True) -> None:
        self.server = Server(self._handle, limits)
        self.port = 0
        self.frames: list[bytes] = []
        self.connections: list[Connection] = []
        self.busy_bytes = self.most_busy_bytes = 0
        self.answered = self.sent = 0
        self._holds = holds
        self._gates: dict[int, asyncio.Future[Answer | None]] = {}
        self._arrived = asyncio.Condition()
        self._writers: list[asyncio.StreamWriter] = []

    async def _handle(self, frame: bytes, connection: Connection) -> Answer | None:
        number = struct.unpack_from(">hhi", frame)[2]
        self.frames.append(frame)
        self.connections.append(connection)
        self.busy_bytes += len(frame)
        self.most_busy_bytes = max(self.most_busy_bytes, self.busy_bytes)
        try:
            if not self._holds:
                return self.answer(number)
            gate = self._gates.setdefault(number, asyncio.get_running_loop().create_future())
            async with self._arrived:
                self._arrived.notify_all()
            return await gate
        finally:
            self.busy_bytes -= len(frame)

    def answer(self, number: int, size: int = 4) -> Answer:
        self.answered += 1
        return Answer([struct.pack(">ii", size, number), bytes(size - 4)], self._on_sent)

    def _on_sent(self) -> None:
        self.sent += 1

    async def arrival(self, count: int) -> None:
        """Wait until so many requests have begun."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: len(self.frames) >= count)

    def release(self, number: int, outcome: Answer | BaseException | None = None, size: int = 4) -> None:
        gate = self._gates.setdefault(number, asyncio.get_running_loop().create_future())
        if isinstance(outcome, BaseException):
            gate.set_exception(outcome)
        else:
            gate.set_result(outcome or self.answer(number, size))

    def release_silently(self, number: int) -> None:
        self._gates[number].set_result(None)

    def release_all(self) -> None:
        self._holds = False
        for number, gate in self._gates.items():
            if not gate.done():
                self.release(number)

    async def connect(self, receive_bytes: int | None = None) -> Streams:
        sock = socket.socket()
        if receive_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.port))
        except OSError:
            sock.close()
            raise
        reader, writer = await asyncio.open_connection(sock=sock, limit=4 * KIB)
        self._writers.append(writer)
        return reader, writer

    async def settle(self) -> None:
        """Several turns of the loop: what was sent has been looked at, and what was to be called is."""
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            for _ in range(5):
                readable = asyncio.Event()
                loop.add_reader(ours, readable.set)
                theirs.send(b"x")
                await readable.wait()
                loop.remove_reader(ours)
                ours.recv(1)

    async def close(self) -> None:
        self.release_all()
        for writer in self._writers:
            writer.transport.abort()
        await self.server.stop(PATIENCE_S)
        for connection in self.connections:
            await connection.closed
        await self.settle()
        assert len(self.server) == 0
        assert self.server.room.taken == 0
        assert self.sent == self.answered


@asynccontextmanager
async def bench(holds: bool = True, **limits: Any) -> AsyncIterator[Bench]:
    """Whatever happened: at the end nobody is connected, and all room is given back."""
    one = Bench(NetworkLimits(**limits), holds)
    _, one.port = await one.server.start("127.0.0.1", 0)
    yield one
    await one.close()


# --- frames and their order


def test_answers_leave_in_the_order_of_requests_whichever_is_done_first(run: Run) -> None:
    async def scenario() -> None:
        async with bench() as one:
            reader, writer = await one.connect()
            writer.write(b"".join(framed(payload(number)) for number in range(5)))
            await one.arrival(5)  # read on while the earlier ones wait
            for number in (4, 2, 3, 1, 0):
                one.release(number)
            assert [number_of(await read_frame(reader)) for _ in range(5)] == [0, 1, 2, 3, 4]

    run(scenario())


def test_requests_without_answer_leave_no_gap(run: Run) -> None:
    async def scenario() -> None:
        async with bench() as one:
            reader, writer = await one.connect()
            writer.write(b"".join(framed(payload(number)) for number in range(3)))
            await one.arrival(3)
            one.release(2)
            one.release_silently(1)
            one.release(0)
            assert [number_of(await read_frame(reader)) for _ in range(2)] == [0, 2]

    run(scenario())


@pytest.mark.parametrize("size", [8, 9, LARGE + 5])
def test_frames_split_anywhere(run: Run, size: int) -> None:
    async def scenario() -> None:
        async with bench(holds=False) as one:
            reader, writer = await one.connect()
            whole = b"".join(framed(payload(number, size)) for number in range(2))
            cuts = range(1, len(whole), 1 if size < 100 else 997)
            for cut in [*cuts, 1, 4, 5, 7, 8, 9, size + 4, size + 5, size + 7, size + 12]:
                one.frames.clear()
                writer.write(whole[:cut])
                await writer.drain()
                await one.settle()
                writer.write(whole[cut:])
                assert [number_of(await read_frame(reader)) for _ in range(2)] == [0, 1]
                assert one.frames == [payload(0, size), payload(1, size)]

    run(scenario())


def test_a_request_that_comes_byte_by_byte(run: Run) -> None:
    async def scenario() -> None:
        async with bench(holds=False) as one:
            reader, writer = await one.connect()
            whole = framed(payload(1, 30)) + framed(payload(2, LARGE))
            writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for at in range(80):
                writer.write(whole[at : at + 1])
                await one.settle()
            writer.write(whole[80:])
            assert [number_of(await read_frame(reader)) for _ in range(2)] == [1, 2]
            assert one.frames == [payload(1, 30), payload(2, LARGE)]

    run(scenario())


def test_very_many_frames_in_one_packet_are_all_answered(run: Run) -> None:
    """More than are worked on at once: the rest waits, unread, until there are answers."""

    async def scenario() -> None:
        async with bench() as one:
            reader, writer = await one.connect()
            writer.write(b"".join(framed(payload(number)) for number in range(3_000)))
            await one.arrival(1_000)
            await one.settle()
            assert len(one.frames) == 1_000
            one.release_all()
            assert [number_of(await read_frame(reader)) for _ in range(3_000)] == list(range(3_000))

    run(scenario())


# --- what is no request


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (struct.pack(">i", 0), "a request of 0 bytes"),
        (struct.pack(">i", -1), "a request of -1 bytes"),
        (struct.pack(">i", -(2**31)), "a request of -2147483648 bytes"),
        (struct.pack(">i", 2**31 - 1), "a request of 2147483647 bytes"),
        (struct.pack(">i", 1_000_001), "where 1 to 1000000 are taken"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "this looks like HTTP"),
        (b"POST /topics HTTP/1.1\r\n\r\n", "this looks like HTTP"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500), "this looks like TLS"),
        (b"\x00\x05\x01\x00\xe0\x00\x00\x00", "do not begin as a request"),
    ],
)
def test_what_is_no_request_closes_the_connection_with_one_line(
    run: Run, caplog: pytest.LogCaptureFixture, sent: bytes, said: str
) -> None:
    async def scenario() -> None:
        async with bench(holds=False, max_request_bytes=1_000_000) as one:
            other_reader, other_writer = await one.connect()
            reader, writer = await one.connect()
            writer.write(framed(payload(1)))
            assert number_of(await read_frame(reader)) == 1
            writer.write(sent)
            assert await read_frame(reader) is None
            other_writer.write(framed(payload(2)))
            assert number_of(await read_frame(other_reader)) == 2
            writer.close()

    with caplog.at_level(logging.INFO, logger="dray"):
        run(scenario())
    closed = [record.getMessage() for record in caplog.records]
    assert len(closed) == 1
    assert said in closed[0]


def test_a_request_of_the_largest_size_is_taken(run: Run) -> None:
    async def scenario() -> None:
        async with bench(holds=False, max_request_bytes=100_000) as one:
            reader, writer = await one.connect()
            writer.write(framed(payload(1, 100_000)))
            assert number_of(await read_frame(reader)) == 1

    run(scenario())


class Panic(BaseException):
    """kio's reader is native: what it cannot go on with is no `Exception`."""


@pytest.mark.parametrize(
    ("error", "level"),
    [
        (MalformedRequest("no", 3), logging.WARNING),
        (RuntimeError("a bug"), logging.ERROR),
        (Panic("a bug elsewhere"), logging.ERROR),
        (asyncio.CancelledError(), logging.ERROR),
    ],
)
def test_a_request_that_fails_closes_its_connection_with_one_line(
    run: Run, caplog: pytest.LogCaptureFixture, error: BaseException, level: int
) -> None:
    """Answers before it are sent, those behind it are not, and all their room is given back."""

    async def scenario() -> None:
        async with bench() as one:
            reader, writer = await one.connect()
            writer.write(b"".join(framed(payload(number)) for number in range(3)))
            await one.arrival(3)
            one.release(2)
            one.release(1, error)
            one.release(0)
            assert number_of(await read_frame(reader)) == 0
            assert await read_frame(reader) is None

    with caplog.at_level(logging.INFO, logger="dray"):
        run(scenario())
    assert [record.levelno for record in caplog.records] == [level]


# --- how many, how much


def test_connections_beyond_the_limit_are_refused(run: Run) -> None:
    async def scenario() -> None:
        async with bench(holds=False, max_connections=2) as one:
            kept = [await one.connect() for _ in range(2)]
            for number, (reader, writer) in enumerate(kept):
                writer.write(framed(payload(number)))
                assert number_of(await read_frame(reader)) == number
            reader, _ = await one.connect()
            assert await read_frame(reader) is None
            assert one.server.refused == 1
            kept[0][1].close()
            await one.connections[0].closed
            reader, writer = await one.connect()
            writer.write(framed(payload(9)))
            assert number_of(await read_frame(reader)) == 9
            kept[1][1].write(framed(payload(8)))
            assert number_of(await read_frame(kept[1][0])) == 8

    run(scenario())


@pytest.mark.parametrize("size", [60 * KIB, 10 * KIB])
def test_requests_of_all_connections_together_are_bounded(run: Run, size: int) -> None:
    """Large ones wait before they are read, small ones before they are worked on; both go on in the end."""
    count = 40

    async def scenario() -> None:
        async with bench(max_inflight_bytes=130 * KIB) as one:
            pairs = [await one.connect() for _ in range(count)]
            for number, (_, writer) in enumerate(pairs):
                writer.write(framed(payload(number, size)))
            fit = 130 * KIB // size
            await one.arrival(fit)
            await one.settle()
            assert len(one.frames) == fit
            one.release_all()
            assert [number_of(await read_frame(reader)) for reader, _ in pairs] == list(range(count))
            assert one.most_busy_bytes <= 130 * KIB

    run(scenario())


def test_requests_of_one_connection_are_bounded(run: Run) -> None:
    async def scenario() -> None:
        async with bench(max_connection_inflight_bytes=100 * KIB) as one:
            reader, writer = await one.connect()
            writer.write(b"".join(framed(payload(number, 40 * KIB)) for number in range(8)))
            await one.arrival(3)  # two are below the limit, so a third is begun
            await one.settle()
            assert len(one.frames) == 3
            other_reader, other_writer = await one.connect()
            other_writer.write(framed(payload(100)))
            one.release(100)
            assert number_of(await read_frame(other_reader)) == 100
            one.release_all()
            assert [number_of(await read_frame(reader)) for _ in range(8)] == list(range(8))

    run(scenario())


def test_a_frame_larger_than_the_whole_bound_is_let_in_alone(run: Run) -> None:
    async def scenario() -> None:
        async with bench(max_inflight_bytes=64 * KIB) as one:
            reader, writer = await one.connect()
            writer.write(framed(payload(0, 30 * KIB)))
            await one.arrival(1)
            giant_reader, giant_writer = await one.connect()
            giant_writer.write(framed(payload(1, 500 * KIB)))
            await one.settle()
            assert len(one.frames) == 1
            one.release(0)
            assert number_of(await read_frame(reader)) == 0
            await one.arrival(2)
            writer.write(framed(payload(2, 30 * KIB)))
            await one.settle()
            assert len(one.frames) == 2
            one.release(1)
            one.release(2)
            assert number_of(await read_frame(giant_reader)) == 1
            assert number_of(await read_frame(reader)) == 2

    run(scenario())


def test_small_requests_do_not_wait_behind_a_large_one(run: Run) -> None:
    async def scenario() -> None:
        async with bench(max_inflight_bytes=100 * KIB) as one:
            _, first = await one.connect()
            first.write(framed(payload(0, 60 * KIB)))
            await one.arrival(1)
            _, second = await one.connect()
            second.write(framed(payload(1, 60 * KIB)))
            await one.settle()
            reader, writer = await one.connect()
            writer.write(framed(payload(2)))
            one.release(2)
            assert number_of(await read_frame(reader)) == 2
            assert len(one.frames) == 2

    run(scenario())


def test_announcing_large_requests_takes_no_room_from_others(run: Run) -> None:
    """Four bytes that are a plausible length: a port scanner, or somebody who stops right there."""

    async def scenario() -> None:
        async with bench(holds=False, max_inflight_bytes=100 * KIB) as one:
            for _ in range(20):
                _, writer = await one.connect()
                writer.write(struct.pack(">i", 90 * KIB))
            await one.settle()
            reader, writer = await one.connect()
            writer.write(framed(payload(1, 90 * KIB)))
            assert number_of(await read_frame(reader)) == 1

    run(scenario())


def test_who_stops_within_a_large_request_is_dropped_for_those_who_wait(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with bench(holds=False, max_inflight_bytes=100 * KIB, send_timeout_s=0.1) as one:
            stalled_reader, stalled_writer = await one.connect()
            stalled_writer.write(framed(payload(0, 90 * KIB))[: 50 * KIB])
            await one.settle()
            reader, writer = await one.connect()
            writer.write(framed(payload(1, 90 * KIB)))
            assert number_of(await read_frame(reader)) == 1
            assert await read_frame(stalled_reader) is None

    run(scenario())
    assert [record.getMessage() for record in caplog.records] == [
        "connection closed: it stopped in the middle of a request"
    ]


def test_partial_requests_that_end_make_room_for_those_behind_them(run: Run) -> None:
    """The one at the head of the queue disappears, and with it the reason to wait."""

    async def scenario() -> None:
        async with bench(max_inflight_bytes=100 * KIB) as one:
            _, holder = await one.connect()
            holder.write(framed(payload(0, 50 * KIB)))
            await one.arrival(1)
            _, head = await one.connect()
            head.write(framed(payload(1, 90 * KIB)))
            await one.settle()
            _, behind = await one.connect()
            behind.write(framed(payload(2, 40 * KIB)))
            await one.settle()
            assert len(one.frames) == 1
            # A connection that is not read does not notice its end: dropped as the idle ones are.
            (waiting, _) = one.server.room._large
            waiting.abort("test")
            await one.arrival(2)
            assert len(one.frames[1]) == 40 * KIB

    run(scenario())


# --- clients that do not take their answers, or say nothing


@pytest.mark.parametrize("half_closed", [False, True])
def test_who_does_not_take_answers_is_dropped(
    run: Run, caplog: pytest.LogCaptureFixture, half_closed: bool
) -> None:
    async def scenario() -> None:
        async with bench(send_timeout_s=0.1) as one:
            _, writer = await one.connect(receive_bytes=4 * KIB)
            writer.write(framed(payload(0)) + framed(payload(1)))
            await one.arrival(2)
            if half_closed:
                writer.write_eof()
            one.release(0, size=8 * 2**20)
            one.release(1, size=8 * 2**20)
            await one.connections[0].closed
            assert one.sent == 2

    run(scenario())
    assert [record.getMessage() for record in caplog.records] == [
        "connection closed: it does not take its answers"
    ]


def test_who_does_not_take_answers_is_not_read(run: Run) -> None:
    async def scenario() -> None:
        async with bench() as one:
            reader, writer = await one.connect(receive_bytes=4 * KIB)
            writer.write(framed(payload(0)))
            await one.arrival(1)
            one.release(0, size=8 * 2**20)
            await one.settle()
            writer.write(framed(payload(1)) + framed(payload(2, LARGE)))
            await one.settle()
            assert len(one.frames) == 1
            one.release_all()
            assert [number_of(await read_frame(reader)) for _ in range(3)] == [0, 1, 2]

    run(scenario())


def test_who_takes_answers_slowly_gets_them_all(run: Run) -> None:
    async def scenario() -> None:
        async with bench() as one:
            reader, writer = await one.connect(receive_bytes=16 * KIB)
            writer.write(b"".join(framed(payload(number)) for number in range(4)))
            await one.arrival(4)
            for number in range(4):
                one.release(number, size=3 * 2**20)
            await one.settle()
            assert one.sent < 4, "what has not left keeps its room"
            frames = [await read_frame(reader) for _ in range(4)]
            assert [number_of(frame) for frame in frames] == [0, 1, 2, 3]
            assert {len(frame or b"") for frame in frames} == {3 * 2**20}

    run(scenario())


def test_who_takes_a_large_answer_slowly_is_not_dropped(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """What was taken of it when time is up decides."""
    size = 6 * LEAST_SENT_BYTES

    async def scenario() -> None:
        async with bench() as one:
            reader, writer = await one.connect(receive_bytes=16 * KIB)
            writer.write(framed(payload(0)))
            await one.arrival(1)
            one.release(0, size=size)
            await one.settle()
            connection = one.connections[0]
            assert connection._transport is not None
            unsent = connection._transport.get_write_buffer_size()
            await reader.readexactly(size - unsent + LEAST_SENT_BYTES + KIB)
            connection._check_sending(unsent)
            assert connection.is_open
            unsent = connection._transport.get_write_buffer_size()
            connection._check_sending(unsent + LEAST_SENT_BYTES - 1)
            await connection.closed

    run(scenario())
    assert [record.getMessage() for record in caplog.records] == [
        "connection closed: it does not take its answers"
    ]


def test_idle_connections_are_closed_and_waiting_ones_are_not(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with bench(max_idle_s=0.2) as one:
            waiting_reader, waiting_writer = await one.connect()
            waiting_writer.write(framed(payload(0)))
            await one.arrival(1)
            idle_reader, idle_writer = await one.connect()
            idle_writer.write(framed(payload(1, LARGE))[:3])
            assert await read_frame(idle_reader) is None
            one.release(0)
            assert number_of(await read_frame(waiting_reader)) == 0

    with caplog.at_level(logging.INFO, logger="dray"):
        run(scenario())
    messages = [record.getMessage() for record in caplog.records]
    assert messages[0] == "connection closed: it was idle for connections.max.idle.ms"


# --- ends


def test_a_half_closed_connection_gets_its_answers(run: Run) -> None:
    async def scenario() -> None:
        async with bench() as one:
            reader, writer = await one.connect()
            writer.write(b"".join(framed(payload(number, LARGE)) for number in range(3)) + b"\0\0")
            writer.write_eof()
            await one.arrival(3)
            for number in (2, 1, 0):
                one.release(number)
            assert [number_of(await read_frame(reader)) for _ in range(4)] == [0, 1, 2, None]

    run(scenario())


def test_a_half_closed_connection_that_waits_for_room_gets_its_answer(run: Run) -> None:
    async def scenario() -> None:
        async with bench(max_inflight_bytes=100 * KIB) as one:
            _, holder = await one.connect()
            holder.write(framed(payload(0, 90 * KIB)))
            await one.arrival(1)
            reader, writer = await one.connect()
            writer.write(framed(payload(1, 50 * KIB)))
            writer.write_eof()
            await one.settle()
            one.release(1)
            one.release(0)
            assert [number_of(await read_frame(reader)) for _ in range(2)] == [1, None]

    run(scenario())


def test_requests_go_on_when_their_client_has_gone(run: Run) -> None:
    """acks=0 counts on it."""

    async def scenario() -> None:
        async with bench() as one:
            _, writer = await one.connect()
            writer.write(framed(payload(0)) + framed(payload(1, LARGE)) + framed(payload(2, LARGE))[:100])
            await one.arrival(2)
            reset(writer)
            await one.connections[0].closed
            assert one.busy_bytes > 0
            assert one.server.room.taken == 8 + LARGE
            one.release(1)
            one.release(0)
            await one.settle()
            assert one.server.room.taken == 0
            assert one.sent == 2

    run(scenario())


def reset(writer: asyncio.StreamWriter) -> None:
    """End a connection with RST instead of FIN."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def test_stopping_answers_what_was_read_and_takes_no_more(run: Run) -> None:
    async def scenario() -> None:
        async with bench() as one:
            idle_reader, _ = await one.connect()
            reader, writer = await one.connect()
            writer.write(framed(payload(0)) + framed(payload(1)) + framed(payload(2, LARGE))[:200])
            await one.arrival(2)
            stopping = asyncio.create_task(one.server.stop(PATIENCE_S))
            assert await read_frame(idle_reader) is None
            for number in range(10, 200):
                writer.write(framed(payload(number, 10 * KIB)))
            await writer.drain()
            one.release(1)
            one.release(0)
            assert [number_of(await read_frame(reader)) for _ in range(3)] == [0, 1, None]
            await stopping
            assert len(one.frames) == 2
            assert len(one.server) == 0
            with pytest.raises(ConnectionRefusedError):
                await one.connect()

    run(scenario())


@pytest.mark.parametrize("stuck_in", ["handler", "socket"])
def test_stopping_cuts_off_what_is_not_done_in_time(run: Run, stuck_in: str) -> None:
    async def scenario() -> None:
        async with bench() as one:
            _, writer = await one.connect(receive_bytes=4 * KIB)
            writer.write(framed(payload(0)))
            await one.arrival(1)
            if stuck_in == "socket":
                one.release(0, size=8 * 2**20)
                await one.settle()
            await one.server.stop(0.1)
            assert len(one.server) == 0

    run(scenario())


# --- anything, in any order

Action: TypeAlias = tuple[str, int, int]
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(("open", "send", "part", "rest", "eof", "reset", "release", "fail", "junk", "turn")),
        st.integers(0, 5),
        st.sampled_from([8, 5 * KIB, LARGE, 30 * KIB, 70 * KIB]),
    ),
    max_size=40,
)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(actions=ACTIONS)
def test_no_room_is_lost_whatever_connections_do(loop: str, actions: list[Action]) -> None:
    factory = asyncio.new_event_loop if loop == "asyncio" else uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(anything(actions))


async def anything(actions: list[Action]) -> None:
    """At the end, `Bench.close` looks at what is left."""
    async with (
        asyncio.timeout(PATIENCE_S),
        bench(max_inflight_bytes=100 * KIB, max_connection_inflight_bytes=60 * KIB, max_connections=4) as one,
    ):
        open_ones: list[Streams] = [await one.connect()]
        rest: dict[asyncio.StreamWriter, bytes] = {}
        numbers = iter(range(10_000))
        for what, which, size in actions:
            if what == "open" or not open_ones:
                open_ones.append(await one.connect())
                continue
            reader, writer = open_ones[which % len(open_ones)]
            frame = framed(payload(next(numbers), size))
            if what in ("release", "fail"):
                waiting = [number for number, gate in one._gates.items() if not gate.done()]
                if waiting:
                    number = waiting[which % len(waiting)]
                    one.release(number, None if what == "release" else MalformedRequest("test", 0))
            elif what == "turn":
                await one.settle()
            elif writer.is_closing() or not writer.can_write_eof():
                continue
            elif what == "send" and writer not in rest:
                writer.write(frame)
            elif what == "part" and writer not in rest:
                writer.write(frame[: len(frame) // 2])
                rest[writer] = frame[len(frame) // 2 :]
            elif what == "rest" and writer in rest:
                writer.write(rest.pop(writer))
            elif what == "eof":
                open_ones.remove((reader, writer))
                await until_sent(writer)
                if not writer.is_closing():
                    writer.write_eof()
            elif what == "reset":
                open_ones.remove((reader, writer))
                reset(writer)
            elif what == "junk":
                writer.write(struct.pack(">i", -5))
        assert one.most_busy_bytes <= 100 * KIB


async def until_sent(writer: asyncio.StreamWriter) -> None:
    await asyncio.wait({asyncio.ensure_future(_quietly(writer.drain()))}, timeout=0.01)


async def _quietly(work: Awaitable[None]) -> None:
    with suppress(ConnectionError):
        await work
