"""Fetch (1): batches from many partitions, with a wait where there is too little.

Without sessions (KIP-227): a client that asks for one is given session 0, which means none, and goes on
sending whole requests.
"""

from __future__ import annotations

from typing import Any

from kio.schema.errors import ErrorCode

from dray.errors import DrayError, FutureEpoch, NotOwner
from dray.handlers.call import NO_THROTTLE, Call, Reply, find_topic, named_as, stream_of
from dray.handlers.errors import code_of
from dray.log.read import LEADER_EPOCH, Got, Want
from dray.protocol.codec import Fields, Pieces
from dray.topics.catalog import Topic

NO_SESSION = 0
NO_RECORDS = Pieces(())


async def handle(call: Call) -> Fields | Reply:
    body = call.body
    if getattr(body, "session_id", NO_SESSION) != NO_SESSION:
        return _response(ErrorCode.fetch_session_id_not_found, [])
    asked: list[tuple[Any, list[tuple[int, Want | DrayError | int]]]] = []
    for entity in body.topics:
        try:
            topic = await find_topic(call.services.topics, entity)
        except DrayError as error:
            asked.append((entity, [(part.partition, error) for part in entity.partitions]))
        else:
            asked.append((entity, [(part.partition, _want(call, topic, part)) for part in entity.partitions]))
    wants = [one for _, parts in asked for _, one in parts if isinstance(one, Want)]
    is_complete = len(wants) == sum(len(parts) for _, parts in asked)
    fetched = await call.services.reader.fetch(
        wants,
        min_bytes=body.min_bytes,
        max_bytes=min(max(getattr(body, "max_bytes", 2**31 - 1), 0), call.services.fetch_max_bytes),
        # An error is answered at once, and so is what has been fetched so far.
        max_wait_s=body.max_wait.total_seconds() if is_complete and wants else 0.0,
        gone=call.connection.ended,
    )
    got = iter(fetched.partitions)
    responses = [
        {
            **named_as(entity),
            "partitions": [
                _partition(index, next(got) if isinstance(one, Want) else one) for index, one in parts
            ],
        }
        for entity, parts in asked
    ]
    return Reply(_response(ErrorCode.none, responses), fetched.release)


def _want(call: Call, topic: Topic, part: Any) -> Want | DrayError | int:
    """What to read; or why not; or the node that is nearer to the client."""
    try:
        stream_id = stream_of(topic, part.partition)
        check_epoch(part)
        if not call.owns(stream_id):
            raise NotOwner(f"partition {part.partition} of {topic.name!r} is another broker's")
    except DrayError as error:
        return error
    rack: str = getattr(call.body, "rack_id", "")
    if rack:
        nearest = call.services.brokers.nearest(rack, stream_id)
        own = call.services.brokers.get(call.services.registry.node_id)
        if nearest is not None and own is not None and own.zone != rack:
            return nearest.node_id
    return Want(stream_id, part.fetch_offset, max(part.partition_max_bytes, 0))


def check_epoch(part: Any) -> None:
    """There is one epoch only, so what clients know can be no older; newer is another cluster's."""
    epoch: int = getattr(part, "current_leader_epoch", -1)
    if epoch > LEADER_EPOCH:
        raise FutureEpoch(f"leader epoch {epoch}, and {LEADER_EPOCH} is the only one")


def _partition(index: int, one: Got | DrayError | int) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "partition_index": index,
        "error_code": ErrorCode.none,
        "high_watermark": -1,
        "last_stable_offset": -1,
        "log_start_offset": -1,
        "aborted_transactions": None,
        "records": NO_RECORDS,
    }
    if isinstance(one, int):
        answer["preferred_read_replica"] = one
        return answer
    error = one.error if isinstance(one, Got) else one
    if error is not None:
        answer["error_code"] = code_of(error)
    elif isinstance(one, Got):
        answer["high_watermark"] = answer["last_stable_offset"] = one.high_watermark
        answer["log_start_offset"] = one.log_start
        answer["records"] = one.records
    return answer


def _response(error_code: ErrorCode, responses: list[dict[str, Any]]) -> Fields:
    return {
        "throttle_time": NO_THROTTLE,
        "error_code": error_code,
        "session_id": NO_SESSION,
        "responses": responses,
    }
