"""Records as columns: what a table of a topic holds, in Arrow. Pure.

One row is one record. Everything that a record batch is rebuilt from is there (`encode`), and everything that
a person wants to ask for. `FIELD_IDS` are Iceberg's: numbers are for ever, add and never reuse. `headers` is
the last column, because catalogs number nested fields behind the top-level ones, each in its own order.

- `timestamp` is null where the client's milliseconds do not fit a table's time: -1, which is "none", and what
  lies outside of the years 1 to 9999. Then, and only then, `raw_timestamp` has them.
- `producer_id`, `producer_epoch` and `sequence` are null together, for a record without a producer.
  `sequence` is the record's own: that of its batch and its place in it, modulo 2^31.
- `attributes` are those of the batch without the codec: bit 3 says LogAppendTime.
- `headers` is never null: a list, in order, with duplicates; a header's value may be null, its key is text.
"""

from __future__ import annotations

import pyarrow as pa

# As Parquet's and Iceberg's readers want to find it.
_ID = b"PARQUET:field_id"

FIELD_IDS = {
    "partition": 1,
    "offset": 2,
    "timestamp": 3,
    "raw_timestamp": 4,
    "key": 5,
    "value": 6,
    "producer_id": 7,
    "producer_epoch": 8,
    "sequence": 9,
    "attributes": 10,
    "headers": 11,
    "headers.element": 12,
    "headers.element.key": 13,
    "headers.element.value": 14,
}


def _field(name: str, kind: pa.DataType, *, nullable: bool = True) -> pa.Field:
    short = name.rpartition(".")[2]
    return pa.field(short, kind, nullable, metadata={_ID: str(FIELD_IDS[name]).encode()})


HEADER = pa.struct(
    [
        _field("headers.element.key", pa.string(), nullable=False),
        _field("headers.element.value", pa.binary()),
    ]
)

SCHEMA = pa.schema(
    [
        _field("partition", pa.int32(), nullable=False),
        _field("offset", pa.int64(), nullable=False),
        _field("timestamp", pa.timestamp("us", tz="UTC")),
        _field("raw_timestamp", pa.int64()),
        _field("key", pa.binary()),
        _field("value", pa.binary()),
        _field("producer_id", pa.int64()),
        _field("producer_epoch", pa.int32()),
        _field("sequence", pa.int32()),
        _field("attributes", pa.int32(), nullable=False),
        _field("headers", pa.list_(_field("headers.element", HEADER, nullable=False)), nullable=False),
    ]
)

# What a table's time can be: 0001-01-01 and the end of 9999-12-31, which Python, Spark and DuckDB all take.
MIN_TIMESTAMP_MS = -62_135_596_800_000
MAX_TIMESTAMP_MS = 253_402_300_799_999
LOG_APPEND_TIME = 8
