"""Compaction: a whole job beside its parts, commits, and what a consumer gets out of Parquet.

    python -m bench.compactor
    python -m bench.compactor --only jobs --codecs none zstd --megabytes 200

- `jobs`: WAL objects in a directory become one Parquet file per part. `decode` and `write` are those of
  `bench.columns`; `job` is `compactor.work`, in this process and as tasks of Spark on `local[1]`, with all
  reading, writing and syncing. Time is the processor's, on Spark that of the JVM and its workers together.
- `commits` is `bench.catalog` on the embedded catalog.
- `fetch` reads a topic through a broker that has just been started, with librdkafka: from the WAL, then from
  the Parquet that it became, twice each. MB/s are of values on the clock; CPU is the broker's.

Records are those of `bench.columns`: a key of 12 bytes, and a value of which a third is compressible. MB/s
are of uncompressed batches. Everything counts as one core's: to Spark, a core more is as much again.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from statistics import median
from uuid import UUID

import pyarrow as pa

from bench.broker import READ_ON, DrayServer
from bench.catalog import measure as measure_commits
from bench.catalog import opened as opened_catalog
from bench.clients import Consume
from bench.columns import batches_of, best
from bench.running import run_client, running
from compactor.spark import LocalRunner, SparkRunner
from compactor.task import Input, Kind, Part
from compactor.work import Done, Work
from dray.columns.decode import decode_batches
from dray.columns.parquet import write_parquet
from dray.wal.format import ChunkInput, encode_object
from tests.integration.local_compactor import LocalCompactor
from tests.integration.rdkafka import create_topic
from tests.integration.wire import Wire, produce_request

MIB = 2**20
SECTIONS = ("jobs", "commits", "fetch")
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
SIZES = (100, 1_024)
BATCH_BYTES = (16 * 1_024, MIB)
SNAPSHOTS = (10, 100, 1_000)
# As brokers write them, and as the compactor cuts them.
OBJECT_BYTES = 8 * MIB
PART_BYTES = 64 * MIB
ROUNDS = 3
# Requests that a producer has on their way.
IN_FLIGHT = 16


# --- jobs


def write_wal(root: Path, batches: Sequence[tuple[memoryview, int]], per_batch: int) -> list[Input]:
    """One stream's chunks, each in an object of its own."""
    inputs: list[Input] = []
    end = end_bytes = 0
    at = 0
    while at < len(batches):
        first, size = at, 0
        while at < len(batches) and size < OBJECT_BYTES:
            size += len(batches[at][0])
            at += 1
        records = (at - first) * per_batch
        object_id = UUID(int=len(inputs) + 1)
        chunk = ChunkInput(1, [data for data, _ in batches[first:at]], records, 0, 0)
        encoded = encode_object(object_id, 0, 0, [chunk])
        path = root / "wal" / f"{object_id.hex}.wo"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded.body)
        end, end_bytes = end + records, end_bytes + encoded.chunks[0].length
        place = encoded.chunks[0]
        key = f"wal/{path.name}"
        inputs.append(Input(end, end_bytes, records, object_id, key, place.offset, place.length))
    return inputs


def works_of(root: Path, inputs: Sequence[Input], raw_ratio: float) -> list[Work]:
    parts: list[list[Input]] = [[]]
    for each in inputs:
        if sum(before.length for before in parts[-1]) * raw_ratio >= PART_BYTES:
            parts.append([])
        parts[-1].append(each)
    works = []
    for number, some in enumerate(parts):
        part = Part(tuple(some), UUID(int=number), f"warehouse/{number}.parquet")
        works.append(Work(f"file://{root}", Kind.COMPACT, 0, 0, part))
    return works


def done_well(results: Sequence[Done]) -> int:
    """Their records."""
    assert all(each.stats is not None for each in results), results
    return sum(each.stats.records for each in results if each.stats is not None)


def job_row(spark: SparkRunner, codec: str, value_bytes: int, batch_bytes: int, total_bytes: int) -> None:
    batches = batches_of(codec, value_bytes, batch_bytes, total_bytes)
    decoding, table = best(lambda: decode_batches(batches, 0, max_bytes=4 * total_bytes), ROUNDS)
    writing, stats = best(lambda: write_parquet([table], pa.BufferOutputStream(), partition=0), ROUNDS)
    raw, records = stats.raw_bytes, table.num_rows
    per_batch = records // len(batches)
    with tempfile.TemporaryDirectory(prefix="dray-bench-") as directory:
        root = Path(directory)
        inputs = write_wal(root, batches, per_batch)
        works = works_of(root, inputs, raw / sum(each.length for each in inputs))
        plain, _ = best(lambda: done_well(LocalRunner().run(works)), ROUNDS)
        on_spark = []
        for _ in range(ROUNDS):
            before = cpu_of_children()
            assert done_well(spark.run(works)) == records
            on_spark.append(cpu_of_children() - before)
    seconds = (decoding, writing, decoding + writing, plain, min(on_spark))
    rates = "".join(f" {records / each / 1e6:>6.2f} {raw / each / 1e6:>5.0f}" for each in seconds)
    print(f"{codec:<8} {value_bytes:>6} {batch_bytes // 1024:>6}{rates} {len(works):>6}", flush=True)


def cpu_of_children() -> float:
    """Of all that run below this process: seconds so far, with those of their own that have ended."""
    total, pids = 0.0, [os.getpid()]
    while pids:
        pid = pids.pop()
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):  # threads come and go
                pids += map(int, (task / "children").read_text().split())
        if pid != os.getpid():
            total += cpu_seconds(pid)
    return total


def cpu_seconds(pid: int) -> float:
    """Of the process and its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def jobs(codecs: Sequence[str], total_bytes: int) -> None:
    # The processor's time of one thread is to be measured.
    pa.set_cpu_count(1)
    print("M records/s and MB/s of one core\n")
    names = ("decode", "write", "both", "job", "job on Spark")
    print(f"{'codec':<8} {'bytes':>6} {'KiB':>6}{''.join(f' {name:>12}' for name in names)} {'files':>6}")
    with closing(SparkRunner("local[1]")) as spark:
        for value_bytes in SIZES:
            for codec in codecs:
                for batch_bytes in BATCH_BYTES:
                    job_row(spark, codec, value_bytes, batch_bytes, total_bytes)


# --- commits


def commits() -> None:
    print("commit of 100 files, ms\n")
    print(f"{'snapshots kept':<16} {'least':>8} {'median':>8} {'most':>8}")
    with opened_catalog("sqlite + files") as tables:
        for snapshots in SNAPSHOTS:
            times = measure_commits(tables, snapshots)
            print(f"{snapshots:<16} {min(times):>8.0f} {median(times):>8.0f} {max(times):>8.0f}", flush=True)


# --- fetch


def fill(address: str, topic: str, batches: Sequence[tuple[memoryview, int]]) -> None:
    with Wire(address) as wire:
        for number, (data, _) in enumerate(batches):
            wire.send(produce_request(topic, 0, bytes(data)))
            if number >= IN_FLIGHT:
                assert wire.receive_produced().base_offset >= 0
        for _ in range(min(IN_FLIGHT, len(batches))):
            assert wire.receive_produced().base_offset >= 0


def fetch(codecs: Sequence[str], total_bytes: int) -> None:
    print("one consumer (librdkafka): MB/s, and the broker's CPU s/GB; cold, then once more\n")
    columns = "".join(f" {name:>22}" for name in ("WAL", "WAL again", "Parquet", "Parquet again"))
    print(f"{'codec':<8} {'bytes':>6}{columns}")
    for value_bytes in SIZES:
        for codec in codecs:
            print(f"{codec:<8} {value_bytes:>6}", end="", flush=True)
            with tempfile.TemporaryDirectory(prefix="dray-bench-") as directory:
                server = DrayServer(Path(directory) / "dray")
                fetch_row(server, Path(directory) / "dray" / "data", codec, value_bytes, total_bytes)
            print(flush=True)


def fetch_row(server: DrayServer, data: Path, codec: str, value_bytes: int, total_bytes: int) -> None:
    batch_bytes = 64 * 1_024
    batches = batches_of(codec, value_bytes, batch_bytes, total_bytes)
    records = len(batches) * max(1, batch_bytes // (value_bytes + 22))
    topic = "bench"
    with running(server):
        create_topic(server.address, topic)
        fill(server.address, topic, batches)
    read = partial(read_twice, server, topic, records)
    read()
    stores = {
        "metadata": f"sqlite:///{data}/metadata.db",
        "objects": f"file://{data}/objects",
        "catalog": f"sqlite:///{data}/catalog.db",
    }
    with LocalCompactor(stores) as compactor:
        compactor.compact()
        assert compactor.counts.records == records
    read()


def read_twice(server: DrayServer, topic: str, records: int) -> None:
    with running(server):
        for _ in range(2):
            before = cpu_seconds(server.pid)
            result = run_client(Consume(server.address, topic, 1, records, properties=READ_ON))
            spent = cpu_seconds(server.pid) - before
            print(
                f" {result.bytes / result.seconds / 1e6:>10.0f} {spent / result.bytes * 1e9:>11.1f}", end=""
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--codecs", nargs="+", choices=CODECS, default=CODECS)
    parser.add_argument("--megabytes", type=int, default=128, help="of records in each row (default 128)")
    options = parser.parse_args()
    total_bytes = options.megabytes * 10**6
    if "jobs" in options.only:
        jobs(options.codecs, total_bytes)
        print()
    if "commits" in options.only:
        commits()
        print()
    if "fetch" in options.only:
        fetch(options.codecs, total_bytes)


if __name__ == "__main__":
    main()
