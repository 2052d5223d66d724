"""A metadata store whose calls go wrong when told to, and a look at whether its topics are sound.

Shared by the unit tests of the topic catalog and by its schedules.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeAlias
from uuid import UUID

from dray.errors import OutcomeUnknown, Unavailable
from dray.index.entry import stream_domain
from dray.metadata.directory import Directory
from dray.metadata.memory import MemoryData, MemoryStore
from dray.metadata.store import AppendResult, Delete, MetadataStore, NewEntry, Put, Record
from dray.topics.catalog import TopicCatalog, topic_directory
from dray.topics.record import TopicRecord, decode_stream, decode_topic, stream_key

DOMAINS = 4


class Fault(enum.Enum):
    """What becomes of one call. On a read, all but the deaths are an unavailable store."""

    NOT_SENT = "nothing happens, and the caller is told so"
    LOST = "nothing happens, and nobody knows"
    DONE = "it happens, and nobody knows"
    LATE = "it happens when `land` is called, and nobody knows"
    DIES_BEFORE = "the caller dies before it"
    DIES_AFTER = "the caller dies after it"


class DiedError(Exception):
    """The broker was killed. Nothing of Dray catches this."""


Script: TypeAlias = Mapping[int, Fault | Callable[[], Awaitable[None]]]


class FaultyStore(MemoryStore):
    """Puts and deletes of `MemoryStore` are appends, so the calls are: append, get and barrier.

    `before` is awaited before each call, with its number from 1, and may say what becomes of it; `after` is
    called behind each write.
    """

    def __init__(
        self,
        data: MemoryData,
        *,
        conditions_abort: bool = True,
        before: Callable[[int], Awaitable[Fault | None]] | None = None,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(data, conditions_abort=conditions_abort)
        self.before = before
        self.after = after
        self.calls = 0
        self.late: list[Callable[[], Awaitable[object]]] = []

    @classmethod
    def scripted(cls, data: MemoryData, aborts: bool, script: Script) -> FaultyStore:
        """Calls, by number: what becomes of them, or what happens before them."""

        async def before(number: int) -> Fault | None:
            what = script.get(number)
            if what is None or isinstance(what, Fault):
                return what
            await what()
            return None

        return cls(data, conditions_abort=aborts, before=before)

    async def append(
        self,
        domain: int,
        entries: Sequence[NewEntry],
        puts: Sequence[Put] = (),
        deletes: Sequence[Delete] = (),
    ) -> AppendResult:
        fault = await self._fault()
        write = super().append
        if fault is Fault.DIES_BEFORE:
            raise DiedError
        if fault is Fault.NOT_SENT:
            raise Unavailable("nothing was sent")
        if fault is Fault.LATE:
            self.late.append(lambda: write(domain, entries, puts, deletes))
        if fault in (Fault.LATE, Fault.LOST):
            raise OutcomeUnknown("the answer was lost")
        try:
            result = await write(domain, entries, puts, deletes)
        finally:
            self.after()
            if fault is Fault.DIES_AFTER:
                raise DiedError
            if fault is Fault.DONE:
                raise OutcomeUnknown("the answer was lost")
        return result

    async def land(self) -> None:
        """All that was held back arrives now; whether it is refused nobody hears."""
        while self.late:
            try:
                await self.late.pop(0)()
            except Exception:
                continue
            finally:
                self.after()

    async def get(self, domain: int, key: str) -> Record | None:
        await self._read()
        return await super().get(domain, key)

    async def barrier(self, domain: int) -> None:
        await self._read()
        await super().barrier(domain)

    async def _fault(self) -> Fault | None:
        self.calls += 1
        return None if self.before is None else await self.before(self.calls)

    async def _read(self) -> None:
        fault = await self._fault()
        if fault in (Fault.DIES_BEFORE, Fault.DIES_AFTER):
            raise DiedError
        if fault is not None:
            raise Unavailable("the store is away")


async def check_answer(
    change: Awaitable[None],
    store: FaultyStore,
    now: Callable[[], Mapping[str, str]],
    *,
    old: Mapping[str, str],
    new: Mapping[str, str],
) -> None:
    """Make a change over a store that fails, and hold the answer against what is stored then and later."""
    try:
        await change
        assert now() == new, now()
    except Unavailable:
        await store.land()
        assert now() == old, now()
    except (OutcomeUnknown, DiedError):
        pass
    else:
        await store.land()
        assert now() == new, now()


def catalog(
    store: MetadataStore,
    directory: Directory[TopicRecord] | None = None,
    new_stream_id: Callable[[], int] | None = None,
) -> TopicCatalog:
    ids: dict[str, Any] = {} if new_stream_id is None else {"new_stream_id": new_stream_id}
    return TopicCatalog(
        store, DOMAINS, directory or topic_directory(store), wall_clock_ms=lambda: 1_700_000_000_000, **ids
    )


@asynccontextmanager
async def broker(store: MetadataStore) -> AsyncIterator[TopicCatalog]:
    """A catalog whose view is loaded and follows."""
    directory = topic_directory(store)
    task = asyncio.create_task(directory.run())
    try:
        await directory.loaded()
        yield catalog(store, directory)
    finally:
        task.cancel()
        await asyncio.wait([task])


def stored(data: MemoryData) -> list[TopicRecord]:
    return [decode_topic(k, r.value) for k, r in data.domain(0).records.items() if k.startswith("topics/")]


def deleted(data: MemoryData) -> list[TopicRecord]:
    records = data.domain(0).records.items()
    return [decode_topic(k, r.value) for k, r in records if k.startswith("deleted-topics/")]


def check_sound(data: MemoryData) -> None:
    """What must hold at every moment, whatever was left half-done."""
    owners: dict[int, UUID] = {}
    gone = {record.topic_id for record in deleted(data)}
    for record in stored(data) + deleted(data):
        for partition, stream_id in enumerate(record.streams):
            assert owners.setdefault(stream_id, record.topic_id) == record.topic_id
            key = stream_key(stream_id)
            claim = decode_stream(key, data.domain(stream_domain(stream_id, DOMAINS)).records[key].value)
            assert (claim.topic_id, claim.partition, claim.topic) == (
                record.topic_id,
                partition,
                record.name,
            )
        assert len(set(record.streams)) == len(record.streams)
    for record in stored(data):
        assert not (record.visible and record.topic_id in gone)
