"""What every handler gets: the request, who sent it, and the parts of the broker it may use."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, TypeAlias, TypeVar
from uuid import UUID

from dray.cluster_settings import ClusterSettings
from dray.errors import DrayError, UnknownPartition, UnknownTopic, UnknownTopicId
from dray.groups.coordinator import GroupCoordinator
from dray.index.deletion import RecordDeleter
from dray.index.lookup import OffsetIndex
from dray.index.times import TimeIndex
from dray.log.append import LogAppender
from dray.log.read import LogReader
from dray.producers.folds import StreamFolds
from dray.producers.ids import ProducerIds
from dray.protocol.codec import Fields
from dray.registry import BrokerRegistry
from dray.routing import Brokers
from dray.server import Connection
from dray.topics.catalog import Topic, TopicCatalog
from dray.topics.configs import ConfigType

NO_THROTTLE = timedelta(0)
NOBODY = UUID(int=0)  # Kafka's way to say that there is no topic id
# Partitions or groups of one request that are looked up or changed at once: each asks the store.
MAX_AT_ONCE = 16

Part = TypeVar("Part")
Answer = TypeVar("Answer")


class DescribedSetting(NamedTuple):
    """A setting of this broker, as DescribeConfigs tells it."""

    name: str
    value: str
    default: str
    type: ConfigType
    doc: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    cluster_id: str
    registry: BrokerRegistry
    topics: TopicCatalog
    index: OffsetIndex
    times: TimeIndex
    deleter: RecordDeleter
    appender: LogAppender
    reader: LogReader
    folds: StreamFolds
    producer_ids: ProducerIds
    groups: GroupCoordinator
    group_heartbeat_interval: timedelta
    offset_metadata_max_bytes: int
    cluster_settings: ClusterSettings
    enforce_owner: bool
    objects_url: str  # without secrets
    fetch_max_bytes: int
    settings: Sequence[DescribedSetting]

    @property
    def brokers(self) -> Brokers:
        return self.registry.brokers


class Call(NamedTuple):
    services: Services
    connection: Connection
    version: int
    client_id: str | None
    zone: str | None
    body: Any  # kio's entity

    def owns(self, stream_id: int) -> bool:
        """Whether to serve this stream here; everybody does, unless `routing.enforce_owner` is on."""
        services = self.services
        return not services.enforce_owner or services.brokers.is_owner(
            services.registry.node_id, self.zone, stream_id
        )


class Reply(NamedTuple):
    """A response with something to be done once it has left."""

    fields: Fields
    on_sent: Callable[[], None]


class Stable(NamedTuple):
    """A response that stays the same for the same request, until brokers or topics change."""

    fields: Fields


# None: the client wants no answer.
Handler: TypeAlias = Callable[[Call], Awaitable[Fields | Reply | Stable | None]]


async def find_topic(topics: TopicCatalog, entity: Any) -> Topic:
    """The topic that a request names, by name or by id. Raises `UnknownTopic`, `UnknownTopicId`."""
    topic_id: UUID | None = getattr(entity, "topic_id", None)
    name: str | None = getattr(entity, "name", getattr(entity, "topic", None))
    if name is not None:
        topic = topics.get(name) or await topics.find(name)
        if topic is None:
            raise UnknownTopic(name)
        return topic
    if topic_id is None or topic_id == NOBODY:
        raise UnknownTopicId(topic_id or NOBODY)
    topic = topics.by_id(topic_id) or await topics.find_id(topic_id)
    if topic is None:
        raise UnknownTopicId(topic_id)
    return topic


async def answer_partitions(
    call: Call,
    entity: Any,
    parts: Iterable[Part],
    answer: Callable[[Call, Topic | DrayError, Part], Awaitable[dict[str, Any]]],
) -> list[dict[str, Any]]:
    """The answers for `parts` of the topic that `entity` names, in order, some of them sought side by side.

    Where the topic is not found, `answer` gets the error in its place: every partition is told.
    """
    topic: Topic | DrayError
    try:
        topic = await find_topic(call.services.topics, entity)
    except DrayError as error:
        topic = error
    return await side_by_side(parts, lambda part: answer(call, topic, part))


async def side_by_side(things: Iterable[Part], answer: Callable[[Part], Awaitable[Answer]]) -> list[Answer]:
    """The answers, in order, `MAX_AT_ONCE` of them sought at a time, however many there are."""
    numbered = enumerate(things)
    answers: dict[int, Answer] = {}

    async def work() -> None:
        for number, thing in numbered:  # each of them is taken by one
            answers[number] = await answer(thing)

    await asyncio.gather(*(work() for _ in range(MAX_AT_ONCE)))
    return [answers[number] for number in range(len(answers))]


def stream_of(topic: Topic, partition: int) -> int:
    """Raises `UnknownPartition`."""
    if not 0 <= partition < len(topic.streams):
        raise UnknownPartition(topic.name, partition, len(topic.streams))
    return topic.streams[partition]


def named_as(entity: Any) -> dict[str, Any]:
    """The fields that name a topic in a response, as the request did; versions take what they know."""
    name = getattr(entity, "name", getattr(entity, "topic", None))
    return {"name": name, "topic": name, "topic_id": getattr(entity, "topic_id", None)}
