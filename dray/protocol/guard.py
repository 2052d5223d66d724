"""Sees to it that every length in a request is covered by bytes that are there, before anything is allocated.

kio's reader makes room for as many elements as an array claims to have, and a claim that no memory can hold
ends the process. So each request is walked first, by the same schema: nothing is decoded here, and the cost
is one step for each variable-sized field and one for each run of fixed-sized ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from struct import Struct
from typing import TypeAlias

from dray.errors import MalformedRequest
from dray.protocol.schema import EntityType, Field, fields_of

# From a position in the request to the one behind the field.
Walk: TypeAlias = Callable[[bytes, int], int]

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

_INT16 = Struct(">h")
_INT32 = Struct(">i")


@cache
def walker(entity: EntityType) -> Walk:
    """A function that walks one entity, and raises `MalformedRequest` where it does not fit."""
    flexible: bool = entity.__flexible__
    steps: list[Walk] = []
    tagged: dict[int, Walk] = {}
    fixed = 0
    for field in fields_of(entity):
        if field.tag is not None:
            tagged[field.tag] = _field_walk(field._replace(is_nullable=False), flexible)
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

    def walk(data: bytes, at: int) -> int:
        for step in steps:
            at = step(data, at)
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

    def walk_array(data: bytes, at: int) -> int:
        if flexible:
            count, at = _varint(data, at)
            count -= 1
        else:
            count, at = _int32(data, at)
        if count > 0:
            if count * least > len(data) - at:
                raise MalformedRequest(f"an array claims {count} elements in {len(data) - at} bytes", at)
            for _ in range(count):
                at = element(data, at)
        elif count < -1:
            raise MalformedRequest(f"an array claims {count} elements", at)
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
    if flexible:
        return _compact
    return _string if field.kafka_type == "string" else _bytes


def _skip(width: int) -> Walk:
    def skip(data: bytes, at: int) -> int:
        return _within(data, at, width)

    return skip


def _nullable(walk: Walk) -> Walk:
    def walk_nullable(data: bytes, at: int) -> int:
        behind = _within(data, at, 1)
        return walk(data, behind) if data[at] < 0x80 else behind

    return walk_nullable


def _tags(known: dict[int, Walk]) -> Walk:
    def walk_tags(data: bytes, at: int) -> int:
        count, at = _varint(data, at)
        if count * 2 > len(data) - at:
            raise MalformedRequest(f"{count} tagged fields are claimed in {len(data) - at} bytes", at)
        for _ in range(count):
            tag, at = _varint(data, at)
            size, at = _varint(data, at)
            behind = _within(data, at, size)
            if tag in known and known[tag](data, at) != behind:
                raise MalformedRequest(f"tagged field {tag} does not fill its {size} bytes", at)
            at = behind
        return at

    return walk_tags


def _compact(data: bytes, at: int) -> int:
    size, at = _varint(data, at)
    return at if size == 0 else _within(data, at, size - 1)


def _string(data: bytes, at: int) -> int:
    behind = _within(data, at, 2)
    (size,) = _INT16.unpack_from(data, at)
    return _sized(data, behind, size)


def _bytes(data: bytes, at: int) -> int:
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


def _within(data: bytes, at: int, size: int) -> int:
    behind = at + size
    if behind > len(data):
        raise MalformedRequest(f"{size} bytes are announced, but {len(data) - at} are left", at)
    return behind
