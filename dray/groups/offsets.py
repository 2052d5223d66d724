"""Committed offsets: how they are stored, and how they are changed without ever going back by accident.

One key per group, topic and partition, in the group's domain, with one message of `offset.proto`. Which
member may commit is for the group's record to say, not for this: it gets a `Check`. Which offsets are too old
to keep is for `retention`.

**Any broker commits for any member**, so two may do so at once, and one may go by a record of the group that
is no longer true. What keeps a late commit from replacing a newer one:
- Each put names the version that it replaces. The versions that this broker wrote or read last are
  remembered, so a commit is normally one round trip.
- A version that was *read* is replaced only after the group's record was read again, behind it: whoever wrote
  that version may know of a newer generation. A version that this broker wrote needs no such look, for as
  long as nobody else writes: then nobody who knows more has been here.
- A put that was refused is repeated only after both were read again: the key, then the group's record.
- Commits of one broker for the same key are made in the order in which they came.
- A commit that found no offset looks at the group once more when it is done: a group that was deleted
  meanwhile had its offsets removed before, and this one would be left over.

**Age.** With an offset the group's age is kept (`group.py`). A commit under an age does not replace one of a
higher age before the group's record was read again. If the check still passes, the higher age is that of an
earlier group of this name: within one group ages never go back.

**Lost answers.** The key tells: at the version that the put named, it may be put again, since of all that
name a version one counts. If it holds what was put, that was done. If it holds something of a lower age, it
was not done. Anything else may have replaced it, and doing it again could undo that: nobody knows then.

**What may come late.** A put that expects no offset may land when the offset was committed by another attempt
and deleted since. Then it is back. All other puts and all deletes name a version and are void when late.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, TypeVar
from uuid import UUID

from google.protobuf.message import DecodeError

from dray.errors import CorruptStore, IncompatibleStore, OutcomeUnknown, Unavailable, VersionConflict
from dray.groups import offset_pb2 as pb
from dray.groups.record import segment_of
from dray.metadata.directory import Found
from dray.metadata.keys import domain_of, escape, unescape
from dray.metadata.store import Delete, Expect, Limits, MetadataStore, Put, Record

OFFSETS = "offsets"
FORMAT = 1
# As `Directory` reads: well below 1 MiB of offsets in one answer, unless all have long metadata.
PAGE_RECORDS = 1_000
# So few keys are read one by one; for more, reading all offsets of the group is cheaper.
MAX_GETS = 8
# Each attempt was foiled by another broker's commit or by a lost answer; so many in a row are an outage.
ATTEMPTS = 10
# A version and its key are about 300 bytes: 20 MB. Who falls out costs its next commit two reads.
MAX_KNOWN = 65_536

W = TypeVar("W", Put, Delete)

Key: TypeAlias = tuple[str, int]  # topic and partition
# Raises a `GroupError` unless the member may commit, and says the group's age. Given True, it goes by the
# group's record as it is at the time of the call.
Check: TypeAlias = Callable[[bool], Awaitable[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    topic_id: UUID
    offset: int
    leader_epoch: int  # -1: the member did not say
    metadata: str
    committed_at_ms: int
    expire_at_ms: int | None = None  # None: by the broker's retention


def offset_key(group_id: str, topic: str, partition: int) -> str:
    return f"{directory_of(group_id)}/{escape(topic)}:{partition}"


def directory_of(group_id: str) -> str:
    return f"{OFFSETS}/{segment_of(group_id)}"


def encode(committed: Committed, age: int) -> bytes:
    message = pb.CommittedOffset(
        format=FORMAT,
        topic_id=committed.topic_id.bytes,
        offset=committed.offset,
        leader_epoch=committed.leader_epoch,
        metadata=committed.metadata,
        committed_at_ms=committed.committed_at_ms,
        expire_at_ms=committed.expire_at_ms,
        age=age,
    )
    return message.SerializeToString()


class Decoded(NamedTuple):
    at: Key
    committed: Committed
    age: int


def decode(key: str, value: bytes) -> Decoded:
    """Raises `CorruptStore`, and `IncompatibleStore` where a newer Dray wrote it."""
    try:
        topic, _, partition = key.rpartition("/")[2].rpartition(":")
        message = pb.CommittedOffset.FromString(value)
        if message.format > FORMAT:
            raise IncompatibleStore(f"{key} has format {message.format}; this Dray reads up to {FORMAT}")
        if message.format < 1:
            raise ValueError("no format")
        committed = Committed(
            topic_id=UUID(bytes=message.topic_id),
            offset=message.offset,
            leader_epoch=message.leader_epoch,
            metadata=message.metadata,
            committed_at_ms=message.committed_at_ms,
            expire_at_ms=message.expire_at_ms if message.HasField("expire_at_ms") else None,
        )
        return Decoded((unescape(topic), int(partition)), committed, message.age)
    except (ValueError, DecodeError) as error:
        raise CorruptStore(f"{key} is no committed offset: {error!r}: {value[:200]!r}") from None


class _Known(NamedTuple):
    """What was last seen at a key. No version: there was nothing, of an age below all."""

    version: int | None
    age: int
    is_checked: bool  # the group's record was read behind it, or this broker wrote it


class _Doubt(NamedTuple):
    """A put whose outcome nobody knows: what it expected, and the age that it put."""

    version: int | None
    age: int


class OffsetStore:
    """See the module's text. Methods also raise what the store raises."""

    def __init__(
        self,
        store: MetadataStore,
        num_domains: int,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self.now_ms = now_ms  # the wall clock, for those who make a `Committed`
        self._store = store
        self._num_domains = num_domains
        self._known: OrderedDict[str, _Known] = OrderedDict()  # by key, the one used last at the end
        self._turns = _Turns()

    async def commit(self, group_id: str, offsets: Mapping[Key, Committed], check: Check) -> None:
        """Commit all of them, normally in one round trip. Without offsets, only `check`.

        Where it raises, each of them may be committed or not.
        """
        left = {offset_key(group_id, *at): committed for at, committed in offsets.items()}
        async with self._turns.take(left):
            age = await check(False)
            known = {key: self._known[key] for key in left if key in self._known}
            unknown = left.keys() - known.keys()
            if unknown:
                stored = await self._read(group_id, unknown)
                known |= {key: self._see(key, stored.get(key)) for key in unknown}
            if not all(each.is_checked and each.age <= age for each in known.values()):
                age = await check(True)
            doubts: dict[str, _Doubt] = {}
            was_absent = False
            for _ in range(ATTEMPTS):
                was_absent |= any(known[key].version is None for key in left)
                await self._put(group_id, left, known, age, doubts)
                if left:
                    await self._look_again(group_id, left, known, doubts)
                if not left:
                    break
                age = await check(True)
            else:
                raise _given_up(group_id, in_doubt=bool(doubts))
            if was_absent:
                await check(True)

    async def _put(
        self,
        group_id: str,
        left: dict[str, Committed],
        known: Mapping[str, _Known],
        age: int,
        doubts: dict[str, _Doubt],
    ) -> None:
        """Put what is `left`, and take away what landed."""
        puts = [
            Put(key, encode(committed, age), _expectation(known[key].version))
            for key, committed in left.items()
        ]
        limits = self._store.limits
        for batch in _batches(limits, puts, lambda put: limits.size((), (put,), ())):
            try:
                result = await self._store.append(self._domain(group_id), (), batch)
            except VersionConflict:
                continue
            except OutcomeUnknown:
                doubts |= {put.key: _Doubt(known[put.key].version, age) for put in batch}
                continue
            for put, version in zip(batch, result.puts, strict=True):
                if version is not None:
                    self._remember(put.key, _Known(version, age, is_checked=True))
                    del left[put.key]

    async def _look_again(
        self,
        group_id: str,
        left: dict[str, Committed],
        known: dict[str, _Known],
        doubts: Mapping[str, _Doubt],
    ) -> None:
        """See what is in the way of what is `left`, and take away what did land after all."""
        stored = await self._read(group_id, left.keys())
        for key, committed in list(left.items()):
            found = stored.get(key)
            known[key] = self._see(key, found)
            if found is not None and found.committed == committed:
                del left[key]
                continue
            doubt = doubts.get(key)
            if doubt is not None and doubt.version != known[key].version and doubt.age <= known[key].age:
                raise OutcomeUnknown(f"{key}: it may have been committed, and replaced since; nobody knows")

    async def fetch(self, group_id: str) -> dict[Key, Found[Committed]]:
        """All offsets of the group, at least as new as the call."""
        stored = await self._scan(group_id)
        for key, found in stored.items():
            self._see(key, found)
        return {found.at: Found(found.committed, found.version) for found in stored.values()}

    async def fetch_some(self, group_id: str, keys: Collection[Key]) -> dict[Key, Found[Committed]]:
        """Those of `keys` that are committed, at least as new as the call."""
        asked = {offset_key(group_id, *at) for at in keys}
        stored = await self._read(group_id, asked)
        for key in asked:
            self._see(key, stored.get(key))
        return {found.at: Found(found.committed, found.version) for found in stored.values()}

    async def delete(self, group_id: str, keys: Collection[Key]) -> set[Key]:
        """Remove these, whatever they are by now: for whoever asks for it. Returns those that were there."""
        gone: set[Key] = set()
        for _ in range(ATTEMPTS):
            found = await self.fetch_some(group_id, set(keys) - gone)
            if not found:
                return gone
            gone |= await self.delete_at(group_id, {at: each.version for at, each in found.items()})
        raise Unavailable(f"offsets of group {group_id!r}: committed anew {ATTEMPTS} times in a row")

    async def delete_at(self, group_id: str, versions: Mapping[Key, int]) -> set[Key]:
        """Remove those that are still at their version; what was committed since stays. For retention.

        Returns those that were removed, by whomever.
        """
        left = {offset_key(group_id, *at): version for at, version in versions.items()}
        names = {offset_key(group_id, *at): at for at in versions}
        gone: set[Key] = set()
        limits = self._store.limits
        for _ in range(ATTEMPTS):
            deletes = [Delete(key, version) for key, version in left.items()]
            for batch in _batches(limits, deletes, lambda delete: limits.size((), (), (delete,))):
                try:
                    result = await self._store.append(self._domain(group_id), (), (), batch)
                except (VersionConflict, OutcomeUnknown):
                    continue
                for delete, is_gone in zip(batch, result.deletes, strict=True):
                    if is_gone:
                        self._known.pop(delete.key, None)
                        gone.add(names[delete.key])
                        del left[delete.key]
            if not left:
                return gone
            stored = await self._read(group_id, left.keys())
            for key, version in list(left.items()):
                found = stored.get(key)
                if found is None:
                    gone.add(names[key])
                if found is None or found.version != version:
                    self._known.pop(key, None)
                    del left[key]
        raise Unavailable(f"offsets of group {group_id!r}: not removed in {ATTEMPTS} attempts")

    async def delete_all(self, group_id: str) -> None:
        """Remove all that is there, for a group that is deleted and takes no more commits."""
        for _ in range(ATTEMPTS):
            found = await self.fetch(group_id)
            if not found:
                return
            await self.delete_at(group_id, {at: each.version for at, each in found.items()})
        raise Unavailable(f"offsets of group {group_id!r}: committed anew {ATTEMPTS} times in a row")

    async def _read(self, group_id: str, keys: Collection[str]) -> dict[str, _Stored]:
        """What these keys hold, behind a barrier."""
        if len(keys) > MAX_GETS:
            stored = await self._scan(group_id)
            return {key: stored[key] for key in keys if key in stored}
        domain = self._domain(group_id)
        await self._store.barrier(domain)
        records = await asyncio.gather(*(self._store.get(domain, key) for key in keys))
        return {record.key: _stored(record) for record in records if record is not None}

    async def _scan(self, group_id: str) -> dict[str, _Stored]:
        domain, directory = self._domain(group_id), directory_of(group_id)
        await self._store.barrier(domain)
        stored: dict[str, _Stored] = {}
        start = ""
        while True:
            page = await self._store.scan(domain, directory, start=start, limit=PAGE_RECORDS)
            stored |= {record.key: _stored(record) for record in page}
            if len(page) < PAGE_RECORDS:
                return stored
            start = page[-1].key.rpartition("/")[2] + "\0"

    def _see(self, key: str, found: _Stored | None) -> _Known:
        """Remember what a read found. What this broker has written itself stays as it knows it."""
        known = self._known.get(key)
        if found is None:
            seen = _Known(None, -1, is_checked=False)
        elif known is not None and known.version == found.version:
            seen = known
        else:
            seen = _Known(found.version, found.age, is_checked=False)
        self._remember(key, seen)
        return seen

    def _remember(self, key: str, known: _Known) -> None:
        self._known[key] = known
        self._known.move_to_end(key)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def _domain(self, group_id: str) -> int:
        return domain_of(group_id, self._num_domains)


class _Stored(NamedTuple):
    at: Key
    committed: Committed
    age: int
    version: int


def _stored(record: Record) -> _Stored:
    return _Stored(*decode(record.key, record.value), record.version)


def _given_up(group_id: str, *, in_doubt: bool) -> OutcomeUnknown | Unavailable:
    if in_doubt:
        return OutcomeUnknown(f"offsets of group {group_id!r}: they may be committed; nobody knows")
    return Unavailable(f"offsets of group {group_id!r}: others were faster {ATTEMPTS} times in a row")


def _expectation(version: int | None) -> Expect | int:
    return Expect.ABSENT if version is None else version


def _batches(limits: Limits, writes: Iterable[W], size: Callable[[W], int]) -> Iterator[list[W]]:
    """As many in each as one append may hold."""
    batch: list[W] = []
    size_bytes = 0
    for write in writes:
        adds = size(write)
        if batch and (len(batch) == limits.max_operations or size_bytes + adds > limits.max_bytes):
            yield batch
            batch, size_bytes = [], 0
        batch.append(write)
        size_bytes += adds
    if batch:
        yield batch


class _Turns:
    """Whoever names a key waits for all who named it before, and for nobody else."""

    def __init__(self) -> None:
        self._last: dict[str, asyncio.Future[None]] = {}  # of the last who named a key

    @asynccontextmanager
    async def take(self, keys: Iterable[str]) -> AsyncIterator[None]:
        keys = tuple(keys)
        mine = asyncio.get_running_loop().create_future()
        before = asyncio.gather(*{self._last[key] for key in keys if key in self._last})
        self._last |= dict.fromkeys(keys, mine)
        try:
            await asyncio.shield(before)
            yield
        finally:
            # One that is cancelled while it waits lets nobody overtake those whom it waited for.
            before.add_done_callback(lambda _: self._end(keys, mine))

    def _end(self, keys: Collection[str], mine: asyncio.Future[None]) -> None:
        mine.set_result(None)
        for key in keys:
            if self._last.get(key) is mine:
                del self._last[key]
