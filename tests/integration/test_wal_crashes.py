"""kill -9 between every two steps of the writer: afterwards the index shows all of an object or nothing."""

from __future__ import annotations

import asyncio
import secrets
import signal
import sys
import time
from pathlib import Path

import pytest

from dray.index.entry import WalChunk, place_all, sequence_of
from dray.metadata.opening import open_store
from dray.metadata.store import MetadataStore
from dray.objectstore.opening import open_object_store
from dray.objectstore.store import ObjectStore
from dray.wal.format import decode_object
from dray.wal.objects import STAGING, decode_marker
from dray.wal.orphans import OrphanCollector
from dray.wal.writer import WalWriter
from tests.integration.wal_child import STEPS, D
from tests.pending import pending

RECORDS = sum(batch.records for batch in pending(1, copies=2))


@pytest.fixture(params=["sqlite and files", "etcd and S3", "oxia and S3"])
def urls(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    name, fresh = request.param.split()[0], f"test-{secrets.token_hex(6)}"
    if name == "sqlite":
        return f"sqlite:///{tmp_path}/metadata.db", f"file://{tmp_path}/objects"
    address = request.getfixturevalue(f"{name}_address")
    objects = request.getfixturevalue("s3_server").url(fresh)
    if name == "etcd":
        return f"etcd://{address}/{fresh}", objects
    return f"oxia://{address}/default?prefix={fresh}", objects


async def committed(metadata: MetadataStore, objects: ObjectStore) -> list[int]:
    """The end of each stream; every entry's bytes are there and whole."""
    ends = []
    await metadata.barrier(D)
    for stream in (1, 2, 3):
        placed = place_all(await metadata.entries(D, sequence_of(stream), 0, 100))
        for each in placed:
            assert isinstance(each.entry.where, WalChunk)
            decode_object(await objects.get(each.entry.where.path), D)
        ends.append(placed[-1].end_offset if placed else 0)
    return ends


async def referenced(metadata: MetadataStore) -> set[str]:
    paths = set()
    for stream in (1, 2, 3):
        for each in place_all(await metadata.entries(D, sequence_of(stream), 0, 100)):
            assert isinstance(each.entry.where, WalChunk)
            paths.add(each.entry.where.path)
    return paths


@pytest.mark.parametrize("step", STEPS)
async def test_after_a_kill_there_is_all_of_an_object_or_nothing(urls: tuple[str, str], step: str) -> None:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.integration.wal_child", *urls, step, stdout=asyncio.subprocess.PIPE
    )
    said, _ = await child.communicate()
    assert child.returncode == -signal.SIGKILL
    assert said.decode().split() == [str(RECORDS)] * 3  # the first object was acknowledged

    metadata, objects = await open_store(urls[0]), await open_object_store(urls[1])
    landed = step == "before the answer"
    assert await committed(metadata, objects) == [RECORDS * (2 if landed else 1)] * 3
    staged = await metadata.scan(D, STAGING, limit=10)
    marked = {decode_marker(record.key, record.value).path for record in staged}
    listed = {info.key for info in await objects.list()}
    orphans = listed - await referenced(metadata)
    assert len(orphans) == (step == "before the append")
    assert orphans <= marked  # protocol 13: it can be found

    # Nothing is left that the collector does not find, and it takes nothing that counts.
    before = await committed(metadata, objects)
    collector, now_ms = OrphanCollector(metadata, objects), time.time_ns() // 1_000_000 + 10**9
    await collector.collect(D, now_ms, 0)
    await collector.collect_unmarked(D, "z", now_ms, 0)
    assert await metadata.scan(D, STAGING, limit=10) == []
    assert len(await objects.list()) == (2 if landed else 1)
    assert await committed(metadata, objects) == before

    writer = WalWriter(metadata, objects, zone="z", incarnation="00" * 16)
    again = await asyncio.gather(*(writer.write(D, pending(stream, copies=2)) for stream in (1, 2, 3)))
    assert [each.start_offset for each in again] == before
    await writer.close()
    await metadata.close()
    await objects.close()
