"""The topics as groups see them, over the broker's view of the catalog.

It answers from the view alone: a topic that the view does not have yet does not exist. `matching` remembers
what it found, by expression; when topics came or went, only the new names are looked at.
"""

from __future__ import annotations

import asyncio
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
        self._now: asyncio.Future[None] | None = None  # the reading that is under way, or was last
        self._next: asyncio.Future[None] | None = None  # the one that comes after it
        self._names: frozenset[str] = frozenset()  # of all topics, when the view was at `_revision`
        self._revision = -1
        self._matched: OrderedDict[str, _Matched] = OrderedDict()

    @property
    def revision(self) -> int:
        """Grows with every change."""
        return self._catalog.revision

    async def refresh(self) -> None:
        """Make it at least as new as this call. Those who ask while one reads share the next reading."""
        if self._next is None:
            self._next = asyncio.ensure_future(self._refresh_after(self._now))
        await asyncio.shield(self._next)

    async def _refresh_after(self, running: asyncio.Future[None] | None) -> None:
        if running is not None:
            await asyncio.wait({running})
        self._now, self._next = self._next, None
        await self._catalog.reload()

    def id_of(self, name: str) -> UUID | None:
        topic = self._catalog.get(name)
        return None if topic is None else topic.topic_id

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
