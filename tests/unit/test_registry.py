"""Brokers that come, go, are killed and lose their session, as the registry of each sees it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from dray import registry as module
from dray.errors import CorruptStore, InvalidRequest, NodeIdTaken, OutcomeUnknown, Unavailable
from dray.metadata.keys import CLUSTER_DOMAIN
from dray.metadata.memory import MemoryData, MemorySession, MemoryStore
from dray.metadata.store import Expect, Expectation, MetadataStore
from dray.registry import BrokerRegistry, decode, encode
from dray.routing import BrokerInfo
from tests.conformance.backends import Backend, MemoryBackend, UrlBackend, sqlite_backend

TTL_MS = 2_000


class Cluster:
    """Brokers on one store, each with a client of its own, as processes have."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._stores: list[MetadataStore] = []
        self._registries: list[BrokerRegistry] = []
        self._running: dict[BrokerRegistry, asyncio.Task[None]] = {}

    async def store(self) -> MetadataStore:
        self._stores.append(await self.backend.open())
        return self._stores[-1]

    async def make(
        self,
        port: int,
        node_id: int | None = None,
        zone: str = "",
        store: MetadataStore | None = None,
        ttl_ms: int = TTL_MS,
    ) -> BrokerRegistry:
        made = BrokerRegistry(
            store or await self.store(),
            host="127.0.0.1",
            port=port,
            zone=zone,
            rack=zone or None,
            node_id=node_id,
            ttl_ms=ttl_ms,
            started_at_ms=1_700_000_000_000,
            version="1.2.3",
        )
        self._registries.append(made)
        return made

    async def start(
        self, port: int, node_id: int | None = None, zone: str = "", store: MetadataStore | None = None
    ) -> BrokerRegistry:
        made = await self.make(port, node_id, zone, store)
        await made.start()
        self._running[made] = asyncio.create_task(made.run())
        return made

    async def stop(self, registry: BrokerRegistry) -> None:
        await registry.close()
        await self._running.pop(registry)

    async def close(self) -> None:
        for registry in self._registries:
            await registry.close()
        await asyncio.gather(*self._running.values())
        for store in self._stores:
            await store.close()


@pytest.fixture(params=["memory", "memory-each-alone", "sqlite"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    if request.param == "sqlite":
        return sqlite_backend(tmp_path)
    return MemoryBackend(request.param, conditions_abort=request.param == "memory")


@pytest.fixture
async def cluster(backend: Backend) -> AsyncIterator[Cluster]:
    made = Cluster(backend)
    yield made
    await made.close()


@pytest.fixture
async def in_memory() -> AsyncIterator[Cluster]:
    made = Cluster(MemoryBackend("memory", conditions_abort=True))
    yield made
    await made.close()


async def until(registry: BrokerRegistry, condition: Callable[[], bool]) -> None:
    """Wait until the view of the registry has changed into this."""
    changed = asyncio.Event()
    registry._directory.subscribe(lambda segment: changed.set())
    async with asyncio.timeout(30):
        while not condition():
            changed.clear()
            await changed.wait()


def ids(registry: BrokerRegistry) -> list[int]:
    return [broker.node_id for broker in registry.brokers.all]


def session_of(registry: BrokerRegistry) -> MemorySession:
    assert isinstance(registry._session, MemorySession)
    return registry._session


async def test_brokers_get_the_first_free_ids_and_see_each_other(cluster: Cluster) -> None:
    one = await cluster.start(9001, zone="a")
    assert one.node_id == 0
    assert ids(one) == [0]
    two = await cluster.start(9002, zone="b")
    three = await cluster.start(9003, zone="a")
    assert (two.node_id, three.node_id) == (1, 2)
    for each in (one, two, three):
        await until(each, lambda each=each: ids(each) == [0, 1, 2])  # type: ignore[misc]
    assert one.brokers.all == two.brokers.all == three.brokers.all
    assert one.brokers.get(1) == BrokerInfo(1, "127.0.0.1", 9002, "b", "b", 1_700_000_000_000, "1.2.3")
    assert one.brokers is one.brokers


async def test_closing_deregisters_at_once_and_frees_the_id(cluster: Cluster) -> None:
    one, two, three = [await cluster.start(port) for port in (9001, 9002, 9003)]
    revision = one.brokers.revision
    await cluster.stop(two)
    await until(one, lambda: ids(one) == [0, 2])
    await until(three, lambda: ids(three) == [0, 2])
    assert one.brokers.revision > revision
    four = await cluster.start(9004)
    assert four.node_id == 1


async def test_ids_are_unique_when_all_start_at_once(cluster: Cluster) -> None:
    made = [await cluster.make(9000 + i) for i in range(8)]
    await asyncio.gather(*(each.start() for each in made))
    assert sorted(each.node_id for each in made) == list(range(8))
    for each in made:
        await until(each, lambda each=each: ids(each) == list(range(8)))  # type: ignore[misc]


async def test_a_given_id_is_taken(cluster: Cluster) -> None:
    one = await cluster.start(9001, node_id=1)
    two = await cluster.start(9002)
    three = await cluster.start(9003)
    assert [each.node_id for each in (one, two, three)] == [1, 0, 2]


async def test_a_given_id_of_another_broker_is_refused_in_the_end(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WAIT_TTLS", 0)
    one = await cluster.start(9001, node_id=7)
    two = await cluster.make(9002, node_id=7)
    with pytest.raises(NodeIdTaken, match=r"7 is taken by the broker at 127\.0\.0\.1:9001") as raised:
        await two.start()
    assert raised.value.node_id == 7
    assert ids(one) == [7]
    assert one.brokers.all[0].port == 9001


async def test_a_given_id_is_waited_for(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAIT_TTLS", 1_000)
    one = await cluster.start(9001, node_id=7)
    two = await cluster.make(9002, node_id=7)
    starting = asyncio.create_task(two.start())
    other = await cluster.start(9003)  # a change that is not the one waited for
    await until(two, lambda: two._directory.get(str(other.node_id)) is not None)
    assert not starting.done()
    await cluster.stop(one)
    await starting
    assert two.brokers.get(other.node_id) is not None
    assert two.brokers.get(7) == BrokerInfo(7, "127.0.0.1", 9002, "", None, 1_700_000_000_000, "1.2.3")


@pytest.mark.parametrize("given", [None, 1])
async def test_a_restarted_broker_takes_over_its_own_registration(
    cluster: Cluster, given: int | None
) -> None:
    """The old session is not over: only that its host and port are this broker's says that it is dead."""
    await cluster.start(9001)
    killed = await cluster.start(9002, zone="old")
    restarted = await cluster.start(9002, node_id=given, zone="new")
    assert restarted.node_id == killed.node_id == 1
    assert [broker.zone for broker in restarted.brokers.all] == ["", "new"]
    # When the old session ends at last, the new record stays: it is the new session's.
    await cluster.stop(killed)
    store = await cluster.store()
    await store.barrier(CLUSTER_DOMAIN)
    assert [record.key for record in await store.scan(CLUSTER_DOMAIN, "brokers", limit=10)] == [
        "brokers/0",
        "brokers/1",
    ]


KILLED = """
import asyncio, sys
from dray.metadata.opening import open_store
from dray.registry import BrokerRegistry

async def main():
    registry = BrokerRegistry(
        await open_store(sys.argv[1], 5.0), host="127.0.0.1", port=9002, zone="", rack=None, node_id=None,
        ttl_ms=2_000, started_at_ms=1, version="1.0",
    )
    await registry.start()
    print(registry.node_id, flush=True)
    await registry.run()

asyncio.run(main())
"""


async def test_a_process_that_was_killed(tmp_path: Path) -> None:
    """Restarted, it has its id at once. Not restarted, it vanishes when its session ends."""
    backend = sqlite_backend(tmp_path)
    assert isinstance(backend, UrlBackend)
    cluster = Cluster(backend)
    one = await cluster.start(9001)

    async def spawn_and_kill() -> None:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", KILLED, backend.url, stdout=asyncio.subprocess.PIPE
        )
        assert child.stdout is not None
        assert await child.stdout.readline() == b"1\n"
        child.kill()
        await child.wait()

    await spawn_and_kill()
    await spawn_and_kill()
    restarted = await cluster.start(9002)
    assert restarted.node_id == 1
    await cluster.stop(restarted)
    await spawn_and_kill()
    await until(one, lambda: 1 in ids(one))
    await until(one, lambda: ids(one) == [0])
    await cluster.close()


async def test_a_lost_session_is_replaced_and_the_id_stays(in_memory: Cluster) -> None:
    one, two = [await in_memory.start(port) for port in (9001, 9002)]
    await until(one, lambda: ids(one) == [0, 1])
    for _ in range(3):
        lost = session_of(two)
        lost.expire()
        await until(two, lambda lost=lost: two._session is not lost and "1" in two._directory.values())  # type: ignore[misc]
        assert two.node_id == 1
        await until(one, lambda: ids(one) == [0, 1])


async def test_no_two_registrations_of_a_broker_are_the_same(in_memory: Cluster) -> None:
    """Who knows one to be gone must not take the next one for gone."""
    one, two = [await in_memory.start(port) for port in (9001, 9002)]
    seen: set[int] = set()
    for _ in range(3):
        await until(one, lambda: one.registrations.get(1) == two.registration)
        assert await one.registration_of(1) == two.registration
        assert two.registration not in seen
        seen.add(two.registration)
        lost = session_of(two)
        lost.expire()
        assert await one.registration_of(1) is None
        await until(two, lambda: two.is_registered)


async def test_a_registration_is_not_made_twice(in_memory: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record was put, and could not be read then. Put again it would be another registration, while this
    one is believed to be the broker's."""
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0)
    one = await in_memory.make(9001)
    refresh, versions = one._directory.refresh, []

    async def shaky(segment: str) -> object:
        versions.append(one.registration)
        if len(versions) < 3:
            raise Unavailable("not now")
        return await refresh(segment)

    monkeypatch.setattr(one._directory, "refresh", shaky)
    await one.start()
    assert len(versions) == 3
    assert set(versions) == {one.registration}


async def test_a_broker_never_leaves_itself_out(in_memory: Cluster) -> None:
    """Somebody has to answer the client, and this broker is there."""
    store = await in_memory.store()
    one, two = [await in_memory.start(port) for port in (9001, 9002)]
    await store.delete(CLUSTER_DOMAIN, "brokers/1")
    await until(one, lambda: ids(one) == [0])
    await until(two, lambda: "1" not in two._directory.values())
    assert ids(two) == [0, 1]


async def test_a_broker_whose_id_was_taken_meanwhile_waits_for_it(
    in_memory: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    store = await in_memory.store()
    one = await in_memory.start(9001, store=store)
    other = BrokerInfo(0, "elsewhere", 9009, "", None, 0, "1.0")
    lost = session_of(one)
    lost.expire()
    await store.put(CLUSTER_DOMAIN, "brokers/0", encode(other), Expect.ABSENT)
    await until(one, lambda: one.brokers.all == (other,))
    for _ in range(50):  # all in memory: by then it has tried and waits
        await asyncio.sleep(0)
    assert "taken by elsewhere:9009" in caplog.text
    assert one.node_id == 0
    await store.delete(CLUSTER_DOMAIN, "brokers/0")
    await until(one, lambda: one.brokers.all != (other,) and "0" in one._directory.values())
    registered = one._directory.get("0")
    assert registered is not None
    assert registered.value == one.brokers.get(0)
    assert registered.value.port == 9001


async def test_a_late_watch_does_not_hide_the_broker_itself(in_memory: Cluster) -> None:
    """Who takes an id over is in its own view from the start, not who had the id before."""
    store = await in_memory.store()
    other = BrokerInfo(0, "elsewhere", 9009, "", None, 0, "1.0")
    await store.put(CLUSTER_DOMAIN, "brokers/0", encode(other))

    class Late(MemoryStore):
        """Whose watch says nothing of what another has deleted."""

        def watch(self, domain: int, prefix: str | None = None):  # type: ignore[no-untyped-def]
            return super().watch(domain, "nothing/")

    assert isinstance(store, MemoryStore)
    one = await in_memory.make(9001, node_id=0, store=Late(store._data))
    starting = asyncio.create_task(one.start())
    await until(one, lambda: one._directory.get("0") is not None)
    await store.delete(CLUSTER_DOMAIN, "brokers/0")
    one._changed.set()
    await starting
    assert [broker.port for broker in one.brokers.all] == [9001]


class ShakyStore(MemoryStore):
    """Sessions cannot be had, or puts in them end unknown, applied or not, as long as that is asked for."""

    no_sessions = 0
    goes: str | None = None  # a key that vanishes in that moment
    unknown: list[bool]

    def __init__(self, data: MemoryData) -> None:
        super().__init__(data)
        self.unknown = []

    def session(self, ttl_ms: int):  # type: ignore[no-untyped-def]
        if self.no_sessions:
            self.no_sessions -= 1
            raise Unavailable("not now")
        return _ShakySession(self, super().session(ttl_ms))


class _ShakySession:
    def __init__(self, store: ShakyStore, inner) -> None:  # type: ignore[no-untyped-def]
        self._store = store
        self._inner = inner

    async def __aenter__(self) -> MemorySession:
        session: MemorySession = await self._inner.__aenter__()
        put = session.put_ephemeral

        async def shaky(domain: int, key: str, value: bytes, expect: Expectation = Expect.ANY) -> int:
            if not self._store.unknown:
                return await put(domain, key, value, expect)
            if self._store.unknown.pop(0):
                await put(domain, key, value, expect)
            if self._store.goes is not None:
                await self._store.delete(domain, self._store.goes)
            for _ in range(50):  # all in memory: by then the view has seen it
                await asyncio.sleep(0)
            raise OutcomeUnknown("the connection was cut")

        session.put_ephemeral = shaky  # type: ignore[method-assign]
        return session

    async def __aexit__(self, *exc: object) -> None:
        await self._inner.__aexit__(*exc)


@pytest.mark.parametrize("unknown", [[True], [False], [True, True], [False, True, False]])
async def test_an_unknown_registration_is_resolved(
    in_memory: Cluster, unknown: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0)
    store = ShakyStore(data := MemoryData())
    store.unknown = list(unknown)
    store.no_sessions = 3
    one = await in_memory.start(9001, store=store)
    assert one.node_id == 0
    session_of(one).expire()
    store.no_sessions = 3
    store.unknown = list(unknown)
    await until(one, lambda: "0" in one._directory.values() and not store.unknown and not store.no_sessions)
    assert list(data.domain(CLUSTER_DOMAIN).records) == ["brokers/0"]


@pytest.mark.parametrize("applied", [True, False])
async def test_a_broker_is_never_registered_twice(
    in_memory: Cluster, applied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lower id gets free while it is not known whether this broker has, or will have, the next one."""
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0)
    store = ShakyStore(data := MemoryData())
    other = BrokerInfo(0, "elsewhere", 9009, "", None, 0, "1.0")
    await store.put(CLUSTER_DOMAIN, "brokers/0", encode(other))
    store.unknown, store.goes = [applied], "brokers/0"
    one = await in_memory.start(9001, store=store)
    assert one.node_id == 1
    assert list(data.domain(CLUSTER_DOMAIN).records) == ["brokers/1"]


async def test_a_setting_that_no_store_takes_is_told(in_memory: Cluster) -> None:
    one = await in_memory.make(9001, ttl_ms=1)
    with pytest.raises(InvalidRequest, match="session lives"):
        await one.start()


async def test_an_unreadable_registration_hides_no_other_and_its_id_is_left_alone(cluster: Cluster) -> None:
    store = await cluster.store()
    await store.put(CLUSTER_DOMAIN, "brokers/0", b"not json")
    await store.put(CLUSTER_DOMAIN, "brokers/none", encode(BrokerInfo(2, "h", 1, "", None, 0, "1")))
    one, two = await cluster.start(9001), await cluster.start(9002)
    assert (one.node_id, two.node_id) == (1, 2)
    await until(one, lambda: ids(one) == [1, 2])


def test_the_record_is_what_others_expect() -> None:
    """Another version of Dray reads it: this is stored, though not for long."""
    broker = BrokerInfo(3, "::1", 9092, "use1-az1", "r1", 1_700_000_000_000, "1.2.3")
    assert json.loads(encode(broker)) == {
        "brokerId": 3,
        "zoneId": "use1-az1",
        "rack": "r1",
        "advertisedListeners": [{"protocol": "PLAINTEXT", "host": "::1", "port": 9092}],
        "startedAt": 1_700_000_000_000,
        "buildInfo": {"version": "1.2.3"},
    }
    assert decode("brokers/3", encode(broker)) == broker
    later = {**json.loads(encode(broker)), "capacityHints": {"cores": 8}}
    assert decode("brokers/3", json.dumps(later).encode()) == broker


@pytest.mark.parametrize(
    "change",
    [
        {"brokerId": 4},
        {"brokerId": True},
        {"brokerId": -3},
        {"zoneId": None},
        {"rack": 1},
        {"advertisedListeners": []},
        {"advertisedListeners": ["127.0.0.1:9092"]},
        {"startedAt": "today"},
        {"buildInfo": "1.2.3"},
    ],
)
def test_what_no_broker_wrote_is_corrupt(change: dict[str, object]) -> None:
    record = {**json.loads(encode(BrokerInfo(3, "h", 9092, "a", None, 0, "1.2.3"))), **change}
    with pytest.raises(CorruptStore, match="brokers/3"):
        decode("brokers/3", json.dumps(record).encode())
