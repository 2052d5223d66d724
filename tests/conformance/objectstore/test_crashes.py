"""`kill -9` of a process that puts: what it was told is there, and nothing is there in part."""

from __future__ import annotations

import asyncio
import sys

from dray.objectstore.opening import open_object_store
from tests.conformance.objectstore.child import content


async def test_a_killed_process_leaves_only_whole_objects(shared_url: str) -> None:
    acknowledged: set[int] = set()
    for stop_after in (1, 25):
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "tests.conformance.objectstore.child", "put", f"{shared_url}"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        assert child.stdout is not None
        seen = 0
        async for line in child.stdout:
            acknowledged.add(int(line))
            seen += 1
            if seen == stop_after:
                child.kill()
        await child.wait()
        assert seen >= stop_after

        store = await open_object_store(shared_url)
        found = [info.key for info in await store.list()]
        numbers = {int(key.rpartition("/")[2]) for key in found}
        assert acknowledged <= numbers
        for number in numbers:
            assert await store.get(f"{number % 10}/{number}") == content(number)
        await store.delete_many(found)  # the next one starts anew
        acknowledged.clear()
        assert await store.list() == []
        await store.close()
