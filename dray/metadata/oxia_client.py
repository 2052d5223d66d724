"""Talking to an Oxia cluster: which server leads a shard, connections to it, and what a failure means.

Owns the table of shards, followed live, and the channels. Knows nothing of what the store writes. A
*route* is the partition key of a domain: it decides the shard, so it is part of the stored format.

Invariants
- What may take effect (`write`) reaches a server at most once. It is sent again only after a refusal
  that the server gives before it logs anything, or when there was no connection to send it on.
- A channel is closed only when no call is on it.
- After `barrier(route)`, fresh calls on that shard go only to a leader that acknowledged a write of
  ours after its name entered the table. A former leader that slept through its replacement answers
  reads with old values, but no write of its can be acknowledged.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

import grpc
import grpc.aio
import xxhash

from dray.errors import (
    AccessDenied,
    IncompatibleStore,
    InvalidRequest,
    MetadataError,
    NoSuchNamespace,
    OutcomeUnknown,
    Unavailable,
)
from dray.metadata.proto import oxia_pb2 as pb
from dray.metadata.proto import oxia_pb2_grpc as pb_grpc
from dray.metadata.rpc import CHANNEL_OPTIONS, open_channel, wait_ready, was_never_sent

T = TypeVar("T")

# What the server accepts (it has no path separators in namespaces: they are directories on its disk).
_NAMESPACE = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]*")

# The server says these before a write is in its log, so the write has no effect, now or later.
# RESOURCE_UNAVAILABLE is not among them: a leader that is replaced says it of writes already logged.
_REFUSED_UNSEEN = frozenset({"NODE_IS_NOT_LEADER", "NOT_INITIALIZED"})

# Between two tries of a call: short enough for a failover of 0.2 s, and no storm on one that lasts.
_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.25
# A server that is there answers with the shard table at once; one that does not in this time is skipped.
_ASSIGNMENTS_WAIT_S = 1.5
# A leader that was replaced may yet say that it refused a write. One that sleeps says nothing.
_LAST_WORD_S = 1.0
# Calls that fail for so long may have an outdated table to blame: ask another server for it.
_CHANGE_SOURCE_S = 1.0
# A server that failed is not asked for the table for this long, unless there is no other.
_AVOID_S = 3.0


@dataclass(frozen=True, slots=True)
class Target:
    """The leader of a shard, connected, and what one call to it needs."""

    shard: int
    address: str
    stub: pb_grpc.OxiaClientAsyncStub
    timeout_s: float


@dataclass(slots=True)
class _Shard:
    id: int
    low: int  # the hashes it holds, both ends inclusive
    high: int
    leader: str | None
    # Barriers: numbered, one write at a time, so that those who wait share the next one.
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    started: int = 0
    acknowledged: int = 0
    proof: pb.WriteRequest | None = None  # the write of the last barrier; None while nobody needs one
    proven: str | None = None  # the leader that acknowledged it


@dataclass(slots=True)
class _Connection:
    address: str
    channel: grpc.aio.Channel
    stub: pb_grpc.OxiaClientAsyncStub
    users: int = 0


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the server refused a call, in its own words; empty where it did not say."""

    reason: str = ""
    leader: str = ""


class _NotThisTime(Exception):
    """An attempt failed without effect, or one that may be repeated failed."""


class OxiaClient:
    def __init__(self, address: str, namespace: str, timeout_s: float, dial: Callable[[str], str]) -> None:
        self.timeout_s = timeout_s
        self._bootstrap = address
        self._namespace = namespace
        self._dial = dial
        self._shards: dict[int, _Shard] = {}
        self._connections: dict[str, _Connection] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False
        self._changed = asyncio.Event()  # set, and replaced, with every change of the table
        self._listeners: dict[int, set[Callable[[], object]]] = {}
        self._source: tuple[Callable[[], object], str] | None = None  # of assignments: cancel, address
        self._doubtful_since: float | None = None  # calls have failed since then, and no assignments came
        self._failed: dict[str, float] = {}  # when a server last failed us
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._follower: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls, address: str, namespace: str, timeout_s: float, dial: Callable[[str], str]
    ) -> OxiaClient:
        """Return once the shard table is there. Raises `Unavailable`, `NoSuchNamespace`, `InvalidRequest`."""
        if not _NAMESPACE.fullmatch(namespace) or ".." in namespace:
            raise InvalidRequest(f"Oxia namespace {namespace!r}: letters, digits, '_', '.' and '-' only")
        client = cls(address, namespace, timeout_s, dial)
        client._follower = asyncio.create_task(client._follow_assignments())
        try:
            async with asyncio.timeout(timeout_s):
                await client._opened
        except TimeoutError:
            await client.close()
            raise Unavailable(f"no shard table from {address}; is an Oxia server running there?") from None
        except BaseException:
            await client.close()
            raise
        return client

    async def close(self) -> None:
        """Cancel what is under way. May be called twice."""
        self._closed = True
        if self._follower is not None:
            self._follower.cancel()
            await asyncio.gather(self._follower, return_exceptions=True)
            self._follower = None  # it refers to its last call, and gRPC hangs up only without that
        if not self._opened.done():
            self._opened.cancel()
        self._notify()
        for connection in list(self._connections.values()):
            self._discard(connection)
        while self._closing:
            await asyncio.gather(*self._closing, return_exceptions=True)

    # --- calls

    def deadline(self) -> float:
        return asyncio.get_running_loop().time() + self.timeout_s

    async def write(
        self, route: str, request: pb.WriteRequest, deadline: float | None = None
    ) -> pb.WriteResponse:
        """Send a write at most once. `Unavailable` if it had no effect, `OutcomeUnknown` if it may have.

        By the unary call, though Oxia calls it deprecated: answers on a WriteStream carry no id, and a
        request that fails gets none, so that every later answer would be taken for the one before it.
        """

        async def send(target: Target) -> pb.WriteResponse:
            request.shard = target.shard
            return await target.stub.Write(request, timeout=target.timeout_s)

        return await self._run(route, deadline or self.deadline(), send, once=True)

    async def repeat(
        self,
        route: str,
        call: Callable[[Target], Awaitable[T]],
        deadline: float | None = None,
        *,
        fresh: bool = False,
    ) -> T:
        """Make a call that may be made again, until it succeeds or time is up (`Unavailable`).

        With `fresh` it sees at least what the last barrier saw.
        """
        return await self._run(route, deadline or self.deadline(), call, once=False, fresh=fresh)

    async def barrier(self, route: str, request: pb.WriteRequest, deadline: float | None = None) -> None:
        """Have the leader acknowledge `request`, which may be applied any number of times.

        Callers that wait together share one write: one that was first sent after they all had called.
        """
        deadline = deadline or self.deadline()
        shard = await self._find(route, deadline)
        ticket = shard.started
        async with locked(shard.lock, deadline):
            if shard.acknowledged > ticket:
                return
            shard.started += 1
            number = shard.started

            async def send(target: Target) -> Target:
                request.shard = target.shard
                await target.stub.Write(request, timeout=target.timeout_s)
                return target

            target = await self._run(route, deadline, send, once=False)
            for proved in {shard.id, target.shard} & self._shards.keys():
                self._shards[proved].proof = request
                self._shards[proved].proven = target.address
            shard.acknowledged = number

    async def _run(
        self,
        route: str,
        deadline: float,
        call: Callable[[Target], Awaitable[T]],
        *,
        once: bool,
        fresh: bool = False,
    ) -> T:
        loop = asyncio.get_running_loop()
        pause_s = _FIRST_PAUSE_S
        while True:
            changed = self._changed
            shard = await self._find(route, deadline)
            if fresh and shard.proof is not None and shard.proven != shard.leader:
                await self.barrier(route, shard.proof, deadline)
                continue
            try:
                return await self._attempt(shard, call, deadline, once=once)
            except _NotThisTime as error:
                failure = error
            with suppress(TimeoutError):
                async with asyncio.timeout_at(min(deadline, loop.time() + pause_s)):
                    if (
                        pause_s > _FIRST_PAUSE_S
                    ):  # the first hint is followed at once; later they may disagree
                        await asyncio.sleep(_FIRST_PAUSE_S)
                    await changed.wait()
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
            if loop.time() >= deadline:
                raise Unavailable(f"shard {shard.id}: {failure}") from failure

    async def _attempt(
        self, shard: _Shard, call: Callable[[Target], Awaitable[T]], deadline: float, *, once: bool
    ) -> T:
        loop = asyncio.get_running_loop()
        address = shard.leader
        assert address is not None, "_find waits for a leader"
        # Half of what is left, so that a leader that swallows calls leaves time to ask the next one.
        attempt_s = (deadline - loop.time()) / 2
        sent = False

        def hurry() -> None:
            if not limit.expired():
                limit.reschedule(loop.time() + (_LAST_WORD_S if once and sent else 0))

        try:
            async with asyncio.timeout(None) as limit:
                with self._using(address) as connection, self.when_leader_changes(shard.id, hurry):
                    await wait_ready(connection.channel, address, loop.time() + attempt_s)
                    sent = True
                    left_s = deadline - loop.time() if once else attempt_s
                    return await call(Target(shard.id, address, connection.stub, left_s))
        except Unavailable as error:
            self._doubt(address)
            raise _NotThisTime(str(error)) from error
        except TimeoutError as error:
            if once and sent:
                raise OutcomeUnknown(
                    f"write to {address}: replaced as leader of shard {shard.id} before it answered"
                ) from error
            raise _NotThisTime(f"{address} was replaced as leader") from error
        except grpc.aio.AioRpcError as error:
            problem = f"{address}: {describe(error)}"
            refusal = self.note(shard.id, address, error)
            if once and not (refusal.reason in _REFUSED_UNSEEN or was_never_sent(error)):
                raise OutcomeUnknown(f"write to {problem}") from error
            raise _NotThisTime(problem) from error
        except asyncio.CancelledError:
            if not closed_under_us():
                raise
            if once:
                raise OutcomeUnknown(f"the store was closed during a write to {address}") from None
            raise Unavailable("the store was closed") from None

    def note(self, shard: int, address: str, error: grpc.aio.AioRpcError) -> Refusal:
        """Learn from a failed call: who leads instead, or that the table may be out of date."""
        if error.code() in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED):
            raise AccessDenied(f"{address}: {describe(error)}") from error
        refusal = refusal_of(error)
        known = self._shards.get(shard)
        if refusal.leader and refusal.leader != address and known is not None and known.leader == address:
            self._set_leader(known, refusal.leader)
            self._notify()
        elif not refusal.leader:
            self._doubt(address)
        return refusal

    # --- the table of shards

    def shard_of(self, route: str) -> int | None:
        """The shard that holds `route`, or None while the table has none for it."""
        shard = self._lookup(route)
        return None if shard is None else shard.id

    async def find_shard(self, route: str, deadline: float) -> int:
        return (await self._find(route, deadline)).id

    @asynccontextmanager
    async def leader(self, shard: int, deadline: float) -> AsyncIterator[Target]:
        """The connected leader of `shard`, for a stream. Raises `Unavailable` at `deadline`."""
        known = self._shards.get(shard)
        if known is None or known.leader is None:
            await self._wait_change(self._changed, deadline, f"shard {shard} has no leader")
            known = self._shards.get(shard)
        if known is None or known.leader is None:
            raise Unavailable(f"shard {shard} has no leader")
        address = known.leader

        def hurry() -> None:
            if not limit.expired():
                limit.reschedule(0)

        with self._using(address) as connection:
            try:
                async with asyncio.timeout(None) as limit:
                    with self.when_leader_changes(shard, hurry):
                        await wait_ready(connection.channel, address, deadline)
            except TimeoutError:
                raise Unavailable(f"{address} was replaced as leader of shard {shard}") from None
            except Unavailable:
                self._doubt(address)
                raise
            yield Target(shard, address, connection.stub, self.timeout_s)

    @contextmanager
    def when_leader_changes(self, shard: int, act: Callable[[], object]) -> Iterator[None]:
        self._listeners.setdefault(shard, set()).add(act)
        try:
            yield
        finally:
            self._listeners[shard].discard(act)

    def _lookup(self, route: str) -> _Shard | None:
        hashed = xxhash.xxh3_64_intdigest(route.encode()) & 0xFFFF_FFFF
        return next((s for s in self._shards.values() if s.low <= hashed <= s.high), None)

    async def _find(self, route: str, deadline: float) -> _Shard:
        while True:
            if self._closed:
                raise Unavailable("the store is closed")
            changed = self._changed
            shard = self._lookup(route)
            if shard is not None and shard.leader is not None:
                return shard
            await self._wait_change(changed, deadline, f"the shard of {route!r} has no leader")

    async def _wait_change(self, changed: asyncio.Event, deadline: float, problem: str) -> None:
        try:
            async with asyncio.timeout_at(deadline):
                await changed.wait()
        except TimeoutError:
            raise Unavailable(problem) from None

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _set_leader(self, shard: _Shard, leader: str | None) -> None:
        if shard.leader == leader:
            return
        shard.leader = leader
        for act in list(self._listeners.get(shard.id, ())):
            act()

    def _doubt(self, address: str) -> None:
        """A call to `address` failed: follow the assignments elsewhere if they may be what is wrong."""
        now = asyncio.get_running_loop().time()
        self._failed[address] = now
        if self._doubtful_since is None:
            self._doubtful_since = now
        if self._source is not None:
            cancel, source = self._source
            if source == address or now - self._doubtful_since > _CHANGE_SOURCE_S:
                cancel()

    def _servers(self) -> list[str]:
        """Whom to ask for assignments: those that did not fail just now, if there are any."""
        leaders = (shard.leader for shard in self._shards.values())
        known = list(dict.fromkeys([self._bootstrap, *(leader for leader in leaders if leader)]))
        since = asyncio.get_running_loop().time() - _AVOID_S
        return [server for server in known if self._failed.get(server, since) <= since] or known

    async def _follow_assignments(self) -> None:
        turn = 0
        while True:
            servers = self._servers()
            server = servers[turn % len(servers)]
            try:
                await self._follow_assignments_at(server)
            except MetadataError as error:
                self._failed[server] = asyncio.get_running_loop().time()
                fatal = isinstance(error, NoSuchNamespace | AccessDenied | IncompatibleStore)
                if fatal and not self._opened.done():
                    self._opened.set_exception(error)
            except Exception as error:  # a bug, ours or that of `dial`: let it not look like a dead server
                if not self._opened.done():
                    self._opened.set_exception(error)
                raise
            turn += 1
            await asyncio.sleep(_FIRST_PAUSE_S if len(servers) > 1 else _LONGEST_PAUSE_S)

    async def _follow_assignments_at(self, address: str) -> None:
        loop = asyncio.get_running_loop()
        with self._using(address) as connection:
            await wait_ready(connection.channel, address, loop.time() + _ASSIGNMENTS_WAIT_S)
            call = connection.stub.GetShardAssignments(pb.ShardAssignmentsRequest(namespace=self._namespace))
            self._source = (call.cancel, address)
            self._doubtful_since = None
            try:
                async with asyncio.timeout(_ASSIGNMENTS_WAIT_S) as limit:
                    while isinstance(message := await call.read(), pb.ShardAssignments):
                        limit.reschedule(None)  # only the first is due at once
                        self._take(message)
            except TimeoutError:
                raise Unavailable(f"{address} sends no shard table") from None
            except grpc.aio.AioRpcError as error:
                if refusal_of(error).reason == "NAMESPACE_NOT_FOUND":
                    raise NoSuchNamespace(
                        f"Oxia at {address} has no namespace {self._namespace!r}"
                    ) from error
                if error.code() in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED):
                    raise AccessDenied(f"{address}: {describe(error)}") from error
                raise Unavailable(f"{address}: {describe(error)}") from error
            except asyncio.CancelledError:
                if not closed_under_us():
                    raise
            finally:
                self._source = None
                call.cancel()

    def _take(self, message: pb.ShardAssignments) -> None:
        assignment = message.namespaces.get(self._namespace)
        if assignment is None:
            return
        if assignment.shard_key_router != pb.XXHASH3:
            raise IncompatibleStore(f"namespace {self._namespace!r} does not route keys by XXH3")
        shards: dict[int, _Shard] = {}
        for given in assignment.assignments:
            hashes = given.int32_hash_range
            shard = self._shards.get(given.shard)
            if shard is None:
                shard = _Shard(given.shard, 0, 0, given.leader or None)
            shard.low, shard.high = hashes.min_hash_inclusive, hashes.max_hash_inclusive
            self._set_leader(shard, given.leader or None)
            shards[given.shard] = shard
        for gone in self._shards.keys() - shards.keys():
            self._set_leader(self._shards[gone], None)
        self._shards = shards
        self._doubtful_since = None
        self._notify()
        for connection in list(self._connections.values()):
            self._discard_unused(connection)
        if not self._opened.done():
            self._opened.set_result(None)

    # --- connections

    @contextmanager
    def _using(self, address: str) -> Iterator[_Connection]:
        if self._closed:
            raise Unavailable("the store is closed")
        connection = self._connections.get(address)
        if connection is None:
            channel = self._open_channel(address)
            connection = _Connection(address, channel, pb_grpc.OxiaClientStub(channel))
            self._connections[address] = connection
        connection.users += 1
        try:
            yield connection
        except grpc.aio.UsageError as error:  # closed before the call was made: nothing was sent
            raise Unavailable(f"the connection to {address} was closed") from error
        finally:
            connection.users -= 1
            self._discard_unused(connection)

    def _open_channel(self, address: str) -> grpc.aio.Channel:
        target = self._dial(address)
        if target == address:
            return open_channel(address)
        # Whatever is dialled, the server is to see the name it goes by: a standalone one gives the name
        # it was called by as its own, and others may refuse one they do not know.
        options = (*CHANNEL_OPTIONS, ("grpc.default_authority", address))
        return grpc.aio.insecure_channel(target, options=options)

    def _discard_unused(self, connection: _Connection) -> None:
        led = any(shard.leader == connection.address for shard in self._shards.values())
        if not connection.users and not led:
            self._discard(connection)

    def _discard(self, connection: _Connection) -> None:
        if self._connections.get(connection.address) is connection:
            del self._connections[connection.address]
            task = asyncio.create_task(connection.channel.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


@asynccontextmanager
async def locked(lock: asyncio.Lock, deadline: float) -> AsyncIterator[None]:
    """Hold `lock`; `Unavailable` if those before take until `deadline`."""
    try:
        async with asyncio.timeout_at(deadline):
            await lock.acquire()
    except TimeoutError:
        raise Unavailable("calls that came first did not end in time") from None
    try:
        yield
    finally:
        lock.release()


def closed_under_us() -> bool:
    """Whether a CancelledError came from a call that was cancelled, not from the task that awaits it.

    gRPC says so of calls on a channel that is closed. Taken for a cancelled task it would end the
    caller, who was not asked to.
    """
    task = asyncio.current_task()
    return task is not None and not task.cancelling()


def describe(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error)


def refusal_of(error: grpc.aio.AioRpcError) -> Refusal:
    """Read the ErrorInfo that Oxia attaches to a status (google.rpc.Status, in a trailer)."""
    trailers = error.trailing_metadata()
    status = trailers.get("grpc-status-details-bin") if trailers is not None else None
    if not isinstance(status, bytes):
        return Refusal()
    try:
        for number, detail in _fields(status):
            if number != 3:
                continue
            packed = dict(_fields(detail))  # google.protobuf.Any
            if not packed.get(1, b"").endswith(b"google.rpc.ErrorInfo"):
                continue
            info = list(_fields(packed.get(2, b"")))
            reason = b"".join(value for number, value in info if number == 1)
            if (2, b"oxia.io") not in info:
                continue
            pairs = [dict(_fields(value)) for number, value in info if number == 3]
            facts = {pair.get(1, b""): pair.get(2, b"") for pair in pairs}
            return Refusal(reason.decode(), facts.get(b"leader", b"").decode())
    except ValueError:  # not a status; the code and text of the error have to do
        pass
    return Refusal()


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """The length-delimited fields of a protobuf message. Three small messages do not merit a dependency."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            if at >= len(message) or shift > 63:
                raise ValueError("truncated message")
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    while at < len(message):
        tag = varint()
        if tag & 7 == 0:
            varint()
        elif tag & 7 == 2:
            size = varint()
            if at + size > len(message):
                raise ValueError("truncated message")
            yield tag >> 3, message[at : at + size]
            at += size
        else:
            raise ValueError(f"wire type {tag & 7} is not used by google.rpc.Status")
