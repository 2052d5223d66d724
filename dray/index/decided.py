"""The index as readers may use it: only entries that count, those of fenced objects as void."""

from __future__ import annotations

import builtins
from collections.abc import Callable

from dray.errors import Unavailable, VersionConflict
from dray.index.cache import IndexCache
from dray.index.entry import Placed, Truncated
from dray.index.lookup import OffsetIndex
from dray.index.witness import Witness
from dray.metadata.store import MetadataStore, Position

# Compaction swaps a range once; being overtaken more often than this is an accident of its own.
JUDGE_ATTEMPTS = 3


class DecidedIndex(OffsetIndex):
    def __init__(
        self, store: MetadataStore, domain_of: Callable[[int], int], cache: IndexCache, witness: Witness
    ) -> None:
        super().__init__(store, domain_of, cache)
        self._witness = witness

    def knows(self, stream_id: int, offset: int) -> bool:
        """Whether reading from there on can begin without asking the store."""
        end = self._cache.end(stream_id)
        if end is None or self._cache.log_start(stream_id) is None:
            return False
        if offset == end.end_records:
            return True
        placed = self._cache.find(stream_id, offset)
        return placed is not None and self._witness.known([placed]) is not None

    async def end(self, stream_id: int, *, fresh: bool = False) -> Position:
        """Where the next append will start; never below what the watch has told, though a read may be stale.

        Whoever was woken by the watch looks here, and would not be woken again.
        """
        end = await super().end(stream_id, fresh=fresh)
        followed = self._cache.end(stream_id)
        return end if followed is None or followed <= end else self._tell(stream_id, end=followed).end

    async def find(self, stream_id: int, offset: int, *, fresh: bool = False) -> Placed | None:
        run = await self.range(stream_id, offset, 1, fresh=fresh)
        return run[0] if run else None

    async def range(
        self, stream_id: int, start: int, max_entries: int, *, fresh: bool = False
    ) -> list[Placed]:
        for _ in builtins.range(JUDGE_ATTEMPTS):
            entries = await super().range(stream_id, start, max_entries, fresh=fresh)
            if entries and isinstance(entries[0].entry.where, Truncated):
                # Read before the watch has told of it: from now on no lower log start is told.
                self._tell(stream_id, log_start=entries[0].end_offset)
            known = self._witness.known(entries)
            if known is not None:
                return known
            try:
                return await self._witness.judge(entries)
            except VersionConflict:
                fresh = True  # a swap took the range while it was looked at
        raise Unavailable(f"stream {stream_id:016x}: its index changes faster than it can be read")
