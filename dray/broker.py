"""One broker: wires its parts, owns their tasks, and stops them in order.

A broker has nothing of its own. Killed at any moment, it loses only what nobody was told is safe.
"""

from __future__ import annotations

import asyncio
import logging
import random
import resource
import socket
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, fields
from datetime import timedelta
from functools import partial
from typing import Any

from dray import __version__
from dray.cluster_settings import ClusterSettings
from dray.config import SETTINGS, Address, Settings
from dray.errors import DrayError, MetadataError
from dray.groups.coordinator import GroupCoordinator
from dray.groups.group import GroupLimits
from dray.groups.offsets import OffsetStore
from dray.groups.topics import TopicsView
from dray.handlers.call import DescribedSetting, Services
from dray.handlers.dispatch import Dispatcher
from dray.index.cache import IndexCache
from dray.index.decided import DecidedIndex
from dray.index.deletion import RecordDeleter
from dray.index.entry import WalChunk, stream_domain, stream_of
from dray.index.log_start import stream_of_key
from dray.index.times import TimeIndex
from dray.index.witness import Witness
from dray.log.append import LogAppender
from dray.log.compacted import CompactedReader
from dray.log.read import LogReader
from dray.log.wakeups import Wakeups
from dray.metadata.cluster import Cluster, open_cluster
from dray.metadata.opening import open_store, redact
from dray.metadata.store import EntryChange, Gap, MetadataStore, WatchEvent
from dray.objectstore.opening import open_object_store
from dray.objectstore.store import ObjectStore
from dray.producers.ids import ProducerIds
from dray.registry import BrokerRegistry
from dray.server import Answer, Connection, NetworkLimits, Server
from dray.topics.catalog import TopicCatalog, topic_directory
from dray.topics.configs import ConfigType
from dray.wal.orphans import OrphanCollector
from dray.wal.reader import WalReader
from dray.wal.writer import CommittedObject, WalWriter

log = logging.getLogger(__name__)

# Of the ten seconds that a stop may take: the rest is for the store and the writer.
DRAIN_S = 4.0
CLOSE_S = 1.5
# A watch that failed is begun again; a store that comes back is met by all domains at once.
RETRY_PAUSE_S = 0.5
# Objects without a commit are looked for now and then, by every broker in another order. They are an hour old
# at least: sealing, uploading and appending have deadlines of seconds, and being early would only waste work.
COLLECT_EVERY_S = 600.0
ORPHAN_AGE_MS = 3_600_000
# A fence goes when no append of its object is conceivable any more, clocks that differ by hours included.
FENCE_AGE_MS = 24 * 3_600_000
# Threads and connections of the stores, the listener, objects being written.
RESERVED_FILES = 256
# Where no zone is set, objects are filed under this name.
NO_ZONE = "none"


class Broker:
    """Made by `open_broker`. Serves until `stop`."""

    def __init__(
        self, settings: Settings, cluster: Cluster, store: MetadataStore, objects: ObjectStore
    ) -> None:
        self._settings = settings
        self._cluster = cluster
        self._store = store
        self._objects = objects
        self._tasks: set[asyncio.Task[None]] = set()
        self._cache = IndexCache(settings.index_cache_bytes)
        self._witness = Witness(store, self._domain_of)
        self._index = DecidedIndex(
            store, self._domain_of, self._cache, self._witness, incarnation=cluster.incarnation
        )
        self._wal_reader = WalReader(objects, cache_bytes=settings.fetch_cache_bytes)
        self._wakeups = Wakeups()
        self._writer = WalWriter(
            store,
            objects,
            zone=settings.zone or NO_ZONE,
            incarnation=cluster.incarnation,
            target_bytes=settings.wal_segment_bytes,
            linger_ms=settings.wal_linger_ms,
            max_buffer_bytes=settings.wal_buffer_bytes,
            clock=self._index.now,
            on_commit=self._committed,
            folds=self._index.folds,
            resolve=self._index.resolve,
        )
        self._reader = LogReader(
            self._index,
            self._wal_reader,
            CompactedReader(self._wal_reader, cache_bytes=settings.fetch_compacted_cache_bytes),
            self._wakeups,
            buffer_bytes=settings.fetch_buffer_bytes,
        )
        self._cluster_settings = ClusterSettings(store, _given(settings))
        self._cluster_settings.subscribe(self._use_settings)
        self._topic_view = topic_directory(store)
        self._topics = TopicCatalog(
            store,
            cluster.num_domains,
            self._topic_view,
            wall_clock_ms=_now_ms,
            num_partitions=self._cluster_settings.num_partitions,
            defaults=self._cluster_settings.topic_defaults,
        )
        self._registry: BrokerRegistry | None = None
        self._groups: GroupCoordinator | None = None
        self._server: Server | None = None
        self._ready = asyncio.Event()
        self.address: Address | None = None

    async def start(self) -> None:
        """Ready when this returns. Raises `OSError` where it cannot listen, and what the stores raise."""
        settings = self._settings
        for domain in range(self._cluster.num_domains):
            self._run(self._follow(domain), f"domain {domain}")
        self._run(self._topic_view.run(), "topics")
        self._run(self._cluster_settings.run(), "settings")
        await self._topic_view.loaded()
        await self._cluster_settings.loaded()
        # Bound before it is registered, so that nobody is sent to a port that is not there.
        self._server = server = Server(self._handle_once_ready, _limits(settings))
        host, port = await server.start(settings.listen.host, settings.listen.port)
        self.address = _advertised(settings, host, port)
        self._registry = registry = BrokerRegistry(
            self._store,
            host=self.address.host,
            port=self.address.port,
            zone=settings.zone,
            rack=settings.zone or None,
            node_id=settings.node_id,
            ttl_ms=settings.broker_session_timeout_ms,
            started_at_ms=_now_ms(),
            version=__version__,
        )
        await registry.start()
        self._run(registry.run(), "registry")
        self._groups = groups = self._open_groups(registry)
        self._topic_view.subscribe(self._topic_changed)
        services = Services(
            cluster_id=self._cluster.cluster_id,
            registry=registry,
            topics=self._topics,
            index=self._index,
            times=TimeIndex(self._index, self._reader.read_batch, self._reader.compacted),
            deleter=RecordDeleter(self._store, self._domain_of, self._index),
            appender=LogAppender(self._writer, self._cluster.num_domains),
            reader=self._reader,
            folds=self._index.folds,
            producer_ids=ProducerIds(self._store),
            groups=groups,
            group_heartbeat_interval=timedelta(milliseconds=settings.group_consumer_heartbeat_interval_ms),
            offset_metadata_max_bytes=settings.offset_metadata_max_bytes,
            cluster_settings=self._cluster_settings,
            enforce_owner=settings.routing_enforce_owner,
            objects_url=redact(settings.objects),
            fetch_max_bytes=settings.fetch_max_bytes,
            settings=_described(settings),
        )
        self._run(groups.run(), "groups")
        server.handle = Dispatcher(services).handle
        self._ready.set()
        self._run(self._sweep(), "sweep")
        self._run(self._collect(), "orphans")
        log.info(
            "broker %d is ready",
            registry.node_id,
            extra={
                "listen": f"{host}:{port}",
                "advertise": str(self.address),
                "zone": settings.zone,
                "cluster_id": self._cluster.cluster_id,
                "metadata": redact(settings.metadata),
                "objects": redact(settings.objects),
            },
        )

    async def stop(self) -> None:
        """Answer what was read, commit what was accepted, deregister. Takes ten seconds at most."""
        self._wakeups.stop()
        if self._groups is not None:
            self._groups.stop()
        if self._registry is not None:
            # First, so that clients go elsewhere while the rest is drained.
            await _at_most(CLOSE_S, self._registry.close(), "deregistering")
        if self._server is not None:
            await self._server.stop(DRAIN_S)
        await _at_most(CLOSE_S, self._writer.close(), "committing what was accepted")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._index.close()
        await self._wal_reader.close()
        log.info("broker stopped", extra=asdict(self._writer.counts))

    async def _handle_once_ready(self, frame: bytes, connection: Connection) -> Answer | None:
        """For those who connect between binding the port and knowing this broker's node id."""
        await self._ready.wait()
        assert self._server is not None
        return await self._server.handle(frame, connection)

    def _open_groups(self, registry: BrokerRegistry) -> GroupCoordinator:
        settings = self._settings
        return GroupCoordinator(
            self._store,
            self._cluster.num_domains,
            registry,
            TopicsView(self._topics),
            OffsetStore(self._store, self._cluster.num_domains),
            GroupLimits(
                min_session_timeout_ms=settings.group_min_session_timeout_ms,
                max_session_timeout_ms=settings.group_max_session_timeout_ms,
                initial_rebalance_delay_ms=settings.group_initial_rebalance_delay_ms,
                max_size=settings.group_max_size,
                consumer_session_timeout_ms=settings.group_consumer_session_timeout_ms,
                consumer_max_size=settings.group_consumer_max_size,
                assignors=settings.group_consumer_assignors,
            ),
            retention_ms=settings.offsets_retention_minutes * 60_000,
            retention_check_s=settings.offsets_retention_check_interval_ms / 1000,
            wall_clock_ms=_now_ms,
        )

    def _domain_of(self, stream_id: int) -> int:
        return stream_domain(stream_id, self._cluster.num_domains)

    def _run(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(_report)

    def _committed(self, done: CommittedObject) -> None:
        """What this broker wrote itself it reads from memory, before the watch tells of it."""
        self._wal_reader.add(done.path, done.body)
        for placed in done.entries:
            where = placed.entry.where
            assert isinstance(where, WalChunk), "the writer makes nothing else"
            self._witness.know(where.object_id)
            self._index.add(placed, done.began)
            self._wakeups.wake(placed.entry.stream_id)

    def _topic_changed(self, segment: str) -> None:
        if self._topic_view.get(segment) is None and self._groups is not None:
            self._groups.topics_deleted()

    def _use_settings(self) -> None:
        settings = self._cluster_settings
        self._topics.set_defaults(settings.num_partitions, settings.topic_defaults)

    async def _follow(self, domain: int) -> None:
        """Keep the index cache right, and wake those who wait, for as long as the broker runs."""
        while True:
            try:
                await self._cache.follow(self._store, domain, partial(self._tell, domain))
                return  # the store was closed
            except MetadataError as error:
                log.warning("watch of domain %d: %s", domain, error)
            self._tell(domain, Gap())
            await asyncio.sleep(RETRY_PAUSE_S * (1 + random.random()))

    def _tell(self, domain: int, event: WatchEvent) -> None:
        if self._groups is not None:
            self._groups.told(domain, event)
        if isinstance(event, Gap):
            self._wakeups.wake_all()
            return
        for change in event.changes:
            if change.version is None:
                continue
            if isinstance(change, EntryChange):
                stream_id = stream_of(change.sequence)
            else:
                stream_id = stream_of_key(change.key)
            if stream_id is not None:
                self._wakeups.wake(stream_id)

    async def _sweep(self) -> None:
        """Finish what a broker that died has left half done with topics."""
        try:
            await self._topics.sweep()
        except DrayError as error:
            log.warning("topics that are half made or half deleted stay so for now: %s", error)

    async def _collect(self) -> None:
        collector = OrphanCollector(self._store, self._objects)
        while True:
            await asyncio.sleep(COLLECT_EVERY_S * (0.5 + random.random()))
            for domain in random.sample(range(self._cluster.num_domains), self._cluster.num_domains):
                try:
                    await collector.collect(domain, _now_ms(), ORPHAN_AGE_MS)
                    await collector.forget_fences(domain, _now_ms(), FENCE_AGE_MS)
                except DrayError as error:
                    log.warning("orphans of domain %d: %s", domain, error)


@asynccontextmanager
async def open_broker(settings: Settings) -> AsyncIterator[Broker]:
    """A broker that serves, until the context is left."""
    store = await open_store(settings.metadata, settings.metadata_timeout_ms / 1000)
    try:
        cluster = await open_cluster(store, settings.metadata_domains)
        objects = await open_object_store(settings.objects)
        try:
            broker = Broker(settings, cluster, store, objects)
            try:
                await broker.start()
                yield broker
            finally:
                await broker.stop()
        finally:
            await objects.close()
    finally:
        await store.close()


def _limits(settings: Settings) -> NetworkLimits:
    return NetworkLimits(
        max_request_bytes=settings.network_max_request_bytes,
        max_connections=_max_connections(settings.max_connections),
        max_inflight_bytes=settings.network_max_inflight_bytes,
        max_connection_inflight_bytes=settings.network_max_connection_inflight_bytes,
        max_idle_s=settings.connections_max_idle_ms / 1000,
        send_timeout_s=settings.network_send_timeout_ms / 1000,
    )


def _max_connections(wanted: int) -> int:
    """As many as are wanted, if the process may have so many files open: a store needs some, too."""
    open_files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        open_files = most
    possible = max(open_files - RESERVED_FILES, open_files // 2)
    if wanted > possible:
        log.warning("max.connections is %d here: the process may open %d files", possible, open_files)
    return min(wanted, possible)


def _advertised(settings: Settings, host: str, port: int) -> Address:
    """What clients are told. An address that means "all interfaces" is no address to connect to."""
    if settings.advertise is not None:
        return Address(settings.advertise.host, settings.advertise.port or port)
    return Address(socket.gethostname() if host in ("0.0.0.0", "::") else settings.listen.host, port)


def _given(settings: Settings) -> dict[str, str]:
    """The settings that somebody has set, as far as they are not the defaults."""
    return {each.name: each.value for each in _described(settings) if each.value != each.default}


def _described(settings: Settings) -> list[DescribedSetting]:
    """The settings as DescribeConfigs tells them; passwords in URLs are left out."""
    described = []
    for of in fields(Settings):
        setting = SETTINGS[of.metadata["setting"].name]
        value = getattr(settings, of.name)
        kind = ConfigType.STRING
        if isinstance(value, bool):
            kind, value = ConfigType.BOOLEAN, str(value).lower()
        elif isinstance(value, int):
            kind = ConfigType.LONG
        elif isinstance(value, tuple):
            kind, value = ConfigType.LIST, ",".join(value)
        text = "" if value is None else redact(str(value))
        described.append(DescribedSetting(setting.name, text, setting.default or "", kind, setting.doc))
    return described


async def _at_most(limit_s: float, work: Coroutine[Any, Any, None], what: str) -> None:
    try:
        async with asyncio.timeout(limit_s):
            await work
    except TimeoutError:
        log.warning("%s took more than %g s and was left", what, limit_s)
    except DrayError as error:
        log.warning("%s: %s", what, error)


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s ended", task.get_name(), exc_info=error)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
