"""DescribeConfigs (32): what topics and this broker are set to, and why."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kio.schema.errors import ErrorCode

from dray.errors import BadRequest, DrayError, UnknownTopic
from dray.handlers.call import NO_THROTTLE, Call, DescribedSetting
from dray.handlers.errors import code_of, message_of
from dray.protocol.codec import Fields
from dray.topics.catalog import Topic, check_name
from dray.topics.configs import ConfigRow, ConfigSource, ConfigType, describe

# Kafka's numbers (ConfigResource.Type, DescribeConfigsResponse.ConfigSource and .ConfigType).
TOPIC = 2
BROKER = 4
SOURCES = {ConfigSource.TOPIC: 1, ConfigSource.BROKER: 4, ConfigSource.DEFAULT: 5}
TYPES = {
    ConfigType.BOOLEAN: 1,
    ConfigType.STRING: 2,
    ConfigType.INT: 3,
    ConfigType.LONG: 5,
    ConfigType.DOUBLE: 6,
    ConfigType.LIST: 7,
}


async def describe_configs(call: Call) -> Fields:
    results = [await _resource(call, resource) for resource in call.body.resources]
    return {"throttle_time": NO_THROTTLE, "results": results}


def config_fields(call: Call, topic: Topic) -> list[dict[str, Any]]:
    """Every config of a topic, as DescribeConfigs and CreateTopics tell it."""
    return [_row_fields(row) for row in describe(topic.overrides, call.services.topic_defaults)]


async def _resource(call: Call, resource: Any) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "error_code": ErrorCode.none,
        "error_message": None,
        "resource_type": resource.resource_type,
        "resource_name": resource.resource_name,
        "configs": (),
    }
    try:
        if resource.resource_type == TOPIC:
            topic = await call.services.topics.find(resource.resource_name)
            if topic is None:
                check_name(resource.resource_name)
                raise UnknownTopic(resource.resource_name)
            configs: Iterable[dict[str, Any]] = config_fields(call, topic)
        elif resource.resource_type == BROKER:
            configs = _broker_configs(call, resource.resource_name)
        else:
            raise BadRequest(f"resource type {resource.resource_type} has no configs here")
    except DrayError as error:
        answer |= {"error_code": code_of(error), "error_message": message_of(error)}
        return answer
    wanted = resource.configuration_keys  # None or empty: all of them
    answer["configs"] = [
        config if getattr(call.body, "include_documentation", False) else {**config, "documentation": None}
        for config in configs
        if not wanted or config["name"] in wanted
    ]
    if not getattr(call.body, "include_synonyms", False):
        answer["configs"] = [{**config, "synonyms": ()} for config in answer["configs"]]
    return answer


def _row_fields(row: ConfigRow) -> dict[str, Any]:
    return {
        "name": row.name,
        "value": row.value,
        "read_only": row.read_only,
        "config_source": SOURCES[row.source],
        "is_sensitive": row.sensitive,
        "synonyms": [
            {"name": each.name, "value": each.value, "source": SOURCES[each.source]} for each in row.synonyms
        ],
        "config_type": TYPES[row.type],
        "documentation": row.doc,
    }


def _broker_configs(call: Call, name: str) -> list[dict[str, Any]]:
    own = str(call.services.registry.node_id)
    if name not in ("", own):
        raise BadRequest(f"the settings of broker {name!r} are known only to itself; this is broker {own}")
    return [_setting_fields(setting) for setting in call.services.settings]


def _setting_fields(setting: DescribedSetting) -> dict[str, Any]:
    source = ConfigSource.DEFAULT if setting.value == setting.default else ConfigSource.BROKER
    synonym = {"name": setting.name, "value": setting.value, "source": SOURCES[source]}
    return {
        "name": setting.name,
        "value": setting.value,
        "read_only": True,
        "config_source": SOURCES[source],
        "is_sensitive": False,
        "synonyms": [synonym],
        "config_type": TYPES[setting.type],
        "documentation": setting.doc,
    }
