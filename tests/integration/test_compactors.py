"""Several compactors at once, one that sleeps while others go on, and catalogs that are away: rows once."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from compactor.task import State
from tests.integration.compacting import (
    Child,
    CompactedCluster,
    Rereader,
    Traffic,
    check_records,
    check_stores,
    traffic_and_reader,
    unfinished,
)
from tests.integration.compactor_child import AFTER, BEFORE
from tests.integration.conftest import store_urls
from tests.servers.iceberg_rest import IcebergRestServer, Relay
from tests.servers.proxy import Mode, TcpProxy

pytestmark = pytest.mark.timeout(600)

# Where a compactor falls asleep. Not on SQLite: in a transaction, all others would wait for it.
ASLEEP = {
    "etcd and S3": [
        ("put .parquet", BEFORE),
        ("put compaction compact PARQUET_WRITTEN", AFTER),  # before it looks at the table
        ("put compaction compact ICEBERG_COMMITTED", BEFORE),
        ("swap", BEFORE),
        ("append garbage wal/objects", BEFORE),
    ],
    "oxia and S3": [
        ("write .metadata.json", BEFORE),  # between touch and commit
        ("put compaction compact ICEBERG_COMMITTED", AFTER),
        ("swap", BEFORE),
        ("swap's deletes", BEFORE),
        ("delete .wo", BEFORE),
    ],
}


@contextmanager
def started(cluster: CompactedCluster) -> Iterator[tuple[Traffic, Rereader]]:
    seed = random.randrange(2**32)
    try:
        cluster.start()
        with traffic_and_reader(cluster, seed, 0.1) as (traffic, reader):
            yield traffic, reader
    finally:
        cluster.kill()


def finish(child: Child, cluster: CompactedCluster, traffic: Traffic, reader: Rereader) -> None:
    """Clients come to rest, a last compactor does all that is left, and then everything has to be right."""
    traffic.stop()
    child.begin(rounds=200)
    assert child.ready()
    child.go()
    assert child.ended() == 0
    check_records(cluster, traffic, reader)
    reader.stop()
    check_stores(cluster)


@pytest.mark.parametrize("stack", ["sqlite and files", "oxia and S3"])
@pytest.mark.parametrize("alone", [False, True], ids=["sharing", "snatching"])
def test_two_compactors_make_rows_once(
    request: pytest.FixtureRequest, stack: str, alone: bool, tmp_path: Path
) -> None:
    """Those that snatch take each other for gone all the time: nothing rests on registrations."""
    cluster = CompactedCluster(tmp_path, *store_urls(request, stack, tmp_path))
    children = [Child(cluster.settings(), tmp_path / f"compactors-{name}.log") for name in "ab"]
    try:
        with started(cluster) as (traffic, reader):
            for child in children:
                child.begin(forever=True, alone=alone, at_once=True)
            for _ in range(4):
                traffic.more(3)
                for child in children:
                    child.round_done(2)
                reader.check()
            for child in children:
                child.signal(signal.SIGKILL)
                child.ended()
            finish(children[0], cluster, traffic, reader)
    finally:
        for child in children:
            child.close()


@pytest.mark.parametrize("stack", ASLEEP)
def test_a_compactor_that_wakes_late_changes_nothing(
    request: pytest.FixtureRequest, stack: str, tmp_path: Path
) -> None:
    cluster = CompactedCluster(tmp_path, *store_urls(request, stack, tmp_path))
    sleeper = Child(cluster.settings(), tmp_path / "sleeper.log")
    other = Child(cluster.settings(), tmp_path / "other.log")
    try:
        with started(cluster) as (traffic, reader):
            other.begin(rounds=2)
            assert other.ready()
            other.go()
            assert other.ended() == 0
            for effect, side in ASLEEP[stack]:
                traffic.more(3)
                sleeper.begin(effect=effect, side=side, kill_at=1, stop=True, at_once=True)
                assert sleeper.stopped(), f"nobody comes to {side} {effect!r}"
                # Its session ends; then its tasks are done by the other one, and more of the same streams.
                other.begin(forever=True, alone=False, at_once=True)
                while any(task.owner == sleeper.owner for task in unfinished(cluster)):
                    other.round_done()
                traffic.more(1)
                done = goal = other.round_done()
                while done["rewritten_files"] == 0 or done["tasks"] < goal["tasks"] + 2:
                    traffic.more(1)
                    done = other.round_done()
                sleeper.signal(signal.SIGCONT)
                assert sleeper.ended() == 0, f"after {effect!r}"
                other.round_done()
                other.signal(signal.SIGKILL)
                other.ended()
                reader.check()
            finish(other, cluster, traffic, reader)
    finally:
        sleeper.close()
        other.close()


async def test_a_catalog_that_is_away_stops_nothing_but_tables(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    server = IcebergRestServer(tmp_path / "rest")
    await asyncio.to_thread(server.start)
    relay, proxy = Relay(server.address), TcpProxy("")
    relay.start()
    proxy.target = relay.address
    await proxy.start()
    catalog = server.url(address=proxy.address)
    cluster = CompactedCluster(tmp_path, *store_urls(request, "sqlite and files", tmp_path), catalog)
    child = Child(cluster.settings(), tmp_path / "compactor.log")

    def has_got_to(goals: tuple[int, int], now: dict[str, int]) -> bool:
        """So many commits and tasks, and nothing waits any more."""
        return relay.commits >= goals[0] and now["tasks"] >= goals[1] and not now["waiting_tasks"]

    def until(what: Callable[[dict[str, int]], bool]) -> dict[str, int]:
        """Rounds of the compactor, while clients go on."""
        traffic.more(1)
        while not what(done := child.round_done()):
            traffic.more(1)
        return done

    try:
        with started(cluster) as (traffic, reader):
            child.begin(forever=True, at_once=True)
            done = await asyncio.to_thread(until, lambda now: now["tasks"] >= 4)
            for status in (500, 502, 503, 504):
                relay.answer_commits(status)  # it is committed all the same
                goals = relay.commits + 2, 0
                await asyncio.to_thread(until, partial(has_got_to, goals))
            for mode in (Mode.BLACK_HOLE, Mode.DROP_ANSWERS, Mode.REFUSE):
                await proxy.set_mode(mode)
                proxy.cut()
                done = await asyncio.to_thread(until, lambda now: now["waiting_tasks"] > 0)
                await asyncio.to_thread(reader.again)
                tasks = await asyncio.to_thread(unfinished, cluster)
                assert State.PARQUET_WRITTEN in {task.state for task in tasks}
                await proxy.set_mode(Mode.PASS)
                proxy.cut()
                goals = 0, done["tasks"] + 1
                await asyncio.to_thread(until, partial(has_got_to, goals))
            child.signal(signal.SIGKILL)
            child.ended()
            assert "its table waits" in (tmp_path / "compactor.log").read_text()
            await asyncio.to_thread(finish, child, cluster, traffic, reader)
    finally:
        child.close()
        await proxy.stop()
        relay.stop()
        server.kill()


def test_without_a_catalog_files_are_made_and_a_catalog_that_comes_later_gets_them_all(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    cluster = CompactedCluster(tmp_path, *store_urls(request, "sqlite and files", tmp_path))
    child = Child(cluster.settings(catalog="none"), tmp_path / "without.log")
    later = Child(cluster.settings(), tmp_path / "with.log")
    try:
        with started(cluster) as (traffic, reader):
            child.begin(forever=True, at_once=True)
            while child.round_done()["rewritten_files"] == 0:
                traffic.more(2)
            child.signal(signal.SIGKILL)
            child.ended()
            for place in cluster.places:
                traffic.more(1, place)
            finish(later, cluster, traffic, reader)
    finally:
        child.close()
        later.close()
