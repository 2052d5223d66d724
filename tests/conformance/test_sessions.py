"""Ephemeral keys: they live while their owner does, and it learns of their loss (D-META-07, D-META-11)."""

from __future__ import annotations

import asyncio

import pytest

from dray.errors import InvalidRequest, SessionLost, VersionConflict
from dray.metadata.store import Expect, KeyChange, MetadataStore, Record
from tests.conformance.backends import Backend, Network, ServerBackend
from tests.conformance.test_watch import until
from tests.servers.proxy import Mode

D = 6
TTL_MS = 2_000


async def test_keys_live_as_long_as_the_session(store: MetadataStore, another: MetadataStore) -> None:
    async with store.session(TTL_MS) as session:
        version = await session.put_ephemeral(D, "brokers/1", b"here")
        other = await session.put_ephemeral(D + 1, "brokers/1", b"and here")
        assert await another.get(D, "brokers/1") == Record("brokers/1", b"here", version)
        assert await another.get(D + 1, "brokers/1") == Record("brokers/1", b"and here", other)
        assert not session.lost
    assert session.lost
    assert await another.get(D, "brokers/1") is None
    assert await another.get(D + 1, "brokers/1") is None
    with pytest.raises(SessionLost):
        await session.put_ephemeral(D, "brokers/1", b"too late")


async def test_a_renewed_session_outlives_its_time_to_live(
    store: MetadataStore, another: MetadataStore
) -> None:
    async with store.session(TTL_MS) as session:
        await session.put_ephemeral(D, "k", b"")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(TTL_MS / 1000 * 1.6):
                await session.wait_lost()
        assert await another.get(D, "k") is not None


async def test_ephemeral_puts_compare_too(store: MetadataStore, another: MetadataStore) -> None:
    async with store.session(TTL_MS) as mine, another.session(TTL_MS) as theirs:
        version = await mine.put_ephemeral(D, "lock", b"mine", Expect.ABSENT)
        with pytest.raises(VersionConflict):
            await theirs.put_ephemeral(D, "lock", b"theirs", Expect.ABSENT)
        await mine.put_ephemeral(D, "lock", b"mine still", version)
        with pytest.raises(VersionConflict):
            await mine.put_ephemeral(D, "lock", b"x", version)


async def test_a_plain_put_makes_a_key_permanent_and_another_session_takes_over(
    store: MetadataStore, another: MetadataStore
) -> None:
    async with another.session(TTL_MS) as outer:
        async with store.session(TTL_MS) as session:
            for key in ("kept", "taken", "gone"):
                await session.put_ephemeral(D, key, b"1")
            await store.put(D, "kept", b"2")
            await outer.put_ephemeral(D, "taken", b"2")
        assert {r.key for r in await store.scan(D, "", limit=10)} == {"kept", "taken"}
    assert {r.key for r in await store.scan(D, "", limit=10)} == {"kept"}


async def test_the_keys_of_a_killed_process_vanish(backend: Backend, store: MetadataStore) -> None:
    async with store.watch(D) as watch:
        owner = await backend.owner(D, "brokers/7", TTL_MS)
        assert await store.get(D, "brokers/7") is not None
        await owner.die()
        await until(watch, lambda seen: KeyChange("brokers/7", None) in seen)
    assert await store.get(D, "brokers/7") is None


async def test_an_owner_that_was_away_too_long_learns_that_it_lost(
    backend: Backend, store: MetadataStore
) -> None:
    async with store.watch(D) as watch:
        owner = await backend.owner(D, "brokers/8", TTL_MS)
        await owner.pause()
        await until(watch, lambda seen: KeyChange("brokers/8", None) in seen)
        await owner.resume()
        async with asyncio.timeout(20):
            await owner.wait_lost()


async def test_an_owner_cut_off_gives_up_by_itself(server_backend: ServerBackend, network: Network) -> None:
    """It cannot ask, but it can count: others have seen its keys vanish by then."""
    cut_off = await server_backend.open_through(network)
    async with cut_off.session(TTL_MS) as session:
        await session.put_ephemeral(D, "k", b"")
        for proxy in network.each():
            await proxy.set_mode(Mode.BLACK_HOLE)
        async with asyncio.timeout(10):
            await session.wait_lost()
        with pytest.raises(SessionLost):
            await session.put_ephemeral(D, "k", b"")
        for proxy in network.each():
            await proxy.set_mode(Mode.PASS)
    await cut_off.close()


async def test_short_interruptions_do_not_lose_a_session(
    server_backend: ServerBackend, network: Network
) -> None:
    watcher = await server_backend.open()
    flaky = await server_backend.open_through(network)
    async with flaky.session(TTL_MS) as session:
        await session.put_ephemeral(D, "k", b"")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(TTL_MS / 1000 * 1.5), asyncio.TaskGroup() as group:
                group.create_task(session.wait_lost())
                group.create_task(_cut_now_and_then(network))
        assert not session.lost
        assert await watcher.get(D, "k") is not None
    await flaky.close()
    await watcher.close()


async def _cut_now_and_then(network: Network) -> None:
    while True:
        await asyncio.sleep(0.5)
        network.cut()


@pytest.mark.parametrize("ttl_ms", [0, 1_999, 300_001])
async def test_a_time_to_live_out_of_range_is_refused(store: MetadataStore, ttl_ms: int) -> None:
    with pytest.raises(InvalidRequest):
        async with store.session(ttl_ms):
            pass
