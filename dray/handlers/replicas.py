"""ElectLeaders (43), AlterPartitionReassignments (45), ListPartitionReassignments (46).

There is nothing to elect or to move: each partition has one replica, on the broker that its hash gives it to.
Tools are told so in Kafka's words. What a partition has already is granted.
"""

from __future__ import annotations

from typing import Any

from kio.schema.errors import ErrorCode

from dray.errors import DrayError, InvalidAssignment
from dray.handlers.call import NO_THROTTLE, Call, find_topic, stream_of
from dray.handlers.errors import code_of, message_of
from dray.protocol.codec import Fields

PREFERRED = 0
UNCLEAN = 1


async def elect_leaders(call: Call) -> Fields:
    asked = call.body.topic_partitions
    kind = getattr(call.body, "election_type", PREFERRED)
    top = ErrorCode.none
    if kind not in (PREFERRED, UNCLEAN):
        top = ErrorCode.invalid_request
    results = []
    for entity in asked or ():  # null is all partitions, of which Kafka tells those with a new leader
        partitions = [await _elect(call, entity, number, kind) for number in entity.partitions]
        results.append({"topic": entity.topic, "partition_result": partitions})
    return {"throttle_time": NO_THROTTLE, "error_code": top, "replica_election_results": results}


async def _elect(call: Call, entity: Any, number: int, kind: int) -> dict[str, Any]:
    code, message = ErrorCode.election_not_needed, "the partition has the only leader it can have"
    if kind not in (PREFERRED, UNCLEAN):
        code, message = ErrorCode.invalid_request, f"there is no election type {kind}"
    else:
        try:
            stream_of(await find_topic(call.services.topics, entity), number)
        except DrayError as error:
            code, message = code_of(error), message_of(error)
    return {"partition_id": number, "error_code": code, "error_message": message}


async def alter_partition_reassignments(call: Call) -> Fields:
    responses = []
    for entity in call.body.topics:
        partitions = [await _reassign(call, entity, part) for part in entity.partitions]
        responses.append({"name": entity.name, "partitions": partitions})
    return {
        "throttle_time": NO_THROTTLE,
        "allow_replication_factor_change": getattr(call.body, "allow_replication_factor_change", True),
        "error_code": ErrorCode.none,
        "error_message": None,
        "responses": responses,
    }


async def _reassign(call: Call, entity: Any, part: Any) -> dict[str, Any]:
    code, message = ErrorCode.none, None
    try:
        stream_id = stream_of(await find_topic(call.services.topics, entity), part.partition_index)
        leader = call.services.brokers.leader(call.zone, stream_id).node_id
        if part.replicas is None:  # cancel what is under way
            code, message = ErrorCode.no_reassignment_in_progress, "partitions are never reassigned here"
        elif part.replicas != (leader,):
            raise InvalidAssignment(
                f"partition {part.partition_index} of {entity.name!r} has its one replica on broker {leader}"
                " and cannot be moved: all brokers share the object store, and hashing spreads partitions"
            )
    except DrayError as error:
        code, message = code_of(error), message_of(error)
    return {"partition_index": part.partition_index, "error_code": code, "error_message": message}


async def list_partition_reassignments(call: Call) -> Fields:
    return {"throttle_time": NO_THROTTLE, "error_code": ErrorCode.none, "error_message": None, "topics": ()}
