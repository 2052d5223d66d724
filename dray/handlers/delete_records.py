"""DeleteRecords (21): the log of a partition starts later from now on."""

from __future__ import annotations

import asyncio
from typing import Any

from kio.schema.errors import ErrorCode

from dray.errors import DrayError, NotOwner, TimedOut
from dray.handlers.call import NO_THROTTLE, Call, answer_partitions, stream_of
from dray.handlers.errors import code_of
from dray.protocol.codec import Fields
from dray.topics.catalog import Topic

HIGH_WATERMARK = -1
NO_WATERMARK = -1
# Clients may ask for less, which no metadata store can do.
LEAST_TIMEOUT_S = 1.0


async def handle(call: Call) -> Fields:
    # One that is named several times counts as it was named last (Kafka does so).
    asked: dict[str, dict[int, int]] = {}
    for entity in call.body.topics:
        asked.setdefault(entity.name, {}).update((p.partition_index, p.offset) for p in entity.partitions)
    topics = []
    for name, offsets in asked.items():
        partitions = await answer_partitions(call, _Named(name), offsets.items(), _partition)
        topics.append({"name": name, "partitions": partitions})
    return {"throttle_time": NO_THROTTLE, "topics": topics}


class _Named:
    def __init__(self, name: str) -> None:
        self.name = name


async def _partition(call: Call, topic: Topic | DrayError, asked: tuple[int, int]) -> dict[str, Any]:
    partition, offset = asked
    answer = {"partition_index": partition, "low_watermark": NO_WATERMARK, "error_code": ErrorCode.none}
    limit_s = max(call.body.timeout.total_seconds(), LEAST_TIMEOUT_S)
    try:
        if isinstance(topic, DrayError):
            raise topic
        stream_id = stream_of(topic, partition)
        if not call.owns(stream_id):
            raise NotOwner(f"partition {partition} of {topic.name!r} is another broker's")
        before = None if offset == HIGH_WATERMARK else offset
        try:
            async with asyncio.timeout(limit_s):
                answer["low_watermark"] = await call.services.deleter.delete_before(stream_id, before)
        except TimeoutError:
            raise TimedOut(f"not deleted within {limit_s:g} s; it may be done yet") from None
    except DrayError as error:
        answer["error_code"] = code_of(error)
    return answer
