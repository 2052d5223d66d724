"""What the store holds for a group: its record's bytes and its keys. Pure.

| key, in the group's domain | what it is |
|---|---|
| `groups/<group>` | the group; its versions decide all that happens to it |
| `offsets/<group>/<topic>:<partition>` | one committed offset; `offsets` has it |

A record is a byte that says how the rest is packed, then the message `Group` of `group.proto`. Members of one
group say nearly the same of themselves, so a large record shrinks to a tenth.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar
from uuid import UUID

from google.protobuf.message import DecodeError

from dray.errors import CorruptStore, IncompatibleStore, InvalidGroupId, TooLarge
from dray.groups import group_pb2 as pb
from dray.groups.group import (
    Assignment,
    ClassicGroup,
    ClassicMember,
    ConsumerGroup,
    ConsumerMember,
    Dying,
    Group,
    GroupState,
    MemberState,
    PendingMember,
    Process,
)
from dray.metadata.keys import escape, unescape

GROUPS = "groups"
FORMAT = 1
# Leaves room for a topic and a partition behind it in the key of an offset.
MAX_SEGMENT_BYTES = 3_000
# What no name is escaped to.
EMPTY_SEGMENT = "%"
PLAIN, ZLIB = b"\0", b"\1"
# Below this, packing costs more time than the bytes it saves.
PACK_FROM_BYTES = 2_048
# Unpacked, and about what the largest of the stores takes packed: zeros shrink to a thousandth, and every
# broker that has to do with the group would hold all of them.
MAX_RECORD_BYTES = 16 * 2**20

_CLASSIC_STATES = {
    GroupState.EMPTY: pb.Classic.EMPTY,
    GroupState.PREPARING: pb.Classic.PREPARING_REBALANCE,
    GroupState.COMPLETING: pb.Classic.COMPLETING_REBALANCE,
    GroupState.STABLE: pb.Classic.STABLE,
}
_MEMBER_STATES = {
    MemberState.STABLE: pb.ConsumerMember.STABLE,
    MemberState.UNREVOKED: pb.ConsumerMember.UNREVOKED,
    MemberState.UNRELEASED: pb.ConsumerMember.UNRELEASED,
}
_CLASSIC_STATE_OF = {number: state for state, number in _CLASSIC_STATES.items()}
_MEMBER_STATE_OF = {number: state for state, number in _MEMBER_STATES.items()}

T = TypeVar("T")


def check_group_id(group_id: str) -> None:
    """Raises `InvalidGroupId` for one that makes too long a key."""
    try:
        size = len(segment_of(group_id))
    except UnicodeEncodeError:
        raise InvalidGroupId("the group id is not valid unicode") from None
    if size > MAX_SEGMENT_BYTES:
        raise InvalidGroupId(f"the group id takes {size} bytes when escaped; {MAX_SEGMENT_BYTES} are allowed")


def segment_of(group_id: str) -> str:
    """The group's name in keys. The empty one can have offsets, but no members."""
    return escape(group_id) or EMPTY_SEGMENT


def group_key(group_id: str) -> str:
    return f"{GROUPS}/{segment_of(group_id)}"


def group_of_key(key: str) -> str | None:
    """The group whose record this is; None of any other key."""
    directory, _, segment = key.rpartition("/")
    if directory != GROUPS:
        return None
    return "" if segment == EMPTY_SEGMENT else unescape(segment)


def encode(group_id: str, group: Group) -> bytes:
    """Raises `TooLarge`, whatever the store takes."""
    message = pb.Group(format=FORMAT, group_id=group_id)
    match group:
        case ClassicGroup():
            _write_classic(message.classic, group)
        case ConsumerGroup():
            _write_consumer(message.consumer, group)
        case Dying():
            message.dying.SetInParent()
    size = message.ByteSize()
    if size >= MAX_RECORD_BYTES:
        raise TooLarge("bytes in the record of a group", size, MAX_RECORD_BYTES)
    body = message.SerializeToString()
    return PLAIN + body if len(body) < PACK_FROM_BYTES else ZLIB + zlib.compress(body, 1)


def decode(key: str, value: bytes) -> Group:
    """Raises `CorruptStore`, and `IncompatibleStore` where a newer Dray wrote it."""
    try:
        message = pb.Group.FromString(_unpacked(value))
        if message.format > FORMAT:
            raise IncompatibleStore(f"{key} has format {message.format}; this Dray reads up to {FORMAT}")
        if message.format < 1 or group_key(message.group_id) != key:
            raise ValueError("the record of another group")
        match message.WhichOneof("kind"):
            case "classic":
                return _read_classic(message.classic)
            case "consumer":
                return _read_consumer(message.consumer)
            case "dying":
                return Dying()
            case _:
                raise ValueError("a group of no kind")
    except (ValueError, LookupError, DecodeError, zlib.error) as error:
        raise CorruptStore(f"{key} is no record of a group: {error!r}: {value[:200]!r}") from None


def _unpacked(value: bytes) -> bytes:
    packing, body = value[:1], value[1:]
    if packing == PLAIN:
        return body
    if packing != ZLIB:
        raise ValueError(f"packed in a way {packing!r} that nobody knows")
    stream = zlib.decompressobj()
    unpacked = stream.decompress(body, MAX_RECORD_BYTES)
    if not stream.eof or stream.unused_data:
        raise ValueError("cut short, or too large")
    return unpacked


class _Places(Generic[T]):
    """What many refer to is written once, and referred to by its place."""

    def __init__(self) -> None:
        self.of: dict[T, int] = {}

    def place(self, thing: T) -> int:
        return self.of.setdefault(thing, len(self.of))


def _write_classic(message: pb.Classic, group: ClassicGroup) -> None:
    processes = _Places[Process]()
    message.state = _CLASSIC_STATES[group.state]
    message.state_since_ms = group.state_since_ms
    message.generation = group.generation
    if group.protocol_type is not None:
        message.protocol_type = group.protocol_type
    if group.protocol is not None:
        message.protocol = group.protocol
    if group.leader is not None:
        message.leader = group.leader
    for member in group.members.values():
        written = message.members.add(
            member_id=member.member_id,
            instance_id=member.instance_id,
            client_id=member.client_id,
            client_host=member.client_host,
            session_timeout_ms=member.session_timeout_ms,
            rebalance_timeout_ms=member.rebalance_timeout_ms,
            heard_by=processes.place(member.heard_by),
            assignment=member.assignment,
            is_joining=member.is_joining,
            is_synced=member.is_synced,
            is_new=member.is_new,
        )
        for name, metadata in member.protocols:
            written.protocols.add(name=name, metadata=metadata)
    for member_id, pending in group.pending.items():
        message.pending.add(
            member_id=member_id,
            session_timeout_ms=pending.session_timeout_ms,
            heard_by=processes.place(pending.heard_by),
        )
    message.phase = group.phase
    message.timeout_ms = group.timeout_ms
    if group.initial_delay_ms is not None:
        message.initial_delay_ms = group.initial_delay_ms
    message.initial_remaining_ms = group.initial_remaining_ms
    message.has_newcomers = group.has_newcomers
    for process in processes.of:
        message.processes.add(node_id=process.node_id, registration=process.registration)


def _read_classic(message: pb.Classic) -> ClassicGroup:
    processes = _read_processes(message.processes)
    members = {
        member.member_id: ClassicMember(
            member_id=member.member_id,
            instance_id=member.instance_id if member.HasField("instance_id") else None,
            client_id=member.client_id,
            client_host=member.client_host,
            session_timeout_ms=member.session_timeout_ms,
            rebalance_timeout_ms=member.rebalance_timeout_ms,
            protocols=tuple((protocol.name, protocol.metadata) for protocol in member.protocols),
            heard_by=processes[member.heard_by],
            assignment=member.assignment,
            is_joining=member.is_joining,
            is_synced=member.is_synced,
            is_new=member.is_new,
        )
        for member in message.members
    }
    pending = {
        each.member_id: PendingMember(
            session_timeout_ms=each.session_timeout_ms, heard_by=processes[each.heard_by]
        )
        for each in message.pending
    }
    return ClassicGroup(
        state=_CLASSIC_STATE_OF[message.state],
        state_since_ms=message.state_since_ms,
        generation=message.generation,
        protocol_type=message.protocol_type if message.HasField("protocol_type") else None,
        protocol=message.protocol if message.HasField("protocol") else None,
        leader=message.leader if message.HasField("leader") else None,
        members=members,
        pending=pending,
        phase=message.phase,
        timeout_ms=message.timeout_ms,
        initial_delay_ms=message.initial_delay_ms if message.HasField("initial_delay_ms") else None,
        initial_remaining_ms=message.initial_remaining_ms,
        has_newcomers=message.has_newcomers,
    )


def _write_consumer(message: pb.Consumer, group: ConsumerGroup) -> None:
    processes, topics = _Places[Process](), _Places[UUID]()
    message.epoch = group.epoch
    message.state_since_ms = group.state_since_ms
    message.target_epoch = group.target_epoch
    for member in group.members.values():
        written = message.members.add(
            member_id=member.member_id,
            instance_id=member.instance_id,
            rack_id=member.rack_id,
            client_id=member.client_id,
            client_host=member.client_host,
            rebalance_timeout_ms=member.rebalance_timeout_ms,
            topics=sorted(member.topics),
            regex=member.regex,
            assignor=member.assignor,
            heard_by=processes.place(member.heard_by),
            epoch=member.epoch,
            previous_epoch=member.previous_epoch,
            state=_MEMBER_STATES[member.state],
            revoking_for=member.revoking_for,
        )
        target = group.target.get(member.member_id, {})
        for field, assignment in (
            (written.assigned, member.assigned),
            (written.revoking, member.revoking),
            (written.target, target),
        ):
            for topic_id in sorted(assignment):
                field.add(topic=topics.place(topic_id), partitions=sorted(assignment[topic_id]))
    message.topics_digest = group.topics_digest
    message.topic_ids.extend(topic_id.bytes for topic_id in topics.of)
    for process in processes.of:
        message.processes.add(node_id=process.node_id, registration=process.registration)


def _read_consumer(message: pb.Consumer) -> ConsumerGroup:
    processes = _read_processes(message.processes)
    topic_ids = [UUID(bytes=topic_id) for topic_id in message.topic_ids]
    members: dict[str, ConsumerMember] = {}
    target: dict[str, Assignment] = {}
    for member in message.members:
        members[member.member_id] = ConsumerMember(
            member_id=member.member_id,
            instance_id=member.instance_id if member.HasField("instance_id") else None,
            rack_id=member.rack_id if member.HasField("rack_id") else None,
            client_id=member.client_id,
            client_host=member.client_host,
            rebalance_timeout_ms=member.rebalance_timeout_ms,
            topics=frozenset(member.topics),
            regex=member.regex if member.HasField("regex") else None,
            assignor=member.assignor if member.HasField("assignor") else None,
            heard_by=processes[member.heard_by],
            epoch=member.epoch,
            previous_epoch=member.previous_epoch,
            state=_MEMBER_STATE_OF[member.state],
            assigned=_read_assignment(member.assigned, topic_ids),
            revoking=_read_assignment(member.revoking, topic_ids),
            revoking_for=member.revoking_for,
        )
        assigned = _read_assignment(member.target, topic_ids)
        if assigned:
            target[member.member_id] = assigned
    return ConsumerGroup(
        epoch=message.epoch,
        state_since_ms=message.state_since_ms,
        target_epoch=message.target_epoch,
        target=target,
        members=members,
        topics_digest=message.topics_digest,
    )


def _read_assignment(
    written: Iterable[pb.Partitions], topic_ids: list[UUID]
) -> Mapping[UUID, frozenset[int]]:
    return {topic_ids[each.topic]: frozenset(each.partitions) for each in written}


def _read_processes(written: Iterable[pb.Process]) -> list[Process]:
    return [Process(each.node_id, each.registration) for each in written]
