"""The view of a directory on every store: what another client does is seen."""

from __future__ import annotations

import asyncio

import pytest

from dray.metadata.directory import Directory
from dray.metadata.store import MetadataStore
from tests.conformance.backends import Backend

DOMAIN = 3


async def test_a_view_follows_another_client(
    backend: Backend, store: MetadataStore, another: MetadataStore
) -> None:
    view: Directory[bytes] = Directory(store, DOMAIN, "brokers", lambda key, value: value)
    changed = asyncio.Event()
    view.subscribe(lambda segment: changed.set())

    async def until(expected: dict[str, bytes]) -> None:
        async with asyncio.timeout(30):
            while {segment: found.value for segment, found in view.values().items()} != expected:
                changed.clear()
                await changed.wait()

    await another.put(DOMAIN, "brokers/1", b"one")
    task = asyncio.create_task(view.run())
    await view.loaded()
    await until({"1": b"one"})
    owner = await backend.owner(DOMAIN, "brokers/3", 2_000)
    await another.put(DOMAIN, "brokers/2", b"two")
    version = await another.put(DOMAIN, "brokers/1", b"uno")
    found = await view.refresh("1")
    assert found is not None
    assert (found.value, found.version) == (b"uno", version)
    await until({"1": b"uno", "2": b"two", "3": b"mine"})
    await another.delete(DOMAIN, "brokers/2")
    await owner.die()
    await until({"1": b"uno"})
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
