"""Who waits for which stream. On the event loop only; no store is asked.

A reader that finds too little registers for its streams and waits. Register first, then look: what comes in
between wakes as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable


class Waiter:
    """Waits for any of several streams. `changed` holds those that were told of and not yet taken."""

    __slots__ = ("_event", "changed", "is_over")

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.changed: set[int] = set()
        self.is_over = False

    def tell(self, stream_id: int) -> None:
        self.changed.add(stream_id)
        self._event.set()

    def give_up(self, _reason: object = None) -> None:
        """Wait no more: whoever asked has gone, or the broker stops."""
        self.is_over = True
        self._event.set()

    async def wait(self, timeout_s: float) -> set[int]:
        """The streams that changed since the last call; empty when time is up or it is over."""
        if not self._event.is_set():
            try:
                async with asyncio.timeout(timeout_s):
                    await self._event.wait()
            except TimeoutError:
                return set()
        if not self.is_over:
            self._event.clear()
        changed, self.changed = self.changed, set()
        return changed


class Wakeups:
    def __init__(self) -> None:
        self._by_stream: dict[int, set[Waiter]] = {}
        self._waiters: set[Waiter] = set()
        self._stopped = False

    def register(self, waiter: Waiter, streams: Iterable[int]) -> None:
        self._waiters.add(waiter)
        for stream_id in streams:
            self._by_stream.setdefault(stream_id, set()).add(waiter)
        if self._stopped:
            waiter.give_up()

    def unregister(self, waiter: Waiter, streams: Iterable[int]) -> None:
        self._waiters.discard(waiter)
        for stream_id in streams:
            waiting = self._by_stream.get(stream_id)
            if waiting is not None:
                waiting.discard(waiter)
                if not waiting:
                    del self._by_stream[stream_id]

    def wake(self, stream_id: int) -> None:
        for waiter in self._by_stream.get(stream_id, ()):
            waiter.tell(stream_id)

    def wake_all(self) -> None:
        """Changes were missed: everybody looks again."""
        for stream_id in self._by_stream:
            self.wake(stream_id)

    def stop(self) -> None:
        """Nobody waits any more, now or later."""
        self._stopped = True
        for waiter in self._waiters:
            waiter.give_up()
