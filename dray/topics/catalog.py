"""The topics of the cluster: finding, creating, growing and deleting them.

One record per topic (`record`) decides everything, by compare-and-put; every broker does all of it. Finding
is a look at the broker's view (`Directory`); only what is not there is looked up in the store.

**Creating and growing** touch several domains, so they are sagas of steps that anybody may repeat:
1. the record is put with the new stream ids as `planned`; what they belong to cannot be seen yet;
2. each planned id is claimed by its stream record, put expecting ABSENT. An id that is another's is replaced
   in the record by a new one;
3. the record is put with the planned ids as `streams`: from this moment they are visible, all at once.

**Deleting**: the record is put as DELETING, which hides the topic; it is copied to `deleted-topics/` for
whoever frees its space; it is removed. The name is free again, for a topic with another id and other streams.

**Configs** are changed in the record, by one put (`amend`).

**A broker that dies, or does not learn what became of a write**, leaves a record that is not at rest. Whoever
needs that record next takes it on from where it stands (`_finish`); a starting broker does so for all.

**Writes that land late.** A put of step 1 whose outcome is unknown may land when its topic was long created,
by another attempt, and deleted. It would bring a deleted topic back, with its streams. So before a creation
goes on, it is looked up in `deleted-topics/`: a topic that is there is removed again. All other puts and
removals of a topic's record name its version, and are void when they come late. Whoever empties
`deleted-topics/` has to wait for as long as a late write is conceivable.

Nothing here knows of replicas: a replication factor is for the caller to check.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import re
import secrets
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Generic, TypeVar
from uuid import UUID, uuid4
from weakref import WeakValueDictionary

from dray.altering import Alteration
from dray.errors import (
    InvalidPartitions,
    InvalidTopicConfig,
    InvalidTopicName,
    MetadataError,
    OutcomeUnknown,
    TopicExists,
    Unavailable,
    UnknownTopic,
    VersionConflict,
)
from dray.index.entry import stream_domain
from dray.metadata.amend import amend
from dray.metadata.directory import Directory, Found
from dray.metadata.keys import CLUSTER_DOMAIN, escape
from dray.metadata.store import Expect, Expectation, MetadataStore, Put
from dray.topics.configs import TopicConfigs, normalize, parse_configs
from dray.topics.record import (
    TOPICS,
    StreamRecord,
    TopicRecord,
    TopicState,
    decode_stream,
    decode_topic,
    deleted_key,
    encode_stream,
    encode_topic,
    stream_key,
    topic_key,
)

log = logging.getLogger(__name__)

# A topic is one record, and an id takes 19 bytes of it: 950,000 bytes, with 131,072 for its configs, stay
# below the 1,310,720 that fit into one write of the narrowest store (etcd takes 1.5 MiB in a request).
MAX_PARTITIONS = 50_000
# What a record may still grow by: another state, and the key of its copy.
SPARE_BYTES = 1_024
# Each attempt was foiled by another's progress or by an answer that was lost; so many in a row are an outage.
ATTEMPTS = 10
# Ids that were looked up in vain. A miss costs a scan of all topics; this bounds what remembering costs.
MAX_UNKNOWN_IDS = 1_024
# As `Directory` reads: about 1 MiB of small records in one answer.
PAGE_RECORDS = 1_000

K = TypeVar("K")
V = TypeVar("V")

_LEGAL = re.compile(r"[a-zA-Z0-9._-]*")
_MAX_NAME_CHARS = 249


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic as it can be used. `streams[p]` is the stream of partition p."""

    name: str
    topic_id: UUID
    streams: tuple[int, ...]
    configs: TopicConfigs
    overrides: Mapping[str, str]
    version: int  # of its record; 0 where it was not written


def check_name(name: str) -> None:
    """Kafka's rules (`Topic.validate`). Raises `InvalidTopicName`."""
    if name in ("", ".", ".."):
        raise InvalidTopicName(name, "it must not be empty, '.' or '..'")
    if len(name) > _MAX_NAME_CHARS:
        raise InvalidTopicName(name, f"it has {len(name)} characters, and {_MAX_NAME_CHARS} are allowed")
    if not _LEGAL.fullmatch(name):
        raise InvalidTopicName(name, "only ASCII letters and digits, '.', '_' and '-' are allowed")


def topic_directory(store: MetadataStore) -> Directory[TopicRecord]:
    """The view that a catalog needs. Whoever makes it runs it."""
    return Directory(store, CLUSTER_DOMAIN, TOPICS, decode_topic)


class TopicCatalog:
    """See the module's text. `defaults` are the broker's settings, named as topic configs are.

    Besides what they say, methods raise what the store raises: `Unavailable` where nothing happened, and
    `OutcomeUnknown` where something may have happened or may be finished by somebody later.
    """

    def __init__(
        self,
        store: MetadataStore,
        num_domains: int,
        directory: Directory[TopicRecord],
        *,
        wall_clock_ms: Callable[[], int],
        num_partitions: int = 1,
        defaults: Mapping[str, str] = MappingProxyType({}),
        new_id: Callable[[], UUID] = uuid4,
        new_stream_id: Callable[[], int] = lambda: secrets.randbelow(2**63 - 1) + 1,
    ) -> None:
        parse_configs({}, defaults)  # a bad setting shows now and not with the first topic
        self._store = store
        self._num_domains = num_domains
        self._directory = directory
        self._wall_clock_ms = wall_clock_ms
        self._num_partitions = num_partitions
        self._defaults = defaults
        self._altering: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._new_id = new_id
        self._new_stream_id = new_stream_id
        self._topics: dict[str, Topic] = {}  # by segment, good while their version is the view's
        self._names: dict[UUID, str] = {}  # of all visible topics when the view was at `_named`
        self._named = -1
        self._lookups: _Shared[str, Found[TopicRecord] | None] = _Shared()
        self._scans: _Shared[None, dict[UUID, str]] = _Shared()
        self._unknown_ids: OrderedDict[UUID, None] = OrderedDict()

    @property
    def revision(self) -> int:
        """Grows with every change of the view."""
        return self._directory.revision

    def set_defaults(self, num_partitions: int, configs: Mapping[str, str]) -> None:
        """Other settings of the broker, from now on. They hold for all topics that do not override them."""
        parse_configs({}, configs)
        self._num_partitions = num_partitions
        self._defaults = configs
        self._topics.clear()

    def get(self, name: str) -> Topic | None:
        """The topic, if the view has it."""
        segment = escape(name)
        found = self._directory.get(segment)
        topic = self._topics.get(segment)
        if found is not None and topic is not None and topic.version == found.version:
            return topic
        return self._make(segment, found)

    async def find(self, name: str) -> Topic | None:
        """The topic; one that the view does not have is looked up in the store."""
        topic = self.get(name)
        if topic is not None or not _is_legal(name):
            return topic
        await self._lookups.call(name, lambda: self._directory.refresh(escape(name)))
        return self.get(name)

    def by_id(self, topic_id: UUID) -> Topic | None:
        """The topic, if the view has it."""
        name = self._names.get(topic_id)
        topic = None if name is None else self.get(name)
        if topic is None and self._named != self.revision:
            self._index()
            name = self._names.get(topic_id)
            topic = None if name is None else self.get(name)
        return topic if topic is not None and topic.topic_id == topic_id else None

    async def find_id(self, topic_id: UUID) -> Topic | None:
        """The topic; one that the view does not have is looked up in the store, once.

        Nobody knows an id before its topic is visible, so an id that was not there then never comes.
        """
        topic = self.by_id(topic_id)
        if topic is not None or topic_id in self._unknown_ids:
            return topic
        name = (await self._scans.call(None, self._scan_ids)).get(topic_id)
        if name is not None:
            await self._directory.refresh(escape(name))
        else:
            self._unknown_ids[topic_id] = None
            if len(self._unknown_ids) > MAX_UNKNOWN_IDS:
                self._unknown_ids.popitem(last=False)
        return self.by_id(topic_id)

    async def reload(self) -> None:
        """Make the whole view at least as new as this call."""
        await self._directory.reload()

    def all(self) -> list[Topic]:
        """All topics of the view, by name."""
        self._index()
        topics = [self.get(name) for name in sorted(self._names.values())]
        return [topic for topic in topics if topic is not None]

    async def create(
        self, name: str, partitions: int, overrides: Mapping[str, str | None], *, validate_only: bool = False
    ) -> Topic:
        """Make a topic; -1 partitions are as many as the broker's default.

        Raises `InvalidTopicName`, `InvalidPartitions`, `InvalidTopicConfig`, `TopicExists`.
        """
        check_name(name)
        count = self._num_partitions if partitions == -1 else partitions
        if not 1 <= count <= MAX_PARTITIONS:
            raise InvalidPartitions(name, partitions, f"from 1 to {MAX_PARTITIONS}, or -1 for the default")
        parse_configs(overrides, self._defaults)
        configs = normalize(overrides)
        await self._check_collision(name)
        record = TopicRecord(
            name=name,
            topic_id=self._new_id(),
            state=TopicState.ACTIVE,
            streams=(),
            planned=self._new_streams(count),
            configs=configs,
            created_at_ms=self._wall_clock_ms(),
        )
        self._check_fits(record)
        if validate_only:
            if await self._directory.refresh(escape(name)) is not None:
                raise TopicExists(name)
            return self._topic(_committed(record), 0)
        return await self._create(record)

    async def _create(self, record: TopicRecord) -> Topic:
        begun = put = False
        for _ in range(ATTEMPTS):
            with _half_done_if(begun, record.name):
                outcome = await self._try_put(record, Expect.ABSENT)
            begun |= outcome is not _Outcome.REFUSED
            put |= outcome is _Outcome.DONE
            with _half_done_if(begun, record.name):
                found = await self._finish(record.name)
            if found is not None and found.value.topic_id == record.topic_id:
                return self._topic(found.value, found.version)
            if put:
                # Somebody has finished and then deleted it, before this one came to see it.
                return self._topic(_committed(record), 0)
            if found is not None:
                raise TopicExists(record.name)
        raise _given_up(record.name)

    async def grow(self, name: str, total: int, *, validate_only: bool = False) -> Topic:
        """Give a topic more partitions, `total` in all. Raises `UnknownTopic`, `InvalidPartitions`."""
        mine: set[int] = set()  # what this call planned, perhaps
        for _ in range(ATTEMPTS):
            with _half_done_if(bool(mine), name):
                found = await self._finish(name)
            if found is None:
                raise UnknownTopic(name)
            record = found.value
            if not mine.isdisjoint(record.streams):
                return self._topic(record, found.version)
            current = len(record.streams)
            if not current < total <= MAX_PARTITIONS:
                raise InvalidPartitions(
                    name, total, f"it has {current}, and can only be given more, up to {MAX_PARTITIONS}"
                )
            grown = replace(record, planned=self._new_streams(total - current))
            self._check_fits(grown)
            if validate_only:
                return self._topic(_committed(grown), 0)
            with _half_done_if(bool(mine), name):
                if await self._try_put(grown, found.version) is not _Outcome.REFUSED:
                    mine.update(grown.planned)
        raise _given_up(name)

    async def alter_configs(self, name: str, alter: Alteration, *, validate_only: bool = False) -> None:
        """Let a topic override what `alter` makes of its overrides. Holds on this broker when it returns.

        Raises `UnknownTopic`, `InvalidTopicConfig`, and what `alter` raises.
        """

        def decide(record: TopicRecord | None) -> TopicRecord | None:
            if record is None:
                raise UnknownTopic(name)
            overrides = alter(record.configs)
            parse_configs(overrides, self._defaults)
            altered = replace(record, configs=normalize(overrides))
            if not self._fits(altered):
                expected = "the metadata store does not take so large a record"
                raise InvalidTopicConfig(next(iter(overrides), ""), None, expected)
            return None if validate_only or altered.configs == record.configs else altered

        async def put(record: TopicRecord, expect: Expectation) -> None:
            await self._put(record, expect)
            # It is done. If the store is away now, the watch brings it when it is back.
            with contextlib.suppress(MetadataError):
                await self._directory.refresh(escape(name))

        def holds(found: TopicRecord | None, put: TopicRecord) -> bool:
            """Others may have given it more partitions since."""
            return found is not None and (found.topic_id, found.configs) == (put.topic_id, put.configs)

        # Changes of one broker wait for each other, so that only other brokers can foil an attempt.
        async with self._altering.setdefault(name, asyncio.Lock()):
            await amend(f"topic {name!r}", lambda: self._finish(name), decide, put, holds)

    async def delete(self, topic: str | UUID) -> None:
        """Remove the topic of this name or id. It is hidden when this returns. Raises `UnknownTopic`."""
        name = topic
        if isinstance(name, UUID):
            known = await self.find_id(name)
            if known is None:
                raise UnknownTopic(topic)
            name = known.name
        marked: UUID | None = None  # by this call, perhaps
        for _ in range(ATTEMPTS):
            with _half_done_if(marked is not None, name):
                found = await self._finish(name)
            if marked is not None and (found is None or found.value.topic_id != marked):
                return
            if found is None or (isinstance(topic, UUID) and found.value.topic_id != topic):
                raise UnknownTopic(topic)
            with _half_done_if(marked is not None, name):
                deleting = replace(found.value, state=TopicState.DELETING)
                if await self._try_put(deleting, found.version) is not _Outcome.REFUSED:
                    marked = deleting.topic_id
        raise _given_up(name)

    async def sweep(self) -> None:
        """Finish whatever the view shows half-done. What cannot be finished now is left for later."""
        left = [found.value.name for found in self._directory.values().values() if not found.value.at_rest]
        for name in left:
            try:
                await self._finish(name)
            except MetadataError as error:
                log.warning("topic %s stays half-done for now: %s", name, error)

    async def _finish(self, name: str) -> Found[TopicRecord] | None:
        """Bring the record of this name to rest, whoever left it; what is there then, if anything."""
        if not _is_legal(name):
            return None
        for _ in range(ATTEMPTS):
            found = await self._directory.refresh(escape(name))
            if found is None or found.value.at_rest:
                return found
            # If it fails, somebody else did it, or it may be done all the same: the next look tells.
            with contextlib.suppress(VersionConflict, OutcomeUnknown):
                await self._step(found.value, found.version)
        raise _given_up(name)

    async def _step(self, record: TopicRecord, version: int) -> None:
        """Take a record that is not at rest one step further."""
        if record.state is TopicState.DELETING:
            with contextlib.suppress(VersionConflict):  # then it is there, written by another
                await self._store.put(
                    CLUSTER_DOMAIN, deleted_key(record.topic_id), encode_topic(record), Expect.ABSENT
                )
            await self._store.delete(CLUSTER_DOMAIN, topic_key(record.name), version)
        elif not record.streams and await self._was_deleted(record.topic_id):
            await self._store.delete(CLUSTER_DOMAIN, topic_key(record.name), version)
        else:
            taken = await self._claim(record)
            if not taken:
                await self._put(_committed(record), version)
            else:
                fresh = iter(self._new_streams(len(taken)))
                planned = tuple(next(fresh) if p in taken else s for p, s in enumerate(record.planned))
                await self._put(replace(record, planned=planned), version)

    async def _was_deleted(self, topic_id: UUID) -> bool:
        # The barrier, because the copy is older than the late record, but a read may be older still.
        await self._store.barrier(CLUSTER_DOMAIN)
        return await self._store.get(CLUSTER_DOMAIN, deleted_key(topic_id)) is not None

    async def _claim(self, record: TopicRecord) -> set[int]:
        """Claim what is planned; the places in `planned` of ids that are another's."""
        taken: set[int] = set()
        seen = set(record.streams)
        by_domain: dict[int, list[_Claim]] = defaultdict(list)
        for place, stream_id in enumerate(record.planned):
            if stream_id in seen:
                taken.add(place)
                continue
            seen.add(stream_id)
            partition = len(record.streams) + place
            stream = StreamRecord(record.topic_id, record.name, partition, record.created_at_ms)
            claim = _Claim(place, stream, Put(stream_key(stream_id), encode_stream(stream), Expect.ABSENT))
            by_domain[stream_domain(stream_id, self._num_domains)].append(claim)
        for domain, claims in by_domain.items():
            for some in self._split(claims):
                taken |= await self._claim_in(domain, some)
        return taken

    async def _claim_in(self, domain: int, claims: Sequence[_Claim]) -> set[int]:
        taken: set[int] = set()
        for _ in range(ATTEMPTS):
            try:
                result = await self._store.append(domain, (), [claim.put for claim in claims])
                claims = [
                    claim for claim, version in zip(claims, result.puts, strict=True) if version is None
                ]
                if not claims:
                    return taken
            except VersionConflict:
                pass  # nothing was put, and at least one is there
            await self._store.barrier(domain)
            missing = []
            for claim in claims:
                found = await self._store.get(domain, claim.put.key)
                if found is None:
                    missing.append(claim)
                elif not claim.is_made_by(decode_stream(claim.put.key, found.value)):
                    taken.add(claim.place)
            if not missing:
                return taken
            claims = missing
        raise OutcomeUnknown(f"streams of domain {domain}: not claimed after {ATTEMPTS} attempts")

    def _split(self, claims: Sequence[_Claim]) -> Iterator[list[_Claim]]:
        """In parts that fit into one append each. Sizes of puts add up in all `limits`."""
        limits = self._store.limits
        some: list[_Claim] = []
        size = 0
        for claim in claims:
            more = limits.size((), (claim.put,), ())
            if some and (len(some) == limits.max_operations or size + more > limits.max_bytes):
                yield some
                some, size = [], 0
            some.append(claim)
            size += more
        yield some

    async def _try_put(self, record: TopicRecord, expect: Expectation) -> _Outcome:
        try:
            await self._put(record, expect)
        except VersionConflict:
            return _Outcome.REFUSED
        except OutcomeUnknown:
            return _Outcome.UNKNOWN
        return _Outcome.DONE

    async def _put(self, record: TopicRecord, expect: Expectation) -> None:
        await self._store.put(CLUSTER_DOMAIN, topic_key(record.name), encode_topic(record), expect)

    async def _check_collision(self, name: str) -> None:
        """Refuse a name that differs from another topic's only in '.' and '_', as Kafka does.

        The names of Kafka's metrics have '_' for both. Nothing else is at stake, so this is decided on a
        read: two such topics can come to be if they are created at the same moment.
        """
        if "." not in name and "_" not in name:
            return
        unified = name.replace(".", "_")
        for found in list(self._directory.values().values()):
            other = found.value.name
            if other != name and other.replace(".", "_") == unified:
                there = await self._directory.refresh(escape(other))
                if there is not None and there.value.state is TopicState.ACTIVE:
                    raise InvalidTopicName(name, f"it differs from topic {other!r} only in '.' and '_'")

    def _fits(self, record: TopicRecord) -> bool:
        """A store may be set up to take less than usual."""
        limits = self._store.limits
        size = limits.size((), (Put(topic_key(record.name), encode_topic(record)),), ())
        return size + SPARE_BYTES <= limits.max_bytes

    def _check_fits(self, record: TopicRecord) -> None:
        if not self._fits(record):
            partitions = len(record.streams) + len(record.planned)
            raise InvalidPartitions(
                record.name, partitions, "the metadata store does not take so large a record"
            )

    def _new_streams(self, count: int) -> tuple[int, ...]:
        return tuple(self._new_stream_id() for _ in range(count))

    def _make(self, segment: str, found: Found[TopicRecord] | None) -> Topic | None:
        if found is None or not found.value.visible:
            self._topics.pop(segment, None)
            return None
        topic = self._topics[segment] = self._topic(found.value, found.version)
        return topic

    def _topic(self, record: TopicRecord, version: int) -> Topic:
        overrides = dict(record.configs)
        while True:
            try:
                configs = parse_configs(overrides, self._defaults)
                break
            except InvalidTopicConfig as error:
                # A broker of another version took it. Serving the topic without it beats not serving it.
                log.warning("topic %s: %s; the default is used", record.name, error)
                if overrides.pop(error.config, None) is None:
                    overrides.clear()
        return Topic(record.name, record.topic_id, record.streams, configs, record.configs, version)

    def _index(self) -> None:
        if self._named == self.revision:
            return
        view = self._directory.values()
        self._names = {f.value.topic_id: f.value.name for f in view.values() if f.value.visible}
        self._topics = {segment: topic for segment, topic in self._topics.items() if segment in view}
        self._named = self.revision

    async def _scan_ids(self) -> dict[UUID, str]:
        names: dict[UUID, str] = {}
        await self._store.barrier(CLUSTER_DOMAIN)
        start = ""
        while True:
            page = await self._store.scan(CLUSTER_DOMAIN, TOPICS, start=start, limit=PAGE_RECORDS)
            for found in page:
                with contextlib.suppress(MetadataError):  # the view says what cannot be read
                    record = decode_topic(found.key, found.value)
                    names[record.topic_id] = record.name
            if len(page) < PAGE_RECORDS:
                return names
            start = page[-1].key.rpartition("/")[2] + "\0"


class _Shared(Generic[K, V]):
    """Calls that many wait for. What a caller gets was begun after it asked, so it is as new as that."""

    def __init__(self) -> None:
        self._running: dict[K, asyncio.Task[V]] = {}

    async def call(self, key: K, begin: Callable[[], Coroutine[None, None, V]]) -> V:
        if key in self._running:
            await asyncio.wait([self._running[key]])
        # Whoever else waited for the same may have begun the next one already.
        if key not in self._running:
            self._running[key] = asyncio.create_task(begin())
            self._running[key].add_done_callback(lambda task: self._ended(key, task))
        return await asyncio.shield(self._running[key])

    def _ended(self, key: K, task: asyncio.Task[V]) -> None:
        del self._running[key]
        if not task.cancelled():
            task.exception()  # looked at, in case all who waited were cancelled


class _Outcome(enum.Enum):
    DONE = "done"
    REFUSED = "refused"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class _Claim:
    place: int  # in `planned`
    stream: StreamRecord
    put: Put

    def is_made_by(self, other: StreamRecord) -> bool:
        return (other.topic_id, other.partition) == (self.stream.topic_id, self.stream.partition)


def _committed(record: TopicRecord) -> TopicRecord:
    return replace(record, streams=record.streams + record.planned, planned=())


def _is_legal(name: str) -> bool:
    try:
        check_name(name)
    except InvalidTopicName:
        return False
    return True


def _given_up(name: str) -> OutcomeUnknown:
    return OutcomeUnknown(f"topic {name!r}: given up after {ATTEMPTS} attempts; it may be half-done")


@contextmanager
def _half_done_if(begun: bool, name: str) -> Iterator[None]:
    """Once a saga has begun, a step to which nothing happened does not mean that nothing happened."""
    try:
        yield
    except Unavailable as error:
        if not begun:
            raise
        raise OutcomeUnknown(f"topic {name!r}: it may be half-done: {error}") from error
