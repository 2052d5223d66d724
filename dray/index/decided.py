"""The index as readers may use it: only entries that count, those of fenced objects as void."""

from __future__ import annotations

from collections.abc import Callable

from dray.index.cache import IndexCache
from dray.index.entry import Placed
from dray.index.lookup import OffsetIndex
from dray.index.witness import Witness
from dray.metadata.store import MetadataStore


class DecidedIndex(OffsetIndex):
    def __init__(
        self, store: MetadataStore, domain_of: Callable[[int], int], cache: IndexCache, witness: Witness
    ) -> None:
        super().__init__(store, domain_of, cache)
        self._witness = witness

    async def find(self, stream_id: int, offset: int, *, fresh: bool = False) -> Placed | None:
        found = await super().find(stream_id, offset, fresh=fresh)
        return None if found is None else (await self._judged([found]))[0]

    async def range(
        self, stream_id: int, start: int, max_entries: int, *, fresh: bool = False
    ) -> list[Placed]:
        return await self._judged(await super().range(stream_id, start, max_entries, fresh=fresh))

    async def _judged(self, entries: list[Placed]) -> list[Placed]:
        known = self._witness.known(entries)
        return await self._witness.judge(entries) if known is None else known
