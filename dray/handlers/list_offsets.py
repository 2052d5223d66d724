"""ListOffsets (2): where a partition begins and ends, and which record is the first from a time on."""

from __future__ import annotations

from typing import Any, NamedTuple

from kio.schema.errors import ErrorCode

from dray.errors import BadRequest, DrayError, NotOwner, UnsupportedRequestValue
from dray.handlers.call import NO_THROTTLE, Call, answer_partitions, stream_of
from dray.handlers.errors import code_of
from dray.handlers.fetch import check_epoch
from dray.log.read import LEADER_EPOCH
from dray.protocol.codec import Fields
from dray.topics.catalog import Topic

LATEST = -1
EARLIEST = -2
MAX_TIMESTAMP = -3
FIRST_WITH_MAX_TIMESTAMP = 7


class _Found(NamedTuple):
    offset: int = -1
    timestamp_ms: int = -1


async def handle(call: Call) -> Fields:
    topics = []
    for entity in call.body.topics:
        partitions = await answer_partitions(call, entity, _once(entity), _partition)
        topics.append({"name": entity.name, "partitions": partitions})
    return {"throttle_time": NO_THROTTLE, "topics": topics}


def _once(entity: Any) -> list[Any]:
    """Each partition once, one that is named twice as an error (Kafka does so)."""
    by_index: dict[int, Any] = {}
    for part in entity.partitions:
        known = by_index.get(part.partition_index)
        by_index[part.partition_index] = part if known is None else _Twice(part.partition_index)
    return list(by_index.values())


class _Twice(NamedTuple):
    partition_index: int


async def _partition(call: Call, topic: Topic | DrayError, part: Any) -> dict[str, Any]:
    answer: dict[str, Any] = {"partition_index": part.partition_index, "error_code": ErrorCode.none}
    try:
        if isinstance(part, _Twice):
            raise BadRequest(f"partition {part.partition_index} is named twice")
        if isinstance(topic, DrayError):
            raise topic
        stream_id = stream_of(topic, part.partition_index)
        check_epoch(part)
        if not call.owns(stream_id):
            raise NotOwner(f"partition {part.partition_index} of {topic.name!r} is another broker's")
        found = await _find(call, stream_id, part.timestamp)
    except DrayError as error:
        answer["error_code"] = code_of(error)
        return answer
    answer["offset"], answer["timestamp"] = found
    answer["leader_epoch"] = LEADER_EPOCH if found.offset >= 0 else -1
    return answer


async def _find(call: Call, stream_id: int, timestamp_ms: int) -> _Found:
    """Behind a barrier: a client that has been acknowledged elsewhere is not told of an earlier end."""
    index, times = call.services.index, call.services.times
    if timestamp_ms == EARLIEST:
        return _Found(await index.log_start(stream_id, fresh=True))
    end = (await index.end(stream_id, fresh=True)).end_records
    if timestamp_ms == LATEST:
        return _Found(end)
    if timestamp_ms == MAX_TIMESTAMP and call.version >= FIRST_WITH_MAX_TIMESTAMP:
        found = await times.find_latest_time(stream_id, end_offset=end)
    elif timestamp_ms >= 0:
        found = await times.find_by_time(stream_id, timestamp_ms, end_offset=end)
    else:
        # Those of tiered storage (-4, -5) among them: there is one tier.
        raise UnsupportedRequestValue(f"timestamp {timestamp_ms} in version {call.version}")
    return _Found() if found is None else _Found(*found)
