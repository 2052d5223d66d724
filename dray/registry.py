"""This broker's registration, and the view of all others.

One ephemeral record per broker, `brokers/<node id>` in the cluster domain, that dies with the broker's
session. `BrokerRegistry` chooses the node id, keeps the record there for as long as the broker runs, and
follows the directory. What the brokers are for is `routing`'s.

Registration is for routing only. A broker that lost its registration, or whose id another one took
meanwhile, goes on serving; nothing that decides correctness may rest on a node id or on who is registered.

**A record with this broker's own host and port is its own**, left by a process that was killed and for as
long as that one's session lives: it is taken over, so that a restarted broker has its node id at once.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import chain
from typing import TypeVar

from dray.errors import (
    CorruptStore,
    InvalidRequest,
    MetadataError,
    NodeIdTaken,
    VersionConflict,
)
from dray.metadata.directory import Directory
from dray.metadata.keys import CLUSTER_DOMAIN
from dray.metadata.store import Expect, Expectation, MetadataStore, Session
from dray.routing import BrokerInfo, Brokers

log = logging.getLogger(__name__)

DIRECTORY = "brokers"
MAX_NODE_ID = 2**31 - 1  # an int32 in Kafka's answers
# How many times-to-live a broker waits for the node id it was given: the holder may be dead and have renewed
# just before, and stores end sessions a little late.
WAIT_TTLS = 2
# A store that comes back is met by all brokers at once: the pauses grow.
FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 5.0

T = TypeVar("T")
Value = TypeVar("Value", int, str)


class BrokerRegistry:
    """`start`, then `run` for as long as the broker serves, then `close`."""

    def __init__(
        self,
        store: MetadataStore,
        *,
        host: str,
        port: int,
        zone: str,
        rack: str | None,
        node_id: int | None,
        ttl_ms: int,
        started_at_ms: int,
        version: str,
    ) -> None:
        self._store = store
        self._ttl_ms = ttl_ms
        self._given = node_id
        self._node_id: int | None = None
        self._tried: int | None = None  # the last id that was claimed, with or without success
        self._info = BrokerInfo(-1, host, port, zone, rack, started_at_ms, version)
        self._directory = Directory(store, CLUSTER_DOMAIN, DIRECTORY, decode)
        self._changed = asyncio.Event()
        self._directory.subscribe(lambda segment: self._changed.set())
        self._brokers = Brokers((), revision=-1)
        self._registration = -1
        self._session: Session | None = None
        self._registered_in: Session | None = None
        self._leaving = AsyncExitStack()  # ends the session
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def node_id(self) -> int:
        """Kept from `start` on, whatever becomes of the registration."""
        assert self._node_id is not None, "only after start"
        return self._node_id

    @property
    def info(self) -> BrokerInfo:
        """This broker, as its registration has it."""
        return self._info

    @property
    def registration(self) -> int:
        """Names this broker's latest registration, whatever became of it. No two of one node id are the same:
        it is the version of the record."""
        return self._registration

    @property
    def registrations(self) -> Mapping[int, int]:
        """Of all that are registered, by node id, as far as the view goes."""
        return {found.value.node_id: found.version for found in self._directory.values().values()}

    async def registration_of(self, node_id: int) -> int | None:
        """At least as new as this call. Raises what the store raises."""
        found = await self._directory.refresh(str(node_id))
        return None if found is None else found.version

    @property
    def is_registered(self) -> bool:
        """Whether the others can know that this broker is there; they may learn sooner that it is not."""
        return self._session is not None and self._session is self._registered_in and not self._session.lost

    @property
    def brokers(self) -> Brokers:
        """All that are registered, and this one, also when the store lost it for a moment.

        Where another broker has taken its node id, that one is in it: all are to agree.
        """
        if self._brokers.revision != self._directory.revision:
            brokers = {found.value.node_id: found.value for found in self._directory.values().values()}
            brokers.setdefault(self.node_id, self._info)
            self._brokers = Brokers(brokers.values(), self._directory.revision)
        return self._brokers

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Have it called when brokers have come, gone or changed. It must not raise."""
        self._directory.subscribe(lambda segment: callback())

    async def start(self) -> None:
        """Register. Waits for the store; raises `NodeIdTaken` if the id that was given stays another's."""
        self._tasks.append(asyncio.create_task(self._directory.run(), name="brokers"))
        try:
            await self._directory.loaded()
            self._node_id = await self._until_the_store_is_there(self._register)
        except BaseException:
            await self.close()
            raise
        self._info = replace(self._info, node_id=self._node_id)
        log.info("registered as broker %d in zone %r", self._node_id, self._info.zone)

    async def run(self) -> None:
        """Keep the registration until cancelled, or until this or the store is closed."""
        assert self._node_id is not None, "start first"
        self._tasks.append(asyncio.create_task(self._keep(), name="registration"))
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if not task.cancelled():
                task.result()

    async def close(self) -> None:
        """Deregister at once, as far as the store can be reached. May be called twice, or before `start`."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._leaving.aclose()

    async def _keep(self) -> None:
        while True:
            assert self._session is not None
            await self._session.wait_lost()
            log.warning("broker %d lost its session; registering again", self.node_id)
            await self._until_the_store_is_there(self._register)
            log.info("broker %d is registered again", self.node_id)

    async def _register(self) -> int:
        """Have a session and a record in it. Returns the node id."""
        if self._session is None or self._session.lost:
            await self._leaving.aclose()
            self._session = await self._leaving.enter_async_context(self._store.session(self._ttl_ms))
        if self._registered_in is self._session:
            # Not once more: that would be another registration, while members are heard by this one.
            assert self._tried is not None
            node_id = self._tried
        elif self._node_id is not None:
            node_id = self._node_id
            await self._claim_this(self._session, node_id, deadline=None)
        elif self._given is not None:
            node_id = self._given
            now = asyncio.get_running_loop().time()
            await self._claim_this(self._session, node_id, now + WAIT_TTLS * self._ttl_ms / 1000)
        else:
            node_id = await self._claim_free(self._session)
        self._registered_in = self._session
        # The watch may be late: until it comes, the view would show who had the id before.
        await self._directory.refresh(str(node_id))
        return node_id

    async def _claim_this(self, session: Session, node_id: int, deadline: float | None) -> None:
        """Register under this id, as soon as nobody else has it."""
        said = ""
        while True:
            self._changed.clear()
            holder = await self._claim(session, node_id)
            if holder is None:
                return
            if holder != said:
                log.error("node id %d is taken by %s; waiting until it is free", node_id, holder)
                said = holder
            try:
                async with asyncio.timeout_at(deadline):
                    await self._changed.wait()
            except TimeoutError:
                raise NodeIdTaken(node_id, holder) from None

    async def _claim_free(self, session: Session) -> int:
        """Register under the id that this broker had before it was killed, or the first that is free."""
        refused: set[int] = set()
        while True:
            seen = {found.value.node_id: found.value for found in self._directory.values().values()}
            own = [node_id for node_id, broker in seen.items() if self._is_own(broker)]
            # One whose outcome stayed unknown may be registered: two of one broker must not stay.
            tried = [] if self._tried is None else [self._tried]
            free = (node_id for node_id in range(MAX_NODE_ID + 1) if node_id not in seen)
            node_id = next(each for each in chain(tried, own, free) if each not in refused)
            if await self._claim(session, node_id) is None:
                return node_id
            refused.add(node_id)  # the view is late, or that record cannot be decoded

    async def _claim(self, session: Session, node_id: int) -> str | None:
        """Register under this id unless another broker has it; that one's name, or None when done."""
        self._tried = node_id
        key = f"{DIRECTORY}/{node_id}"
        value = encode(replace(self._info, node_id=node_id))
        expect: Expectation = Expect.ABSENT
        while True:
            try:
                self._registration = await session.put_ephemeral(CLUSTER_DOMAIN, key, value, expect)
                return None
            except VersionConflict:
                await self._store.barrier(CLUSTER_DOMAIN)
                record = await self._store.get(CLUSTER_DOMAIN, key)
            if record is None:
                expect = Expect.ABSENT
                continue
            try:
                holder = decode(key, record.value)
            except CorruptStore:
                return "a record that cannot be read"
            if not self._is_own(holder):
                return f"{holder.host}:{holder.port}"
            expect = record.version

    def _is_own(self, broker: BrokerInfo) -> bool:
        return (broker.host, broker.port) == (self._info.host, self._info.port)

    async def _until_the_store_is_there(self, step: Callable[[], Awaitable[T]]) -> T:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                return await step()
            except InvalidRequest:
                raise  # a mistake in here or in a setting: trying again would not mend it
            except MetadataError as error:
                log.warning("not registered; trying again in %.1f s: %s", pause_s, error)
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, MAX_PAUSE_S)


def encode(broker: BrokerInfo) -> bytes:
    """The record, with the field names of the specification. Unknown fields are for later versions."""
    listener = {"protocol": "PLAINTEXT", "host": broker.host, "port": broker.port}
    return json.dumps(
        {
            "brokerId": broker.node_id,
            "zoneId": broker.zone,
            "rack": broker.rack,
            "advertisedListeners": [listener],
            "startedAt": broker.started_at_ms,
            "buildInfo": {"version": broker.version},
        }
    ).encode()


def decode(key: str, value: bytes) -> BrokerInfo:
    """Raises `CorruptStore`."""
    try:
        record = json.loads(value)
        listener = record["advertisedListeners"][0]
        broker = BrokerInfo(
            node_id=_typed(record["brokerId"], int),
            host=_typed(listener["host"], str),
            port=_typed(listener["port"], int),
            zone=_typed(record["zoneId"], str),
            rack=None if record["rack"] is None else _typed(record["rack"], str),
            started_at_ms=_typed(record["startedAt"], int),
            version=_typed(record["buildInfo"]["version"], str),
        )
    except (ValueError, LookupError, TypeError) as error:
        raise CorruptStore(f"{key} is no registration of a broker: {error!r}: {value[:200]!r}") from None
    if key != f"{DIRECTORY}/{broker.node_id}" or not 0 <= broker.node_id <= MAX_NODE_ID:
        raise CorruptStore(f"{key} is the registration of another broker: {value[:200]!r}")
    return broker


def _typed(value: object, kind: type[Value]) -> Value:
    if type(value) is not kind:  # not isinstance: True is no number here
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value
