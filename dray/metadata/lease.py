"""The owner's side of a session, shared by the stores that renew over a connection.

It knows when the session was last certainly alive and gives it up when that is longer ago than its
time-to-live, whether or not the store could be asked: an owner that cannot renew must assume that
others have seen its keys vanish.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from dray.errors import MetadataError, SessionLost


class Lease:
    """Renews by calling `renew` three times per time-to-live until that says no or time runs out.

    `renew` returns False when the store no longer knows the session; a `MetadataError` from it means
    "could not tell" and is tried again. `asked_at`, of the loop's clock, is when the session was asked
    for: like a renewal it counts from when it was sent, not from its answer.
    """

    def __init__(self, ttl_ms: int, renew: Callable[[], Awaitable[bool]], asked_at: float) -> None:
        self._ttl_s = ttl_ms / 1000
        self._renew = renew
        self._alive_at = asked_at
        self._over = asyncio.Event()
        self._task = asyncio.create_task(self._keep())

    @property
    def lost(self) -> bool:
        return self._over.is_set()

    def check(self) -> None:
        if self.lost:
            raise SessionLost("the session is over; make a new one")

    def lose(self) -> None:
        self._over.set()

    async def wait_lost(self) -> None:
        await self._over.wait()

    async def stop(self) -> None:
        """End renewing. The session counts as over from here on."""
        self._over.set()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _keep(self) -> None:
        try:
            await self._renew_until_lost()
        finally:  # whatever ended it: nobody renews any more
            self._over.set()

    async def _renew_until_lost(self) -> None:
        loop = asyncio.get_running_loop()
        sent_at = self._alive_at
        while not self.lost:
            deadline = self._alive_at + self._ttl_s
            # A third after the last was sent, not after it failed: one that hung is followed at once.
            due = min(sent_at + self._ttl_s / 3, deadline)
            await asyncio.sleep(max(due - loop.time(), 0))
            sent_at = loop.time()
            try:
                async with asyncio.timeout_at(deadline):
                    if not await self._renew():
                        break
                self._alive_at = sent_at
            except TimeoutError:
                break
            except MetadataError:
                if loop.time() >= deadline:
                    break
