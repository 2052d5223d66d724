"""Batches to columns, columns to Parquet, and both ways back: rates of one core.

    python -m bench.columns
    python -m bench.columns --megabytes 200 --only zstd

Records have a key of 12 bytes and a value of which a third is compressible; batches are of 16 KiB, as Java's
clients make them, or of 1 MiB. MB/s are of uncompressed batches. Time is that of the processor, the best of
several runs; whatever waits for disks or networks is left out.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from dray.columns.decode import decode_batches
from dray.columns.encode import encode_batches
from dray.columns.parquet import read_row_group, row_groups, write_parquet
from tests.naive_records import CODECS, Plan, build

T = TypeVar("T")
MIB = 2**20
BATCH_BYTES = MIB
# Different ones, repeated until there are enough: no row group sees one twice.
DISTINCT_BYTES = 9 * MIB


def batches_of(
    codec: str, value_bytes: int, batch_bytes: int, total_bytes: int
) -> list[tuple[memoryview, int]]:
    rng = random.Random(codec)
    per_batch = max(1, batch_bytes // (value_bytes + 22))
    kept: list[memoryview] = []
    for _ in range(-(-DISTINCT_BYTES // batch_bytes)):
        rows = [
            (
                1_700_000_000_000 + n // 10,
                b"key-%08d" % rng.randrange(10**8),
                rng.randbytes(value_bytes * 2 // 3) + b"compress" * (value_bytes // 3 // 8 + 1),
                (),
            )
            for n in range(per_batch)
        ]
        rows = [(at, key, value[:value_bytes], none) for at, key, value, none in rows]
        kept.append(memoryview(build(Plan(rows, codec))))
    count = -(-total_bytes // (per_batch * (value_bytes + 22)))
    return [(kept[n % len(kept)], n * per_batch) for n in range(count)]


def best(work: Callable[[], T], rounds: int = 3) -> tuple[float, T]:
    """Seconds, and what it gave."""
    found = float("inf")
    for _ in range(rounds):
        started = time.process_time()
        result = work()
        found = min(found, time.process_time() - started)
    return found, result


def row(codec: str, value_bytes: int, batch_bytes: int, total_bytes: int) -> None:
    batches = batches_of(codec, value_bytes, batch_bytes, total_bytes)
    decoding, table = best(lambda: decode_batches(batches, 0, max_bytes=4 * total_bytes))
    sink = pa.BufferOutputStream()

    def write() -> bytes:
        nonlocal sink
        sink = pa.BufferOutputStream()
        write_parquet([table], sink, partition=0)
        return bytes(sink.getvalue())

    writing, body = best(write)
    metadata = pq.read_metadata(pa.BufferReader(body))
    groups = row_groups(metadata)
    parts = [body[group.byte_start : group.byte_end] for group in groups]
    reading, tables = best(lambda: [read_row_group(metadata, n, part) for n, part in enumerate(parts)])
    encoding, rebuilt = best(
        lambda: [batch for each in tables for batch in encode_batches(each, target_bytes=BATCH_BYTES)]
    )
    raw = sum(len(batch.data) for batch in rebuilt)
    seconds = (decoding, writing, decoding + writing, reading, encoding)
    rates = "".join(f" {table.num_rows / each / 1e6:>7.2f} {raw / each / 1e6:>6.0f}" for each in seconds)
    print(f"{codec:<18} {value_bytes:>6} {batch_bytes // 1024:>6}{rates} {len(body) / raw:>6.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=100, help="of records in each row (default 100)")
    parser.add_argument("--only", nargs="+", choices=CODECS, default=list(CODECS), metavar="CODEC")
    options = parser.parse_args()
    # The processor's time of one thread is to be measured.
    pa.set_cpu_count(1)
    print("M records/s and MB/s of one core; file: its size beside that of uncompressed batches\n")
    steps = "".join(f" {name:>14}" for name in ("decode", "write", "both", "read", "encode"))
    print(f"{'codec':<18} {'bytes':>6} {'KiB':>6}{steps} {'file':>6}")
    for value_bytes in (100, 1_024):
        for codec in options.only:
            for batch_bytes in (16 * 1_024, MIB):
                row(codec, value_bytes, batch_bytes, options.megabytes * 10**6)


if __name__ == "__main__":
    main()
