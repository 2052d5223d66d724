"""What the four operations make of configs; expectations were taken from a Kafka 4.2 broker."""

from __future__ import annotations

import pytest

from dray.altering import Change, Operation, change_some, replace_all
from dray.errors import NotAListConfig

SET, DELETE, APPEND, SUBTRACT = Operation.SET, Operation.DELETE, Operation.APPEND, Operation.SUBTRACT
LISTS = {"cleanup.policy": "delete", "replicas": ""}


def altered(current: dict[str, str], *changes: tuple[str, Operation, str]) -> dict[str, str]:
    return change_some([Change(*change) for change in changes], LISTS)(current)


def test_numbers_are_kafkas() -> None:
    assert [(each.name, each.value) for each in Operation] == [
        ("SET", 0),
        ("DELETE", 1),
        ("APPEND", 2),
        ("SUBTRACT", 3),
    ]


def test_what_is_not_named_stays_unless_all_is_replaced() -> None:
    current = {"a": "1", "b": "2"}
    assert altered(current, ("b", SET, "3"), ("c", SET, "4")) == {"a": "1", "b": "3", "c": "4"}
    assert altered(current, ("b", DELETE, ""), ("never", DELETE, "")) == {"a": "1"}
    assert altered(current) == current
    assert replace_all({"b": "3"})(current) == {"b": "3"}
    assert current == {"a": "1", "b": "2"}


@pytest.mark.parametrize(
    ("current", "operation", "value", "expected"),
    [
        ({}, APPEND, "compact", "delete,compact"),  # from the default
        ({}, SUBTRACT, "delete", ""),
        ({"cleanup.policy": "delete,compact"}, SUBTRACT, "delete", "compact"),
        ({"cleanup.policy": "delete"}, APPEND, "delete", "delete"),
        ({"cleanup.policy": "delete"}, SUBTRACT, "compact", "delete"),
        ({"cleanup.policy": "a"}, APPEND, " b , c,,", "a,b,c"),
        ({"cleanup.policy": "a,b,c"}, SUBTRACT, "c, a", "b"),
        ({"cleanup.policy": ""}, APPEND, "a", "a"),
    ],
)
def test_lists_grow_and_shrink(
    current: dict[str, str], operation: Operation, value: str, expected: str
) -> None:
    assert altered(current, ("cleanup.policy", operation, value)) == {"cleanup.policy": expected}


@pytest.mark.parametrize("operation", [APPEND, SUBTRACT])
@pytest.mark.parametrize("name", ["retention.ms", "no.such.config", "", "\0", "ü" * 20_000])
def test_only_lists_do(name: str, operation: Operation) -> None:
    with pytest.raises(NotAListConfig) as raised:
        altered({}, (name, operation, "1"))
    assert len(str(raised.value)) < 1_000
