"""What is particular to the etcd store. What all stores share is in `tests/conformance/`."""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from itertools import pairwise
from pathlib import Path

import grpc
import grpc.aio
import pytest

from dray.errors import (
    AccessDenied,
    OutcomeUnknown,
    StartConflict,
    StoreFull,
    TooLarge,
    Unavailable,
    VersionConflict,
)
from dray.metadata.etcd import EtcdStore
from dray.metadata.proto import etcd_pb2 as pb
from dray.metadata.proto.etcd_pb2_grpc import AuthStub, KVStub
from dray.metadata.store import (
    Changes,
    Delete,
    Entry,
    EntryChange,
    Expect,
    Gap,
    KeyChange,
    NewEntry,
    Position,
    Put,
)
from tests.servers.etcd import EtcdCluster, EtcdServer
from tests.servers.proxy import Mode, TcpProxy

D = 3


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """Not the one that other tests share: this one gets compacted."""
    made = EtcdServer(tmp_path_factory.mktemp("etcd"))
    made.start()
    yield made
    made.kill()


@pytest.fixture(scope="module")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    flags = ["--max-txn-ops=16", "--max-request-bytes=65536", "--quota-backend-bytes=4000000"]
    made = EtcdServer(tmp_path_factory.mktemp("small-etcd"), flags)
    made.start()
    yield made
    made.kill()


@pytest.fixture
def root(request: pytest.FixtureRequest) -> str:
    return f"/{request.node.name}"


@pytest.fixture
async def store(server: EtcdServer, root: str) -> AsyncIterator[EtcdStore]:
    opened = await EtcdStore.open([server.address], root)
    yield opened
    await opened.close()


@pytest.fixture
async def another(server: EtcdServer, root: str) -> AsyncIterator[EtcdStore]:
    opened = await EtcdStore.open([server.address], root)
    yield opened
    await opened.close()


@pytest.fixture
async def proxy(server: EtcdServer) -> AsyncIterator[TcpProxy]:
    made = TcpProxy(server.address)
    await made.start()
    yield made
    await made.stop()


class Requests:
    """How many requests a block took: `with Requests(store) as sent: ...; assert sent() == 1`."""

    def __init__(self, store: EtcdStore) -> None:
        self._store = store

    def __enter__(self) -> Callable[[], int]:
        before = self._store.requests_sent
        return lambda: self._store.requests_sent - before

    def __exit__(self, *_: object) -> None:
        pass


def one(sequence: str, records: int = 5, expected_start: int | None = None) -> NewEntry:
    return NewEntry(sequence, records, 10 * records, b"v", expected_start)


# Round trips


async def test_an_append_to_known_sequences_is_one_round_trip(store: EtcdStore) -> None:
    with Requests(store) as sent:
        await store.append(D, [one("a"), one("b")])
        assert sent() == 2  # where do they end, and the append
    with Requests(store) as sent:
        result = await store.append(
            D, [one("a", expected_start=5), one("b"), one("a")], [Put("k", b"", Expect.ABSENT)], [Delete("x")]
        )
        assert sent() == 1
    assert [e.position.end_records for e in result.entries] == [10, 10, 15]


@pytest.mark.parametrize("read", ["tail", "entries", "ceiling"])
async def test_reading_the_end_of_a_sequence_makes_the_next_append_one_round_trip(
    store: EtcdStore, another: EtcdStore, read: str
) -> None:
    await store.append(D, [one("s"), one("s")])
    tail = await store.tail(D, "s")
    assert tail is not None
    # A replaced last entry is newer than the tail record, which must still be recognised.
    await store.swap(D, "s", tail.position, tail.version, b"replaced", [])
    reads: dict[str, Callable[[], Awaitable[object]]] = {
        "tail": lambda: another.tail(D, "s"),
        "entries": lambda: another.entries(D, "s", 0, 10),
        "ceiling": lambda: another.ceiling(D, "s", 6),
    }
    await reads[read]()
    with Requests(another) as sent:
        result = await another.append(D, [one("s", expected_start=10)])
        assert sent() == 1
    assert result.entries[0].position == Position(15, 150)


async def test_a_page_of_entries_is_not_taken_for_the_end(store: EtcdStore, another: EtcdStore) -> None:
    """All entries of one append have the revision of the tail record; only the last one is the tail."""
    await store.append(D, [one("s"), one("s"), one("s")])
    assert len(await another.entries(D, "s", 0, 2)) == 2
    result = await another.append(D, [one("s")])
    assert result.entries[0].position.end_records == 20


async def test_round_trips_of_reads(store: EtcdStore, another: EtcdStore) -> None:
    await store.append(D, [one("s")])
    for expected, what in ((2, "cold"), (1, "known")):
        with Requests(another) as sent:
            tail = await another.tail(D, "s")
            assert tail is not None
            assert tail.position == Position(5, 50)
            assert sent() == expected, what
    await store.append(D, [one("s")])
    with Requests(another) as sent:
        tail = await another.tail(D, "s")
        assert tail is not None
        assert tail.position.end_records == 10
        assert sent() == 2
    for lookup in (store.ceiling(D, "s", 3), store.floor(D, "s", 9), store.entries(D, "s", 0, 9)):
        with Requests(store) as sent:
            assert await lookup
            assert sent() == 1
    with Requests(store) as sent:
        last = await store.floor(D, "s", 10**15)
        assert last is not None
        assert last.position.end_records == 10
        assert sent() == 2  # not a walk down from there


async def test_floor_agrees_with_a_search_through_all_entries(store: EtcdStore) -> None:
    """Windows grow: entries far apart, close together, and at the windows' edges."""
    sizes = [1, 1, 1_022, 1, 5_000_000, 3, 40_000, 1_024, 1_025, 2_000_000_000, 1]
    for size in sizes:
        await store.append(D, [one("s", size)])
    ends = [e.position.end_records for e in await store.entries(D, "s", 0, 100)]
    for n in sorted({max(end + d, 0) for end in ends for d in (-1_025, -1_024, -1, 0, 1, 1_024)}):
        found = await store.floor(D, "s", n)
        assert (found and found.position.end_records) == max((e for e in ends if e <= n), default=None), n


async def test_a_scan_skips_what_lies_deeper(store: EtcdStore) -> None:
    for begin in range(0, 600, 100):
        await store.append(D, [], [Put(f"d/big/{n:03}", b"") for n in range(begin, begin + 100)])
    await store.append(D, [], [Put(f"d/{name}", b"") for name in ("a", "big", "big-", "big0", "z")])
    with Requests(store) as sent:
        found = await store.scan(D, "d", limit=5)
        assert sent() <= 3
    assert [record.key for record in found] == ["d/a", "d/big", "d/big-", "d/big0", "d/z"]


# Conflicts


async def test_an_append_finds_its_place_behind_another_writers(store: EtcdStore, another: EtcdStore) -> None:
    await store.append(D, [one("s"), one("quiet")])
    await another.append(D, [one("s", 7)])
    with Requests(store) as sent:
        result = await store.append(D, [one("quiet"), one("s")])
        assert sent() == 2  # refused, with the truth in the refusal
    assert [e.position.end_records for e in result.entries] == [10, 17]


async def test_a_stale_expected_start_is_refused_with_the_truth(store: EtcdStore, another: EtcdStore) -> None:
    await store.append(D, [one("s"), one("t")])
    await another.append(D, [one("s", 7)])
    with Requests(store) as sent:
        with pytest.raises(StartConflict) as conflict:
            await store.append(D, [one("t"), one("s", expected_start=5)])
        assert sent() == 1
    assert (conflict.value.sequence, conflict.value.expected, conflict.value.actual) == ("s", 5, 12)
    assert len(await another.entries(D, "t", 0, 9)) == 1


async def test_an_expected_start_is_not_refused_by_a_tail_that_was_only_remembered(
    store: EtcdStore, another: EtcdStore
) -> None:
    """The caller may know more than the store, from a watch."""
    await store.append(D, [one("s")])
    await another.append(D, [one("s", 7)])
    result = await store.append(D, [one("s", expected_start=12)])
    assert result.entries[0].position.end_records == 17


async def test_a_refused_condition_leaves_nothing(store: EtcdStore, another: EtcdStore) -> None:
    await store.append(D, [one("s")], [Put("k", b"first")])
    for puts, deletes in (([Put("k", b"2", Expect.ABSENT)], []), ([Put("new", b"")], [Delete("k", 1)])):
        with pytest.raises(VersionConflict) as conflict:
            await store.append(D, [one("s")], puts, deletes)
        assert conflict.value.key == "k"
    assert await another.get(D, "new") is None
    tail = await another.tail(D, "s")
    assert tail is not None
    assert tail.position.end_records == 5


# Limits


@pytest.mark.parametrize("name", ["s", "ü" * 1_500, "%/" * 700 + "%"])
async def test_what_passes_the_limits_fits_into_a_request(store: EtcdStore, name: str) -> None:
    """Names are escaped, three times as long, and said four times in an append."""
    puts = [Put("key", b"", Expect.ABSENT), Put(f"{name.replace('/', '-')}-2", b"", Expect.ABSENT)]
    names = [f"{name}{n:02}" for n in range(20)]
    room = store.limits.max_bytes - store.limits.size([NewEntry(s, 1, 1, b"") for s in names], puts, [])
    entries = [NewEntry(s, 1, 1, b"v" * (room // 20 + (n < room % 20))) for n, s in enumerate(names)]
    assert store.limits.size(entries, puts, []) == store.limits.max_bytes
    assert len((await store.append(D, entries, puts)).entries) == 20
    entries[0] = NewEntry(names[0], 1, 1, entries[0].value + b"v")
    with Requests(store) as sent:
        with pytest.raises(TooLarge):
            await store.append(D, entries, puts)
        assert sent() == 0


async def test_a_value_of_one_mebibyte_fits(store: EtcdStore) -> None:
    value = random.randbytes(2**20)
    version = await store.put(D, "k", value)
    await store.append(D, [NewEntry("s", 1, 1, value)], [Put("wal/1", b"", Expect.ABSENT)])
    tail = await store.tail(D, "s")
    assert tail is not None
    assert tail.value == value
    await store.swap(D, "s", tail.position, tail.version, value[::-1], [])
    assert (await store.get(D, "k")) is not None
    with pytest.raises(TooLarge):
        await store.put(D, "k", value + value, version)
    with pytest.raises(TooLarge):
        await store.swap(D, "s", tail.position, tail.version, value + value, [])


async def test_the_most_entries_of_one_append(store: EtcdStore) -> None:
    result = await store.append(D, [one(f"s{n}", expected_start=0) for n in range(64)])
    assert len(result.entries) == 64
    with pytest.raises(TooLarge):
        await store.append(D, [one(f"s{n}") for n in range(65)])


async def test_a_server_that_allows_less_than_configured_says_so(small_server: EtcdServer, root: str) -> None:
    store = await EtcdStore.open([small_server.address], root)
    with pytest.raises(TooLarge):
        await store.append(D, [one(f"s{n}") for n in range(10)])
    with pytest.raises(TooLarge):
        await store.put(D, "k", bytes(70_000))
    with pytest.raises(TooLarge):
        await store.put(D, "k", bytes(1_000_000))  # gRPC's own limit, half a mebibyte higher
    await store.close()


async def test_a_swap_of_more_than_fits_into_one_request(small_server: EtcdServer, root: str) -> None:
    store = await EtcdStore.open([small_server.address], root, max_operations=16, max_request_bytes=65_536)
    for _ in range(10):
        await store.append(D, [one("s", 1)] * 5)
    *covered, last = await store.entries(D, "s", 0, 100)
    deletes = [entry.position for entry in covered[10:]]
    with pytest.raises(VersionConflict):
        await store.swap(D, "s", last.position, last.version - 1, b"no", deletes)
    assert len(await store.entries(D, "s", 0, 100)) == 50
    with Requests(store) as sent:
        version = await store.swap(D, "s", last.position, last.version, b"all", deletes)
        assert sent() == 3  # 15 + 16 + 8
    assert await store.entries(D, "s", 11, 100) == [Entry(last.position, b"all", version)]
    with Requests(store) as sent:
        await store.append(D, [one("s", expected_start=50)])
        assert sent() == 1
    await store.close()


async def test_a_full_server(small_server: EtcdServer, root: str) -> None:
    store = await EtcdStore.open([small_server.address], root)
    await store.append(D, [one("s")])
    with pytest.raises(StoreFull):
        for n in range(200):
            with contextlib.suppress(OutcomeUnknown):
                await store.put(D, f"fill/{n}", bytes(60_000))
    with pytest.raises(StoreFull):
        await store.append(D, [one("s")], [Put("witness", b"", Expect.ABSENT)])
    assert await store.get(D, "witness") is None
    assert [e.position.end_records for e in await store.entries(D, "s", 0, 9)] == [5]
    assert await store.delete(D, "fill/0")  # room can be made
    await store.close()


async def test_a_server_that_gets_full_under_load(tmp_path: Path) -> None:
    """Around that moment etcd refuses writes that it has applied: those must not pass for refused."""
    server = EtcdServer(tmp_path, ["--quota-backend-bytes=6000000", "--unsafe-no-fsync"])
    server.start()
    outcomes: dict[str, type[Exception] | None] = {}

    async def fill(store: EtcdStore, writer: int) -> None:
        for n in range(1_000):
            key = f"{writer}/{n}"
            outcomes[key] = None
            try:
                await store.append(writer, [NewEntry("s", 1, 1, bytes(20_000))], [Put(key, b"")])
            except (StoreFull, OutcomeUnknown) as error:
                outcomes[key] = type(error)
                return

    try:
        store = await EtcdStore.open([server.address], "/x")
        await asyncio.gather(*(fill(store, writer) for writer in range(100)))
        for key, outcome in outcomes.items():
            writer = int(key.split("/")[0])
            there = await store.get(writer, key) is not None
            assert outcome is OutcomeUnknown or there == (outcome is None), key
        with pytest.raises(StoreFull):
            await store.put(D, "k", b"")
        await store.close()
    finally:
        server.kill()


# Watching


async def test_a_watch_over_a_compaction_says_gap(
    server: EtcdServer, store: EtcdStore, proxy: TcpProxy, root: str
) -> None:
    await store.put(D, "before", b"")
    reader = await EtcdStore.open([server.address], root, dial=lambda _: proxy.address)
    async with reader.watch(D) as watch, asyncio.timeout(20):
        seen = await store.put(D, "seen", b"")
        assert await anext(watch) == Changes((KeyChange("seen", seen),))
        await proxy.set_mode(Mode.REFUSE)
        proxy.cut()
        await store.put(D, "missed", b"")
        version = await store.put(D, "missed", b"")
        async with grpc.aio.insecure_channel(server.address) as channel:
            await KVStub(channel).Compact(pb.CompactionRequest(revision=version))
        await proxy.set_mode(Mode.PASS)
        assert await anext(watch) == Gap()
        after = await store.put(D, "after", b"")
        assert await anext(watch) == Changes((KeyChange("after", after),))
    await reader.close()


async def test_a_watch_tells_of_an_append_in_one_piece_and_not_of_tail_records(store: EtcdStore) -> None:
    async with store.watch(D) as watch:
        version = (await store.append(D, [one("s"), one("s")], [Put("k", b"")])).entries[0].version
        event = await anext(watch)
    assert isinstance(event, Changes)
    assert set(event.changes) == {
        EntryChange("s", Position(5, 50), version),
        EntryChange("s", Position(10, 100), version),
        KeyChange("k", version),
    }
    assert len(event.changes) == 3


async def test_a_watch_that_catches_up_over_much_loses_nothing(
    server: EtcdServer, store: EtcdStore, proxy: TcpProxy, root: str
) -> None:
    """etcd sends up to 1,000 revisions at once, here 12 MB, and takes that apart in between."""
    reader = await EtcdStore.open([server.address], root, dial=lambda _: proxy.address)
    async with reader.watch(D) as watch, asyncio.timeout(20):
        await proxy.set_mode(Mode.REFUSE)
        proxy.cut()
        writes = [await store.append(D, [NewEntry("s", 1, 1, bytes(300_000))] * 4) for _ in range(10)]
        await proxy.set_mode(Mode.PASS)
        found: list[tuple[int, int]] = []
        while len(found) < 40:
            event = await anext(watch)
            assert isinstance(event, Changes)
            assert len(event.changes) % 4 == 0, "an append came in two pieces"
            for change in event.changes:
                assert isinstance(change, EntryChange)
                assert change.version is not None
                found.append((change.position.end_records, change.version))
    assert found == [(e.position.end_records, e.version) for write in writes for e in write.entries]
    await reader.close()


# Endpoints and connections


async def test_nobody_there(server: EtcdServer) -> None:
    began = asyncio.get_running_loop().time()
    with pytest.raises(Unavailable):
        await EtcdStore.open(["127.0.0.1:1"], "/x", timeout_s=0.5)
    assert asyncio.get_running_loop().time() - began < 3
    opened = await EtcdStore.open(["127.0.0.1:1", server.address], "/x", timeout_s=2)
    await opened.put(D, "k", b"")
    await opened.close()


@pytest.mark.parametrize("begin_with", ["read", "write"])
async def test_an_endpoint_that_swallows_everything_is_left(
    server: EtcdServer, proxy: TcpProxy, root: str, begin_with: str
) -> None:
    second = TcpProxy(server.address)
    await second.start()
    await second.set_mode(Mode.REFUSE)  # so that the first is the one in use
    dial = {"first:1": proxy.address, "second:1": second.address}
    store = await EtcdStore.open(["first:1", "second:1"], root, timeout_s=3, dial=dial.__getitem__)
    try:
        await store.put(D, "k", b"v")
        await second.set_mode(Mode.PASS)
        await proxy.set_mode(Mode.BLACK_HOLE)
        if begin_with == "read":
            assert await store.get(D, "k") is not None
        else:
            with pytest.raises(OutcomeUnknown):
                await store.put(D, "k", b"lost")
        with Requests(store) as sent:
            await store.put(D, "k", b"v")
            assert sent() == 1
    finally:
        await store.close()
        await second.stop()


async def test_closing_ends_calls_that_are_under_way(server: EtcdServer, proxy: TcpProxy, root: str) -> None:
    """In an error, and not in the CancelledError that grpc raises where nobody cancelled."""
    store = await EtcdStore.open([server.address], root, dial=lambda _: proxy.address)
    await proxy.set_mode(Mode.BLACK_HOLE)
    with Requests(store) as sent:
        calls = [asyncio.create_task(store.get(D, "k")), asyncio.create_task(store.put(D, "k", b""))]
        while sent() < 2:  # noqa: ASYNC110 - there is no event for "on its way"
            await asyncio.sleep(0)
    await store.close()
    async with asyncio.timeout(2):
        read, write = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(read, Unavailable)
    assert isinstance(write, OutcomeUnknown)
    await proxy.set_mode(Mode.PASS)
    with pytest.raises(Unavailable):
        await store.get(D, "k")


async def test_users(tmp_path: Path) -> None:
    server = EtcdServer(tmp_path)
    server.start()
    try:
        early = await EtcdStore.open([server.address], "/x", user="root", password="right")
        await early.put(D, "k", b"before there were users")
        async with grpc.aio.insecure_channel(server.address) as channel:
            auth = AuthStub(channel)
            await auth.UserAdd(pb.AuthUserAddRequest(name="root", password="right"))
            await auth.UserGrantRole(pb.AuthUserGrantRoleRequest(user="root", role="root"))
            await auth.UserAdd(pb.AuthUserAddRequest(name="guest", password="guest"))
            await auth.AuthEnable(pb.AuthEnableRequest())

        for user, password in (("root", "wrong"), ("nobody", "right"), ("guest", "guest"), (None, None)):
            with pytest.raises(AccessDenied):
                await EtcdStore.open([server.address], "/x", user=user, password=password)

        store = await EtcdStore.open([server.address], "/x", user="root", password="right")
        for each in (early, store):
            async with each.session(10_000) as session, each.watch(D) as watch:
                version = await session.put_ephemeral(D, "e", b"")
                assert await anext(watch) == Changes((KeyChange("e", version),))
        # etcd keeps its tokens in memory: after a restart ours is refused, and gets renewed.
        server.kill()
        server.start()
        assert await store.put(D, "new", b"", Expect.ABSENT)
        async with early.watch(D) as watch:
            version = await early.put(D, "k", b"")
            assert await anext(watch) == Changes((KeyChange("k", version),))
        await early.close()
        await store.close()
    finally:
        server.kill()


async def test_tls(tmp_path: Path) -> None:
    for name in ("server", "stranger"):
        command = (
            f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN={name}"
        )
        command += (
            f" -addext subjectAltName=IP:127.0.0.1 -keyout {tmp_path}/{name}.key -out {tmp_path}/{name}.crt"
        )
        await asyncio.to_thread(subprocess.run, command.split(), check=True, capture_output=True)
    flags = [f"--cert-file={tmp_path}/server.crt", f"--key-file={tmp_path}/server.key"]
    server = EtcdServer(tmp_path / "etcd", flags, scheme="https")
    server.start()
    try:
        trusted, other = (
            grpc.ssl_channel_credentials((tmp_path / f"{name}.crt").read_bytes())
            for name in ("server", "stranger")
        )
        for credentials in (other, None):
            with pytest.raises(Unavailable):
                await EtcdStore.open([server.address], "/x", timeout_s=1, tls=credentials)
        store = await EtcdStore.open([server.address], "/x", tls=trusted)
        assert (await store.append(D, [one("s")])).entries[0].position == Position(5, 50)
        await store.close()
    finally:
        server.kill()


# A cluster


async def test_no_acknowledged_entry_is_lost_with_the_leader(tmp_path: Path) -> None:
    cluster = EtcdCluster(tmp_path)
    cluster.start()
    acknowledged: dict[bytes, int] = {}
    progress = asyncio.Condition()
    done = False

    async def write(writer: int) -> None:
        endpoints = cluster.addresses[writer:] + cluster.addresses[:writer]
        store = await EtcdStore.open(endpoints, "/x", timeout_s=3)
        n = 0
        while not done:
            value = b"%d/%d" % (writer, n)
            n += 1
            try:
                result = await store.append(D, [NewEntry("s", 1 + n % 3, 1, value)])
            except (Unavailable, OutcomeUnknown):
                continue
            async with progress:
                acknowledged[value] = result.entries[0].position.end_records
                progress.notify_all()
        await store.close()

    async def more(count: int) -> None:
        """Wait until every writer has got through that many more times."""
        goal = {w: sum(v.startswith(b"%d/" % w) for v in acknowledged) + count for w in range(3)}
        async with progress, asyncio.timeout(20):
            await progress.wait_for(
                lambda: all(sum(v.startswith(b"%d/" % w) for v in acknowledged) >= g for w, g in goal.items())
            )

    try:
        async with asyncio.TaskGroup() as group:
            for writer in range(3):
                group.create_task(write(writer))
            await more(6)
            (leader,) = [m for m in cluster.members if await asyncio.to_thread(m.is_leader)]
            leader.kill()
            await more(6)
            await asyncio.to_thread(leader.start)
            await more(3)
            done = True
        reader = await EtcdStore.open(cluster.addresses, "/x")
        entries = await reader.entries(D, "s", 0, 100_000)
        await reader.close()
    finally:
        cluster.stop()
    found = {entry.value: entry.position.end_records for entry in entries}
    assert len(found) == len(entries), "an append was applied twice"
    assert acknowledged.items() <= found.items()
    ends = [0, *(entry.position.end_records for entry in entries)]
    sizes = [1 + (int(entry.value.split(b"/")[1]) + 1) % 3 for entry in entries]
    assert [end - start for start, end in pairwise(ends)] == sizes
