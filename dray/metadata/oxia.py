"""The metadata contract on Oxia.

A domain is one shard: every key of it is put with the same partition key. Keys are spelled as
`layout.py` says. `oxia_client.py` finds the leaders, `oxia_watch.py` and `oxia_session.py` do what
their names say; here are the requests.

What Oxia allows and nothing here may do, because it does harm that cannot be undone:
- A malformed sequence put is logged before it fails, and the shard cannot be recovered from that log.
  `_sequence_put` is the only place that makes one.
- A request larger than a segment of the server's log (64 MiB) stops the shard's writes. `_write` is
  the only place that sends one.
- Deleting the last entry of a sequence gives its positions out again. Only `swap` deletes entries, and
  only below one that it has just replaced.
- DeleteRange removes keys all over the shard when its ends are at different depths. Never used.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import TypeAlias

from dray.errors import (
    CorruptStore,
    InvalidRequest,
    MetadataError,
    OutcomeUnknown,
    TooLarge,
    VersionConflict,
)
from dray.metadata.feed import Feed
from dray.metadata.keys import CLUSTER_DOMAIN
from dray.metadata.layout import EntryOf, Layout, parse_position
from dray.metadata.oxia_client import OxiaClient, Target
from dray.metadata.oxia_session import OxiaSession
from dray.metadata.oxia_watch import Watches
from dray.metadata.proto import oxia_pb2 as pb
from dray.metadata.store import (
    MAX_POSITION,
    AppendResult,
    Assigned,
    Delete,
    Entry,
    Expect,
    Expectation,
    Limits,
    NewEntry,
    Position,
    Put,
    Record,
    check_append,
    check_key,
    check_record,
    check_scan,
    check_sequence,
    check_session_ttl,
    check_swap,
    check_watch,
)

_Comparison: TypeAlias = "pb.KeyComparisonType.ValueType"

# An eighth of a log segment. `limits` keep requests far below; names grow when they are escaped, and
# this is for what nobody thought of.
_MAX_REQUEST_BYTES = 8 * 2**20
# Names in a request are `root` twice and an operation's own: a longer root would eat the limits up.
_MAX_ROOT_BYTES = 256
# Oxia's "must not exist". A version that no key ever has, for those that cannot be one.
_ABSENT_VERSION = -1
_NO_VERSION = 2**63 - 1
_OK = pb.OK  # looked up once: enums of generated modules are slow to reach


def _identity(address: str) -> str:
    return address


class OxiaStore:
    limits = Limits(max_operations=1_000, max_bytes=1_310_720)
    conditions_abort = False

    def __init__(self, client: OxiaClient, root: str) -> None:
        self._client = client
        self._layout = Layout(root)
        self._name = f"dray-{uuid.uuid4()}"
        self._watches = Watches(client, self._layout, self._route, self._barrier)
        self._sessions: set[OxiaSession] = set()

    @classmethod
    async def open(
        cls,
        address: str,
        namespace: str,
        root: str = "dray/v1/",
        *,
        timeout_s: float = 5.0,
        dial: Callable[[str], str] = _identity,
    ) -> OxiaStore:
        """Connect to the cluster that the server at `address` belongs to.

        `dial` says which address to connect to for one that the cluster names. Raises `Unavailable`,
        `NoSuchNamespace`, `InvalidRequest`, `AccessDenied`, `IncompatibleStore`.
        """
        if root:
            check_key(root.removesuffix("/"), "root")
        if root and (not root.endswith("/") or len(root.encode()) > _MAX_ROOT_BYTES):
            raise InvalidRequest(f"root {root!r} must end in '/' and have at most {_MAX_ROOT_BYTES} bytes")
        return cls(await OxiaClient.open(address, namespace, timeout_s, dial), root)

    async def close(self) -> None:
        await asyncio.gather(*(session.close() for session in self._sessions))
        await self._watches.close()
        await self._client.close()

    # --- reads

    async def get(self, domain: int, key: str) -> Record | None:
        check_record(domain, key)
        found = await self._get(domain, self._layout.key(domain, key), pb.EQUAL)
        return None if found is None else Record(key, found.value, found.version.version_id)

    async def scan(
        self, domain: int, directory: str, *, start: str = "", end: str | None = None, limit: int
    ) -> list[Record]:
        check_scan(domain, directory, start, end, limit)
        parent = self._layout.directory(domain, directory)
        # The server sorts `x//` behind all direct children of `x`, and they are all that lies between.
        until = parent + ("/" if end is None else end)
        found = await self._range(domain, parent, parent + start, until, limit)
        top = len(self._layout.key(domain, ""))
        return [Record(one.key[top:], one.value, one.version.version_id) for one in found]

    async def ceiling(self, domain: int, sequence: str, n: int) -> Entry | None:
        return await self._neighbour(domain, sequence, n, pb.CEILING)

    async def floor(self, domain: int, sequence: str, n: int) -> Entry | None:
        return await self._neighbour(domain, sequence, n + 1, pb.LOWER)

    async def tail(self, domain: int, sequence: str) -> Entry | None:
        return await self._neighbour(domain, sequence, MAX_POSITION + 1, pb.LOWER)

    async def entries(self, domain: int, sequence: str, start: int, limit: int) -> list[Entry]:
        check_sequence(domain, sequence, limit)
        parent = self._layout.sequence(domain, sequence)
        found = await self._range(
            domain, parent, self._from_end(domain, sequence, start), parent + "/", limit
        )
        return [self._entry(one) for one in found]

    # --- writes

    async def put(self, domain: int, key: str, value: bytes, expect: Expectation = Expect.ANY) -> int:
        check_record(domain, key, expect)
        version = await self._put_one(domain, key, value, expect)
        if version is None:
            raise CorruptStore(f"{key}: a put without session was refused for want of one")
        return version

    async def delete(self, domain: int, key: str, expect: Expectation = Expect.ANY) -> bool:
        check_record(domain, key, expect)
        request = pb.WriteRequest(deletes=[self._delete(domain, self._layout.key(domain, key), expect)])
        status = (await self._write(domain, request)).deletes[0].status
        if status == pb.UNEXPECTED_VERSION_ID:
            raise VersionConflict(key, expect)
        return status == pb.OK

    async def append(
        self,
        domain: int,
        entries: Sequence[NewEntry],
        puts: Sequence[Put] = (),
        deletes: Sequence[Delete] = (),
    ) -> AppendResult:
        check_append(domain, entries, puts, deletes)
        self.limits.check(entries, puts, deletes)
        if not entries and not puts and not deletes:
            return AppendResult((), (), ())
        request = pb.WriteRequest()
        for entry in entries:
            self._sequence_put(request, domain, entry)
        request.puts.extend(
            self._put(domain, self._layout.key(domain, p.key), p.value, p.expect) for p in puts
        )
        request.deletes.extend(
            self._delete(domain, self._layout.key(domain, d.key), d.expect) for d in deletes
        )
        answer = await self._write(domain, request)
        appended, written = answer.puts[: len(entries)], answer.puts[len(entries) :]
        return AppendResult(
            tuple(self._assigned(domain, entry, put) for entry, put in zip(entries, appended, strict=True)),
            tuple(put.version.version_id if put.status == pb.OK else None for put in written),
            # The others are gone, or were not there to begin with.
            tuple(delete.status != pb.UNEXPECTED_VERSION_ID for delete in answer.deletes),
        )

    async def swap(
        self,
        domain: int,
        sequence: str,
        at: Position,
        version: int,
        value: bytes,
        deletes: Sequence[Position],
    ) -> int:
        check_swap(domain, sequence, at, version, deletes)
        self.limits.check((), (Put(sequence, value),), ())
        deadline = self._client.deadline()
        key = self._layout.entry(domain, sequence, at)
        # At a version, so this can replace an entry but never make one: that would move the sequence.
        replace = pb.WriteRequest(puts=[self._put(domain, key, value, version)])
        replaced = (await self._write(domain, replace, deadline)).puts[0]
        if replaced.status != pb.OK:
            raise VersionConflict(f"{sequence} at {at}", version)
        # Not in the request above: there a delete happens whether or not the put does. Without
        # versions: whatever stands below the entry just replaced is covered by it.
        for request in self._delete_requests(domain, sequence, deletes):
            try:
                await self._write(domain, request, deadline)
            except MetadataError as error:
                raise OutcomeUnknown(f"swap of {sequence} at {at}: replaced, but {error}") from error
        return replaced.version.version_id

    async def barrier(self, domain: int) -> None:
        await self._barrier(domain)

    # --- watches and sessions

    @asynccontextmanager
    async def watch(self, domain: int, prefix: str | None = None) -> AsyncIterator[Feed]:
        check_watch(domain, prefix)
        async with self._watches.watch(domain, prefix) as feed:
            yield feed

    @asynccontextmanager
    async def session(self, ttl_ms: int) -> AsyncIterator[OxiaSession]:
        check_session_ttl(ttl_ms)
        session = OxiaSession(self._client, ttl_ms, self._name, self._route, self._put_one, self._barrier)
        self._sessions.add(session)
        try:
            await session.make(CLUSTER_DOMAIN, self._client.deadline())
            yield session
        finally:
            self._sessions.discard(session)
            await session.close()

    # --- requests

    def _route(self, domain: int) -> str:
        """The partition key of a domain. Part of the stored format: it says where everything is."""
        return f"{self._layout.root}{domain}"

    def _sequence_put(self, request: pb.WriteRequest, domain: int, entry: NewEntry) -> None:
        """Add a sequence put. The one place that makes one, checked here again: a wrong one ruins the shard.

        What ruins it: no partition key; a first delta of 0; a number of deltas that differs from the
        entries already there; a key in whose directory something else lives. With an expectation it
        would be refused, and with a session its expiry would delete the tail: it has neither.
        """
        if entry.records < 1 or entry.size_bytes < 0 or not entry.sequence:
            raise InvalidRequest(f"sequence {entry.sequence}: this entry would ruin the shard")
        # Filled in place: making a message and copying it in takes twice as long.
        put = request.puts.add()
        put.key = self._layout.sequence(domain, entry.sequence)
        put.value = entry.value
        put.partition_key = self._route(domain)
        put.sequence_key_delta.extend((entry.records, entry.size_bytes))

    def _put(self, domain: int, raw: str, value: bytes, expect: Expectation) -> pb.PutRequest:
        return pb.PutRequest(
            key=raw, value=value, partition_key=self._route(domain), expected_version_id=_version(expect)
        )

    def _delete(self, domain: int, raw: str, expect: Expectation) -> pb.DeleteRequest:
        return pb.DeleteRequest(
            key=raw, partition_key=self._route(domain), expected_version_id=_version(expect)
        )

    def _delete_requests(
        self, domain: int, sequence: str, positions: Sequence[Position]
    ) -> Iterator[pb.WriteRequest]:
        request, size = pb.WriteRequest(), 0
        for position in positions:
            delete = self._delete(domain, self._layout.entry(domain, sequence, position), Expect.ANY)
            size += delete.ByteSize() + Limits.OPERATION_OVERHEAD_BYTES
            if len(request.deletes) == self.limits.max_operations or size > self.limits.max_bytes:
                yield request
                request, size = pb.WriteRequest(), delete.ByteSize()
            request.deletes.append(delete)
        if request.deletes:
            yield request

    async def _put_one(
        self,
        domain: int,
        key: str,
        value: bytes,
        expect: Expectation,
        *,
        session_id: int | None = None,
        identity: str | None = None,
        deadline: float | None = None,
    ) -> int | None:
        """The new version; None if there is no such session."""
        check_record(domain, key, expect)
        self.limits.check((), (Put(key, value, expect),), ())
        put = self._put(domain, self._layout.key(domain, key), value, expect)
        if session_id is not None:
            put.session_id = session_id
        if identity is not None:
            put.client_identity = identity
        done = (await self._write(domain, pb.WriteRequest(puts=[put]), deadline)).puts[0]
        if done.status == pb.UNEXPECTED_VERSION_ID:
            raise VersionConflict(key, expect)
        return done.version.version_id if done.status == pb.OK else None

    async def _write(
        self, domain: int, request: pb.WriteRequest, deadline: float | None = None
    ) -> pb.WriteResponse:
        size = request.ByteSize()
        if size > _MAX_REQUEST_BYTES:
            raise TooLarge("bytes in one request", size, _MAX_REQUEST_BYTES)
        answer = await self._client.write(self._route(domain), request, deadline)
        if len(answer.puts) != len(request.puts) or len(answer.deletes) != len(request.deletes):
            raise CorruptStore("Oxia answered another number of operations than it was sent")
        return answer

    async def _barrier(self, domain: int, deadline: float | None = None) -> None:
        # Neither a key nor an entry to `Layout.parse`, so no watch tells of it.
        key = self._layout.domain(domain) + "b/barrier"
        request = pb.WriteRequest(puts=[self._put(domain, key, b"", Expect.ANY)])
        await self._client.barrier(self._route(domain), request, deadline)

    def _assigned(self, domain: int, entry: NewEntry, put: pb.PutResponse) -> Assigned:
        key, directory = put.key, self._layout.sequence(domain, entry.sequence)
        if put.status != _OK or not key.startswith(directory):
            raise CorruptStore(f"sequence {entry.sequence}: the entry was put at {key!r}")
        end = parse_position(key[len(directory) :], key)
        if not entry.records <= end.end_records <= MAX_POSITION or end.end_bytes < entry.size_bytes:
            raise CorruptStore(f"sequence {entry.sequence}: {entry.records} records cannot end at {end}")
        return Assigned(end, put.version.version_id)

    async def _get(self, domain: int, raw: str, how: _Comparison) -> pb.GetResponse | None:
        wanted = pb.GetRequest(key=raw, include_value=True, comparison_type=how)

        async def read(target: Target) -> pb.GetResponse | None:
            request = pb.ReadRequest(shard=target.shard, gets=[wanted])
            call = target.stub.Read(request, timeout=target.timeout_s)
            found: list[pb.GetResponse] = []
            while isinstance(message := await call.read(), pb.ReadResponse):
                found += message.gets
            if len(found) != 1:
                raise CorruptStore(f"Oxia answered {len(found)} records to one get")
            return found[0] if found[0].status == pb.OK else None

        return await self._client.repeat(self._route(domain), read, fresh=True)

    async def _neighbour(self, domain: int, sequence: str, n: int, how: _Comparison) -> Entry | None:
        check_sequence(domain, sequence)
        found = await self._get(domain, self._from_end(domain, sequence, n), how)
        # The search runs over the whole shard: past an end of this sequence it finds somebody else's key.
        if found is None or not found.key.startswith(self._layout.sequence(domain, sequence)):
            return None
        return self._entry(found)

    async def _range(
        self, domain: int, parent: str, start: str, end: str, limit: int
    ) -> list[pb.GetResponse]:
        """At most `limit` children of `parent` in [start, end). One call, so one snapshot."""

        async def read(target: Target) -> list[pb.GetResponse]:
            request = pb.RangeScanRequest(shard=target.shard, start_inclusive=start, end_exclusive=end)
            call = target.stub.RangeScan(request, timeout=target.timeout_s)
            found: list[pb.GetResponse] = []
            try:
                while len(found) < limit and isinstance(message := await call.read(), pb.RangeScanResponse):
                    found += message.records
            finally:
                call.cancel()  # the server has no limit; without this it goes on sending
            return found[:limit]

        found = await self._client.repeat(self._route(domain), read, fresh=True)
        for one in found:
            if not one.key.startswith(parent) or "/" in one.key[len(parent) :]:
                raise CorruptStore(f"{one.key!r} is no child of {parent!r}; are keys sorted hierarchically?")
        return found

    def _from_end(self, domain: int, sequence: str, n: int) -> str:
        return self._layout.from_end(domain, sequence, min(n, MAX_POSITION + 1))

    def _entry(self, found: pb.GetResponse) -> Entry:
        place = self._layout.parse(found.key)
        assert isinstance(place, EntryOf), "the caller checked that it lies in a sequence"
        return Entry(place.position, found.value, found.version.version_id)


def _version(expect: Expectation) -> int | None:
    if expect is Expect.ANY:
        return None
    if expect is Expect.ABSENT:
        return _ABSENT_VERSION
    assert isinstance(expect, int)
    # A caller's -1 is a version that does not exist, not "must not exist".
    return expect if 0 <= expect < _NO_VERSION else _NO_VERSION
