"""Sessions on Oxia. There they are per shard: one of ours is as many of theirs as shards were used.

The first is made on entering, so that a loss is noticed by an owner that has put nothing yet. One
lost is all lost: the owner must not act on half of its keys.

Oxia renews a session in the memory of the server that is asked, and one that was replaced as leader
without noticing goes on doing so. A renewal counts here only at a leader that has just acknowledged a
write: should it be replaced after that, its successor gives every session its full time from then on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import grpc.aio

from dray.errors import MetadataError, SessionLost
from dray.metadata.lease import Lease
from dray.metadata.oxia_client import OxiaClient, Target, locked, refusal_of
from dray.metadata.proto import oxia_pb2 as pb
from dray.metadata.store import Expect, Expectation

# Closing is a courtesy to those who wait for the keys: it must not hold up a shutdown.
_END_WAIT_S = 2.0


class PutInSession(Protocol):
    """Put a key that belongs to a shard's session; None if the server does not know that session."""

    async def __call__(
        self,
        domain: int,
        key: str,
        value: bytes,
        expect: Expectation,
        *,
        session_id: int,
        identity: str,
        deadline: float,
    ) -> int | None: ...


@dataclass(frozen=True, slots=True)
class _ShardSession:
    route: str
    id: int
    lease: Lease
    watcher: asyncio.Task[None]


class OxiaSession:
    """See `dray.metadata.store.Session`. `identity` is what operators see as the owner of its keys."""

    def __init__(
        self,
        client: OxiaClient,
        ttl_ms: int,
        identity: str,
        route: Callable[[int], str],
        put: PutInSession,
        barrier: Callable[[int, float], Awaitable[None]],
    ) -> None:
        self._client = client
        self._ttl_ms = ttl_ms
        self._identity = identity
        self._route = route
        self._put = put
        self._barrier = barrier
        self._on_shard: dict[int, _ShardSession] = {}
        self._making = asyncio.Lock()
        self._over = asyncio.Event()

    @property
    def lost(self) -> bool:
        return self._over.is_set()

    async def wait_lost(self) -> None:
        await self._over.wait()

    async def put_ephemeral(
        self, domain: int, key: str, value: bytes, expect: Expectation = Expect.ANY
    ) -> int:
        deadline = self._client.deadline()
        session_id = await self.make(domain, deadline)
        version = await self._put(
            domain,
            key,
            value,
            expect,
            session_id=session_id,
            identity=self._identity,
            deadline=deadline,
        )
        if version is None:
            self._lose()
            raise SessionLost("the server no longer knows the session; make a new one")
        return version

    async def make(self, domain: int, deadline: float) -> int:
        """The id of the session on the shard of `domain`, made if there is none yet."""
        route = self._route(domain)
        async with locked(self._making, deadline):
            self._check()
            shard = await self._client.find_shard(route, deadline)
            if shard not in self._on_shard:
                # A repeated one may have been made already: that one expires, unused.
                asked_at = asyncio.get_running_loop().time()
                created = await self._client.repeat(route, self._create, deadline)
                self._check()
                lease = Lease(self._ttl_ms, lambda: self._renew(domain, created), asked_at)
                watcher = asyncio.create_task(self._share_loss(lease))
                self._on_shard[shard] = _ShardSession(route, created, lease, watcher)
            return self._on_shard[shard].id

    async def close(self) -> None:
        self._lose()
        sessions = list(self._on_shard.values())
        self._on_shard.clear()
        for session in sessions:
            session.watcher.cancel()
            await session.lease.stop()
        await asyncio.gather(*(session.watcher for session in sessions), return_exceptions=True)
        await asyncio.gather(*(self._end(session) for session in sessions))

    def _check(self) -> None:
        if self.lost:
            raise SessionLost("the session is over; make a new one")

    def _lose(self) -> None:
        self._over.set()
        for session in self._on_shard.values():
            session.lease.lose()

    async def _share_loss(self, lease: Lease) -> None:
        await lease.wait_lost()
        self._lose()

    async def _create(self, target: Target) -> int:
        request = pb.CreateSessionRequest(
            shard=target.shard, session_timeout_ms=self._ttl_ms, client_identity=self._identity
        )
        answer = await target.stub.CreateSession(request, timeout=target.timeout_s)
        return answer.session_id

    async def _renew(self, domain: int, session_id: int) -> bool:
        # A renewal that hangs must leave time for the next one.
        deadline = asyncio.get_running_loop().time() + min(self._client.timeout_s, self._ttl_ms / 3000)
        # Twice: a leader that is being replaced forgets its sessions before it says that it is no leader.
        for _ in range(2):
            await self._barrier(domain, deadline)
            if await self._heartbeat(domain, session_id, deadline):
                return True
        return False

    async def _heartbeat(self, domain: int, session_id: int, deadline: float) -> bool:
        async def beat(target: Target) -> bool:
            request = pb.SessionHeartbeat(shard=target.shard, session_id=session_id)
            try:
                await target.stub.KeepAlive(request, timeout=target.timeout_s)
            except grpc.aio.AioRpcError as error:
                if refusal_of(error).reason == "SESSION_NOT_FOUND":
                    return False
                raise
            return True

        return await self._client.repeat(self._route(domain), beat, deadline, fresh=True)

    async def _end(self, session: _ShardSession) -> None:
        async def end(target: Target) -> None:
            request = pb.CloseSessionRequest(shard=target.shard, session_id=session.id)
            try:
                await target.stub.CloseSession(request, timeout=target.timeout_s)
            except grpc.aio.AioRpcError as error:
                if refusal_of(error).reason != "SESSION_NOT_FOUND":
                    raise

        with suppress(MetadataError):  # out of reach: it ends by itself within its time-to-live
            wait_s = min(self._client.timeout_s, _END_WAIT_S)
            await self._client.repeat(session.route, end, asyncio.get_running_loop().time() + wait_s)
