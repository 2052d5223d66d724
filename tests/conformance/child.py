"""Runs in a process of its own, so that the suite can stop or kill it.

hold URL DOMAIN KEY TTL_MS          hold a session with one key; say when it is lost
append URL DOMAIN SEQUENCE WRITER   append until killed; say each position after it was acknowledged
"""

from __future__ import annotations

import asyncio
import sys
from itertools import count

from dray.metadata.opening import open_store
from dray.metadata.store import Expect, NewEntry, Put


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def hold(url: str, domain: str, key: str, ttl_ms: str) -> None:
    store = await open_store(url)
    async with store.session(int(ttl_ms)) as session:
        await session.put_ephemeral(int(domain), key, b"mine")
        say("holding")
        await session.wait_lost()
        say("lost")
    await store.close()


async def append(url: str, domain: str, sequence: str, writer: str) -> None:
    store = await open_store(url)
    for number in count():
        name = f"{writer}-{number}"
        result = await store.append(
            int(domain),
            [NewEntry(sequence, 1 + number % 5, 10, name.encode())],
            [Put(f"witness/{name}", b"", Expect.ABSENT)],
        )
        say(f"{name} {result.entries[0].position.end_records}")


if __name__ == "__main__":
    asyncio.run({"hold": hold, "append": append}[sys.argv[1]](*sys.argv[2:]))
