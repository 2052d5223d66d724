"""Consumer groups on one broker: every broker serves every member of every group.

`GroupCoordinator` joins the pure state machines (`classic`, `consumer`) to the records (`live`), the watch
and the clock. It owns no group: what it knows is a copy, and every change is a compare-and-put.

**Who times what** (ADR 0011). A member's session is timed by the broker process that the record names as
hearing it, from memory: a heartbeat there writes nothing. A heartbeat that comes to another broker moves the
member there first, by a write, and is answered after it. So whoever expels a member has heard it last, and
the put that expels it fails if the member has moved. Members whose broker is not registered any more get one
whole session from the *holder* of the group's timers, and are expelled by it.

**The holder** of a group is the registered broker that a rendezvous hash gives; its registration is the
lease. It also runs the timers of rebalances. Brokers may differ about who it is: a timer that fires twice, or
late, finds its phase gone and does nothing. Where the holder does not act, a broker with members of the group
does, `BACKUP_S` later.

**A broker that is not registered** hears nobody: it sends members away, because the others believe it dead.
Registered again it is another `Process`: who comes back to it is moved by a write, like any other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from dray.errors import (
    CoordinatorAway,
    CorruptStore,
    DrayError,
    GroupError,
    GroupNotEmpty,
    IncompatibleStore,
    InvalidGroupId,
    MetadataError,
    RebalanceInProgress,
    UnknownGroup,
)
from dray.groups import classic, consumer
from dray.groups.clocks import Clocks, Key
from dray.groups.group import (
    Beat,
    Beaten,
    ClassicGroup,
    ConsumerGroup,
    Dying,
    Group,
    GroupLimits,
    GroupState,
    Join,
    Joined,
    Leaving,
    Left,
    MemberSession,
    Outcome,
    Process,
    Sync,
    Synced,
)
from dray.groups.live import LiveGroup
from dray.groups.offsets import OffsetStore
from dray.groups.record import GROUPS, check_group_id, decode, group_of_key
from dray.groups.retention import expired, orphaned
from dray.groups.topics import TopicsView
from dray.metadata.keys import domain_of
from dray.metadata.pages import records_of
from dray.metadata.store import Gap, KeyChange, MetadataStore, Record, WatchEvent
from dray.registry import BrokerRegistry

log = logging.getLogger(__name__)

# How much later than the holder another broker fires a timer: more than the two can differ, and less than
# anybody waits for a rebalance.
BACKUP_S = 2.0
# What could not be written is tried again after this.
RETRY_S = 1.0
# A timer that rings so late rang in a process that stood still: heartbeats may lie unread.
STALL_S = 0.5
# Groups that nobody here has to do with are remembered, as simple consumers commit again and again.
MAX_IDLE = 1_000
# Registrations that are gone. Brokers restart a few times a day; above this all are looked for once more.
MAX_GONE = 10_000
# Topics are often deleted one after the other: their offsets go together.
SWEEP_PAUSE_S = 5.0
# Records of groups may be large.
PAGE_RECORDS = 100

A = TypeVar("A")


class ListedGroup(NamedTuple):
    group_id: str
    group: ClassicGroup | ConsumerGroup


class GroupCoordinator:
    """`run` for as long as the broker serves. `told` takes what the watch of each domain tells.

    Besides `GroupError`, methods raise `CorruptStore` and `IncompatibleStore` where a record cannot be read.
    """

    def __init__(
        self,
        store: MetadataStore,
        num_domains: int,
        registry: BrokerRegistry,
        topics: TopicsView,
        offsets: OffsetStore,
        limits: GroupLimits,
        *,
        retention_ms: int,
        retention_check_s: float,
        wall_clock_ms: Callable[[], int],
    ) -> None:
        self.limits = limits
        self.offsets = offsets
        self._store = store
        self._num_domains = num_domains
        self._registry = registry
        self._topics = topics
        self._retention_ms = retention_ms
        self._retention_check_s = retention_check_s
        self._now_ms = wall_clock_ms
        self._loop = asyncio.get_running_loop()
        self._groups: dict[str, _Timed] = {}  # the least lately used first
        self._forget_at = MAX_IDLE
        self._tasks: set[asyncio.Task[None]] = set()
        self._was = self.process  # when a timer rang last
        self._survey_wanted = asyncio.Event()
        self._survey_wanted.set()
        self._sweep_wanted = asyncio.Event()
        registry.subscribe(self._survey_wanted.set)
        self._gone: set[Process] = set()
        self._looked_for: set[Process] = set()
        self._is_stopped = False

    @property
    def process(self) -> Process:
        """Who hears the members that ask here."""
        return Process(self._registry.node_id, self._registry.registration)

    async def join(self, group_id: str, request: Join, gone: asyncio.Future[None]) -> Joined:
        """Waits for the rebalance to end, or until the connection has `gone`."""
        timed = self._for_members(group_id)
        member_id = request.member_id or request.new_member_id

        def join(group: Group | None) -> Outcome[Joined]:
            outcome = classic.join(group, request, self.limits, self._now_ms())
            if not isinstance(outcome.answer, Joined):
                return outcome
            return Outcome(classic.hear(outcome.group, member_id, request.heard_by), outcome.answer)

        try:
            joined = await timed.live.ask_and_wait(
                join, lambda group: classic.joined(group, request, member_id), member_id, gone
            )
        finally:
            timed.clocks.heard(member_id, self._loop.time())
        self._check_registered(request.heard_by)
        return joined

    async def sync(self, group_id: str, request: Sync, gone: asyncio.Future[None]) -> Synced:
        timed = self._for_members(group_id)
        me = self.process

        def sync(group: Group | None) -> Outcome[Synced]:
            outcome = classic.sync(group, request)
            if isinstance(outcome.answer, GroupError):
                return outcome
            return Outcome(classic.hear(outcome.group, request.member_id, me), outcome.answer)

        try:
            synced = await timed.live.ask_and_wait(
                sync, lambda group: classic.synced(group, request), request.member_id, gone
            )
        finally:
            timed.clocks.heard(request.member_id, self._loop.time())
        self._check_registered(me)
        return synced

    async def heartbeat(
        self, group_id: str, member_id: str, instance_id: str | None, generation: int
    ) -> None:
        timed = self._for_members(group_id)
        live, me = timed.live, self.process

        def beat(group: Group | None) -> Outcome[RebalanceInProgress | bool]:
            error = classic.heartbeat(group, member_id, instance_id, generation)
            if error is not None and not isinstance(error, RebalanceInProgress):
                return Outcome(group, error)
            return Outcome(classic.hear(group, member_id, me), error or True)

        if live.is_known:
            outcome = beat(live.group)
            if outcome.group is live.group and timed.clocks.heard(member_id, self._loop.time()):
                if isinstance(outcome.answer, GroupError):
                    raise outcome.answer
                return
        try:
            with live.hearing(member_id):
                await live.ask(beat)
        finally:
            timed.clocks.heard(member_id, self._loop.time())
        self._check_registered(me)

    async def leave(self, group_id: str, leaving: Sequence[Leaving]) -> tuple[Left, ...]:
        def leave(group: Group | None) -> Outcome[tuple[Left, ...]]:
            if isinstance(group, ConsumerGroup):
                return consumer.leave(group, leaving, self._now_ms())
            return classic.leave(group, leaving, self._now_ms())

        return await self._for_members(group_id).live.ask(leave)

    async def beat(self, group_id: str, beat: Beat, gone: asyncio.Future[None]) -> Beaten:
        """ConsumerGroupHeartbeat.

        It counts for nothing once its connection has `gone`. The member asks another broker then, and gets
        on, and what it said here of the partitions that it owns is not so any more.
        """
        timed = self._for_members(group_id)
        error = consumer.check(beat, self.limits)
        if error is not None:
            raise error
        live = timed.live

        may_be_done = False

        def apply(group: Group | None) -> Outcome[Beaten]:
            nonlocal may_be_done
            if gone.done():
                return Outcome(group, CoordinatorAway("the member has gone"))
            this = replace(beat, is_repeat=True) if may_be_done else beat
            outcome = consumer.beat(group, this, self._topics, self.limits, self._now_ms())
            may_be_done |= outcome.group is not group
            return outcome

        if live.is_known and timed.has_current_topics(self._topics):
            outcome = apply(live.group)
            if outcome.group is live.group and isinstance(outcome.answer, Beaten):
                timed.clocks.heard(beat.member_id, self._loop.time())
                return outcome.answer
            may_be_done = False  # it was not put
        with live.hearing(beat.member_id):
            beaten = await live.ask(apply)
        timed.clocks.heard(beat.member_id, self._loop.time())
        self._check_registered(beat.heard_by)
        return beaten

    async def check_commit(
        self,
        group_id: str,
        member_id: str,
        instance_id: str | None,
        age: int,
        *,
        is_epoch: bool = True,
        fresh: bool = False,
    ) -> int:
        """Whether this member, at its generation or epoch `age`, may commit; the group's age for the offsets.

        A commit without a member, with a negative age, brings an unknown group into being. Not `is_epoch`:
        the client knows generations only. With `fresh` the group is read again first.
        """
        timed = self._of(group_id)
        live = timed.live

        def check(group: Group | None) -> Outcome[int]:
            if isinstance(group, ConsumerGroup):
                error = consumer.check_commit(group, member_id, age, is_epoch=is_epoch)
            else:
                error = classic.check_commit(group, member_id, instance_id, age)
            if error is not None:
                return Outcome(group, error)
            if group is None:
                group = ClassicGroup(state_since_ms=self._now_ms())
            assert not isinstance(group, Dying)
            return Outcome(group, group.age)

        timed.clocks.heard(member_id, self._loop.time())
        if live.is_known and not fresh:
            outcome = check(live.group)
            if outcome.group is live.group and isinstance(outcome.answer, int):
                return outcome.answer
        return await live.ask(check, wants_fresh=fresh)

    async def check_fetch(self, group_id: str, member_id: str | None, epoch: int) -> None:
        """Whether this member may read the group's offsets; without a member anybody may."""
        if member_id is None:
            return

        def check(group: Group | None) -> Outcome[bool]:
            error = None
            if isinstance(group, ConsumerGroup):
                error = consumer.check_fetch(group, member_id, epoch)
            return Outcome(group, error or True)

        await self._of(group_id).live.ask(check)

    async def find(self, group_id: str) -> ClassicGroup | ConsumerGroup | None:
        """At least as new as this call."""
        found = await self._of(group_id).live.ask(lambda group: Outcome(group, (group,)), wants_fresh=True)
        assert not isinstance(found[0], Dying)
        return found[0]

    def subscribed(self, group: Group | None) -> frozenset[str] | None:
        """The topics that its members subscribe to; None where that is not known."""
        if isinstance(group, ConsumerGroup):
            return consumer.subscribed_topics(group, self._topics)
        return classic.subscribed_topics(group)

    def assignor_of(self, group: ConsumerGroup) -> str:
        return consumer.assignor_of(group, self.limits)

    async def list(self) -> list[ListedGroup]:
        """All groups. One that cannot be read is logged and left out."""
        return [listed async for listed in self._all()]

    async def delete(self, group_id: str) -> None:
        """Remove an empty group and its offsets. Raises `UnknownGroup`, `GroupNotEmpty`."""
        live = self._of(group_id).live
        was_there = False  # when it was first applied: the put may have landed, and its answer been lost

        def delete(group: Group | None) -> Outcome[bool]:
            nonlocal was_there
            if group is None and not was_there:
                return Outcome(None, UnknownGroup(f"there is no group {group_id!r}"))
            if group is None:
                return Outcome(None, True)
            if not is_empty(group):
                return Outcome(group, GroupNotEmpty(f"group {group_id!r} has members"))
            was_there = True
            return Outcome(Dying(), True)

        await live.ask(delete)
        await live.ask(lambda group: Outcome(group, True))  # when this is answered, the record is gone

    def told(self, domain: int, event: WatchEvent) -> None:
        """Take what the watch of a domain told."""
        if isinstance(event, Gap):
            for timed in self._groups.values():
                if self._domain_of(timed.live.group_id) == domain:
                    timed.live.missed()
            self._survey_wanted.set()
            return
        for change in event.changes:
            group_id = group_of_key(change.key) if isinstance(change, KeyChange) else None
            if group_id is not None:
                self._told_of(group_id, change.version)

    def topics_deleted(self) -> None:
        """Offsets of topics that are gone may go."""
        self._sweep_wanted.set()

    async def run(self) -> None:
        """Look after the groups whose timers this broker holds, until cancelled."""
        self._spawn(self._sweep_forever())
        while True:
            await self._survey_wanted.wait()
            self._survey_wanted.clear()
            try:
                await self._survey()
            except DrayError as error:
                log.warning("groups: looking again in %g s: %s", RETRY_S, error)
                await asyncio.sleep(RETRY_S)
                self._survey_wanted.set()

    def stop(self) -> None:
        """Send away all who wait. They find another broker."""
        self._is_stopped = True
        for timed in self._groups.values():
            timed.disarm()
            timed.live.stop()
        for task in self._tasks:
            task.cancel()

    # Groups that this broker has to do with

    def _for_members(self, group_id: str) -> _Timed:
        if not group_id:
            raise InvalidGroupId("members need a group id that is not empty")
        self._check_registered(self.process)
        return self._of(group_id)

    def _check_registered(self, process: Process) -> None:
        """Whether it is still this one that members are heard by."""
        if not self._registry.is_registered or self._is_stopped or self.process != process:
            raise CoordinatorAway("this broker is not registered: others believe it dead")

    def _of(self, group_id: str) -> _Timed:
        timed = self._groups.pop(group_id, None)
        if timed is None:
            check_group_id(group_id)
            live = LiveGroup(
                self._store,
                self._domain_of(group_id),
                group_id,
                prepare=self._prepare,
                bury=self.offsets.delete_all,
                changed=self._changed,
            )
            timed = _Timed(live)
            self._forget_idle()
        self._groups[group_id] = timed
        return timed

    def _forget_idle(self) -> None:
        if len(self._groups) < self._forget_at:
            return
        idle = [group_id for group_id, timed in self._groups.items() if timed.is_idle]
        for group_id in idle[: max(0, len(idle) - MAX_IDLE // 2)]:
            self._groups.pop(group_id).disarm()
        self._forget_at = len(self._groups) + MAX_IDLE  # not soon again, however many there are

    def _domain_of(self, group_id: str) -> int:
        return domain_of(group_id, self._num_domains)

    async def _prepare(self, group: Group | None) -> None:
        """Topics must be as new as the group that was made from them, or its epoch would go to and fro."""
        if isinstance(group, ConsumerGroup) and not consumer.is_current(group, self._topics):
            await self._topics.refresh()

    def _told_of(self, group_id: str, version: int | None) -> None:
        timed = self._groups.get(group_id)
        if timed is not None:
            timed.live.told(version)
        if self._holds(group_id) and (timed is not None or version is not None):
            timed = timed or self._of(group_id)
            if not timed.live.is_known:
                timed.live.read_again()

    # Timers

    def _holds(self, group_id: str) -> bool:
        registry = self._registry
        return registry.brokers.coordinator(None, group_id).node_id == registry.node_id

    def _changed(self, live: LiveGroup) -> None:
        timed = self._groups.get(live.group_id)
        if timed is not None and timed.live is live and not self._is_stopped:
            self._set_clocks(timed)

    def _set_clocks(self, timed: _Timed) -> None:
        """Run what this broker is to time, as the group is now."""
        live = timed.live
        me = self.process
        wanted: dict[Key, float] = {}
        is_unsure = False
        members = list(_sessions(live.group, self.limits))
        for session in members:
            if session.heard_by == me:
                wanted[session] = session.timeout_ms / 1000
        holds = self._holds(live.group_id)
        if holds or wanted or live.waiting:
            lag_s = 0.0 if holds else BACKUP_S
            there = self._processes()
            for session in members:
                if session.heard_by in there:
                    continue
                if self._is_gone(session.heard_by):
                    wanted[session] = session.timeout_ms / 1000 + lag_s
                else:
                    is_unsure = True
            for timer in _timers(live.group):
                wanted[timer] = timer.after_ms / 1000 + lag_s
        timed.clocks.want(wanted, self._loop.time())
        live.is_followed = bool(wanted) or is_unsure
        self._arm(timed)

    def _processes(self) -> set[Process]:
        """All that others leave the members of alone."""
        return {self.process, *(Process(*each) for each in self._registry.registrations.items())}

    def _is_gone(self, process: Process) -> bool:
        """Whether that is certain. If not, it is found out, and clocks are set again then.

        The view of the brokers may be older than the group, and lack one that has come since. What was once
        seen to be gone is so for ever: no registration comes back.
        """
        if process not in self._gone and process not in self._looked_for:
            self._looked_for.add(process)
            self._spawn(self._look_for(process))
        return process in self._gone

    async def _look_for(self, process: Process) -> None:
        try:
            registration = await self._registry.registration_of(process.node_id)
        except MetadataError as error:
            log.warning("groups: whether %s is gone: %s", process, error)
            await asyncio.sleep(RETRY_S)
        else:
            if registration != process.registration:
                if len(self._gone) >= MAX_GONE:
                    self._gone.clear()
                self._gone.add(process)
        finally:
            self._looked_for.discard(process)
        for timed in list(self._groups.values()):
            self._set_clocks(timed)

    def _arm(self, timed: _Timed) -> None:
        at = timed.clocks.next_at()
        if at is None:
            timed.disarm()
        elif timed.rings_at is None or at < timed.rings_at:
            timed.disarm()
            timed.rings_at = at
            timed.handle = self._loop.call_at(at, self._ring, timed)

    def _ring(self, timed: _Timed) -> None:
        now = self._loop.time()
        late_s = now - timed.rings_at if timed.rings_at is not None else 0.0
        timed.disarm()
        self._set_clocks(timed)  # brokers may have come back that nobody has told this group of yet
        self._forgive_silence(now)
        if late_s > STALL_S or not self._registry.is_registered:
            timed.clocks.restart_sessions(now)
        for key in timed.clocks.due(now):
            if isinstance(key, MemberSession) and timed.live.waiting[key.member_id]:
                timed.clocks.heard(key.member_id, now)  # its request is here: so is it
                continue
            timed.clocks.put_off(key, now, RETRY_S)
            self._fire(timed.live, key)
        self._arm(timed)

    def _forgive_silence(self, now: float) -> None:
        """While this broker was not registered it heard nobody: all sessions begin anew."""
        if self._was != self.process:
            self._was = self.process
            for timed in self._groups.values():
                timed.clocks.restart_sessions(now)

    def _fire(self, live: LiveGroup, key: Key) -> None:
        """From here on the member's heartbeats are put to the group behind this, and not answered before."""

        def fire(group: Group | None) -> Outcome[bool]:
            machine = consumer if isinstance(group, ConsumerGroup) else classic
            if isinstance(key, MemberSession):
                after = machine.expel(group, key.member_id, key.heard_by, self._now_ms())
                if after is not group:
                    log.info("group %r: member %s was silent and is expelled", live.group_id, key.member_id)
            else:
                after = machine.fire(group, key, self._now_ms())
            return Outcome(after, True)

        def fired(answer: asyncio.Future[bool]) -> None:
            error = None if answer.cancelled() else answer.exception()
            if error is not None:
                log.warning("group %r: %s is tried again: %s", live.group_id, key, error)

        live.ask(fire).add_done_callback(fired)

    async def _survey(self) -> None:
        """Find the groups that this broker has to time, by its hash or because it hears a member."""
        for timed in list(self._groups.values()):
            self._set_clocks(timed)
        async for group_id, group in self._all():
            known = self._groups.get(group_id)
            if known is not None and known.live.is_known:
                continue
            sessions = list(_sessions(group, self.limits))
            is_held = self._holds(group_id) and (any(sessions) or any(_timers(group)))
            if is_held or any(session.heard_by == self.process for session in sessions):
                self._of(group_id).live.read_again()

    async def _all(self) -> AsyncIterator[ListedGroup]:
        for domain in range(self._num_domains):
            await self._store.barrier(domain)
            async for record in records_of(self._store, domain, GROUPS, page_records=PAGE_RECORDS):
                listed = _listed(record)
                if listed is not None:
                    yield listed

    # Retention of offsets

    async def _sweep_forever(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._retention_check_s):
                    await self._sweep_wanted.wait()
                    await asyncio.sleep(SWEEP_PAUSE_S)
            except TimeoutError:
                pass
            self._sweep_wanted.clear()
            self._survey_wanted.set()
            try:
                await self.sweep()
            except DrayError as error:
                log.warning("offsets: looking again later: %s", error)

    async def sweep(self) -> None:
        """Remove offsets that are too old or whose topics are gone, and groups that have none left."""
        await self._topics.refresh()
        async for group_id, group in self._all():
            if not self._holds(group_id):
                continue
            offsets = await self.offsets.fetch(group_id)
            gone = orphaned(offsets, self._topics.id_of)
            gone |= expired(group, offsets, self.subscribed(group), self._now_ms(), self._retention_ms)
            if gone:
                gone = await self.offsets.delete(group_id, gone)
                log.info("group %r: %d offsets are expired", group_id, len(gone))
            if is_empty(group) and gone >= offsets.keys():
                await self._delete_empty(group_id, group)

    async def _delete_empty(self, group_id: str, seen: Group) -> None:
        """Unless it was used since."""
        await self._of(group_id).live.ask(
            lambda group: Outcome(Dying() if group == seen else group, True), wants_fresh=True
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Timed:
    """A group that this broker has to do with, and the timers that run for it here."""

    def __init__(self, live: LiveGroup) -> None:
        self.live = live
        self.clocks = Clocks()
        self.rings_at: float | None = None
        self.handle: asyncio.TimerHandle | None = None
        self._current: tuple[Group | None, int] | None = (
            None  # last found to have been made from these topics
        )

    @property
    def is_idle(self) -> bool:
        return self.live.is_idle and not self.live.is_followed

    def has_current_topics(self, topics: TopicsView) -> bool:
        group = self.live.group
        if self._current is not None and self._current[0] is group and self._current[1] == topics.revision:
            return True
        if not isinstance(group, ConsumerGroup) or not consumer.is_current(group, topics):
            return False
        self._current = (group, topics.revision)
        return True

    def disarm(self) -> None:
        if self.handle is not None:
            self.handle.cancel()
        self.handle = self.rings_at = None


def is_empty(group: Group) -> bool:
    return not isinstance(group, ClassicGroup | ConsumerGroup) or not group.members


def state_of(group: ClassicGroup | ConsumerGroup) -> GroupState:
    return consumer.state_of(group) if isinstance(group, ConsumerGroup) else group.state


def _sessions(group: Group | None, limits: GroupLimits) -> Iterator[MemberSession]:
    if isinstance(group, ConsumerGroup):
        return consumer.sessions(group, limits)
    return classic.sessions(group)


def _timers(group: Group | None) -> Sequence[Any]:
    return consumer.timers(group) if isinstance(group, ConsumerGroup) else classic.timers(group)


def _listed(record: Record) -> ListedGroup | None:
    group_id = group_of_key(record.key)
    assert group_id is not None
    try:
        group = decode(record.key, record.value)
    except (CorruptStore, IncompatibleStore) as error:
        log.error("%s is left out: %s", record.key, error)
        return None
    return None if isinstance(group, Dying) else ListedGroup(group_id, group)
