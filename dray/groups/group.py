"""A group as a value: what its record holds, what members ask, and what they are told. Pure.

A group is `None` (there is none), a `ClassicGroup`, a `ConsumerGroup`, or `Dying`. The values never change: a
state machine (`classic`, `consumer`) takes one and a request and returns an `Outcome` with the next one. The
same object comes back where nothing changed, and then nothing is written.

**Who times a member.** `heard_by` names the one broker process that times the member's session. Everybody
else leaves that session alone for as long as that process is registered.

**What never goes back**: `ClassicGroup.generation` and `ConsumerGroup.epoch`, also where one becomes the
other. Both are the group's *age*.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar
from uuid import UUID

from dray.errors import GroupError

A = TypeVar("A")

# Topic id to partitions. Never with an empty set.
Assignment: TypeAlias = Mapping[UUID, frozenset[int]]

NOTHING: Mapping[Any, Any] = MappingProxyType({})


class Process(NamedTuple):
    """A broker for as long as one registration of it lasts. Registered again, it is another."""

    node_id: int
    registration: int  # the version of its record


class GroupState(enum.Enum):
    """The names that Kafka's tools show."""

    EMPTY = "Empty"
    PREPARING = "PreparingRebalance"
    COMPLETING = "CompletingRebalance"
    STABLE = "Stable"
    ASSIGNING = "Assigning"
    RECONCILING = "Reconciling"
    DEAD = "Dead"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassicMember:
    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocols: tuple[tuple[str, bytes], ...]  # names and metadata, the preferred first
    heard_by: Process
    assignment: bytes = b""
    is_joining: bool = False  # it has joined the rebalance that is under way, and waits for its end
    is_synced: bool = False  # it has asked for its assignment of this generation
    is_new: bool = False  # it waits for its first rebalance to end: nobody told it yet that it is a member


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingMember:
    """An id that was given out and with which nobody has joined yet."""

    session_timeout_ms: int
    heard_by: Process


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassicGroup:
    state: GroupState = GroupState.EMPTY
    state_since_ms: int = 0  # wall clock; only for the retention of offsets
    generation: int = 0
    protocol_type: str | None = None  # kept when the last member leaves, as Kafka does
    protocol: str | None = None
    leader: str | None = None
    members: Mapping[str, ClassicMember] = field(default_factory=lambda: NOTHING)  # as they came
    pending: Mapping[str, PendingMember] = field(default_factory=lambda: NOTHING)
    phase: int = 0  # grows whenever a timer begins that must not end by an older one
    timeout_ms: int = 0  # of that timer; fixed when it began, whatever members come and go meanwhile
    # In the first rebalance after it was empty: how long to wait for more members before it ends, and how
    # much longer that may be drawn out by members that come. None in any other.
    initial_delay_ms: int | None = None
    initial_remaining_ms: int = 0
    has_newcomers: bool = False  # since the delay began

    @property
    def age(self) -> int:
        return self.generation


class MemberState(enum.Enum):
    STABLE = "stable"
    UNREVOKED = "unrevoked"  # it was told to give up partitions and has not said that it did
    UNRELEASED = "unreleased"  # it waits for partitions that others have not given up


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerMember:
    member_id: str
    instance_id: str | None
    rack_id: str | None
    client_id: str
    client_host: str
    rebalance_timeout_ms: int
    topics: frozenset[str]  # by name
    regex: str | None
    assignor: str | None
    heard_by: Process
    epoch: int
    previous_epoch: int = -1
    state: MemberState = MemberState.STABLE
    assigned: Assignment = field(default_factory=lambda: NOTHING)
    revoking: Assignment = field(default_factory=lambda: NOTHING)
    revoking_for: int = 0  # the target's epoch that `revoking` was taken for; 0 where nothing is


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerGroup:
    epoch: int = 0
    state_since_ms: int = 0  # wall clock, of becoming empty; only for the retention of offsets
    target_epoch: int = 0
    target: Mapping[str, Assignment] = field(default_factory=lambda: NOTHING)
    members: Mapping[str, ConsumerMember] = field(default_factory=lambda: NOTHING)
    # What the subscribed topics were like when the target was made; a digest, b"" of none.
    topics_digest: bytes = b""
    # Of all members together, and no part of the record. A heartbeat that changes nothing goes by these
    # and so does not look at every member.
    topic_names: frozenset[str] = field(init=False, repr=False, compare=False)
    regexes: frozenset[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        members = self.members.values()
        regexes = frozenset(member.regex for member in members if member.regex is not None)
        object.__setattr__(self, "topic_names", frozenset().union(*{member.topics for member in members}))
        object.__setattr__(self, "regexes", regexes)

    @property
    def age(self) -> int:
        return self.epoch


@dataclass(frozen=True, slots=True)
class Dying:
    """Deleted. Whoever meets it removes its offsets, then its record."""


Group: TypeAlias = ClassicGroup | ConsumerGroup | Dying


@dataclass(frozen=True, slots=True)
class Outcome(Generic[A]):
    """What a request did. An `answer` of None: not yet, to be asked for again when the group has changed."""

    group: Group | None
    answer: A | GroupError | None


class TimerKind(enum.Enum):
    INITIAL_DELAY = "initial delay"
    JOIN = "join"
    SYNC = "sync"
    REVOKE = "revoke"


class Timer(NamedTuple):
    """To be fired when the group has wanted this very timer for `after_ms`, by whoever holds its timers."""

    kind: TimerKind
    phase: int
    member_id: str  # "" where it is the group's
    after_ms: int


class MemberSession(NamedTuple):
    """For whoever hears a member: expel it after this long without a word."""

    member_id: str
    heard_by: Process
    timeout_ms: int


# What members ask, and what they are told. `heard_by` is the broker that was asked.


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    member_id: str  # "" of a newcomer
    new_member_id: str  # for a newcomer that gets one: the same in every attempt
    instance_id: str | None
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocol_type: str
    protocols: tuple[tuple[str, bytes], ...]
    heard_by: Process
    needs_known_id: bool  # JoinGroup 4 and above: a newcomer is told its id first
    can_skip_assignment: bool  # JoinGroup 9


class JoinedMember(NamedTuple):
    member_id: str
    instance_id: str | None
    metadata: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    member_id: str
    generation: int
    protocol_type: str | None
    protocol: str | None
    leader: str
    members: tuple[JoinedMember, ...]  # for the leader only
    skip_assignment: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sync:
    member_id: str
    instance_id: str | None
    generation: int
    protocol_type: str | None  # None before SyncGroup 5
    protocol: str | None
    assignments: Mapping[str, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Synced:
    protocol_type: str | None
    protocol: str | None
    assignment: bytes


class Leaving(NamedTuple):
    member_id: str
    instance_id: str | None


class Left(NamedTuple):
    member_id: str
    instance_id: str | None
    error: GroupError | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """ConsumerGroupHeartbeat. None is "as before", as in the protocol."""

    member_id: str
    epoch: int
    instance_id: str | None
    rack_id: str | None
    rebalance_timeout_ms: int  # -1: as before
    topics: frozenset[str] | None
    regex: str | None
    assignor: str | None
    owned: Assignment | None
    client_id: str
    client_host: str
    heard_by: Process
    is_repeat: bool = False  # it may have been applied before, and nobody was told what came of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Beaten:
    member_id: str | None
    epoch: int
    assignment: Assignment | None  # None: as before


class TopicShape(NamedTuple):
    topic_id: UUID
    partitions: int


class Topics(Protocol):
    """The topics that exist at one moment."""

    def get(self, name: str) -> TopicShape | None: ...

    def name_of(self, topic_id: UUID) -> str | None: ...

    def matching(self, regex: str) -> frozenset[str]:
        """Their names that match as a whole. The expression was checked before."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLimits:
    """The settings that the state machines go by; names and defaults are Kafka's."""

    min_session_timeout_ms: int = 6_000
    max_session_timeout_ms: int = 1_800_000
    initial_rebalance_delay_ms: int = 3_000
    max_size: int = 2**31 - 1
    consumer_session_timeout_ms: int = 45_000
    consumer_max_size: int = 2**31 - 1
    assignors: tuple[str, ...] = ("uniform", "range")
