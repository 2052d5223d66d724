"""Threads for blocking calls: so many, with a deadline for who waits and a way to say that nobody does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent import futures
from typing import Any, TypeVar

from dray.errors import ObjectStoreUnavailable

T = TypeVar("T")

# How long closing waits for calls under way: each ends at its next step, unless it hangs in the kernel.
_CLOSE_S = 2.0


class ThreadPool:
    """The queue in front of the threads holds one piece of work per waiting caller, and no more."""

    def __init__(self, name: str, threads: int) -> None:
        self._executor = futures.ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._running: dict[futures.Future[Any], threading.Event] = {}
        self._closed = False

    async def run(self, work: Callable[[threading.Event], T], timeout_s: float) -> T:
        """What `work` returns or raises; `TimeoutError` after `timeout_s`, waiting for a thread included.

        `work` is given an event that is set once nobody waits for it any more, to look at between its steps.
        """
        if self._closed:
            raise ObjectStoreUnavailable("the object store was closed")
        abandoned = threading.Event()

        def start() -> T:
            stop_if(abandoned)
            return work(abandoned)

        future = self._executor.submit(start)
        self._running[future] = abandoned
        future.add_done_callback(lambda done: self._running.pop(done, None))  # from its thread
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.wrap_future(future)
        finally:
            abandoned.set()

    @property
    def closed(self) -> bool:
        return self._closed

    async def close(self) -> None:
        self._closed = True
        running = self._running.copy()
        for abandoned in running.values():
            abandoned.set()
        await asyncio.to_thread(futures.wait, running, _CLOSE_S)
        self._executor.shutdown(wait=False)


def stop_if(abandoned: threading.Event) -> None:
    if abandoned.is_set():
        raise ObjectStoreUnavailable("the call was given up or the object store closed")
