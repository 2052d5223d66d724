"""The index as readers may use it: only entries that count, and only the decided prefix of a stream.

Entries of fenced objects are void (`Witness`). Where the store does not ensure that an entry starts where its
writer expected, an entry with producers may be undecided: another came in between, and its verdicts are not
stored yet. Readers stop in front of it, so the high watermark (`end`) is the end of the decided prefix.

Undecided entries are resolved: the fold's verdicts are put into the entry, at its version. Everybody computes
the same ones, and whoever loses the compare-and-put checks that (protocol 2). The writer does it at once; if
it has died, any broker whose readers wait does it after `RESOLVE_AFTER_S`. One that stands in front of what
this broker has acknowledged is resolved by the reader that meets it: what was acknowledged here can be read
here at once (protocol 18).

Where `conditions_abort` there are no undecided entries, and all of this costs nothing.
"""

from __future__ import annotations

import asyncio
import builtins
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress

from dray.errors import CorruptStore, DrayError, OutcomeUnknown, ReadAgain, Unavailable, VersionConflict
from dray.index.cache import IndexCache
from dray.index.changes import carry_out, resolve
from dray.index.entry import Placed, Truncated, WalChunk, is_decided, place, sequence_of
from dray.index.fold import EXPIRATION_MS
from dray.index.lookup import NOTHING, OffsetIndex
from dray.index.witness import Witness
from dray.metadata.store import MetadataStore, Position
from dray.producers.folds import StreamFolds

log = logging.getLogger(__name__)

# Compaction swaps a range once; being overtaken more often than this is an accident of its own.
JUDGE_ATTEMPTS = 3
RESOLVE_ATTEMPTS = 4
# A writer resolves its own entries within milliseconds.
RESOLVE_AFTER_S = 2.0
PAGE_ENTRIES = 256
# Looking through so many entries for one that is undecided is worth a snapshot, which says that none is.
SNAPSHOT_ENTRIES = 2_000
MAX_STREAMS = 65_536


class DecidedIndex(OffsetIndex):
    def __init__(
        self,
        store: MetadataStore,
        domain_of: Callable[[int], int],
        cache: IndexCache,
        witness: Witness,
        *,
        incarnation: str,
        expiration_ms: int = EXPIRATION_MS,
        resolve_after_s: float = RESOLVE_AFTER_S,
    ) -> None:
        super().__init__(store, domain_of, cache)
        self._witness = witness
        self._incarnation = incarnation
        self._resolve_after_s = resolve_after_s
        self.folds = StreamFolds(store, domain_of, self, incarnation=incarnation, expiration_ms=expiration_ms)
        # The end of the decided prefix, as far as it was looked at. The one asked for last is last.
        self._decided: OrderedDict[int, Position] = OrderedDict()
        self._resolving: dict[int, asyncio.Task[None]] = {}

    # --- as readers see it

    def knows(self, stream_id: int, offset: int) -> bool:
        """Whether reading from there on can begin without asking the store."""
        end = self._cache.end(stream_id)
        if end is None or self._cache.log_start(stream_id) is None:
            return False
        if not self._store.conditions_abort and self._decided.get(stream_id) != end:
            return False
        if offset == end.end_records:
            return True
        placed = self._cache.find(stream_id, offset)
        return placed is not None and self._witness.known([placed]) is not None

    async def end(self, stream_id: int, *, fresh: bool = False) -> Position:
        """The high watermark: the end of the decided prefix."""
        tail = await self.tail(stream_id, fresh=fresh)
        resolve_to = self.folds.acknowledged(stream_id)
        if tail.end_records < resolve_to:  # by a snapshot that is ahead of the watch
            tail = await self.tail(stream_id, fresh=True)
        if self._store.conditions_abort:
            return tail
        return await self._decided_end(stream_id, tail, resolve_to=resolve_to, fresh=fresh)

    async def find(self, stream_id: int, offset: int, *, fresh: bool = False) -> Placed | None:
        run = await self.range(stream_id, offset, 1, fresh=fresh)
        return run[0] if run else None

    async def range(
        self, stream_id: int, start: int, max_entries: int, *, fresh: bool = False
    ) -> list[Placed]:
        """Decided entries only: fewer than `max_entries`, also where one follows that is not."""
        entries = await self.counted(stream_id, start, max_entries, fresh=fresh)
        if not self._store.conditions_abort:
            for number, placed in enumerate(entries):
                if not is_decided(placed, self._incarnation):
                    if not fresh and placed.end_offset <= self._decided.get(stream_id, NOTHING).end_records:
                        return await self.range(stream_id, start, max_entries, fresh=True)  # a stale read
                    entries = entries[:number]
                    break
            self._goes_on(stream_id, entries)
        return entries

    def add(self, placed: Placed, began: int) -> None:
        super().add(placed, began)
        if not self._store.conditions_abort:
            self.folds.acknowledge(placed.entry.stream_id, placed.end_offset)

    async def close(self) -> None:
        for task in self._resolving.values():
            task.cancel()
        await asyncio.gather(*self._resolving.values(), return_exceptions=True)
        await self.folds.close()

    # --- as it is

    def followed_end(self, stream_id: int) -> int | None:
        """Where the watch has seen the stream end."""
        end = self._cache.end(stream_id)
        return None if end is None else end.end_records

    async def tail(self, stream_id: int, *, fresh: bool = False) -> Position:
        """Where the next append will start; never below what the watch has told, though a read may be stale.

        Whoever was woken by the watch looks here, and would not be woken again.
        """
        end = await super().end(stream_id, fresh=fresh)
        followed = self._cache.end(stream_id)
        return end if followed is None or followed <= end else self._tell(stream_id, end=followed).end

    async def counted(
        self, stream_id: int, start: int, max_entries: int, *, fresh: bool = False
    ) -> list[Placed]:
        """Entries that count, decided or not, and void ones marked."""
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

    # --- deciding

    async def _decided_end(
        self, stream_id: int, tail: Position, *, resolve_to: int, fresh: bool = False
    ) -> Position:
        """Look on from where it is known to be decided, and resolve what begins before `resolve_to`."""
        known = self._decided.get(stream_id)
        if known is None:
            known = await self._begin(stream_id, tail)
        looked_at = 0
        while known < tail:
            page = await self.counted(stream_id, known.end_records, PAGE_ENTRIES, fresh=fresh)
            looked_at += len(page)
            if not page:
                break
            for placed in page:
                if not is_decided(placed, self._incarnation):
                    if placed.start_offset >= resolve_to:
                        self._resolve_later(stream_id, tail)
                        return self._keep(stream_id, known)
                    await self.resolve(placed)
                known = max(known, Position(placed.end_offset, placed.end_bytes))
            if len(page) == PAGE_ENTRIES:
                await asyncio.sleep(0)  # pages that are all in memory would keep everyone else waiting
        known = self._keep(stream_id, known)
        if looked_at > SNAPSHOT_ENTRIES:
            with suppress(DrayError):  # nothing rests on it
                await self.folds.catch_up(stream_id)
        return known

    async def _begin(self, stream_id: int, tail: Position) -> Position:
        """Everything below a snapshot is decided; where there are few entries it need not be asked for."""
        first = await self.counted(stream_id, 0, PAGE_ENTRIES) if tail > NOTHING else []
        if len(first) < PAGE_ENTRIES:
            return NOTHING
        # It may be ahead of the watch, which says where a lookup ends.
        begin = min(await self.folds.snapshot_end(stream_id), tail.end_records)
        before = await self._store.floor(self._domain_of(stream_id), sequence_of(stream_id), begin)
        return NOTHING if before is None else before.position

    def _goes_on(self, stream_id: int, run: Sequence[Placed]) -> None:
        """Decided entries are about to be told of: if they go on from the decided prefix, so does that.

        Or a stale read might end it in front of them later.
        """
        known = self._decided.get(stream_id)
        if known is not None and run and run[0].start_offset <= known.end_records < run[-1].end_offset:
            self._keep(stream_id, Position(run[-1].end_offset, run[-1].end_bytes))

    def _keep(self, stream_id: int, decided: Position) -> Position:
        decided = max(decided, self._decided.get(stream_id, NOTHING))
        self._decided[stream_id] = decided
        self._decided.move_to_end(stream_id)
        if len(self._decided) > MAX_STREAMS:
            self._decided.popitem(last=False)
        self.folds.decided(stream_id, decided.end_records)
        return decided

    # --- resolving

    async def resolve(self, placed: Placed) -> None:
        """Store the verdicts of an entry that counts. When this returns, they are, or it is replaced."""
        stream_id = placed.entry.stream_id
        failure: DrayError | None = None
        for _ in builtins.range(RESOLVE_ATTEMPTS):
            try:
                began = self.now()
                verdicts = await self.folds.verdicts(placed)
                swap = resolve(placed, [verdict.kind for verdict in verdicts])
                done = await carry_out(self._store, self._domain_of(stream_id), swap)
            except (VersionConflict, OutcomeUnknown, ReadAgain) as error:
                failure = error
                found = await self._read_again(placed)
                if found is None:
                    return
                placed = found
            else:
                log.debug("stream %016x: resolved the entry at %d", stream_id, placed.end_offset)
                self._cache.add(self._domain_of(stream_id), began, [done])
                self.folds.resolved(done)
                return
        raise failure or AssertionError("it fails or returns")

    async def _read_again(self, placed: Placed) -> Placed | None:
        """The entry as it is now, if it is still undecided."""
        stream_id = placed.entry.stream_id
        domain, sequence = self._domain_of(stream_id), sequence_of(stream_id)
        await self._store.barrier(domain)
        began = self.now()
        entry = await self._store.ceiling(domain, sequence, placed.end_offset)
        found = None if entry is None else place(entry)
        if found is None or found.end_offset != placed.end_offset:
            return None
        self._cache.add(domain, began, [found])  # or readers would go on stopping at what it was before
        if not is_decided(found, self._incarnation):
            return found
        self._check_equal(found)
        return None

    def _check_equal(self, found: Placed) -> None:
        """Others resolved it. That they found what this broker would have is what all of this rests on."""
        where = found.entry.where
        verdicts = self.folds.remembered(found)
        if not isinstance(where, WalChunk) or verdicts is None:
            return
        if tuple(verdict.kind for verdict in verdicts) != where.verdicts:
            raise CorruptStore(
                f"stream {found.entry.stream_id:016x}: the entry at {found.end_offset} was resolved as"
                f" {where.verdicts}, but the fold says {verdicts}"
            )
        self.folds.resolved(found)

    def _resolve_later(self, stream_id: int, tail: Position) -> None:
        if stream_id not in self._resolving:
            work = self._wait_and_resolve(stream_id, tail)
            self._resolving[stream_id] = asyncio.get_running_loop().create_task(work)

    async def _wait_and_resolve(self, stream_id: int, tail: Position) -> None:
        """What the writers of the entries up to `tail` have had time for."""
        try:
            await asyncio.sleep(self._resolve_after_s)
            await self._decided_end(stream_id, tail, resolve_to=tail.end_records)
        except DrayError as error:
            log.warning("stream %016x has entries that are not resolved yet: %s", stream_id, error)
        finally:
            del self._resolving[stream_id]
