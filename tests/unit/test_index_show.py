"""`drayd admin index show` as a user meets it: a real process on the embedded store."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest

from dray.index.changes import carry_out, replace_run
from dray.index.entry import Placed, Producer, encode, place_all, sequence_of
from dray.index.show import StreamIndex, as_json, as_table
from dray.metadata.keys import CLUSTER_DOMAIN
from dray.metadata.opening import open_store
from dray.metadata.store import NewEntry, Position
from dray.topics.record import TopicRecord, TopicState, encode_topic, topic_key
from tests.index_entries import STREAM, parquet_entry, truncated_entry, void_entry, wal_entry
from tests.unit.test_cli import drayd

DOMAIN = 13  # of stream 1f among the 16 domains of a new cluster
SHOW = ("admin", "index", "show", "--stream", "1f")


@pytest.fixture
async def written(tmp_path: Path) -> Path:
    """Offsets 0–3 truncated, 3–8 in a Parquet file with one superseded entry left, 8–10 in a WAL object."""
    assert drayd("admin", "cluster", "init", cwd=tmp_path).returncode == 0
    store = await open_store(f"sqlite:///{tmp_path}/data/metadata.db")
    sequence = sequence_of(STREAM)
    try:
        for number, batches in enumerate([(1, 2), (1,), (4,), (1, 1)], 1):
            entry = wal_entry(*batches, number=number)
            new = NewEntry(sequence, entry.records, 104 * len(batches), encode(entry))
            await store.append(DOMAIN, [new])
        stored = place_all(await store.entries(DOMAIN, sequence, 0, 10))
        await carry_out(store, DOMAIN, replace_run(stored[:1], truncated_entry(3)))
        merged = replace_run(stored[1:3], parquet_entry(5, number=9))
        await store.swap(DOMAIN, sequence, merged.at, merged.version, encode(merged.new), [])
    finally:
        await store.close()
    return tmp_path


def test_entries_are_shown_as_a_table(written: Path) -> None:
    done = drayd(*SHOW, cwd=written)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[:4] == [
        "stream     000000000000001f",
        "domain     13",
        "log start  3",
        "end        10 (624 bytes)",
    ]
    rows = [re.split(r" {2,}", line.strip()) for line in done.stdout.splitlines()[6:]]
    created = "1970-01-01T00:00:05+00:00"
    assert rows == [
        ["0", "3", "3", "0", "0", created + " truncated"],
        ["3", "4", "1", "104", "1", created + " wal", "wal/2 (superseded)"],
        ["3", "8", "5", "77", "0", created + " parquet", "data/9.parquet"],
        ["8", "10", "2", "208", "2", created + " wal", "wal/4"],
    ]


def test_entries_are_json_for_scripts(written: Path) -> None:
    done = drayd(*SHOW, "--json", "--limit", "2", cwd=written)
    assert (done.returncode, done.stderr) == (0, "")
    shown = json.loads(done.stdout)
    rows = shown.pop("entries")
    assert shown == {
        "stream": "000000000000001f",
        "domain": 13,
        "log_start_offset": 3,
        "end_offset": 10,
        "end_bytes": 624,
        "has_more": True,
    }
    assert [(row["kind"], row["start_offset"], row["end_bytes"]) for row in rows] == [
        ("truncated", 0, 208),
        ("wal", 3, 312),
    ]


def test_a_table_cut_short_says_so(written: Path) -> None:
    done = drayd(*SHOW, "--limit", "3", cwd=written)
    assert done.stdout.splitlines()[-1] == "more entries follow; --limit shows more"


async def test_a_partition_is_found_by_its_topic(written: Path) -> None:
    record = TopicRecord("orders", uuid4(), TopicState.ACTIVE, (7, STREAM), (), {}, 0)
    store = await open_store(f"sqlite:///{written}/data/metadata.db")
    await store.put(CLUSTER_DOMAIN, topic_key("orders"), encode_topic(record))
    await store.close()
    done = drayd("admin", "index", "show", "orders", "1", cwd=written)
    assert (done.returncode, done.stdout) == (0, drayd(*SHOW, cwd=written).stdout)
    for arguments, complaint in [(["nope", "0"], "no topic 'nope'"), (["orders", "2"], "has 2 partitions")]:
        done = drayd("admin", "index", "show", *arguments, cwd=written)
        assert done.returncode == 1
        assert complaint in done.stderr


def test_a_stream_without_entries_is_empty(written: Path) -> None:
    done = drayd("admin", "index", "show", "--stream", "ffffffffffffffff", "--json", cwd=written)
    assert done.returncode == 0
    assert json.loads(done.stdout)["entries"] == []


def test_without_a_cluster_nothing_is_created(tmp_path: Path) -> None:
    done = drayd(*SHOW, cwd=tmp_path)
    assert done.returncode == 1
    assert "there is no cluster" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["--stream", "x"],
        ["--stream", "1" * 17],
        ["--stream", "-1"],
        [],
        ["--stream", "1", "--limit", "0"],
        ["t"],
    ],
)
def test_arguments_that_cannot_be_used(tmp_path: Path, arguments: list[str]) -> None:
    done = drayd("admin", "index", "show", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert "stream" in done.stderr or "--limit" in done.stderr


def test_a_void_entry_is_shown_as_one() -> None:
    stored = [Placed(void_entry(5), 5, 104, 1)]
    shown = as_table(StreamIndex(STREAM, DOMAIN, 0, Position(5, 104), stored, False))
    row = shown.splitlines()[-1].split()
    assert row == ["0", "5", "5", "0", "0", "1970-01-01T00:00:05+00:00", "void"]


def test_an_entry_that_nobody_has_resolved_is_shown_as_one() -> None:
    entry = wal_entry(2, 0, producers=[Producer(1, 0, 0)] * 2)
    stored = [Placed(replace(entry, expected_start=start), 2, 208, 1) for start in (0, 1)]
    rows = [
        as_table(StreamIndex(STREAM, DOMAIN, 0, Position(2, 208), [placed], False)).splitlines()[-1].split()
        for placed in stored
    ]
    assert [row[6] for row in rows] == ["wal", "unresolved"]
    shown = as_json(StreamIndex(STREAM, DOMAIN, 0, Position(2, 208), stored[:1], False))
    (row,) = json.loads(json.dumps(shown))["entries"]
    assert (row["batches"], row["served_batches"], row["expected_start"]) == (2, 1, 0)
