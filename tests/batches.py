"""Kafka record batches for tests: captured from real clients, or built field by field.

Written against Kafka's documentation of the format and shares no code with Dray.
"""

from __future__ import annotations

import struct
from pathlib import Path

from crc32c import crc32c

GOLDEN = Path(__file__).parent.parent / "golden"


def captured(name: str) -> bytes:
    return (GOLDEN / "records" / f"{name}.bin").read_bytes()


def build_batch(
    body: bytes = b"\x0c" + bytes(6),
    *,
    base_offset: int = 0,
    leader_epoch: int = -1,
    magic: int = 2,
    attributes: int = 0,
    last_offset_delta: int | None = None,
    base_timestamp: int = 1_700_000_000_000,
    max_timestamp: int = 1_700_000_000_000,
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
    records: int = 1,
    length: int | None = None,
) -> bytes:
    """A batch whose checksum is right, whatever else is wrong with it. The body is one empty record."""
    if last_offset_delta is None:
        last_offset_delta = records - 1
    covered = (
        struct.pack(
            ">hiqqqhii",
            attributes,
            last_offset_delta,
            base_timestamp,
            max_timestamp,
            producer_id,
            producer_epoch,
            base_sequence,
            records,
        )
        + body
    )
    if length is None:
        length = 9 + len(covered)
    return struct.pack(">qiibI", base_offset, length, leader_epoch, magic, crc32c(covered)) + covered


def end_of(batches: bytes) -> int:
    """The offset behind the last of adjacent batches; 0 if there are none."""
    at = end = 0
    while at < len(batches):
        end = int.from_bytes(batches[at : at + 8]) + int.from_bytes(batches[at + 23 : at + 27]) + 1
        at += 12 + int.from_bytes(batches[at + 8 : at + 12])
    return end
