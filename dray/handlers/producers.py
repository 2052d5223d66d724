"""InitProducerId (22) and DescribeProducers (61): who writes idempotently, and how far they are."""

from __future__ import annotations

import logging
from typing import Any

from kio.schema.errors import ErrorCode

from dray.errors import BadRequest, DrayError
from dray.handlers.call import NO_THROTTLE, Call, find_topic, stream_of
from dray.handlers.errors import code_of, message_of
from dray.index.fold import ProducerState
from dray.protocol.codec import Fields

log = logging.getLogger(__name__)

NOBODY = {"producer_id": -1, "producer_epoch": -1}
# There are no transactions.
NO_COORDINATOR = NO_TRANSACTION = -1


async def init_producer_id(call: Call) -> Fields:
    """A new id with epoch 0, always, as Kafka does for producers without transactions.

    A producer that asks because it must go on under a higher epoch (KIP-360) begins anew with the new id.
    """
    answer: dict[str, Any] = {"throttle_time": NO_THROTTLE, "error_code": ErrorCode.none, **NOBODY}
    try:
        if call.body.transactional_id is not None:
            raise BadRequest("transactions are not supported: unset transactional.id")
        producer_id = getattr(call.body, "producer_id", -1)
        producer_epoch = getattr(call.body, "producer_epoch", -1)
        if (producer_id < 0) != (producer_epoch < 0):
            raise BadRequest(
                f"producer {producer_id} with epoch {producer_epoch}: both are known, or neither"
            )
        answer |= {"producer_id": await call.services.producer_ids.next(), "producer_epoch": 0}
    except DrayError as error:
        log.info("InitProducerId: %s", error)
        answer["error_code"] = code_of(error)
    return answer


async def describe_producers(call: Call) -> Fields:
    """Each partition once, however often it is asked for: an answer is much larger than its question."""
    asked: dict[str, dict[int, Any]] = {}
    for topic in call.body.topics:
        asked.setdefault(topic.name, {}).update(dict.fromkeys(topic.partition_indexes, topic))
    topics = []
    for name, indexes in asked.items():
        partitions = [await _partition(call, topic, index) for index, topic in indexes.items()]
        topics.append({"name": name, "partitions": partitions})
    return {"throttle_time": NO_THROTTLE, "topics": topics}


async def _partition(call: Call, entity: Any, index: int) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "partition_index": index,
        "error_code": ErrorCode.none,
        "error_message": None,
        "active_producers": (),
    }
    try:
        stream_id = stream_of(await find_topic(call.services.topics, entity), index)
        fold = await call.services.folds.catch_up(stream_id)
    except DrayError as error:
        return answer | {"error_code": code_of(error), "error_message": message_of(error)}
    answer["active_producers"] = [_producer(*known) for known in fold.producers.items()]
    return answer


def _producer(producer_id: int, state: ProducerState) -> dict[str, Any]:
    return {
        "producer_id": producer_id,
        "producer_epoch": state.epoch,
        "last_sequence": state.batches[-1].last_sequence,
        "last_timestamp": state.clock_ms,  # when a broker wrote it; Kafka tells the newest record's time
        "coordinator_epoch": NO_COORDINATOR,
        "current_txn_start_offset": NO_TRANSACTION,
    }
