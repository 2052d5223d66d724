"""Producer ids: each is handed out once, by whichever broker, for the life of the cluster.

One JSON record, `producer-ids` in the cluster domain, says where the next block begins. A broker takes a
block of 1000 ids, as Kafka does, by moving that on with a compare-and-put, and hands them out from memory.
What it has not handed out when it ends is lost; there are enough.

- Ids are handed out only from a block whose put was acknowledged. Two puts at the same version cannot both
  be, so a stale read costs an attempt and nothing else.
- A put with unknown outcome may have taken its block, now or later. This broker never takes ids from it.
- One put is in flight however many wait, and none before a block is used up.
"""

from __future__ import annotations

import asyncio
import json

from dray.errors import (
    CorruptStore,
    IncompatibleStore,
    MetadataError,
    OutcomeUnknown,
    Unavailable,
    VersionConflict,
)
from dray.metadata.keys import CLUSTER_DOMAIN
from dray.metadata.store import Expect, MetadataStore

KEY = "producer-ids"
FORMAT = 1
BLOCK = 1_000
MAX_ID = 2**63 - 1
# One broker wins each time: enough for as many brokers as start at the same moment.
MAX_CONFLICTS = 64
# Each may take a whole call timeout; three in a row are an outage, and the client is to ask again.
MAX_UNKNOWN = 3


class ProducerIds:
    def __init__(self, store: MetadataStore) -> None:
        self._store = store
        self._next = self._end = 0
        # Below it are ids that this broker has handed out, or must not.
        self._floor = 0
        self._taking: asyncio.Task[None] | None = None

    async def next(self) -> int:
        """An id that nobody was given before, from 0 to 2^63-1.

        Raises `Unavailable` if no block could be taken, and whatever else the store raises. Nothing is wrong
        after that: ask again.
        """
        while self._next == self._end:
            if self._taking is None:
                self._taking = asyncio.get_running_loop().create_task(self._take())
                self._taking.add_done_callback(self._has_taken)
            await asyncio.shield(self._taking)
        self._next += 1
        return self._next - 1

    def _has_taken(self, done: asyncio.Task[None]) -> None:
        self._taking = None
        if not done.cancelled():
            done.exception()  # nobody may be left who waits for it

    async def _take(self) -> None:
        """Take the next block."""
        conflicts = unknown = 0
        failure: MetadataError | None = None
        while conflicts < MAX_CONFLICTS and unknown < MAX_UNKNOWN:
            if failure is not None:
                await self._store.barrier(CLUSTER_DOMAIN)
            record = await self._store.get(CLUSTER_DOMAIN, KEY)
            first = max(self._floor, 0 if record is None else decode(record.value))
            end = first + BLOCK
            if end > MAX_ID:
                raise CorruptStore(f"{KEY}: the next id would be {first}; nobody can have used up so many")
            expect = Expect.ABSENT if record is None else record.version
            try:
                await self._store.put(CLUSTER_DOMAIN, KEY, encode(end), expect)
            except VersionConflict as error:
                conflicts, failure = conflicts + 1, error
            except OutcomeUnknown as error:
                unknown, failure = unknown + 1, error
                self._floor = end
            else:
                self._next, self._end, self._floor = first, end, end
                return
        raise Unavailable(
            f"no block of producer ids after {conflicts} conflicts and {unknown} unknown outcomes"
        ) from failure


def encode(next_id: int) -> bytes:
    return json.dumps({"format": FORMAT, "next": next_id}, separators=(",", ":")).encode()


def decode(value: bytes) -> int:
    """Where the next block begins. Raises `IncompatibleStore` for a newer format, and `CorruptStore`."""
    try:
        fields = json.loads(value)
    except ValueError:
        raise CorruptStore(f"{KEY}: not JSON: {value[:80]!r}") from None
    version, next_id = (fields.get("format"), fields.get("next")) if isinstance(fields, dict) else (0, 0)
    if type(version) is int and version > FORMAT:  # not isinstance: True is no number here
        raise IncompatibleStore(f"{KEY} has format {version}, and this Dray knows those up to {FORMAT}")
    if type(version) is not int or version < 1 or type(next_id) is not int or not 0 <= next_id <= MAX_ID:
        raise CorruptStore(f"{KEY}: nobody can have written {value[:80]!r}")
    return next_id
