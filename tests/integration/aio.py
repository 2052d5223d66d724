"""aiokafka for tests that are no coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from aiokafka.admin import AIOKafkaAdminClient  # type: ignore[import-untyped]

T = TypeVar("T")


def in_own_loop(work: Coroutine[Any, Any, T]) -> T:
    """In a thread of its own: the one that runs the tests has an event loop already."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def with_aiokafka(address: str, work: Callable[[Any], Awaitable[T]], **settings: str) -> T:
    """What `work` returns, which gets an admin client."""

    async def run() -> T:
        admin = AIOKafkaAdminClient(bootstrap_servers=address, **settings)
        await admin.start()
        try:
            return await work(admin)
        finally:
            await admin.close()

    return in_own_loop(run())
