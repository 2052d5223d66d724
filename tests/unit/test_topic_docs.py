"""The page of topic configs says what the table says."""

from __future__ import annotations

from pathlib import Path

from dray.topics.docs import page

PAGE = Path(__file__).parents[2] / "docs" / "topic-configs.md"


def test_the_page_is_the_table() -> None:
    assert PAGE.read_text() == page(), "run python -m dray.topics.docs > docs/topic-configs.md"


def test_the_page_has_kafkas_defaults() -> None:
    rows = [line.split(" | ") for line in page().splitlines()]
    assert ["| `max.message.bytes`", "int", "`1048588`", "`message.max.bytes`", "yes"] in [
        r[:5] for r in rows
    ]
