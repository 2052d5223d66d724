"""Subscriptions by expression: what is taken, what matches, and what is remembered."""

from __future__ import annotations

import pytest

from dray.errors import InvalidRegex
from dray.groups import regex
from dray.groups.topics import TopicsView
from dray.metadata.memory import MemoryData, MemoryStore
from dray.topics.catalog import TopicCatalog, topic_directory


@pytest.mark.parametrize("pattern", ["a", "logs-.*", "(?i)A+", r"\d{3}", "a|b", "", ".*", "[^a]", r"\pL+"])
def test_re2_is_taken(pattern: str) -> None:
    regex.check(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        "(",
        "[a",
        "*",
        r"(a)\1",
        "a(?=b)",
        "(?!a)",
        "a{1001}",
        "((a{100}){100}){100}",
        "(?<n>a",
        "\ud800",
        "a" * 8_193,
    ],
)
def test_what_is_not_re2_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidRegex):
        regex.check(pattern)


def test_large_expressions_are_refused_or_small_in_memory() -> None:
    """Within the allowed length, some would have programs of many megabytes."""
    with pytest.raises(InvalidRegex):
        regex.check(r"(\pL{500})" * 100)


def test_names_match_as_a_whole() -> None:
    names = ["logs", "logs-1", "my-logs", "LOGS"]
    assert regex.matching("logs", names) == {"logs"}
    assert regex.matching("logs.*", names) == {"logs", "logs-1"}
    assert regex.matching("logs|my", names) == {"logs"}
    assert regex.matching("^logs$", names) == {"logs"}
    assert regex.matching("", names) == set()


def test_expressions_that_others_take_long_for_are_quick() -> None:
    """A backtracking matcher would not come to an end."""
    assert regex.matching("(a*)*b", ["a" * 249]) == set()


async def test_view_of_topics_follows_the_catalog() -> None:
    store = MemoryStore(MemoryData())
    directory = topic_directory(store)
    catalog = TopicCatalog(store, 4, directory, wall_clock_ms=lambda: 0)
    view = TopicsView(catalog)
    assert view.matching("logs.*") == set()
    made = await catalog.create("logs", 3, {})
    await catalog.create("other", 1, {})
    shape = view.get("logs")
    assert shape == (made.topic_id, 3)
    assert view.get("nothing") is None
    assert view.name_of(made.topic_id) == "logs"
    assert view.matching("logs.*") == {"logs"}
    await catalog.create("logs-2", 1, {})
    assert view.matching("logs.*") == {"logs", "logs-2"}
    await catalog.delete("logs")
    assert view.matching("logs.*") == {"logs-2"}
    assert view.name_of(made.topic_id) is None


async def test_remembered_expressions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dray.groups.topics.MAX_REMEMBERED", 2)
    store = MemoryStore(MemoryData())
    catalog = TopicCatalog(store, 4, topic_directory(store), wall_clock_ms=lambda: 0)
    await catalog.create("aaaa", 1, {})
    view = TopicsView(catalog)
    for count in (1, 2, 3, 4, 4, 1):
        assert view.matching("a" * count) == ({"aaaa"} if count == 4 else set())
    assert len(view._matched) == 2
