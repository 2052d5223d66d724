"""The classic group protocol: JoinGroup (11), SyncGroup (14), Heartbeat (12) and LeaveGroup (13)."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any
from uuid import uuid4

from kio.schema.errors import ErrorCode

from dray.errors import DrayError, FencedInstance, GroupFull, InconsistentProtocol, MemberIdRequired
from dray.groups.group import Join, Leaving, Sync
from dray.handlers.call import NO_THROTTLE, Call
from dray.handlers.errors import code_of
from dray.protocol.codec import Fields

log = logging.getLogger(__name__)

# From this version of JoinGroup on, newcomers are told their id before they join (KIP-394).
NEEDS_KNOWN_ID = 4
CAN_SKIP_ASSIGNMENT = 9
# From this version of SyncGroup on, members say which protocol they mean (KIP-559).
NAMES_PROTOCOL = 5
# From this version of LeaveGroup on, several members may leave at once.
BATCH_LEAVE = 3
NO_GENERATION = -1


async def join_group(call: Call) -> Fields:
    body = call.body
    groups = call.services.groups
    instance_id = getattr(body, "group_instance_id", None)
    session_timeout_ms = to_ms(body.session_timeout)
    client_id = call.client_id or ""
    request = Join(
        member_id=body.member_id,
        new_member_id=f"{client_id if instance_id is None else instance_id}-{uuid4()}",
        instance_id=instance_id,
        client_id=client_id,
        client_host=client_host(call),
        session_timeout_ms=session_timeout_ms,
        rebalance_timeout_ms=to_ms(body.rebalance_timeout) if call.version >= 1 else session_timeout_ms,
        protocol_type=body.protocol_type,
        protocols=tuple((protocol.name, protocol.metadata) for protocol in body.protocols),
        heard_by=groups.process,
        needs_known_id=call.version >= NEEDS_KNOWN_ID,
        can_skip_assignment=call.version >= CAN_SKIP_ASSIGNMENT,
    )
    try:
        joined = await groups.join(body.group_id, request, call.connection.ended)
    except DrayError as error:
        if not isinstance(error, MemberIdRequired):  # each newcomer is told that
            log.info("JoinGroup %r: %s", body.group_id, error)
        return {
            "throttle_time": NO_THROTTLE,
            "error_code": code_of(error),
            "generation_id": NO_GENERATION,
            "protocol_type": None,
            "protocol_name": None if call.version >= 7 else "",
            "leader": "",
            "member_id": _refused_id(error, request),
            "members": (),
        }
    return {
        "throttle_time": NO_THROTTLE,
        "error_code": ErrorCode.none,
        "generation_id": joined.generation,
        "protocol_type": joined.protocol_type,
        "protocol_name": joined.protocol,
        "leader": joined.leader,
        "skip_assignment": joined.skip_assignment,
        "member_id": joined.member_id,
        "members": [
            {
                "member_id": member.member_id,
                "group_instance_id": member.instance_id,
                "metadata": member.metadata,
            }
            for member in joined.members
        ],
    }


def _refused_id(error: DrayError, request: Join) -> str:
    """Which member is refused, as Kafka tells it."""
    match error:
        case MemberIdRequired():
            return error.member_id
        case GroupFull():
            return ""  # its id is no longer good for anything
        case FencedInstance():
            # A newcomer had an id by then: another has joined as the same instance while it waited.
            return request.member_id or request.new_member_id
    return request.member_id


async def sync_group(call: Call) -> Fields:
    body = call.body
    request = Sync(
        member_id=body.member_id,
        instance_id=getattr(body, "group_instance_id", None),
        generation=body.generation_id,
        protocol_type=getattr(body, "protocol_type", None),
        protocol=getattr(body, "protocol_name", None),
        assignments={each.member_id: each.assignment for each in body.assignments},
    )
    answer: dict[str, Any] = {"throttle_time": NO_THROTTLE, "error_code": ErrorCode.none, "assignment": b""}
    try:
        if call.version >= NAMES_PROTOCOL and None in (request.protocol_type, request.protocol):
            raise InconsistentProtocol("it does not say which protocol it means")
        synced = await call.services.groups.sync(body.group_id, request, call.connection.ended)
    except DrayError as error:
        log.info("SyncGroup %r: %s", body.group_id, error)
        return answer | {"error_code": code_of(error), "protocol_type": None, "protocol_name": None}
    return answer | {
        "protocol_type": synced.protocol_type,
        "protocol_name": synced.protocol,
        "assignment": synced.assignment,
    }


async def heartbeat(call: Call) -> Fields:
    body = call.body
    code = ErrorCode.none
    try:
        await call.services.groups.heartbeat(
            body.group_id, body.member_id, getattr(body, "group_instance_id", None), body.generation_id
        )
    except DrayError as error:
        code = code_of(error)
    return {"throttle_time": NO_THROTTLE, "error_code": code}


async def leave_group(call: Call) -> Fields:
    body = call.body
    if call.version >= BATCH_LEAVE:
        leaving = [Leaving(member.member_id, member.group_instance_id) for member in body.members]
    else:
        leaving = [Leaving(body.member_id, None)]
    try:
        left = await call.services.groups.leave(body.group_id, leaving)
    except DrayError as error:
        log.info("LeaveGroup %r: %s", body.group_id, error)
        return {"throttle_time": NO_THROTTLE, "error_code": code_of(error), "members": ()}
    codes = [ErrorCode.none if each.error is None else code_of(each.error) for each in left]
    return {
        "throttle_time": NO_THROTTLE,
        "error_code": ErrorCode.none if call.version >= BATCH_LEAVE else codes[0],
        "members": [
            {"member_id": each.member_id, "group_instance_id": each.instance_id, "error_code": code}
            for each, code in zip(left, codes, strict=True)
        ],
    }


def to_ms(duration: timedelta) -> int:
    return duration // timedelta(milliseconds=1)


def client_host(call: Call) -> str:
    """As Java writes an address, for Kafka's tools show it."""
    return "/" + call.connection.peer.rpartition(":")[0]
