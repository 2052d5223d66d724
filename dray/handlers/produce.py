"""Produce (0): batches of many partitions, each committed or refused on its own."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

from kio.schema.errors import ErrorCode

from dray.errors import BadRequest, DrayError, NotOwner, SequenceError, TimedOut, TopicError
from dray.handlers.call import NO_THROTTLE, Call, find_topic, named_as, stream_of
from dray.handlers.errors import code_of, message_of
from dray.log.append import Appending
from dray.protocol.codec import Fields
from dray.topics.catalog import Topic

ACKS = (-1, 0, 1)
# zstd came with this version (KIP-110).
FIRST_WITH_ZSTD = 7
# Clients may ask for less, which no object store can do.
LEAST_TIMEOUT_S = 1.0


async def handle(call: Call) -> Fields | None:
    # The turn, because looking up a topic may wait, and a later request must not overtake this one.
    async with call.connection.produce_turn:
        begun = [(topic, await _begin(call, topic)) for topic in call.body.topic_data]
    waiting = [one.committed for _, parts in begun for _, one in parts if isinstance(one, Appending)]
    if waiting:
        await asyncio.wait(waiting, timeout=max(call.body.timeout.total_seconds(), LEAST_TIMEOUT_S))
        for committed in waiting:
            # Done ones do not mind. Those that have found no room by now would only keep their bytes.
            committed.cancel()
    responses = [
        {**named_as(topic), "partition_responses": [_answer(call, index, one) for index, one in parts]}
        for topic, parts in begun
    ]
    if call.body.acks != 0:
        return {"responses": responses, "throttle_time": NO_THROTTLE}
    for topic in responses:
        for partition in topic["partition_responses"]:
            if partition["error_code"] is not ErrorCode.none:
                # It is the only way to tell a producer that waits for no answer; Kafka does the same.
                call.connection.abort(f"acks=0 and an error: {partition['error_message']}")
                return None
    return None


async def _begin(call: Call, entity: Any) -> list[tuple[int, Appending | DrayError]]:
    """Hand each partition's batches to the log, without waiting for them."""
    try:
        if call.body.transactional_id is not None:
            raise BadRequest("transactions are not supported: unset transactional.id")
        if call.body.acks not in ACKS:
            raise _InvalidAcks(call.body.acks)
        topic = await find_topic(call.services.topics, entity)
    except DrayError as error:
        return [(partition.index, error) for partition in entity.partition_data]
    return [
        (partition.index, _append(call, topic, partition.index, partition.records))
        for partition in entity.partition_data
    ]


def _append(call: Call, topic: Topic, partition: int, records: bytes | None) -> Appending | DrayError:
    try:
        stream_id = stream_of(topic, partition)
        if not call.owns(stream_id):
            raise NotOwner(f"partition {partition} of {topic.name!r} is another broker's")
        appending = call.services.appender.append(
            stream_id, topic.configs, records or b"", allows_zstd=call.version >= FIRST_WITH_ZSTD
        )
    except DrayError as error:
        return error
    # Looked at here, since nobody may be left to look at it later.
    appending.committed.add_done_callback(lambda done: done.cancelled() or done.exception())
    return appending


def _answer(call: Call, index: int, one: Appending | DrayError) -> dict[str, Any]:
    error: BaseException | None
    if isinstance(one, DrayError):
        error = one
    elif one.committed.cancelled():
        error = TimedOut("the batches were not committed in the time that the request gave")
    else:
        error = one.committed.exception()
    answer: dict[str, Any] = {
        "index": index,
        "error_code": ErrorCode.none,
        "base_offset": -1,
        "log_append_time": None,
        "log_start_offset": -1,
        "record_errors": (),
        "error_message": None,
    }
    if error is not None:
        answer["error_code"] = (
            ErrorCode.invalid_required_acks if isinstance(error, _InvalidAcks) else code_of(error)
        )
        answer["error_message"] = None if isinstance(error, TopicError) else message_of(error)
        if isinstance(error, SequenceError) and isinstance(one, Appending):
            # By it a client tells whether its producer can have been forgotten.
            answer["log_start_offset"] = call.services.index.told_log_start(one.stream_id)
        return answer
    assert isinstance(one, Appending), "anything else is an error"
    answer["base_offset"] = one.committed.result().start_offset
    answer["log_start_offset"] = call.services.index.told_log_start(one.stream_id)
    if one.append_time_ms is not None:
        answer["log_append_time"] = datetime.fromtimestamp(one.append_time_ms / 1000, UTC)
    return answer


class _InvalidAcks(BadRequest):
    def __init__(self, acks: int) -> None:
        super().__init__(f"acks is {acks}, and only -1 (all), 0 and 1 are known")
