"""Changing one record by compare-and-put, once, whatever becomes of the answers.

For changes that are made from what is there, such as one config among others: what others change at the same
moment stays. What the change is, and how the record is read and spelled, is for the caller.

**Once.** After an answer was lost, the record tells: at the old version the put may be repeated, since of all
that name this version one counts. At another version with what was put, it was done. At another version with
anything else it may have been done and changed again by somebody; doing it anew could undo what they did
after it, so the caller is told that nobody knows.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from dray.errors import OutcomeUnknown, Unavailable, VersionConflict
from dray.metadata.directory import Found
from dray.metadata.store import Expect, Expectation

# Each attempt was foiled by another broker's change or by a lost answer; so many in a row are an outage.
ATTEMPTS = 10

T = TypeVar("T")


async def amend(
    what: str,
    read: Callable[[], Awaitable[Found[T] | None]],
    decide: Callable[[T | None], T | None],
    put: Callable[[T, Expectation], Awaitable[object]],
    holds: Callable[[T | None, T], bool],
) -> None:
    """Put what `decide` makes of the record that is there; None leaves it as it is.

    `read` is at least as new as its call. `decide` raises to refuse: nothing was changed then. `holds(found,
    put)` says whether a record that was found has what was put. Raises what the store raises, `Unavailable`
    where nothing happened and `OutcomeUnknown` where nobody knows.
    """
    wanted: T | None = None  # what was put, perhaps, in place of version `at`
    at: int | None = None
    for _ in range(ATTEMPTS):
        try:
            found = await read()
            version = None if found is None else found.version
            record = None if found is None else found.value
            if wanted is None:
                decided = decide(record)
                if decided is None:
                    return
            elif version == at:
                decided = wanted
            elif holds(record, wanted):
                return
            else:
                break
            try:
                await put(decided, Expect.ABSENT if version is None else version)
                return
            except VersionConflict:
                pass
            except OutcomeUnknown:
                wanted, at = decided, version
        except Unavailable as error:
            if wanted is None:
                raise
            raise OutcomeUnknown(f"{what}: it may be changed: {error}") from error
    if wanted is None:
        raise Unavailable(f"{what}: others were faster {ATTEMPTS} times in a row")
    raise OutcomeUnknown(f"{what}: it may be changed; nobody knows")
