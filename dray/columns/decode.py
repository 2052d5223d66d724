"""Record batches to columns, many at once and without a loop over records. Pure.

`decode_batches` gives what a consumer would read out of batches, as rows of `dray.columns.schema.SCHEMA`.
Bytes are not believed: not the batch's header, not a count, not a length. Whoever stored a batch looked at
its header only, so this is the first to see whether its records are what that says.

How: where a record begins is known when the one before was looked at, but batches do not depend on each
other. So step i looks at record i of every batch at once. Then all other fields of all records are read
together, one field after the other, and Arrow gathers keys, values and headers into columns. Few batches of
many records leave little to do at once; below `_FEW` a plain loop finds the records sooner.

Numbers are read as the Java client reads them. A varint may be longer than it needs to be, up to 5 bytes
(varlong: 10), and loses the bits above 32 (64); lengths below 0 mean null; a timestamp beyond 64 bits wraps.
What no table has room for is the attributes of single records, which nobody uses (Kafka: "currently unused").
Stricter than a client: the records of a batch are numbered 0 … n-1 and fill it exactly, and header keys are
UTF-8.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dray.columns.schema import HEADER, MAX_TIMESTAMP_MS, MIN_TIMESTAMP_MS, SCHEMA
from dray.errors import CorruptBatch, InvalidBatch, InvalidRecords, UndecodableBatch
from dray.protocol.compression import decompress
from dray.protocol.records import (
    CODEC_BITS,
    HEADER_BYTES,
    LOG_APPEND_TIME_BIT,
    NO_TIMESTAMP,
    TRANSACTIONAL_BIT,
    Batch,
    Buffer,
    read_batch,
)

Ints: TypeAlias = npt.NDArray[np.int64]
Numbers: TypeAlias = npt.NDArray[Any]

# Bytes of records that are looked at together. Enough batches of up to 1 MiB to be worth it; few enough that
# what is needed beside them (80 bytes a record) is no matter.
_PART_BYTES = 2**26
# Arrow's offsets are of 32 bits.
_MAX_PART_BYTES = 2**31 - 2**16
# Records whose fields are read together: what is in between stays in the processor's cache.
_ROWS = 2**14
# Below so many batches a step of all of them takes longer than a plain loop (4 µs against 0.1 µs a record).
_FEW = 40
# A length, attributes, two deltas, no key, no value, no headers.
_SMALLEST_RECORD_BYTES = 7
_SMALLEST_HEADER_BYTES = 2
# Numbers are read by eights of bytes, and up to four of them behind the end of a record before it is noticed.
_PADDING = bytes(64)
_MAX_VARINT_BYTES = 5
_MAX_VARLONG_BYTES = 10
_SEQUENCES = 2**31
_KNOWN_BITS = CODEC_BITS | LOG_APPEND_TIME_BIT | TRANSACTIONAL_BIT

_FIELDS = {field.name: field for field in SCHEMA}


def decode_batches(batches: Sequence[tuple[memoryview, int]], partition: int, *, max_bytes: int) -> pa.Table:
    """The records of batches, in order. Each is whole, header included, and comes with its base offset.

    The base offset in its header does not count. `max_bytes` is for what compressed batches become when they
    are decompressed, all together. Raises `UndecodableBatch` for the first that cannot be decoded, or is too
    large together with those before it.
    """
    tables = list(_tables(batches, partition, max_bytes))
    return pa.concat_tables(tables) if tables else SCHEMA.empty_table()


class _Bad(Exception):
    """A record that is not right: by its row, and what is wrong with it."""

    def __init__(self, row: int, problem: str) -> None:
        self.row = row
        self.problem = problem


@dataclass(slots=True)
class _Part:
    """Batches that become one table."""

    number: int  # of the first
    batches: list[Batch]
    base_offsets: list[int]
    bodies: list[Buffer]  # decompressed
    size_bytes: int = 0


def _tables(batches: Sequence[tuple[memoryview, int]], partition: int, max_bytes: int) -> Iterator[pa.Table]:
    part = _Part(0, [], [], [])
    for number, (data, base_offset) in enumerate(batches):
        try:
            batch = _read_header(data)
            body = _read_body(batch, max_bytes)
        except InvalidBatch as error:
            # An earlier one may be bad as well.
            if part.batches:
                yield _decode(part, partition)
            raise UndecodableBatch(number, error.problem) from error
        if batch.attributes & CODEC_BITS:
            max_bytes -= len(body)
        if part.batches and part.size_bytes + len(body) > _PART_BYTES:
            yield _decode(part, partition)
            part = _Part(number, [], [], [])
        part.batches.append(batch)
        part.base_offsets.append(base_offset)
        part.bodies.append(body)
        part.size_bytes += len(body)
    if part.batches:
        yield _decode(part, partition)


def _read_header(data: memoryview) -> Batch:
    batch = read_batch(data)
    if len(batch.data) != len(data):
        raise CorruptBatch(f"{len(data) - len(batch.data)} bytes behind it", 0)
    if batch.records <= 0 or batch.last_offset_delta != batch.records - 1:
        raise InvalidRecords(
            f"{batch.records} records, but the last offset delta is {batch.last_offset_delta}", 0
        )
    if batch.attributes & ~_KNOWN_BITS:
        # A control batch has no records of a client; the others would be lost.
        raise InvalidRecords(f"attributes {batch.attributes & 0xFFFF:#06x}", 0)
    if batch.producer_id >= 0 and (batch.producer_epoch < 0 or batch.base_sequence < 0):
        raise InvalidRecords(
            f"producer {batch.producer_id} with epoch {batch.producer_epoch}"
            f" and base sequence {batch.base_sequence}",
            0,
        )
    return batch


def _read_body(batch: Batch, max_bytes: int) -> Buffer:
    body = batch.data[HEADER_BYTES:]
    if batch.attributes & CODEC_BITS:
        decompressed = decompress(batch.codec, body, min(max_bytes, _MAX_PART_BYTES))
    else:
        decompressed = body
    if batch.records > len(decompressed) // _SMALLEST_RECORD_BYTES:
        raise InvalidRecords(f"{batch.records} records in {len(decompressed)} bytes", 0)
    if len(decompressed) > _MAX_PART_BYTES:
        raise InvalidRecords(f"{len(decompressed)} bytes of records are more than a column can hold", 0)
    return decompressed


def _decode(part: _Part, partition: int) -> pa.Table:
    """Raises `UndecodableBatch` for the first batch that is bad, whatever is wrong with which of them."""
    bad: UndecodableBatch | None = None
    while True:
        rows = _Rows(part)
        try:
            table = rows.table(partition)
        except _Bad as error:
            batch = int(rows.batch_of(error.row))
            record = error.row - int(rows.first[batch])
            bad = UndecodableBatch(part.number + batch, f"record {record}: {error.problem}")
            # One field after the other was looked at, so another field of an earlier batch may be bad.
            # Those before it are right as far as they were looked at: this ends after as many rounds as
            # there are fields.
            del part.batches[batch:], part.base_offsets[batch:], part.bodies[batch:]
            part.size_bytes = sum(map(len, part.bodies))
            if part.batches:
                continue
        if bad is not None:
            raise bad
        return table


def _joined(part: _Part) -> Numbers:
    """In memory of numpy's, which has huge pages: joining into fresh small ones takes three times as long."""
    data = np.empty(part.size_bytes + len(_PADDING), np.uint8)
    view, at = data.data, 0
    for body in [*part.bodies, _PADDING]:
        view[at : at + len(body)] = body
        at += len(body)
    return data


class _Rows:
    """The records of a part, one row each."""

    def __init__(self, part: _Part) -> None:
        self._batches = part.batches
        self._base_offsets = part.base_offsets
        self.data = _joined(part)
        # What begins at each byte, whatever its alignment.
        self._eights: Numbers = np.ndarray((len(self.data) - 7,), "<u8", self.data, strides=(1,))
        self._twos: Numbers = np.ndarray((len(self.data) - 1,), "<u2", self.data, strides=(1,))
        self._counts = np.array([batch.records for batch in part.batches], np.int64)
        self.first = np.cumsum(self._counts) - self._counts
        sizes = np.array([len(body) for body in part.bodies], np.int64)
        self._ends = np.cumsum(sizes)  # of batches
        self._begins = self._ends - sizes
        self.count = int(self._counts.sum())

    def batch_of(self, row: int) -> np.intp:
        return np.searchsorted(self.first, row, side="right") - 1

    def table(self, partition: int) -> pa.Table:
        count = self.count
        starts = np.empty(count + 1, np.int64)
        self._find(starts)
        base_timestamps = self._per_row([batch.base_timestamp_ms for batch in self._batches])
        deltas = np.arange(count) - self._repeated(self.first)
        # Key and value of each record, as places in the data: begin and end of both.
        places = np.empty((count, 4), np.int32)
        has_key = np.empty(count, bool)
        has_value = np.empty(count, bool)
        timestamps = base_timestamps
        headers = np.empty(count, np.int64)
        headers_at = np.empty(count, np.int64)
        for row in range(0, count, _ROWS):
            rows = slice(row, min(row + _ROWS, count))
            at, ends = starts[rows], starts[row + 1 : rows.stop + 1]
            _, at = self._varints(at, row)
            timestamp_deltas, at = self._varlongs(at + 1, row)
            timestamps[rows] += timestamp_deltas
            offset_deltas, at = self._varints(at, row)
            _check(offset_deltas == deltas[rows], row, "not the next offset delta")
            at = self._bytes(at, ends, row, places[rows, :2], has_key[rows], "key")
            at = self._bytes(at, ends, row, places[rows, 2:], has_value[rows], "value")
            headers[rows], at = self._varints(at, row)
            headers_at[rows] = at
            counted = headers[rows]
            _check((counted != 0) | (at == ends), row, "bytes behind its fields")
            fits = (counted >= 0) & (counted <= (ends - at) // _SMALLEST_HEADER_BYTES)
            _check(fits, row, "more headers than there is room for")
        self._stamp(timestamps)
        columns = {
            "partition": pa.array(np.full(count, partition, np.int32)),
            "offset": pa.array(self._per_row(self._base_offsets) + deltas),
            **_timestamps(timestamps),
            "key": self._gathered(places, 0, has_key),
            "value": self._gathered(places, 2, has_value),
            **self._producers(deltas),
            "attributes": pa.array(
                self._per_row([batch.attributes & ~CODEC_BITS for batch in self._batches], np.int32)
            ),
            "headers": self._headers(headers, headers_at, starts[1:]),
        }
        return pa.Table.from_arrays([columns[name] for name in SCHEMA.names], schema=SCHEMA)

    # Where records begin.

    def _find(self, starts: Ints) -> None:
        """Where each record begins, which is where the one before ends."""
        # The longest first, so that those that are not through yet are always in front.
        order = np.argsort(-self._counts, kind="stable")
        counts, at, rows = self._counts[order], self._begins[order], self.first[order]
        # An end that is not met exactly is stepped over and stays so.
        beyond = self._ends[order] + 1
        live = len(order)
        for step in range(int(counts[0])):
            if counts[live - 1] <= step:
                live = int(np.searchsorted(-counts, -step, side="left"))
                if live < _FEW:
                    break
            elif live < _FEW:
                break
            here = at[:live]
            starts[rows[:live]] = here
            moves = _MOVES.take(self._twos[here])
            if np.count_nonzero(moves) < live:
                self._move_far(here, moves)
            here += moves
            np.minimum(here, beyond[:live], out=here)
            rows[:live] += 1
        else:
            live = 0
        for number in range(live):
            batch = order[number]
            at[number] = self._walk(starts, int(rows[number]), int(at[number]), int(batch))
        wrong = at != beyond - 1
        if wrong.any():
            batch = order[wrong].min()
            raise _Bad(int(self.first[batch]), "the records do not fill the batch exactly")
        starts[self.count] = self._ends[-1]

    def _move_far(self, at: Ints, moves: Numbers) -> None:
        """What `_MOVES` does not know: 8 KiB and longer, and what cannot be."""
        rows = np.flatnonzero(moves == 0)
        lengths, behind, is_whole = _small(self._eights[at[rows]], at[rows])
        moves[rows] = np.where(is_whole & (lengths > 0), lengths + behind - at[rows], _BEYOND)

    def _walk(self, starts: Ints, row: int, at: int, batch: int) -> int:
        """The same for what is left of one batch; where it ends."""
        begin, end = at, int(self._ends[batch])
        data = self.data[begin:end].tobytes() + _PADDING
        count = int(self.first[batch] + self._counts[batch]) - row
        found: list[int] = []
        at = 0
        try:
            for _ in range(count):
                found.append(at)
                byte = data[at]
                if byte < 0x80:
                    at += (byte >> 1) + 1
                elif (second := data[at + 1]) < 0x80:
                    at += ((byte & 0x7F | second << 7) >> 1) + 2
                else:
                    length, at = _read_varint(data, at)
                    if length < 0:
                        return end + 1
                    at += length
        except IndexError:
            return end + 1
        if begin + at > end:
            return end + 1
        here = np.array(found) + begin
        # The lowest bit of a length is its sign.
        if (self._twos[here] & 1).any():
            return end + 1
        starts[row : row + count] = here
        return begin + at

    # Fields.

    def _varints(self, at: Ints, row: int) -> tuple[Ints, Ints]:
        """The numbers that begin there, and what is behind them. `row` is the first one's."""
        values, behind, is_whole = _small(self._eights[at], at)
        _check(is_whole, row, "a number that does not end where it has to")
        return values, behind

    def _varlongs(self, at: Ints, row: int) -> tuple[Ints, Ints]:
        values, behind, is_whole = _large(self._eights[at], at)
        if not is_whole.all():
            # Rare, so it does not matter that these are read one by one.
            for index in np.flatnonzero(~is_whole):
                start = int(at[index])
                found = _read_varlong(self.data[start : start + _MAX_VARLONG_BYTES].tobytes())
                if found is None:
                    raise _Bad(row + int(index), "a number that does not end where it has to")
                values[index], behind[index] = found[0], start + found[1]
        return values, behind

    def _bytes(self, at: Ints, ends: Ints, row: int, places: Numbers, present: Numbers, what: str) -> Ints:
        """Where the bytes behind a length are, and what is behind them."""
        lengths, at = self._varints(at, row)
        np.greater_equal(lengths, 0, out=present)
        np.maximum(lengths, 0, out=lengths)
        behind = at + lengths
        # Also what was read behind the end before it was noticed.
        _check(behind <= ends, row, f"a {what} that is longer than the record")
        places[:, 0] = at
        places[:, 1] = behind
        return behind

    def _gathered(self, places: Numbers, which: int, present: Numbers) -> pa.Array:
        """Keys or values as a column: the `which`th of every four slots that the places delimit."""
        if not present.any():
            return pa.nulls(len(present), pa.binary())
        return _gather(self.data, places.reshape(-1), 4, which, present)

    # Columns.

    def _per_row(self, per_batch: Sequence[int], dtype: Any = np.int64) -> Numbers:
        return np.repeat(np.array(per_batch, dtype), self._counts)

    def _repeated(self, per_batch: Ints) -> Ints:
        return np.repeat(per_batch, self._counts)

    def _stamp(self, timestamps: Ints) -> None:
        """LogAppendTime: the header alone has the time, and it is every record's."""
        for number, batch in enumerate(self._batches):
            if batch.attributes & LOG_APPEND_TIME_BIT:
                first = int(self.first[number])
                timestamps[first : first + batch.records] = batch.max_timestamp_ms

    def _producers(self, deltas: Ints) -> dict[str, pa.Array]:
        kinds = {name: _FIELDS[name].type for name in ("producer_id", "producer_epoch", "sequence")}
        if all(batch.producer_id < 0 for batch in self._batches):
            return {name: pa.nulls(self.count, kind) for name, kind in kinds.items()}
        ids = self._per_row([batch.producer_id for batch in self._batches])
        epochs = self._per_row([batch.producer_epoch for batch in self._batches])
        bases = self._per_row([batch.base_sequence for batch in self._batches])
        columns = {"producer_id": ids, "producer_epoch": epochs, "sequence": (bases + deltas) % _SEQUENCES}
        absent = ids < 0
        return {
            name: pa.array(values, mask=absent).cast(kinds[name], safe=False)
            for name, values in columns.items()
        }

    def _headers(self, counts: Ints, at: Ints, ends: Ints) -> pa.Array:
        offsets = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(counts, out=offsets[1:])
        total = int(offsets[-1])
        places = np.empty((total, 4), np.int32)
        present = np.empty(total, bool)
        if total:
            rows = np.flatnonzero(counts)
            rows = rows[np.argsort(-counts[rows], kind="stable")]
            self._read_headers(rows, counts[rows], at[rows], ends[rows], offsets[rows], places, present)
        keys = _gather(self.data, places.reshape(-1), 4, 0, np.ones(total, bool))
        try:
            texts = keys.cast(pa.string())
        except pa.ArrowInvalid:
            first = _first_not_text(keys)
            row = int(np.searchsorted(offsets, first, side="right")) - 1
            raise _Bad(row, "a header's key is not UTF-8") from None
        values = _gather(self.data, places.reshape(-1), 4, 2, present)
        structs = pa.StructArray.from_arrays([texts, values], fields=list(HEADER))
        kind = _FIELDS["headers"].type
        return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), structs, type=kind)

    def _read_headers(
        self, rows: Ints, counts: Ints, at: Ints, ends: Ints, slots: Ints, places: Numbers, present: Numbers
    ) -> None:
        """Header i of every record at once, those with the most headers first."""
        live = len(rows)
        for step in range(int(counts[0])):
            live = int(np.searchsorted(-counts[:live], -step, side="left"))
            if live < _FEW:
                break
            here, stops = at[:live], ends[:live]
            lengths, here, is_whole = _small(self._eights[here], here)
            key_ends = here + lengths
            _check_at(is_whole & (lengths >= 0) & (key_ends <= stops), rows, _HEADER_KEY)
            value_lengths, begins, is_whole = _small(self._eights[key_ends], key_ends)
            value_ends = begins + np.maximum(value_lengths, 0)
            _check_at(is_whole & (value_ends <= stops), rows, _HEADER_VALUE)
            slot = slots[:live] + step
            places[slot, 0], places[slot, 1] = here, key_ends
            places[slot, 2], places[slot, 3] = begins, value_ends
            present[slot] = value_lengths >= 0
            at[:live] = value_ends
        else:
            step, live = step + 1, 0
        for number in range(live):
            first, last = int(slots[number]) + step, int(slots[number] + counts[number])
            at[number] = self._walk_headers(
                int(rows[number]), int(at[number]), int(ends[number]), places[first:last], present[first:last]
            )
        _check_at(at == ends, rows, "bytes behind its headers")

    def _walk_headers(self, row: int, at: int, end: int, places: Numbers, present: Numbers) -> int:
        """The same for what is left of one record."""
        data, size = self.data[at:end].tobytes() + _PADDING, end - at
        found: list[tuple[int, int, int, int]] = []
        has: list[bool] = []
        behind = 0
        for _ in range(len(present)):
            length, begin = _read_varint(data, behind)
            key_end = begin + length
            if length < 0 or key_end > size:
                raise _Bad(row, _HEADER_KEY)
            length, value_begin = _read_varint(data, key_end)
            behind = value_begin + max(length, 0)
            if behind > size:
                raise _Bad(row, _HEADER_VALUE)
            found.append((begin, key_end, value_begin, behind))
            has.append(length >= 0)
        if found:
            places[:] = np.array(found) + at
            present[:] = has
        return at + behind


_HEADER_KEY = "a header's key that is longer than the record"
_HEADER_VALUE = "a header's value that is longer than the record"

# Behind every batch.
_BEYOND = 2**40

# The top bit of each byte is unset in the last byte of a number.
_FIVE_TOPS = 0x80_8080_8080
_EIGHT_TOPS = 0x8080_8080_8080_8080


def _moves() -> Ints:
    """How far it is to the next record, by the two bytes that one begins with. 0 where they do not tell."""
    twos = np.arange(2**16)
    low, high = twos & 0xFF, twos >> 8
    in_one = low < 0x80
    length = np.where(in_one, low, low & 0x7F | high << 7)
    moves = (length >> 1) + np.where(in_one, 1, 2)
    known = (length & 1 == 0) & (length > 0) & (in_one | (high < 0x80))
    return np.where(known, moves, 0)


_MOVES = _moves()


def _small(eights: Numbers, at: Ints) -> tuple[Ints, Ints, npt.NDArray[np.bool_]]:
    """Varints in the low bytes of `eights`: their values, what is behind them, which end as they have to."""
    tops = ~eights & _FIVE_TOPS
    bits, sizes = _last(eights, tops)
    return _signed(bits & 0xFFFF_FFFF), at + sizes, tops != 0


def _large(eights: Numbers, at: Ints) -> tuple[Ints, Ints, npt.NDArray[np.bool_]]:
    """Varlongs, as far as they have no more than eight bytes."""
    tops = ~eights & _EIGHT_TOPS
    bits, sizes = _last(eights, tops)
    return _signed(bits), at + sizes, tops != 0


def _last(eights: Numbers, tops: Numbers) -> tuple[Numbers, Numbers]:
    """What the bytes up to the first of `tops` say, seven bits each, and how many they are."""
    below = (tops & -tops) - 1
    sizes = (np.bitwise_count(below) + 1) >> 3
    bits = eights & below
    bits = bits & 0x007F_007F_007F_007F | (bits & 0x7F00_7F00_7F00_7F00) >> 1
    bits = bits & 0x0000_3FFF_0000_3FFF | (bits & 0x3FFF_0000_3FFF_0000) >> 2
    bits = bits & 0x0000_0000_0FFF_FFFF | (bits & 0x0FFF_FFFF_0000_0000) >> 4
    return bits, sizes


def _signed(bits: Numbers) -> Ints:
    """Zigzag: 0, -1, 1, -2 …"""
    return ((bits >> 1) ^ -(bits & 1)).view(np.int64)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """A single one and what is behind it; beyond everything if it does not end where it has to."""
    bits = 0
    for index in range(_MAX_VARINT_BYTES):
        byte = data[at + index]
        bits |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            bits &= 0xFFFF_FFFF
            return (bits >> 1) ^ -(bits & 1), at + index + 1
    return _BEYOND, at


def _read_varlong(data: bytes) -> tuple[int, int] | None:
    """The one that the bytes begin with, and how many it has."""
    bits = 0
    for index, byte in enumerate(data):
        bits |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            bits &= 0xFFFF_FFFF_FFFF_FFFF
            return (bits >> 1) ^ -(bits & 1), index + 1
    return None


def _check(ok: Numbers, row: int, problem: str) -> None:
    if not ok.all():
        raise _Bad(row + int(ok.argmin()), problem)


def _check_at(ok: Numbers, rows: Ints, problem: str) -> None:
    if not ok.all():
        raise _Bad(int(rows[: len(ok)][~ok].min()), problem)


def _gather(data: Numbers, offsets: Numbers, stride: int, which: int, present: Numbers) -> pa.Array:
    """Every `stride`th of the slots between the offsets; null where it is not present."""
    count = len(present)
    if not count:
        return pa.array([], pa.binary())
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    slots = pa.Array.from_buffers(pa.binary(), len(offsets) - 1, buffers)
    taken = slots.take(pa.array(np.arange(which, len(offsets), stride)))
    if present.all():
        return taken
    bitmap = pa.py_buffer(np.packbits(present, bitorder="little"))
    return pa.Array.from_buffers(pa.binary(), count, [bitmap, *taken.buffers()[1:]])


def _timestamps(milliseconds: Ints) -> dict[str, pa.Array]:
    """What a table's time can hold, and what it cannot."""
    fits = (milliseconds >= MIN_TIMESTAMP_MS) & (milliseconds <= MAX_TIMESTAMP_MS)
    fits &= milliseconds != NO_TIMESTAMP
    kind = _FIELDS["timestamp"].type
    if fits.all():
        return {
            "timestamp": pa.array(milliseconds * 1000).view(kind),
            "raw_timestamp": pa.nulls(len(milliseconds), pa.int64()),
        }
    return {
        "timestamp": pa.array(milliseconds * 1000, mask=~fits).view(kind),
        "raw_timestamp": pa.array(milliseconds, mask=fits),
    }


def _first_not_text(keys: pa.Array) -> int:
    low, high = 0, len(keys)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            keys.slice(low, middle - low).cast(pa.string())
        except pa.ArrowInvalid:
            high = middle
        else:
            low = middle
    return low
