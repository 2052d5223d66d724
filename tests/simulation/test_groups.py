"""Consumer groups on seeded schedules of faults: nobody is expelled early, and nobody lives for ever.

Three brokers run the real coordinator over a store of Oxia's promises or of etcd's. They crash, come back,
stand still, lose their registration and are cut off, while members join, move, die and come back (`groups`).

Rules that this rests on are taken out one at a time: then somebody notices (`BROKEN`). Some are not in there,
because no schedule that was tried shows what happens without: that refusals are fresh, that a put in doubt is
decided, that a repeated heartbeat is known for one, that sessions begin anew with a registration, and that
the store is asked whether a broker is gone.

`SIMULATIONS` in the environment is how many times as many schedules are to be run.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from dray.groups import classic, consumer
from dray.groups import coordinator as coordinator_module
from dray.groups.coordinator import GroupCoordinator, ListedGroup
from dray.groups.group import (
    Beat,
    Beaten,
    ConsumerGroup,
    Group,
    Process,
)
from dray.groups.live import LiveGroup
from dray.metadata.store import Expect, Expectation, Gap, WatchEvent
from tests.simulation.groups import (
    SESSION_MS,
    GroupMetadata,
    Plot,
    Rules,
    Violation,
    play,
    play_unread,
)
from tests.simulation.world import SimulatedMetadata, simulate

TIMES = int(os.environ.get("SIMULATIONS", "1"))
WEAK = Plot(statics=2, restarts=1)
STRONG = replace(WEAK, strong=True)
MOVING = Plot(moves=0.4, deaths=3)
UNREGISTERED = Plot(kinds=("lose", "cut", "still"), incidents=8)
RESTARTING = Plot(kinds=("crash", "restart"), incidents=8, statics=3, restarts=2, classic=2)
DYING = Plot(brokers=2, kinds=("restart",), incidents=10, classic=2, consumers=2, deaths=4)
UNSURE = Plot(trouble=0.4, moves=0.3, kinds=("lose", "restart"))
EAGER = Plot(trouble=0.4, moves=0.8, classic=0, consumers=8, kinds=("lose", "restart"))
TWO = Plot(brokers=2, moves=0.3, trouble=0.25, kinds=("lose", "restart", "still"))


@pytest.mark.parametrize(
    ("plot", "seeds", "what_happened"),
    [
        (WEAK, 60, ("expelled", "moved", "crash", "restart", "lose", "cut", "still")),
        (STRONG, 60, ("expelled", "moved", "crash", "restart", "lose", "cut", "still")),
        (MOVING, 40, ("expelled", "moved")),
        (UNREGISTERED, 40, ("lose", "cut", "still")),
        (RESTARTING, 40, ("crash", "restart")),
        (TWO, 40, ("moved", "expelled")),
        (DYING, 20, ("expelled",)),
        (UNSURE, 60, ("expelled", "lose")),  # registrations often fail halfway
        (EAGER, 20, ("expelled", "moved")),
    ],
    ids=["weak", "strong", "moving", "unregistered", "restarting", "two", "dying", "unsure", "eager"],
)
def test_members_are_what_they_are_told(plot: Plot, seeds: int, what_happened: Sequence[str]) -> None:
    counts: Counter[str] = Counter()
    for seed in range(seeds * TIMES):
        try:
            counts += play(seed, plot)
        except Violation as violation:
            raise AssertionError(f"seed {seed}: {violation}") from violation
    assert counts["told"] > 20 * seeds, counts
    assert all(counts[each] for each in what_happened), counts


def test_a_broker_that_stood_still_reads_before_it_expels() -> None:
    """Heartbeats lie unread longer than a session, and the timer rings before anybody reads them."""
    seconds = SESSION_MS / 1000 + 1.5
    assert simulate(lambda: play_unread(seconds)) == 0
    with patched((coordinator_module, "STALL_S", float("inf"))).in_force():
        assert simulate(lambda: play_unread(seconds)) == 1


# --- the rules, and what happens without each


def patched(*patches: tuple[Any, str, Any]) -> Rules:
    return Rules(patches)


class PutsWhateverIsThere(GroupMetadata):
    async def put(self, domain: int, key: str, value: bytes, expect: Expectation = Expect.ANY) -> int:
        return await SimulatedMetadata.put(self, domain, key, value)


REAL_CONSUMER_EXPEL, REAL_CLASSIC_EXPEL = consumer.expel, classic.expel


def expels_whoever_hears_it(
    group: ConsumerGroup, member_id: str, heard_by: Process, now_ms: int
) -> ConsumerGroup:
    member = group.members.get(member_id)
    return group if member is None else REAL_CONSUMER_EXPEL(group, member_id, member.heard_by, now_ms)


def expels_classic_whoever_hears_it(
    group: Group | None, member_id: str, heard_by: Process, now_ms: int
) -> Group | None:
    hearing = next((each for each in classic.sessions(group) if each.member_id == member_id), None)
    return group if hearing is None else REAL_CLASSIC_EXPEL(group, member_id, hearing.heard_by, now_ms)


def leaves_the_member_where_it_was(group: Any, member_id: str, by: Process) -> Any:
    return group


REAL_CHECK = GroupCoordinator._check_registered


def checks_on_arrival_only(self: GroupCoordinator, group_id: str) -> Any:
    REAL_CHECK(self, self.process)
    return self._of(group_id)


def checks_nothing(self: GroupCoordinator, process: Process) -> None:
    pass


def process_of_a_life(self: GroupCoordinator) -> Process:
    """As though a broker that is registered again were the same."""
    return Process(self._registry.node_id, self._registry.info.started_at_ms)


def processes_of_lives(self: GroupCoordinator) -> set[Process]:
    return {Process(each.node_id, each.started_at_ms) for each in self._registry.brokers.all}


REAL_BEAT = GroupCoordinator.beat


async def beats_for_who_has_gone(
    self: GroupCoordinator, group_id: str, beat: Beat, gone: asyncio.Future[None]
) -> Beaten:
    return await REAL_BEAT(self, group_id, beat, asyncio.get_running_loop().create_future())


@contextmanager
def hears_no_requests(self: LiveGroup, member_id: str) -> Iterator[None]:
    yield


def is_known_while_asked(self: LiveGroup) -> bool:
    return not self._is_behind and self._last_read == self._reads


REAL_TOLD = GroupCoordinator.told


def passes_over_gaps(self: GroupCoordinator, domain: int, event: WatchEvent) -> None:
    if not isinstance(event, Gap):
        REAL_TOLD(self, domain, event)


async def finds_none(self: GroupCoordinator) -> AsyncIterator[ListedGroup]:
    nothing: tuple[ListedGroup, ...] = ()
    for none in nothing:
        yield none


# With the seed to begin with: the first that noticed when this was written.
BROKEN: dict[str, tuple[Plot, Rules, int]] = {
    "puts whatever is there": (WEAK, patched((GroupMetadata, "put", PutsWhateverIsThere.put)), 0),
    "expels consumers whoever hears them": (MOVING, patched((consumer, "expel", expels_whoever_hears_it)), 0),
    "expels classic members whoever hears them": (
        MOVING,
        patched((classic, "expel", expels_classic_whoever_hears_it)),
        1,
    ),
    "does not move classic members": (MOVING, patched((classic, "hear", leaves_the_member_where_it_was)), 0),
    "answers though not registered": (
        UNREGISTERED,
        patched((GroupCoordinator, "_check_registered", checks_nothing)),
        30,
    ),
    "is registered on arrival only": (
        UNREGISTERED,
        patched(
            (GroupCoordinator, "_for_members", checks_on_arrival_only),
            (GroupCoordinator, "_check_registered", checks_nothing),
        ),
        22,
    ),
    "is the same when registered again": (
        UNREGISTERED,
        patched(
            (GroupCoordinator, "process", property(process_of_a_life)),
            (GroupCoordinator, "_processes", processes_of_lives),
            (GroupCoordinator, "_is_gone", lambda self, process: True),
        ),
        59,
    ),
    "leaves members of lost brokers alone": (
        RESTARTING,
        patched((GroupCoordinator, "_is_gone", lambda self, process: False)),
        1,
    ),
    "finds no groups": (DYING, patched((GroupCoordinator, "_all", finds_none)), 1),
    "knows the group while something is asked": (
        TWO,
        patched((LiveGroup, "is_known", property(is_known_while_asked))),
        25,
    ),
    "passes over gaps": (MOVING, patched((GroupCoordinator, "told", passes_over_gaps)), 15),
    "takes no notice of others' writes": (
        MOVING,
        patched((LiveGroup, "told", lambda self, version: None)),
        0,
    ),
    "hears no requests that wait": (TWO, patched((LiveGroup, "hearing", hears_no_requests)), 27),
    "heeds heartbeats of who has gone": (
        TWO,
        patched((GroupCoordinator, "beat", beats_for_who_has_gone)),
        67,
    ),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_without_a_rule_somebody_notices(rule: str) -> None:
    plot, rules, first = BROKEN[rule]

    def fails(seed: int) -> bool:
        try:
            play(seed, plot, rules)
        except Violation:
            return True
        return False

    assert any(fails(seed) for seed in range(first, first + 100)), f"{rule}: makes no difference"
