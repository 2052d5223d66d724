"""A small server that speaks Oxia's client protocol and behaves like Oxia where Dray could notice.

    python -m tests.servers.oxia_standin --listen 127.0.0.1:6648 --data DIR --shards 4

It exists so that the Oxia store is tested where no Oxia is installed, and so that tests can reach
what would wreck or cannot be asked of a real one: poisoned logs, wedged shards, a leader that moves.
`tests/unit/test_oxia_server.py` runs the same assertions against this and against a real Oxia; what
is modelled here was measured there. Surprising behaviour is the point: do not make it nicer.

One process holds all shards. Each shard is a log that is fsynced before an answer and replayed at
start, a state that only the log changes, and a change feed. With `--follower` the same process also
listens on a second address; which of the two leads is decided through the control port.

Not modelled: secondary indexes (reading by one is refused), internal `__oxia/` keys, natural key
sorting, TLS and authentication, retention by time (see `--notifications-kept`), replication itself.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import collections
import contextlib
import json
import os
import re
import signal
import struct
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, TypeVar

import grpc
import grpc.aio

from dray.metadata.proto import oxia_pb2 as pb
from dray.metadata.proto.oxia_pb2_grpc import OxiaClientServicer, add_OxiaClientServicer_to_server

MIB = 2**20
MAX_RECEIVE_BYTES = 256 * MIB
SEGMENT_BYTES = 64 * MIB  # what one log segment holds; a larger request can never be logged
MAX_BATCH_BYTES = 2 * MIB  # of values or keys in one streamed answer
MAX_BATCH_RECORDS = 1000
NOTIFICATIONS_AT_ONCE = 100
MIN_SESSION_MS, MAX_SESSION_MS = 2_000, 300_000
UINT64 = 2**64
# How long a write stream that met a failing request goes on answering those behind it.
FAILED_STREAM_GRACE_S = 0.1

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")


# --- errors as they travel ---------------------------------------------------------------------------


class Refused(Exception):
    """A call ends with this gRPC status, and with an ErrorInfo where `reason` is given."""

    def __init__(self, code: grpc.StatusCode, message: str, reason: str = "", **facts: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.reason = reason
        self.facts = facts

    async def abort(self, context: Context) -> NoReturn:
        trailing = (("grpc-status-details-bin", self._details()),) if self.reason else ()
        await context.abort(self.code, self.message, trailing)

    def _details(self) -> bytes:
        """google.rpc.Status holding one google.rpc.ErrorInfo; too little to depend on a package for."""
        info = _field(1, self.reason.encode()) + _field(2, b"oxia.io")
        for name, value in self.facts.items():
            info += _field(3, _field(1, name.encode()) + _field(2, value.encode()))
        detail = _field(1, b"type.googleapis.com/google.rpc.ErrorInfo") + _field(2, info)
        code: int = self.code.value[0]
        return bytes((0x08, code)) + _field(2, self.message.encode()) + _field(3, detail)


def _field(number: int, data: bytes) -> bytes:
    size, length = len(data), bytearray()
    while size >= 0x80:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    length.append(size)
    return bytes((number << 3 | 2,)) + bytes(length) + data


def not_leader(shard: int, leader: str | None) -> Refused:
    hint = {"shard": str(shard), "leader": leader} if leader else {}
    return Refused(grpc.StatusCode.ABORTED, "oxia: node is not leader", "NODE_IS_NOT_LEADER", **hint)


def session_not_found() -> Refused:
    return Refused(grpc.StatusCode.NOT_FOUND, "oxia: session not found", "SESSION_NOT_FOUND")


class Poison(Exception):
    """A logged request that cannot be applied: it fails its caller now and every replay later."""


# --- the state of a shard: pure ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stored:
    key: str
    value: bytes
    version_id: int
    modifications: int
    created_ms: int
    modified_ms: int
    session_id: int | None
    client_identity: str | None

    def version(self) -> pb.Version:
        return pb.Version(
            version_id=self.version_id,
            modifications_count=self.modifications,
            created_timestamp=self.created_ms,
            modified_timestamp=self.modified_ms,
            session_id=self.session_id,
            client_identity=self.client_identity,
        )

    def record(self, with_key: bool, with_value: bool = True) -> pb.GetResponse:
        return pb.GetResponse(
            version=self.version(),
            value=self.value if with_value and self.value else None,  # an empty value is no value
            key=self.key if with_key else None,
        )


def sort_key(key: str) -> bytes:
    """Keys sort by depth, then by bytes with '/' above all others; a final '//' counts as one slash.

    So `x/` .. `x//` are exactly the direct children of x.
    """
    depth = min(key.count("/") - key.endswith("//"), 2**15 - 1)
    return depth.to_bytes(2, "big") + key.encode().replace(b"/", b"\xff")


class Records:
    """Records in Oxia's order."""

    def __init__(self, records: dict[bytes, Stored] | None = None, order: list[bytes] | None = None) -> None:
        self._records = records or {}
        self._order = order or []

    def copy(self) -> Records:
        return Records(dict(self._records), list(self._order))

    def __iter__(self) -> Iterator[Stored]:
        return iter([self._records[at] for at in self._order])

    def get(self, key: str) -> Stored | None:
        return self._records.get(sort_key(key))

    def replace(self, key: str, stored: Stored | None) -> Stored | None:
        """Put or (None) remove a record; what was there before is returned."""
        at = sort_key(key)
        before = self._records.get(at)
        if stored is None and before is not None:
            del self._records[at]
            del self._order[bisect.bisect_left(self._order, at)]
        elif stored is not None:
            self._records[at] = stored
            if before is None:
                bisect.insort(self._order, at)
        return before

    def find(self, key: str, comparison: pb.KeyComparisonType.ValueType) -> Stored | None:
        """The nearest record in the whole shard, whatever directory it is in."""
        at = sort_key(key)
        if comparison == pb.EQUAL:
            return self._records.get(at)
        if comparison in (pb.CEILING, pb.LOWER):
            index = bisect.bisect_left(self._order, at)
        else:
            index = bisect.bisect_right(self._order, at)
        if comparison in (pb.LOWER, pb.FLOOR):
            index -= 1
        return self._records[self._order[index]] if 0 <= index < len(self._order) else None

    def between(self, start: str, end: str) -> list[Stored]:
        low = bisect.bisect_left(self._order, sort_key(start))
        return [self._records[at] for at in self._order[low : bisect.bisect_left(self._order, sort_key(end))]]

    def scan(self, start: str, end: str) -> list[Stored]:
        """Like `between`, but an empty `end` is no bound; a range delete does not have this exception."""
        if end:
            return self.between(start, end)
        return [self._records[at] for at in self._order[bisect.bisect_left(self._order, sort_key(start)) :]]


class ShardState:
    """What a log amounts to. Each method applies one log entry at an offset and a time."""

    def __init__(self, shard: int) -> None:
        self.shard = shard
        self.records = Records()
        self.sessions: dict[int, int] = {}  # id -> timeout in ms
        # Told of the outcome of each sequence put, "" for a failed one, before the request commits.
        self.sequence_told: Callable[[str, str], None] = lambda prefix, key: None
        self._version_id = -1  # one counter for the shard, so a recreated key gets a new version

    def write(
        self, offset: int, now_ms: int, request: pb.WriteRequest
    ) -> tuple[pb.WriteResponse, pb.NotificationBatch]:
        """Puts, then deletes, then range deletes; each passes or fails alone. `Poison` undoes them all."""
        change = _Change(self, self._version_id, now_ms)
        try:
            response = pb.WriteResponse(
                puts=[change.put(put) for put in request.puts],
                deletes=[change.delete(delete) for delete in request.deletes],
                delete_ranges=[change.delete_range(span) for span in request.delete_ranges],
            )
        except Poison:
            change.undo()
            raise
        self._version_id = change.version_id
        return response, self._batch(offset, now_ms, change.notifications)

    def create_session(self, offset: int, now_ms: int, timeout_ms: int) -> pb.NotificationBatch:
        self._version_id += 1  # Oxia keeps a session as a record, so it takes a version
        self.sessions[offset] = timeout_ms
        return self._batch(offset, now_ms, {})

    def close_session(self, offset: int, now_ms: int, session_id: int) -> pb.NotificationBatch:
        self.sessions.pop(session_id, None)
        gone = [stored.key for stored in self.records if stored.session_id == session_id]
        for key in gone:
            self.records.replace(key, None)
        deleted = pb.Notification(type=pb.KEY_DELETED)
        return self._batch(offset, now_ms, dict.fromkeys(gone, deleted))

    def _batch(
        self, offset: int, now_ms: int, notifications: dict[str, pb.Notification]
    ) -> pb.NotificationBatch:
        entries = [pb.NotificationEntry(key=key, value=notifications[key]) for key in sorted(notifications)]
        return pb.NotificationBatch(shard=self.shard, offset=offset, timestamp=now_ms, notifications=entries)


class _Change:
    """One request while it is applied: what it notifies, and how to take it back."""

    def __init__(self, state: ShardState, version_id: int, now_ms: int) -> None:
        self.version_id = version_id
        self.notifications: dict[str, pb.Notification] = {}  # the last operation on a key wins
        self._state = state
        self._records = state.records
        self._now_ms = now_ms
        self._undo: list[tuple[str, Stored | None]] = []

    def put(self, put: pb.PutRequest) -> pb.PutResponse:
        key, existing = put.key, None
        sequence = len(put.sequence_key_delta) > 0
        if sequence:
            try:
                assigned = self._next_in_sequence(put)
            except Poison:
                self._state.sequence_told(put.key, "")
                raise
            self._state.sequence_told(put.key, assigned or "")
            if assigned is None:
                return pb.PutResponse(status=pb.UNEXPECTED_VERSION_ID)
            key = assigned
        else:
            existing = self._records.get(key)
            if not _as_expected(put, existing):
                return pb.PutResponse(status=pb.UNEXPECTED_VERSION_ID)
        if put.HasField("session_id") and put.session_id not in self._state.sessions:
            return pb.PutResponse(status=pb.SESSION_DOES_NOT_EXIST)

        if put.HasField("override_version_id"):
            version_id = put.override_version_id
        else:
            self.version_id += 1
            version_id = self.version_id
        modifications = existing.modifications + 1 if existing else 0
        if put.HasField("override_modifications_count"):
            modifications = put.override_modifications_count
        stored = Stored(
            key=key,
            value=put.value,
            version_id=version_id,
            modifications=modifications,
            created_ms=existing.created_ms if existing else self._now_ms,
            modified_ms=self._now_ms,
            session_id=put.session_id if put.HasField("session_id") else None,
            client_identity=put.client_identity if put.HasField("client_identity") else None,
        )
        self._replace(key, stored)
        kind = pb.KEY_MODIFIED if modifications > 0 else pb.KEY_CREATED
        self.notifications[key] = pb.Notification(type=kind, version_id=version_id)
        return pb.PutResponse(version=stored.version(), key=key if sequence else None)

    def delete(self, delete: pb.DeleteRequest) -> pb.DeleteResponse:
        existing = self._records.get(delete.key)
        if not _as_expected(delete, existing):
            return pb.DeleteResponse(status=pb.UNEXPECTED_VERSION_ID)
        if existing is None:
            return pb.DeleteResponse(status=pb.KEY_NOT_FOUND)
        self._replace(delete.key, None)
        self.notifications[delete.key] = pb.Notification(type=pb.KEY_DELETED)
        return pb.DeleteResponse()

    def delete_range(self, span: pb.DeleteRangeRequest) -> pb.DeleteRangeResponse:
        """Everything between in the shard's order: with ends of different depth, whole other directories."""
        for stored in self._records.between(span.start_inclusive, span.end_exclusive):
            self._replace(stored.key, None)
        self.notifications[span.start_inclusive] = pb.Notification(
            type=pb.KEY_RANGE_DELETED, key_range_last=span.end_exclusive
        )
        return pb.DeleteRangeResponse()

    def undo(self) -> None:
        for key, before in reversed(self._undo):
            self._records.replace(key, before)

    def _replace(self, key: str, stored: Stored | None) -> None:
        self._undo.append((key, self._records.replace(key, stored)))

    def _next_in_sequence(self, put: pb.PutRequest) -> str | None:
        """The key the server assigns, or None for the version conflict that any expectation is."""
        if not put.HasField("partition_key"):
            raise Poison(f"sequence put on {put.key!r} has no partition key")
        if put.HasField("expected_version_id"):
            return None
        last = self._last_in_sequence(put.key)
        deltas = put.sequence_key_delta
        if len(last) > len(deltas):
            raise Poison(f"sequence put on {put.key!r} has {len(deltas)} deltas; its keys have {len(last)}")
        if deltas[0] == 0:
            raise Poison(f"sequence put on {put.key!r} has a first delta of 0")
        key = put.key
        for index, delta in enumerate(deltas):
            value = _parse_part(put.key, last[index]) if index < len(last) else 0
            key += f"-{(value + delta) % UINT64:020d}"
        return key

    def _last_in_sequence(self, prefix: str) -> list[str]:
        """The numbers of what is taken for the tail: the neighbour below, if only it begins with `prefix`.

        A sibling such as `<prefix>+x-5` or `<prefix>-1-5` is therefore mistaken for it.
        """
        neighbour = self._records.find(f"{prefix}-{UINT64 - 1:020d}", pb.LOWER)
        if neighbour is None or not neighbour.key.startswith(prefix):
            return []
        return neighbour.key[len(prefix) :].split("-")[1:]


def _as_expected(request: pb.PutRequest | pb.DeleteRequest, existing: Stored | None) -> bool:
    if not request.HasField("expected_version_id"):
        return True
    return request.expected_version_id == (existing.version_id if existing else -1)


def _parse_part(prefix: str, part: str) -> int:
    number = re.match(r"[ \t\r]*([0-9]{1,20})", part)
    if number is None or int(number[1]) >= UINT64:
        raise Poison(f"sequence put on {prefix!r}: its neighbour has {part!r} where a number should be")
    return int(number[1])


# --- the log: durability -----------------------------------------------------------------------------

WRITE, CREATE_SESSION, CLOSE_SESSION, CHECKSUM = range(4)
_HEADER = struct.Struct(">IIqQB")  # crc32 of the rest, payload length, offset, time in ms, kind


@dataclass(frozen=True, slots=True)
class LogEntry:
    offset: int
    now_ms: int
    kind: int
    payload: bytes

    def encode(self) -> bytes:
        packed = _HEADER.pack(0, len(self.payload), self.offset, self.now_ms, self.kind) + self.payload
        return zlib.crc32(packed[4:]).to_bytes(4, "big") + packed[4:]


class Log:
    """An append-only file. What `append` has returned from survives a kill; a torn end is cut off."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab")

    def replay(self) -> Iterator[LogEntry]:
        data, at = self._path.read_bytes(), 0
        while len(data) - at >= _HEADER.size:
            crc, size, offset, now_ms, kind = _HEADER.unpack_from(data, at)
            end = at + _HEADER.size + size
            if end > len(data) or zlib.crc32(data[at + 4 : end]) != crc:
                break
            yield LogEntry(offset, now_ms, kind, data[at + _HEADER.size : end])
            at = end
        self._file.truncate(at)

    def append(self, entries: Iterable[LogEntry]) -> None:
        self._file.write(b"".join(entry.encode() for entry in entries))
        self._file.flush()
        os.fsync(self._file.fileno())


# --- a shard: log, state, sessions, feed -------------------------------------------------------------


class Signal:
    """Wakes all who wait, each time it fires. Check, then wait: nothing is missed in between."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def fire(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self) -> None:
        await self._event.wait()


class SequenceSlot:
    """The newest key told to one subscriber; older ones that it did not fetch are lost, as in Oxia."""

    def __init__(self, key: str | None) -> None:
        self.key = key
        self.woken = Signal()

    def tell(self, key: str) -> None:
        self.key = key
        self.woken.fire()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a former leader knows."""

    records: Records
    sessions: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Pending:
    kind: int
    payload: bytes
    done: asyncio.Future[pb.WriteResponse | int]


class Shard:
    """One shard. `submit` hands a request to `run`, which logs, applies and answers in that order."""

    def __init__(self, shard: int, path: Path, notifications_kept: int) -> None:
        self.id = shard
        self.state = ShardState(shard)
        self.committed = Signal()
        self.commit_offset = -1
        self._log = Log(path)
        self._kept = notifications_kept
        self._batches: dict[int, pb.NotificationBatch] = {}
        self._oldest = 0
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._slots: dict[str, set[SequenceSlot]] = {}
        # Not bounded: those who submit wait for the answer, and the tests are few.
        self._queue: asyncio.Queue[_Pending] = asyncio.Queue()
        for entry in self._log.replay():
            self._apply(entry)
        # Ahead of the log by more than one once a request was too large to be logged.
        self._next_offset = self.commit_offset + 1
        self.state.sequence_told = self._tell_sequence

    async def run(self) -> None:
        self.restart_session_timers()
        while True:
            group = [await self._queue.get()]
            while not self._queue.empty():
                group.append(self._queue.get_nowait())
            await self._commit(group)

    def submit(self, kind: int, payload: bytes) -> asyncio.Future[pb.WriteResponse | int]:
        """Ends in the response (the session's id for CREATE_SESSION) or in `Refused`."""
        pending = _Pending(kind, payload, asyncio.get_running_loop().create_future())
        self._queue.put_nowait(pending)
        return pending.done

    async def _commit(self, group: Sequence[_Pending]) -> None:
        accepted: list[tuple[_Pending, LogEntry]] = []
        head, now_ms = self.commit_offset, int(time.time() * 1000)
        for pending in group:
            entry = LogEntry(self._next_offset, now_ms, pending.kind, pending.payload)
            self._next_offset += 1
            refused = _refused_by_log(head, entry)
            if refused is not None:
                _finish(pending.done, refused)
                continue
            head = entry.offset
            accepted.append((pending, entry))
        await asyncio.to_thread(self._log.append, [entry for _, entry in accepted])
        for pending, entry in accepted:
            try:
                _finish(pending.done, self._apply(entry))
            except Poison as poison:
                _finish(
                    pending.done,
                    Refused(grpc.StatusCode.UNKNOWN, f"oxia db: failed to apply batch: {poison}"),
                )
        self.committed.fire()

    def _apply(self, entry: LogEntry) -> pb.WriteResponse | int:
        """Raises `Poison`; the entry's offset is then taken but has no batch in the feed."""
        offset, now_ms = entry.offset, entry.now_ms
        self.commit_offset = offset
        if entry.kind == CHECKSUM:
            return offset  # nor has this
        result: pb.WriteResponse | int = offset
        if entry.kind == WRITE:
            request = pb.WriteRequest.FromString(entry.payload)
            result, batch = self.state.write(offset, now_ms, request)
        elif entry.kind == CREATE_SESSION:
            create = pb.CreateSessionRequest.FromString(entry.payload)
            batch = self.state.create_session(offset, now_ms, create.session_timeout_ms)
        else:
            close = pb.CloseSessionRequest.FromString(entry.payload)
            batch = self.state.close_session(offset, now_ms, close.session_id)
        self._batches[offset] = batch
        while len(self._batches) > self._kept:
            self._batches.pop(self._oldest, None)
            self._oldest += 1
        return result

    async def record_checksum(self) -> None:
        """Log an entry of the server's own. Oxia does so every five minutes."""
        await self.submit(CHECKSUM, b"")

    # Sessions. Their clocks are the leader's own: a restart or a new leader starts them afresh.

    def snapshot(self) -> Snapshot:
        return Snapshot(self.state.records.copy(), frozenset(self._timers))

    def restart_session_timers(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        for session_id in self.state.sessions:
            self.start_session_timer(session_id)

    def start_session_timer(self, session_id: int) -> None:
        if session_id in self._timers:
            self._timers[session_id].cancel()
        after_s = self.state.sessions[session_id] / 1000
        loop = asyncio.get_running_loop()
        self._timers[session_id] = loop.call_later(after_s, self.end_session, session_id)

    def keep_alive(self, session_id: int) -> None:
        """Raises `Refused` for a session that has ended, also if that is still to be logged."""
        if session_id not in self._timers:
            raise session_not_found()
        self.start_session_timer(session_id)

    def end_session(self, session_id: int) -> asyncio.Future[pb.WriteResponse | int]:
        """Raises `Refused` for a session that has ended."""
        timer = self._timers.pop(session_id, None)
        if timer is None:
            raise session_not_found()
        timer.cancel()
        request = pb.CloseSessionRequest(shard=self.id, session_id=session_id)
        done = self.submit(CLOSE_SESSION, request.SerializeToString())
        # Nobody waits when the session expires by itself; a wedged shard then just keeps the records.
        done.add_done_callback(lambda future: future.cancelled() or future.exception())
        return done

    # The feed.

    def batches_after(self, offset: int) -> list[pb.NotificationBatch]:
        """The next few batches; if those asked for are no longer kept, silently the oldest that are."""
        found: list[pb.NotificationBatch] = []
        at = max(offset + 1, self._oldest)
        while at <= self.commit_offset and len(found) < NOTIFICATIONS_AT_ONCE:
            if at in self._batches:
                found.append(self._batches[at])
            at += 1
        return found

    def forget_batches(self) -> None:
        self._batches.clear()
        self._oldest = self.commit_offset + 1

    @contextlib.contextmanager
    def sequence_slot(self, prefix: str) -> Iterator[SequenceSlot]:
        present = self.state.records.between(f"{prefix}-{0:020d}", f"{prefix}-{2**63 - 1:020d}")
        slot = SequenceSlot(present[-1].key if present else None)
        self._slots.setdefault(prefix, set()).add(slot)
        try:
            yield slot
        finally:
            self._slots[prefix].discard(slot)

    def _tell_sequence(self, prefix: str, key: str) -> None:
        for slot in self._slots.get(prefix, ()):
            slot.tell(key)

    def wake_all(self) -> None:
        self.committed.fire()
        for slots in self._slots.values():
            for slot in slots:
                slot.woken.fire()


def _refused_by_log(head: int, entry: LogEntry) -> Refused | None:
    """A request larger than a segment fails but takes an offset; the log takes no later one after that.

    Only an empty log does not care about the gap.
    """
    if head >= 0 and entry.offset != head + 1:
        why = f"{entry.offset} can not immediately follow {head}: oxia: invalid next offset in wal"
    elif len(entry.payload) > SEGMENT_BYTES - 1024:
        why = "oxia: current segment is full"
    else:
        return None
    return Refused(grpc.StatusCode.UNKNOWN, f"oxia: failed to append to wal: {why}")


def _finish(future: asyncio.Future[T], result: T | Refused) -> None:
    if future.done():
        return  # the caller hung up; its request was applied all the same
    if isinstance(result, Refused):
        future.set_exception(result)
    else:
        future.set_result(result)


# --- the cluster: who leads, and who believes to -----------------------------------------------------


class Cluster:
    """All shards, and which address leads them: always the same one for all.

    A *paused* address is a former leader that has not noticed: it answers reads as of the moment it
    was deposed, renews the sessions of that moment, shows itself as leader, and its feeds stay silent.
    Its writes are refused.
    """

    def __init__(self, addresses: Sequence[str], namespaces: dict[str, list[Shard]]) -> None:
        self.addresses = list(addresses)
        self.namespaces = namespaces
        self.shards = {shard.id: shard for shards in namespaces.values() for shard in shards}
        self.leader: str | None = addresses[0]
        self.term = 0
        self.paused: str | None = None
        self.snapshots: dict[int, Snapshot] = {}
        self.changed = Signal()
        self.calls: collections.Counter[str] = collections.Counter()

    def move(self) -> None:
        """The other address leads from now on, and everybody knows."""
        self.paused = None
        self._depose()

    def stale(self) -> None:
        """The other address leads from now on, but the former leader does not know until `settle`."""
        self.paused = self.leader
        self.snapshots = {shard.id: shard.snapshot() for shard in self.shards.values()}
        self._depose()

    def settle(self) -> None:
        self.paused = None
        self.snapshots = {}
        self._announce()

    def close(self) -> None:
        self.leader = self.paused = None
        self._announce()

    def _depose(self) -> None:
        if len(self.addresses) != 2:
            raise ValueError("leadership can move only where there is a --follower")
        self.leader = self.addresses[1 - self.addresses.index(self.leader or "")]
        for shard in self.shards.values():
            shard.restart_session_timers()
        self._announce()

    def _announce(self) -> None:
        self.term += 1
        self.changed.fire()
        for shard in self.shards.values():
            shard.wake_all()


# --- gRPC --------------------------------------------------------------------------------------------


class Node(OxiaClientServicer):
    """One address of the cluster."""

    def __init__(self, address: str, cluster: Cluster) -> None:
        self._address = address
        self._cluster = cluster

    async def GetShardAssignments(
        self, request: pb.ShardAssignmentsRequest, context: Context
    ) -> AsyncIterator[pb.ShardAssignments]:
        namespace = request.namespace or "default"
        if namespace not in self._cluster.namespaces:
            refused = Refused(grpc.StatusCode.NOT_FOUND, "oxia: namespace not found", "NAMESPACE_NOT_FOUND")
            await refused.abort(context)
        while self._cluster.leader is not None:
            term = self._cluster.term
            leader = self._address if self._cluster.paused == self._address else self._cluster.leader
            yield self._assignments(namespace, leader)
            while self._cluster.term == term or self._cluster.paused == self._address:
                await self._cluster.changed.wait()

    async def Write(self, request: pb.WriteRequest, context: Context) -> pb.WriteResponse:
        shard = await self._leading(request.shard if request.HasField("shard") else None, context)
        try:
            return await self._write(shard, request)
        except Refused as refused:
            await refused.abort(context)

    async def WriteStream(
        self, request_iterator: AsyncIterator[pb.WriteRequest], context: Context
    ) -> AsyncIterator[pb.WriteResponse]:
        """Answers carry nothing to match them by, and a failing request has none: those after it shift."""
        shard = await self._leading(await _stream_shard(context), context)
        # What came of each request as it happens, and None when the client has no more to send.
        outcomes: asyncio.Queue[pb.WriteResponse | Refused | None] = asyncio.Queue()

        async def receive() -> None:
            async for request in request_iterator:
                if self._cluster.leader != self._address:
                    outcomes.put_nowait(not_leader(shard.id, self._cluster.leader))
                    return
                self._write(shard, request).add_done_callback(
                    lambda done: outcomes.put_nowait(_outcome(done))
                )
            outcomes.put_nowait(None)

        receiving = asyncio.create_task(receive())
        failure: Refused | None = None
        try:
            while True:
                try:
                    async with asyncio.timeout(FAILED_STREAM_GRACE_S if failure else None):
                        outcome = await outcomes.get()
                except TimeoutError:
                    break
                if outcome is None:
                    break  # answers still on their way are lost: a client must not half-close early
                if isinstance(outcome, pb.WriteResponse):
                    yield outcome
                else:
                    failure = failure or outcome
        finally:
            receiving.cancel()
        if failure:
            await failure.abort(context)

    async def Read(self, request: pb.ReadRequest, context: Context) -> AsyncIterator[pb.ReadResponse]:
        records = await self._readable(request, context)
        found: list[pb.GetResponse] = []
        for get in request.gets:
            if get.HasField("secondary_index_name"):
                await _refuse_secondary_index(context)
            stored = records.find(get.key, get.comparison_type)
            if stored is None:
                found.append(pb.GetResponse(status=pb.KEY_NOT_FOUND))
            else:
                found.append(stored.record(get.comparison_type != pb.EQUAL, get.include_value))
        for gets in _batched(found, lambda get: len(get.value), len(found)):
            yield pb.ReadResponse(gets=gets)

    async def List(self, request: pb.ListRequest, context: Context) -> AsyncIterator[pb.ListResponse]:
        records = await self._readable(request, context)
        if request.HasField("secondary_index_name"):
            await _refuse_secondary_index(context)
        keys = [stored.key for stored in records.scan(request.start_inclusive, request.end_exclusive)]
        for batch in _batched(keys, len, len(keys)):
            yield pb.ListResponse(keys=batch)

    async def RangeScan(
        self, request: pb.RangeScanRequest, context: Context
    ) -> AsyncIterator[pb.RangeScanResponse]:
        records = await self._readable(request, context)
        if request.HasField("secondary_index_name"):
            await _refuse_secondary_index(context)
        snapshot = records.scan(request.start_inclusive, request.end_exclusive)
        for batch in _batched(snapshot, lambda stored: len(stored.value), MAX_BATCH_RECORDS):
            yield pb.RangeScanResponse(records=[stored.record(with_key=True) for stored in batch])

    async def GetSequenceUpdates(
        self, request: pb.GetSequenceUpdatesRequest, context: Context
    ) -> AsyncIterator[pb.GetSequenceUpdatesResponse]:
        """Ends without an error when the leader stops or changes."""
        shard = await self._leading(request.shard, context)
        term = self._cluster.term
        with shard.sequence_slot(request.key) as slot:
            while await self._in_term(term):
                if slot.key is None:
                    await slot.woken.wait()
                else:
                    key, slot.key = slot.key, None
                    yield pb.GetSequenceUpdatesResponse(highest_sequence_key=key)

    async def GetNotifications(
        self, request: pb.NotificationsRequest, context: Context
    ) -> AsyncIterator[pb.NotificationBatch]:
        shard = await self._leading(request.shard, context)
        term = self._cluster.term
        if request.HasField("start_offset_exclusive"):
            offset = request.start_offset_exclusive
        else:
            offset = shard.commit_offset
            yield pb.NotificationBatch(shard=shard.id, offset=offset)
        while await self._in_term(term):
            batches = shard.batches_after(offset)
            if not batches:
                await shard.committed.wait()
            for batch in batches:
                yield batch
                offset = batch.offset
        gone = Refused(grpc.StatusCode.UNAVAILABLE, "oxia: resource unavailable", "RESOURCE_UNAVAILABLE")
        await gone.abort(context)

    async def CreateSession(
        self, request: pb.CreateSessionRequest, context: Context
    ) -> pb.CreateSessionResponse:
        shard = await self._leading(request.shard, context)
        timeout_ms = request.session_timeout_ms
        try:
            if not MIN_SESSION_MS <= timeout_ms <= MAX_SESSION_MS:
                message = f"timeoutMs={timeout_ms}: oxia: invalid session timeout"
                raise Refused(grpc.StatusCode.INVALID_ARGUMENT, message, "INVALID_SESSION_TIMEOUT")
            session_id = await shard.submit(CREATE_SESSION, request.SerializeToString())
            assert isinstance(session_id, int)
            shard.start_session_timer(session_id)
            return pb.CreateSessionResponse(session_id=session_id)
        except Refused as refused:
            await refused.abort(context)

    async def KeepAlive(self, request: pb.SessionHeartbeat, context: Context) -> pb.KeepAliveResponse:
        """Asks only the node's own memory: a former leader takes it as long as it has not noticed."""
        try:
            stale = self._snapshot(request.shard)
            if stale is None:
                (await self._leading(request.shard, context)).keep_alive(request.session_id)
            elif request.session_id not in stale.sessions:
                raise session_not_found()
        except Refused as refused:
            await refused.abort(context)
        return pb.KeepAliveResponse()

    async def CloseSession(
        self, request: pb.CloseSessionRequest, context: Context
    ) -> pb.CloseSessionResponse:
        shard = await self._leading(request.shard, context)
        try:
            await shard.end_session(request.session_id)
        except Refused as refused:
            await refused.abort(context)
        return pb.CloseSessionResponse()

    def _assignments(self, namespace: str, leader: str) -> pb.ShardAssignments:
        shards = self._cluster.namespaces[namespace]
        width = (2**32 - 1) // len(shards) + 1
        assignments = [
            pb.ShardAssignment(
                shard=shard.id,
                leader=leader,
                int32_hash_range=pb.Int32HashRange(
                    min_hash_inclusive=index * width,
                    max_hash_inclusive=min((index + 1) * width, 2**32) - 1,
                ),
            )
            for index, shard in enumerate(shards)
        ]
        of_namespace = pb.NamespaceShardsAssignment(assignments=assignments, shard_key_router=pb.XXHASH3)
        return pb.ShardAssignments(namespaces={namespace: of_namespace})

    def _write(self, shard: Shard, request: pb.WriteRequest) -> asyncio.Future[pb.WriteResponse]:
        self._cluster.calls["DeleteRange"] += len(request.delete_ranges)
        done: asyncio.Future[Any] = shard.submit(WRITE, request.SerializeToString())
        return done

    async def _leading(self, shard: int | None, context: Context) -> Shard:
        """The shard, if this address leads it; otherwise the call ends here."""
        if shard is None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "shard id is required")
        if shard not in self._cluster.shards:
            await not_leader(shard, None).abort(context)
        if self._cluster.leader != self._address:
            await not_leader(shard, self._cluster.leader).abort(context)
        return self._cluster.shards[shard]

    async def _readable(
        self, request: pb.ReadRequest | pb.ListRequest | pb.RangeScanRequest, context: Context
    ) -> Records:
        shard = request.shard if request.HasField("shard") else None
        stale = self._snapshot(shard)
        return stale.records if stale is not None else (await self._leading(shard, context)).state.records

    def _snapshot(self, shard: int | None) -> Snapshot | None:
        """What this address still believes, if it is the paused one."""
        if shard is None or self._cluster.paused != self._address:
            return None
        return self._cluster.snapshots.get(shard)

    async def _in_term(self, term: int) -> bool:
        """Whether a feed opened in `term` goes on. A paused leader's feeds hang until it notices."""
        while self._cluster.paused == self._address:
            await self._cluster.changed.wait()
        return self._cluster.term == term


async def _stream_shard(context: Context) -> int:
    metadata = dict(context.invocation_metadata() or ())
    for name in ("shard-id", "namespace"):
        if name not in metadata:
            await context.abort(grpc.StatusCode.UNKNOWN, f"Request must include '{name}' metadata field")
    try:
        return int(metadata["shard-id"])
    except ValueError:
        await context.abort(grpc.StatusCode.UNKNOWN, "expected integer")


async def _refuse_secondary_index(context: Context) -> NoReturn:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "the stand-in has no secondary indexes")


def _outcome(done: asyncio.Future[pb.WriteResponse]) -> pb.WriteResponse | Refused:
    failure = done.exception()
    if failure is None:
        return done.result()
    assert isinstance(failure, Refused)
    return failure


def _batched(items: Iterable[T], size: Callable[[T], int], max_items: int) -> Iterator[list[T]]:
    batch: list[T] = []
    total = 0
    for item in items:
        if batch and (len(batch) >= max_items or total + size(item) > MAX_BATCH_BYTES):
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size(item)
    if batch:
        yield batch


class CallCounter(grpc.aio.ServerInterceptor):
    def __init__(self, calls: collections.Counter[str]) -> None:
        self._calls = calls

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        self._calls[handler_call_details.method.rpartition("/")[2]] += 1
        return await continuation(handler_call_details)


# --- control and start -------------------------------------------------------------------------------


async def control(cluster: Cluster, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One command a line, one line of JSON back: see `tests.servers.oxia.StandInControl`."""
    with contextlib.closing(writer):
        while line := (await reader.readline()).decode().strip():
            answer: object = "ok"
            try:
                if line == "calls":
                    answer = cluster.calls
                elif line == "forget-calls":
                    cluster.calls.clear()
                elif line in ("move", "stale", "settle"):
                    getattr(cluster, line)()
                elif line == "checksum":
                    for shard in cluster.shards.values():
                        await shard.record_checksum()
                elif line == "forget-batches":
                    for shard in cluster.shards.values():
                        shard.forget_batches()
                else:
                    raise ValueError(f"no such command: {line!r}")
            except ValueError as error:
                answer = {"error": str(error)}
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()


def open_cluster(options: argparse.Namespace) -> Cluster:
    directory: Path = options.data
    directory.mkdir(parents=True, exist_ok=True)
    names = ["default", *options.namespace]
    namespaces: dict[str, list[Shard]] = {name: [] for name in names}
    for shard in range(len(names) * options.shards):  # ids are unique across namespaces
        try:
            opened = Shard(shard, directory / f"shard-{shard}.log", options.notifications_kept)
        except Poison as poison:
            raise SystemExit(f"cannot recover shard {shard} from its log: {poison}") from None
        namespaces[names[shard // options.shards]].append(opened)
    return Cluster([options.listen, *([options.follower] if options.follower else [])], namespaces)


async def serve(options: argparse.Namespace) -> None:
    cluster = open_cluster(options)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    servers = []
    async with asyncio.TaskGroup() as group, contextlib.AsyncExitStack() as stack:
        shards = [group.create_task(shard.run()) for shard in cluster.shards.values()]
        if options.control:
            host, _, port = options.control.rpartition(":")
            listener = await asyncio.start_server(lambda r, w: control(cluster, r, w), host, int(port))
            await stack.enter_async_context(listener)
        for address in reversed(cluster.addresses):  # the leader last: who sees it may use all
            server = grpc.aio.server(
                interceptors=[CallCounter(cluster.calls)],
                options=[
                    ("grpc.max_receive_message_length", MAX_RECEIVE_BYTES),
                    ("grpc.max_send_message_length", -1),
                    ("grpc.so_reuseport", 0),
                    # Oxia allows a ping every 5 s, also without calls; gRPC's default would hang up.
                    ("grpc.keepalive_permit_without_calls", 1),
                    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
                ],
            )
            add_OxiaClientServicer_to_server(Node(address, cluster), server)
            server.add_insecure_port(address)
            await server.start()
            servers.append(server)
        await stop.wait()
        cluster.close()
        await asyncio.gather(*(server.stop(0.5) for server in servers))
        for task in shards:
            task.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(description="an Oxia stand-in for tests; loopback only")
    parser.add_argument("--listen", required=True, metavar="HOST:PORT")
    parser.add_argument("--data", required=True, type=Path, metavar="DIR")
    parser.add_argument("--shards", type=int, default=4, help="per namespace")
    parser.add_argument("--namespace", action="append", default=[], help="one more besides `default`")
    parser.add_argument("--follower", metavar="HOST:PORT", help="a second address, at first not the leader")
    parser.add_argument("--control", metavar="HOST:PORT", help="where tests send commands")
    parser.add_argument("--notifications-kept", type=int, default=100_000, metavar="N", help="per shard")
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
