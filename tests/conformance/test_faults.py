"""Faults on real servers: every call ends in time, in the truth or unknown, never in a wrong "failed".

What a client was told is compared with what a second, undisturbed client finds when all is over.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from dray.errors import OutcomeUnknown, Unavailable, VersionConflict
from dray.metadata.opening import open_store
from dray.metadata.store import AppendResult, Entry, Expect, MetadataStore, NewEntry, Position, Put
from tests.conformance.backends import (
    Backend,
    Network,
    ServerBackend,
    UrlBackend,
    etcd_backend,
    oxia_backend,
    read_line,
    spawn,
)
from tests.servers.etcd import EtcdServer
from tests.servers.oxia import OxiaServer, StandInServer, find_oxia
from tests.servers.proxy import Mode

D = 7
TIMEOUT_S = 1.0
# What a call may take beyond its own deadline before this counts as a hang, on a busy machine.
GRACE_S = 4.0


async def cut_inside_the_request(network: Network) -> None:
    for proxy in network.each():
        proxy.cut_after(1)


async def cut_before_the_request(network: Network) -> None:
    network.cut()


async def black_hole(network: Network) -> None:
    for proxy in network.each():
        await proxy.set_mode(Mode.BLACK_HOLE)


async def drop_answers(network: Network) -> None:
    for proxy in network.each():
        await proxy.set_mode(Mode.DROP_ANSWERS)


async def refuse(network: Network) -> None:
    for proxy in network.each():
        await proxy.set_mode(Mode.REFUSE)
    network.cut()


async def delay(network: Network) -> None:
    for proxy in network.each():
        proxy.delay_s = 0.1


Fault = Callable[[Network], Awaitable[None]]
FAULTS: list[Fault] = [
    cut_inside_the_request,
    cut_before_the_request,
    black_hole,
    drop_answers,
    refuse,
    delay,
]

READS: dict[str, Callable[[MetadataStore], Awaitable[object]]] = {
    "get": lambda s: s.get(D, "k"),
    "scan": lambda s: s.scan(D, "dir", limit=10),
    "ceiling": lambda s: s.ceiling(D, "s", 1),
    "floor": lambda s: s.floor(D, "s", 5),
    "entries": lambda s: s.entries(D, "s", 0, 10),
    "tail": lambda s: s.tail(D, "s"),
    "barrier": lambda s: s.barrier(D),  # no read on Oxia, but it may be repeated like one
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
async def test_reads_end_in_the_truth_or_in_unavailable(server_backend: ServerBackend, fault: Fault) -> None:
    direct = await server_backend.open()
    await direct.put(D, "k", b"v")
    await direct.put(D, "dir/k", b"v")
    await direct.append(D, [NewEntry("s", 5, 5, b"v")])
    truth = {name: await read(direct) for name, read in READS.items()}

    async def one(name: str) -> None:
        async with faulty(server_backend) as (store, network):
            await fault(network)
            try:
                async with asyncio.timeout(TIMEOUT_S + GRACE_S):
                    assert await READS[name](store) == truth[name], name
            except (Unavailable, OutcomeUnknown) as error:
                assert isinstance(error, Unavailable) or name == "barrier", name
                assert fault is not delay, f"{name} gave up on a slow network"
            await heal(network)
            await until_answered(lambda: READS[name](store))
            assert await READS[name](store) == truth[name], f"{name} after the fault"

    await asyncio.gather(*(one(name) for name in READS))
    await direct.close()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
async def test_writes_never_end_in_a_wrong_failure(server_backend: ServerBackend, fault: Fault) -> None:
    direct = await server_backend.open()
    at = await direct.put(D, "delete", b"old")
    result = await direct.append(D, [NewEntry("swap", 5, 5, b"old"), NewEntry("swap", 5, 5, b"old")])
    low, high = result.entries

    async def value(key: str) -> bytes | None:
        record = await direct.get(D, key)
        return record.value if record else None

    async def tail_value(sequence: str) -> bytes | None:
        tail = await direct.tail(D, sequence)
        return tail.value if tail else None

    async def attempt(
        name: str,
        write: Callable[[MetadataStore], Awaitable[object]],
        happened: Callable[[], Awaitable[bool]],
    ) -> None:
        async with faulty(server_backend) as (store, network):
            await fault(network)
            outcome: Exception | None = None
            try:
                async with asyncio.timeout(TIMEOUT_S + GRACE_S):
                    await write(store)
            except (Unavailable, OutcomeUnknown) as error:
                outcome = error
            await heal(network)
            # The same client works again, and behind its write nothing of the first is under way.
            await until_answered(lambda: store.put(D, f"after/{name}", b""))
            await direct.barrier(D)
            if outcome is None:
                assert await happened(), f"{name} was acknowledged and did not happen"
            elif isinstance(outcome, Unavailable):
                assert not await happened(), f"{name} failed for certain, and happened"
            else:
                assert fault is not delay, f"{name} gave up on a slow network"

    await asyncio.gather(
        attempt("put", lambda s: s.put(D, "put", b"new"), lambda: _is(value("put"), b"new")),
        attempt("cas", lambda s: s.put(D, "cas", b"new", Expect.ABSENT), lambda: _is(value("cas"), b"new")),
        attempt("delete", lambda s: s.delete(D, "delete", at), lambda: _is(value("delete"), None)),
        attempt(
            "append",
            lambda s: s.append(
                D, [NewEntry("append", 1, 1, b"new")], [Put("witness", b"new", Expect.ABSENT)]
            ),
            lambda: _is(tail_value("append"), b"new"),
        ),
        attempt(
            "swap",
            lambda s: s.swap(D, "swap", high.position, high.version, b"new", [low.position]),
            lambda: _is(tail_value("swap"), b"new"),
        ),
    )
    await direct.close()


async def _is(found: Awaitable[bytes | None], expected: bytes | None) -> bool:
    return await found == expected


@asynccontextmanager
async def faulty(backend: ServerBackend) -> AsyncIterator[tuple[MetadataStore, Network]]:
    network = Network()
    store = await backend.open_through(network, TIMEOUT_S)
    try:
        yield store, network
    finally:
        await store.close()
        await network.stop()


async def heal(network: Network) -> None:
    for proxy in network.each():
        proxy.delay_s = 0
        await proxy.set_mode(Mode.PASS)
        proxy.cut()


class Book:
    """What became of each append, as its writer learned it."""

    def __init__(self) -> None:
        self.acknowledged: dict[bytes, int] = {}  # value -> end of its entry
        self.void: set[bytes] = set()
        self.unknown = 0
        self._changed = asyncio.Event()

    async def wait_for(self, acknowledged: int) -> None:
        while len(self.acknowledged) < acknowledged:
            self._changed.clear()
            await self._changed.wait()

    async def append(self, store: MetadataStore, resolver: MetadataStore, name: str, records: int) -> None:
        """Append, and resolve an unknown outcome by its witness: exactly one of two puts wins it."""
        value = name.encode()
        witness = f"wal/{name}"
        try:
            result = await store.append(
                D, [NewEntry("s", records, 10, value)], [Put(witness, b"COMMITTED", Expect.ABSENT)]
            )
        except Unavailable:
            self.void.add(value)
        except OutcomeUnknown:
            self.unknown += 1
            try:
                await until_answered(lambda: resolver.put(D, witness, b"FENCED", Expect.ABSENT))
                self.void.add(value)
            except VersionConflict:
                await resolver.barrier(D)
                record = await resolver.get(D, witness)
                assert record is not None
                if record.value == b"FENCED":  # an earlier try of the resolver had landed after all
                    self.void.add(value)
                else:
                    entries = await resolver.entries(D, "s", 0, 100_000)
                    [end] = [e.position.end_records for e in entries if e.value == value]
                    self.acknowledged[value] = end
        else:
            assert result.puts[0] is not None
            self.acknowledged[value] = result.entries[0].position.end_records
        self._changed.set()

    async def check(self, store: MetadataStore) -> None:
        """The one truth: dense positions, each acknowledged entry once where it was said to be."""
        await store.barrier(D)
        entries = await store.entries(D, "s", 0, 100_000)
        records = {value: int(value.split(b"-")[-1]) for value in (e.value for e in entries)}
        end = 0
        for entry in entries:
            end += records[entry.value]
            assert entry.position.end_records == end, "a gap or an overlap"
        values = [e.value for e in entries]
        assert len(values) == len(set(values)), "an append was applied twice"
        ends = {e.value: e.position.end_records for e in entries}
        for value, acknowledged_end in self.acknowledged.items():
            assert ends.get(value) == acknowledged_end, f"{value!r} was acknowledged and is not there"
        fenced = {value for value in self.void if value in ends}
        if store.conditions_abort:
            assert not fenced, "a void append left entries"
        for value in fenced:  # void for every reader, by its record
            record = await store.get(D, f"wal/{value.decode()}")
            assert record is None or record.value == b"FENCED"
        tail = await store.tail(D, "s")
        assert (tail.position.end_records if tail else 0) == end
        added = await store.append(D, [NewEntry("s", 1, 1, b"later-1")])
        assert added.entries[0].position.end_records == end + 1


async def until_answered(call: Callable[[], Awaitable[object]]) -> None:
    """For calls that may be repeated: until the store answers at all."""
    async with asyncio.timeout(60):
        while True:
            try:
                await call()
            except (Unavailable, OutcomeUnknown):
                await asyncio.sleep(0.05)
            else:
                return


async def test_unknown_appends_have_one_truth_under_cuts(server_backend: ServerBackend) -> None:
    """Connections are cut at random bytes of the requests while four writers append."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")  # noqa: T201 — shown when the test fails
    chance = random.Random(seed)
    direct = await server_backend.open()
    book = Book()

    async def write(writer: int) -> None:
        async with faulty(server_backend) as (store, network):
            for n in range(25):
                if chance.random() < 0.5:
                    for proxy in network.each():
                        proxy.cut_after(chance.randrange(1, 400))
                await book.append(store, direct, f"{writer}-{n}-{1 + n % 3}", 1 + n % 3)

    await asyncio.gather(*(write(i) for i in range(4)))
    assert book.unknown > 0, "no cut hit a request: this test proves nothing"
    await book.check(direct)
    await direct.close()


@pytest.mark.parametrize("fault", [drop_answers, black_hole], ids=lambda fault: fault.__name__)
async def test_an_append_without_an_answer_is_resolved_and_may_land_late(
    server_backend: ServerBackend, fault: Fault
) -> None:
    direct = await server_backend.open()
    book = Book()

    async def write(writer: int) -> None:
        async with faulty(server_backend) as (store, network):
            await book.append(store, direct, f"{writer}-0-2", 2)
            await fault(network)
            await book.append(store, direct, f"{writer}-1-1", 1)
            # What the black hole holds back arrives now, after its append was resolved.
            for proxy in network.each():
                await proxy.set_mode(Mode.PASS)
            await until_answered(lambda: store.put(D, f"again/{writer}", b""))
            await book.append(store, direct, f"{writer}-2-3", 3)

    await asyncio.gather(*(write(i) for i in range(3)))
    assert book.unknown == 3
    await book.check(direct)
    await direct.close()


@pytest.fixture(params=["etcd", "oxia"])
def killable(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[EtcdServer | OxiaServer, ServerBackend]]:
    """A server of this test's own, with an empty store on it."""
    server: EtcdServer | OxiaServer
    if request.param == "etcd":
        server = EtcdServer(tmp_path)
    else:
        server = find_oxia(tmp_path)
        if not server.owned:  # somebody else's: not ours to kill
            server = StandInServer(tmp_path)
    server.start()
    backend = etcd_backend(server.address) if request.param == "etcd" else oxia_backend(server.address)
    yield server, backend
    server.kill()


async def test_a_killed_server_loses_nothing_acknowledged(
    killable: tuple[EtcdServer | OxiaServer, ServerBackend],
) -> None:
    """kill -9 and restart under load, three times: sequences go on where they were."""
    server, backend = killable
    direct = await backend.open()
    book = Book()
    stop = asyncio.Event()

    async def write(writer: int) -> None:
        store = await backend.open(timeout_s=2)
        n = 0
        while not stop.is_set():
            await book.append(store, direct, f"{writer}-{n}-{1 + n % 3}", 1 + n % 3)
            n += 1
        await store.close()

    async with asyncio.TaskGroup() as group:
        for i in range(4):
            group.create_task(write(i))
        for round_ in range(1, 4):
            await book.wait_for(40 * round_)
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
        await book.wait_for(len(book.acknowledged) + 40)
        stop.set()
    await book.check(direct)
    await direct.close()


async def test_every_call_survives_a_kill_of_the_server(
    killable: tuple[EtcdServer | OxiaServer, ServerBackend],
) -> None:
    """All calls at once, over and over, while the server is killed and restarted under them."""
    server, backend = killable
    direct = await backend.open()
    await direct.put(D, "k", b"v")
    await direct.put(D, "dir/k", b"v")
    result = await direct.append(D, [NewEntry("s", 5, 5, b"v"), NewEntry("swapped", 5, 5, b"0")])
    truth = {name: await read(direct) for name, read in READS.items()}
    swapped = result.entries[1]
    stop = asyncio.Event()
    told: dict[str, str] = {}  # key -> what its writer learned
    ended = 0

    async def call(make: Callable[[], Awaitable[object]]) -> tuple[str, object]:
        nonlocal ended
        answer: object = None
        try:
            async with asyncio.timeout(TIMEOUT_S + GRACE_S):
                answer = await make()
            outcome = "done"
        except Unavailable:
            outcome = "not done"
        except OutcomeUnknown:
            outcome = "unknown"
        ended += 1
        await asyncio.sleep(0)
        return outcome, answer

    async def reads(name: str) -> None:
        store = await backend.open(TIMEOUT_S)
        while not stop.is_set():
            outcome, answer = await call(lambda: READS[name](store))
            assert outcome != "done" or answer == truth[name], name
            assert outcome != "unknown" or name == "barrier", name
        await store.close()

    async def puts_and_deletes() -> None:
        store = await backend.open(TIMEOUT_S)
        n = 0
        while not stop.is_set():
            key, n = f"put/{n}", n + 1
            told[key], version = await call(lambda: store.put(D, key, b"", Expect.ABSENT))  # noqa: B023
            if told[key] == "done" and n % 2:
                assert isinstance(version, int)
                deleted, _ = await call(lambda: store.delete(D, key, version))  # noqa: B023
                told[key] = {"done": "not done", "not done": "done", "unknown": "unknown"}[deleted]
        await store.close()

    async def swaps() -> None:
        store = await backend.open(TIMEOUT_S)
        at, version = swapped.position, swapped.version
        unknown = False
        while not stop.is_set():
            try:
                outcome, answer = await call(lambda: store.swap(D, "swapped", at, version, b"1", []))  # noqa: B023
            except VersionConflict:
                assert unknown, "nobody else swaps here"  # one of those has landed, perhaps late
                outcome = "unknown"
            if outcome == "unknown":  # find the version out; the entry itself cannot be gone
                unknown = True
                answer = None
                while not isinstance(answer, Entry):
                    await until_answered(lambda: store.barrier(D))
                    _, answer = await call(lambda: store.tail(D, "swapped"))
                version = answer.version
            elif outcome == "done":
                assert isinstance(answer, int)
                version = answer
        await store.close()

    async with asyncio.TaskGroup() as group:
        for name in READS:
            group.create_task(reads(name))
        group.create_task(puts_and_deletes())
        group.create_task(swaps())
        for _ in range(2):
            before = ended
            while ended < before + 200:  # noqa: ASYNC110 — progress of eight tasks, not one event
                await asyncio.sleep(0.01)
            await asyncio.to_thread(server.kill)
            await asyncio.sleep(TIMEOUT_S / 2)  # calls meet a server that is not there
            await asyncio.to_thread(server.start)
        await until_answered(lambda: direct.barrier(D))
        stop.set()
    there = {record.key for record in await direct.scan(D, "put", limit=100_000)}
    assert {key for key, what in told.items() if what == "done"} <= there
    assert not there & {key for key, what in told.items() if what == "not done"}
    assert len(await direct.entries(D, "swapped", 0, 10)) == 1
    await direct.close()


async def test_everything_is_still_there_after_a_restart(
    killable: tuple[EtcdServer | OxiaServer, ServerBackend],
) -> None:
    server, backend = killable
    store = await backend.open()
    version = await store.put(D, "k", b"v")
    first = await store.append(D, [NewEntry("s", 3, 30, b"a"), NewEntry("s", 2, 20, b"b")])
    low, high = first.entries
    await store.swap(D, "s", high.position, high.version, b"ab", [low.position])
    entries = await store.entries(D, "s", 0, 10)
    async with store.watch(D) as watch:
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        await until_answered(lambda: store.barrier(D))
        record = await store.get(D, "k")
        assert record is not None
        assert (record.value, record.version) == (b"v", version)
        assert await store.entries(D, "s", 0, 10) == entries
        again = await store.append(D, [NewEntry("s", 1, 1, b"c", expected_start=5)])
        assert again.entries[0].position == (6, 51)
        async with asyncio.timeout(20):
            await anext(aiter(watch))  # the change, or a gap: the feed is alive
    await store.close()


async def test_killed_processes_leave_whole_appends_or_none(shared_backend: UrlBackend) -> None:
    """The embedded store has no server to kill: its processes are. kill -9 in the middle of their appends."""
    acknowledged: dict[str, int] = {}

    async def run(writer: str) -> None:
        child = await spawn("append", shared_backend.url, str(D), "s", writer)
        for _ in range(30):
            name, end = (await read_line(child)).split()
            acknowledged[name] = int(end)
        child.kill()
        rest = await child.communicate()
        for line in rest[0].decode().split("\n")[:-1]:  # said before it died
            name, end = line.split()
            acknowledged[name] = int(end)

    await asyncio.gather(*(run(f"w{i}") for i in range(3)))
    store = await shared_backend.open()
    await store.barrier(D)
    entries = await store.entries(D, "s", 0, 100_000)
    ends = {e.value.decode(): e.position.end_records for e in entries}
    assert acknowledged.items() <= ends.items()
    assert len(ends) == len(entries)
    end = 0
    for name in ends:
        end += 1 + int(name.split("-")[1]) % 5
        assert ends[name] == end
    witnesses = await store.scan(D, "witness", limit=100_000)
    assert {r.key.removeprefix("witness/") for r in witnesses} == set(ends)
    await store.close()


@pytest.mark.parametrize("scheme", ["etcd", "oxia"])
async def test_a_server_that_is_not_there(scheme: str) -> None:
    async with asyncio.timeout(TIMEOUT_S + GRACE_S):
        with pytest.raises(Unavailable):
            await open_store(f"{scheme}://127.0.0.1:1", TIMEOUT_S)


async def test_a_server_that_does_not_answer(server_backend: ServerBackend, network: Network) -> None:
    store = await server_backend.open_through(network)  # lets the network know its addresses
    await store.close()
    await black_hole(network)
    async with asyncio.timeout(TIMEOUT_S + GRACE_S):
        with pytest.raises(Unavailable):
            await server_backend.open_through(network, TIMEOUT_S)


async def test_cancelled_calls_do_not_disturb_later_ones(shared_backend: UrlBackend) -> None:
    """A cancelled append is an unknown outcome; what follows it is dense all the same."""
    store = await shared_backend.open()
    seed = random.randrange(2**32)
    print(f"seed {seed}")  # noqa: T201 — shown when the test fails
    chance = random.Random(seed)
    loop = asyncio.get_running_loop()
    started = loop.time()
    for _ in range(20):
        await asyncio.gather(*(store.append(D, [NewEntry("warm-up", 1, 1, b"")]) for _ in range(5)))
    usual_s = (
        loop.time() - started
    ) / 20  # so that some are cancelled on their way, some before, some behind
    cancelled: set[bytes] = set()
    for i in range(0, 300, 5):
        values = [b"%d" % n for n in range(i, i + 5)]
        tasks = [asyncio.create_task(store.append(D, [NewEntry("s", 1, 1, value)])) for value in values]
        await asyncio.sleep(chance.uniform(0, usual_s))
        for task in tasks:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        cancelled |= {
            v for v, o in zip(values, outcomes, strict=True) if isinstance(o, asyncio.CancelledError)
        }
        assert all(isinstance(o, AppendResult | asyncio.CancelledError) for o in outcomes)
    await store.append(D, [NewEntry("s", 1, 1, b"end")])
    entries = await store.entries(D, "s", 0, 1000)
    assert [e.position.end_records for e in entries] == list(range(1, len(entries) + 1))
    assert len({e.value for e in entries}) == len(entries)
    landed = {e.value for e in entries}
    assert cancelled & landed, "no cancelled append landed: this test proves nothing"
    assert cancelled - landed, "no cancelled append was stopped"
    await store.close()


async def test_calls_on_a_closed_store_are_refused(backend: Backend) -> None:
    store = await backend.open()
    await store.append(D, [NewEntry("s", 1, 1, b"")])
    await store.close()
    await store.close()
    calls: list[Callable[[], Awaitable[object]]] = [
        *(lambda read=read: read(store) for read in READS.values()),
        lambda: store.put(D, "k", b""),
        lambda: store.delete(D, "k"),
        lambda: store.append(D, [NewEntry("s", 1, 1, b"")]),
        lambda: store.swap(D, "s", Position(1, 1), 1, b"", []),
        lambda: store.watch(D).__aenter__(),
        lambda: store.session(2_000).__aenter__(),
    ]
    for call in calls:
        async with asyncio.timeout(GRACE_S):
            with pytest.raises(Unavailable):
                await call()


async def test_closing_a_store_ends_the_calls_under_way(
    server_backend: ServerBackend, network: Network
) -> None:
    store = await server_backend.open_through(network, timeout_s=10)
    await store.append(D, [NewEntry("s", 1, 1, b"")])
    await black_hole(network)
    calls = [asyncio.create_task(_as_task(read(store))) for name, read in READS.items()]
    calls.append(asyncio.create_task(_as_task(store.put(D, "k", b""))))
    calls.append(asyncio.create_task(_as_task(store.append(D, [NewEntry("s", 1, 1, b"")]))))
    await asyncio.sleep(0.1)
    async with asyncio.timeout(GRACE_S):
        await store.close()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert all(o is None or isinstance(o, Unavailable | OutcomeUnknown) for o in outcomes), outcomes


async def _as_task(call: Awaitable[object]) -> object:
    return await call
