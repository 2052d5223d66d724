"""DescribeLogDirs (35): how much each partition holds. The one "directory" is the object store.

A broker tells of the partitions that clients of that zone take it for the replica of, so that tools that ask
all brokers and add up get each partition once. Sizes come from the index: bytes as they were written first,
from the log start on. How large the object store is, and how full, nobody knows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from kio.schema.errors import ErrorCode

from dray.errors import DrayError
from dray.handlers.call import NO_THROTTLE, Call
from dray.handlers.errors import code_of
from dray.protocol.codec import Fields
from dray.topics.catalog import Topic

# Partitions looked up at once, however many there are: what is not in the cache is read.
MAX_LOOKUPS = 16
# Those that are in the cache take no time each, but thousands do.
YIELD_AFTER = 256
UNKNOWN = -1


class _Partition(NamedTuple):
    topic: str
    number: int
    stream_id: int


async def handle(call: Call) -> Fields:
    error_code = ErrorCode.none
    sizes: dict[_Partition, int] = {}
    wanted = iter(list(_partitions(call)))
    try:
        async with asyncio.TaskGroup() as readers:
            for _ in range(MAX_LOOKUPS):
                readers.create_task(_look_up(call, wanted, sizes))
    except* DrayError as errors:
        error_code = code_of(errors.exceptions[0])
        sizes.clear()
    directory = {
        "error_code": error_code,
        "log_dir": call.services.objects_url,
        "topics": _topics(sizes),
        "total_bytes": UNKNOWN,
        "usable_bytes": UNKNOWN,
    }
    return {"throttle_time": NO_THROTTLE, "error_code": ErrorCode.none, "results": [directory]}


def _partitions(call: Call) -> Iterator[_Partition]:
    """Those that were asked for and are there; others are passed over in silence, as Kafka does."""
    services = call.services
    own = services.registry.node_id
    for topic, numbers in _asked(call):
        for number in sorted(numbers):
            if 0 <= number < len(topic.streams):
                stream_id = topic.streams[number]
                if services.brokers.leader(call.zone, stream_id).node_id == own:
                    yield _Partition(topic.name, number, stream_id)


def _asked(call: Call) -> Iterator[tuple[Topic, Iterable[int]]]:
    topics = call.services.topics
    if call.body.topics is None:
        for topic in topics.all():
            yield topic, range(len(topic.streams))
        return
    asked: dict[str, set[int]] = {}
    for entity in call.body.topics:
        asked.setdefault(entity.topic, set()).update(entity.partitions)
    for name, numbers in asked.items():
        found = topics.get(name)
        if found is not None:
            yield found, numbers


async def _look_up(call: Call, wanted: Iterator[_Partition], sizes: dict[_Partition, int]) -> None:
    for count, partition in enumerate(wanted, 1):
        sizes[partition] = await call.services.index.size_bytes(partition.stream_id)
        if count % YIELD_AFTER == 0:
            await asyncio.sleep(0)


def _topics(sizes: Mapping[_Partition, int]) -> list[dict[str, Any]]:
    topics: dict[str, list[dict[str, Any]]] = {}
    for partition, size in sorted(sizes.items()):
        topics.setdefault(partition.topic, []).append(
            {
                "partition_index": partition.number,
                "partition_size": size,
                "offset_lag": 0,
                "is_future_key": False,
            }
        )
    return [{"name": name, "partitions": partitions} for name, partitions in topics.items()]
