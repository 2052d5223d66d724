"""Commits to tables on real catalogs and stores, with answers that are lost and servers that go away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import duckdb
import pytest

from compactor.catalog import TopicTable, TopicTables, open_catalog
from compactor.commit import Applied, Rewrite, append, expire, replace
from dray.errors import CatalogDenied, CatalogUnavailable, InputsGone, TableCommitUnknown
from tests.servers.iceberg_rest import IcebergRestServer, Relay
from tests.servers.process import free_port
from tests.servers.proxy import Mode, TcpProxy
from tests.servers.s3 import S3Server
from tests.tables import TOPIC_ID, expected, load_extensions, read_duckdb, read_iceberg, write_file


@dataclass
class Stack:
    catalog: str
    objects: str
    duckdb: list[str]  # how DuckDB finds the store

    def open(self) -> TopicTables:
        return open_catalog(self.catalog, self.objects)


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[IcebergRestServer]:
    """Over directories."""
    server = IcebergRestServer(tmp_path_factory.mktemp("rest"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def rest_over_s3(
    tmp_path_factory: pytest.TempPathFactory, s3_server: S3Server
) -> Iterator[IcebergRestServer]:
    server = IcebergRestServer(tmp_path_factory.mktemp("rest-s3"), s3_server)
    server.start()
    yield server
    server.kill()


@pytest.fixture(params=["sqlite and S3", "rest and files", "rest and S3"])
def stack(request: pytest.FixtureRequest, tmp_path: Path) -> Stack:
    objects, secrets = f"file://{tmp_path}/objects", []
    if request.param.endswith("S3"):
        s3: S3Server = request.getfixturevalue("s3_server")
        objects = s3.url(tmp_path.name)
        secrets = [
            f"CREATE SECRET (TYPE s3, KEY_ID '{s3.access_key}', SECRET '{s3.secret_key}',"
            f" REGION '{s3.region}', ENDPOINT '{s3.address}', URL_STYLE 'path', USE_SSL false)"
        ]
    match request.param:
        case "sqlite and S3":
            catalog = f"sqlite:///{tmp_path}/catalog.db"
        case "rest and files":
            catalog = request.getfixturevalue("rest").url()
        case _:
            catalog = request.getfixturevalue("rest_over_s3").url()
    return Stack(catalog, objects, secrets)


@pytest.fixture
def table(rest: IcebergRestServer, tmp_path: Path) -> Iterator[TopicTable]:
    """As it is in the REST catalog, asked for directly."""
    with closing(open_catalog(rest.url(), f"file://{tmp_path}/objects")) as tables:
        yield tables.ensure_table(tmp_path.name, "orders", TOPIC_ID)


@pytest.fixture
def relay(rest: IcebergRestServer) -> Iterator[Relay]:
    made = Relay(rest.address)
    made.start()
    yield made
    made.stop()


def through(address: str, rest: IcebergRestServer, table: TopicTable, **options: str) -> TopicTable:
    """The same table, by way of what stands before the server."""
    place = table.table.location().partition("/warehouse/")[0]
    tables = open_catalog(rest.url(address=address, options=options), place)
    return tables.ensure_table(table.namespace, table.topic, TOPIC_ID)


def at_once(seconds: float) -> None:
    """Instead of a pause between attempts."""


def test_a_table_from_its_first_commit_to_its_last(stack: Stack, tmp_path: Path) -> None:
    with closing(stack.open()) as tables, closing(stack.open()) as others:
        table = tables.ensure_table(tmp_path.name, "orders.eu", TOPIC_ID)
        assert table.created
        other = others.ensure_table(tmp_path.name, "orders.eu", TOPIC_ID)
        assert not other.created

        files = [write_file(table, partition, 0, 10) for partition in range(100)]
        raced: list[Applied] = []

        def touch() -> None:
            if not raced:
                raced.extend(append(other, files[:50]))

        applied = append(table, files, touch=touch, pause=at_once)
        assert [each.before for each in applied] == [True] * 50 + [False] * 50
        rows = expected(*((partition, 0, 10) for partition in range(100)))
        assert read_iceberg(table.table) == read_duckdb(table.table, stack.duckdb) == rows

        later = write_file(table, 0, 10, 20, follows=10)
        append(table, [later])
        merged = write_file(table, 0, 0, 20)
        rewrite = Rewrite(merged.task_id, 0, (files[0].path, later.path), (merged,))
        replace(table, [rewrite])
        assert replace(other, [rewrite])[0].before
        expired = expire(table, keep=1, older_than_ms=time.time_ns() // 1_000_000 + 60_000)
        assert (expired.snapshots, set(expired.data_files)) == (3, {files[0].path, later.path})
        assert all(each.before for each in append(other, [*files, later]))
        rows = expected((0, 0, 20), *((partition, 0, 10) for partition in range(1, 100)))
        assert read_iceberg(table.table) == read_duckdb(table.table, stack.duckdb) == rows


def test_a_table_that_was_dropped(stack: Stack, tmp_path: Path) -> None:
    with closing(stack.open()) as tables:
        table = tables.ensure_table(tmp_path.name, "orders", TOPIC_ID)
        old = write_file(table, 0, 0, 10)
        append(table, [old])
        tables.catalog.drop_table(table.table.name())
        again = tables.ensure_table(tmp_path.name, "orders", TOPIC_ID)
        assert again.created
        append(again, [old, write_file(again, 0, 10, 20, follows=10)])
        assert read_duckdb(again.table, stack.duckdb) == expected((0, 0, 20))


@pytest.mark.parametrize("statuses", [[500], [502], [503], [504], [409], [500, 500]])
def test_a_catalog_that_commits_and_says_otherwise(
    statuses: list[int], table: TopicTable, rest: IcebergRestServer, relay: Relay
) -> None:
    behind = through(relay.address, rest, table)
    files = [write_file(table, 0, 0, 10), write_file(table, 1, 0, 10)]
    relay.answer_commits(*statuses)
    applied = append(behind, files, pause=at_once)
    assert relay.commits == 1
    snapshot = table.table.refresh().current_snapshot()
    assert snapshot is not None
    assert applied == [Applied(file.task_id, file.path, snapshot.snapshot_id, before=False) for file in files]
    assert read_duckdb(table.table) == expected((0, 0, 10), (1, 0, 10))


async def test_an_answer_that_is_lost(table: TopicTable, rest: IcebergRestServer) -> None:
    proxy = TcpProxy(rest.address)
    await proxy.start()
    loop = asyncio.get_running_loop()

    def on_loop(mode: Mode) -> None:
        asyncio.run_coroutine_threadsafe(proxy.set_mode(mode), loop).result()

    touched: list[None] = []

    def touch() -> None:
        touched.append(None)
        on_loop(Mode.DROP_ANSWERS)

    def commit() -> list[Applied]:
        behind = through(proxy.address, rest, table)
        return append(behind, [write_file(table, 0, 0, 10)], touch=touch, pause=at_once)

    try:
        committing = asyncio.create_task(asyncio.to_thread(commit))
        while not touched or (await asyncio.to_thread(table.table.refresh)).current_snapshot() is None:
            await asyncio.wait([committing], timeout=0.02)
        proxy.cut()
        await proxy.set_mode(Mode.PASS)
        applied = await committing
    finally:
        await proxy.stop()
    assert [each.before for each in applied] == [False]
    assert len(touched) == 1
    assert read_duckdb(table.table) == expected((0, 0, 10))


def test_a_catalog_that_shows_only_one_snapshot(table: TopicTable, rest: IcebergRestServer) -> None:
    narrow = through(rest.address, rest, table, **{"snapshot-loading-mode": "refs"})
    files = [write_file(table, 0, n, n + 5) for n in range(0, 15, 5)]
    for file in files:
        append(narrow, [file])
    narrow.load()
    assert len(narrow.table.snapshots()) == 1
    applied = append(narrow, files)
    assert [(each.before, each.snapshot_id is None) for each in applied] == [
        (True, True),
        (True, True),
        (True, False),
    ]
    assert read_duckdb(table.table) == expected((0, 0, 15))


def test_a_catalog_that_goes_away(tmp_path: Path) -> None:
    server = IcebergRestServer(tmp_path / "rest")
    server.start()
    tables = open_catalog(server.url(), f"file://{tmp_path}/objects")
    try:
        table = tables.ensure_table("kafka", "orders", TOPIC_ID)
        first, second = write_file(table, 0, 0, 10), write_file(table, 0, 10, 20, follows=10)
        server.kill()
        with pytest.raises(CatalogUnavailable):
            append(table, [first], pause=at_once)
        with pytest.raises(CatalogUnavailable):
            tables.ensure_table("kafka", "orders", TOPIC_ID)
        with pytest.raises(CatalogUnavailable):
            open_catalog(server.url(), f"file://{tmp_path}/objects")
        server.start()
        append(table, [first])
        # It is gone when the commit is sent: nobody can say whether it got there.
        with pytest.raises(TableCommitUnknown):
            append(table, [second], touch=server.kill, pause=at_once)
        server.start()
        append(table, [first, second])
        assert read_duckdb(table.table) == expected((0, 0, 20))
    finally:
        server.kill()
        tables.close()


def test_a_catalog_that_refuses_us(table: TopicTable, rest: IcebergRestServer, relay: Relay) -> None:
    behind = through(relay.address, rest, table)
    file = write_file(table, 0, 0, 10)
    relay.answer_commits(403)
    with pytest.raises(CatalogDenied, match="correct the token"):
        append(behind, [file], pause=at_once)
    assert append(behind, [file])[0].before  # it was none of the server's answers
    assert read_duckdb(table.table) == expected((0, 0, 10))


def test_nobody_at_the_address(tmp_path: Path) -> None:
    with pytest.raises(CatalogUnavailable, match=r"catalog rest\+http://127\.0\.0\.1") as raised:
        open_catalog(f"rest+http://127.0.0.1:{free_port()}/?token=tell-nobody", f"file://{tmp_path}")
    assert "tell-nobody" not in str(raised.value)


def test_deleted_rows_do_not_come_back(rest: IcebergRestServer, table: TopicTable) -> None:
    """DuckDB deletes by files that name rows of ours: a file made anew would have them again."""
    files = [write_file(table, 0, 0, 5), write_file(table, 0, 5, 10), write_file(table, 1, 0, 5)]
    append(table, files)
    merged = [write_file(table, 0, 0, 10), write_file(table, 1, 0, 5)]
    rewrites = [
        Rewrite(merged[0].task_id, 0, (files[0].path, files[1].path), (merged[0],)),
        Rewrite(merged[1].task_id, 1, (files[2].path,), (merged[1],)),
    ]
    with duckdb.connect() as connection:
        load_extensions(connection)
        connection.execute(
            f"ATTACH '' AS lake (TYPE iceberg, ENDPOINT 'http://{rest.address}', AUTHORIZATION_TYPE 'none')"
        )
        connection.execute(
            f'DELETE FROM lake."{table.namespace}".orders WHERE partition = 0 AND "offset" = 3'
        )
    left = [row for row in expected((0, 0, 10), (1, 0, 5)) if row[:2] != (0, 3)]
    assert read_duckdb(table.table) == left
    with pytest.raises(InputsGone, match="rows of it were deleted"):
        replace(table, rewrites)
    assert not replace(table, rewrites[1:])[0].before
    append(table, [write_file(table, 0, 10, 12, follows=10)])
    assert read_duckdb(table.table) == sorted([*left, *expected((0, 10, 12))])
    assert read_iceberg(table.table) == sorted([*left, *expected((0, 10, 12))])
