"""Columns back to batches, read again by a naive reader and by clients' own."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pytest
from aiokafka.record import MemoryRecords  # type: ignore[import-untyped]  # has no stubs
from hypothesis import given, settings
from hypothesis import strategies as st

from dray.columns.decode import decode_batches
from dray.columns.encode import Rebuilt, encode_batches
from dray.columns.schema import SCHEMA
from tests.naive_records import Plan, Record, build, parse
from tests.record_plans import plans

MIB = 2**20
NO_HEADERS: tuple[tuple[str, bytes | None], ...] = ()
NOW = 1_700_000_000_000


def table_of(*batches: Plan) -> pa.Table:
    placed, offset = [], 0
    for plan in batches:
        offset += plan.gap
        placed.append((memoryview(build(plan)), offset))
        offset += len(plan.records)
    return decode_batches(placed, 7, max_bytes=2**30)


def expected_of(*batches: Plan) -> list[Record]:
    found, offset = list[Record](), 0
    for plan in batches:
        offset += plan.gap
        found += parse(build(plan), offset)
        offset += len(plan.records)
    return found


def plain(count: int, *, value: bytes | None = b"value", gap: int = 0) -> Plan:
    return Plan([(NOW + n, b"key", value, NO_HEADERS) for n in range(count)], gap=gap)


def counts(batches: Sequence[Rebuilt]) -> list[int]:
    return [batch.end_offset - batch.base_offset for batch in batches]


@settings(max_examples=150, deadline=None)
@given(plans(), st.sampled_from([0, 100, 1_000, 100_000, MIB]))
def test_any_records_come_back(batches: Sequence[Plan], target_bytes: int) -> None:
    """Also their order, and every batch is within the target unless it is of one record."""
    rebuilt = encode_batches(table_of(*batches), target_bytes=target_bytes)
    found = list[Record]()
    for batch in rebuilt:
        records = parse(batch.data)
        assert (records[0].offset, records[-1].offset) == (batch.base_offset, batch.end_offset - 1)
        assert len(batch.data) <= target_bytes or len(records) == 1
        found += records
    assert found == expected_of(*batches)


def test_a_clients_own_reader_reads_the_same() -> None:
    headers = (("a", b"1"), ("a", None), ("b", b""))
    plan = Plan([(NOW, b"k", None, headers), (NOW - 500, None, b"", ()), (NOW + 9, b"", b"v", headers)])
    (rebuilt,) = encode_batches(table_of(plan), target_bytes=MIB)
    batch = MemoryRecords(rebuilt.data).next_batch()
    assert batch.validate_crc()
    found = [(each.offset, each.timestamp, each.key, each.value, tuple(each.headers)) for each in batch]
    assert found == [
        (0, NOW, b"k", None, headers),
        (1, NOW - 500, None, b"", ()),
        (2, NOW + 9, b"", b"v", headers),
    ]


def test_the_header_says_what_its_records_are() -> None:
    plan = Plan([(NOW + 5, b"k", b"v", ()), (NOW, b"k", b"v", ())], producer=(11, 3, 8), gap=40)
    (rebuilt,) = encode_batches(table_of(plan), target_bytes=MIB)
    head = rebuilt.data[:61]
    assert int.from_bytes(head[0:8]) == 40
    assert int.from_bytes(head[8:12]) == len(rebuilt.data) - 12
    assert int.from_bytes(head[12:16]) == 0  # the leader epoch
    assert int.from_bytes(head[21:23]) == 0
    assert int.from_bytes(head[23:27]) == 1
    assert int.from_bytes(head[27:35]) == NOW + 5
    assert int.from_bytes(head[35:43]) == NOW + 5
    assert (int.from_bytes(head[43:51]), int.from_bytes(head[51:53]), int.from_bytes(head[53:57])) == (
        11,
        3,
        8,
    )
    assert int.from_bytes(head[57:61]) == 2
    without = encode_batches(table_of(plain(1)), target_bytes=MIB)[0].data
    assert without[43:57] == b"\xff" * 14


def test_nothing_is_no_batch() -> None:
    assert encode_batches(SCHEMA.empty_table(), target_bytes=100) == []


def test_batches_that_go_on_from_each_other_become_one() -> None:
    first = Plan([(NOW, None, None, ())] * 3, producer=(1, 2, 2**31 - 3))
    second = Plan([(NOW, None, None, ())] * 2, codec="gzip", producer=(1, 2, 0))
    assert counts(encode_batches(table_of(first, second, plain(1), plain(2)), target_bytes=MIB)) == [5, 3]


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"producer": (2, 2, 8)}, id="producer"),
        pytest.param({"producer": (1, 3, 8)}, id="epoch"),
        pytest.param({"producer": (1, 2, 9)}, id="sequence"),
        pytest.param({}, id="no producer"),
        pytest.param({"producer": (1, 2, 8), "gap": 1}, id="offset"),
        pytest.param({"producer": (1, 2, 8), "extra_bits": 16}, id="attributes"),
    ],
)
def test_what_a_batch_says_once_is_the_same_for_all_of_it(other: dict[str, object]) -> None:
    records = [(NOW, b"k", b"v", NO_HEADERS)] * 3
    first = Plan(records, producer=(1, 2, 5))
    assert counts(encode_batches(table_of(first, Plan(records, **other)), target_bytes=MIB)) == [3, 3]  # type: ignore[arg-type]
    same = Plan(records, producer=(1, 2, 8))
    assert counts(encode_batches(table_of(first, same), target_bytes=MIB)) == [6]


def test_another_append_time_is_another_batch() -> None:
    records = [(NOW, b"k", b"v", NO_HEADERS)] * 2
    stamped = [Plan(records, append_time=time) for time in (5, 5, 6)]
    assert counts(encode_batches(table_of(*stamped), target_bytes=MIB)) == [4, 2]


def test_batches_are_nearly_as_large_as_they_may_be() -> None:
    rebuilt = encode_batches(table_of(plain(20_000, value=b"v" * 100)), target_bytes=100_000)
    assert all(95_000 < len(batch.data) <= 100_000 for batch in rebuilt[:-1])


def test_times_more_than_64_bits_apart_do_not_make_batches_too_large() -> None:
    """Their difference wraps, and takes ten bytes."""
    apart = Plan([(time, None, None, NO_HEADERS) for time in (2**62, -(2**62) - 1)] * 500)
    rebuilt = encode_batches(table_of(apart), target_bytes=1_000)
    assert all(len(batch.data) <= 1_000 for batch in rebuilt)
    assert [record for batch in rebuilt for record in parse(batch.data)] == expected_of(apart)


def test_a_record_above_the_target_is_alone() -> None:
    huge = Plan([(NOW, None, b"v" * 50_000, NO_HEADERS)])
    assert counts(encode_batches(table_of(plain(2), huge, plain(2)), target_bytes=1_000)) == [2, 1, 2]


def test_tables_in_pieces_and_parts_of_tables_are_read() -> None:
    """Also more bytes than are joined at once."""
    plan = plain(50, value=bytes(MIB))
    table = table_of(plan)
    pieces = pa.concat_tables([table.slice(at, 7) for at in range(3, 50, 7)])
    rebuilt = encode_batches(pieces, target_bytes=5 * MIB)
    assert [record for batch in rebuilt for record in parse(batch.data)] == expected_of(plan)[3:]
    headers = Plan([(NOW, None, None, (("h", b"%d" % n),) * (n % 3)) for n in range(20)])
    part = encode_batches(table_of(headers).slice(4, 9), target_bytes=MIB)
    assert parse(part[0].data) == expected_of(headers)[4:13]
