"""The expressions by which members subscribe to topics: RE2, as in Kafka.

RE2 takes time linear in the name that it looks at, whatever the expression. What an expression may cost in
memory is bounded here.
"""

from __future__ import annotations

from collections.abc import Iterable

import re2  # type: ignore[import-untyped]  # it ships no types

from dray.errors import InvalidRegex

# Every member's record holds its expression, and a group's record is one value in the store. This is enough
# for some hundred names by way of alternatives.
MAX_CHARS = 8_192
# For the program and what is remembered while matching. The module remembers 128 expressions.
MAX_BYTES = 2**20

_OPTIONS = re2.Options()
_OPTIONS.max_mem = MAX_BYTES
_OPTIONS.log_errors = False
_OPTIONS.never_capture = True


def check(pattern: str) -> None:
    """Raises `InvalidRegex`."""
    if len(pattern) > MAX_CHARS:
        raise InvalidRegex(f"the expression has {len(pattern)} characters, and {MAX_CHARS} are allowed")
    _compile(pattern)


def matching(pattern: str, names: Iterable[str]) -> frozenset[str]:
    """Those that match as a whole. Raises `InvalidRegex`."""
    fullmatch = _compile(pattern).fullmatch
    return frozenset(name for name in names if fullmatch(name) is not None)


def _compile(pattern: str) -> re2._Regexp:
    try:
        return re2.compile(pattern, _OPTIONS)
    except (re2.error, UnicodeError) as error:
        problem = error.args[0].decode(errors="replace") if isinstance(error, re2.error) else "it is no text"
        raise InvalidRegex(f"{pattern[:200]!r} is no expression of RE2: {problem[:200]}") from None
