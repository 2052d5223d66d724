"""DescribeCluster (60) and FindCoordinator (10): which brokers there are, and which one to turn to."""

from __future__ import annotations

import logging
from typing import Any

from kio.schema.errors import ErrorCode

from dray.handlers.call import NO_THROTTLE, Call
from dray.handlers.metadata import broker_fields
from dray.protocol.codec import Fields

log = logging.getLogger(__name__)

BROKER_ENDPOINTS = 1
GROUP_KEY = 0
TRANSACTION_KEY = 1
NO_TRANSACTIONS = "transactions are not supported: unset transactional.id"


async def describe_cluster(call: Call) -> Fields:
    brokers = call.services.brokers
    answer: dict[str, Any] = {
        "throttle_time": NO_THROTTLE,
        "error_code": ErrorCode.none,
        "error_message": None,
        "endpoint_type": BROKER_ENDPOINTS,
        "cluster_id": call.services.cluster_id,
        "controller_id": brokers.controller(call.zone).node_id,
        "brokers": [],
    }
    endpoint_type = getattr(call.body, "endpoint_type", BROKER_ENDPOINTS)
    if endpoint_type != BROKER_ENDPOINTS:
        answer["error_code"] = ErrorCode.mismatched_endpoint_type
        answer["error_message"] = "this is a broker; there are no controllers to connect to"
        answer |= {"cluster_id": "", "controller_id": -1}
        return answer
    answer["brokers"] = [
        {**broker_fields(broker), "broker_id": broker.node_id, "is_fenced": False}
        for broker in brokers.told_by(call.services.registry.node_id, call.zone)
    ]
    return answer


async def find_coordinator(call: Call) -> Fields:
    """Any broker serves any group; this is an affinity, as with partitions."""
    key_type = getattr(call.body, "key_type", GROUP_KEY)
    if key_type == TRANSACTION_KEY:  # not all clients show the message to their users
        log.warning("request refused: %s", NO_TRANSACTIONS, extra={"client_id": call.client_id})
    keys = getattr(call.body, "coordinator_keys", None)
    if keys is not None:
        return {
            "throttle_time": NO_THROTTLE,
            "coordinators": [_coordinator(call, key_type, key) for key in keys],
        }
    return {"throttle_time": NO_THROTTLE, **_coordinator(call, key_type, call.body.key)}


def _coordinator(call: Call, key_type: int, key: str) -> dict[str, Any]:
    if key_type != GROUP_KEY:
        code, message = ErrorCode.invalid_request, "only groups have coordinators here"
        if key_type == TRANSACTION_KEY:
            # The one code that makes every client give up: librdkafka asks again for ever after any other.
            code = ErrorCode.transactional_id_authorization_failed
            message = NO_TRANSACTIONS
        return {
            "key": key,
            "error_code": code,
            "error_message": message,
            "node_id": -1,
            "host": "",
            "port": -1,
        }
    broker = broker_fields(call.services.brokers.coordinator(call.zone, key))
    return {"key": key, "error_code": ErrorCode.none, "error_message": None, **broker}
