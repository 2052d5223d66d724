"""Writes batches as WAL objects and commits them: marker, object, append, answer.

Each domain has a pipeline. Objects are uploaded in parallel but committed in the order they were sealed,
so that the batches one caller writes to a stream keep their order. One append per domain is in flight; it
carries every object that is uploaded by then (protocol 3, 19).

Every object has its marker before it is put. An append brings the markers of the next objects along, so that
these need not wait for one; only the first of an idle writer does.

Batches of idempotent producers are judged right before each append (`dray/wal/judging.py`), with nothing
awaited between that and sending it (protocol 4). What is not ok is left out: a duplicate is answered with its
old offset, anything else with an error. An entry states where the fold ends. If it starts there, nobody came
in between and the judgement holds; if not, where the store let it in all the same, its callers are answered
by what the fold says of it there, and the verdicts are stored. A gap is not told where this writer has just
failed an earlier batch of the same producer: then the later ones fail alike.

What a caller hears is true: `Committed` only after the append was acknowledged and the object's record is
COMMITTED; `NotCommitted` only if nothing of it is, nor ever will be; `CommitUnknown` if the store stayed
away for too long to find out. An append is never sent twice. One whose outcome is unknown is settled by
its record: this writer tries to fence its own object, and either that wins, and the append is void for
good, or it finds that the append happened.

Memory is bounded by `max_buffer_bytes` for everything from acceptance to the answer: above it callers wait,
in the order they came. Batches are let go of once they are in their object, so only those being assembled
are held twice; a caller that keeps its own reference keeps the bytes.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeAlias
from uuid import UUID, uuid4

from dray.errors import (
    AccessDenied,
    CommitUnknown,
    DrayError,
    InvalidRequest,
    MetadataError,
    NoSuchNamespace,
    NotCommitted,
    OutcomeUnknown,
    OutOfOrderSequence,
    SequenceError,
    StaleEpoch,
    StartConflict,
    StoreFull,
    TooLarge,
    Unavailable,
    UnknownProducer,
    VersionConflict,
)
from dray.index.entry import Kind, Placed, Producer, WalChunk, place, sequence_of
from dray.index.fold import OK, Verdict
from dray.metadata.store import AppendResult, Delete, Expect, MetadataStore, NewEntry, Put
from dray.objectstore.store import ObjectStore
from dray.producers.broken import Broken
from dray.producers.folds import StreamFolds
from dray.wal.assemble import Assembled, Identity, assemble
from dray.wal.batcher import Pending, PendingBatch, SegmentBatcher, check_pending
from dray.wal.draft import Part, producer_streams, rests_on
from dray.wal.format import object_path
from dray.wal.judging import DOUBTFUL, Judge, because
from dray.wal.objects import (
    Marker,
    ObjectRecord,
    State,
    decode_record,
    encode_marker,
    encode_record,
    marker_key,
    record_key,
)

log = logging.getLogger(__name__)

TARGET_BYTES = 8 * 2**20
LINGER_MS = 250
MAX_BUFFER_BYTES = 128 * 2**20
# Enough to keep a store of 100 ms busy at the target size, few enough for its connection pool.
MAX_UPLOADS = 4
# Assembling less than this, in few batches, takes less time than handing it to a thread.
INLINE_BYTES = 64 * 2**10
INLINE_BATCHES = 100
# What a store says of an append that had no effect and will have none. Of anything else it is found out.
NO_EFFECT = (Unavailable, TooLarge, StoreFull, InvalidRequest, AccessDenied, NoSuchNamespace)
# How long to go on asking what became of an append, and how far back to look for its entries.
SETTLE_S = 15.0
SETTLE_PAUSE_S = 0.1
MAX_STEPS_BACK = 1_000
# Markers put ahead are used within this time, far below the age at which a collector looks at them.
SPARE_S = 60.0
# What stating a start adds to an entry, at most.
EXPECTED_START_BYTES = 11
REFUSALS: dict[Kind, type[SequenceError]] = {
    Kind.OUT_OF_ORDER: OutOfOrderSequence,
    Kind.STALE_EPOCH: StaleEpoch,
    Kind.UNKNOWN_PRODUCER: UnknownProducer,
}


async def _leave_to_others(_: Placed) -> None: ...


@dataclass(frozen=True, slots=True)
class Committed:
    """Where one caller's batches are: [start_offset, end_offset) of their stream."""

    start_offset: int
    end_offset: int


@dataclass(frozen=True, slots=True)
class CommittedObject:
    """An object whose append was acknowledged, for those who read: its bytes, and where its entries are.

    `began` is what `clock` said before the append.
    """

    path: str
    body: bytearray
    entries: tuple[Placed, ...]
    began: int


@dataclass(slots=True)
class Counts:
    """Appends that were sent, those that had to be made anew, and entries that had to be resolved."""

    appends: int = 0
    start_conflicts: int = 0
    unresolved: int = 0


class WalWriter:
    def __init__(
        self,
        metadata: MetadataStore,
        objects: ObjectStore,
        *,
        zone: str,
        incarnation: str,
        target_bytes: int = TARGET_BYTES,
        linger_ms: int = LINGER_MS,
        max_buffer_bytes: int = MAX_BUFFER_BYTES,
        settle_s: float = SETTLE_S,
        wall_clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        new_id: Callable[[], UUID] = uuid4,
        clock: Callable[[], int] = lambda: 0,
        on_commit: Callable[[CommittedObject], None] = lambda _: None,
        folds: StreamFolds | None = None,
        resolve: Callable[[Placed], Awaitable[None]] = _leave_to_others,
        pipeline: type[_Pipeline] | None = None,
    ) -> None:
        """`on_commit` is called before the callers of an object are answered; it does not raise.

        Without `folds`, batches of idempotent producers are not taken. `resolve` stores the verdicts on an
        entry of this writer that others came before.
        """
        self.metadata = metadata
        self.objects = objects
        self.zone = zone
        self.incarnation = incarnation
        self.target_bytes = target_bytes
        self.linger_ms = linger_ms
        self.settle_s = settle_s
        self.wall_clock_ms = wall_clock_ms
        self.new_id = new_id
        self.clock = clock
        self.on_commit = on_commit
        self.folds = folds
        self.resolve = resolve
        self.broken = Broken()
        self.counts = Counts()
        self._max_buffer_bytes = max_buffer_bytes
        self._free_bytes = max_buffer_bytes
        # With their domains, in the order they came, by the futures of those who wait.
        self._waiting: OrderedDict[asyncio.Future[Committed], tuple[int, Pending]] = OrderedDict()
        self._pipeline = pipeline or _Pipeline
        self._pipelines: dict[int, _Pipeline] = {}
        self._closed = False

    async def write(self, domain: int, batches: Sequence[PendingBatch]) -> Committed:
        """Commit batches of one stream, adjacent and in order: `submit`, and wait."""
        return await self.submit(domain, batches)

    def submit(self, domain: int, batches: Sequence[PendingBatch]) -> asyncio.Future[Committed]:
        """Accept batches of one stream, adjacent and in order. While the buffers are full, they wait.

        Calls keep their order. The future raises `NotCommitted` or `CommitUnknown`, this call `NotCommitted`
        and `TooLarge`. It may be cancelled: batches that still wait are let go of, others may be committed.
        """
        if not batches:
            raise ValueError("nothing to write")
        if self._closed:
            raise NotCommitted("the writer is closed")
        answer: asyncio.Future[Committed] = asyncio.get_running_loop().create_future()
        pending = Pending(batches, answer)
        check_pending(pending, self.metadata.limits)
        if pending.size_bytes > self._max_buffer_bytes:
            raise TooLarge("bytes written at once", pending.size_bytes, self._max_buffer_bytes)
        if pending.producer is not None and self._is_told(pending, pending.producer):
            return answer
        self._waiting[answer] = domain, pending
        self._admit()
        if answer in self._waiting:
            answer.add_done_callback(self._leave)
        return answer

    def tell(self, pending: Pending, verdict: Verdict, start: int) -> None:
        """Answer a caller by the verdict on its batches; `start` is where they are if they are ok."""
        if verdict.offset is not None:
            start = verdict.offset
            assert self.folds is not None, "nobody else knows of duplicates"
            self.folds.acknowledge(pending.stream_id, start + pending.records)
        handle = pending.handle
        refusal = REFUSALS.get(verdict.kind)
        if refusal is None:
            self.broken.mend(pending.stream_id, pending.producer)
            if not handle.done():
                handle.set_result(Committed(start, start + pending.records))
        elif not handle.done():
            assert pending.producer is not None, "others have no sequence"
            if verdict.kind in DOUBTFUL and self.broken.fails_alike(pending.stream_id, pending.producer):
                handle.set_exception(NotCommitted("an earlier batch of this producer was not committed"))
            else:
                handle.set_exception(refusal(f"{verdict.kind.value}: {pending.producer}"))

    def _is_told(self, pending: Pending, producer: Producer) -> bool:
        """Answer what any folded prefix tells: a duplicate, and an epoch that is over (protocol 10)."""
        if self.folds is None:
            raise ValueError("batches of idempotent producers need folds")
        if pending.count > 1:
            raise ValueError("an idempotent producer writes one batch at a time")
        fold = self.folds.fold(pending.stream_id)
        if fold is None:
            return False
        verdict = fold.check(producer, pending.records, self.wall_clock_ms())
        if verdict.kind not in (Kind.DUPLICATE, Kind.STALE_EPOCH):
            return False
        self.tell(pending, verdict, -1)
        return True

    async def close(self) -> None:
        """Commit what was accepted, then end. Whoever still waits for room, or comes later, is refused."""
        self._closed = True
        waiting, self._waiting = self._waiting, OrderedDict()
        for answer in waiting:
            if not answer.done():
                answer.set_exception(NotCommitted("the writer is closed"))
        await asyncio.gather(*(pipeline.drain() for pipeline in self._pipelines.values()))

    def release(self, size_bytes: int) -> None:
        """Called by a pipeline when callers were answered."""
        self._free_bytes += size_bytes
        self._admit()

    def _leave(self, answer: asyncio.Future[Committed]) -> None:
        """Whoever gave up waiting for room holds no bytes, nor those behind."""
        waited = self._waiting.pop(answer, None)
        if waited is not None:
            _, pending = waited
            self.broken.add(pending.stream_id, pending.producer)
            self._admit()

    def _admit(self) -> None:
        """Let in whoever is first and fits. Here and not in the waiting task: others would overtake it."""
        while self._waiting:
            answer, (domain, pending) = next(iter(self._waiting.items()))
            if not answer.done() and pending.size_bytes > self._free_bytes:
                break
            self._waiting.popitem(last=False)
            if answer.done():  # cancelled while it waited
                self.broken.add(pending.stream_id, pending.producer)
                continue
            pipeline = self._pipelines.get(domain)
            if pipeline is None:
                pipeline = self._pipelines[domain] = self._pipeline(self, domain)
            if pipeline.stopped:
                pending.handle.set_exception(NotCommitted("the writer was stopped"))
                continue
            self._free_bytes -= pending.size_bytes
            pipeline.add(pending)


class _Step(enum.Enum):
    ON_ITS_WAY = enum.auto()
    UPLOADED = enum.auto()
    APPENDING = enum.auto()  # only the append's outcome can say what became of it
    OVER = enum.auto()  # its callers have been answered


@dataclass(frozen=True, slots=True)
class _Spare:
    """An object to be, whose marker is there already."""

    id: UUID
    path: str
    made_at: float  # by the loop's clock


@dataclass(eq=False, slots=True)
class _Object:
    identity: Identity
    pending: list[Pending]
    size_bytes: int  # of the batches that came in
    is_marked: bool
    step: _Step = _Step.ON_ITS_WAY
    assembled: Assembled | None = None

    @property
    def id(self) -> UUID:
        return self.identity.id

    @property
    def path(self) -> str:
        return self.identity.path

    @property
    def parts(self) -> Assembled:
        assert self.assembled is not None, "asked for only between assembling and the answer"
        return self.assembled


# Objects of an append, with what of them was sent.
_Sent: TypeAlias = Sequence[tuple[_Object, Part]]


class _Pipeline:
    """One domain. Everything here runs on the event loop; what waits is a task of `_tasks`."""

    def __init__(self, writer: WalWriter, domain: int) -> None:
        self._writer = writer
        self._metadata = writer.metadata
        self._domain = domain
        self._judge = Judge(writer.folds)
        self._loop = asyncio.get_running_loop()
        self._batcher = SegmentBatcher(writer.target_bytes, writer.linger_ms, writer.metadata.limits)
        self._on_way: deque[_Object] = deque()  # in the order they were sealed
        self._uploads = asyncio.Semaphore(MAX_UPLOADS)
        self._spares: deque[_Spare] = deque()  # the oldest first
        self._tasks: set[asyncio.Task[None]] = set()
        self._committing = False
        self._poked = False
        self.stopped = False
        self._timer: asyncio.TimerHandle | None = None

    def add(self, pending: Pending) -> None:
        if not self._batcher.fits(pending):
            self._seal()
        self._batcher.add(pending, self._now_ms())
        # Not at once: what the same request writes to other streams is about to follow.
        if not self._poked:
            self._poked = True
            self._loop.call_soon(self._poke)

    async def drain(self) -> None:
        if self._batcher.deadline_ms() is not None:
            self._seal()
        while self._tasks:
            await asyncio.wait(self._tasks)
        self._judge.close()
        spares, self._spares = self._spares, deque()
        if spares:
            with suppress(MetadataError):  # a collector will find them
                await self._metadata.append(
                    self._domain, [], [], [Delete(marker_key(spare.id)) for spare in spares]
                )

    def _now_ms(self) -> float:
        return self._loop.time() * 1000

    def _poke(self, timer_ms: float = 0.0) -> None:
        """Seal if it is time. `timer_ms`: what the timer was set to, since it may ring a moment early."""
        self._poked = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        # Idle is who uploads nothing: an object may fill and leave while the one before is being committed.
        idle = all(sealed.step is not _Step.ON_ITS_WAY for sealed in self._on_way)
        if self._batcher.is_due(max(self._now_ms(), timer_ms), idle=idle):
            self._seal()
        deadline_ms = self._batcher.deadline_ms()
        if deadline_ms is not None:
            self._timer = self._loop.call_at(deadline_ms / 1000, self._poke, deadline_ms)

    def _seal(self) -> None:
        spare = self._take_spare()
        named = spare or self._new_spare()
        now_ms = self._writer.wall_clock_ms()
        identity = Identity(named.id, named.path, self._domain, now_ms, self._writer.incarnation)
        pending = self._batcher.seal()
        size_bytes = sum(each.size_bytes for each in pending)
        sealed = _Object(identity, pending, size_bytes, is_marked=spare is not None)
        self._on_way.append(sealed)
        self._start(self._upload(sealed))

    def _take_spare(self) -> _Spare | None:
        while self._spares:
            spare = self._spares.popleft()
            if self._loop.time() - spare.made_at < SPARE_S:
                return spare
        return None

    def _new_spare(self) -> _Spare:
        object_id = self._writer.new_id()
        path = object_path(self._writer.zone, self._domain, self._writer.wall_clock_ms(), object_id)
        return _Spare(object_id, path, self._loop.time())

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Uploading

    async def _upload(self, sealed: _Object) -> None:
        try:
            async with self._uploads:
                self._leave_out_given_up(sealed)
                await self._assemble(sealed)
                await self._put_marker(sealed)
                await self._put_object(sealed)
            sealed.step = _Step.UPLOADED
        except Exception as error:
            # Nothing of it is committed, and nothing will be: only the append could do that.
            if not isinstance(error, DrayError):
                log.exception("object %s could not be made", sealed.path)
            self._fail(sealed, NotCommitted(f"object {sealed.path} was not written: {error!r}"), error)
        except asyncio.CancelledError as cancelled:
            self._stop(cancelled)
            raise
        finally:
            self._advance()

    def _leave_out_given_up(self, sealed: _Object) -> None:
        """Batches whose callers have gone while a store was away: they will write them again."""
        for pending in sealed.pending:
            if pending.handle.done():
                self._writer.broken.add(pending.stream_id, pending.producer)
        sealed.pending = [pending for pending in sealed.pending if not pending.handle.done()]
        if not sealed.pending:
            raise NotCommitted("nobody waits for it any more")

    async def _assemble(self, sealed: _Object) -> None:
        batches = sum(len(pending.batches) for pending in sealed.pending)
        if sealed.size_bytes <= INLINE_BYTES and batches <= INLINE_BATCHES:
            sealed.assembled = assemble(sealed.identity, sealed.pending)
        else:
            sealed.assembled = await asyncio.to_thread(assemble, sealed.identity, sealed.pending)
        for pending in sealed.pending:
            pending.batches = ()

    async def _put_marker(self, sealed: _Object) -> None:
        """Before the object, so that one that is never committed can be found."""
        if not sealed.is_marked:
            key, value = self._marker(sealed.id, sealed.path)
            await self._metadata.put(self._domain, key, value, Expect.ABSENT)

    def _marker(self, object_id: UUID, path: str) -> tuple[str, bytes]:
        """The size is not known yet where it is put ahead, and nobody needs it."""
        marker = Marker(object_id, path, 0, self._writer.wall_clock_ms())
        return marker_key(object_id), encode_marker(marker)

    async def _put_object(self, sealed: _Object) -> None:
        await self._writer.objects.put(sealed.path, sealed.parts.body)

    # Committing

    def _stop(self, cancelled: asyncio.CancelledError) -> None:
        """Refuse everything that no append has been sent for, now and later."""
        self.stopped = True
        refusal = NotCommitted("the writer was stopped")
        for sealed in self._on_way:
            if sealed.step is not _Step.APPENDING:
                self._fail(sealed, refusal, cancelled)
        left = self._batcher.seal()
        _refuse(left, refusal, cancelled)
        self._writer.release(sum(pending.size_bytes for pending in left))

    def _advance(self) -> None:
        """Drop what is over, begin the next append, and seal what may be due now."""
        if self.stopped:
            return
        while self._on_way and self._on_way[0].step is _Step.OVER:
            self._on_way.popleft()
        if not self._committing and self._on_way and self._on_way[0].step is _Step.UPLOADED:
            self._committing = True
            self._start(self._commit(self._next_append()))
        if not self._poked:
            self._poked = True
            self._loop.call_soon(self._poke)

    def _next_append(self) -> list[_Object]:
        """The objects at the front that are uploaded, as many as fit into one append.

        Where each record of an append passes or fails alone, no two of them have producers in one stream: the
        second could be committed and the first fenced, and it was judged as though that one counted.
        """
        limits = self._metadata.limits
        chosen: list[_Object] = []
        streams: set[int] = set()
        operations = size = 0
        for sealed in self._on_way:
            if sealed.step is _Step.OVER:
                continue
            if sealed.step is not _Step.UPLOADED:
                break
            parts = sealed.parts
            operations += limits.operations(len(parts.entries), len(parts.puts), len(parts.deletes))
            size += limits.size(parts.entries, parts.puts, parts.deletes)
            size += EXPECTED_START_BYTES * len(parts.entries)
            if chosen and (operations > limits.max_operations or size > limits.max_bytes):
                break
            if not self._metadata.conditions_abort:
                with_producers = set(producer_streams(parts))
                if streams & with_producers:
                    break
                streams |= with_producers
            chosen.append(sealed)
        return chosen

    def _mark_ahead(
        self, entries: Sequence[NewEntry], puts: list[Put], deletes: Sequence[Delete]
    ) -> list[_Spare]:
        """Put markers of objects to be into an append that is about to be sent, as far as there is room.

        As many as objects are on their way now: those who write one at a time leave one behind.
        """
        limits = self._metadata.limits
        spares: list[_Spare] = []
        while len(self._spares) + len(spares) < min(len(self._on_way), MAX_UPLOADS):
            spare = self._new_spare()
            puts.append(Put(*self._marker(spare.id, spare.path)))
            operations = limits.operations(len(entries), len(puts), len(deletes))
            if operations > limits.max_operations or limits.size(entries, puts, deletes) > limits.max_bytes:
                puts.pop()
                break
            spares.append(spare)
        return spares

    async def _commit(self, chosen: list[_Object]) -> None:
        for sealed in chosen:
            sealed.step = _Step.APPENDING
        try:
            await self._append(chosen)
        except Exception as error:  # a bug: its callers are not left waiting
            log.exception("append in domain %d", self._domain)
            for sealed in chosen:
                self._fail(sealed, CommitUnknown(f"the append was interrupted: {error!r}"), error)
        except asyncio.CancelledError as cancelled:
            for sealed in chosen:
                self._fail(sealed, CommitUnknown("the writer was stopped during an append"), cancelled)
            self._stop(cancelled)
            raise
        finally:
            self._committing = False
            self._advance()

    async def _append(self, chosen: list[_Object]) -> None:
        deadline = self._loop.time() + self._writer.settle_s
        failed: dict[int, DrayError] = {}  # streams
        while chosen:
            began = self._writer.clock()
            parts = await self._judge.judged([sealed.parts for sealed in chosen], failed)
            sent: list[tuple[_Object, Part]] = []
            for sealed, part in zip(chosen, parts, strict=True):
                if part.entries or rests_on(part, [before for _, before in sent]):
                    sent.append((sealed, part))
                else:  # nothing of it is new
                    self._answer(sealed, part, (), {})
            if not sent:
                return
            chosen = [sealed for sealed, _ in sent]
            entries, puts, deletes = _operations(sent)
            spares = self._mark_ahead(entries, puts, deletes)
            self._writer.counts.appends += 1
            try:
                result = await self._metadata.append(self._domain, entries, puts, deletes)
            except StartConflict as conflict:
                # Others came first, and nothing happened: judge by what they wrote.
                self._writer.counts.start_conflicts += 1
                await self._judge.follow(conflict, deadline, failed)
            except VersionConflict as conflict:
                # Of a store where that fails the whole append: nothing happened, the others may try again.
                fenced = [s for s in chosen if record_key(s.id) == conflict.key]
                for sealed in fenced or chosen:
                    self._fail(sealed, NotCommitted(f"object {sealed.path} was fenced"), conflict)
                chosen = [s for s in chosen if s.step is not _Step.OVER]
            except NO_EFFECT as error:
                self._fail_all(chosen, NotCommitted(f"the append failed: {error}"), error)
                return
            except MetadataError as unknown:  # also an answer that nobody understands
                await self._settle(sent, unknown)
                return
            else:
                self._spares += spares
                await self._acknowledge(sent, result, began)
                return

    async def _acknowledge(self, sent: _Sent, result: AppendResult, began: int) -> None:
        ends = iter(result.entries)
        versions = iter(result.puts)
        committed: list[tuple[_Object, Part, list[Placed]]] = []
        for sealed, part in sent:
            is_committed = not part.puts or next(versions) is not None
            placed = []
            for entry in part.indexed:
                assigned = next(ends)
                placed.append(Placed(entry, *assigned.position, assigned.version))
                next(versions)
            if is_committed:
                committed.append((sealed, part, placed))
                self._tell_readers(sealed, placed, began)
            else:  # its entries have landed, but an object that is fenced is void for everybody
                self._fail(sealed, NotCommitted(f"object {sealed.path} was fenced"), None)
        for sealed, part, placed in committed:
            await self._finish(sealed, part, placed)

    async def _settle(self, sent: _Sent, unknown: MetadataError) -> None:
        """Find out what became of an append, or see to it that nothing does."""
        log.warning("append of %d objects in domain %d: %s", len(sent), self._domain, unknown)
        deadline = self._loop.time() + self._writer.settle_s
        for sealed, part in sent:
            if not part.entries:
                self._fail(sealed, CommitUnknown("what it repeats may not be committed"), unknown)
                continue
            began = self._writer.clock()
            try:
                placed = await self._settled(sealed, part, deadline)
            except DrayError as error:
                self._fail(sealed, CommitUnknown(f"object {sealed.path}: {error}"), error)
            else:
                if placed is None:
                    self._fail(sealed, NotCommitted(f"object {sealed.path}: {unknown}"), unknown)
                else:
                    self._tell_readers(sealed, placed, began)
                    await self._finish(sealed, part, placed)

    async def _settled(self, sealed: _Object, part: Part, deadline: float) -> list[Placed] | None:
        """The object's entries where they stand, or None if it is void. Raises when time is up."""
        fence = ObjectRecord(State.FENCED, sealed.path, len(sealed.parts.body), self._writer.wall_clock_ms())
        key = record_key(sealed.id)
        while True:
            try:
                with suppress(VersionConflict):
                    await self._metadata.put(self._domain, key, encode_record(fence), Expect.ABSENT)
                    return None
                await self._metadata.barrier(self._domain)
                record = await self._metadata.get(self._domain, key)
                if record is not None and decode_record(key, record.value).state is State.FENCED:
                    return None  # by a collector, or by an earlier try of ours
                if record is not None:
                    streams = [entry.stream_id for entry in part.indexed]
                    return [await self._find(stream, sealed.id) for stream in streams]
            except (Unavailable, OutcomeUnknown):
                if self._loop.time() >= deadline:
                    raise
            await asyncio.sleep(SETTLE_PAUSE_S)

    async def _find(self, stream_id: int, object_id: UUID) -> Placed:
        """The entry of an object that is known to be committed: near the end of its stream."""
        sequence = sequence_of(stream_id)
        entry = await self._metadata.tail(self._domain, sequence)
        for _ in range(MAX_STEPS_BACK):
            if entry is None:
                break
            placed = place(entry)
            if isinstance(placed.entry.where, WalChunk) and placed.entry.where.object_id == object_id:
                return placed
            entry = await self._metadata.floor(self._domain, sequence, placed.start_offset)
        raise CommitUnknown(f"object {object_id} is committed, but its entry in {sequence} is not at hand")

    # Answering

    def _tell_readers(self, sealed: _Object, placed: Sequence[Placed], began: int) -> None:
        self._writer.on_commit(CommittedObject(sealed.path, sealed.parts.body, tuple(placed), began))

    async def _finish(self, sealed: _Object, part: Part, placed: Sequence[Placed]) -> None:
        """Fold the entries of an object that is committed, and answer its callers."""
        settled: dict[int, tuple[Verdict | None, ...]] = {}
        failed = dict(part.failed)
        for one in placed:
            try:
                verdicts = await self._judge.fold(part, one)
            except DrayError as error:
                failed[one.entry.stream_id] = because(CommitUnknown(f"object {sealed.path}"), error)
                continue
            if verdicts is not None:
                settled[one.entry.stream_id] = verdicts
                self._writer.counts.unresolved += 1
                self._start(self._resolve(one))
        self._answer(sealed, replace(part, failed=failed), placed, settled)

    async def _resolve(self, placed: Placed) -> None:
        """Store the verdicts on an entry of ours. If that fails, others will."""
        try:
            await self._writer.resolve(placed)
        except DrayError as error:
            log.warning("stream %016x: not resolved: %s", placed.entry.stream_id, error)

    def _answer(
        self,
        sealed: _Object,
        part: Part,
        placed: Sequence[Placed],
        settled: Mapping[int, tuple[Verdict | None, ...]],
    ) -> None:
        """Each caller by the verdict on its batches: the draft's, or the fold's where others came before."""
        offsets = {one.entry.stream_id: one.start_offset for one in placed}
        numbers = dict.fromkeys(part.verdicts, 0)
        for pending in sealed.pending:
            stream_id = pending.stream_id
            if stream_id in part.failed:
                self._give_up(pending, part.failed[stream_id])
                continue
            start = offsets.get(stream_id, -1)
            verdict: Verdict | None = OK
            records = pending.records
            if stream_id in numbers:
                number = numbers[stream_id]
                numbers[stream_id] += pending.count
                verdict = judged = part.verdicts[stream_id][number]
                if not judged.ok:
                    records = 0  # left out
                if stream_id in settled:
                    verdict = settled[stream_id][number]
            offsets[stream_id] = start + records
            if verdict is None:
                self._give_up(pending, CommitUnknown(f"object {sealed.path}: too much has followed it"))
            else:
                self._writer.tell(pending, verdict, start)
        self._over(sealed)

    def _give_up(self, pending: Pending, error: DrayError) -> None:
        self._writer.broken.add(pending.stream_id, pending.producer)
        _refuse([pending], error, error.__cause__)

    def _fail_all(self, failed: Sequence[_Object], error: DrayError, cause: BaseException | None) -> None:
        for sealed in failed:
            self._fail(sealed, error, cause)

    def _fail(self, sealed: _Object, error: DrayError, cause: BaseException | None) -> None:
        if sealed.step is not _Step.OVER:
            for pending in sealed.pending:
                self._writer.broken.add(pending.stream_id, pending.producer)
            _refuse(sealed.pending, error, cause)
            self._over(sealed)

    def _over(self, sealed: _Object) -> None:
        sealed.step = _Step.OVER
        self._writer.release(sealed.size_bytes)
        sealed.pending = []
        sealed.assembled = None


def _operations(sent: _Sent) -> tuple[list[NewEntry], list[Put], list[Delete]]:
    return (
        [entry for _, part in sent for entry in part.entries],
        [put for _, part in sent for put in part.puts],
        [delete for _, part in sent for delete in part.deletes],
    )


def _refuse(refused: Sequence[Pending], error: DrayError, cause: BaseException | None) -> None:
    for pending in refused:
        if not pending.handle.done():
            failure = type(error)(*error.args)  # each caller raises its own
            failure.__cause__ = cause
            pending.handle.set_exception(failure)
