"""Deletes records from the front of a stream, by raising its log-start record (`dray.index.log_start`).

Nothing of the index is touched: entries and bytes go later. When `delete_before` returns, no reader of this
broker sees a deleted record any more, and those of other brokers as soon as their watch tells.
"""

from __future__ import annotations

from collections.abc import Callable

from dray.errors import MetadataError, OffsetOutOfRange, OutcomeUnknown, Unavailable, VersionConflict
from dray.index.log_start import decode, encode, log_start_key
from dray.index.lookup import OffsetIndex
from dray.metadata.store import Expect, MetadataStore

# Each was foiled by another deletion of the same stream or by an answer that was lost: so many in a row are
# an outage.
ATTEMPTS = 10


class RecordDeleter:
    def __init__(self, store: MetadataStore, domain_of: Callable[[int], int], index: OffsetIndex) -> None:
        self._store = store
        self._domain_of = domain_of
        self._index = index

    async def delete_before(self, stream_id: int, offset: int | None) -> int:
        """Make the log start at `offset` or later; None is the end of the stream. Where it starts then.

        Raises `OffsetOutOfRange` behind the end, as of a moment after the call, and for a negative offset.
        Besides, what the store raises: `OutcomeUnknown` if the records may be deleted or not.
        """
        end = (await self._index.end(stream_id, fresh=True)).end_records
        wanted = end if offset is None else offset
        # May be stale, and is too low then.
        log_start = await self._index.log_start(stream_id)
        if not 0 <= wanted <= end:
            raise OffsetOutOfRange(wanted, log_start, end)
        if wanted <= log_start:
            return log_start
        return self._index.raise_log_start(stream_id, await self._raise(stream_id, wanted))

    async def _raise(self, stream_id: int, wanted: int) -> int:
        """Doing it twice is doing it once, so a put whose answer was lost is simply made again."""
        domain, key = self._domain_of(stream_id), log_start_key(stream_id)
        failure: MetadataError | None = None
        for _ in range(ATTEMPTS):
            try:
                if failure is not None:
                    await self._store.barrier(domain)
                record = await self._store.get(domain, key)
                if record is not None and (stored := decode(key, record.value)) >= wanted:
                    return stored
                expect = Expect.ABSENT if record is None else record.version
                await self._store.put(domain, key, encode(wanted), expect)
                return wanted
            except VersionConflict as error:
                failure = failure or error
            except OutcomeUnknown as error:
                failure = error
            except Unavailable as error:
                if not isinstance(failure, OutcomeUnknown):
                    raise
                failure = error
                break
        raise OutcomeUnknown(f"the log start of stream {stream_id:016x}: it may be raised") from failure
