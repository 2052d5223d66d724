"""AlterConfigs (33) and IncrementalAlterConfigs (44): configs of topics, and settings of all brokers.

Each resource is changed as a whole or not at all, whatever becomes of the others (X-51), and gets one result.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from kio.schema.errors import ErrorCode

from dray.altering import Alteration, Change, Operation, change_some, replace_all
from dray.cluster_settings import LIST_SETTINGS
from dray.errors import BadRequest, DrayError
from dray.handlers.call import NO_THROTTLE, Call
from dray.handlers.configs import BROKER, TOPIC, not_configured
from dray.handlers.errors import code_of, message_of
from dray.protocol.codec import Fields
from dray.topics.catalog import check_name
from dray.topics.configs import TOPIC_CONFIGS, ConfigType

# Enough to hide the round trips of some topics, few enough to leave the store to others.
MAX_AT_ONCE = 16

LIST_CONFIGS = {each.name: each.default for each in TOPIC_CONFIGS.values() if each.type is ConfigType.LIST}

# From the configs that a request has for a resource, and the lists among those that such a resource can have.
Reading: TypeAlias = Callable[[Any, Mapping[str, str]], Alteration]


async def alter_configs(call: Call) -> Fields:
    """What is not named is set no more."""
    return await _alter_all(call, _replacement)


async def incremental_alter_configs(call: Call) -> Fields:
    return await _alter_all(call, _changes)


async def _alter_all(call: Call, read: Reading) -> Fields:
    named = Counter((each.resource_type, each.resource_name) for each in call.body.resources)
    results: list[dict[str, Any]] = [{}] * len(call.body.resources)
    remaining = iter(enumerate(call.body.resources))

    async def work() -> None:
        for place, resource in remaining:
            times = named[resource.resource_type, resource.resource_name]
            results[place] = await _result(call, resource, times, read)
            await asyncio.sleep(0)  # what is refused is so without waiting: others are served, too

    await asyncio.gather(*(work() for _ in range(min(MAX_AT_ONCE, len(results)))))
    return {"throttle_time": NO_THROTTLE, "responses": results}


async def _result(call: Call, resource: Any, times: int, read: Reading) -> dict[str, Any]:
    answer = {
        "error_code": ErrorCode.none,
        "error_message": None,
        "resource_type": resource.resource_type,
        "resource_name": resource.resource_name,
    }
    try:
        if times > 1:
            raise BadRequest(f"a resource is named once in a request, and this one {times} times")
        await _alter(call, resource, read)
    except DrayError as error:
        answer |= {"error_code": code_of(error), "error_message": message_of(error)}
    return answer


async def _alter(call: Call, resource: Any, read: Reading) -> None:
    services, name, validate_only = call.services, resource.resource_name, call.body.validate_only
    _check(resource)
    if resource.resource_type == TOPIC:
        if not name:
            raise BadRequest("topics have no defaults as a resource; those of brokers stand in for them")
        check_name(name)
        alteration = read(resource.configs, LIST_CONFIGS)
        await services.topics.alter_configs(name, alteration, validate_only=validate_only)
    elif resource.resource_type == BROKER:
        if name:
            raise BadRequest(
                f"broker {name[:200]!r} has no altered settings of its own: brokers are alike here;"
                " an empty name alters those of all brokers"
            )
        alteration = read(resource.configs, LIST_SETTINGS)
        await services.cluster_settings.alter(alteration, validate_only=validate_only)
    else:
        raise not_configured(resource.resource_type)


def _check(resource: Any) -> None:
    names = Counter(config.name for config in resource.configs)
    if len(names) < len(resource.configs):
        raise BadRequest(f"config {names.most_common(1)[0][0][:200]!r} is named more than once")
    for config in resource.configs:
        if config.value is None and getattr(config, "config_operation", None) != Operation.DELETE.value:
            raise BadRequest(f"config {config.name[:200]!r} has no value")


def _replacement(configs: Any, _: Mapping[str, str]) -> Alteration:
    return replace_all({config.name: config.value for config in configs})


def _changes(configs: Any, lists: Mapping[str, str]) -> Alteration:
    return change_some(
        [Change(config.name, _operation(config.config_operation), config.value or "") for config in configs],
        lists,
    )


def _operation(number: int) -> Operation:
    try:
        return Operation(number)
    except ValueError:
        raise BadRequest(f"there is no operation {number} on configs") from None
