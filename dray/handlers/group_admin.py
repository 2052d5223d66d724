"""Groups seen from outside: DescribeGroups (15), ListGroups (16) and DeleteGroups (42)."""

from __future__ import annotations

import logging
from typing import Any

from kio.schema.errors import ErrorCode

from dray.errors import DrayError, UnknownGroup
from dray.groups.coordinator import state_of
from dray.groups.group import ClassicGroup, ConsumerGroup, GroupState
from dray.handlers.call import NO_THROTTLE, Call, side_by_side
from dray.handlers.errors import code_of, message_of
from dray.protocol.codec import Fields

log = logging.getLogger(__name__)

# What Kafka says of operations when nobody asked.
NOT_ASKED = -(2**31)
# Without access control everybody may do all that can be done to a group: read, delete, describe, and
# describe and alter its configs.
ALL_OPERATIONS = 1 << 3 | 1 << 6 | 1 << 8 | 1 << 10 | 1 << 11
# From this version on, a group that is not there is an error, and not just dead.
UNKNOWN_IS_AN_ERROR = 6


def authorized_operations(call: Call) -> int:
    return ALL_OPERATIONS if getattr(call.body, "include_authorized_operations", False) else NOT_ASKED


async def list_groups(call: Call) -> Fields:
    states = {state.lower() for state in getattr(call.body, "states_filter", ())}
    types = {each.lower() for each in getattr(call.body, "types_filter", ())}
    listed = []
    try:
        for group_id, group in await call.services.groups.list():
            state, kind = state_of(group).value, type_of(group)
            if (states and state.lower() not in states) or (types and kind not in types):
                continue
            listed.append(
                {
                    "group_id": group_id,
                    "protocol_type": _protocol_type(group),
                    "group_state": state,
                    "group_type": kind,
                }
            )
    except DrayError as error:
        log.warning("ListGroups: %s", error)
        return {"throttle_time": NO_THROTTLE, "error_code": ErrorCode.coordinator_not_available, "groups": ()}
    return {"throttle_time": NO_THROTTLE, "error_code": ErrorCode.none, "groups": listed}


async def describe_groups(call: Call) -> Fields:
    """Each group once, however often it is asked for: an answer is much larger than its question."""
    groups = await side_by_side(dict.fromkeys(call.body.groups), lambda group_id: _described(call, group_id))
    return {"throttle_time": NO_THROTTLE, "groups": groups}


async def delete_groups(call: Call) -> Fields:
    async def delete(group_id: str) -> dict[str, Any]:
        code = ErrorCode.none
        try:
            await call.services.groups.delete(group_id)
        except DrayError as error:
            log.info("DeleteGroups %r: %s", group_id, error)
            code = code_of(error)
        return {"group_id": group_id, "error_code": code}

    results = await side_by_side(dict.fromkeys(call.body.groups_names), delete)
    return {"throttle_time": NO_THROTTLE, "results": results}


def type_of(group: ClassicGroup | ConsumerGroup) -> str:
    return "consumer" if isinstance(group, ConsumerGroup) else "classic"


def _protocol_type(group: ClassicGroup | ConsumerGroup) -> str:
    return "consumer" if isinstance(group, ConsumerGroup) else group.protocol_type or ""


async def _described(call: Call, group_id: str) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "error_code": ErrorCode.none,
        "error_message": None,
        "group_id": group_id,
        "group_state": "",
        "protocol_type": "",
        "protocol_data": "",
        "members": (),
        "authorized_operations": NOT_ASKED,
    }
    try:
        group = await call.services.groups.find(group_id)
        if not isinstance(group, ClassicGroup):
            raise UnknownGroup(f"there is no classic group {group_id!r}")
    except UnknownGroup as error:
        answer["group_state"] = GroupState.DEAD.value
        if call.version >= UNKNOWN_IS_AN_ERROR:
            answer |= {"error_code": code_of(error), "error_message": message_of(error)}
        return answer
    except DrayError as error:
        return answer | {"error_code": code_of(error), "error_message": message_of(error)}
    is_stable = group.state is GroupState.STABLE
    return answer | {
        "group_state": group.state.value,
        "protocol_type": group.protocol_type or "",
        "protocol_data": (group.protocol or "") if is_stable else "",
        "members": [
            {
                "member_id": member.member_id,
                "group_instance_id": member.instance_id,
                "client_id": member.client_id,
                "client_host": member.client_host,
                # Until all agree on a protocol there is nothing to tell of it.
                "member_metadata": dict(member.protocols).get(group.protocol or "", b"")
                if is_stable
                else b"",
                "member_assignment": member.assignment,
            }
            for member in group.members.values()
        ],
        "authorized_operations": authorized_operations(call),
    }
