"""What kio's generated classes say of Kafka's messages: their fields, and how those stand on the wire. Pure.

`codec` builds responses by it, `guard` walks requests by it. Both take everything from the classes, so that
no structure is written down twice.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from functools import cache
from typing import Any, NamedTuple, TypeAlias

EntityType: TypeAlias = Any  # one of kio's dataclasses


class Field(NamedTuple):
    name: str
    kafka_type: str | None  # of the value, or of each element; None for a structure
    entity: EntityType | None  # the structure, or that of each element
    is_array: bool
    is_nullable: bool
    tag: int | None
    has_default: bool


@cache
def fields_of(entity: EntityType) -> tuple[Field, ...]:
    hints = typing.get_type_hints(entity)
    return tuple(_field(field, hints[field.name]) for field in dataclasses.fields(entity))


def _field(field: dataclasses.Field[Any], hint: Any) -> Field:
    is_nullable = False
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        choices = [choice for choice in typing.get_args(hint) if choice is not types.NoneType]
        is_nullable = len(choices) < len(typing.get_args(hint))
        (hint,) = choices
    is_array = typing.get_origin(hint) is tuple
    element = typing.get_args(hint)[0] if is_array else hint
    return Field(
        name=field.name,
        kafka_type=field.metadata.get("kafka_type"),
        entity=element if dataclasses.is_dataclass(element) else None,
        is_array=is_array,
        is_nullable=is_nullable,
        tag=field.metadata.get("tag"),
        has_default=field.default is not dataclasses.MISSING,
    )
