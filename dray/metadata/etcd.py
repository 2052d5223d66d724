"""The metadata contract on etcd: every write is one transaction, and a version is a mod_revision.

Besides its entries a sequence has one tail record (`Layout.tail`) that holds the position of its last
entry. An append compares the tail records it was computed from and writes entries and tails together:
that assigns positions. Tails are remembered, so that the normal append is one round trip; a memory
that is out of date makes the transaction fail, never misplace an entry.

Reads are linearizable. Those that take several requests read at the revision of their first one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import grpc

from dray.errors import (
    CorruptStore,
    MetadataError,
    OutcomeUnknown,
    SessionLost,
    StartConflict,
    TooLarge,
    Unavailable,
    VersionConflict,
)
from dray.metadata.etcd_client import EtcdClient, RevisionCompacted
from dray.metadata.etcd_txn import (
    EtcdLimits,
    Tail,
    append_request,
    conditional,
    conditions,
    delete,
    end_of,
    expected_revision,
    place,
    put,
    read,
)
from dray.metadata.etcd_watch import EtcdWatch
from dray.metadata.layout import Layout, parse_position
from dray.metadata.lease import Lease
from dray.metadata.proto import etcd_pb2 as pb
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
    Session,
    Watch,
    check_append,
    check_record,
    check_scan,
    check_sequence,
    check_session_ttl,
    check_swap,
    check_watch,
)

T = TypeVar("T")

# etcd's own defaults (--max-txn-ops, --max-request-bytes).
DEFAULT_MAX_OPERATIONS = 128
DEFAULT_MAX_REQUEST_BYTES = 1_572_864
# What etcd wraps around a transaction before it measures it: a header with ids and the user's name.
_ENVELOPE_BYTES = 128
# Streams that one broker writes at a time: far fewer. At about 300 bytes each this is 20 MiB at most.
_MAX_KNOWN_TAILS = 65_536
# Conflicts after which an append stops pushing and lets others go first.
_EAGER_ATTEMPTS = 4
_LONGEST_PAUSE_S = 0.05
# Records below n in which `floor` looks first, and by how much it looks further each time.
_FLOOR_WINDOW, _FLOOR_GROWTH = 1_024, 32
# What `scan` asks for at a time once it has met grandchildren, which it must skip.
_SCAN_PAGE = 256


class _KnownTails:
    """The tails last seen, by (domain, sequence). Forgets those used longest ago."""

    def __init__(self) -> None:
        self._tails: OrderedDict[tuple[int, str], Tail] = OrderedDict()

    def get(self, domain: int, sequence: str) -> Tail | None:
        tail = self._tails.get((domain, sequence))
        if tail is not None:
            self._tails.move_to_end((domain, sequence))
        return tail

    def remember(self, domain: int, sequence: str, tail: Tail) -> None:
        self._tails[domain, sequence] = tail
        self._tails.move_to_end((domain, sequence))
        if len(self._tails) > _MAX_KNOWN_TAILS:
            self._tails.popitem(last=False)


@dataclass(slots=True)
class _Turn:
    """Appends to a domain go one after the other, so that a process never conflicts with itself."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    queued: int = 0  # those that hold the lock or wait for it


class EtcdStore:
    """A `MetadataStore` in an etcd cluster, below one key prefix. Made by `open`."""

    def __init__(self, client: EtcdClient, layout: Layout, limits: Limits) -> None:
        self._client = client
        self._layout = layout
        self._limits = limits
        self._tails = _KnownTails()
        self._turns: dict[int, _Turn] = {}  # one per domain
        self._watches: set[EtcdWatch] = set()
        self._sessions: set[_EtcdSession] = set()

    @classmethod
    async def open(
        cls,
        endpoints: Sequence[str],
        root: str,
        *,
        timeout_s: float = 5.0,
        user: str | None = None,
        password: str | None = None,
        tls: grpc.ChannelCredentials | None = None,
        max_operations: int = DEFAULT_MAX_OPERATIONS,
        max_request_bytes: int = DEFAULT_MAX_REQUEST_BYTES,
        dial: Callable[[str], str] = str,
    ) -> EtcdStore:
        """Connect, authenticate, and see that the server lets us read below `root`.

        `endpoints` are `host:port`; `dial` says where each is really reached. Raises `Unavailable` or
        `AccessDenied` within `timeout_s`, which is also the time that each later call may take. The two
        maxima are what the server was configured with.
        """
        client = EtcdClient(
            [dial(endpoint) for endpoint in endpoints],
            timeout_s=timeout_s,
            user=user,
            password=password,
            tls=tls,
        )
        layout = Layout(f"{root.rstrip('/')}/dray/v1/")
        limits = EtcdLimits(
            max_operations=max_operations,
            max_bytes=max_request_bytes - _ENVELOPE_BYTES - len((user or "").encode()),
            operations_per_entry=2,
            layout=layout,
        )
        try:
            deadline = client.deadline()
            await client.authenticate(deadline)
            await client.range(
                pb.RangeRequest(
                    key=layout.root.encode(),
                    range_end=end_of(layout.root.encode()),
                    limit=1,
                    keys_only=True,
                ),
                deadline,
            )
        except BaseException:
            await client.close()
            raise
        return cls(client, layout, limits)

    @property
    def limits(self) -> Limits:
        return self._limits

    @property
    def conditions_abort(self) -> bool:
        return True

    @property
    def requests_sent(self) -> int:
        """Requests for keys since the store was opened; a round trip each."""
        return self._client.requests_sent

    async def get(self, domain: int, key: str) -> Record | None:
        check_record(domain, key)
        raw = self._layout.key(domain, key).encode()
        response = await self._client.range(pb.RangeRequest(key=raw), self._client.deadline())
        for kv in response.kvs:
            return Record(key, kv.value, kv.mod_revision)
        return None

    async def scan(
        self, domain: int, directory: str, *, start: str = "", end: str | None = None, limit: int
    ) -> list[Record]:
        check_scan(domain, directory, start, end, limit)
        base = self._layout.directory(domain, directory).encode()
        low = base + start.encode()
        high = end_of(base) if end is None else base + end.encode()
        keys_at = len(self._layout.key(domain, "").encode())
        return await self._pinned(lambda deadline: self._scan(base, low, high, limit, keys_at, deadline))

    async def put(self, domain: int, key: str, value: bytes, expect: Expectation = Expect.ANY) -> int:
        return await self._put(domain, key, value, expect, lease=0)

    async def delete(self, domain: int, key: str, expect: Expectation = Expect.ANY) -> bool:
        check_record(domain, key, expect)
        raw = self._layout.key(domain, key).encode()
        response = await self._write(
            pb.TxnRequest(compare=conditions(raw, expect), success=[delete(raw)]), self._client.deadline()
        )
        if not response.succeeded:
            raise VersionConflict(key, expect)
        return response.responses[0].response_delete_range.deleted > 0

    async def append(
        self,
        domain: int,
        entries: Sequence[NewEntry],
        puts: Sequence[Put] = (),
        deletes: Sequence[Delete] = (),
    ) -> AppendResult:
        check_append(domain, entries, puts, deletes)
        self._limits.check(entries, puts, deletes)
        deadline = self._client.deadline()
        if not entries:  # no position to wait for
            return await self._append(domain, (), puts, deletes, deadline)
        turn = self._turns.setdefault(domain, _Turn())
        await self._take_turn(turn, deadline)
        try:
            return await self._append(domain, entries, puts, deletes, deadline)
        finally:
            turn.queued -= 1
            turn.lock.release()

    async def ceiling(self, domain: int, sequence: str, n: int) -> Entry | None:
        for entry in await self.entries(domain, sequence, n, 1):
            return entry
        return None

    async def floor(self, domain: int, sequence: str, n: int) -> Entry | None:
        check_sequence(domain, sequence)
        return await self._pinned(
            lambda deadline: self._floor(domain, sequence, min(n, MAX_POSITION), deadline)
        )

    async def entries(self, domain: int, sequence: str, start: int, limit: int) -> list[Entry]:
        check_sequence(domain, sequence, limit)
        if start > MAX_POSITION:
            return []
        # No sort order: etcd keeps keys in ascending order anyway, but if asked for it in so many words
        # reads the whole range before it applies the limit.
        request = pb.RangeRequest(
            key=self._layout.from_end(domain, sequence, start).encode(),
            range_end=end_of(self._layout.sequence(domain, sequence).encode()),
            limit=limit,
        )
        response = await self._client.range(request, self._client.deadline())
        found = [self._entry(domain, sequence, kv) for kv in response.kvs]
        if found and not response.more:
            # The last entry was created in the transaction that wrote the tail record.
            tail = Tail(found[-1].position, response.kvs[-1].create_revision)
            known = self._tails.get(domain, sequence)
            if known is None or known.revision < tail.revision:
                self._tails.remember(domain, sequence, tail)
        return found

    async def tail(self, domain: int, sequence: str) -> Entry | None:
        check_sequence(domain, sequence)
        return await self._pinned(lambda deadline: self._tail(domain, sequence, deadline))

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
        deadline = self._client.deadline()
        raw = self._layout.entry(domain, sequence, at).encode()
        removals = [delete(self._layout.entry(domain, sequence, position).encode()) for position in deletes]
        # All keys of a sequence have the same length, so each removal costs the same.
        cost = len(raw) + Limits.OPERATION_OVERHEAD_BYTES
        room = max(self._limits.max_bytes - len(value) - 2 * cost, 0)
        first = min(self._limits.max_operations - 1, room // cost)
        response = await self._write(
            pb.TxnRequest(compare=conditions(raw, version), success=[put(raw, value), *removals[:first]]),
            deadline,
        )
        if not response.succeeded:
            raise VersionConflict(f"sequence {sequence} at {at.end_records}", version)
        batch = max(min(self._limits.max_operations, self._limits.max_bytes // cost), 1)
        for begin in range(first, len(removals), batch):
            try:
                # May be repeated: a position that is gone never comes back.
                await self._client.repeatable(
                    pb.TxnRequest(success=removals[begin : begin + batch]), deadline
                )
            except MetadataError as error:
                raise OutcomeUnknown(
                    f"replaced, but not all covered entries were removed: {error}"
                ) from error
        return response.header.revision

    async def barrier(self, domain: int) -> None:
        """Nothing to do: every read asks the leader's quorum for the commit index and waits for it."""
        self._client.check_open()

    @contextlib.asynccontextmanager
    async def watch(self, domain: int, prefix: str | None = None) -> AsyncIterator[Watch]:
        check_watch(domain, prefix)
        if prefix is None:
            # Keys and entries lie side by side; the tail records behind them are nobody's business.
            start, end = self._layout.key(domain, "").encode(), f"{self._layout.domain(domain)}t".encode()
        else:
            start = self._layout.key(domain, prefix).encode()
            end = end_of(start)
        watch = EtcdWatch(self._client, self._layout, start, end)
        await watch.open()
        self._watches.add(watch)
        try:
            yield watch.feed
        finally:
            self._watches.discard(watch)
            await watch.close()

    @contextlib.asynccontextmanager
    async def session(self, ttl_ms: int) -> AsyncIterator[Session]:
        check_session_ttl(ttl_ms)
        asked_at = asyncio.get_running_loop().time()
        lease = await self._client.grant(math.ceil(ttl_ms / 1000), self._client.deadline())
        session = _EtcdSession(self, self._client, lease, ttl_ms, asked_at)
        self._sessions.add(session)
        try:
            yield session
        finally:
            self._sessions.discard(session)
            await session.close()

    async def close(self) -> None:
        await asyncio.gather(*(session.close() for session in self._sessions))
        await asyncio.gather(*(watch.close() for watch in self._watches))
        await self._client.close()

    # Single keys

    async def _put(self, domain: int, key: str, value: bytes, expect: Expectation, lease: int) -> int:
        check_record(domain, key, expect)
        self._limits.check((), (Put(key, value, expect),), ())
        raw = self._layout.key(domain, key).encode()
        response = await self._write(
            pb.TxnRequest(compare=conditions(raw, expect), success=[put(raw, value, lease)]),
            self._client.deadline(),
        )
        if not response.succeeded:
            raise VersionConflict(key, expect)
        return response.header.revision

    async def _write(self, request: pb.TxnRequest, deadline: float) -> pb.TxnResponse:
        size = request.ByteSize()
        if size > self._limits.max_bytes:
            raise TooLarge("bytes in one request", size, self._limits.max_bytes)
        return await self._client.write(request, deadline)

    async def _scan(
        self, base: bytes, low: bytes, high: bytes, limit: int, keys_at: int, deadline: float
    ) -> list[Record]:
        found: list[Record] = []
        page, revision = limit, 0
        while low < high:
            request = pb.RangeRequest(key=low, range_end=high, limit=page, revision=revision)
            response = await self._client.range(request, deadline)
            revision = revision or response.header.revision
            found.extend(
                Record(kv.key[keys_at:].decode(), kv.value, kv.mod_revision)
                for kv in response.kvs
                if b"/" not in kv.key[len(base) :]
            )
            if len(found) >= limit or not response.more:
                break
            # Go on behind the last key, or behind the whole directory in which it lies ("0" follows "/").
            name, in_directory, _ = response.kvs[-1].key[len(base) :].partition(b"/")
            low = base + name + (b"0" if in_directory else b"\0")
            page = max(limit - len(found), _SCAN_PAGE)
        return found[:limit]

    # Sequences

    async def _take_turn(self, turn: _Turn, deadline: float) -> None:
        turn.queued += 1
        if turn.queued == 1:  # the normal case: nobody to wait for, so no timeout to arm, which costs 20 µs
            await turn.lock.acquire()
            return
        try:
            async with asyncio.timeout_at(deadline):
                await turn.lock.acquire()
        except BaseException as error:
            turn.queued -= 1
            if isinstance(error, TimeoutError):
                raise Unavailable("earlier appends of this process still wait for etcd") from None
            raise

    async def _append(
        self,
        domain: int,
        entries: Sequence[NewEntry],
        puts: Sequence[Put],
        deletes: Sequence[Delete],
        deadline: float,
    ) -> AppendResult:
        if not (entries or puts or deletes):
            return AppendResult((), (), ())
        sequences = list(dict.fromkeys(entry.sequence for entry in entries))
        known = {sequence: self._tails.get(domain, sequence) for sequence in sequences}
        tails = {sequence: tail for sequence, tail in known.items() if tail is not None}
        fresh = len(tails) < len(sequences)
        if fresh:
            tails = await self._read_tails(domain, sequences, deadline)
        for attempt in itertools.count(1):
            try:
                positions = place(entries, tails)
            except StartConflict:
                if fresh:
                    raise
                # By a tail that was only remembered. Nothing may be said, nor sent, on its word.
                tails, fresh = await self._read_tails(domain, sequences, deadline), True
                continue
            request = append_request(self._layout, domain, entries, positions, tails, puts, deletes)
            response = await self._write(request, deadline)
            if response.succeeded:
                break
            tails, fresh = self._take_tails(domain, sequences, response.responses), True
            for write, answer in zip(
                conditional(puts, deletes), response.responses[len(sequences) :], strict=True
            ):
                revision = next((kv.mod_revision for kv in answer.response_range.kvs), 0)
                if revision != expected_revision(write.expect):
                    raise VersionConflict(write.key, write.expect)
            if attempt >= _EAGER_ATTEMPTS:
                await asyncio.sleep(random.uniform(0, min(0.001 * 2**attempt, _LONGEST_PAUSE_S)))
                tails = await self._read_tails(domain, sequences, deadline)
        version = response.header.revision
        for entry, position in zip(entries, positions, strict=True):  # the last one of each stays
            self._tails.remember(domain, entry.sequence, Tail(position, version))
        return AppendResult(
            tuple(Assigned(position, version) for position in positions),
            (version,) * len(puts),
            (True,) * len(deletes),
        )

    async def _read_tails(self, domain: int, sequences: Sequence[str], deadline: float) -> dict[str, Tail]:
        keys = [self._layout.tail(domain, sequence).encode() for sequence in sequences]
        request = pb.TxnRequest(success=[read(pb.RangeRequest(key=key)) for key in keys])
        response = await self._client.repeatable(request, deadline)
        return self._take_tails(domain, sequences, response.responses)

    def _take_tails(
        self, domain: int, sequences: Sequence[str], answers: Sequence[pb.ResponseOp]
    ) -> dict[str, Tail]:
        """Understand and remember answers that begin with the tail records of `sequences`."""
        tails = {}
        for sequence, answer in zip(sequences, answers, strict=False):
            tail = Tail(Position(0, 0), 0)
            for kv in answer.response_range.kvs:
                raw = kv.key.decode()
                tail = Tail(parse_position(kv.value.decode(errors="replace"), raw), kv.mod_revision)
            self._tails.remember(domain, sequence, tail)
            tails[sequence] = tail
        return tails

    async def _tail(self, domain: int, sequence: str, deadline: float) -> Entry | None:
        known = self._tails.get(domain, sequence)
        reads = [read(pb.RangeRequest(key=self._layout.tail(domain, sequence).encode()))]
        if known is not None:
            raw = self._layout.entry(domain, sequence, known.position).encode()
            reads.append(read(pb.RangeRequest(key=raw)))
        response = await self._client.repeatable(pb.TxnRequest(success=reads), deadline)
        tail = self._take_tails(domain, [sequence], response.responses)[sequence]
        if tail.revision == 0:
            return None
        if known is not None and known.position == tail.position:
            kvs = response.responses[1].response_range.kvs
        else:
            raw = self._layout.entry(domain, sequence, tail.position).encode()
            request = pb.RangeRequest(key=raw, revision=response.header.revision)
            kvs = (await self._client.range(request, deadline)).kvs
        for kv in kvs:
            return self._entry(domain, sequence, kv)
        raise CorruptStore(f"sequence {sequence} ends at {tail.position}, but there is no entry")

    async def _floor(self, domain: int, sequence: str, n: int, deadline: float) -> Entry | None:
        """Look below n in growing windows: etcd reads all of a range to find the last key in it."""
        end, width, revision = n + 1, _FLOOR_WINDOW, 0
        tail_key = self._layout.tail(domain, sequence).encode()
        while end > 0:
            start = max(end - width, 0)
            window = pb.RangeRequest(
                key=self._layout.from_end(domain, sequence, start).encode(),
                range_end=self._layout.from_end(domain, sequence, end).encode(),
                limit=1,
                sort_order=pb.RangeRequest.DESCEND,
                revision=revision,
            )
            reads = [read(window)]
            if revision == 0:
                reads.append(read(pb.RangeRequest(key=tail_key)))
            response = await self._client.repeatable(pb.TxnRequest(success=reads), deadline)
            for kv in response.responses[0].response_range.kvs:
                return self._entry(domain, sequence, kv)
            end, width = start, width * _FLOOR_GROWTH
            if revision == 0:
                revision = response.header.revision
                tail = self._take_tails(domain, [sequence], response.responses[1:])[sequence]
                if tail.position.end_records < start:  # n lies far behind the end: take the last entry
                    end, width = tail.position.end_records + 1, 1
        return None

    def _entry(self, domain: int, sequence: str, kv: pb.KeyValue) -> Entry:
        raw = kv.key.decode()
        position = parse_position(raw[len(self._layout.sequence(domain, sequence)) :], raw)
        return Entry(position, kv.value, kv.mod_revision)

    async def _pinned(self, reading: Callable[[float], Awaitable[T]]) -> T:
        """Repeat a read at one revision if that was compacted away in the middle of it."""
        deadline = self._client.deadline()
        while True:
            try:
                return await reading(deadline)
            except RevisionCompacted:
                if asyncio.get_running_loop().time() >= deadline:
                    raise Unavailable("etcd compacts faster than this can be read") from None


class _EtcdSession:
    """A lease. etcd counts whole seconds, so the server may let it live a little longer than asked."""

    def __init__(
        self, store: EtcdStore, client: EtcdClient, lease: int, ttl_ms: int, asked_at: float
    ) -> None:
        self._store = store
        self._client = client
        self._id = lease
        self._closed = False
        self._lease = Lease(ttl_ms, lambda: client.keep_alive(lease, client.deadline()), asked_at)

    @property
    def lost(self) -> bool:
        return self._lease.lost

    async def wait_lost(self) -> None:
        await self._lease.wait_lost()

    async def put_ephemeral(
        self, domain: int, key: str, value: bytes, expect: Expectation = Expect.ANY
    ) -> int:
        self._lease.check()
        try:
            return await self._store._put(domain, key, value, expect, self._id)
        except SessionLost:
            self._lease.lose()
            raise

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await self._lease.stop()
        # Best effort: what cannot be revoked now ends by itself.
        with contextlib.suppress(MetadataError):
            await self._client.revoke(self._id, self._client.deadline())
