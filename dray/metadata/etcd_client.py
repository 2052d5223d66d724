"""Calls to an etcd cluster: endpoints, deadlines, credentials, and what each failure means.

Owns the channels and the auth token; knows nothing of keys, sequences or Kafka. Every call ends by
its deadline in an answer or a `MetadataError`.

- What may be repeated (`range`, `repeatable`, leases, watches) is repeated over the endpoints until its
  deadline.
- A write (`write`) is sent once, on a connected channel. It is sent again only where etcd has said
  that it did not take it because the auth token was not valid.
- One endpoint is current and stays so while it answers. One that failed is suspected for a while and
  used only if no other can be reached.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

import grpc
import grpc.aio

from dray.errors import (
    AccessDenied,
    CorruptStore,
    InvalidRequest,
    MetadataError,
    OutcomeUnknown,
    SessionLost,
    StoreFull,
    TooLarge,
    Unavailable,
)
from dray.metadata.proto import etcd_pb2 as pb
from dray.metadata.proto.etcd_pb2_grpc import AuthStub, KVStub, LeaseStub, WatchStub
from dray.metadata.rpc import open_channel, wait_ready, was_never_sent

if TYPE_CHECKING:  # the generated module has these for the type checker only
    from dray.metadata.proto.etcd_pb2_grpc import AuthAsyncStub, KVAsyncStub, LeaseAsyncStub, WatchAsyncStub

T = TypeVar("T")
Answer = TypeVar("Answer", bound="_Answer")
WatchStream: TypeAlias = "grpc.aio.StreamStreamCall[pb.WatchRequest, pb.WatchResponse]"

# A channel notices after 13 s that its peer is gone (keepalive, `rpc.py`); do not go back before that.
_SUSPECT_S = 15.0
# Between repeats: a leader election takes about a second, so more than a few tries are a waste.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.25

# A member that has lost its leader refuses at once with this, and ends its watches, instead of letting
# them wait for a leader that another member may know.
_REQUIRE_LEADER = ("hasleader", "true")

_TOKEN_REFUSED = frozenset(
    {
        "etcdserver: invalid auth token",
        "etcdserver: revision of auth store is old",
        "etcdserver: user name is empty",  # auth was enabled after this client had connected
    }
)
# Refusals by their text (etcd's api/v3rpc/rpctypes/error.go): two of them come with code UNKNOWN. Each
# is said before the request is proposed, or by all members alike when they apply it and leave it out;
# the first needs a second look (`_left_out`).
# Not here, because they may come after the proposal: "request timed out…", "server stopped", "leader
# changed", "request canceled", and whatever the transport says.
_REFUSALS: dict[str, Callable[[str], MetadataError]] = {
    "etcdserver: mvcc: database space exceeded": StoreFull,
    "etcdserver: requested lease not found": SessionLost,
    "etcdserver: authentication failed, invalid user ID or password": AccessDenied,
    "etcdserver: permission denied": AccessDenied,
    **dict.fromkeys(_TOKEN_REFUSED, AccessDenied),
    "etcdserver: no leader": Unavailable,
    "etcdserver: too many requests": Unavailable,
    "raft proposal dropped": Unavailable,
    "etcdserver: not capable": Unavailable,
    "etcdserver: rpc not supported for learner": Unavailable,
    "etcdserver: corrupt cluster": CorruptStore,
}
_TOO_LARGE = ("etcdserver: request is too large", "grpc: received message larger than max")
_TOO_MANY = "etcdserver: too many operations in txn request"
_COMPACTED = "etcdserver: mvcc: required revision has been compacted"
# Every other error that etcd gives these codes is a check of the request.
_INVALID_CODES = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)


class _Answer(Protocol):
    @property
    def header(self) -> pb.ResponseHeader: ...


class RevisionCompacted(MetadataError):
    """The revision that a read was pinned to is gone: read again at the current one."""


@dataclass(slots=True)
class Endpoint:
    address: str
    channel: grpc.aio.Channel
    kv: KVAsyncStub
    watch: WatchAsyncStub
    lease: LeaseAsyncStub
    auth: AuthAsyncStub
    suspect_until: float = 0.0  # of the loop's clock

    @classmethod
    def open(cls, address: str, tls: grpc.ChannelCredentials | None) -> Endpoint:
        # etcd counts pings on a connection without calls as abuse and closes it. So an idle connection that
        # has silently died is noticed by the first call on it; a watch is a call, and keeps it observed.
        channel = open_channel(address, tls, keepalive_permit_without_calls=0)
        return cls(
            address, channel, KVStub(channel), WatchStub(channel), LeaseStub(channel), AuthStub(channel)
        )

    def is_ready(self) -> bool:
        return self.channel.get_state(try_to_connect=True) is grpc.ChannelConnectivity.READY


class EtcdClient:
    def __init__(
        self,
        addresses: Sequence[str],
        *,
        timeout_s: float,
        user: str | None = None,
        password: str | None = None,
        tls: grpc.ChannelCredentials | None = None,
    ) -> None:
        if not addresses:
            raise InvalidRequest("etcd needs at least one endpoint")
        self._loop = asyncio.get_running_loop()
        self._endpoints = [Endpoint.open(address, tls) for address in addresses]
        self._current = self._endpoints[0]
        self._timeout_s = timeout_s
        # One endpoint that swallows requests leaves each of the others its turn.
        self._attempt_s = timeout_s / (len(addresses) + 1)
        self._user = user
        self._password = password or ""
        self._token: str | None = None
        self._authenticating = asyncio.Lock()
        self._connecting: set[asyncio.Task[None]] = set()
        self._closed = False
        self._revision = 0  # the newest that an answer has named; a later write gets a higher one
        self.requests_sent = 0  # calls of KV, for metrics and for tests that count round trips

    def deadline(self) -> float:
        """When a call that begins now must have ended."""
        return self._loop.time() + self._timeout_s

    async def authenticate(self, deadline: float) -> None:
        """Get a token, if there are credentials and the server wants any. Raises `AccessDenied`."""
        if self._user is not None:
            await self._renew_token(self._token, deadline)

    async def range(self, request: pb.RangeRequest, deadline: float) -> pb.RangeResponse:
        return await self.retry(
            lambda endpoint, budget_s: self._unary(endpoint.kv.Range, request, budget_s), deadline
        )

    async def repeatable(self, request: pb.TxnRequest, deadline: float) -> pb.TxnResponse:
        """A transaction that only reads, or whose writes do no harm when done twice or late."""
        return await self.retry(
            lambda endpoint, budget_s: self._unary(endpoint.kv.Txn, request, budget_s), deadline, request
        )

    async def write(self, request: pb.TxnRequest, deadline: float) -> pb.TxnResponse:
        """Send a transaction once. `Unavailable` is certain to have had no effect."""
        while True:
            endpoint = await self._connected(deadline)
            token, before = self._token, self._revision
            budget_s = deadline - self._loop.time()
            if budget_s <= 0:
                raise Unavailable("the time for this call was up before it could be sent")
            try:
                response = await self._unary(endpoint.kv.Txn, request, budget_s)
            except grpc.aio.AioRpcError as error:
                if self._user is not None and error.details() in _TOKEN_REFUSED:
                    await self._renew_token(token, deadline)
                    continue
                refusal = _refusal(error, request)
                if refusal is None or isinstance(refusal, Unavailable):
                    self._suspect(endpoint)
                if isinstance(refusal, StoreFull) and not await self._left_out(request, before, deadline):
                    raise OutcomeUnknown("etcd is full, and may have taken this write as its last") from error
                if refusal is not None:
                    raise refusal from error
                if was_never_sent(error):
                    raise Unavailable(_failure_text(endpoint, error)) from error
                raise OutcomeUnknown(_failure_text(endpoint, error)) from error
            endpoint.suspect_until = 0.0
            return response

    async def _left_out(self, request: pb.TxnRequest, before: int, deadline: float) -> bool:
        """Whether nothing that `request` puts was written since the revision `before`.

        etcd checks for space when it takes a request and again when it applies it. What fails the second
        check is applied all the same and then answered like the first (`quotaApplierV3.Txn`): of 600
        writes refused around the moment a server got full, 589 were there.
        """
        keys = [op.request_put.key for op in request.success if op.HasField("request_put")]
        reads = [pb.RequestOp(request_range=pb.RangeRequest(key=key, keys_only=True)) for key in keys]
        try:
            found = await self.repeatable(pb.TxnRequest(success=reads), deadline)
        except MetadataError:
            return False
        return all(kv.mod_revision <= before for op in found.responses for kv in op.response_range.kvs)

    async def grant(self, ttl_s: int, deadline: float) -> int:
        """A new lease. Repeated where an answer got lost: a lease that nobody uses ends by itself."""
        request = pb.LeaseGrantRequest(TTL=ttl_s)
        response = await self.retry(
            lambda endpoint, budget_s: self._unary(endpoint.lease.LeaseGrant, request, budget_s), deadline
        )
        return response.ID

    async def revoke(self, lease: int, deadline: float) -> None:
        request = pb.LeaseRevokeRequest(ID=lease)
        await self.retry(
            lambda endpoint, budget_s: self._unary(endpoint.lease.LeaseRevoke, request, budget_s), deadline
        )

    async def keep_alive(self, lease: int, deadline: float) -> bool:
        """Renew a lease; False if the server does not know it (any more)."""

        async def attempt(endpoint: Endpoint, budget_s: float) -> bool:
            request = pb.LeaseKeepAliveRequest(ID=lease)
            call = endpoint.lease.LeaseKeepAlive(iter([request]), timeout=budget_s, metadata=self._metadata())
            try:
                with self._closing_is_failure():
                    response = await call.read()
            finally:
                call.cancel()
            if not isinstance(response, pb.LeaseKeepAliveResponse):
                raise _failure(grpc.StatusCode.UNAVAILABLE, "the stream ended without an answer")
            return response.TTL > 0

        return await self.retry(attempt, deadline)

    async def subscribe(
        self, create: pb.WatchCreateRequest, deadline: float
    ) -> tuple[WatchStream, pb.WatchResponse]:
        """Open a watch; returns once the server has created it. The caller cancels the stream."""

        async def attempt(endpoint: Endpoint, budget_s: float) -> tuple[WatchStream, pb.WatchResponse]:
            request = pb.WatchRequest(create_request=create)
            stream: WatchStream = endpoint.watch.Watch(iter([request]), metadata=self._metadata())
            try:
                async with asyncio.timeout(budget_s):
                    with self._closing_is_failure():
                        created = await stream.read()
                if not isinstance(created, pb.WatchResponse):
                    raise _failure(grpc.StatusCode.UNAVAILABLE, "the stream ended without an answer")
                if created.canceled:
                    # The reason is a Go error: "rpc error: code = … desc = etcdserver: …".
                    reason = created.cancel_reason.rpartition("desc = ")[2]
                    raise _failure(grpc.StatusCode.FAILED_PRECONDITION, reason)
            except TimeoutError:
                stream.cancel()
                raise _failure(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer to a watch") from None
            except BaseException:
                stream.cancel()
                raise
            return stream, created

        return await self.retry(attempt, deadline)

    async def retry(
        self,
        attempt: Callable[[Endpoint, float], Awaitable[T]],
        deadline: float,
        request: pb.TxnRequest | None = None,
    ) -> T:
        """Repeat `attempt(endpoint, seconds it may take)` until etcd answers, or `Unavailable`."""
        pause_s = _FIRST_PAUSE_S
        while True:
            endpoint = await self._connected(deadline)
            token = self._token
            try:
                answer = await attempt(endpoint, min(self._attempt_s, deadline - self._loop.time()))
            except grpc.aio.AioRpcError as error:
                if self._user is not None and error.details() in _TOKEN_REFUSED:
                    await self._renew_token(token, deadline)
                else:
                    refusal = _refusal(error, request)
                    if refusal is not None and not isinstance(refusal, Unavailable):
                        raise refusal from error
                    self._suspect(endpoint)
                if self._loop.time() + pause_s >= deadline:
                    raise Unavailable(_failure_text(endpoint, error)) from error
            else:
                endpoint.suspect_until = 0.0
                return answer
            await asyncio.sleep(pause_s * random.uniform(0.5, 1))
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)

    async def close(self) -> None:
        """Calls that are under way fail. May be called twice."""
        self._closed = True
        for task in self._connecting:
            task.cancel()
        await asyncio.gather(*(endpoint.channel.close() for endpoint in self._endpoints))

    async def _connected(self, deadline: float) -> Endpoint:
        """The current endpoint if it is connected and not suspected, else the first that connects."""
        self.check_open()
        endpoint = await self._choose(deadline)
        self.check_open()  # it may have been closed while we waited
        return endpoint

    def check_open(self) -> None:
        if self._closed:
            raise Unavailable("the store is closed")

    async def _choose(self, deadline: float) -> Endpoint:
        now = self._loop.time()
        if self._current.suspect_until <= now and self._current.is_ready():
            return self._current
        trusted = [endpoint for endpoint in self._endpoints if endpoint.suspect_until <= now]
        if 0 < len(trusted) < len(self._endpoints):
            with contextlib.suppress(Unavailable):
                return await self._first_ready(trusted, now + (deadline - now) / 2)
        # All of them, beginning behind the current one: if all are suspected it is another's turn.
        turn = self._endpoints.index(self._current) + 1
        return await self._first_ready(self._endpoints[turn:] + self._endpoints[:turn], deadline)

    async def _first_ready(self, endpoints: Sequence[Endpoint], deadline: float) -> Endpoint:
        for endpoint in endpoints:
            if endpoint.is_ready():
                self._current = endpoint
                return endpoint
        tasks = {
            asyncio.create_task(wait_ready(endpoint.channel, endpoint.address, deadline)): endpoint
            for endpoint in endpoints
        }
        self._connecting.update(tasks)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task, endpoint in tasks.items():
                if task.done() and not task.cancelled() and task.exception() is None:
                    self._current = endpoint
                    return endpoint
        finally:
            self._connecting.difference_update(tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        addresses = ", ".join(endpoint.address for endpoint in endpoints)
        raise Unavailable(f"no connection to etcd at {addresses}; is it running and reachable?")

    def _suspect(self, endpoint: Endpoint) -> None:
        endpoint.suspect_until = self._loop.time() + _SUSPECT_S

    async def _renew_token(self, refused: str | None, deadline: float) -> None:
        """Authenticate, unless another call has done so since `refused` was sent."""

        async def attempt(endpoint: Endpoint, budget_s: float) -> str | None:
            request = pb.AuthenticateRequest(name=self._user or "", password=self._password)
            try:
                with self._closing_is_failure():
                    answer = await endpoint.auth.Authenticate(
                        request, timeout=budget_s, metadata=(_REQUIRE_LEADER,)
                    )
            except grpc.aio.AioRpcError as error:
                if error.details() == "etcdserver: authentication is not enabled":
                    return None  # credentials that are not needed yet: as etcd's own clients do
                raise
            return answer.token

        try:
            async with asyncio.timeout_at(deadline), self._authenticating:
                if self._token == refused:
                    self._token = await self.retry(attempt, deadline)
        except TimeoutError:
            raise Unavailable("no answer to the authentication in time") from None

    async def _unary(
        self,
        method: Callable[..., grpc.aio.UnaryUnaryCall[T, Answer]],
        request: T,
        budget_s: float,
    ) -> Answer:
        self.requests_sent += 1
        with self._closing_is_failure():
            answer = await method(request, timeout=budget_s, metadata=self._metadata())
        self._revision = max(self._revision, answer.header.revision)
        return answer

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        if self._token is None:
            return (_REQUIRE_LEADER,)
        return (_REQUIRE_LEADER, ("token", self._token))

    @contextlib.contextmanager
    def _closing_is_failure(self) -> Iterator[None]:
        """Closing a channel makes grpc raise CancelledError in tasks that nobody has cancelled."""
        try:
            yield
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed and task is not None and not task.cancelling():
                raise _failure(grpc.StatusCode.CANCELLED, "the store was closed") from None
            raise


def _refusal(error: grpc.aio.AioRpcError, request: pb.TxnRequest | None) -> MetadataError | None:
    """What etcd said for certain: the request had no effect and will have none. Else None."""
    text = error.details() or ""
    if text in _REFUSALS:
        return _REFUSALS[text](text)
    if text == _COMPACTED:
        return RevisionCompacted(text)
    if request is not None:
        # The server allows less than was configured here; all that is known is that this is too much.
        if text.startswith(_TOO_LARGE):
            size = request.ByteSize()
            return TooLarge("bytes in one request, by the server's own setting", size, size - 1)
        if text == _TOO_MANY:
            operations = max(len(request.compare), len(request.success), len(request.failure))
            return TooLarge(
                "operations in one request, by the server's own setting", operations, operations - 1
            )
    if error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return AccessDenied(text)
    if error.code() in _INVALID_CODES:
        return InvalidRequest(f"etcd refused the request: {text}")
    return None


def _failure(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


def _failure_text(endpoint: Endpoint, error: grpc.aio.AioRpcError) -> str:
    return f"etcd at {endpoint.address}: {error.code().name}: {error.details()}"
