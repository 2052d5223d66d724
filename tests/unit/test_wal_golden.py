"""WAL objects that were written once must be read for ever, and written the same while version 1 is current.

`golden/wal/manifest.json` says what each file holds. `python -m tests.unit.test_wal_golden --rewrite` makes
all of them anew, for a diff that somebody reviews; a new version of the format adds files instead.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest

from dray.protocol.records import read_batch
from dray.wal.format import ChunkInput, WalObject, decode_object, encode_object
from tests.batches import GOLDEN, captured

DIRECTORY = GOLDEN / "wal"
MANIFEST = DIRECTORY / "manifest.json"
FILES = sorted(path.name for path in DIRECTORY.glob("*.wo"))
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
FIRST_MS, LAST_MS = 1_700_000_000_000, 1_700_000_002_000


def manifest() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(MANIFEST.read_text())
    return loaded


def test_every_file_is_in_the_manifest() -> None:
    assert {"empty.wo", "one-stream.wo", "many-streams.wo", "codecs.wo", "largest-values.wo"} <= set(FILES)
    assert sorted(manifest()) == FILES


@pytest.mark.parametrize("name", FILES)
def test_it_decodes_to_what_the_manifest_says(name: str) -> None:
    data = (DIRECTORY / name).read_bytes()
    expected = manifest()[name]
    assert describe(data) == expected


@pytest.mark.parametrize("name", FILES)
def test_it_encodes_to_the_same_bytes(name: str) -> None:
    data = (DIRECTORY / name).read_bytes()
    assert encode_again(decode_object(data)) == data


def test_codecs_are_those_of_real_clients() -> None:
    (first, second) = decode_object((DIRECTORY / "codecs.wo").read_bytes()).chunks
    for (_, batches), client in ((first, "librdkafka"), (second, "kafka-python")):
        assert batches == [captured(f"{client}-{codec}") for codec in CODECS]
        assert [read_batch(batch).codec for batch in batches] == list(CODECS)


def test_the_documentation_shows_the_file_as_it_is() -> None:
    text = (GOLDEN.parent / "docs" / "wal-format.md").read_text()
    data = (DIRECTORY / "one-stream.wo").read_bytes()
    dump = re.findall(r"^[0-9a-f]{3}  ([0-9a-f ]{47})  ", text, re.MULTILINE)
    assert bytes.fromhex("".join(dump)) == data
    fields = re.findall(r"^\| 0x([0-9a-f]{3}) \| `([0-9a-f ]+)", text, re.MULTILINE)
    assert len(fields) == 29
    for at, shown in fields:
        assert data[int(at, 16) :].startswith(bytes.fromhex(shown))


def describe(data: bytes) -> dict[str, Any]:
    """As JSON. Stream ids are hexadecimal, since JSON's numbers end at 2^53 in many languages."""
    decoded = decode_object(data)
    header = decoded.header
    return {
        "sha256": hashlib.sha256(data).hexdigest(),
        "size_bytes": len(data),
        "checksum": data[-4:].hex() if decoded.has_checksum else None,
        "wal_id": str(header.wal_id),
        "domain": header.domain,
        "created_at_ms": header.created_at_ms,
        "chunk_count": header.chunk_count,
        "index_offset": header.index_offset,
        "chunks": [
            {
                **entry._asdict(),
                "stream_id": f"{entry.stream_id:016x}",
                "batch_sha256": [hashlib.sha256(batch).hexdigest() for batch in batches],
            }
            for entry, batches in decoded.chunks
        ],
    }


def encode_again(decoded: WalObject) -> bytearray:
    header = decoded.header
    chunks = [
        ChunkInput(entry.stream_id, batches, entry.records, entry.min_timestamp_ms, entry.max_timestamp_ms)
        for entry, batches in decoded.chunks
    ]
    return encode_object(header.wal_id, header.domain, header.created_at_ms, chunks).body


def golden_objects() -> Iterator[tuple[str, bytearray]]:
    first = UUID("018bcfe5-6800-7000-8000-000000000001")
    plain, idempotent = captured("librdkafka-none"), captured("librdkafka-idempotent")

    def chunk(stream_id: int, *batches: bytes) -> ChunkInput:
        return ChunkInput(stream_id, batches, 3 * len(batches), FIRST_MS, LAST_MS)

    def encode(*chunks: ChunkInput) -> bytearray:
        return encode_object(first, 7, 1_700_000_003_000, chunks).body

    yield "empty.wo", encode()
    yield (
        "one-stream.wo",
        encode(chunk(0x1122334455667788, captured("librdkafka-zstd"), captured("librdkafka-gzip"))),
    )
    yield (
        "many-streams.wo",
        encode(
            *(chunk(id, plain, idempotent) for id in (0, 1, 255, 256, 2**32, 2**63 - 1, 2**63, 2**64 - 1))
        ),
    )
    yield (
        "codecs.wo",
        encode(
            *(
                chunk(id, *(captured(f"{client}-{codec}") for codec in CODECS))
                for id, client in ((1, "librdkafka"), (2, "kafka-python"))
            )
        ),
    )
    largest = ChunkInput(2**64 - 1, [plain], 2**32 - 1, -(2**63), 2**63 - 1)
    yield "largest-values.wo", encode_object(UUID(int=2**128 - 1), 2**32 - 1, 2**63 - 1, [largest]).body


def rewrite() -> None:
    objects = dict(golden_objects())
    for name, data in objects.items():
        (DIRECTORY / name).write_bytes(data)
    described = {name: describe(bytes(data)) for name, data in objects.items()}
    MANIFEST.write_text(json.dumps(described, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] != ["--rewrite"]:
        sys.exit("this replaces golden files; say --rewrite if that is meant")
    rewrite()
