"""Change feeds from Oxia: one GetNotifications stream per shard, shared by all feeds on it.

Owns the streams and turns their batches into changes. A batch is one write, its offset that write's
place in the shard's log; a stream that was cut is resumed after the last offset seen, so nothing is
missed as long as the server kept it. What it kept no longer it leaves out without a word, also in a
stream that was never cut, if the reader was stopped for long: a hole in the offsets is all there is to
see. But the server also logs entries of its own that have no batch. So a hole is told as a gap unless
the server still has what came before it; at the place of a cut, where another server may have answered
before, always. That holes show, something must follow them: a silent stream is given a write to tell of.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import grpc.aio

from dray.errors import CorruptStore, IncompatibleStore, MetadataError, Unavailable
from dray.metadata.feed import Feed
from dray.metadata.layout import EntryOf, Layout
from dray.metadata.oxia_client import OxiaClient, Target, closed_under_us, describe
from dray.metadata.proto import oxia_pb2 as pb
from dray.metadata.store import Change, EntryChange, KeyChange

# A leader that is there starts the stream at once. One that does not in this time is asked anew.
_START_WAIT_S = 2.0
_PAUSE_S = 0.05
# How long a stream may be silent. One write per shard in that time, from whoever watches, is no load.
_SILENCE_S = 10.0


@dataclass(eq=False, slots=True)
class _Subscription:
    domain: int
    prefix: str | None
    feed: Feed
    moved: bool = False  # its domain changed shards, and its gap is yet to be told


class Watches:
    """All feeds of one store. `barrier` has the shard of a domain acknowledge a write."""

    def __init__(
        self,
        client: OxiaClient,
        layout: Layout,
        route: Callable[[int], str],
        barrier: Callable[[int], Awaitable[None]],
    ) -> None:
        self._client = client
        self._layout = layout
        self._route = route
        self._barrier = barrier
        self._streams: dict[int, _ShardStream] = {}
        self._closed = False

    @asynccontextmanager
    async def watch(self, domain: int, prefix: str | None) -> AsyncIterator[Feed]:
        deadline = self._client.deadline()
        shard = await self._client.find_shard(self._route(domain), deadline)
        if self._closed:
            raise Unavailable("the store is closed")
        subscription = _Subscription(domain, prefix, Feed())
        stream = self._join(shard, subscription)
        try:
            try:
                async with asyncio.timeout_at(deadline):
                    await stream.started.wait()
            except TimeoutError:
                raise Unavailable(f"no change feed from shard {shard}: {stream.problem}") from None
            if stream.failure is not None:
                raise stream.failure
            yield subscription.feed
        finally:
            await self._leave(subscription)

    async def close(self) -> None:
        self._closed = True
        streams = list(self._streams.values())
        self._streams.clear()
        for stream in streams:
            await stream.stop()
            stream.failure = Unavailable("the store was closed")
            stream.started.set()
            for subscription in stream.subscriptions:
                subscription.feed.close()

    def _join(self, shard: int, subscription: _Subscription) -> _ShardStream:
        stream = self._streams.get(shard)
        if stream is None or stream.failure is not None:
            stream = _ShardStream(shard, self._client, self._layout, self._barrier, self._still_here)
            self._streams[shard] = stream
        stream.join(subscription)
        return stream

    async def _leave(self, subscription: _Subscription) -> None:
        for shard, stream in list(self._streams.items()):
            stream.subscriptions.discard(subscription)
            # Another may have left, and stopped it, while this one waited.
            if not stream.subscriptions and self._streams.get(shard) is stream:
                del self._streams[shard]
                await stream.stop()

    def _still_here(self, stream: _ShardStream) -> bool:
        """Send away the feeds whose domain is in another shard by now; False if none is left."""
        for subscription in list(stream.subscriptions):
            shard = self._client.shard_of(self._route(subscription.domain))
            if shard is not None and shard != stream.shard:
                stream.subscriptions.discard(subscription)
                subscription.moved = True
                self._join(shard, subscription)
        if not stream.subscriptions and self._streams.get(stream.shard) is stream:
            del self._streams[stream.shard]
        return bool(stream.subscriptions)


@dataclass(eq=False)
class _ShardStream:
    shard: int
    client: OxiaClient
    layout: Layout
    barrier: Callable[[int], Awaitable[None]]
    still_here: Callable[[_ShardStream], bool]
    subscriptions: set[_Subscription] = field(default_factory=set)
    started: asyncio.Event = field(default_factory=asyncio.Event)  # also set by a failure
    failure: MetadataError | None = None
    problem: str = "it has not answered"

    def __post_init__(self) -> None:
        self._offset: int | None = None  # of the last batch seen
        self._task = asyncio.create_task(self._run())

    def join(self, subscription: _Subscription) -> None:
        self.subscriptions.add(subscription)
        if self.started.is_set():
            self._tell_moved()

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        stirring = asyncio.create_task(self._stir())
        try:
            while self.still_here(self):
                try:
                    await self._follow()
                except Unavailable as error:
                    self.problem = str(error)
                await asyncio.sleep(_PAUSE_S)
        except Exception as error:  # whatever it is, nobody may go on waiting for a feed that has ended
            failure = error if isinstance(error, MetadataError) else CorruptStore(f"change feed: {error!r}")
            self.failure = failure
            for subscription in self.subscriptions:
                subscription.feed.close(failure)
            self.started.set()
        finally:
            stirring.cancel()

    async def _stir(self) -> None:
        """Write something when nothing came for a while: a hole shows, or that the leader is another."""
        while True:
            before = self._offset
            await asyncio.sleep(_SILENCE_S)
            if self._offset == before and self.subscriptions:
                with suppress(MetadataError):  # what is wrong, the stream will say
                    await self.barrier(next(iter(self.subscriptions)).domain)

    async def _follow(self) -> None:
        """Take batches from the shard's leader until the stream is cut or the leader is another."""
        loop = asyncio.get_running_loop()
        async with self.client.leader(self.shard, loop.time() + _START_WAIT_S) as target:
            request = pb.NotificationsRequest(shard=self.shard, start_offset_exclusive=self._offset)
            call = target.stub.GetNotifications(request)
            try:
                with self.client.when_leader_changes(self.shard, call.cancel):
                    if self._offset is None:
                        async with asyncio.timeout(_START_WAIT_S):
                            first = await call.read()  # empty: says where the stream starts
                        if not isinstance(first, pb.NotificationBatch):
                            raise Unavailable(f"{target.address} ended the stream")
                        self._offset = first.offset
                    after_cut = self.started.is_set()
                    # At the start: what the log held up to here is readable only once a later write is
                    # acknowledged, and a reader who looks now must find it. After a cut: if all that was
                    # missed is no longer kept, only a later batch shows the hole.
                    await self.barrier(next(iter(self.subscriptions)).domain)
                    self.started.set()
                    self._tell_moved()
                    while isinstance(batch := await call.read(), pb.NotificationBatch):
                        if batch.offset != self._offset + 1 and (
                            after_cut or await self._oldest_kept(target) > self._offset
                        ):
                            self._gap()
                        after_cut = False
                        self._offset = batch.offset
                        self._deliver(batch)
            except TimeoutError:
                raise Unavailable(f"{target.address} does not start the stream") from None
            except grpc.aio.AioRpcError as error:
                refusal = self.client.note(self.shard, target.address, error)
                if refusal.reason == "NOTIFICATIONS_NOT_ENABLED":
                    raise IncompatibleStore("notifications are off in this Oxia namespace") from error
                raise Unavailable(f"{target.address}: {describe(error)}") from error
            except asyncio.CancelledError:
                if not closed_under_us():
                    raise
            finally:
                call.cancel()

    async def _oldest_kept(self, target: Target) -> int:
        call = target.stub.GetNotifications(
            pb.NotificationsRequest(shard=self.shard, start_offset_exclusive=-1)
        )
        try:
            async with asyncio.timeout(_START_WAIT_S):
                oldest = await call.read()
        finally:
            call.cancel()
        if not isinstance(oldest, pb.NotificationBatch):
            raise Unavailable(f"{target.address} ended the stream")
        return oldest.offset

    def _tell_moved(self) -> None:
        for subscription in self.subscriptions:
            if subscription.moved:
                subscription.moved = False
                subscription.feed.gap()

    def _gap(self) -> None:
        for subscription in self.subscriptions:
            subscription.feed.gap()

    def _deliver(self, batch: pb.NotificationBatch) -> None:
        changes: dict[int, list[Change]] = {}
        for notification in batch.notifications:
            what = notification.value
            if what.type == pb.KEY_RANGE_DELETED:  # nobody of ours does this; it does not name the keys
                self._gap()
                return
            place = self.layout.parse(notification.key)
            if place is None:
                continue
            version = None if what.type == pb.KEY_DELETED else what.version_id
            change: Change
            if isinstance(place, EntryOf):
                change = EntryChange(place.sequence, place.position, version)
            else:
                change = KeyChange(place.key, version)
            changes.setdefault(place.domain, []).append(change)
        for subscription in self.subscriptions:
            mine = changes.get(subscription.domain, ())
            prefix = subscription.prefix
            if prefix is not None:
                mine = [c for c in mine if isinstance(c, KeyChange) and c.key.startswith(prefix)]
            subscription.feed.offer(tuple(mine))
