"""The consumer group protocol of KIP-848: ConsumerGroupHeartbeat (68) and ConsumerGroupDescribe (69)."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any
from uuid import UUID, uuid4

from kio.schema.errors import ErrorCode

from dray.errors import DrayError, InvalidMemberRequest, UnknownGroup
from dray.groups.consumer import AS_BEFORE_MS
from dray.groups.coordinator import state_of
from dray.groups.group import Assignment, Beat, ConsumerGroup, ConsumerMember
from dray.handlers.call import NO_THROTTLE, NOBODY, Call, side_by_side
from dray.handlers.errors import code_of, message_of
from dray.handlers.group_admin import NOT_ASKED, authorized_operations
from dray.handlers.groups import client_host, to_ms
from dray.protocol.codec import Fields

log = logging.getLogger(__name__)

CONSUMER_MEMBER = 1  # of a member's type, where 0 is a classic one


async def heartbeat(call: Call) -> Fields:
    body = call.body
    groups = call.services.groups
    names = body.subscribed_topic_names
    beat = Beat(
        # Clients that speak version 0 may leave the choice of their id to the broker.
        member_id=body.member_id or (str(uuid4()) if call.version == 0 and body.member_epoch == 0 else ""),
        epoch=body.member_epoch,
        instance_id=body.instance_id,
        rack_id=body.rack_id,
        rebalance_timeout_ms=_rebalance_timeout_ms(body),
        topics=None if names is None else frozenset(names),
        regex=getattr(body, "subscribed_topic_regex", None),
        assignor=body.server_assignor,
        owned=None if body.topic_partitions is None else _owned(body.topic_partitions),
        client_id=call.client_id or "",
        client_host=client_host(call),
        heard_by=groups.process,
    )
    answer: dict[str, Any] = {
        "throttle_time": NO_THROTTLE,
        "error_code": ErrorCode.none,
        "error_message": None,
        "member_id": None,
        "member_epoch": 0,
        "heartbeat_interval": call.services.group_heartbeat_interval,
        "assignment": None,
    }
    try:
        if not body.group_id:
            raise InvalidMemberRequest("a group id is needed")
        beaten = await groups.beat(body.group_id, beat, call.connection.ended)
    except DrayError as error:
        log.info("ConsumerGroupHeartbeat %r: %s", body.group_id, error)
        return answer | {
            "error_code": code_of(error),
            "error_message": message_of(error),
            "heartbeat_interval": NO_THROTTLE,
        }
    answer |= {"member_id": beaten.member_id, "member_epoch": beaten.epoch}
    if beaten.epoch < 0:
        answer["heartbeat_interval"] = NO_THROTTLE  # it has left, and sends no more of them
    if beaten.assignment is not None:
        answer["assignment"] = {"topic_partitions": _partitions(beaten.assignment)}
    return answer


async def describe(call: Call) -> Fields:
    """Each group once, however often it is asked for: an answer is much larger than its question."""
    named = dict.fromkeys(call.body.group_ids)
    groups = await side_by_side(named, lambda group_id: _described(call, group_id))
    return {"throttle_time": NO_THROTTLE, "groups": groups}


async def _described(call: Call, group_id: str) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "error_code": ErrorCode.none,
        "error_message": None,
        "group_id": group_id,
        "group_state": "",
        "group_epoch": 0,
        "assignment_epoch": 0,
        "assignor_name": "",
        "members": (),
        "authorized_operations": NOT_ASKED,
    }
    groups = call.services.groups
    if not group_id:
        return answer | {"error_code": ErrorCode.invalid_group_id}  # Kafka has no message for it
    try:
        group = await groups.find(group_id)
        if not isinstance(group, ConsumerGroup):
            raise UnknownGroup(f"there is no consumer group {group_id!r}")
    except DrayError as error:
        return answer | {"error_code": code_of(error), "error_message": message_of(error)}
    return answer | {
        "group_state": state_of(group).value,
        "group_epoch": group.epoch,
        "assignment_epoch": group.target_epoch,
        "assignor_name": groups.assignor_of(group),
        "members": [_member(call, group, member) for member in group.members.values()],
        "authorized_operations": authorized_operations(call),
    }


def _member(call: Call, group: ConsumerGroup, member: ConsumerMember) -> dict[str, Any]:
    return {
        "member_id": member.member_id,
        "instance_id": member.instance_id,
        "rack_id": member.rack_id,
        "member_epoch": member.epoch,
        "client_id": member.client_id,
        "client_host": member.client_host,
        "subscribed_topic_names": sorted(member.topics),
        "subscribed_topic_regex": member.regex or "",
        "assignment": {"topic_partitions": _named(call, member.assigned)},
        "target_assignment": {"topic_partitions": _named(call, group.target.get(member.member_id, {}))},
        "member_type": CONSUMER_MEMBER,
    }


def _rebalance_timeout_ms(body: Any) -> int:
    """Kafka takes negative ones too, and they end at once."""
    given_ms = to_ms(body.rebalance_timeout)
    return given_ms if given_ms == AS_BEFORE_MS else max(given_ms, 0)


def _owned(topics: Iterable[Any]) -> Assignment:
    owned: dict[UUID, frozenset[int]] = {}
    for topic in topics:
        topic_id = topic.topic_id or NOBODY
        owned[topic_id] = owned.get(topic_id, frozenset()) | frozenset(topic.partitions)
    return {topic_id: partitions for topic_id, partitions in owned.items() if partitions}


def _partitions(assignment: Assignment) -> list[dict[str, Any]]:
    return [
        {"topic_id": topic_id, "partitions": sorted(assignment[topic_id])} for topic_id in sorted(assignment)
    ]


def _named(call: Call, assignment: Assignment) -> list[dict[str, Any]]:
    """Without the topics that are gone: they have no names."""
    named = []
    for each in _partitions(assignment):
        topic = call.services.topics.by_id(each["topic_id"])
        if topic is not None:
            named.append({**each, "topic_name": topic.name})
    return named
