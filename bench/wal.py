"""The write path: encoding, lookups, and buffer to commit on each pair of stores.

    python -m bench.wal
    python -m bench.wal --seconds 5 --only "sqlite + file"

CPU rows are the best of several runs. A commit row has as many writers as said, each writing one batch after
another to a stream of its own; latency is from `write` to `Committed`. Servers are those of the tests.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from uuid import UUID

from crc32c import crc32c

from dray.index.cache import IndexCache
from dray.index.entry import BatchIndex, IndexEntry, Placed, WalChunk
from dray.index.entry import encode as encode_entry
from dray.metadata.opening import open_store
from dray.metadata.store import MetadataStore
from dray.objectstore.opening import open_object_store
from dray.objectstore.store import ObjectStore
from dray.wal.batcher import PendingBatch
from dray.wal.format import ChunkInput, decode_object, encode_object
from dray.wal.writer import WalWriter
from tests.servers.etcd import EtcdServer
from tests.servers.oxia import start_oxia
from tests.servers.s3 import S3Server

MIB = 2**20
ID = UUID(int=1)


def make_batch(size: int) -> bytes:
    """As far as the format looks: a header that tells its length, and incompressible records."""
    head = bytes(8) + (size - 12).to_bytes(4, "big") + bytes(4) + b"\x02" + bytes(44)
    return head + os.urandom(size - len(head))


def best_ms(work: Callable[[], object], rounds: int = 20) -> float:
    times = []
    for _ in range(rounds):
        started = time.process_time()
        work()
        times.append((time.process_time() - started) * 1000)
    return min(times)


def cpu_rows() -> None:
    batch = memoryview(make_batch(8 * MIB // 500))
    chunks = [ChunkInput(stream, [batch] * 10, 1_000, 0, 0) for stream in range(50)]
    body = bytes(encode_object(ID, 0, 0, chunks).body)
    parts = [batch] * 500
    size = len(body) / 1e9
    print(f"{'8 MiB object, 500 batches, 50 streams':<42} {'ms CPU':>8} {'GB/s':>8}")
    rows = {
        "encode": lambda: encode_object(ID, 0, 0, chunks),
        "  of which the copy": lambda: b"".join(parts),
        "  of which the CRC": lambda: crc32c(body),
        "decode, with the CRC": lambda: decode_object(body),
    }
    for name, work in rows.items():
        taken = best_ms(work)
        print(f"{name:<42} {taken:>8.2f} {size / taken * 1000:>8.1f}")


def lookup_rows() -> None:
    batches = tuple(BatchIndex(100, 16_000, 0, 0) for _ in range(500))
    chunk = WalChunk(ID, "wal/v1/x.wo", 49, 500 * 16_004, batches)
    entry = IndexEntry(1, 50_000, 0, 0, 0, "00" * 16, chunk)
    placed = Placed(entry, 50_000, 500 * 16_004, 1)
    rounds = 100_000

    def find() -> None:
        for offset in range(rounds):
            chunk.batch_offset(chunk.batch_at(offset % 50_000 - placed.start_offset))

    cache = IndexCache()
    cache.open(0)
    small = WalChunk(ID, "wal/v1/x.wo", 49, 16_004, (BatchIndex(500, 16_000, 0, 0),))
    for stream in range(100):
        held = IndexEntry(stream, 500, 0, 0, 0, "00" * 16, small)
        cache.add(0, cache.now(), [Placed(held, 500 * (i + 1), 16_004 * (i + 1), 1) for i in range(100)])

    def look_up() -> None:
        for number in range(rounds):
            assert cache.find(number % 100, number % 50_000) is not None

    print(f"\n{'index':<42} {'µs':>8}")
    print(f"{'an offset in the cache, 100 x 100 entries':<42} {best_ms(look_up, 3) * 1000 / rounds:>8.2f}")
    print(f"{'a batch in a decoded entry of 500':<42} {best_ms(find, 3) * 1000 / rounds:>8.2f}")
    print(f"{'encoding that entry':<42} {best_ms(lambda: encode_entry(entry)) * 1000:>8.1f}")


async def commit_row(
    name: str, metadata: MetadataStore, objects: ObjectStore, size: int, writers: int, seconds: float
) -> None:
    writer = WalWriter(metadata, objects, zone="bench", incarnation="00" * 16)
    data = memoryview(make_batch(size))
    latencies: list[float] = []
    started = time.perf_counter()

    async def one(stream: int) -> None:
        while (before := time.perf_counter()) - started < seconds:
            await writer.write(0, [PendingBatch(stream, data, 100, 0, 0)])
            latencies.append((time.perf_counter() - before) * 1000)

    await asyncio.gather(*(one(stream) for stream in range(writers)))
    taken = time.perf_counter() - started
    await writer.close()
    latencies.sort()
    p50, p99 = latencies[len(latencies) // 2], latencies[int(len(latencies) * 0.99)]
    rate = len(latencies) * size / taken / 1e6
    print(
        f"{name:<16} {size // 1024:>6} {writers:>8} {rate:>8.1f} {len(latencies) / taken:>10,.0f}"
        f" {p50:>8.1f} {p99:>8.1f}",
        flush=True,
    )


@asynccontextmanager
async def stores(name: str, directory: Path) -> AsyncIterator[tuple[MetadataStore, ObjectStore]]:
    async with AsyncExitStack() as stack:
        kind, _, where = name.partition(" + ")
        metadata_url = f"sqlite:///{directory}/metadata.db"
        if kind == "etcd":
            etcd = EtcdServer(directory / "etcd")
            etcd.start()
            stack.callback(etcd.kill)
            metadata_url = f"etcd://{etcd.address}/bench"
        elif kind == "oxia":
            oxia = stack.enter_context(start_oxia(directory))
            metadata_url = f"oxia://{oxia.address}/default?prefix=bench-{time.time_ns()}"
        objects_url = f"file://{directory}/objects"
        if where == "s3":
            s3 = S3Server(directory / "s3")
            s3.start()
            stack.callback(s3.kill)
            os.environ.update(s3.credentials())
            objects_url = s3.url("bench")
        metadata = await open_store(metadata_url)
        stack.push_async_callback(metadata.close)
        objects = await open_object_store(objects_url)
        stack.push_async_callback(objects.close)
        yield metadata, objects


PAIRS = ["sqlite + file", "sqlite + s3", "etcd + s3", "oxia + s3"]


async def run(names: list[str], seconds: float, directory: Path) -> None:
    columns = (
        f"{'stores':<16} {'KiB':>6} {'writers':>8} {'MB/s':>8} {'writes/s':>10} {'p50 ms':>8} {'p99 ms':>8}"
    )
    print(f"\n{columns}")
    for name in names:
        home = directory / name.replace(" + ", "-")
        home.mkdir()
        async with stores(name, home) as (metadata, objects):
            for size, writers in ((1024, 1), (1024, 64), (256 * 1024, 1), (256 * 1024, 64)):
                await commit_row(name, metadata, objects, size, writers, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="time for each commit row (default 3)")
    parser.add_argument("--only", nargs="+", choices=PAIRS, default=PAIRS, metavar="PAIR")
    parser.add_argument("--directory", type=Path, help="where the stores keep their data")
    options = parser.parse_args()
    cpu_rows()
    lookup_rows()
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="dray-bench-") as scratch:
        asyncio.run(run(options.only, options.seconds, Path(scratch)))


if __name__ == "__main__":
    main()
