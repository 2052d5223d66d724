"""Index entries that were stored once must be read for ever, and written the same while format 1 is current.

`golden/index/manifest.json` says what each file holds. `python -m tests.unit.test_index_golden --rewrite`
makes all of them anew, for a diff that somebody reviews; a new format adds files instead.
"""

from __future__ import annotations

import json
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from dray.index.entry import (
    BatchIndex,
    IndexEntry,
    Kind,
    ParquetFile,
    Producer,
    Truncated,
    Void,
    WalChunk,
    decode,
    encode,
)
from tests.index_entries import of, parquet_entry, truncated_entry, void_entry, wal_entry

DIRECTORY = Path(__file__).parents[2] / "golden" / "index"
MANIFEST = DIRECTORY / "manifest.json"
NAMES = sorted(path.stem for path in DIRECTORY.glob("*.bin"))


def chunk_of(entry: IndexEntry) -> WalChunk:
    assert isinstance(entry.where, WalChunk)
    return entry.where


CASES: dict[str, IndexEntry] = {
    "wal": wal_entry(3, 2),
    "wal_producers": replace(
        wal_entry(1, 2, 3, producers=[Producer(4711, 3, 17), None, Producer(0, 0, 0)]), expected_start=0
    ),
    "wal_verdicts": replace(
        of(
            replace(
                chunk_of(
                    wal_entry(2, 3, 0, 1, producers=[Producer(7, 0, 0), None, *[Producer(8, 1, 5)] * 2])
                ),
                verdicts=(Kind.OK, Kind.OK, Kind.LEFT_OUT, Kind.DUPLICATE),
            ),
            6,
        ),
        expected_start=41,
    ),
    "wal_many_batches": wal_entry(*range(1, 201), number=500),
    "wal_largest": IndexEntry(
        stream_id=2**64 - 1,
        records=2**32 - 1,
        created_at_ms=2**63 - 1,
        min_timestamp_ms=-1,
        max_timestamp_ms=2**62,
        incarnation="ff" * 16,
        where=WalChunk(
            UUID(int=2**128 - 1),
            "wal/" + "é" * 500,
            2**64 - 1,
            2**32 - 1,
            (BatchIndex(2**32 - 1, 2**32 - 5, -1, 2**62, Producer(2**63 - 1, 2**15 - 1, 2**31 - 1)),),
        ),
        expected_start=2**63 - 1,
    ),
    "parquet": parquet_entry(12, number=3),
    "parquet_largest": replace(
        of(ParquetFile(UUID(int=2**128 - 1), "data/" + "x" * 1000, 2**64 - 1, "id"), 2**63 - 1),
        created_at_ms=-(2**63),
        min_timestamp_ms=-(2**63),
        max_timestamp_ms=-(2**63),
    ),
    "truncated": truncated_entry(1),
    "truncated_largest": truncated_entry(2**63 - 1, stream_id=0),
    "void": void_entry(2, number=7),
    "void_largest": replace(
        of(Void(UUID(int=2**128 - 1)), 2**31 - 1, 2**64 - 1),
        created_at_ms=2**63 - 1,
        min_timestamp_ms=-1,
        max_timestamp_ms=-1,
        expected_start=2**63 - 1,
    ),
}


def manifest() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(MANIFEST.read_text())
    return loaded


def test_every_file_is_in_the_manifest() -> None:
    assert set(CASES) <= set(NAMES)
    assert sorted(manifest()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_it_decodes_to_what_the_manifest_says(name: str) -> None:
    assert describe(decode((DIRECTORY / f"{name}.bin").read_bytes())) == manifest()[name]


@pytest.mark.parametrize("name", NAMES)
def test_it_encodes_to_the_same_bytes(name: str) -> None:
    value = (DIRECTORY / f"{name}.bin").read_bytes()
    assert encode(decode(value)) == value


def describe(entry: IndexEntry) -> dict[str, Any]:
    """As JSON. A batch is a row; numbers above 2^53, where JSON's end in many languages, are strings."""

    def plain(value: Any) -> Any:
        if isinstance(value, BatchIndex):
            return plain([getattr(value, field.name) for field in fields(value)])
        if isinstance(value, IndexEntry | WalChunk | ParquetFile | Truncated | Void):
            names = [field.name for field in fields(value) if field.init]
            return {name: plain(getattr(value, name)) for name in names}
        if isinstance(value, Kind):
            return value.value
        if isinstance(value, list | tuple):
            return [plain(one) for one in value]
        is_small = value is None or (isinstance(value, int) and abs(value) < 2**53)
        return value if is_small else str(value)

    return {"kind": type(entry.where).__name__, **plain(entry)}


def rewrite() -> None:
    DIRECTORY.mkdir(exist_ok=True)
    for name, entry in CASES.items():
        (DIRECTORY / f"{name}.bin").write_bytes(encode(entry))
    rows = [f"{json.dumps(name)}: {json.dumps(describe(entry))}" for name, entry in CASES.items()]
    MANIFEST.write_text("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    if sys.argv[1:] != ["--rewrite"]:
        sys.exit("this replaces golden files; say --rewrite if that is meant")
    rewrite()
