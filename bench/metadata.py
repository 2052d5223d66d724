"""Metadata stores side by side: appends, lookups and watches, and what the adapter adds to a bare call.

    make bench
    python -m bench.metadata --seconds 3 --only sqlite etcd

A row is one store doing one thing with so many calls in flight, each in a domain of its own as brokers
do it. `x bare` is the median time of a call through the store over that of a bare gRPC call that
carries the same request to the same server; the two take turns within one run. Servers are those of
the tests, on loopback: absolute figures are this machine's, ratios travel better.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count, cycle
from pathlib import Path

from dray.metadata.etcd import EtcdStore
from dray.metadata.etcd_txn import Tail as EtcdTail
from dray.metadata.etcd_txn import append_request, place
from dray.metadata.oxia import OxiaStore
from dray.metadata.proto import etcd_pb2, etcd_pb2_grpc, oxia_pb2, oxia_pb2_grpc
from dray.metadata.rpc import open_channel
from dray.metadata.sqlite import SqliteStore
from dray.metadata.store import MetadataStore, NewEntry, Position
from tests.servers.etcd import EtcdServer
from tests.servers.oxia import start_oxia

IN_FLIGHT = (1, 16)
STREAMS = (1, 50)
# About what an index entry of a few batches takes.
VALUE = b"v" * 200
# Store and bare call take turns of this length, so that both meet the machine in the same mood.
SLICE_S = 0.25
# Made beforehand for the bare calls, so that making them is not part of what they take.
BARE_OPERATIONS = 20_000

Call = Callable[[int], Awaitable[object]]  # of a domain


@dataclass(frozen=True)
class Subject:
    """A store, and bare calls that carry the same requests where it speaks gRPC."""

    name: str
    store: MetadataStore
    bare_append: Callable[[int], Call] | None = None  # by number of streams
    bare_ceiling: Call | None = None


@dataclass(frozen=True)
class Measured:
    seconds: float
    latencies_ms: list[float]

    def per_second(self) -> float:
        return len(self.latencies_ms) / self.seconds

    def quantile(self, q: float) -> float:
        ordered = sorted(self.latencies_ms)
        return ordered[min(int(q * len(ordered)), len(ordered) - 1)]


def new_entries(streams: int) -> list[NewEntry]:
    return [NewEntry(f"stream-{i:04d}", 100, 16_384, VALUE) for i in range(streams)]


async def drive(call: Call, in_flight: int, seconds: float) -> Measured:
    latencies: list[float] = []
    started = time.perf_counter()

    async def one(domain: int) -> None:
        while (before := time.perf_counter()) - started < seconds:
            await call(domain)
            latencies.append((time.perf_counter() - before) * 1000)

    await asyncio.gather(*(one(domain) for domain in range(in_flight)))
    return Measured(time.perf_counter() - started, latencies)


async def compare(
    call: Call, bare: Call | None, in_flight: int, seconds: float
) -> tuple[Measured, Measured | None]:
    parts: dict[str, list[Measured]] = {"store": [], "bare": []}
    for what in (call, bare):
        if what is not None:  # connections, caches, prepared statements
            await drive(what, in_flight, SLICE_S / 2)
    for _ in range(max(1, round(seconds / SLICE_S))):
        for which, what in (("store", call), ("bare", bare)):
            if what is not None:
                parts[which].append(await drive(what, in_flight, SLICE_S))

    def join(measured: list[Measured]) -> Measured:
        return Measured(sum(m.seconds for m in measured), [ms for m in measured for ms in m.latencies_ms])

    return join(parts["store"]), join(parts["bare"]) if parts["bare"] else None


async def watch_latency(store: MetadataStore, rounds: int) -> Measured:
    """From the start of a put to its arrival at a watcher of the same process."""
    latencies = []
    started = time.perf_counter()
    async with store.watch(0) as watch:
        for i in range(rounds):
            before = time.perf_counter()
            putting = asyncio.create_task(store.put(0, "watched", b"%d" % i))
            await anext(aiter(watch))
            latencies.append((time.perf_counter() - before) * 1000)
            await putting
    return Measured(time.perf_counter() - started, latencies)


def report(name: str, what: str, in_flight: int, measured: Measured, bare: Measured | None = None) -> None:
    ratio = f"{measured.quantile(0.5) / bare.quantile(0.5):8.2f}" if bare else f"{'–':>8}"
    print(
        f"{name:<18} {what:<22} {in_flight:>9} {measured.per_second():>10,.0f}"
        f" {measured.quantile(0.5):>9.2f} {measured.quantile(0.99):>9.2f} {ratio}",
        flush=True,
    )


async def _append(store: MetadataStore, entries: list[NewEntry], domain: int) -> None:
    await store.append(domain, entries)


async def measure(subject: Subject, seconds: float) -> None:
    store = subject.store
    for streams in STREAMS:
        entries = new_entries(streams)
        bare = subject.bare_append(streams) if subject.bare_append else None
        append = partial(_append, store, entries)
        for in_flight in IN_FLIGHT:
            measured, beside = await compare(append, bare, in_flight, seconds)
            report(subject.name, f"append, {streams} streams", in_flight, measured, beside)
    offsets = count()
    for in_flight in IN_FLIGHT:
        measured, beside = await compare(
            lambda domain: store.ceiling(domain, "stream-0000", next(offsets) % 1000),
            subject.bare_ceiling,
            in_flight,
            seconds,
        )
        report(subject.name, "ceiling", in_flight, measured, beside)
    report(subject.name, "put to watcher", 1, await watch_latency(store, 300))


@asynccontextmanager
async def sqlite_subject(directory: Path) -> AsyncIterator[Subject]:
    store = await SqliteStore.open(directory / "metadata.db")
    yield Subject("sqlite", store)
    await store.close()


@asynccontextmanager
async def etcd_subject(directory: Path) -> AsyncIterator[Subject]:
    server = EtcdServer(directory)
    server.start()
    store = await EtcdStore.open([server.address], "/bench")
    async with open_channel(server.address) as channel:
        stub = etcd_pb2_grpc.KVStub(channel)

        def bare_append(streams: int) -> Call:
            entries = new_entries(streams)
            tails = {entry.sequence: EtcdTail(Position(0, 0), 1) for entry in entries}
            requests = []
            for _ in range(BARE_OPERATIONS // streams):  # new keys each time, as appends write them
                ends = place(entries, tails)
                request = append_request(store._layout, 1000 + streams, entries, ends, tails, (), ())
                for condition in request.compare:  # as many and as long, but always true
                    condition.result = etcd_pb2.Compare.NOT_EQUAL
                requests.append(request)
                tails = {entry.sequence: EtcdTail(end, 1) for entry, end in zip(entries, ends, strict=True)}
            turns = cycle(requests)
            return lambda domain: stub.Txn(next(turns))

        def bare_ceiling(domain: int) -> Awaitable[object]:
            low = store._layout.from_end(domain, "stream-0000", 500).encode()
            return stub.Range(etcd_pb2.RangeRequest(key=low, range_end=low[:-21] + b"0", limit=1))

        yield Subject("etcd", store, bare_append, bare_ceiling)
    await store.close()
    server.kill()


@asynccontextmanager
async def oxia_subject(directory: Path) -> AsyncIterator[Subject]:
    with start_oxia(directory) as server:
        store = await OxiaStore.open(server.address, "default", f"bench-{time.time_ns()}/dray/v1/")
        async with open_channel(server.address) as channel:
            stub = oxia_pb2_grpc.OxiaClientStub(channel)

            def shard_of(domain: int) -> int | None:
                return store._client.shard_of(store._route(domain))

            def bare_append(streams: int) -> Call:
                requests = {}
                for domain in range(max(IN_FLIGHT)):
                    requests[domain] = oxia_pb2.WriteRequest(shard=shard_of(domain))
                    for entry in new_entries(streams):
                        store._sequence_put(requests[domain], domain, entry)
                return lambda domain: stub.Write(requests[domain])

            async def bare_ceiling(domain: int) -> None:
                key = store._layout.from_end(domain, "stream-0000", 500)
                get = oxia_pb2.GetRequest(key=key, include_value=True, comparison_type=oxia_pb2.CEILING)
                async for _ in stub.Read(oxia_pb2.ReadRequest(shard=shard_of(domain), gets=[get])):
                    pass

            yield Subject(f"oxia ({server.kind})", store, bare_append, bare_ceiling)
        await store.close()


SUBJECTS = {"sqlite": sqlite_subject, "etcd": etcd_subject, "oxia": oxia_subject}


async def run(names: list[str], seconds: float, directory: Path) -> None:
    columns = f"{'store':<18} {'what':<22} {'in flight':>9} {'per second':>10}"
    print(f"{columns} {'p50 ms':>9} {'p99 ms':>9} {'x bare':>8}")
    for name in names:
        async with AsyncExitStack() as stack:
            subject = await stack.enter_async_context(SUBJECTS[name](directory / name))
            await measure(subject, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each row (default 2)")
    parser.add_argument("--only", nargs="+", choices=list(SUBJECTS), default=list(SUBJECTS), metavar="STORE")
    parser.add_argument(
        "--directory", type=Path, help="where the stores keep their data (default: a temporary one)"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="dray-bench-") as scratch:
        directory = Path(scratch)
        for name in options.only:
            (directory / name).mkdir()
        asyncio.run(run(options.only, options.seconds, directory))


if __name__ == "__main__":
    main()
