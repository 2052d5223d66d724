"""The object store contract: what every store promises, and no more.

Two stores keep it (`file`, `s3`), and `memory` for unit tests; one suite, `tests/conformance/objectstore/`,
holds them to it.

**Keys** are relative paths: non-empty segments joined by `/`, in unicode, of at most 1024 bytes in UTF-8, the
store's own prefix included. `.` and `..`, NUL, segments above 255 bytes and a first segment that begins with
`.dray-` are refused with `InvalidObjectRequest`, before anything is sent. No key may lie below another (`a`
and `a/b`): S3 would keep both, a file system refuses the second with `InvalidObjectRequest`.

**Whole or not at all.** An object appears by one put, whole. Whoever reads while it is overwritten gets the
old or the new bytes, never a mixture, within one request; the requests of one `get_ranges` may see different
versions, so do not overwrite what others read by ranges.

**Durable.** What returned from `put` or `delete` survives the loss of power, and every client sees it.

**Deadline.** Every request to the store ends within the store's `timeout_s`, in a result or an error. A store
repeats by itself what may be repeated (errors of the server, throttling, broken connections), and what
cannot succeed fails at once. Calls that are several requests (a put in parts, `get_ranges`, `delete_many`, a
long list) have that time for each of them.

**Writes may be late.** A put or delete that raised `ObjectStoreUnavailable`, or was cancelled, may have
happened, or may happen a little later; put the same bytes again, or delete again, to be sure. A put that is
repeated may bring back an object that another deleted meanwhile.

**Cancelling** a call ends it at once; a thread that works on it may go on in the background until its next
step or its socket timeout, and what it leaves is whole or nothing.

**Buffers.** The caller must not change `body` after handing it over, not even after a failed or cancelled
call: a thread may still be reading it. What is returned belongs to the caller.

**Errors** are those of `ObjectStoreError`. Besides what each call names, any may raise
`ObjectStoreUnavailable`, `ObjectStoreDenied`, `ObjectStoreMisconfigured` and, after `close`,
`ObjectStoreUnavailable`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from dray.errors import InvalidObjectRequest, ObjectStoreError
from dray.objectstore.health import Health

MAX_KEY_BYTES = 1024  # S3's limit
MAX_SEGMENT_BYTES = 255  # that of Linux file systems
RESERVED = ".dray-"  # what stores keep for themselves beside the objects

# S3 needs tens of milliseconds for a first byte, in which one connection brings about as much as this:
# reading a hole of this size is cheaper than a second request.
MERGE_GAP_BYTES = 256 * 1024
# Merging stops here, so that far-reaching reads still run in parallel.
MERGED_BYTES = 8 * 1024 * 1024

Body: TypeAlias = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    key: str
    size: int
    modified_ms: int  # by the store's clock, and only good to a second


class ObjectStore(Protocol):
    async def put(self, key: str, body: Body, *, if_absent: bool = False) -> None:
        """Create or replace the object.

        With `if_absent` only create: of any number of such puts of one key exactly one returns, and the
        others raise `ObjectExists`. Raises `ObjectStoreFull`.
        """
        ...

    async def get(self, key: str) -> bytes:
        """The whole object. Raises `ObjectNotFound`, `ObjectDamaged`."""
        ...

    async def get_range(self, key: str, start: int, end: int, *, clip: bool = False) -> bytes:
        """Exactly the bytes from `start` to before `end`, at least one.

        With `clip` those of them that the object has, for who does not know its size; still at least one.
        Raises `ObjectNotFound`, `ObjectDamaged`, and `ObjectTooShort` if the object ends before `end`; with
        `clip`, if it ends at `start` or before.
        """
        ...

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """As `get_range` for each, in the order asked for. Near ones are read by one request."""
        ...

    async def head(self, key: str) -> ObjectInfo:
        """Raises `ObjectNotFound`."""
        ...

    async def delete(self, key: str) -> None:
        """Remove the object; it is no error if there is none."""
        ...

    async def delete_many(self, keys: Sequence[str]) -> dict[str, ObjectStoreError]:
        """Remove all of them, in few requests. Returns those that failed, each with its reason."""
        ...

    async def list(self, prefix: str = "", *, after: str = "", limit: int = 1000) -> list[ObjectInfo]:
        """The first `limit` objects whose keys begin with `prefix` and come after `after`.

        In the order of the keys' UTF-8 bytes. To go on, pass the last key as `after`; fewer than `limit`
        means that there are no more. Objects put or deleted meanwhile may or may not be among them.
        """
        ...

    async def check(self) -> None:
        """See that the store can be reached and used, cheaply: what opening it does."""
        ...

    @property
    def health(self) -> Health:
        """Judged by the calls so far, `check` among them."""
        ...

    async def close(self) -> None:
        """Give up connections and threads; calls under way end in an error. May be called twice."""
        ...


def check_key(key: str) -> None:
    """Raise `InvalidObjectRequest` unless `key` is a path that every store keeps as it is."""
    size = len(_encoded(key))
    if not 0 < size <= MAX_KEY_BYTES:
        raise InvalidObjectRequest(f"key {key[:64]!r}… has {size} bytes; it must have 1 to {MAX_KEY_BYTES}")
    if problem := _problem(key):
        raise InvalidObjectRequest(f"key {key!r}: {problem}")


def is_key(key: str) -> bool:
    """Whether `key` can be an object of ours; other programs may keep more beside them."""
    try:
        check_key(key)
    except InvalidObjectRequest:
        return False
    return True


def check_range(start: int, end: int) -> None:
    if not 0 <= start < end:
        raise InvalidObjectRequest(f"bytes {start} to {end}: a range begins at 0 or later and is not empty")


def check_list(prefix: str, after: str, limit: int) -> None:
    for text in (prefix, after):
        if b"\0" in _encoded(text):
            raise InvalidObjectRequest(f"a list cannot begin with {text!r}: no key holds a NUL")
    if limit < 1:
        raise InvalidObjectRequest(f"a list of {limit} objects; ask for at least 1")


def merge_ranges(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The fewest reads that bring all of `ranges`: ascending, near and overlapping ones in one."""
    reads: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if reads:
            first, last = reads[-1]
            near = start <= last + MERGE_GAP_BYTES and end - first <= MERGED_BYTES
            if near or end <= last:
                reads[-1] = first, max(last, end)
                continue
        reads.append((start, end))
    return reads


def cut(
    ranges: Sequence[tuple[int, int]], reads: Sequence[tuple[int, int]], bodies: Sequence[bytes]
) -> list[bytes]:
    """What each of `ranges` asked for, out of the `bodies` that `reads` brought."""
    cuts = []
    for start, end in ranges:
        at = next(i for i, (first, last) in enumerate(reads) if first <= start and end <= last)
        first, last = reads[at]
        whole = (start, end) == (first, last)
        cuts.append(bodies[at] if whole else bodies[at][start - first : end - first])
    return cuts


def _problem(key: str) -> str | None:
    if "\0" in key:
        return "it holds a NUL"
    if key.startswith(RESERVED):
        return f"names that begin with {RESERVED!r} are the store's own"
    for segment in key.split("/"):
        if segment in ("", ".", ".."):
            return "it must be a relative path without empty segments, '.' and '..'"
        if len(segment.encode()) > MAX_SEGMENT_BYTES:
            return f"a segment has more than {MAX_SEGMENT_BYTES} bytes"
    return None


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InvalidObjectRequest(f"{text!r} is not valid unicode") from None
