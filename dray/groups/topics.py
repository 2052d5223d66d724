"""The topics as groups see them, over the broker's view of the catalog.

It answers from the view alone: a topic that the view does not have yet does not exist. `matching` remembers
what it found, by expression; when topics came or went, only the new names are looked at.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple
from uuid import UUID

from dray.groups import regex
from dray.groups.group import TopicShape
from dray.topics.catalog import TopicCatalog

# Each holds a reference per name that matches. Groups of one application share their expression.
MAX_REMEMBERED = 256


class _Matched(NamedTuple):
    looked_at: frozenset[str]
    names: frozenset[str]


class TopicsView:
    """`Topics` as of now: between two awaits it does not change."""

    def __init__(self, catalog: TopicCatalog) -> None:
        self._catalog = catalog
        self._names: frozenset[str] = frozenset()  # of all topics, when the view was at `_revision`
        self._revision = -1
        self._matched: OrderedDict[str, _Matched] = OrderedDict()

    def get(self, name: str) -> TopicShape | None:
        topic = self._catalog.get(name)
        return None if topic is None else TopicShape(topic.topic_id, len(topic.streams))

    def name_of(self, topic_id: UUID) -> str | None:
        topic = self._catalog.by_id(topic_id)
        return None if topic is None else topic.name

    def matching(self, pattern: str) -> frozenset[str]:
        """The names that match as a whole. The expression was checked before."""
        names = self._all_names()
        known = self._matched.pop(pattern, _Matched(frozenset(), frozenset()))
        if known.looked_at is not names:
            new = regex.matching(pattern, names - known.looked_at)
            known = _Matched(names, (known.names & names) | new)
        self._matched[pattern] = known
        if len(self._matched) > MAX_REMEMBERED:
            self._matched.popitem(last=False)
        return known.names

    def _all_names(self) -> frozenset[str]:
        if self._revision != self._catalog.revision:
            self._revision = self._catalog.revision
            names = frozenset(topic.name for topic in self._catalog.all())
            if names != self._names:
                self._names = names
        return self._names
