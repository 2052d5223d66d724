"""`drayd` as a user meets it: a real process, its exit code and what it prints."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dray.metadata.opening import open_store
from dray.metadata.store import Position

NEWER = b'{"format_version": 2, "num_domains": 16}'


def drayd(*arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DRAY_")}
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "dray", *arguments],
        cwd=cwd,
        env={**clean, **env},
        capture_output=True,
        text=True,
        timeout=30,
    )


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A loopback port that refuses connections: bound, so that nobody else takes it, but not listening."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


async def read_record(path: Path) -> bytes:
    store = await open_store(f"sqlite:///{path}")
    try:
        record = await store.get(0, "cluster")
        assert record is not None
        return record.value
    finally:
        await store.close()


async def test_check_of_the_embedded_default_passes_twice_and_leaves_only_its_tail(tmp_path: Path) -> None:
    for _ in range(2):
        done = drayd("admin", "metadata", "check", cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        rows = re.findall(r"^(\w+) +\d+ +[\d.]+ +[\d.]+  (\w+)$", done.stdout, re.MULTILINE)
        assert sorted(rows) == [
            ("append", "yes"),
            ("barrier", "yes"),
            ("ceiling", "yes"),
            ("delete", "yes"),
            ("entries", "yes"),
            ("floor", "yes"),
            ("get", "yes"),
            ("put", "yes"),
            ("put_ephemeral", "yes"),
            ("scan", "yes"),
            ("session", "yes"),
            ("swap", "yes"),
            ("tail", "yes"),
            ("watch", "yes"),
        ]

    store = await open_store(f"sqlite:///{tmp_path}/data/metadata.db")
    try:
        left: list[Position] = []
        for domain in range(16):
            left += [e.position for e in await store.entries(domain, "drayd-check", 0, 10)]
        assert left == [(110, 11_000)]  # twice 1 + 2 + … + 10 records, 100 bytes each
    finally:
        await store.close()


def test_check_prints_json(tmp_path: Path) -> None:
    done = drayd("admin", "metadata", "check", "--json", cwd=tmp_path)
    answer = json.loads(done.stdout)
    assert answer["metadata"] == "sqlite:///data/metadata.db"
    assert {row["ok"] for row in answer["primitives"]} == {True}
    assert min(row["calls"] for row in answer["primitives"]) >= 1


def test_init_is_idempotent_and_show_says_what_it_created(tmp_path: Path) -> None:
    first = drayd("admin", "cluster", "init", "--set", "metadata.domains=64", cwd=tmp_path)
    assert (first.returncode, first.stderr) == (0, "")
    again = drayd("admin", "cluster", "init", cwd=tmp_path)
    assert (again.returncode, again.stdout) == (0, first.stdout)
    assert drayd("admin", "cluster", "show", cwd=tmp_path).stdout == first.stdout

    shown = json.loads(drayd("admin", "cluster", "show", "--json", cwd=tmp_path).stdout)
    assert shown["num_domains"] == 64
    assert f"cluster id   {shown['cluster_id']}\n" in first.stdout


def test_settings_are_taken_on_every_level_and_the_last_one_counts(tmp_path: Path) -> None:
    (tmp_path / "dray.yaml").write_text("metadata.domains: 2\n")
    arguments = ["--config", "dray.yaml", "--data", "a", "admin", "--set", "metadata.domains=3", "cluster"]
    done = drayd(*arguments, "init", "--data", "b", cwd=tmp_path, DRAY_METADATA_DOMAINS="4")
    assert "metadata     sqlite:///b/metadata.db\n" in done.stdout
    assert "domains      3\n" in done.stdout
    assert not (tmp_path / "a").exists()


def test_show_creates_nothing(tmp_path: Path) -> None:
    done = drayd("admin", "cluster", "show", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == (
        "drayd: there is no cluster at sqlite:///data/metadata.db (drayd admin cluster init creates it)\n"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [("metadata", "check"), ("cluster", "init"), ("cluster", "show")])
def test_newer_format_is_refused_and_the_store_unchanged(tmp_path: Path, command: tuple[str, str]) -> None:
    path = tmp_path / "newer.db"

    async def write() -> None:
        store = await open_store(f"sqlite:///{path}")
        await store.put(0, "cluster", NEWER)
        await store.close()

    asyncio.run(write())
    done = drayd("admin", *command, "--metadata", f"sqlite:///{path}", cwd=tmp_path)
    assert done.returncode == 1
    assert re.fullmatch(r"drayd: .*format version 2.*up to 1.*nothing was changed.*\n", done.stderr)
    assert asyncio.run(read_record(path)) == NEWER


def test_other_number_of_domains_is_refused(tmp_path: Path) -> None:
    drayd("admin", "cluster", "init", cwd=tmp_path)
    done = drayd("admin", "cluster", "init", cwd=tmp_path, DRAY_METADATA_DOMAINS="32")
    assert done.returncode == 1
    assert "metadata.domains is 32, but the cluster was created with 16" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "env", "complaint"),
    [
        (["--metadata", "redis://h"], {}, r"drayd: metadata: 'redis://h' .*sqlite:///, etcd:// or oxia://"),
        (["--metadata", "memory:"], {}, r"drayd: metadata: 'memory:' .*tests only"),
        (["--objects", "gs://bucket"], {}, r"drayd: objects: 'gs://bucket' .*\(from --objects\)"),
        (["--catalog", "hive://h"], {}, r"drayd: catalog: 'hive://h' .*\(from --catalog\)"),
        (["--data", ""], {}, r"drayd: data: '' .*\(from --data\)"),
        (["--set", "metadata.domain=4"], {}, r"drayd: metadata\.domain: '4' .*mean metadata\.domains\?"),
        (["--set", "metadata.domains=0"], {}, r"drayd: metadata\.domains: '0' .*1 to 65536 \(from --set\)"),
        ([], {"DRAY_METADATA_TIMEOUT_MS": "soon"}, r"drayd: metadata\.timeout\.ms: 'soon' .*DRAY_METADATA_T"),
        ([], {"DRAY_METADTA": "x"}, r"drayd: DRAY_METADTA: 'x' .*did you mean DRAY_METADATA\?"),
        (["--config", "missing.yaml"], {}, r"drayd: --config: 'missing\.yaml' .*No such file"),
    ],
)
def test_bad_setting_exits_2_before_anything_is_opened(
    tmp_path: Path, arguments: list[str], env: dict[str, str], complaint: str
) -> None:
    done = drayd("admin", "metadata", "check", *arguments, cwd=tmp_path, **env)
    assert done.returncode == 2
    assert re.match(complaint, done.stderr)
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [["--set", "metadata.domains"], ["--sett", "a=b"], ["--meta", "x"]])
def test_bad_argument_exits_2(tmp_path: Path, arguments: list[str]) -> None:
    done = drayd("admin", "metadata", "check", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert "error: " in done.stderr


def test_unreachable_server_fails_in_time_with_a_hint(tmp_path: Path, closed_port: int) -> None:
    """With the default timeout; both at once, because each waits for all of it."""

    def check(scheme: str) -> subprocess.CompletedProcess[str]:
        url = f"{scheme}://127.0.0.1:{closed_port}"
        return drayd("admin", "metadata", "check", "--metadata", url, cwd=tmp_path)

    started = time.monotonic()
    with ThreadPoolExecutor() as pool:
        runs = list(pool.map(check, ["etcd", "oxia"]))
    assert time.monotonic() - started < 25  # 5 s of it are the timeout
    for done in runs:
        assert done.returncode == 1
        complaint = rf"drayd: .*127\.0\.0\.1:{closed_port}.*check that the metadata URL.*\n"
        assert re.fullmatch(complaint, done.stderr)


def test_store_that_is_no_database_fails_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not a database, and much longer than the header of one " * 10)
    done = drayd("admin", "metadata", "check", "--metadata", "sqlite:///notes.txt", cwd=tmp_path)
    assert done.returncode == 1
    assert re.fullmatch(r"drayd: .*notes\.txt.*\n", done.stderr)


def test_directory_that_cannot_be_made_fails_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = drayd("admin", "metadata", "check", "--data", "file", cwd=tmp_path)
    assert done.returncode == 1
    assert re.fullmatch(r"drayd: .*file.*\n", done.stderr)


def test_interrupt_exits_130(tmp_path: Path) -> None:
    """Interrupted while it waits for a server that accepts the connection and then says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(20)
        url = f"etcd://127.0.0.1:{silent.getsockname()[1]}"
        command = [sys.executable, "-m", "dray", "admin", "cluster", "show", "--metadata", url]
        with subprocess.Popen(
            command,
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            text=True,
            # A shell ignores interrupts for what it runs in the background, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        ) as process:
            connection, _ = silent.accept()
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=10)
            connection.close()
    assert process.returncode == 130
    assert "Traceback" not in stderr


def test_version_and_help(tmp_path: Path) -> None:
    assert drayd("--version", cwd=tmp_path).stdout == "drayd 0.1.0\n"
    help_text = drayd("--help", cwd=tmp_path).stdout
    assert "drayd admin metadata check\n" in help_text
    assert "sqlite:///<data>/metadata.db" in help_text
