"""What AlterConfigs and IncrementalAlterConfigs make of the configs that a resource has. Pure.

Of names and values nothing is known here but which are lists: whoever stores the outcome checks it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from dray.errors import NotAListConfig

# From the configs that are set to those that will be.
Alteration: TypeAlias = Callable[[Mapping[str, str]], dict[str, str]]


class Operation(enum.Enum):
    """Kafka's numbers (`AlterConfigOp.OpType`)."""

    SET = 0
    DELETE = 1  # set no more: the default holds
    APPEND = 2
    SUBTRACT = 3


class Change(NamedTuple):
    name: str
    operation: Operation
    value: str  # nothing to DELETE


def replace_all(configs: Mapping[str, str]) -> Alteration:
    """What is not named is set no more."""
    return lambda _: dict(configs)


def change_some(changes: Sequence[Change], lists: Mapping[str, str]) -> Alteration:
    """Each name is changed once. `lists` has the defaults of those that are lists.

    The outcome raises `NotAListConfig`.
    """

    def alter(current: Mapping[str, str]) -> dict[str, str]:
        altered = dict(current)
        for name, operation, value in changes:
            if operation is Operation.DELETE:
                altered.pop(name, None)
            elif operation is Operation.SET:
                altered[name] = value
            elif name not in lists:
                raise NotAListConfig(name)
            else:
                # As in Kafka, a list that is not set is changed from its default.
                before = _elements(altered.get(name, lists[name]))
                named = _elements(value)
                after = before | named if operation is Operation.APPEND else _without(before, named)
                altered[name] = ",".join(after)
        return altered

    return alter


def _elements(text: str) -> dict[str, None]:
    """Each once, in their order."""
    return dict.fromkeys(element for part in text.split(",") if (element := part.strip()))


def _without(elements: dict[str, None], gone: dict[str, None]) -> dict[str, None]:
    return {element: None for element in elements if element not in gone}
