"""Parts on Spark, in one process and on a cluster: the files of a plain loop, whatever dies on the way."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from uuid import UUID

import pytest
from pyspark import SparkContext

from compactor.spark import LocalRunner, SparkRunner
from compactor.task import Input, Kind, Part, file_key
from compactor.work import Done, Work
from dray.errors import JavaMissing
from dray.objectstore.opening import open_object_store
from tests.integration.waiting import eventually_async
from tests.naive_records import CODECS, Plan, build
from tests.servers.process import free_port
from tests.servers.proxy import Mode, TcpProxy
from tests.servers.s3 import S3Server
from tests.servers.spark import SparkCluster, processes_connected_to

# A JVM on a machine where several others start takes its time. PySpark leaves sockets to be collected.
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
SLOW_S = 240.0
CONF = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    # As whoever runs a cluster gives them to executors that have none of their own.
    **{f"spark.executorEnv.{name}": value for name, value in S3Server.credentials().items()},
}


@pytest.fixture
def local() -> Iterator[SparkRunner]:
    runner = SparkRunner("local[2]", CONF, bundle_bytes=1)  # each part is a task of its own
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkCluster]:
    cluster = SparkCluster(tmp_path_factory.mktemp("spark"))
    cluster.start()
    yield cluster
    cluster.kill()


@pytest.fixture
def on_cluster(cluster: SparkCluster) -> Iterator[SparkRunner]:
    runner = SparkRunner(cluster.url, CONF, bundle_bytes=1)
    yield runner
    runner.close()


async def make_works(url: str, parts: int = 6) -> list[Work]:
    """Parts of two chunks each, with every codec among them; the same bytes in every store."""
    store = await open_object_store(url)
    works: list[Work] = []
    codecs = list(CODECS)
    for number in range(parts):
        inputs: list[Input] = []
        for chunk in range(2):
            records = tuple(
                (1_700_000_000_000 + n, f"k{n}".encode(), bytes([number]) * 100, (("h", None),))
                for n in range(500)
            )
            batch = build(Plan(records, codecs[(number + chunk) % len(codecs)]))
            body = len(batch).to_bytes(4, "big") + batch
            path = f"wal/{number}-{chunk}"
            await store.put(path, body)
            end = 500 * (chunk + 1)
            inputs.append(Input(end, 0, 500, UUID(int=number * 10 + chunk), path, 0, len(body)))
        file_id = UUID(int=1000 + number)
        part = Part(tuple(inputs), file_id, file_key("warehouse/kafka/orders", number, 0, 1000, file_id))
        works.append(Work(url, Kind.COMPACT, number, 0, part))
    await store.close()
    return works


async def files(url: str, works: Sequence[Work]) -> list[bytes]:
    store = await open_object_store(url)
    bodies = [bytes(await store.get(work.part.key)) for work in works]
    await store.close()
    return bodies


def without_object(work: Work) -> Work:
    first, *rest = work.part.inputs
    return replace(work, part=replace(work.part, inputs=(replace(first, path="wal/gone"), *rest)))


async def test_plain_python_and_spark_write_the_same_bytes(
    tmp_path: Path, local: SparkRunner, on_cluster: SparkRunner
) -> None:
    runners: dict[str, LocalRunner | SparkRunner]
    runners = {"plain": LocalRunner(), "local": local, "cluster": on_cluster}
    results: dict[str, list[Done]] = {}
    bodies: dict[str, list[bytes]] = {}
    for name, runner in runners.items():
        url = f"file://{tmp_path}/{name}"
        works = await make_works(url)
        told: list[Done] = []
        results[name] = await asyncio.to_thread(runner.run, works, told.append)
        assert sorted(told, key=lambda each: each.key) == sorted(results[name], key=lambda each: each.key)
        bodies[name] = await files(url, works)
        runner.close()  # a process has one Spark at a time
    assert [each.stats is not None and each.stats.records for each in results["plain"]] == [1000] * 6
    assert results["local"] == results["cluster"] == results["plain"]
    assert bodies["local"] == bodies["cluster"] == bodies["plain"]


async def test_what_cannot_be_read_is_said_of_its_part_alone(tmp_path: Path, local: SparkRunner) -> None:
    works = await make_works(f"file://{tmp_path}/objects", parts=3)
    away = f"s3://bucket/prefix?endpoint=http://127.0.0.1:{free_port()}&region=us-east-1"
    works[0] = without_object(works[0])
    works[1] = replace(works[1], objects=away)
    gone, unreachable, good = await asyncio.to_thread(local.run, works)
    assert [(each.end_offset, each.records) for each in gone.undecodable] == [(500, 500)]
    assert "wal/gone: there is no such object" in gone.undecodable[0].problem
    assert unreachable.stats is None
    assert unreachable.problem is not None
    assert unreachable.problem.startswith("ObjectStoreUnavailable: objects s3://bucket/prefix")
    assert good.stats is not None


async def test_executors_run_the_code_of_the_driver(on_cluster: SparkRunner) -> None:
    """Whatever version they have installed: here it is this checkout."""
    on_cluster.start()
    packages = SparkContext.getOrCreate().parallelize(["dray", "compactor"], 2)
    places = packages.map(import_module).map(attrgetter("__file__")).collect()
    assert [Path(place).parts[-3:] for place in places] == [
        ("dray-compactor.zip", package, "__init__.py") for package in ("dray", "compactor")
    ]


@pytest.fixture
async def proxy(s3_server: S3Server) -> AsyncIterator[TcpProxy]:
    """Before the object store of a part that is to last until something died."""
    proxy = TcpProxy(s3_server.address)
    await proxy.start()
    await proxy.set_mode(Mode.BLACK_HOLE)
    yield proxy
    await proxy.stop()


async def test_an_executor_that_dies_in_the_middle_changes_nothing(
    tmp_path: Path, cluster: SparkCluster, on_cluster: SparkRunner, s3_server: S3Server, proxy: TcpProxy
) -> None:
    plain = await make_works(s3_server.url("plain"))
    expected = await asyncio.to_thread(LocalRunner().run, plain)
    works = await make_works(s3_server.url("killed"))
    through = s3_server.url("killed", address=proxy.address)
    running = asyncio.create_task(
        asyncio.to_thread(on_cluster.run, [replace(work, objects=through) for work in works])
    )
    port = int(proxy.address.rpartition(":")[2])
    busy = await eventually_async(lambda: processes_connected_to(port), "a worker that reads", SLOW_S)
    executors = set(cluster.executors())
    (killed, *_) = [each for pid in busy for each in ancestors(pid) if each in executors]
    os.kill(killed, signal.SIGKILL)
    await proxy.set_mode(Mode.PASS)
    assert await asyncio.wait_for(running, SLOW_S) == expected
    assert await files(s3_server.url("killed"), works) == await files(s3_server.url("plain"), plain)


async def test_a_part_that_kills_its_worker_each_time_fails_alone_and_says_what_to_do(
    tmp_path: Path, local: SparkRunner, s3_server: S3Server, proxy: TcpProxy
) -> None:
    works = await make_works(f"file://{tmp_path}/objects", parts=4)
    works[1] = replace(works[1], objects=s3_server.url("poison", address=proxy.address))
    running = asyncio.create_task(asyncio.to_thread(local.run, works))
    port = int(proxy.address.rpartition(":")[2])
    while not running.done():
        for pid in await asyncio.to_thread(processes_connected_to, port):
            os.kill(pid, signal.SIGKILL)
        await asyncio.wait([running], timeout=0.05)
    results = running.result()
    assert [each.stats is not None for each in results] == [True, False, True, True]
    problem = results[1].problem
    assert problem is not None
    assert "worker exited" in problem
    assert "make compaction.task.bytes smaller, or give executors more memory" in problem
    assert "\n" not in problem


async def test_a_spark_that_died_is_started_anew(tmp_path: Path, local: SparkRunner) -> None:
    works = await make_works(f"file://{tmp_path}/objects", parts=2)
    local.start()
    assert SparkContext._gateway is not None
    jvm = SparkContext._gateway.proc
    jvm.kill()
    jvm.wait()
    results = await asyncio.to_thread(local.run, works)
    assert [each.problem for each in results] == [None, None]


async def test_without_java_every_part_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    runner = SparkRunner("local[1]")
    with pytest.raises(JavaMissing):
        runner.start()
    works = await make_works(f"file://{tmp_path}/objects", parts=2)
    results = await asyncio.to_thread(runner.run, works)
    assert all(each.problem is not None and "Spark needs Java 17" in each.problem for each in results)
    runner.close()


def ancestors(pid: int) -> Iterator[int]:
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])
        yield pid
