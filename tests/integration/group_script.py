"""Scripts of exact requests about groups, and their transcripts: what `golden/groups/` is written in.

A script speaks on named connections, one request at a time on each, so that one may wait for its answer while
others go on. The transcript has the fields that were sent, and all fields of the answers. What differs from
run to run stands in angle brackets: member ids that the broker made are called after their connection, `<a>`,
and topic ids after the topic, `<t>`. Arrays of an answer are sorted: nothing here depends on their order.
Messages are `<message>`, for their words are nobody's promise.

Groups and topics of a script have its name before theirs on the wire, so that scripts share a broker; the
transcript leaves it out. Built on `tests.wire`; shares no code with Dray.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from enum import Enum
from typing import Any, NamedTuple, TypeAlias
from uuid import UUID

from kio.index import load_request_schema
from kio.schema.errors import ErrorCode

from tests import wire

# What is waited for comes within a few seconds; all of it is waited for only by a broker that differs.
LIMIT_S = 20.0
PAUSE_S = 0.02
LONG_MS = 60_000

KEYS = {
    "Metadata": 3,
    "OffsetCommit": 8,
    "OffsetFetch": 9,
    "FindCoordinator": 10,
    "JoinGroup": 11,
    "Heartbeat": 12,
    "LeaveGroup": 13,
    "SyncGroup": 14,
    "DescribeGroups": 15,
    "ListGroups": 16,
    "CreateTopics": 19,
    "DeleteTopics": 20,
    "CreatePartitions": 37,
    "DeleteGroups": 42,
    "OffsetDelete": 47,
    "ConsumerGroupHeartbeat": 68,
    "ConsumerGroupDescribe": 69,
}
_NOT_YET = (
    ErrorCode.coordinator_not_available,
    ErrorCode.coordinator_load_in_progress,
    ErrorCode.not_coordinator,
)
# No topic has it.
_NO_TOPIC = UUID(int=77)


class Stuck(Exception):
    """The broker did not come to what the script waits for."""


class Name(str):
    """Of a group or a topic: the script's name goes before it on the wire, unless it is empty."""


class TopicId(NamedTuple):
    """Of the topic with this name."""

    topic: str


@dataclasses.dataclass(frozen=True)
class Subscription:
    """What a classic consumer sends as metadata, in its version 0.

    Kafka reads it, and some that it cannot read it never answers: so scripts send what clients would.
    """

    topics: tuple[str, ...]

    def encoded(self, prefix: str) -> bytes:
        names = [f"{prefix}{topic}".encode() for topic in self.topics]
        listed = b"".join(struct.pack(">h", len(name)) + name for name in names)
        return struct.pack(">hi", 0, len(names)) + listed + struct.pack(">i", -1)


OF_T = Subscription(("t",))
OF_U = Subscription(("u",))


class Told(int):
    """A number from an answer, shown by a name: for what Dray counts otherwise than Kafka."""

    def __new__(cls, value: int, name: str) -> Told:
        told = super().__new__(cls, value)
        told.name = name
        return told

    name: str


class Ask(NamedTuple):
    """A request. Fields that its version does not have are left out."""

    api: str
    version: int
    fields: dict[str, Any]


class Connection:
    """One connection; the client id is its name. As a member it is who the broker said it is."""

    def __init__(
        self, name: str, script: Script, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.name = name
        self.member_id = ""
        self._script = script
        self._reader = reader
        self._writer = writer

    async def __call__(self, ask: Ask, *, dray: Mapping[str, Any] | None = None, because: str = "") -> Any:
        """The answer. Where Dray's differs on purpose: its fields, by their paths, and the reason."""
        return await (await self.starts(ask))(dray=dray, because=because)

    async def starts(self, ask: Ask) -> Waiting:
        """Send it. The answer is written down when it is asked for."""
        sent = self._script.resolve(ask)
        self._script.asked(self, ask, sent)
        await self.send(ask, sent)
        return Waiting(self, ask)

    async def until(
        self, ask: Ask, *, dray: Mapping[str, Any] | None = None, because: str = "", **expected: Any
    ) -> Any:
        """Ask until the answer has these fields; only the last answer is written down."""
        sent = self._script.resolve(ask)
        self._script.asked(self, ask, sent, ", until it is answered so")

        async def attempt() -> Any:
            await self.send(ask, sent)
            answer = await self.receive(ask)
            fits = all(_plain(_at(answer, path)) == value for path, value in expected.items())
            return answer if fits else None

        answer = await eventually(attempt, f"{ask.api} with {expected}")
        self._script.answered(self, ask, answer, dray or {}, because)
        return answer

    async def send(self, ask: Ask, fields: Mapping[str, Any]) -> None:
        payload = wire.request(KEYS[ask.api], ask.version, fields, client_id=self.name)
        self._writer.write(wire.framed(payload))
        await self._writer.drain()

    async def receive(self, ask: Ask) -> Any:
        try:
            async with asyncio.timeout(LIMIT_S):
                frame = await wire.read_frame(self._reader)
        except TimeoutError:
            raise Stuck(f"{self.name} has no answer to {ask.api} {ask.version}") from None
        if frame is None:
            raise Stuck(f"{self.name} was cut off at {ask.api} {ask.version}")
        return wire.decode(KEYS[ask.api], ask.version, frame)[1]

    def close(self) -> None:
        self._writer.close()

    def answered(self, ask: Ask, answer: Any, dray: Mapping[str, Any], because: str) -> None:
        self._script.answered(self, ask, answer, dray, because)


class Waiting:
    """A request without its answer."""

    def __init__(self, connection: Connection, ask: Ask) -> None:
        self._connection = connection
        self._ask = ask

    async def __call__(self, *, dray: Mapping[str, Any] | None = None, because: str = "") -> Any:
        answer = await self._connection.receive(self._ask)
        self._connection.answered(self._ask, answer, dray or {}, because)
        return answer


class Script:
    """One run of a script against a broker; `of_kafka` if what Dray answers otherwise is to be noted."""

    def __init__(self, name: str, address: tuple[str, int], of_kafka: bool) -> None:
        self._of_kafka = of_kafka
        self._prefix = f"{name}."
        self._address = address
        self._connections: list[Connection] = []
        self._quiet: Connection | None = None
        self._shown: dict[str, str] = {}
        self._shown_bytes: dict[bytes, str] = {}
        self._topic_ids: dict[str, UUID] = {}
        self._topics_shown: dict[UUID, str] = {}
        # Text, or what becomes text when all names are known: a leader is told of a member before that is
        # told its own id.
        self._blocks: list[str | _Block] = []
        self._epoch: Told | None = None

    async def connect(self, *names: str) -> Any:
        """Connections, or the one of a single name."""
        made = []
        for name in names:
            connection = Connection(name, self, *await asyncio.open_connection(*self._address))
            self._connections.append(connection)
            made.append(connection)
        return made if len(made) > 1 else made[0]

    def close(self) -> None:
        for connection in self._connections:
            connection.close()

    def says(self, text: str) -> None:
        self._blocks.append(f"\n# {text}")

    def stuck(self, why: Stuck) -> None:
        self._blocks.append(f"stuck: {why}")

    def transcript(self) -> str:
        blocks = (each if isinstance(each, str) else self._written(each) for each in self._blocks)
        return "\n".join(blocks).strip() + "\n"

    # What scripts need and do not tell of

    async def topic(self, name: str, partitions: int = 1) -> None:
        """Made, and known to who assigns partitions."""
        self.says(f"topic {name} of {partitions} partitions")
        topic = {"name": Name(name), "num_partitions": partitions, "replication_factor": 1}
        (made,) = (await self._quietly("CreateTopics", 7, topics=[topic])).topics
        assert made.error_code is ErrorCode.none, made
        self._topic_ids[name] = made.topic_id
        self._topics_shown[made.topic_id] = f"<{name}>"
        await self._assignable(name, partitions)

    async def grow(self, name: str, partitions: int) -> None:
        self.says(f"topic {name} has {partitions} partitions now")
        topic = {"name": Name(name), "count": partitions, "assignments": None}
        timeout = timedelta(milliseconds=LONG_MS)
        (grown,) = (await self._quietly("CreatePartitions", 3, topics=[topic], timeout=timeout)).results
        assert grown.error_code is ErrorCode.none, grown
        await self._assignable(name, partitions)

    async def drop_topic(self, name: str) -> None:
        self.says(f"topic {name} is deleted")
        topic = {"name": Name(name), "topic_id": None}
        timeout = timedelta(milliseconds=LONG_MS)
        (gone,) = (await self._quietly("DeleteTopics", 6, topics=[topic], timeout=timeout)).responses
        assert gone.error_code is ErrorCode.none, gone

        async def unknown() -> bool:
            topics = [{"name": Name(name), "topic_id": None}]
            answer = await self._quietly("Metadata", 12, topics=topics, allow_auto_topic_creation=False)
            return answer.topics[0].error_code is ErrorCode.unknown_topic_or_partition

        await eventually(unknown, f"{name} is gone")

    async def is_in(self, group: str, state: str, members: int | None = None) -> None:
        """Until the group is in that state, and has that many members.

        Kafka may not tell of a group before its first assignment; `has_joined` does.
        """

        async def there() -> bool:
            answer = await self._quietly("DescribeGroups", 5, groups=[Name(group)])
            found = answer.groups[0]
            return found.group_state == state and members in (None, len(found.members))

        await eventually(there, f"{group} is {state} with {members} members")

    async def has_joined(self, group: str, member: Connection) -> None:
        """Until the group knows the member, whose JoinGroup has no answer yet: of a new group."""

        async def known() -> bool:
            beat = heartbeat(group, member, 0)
            answer = await self._quietly(beat.api, beat.version, **beat.fields)
            return answer.error_code is not ErrorCode.unknown_member_id

        await eventually(known, f"{member.name} has joined {group}")

    async def is_assigned(self, connection: Connection, group: str, member: str) -> int:
        """Until the member has partitions: its epoch, from which the transcript counts epochs on, as `e`.

        It beats on its connection meanwhile, for Kafka gives partitions with the answers.
        """

        async def assigned() -> int:
            (found,) = (await self._quietly("ConsumerGroupDescribe", 1, group_ids=[Name(group)])).groups
            (one,) = (each for each in found.members if each.member_id == member)
            if one.assignment.topic_partitions:
                return int(one.member_epoch)
            beat = consumer(group, member, one.member_epoch)
            await connection.send(beat, self.resolve(beat))
            await connection.receive(beat)
            return 0

        epoch = int(await eventually(assigned, f"{member} is assigned"))
        self._epoch = Told(epoch, "e")
        return epoch

    async def _assignable(self, topic: str, partitions: int) -> None:
        """Kafka answers before all of it knows of a topic: until a group of the same broker gets it all.

        The group has no part in the script, and is gone before that goes on.
        """
        group, count = f"probe of {self._prefix}{topic}", 0

        async def assigned() -> bool:
            nonlocal count
            count += 1
            fields = {
                "group_id": group,
                "member_id": f"probe {count}",
                "subscribed_topic_names": [Name(topic)],
                "rebalance_timeout": timedelta(milliseconds=LONG_MS),
                "topic_partitions": [],
            }
            answer = await self._quietly("ConsumerGroupHeartbeat", 1, member_epoch=0, **fields)
            assert answer.error_code is ErrorCode.none, answer
            await self._quietly("ConsumerGroupHeartbeat", 1, **{**fields, "member_epoch": -1})
            got = answer.assignment.topic_partitions if answer.assignment else ()
            return sum(len(each.partitions) for each in got) == partitions

        await eventually(assigned, f"{topic} is known")
        await self._quietly("DeleteGroups", 2, groups_names=[group])

    async def _quietly(self, api: str, version: int, **fields: Any) -> Any:
        ask = Ask(api, version, fields)
        if self._quiet is None:
            self._quiet = await self.connect("quiet")
        await self._quiet.send(ask, self.resolve(ask))
        return await self._quiet.receive(ask)

    # From names to what is on the wire, and back

    def resolve(self, ask: Ask) -> dict[str, Any]:
        schema = load_request_schema(KEYS[ask.api], ask.version)
        return dict(wire.fitting(schema, self._resolved(ask.fields)))

    def _resolved(self, value: Any) -> Any:
        match value:
            case Connection():
                return value.member_id
            case Name():
                return self._prefix + str(value) if value else ""
            case TopicId():
                return self._topic_ids.get(value.topic, _NO_TOPIC)
            case Subscription():
                encoded = value.encoded(self._prefix)
                self._shown_bytes[encoded] = f"subscription{list(value.topics)}"
                return encoded
            case dict():
                return {name: self._resolved(each) for name, each in value.items()}
            case list():
                return [self._resolved(each) for each in value]
        return value

    def answered(
        self, connection: Connection, ask: Ask, answer: Any, dray: Mapping[str, Any], because: str
    ) -> None:
        if ask.api in ("JoinGroup", "ConsumerGroupHeartbeat") and answer.member_id:
            self._meet(connection, ask, answer.member_id)
        self._blocks.append(_Block(f"{connection.name} <", answer, True, self._epoch))
        if dray and self._of_kafka:
            self._blocks.append(_Block("Dray <", answer, True, self._epoch, dray))
            self._blocks.append(f"because {because}")

    def _meet(self, connection: Connection, ask: Ask, member_id: str) -> None:
        asked = ask.fields.get("member_id")
        if isinstance(asked, str) and asked == member_id:
            return  # the client's own choice
        connection.member_id = member_id
        if member_id not in self._shown:
            taken = sum(each.startswith(f"<{connection.name}") for each in self._shown.values())
            self._shown[member_id] = f"<{connection.name}{taken + 1 if taken else ''}>"

    def asked(self, connection: Connection, ask: Ask, sent: Mapping[str, Any], how: str = "") -> None:
        head = f"{connection.name} > {ask.api} {ask.version}{how}"
        self._blocks.append(_Block(head, dict(sent), False, self._epoch))

    def _written(self, block: _Block) -> str:
        tree = _changed(self._tree("", block.entity), block.changes)
        if block.epoch is not None:
            tree = _counted(tree, block.epoch)
        first, *more = _lines(tree, block.is_answer)
        if not block.is_answer:
            first, more = "", [first, *more]
        return "\n".join([f"{block.head} {first}".rstrip(), *(f"    {line}" for line in more if line)])

    def _tree(self, name: str, value: Any) -> Any:
        """As it is shown: leaves are text."""
        match value:
            case dict():
                return {key: self._tree(key, each) for key, each in value.items()}
            case list() | tuple():
                trees = [self._tree(name, each) for each in value]
                return [
                    each
                    for each in trees
                    if not (isinstance(each, dict) and isinstance(each.get("group_id"), _Other))
                ]
            case bool():
                return str(value).lower()
            case Told():
                return f"<{value.name}>"
            case Enum():
                return value.name
            case timedelta():
                return str(value // timedelta(milliseconds=1))
            case UUID():
                return "<nobody's>" if value == _NO_TOPIC else self._topics_shown.get(value, str(value))
            case bytes() | memoryview():
                return self._shown_bytes.get(bytes(value)) or repr(bytes(value))
            case str():
                return self._text(name, value)
            case None:
                return "null"
        if dataclasses.is_dataclass(value):
            return {
                field.name: self._tree(field.name, getattr(value, field.name))
                for field in dataclasses.fields(value)
            }
        return str(value)

    def _text(self, name: str, value: str) -> str:
        if value in self._shown:
            return self._shown[value]
        if name == "error_message":
            return "<message>"
        if name == "group_id" and value and not value.startswith(self._prefix):
            return _Other(value)
        value = value.replace("127.0.0.1", "<host>") if name == "client_host" else value
        if len(value) > 100:
            return f"<{len(value)} characters>"
        return json.dumps(value.replace(self._prefix, ""), ensure_ascii=False)


class _Block(NamedTuple):
    """What becomes a request or an answer of the transcript."""

    head: str
    entity: Any
    is_answer: bool
    epoch: Told | None  # what epochs are counted from
    changes: Mapping[str, Any] = {}  # fields of Dray's answer, by their paths


class _Other(str):
    """A group of another script."""


Tree: TypeAlias = Any


def _lines(tree: Tree, is_answer: bool) -> list[str]:
    """Plain fields in one line, and each structure below."""
    plain, below = [], []
    for name, value in tree.items():
        if isinstance(value, dict):
            below += [f"{name}:", *_indented(_lines(value, is_answer))]
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            below.append(f"{name}:")
            elements = [_listed(_lines(each, is_answer)) for each in value]
            for element in sorted(elements) if is_answer else elements:
                below += element
        elif isinstance(value, list):
            plain.append(f"{name}=[{', '.join(sorted(value, key=_by_number) if is_answer else value)}]")
        else:
            plain.append(f"{name}={value}")
    return [" ".join(plain), *below]


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in lines if line]


def _listed(lines: Iterable[str]) -> list[str]:
    first, *more = (line for line in lines if line)
    return [f"- {first}", *(f"  {line}" for line in more)]


def _by_number(text: str) -> tuple[int, str]:
    return (int(text) if text.isdigit() else -1, text)


def _changed(tree: Tree, changes: Mapping[str, Any]) -> Tree:
    changed = copy.deepcopy(tree)
    for path, value in changes.items():
        *way, last = path.split(".")
        place = changed
        for step in way:
            place = place[int(step)] if isinstance(place, list) else place[step]
        key: Any = int(last) if isinstance(place, list) else last
        place[key] = value(place[key]) if callable(value) else value
    assert changed != tree or not changes, f"Dray's answer would be Kafka's: {changes}"
    return changed


def _counted(tree: Tree, epoch: Told) -> Tree:
    if isinstance(tree, list):
        return [_counted(each, epoch) for each in tree]
    if not isinstance(tree, dict):
        return tree
    counted = {}
    for name, value in tree.items():
        if name in ("member_epoch", "group_epoch", "assignment_epoch") and int(value) >= epoch:
            more = int(value) - epoch
            counted[name] = f"{epoch.name}+{more}" if more else epoch.name
        else:
            counted[name] = _counted(value, epoch)
    return counted


def _at(answer: Any, path: str) -> Any:
    for step in path.split("__"):
        answer = answer[int(step)] if isinstance(answer, tuple) else getattr(answer, step)
    return answer


def _plain(value: Any) -> Any:
    return value.name if isinstance(value, Enum) else value


async def eventually(attempt: Callable[[], Awaitable[Any]], what: str) -> Any:
    deadline = time.monotonic() + LIMIT_S
    while not (got := await attempt()):
        if time.monotonic() > deadline:
            raise Stuck(f"not within {LIMIT_S:g} s: {what}")
        await asyncio.sleep(PAUSE_S)
    return got


@asynccontextmanager
async def running(name: str, address: tuple[str, int], of_kafka: bool) -> AsyncIterator[Script]:
    script = Script(name, address, of_kafka)
    try:
        yield script
    finally:
        script.close()


async def served(address: tuple[str, int]) -> None:
    """Until the broker serves groups: Kafka makes the topic of their records when first asked."""
    async with running("warm-up", address, of_kafka=True) as script:
        connection = await script.connect("warm-up")

        async def found() -> bool:
            ask = Ask("FindCoordinator", 4, {"key_type": 0, "coordinator_keys": ["warm-up"]})
            await connection.send(ask, ask.fields)
            return (await connection.receive(ask)).coordinators[0].error_code not in _NOT_YET

        async def answers() -> bool:
            ask = heartbeat("warm-up", "nobody", 1)
            await connection.send(ask, script.resolve(ask))
            # Kafka answers the heartbeats of members that it has not read yet as if all were well.
            return (await connection.receive(ask)).error_code is ErrorCode.unknown_member_id

        await eventually(found, "a coordinator")
        await eventually(answers, "the group's records are loaded")


# Requests. Every function has what its scripts vary as parameters, and the newest version as default.

Member: TypeAlias = Connection | str


def ms(value: int) -> timedelta:
    return timedelta(milliseconds=value)


def join(
    group: str,
    member: Member = "",
    protocols: Mapping[str, bytes | Subscription] | None = None,
    *,
    kind: str = "consumer",
    instance: str | None = None,
    session_ms: int = LONG_MS,
    rebalance_ms: int = LONG_MS,
    version: int = 9,
) -> Ask:
    offered = {"range": OF_T} if protocols is None else protocols
    fields = {
        "group_id": Name(group),
        "session_timeout": ms(session_ms),
        "rebalance_timeout": ms(rebalance_ms),
        "member_id": member,
        "group_instance_id": instance,
        "protocol_type": kind,
        "protocols": [{"name": name, "metadata": metadata} for name, metadata in offered.items()],
    }
    return Ask("JoinGroup", version, fields)


def sync(
    group: str,
    member: Member,
    generation: int,
    assignments: Sequence[tuple[Member, bytes]] = (),
    *,
    instance: str | None = None,
    kind: str | None = "consumer",
    protocol: str | None = "range",
    version: int = 5,
) -> Ask:
    fields = {
        "group_id": Name(group),
        "generation_id": generation,
        "member_id": member,
        "group_instance_id": instance,
        "protocol_type": kind,
        "protocol_name": protocol,
        "assignments": [{"member_id": each, "assignment": part} for each, part in assignments],
    }
    return Ask("SyncGroup", version, fields)


def heartbeat(
    group: str, member: Member, generation: int, *, instance: str | None = None, version: int = 4
) -> Ask:
    fields = {
        "group_id": Name(group),
        "generation_id": generation,
        "member_id": member,
        "group_instance_id": instance,
    }
    return Ask("Heartbeat", version, fields)


def leave(group: str, *members: Member | tuple[Member, str]) -> Ask:
    """Members, or pairs of a member id and an instance id."""
    leaving: list[dict[str, Any]] = []
    for member in members:
        who, instance = member if isinstance(member, tuple) else (member, None)
        leaving.append({"member_id": who, "group_instance_id": instance})
    return Ask("LeaveGroup", 5, {"group_id": Name(group), "members": leaving})


def leave_alone(group: str, member: Member, version: int = 2) -> Ask:
    """As before there were batches of members."""
    return Ask("LeaveGroup", version, {"group_id": Name(group), "member_id": member})


Offsets: TypeAlias = Mapping[str, Mapping[int, int | tuple[int, int, str | None]]]


def commit(
    group: str,
    offsets: Offsets,
    member: Member = "",
    generation: int = -1,
    *,
    instance: str | None = None,
    version: int = 9,
) -> Ask:
    """Offsets by topic and partition: each an offset, or with leader epoch and metadata."""
    topics = []
    for topic, partitions in offsets.items():
        rows = []
        for index, offset in partitions.items():
            at, leader_epoch, metadata = offset if isinstance(offset, tuple) else (offset, -1, "")
            row = {"partition_index": index, "committed_offset": at, "committed_metadata": metadata}
            rows.append(row if leader_epoch < 0 else {**row, "committed_leader_epoch": leader_epoch})
        topics.append({"name": Name(topic), "partitions": rows})
    fields = {
        "group_id": Name(group),
        "generation_id_or_member_epoch": generation,
        "member_id": member,
        "group_instance_id": instance,
        "topics": topics,
    }
    return Ask("OffsetCommit", version, fields)


Wanted: TypeAlias = Mapping[str, Sequence[int]]


def _wanted(topics: Wanted | None) -> list[dict[str, Any]] | None:
    if topics is None:
        return None
    return [
        {"name": Name(topic), "partition_indexes": list(partitions)} for topic, partitions in topics.items()
    ]


def fetch(
    groups: Mapping[str, Wanted | None],
    *,
    member: Member | None = None,
    epoch: int = -1,
    stable: bool = False,
    version: int = 9,
) -> Ask:
    """Of some partitions of each group, or of all that are committed: None."""
    rows: list[dict[str, Any]] = []
    for group, topics in groups.items():
        row: dict[str, Any] = {"group_id": Name(group), "topics": _wanted(topics)}
        rows.append(row if member is None else {**row, "member_id": member, "member_epoch": epoch})
    return Ask("OffsetFetch", version, {"groups": rows, "require_stable": stable})


def fetch_alone(group: str, topics: Wanted | None, version: int, *, stable: bool = False) -> Ask:
    """As before there were several groups in a request."""
    fields = {"group_id": Name(group), "topics": _wanted(topics), "require_stable": stable}
    return Ask("OffsetFetch", version, fields)


def delete_offsets(group: str, topics: Wanted) -> Ask:
    rows = [
        {"name": Name(topic), "partitions": [{"partition_index": index} for index in partitions]}
        for topic, partitions in topics.items()
    ]
    return Ask("OffsetDelete", 0, {"group_id": Name(group), "topics": rows})


def describe(*groups: str, version: int = 6, operations: bool = False) -> Ask:
    fields = {"groups": [Name(each) for each in groups], "include_authorized_operations": operations}
    return Ask("DescribeGroups", version, fields)


def list_groups(states: Sequence[str] = (), types: Sequence[str] = (), version: int = 5) -> Ask:
    return Ask("ListGroups", version, {"states_filter": list(states), "types_filter": list(types)})


def delete_groups(*groups: str) -> Ask:
    return Ask("DeleteGroups", 2, {"groups_names": [Name(each) for each in groups]})


def consumer(
    group: str,
    member: Member,
    epoch: int,
    topics: Sequence[str] | None = None,
    owned: Wanted | None = None,
    *,
    version: int = 1,
    rebalance_ms: int | None = None,
    **more: Any,
) -> Ask:
    """ConsumerGroupHeartbeat: null is what is not given. `joins` has what the first one needs."""
    fields = {"group_id": Name(group), "member_id": member, "member_epoch": epoch, **more}
    if rebalance_ms is not None:
        fields["rebalance_timeout"] = ms(rebalance_ms)
    if topics is not None:
        fields["subscribed_topic_names"] = [Name(topic) for topic in topics]
    fields["topic_partitions"] = (
        None
        if owned is None
        else [{"topic_id": TopicId(topic), "partitions": list(rows)} for topic, rows in owned.items()]
    )
    return Ask("ConsumerGroupHeartbeat", version, fields)


def joins(group: str, member: Member, topics: Sequence[str] | None = ("t",), **more: Any) -> Ask:
    fields = {"rebalance_ms": LONG_MS, "owned": {}, "server_assignor": "range", **more}
    return consumer(group, member, 0, topics, **fields)


def describe_consumers(*groups: str, operations: bool = False, version: int = 1) -> Ask:
    fields = {"group_ids": [Name(each) for each in groups], "include_authorized_operations": operations}
    return Ask("ConsumerGroupDescribe", version, fields)


# Steps that many scripts begin with


async def enter(member: Connection, group: str, *more: Any, **named: Any) -> Waiting:
    """A classic member gets its id, and joins with it."""
    await member(join(group, "", *more, **named))
    return await member.starts(join(group, member, *more, **named))


async def alone(member: Connection, group: str, *more: Any, **named: Any) -> None:
    """The only member of a classic group, of generation 1."""
    await (await enter(member, group, *more, **named))()
    await member(sync(group, member, 1, [(member, b"all")]))


async def pair(
    script: Script, leader: Connection, follower: Connection, group: str, *more: Any, **named: Any
) -> None:
    """Two members of a classic group, of generation 2."""
    await alone(leader, group, *more, **named)
    await joined_by(script, leader, follower, group, *more, **named)
    await leader(sync(group, leader, 2, [(leader, b"one"), (follower, b"two")]))
    await follower(sync(group, follower, 2))


async def joined_by(
    script: Script, leader: Connection, follower: Connection, group: str, *more: Any, **named: Any
) -> None:
    """A second member has joined, and none has synced."""
    following = await enter(follower, group, *more, **named)
    await script.is_in(group, "PreparingRebalance")
    leading = await leader.starts(join(group, leader, *more, **named))
    await leading()
    await following()


# The table of scripts


class Scenario(NamedTuple):
    name: str
    settings: Mapping[str, str]
    run: Callable[[Script], Awaitable[None]]

    @property
    def about(self) -> str:
        return (self.run.__doc__ or "").strip()


SCENARIOS: dict[str, Scenario] = {}

Run: TypeAlias = Callable[[Script], Awaitable[None]]


def scenario(**settings: str) -> Callable[[Run], Run]:
    """Named as the function. Settings go on top of the runner's, with _ for the dots in their names."""

    def register(run: Run) -> Run:
        name = run.__name__.replace("_", "-")
        assert name not in SCENARIOS, name
        SCENARIOS[name] = Scenario(name, {key.replace("_", "."): v for key, v in settings.items()}, run)
        return run

    return register
