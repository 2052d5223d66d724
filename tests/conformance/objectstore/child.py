"""Runs in a process of its own, so that the suite can kill it or take its rights away.

put URL             put objects that `content` describes until killed; say each key after it was acknowledged
limit URL BYTES     put an object above the size that the system allows to a file; say what was raised
nobody URL OPEN     open as a user without rights; say what was raised. OPEN is a place that can be opened
"""

from __future__ import annotations

import asyncio
import os
import random
import resource
import sys
from collections.abc import Callable, Coroutine
from itertools import count

from dray.errors import ObjectStoreError
from dray.objectstore.opening import open_object_store

AT_ONCE = 6
NOBODY = 65534


def content(number: int) -> bytes:
    return random.Random(number).randbytes(number * 7919 % 600_000)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def put(url: str) -> None:
    store = await open_object_store(url)
    numbers = count()

    async def go_on() -> None:
        for number in numbers:
            await store.put(f"{number % 10}/{number}", content(number), if_absent=number % 2 == 0)
            say(f"{number}")

    await asyncio.gather(*(go_on() for _ in range(AT_ONCE)))


async def limit(url: str, size: str) -> None:
    store = await open_object_store(url)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(size), int(size)))
    await store.put("fits", b"x" * int(size))
    try:
        await store.put("above", b"x" * (int(size) + 1))
    except ObjectStoreError as error:
        say(f"{type(error).__name__}: {error}")
    await store.close()


async def nobody(url: str, open_url: str) -> None:
    store = await open_object_store(open_url)  # imports what a user without rights might not be able to
    await store.close()
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    try:
        await open_object_store(url)
    except ObjectStoreError as error:
        say(f"{type(error).__name__}: {error}")


COMMANDS: dict[str, Callable[..., Coroutine[None, None, None]]] = {
    "put": put,
    "limit": limit,
    "nobody": nobody,
}

if __name__ == "__main__":
    asyncio.run(COMMANDS[sys.argv[1]](*sys.argv[2:]))
