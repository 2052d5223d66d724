"""OffsetForLeaderEpoch (23): where an epoch ends. There is one only, and it never does (X-57)."""

from __future__ import annotations

from typing import Any

from kio.schema.errors import ErrorCode

from dray.errors import DrayError, NotOwner
from dray.handlers.call import NO_THROTTLE, Call, answer_partitions, stream_of
from dray.handlers.errors import code_of
from dray.handlers.fetch import check_epoch
from dray.log.read import LEADER_EPOCH
from dray.protocol.codec import Fields
from dray.topics.catalog import Topic

UNDEFINED = -1


async def handle(call: Call) -> Fields:
    topics = []
    for entity in call.body.topics:
        partitions = await answer_partitions(call, entity, entity.partitions, _partition)
        topics.append({"topic": entity.topic, "partitions": partitions})
    return {"throttle_time": NO_THROTTLE, "topics": topics}


async def _partition(call: Call, topic: Topic | DrayError, part: Any) -> dict[str, Any]:
    answer = {
        "partition": part.partition,
        "error_code": ErrorCode.none,
        "leader_epoch": UNDEFINED,
        "end_offset": UNDEFINED,
    }
    try:
        if isinstance(topic, DrayError):
            raise topic
        stream_id = stream_of(topic, part.partition)
        check_epoch(part)
        if not call.owns(stream_id):
            raise NotOwner(f"partition {part.partition} of {topic.name!r} is another broker's")
        if part.leader_epoch == LEADER_EPOCH:
            # Behind a barrier: a consumer that is further than it is told takes the log for truncated.
            end = await call.services.index.end(stream_id, fresh=True)
            answer |= {"leader_epoch": LEADER_EPOCH, "end_offset": end.end_records}
    except DrayError as error:
        answer["error_code"] = code_of(error)
    return answer
