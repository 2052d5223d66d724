"""Threads for blocking calls: so many, with a deadline for who waits and a way to say that nobody does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent import futures
from contextlib import suppress
from typing import Any, TypeVar

from dray.errors import ObjectStoreUnavailable

T = TypeVar("T")

# How long closing waits for calls under way: each ends at its next step, unless it hangs in the kernel.
_CLOSE_S = 2.0


class ThreadPool:
    """Work is handed over when a thread is free for it, and not before.

    The executor's own queue keeps what was given up, with the bodies it holds, until a thread comes to it: in
    front of a file system that hangs it would grow without end. So callers wait here instead.
    """

    def __init__(self, name: str, threads: int) -> None:
        self._executor = futures.ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._free = asyncio.Semaphore(threads)
        self._running: dict[futures.Future[Any], threading.Event] = {}
        self._closed = False

    async def run(self, work: Callable[[threading.Event], T], timeout_s: float) -> T:
        """What `work` returns or raises; `TimeoutError` after `timeout_s`, waiting for a thread included.

        `work` is given an event that is set once nobody waits for it any more, to look at between its steps.
        """
        abandoned = threading.Event()

        def start() -> T:
            stop_if(abandoned)
            return work(abandoned)

        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.wrap_future(await self._submit(start, abandoned))
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

    async def _submit(self, start: Callable[[], T], abandoned: threading.Event) -> futures.Future[T]:
        loop = asyncio.get_running_loop()

        def ended(done: futures.Future[T]) -> None:  # from its thread
            self._running.pop(done, None)
            with suppress(RuntimeError):  # the loop was closed before a call that hung came back
                loop.call_soon_threadsafe(self._free.release)

        self._check_open()
        await self._free.acquire()
        try:
            self._check_open()
            future = self._executor.submit(start)
        except BaseException:
            self._free.release()
            raise
        self._running[future] = abandoned
        future.add_done_callback(ended)
        return future

    def _check_open(self) -> None:
        if self._closed:
            raise ObjectStoreUnavailable("the object store was closed")


def stop_if(abandoned: threading.Event) -> None:
    if abandoned.is_set():
        raise ObjectStoreUnavailable("the call was given up or the object store closed")
