"""`drayd sql` without Spark: where statements end, and how values look."""

from __future__ import annotations

import datetime as dt
import json
from decimal import Decimal

import pyarrow as pa
import pytest

from dray.sql_command import json_lines, split_statements, table_lines


@pytest.mark.parametrize(
    ("text", "statements"),
    [
        ("SELECT 1", ["SELECT 1"]),
        (" SELECT 1 ;\nSELECT 2; ", ["SELECT 1", "SELECT 2"]),
        ("SELECT ';', \";\", `;`; SELECT 2", ["SELECT ';', \";\", `;`", "SELECT 2"]),
        (r"SELECT '\';' ; SELECT 2", [r"SELECT '\';'", "SELECT 2"]),
        (r"SELECT 'a'';' ; SELECT '\\' ; SELECT 3", ["SELECT 'a'';'", r"SELECT '\\'", "SELECT 3"]),
        (r"SELECT `\`; SELECT 2", [r"SELECT `\`", "SELECT 2"]),
        ("SELECT 1 -- it's; so\n; SELECT 2", ["SELECT 1 -- it's; so", "SELECT 2"]),
        ("SELECT 1 /* ; ' */ + 2; SELECT 2", ["SELECT 1 /* ; ' */ + 2", "SELECT 2"]),
        ("SELECT 1 - -1; -- the end\n /* of it */ ;;", ["SELECT 1 - -1"]),
        ("SELECT 'never closed; SELECT 2", ["SELECT 'never closed; SELECT 2"]),
        ("", []),
        (" ; -- nothing", []),
    ],
)
def test_statements_end_at_semicolons_outside_of_quotes_and_comments(
    text: str, statements: list[str]
) -> None:
    assert split_statements(text) == statements


VALUES = pa.table(
    {
        "n": pa.array([1, None, 1234], pa.int64()),
        "bytes": pa.array([b"text", b"\xff\x00", None], pa.binary()),
        "text": ["a\nb\x1b[31m", "日本", "e\u0301"],
        "at": pa.array([dt.datetime(2026, 1, 2, 3, 4, 5, 6000), None, None], pa.timestamp("us", tz="UTC")),
        "headers": [[{"key": "h", "value": b"v"}, {"key": "h", "value": None}], [], None],
    }
)


def test_a_table_is_aligned_and_shows_what_terminals_would_obey() -> None:
    assert list(table_lines(VALUES)) == [
        "   n  bytes   text          at                             headers",
        "----  ------  ------------  -----------------------------  "
        "---------------------------------------------------------",
        "   1  text    a\\nb\\x1b[31m  2026-01-02T03:04:05.006+00:00  "
        '[{"key": "h", "value": "v"}, {"key": "h", "value": null}]',
        "NULL  0xff00  日本          NULL                           []",
        "1234  NULL    e\u0301             NULL                           NULL",
    ]


def test_json_has_every_row_as_an_object() -> None:
    rows = [json.loads(line) for line in json_lines(VALUES)]
    assert rows[0] == {
        "n": 1,
        "bytes": "text",
        "text": "a\nb\x1b[31m",
        "at": "2026-01-02T03:04:05.006+00:00",
        "headers": [{"key": "h", "value": "v"}, {"key": "h", "value": None}],
    }
    assert [rows[1]["bytes"], rows[2]["bytes"], rows[2]["headers"]] == ["0xff00", None, None]


def test_a_long_value_is_shortened_in_a_table_and_whole_in_json() -> None:
    table = pa.table({"value": [b"x" * 1000]})
    assert list(table_lines(table))[2] == "x" * 119 + "…"
    assert json.loads(next(json_lines(table))) == {"value": "x" * 1000}


def test_values_that_json_lacks_are_text() -> None:
    table = pa.table(
        {
            "day": [dt.date(2026, 1, 2)],
            "price": [Decimal("1.50")],
            "ratio": [float("nan")],
            "for": [dt.timedelta(hours=1)],
            "tags": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int32())),
        }
    )
    assert json.loads(next(json_lines(table))) == {
        "day": "2026-01-02",
        "price": "1.50",
        "ratio": "nan",
        "for": "1:00:00",
        "tags": [["a", 1]],
    }
