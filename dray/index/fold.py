"""The verdict fold: from index entries, in order, to producers' state and a verdict for every batch. Pure.

Whoever folds the same entries gets the same verdicts: the writer, any resolver, any reader, from the start
or from any snapshot (protocol 1, 2). So nothing enters but the batches in index order, the stamps of the
brokers that wrote the entries, `VERSION` and `expiration_ms`. Stored verdicts are never read. **The
expiration is part of the function**: all brokers of a cluster must use the same, for ever, and a snapshot
made with another is refused.

**What an entry does.** A `WalChunk` is folded batch by batch; each batch sees those before it, in the same
entry too. A `Void` has no batches: it moves the end and the clock. A `ParquetFile` or `Truncated` cannot be
folded: its batches are gone, and a snapshot at or above its end was stored before it (protocol 15). A batch
of 0 records was left out by its writer and is not there; its verdict is LEFT_OUT, to keep the count.
A batch that is neither ok nor left out is void: it keeps its offsets and changes no state (protocol 9).

**The verdicts**, as in Kafka's `ProducerAppendInfo` and `UnifiedLog.analyzeAndValidateProducerState`:
a lower epoch is stale; a higher one must begin at sequence 0, else out of order; in the same epoch a batch
with first and last sequence of one of the last five is its duplicate, the next sequence is ok, and all the
rest is out of order. Sequences wrap from 2^31-1 to 0, also inside a batch. Where this differs from Kafka:

- An unknown producer must begin at sequence 0 (protocol 9). Kafka takes any sequence, because its state may
  have gone with the log; here it is kept apart from the log, and only expiry and the bound below lose it.
- Time is the running maximum of `created_at_ms` of the entries (protocol 20), not the records' timestamps,
  which clients choose, nor the reader's clock. A producer is expired *above* the limit; in Kafka, at it.
- Kafka looks for duplicates in the state before the append only: a batch twice in one request is out of order
  there, a duplicate here. Entries are made of many requests, so where one ends must not matter.
- A snapshot has the last five batches; Kafka's has the last one.
- Kafka keeps any number of producers. Here it is `MAX_PRODUCERS` a stream; the longest silent go first.

**Forgetting changes no verdict that would not change anyway.** A producer is judged by the clocks, whether or
not its state is still there: expired and absent are the same to `_judge`. The clock never goes back, so what
is expired stays so until it begins anew, which needs nothing of the old state. Producers are kept in the
order of their last ok batch, and so of their clocks: the expired ones are the first, and dropping them before
or after the bound has dropped its share leaves the same ones. Both happen at the end of each entry, so the
state after an entry, and its bytes, depend on the entries alone.

Left to others: which entries count (`witness`), reading them adjacent, trust and resolution, what a client is
told, and where snapshots are kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

from dray.errors import CorruptStore, IncompatibleStore, ReadAgain
from dray.index.entry import Kind, Placed, Producer, Void, WalChunk

# Raised with any change that could give a batch another verdict or a state other bytes.
VERSION = 1
# Kafka's default of `producer.id.expiration.ms`.
EXPIRATION_MS = 86_400_000
# As many as a client may have in flight; Kafka keeps the same number.
KEPT_BATCHES = 5
# A snapshot is one value of the store. With 98 bytes a producer at the very most, so many fit into the
# smallest limit of a store (1.25 MiB).
MAX_PRODUCERS = 10_000
SEQUENCES = 2**31


class Verdict(NamedTuple):
    kind: Kind
    offset: int | None = None  # of a duplicate: where the original begins

    @property
    def ok(self) -> bool:
        return self.kind is Kind.OK


OK = Verdict(Kind.OK)
OUT_OF_ORDER = Verdict(Kind.OUT_OF_ORDER)
STALE_EPOCH = Verdict(Kind.STALE_EPOCH)
UNKNOWN_PRODUCER = Verdict(Kind.UNKNOWN_PRODUCER)
LEFT_OUT = Verdict(Kind.LEFT_OUT)


class OkBatch(NamedTuple):
    """First and last sequence are told by the first and the number of records."""

    first_sequence: int
    records: int
    start_offset: int

    @property
    def last_sequence(self) -> int:
        return (self.first_sequence + self.records - 1) % SEQUENCES


class ProducerState(NamedTuple):
    epoch: int
    clock_ms: int  # the fold's, at the last ok batch
    batches: tuple[OkBatch, ...]  # 1 to 5 of this epoch, oldest first, without a gap in their sequences


class _Folding(ABC):
    """What `Fold` and `Draft` have in common: an end, a clock, and how a batch is judged."""

    def __init__(self, expiration_ms: int, end: int, clock_ms: int) -> None:
        self.expiration_ms = expiration_ms
        self.end = end
        self.clock_ms = clock_ms

    def check(self, producer: Producer | None, records: int, now_ms: int) -> Verdict:
        """What a batch would get if it came next, alone, in an entry stamped `now_ms`."""
        if records == 0:
            return LEFT_OUT
        if producer is None:
            return OK
        return _judge(self._known(producer.id, max(self.clock_ms, now_ms)), producer, records)

    def _fold(
        self, batches: Iterable[tuple[Producer | None, int]], clock_ms: int, *, void_has_offsets: bool
    ) -> tuple[Verdict, ...]:
        verdicts = []
        offset = self.end
        for producer, records in batches:
            verdict = LEFT_OUT if records == 0 else OK
            if producer is not None and records > 0:
                known = self._known(producer.id, clock_ms)
                verdict = _judge(known, producer, records)
                if verdict is OK:
                    self._put(producer.id, _after(known, producer, records, offset, clock_ms))
            if verdict is OK or void_has_offsets:
                offset += records
            verdicts.append(verdict)
        self.end = offset
        return tuple(verdicts)

    def _known(self, producer_id: int, clock_ms: int) -> ProducerState | None:
        state = self._get(producer_id)
        return None if state is None or clock_ms - state.clock_ms > self.expiration_ms else state

    @abstractmethod
    def _get(self, producer_id: int) -> ProducerState | None: ...

    @abstractmethod
    def _put(self, producer_id: int, state: ProducerState) -> None: ...


class Fold(_Folding):
    """A stream, folded from 0 or from a snapshot up to `end` (T of the protocol)."""

    def __init__(self, expiration_ms: int = EXPIRATION_MS) -> None:
        super().__init__(expiration_ms, 0, 0)
        # In the order of their last ok batch: expired and surplus ones are the first.
        self._producers: OrderedDict[int, ProducerState] = OrderedDict()

    @property
    def producers(self) -> Mapping[int, ProducerState]:
        """Those that are not expired; the one that wrote last is last. A view: it changes with the fold."""
        return MappingProxyType(self._producers)

    def advance(self, placed: Placed) -> tuple[Verdict, ...] | None:
        """Fold the entry that comes next; a verdict for each of its batches, in order.

        None if it was folded before: then nothing changes (protocol 5). Raises `ReadAgain` for one that is
        not adjacent, or whose batches are gone. The caller knows that the entry counts (protocol 12).
        """
        if placed.end_offset <= self.end:
            return None
        where = placed.entry.where
        if placed.start_offset != self.end or not isinstance(where, WalChunk | Void):
            raise ReadAgain(_torn(placed, self.end))
        self.clock_ms = max(self.clock_ms, placed.entry.created_at_ms)
        batches = where.batches if isinstance(where, WalChunk) else ()
        verdicts = self._fold(
            ((batch.producer, batch.records) for batch in batches), self.clock_ms, void_has_offsets=True
        )
        self.end = placed.end_offset
        self._forget()
        return verdicts

    def draft(self) -> Draft:
        """Begin an append at `end`. It holds until this fold moves on."""
        return Draft(self)

    def copy(self) -> Fold:
        copy = Fold(self.expiration_ms)
        copy.end, copy.clock_ms, copy._producers = self.end, self.clock_ms, self._producers.copy()
        return copy

    def _get(self, producer_id: int) -> ProducerState | None:
        return self._producers.get(producer_id)

    def _put(self, producer_id: int, state: ProducerState) -> None:
        self._producers[producer_id] = state
        self._producers.move_to_end(producer_id)

    def _forget(self) -> None:
        producers = self._producers
        while producers:
            oldest = next(iter(producers.values()))
            if len(producers) <= MAX_PRODUCERS and self.clock_ms - oldest.clock_ms <= self.expiration_ms:
                break
            producers.popitem(last=False)


class Draft(_Folding):
    """The entries of a stream in an append that is being made: how they are judged if they land at `start`.

    Nothing of the fold changes, and it costs what it touches, not what the fold holds. For protocol 4:
    between `Fold.draft` and sending the append nothing may be awaited.
    """

    def __init__(self, fold: Fold) -> None:
        super().__init__(fold.expiration_ms, fold.end, fold.clock_ms)
        self.start = fold.end
        self._below = fold
        # Instead of those of the fold that are hidden, and in the same order, behind all others.
        self._changed: OrderedDict[int, ProducerState] = OrderedDict()
        self._hidden: set[int] = set()
        self._oldest: Iterator[int] = iter(fold.producers)

    def add(self, batches: Iterable[tuple[Producer | None, int]], created_at_ms: int) -> tuple[Verdict, ...]:
        """The next entry: its batches (producer, records) and its stamp; a verdict for each batch.

        What is not ok is to be left out, and takes no offsets. If nothing is ok there is no entry, and this
        has changed nothing. Landed at `start` with the same stamps, all that is left will be ok for everyone.
        """
        assert self._below.end == self.start, "the fold has moved on: begin another draft"
        end, clock_ms = self.end, max(self.clock_ms, created_at_ms)
        verdicts = self._fold(batches, clock_ms, void_has_offsets=False)
        if self.end > end:
            self.clock_ms = clock_ms
            self._forget()
        return verdicts

    def _get(self, producer_id: int) -> ProducerState | None:
        state = self._changed.get(producer_id)
        if state is None and producer_id not in self._hidden:
            state = self._below._get(producer_id)
        return state

    def _put(self, producer_id: int, state: ProducerState) -> None:
        if producer_id in self._below.producers:
            self._hidden.add(producer_id)
        self._changed[producer_id] = state
        self._changed.move_to_end(producer_id)

    def _forget(self) -> None:
        """As the fold will at the end of the entry, but the expired may stay: they are the first to go."""
        below = self._below.producers
        while len(below) - len(self._hidden) + len(self._changed) > MAX_PRODUCERS:
            oldest = next((one for one in self._oldest if one not in self._hidden), None)
            if oldest is None:
                self._changed.popitem(last=False)
            else:
                self._hidden.add(oldest)


def encode(fold: Fold) -> bytes:
    """A snapshot. Equal states give equal bytes.

    Varints: version, expiration, end, clock, number of producers; then each producer in the order of its last
    ok batch, which makes the differences to the one before small and never negative: id and epoch (zigzag),
    clock (difference), number of batches, first sequence, start of the last batch (difference); then the
    records of each batch, newest first, each but the newest behind the offsets between it and the newer one.
    """
    out = bytearray()
    for number in (VERSION, fold.expiration_ms, fold.end, fold.clock_ms, len(fold.producers)):
        _put_varint(out, number)
    clock_ms = last_start = 0
    for producer_id, state in fold.producers.items():
        newest = state.batches[-1]
        _put_varint(out, _zigzag(producer_id))
        _put_varint(out, _zigzag(state.epoch))
        _put_varint(out, state.clock_ms - clock_ms)
        _put_varint(out, len(state.batches))
        _put_varint(out, state.batches[0].first_sequence)
        _put_varint(out, newest.start_offset - last_start)
        _put_varint(out, newest.records)
        for newer, older in pairwise(reversed(state.batches)):
            _put_varint(out, newer.start_offset - older.start_offset - older.records)
            _put_varint(out, older.records)
        clock_ms, last_start = state.clock_ms, newest.start_offset
    return bytes(out)


def decode(value: bytes, expiration_ms: int = EXPIRATION_MS) -> Fold:
    """The fold as it was.

    Raises `IncompatibleStore` for a newer version or another expiration, `CorruptStore` for what nobody can
    have written.
    """
    numbers = _varints(value)
    try:
        version = next(numbers)
        if version > VERSION:
            raise IncompatibleStore(
                f"a producer snapshot was made by fold {version}, and this Dray knows those up to {VERSION}"
            )
        expiration = next(numbers)
        if expiration != expiration_ms:
            raise IncompatibleStore(
                f"a producer snapshot was made with producer.id.expiration.ms {expiration}, and not"
                f" {expiration_ms}: it is fixed for a cluster"
            )
        fold = Fold(expiration_ms)
        fold.end, fold.clock_ms, count = next(numbers), next(numbers), next(numbers)
        clock_ms = last_start = 0
        for _ in range(count):
            producer_id, epoch = _unzigzag(next(numbers)), _unzigzag(next(numbers))
            clock_ms += next(numbers)
            kept, sequence = next(numbers), next(numbers)
            last_start += next(numbers)
            starts, records = [last_start], [next(numbers)]
            for _ in range(kept - 1):
                gap = next(numbers)
                records.append(next(numbers))
                starts.append(starts[-1] - gap - records[-1])
            batches = []
            for start, size in zip(reversed(starts), reversed(records), strict=True):
                batches.append(OkBatch(sequence, size, start))
                sequence = (sequence + size) % SEQUENCES
            fold._put(producer_id, ProducerState(epoch, clock_ms, tuple(batches)))
    except StopIteration:
        raise CorruptStore(f"a producer snapshot of {len(value)} bytes ends too early") from None
    # Whatever else is wrong, it is not what this would have written.
    if encode(fold) != value or not _is_sound(fold):
        raise CorruptStore(f"a producer snapshot of {len(value)} bytes is not one")
    return fold


def _judge(known: ProducerState | None, producer: Producer, records: int) -> Verdict:
    sequence = producer.base_sequence
    if known is None:
        return OK if sequence == 0 else UNKNOWN_PRODUCER
    if producer.epoch < known.epoch:
        return STALE_EPOCH
    if producer.epoch > known.epoch:
        return OK if sequence == 0 else OUT_OF_ORDER
    for first_sequence, size, start_offset in known.batches:
        if sequence == first_sequence and records == size:
            return Verdict(Kind.DUPLICATE, start_offset)
    last = known.batches[-1]
    return OK if sequence == (last.first_sequence + last.records) % SEQUENCES else OUT_OF_ORDER


def _after(
    known: ProducerState | None, producer: Producer, records: int, offset: int, clock_ms: int
) -> ProducerState:
    """The state of a producer once this batch was ok."""
    before = known.batches if known is not None and known.epoch == producer.epoch else ()
    batch = OkBatch(producer.base_sequence, records, offset)
    return ProducerState(producer.epoch, clock_ms, (*before[-(KEPT_BATCHES - 1) :], batch))


def _torn(placed: Placed, end: int) -> str:
    kind = type(placed.entry.where).__name__
    return (
        f"stream {placed.entry.stream_id:016x} is folded up to {end}: it cannot go on with"
        f" a {kind} from {placed.start_offset} to {placed.end_offset}"
    )


def _is_sound(fold: Fold) -> bool:
    end = 0
    for state in fold.producers.values():
        last = state.batches[-1]
        if not (
            len(state.batches) <= KEPT_BATCHES
            and state.batches[0].start_offset >= 0
            and all(batch.records > 0 for batch in state.batches)
            and end <= last.start_offset
            and fold.clock_ms - fold.expiration_ms <= state.clock_ms <= fold.clock_ms
        ):
            return False
        end = last.start_offset + last.records
    return end <= fold.end and len(fold.producers) <= MAX_PRODUCERS


def _zigzag(number: int) -> int:
    return number * 2 if number >= 0 else -number * 2 - 1


def _unzigzag(number: int) -> int:
    return number // 2 if number % 2 == 0 else -(number // 2) - 1


def _put_varint(out: bytearray, number: int) -> None:
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)


def _varints(value: bytes) -> Iterator[int]:
    number = shift = 0
    for byte in value:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            yield number
            number = shift = 0
        elif shift == 70:
            return  # no number has more bytes
