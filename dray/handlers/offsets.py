"""Committed offsets: OffsetCommit (8), OffsetFetch (9) and OffsetDelete (47)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any
from uuid import UUID

from kio.schema.errors import ErrorCode

from dray.errors import (
    DrayError,
    GroupNotEmpty,
    InvalidGroupId,
    MetadataError,
    MetadataTooLarge,
    UnknownGroup,
)
from dray.groups.classic import CONSUMER_PROTOCOL
from dray.groups.group import ConsumerGroup
from dray.groups.offsets import Committed, Key
from dray.handlers.call import NO_THROTTLE, Call, find_topic, side_by_side, stream_of
from dray.handlers.errors import code_of
from dray.protocol.codec import Fields
from dray.topics.catalog import Topic

log = logging.getLogger(__name__)

# From this version of OffsetCommit on, members have epochs, and are told of a group that there is not.
KNOWS_EPOCHS = 9
# From these versions of OffsetFetch on: an error of the whole group, and several groups at once.
GROUP_ERROR = 2
SEVERAL_GROUPS = 8
AS_THE_BROKER_KEEPS = timedelta(milliseconds=-1)
NOT_COMMITTED = {
    "committed_offset": -1,
    "committed_leader_epoch": -1,
    "metadata": "",
    "error_code": ErrorCode.none,
}
MILLISECOND = timedelta(milliseconds=1)


async def offset_commit(call: Call) -> Fields:
    """Topics that are not there, and texts that are too long, do not keep the rest from being committed."""
    body = call.body
    now_ms = call.services.groups.offsets.now_ms()
    retention = getattr(body, "retention_time", AS_THE_BROKER_KEEPS)
    expire_at_ms = None if retention == AS_THE_BROKER_KEEPS else now_ms + retention // MILLISECOND
    topics: list[dict[str, Any]] = []
    asked: list[dict[str, Any]] = []  # of the answers, those that are for the group to decide
    offsets: dict[Key, Committed] = {}  # one that is named several times counts as it was named last
    for entity in body.topics:
        topic = await _topic(call, entity)
        answers = []
        for part in entity.partitions:
            answer = {"partition_index": part.partition_index, "error_code": ErrorCode.none}
            answers.append(answer)
            try:
                topic_id = _existing(topic, part.partition_index).topic_id
                asked.append(answer)
                metadata = part.committed_metadata or ""
                if len(metadata) > call.services.offset_metadata_max_bytes:
                    raise MetadataTooLarge(f"{len(metadata)} characters of metadata")
            except DrayError as error:
                answer["error_code"] = _code_of(error)
                continue
            offsets[entity.name, part.partition_index] = Committed(
                topic_id=topic_id,
                offset=part.committed_offset,
                leader_epoch=getattr(part, "committed_leader_epoch", -1),
                metadata=metadata,
                committed_at_ms=now_ms,
                expire_at_ms=expire_at_ms,
            )
        if answers:
            topics.append({"name": entity.name, "partitions": answers})
    if asked:
        code = await _commit(call, offsets)
        if code is not ErrorCode.none:
            for answer in asked:
                answer["error_code"] = code
    return {"throttle_time": NO_THROTTLE, "topics": topics}


async def _commit(call: Call, offsets: Mapping[Key, Committed]) -> ErrorCode:
    body, groups = call.body, call.services.groups

    async def check(fresh: bool) -> int:
        return await groups.check_commit(
            body.group_id,
            body.member_id,
            getattr(body, "group_instance_id", None),
            body.generation_id_or_member_epoch,
            is_epoch=call.version >= KNOWS_EPOCHS,
            fresh=fresh,
        )

    try:
        await groups.offsets.commit(body.group_id, offsets, check)
    except UnknownGroup as error:
        return code_of(error) if call.version >= KNOWS_EPOCHS else ErrorCode.illegal_generation
    except DrayError as error:
        log.info("OffsetCommit %r: %s", body.group_id, error)
        return _code_of(error)
    return ErrorCode.none


async def offset_fetch(call: Call) -> Fields:
    """Nothing here is ever unstable (`require_stable`): there are no transactions."""
    if call.version < SEVERAL_GROUPS:
        return {"throttle_time": NO_THROTTLE, **await _fetch(call, call.body)}
    # Each once: an answer may be much larger than its question.
    asked = {entity.group_id: entity for entity in call.body.groups}
    groups = await side_by_side(asked.values(), lambda entity: _fetch(call, entity))
    return {"throttle_time": NO_THROTTLE, "groups": groups}


async def _fetch(call: Call, entity: Any) -> dict[str, Any]:
    answer: dict[str, Any] = {"group_id": entity.group_id, "error_code": ErrorCode.none}
    try:
        offsets = await _committed(call, entity)
    except DrayError as error:
        log.info("OffsetFetch %r: %s", entity.group_id, error)
        # Consumers before Kafka 3.9 take anything else of what passes for final (Kafka does so).
        code = ErrorCode.not_coordinator if isinstance(error, MetadataError) else code_of(error)
        if call.version < GROUP_ERROR:
            failed = {**NOT_COMMITTED, "error_code": code}
            return answer | {"topics": _answers(entity.topics, lambda _: failed)}
        return answer | {"error_code": code, "topics": ()}
    if entity.topics is None:
        return answer | {"topics": _all(offsets)}

    def found(at: Key) -> dict[str, Any]:
        return _fields(offsets[at]) if at in offsets else NOT_COMMITTED

    return answer | {"topics": _answers(entity.topics, found)}


async def _committed(call: Call, entity: Any) -> dict[Key, Committed]:
    """The offsets that are asked for, of topics that still exist."""
    groups, group_id = call.services.groups, entity.group_id
    await groups.check_fetch(
        group_id, getattr(entity, "member_id", None), getattr(entity, "member_epoch", -1)
    )
    if await groups.find(group_id) is None:
        return {}
    if entity.topics is None:
        found = await groups.offsets.fetch(group_id)
    else:
        asked = {(topic.name, index) for topic in entity.topics for index in topic.partition_indexes}
        found = await groups.offsets.fetch_some(group_id, asked)
    names: dict[UUID, str | None] = {}
    for each in found.values():
        topic_id = each.value.topic_id
        if topic_id not in names:
            topics = call.services.topics
            topic = topics.by_id(topic_id) or await topics.find_id(topic_id)
            names[topic_id] = None if topic is None else topic.name
    return {at: each.value for at, each in found.items() if names[each.value.topic_id] == at[0]}


def _answers(topics: Iterable[Any], fields_of: Callable[[Key], dict[str, Any]]) -> list[dict[str, Any]]:
    """Each partition once: an index is four bytes of a request, and its metadata thousands of the answer."""
    asked: dict[str, dict[int, None]] = {}
    for topic in topics:
        asked.setdefault(topic.name, {}).update(dict.fromkeys(topic.partition_indexes))
    return [
        {"name": name, "partitions": [{"partition_index": i, **fields_of((name, i))} for i in indexes]}
        for name, indexes in asked.items()
    ]


def _all(offsets: Mapping[Key, Committed]) -> list[dict[str, Any]]:
    by_topic: dict[str, list[dict[str, Any]]] = {}
    for (name, index), committed in sorted(offsets.items()):
        by_topic.setdefault(name, []).append({"partition_index": index, **_fields(committed)})
    return [{"name": name, "partitions": partitions} for name, partitions in by_topic.items()]


def _fields(committed: Committed) -> dict[str, Any]:
    return {
        "committed_offset": committed.offset,
        "committed_leader_epoch": committed.leader_epoch,
        "metadata": committed.metadata,
        "error_code": ErrorCode.none,
    }


async def offset_delete(call: Call) -> Fields:
    """Of topics that the group's members use nothing is deleted."""
    groups, group_id = call.services.groups, call.body.group_id
    codes: dict[str, dict[int, ErrorCode]] = {}
    existing: set[Key] = set()
    for entity in call.body.topics:
        topic = await _topic(call, entity)
        for part in entity.partitions:
            code = ErrorCode.none
            try:
                _existing(topic, part.partition_index)
                existing.add((entity.name, part.partition_index))
            except DrayError as error:
                code = _code_of(error)
            codes.setdefault(entity.name, {})[part.partition_index] = code
    answer = {"throttle_time": NO_THROTTLE, "error_code": ErrorCode.none, "topics": ()}
    try:
        in_use = await _in_use(call, {name for name, _ in existing})
        await groups.offsets.delete(group_id, {at for at in existing if at[0] not in in_use})
        for name, index in existing:
            if name in in_use:
                codes[name][index] = ErrorCode.group_subscribed_to_topic
    except DrayError as error:
        log.info("OffsetDelete %r: %s", group_id, error)
        return answer | {"error_code": _code_of(error)}
    return answer | {
        "topics": [
            {
                "name": name,
                "partitions": [{"partition_index": i, "error_code": code} for i, code in of_topic.items()],
            }
            for name, of_topic in codes.items()
        ]
    }


async def _in_use(call: Call, names: set[str]) -> set[str]:
    """Those of the topics that the group's members subscribe to.

    Raises `InvalidGroupId`, `UnknownGroup`, and `GroupNotEmpty` of members that are no consumers.
    """
    groups, group_id = call.services.groups, call.body.group_id
    if not group_id:
        raise InvalidGroupId("a group id is needed")
    group = await groups.find(group_id)
    if group is None:
        raise UnknownGroup(f"there is no group {group_id!r}")
    of_consumers = isinstance(group, ConsumerGroup) or group.protocol_type == CONSUMER_PROTOCOL
    if group.members and not of_consumers:
        raise GroupNotEmpty(f"group {group_id!r} has members")
    subscribed = groups.subscribed(group)
    if subscribed is None:
        # Of consumers whose subscriptions nobody can read, every topic may be one of theirs.
        return names if of_consumers else set()
    return names & subscribed


async def _topic(call: Call, entity: Any) -> Topic | DrayError:
    try:
        return await find_topic(call.services.topics, entity)
    except DrayError as error:
        return error


def _existing(topic: Topic | DrayError, partition: int) -> Topic:
    """Raises what `topic` is, if it is an error, and `UnknownPartition`."""
    if isinstance(topic, DrayError):
        raise topic
    stream_of(topic, partition)
    return topic


def _code_of(error: DrayError) -> ErrorCode:
    """Trouble with the store is to the client a coordinator that is away: it asks again."""
    return ErrorCode.coordinator_not_available if isinstance(error, MetadataError) else code_of(error)
