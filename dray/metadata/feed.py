"""The receiving end of a watch, shared by all stores: a bounded queue that turns overflow into a gap."""

from __future__ import annotations

import asyncio
from collections import deque

from dray.errors import MetadataError
from dray.metadata.store import Change, Changes, Gap, WatchEvent

# About 10 MiB of change objects. A reader further behind than this is better off reading again.
MAX_PENDING_CHANGES = 65_536


class Feed:
    """Filled by a store on its event loop, read by one watcher."""

    def __init__(self, max_pending: int = MAX_PENDING_CHANGES) -> None:
        self._events: deque[WatchEvent] = deque()
        self._pending = 0
        self._max_pending = max_pending
        self._wake = asyncio.Event()
        self._closed = False
        self._error: MetadataError | None = None

    def offer(self, changes: tuple[Change, ...]) -> None:
        """Queue what one write did, or several writes in order."""
        if not changes or self._closed:
            return
        if self._pending + len(changes) > self._max_pending:
            self.gap()
            return
        self._events.append(Changes(changes))
        self._pending += len(changes)
        self._wake.set()

    def gap(self) -> None:
        """Say that changes were missed. What was queued is covered by that and dropped."""
        self._events.clear()
        self._events.append(Gap())
        self._pending = 0
        self._wake.set()

    def close(self, error: MetadataError | None = None) -> None:
        """End the feed after what is queued: with `error`, or cleanly."""
        self._closed = True
        self._error = error
        self._wake.set()

    def __aiter__(self) -> Feed:
        return self

    async def __anext__(self) -> WatchEvent:
        while not self._events:
            if self._closed:
                if self._error is not None:
                    raise self._error
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        event = self._events.popleft()
        if isinstance(event, Changes):
            self._pending -= len(event.changes)
        return event
