"""Commits to a table: how long one of 100 files takes, by the snapshots that the table keeps.

    python -m bench.catalog
    python -m bench.catalog --catalogs "sqlite + files" "rest + s3" --snapshots 10 100

From the call to its return, the look at what is in the table included. Every row has a table of its own,
whose snapshots were made by such commits of one file. Servers are those of the tests.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace as changed
from pathlib import Path
from uuid import uuid4

from compactor.catalog import TopicTable, TopicTables, open_catalog
from compactor.commit import NewFile, append, expire
from tests.servers.iceberg_rest import IcebergRestServer
from tests.servers.s3 import S3Server
from tests.tables import TOPIC_ID, write_file

FILES = 100
ROUNDS = 20
CATALOGS = ("sqlite + files", "sqlite + s3", "rest + files", "rest + s3")


@contextmanager
def opened(catalog: str) -> Iterator[TopicTables]:
    kind, _, store = catalog.partition(" + ")
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        objects, s3 = f"file://{directory}/objects", None
        if store == "s3":
            s3 = S3Server(directory / "s3")
            s3.start()
            stack.callback(s3.kill)
            os.environ.update(s3.credentials())
            objects = s3.url("bench")
        url = f"sqlite:///{directory}/catalog.db"
        if kind == "rest":
            server = IcebergRestServer(directory / "rest", s3)
            server.start()
            stack.callback(server.kill)
            url = server.url()
        yield stack.enter_context(closing(open_catalog(url, objects)))


def measure(tables: TopicTables, snapshots: int) -> list[float]:
    table = tables.ensure_table("bench", f"kept-{snapshots}", TOPIC_ID)
    made = write_file(table, 0, 0, 10)
    while len(table.table.snapshots()) < snapshots:
        append(table, [next_file(table, made, 0)])
    times = []
    for _ in range(ROUNDS):
        files = [next_file(table, made, partition) for partition in range(1, FILES + 1)]
        started = time.perf_counter()
        append(table, files)
        times.append((time.perf_counter() - started) * 1000)
        expire(table, keep=snapshots, older_than_ms=time.time_ns() // 1_000_000 + 60_000)
    return times


def next_file(table: TopicTable, made: NewFile, partition: int) -> NewFile:
    """As if it had been written: a commit looks at no data file."""
    start = table.end_offset(partition)
    path = f"{made.path}-{partition}-{start}"
    return changed(
        made, task_id=uuid4(), partition=partition, start_offset=start, end_offset=start + 10, path=path
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--catalogs", nargs="+", choices=CATALOGS, default=CATALOGS)
    parser.add_argument("--snapshots", nargs="+", type=int, default=[10, 100, 1000])
    arguments = parser.parse_args()
    print(f"commit of {FILES} files, ms\n")
    print("| catalog | snapshots kept | least | median | most |\n|---|---|---|---|---|")
    for catalog in arguments.catalogs:
        with opened(catalog) as tables:
            for snapshots in arguments.snapshots:
                times = measure(tables, snapshots)
                row = (min(times), statistics.median(times), max(times))
                print(
                    f"| {catalog} | {snapshots} | {' | '.join(f'{each:.0f}' for each in row)} |", flush=True
                )


if __name__ == "__main__":
    main()
