"""Records of compaction that were stored once must be read for ever; rubbish is told from a newer format.

`python -m tests.unit.test_compaction_task --rewrite` makes the golden files anew, for a diff that somebody
reviews; a new format adds files instead.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from compactor.task import (
    Input,
    Kind,
    Part,
    State,
    StreamState,
    Task,
    Undecodable,
    decode,
    encode,
    file_key,
    state_key,
    stream_of_key,
    with_stats,
)
from dray.columns.parquet import FileStats
from dray.errors import CorruptStore, IncompatibleStore

DIRECTORY = Path(__file__).parents[2] / "golden" / "compaction"
KEY = "compaction/000000000000001f"
NAMES = sorted(path.stem for path in DIRECTORY.glob("*.json"))

CHUNK = Input(7, 700, 7, UUID(int=1), "wal/z/1.wo", 49, 312, left_out=(1,), void=(0, 2))
PLAIN = Input(9, 900, 2, UUID(int=2), "wal/z/2.wo", 49, 104)
VOID = Input(12, 900, 3, UUID(int=3), "", 0, 0)
FILE = Input(2**62, 2**62, 1, UUID(int=2**128 - 1), "warehouse/a", 0, 77, iceberg_file="s3://bucket/a")
STATS = FileStats(
    records=5,
    size_bytes=2**33,
    start_offset=0,
    end_offset=12,
    min_timestamp_ms=-(2**63),
    max_timestamp_ms=None,
    raw_bytes=2**40,
    column_sizes={1: 10, 14: 20},
    value_counts={1: 5},
    null_value_counts={1: 0},
    lower_bounds={2: "0000000000000000"},
    upper_bounds={2: "0b00000000000000"},
    split_offsets=[4, 1_000],
)


def task(kind: Kind, state: State, *inputs: Input, **more: Any) -> Task:
    stats = None if state is State.CREATED else STATS
    parts = (Part(inputs, UUID(int=77), "warehouse/kafka/orders/data/a.parquet", stats),) if inputs else ()
    fields = {
        "task_id": UUID(int=5),
        "kind": kind,
        "state": state,
        "owner": "0123456789abcdef",
        "namespace": "kafka",
        "topic": "Größe",
        "topic_id": UUID(int=6),
        "partition": 3,
        "follows": 0,
        "log_start": 0,
        "created_at_ms": 1_700_000_000_000,
        "parts": parts,
        **more,
    }
    return Task(**fields)


CREATED = task(Kind.COMPACT, State.CREATED, CHUNK, PLAIN, VOID)
CASES: dict[str, StreamState] = {
    "none": StreamState(),
    "undecodable": StreamState(None, (Undecodable(9, 2, "InvalidBatch: its CRC"), Undecodable(40, 1, "ß"))),
    "created": StreamState(CREATED),
    "written": StreamState(with_stats(CREATED, [STATS])),
    "committed": StreamState(
        task(Kind.REWRITE, State.ICEBERG_COMMITTED, FILE, snapshot_id=2**63 - 1, follows=7, log_start=2),
        (Undecodable(9, 2, "gone"),),
    ),
    "swapped": StreamState(task(Kind.COMPACT, State.INDEX_SWAPPED, PLAIN)),
    "gc_ready": StreamState(task(Kind.COMPACT, State.WAL_GC_READY, PLAIN)),
    "done": StreamState(task(Kind.COMPACT, State.DONE, snapshot_id=1)),
}


def test_every_case_has_its_file() -> None:
    assert set(CASES) <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_stored_record_is_read_and_written_the_same(name: str) -> None:
    value = (DIRECTORY / f"{name}.json").read_bytes().rstrip(b"\n")
    assert encode(decode(KEY, value)) == value
    if name in CASES:
        assert decode(KEY, value) == CASES[name]


def test_only_a_task_that_is_not_done_is_a_claim() -> None:
    claims = {name for name, state in CASES.items() if state.unfinished is not None}
    assert claims == {"created", "written", "committed", "swapped", "gc_ready"}


def test_what_is_rare_is_left_out() -> None:
    fields = json.loads(encode(CASES["created"]))["task"]["parts"][0]["inputs"]
    assert list(map(len, fields)) == [9, 7, 7]


def test_a_range_is_that_of_its_inputs() -> None:
    (part,) = CREATED.parts
    assert (part.start_offset, part.end_offset, part.input_bytes) == (0, 12, 416)
    assert (CREATED.start_offset, CREATED.end_offset) == (0, 12)


def test_keys_say_whose_they_are() -> None:
    assert state_key(0x1F) == KEY
    assert stream_of_key(KEY) == 0x1F
    key = file_key("warehouse/kafka/a", 3, 5, 12, UUID(int=255))
    name = f"{5:020}-{12:020}-{'0' * 30}ff.parquet"
    assert key == f"warehouse/kafka/a/data/partition=3/{name}"


def _changed(**fields: Any) -> bytes:
    record = json.loads(encode(CASES["written"]))
    record["task"].update(fields)
    return json.dumps(record).encode()


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xff",
        b"null",
        b"[]",
        b"7",
        b"{}",
        b'{"format": 1}',
        b'{"format": 1, "task": null}',
        b'{"format": 1, "task": null, "undecodable": [[1, 2]]}',
        b'{"format": 1, "task": [], "undecodable": []}',
        b'{"format": "1", "task": null, "undecodable": []}',
        b'{"format": true, "task": null, "undecodable": []}',
        b'{"format": 0, "task": null, "undecodable": []}',
        encode(CASES["written"])[:-9],
        _changed(id="xyz"),
        _changed(id=None),
        _changed(state="SWAPPED"),
        _changed(kind="merge"),
        _changed(partition=None),
        encode(CASES["created"]).replace(b"CREATED", b"INDEX_SWAPPED"),
        _changed(parts=[]),
        _changed(parts=None),
        _changed(parts=[{}]),
        _changed(parts=[{"file": "0" * 32, "key": "a", "stats": None, "inputs": []}]),
        _changed(
            parts=[{"file": "0" * 32, "key": "a", "stats": {}, "inputs": [[1, 1, 1, "0" * 32, "", 0, 0]]}]
        ),
        _changed(parts=[{"file": "0" * 32, "key": "a", "stats": None, "inputs": [[1, 1, 1]]}]),
    ],
)
def test_rubbish_is_told(value: bytes) -> None:
    with pytest.raises(CorruptStore, match=KEY):
        decode(KEY, value)


@pytest.mark.parametrize("at", range(0, 600, 7))
def test_a_record_with_a_byte_missing_is_rubbish_or_another_record(at: int) -> None:
    """Never another error: whoever reads it leaves the stream alone and goes on with the others."""
    value = encode(CASES["written"])
    with suppress(CorruptStore, IncompatibleStore):
        decode(KEY, value[: at % len(value)] + value[at % len(value) + 1 :])


def test_a_newer_format_is_no_rubbish() -> None:
    with pytest.raises(IncompatibleStore, match="format 2"):
        decode(KEY, b'{"format": 2, "tasks": []}')


def rewrite() -> None:
    DIRECTORY.mkdir(exist_ok=True)
    for name, state in CASES.items():
        (DIRECTORY / f"{name}.json").write_bytes(encode(state) + b"\n")


if __name__ == "__main__" and sys.argv[1:] == ["--rewrite"]:
    rewrite()
