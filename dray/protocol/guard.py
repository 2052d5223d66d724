"""Sees to it that a request is what its schema says, before anything is allocated for it.

kio's reader makes room for as many elements as an array claims to have, and a claim that no memory can hold
ends the process. Nor does it know tags that are not in the schema, which Kafka says are to be ignored
(KIP-482). So each request is walked first, by the same schema: every length is covered by bytes that are
there, null stands only where it may, there are no more elements than `MAX_ELEMENTS`, and unknown tags are
noted to be cut out. Nothing is decoded here: the cost is one step for each variable-sized field and one for
each run of fixed-sized ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from struct import Struct
from typing import NamedTuple, TypeAlias

from dray.errors import MalformedRequest
from dray.protocol.schema import EntityType, Field, fields_of

# Array elements and tagged fields in one request. An element of two bytes becomes a hundred of Python's, and
# a microsecond in which nobody else is served. Clients name some thousands of partitions at most.
MAX_ELEMENTS = 100_000
# Kafka's own bound, for strings of the compact form too.
MAX_STRING_BYTES = 2**15 - 1

FIXED_BYTES = {
    "bool": 1,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "uint16": 2,
    "error_code": 2,
    "int32": 4,
    "uint32": 4,
    "timedelta_i32": 4,
    "int64": 8,
    "uint64": 8,
    "timedelta_i64": 8,
    "datetime_i64": 8,
    "float64": 8,
    "uuid": 16,
}
# A 32-bit number takes five bytes of seven bits.
MAX_VARINT_BYTES = 5

NULL_STRUCTURE = 0xFF

_INT16 = Struct(">h")
_INT32 = Struct(">i")


class Cut(NamedTuple):
    """Bytes of a request that kio is not to see, and what it sees in their place."""

    start: int
    end: int
    instead: bytes = b""


class Walked:
    """What was met on the way through one request."""

    __slots__ = ("cuts", "elements")

    def __init__(self) -> None:
        self.elements = 0
        self.cuts: list[Cut] = []

    def count(self, elements: int, at: int) -> None:
        self.elements += elements
        if self.elements > MAX_ELEMENTS:
            raise MalformedRequest(f"it has more than {MAX_ELEMENTS} elements", at)

    def without_cuts(self, data: bytes) -> bytes:
        if not self.cuts:
            return data
        parts, at = [], 0
        for start, end, instead in sorted(self.cuts):
            parts += [data[at:start], instead]
            at = end
        return b"".join([*parts, data[at:]])


# From a position in the request to the one behind the field.
Walk: TypeAlias = Callable[[bytes, int, Walked], int]


@cache
def walker(entity: EntityType) -> Walk:
    """A function that walks one entity, and raises `MalformedRequest` where it does not fit."""
    flexible: bool = entity.__flexible__
    steps: list[Walk] = []
    tagged: dict[int, Walk] = {}
    fixed = 0
    for field in fields_of(entity):
        if field.tag is not None:
            tagged[field.tag] = _field_walk(field, flexible)
            continue
        width = _fixed_width(field)
        if width is not None:
            fixed += width
            continue
        if fixed:
            steps.append(_skip(fixed))
            fixed = 0
        is_client_id = entity.__name__ == "RequestHeader" and field.name == "client_id"
        # Kafka's own exception: flexible headers keep the old form of this string.
        steps.append(_field_walk(field, flexible and not is_client_id))
    if fixed:
        steps.append(_skip(fixed))
    if flexible:
        steps.append(_tags(tagged))

    def walk(data: bytes, at: int, walked: Walked) -> int:
        for step in steps:
            at = step(data, at, walked)
        return at

    return walk


@cache
def least_bytes(entity: EntityType) -> int:
    """The fewest bytes that an entity can take."""
    flexible = 1 if entity.__flexible__ else 0
    total = flexible  # the count of tags
    for field in fields_of(entity):
        if field.tag is None:
            total += _least(field, bool(flexible))
    return total


def _least(field: Field, flexible: bool) -> int:
    width = _fixed_width(field)
    if width is not None:
        return width
    if field.is_array:
        return 1 if flexible else 4
    if field.entity is not None:
        return 1 if field.is_nullable else least_bytes(field.entity)
    if flexible:
        return 1
    return 2 if field.kafka_type == "string" else 4


def _fixed_width(field: Field) -> int | None:
    return None if field.is_array or field.kafka_type is None else FIXED_BYTES.get(field.kafka_type)


def _field_walk(field: Field, flexible: bool) -> Walk:
    element = _element_walk(field, flexible)
    if not field.is_array:
        return element
    if field.entity is not None:
        least = least_bytes(field.entity)
    else:
        least = _least(field._replace(is_array=False), flexible)
    width = None if field.kafka_type is None else FIXED_BYTES.get(field.kafka_type)
    fewest = -1 if field.is_nullable else 0

    def walk_array(data: bytes, at: int, walked: Walked) -> int:
        if flexible:
            count, at = _varint(data, at)
            count -= 1
        else:
            count, at = _int32(data, at)
        if count <= 0:
            if count < fewest:
                raise MalformedRequest(f"an array claims {count} elements", at)
            return at
        if count * least > len(data) - at:
            raise MalformedRequest(f"an array claims {count} elements in {len(data) - at} bytes", at)
        walked.count(count, at)
        if width is not None:
            return at + count * width
        for _ in range(count):
            at = element(data, at, walked)
        return at

    return walk_array


def _element_walk(field: Field, flexible: bool) -> Walk:
    if field.entity is not None:
        walk = walker(field.entity)
        return _nullable(walk) if field.is_nullable and not field.is_array else walk
    assert field.kafka_type is not None, "a field is a structure or has a type"
    width = FIXED_BYTES.get(field.kafka_type)
    if width is not None:
        return _skip(width)
    if field.kafka_type == "string":
        return _compact_string if flexible else _string
    return _compact_bytes if flexible else _bytes


def _skip(width: int) -> Walk:
    def skip(data: bytes, at: int, _walked: Walked) -> int:
        return _within(data, at, width)

    return skip


def _nullable(walk: Walk) -> Walk:
    def walk_nullable(data: bytes, at: int, walked: Walked) -> int:
        behind = _within(data, at, 1)
        if data[at] == NULL_STRUCTURE:
            return behind
        if data[at] > 0x7F:  # null for Kafka, and something else for kio; nobody sends it
            raise MalformedRequest(f"a structure begins with {data[at]}", at)
        return walk(data, behind, walked)

    return walk_nullable


def _tags(known: dict[int, Walk]) -> Walk:
    def walk_tags(data: bytes, at: int, walked: Walked) -> int:
        counted_at = at
        count, at = _varint(data, at)
        if count == 0:
            return at
        if count * 2 > len(data) - at:
            raise MalformedRequest(f"{count} tagged fields are claimed in {len(data) - at} bytes", at)
        walked.count(count, at)
        first, kept = at, 0
        for _ in range(count):
            begins = at
            tag, at = _varint(data, at)
            size, at = _varint(data, at)
            behind = _within(data, at, size)
            if tag not in known:
                walked.cuts.append(Cut(begins, behind))
            elif known[tag](data, at, walked) == behind:
                kept += 1
            else:
                raise MalformedRequest(f"tagged field {tag} does not fill its {size} bytes", at)
            at = behind
        if kept < count:
            walked.cuts.append(Cut(counted_at, first, _as_varint(kept)))
        return at

    return walk_tags


def _compact_string(data: bytes, at: int, _walked: Walked) -> int:
    size, at = _varint(data, at)
    if size > MAX_STRING_BYTES + 1:
        raise MalformedRequest(f"a string of {size - 1} bytes", at)
    return at if size == 0 else _within(data, at, size - 1)


def _compact_bytes(data: bytes, at: int, _walked: Walked) -> int:
    size, at = _varint(data, at)
    return at if size == 0 else _within(data, at, size - 1)


def _string(data: bytes, at: int, _walked: Walked) -> int:
    behind = _within(data, at, 2)
    (size,) = _INT16.unpack_from(data, at)
    return _sized(data, behind, size)


def _bytes(data: bytes, at: int, _walked: Walked) -> int:
    size, at = _int32(data, at)
    return _sized(data, at, size)


def _sized(data: bytes, at: int, size: int) -> int:
    if size < -1:
        raise MalformedRequest(f"a length of {size}", at)
    return _within(data, at, max(size, 0))


def _int32(data: bytes, at: int) -> tuple[int, int]:
    behind = _within(data, at, 4)
    (number,) = _INT32.unpack_from(data, at)
    return number, behind


def _varint(data: bytes, at: int) -> tuple[int, int]:
    try:
        byte = data[at]
        if byte < 0x80:
            return byte, at + 1
        number = byte & 0x7F
        for index in range(1, MAX_VARINT_BYTES):
            byte = data[at + index]
            number |= (byte & 0x7F) << (7 * index)
            if byte < 0x80:
                if number >= 2**32:
                    break
                return number, at + index + 1
    except IndexError:
        raise MalformedRequest("it ends within a number", at) from None
    raise MalformedRequest("a number has more than 32 bits", at)


def _as_varint(number: int) -> bytes:
    written = bytearray()
    while number > 0x7F:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)


def _within(data: bytes, at: int, size: int) -> int:
    behind = at + size
    if behind > len(data):
        raise MalformedRequest(f"{size} bytes are announced, but {len(data) - at} are left", at)
    return behind
