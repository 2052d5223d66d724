"""Waits for a condition, in place of a sleep that hopes for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# For what takes a second at most: generous, since it is waited for in full only when the test fails.
LIMIT_S = 30.0
PAUSE_S = 0.02


def eventually(
    condition: Callable[[], T], what: str = "", limit_s: float = LIMIT_S, pause_s: float = PAUSE_S
) -> T:
    """What `condition` returns once it is true. Fails with what it returned last."""
    deadline = time.monotonic() + limit_s
    while not (got := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{what or 'the condition'} did not come true in {limit_s:g} s: {got!r}")
        time.sleep(pause_s)
    return got


async def eventually_async(condition: Callable[[], T], what: str = "", limit_s: float = LIMIT_S) -> T:
    """The same in a thread, while the event loop goes on."""
    return await asyncio.to_thread(eventually, condition, what, limit_s)
