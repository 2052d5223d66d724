"""DescribeConfigs (32) and ListConfigResources (74): what topics and brokers are set to, and why."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from kio.schema.errors import ErrorCode

from dray.errors import BadRequest, DrayError, UnknownTopic, UnsupportedRequestValue
from dray.handlers.call import NO_THROTTLE, Call, DescribedSetting
from dray.handlers.errors import code_of, message_of
from dray.protocol.codec import Fields
from dray.topics.catalog import Topic, check_name
from dray.topics.configs import ConfigRow, ConfigSource, ConfigType, Synonym, as_topic_configs, describe

# Kafka's numbers (ConfigResource.Type, DescribeConfigsResponse.ConfigSource and .ConfigType).
TOPIC = 2
BROKER = 4
BROKER_LOGGER = 8
CLIENT_METRICS = 16
GROUP = 32
RESOURCE_TYPES = (TOPIC, BROKER, BROKER_LOGGER, CLIENT_METRICS, GROUP)
SOURCES = {
    ConfigSource.TOPIC: 1,
    ConfigSource.CLUSTER: 3,  # DYNAMIC_DEFAULT_BROKER_CONFIG
    ConfigSource.BROKER: 4,
    ConfigSource.DEFAULT: 5,
}
# ListConfigResources asked for client metrics only before it (KIP-1142).
FIRST_WITH_TYPES = 1
TYPES = {
    ConfigType.BOOLEAN: 1,
    ConfigType.STRING: 2,
    ConfigType.INT: 3,
    ConfigType.LONG: 5,
    ConfigType.DOUBLE: 6,
    ConfigType.LIST: 7,
}


async def describe_configs(call: Call) -> Fields:
    # Each once: a small request could ask for the same configs a hundred thousand times.
    once = {
        (each.resource_type, each.resource_name, frozenset(each.configuration_keys or ())): each
        for each in call.body.resources
    }
    results = []
    for resource in once.values():
        results.append(await _resource(call, resource))
        await asyncio.sleep(0)  # what is known here is described without waiting: others are served, too
    return {"throttle_time": NO_THROTTLE, "results": results}


def config_fields(call: Call, topic: Topic) -> list[dict[str, Any]]:
    """Every config of a topic, as DescribeConfigs and CreateTopics tell it."""
    settings = call.services.cluster_settings
    rows = describe(topic.overrides, as_topic_configs(settings.given), as_topic_configs(settings.altered))
    return [_row_fields(row) for row in rows]


def not_configured(resource_type: int) -> BadRequest:
    """What to say of resources that have no configs here."""
    said = {
        BROKER_LOGGER: "levels of loggers are set by log.level when a broker starts",
        CLIENT_METRICS: "no metrics of clients are collected",
        GROUP: "groups have no configs yet",
    }
    return BadRequest(said.get(resource_type, f"resource type {resource_type} has no configs here"))


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
            raise not_configured(resource.resource_type)
    except DrayError as error:
        answer |= {"error_code": code_of(error), "error_message": message_of(error)}
        return answer
    wanted = frozenset(resource.configuration_keys or ())  # None or empty: all of them
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
    services = call.services
    if not name:
        return [_row_fields(row) for row in services.cluster_settings.describe_altered()]
    own = str(services.registry.node_id)
    if name != own:
        raise BadRequest(
            f"the settings of broker {name[:200]!r} are known only to itself; this is broker {own}"
        )
    dynamic = services.cluster_settings.describe()
    names = {row.name for row in dynamic}
    fixed = [_fixed_row(setting) for setting in services.settings if setting.name not in names]
    return [_row_fields(row) for row in sorted([*fixed, *dynamic], key=lambda row: row.name)]


def _fixed_row(setting: DescribedSetting) -> ConfigRow:
    name, value = setting.name, setting.value
    source = ConfigSource.DEFAULT if value == setting.default else ConfigSource.BROKER
    synonyms = (Synonym(name, value, source),)
    return ConfigRow(name, value, source, setting.type, synonyms, setting.doc, read_only=True)


async def list_config_resources(call: Call) -> Fields:
    """Of the types that are asked for; of all, where none is."""
    types = call.body.resource_types if call.version >= FIRST_WITH_TYPES else (CLIENT_METRICS,)
    answer: dict[str, Any] = {
        "throttle_time": NO_THROTTLE,
        "error_code": ErrorCode.none,
        "config_resources": (),
    }
    unknown = set(types) - set(RESOURCE_TYPES)
    if unknown:
        return answer | {"error_code": code_of(UnsupportedRequestValue(f"resource types {unknown}"))}
    names: list[tuple[int, str]] = []
    if not types or BROKER in types:
        brokers = call.services.brokers.in_zone(call.zone)
        names += [(BROKER, str(broker.node_id)) for broker in brokers]
    if not types or TOPIC in types:
        names += [(TOPIC, topic.name) for topic in call.services.topics.all()]
    answer["config_resources"] = [{"resource_type": kind, "resource_name": name} for kind, name in names]
    return answer
