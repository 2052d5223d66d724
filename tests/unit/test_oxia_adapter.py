"""The Oxia store where Oxia is special: its traps, its leaders, its change feed.

Each trap is one that a real server was seen to fall into (`test_oxia_server.py` shows them over raw
gRPC). Here callers try to get there through the store and cannot. What needs no control over the
server runs on whatever Oxia there is, under a root of its own; the rest on stand-ins.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import grpc.aio
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from dray.errors import (
    InvalidRequest,
    NoSuchNamespace,
    OutcomeUnknown,
    SessionLost,
    TooLarge,
    Unavailable,
    VersionConflict,
)
from dray.metadata.lease import Lease
from dray.metadata.oxia import OxiaStore
from dray.metadata.oxia_client import Refusal, refusal_of
from dray.metadata.proto import oxia_pb2 as pb
from dray.metadata.proto.oxia_pb2_grpc import OxiaClientStub
from dray.metadata.store import (
    Changes,
    Delete,
    EntryChange,
    Gap,
    KeyChange,
    NewEntry,
    Position,
    Put,
    Watch,
    WatchEvent,
)
from tests.servers.oxia import StandInServer
from tests.servers.proxy import Mode, TcpProxy

MIB = 2**20
WEDGE = bytes(65 * MIB)  # one more than a segment of Oxia's log holds


@pytest.fixture
def root() -> str:
    return f"test-{secrets.token_hex(6)}/"


@pytest.fixture
async def store(oxia_address: str, root: str) -> AsyncIterator[OxiaStore]:
    opened = await OxiaStore.open(oxia_address, "default", root)
    yield opened
    await opened.close()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandInServer]:
    """Two addresses, of which one leads; which one, depends on the tests before."""
    server = StandInServer(tmp_path_factory.mktemp("pair"), follower=True, namespaces=["second"])
    server.start()
    yield server
    server.kill()


@pytest.fixture
async def counted(pair: StandInServer, root: str) -> AsyncIterator[OxiaStore]:
    """A store on the pair, with no calls counted yet."""
    opened = await OxiaStore.open(pair.address, "default", root)
    await opened.put(0, "warm", b"up")
    pair.control.forget_calls()
    yield opened
    await opened.close()


@pytest.fixture
async def proxies(pair: StandInServer) -> AsyncIterator[dict[str, TcpProxy]]:
    async with AsyncExitStack() as stack:
        made = {}
        for address in (pair.address, pair.follower_address):
            assert address is not None
            made[address] = TcpProxy(address)
            await made[address].start()
            stack.push_async_callback(made[address].stop)
        yield made


def entry(sequence: str = "stream", records: int = 1, size: int = 1, value: bytes = b"") -> NewEntry:
    return NewEntry(sequence, records, size, value)


async def filled(store: OxiaStore, count: int, sequence: str = "stream") -> list[tuple[Position, int]]:
    result = await store.append(0, [entry(sequence) for _ in range(count)])
    return [(assigned.position, assigned.version) for assigned in result.entries]


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while True:
            if holds():
                return
            await asyncio.sleep(0.02)


async def read_event(watch: Watch) -> WatchEvent:
    return await asyncio.wait_for(anext(watch), 5)


async def read_keys(watch: Watch, count: int) -> list[str]:
    """The next keys that changed; anything else fails."""
    keys: list[str] = []
    while len(keys) < count:
        event = await read_event(watch)
        assert isinstance(event, Changes), event
        for change in event.changes:
            assert isinstance(change, KeyChange)
            keys.append(change.key)
    return keys


async def assignments(address: str) -> list[pb.ShardAssignment]:
    async with grpc.aio.insecure_channel(address) as channel:
        call = OxiaClientStub(channel).GetShardAssignments(pb.ShardAssignmentsRequest(namespace="default"))
        message = await call.read()
        assert isinstance(message, pb.ShardAssignments)
        call.cancel()
        return list(message.namespaces["default"].assignments)


async def leader_of(pair: StandInServer) -> str:
    return (await assignments(pair.address))[0].leader


# --- traps -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        entry(records=0),
        entry(records=-1),
        entry(records=2**31),
        entry(size=-1),
        entry(size=2**41),
        entry(sequence=""),
        entry(sequence="/stream"),
        entry(sequence="stream//x"),
        entry(sequence="stream/"),
        entry(sequence="a\0b"),
        entry(sequence="\ud800"),
    ],
    ids=repr,
)
async def test_a_poisonous_entry_is_not_sent(counted: OxiaStore, pair: StandInServer, bad: NewEntry) -> None:
    """Oxia logs a malformed sequence put before it fails, and cannot recover the shard from that log."""
    with pytest.raises(InvalidRequest):
        await counted.append(0, [entry(), bad], [Put("key", b"")])
    assert "Write" not in pair.control.calls()
    assert await counted.tail(0, "stream") is None


async def test_a_shard_recovers_from_everything_that_appends_can_do(tmp_path: Path) -> None:
    """Poison shows when the log is replayed: with the names that Oxia confuses, in every combination."""
    server = StandInServer(tmp_path)
    server.start()
    store = await OxiaStore.open(server.address, "default")
    names = [
        "idx",
        "idx-1",
        "idx-10",
        "p",
        "p+q",
        "t",
        "t+a-b",
        "d/s",
        "d/s/child",
        "x ",
        "%2F",
        "ü",
        "-",
        "-1",
    ]
    keys = [f"s/{name}/-{5:020d}-{5:020d}" for name in ("idx", "t", "p")]
    try:
        for turn in range(1, 4):
            result = await store.append(
                0, [entry(name, 2, 0) for name in names], [Put(key, b"") for key in keys]
            )
            assert [a.position for a in result.entries] == [Position(2 * turn, 0)] * len(names)
        server.kill()
        server.start()
        assert [await store.tail(0, name) is not None for name in names] == [True] * len(names)
        again = await store.append(0, [entry(name, 1, 1) for name in names])
        assert [a.position for a in again.entries] == [Position(7, 1)] * len(names)
    finally:
        await store.close()
        server.kill()


async def test_a_request_that_would_wedge_the_shard_is_not_sent(
    counted: OxiaStore, pair: StandInServer
) -> None:
    """A request larger than a segment of Oxia's log stops all later writes to the shard."""
    [(at, version)] = await filled(counted, 1)
    async with counted.session(10_000) as session:
        pair.control.forget_calls()
        with pytest.raises(TooLarge):
            await counted.put(0, "key", WEDGE)
        with pytest.raises(TooLarge):
            await counted.append(0, [entry(value=WEDGE)])
        with pytest.raises(TooLarge):
            await counted.append(0, [], [Put("key", WEDGE)])
        with pytest.raises(TooLarge):
            await counted.swap(0, "stream", at, version, WEDGE, [])
        with pytest.raises(TooLarge):
            await session.put_ephemeral(0, "key", WEDGE)
        with pytest.raises(TooLarge):
            await counted.append(0, [], [Put(f"{i}/" + "n" * 4000, b"") for i in range(1000)])
        with pytest.raises(TooLarge):
            await counted.append(0, [], [], [Delete(str(i)) for i in range(1001)])
        assert "Write" not in pair.control.calls()
    assert await counted.put(0, "key", b"still writable") >= 0


async def test_the_largest_append_is_taken(store: OxiaStore) -> None:
    """Names that are escaped make a request three times as long as `limits` counts; that must fit too."""
    name = "ü" * 500
    many = [entry(f"{name}{i}", value=b"v" * 100) for i in range(1_000)]
    size = store.limits.size(many, [], [])
    assert store.limits.max_bytes * 0.9 < size <= store.limits.max_bytes
    result = await store.append(0, many)
    assert {a.position for a in result.entries} == {Position(1, 1)}


async def test_the_tail_of_a_sequence_cannot_be_removed(store: OxiaStore, root: str) -> None:
    """Oxia would give the positions of a deleted tail out again."""
    run = await filled(store, 3)
    tail, version = run[2]
    for positions in ([tail], [Position(4, 4)], [run[0][0], tail], [Position(3, 0)]):
        with pytest.raises(InvalidRequest):
            await store.swap(0, "stream", tail, version, b"", positions)
    raw = f"{root}0/s/stream/-{3:020d}-{3:020d}"
    for key in (raw, raw.removeprefix(f"{root}0/"), "../s/stream/-" + raw.rpartition("/-")[2]):
        assert not await store.delete(0, key)
    with pytest.raises(VersionConflict):
        await store.swap(0, "stream", tail, version + 1000, b"", [run[0][0], run[1][0]])
    assert len(await store.entries(0, "stream", 0, 10)) == 3
    await store.swap(0, "stream", tail, version, b"all", [run[0][0], run[1][0]])
    assert [e.position for e in await store.entries(0, "stream", 0, 10)] == [tail]
    assert [position for position, _ in await filled(store, 1)] == [Position(4, 4)]


@pytest.mark.parametrize("version", [-1, 0, 2**63 - 1, 2**70])
async def test_a_swap_never_makes_an_entry(store: OxiaStore, version: int) -> None:
    """A key above the tail would move the sequence; to Oxia -1 means "must not exist"."""
    await filled(store, 1)
    for sequence, at in (("stream", Position(50, 50)), ("other", Position(1, 1))):
        with pytest.raises((VersionConflict, InvalidRequest)):
            await store.swap(0, sequence, at, version, b"", [])
    assert [position for position, _ in await filled(store, 1)] == [Position(2, 2)]
    assert await store.tail(0, "other") is None


async def test_a_version_below_zero_is_not_must_not_exist(store: OxiaStore) -> None:
    with pytest.raises(InvalidRequest):
        await store.put(0, "key", b"", -1)
    with pytest.raises(InvalidRequest):
        await store.delete(0, "key", -1)
    assert await store.get(0, "key") is None


async def test_removing_many_entries_uses_no_range_delete(counted: OxiaStore, pair: StandInServer) -> None:
    """A range whose ends differ in depth deletes all over the shard, and has no condition."""
    run: list[tuple[Position, int]] = []
    for _ in range(3):
        run += await filled(counted, 800)
    await counted.append(0, [entry("neighbour")], [Put("a/b/c/d", b"")])
    pair.control.forget_calls()
    await counted.swap(0, "stream", *run[-1], b"all", [position for position, _ in run[:-1]])
    assert pair.control.calls() == {"Write": 1 + 3, "DeleteRange": 0}  # 2,399 deletes, 1,000 in a request
    assert [e.value for e in await counted.entries(0, "stream", 0, 10)] == [b"all"]
    assert await counted.tail(0, "neighbour") is not None
    assert await counted.get(0, "a/b/c/d") is not None


async def test_a_search_past_the_end_does_not_find_the_neighbour(store: OxiaStore) -> None:
    """Oxia's floor and ceiling search the whole shard."""
    await store.append(0, [entry("a"), entry("c")], [Put("k", b""), Put("z", b"")])
    assert await store.ceiling(0, "a", 2) is None
    assert await store.floor(0, "c", 0) is None
    for name in ("b", "0", "~"):
        assert await store.ceiling(0, name, 0) is None
        assert await store.floor(0, name, 2**62) is None
        assert await store.tail(0, name) is None
        assert await store.entries(0, name, 0, 10) == []
    assert await store.ceiling(0, "a", 2**80) is None
    found = await store.floor(0, "a", 2**80)
    assert found is not None
    assert found.position == Position(1, 1)


async def test_a_scan_stays_in_its_directory(store: OxiaStore) -> None:
    for key in ("a", "a/1", "a/ü", "a/1/deep", "a-", "a0", "a0/1", "b/1"):
        await store.put(0, key, b"")
    assert [r.key for r in await store.scan(0, "a", limit=100)] == ["a/1", "a/ü"]
    assert [r.key for r in await store.scan(0, "", limit=100)] == ["a", "a-", "a0"]
    assert [r.key for r in await store.scan(0, "a", start="2", limit=100)] == ["a/ü"]


async def test_every_append_gets_its_own_answer(counted: OxiaStore, pair: StandInServer) -> None:
    """On Oxia's write stream a failed request shifts the answers of all later ones."""

    async def append(number: int) -> None:
        value = str(number).encode()
        if number % 5 == 0:
            with pytest.raises(InvalidRequest):
                await counted.append(0, [entry(records=0)])
        result = await counted.append(0, [entry(records=number + 1, value=value)])
        end = result.entries[0].position.end_records
        at = await counted.ceiling(0, "stream", end)
        assert at is not None
        assert (at.position.end_records, at.value) == (end, value)

    await asyncio.gather(*(append(number) for number in range(40)))
    assert "WriteStream" not in pair.control.calls()
    assert pair.control.calls()["Write"] == 40


async def test_reads_after_a_barrier_are_not_stale(
    pair: StandInServer, proxies: dict[str, TcpProxy], root: str
) -> None:
    """A former leader that has not noticed answers reads with what it knew, and names itself the leader."""
    former = await leader_of(pair)
    [now] = {*proxies} - {former}
    ours = await OxiaStore.open(former, "default", root, dial=lambda address: proxies[address].address)
    await ours.append(0, [entry(value=b"old")], [Put("key", b"old")])
    pair.control.stale()
    theirs = await OxiaStore.open(now, "default", root)
    try:
        await theirs.append(0, [entry(value=b"new")], [Put("key", b"new")])
        stale = await ours.get(0, "key")
        assert stale is not None
        assert stale.value == b"old", "the stand-in is to answer with old values, else this tests nothing"
        await ours.barrier(0)
        for _ in range(2):
            record, tail = await ours.get(0, "key"), await ours.tail(0, "stream")
            assert record is not None
            assert tail is not None
            assert (record.value, tail.value) == (b"new", b"new")
            assert [r.value for r in await ours.scan(0, "", limit=1)] == [b"new"]
            assert len(await ours.entries(0, "stream", 0, 10)) == 2
            # Only the former leader can be asked for assignments now, and it names itself.
            pair.control.forget_calls()
            await proxies[now].set_mode(Mode.REFUSE)
            for proxy in proxies.values():
                proxy.cut()
            await eventually(lambda: pair.control.calls().get("GetShardAssignments", 0) > 0)
            await asyncio.sleep(0.05)
            await proxies[now].set_mode(Mode.PASS)
    finally:
        pair.control.settle()
        await ours.close()
        await theirs.close()


# --- leaders -----------------------------------------------------------------------------------------


async def test_a_moved_leader_is_followed_live(counted: OxiaStore, pair: StandInServer) -> None:
    """The assignment stream tells; a moment later nothing is sent to the wrong server any more."""
    for turn in range(1, 4):
        pair.control.move()
        result = await counted.append(0, [entry()])
        assert result.entries[0].position == Position(turn, turn)
    async with asyncio.timeout(5):
        while True:
            pair.control.forget_calls()
            await counted.put(0, "key", b"")
            if pair.control.calls()["Write"] == 1:
                break


async def test_a_refusal_names_the_leader(counted: OxiaStore, pair: StandInServer) -> None:
    """A former leader's assignments are no help here: they still name itself."""
    pair.control.stale()
    started = time.monotonic()
    try:
        result = await counted.append(0, [entry()])
        assert result.entries[0].position == Position(1, 1)
        assert time.monotonic() - started < 1
        assert pair.control.calls()["Write"] == 2
    finally:
        pair.control.settle()


@pytest.mark.parametrize("assignments_from", ["the other", "the silent"])
async def test_a_leader_that_went_silent_does_not_eat_the_deadline(
    pair: StandInServer, proxies: dict[str, TcpProxy], root: str, assignments_from: str
) -> None:
    leader = await leader_of(pair)
    [other] = {*proxies} - {leader}
    store = await OxiaStore.open(
        other, "default", root, timeout_s=4, dial=lambda address: proxies[address].address
    )
    try:
        await store.put(0, "key", b"value")
        if assignments_from == "the silent":
            await proxies[other].set_mode(Mode.REFUSE)
            proxies[other].cut()
            await asyncio.sleep(0.3)
            await proxies[other].set_mode(Mode.PASS)
        await proxies[leader].set_mode(Mode.BLACK_HOLE)
        read = asyncio.create_task(store.get(0, "key"))
        await asyncio.sleep(0.1)
        pair.control.move()
        record = await read
        assert record is not None
        assert record.value == b"value"
    finally:
        await proxies[leader].set_mode(Mode.PASS)
        await store.close()


async def test_a_watch_and_a_session_outlive_a_move(counted: OxiaStore, pair: StandInServer) -> None:
    async with counted.session(2_000) as session, counted.watch(0) as watch:
        await session.put_ephemeral(0, "mine", b"")
        expected = ["mine"]
        for turn in range(4):
            pair.control.move()
            for number in range(5):
                expected.append(f"{turn}-{number}")
                await counted.put(0, expected[-1], b"")
        assert await read_keys(watch, len(expected)) == expected
        pair.control.forget_calls()
        await eventually(lambda: pair.control.calls().get("KeepAlive", 0) >= 2)
        assert not session.lost
        assert await counted.get(0, "mine") is not None
    assert session.lost
    assert await counted.get(0, "mine") is None


# --- opening and closing -----------------------------------------------------------------------------


async def test_a_namespace_that_does_not_exist(oxia_address: str) -> None:
    with pytest.raises(NoSuchNamespace, match="nowhere"):
        await OxiaStore.open(oxia_address, "nowhere")


@pytest.mark.parametrize("namespace", ["", "dray/c1", "a b", "..", "a..b", "-x", "ü"])
async def test_a_malformed_namespace(namespace: str) -> None:
    """Oxia makes directories of them; nothing is asked."""
    with pytest.raises(InvalidRequest):
        await OxiaStore.open("127.0.0.1:1", namespace)


@pytest.mark.parametrize("root", ["x", "/", "a//", "/a/", "r" * 300 + "/"])
async def test_a_malformed_root(root: str) -> None:
    with pytest.raises(InvalidRequest):
        await OxiaStore.open("127.0.0.1:1", "default", root)


async def test_namespaces_and_roots_are_apart(pair: StandInServer, root: str) -> None:
    stores = [
        await OxiaStore.open(pair.address, "default", root),
        await OxiaStore.open(pair.address, "second", root),
        await OxiaStore.open(pair.address, "default", root + "x/"),
    ]
    for number, store in enumerate(stores):
        await store.append(0, [entry(value=b"%d" % number)], [Put("key", b"%d" % number)])
    for number, store in enumerate(stores):
        record = await store.get(0, "key")
        assert record is not None
        assert record.value == b"%d" % number
        assert [e.value for e in await store.entries(0, "stream", 0, 10)] == [b"%d" % number]
        await store.close()


async def test_opening_ends_in_time_where_nothing_answers(proxies: dict[str, TcpProxy]) -> None:
    [silent, *_] = proxies.values()
    await silent.set_mode(Mode.BLACK_HOLE)
    for address in ("127.0.0.1:1", silent.address):
        started = time.monotonic()
        with pytest.raises(Unavailable):
            await OxiaStore.open(address, "default", timeout_s=0.5)
        assert 0.4 < time.monotonic() - started < 1.0
    await silent.set_mode(Mode.PASS)


async def test_closing_ends_calls_under_way(
    pair: StandInServer, proxies: dict[str, TcpProxy], root: str
) -> None:
    """With an error of ours, not as if their callers had been cancelled."""
    before = asyncio.all_tasks()
    leader = await leader_of(pair)
    store = await OxiaStore.open(leader, "default", root, dial=lambda address: proxies[address].address)
    async with store.watch(0) as watch:
        await store.put(0, "key", b"")
        assert await read_keys(watch, 1) == ["key"]
        await proxies[leader].set_mode(Mode.DROP_ANSWERS)
        under_way = [
            asyncio.create_task(store.get(0, "key")),
            asyncio.create_task(store.put(0, "key", b"")),
            asyncio.create_task(store.scan(0, "", limit=1)),
            asyncio.create_task(store.barrier(0)),
            asyncio.create_task(read_event(watch)),
        ]
        await asyncio.sleep(0.1)
        await store.close()
        await store.close()
        outcomes = await asyncio.gather(*under_way, return_exceptions=True)
    ends = [Unavailable, OutcomeUnknown, Unavailable, Unavailable, StopAsyncIteration]
    assert [type(outcome) for outcome in outcomes] == ends
    for call in (store.get(0, "key"), store.put(0, "key", b""), store.barrier(0), store.tail(0, "stream")):
        with pytest.raises(Unavailable):
            await call
    for context in (store.watch(0), store.session(2_000)):
        with pytest.raises(Unavailable):
            await context.__aenter__()
    await proxies[leader].set_mode(Mode.PASS)
    # Those of the proxy stay until gRPC hangs up: when nothing refers to its calls any more.
    await eventually(
        lambda: not [t for t in asyncio.all_tasks() - before if not repr(t.get_coro()).count("TcpProxy")]
    )


async def test_closing_ends_calls_that_wait_for_a_server(tmp_path: Path, root: str) -> None:
    """Nothing of them was sent."""
    server = StandInServer(tmp_path)
    server.start()
    store = await OxiaStore.open(server.address, "default", root, timeout_s=2)
    server.kill()
    with pytest.raises(Unavailable):  # by then the connection is known to be gone
        await store.get(0, "key")
    contexts = [store.watch(5), store.session(2_000)]
    calls = [
        store.get(0, "key"),
        store.put(0, "key", b""),
        store.delete(0, "key"),
        store.append(0, [entry()]),
        store.swap(0, "stream", Position(1, 1), 1, b"", []),
        store.scan(0, "", limit=1),
        store.tail(0, "stream"),
        store.entries(0, "stream", 0, 1),
        store.barrier(0),
        *(context.__aenter__() for context in contexts),
    ]
    under_way = [asyncio.create_task(call) for call in calls]
    await asyncio.sleep(0.2)
    started = time.monotonic()
    await store.close()
    outcomes = await asyncio.gather(*under_way, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [Unavailable] * len(calls)
    assert time.monotonic() - started < 1


async def test_closing_takes_as_long_as_ending_one_session(tmp_path: Path, root: str) -> None:
    server = StandInServer(tmp_path)
    server.start()
    store = await OxiaStore.open(server.address, "default", root, timeout_s=1)
    async with AsyncExitStack() as stack:
        for _ in range(5):
            await stack.enter_async_context(store.session(60_000))
        server.kill()
        started = time.monotonic()
        await store.close()
        assert time.monotonic() - started < 2


async def test_closing_ends_sessions(store: OxiaStore, oxia_address: str, root: str) -> None:
    another = await OxiaStore.open(oxia_address, "default", root)
    async with another.session(60_000) as session:
        await session.put_ephemeral(5, "mine", b"")
        await another.close()
        await asyncio.wait_for(session.wait_lost(), 1)
        assert await store.get(5, "mine") is None
        with pytest.raises(SessionLost):
            await session.put_ephemeral(5, "mine", b"")


# --- round trips, and how often something is sent ----------------------------------------------------


async def test_one_round_trip_each(counted: OxiaStore, pair: StandInServer) -> None:
    async def calls() -> dict[str, int]:
        made = {name: count for name, count in pair.control.calls().items() if count}
        pair.control.forget_calls()
        return made

    many = [entry(f"stream-{i}", value=b"v") for i in range(200)]
    await counted.append(
        0, many, [Put(f"k/{i}", b"") for i in range(200)], [Delete(f"d{i}") for i in range(50)]
    )
    assert await calls() == {"Write": 1}
    for read in (counted.ceiling, counted.floor):
        assert await read(0, "stream-7", 1) is not None
        assert await calls() == {"Read": 1}
    tail = await counted.tail(0, "stream-7")
    assert tail is not None
    assert await calls() == {"Read": 1}
    await counted.get(0, "k/1")
    assert await calls() == {"Read": 1}
    await counted.entries(0, "stream-7", 0, 5)
    assert await calls() == {"RangeScan": 1}
    await counted.scan(0, "k", limit=5)
    assert await calls() == {"RangeScan": 1}
    await counted.put(0, "k/1", b"")
    assert await calls() == {"Write": 1}
    await counted.delete(0, "k/1")
    assert await calls() == {"Write": 1}
    await counted.swap(0, "stream-7", tail.position, tail.version, b"", [])
    assert await calls() == {"Write": 1}
    await counted.barrier(0)
    assert await calls() == {"Write": 1}
    await asyncio.gather(*(counted.barrier(0) for _ in range(20)))
    assert await calls() == {"Write": 2}  # one was under way when the others came; those share the next


async def test_a_write_without_an_answer_is_sent_once(
    pair: StandInServer, proxies: dict[str, TcpProxy], root: str
) -> None:
    leader = await leader_of(pair)
    store = await OxiaStore.open(
        leader, "default", root, timeout_s=1, dial=lambda address: proxies[address].address
    )
    another = await OxiaStore.open(leader, "default", root)
    try:
        await store.append(0, [entry()])
        pair.control.forget_calls()
        await proxies[leader].set_mode(Mode.DROP_ANSWERS)
        with pytest.raises(OutcomeUnknown):
            await store.append(0, [entry()])
        await proxies[leader].set_mode(Mode.REFUSE)
        proxies[leader].cut()
        await asyncio.sleep(0.1)  # until the store can see that
        with pytest.raises(Unavailable):
            await store.append(0, [entry()])
        tail = await another.tail(0, "stream")
        assert tail is not None
        assert tail.position == Position(2, 2)
        assert pair.control.calls()["Write"] == 1
    finally:
        await store.close()
        await another.close()


# --- where things are stored -------------------------------------------------------------------------


async def test_the_stored_form(store: OxiaStore, oxia_address: str, root: str) -> None:
    """Keys, and the shard they are in, are promises to the data that is there already."""
    await store.append(7, [entry("my/stream", 3, 9, b"e")], [Put("wal/x", b"r")])
    hashed = xxhash.xxh3_64_intdigest(f"{root}7".encode()) % 2**32
    [shard] = [
        one
        for one in await assignments(oxia_address)
        if one.int32_hash_range.min_hash_inclusive <= hashed <= one.int32_hash_range.max_hash_inclusive
    ]
    keys = [f"{root}7/k/wal/x", f"{root}7/s/my%2Fstream/-00000000000000000003-00000000000000000009"]
    async with grpc.aio.insecure_channel(shard.leader) as channel:
        gets = [pb.GetRequest(key=key, include_value=True) for key in keys]
        reading = OxiaClientStub(channel).Read(pb.ReadRequest(shard=shard.shard, gets=gets))
        found = [one async for message in reading for one in message.gets]
    assert [(one.status, one.value) for one in found] == [(pb.OK, b"r"), (pb.OK, b"e")]


# --- watches -----------------------------------------------------------------------------------------


@pytest.fixture
def forgetful_server(tmp_path: Path) -> Iterator[StandInServer]:
    """One that keeps five notifications."""
    server = StandInServer(tmp_path, notifications_kept=5)
    server.start()
    yield server
    server.kill()


@pytest.fixture
async def forgetful(
    forgetful_server: StandInServer, root: str
) -> AsyncIterator[tuple[OxiaStore, OxiaStore, TcpProxy]]:
    """A store behind a proxy, and one that is not."""
    server = forgetful_server
    proxy = TcpProxy(server.address)
    await proxy.start()
    ours = await OxiaStore.open(server.address, "default", root, dial=lambda address: proxy.address)
    theirs = await OxiaStore.open(server.address, "default", root)
    yield ours, theirs, proxy
    await ours.close()
    await theirs.close()
    await proxy.stop()


async def test_a_cut_watch_misses_nothing(forgetful: tuple[OxiaStore, OxiaStore, TcpProxy]) -> None:
    ours, theirs, proxy = forgetful
    async with ours.watch(0) as watch, ours.watch(0, "a/") as prefixed:
        for turn in range(3):
            await proxy.set_mode(Mode.REFUSE)
            proxy.cut()
            keys = [f"a/{turn}-{number}" for number in range(3)]
            for key in keys:
                await theirs.put(0, key, b"")
            await proxy.set_mode(Mode.PASS)
            assert await read_keys(watch, 3) == keys
            assert await read_keys(prefixed, 3) == keys


async def test_changes_no_longer_kept_are_a_gap(forgetful: tuple[OxiaStore, OxiaStore, TcpProxy]) -> None:
    """Oxia goes on silently with the oldest that it has, or waits for the next if it has none."""
    ours, theirs, proxy = forgetful
    async with ours.watch(0) as watch, ours.watch(0, "no/such/prefix") as uninterested:
        await proxy.set_mode(Mode.REFUSE)
        proxy.cut()
        for number in range(20):
            await theirs.put(0, f"missed-{number}", b"")
        await proxy.set_mode(Mode.PASS)
        assert await read_event(watch) == Gap()
        assert await read_event(uninterested) == Gap()
        assert len(await ours.scan(0, "", limit=100)) == 20
        await theirs.put(0, "after", b"")
        async with asyncio.timeout(5):
            while await read_keys(watch, 1) != ["after"]:
                pass  # of those kept, some may still come


@pytest.mark.parametrize("more", ["some are still kept", "none is, and nothing more is written"])
async def test_a_reader_that_was_stopped_is_told_of_it(
    forgetful: tuple[OxiaStore, OxiaStore, TcpProxy],
    forgetful_server: StandInServer,
    more: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its stream was never cut: it goes on behind a hole, with the oldest that the server still has."""
    monkeypatch.setattr("dray.metadata.oxia_watch._SILENCE_S", 0.5)
    ours, theirs, proxy = forgetful
    long = "n" * 4000  # the server sends ahead of the reader, but not all of 15 MB
    async with ours.watch(0) as watch:
        await proxy.set_mode(Mode.BLACK_HOLE)
        for turn in range(15):
            await theirs.append(0, [], [Put(f"{turn}-{number}-{long}", b"") for number in range(250)])
        if more == "none is, and nothing more is written":
            forgetful_server.control.forget_batches()
        await proxy.set_mode(Mode.PASS)
        seen = 0
        while isinstance(event := await read_event(watch), Changes):
            seen += len(event.changes)
            assert seen < 15 * 250, "nothing was missed, so this tests nothing"
        assert event == Gap()
        await theirs.put(0, "after", b"")
        async with asyncio.timeout(5):
            while await read_keys(watch, 1) != ["after"]:
                pass  # of those kept, some may still come


async def test_what_the_server_logs_for_itself_is_no_gap(counted: OxiaStore, pair: StandInServer) -> None:
    """It does so every few minutes in every shard; to read everything again each time is too much."""
    async with counted.watch(0) as watch:
        for number in range(3):
            pair.control.checksum()
            await counted.put(0, str(number), b"")
        assert await read_keys(watch, 3) == ["0", "1", "2"]


async def test_a_range_delete_by_others_is_a_gap(store: OxiaStore, oxia_address: str, root: str) -> None:
    """Its notification does not name the keys."""
    await store.put(0, "a/1", b"")
    ends = pb.DeleteRangeRequest(start_inclusive=f"{root}0/k/a/", end_exclusive=f"{root}0/k/a//")
    async with store.watch(0) as watch:
        for one in await assignments(oxia_address):
            async with grpc.aio.insecure_channel(one.leader) as channel:
                request = pb.WriteRequest(shard=one.shard, delete_ranges=[ends])
                await OxiaClientStub(channel).Write(request)
        assert await read_event(watch) == Gap()
        assert await store.scan(0, "a", limit=10) == []


async def test_one_write_is_one_event_for_each_feed(store: OxiaStore) -> None:
    """All domains of a shard share a stream; a barrier is nobody's change."""
    async with AsyncExitStack() as stack:
        feeds = [await stack.enter_async_context(store.watch(domain)) for domain in range(8)]
        keys_only = await stack.enter_async_context(store.watch(3, "a"))
        for domain in range(8):
            await store.barrier(domain)
            await store.append(domain, [entry(f"s{domain}")], [Put("a", b""), Put("b", b"")])
        for domain, feed in enumerate(feeds):
            event = await read_event(feed)
            assert isinstance(event, Changes)
            named = {c.sequence if isinstance(c, EntryChange) else c.key for c in event.changes}
            assert named == {f"s{domain}", "a", "b"}
        assert await read_keys(keys_only, 1) == ["a"]


async def test_one_stream_per_shard_while_somebody_watches(counted: OxiaStore, pair: StandInServer) -> None:
    async with AsyncExitStack() as stack:
        for _ in range(20):
            await stack.enter_async_context(counted.watch(0))
        assert pair.control.calls()["GetNotifications"] == 1
    async with counted.watch(0):
        assert pair.control.calls()["GetNotifications"] == 2


# --- sessions ----------------------------------------------------------------------------------------


async def test_a_session_that_the_server_forgot_is_lost_everywhere(
    store: OxiaStore, oxia_address: str, root: str
) -> None:
    """Sessions are per shard; the loss of one ends them all, also one that has put nothing yet."""
    async with store.session(2_000) as idle, store.session(2_000) as session:
        for domain in range(8):
            await session.put_ephemeral(domain, "mine", b"")
        assert not session.lost
        await _end_session_of(oxia_address, f"{root}5/k/mine")
        with pytest.raises(SessionLost):
            for domain in range(8):
                await session.put_ephemeral(domain, "mine", b"")
        await asyncio.wait_for(session.wait_lost(), 5)
        with pytest.raises(SessionLost):
            await session.put_ephemeral(0, "other", b"")
        assert not idle.lost


async def test_a_renewal_that_hangs_leaves_time_for_another() -> None:
    renewals = 0

    async def renew() -> bool:
        nonlocal renewals
        renewals += 1
        await asyncio.sleep(0.2 if renewals == 1 else 0.02)  # a third of the time-to-live, or an answer
        if renewals == 1:
            raise Unavailable("no answer")
        return True

    lease = Lease(600, renew, asyncio.get_running_loop().time())
    await eventually(lambda: renewals == 3)
    assert not lease.lost
    await lease.stop()


async def test_a_session_cut_off_with_a_former_leader_is_lost(
    pair: StandInServer, proxies: dict[str, TcpProxy], root: str
) -> None:
    """That leader goes on renewing it, while the others have seen its keys vanish."""
    former = await leader_of(pair)
    [now] = {*proxies} - {former}
    ours = await OxiaStore.open(former, "default", root, dial=lambda address: proxies[address].address)
    try:
        async with ours.session(2_000) as session:
            await session.put_ephemeral(0, "mine", b"")
            await ours.barrier(0)
            await proxies[now].set_mode(Mode.REFUSE)
            proxies[now].cut()
            pair.control.stale()
            await asyncio.wait_for(session.wait_lost(), 3)
    finally:
        pair.control.settle()
        await ours.close()


async def test_a_session_outlives_a_leader_that_does_not_know_it_was_replaced(
    pair: StandInServer, root: str
) -> None:
    former = await leader_of(pair)
    ours = await OxiaStore.open(former, "default", root)
    try:
        async with ours.session(2_000) as session:
            await session.put_ephemeral(0, "mine", b"")
            await ours.barrier(0)
            pair.control.stale()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(session.wait_lost(), 3)
            assert await ours.get(0, "mine") is not None
    finally:
        pair.control.settle()
        await ours.close()


async def _end_session_of(address: str, key: str) -> None:
    """Close, behind its owner's back, the session that holds `key`."""
    for one in await assignments(address):
        async with grpc.aio.insecure_channel(one.leader) as channel:
            stub = OxiaClientStub(channel)
            answer = await stub.Read(pb.ReadRequest(shard=one.shard, gets=[pb.GetRequest(key=key)])).read()
            assert isinstance(answer, pb.ReadResponse)
            if answer.gets[0].status == pb.OK:
                session_id = answer.gets[0].version.session_id
                await stub.CloseSession(pb.CloseSessionRequest(shard=one.shard, session_id=session_id))
                return
    raise AssertionError("no such key")


# --- refusals ----------------------------------------------------------------------------------------


def _refused(details: bytes) -> grpc.aio.AioRpcError:
    trailers = grpc.aio.Metadata(("grpc-status-details-bin", details))
    return grpc.aio.AioRpcError(grpc.StatusCode.ABORTED, grpc.aio.Metadata(), trailers)


def test_the_refusal_of_a_real_server_is_read() -> None:
    """Taken from the wire: google.rpc.Status with an ErrorInfo."""
    details = (
        b"\x08\n\x12\x18oxia: node is not leader\x1ap\n(type.googleapis.com/google.rpc.ErrorInfo\x12D"
        b"\n\x12NODE_IS_NOT_LEADER\x12\x07oxia.io\x1a\n\n\x05shard\x12\x010"
        b"\x1a\x19\n\x06leader\x12\x0f127.0.0.1:26643"
    )
    assert refusal_of(_refused(details)) == Refusal("NODE_IS_NOT_LEADER", "127.0.0.1:26643")
    for cut in range(len(details)):
        assert refusal_of(_refused(details[:cut])) != Refusal("NODE_IS_NOT_LEADER", "127.0.0.1:26643")


@given(st.binary(max_size=200))
def test_unreadable_details_are_no_refusal(details: bytes) -> None:
    assert isinstance(refusal_of(_refused(details)), Refusal)
