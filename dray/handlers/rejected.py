"""Answers to APIs that Dray knows of, does not serve and does not advertise (X-21).

A client that calls one all the same gets an answer in that API's own schema: the error at the top where the
response has one, and for each thing it named where it has not.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, NamedTuple

from kio.schema.errors import ErrorCode

from dray.handlers.call import NO_THROTTLE
from dray.protocol.codec import Fields

# What Kafka says of a transaction that it does not know; null is not possible here.
NEVER = datetime.fromtimestamp(0, UTC)


class Rejected(NamedTuple):
    name: str
    answer: Callable[[Any, ErrorCode], Fields]


def _at_the_top(**more: Any) -> Callable[[Any, ErrorCode], Fields]:
    def answer(body: Any, code: ErrorCode) -> Fields:
        return {"throttle_time": NO_THROTTLE, "error_code": code, **more}

    return answer


def _per_partition(body: Any, code: ErrorCode) -> Fields:
    """AddPartitionsToTxn until version 3, and TxnOffsetCommit."""
    topics: Any = getattr(body, "v3_and_below_topics", None) or getattr(body, "topics", ())
    results = []
    for topic in topics:
        numbers = [getattr(part, "partition_index", part) for part in topic.partitions]
        parts = [{"partition_index": n, "partition_error_code": code, "error_code": code} for n in numbers]
        results.append({"name": topic.name, "results_by_partition": parts, "partitions": parts})
    return {
        "throttle_time": NO_THROTTLE,
        "error_code": code,
        "results_by_topic_v3_and_below": results,
        "results_by_transaction": (),
        "topics": results,
    }


def _per_marker(body: Any, code: ErrorCode) -> Fields:
    """WriteTxnMarkers."""
    markers = []
    for marker in body.markers:
        topics = [
            {
                "name": topic.name,
                "partitions": [
                    {"partition_index": number, "error_code": code} for number in topic.partition_indexes
                ],
            }
            for topic in marker.topics
        ]
        markers.append({"producer_id": marker.producer_id, "topics": topics})
    return {"markers": markers}


def _per_transaction(body: Any, code: ErrorCode) -> Fields:
    """DescribeTransactions."""
    states = [
        {
            "error_code": code,
            "transactional_id": name,
            "transaction_state": "",
            "transaction_timeout": NO_THROTTLE,
            "transaction_start_time": NEVER,
            "producer_id": -1,
            "producer_epoch": -1,
            "topics": (),
        }
        for name in body.transactional_ids
    ]
    return {"throttle_time": NO_THROTTLE, "transaction_states": states}


REJECTED: dict[int, Rejected] = {
    24: Rejected("AddPartitionsToTxn", _per_partition),
    25: Rejected("AddOffsetsToTxn", _at_the_top()),
    26: Rejected("EndTxn", _at_the_top()),
    27: Rejected("WriteTxnMarkers", _per_marker),
    28: Rejected("TxnOffsetCommit", _per_partition),
    65: Rejected("DescribeTransactions", _per_transaction),
    66: Rejected("ListTransactions", _at_the_top(unknown_state_filters=(), transaction_states=())),
}
