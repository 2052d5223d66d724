"""`drayd admin wal inspect` as a user meets it: a real process on files and on a real S3 server."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dray.objectstore.opening import open_object_store
from tests.batches import GOLDEN
from tests.servers.s3 import S3Server
from tests.unit.test_cli import drayd

ONE_STREAM = GOLDEN / "wal" / "one-stream.wo"
KEY = "wal/v1/zone=a/domain=7/date=2023/11/14/018bcfe5-6800-7000-8000-000000000001.wo"


def test_a_whole_object_is_shown_as_a_table(tmp_path: Path) -> None:
    done = drayd("admin", "wal", "inspect", str(ONE_STREAM), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[:7] == [
        "wal id    018bcfe5-6800-7000-8000-000000000001",
        "version   1",
        "domain    7",
        "created   2023-11-14T22:13:23.000+00:00",
        "chunks    1, index at byte 328",
        "size      376 bytes",
        "checksum  ok",
    ]
    assert "stream 1122334455667788  records 6  batches 2  bytes 279  at byte 49" in lines
    rows = re.findall(r"^ +(\d+) +(\d+) +(\d+) (\w+) ", done.stdout, re.MULTILINE)
    assert rows == [("53", "132", "3", "zstd"), ("189", "139", "3", "gzip")]
    assert list(tmp_path.iterdir()) == []


def test_a_whole_object_is_json_for_scripts(tmp_path: Path) -> None:
    done = drayd("admin", "wal", "inspect", "--json", str(GOLDEN / "wal" / "many-streams.wo"), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    shown = json.loads(done.stdout)
    assert shown["checksum"] == "ok"
    assert shown["problems"] == []
    assert shown["header"]["chunk_count"] == 8
    assert [chunk["stream_id"] for chunk in shown["chunks"]][-2:] == ["8000000000000000", "ffffffffffffffff"]
    assert shown["chunks"][0]["batches"][1] == {
        "at": 438,
        "size_bytes": 381,
        "codec": "none",
        "base_offset": 0,
        "leader_epoch": 0,
        "attributes": 0,
        "last_offset_delta": 2,
        "base_timestamp_ms": 1_700_000_000_000,
        "max_timestamp_ms": 1_700_000_002_000,
        "producer_id": 4711,
        "producer_epoch": 3,
        "base_sequence": 0,
        "records": 3,
    }


@pytest.mark.parametrize("json_flag", [[], ["--json"]])
def test_of_a_damaged_object_all_that_can_be_read_is_shown(tmp_path: Path, json_flag: list[str]) -> None:
    """A flipped bit in the second batch: both checksums notice, and the first batch is still there."""
    data = bytearray(ONE_STREAM.read_bytes())
    data[300] ^= 1
    (tmp_path / "damaged.wo").write_bytes(data)
    done = drayd("admin", "wal", "inspect", "damaged.wo", *json_flag, cwd=tmp_path)
    assert done.returncode == 1
    assert re.fullmatch(
        r"drayd: damaged.wo: WAL object, byte 372: checksum is 0x\w+, but the footer says 0xffcbb61a"
        r" \(and 1 more\)\n",
        done.stderr,
    )
    if json_flag:
        shown = json.loads(done.stdout)
        assert shown["checksum"] == "wrong"
        assert [batch["codec"] for batch in shown["chunks"][0]["batches"]] == ["zstd"]
        assert len(shown["problems"]) == 2
        assert "byte 189: batch of stream 1122334455667788: checksum" in shown["problems"][1]
    else:
        assert "\nchecksum  wrong\n" in done.stdout
        assert " zstd " in done.stdout
        assert " gzip " not in done.stdout


@pytest.mark.parametrize(
    ("size", "checksum", "problem"),
    [
        (0, "unknown", "byte 0: it ends inside the header"),
        (48, "unknown", "byte 48: it ends inside the header"),
        (200, "unknown", "byte 200: it ends inside the chunk index"),
        (350, "unknown", "byte 350: it ends inside the chunk index"),
        (375, "unknown", "byte 372: 3 bytes behind the index"),
        (372, "absent", None),
    ],
)
def test_an_object_that_was_cut_short(tmp_path: Path, size: int, checksum: str, problem: str | None) -> None:
    (tmp_path / "short.wo").write_bytes(ONE_STREAM.read_bytes()[:size])
    done = drayd("admin", "wal", "inspect", "short.wo", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["checksum"] == checksum
    assert done.returncode == (1 if problem else 0)
    assert (problem or "") in done.stderr
    assert done.stderr.count("\n") == (1 if problem else 0)


def test_a_newer_version_and_other_files_are_told_apart(tmp_path: Path) -> None:
    newer = bytearray(ONE_STREAM.read_bytes())
    newer[8] = 2
    (tmp_path / "newer.wo").write_bytes(newer)
    (tmp_path / "other").write_text("something else, and long enough to have a header in it")
    done = drayd("admin", "wal", "inspect", "newer.wo", cwd=tmp_path)
    assert (done.returncode, "byte 7: version 2" in done.stderr) == (1, True)
    done = drayd("admin", "wal", "inspect", "other", cwd=tmp_path)
    assert (done.returncode, "not a WAL object" in done.stderr) == (1, True)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("missing.wo", "neither a file nor a key in file:///"),
        (".", "Not a file"),
        ("s3://some-bucket", "name an object in the bucket"),
        ("gs://bucket/x.wo", "begins with file:/// or s3://"),
    ],
)
def test_what_is_not_there_is_one_line(tmp_path: Path, name: str, problem: str) -> None:
    done = drayd("admin", "wal", "inspect", name, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(rf"drayd: [^\n]*{re.escape(problem)}[^\n]*\n", done.stderr)
    assert list(tmp_path.iterdir()) == []


def test_an_object_is_found_by_its_key_or_url_in_a_directory(tmp_path: Path) -> None:
    place = tmp_path / "objects" / KEY
    place.parent.mkdir(parents=True)
    place.write_bytes(ONE_STREAM.read_bytes())
    by_key = drayd("admin", "wal", "inspect", KEY, "--objects", f"file://{tmp_path}/objects", cwd=tmp_path)
    by_url = drayd("admin", "wal", "inspect", f"file://{place}", cwd=tmp_path)
    assert (by_key.returncode, by_url.returncode) == (0, 0)
    assert by_key.stdout == by_url.stdout


async def test_an_object_is_found_by_its_key_or_url_in_s3(s3_server: S3Server, tmp_path: Path) -> None:
    url = s3_server.url("inspect")
    store = await open_object_store(url)
    try:
        await store.put(KEY, ONE_STREAM.read_bytes())
    finally:
        await store.close()
    path, _, options = url.partition("?")
    by_key = drayd("admin", "wal", "inspect", KEY, "--objects", url, cwd=tmp_path)
    by_url = drayd("admin", "wal", "inspect", f"{path}/{KEY}?{options}", cwd=tmp_path)
    assert (by_key.stderr, by_url.stderr) == ("", "")
    assert (by_key.returncode, by_url.returncode) == (0, 0)
    assert by_key.stdout == by_url.stdout
    missing = drayd("admin", "wal", "inspect", f"{path}/missing.wo?{options}", cwd=tmp_path)
    assert (missing.returncode, missing.stderr.count("\n")) == (1, 1)
