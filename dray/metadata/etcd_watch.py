"""One etcd watch: follows a key range over cuts of the connection and tells a feed.

It resumes behind the last revision that it has delivered whole, so that a cut loses and repeats
nothing. Where etcd has compacted that revision away, it subscribes at the current one first and then
announces the gap: what is written after the reader has read again is delivered.
"""

from __future__ import annotations

import asyncio
import random

import grpc
import grpc.aio

from dray.errors import MetadataError, Unavailable
from dray.metadata.etcd_client import EtcdClient, WatchStream
from dray.metadata.feed import Feed
from dray.metadata.layout import EntryOf, KeyOf, Layout
from dray.metadata.proto import etcd_pb2 as pb
from dray.metadata.store import Change, EntryChange, KeyChange

# Before subscribing again: at once for a lone cut, calmly at a server that keeps cutting.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0


class EtcdWatch:
    """`await open()`, then read `feed`; `await close()` ends it."""

    def __init__(self, client: EtcdClient, layout: Layout, start: bytes, end: bytes) -> None:
        self.feed = Feed()
        self._client = client
        self._layout = layout
        self._start = start
        self._end = end
        self._revision = 0  # all changes up to here were delivered, or were made before `open`
        self._stream: WatchStream | None = None
        self._task: asyncio.Task[None] | None = None
        self._ended = False

    async def open(self) -> None:
        created = await self._subscribe(0)
        self._revision = created.header.revision
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._end_feed(None)

    async def _run(self) -> None:
        try:
            pause_s = _FIRST_PAUSE_S
            while True:
                before = self._revision
                compacted = await self._deliver()
                pause_s = _FIRST_PAUSE_S if self._revision > before else min(pause_s * 2, _LONGEST_PAUSE_S)
                await asyncio.sleep(pause_s * random.uniform(0.5, 1))
                await self._resume(compacted)
        except MetadataError as error:
            self._end_feed(error)
        finally:
            self._end_feed(None)  # also for a bug: its reader must not wait for ever

    async def _deliver(self) -> bool:
        """Pass on what comes until the stream ends; True if the server has dropped changes."""
        assert self._stream is not None
        changes: list[Change] = []
        while True:
            try:
                response = await self._stream.read()
            except grpc.aio.AioRpcError:
                return False
            if not isinstance(response, pb.WatchResponse):
                return False
            if response.canceled:
                return response.compact_revision > 0
            changes.extend(change for event in response.events if (change := self._change(event)) is not None)
            if response.fragment:
                continue  # of one answer that was too long; a revision may go on in the next
            # The header can be ahead of the events while a late watcher catches up.
            last = response.events[-1].kv.mod_revision if response.events else response.header.revision
            self._revision = max(self._revision, last)
            self.feed.offer(tuple(changes))
            changes = []

    async def _resume(self, compacted: bool) -> None:
        while True:
            try:
                created = await self._subscribe(0 if compacted else self._revision + 1)
            except Unavailable:
                await asyncio.sleep(_LONGEST_PAUSE_S * random.uniform(0.5, 1))
            else:
                break
        if compacted:
            self._revision = created.header.revision
            self.feed.gap()

    async def _subscribe(self, revision: int) -> pb.WatchResponse:
        if self._stream is not None:
            self._stream.cancel()
        create = pb.WatchCreateRequest(
            key=self._start,
            range_end=self._end,
            start_revision=revision,
            progress_notify=True,  # keeps an idle watch's revision ahead of compaction
            fragment=True,
        )
        self._stream, created = await self._client.subscribe(create, self._client.deadline())
        return created

    def _change(self, event: pb.Event) -> Change | None:
        version = event.kv.mod_revision if event.type == pb.Event.PUT else None
        match self._layout.parse(event.kv.key.decode()):
            case KeyOf(key=key):
                return KeyChange(key, version)
            case EntryOf(sequence=sequence, position=position):
                return EntryChange(sequence, position, version)
            case None:
                return None

    def _end_feed(self, error: MetadataError | None) -> None:
        if self._stream is not None:
            self._stream.cancel()
        if not self._ended:
            self._ended = True
            self.feed.close(error)
