"""The metadata contract: what every store promises, and no more.

Three stores keep it natively (`sqlite`, `etcd`, `oxia`), and `memory` for unit tests; one suite,
`tests/conformance/`, holds them to it. Kafka's meaning is built once, above this.

**Domains.** Every key and every sequence lives in one MetaDomain, a small integer. What one call
touches is in one domain; the same key in two domains is two records. A domain is the unit of
atomicity, order and watching.

**Keys** are paths: one or more non-empty segments joined by `/` (`keys.py` escapes user-chosen
names). A scan covers the direct children of one directory, ordered by the UTF-8 bytes of their
name: the one order that all stores share, because Oxia sorts by depth first.

**Sequences** are append-only lists whose positions the *store* assigns. An entry's position is its
end: `(end_records, end_bytes)`, both cumulative from 0. Sequences and keys are separate name spaces;
an entry is addressed by its position, never by a raw key.

**Versions** are opaque integers. A record or entry gets a new one with every write, and a version is
never used twice for the same key, also not after a delete.

**What may be relied on**
- A write is linearizable and decides by version or position.
- All that one `append` writes becomes visible at one moment, in scans, sequence reads and watches.
- A read may be stale for a moment (a paused former Oxia leader answers with old values). Decide
  nothing on a read alone; `barrier` makes the reads after it at least as new as itself.
- One scan, and one `entries` call, is a snapshot. Two calls are not.

**How a call ends.** Within the store's call timeout, in a result or in one of the errors of
`dray.errors`; it never hangs. Reads are repeated inside that time where the store is shaky. A write
is sent at most once: `Unavailable` means it had no effect and will have none, `OutcomeUnknown` that
it may have been applied or may still be applied later. A caller resolves an unknown append by its
witness: a record that the append puts expecting ABSENT. Put another value there, expecting ABSENT:
if that wins, the append is void (on stores where `conditions_abort`, it left nothing and never
will); if it conflicts, the append happened.

**Cancelling.** Any call may be cancelled. A cancelled read has no effect; a cancelled write is an
unknown outcome.

Stores are used from the event loop that opened them, and never block it. Values are taken as they
are and not copied: do not change a buffer that was passed in.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from dray.errors import InvalidRequest, TooLarge

# 20 decimal digits are the key width of a position; stay within a signed 64-bit integer as Kafka does.
MAX_POSITION = 2**63 - 1
# What every store numbers its writes with.
MAX_VERSION = 2**63 - 1
# A domain is a u32 in the header of a WAL object.
MAX_DOMAIN = 2**32 - 1
# One entry is one chunk of one WAL object: far below this. Bounds what a bug can do to a sequence.
MAX_ENTRY_RECORDS = 2**31 - 1
MAX_ENTRY_BYTES = 2**40
# Room for a percent-escaped Kafka name (at most 3 × 249) in a path, with space to spare.
MAX_KEY_BYTES = 4096
# What Oxia accepts as a session timeout; kept everywhere so that a setting works on every store.
MIN_SESSION_MS = 2_000
MAX_SESSION_MS = 300_000


class Expect(enum.Enum):
    """What a write wants to find, where it does not name a version."""

    ANY = "any"
    ABSENT = "absent"


Expectation: TypeAlias = Expect | int  # an int is "exactly this version"


@dataclass(frozen=True, slots=True)
class Record:
    key: str
    value: bytes
    version: int


class Position(NamedTuple):
    """Where an entry ends: all records and bytes of the sequence up to and including it."""

    end_records: int
    end_bytes: int


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry as the store holds it. What it covers is said by its value, not by its neighbours."""

    position: Position
    value: bytes
    version: int


@dataclass(frozen=True, slots=True)
class NewEntry:
    """An entry to append: `records` > 0 and `size_bytes` >= 0 move the sequence's end.

    `expected_start` is where the writer believes this entry will start. Where `conditions_abort`, a
    wrong one fails the whole append; elsewhere the entry lands all the same and the writer sees from
    the assigned position that it did not start there.
    """

    sequence: str
    records: int
    size_bytes: int
    value: bytes
    expected_start: int | None = None


@dataclass(frozen=True, slots=True)
class Put:
    key: str
    value: bytes
    expect: Expectation = Expect.ANY


@dataclass(frozen=True, slots=True)
class Delete:
    key: str
    expect: Expectation = Expect.ANY


@dataclass(frozen=True, slots=True)
class Assigned:
    """Where the store put an entry, and the version it has there."""

    position: Position
    version: int


@dataclass(frozen=True, slots=True)
class AppendResult:
    """What became of each part, in the order given.

    `puts`: the new version, or None where the expectation failed. `deletes`: whether the expectation
    held (deleting what is absent with ANY holds). None and False occur only where not
    `conditions_abort`.
    """

    entries: tuple[Assigned, ...]
    puts: tuple[int | None, ...]
    deletes: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class KeyChange:
    """A key was written (its new version) or removed (None)."""

    key: str
    version: int | None


@dataclass(frozen=True, slots=True)
class EntryChange:
    """An entry of a sequence was appended or replaced (its new version) or removed (None)."""

    sequence: str
    position: Position
    version: int | None


Change: TypeAlias = KeyChange | EntryChange


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes in the order they took effect. What one write did is never spread over two of these.

    Within one write each key or entry appears once, in no particular order.
    """

    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class Gap:
    """Changes were missed. Read again what you follow; what comes after this is complete again."""


WatchEvent: TypeAlias = Changes | Gap


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that one append may hold. Writers split by it; above it, `TooLarge` and nothing sent."""

    max_operations: int
    max_bytes: int
    # etcd also writes a tail record per entry, so one entry costs two of its operations.
    operations_per_entry: int = 1

    # What a request carries for an operation besides its names and value: lengths, tags, positions.
    OPERATION_OVERHEAD_BYTES = 96

    def operations(self, entries: int, puts: int, deletes: int) -> int:
        return entries * self.operations_per_entry + puts + deletes

    def size(self, entries: Sequence[NewEntry], puts: Sequence[Put], deletes: Sequence[Delete]) -> int:
        names = sum(len(e.sequence.encode()) for e in entries) * self.operations_per_entry
        names += sum(len(p.key.encode()) for p in puts) + sum(len(d.key.encode()) for d in deletes)
        values = sum(len(e.value) for e in entries) + sum(len(p.value) for p in puts)
        return (
            names
            + values
            + self.OPERATION_OVERHEAD_BYTES * self.operations(len(entries), len(puts), len(deletes))
        )

    def check(self, entries: Sequence[NewEntry], puts: Sequence[Put], deletes: Sequence[Delete]) -> None:
        """Raise `TooLarge` unless all of this fits into one append."""
        operations = self.operations(len(entries), len(puts), len(deletes))
        if operations > self.max_operations:
            raise TooLarge("operations in one request", operations, self.max_operations)
        size = self.size(entries, puts, deletes)
        if size > self.max_bytes:
            raise TooLarge("bytes in one request", size, self.max_bytes)


class Watch(Protocol):
    """A change feed. Ends (StopAsyncIteration) when the store is closed.

    The buffer is bounded: a reader that falls behind gets a `Gap` for what was dropped. Cuts of the
    connection are mended inside, seamlessly where the store kept the changes, with a `Gap` where not.
    """

    def __aiter__(self) -> AsyncIterator[WatchEvent]: ...

    async def __anext__(self) -> WatchEvent: ...


class Session(Protocol):
    """Keeps ephemeral keys alive for as long as this process renews it.

    A lost session stays lost: its keys are gone or will be within its time-to-live, and its owner
    must stop acting as though it held them. The owner may learn later than others that the keys are
    gone, so nothing that decides correctness may rest on one.
    """

    @property
    def lost(self) -> bool: ...

    async def wait_lost(self) -> None:
        """Return when the session is lost or closed."""
        ...

    async def put_ephemeral(
        self, domain: int, key: str, value: bytes, expect: Expectation = Expect.ANY
    ) -> int:
        """Like `MetadataStore.put`, but the key dies with the session. Raises `SessionLost`.

        A later plain `put` makes the key permanent; a `put_ephemeral` of another session takes it over.
        """
        ...

    async def close(self) -> None:
        """Remove the session's keys now, as far as the store can be reached. May be called twice."""
        ...


class MetadataStore(Protocol):
    """See the module's text for ordering, atomicity, errors and cancelling."""

    @property
    def limits(self) -> Limits: ...

    @property
    def conditions_abort(self) -> bool:
        """Whether a failed expectation or expected start fails the whole append (not so on Oxia).

        Callers are written for False: there each put and delete passes or fails alone, and the entries
        land whatever they expected.
        """
        ...

    async def get(self, domain: int, key: str) -> Record | None: ...

    async def scan(
        self, domain: int, directory: str, *, start: str = "", end: str | None = None, limit: int
    ) -> list[Record]:
        """At most `limit` direct children of `directory` ("" is the top), as one snapshot.

        `start` and `end` bound the last segment, half-open; `end=None` is to the end. Fewer than
        `limit` records means that there were no more.
        """
        ...

    async def put(self, domain: int, key: str, value: bytes, expect: Expectation = Expect.ANY) -> int:
        """Write one record and return its new version. Raises `VersionConflict`."""
        ...

    async def delete(self, domain: int, key: str, expect: Expectation = Expect.ANY) -> bool:
        """Remove one record; True if there was one. Raises `VersionConflict`.

        With a version an absent key conflicts; with ANY or ABSENT it does not.
        """
        ...

    async def append(
        self,
        domain: int,
        entries: Sequence[NewEntry],
        puts: Sequence[Put] = (),
        deletes: Sequence[Delete] = (),
    ) -> AppendResult:
        """Append entries, write and remove records, in one step. This is offset allocation.

        The store gives each entry the next position of its sequence, in the order of `entries`: no
        gap, no overlap, the same for every reader. Without expected starts an append never conflicts
        with another. A key may be named once. `entries` may be empty: then this is a batch of writes.
        Raises `VersionConflict` or `StartConflict` only where `conditions_abort`, and `TooLarge` above
        `limits`. Never sent twice, by the store or by anything below it.
        """
        ...

    async def ceiling(self, domain: int, sequence: str, n: int) -> Entry | None:
        """The first entry with end_records >= n. Offset x is in the entry at `ceiling(x + 1)`."""
        ...

    async def floor(self, domain: int, sequence: str, n: int) -> Entry | None:
        """The last entry with end_records <= n."""
        ...

    async def entries(self, domain: int, sequence: str, start: int, limit: int) -> list[Entry]:
        """At most `limit` entries in order, beginning with `ceiling(start)`, as one snapshot."""
        ...

    async def tail(self, domain: int, sequence: str) -> Entry | None:
        """The last entry. Its position is where the next append starts."""
        ...

    async def swap(
        self,
        domain: int,
        sequence: str,
        at: Position,
        version: int,
        value: bytes,
        deletes: Sequence[Position],
    ) -> int:
        """Replace the entry at `at` if it is still at `version`; only then remove the entries at `deletes`.

        All of `deletes` lie below `at`, so the tail of a sequence is never removed; those already gone
        are ignored. Returns the new version at `at`. Raises `VersionConflict`, and then nothing changed.
        One step where `conditions_abort` and it fits into `limits`; else the replacement comes first,
        so a reader that lets a later entry supersede those it covers gets the same answer throughout.
        After `OutcomeUnknown` the replacement may be there with some of `deletes` left: swap again at
        the version found.
        """
        ...

    async def barrier(self, domain: int) -> None:
        """After this, reads of the domain see at least all that was acknowledged before the call."""
        ...

    def watch(self, domain: int, prefix: str | None = None) -> AbstractAsyncContextManager[Watch]:
        """Follow one domain: its keys and sequences, or with `prefix` only keys beginning with it.

        Every change made after the context was entered is delivered, or a `Gap` is. Earlier changes
        may be delivered too. Subscribe first, then read, then follow.
        """
        ...

    def session(self, ttl_ms: int) -> AbstractAsyncContextManager[Session]:
        """A session that ends by itself when not renewed for `ttl_ms`; closed on leaving the context."""
        ...

    async def close(self) -> None:
        """Give up connections and sessions. Watches end. May be called twice."""
        ...


def check_key(key: str, what: str = "key") -> None:
    """Raise `InvalidRequest` unless `key` is a path that every store keeps as it is."""
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(f"{what} {key!r} is not valid unicode") from None
    if not 0 < size <= MAX_KEY_BYTES:
        raise InvalidRequest(f"{what} {key[:64]!r}… has {size} bytes; it must have 1 to {MAX_KEY_BYTES}")
    if "\0" in key or any(segment == "" for segment in key.split("/")):
        raise InvalidRequest(f"{what} {key!r} has an empty segment or a NUL; escape names with keys.escape")


def check_record(domain: int, key: str, expect: Expectation = Expect.ANY) -> None:
    _check_domain(domain)
    check_key(key)
    _check_expectation(expect)


def check_scan(domain: int, directory: str, start: str, end: str | None, limit: int) -> None:
    """Raise `InvalidRequest` for a scan that would leave its directory or ask for nothing."""
    _check_domain(domain)
    if directory:
        check_key(directory, "directory")
    for bound in (start, end):
        if bound:
            check_key(bound.replace("\0", ""), "scan bound")
            if "/" in bound:
                raise InvalidRequest(f"scan bound {bound!r} leaves the directory: it names a last segment")
    if limit < 1:
        raise InvalidRequest(f"a scan of {limit} records; ask for at least 1")


def check_sequence(domain: int, sequence: str, limit: int = 1) -> None:
    _check_domain(domain)
    check_key(sequence, "sequence")
    if limit < 1:
        raise InvalidRequest(f"{limit} entries of sequence {sequence}; ask for at least 1")


def check_append(
    domain: int, entries: Sequence[NewEntry], puts: Sequence[Put], deletes: Sequence[Delete]
) -> None:
    """Raise `InvalidRequest` for what no store may be asked; adapters call this before anything is sent."""
    _check_domain(domain)
    for entry in entries:
        check_key(entry.sequence, "sequence")
        if not 0 < entry.records <= MAX_ENTRY_RECORDS:
            raise InvalidRequest(
                f"sequence {entry.sequence}: an entry needs 1 to {MAX_ENTRY_RECORDS} records"
            )
        if not 0 <= entry.size_bytes <= MAX_ENTRY_BYTES:
            raise InvalidRequest(f"sequence {entry.sequence}: an entry has 0 to {MAX_ENTRY_BYTES} bytes")
    writes: list[Put | Delete] = [*puts, *deletes]
    for write in writes:
        check_key(write.key)
        _check_expectation(write.expect)
    if len({write.key for write in writes}) != len(writes):
        raise InvalidRequest("an append names a key twice; which of the two should win is not defined")


def check_swap(domain: int, sequence: str, at: Position, version: int, deletes: Sequence[Position]) -> None:
    """Raise `InvalidRequest` for a swap that could remove the end of a sequence."""
    check_sequence(domain, sequence)
    _check_expectation(version)
    for position in (at, *deletes):
        if not (0 < position.end_records <= MAX_POSITION and 0 <= position.end_bytes <= MAX_POSITION):
            raise InvalidRequest(f"{position} is no position of an entry")
    for position in deletes:
        if position.end_records >= at.end_records:
            raise InvalidRequest(f"a swap at {at} cannot remove {position}: it must lie below")


def check_watch(domain: int, prefix: str | None) -> None:
    _check_domain(domain)
    if prefix:
        check_key(prefix.removesuffix("/"), "prefix")


def check_session_ttl(ttl_ms: int) -> None:
    if not MIN_SESSION_MS <= ttl_ms <= MAX_SESSION_MS:
        raise InvalidRequest(f"a session lives {MIN_SESSION_MS} to {MAX_SESSION_MS} ms, not {ttl_ms}")


def _check_domain(domain: int) -> None:
    if not 0 <= domain <= MAX_DOMAIN:
        raise InvalidRequest(f"domain {domain}; domains are numbered from 0 to {MAX_DOMAIN}")


def _check_expectation(expect: Expectation) -> None:
    if isinstance(expect, int) and not 0 <= expect <= MAX_VERSION:
        raise InvalidRequest(f"{expect} cannot be a version that a store gave out")
