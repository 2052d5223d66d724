"""`drayd compactor`: one compactor, from its settings to its end.

With `once` it goes round until nothing is left to be done and says what it did; without, until it is told to
stop. What it is in the middle of is left as it is: whoever comes next goes on there.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TextIO

from compactor.catalog import objects_uri, open_catalog
from compactor.metrics import serving
from compactor.plan import PlanLimits
from compactor.service import Compactor, Counts, Options, Runner
from compactor.spark import SparkRunner
from compactor.work import Done
from dray.config import Settings
from dray.errors import DrayError
from dray.metadata.cluster import open_cluster
from dray.metadata.opening import open_store, redact
from dray.objectstore.opening import open_object_store

log = logging.getLogger(__name__)

# Others that have a claim may be gone: that shows when their session ends. What nobody has decided is decided
# after two seconds.
WAIT_S = 1.0
MAX_WAITS = 60
BAR_WIDTH = 30
# Where nobody looks at a terminal.
LOG_EVERY_S = 10.0


async def compact_for_ever(settings: Settings, interval_s: float) -> None:
    """Until cancelled."""
    async with opened(settings, _progress()) as compactor:
        await compactor.run(interval_s)


async def compact_once(settings: Settings) -> Counts:
    """All that is there now, however young."""
    async with opened(settings, _progress()) as compactor:
        until = await compactor.ends()
        waited = 0
        while True:
            if await compactor.round(everything=True, until=until):
                waited = 0
            elif waited < MAX_WAITS and await _waits(compactor):
                waited += 1
                await asyncio.sleep(WAIT_S)
            else:
                return compactor.counts


@asynccontextmanager
async def opened(
    settings: Settings, progress: Progress | None = None, runner: Runner | None = None
) -> AsyncIterator[Compactor]:
    """A compactor that is registered. `runner` is Spark's unless given. Raises what the stores raise."""
    store = await open_store(settings.metadata, settings.metadata_timeout_ms / 1000)
    try:
        cluster = await open_cluster(store, settings.metadata_domains)
        objects = await open_object_store(settings.objects)
        own = SparkRunner(settings.spark_master, settings.spark_conf) if runner is None else None
        try:
            if own is not None:
                await asyncio.to_thread(own.start)  # what is wrong with Java or Spark is told at once
            uri = objects_uri(settings.objects)
            has_catalog = settings.catalog != "none"
            compactor = Compactor(
                cluster,
                store,
                objects,
                partial(open_catalog, settings.catalog, settings.objects) if has_catalog else None,
                runner or own,  # type: ignore[arg-type]  # one of the two is there
                options_of(settings),
                file_uri=lambda key: f"{uri}/{key}",
                watcher=progress,
            )
            await compactor.start()
            log.info(
                "compactor is ready",
                extra={
                    "metadata": redact(settings.metadata),
                    "objects": redact(settings.objects),
                    "catalog": redact(settings.catalog),
                    "master": settings.spark_master,
                },
            )
            try:
                with serving(compactor.counts, settings.http):
                    yield compactor
            finally:
                with suppress(DrayError):  # a store that is away does not keep anybody from stopping
                    await compactor.stop()
        finally:
            if own is not None:
                await asyncio.to_thread(own.close)
            await objects.close()
    finally:
        await store.close()


def options_of(settings: Settings) -> Options:
    return Options(
        objects_url=settings.objects,
        namespace=settings.table_namespace,
        partition_by=settings.table_iceberg_partitioning,
        limits=PlanLimits(
            max_age_ms=settings.compaction_wal_max_age_ms,
            part_bytes=settings.compaction_task_bytes,
            file_bytes=settings.compaction_target_file_size_bytes,
            max_files=settings.compaction_parquet_max_files_per_partition,
        ),
        grace_ms=settings.wal_gc_grace_ms,
        keep_snapshots=settings.table_snapshots_keep,
        snapshot_age_ms=settings.table_snapshots_max_age_ms,
    )


def tell(counts: Counts, seconds: float) -> str:
    """For people."""
    rows = [
        ("records", f"{counts.records:,}"),
        ("from WAL", _size(counts.wal_bytes)),
        ("data files", f"{counts.files:,} ({_size(counts.file_bytes)})"),
        ("rewritten", f"{counts.rewritten_files:,} small files"),
        ("collected", f"{counts.collected.objects:,} WAL objects, {counts.collected.files:,} data files"),
        ("undecodable", f"{counts.undecodable:,} ranges stay in the WAL"),
        ("unfinished", f"{counts.waiting_tasks:,} tasks"),
        ("took", f"{seconds:.1f} s"),
    ]
    optional = {"rewritten": counts.rewritten_files, "undecodable": counts.undecodable}
    optional |= {"unfinished": counts.waiting_tasks}
    return "\n".join(f"{name:<12} {text}" for name, text in rows if optional.get(name, True))


class Progress:
    """How far the workers are: a line that is written over for somebody at a terminal, else a line of the log
    now and then."""

    def __init__(self, terminal: TextIO | None) -> None:
        self._terminal = terminal
        self._streams = self._bytes = self._done = self._done_bytes = 0
        self._sizes: dict[str, int] = {}
        self._began = self._told_at = 0.0

    def planned(self, streams: int, sizes: dict[str, int]) -> None:
        self._streams, self._sizes, self._bytes = streams, sizes, sum(sizes.values())
        self._done = self._done_bytes = 0
        self._began = self._told_at = time.monotonic()
        self._show()

    def written(self, done: Done) -> None:
        self._done += 1
        self._done_bytes += self._sizes.get(done.key, 0)
        self._show()

    def _show(self) -> None:
        now = time.monotonic()
        if self._terminal is not None:
            part = self._done_bytes / max(self._bytes, 1)
            bar = f"{'█' * int(part * BAR_WIDTH):<{BAR_WIDTH}}"
            end = "\n" if self._done == len(self._sizes) else ""
            self._terminal.write(f"\r\x1b[K{bar} {self._line(now)}{end}")
            self._terminal.flush()
        elif now - self._told_at >= LOG_EVERY_S:
            self._told_at = now
            log.info("writing: %s", self._line(now))

    def _line(self, now: float) -> str:
        rate = self._done_bytes / max(now - self._began, 1e-3)
        left = f", {(self._bytes - self._done_bytes) / rate:.0f} s left" if rate else ""
        files = f"{self._done}/{len(self._sizes)} files of {self._streams} streams"
        return f"{files}, {_size(self._done_bytes)} of {_size(self._bytes)}, {_size(int(rate))}/s{left}"


def _progress() -> Progress:
    return Progress(sys.stderr if sys.stderr.isatty() else None)


async def _waits(compactor: Compactor) -> bool:
    """Whether something will be there in a moment that is not yet."""
    return compactor.counts.undecided > 0 or await compactor.others()


def _size(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
