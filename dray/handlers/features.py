"""UpdateFeatures (57). Dray has no features that are switched on cluster-wide (KIP-584).

`metadata.version` and the others are about Kafka's own logs and state machines; saying that they are there
would make clients expect those. So ApiVersions lists none, and none can be changed.
"""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from dray.handlers.call import NO_THROTTLE, Call
from dray.protocol.codec import Fields


async def update_features(call: Call) -> Fields:
    """All or nothing, with the error at the top, as Kafka 4 answers in all versions."""
    code, message = ErrorCode.none, None
    updates = call.body.feature_updates
    if updates:
        first = min(update.feature for update in updates)
        code = ErrorCode.invalid_update_version
        message = f"nothing was updated: there is no feature {first[:200]!r}; Dray has none"
    return {"throttle_time": NO_THROTTLE, "error_code": code, "error_message": message, "results": ()}
