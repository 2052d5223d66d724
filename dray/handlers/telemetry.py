"""GetTelemetrySubscriptions (71) and PushTelemetry (72), KIP-714: of clients' metrics none are wanted.

As with a Kafka broker that has no receiver for them, clients are not told of these APIs. Those who ask all
the same get an answer: nothing is subscribed to, come back in five minutes.
"""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

from kio.schema.errors import ErrorCode

from dray.handlers.call import NO_THROTTLE, NOBODY, Call
from dray.protocol.codec import Fields

# Kafka's defaults.
PUSH_INTERVAL = timedelta(minutes=5)
MAX_BYTES = 2**20
NO_SUBSCRIPTION = 0


async def get_telemetry_subscriptions(call: Call) -> Fields:
    instance = call.body.client_instance_id
    return {
        "throttle_time": NO_THROTTLE,
        "error_code": ErrorCode.none,
        "client_instance_id": uuid4() if instance in (None, NOBODY) else instance,
        "subscription_id": NO_SUBSCRIPTION,
        "accepted_compression_types": (),
        "push_interval": PUSH_INTERVAL,
        "telemetry_max_bytes": MAX_BYTES,
        "delta_temporality": True,
        "requested_metrics": (),
    }


async def push_telemetry(call: Call) -> Fields:
    """Nothing was subscribed to; the client is to ask for what is."""
    anonymous = call.body.client_instance_id in (None, NOBODY)
    code = ErrorCode.invalid_request if anonymous else ErrorCode.unknown_subscription_id
    return {"throttle_time": NO_THROTTLE, "error_code": code}
