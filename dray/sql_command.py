"""`drayd sql`: statements in, tables of text out. What is shown is for people, or with JSON for programs.

Bytes are shown as the text that they are in UTF-8, and otherwise as 0x and hexadecimal digits; times as ISO,
in UTC. A table shows long values shortened; JSON has them whole.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import IO, TYPE_CHECKING, Any

from dray.config import Settings
from dray.errors import QueryFailed, SparkNotStarted
from dray.spark import CATALOG, first_line, open_session

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

# Of a value in a table. Kafka's may be a megabyte.
MAX_CELL = 120
_SHORTENED = "…"


def run_sql(
    settings: Settings,
    text: str,
    *,
    limit: int,
    as_json: bool,
    out: IO[str],
    note: Callable[[str], None],
    clear: Callable[[], None] = lambda: None,
) -> None:
    """Run the statements of `text`, in order, up to the first that fails.

    `note` says what happens on the way, and `clear` takes it back. Raises `QueryFailed` and `SparkError`.
    """
    statements = split_statements(text)
    if not statements:
        raise QueryFailed("there is no statement in it", 'drayd sql "SHOW TABLES IN dray.kafka"')
    note("starting Spark …")
    with _session(settings) as spark:
        shown_before = False
        for statement in statements:
            clear()
            note("running …")
            table = _run(spark, statement, limit + 1)
            clear()
            shown = table.slice(0, limit)
            if not table.num_columns:
                pass  # it did something, and has nothing to show
            elif as_json:
                out.writelines(f"{line}\n" for line in json_lines(shown))
            else:
                if shown_before:
                    out.write("\n")
                shown_before = True
                out.writelines(f"{line}\n" for line in table_lines(shown))
            out.flush()
            if table.num_rows > limit:
                note(f"only the first {limit} rows are shown; --limit N shows more\n")


@contextmanager
def _session(settings: Settings) -> Iterator[SparkSession]:
    """What the JVM says is of use only if it does not come up."""
    with tempfile.TemporaryFile() as said:
        try:
            spark = open_session(settings, stderr=said.fileno())
        except SparkNotStarted as error:
            said.seek(0)
            lines = said.read().decode(errors="replace").splitlines()
            reasons = [line for line in lines if line.strip() and not line.startswith("WARNING")]
            raise SparkNotStarted(": ".join([str(error).rstrip("."), *reasons[:1]])) from error
        try:
            yield spark
        finally:
            spark.stop()


def _run(spark: SparkSession, statement: str, limit: int) -> pa.Table:
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        return spark.sql(statement).limit(limit).toArrow()
    except (PySparkException, Py4JError) as error:
        raise query_failed(error) from error


def query_failed(error: Exception) -> QueryFailed:
    condition = str(getattr(error, "getCondition", lambda: None)() or "")
    parameters = getattr(error, "getMessageParameters", lambda: None)() or {}
    if condition.startswith("TABLE_OR_VIEW_NOT_FOUND"):
        name = str(parameters.get("relationName", "?")).replace("`", "")
        return QueryFailed(
            f"there is no table {name}",
            "a topic is a table once drayd compactor has been at it; SHOW TABLES IN dray.kafka lists them",
        )
    message = first_line(error)
    if "NoSuchNamespaceException: " in message:
        name = message.rpartition(": ")[2]
        return QueryFailed(
            f"there is no namespace {name}",
            f"it is made with the first table; SHOW NAMESPACES IN {CATALOG} lists them",
        )
    # "class.of.Error: [CONDITION] What it is. SQLSTATE: 42000 (line 1, pos 3)"
    message = re.sub(r"^[\w.$]+(Exception|Error): ", "", message)
    message = re.sub(r"^\[[\w.]+\] ", "", message)
    message = re.sub(r"\s*SQLSTATE: \w{5}", "", message).rstrip("; ")
    hint = ""
    if condition.startswith("PARSE_SYNTAX_ERROR"):
        hint = "names with dots or dashes stand in backquotes: dray.kafka.`my-topic`"
    return QueryFailed(message or condition or repr(error), hint)


def split_statements(text: str) -> list[str]:
    """At each `;` that is not inside of quotes or a comment. Those without anything in them are left out."""
    statements: list[str] = []
    start = end = 0
    is_empty = True
    for token in _TOKENS.finditer(text):
        end = token.end()
        if token[0] == ";":
            if not is_empty:
                statements.append(text[start : token.start()].strip())
            start, is_empty = end, True
        elif token.lastgroup != "nothing":
            is_empty = False
    if not is_empty:
        statements.append(text[start:end].strip())
    return statements


# A quote that nobody closes goes on to the end, and Spark says so. In `…` only a doubled quote escapes.
_TOKENS = re.compile(
    r"""(?P<nothing>\s+|--[^\n]*|/\*.*?(?:\*/|\Z))
      | '(?:\\.|[^'\\])*(?:'|\Z) | "(?:\\.|[^"\\])*(?:"|\Z) | `[^`]*(?:`|\Z) | ; | .""",
    re.VERBOSE | re.DOTALL,
)


def table_lines(table: pa.Table) -> Iterator[str]:
    """A header, a rule and the rows, aligned: numbers to the right, everything else to the left."""
    import pyarrow.types as kinds

    columns: list[list[str]] = []
    to_right: list[bool] = []
    for name, column in zip(table.column_names, table.columns, strict=True):
        columns.append([_cell(name), *(_cell(_text(value)) for value in column.to_pylist())])
        kind = column.type
        to_right.append(kinds.is_integer(kind) or kinds.is_floating(kind) or kinds.is_decimal(kind))
    widths = [max(map(_width, cells)) for cells in columns]
    for number, row in enumerate(zip(*columns, strict=True)):
        yield "  ".join(map(_aligned, row, widths, to_right)).rstrip()
        if number == 0:
            yield "  ".join("-" * width for width in widths)


def json_lines(table: pa.Table) -> Iterator[str]:
    for row in table.to_pylist():
        yield json.dumps({name: _plain(value) for name, value in row.items()}, ensure_ascii=False)


def _text(value: object) -> str:
    plain = _plain(value)
    if plain is None:
        return "NULL"
    if isinstance(plain, str):
        return plain
    return json.dumps(plain, ensure_ascii=False)


def _plain(value: Any) -> Any:
    """As JSON can have it."""
    match value:
        case bytes():
            try:
                return value.decode()
            except UnicodeDecodeError:
                return f"0x{value.hex()}"
        case datetime():
            return value.isoformat(
                timespec="milliseconds" if value.microsecond % 1000 == 0 else "microseconds"
            )
        case date() | time():
            return value.isoformat()
        case timedelta() | Decimal():
            return str(value)
        case float() if not math.isfinite(value):
            return str(value)
        case dict():
            return {str(name): _plain(each) for name, each in value.items()}
        # Arrow has maps as lists of pairs.
        case list() | tuple():
            return [_plain(each) for each in value]
        case _:
            return value


def _cell(text: str) -> str:
    """On one line, without what a terminal would obey."""
    if len(text) > MAX_CELL:
        text = text[: MAX_CELL - 1] + _SHORTENED
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def _width(text: str) -> int:
    """In columns of a terminal: East Asian characters take two, marks upon others none."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(each) in "WF" for each in text)
    return len(text) + wide - sum(map(bool, map(unicodedata.combining, text)))


def _aligned(text: str, width: int, to_right: bool) -> str:
    padding = " " * (width - _width(text))
    return padding + text if to_right else text + padding
