"""Metadata (3) and DescribeTopicPartitions (75): brokers, topics, and who is called a partition's leader.

Every broker can serve every partition. What clients are told is an affinity: the owner of the partition among
the brokers of their zone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kio.schema.errors import ErrorCode

from dray.errors import BadRequest, DrayError, TopicExists, UnknownTopic
from dray.handlers.call import NO_THROTTLE, NOBODY, Call, Stable, find_topic
from dray.handlers.errors import code_of
from dray.log.read import LEADER_EPOCH
from dray.protocol.codec import Fields
from dray.routing import BrokerInfo
from dray.topics.catalog import Topic, check_name

# From here on an empty list means no topics, and null all of them.
FIRST_WITH_NULL_FOR_ALL = 1
# The fields are there two versions earlier, but were not to be used (KAFKA-10774).
FIRST_BY_ID = 12
# Kafka's own bound of one answer (`max.request.partition.size.limit`).
MAX_DESCRIBED_PARTITIONS = 2_000


async def handle(call: Call) -> Fields | Stable:
    body, services = call.body, call.services
    asked = body.topics
    if asked is None or (call.version < FIRST_WITH_NULL_FOR_ALL and not asked):
        topics = [_topic(call, topic) for topic in services.topics.all()]
    else:
        wants_it = getattr(body, "allow_auto_topic_creation", True)
        may_create = wants_it and services.cluster_settings.auto_create_topics
        once = {(entity.name, getattr(entity, "topic_id", None)): entity for entity in asked}
        topics = [await _asked(call, entity, may_create) for entity in once.values()]
    brokers = services.brokers
    answer = {
        "throttle_time": NO_THROTTLE,
        "brokers": [
            broker_fields(broker) for broker in brokers.told_by(services.registry.node_id, call.zone)
        ],
        "cluster_id": services.cluster_id,
        "controller_id": brokers.controller(call.zone).node_id,
        "topics": topics,
        "error_code": ErrorCode.none,
    }
    found_all = all(topic["error_code"] is ErrorCode.none for topic in topics)
    return Stable(answer) if found_all else answer


def broker_fields(broker: BrokerInfo) -> dict[str, Any]:
    return {
        "node_id": broker.node_id,
        "host": broker.host,
        "port": broker.port,
        "rack": broker.rack or broker.zone or None,
    }


async def _asked(call: Call, entity: Any, may_create: bool) -> dict[str, Any]:
    try:
        if entity.name is None and call.version < FIRST_BY_ID:
            raise BadRequest(f"a topic without a name in version {call.version}")
        try:
            return _topic(call, await find_topic(call.services.topics, entity))
        except UnknownTopic as error:
            check_name(str(error.topic))
            if not may_create:
                raise
            return _topic(call, await _create(call, str(error.topic)))
    except DrayError as error:
        return {
            "error_code": code_of(error),
            "name": "" if entity.name is None and call.version < FIRST_BY_ID else entity.name,
            "topic_id": getattr(entity, "topic_id", None) or NOBODY,
            "partitions": (),
        }


async def _create(call: Call, name: str) -> Topic:
    try:
        return await call.services.topics.create(name, -1, {})
    except TopicExists:
        topic = await call.services.topics.find(name)
        if topic is None:
            raise UnknownTopic(name) from None
        return topic


def _topic(call: Call, topic: Topic) -> dict[str, Any]:
    return {**_topic_fields(topic), "partitions": _partitions(call, topic, range(len(topic.streams)))}


def _topic_fields(topic: Topic) -> dict[str, Any]:
    return {
        "error_code": ErrorCode.none,
        "name": topic.name,
        "topic_id": topic.topic_id,
        "is_internal": False,
    }


def _partitions(call: Call, topic: Topic, numbers: Iterable[int]) -> list[dict[str, Any]]:
    brokers, zone = call.services.brokers, call.zone
    described = []
    for number in numbers:
        leader = brokers.leader(zone, topic.streams[number]).node_id
        described.append(
            {
                "error_code": ErrorCode.none,
                "partition_index": number,
                "leader_id": leader,
                "leader_epoch": LEADER_EPOCH,
                "replica_nodes": (leader,),
                "isr_nodes": (leader,),
                "offline_replicas": (),
                "eligible_leader_replicas": (),
                "last_known_elr": (),
            }
        )
    return described


async def describe_topic_partitions(call: Call) -> Fields:
    """By name in code-point order, from the cursor on, up to the limit; an empty list means all topics."""
    body, services = call.body, call.services
    asked = sorted({entity.name for entity in body.topics})
    first, start = (body.cursor.topic_name, body.cursor.partition_index) if body.cursor else ("", 0)
    if start < 0 or (asked and body.cursor and first not in asked):
        # A cursor that nobody was given: an error for each topic that was asked for, as Kafka says it.
        topics = [_not_described(name, ErrorCode.invalid_request) for name in asked]
        return {"throttle_time": NO_THROTTLE, "topics": topics, "next_cursor": None}
    left = min(max(body.response_partition_limit, 1), MAX_DESCRIBED_PARTITIONS)
    topics = []
    next_cursor = None
    for name in asked or [topic.name for topic in services.topics.all()]:
        if name < first:
            continue
        if left == 0:
            next_cursor = {"topic_name": name, "partition_index": 0}
            break
        try:
            topic = await _described(call, name)
        except DrayError as error:
            if asked:
                topics.append(_not_described(name, code_of(error)))
            continue
        low = start if name == first else 0
        high = min(len(topic.streams), low + left)
        topics.append({**_topic_fields(topic), "partitions": _partitions(call, topic, range(low, high))})
        left -= max(high - low, 0)
        if high < len(topic.streams):
            next_cursor = {"topic_name": name, "partition_index": high}
            break
    return {"throttle_time": NO_THROTTLE, "topics": topics, "next_cursor": next_cursor}


def _not_described(name: str, code: ErrorCode) -> dict[str, Any]:
    return {"error_code": code, "name": name, "topic_id": NOBODY, "partitions": ()}


async def _described(call: Call, name: str) -> Topic:
    topic = call.services.topics.get(name) or await call.services.topics.find(name)
    if topic is None:
        check_name(name)
        raise UnknownTopic(name)
    return topic
