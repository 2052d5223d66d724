"""CreateTopics (19), DeleteTopics (20), CreatePartitions (37)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable
from typing import Any, TypeVar

from kio.schema.errors import ErrorCode

from dray.errors import BadRequest, DrayError, InvalidAssignment, InvalidReplication, TimedOut
from dray.handlers.call import NO_THROTTLE, NOBODY, Call, find_topic
from dray.handlers.configs import config_fields
from dray.handlers.errors import code_of, message_of
from dray.protocol.codec import Fields
from dray.topics.catalog import Topic

# What is stored once, in an object store that keeps its own copies, has one replica for Kafka's tools.
REPLICATION_FACTOR = 1
DEFAULT = -1
# Clients may ask for less, which no metadata store can do.
LEAST_TIMEOUT_S = 1.0

Result = TypeVar("Result")


async def create_topics(call: Call) -> Fields:
    names = Counter(entity.name for entity in call.body.topics)
    once = {entity.name: entity for entity in call.body.topics}.values()
    topics = await asyncio.gather(*(_create(call, entity, names[entity.name]) for entity in once))
    return {"throttle_time": NO_THROTTLE, "topics": topics}


async def _create(call: Call, entity: Any, times: int) -> dict[str, Any]:
    try:
        _only_once(entity.name, times)
        count = _partition_count(entity)
        overrides = {config.name: config.value for config in entity.configs}
        if len(overrides) < len(entity.configs):
            raise BadRequest(f"topic {entity.name!r} has a config twice")
        validate_only = call.body.validate_only
        creating = call.services.topics.create(entity.name, count, overrides, validate_only=validate_only)
        topic = await _in_time(call, creating)
    except DrayError as error:
        return {
            "name": entity.name,
            "topic_id": NOBODY,
            "error_code": code_of(error),
            "error_message": message_of(error),
            "configs": (),
        }
    return {
        "name": topic.name,
        "topic_id": NOBODY if call.body.validate_only else topic.topic_id,
        "error_code": ErrorCode.none,
        "error_message": None,
        "num_partitions": len(topic.streams),
        "replication_factor": REPLICATION_FACTOR,
        "configs": config_fields(call, topic),
    }


def _partition_count(entity: Any) -> int:
    """How many partitions are asked for, by number or by an assignment of replicas, which is then ignored."""
    if not entity.assignments:
        if entity.replication_factor < 1 and entity.replication_factor != DEFAULT:
            expected = (
                "at least 1, or -1 for the default; it changes nothing, as the object store keeps copies"
            )
            raise InvalidReplication(entity.name, entity.replication_factor, expected)
        count: int = entity.num_partitions
        return count
    if entity.num_partitions != DEFAULT or entity.replication_factor != DEFAULT:
        raise BadRequest("partitions and replication factor must be -1 where replicas are assigned")
    numbers = sorted(assignment.partition_index for assignment in entity.assignments)
    if numbers != list(range(len(numbers))):
        raise InvalidAssignment("the assigned partitions are not 0, 1, 2 … without holes")
    for assignment in entity.assignments:
        _check_replicas(assignment.broker_ids)
    return len(numbers)


def _check_replicas(broker_ids: tuple[int, ...]) -> None:
    if not broker_ids or len(set(broker_ids)) < len(broker_ids) or min(broker_ids) < 0:
        raise InvalidAssignment("each partition needs at least one replica, and each on another broker")


async def delete_topics(call: Call) -> Fields:
    entities = getattr(call.body, "topics", None)
    if entities is None:  # by name only, before version 6
        entities = [_Named(name) for name in call.body.topic_names]
    times = Counter((entity.name, entity.topic_id) for entity in entities)
    once = {(entity.name, entity.topic_id): entity for entity in entities}.values()
    responses = await asyncio.gather(
        *(_delete(call, entity, times[entity.name, entity.topic_id]) for entity in once)
    )
    return {"throttle_time": NO_THROTTLE, "responses": responses}


class _Named:
    topic_id = None

    def __init__(self, name: str) -> None:
        self.name = name


async def _delete(call: Call, entity: Any, times: int) -> dict[str, Any]:
    answer = {"name": entity.name, "topic_id": entity.topic_id or NOBODY, "error_code": ErrorCode.none}
    try:
        _only_once(entity.name, times)
        if entity.name is not None and entity.topic_id not in (None, NOBODY):
            raise BadRequest("a topic is named by its name or by its id, not both")
        if entity.name is None and entity.topic_id in (None, NOBODY):
            raise BadRequest("a topic is named by its name or by its id")
        topic = await find_topic(call.services.topics, entity)
        answer |= {"name": topic.name, "topic_id": topic.topic_id}
        await _in_time(call, call.services.topics.delete(topic.topic_id))
    except DrayError as error:
        answer |= {"error_code": code_of(error), "error_message": message_of(error)}
    return answer


async def create_partitions(call: Call) -> Fields:
    names = Counter(entity.name for entity in call.body.topics)
    once = {entity.name: entity for entity in call.body.topics}.values()
    results = await asyncio.gather(*(_grow(call, entity, names[entity.name]) for entity in once))
    return {"throttle_time": NO_THROTTLE, "results": results}


async def _grow(call: Call, entity: Any, times: int) -> dict[str, Any]:
    answer: dict[str, Any] = {"name": entity.name, "error_code": ErrorCode.none, "error_message": None}
    try:
        _only_once(entity.name, times)
        topic = await find_topic(call.services.topics, entity)
        if entity.assignments is not None:
            _check_added(topic, entity)
        growing = call.services.topics.grow(entity.name, entity.count, validate_only=call.body.validate_only)
        await _in_time(call, growing)
    except DrayError as error:
        answer |= {"error_code": code_of(error), "error_message": message_of(error)}
    return answer


def _check_added(topic: Topic, entity: Any) -> None:
    added = entity.count - len(topic.streams)
    if added > 0 and len(entity.assignments) != added:
        raise InvalidAssignment(f"{len(entity.assignments)} partitions are assigned, but {added} are added")
    for assignment in entity.assignments:
        _check_replicas(assignment.broker_ids)


def _only_once(name: object, times: int) -> None:
    if times > 1:
        raise BadRequest(f"topic {name!r} is named {times} times in one request")


async def _in_time(call: Call, work: Awaitable[Result]) -> Result:
    """Wait as long as the client does. What was begun goes on: anybody may finish it."""
    doing = asyncio.ensure_future(work)
    limit_s = max(call.body.timeout.total_seconds(), LEAST_TIMEOUT_S)
    await asyncio.wait([doing], timeout=limit_s)
    if not doing.done():
        doing.add_done_callback(lambda done: done.cancelled() or done.exception())
        raise TimedOut(f"not done within {limit_s:g} s; it may be done yet")
    return doing.result()
