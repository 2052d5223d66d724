"""Which index entries count: those whose object is COMMITTED (protocol 12).

Where not `conditions_abort`, the entries of an append land even if its object was fenced before. They keep
their offsets and are void. `Witness` finds out by the object's record, once per object, and marks what is
void in the index, so that the record need not be kept for ever. Where `conditions_abort`, such an append
leaves nothing, and everything counts.

- An entry counts only after COMMITTED was read for its object, or was acknowledged to this broker (`know`).
  That never changes while an entry is left, so it is remembered.
- An entry is void only once the index says so: after a compare-and-put of `Void` that was acknowledged, or
  after `Void` was read there. FENCED alone is not enough: the record may be forgotten, and others who then
  found neither would never know.
- A record that is absent decides nothing. It became visible together with its entries and goes after them,
  so one of the two reads was stale, or the entry has changed since: both are read again, behind a barrier.

**What keeps a fence from being forgotten too early.** A fenced append puts its references beside the record
in the same step as its entries, and `OrphanCollector.forget_fences` leaves a record that has one. The
reference of a fenced entry is deleted here, and only after its mark is known to be in place; so a fenced
entry without a mark has a reference, and its fence stays. Whoever dies in between leaves a reference behind,
which keeps the fence: no harm, and it goes with the entry, which names its object (protocol 15). That no
append lands after its fence was forgotten is for the collector's age limit to ensure; nothing here can.

Left to others: finding the entries (`OffsetIndex`), serving them, and what to tell a client when this raises.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from uuid import UUID

from dray.errors import CorruptStore, MetadataError, OutcomeUnknown, VersionConflict
from dray.index.changes import carry_out, void
from dray.index.entry import Placed, Void, WalChunk, place, sequence_of
from dray.metadata.store import MetadataStore
from dray.wal.objects import State, decode_record, record_key, reference_key

log = logging.getLogger(__name__)

# Behind a barrier one more is enough, unless others change the entry at the same time.
ATTEMPTS = 4
# Records read at once. A cold reader asks for hundreds; a store answers tens at a time no slower than one.
MAX_READS = 32
# About 8 MiB. One that was forgotten is read again.
MAX_OBJECTS = 65_536


class Witness:
    def __init__(
        self, store: MetadataStore, domain_of: Callable[[int], int], *, max_objects: int = MAX_OBJECTS
    ) -> None:
        """`domain_of` says which domain a stream is in; its objects are in the same."""
        self._store = store
        self._domain_of = domain_of
        self._max_objects = max_objects
        # By the number of their id: hashing a UUID runs Python code. The one asked for last is last.
        self._committed: OrderedDict[int, None] = OrderedDict()
        self._reading: dict[UUID, asyncio.Task[State | None]] = {}
        self._reads = asyncio.Semaphore(MAX_READS)

    def know(self, object_id: UUID) -> None:
        """Take an object for committed: this broker's own append of it was acknowledged."""
        if not self._store.conditions_abort:
            self._remember(object_id)

    def known(self, entries: Sequence[Placed]) -> list[Placed] | None:
        """The entries, if it is known already that all of them count or are marked. Never suspends."""
        if not self._store.conditions_abort and not all(map(self._is_decided, entries)):
            return None
        return list(entries)

    async def judge(self, entries: Sequence[Placed]) -> list[Placed]:
        """The same ranges in the same order, each entry either one that counts or `Void`.

        Raises `VersionConflict` if a swap took a range meanwhile: look up again, freshly. Raises
        `CorruptStore` if nobody seems to have decided about an object, and whatever the store raises. None
        of these says anything about an offset; all of them may pass.
        """
        known = self.known(entries)
        if known is not None:
            return known
        judged = await asyncio.gather(*map(self._judge, entries), return_exceptions=True)
        for one in judged:
            if isinstance(one, BaseException):
                raise one
        return [one for one in judged if isinstance(one, Placed)]

    def _is_decided(self, placed: Placed) -> bool:
        where = placed.entry.where
        if not isinstance(where, WalChunk):
            return True
        number = where.object_id.int
        if number not in self._committed:
            return False
        self._committed.move_to_end(number)
        return True

    async def _judge(self, placed: Placed) -> Placed:
        domain = self._domain_of(placed.entry.stream_id)
        failure: MetadataError | None = None
        for attempt in range(ATTEMPTS):
            if attempt > 0:
                await self._store.barrier(domain)
                placed = await self._read_again(domain, placed)
                if isinstance(placed.entry.where, Void):
                    # By an earlier try, or by somebody who may have died before this.
                    await self._delete_reference(domain, placed)
            if self._is_decided(placed):
                return placed
            chunk = placed.entry.where
            assert isinstance(chunk, WalChunk)
            # Behind a barrier not from a read that others began before it.
            read = self._read_once if attempt == 0 else self._read_record
            match await read(domain, chunk.object_id):
                case State.COMMITTED:
                    return placed
                case State.FENCED:
                    try:
                        marked = await self._mark(domain, placed)
                    except (VersionConflict, OutcomeUnknown) as error:
                        failure = error
                        continue
                    await self._delete_reference(domain, marked)
                    return marked
        raise failure or CorruptStore(
            f"stream {placed.entry.stream_id:016x} has an entry at {placed.end_offset} of an object that has"
            f" no record: read {ATTEMPTS} times"
        )

    async def _read_again(self, domain: int, placed: Placed) -> Placed:
        sequence = sequence_of(placed.entry.stream_id)
        entry = await self._store.ceiling(domain, sequence, placed.end_offset)
        found = None if entry is None else place(entry)
        if (
            found is None
            or found.end_offset != placed.end_offset
            or found.entry.records != placed.entry.records
        ):
            raise VersionConflict(f"{sequence} at {placed.end_offset}", placed.version)
        return found

    async def _mark(self, domain: int, placed: Placed) -> Placed:
        log.info("stream %016x: void at %d", placed.entry.stream_id, placed.end_offset)
        return await carry_out(self._store, domain, void(placed))

    async def _delete_reference(self, domain: int, marked: Placed) -> None:
        where = marked.entry.where
        assert isinstance(where, Void), "as long as the entry has no mark, the reference keeps its fence"
        key = reference_key(where.object_id, marked.entry.stream_id)
        try:
            await self._store.delete(domain, key)
        except MetadataError as error:
            # The mark is what counts. What is left goes with the entry.
            log.warning("%s is left behind: %s", key, error)

    async def _read_once(self, domain: int, object_id: UUID) -> State | None:
        """One read for all who ask at the same time. It goes on when one of them is cancelled."""
        task = self._reading.get(object_id)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._read_record(domain, object_id))
            self._reading[object_id] = task
            task.add_done_callback(lambda done: self._has_read(object_id, done))
        return await asyncio.shield(task)

    def _has_read(self, object_id: UUID, done: asyncio.Task[State | None]) -> None:
        del self._reading[object_id]
        if not done.cancelled():
            done.exception()  # nobody may be left who waits for it

    async def _read_record(self, domain: int, object_id: UUID) -> State | None:
        key = record_key(object_id)
        async with self._reads:
            record = await self._store.get(domain, key)
        if record is None:
            return None
        state = decode_record(key, record.value).state
        if state is State.COMMITTED:
            self._remember(object_id)
        return state

    def _remember(self, object_id: UUID) -> None:
        self._committed[object_id.int] = None
        self._committed.move_to_end(object_id.int)
        if len(self._committed) > self._max_objects:
            self._committed.popitem(last=False)
