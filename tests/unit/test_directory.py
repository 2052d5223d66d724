"""The view of a directory against everything that a store may do to it within its contract."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from dray.errors import CorruptStore, InvalidRequest, Unavailable
from dray.metadata import directory as module
from dray.metadata.directory import Directory, Found
from dray.metadata.memory import MemoryData, MemoryStore
from dray.metadata.store import Record

DOMAIN = 3


def text(key: str, value: bytes) -> str:
    if value == b"bad":
        raise CorruptStore(f"{key}: bad")
    return value.decode()


class Seen:
    """What a subscriber of the view saw, and a way to wait for more."""

    def __init__(self, view: Directory[str]) -> None:
        self.history: list[tuple[str, str | None]] = []
        self._view = view
        self._more = asyncio.Event()
        view.subscribe(self._tell)

    def _tell(self, segment: str) -> None:
        found = self._view.get(segment)
        self.history.append((segment, None if found is None else found.value))
        self._more.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                self._more.clear()
                await self._more.wait()


@asynccontextmanager
async def viewing(store: MemoryStore) -> AsyncIterator[tuple[Directory[str], Seen]]:
    view = Directory(store, DOMAIN, "d", text)
    seen = Seen(view)
    task = asyncio.create_task(view.run())
    try:
        await view.loaded()
        yield view, seen
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


def contents(view: Directory[str]) -> dict[str, str]:
    return {segment: found.value for segment, found in view.values().items()}


def make_gap(data: MemoryData) -> None:
    for _, feed in data.domain(DOMAIN).watchers:
        feed.gap()


async def let_others_run() -> None:
    """Until every task that can go on without this one waits for something. All of it is in memory."""
    for _ in range(50):
        await asyncio.sleep(0)


async def test_what_was_there_before_is_loaded_in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAGE_RECORDS", 3)
    store = MemoryStore()
    for name in ("a", "b", "c", "d", "é", "f"):  # two full pages: only a third says that this is all
        await store.put(DOMAIN, f"d/{name}", name.encode())
    async with viewing(store) as (view, _):
        assert contents(view) == {name: name for name in ("a", "b", "c", "d", "é", "f")}
        assert view.revision == 6


async def test_changes_of_direct_children_are_followed_and_no_others() -> None:
    store = MemoryStore()
    async with viewing(store) as (view, seen):
        for key in ("d/a", "d/a/deeper", "other/a", "dd"):
            await store.put(DOMAIN, key, b"1")
        await store.put(DOMAIN + 1, "d/elsewhere", b"1")
        version = await store.put(DOMAIN, "d/a", b"2")
        await store.put(DOMAIN, "d/b", b"1")
        await seen.until(lambda: "b" in view.values())
        assert contents(view) == {"a": "2", "b": "1"}
        assert view.get("a") == Found("2", version)
        assert view.get("deeper") is None
        await store.delete(DOMAIN, "d/a")
        await seen.until(lambda: "a" not in view.values())
        assert seen.history[-1] == ("a", None)
        assert view.revision == len(seen.history)


async def test_what_vanished_in_a_gap_is_removed_and_what_came_is_found() -> None:
    store = MemoryStore(data := MemoryData())
    await store.put(DOMAIN, "d/stays", b"1")
    await store.put(DOMAIN, "d/goes", b"1")
    await store.put(DOMAIN, "d/broken", b"bad")
    async with viewing(store) as (view, seen):
        await store.delete(DOMAIN, "d/goes")
        await store.delete(DOMAIN, "d/broken")
        await store.put(DOMAIN, "d/comes", b"1")
        make_gap(data)
        await seen.until(lambda: contents(view) == {"stays": "1", "comes": "1"})
        await store.put(DOMAIN, "d/later", b"1")
        await seen.until(lambda: "later" in view.values())
        assert contents(view) == {"stays": "1", "comes": "1", "later": "1"}


async def test_a_record_that_cannot_be_decoded_is_left_out_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One bad record must not hide the others, nor fill the log each time the watch has a gap."""
    store = MemoryStore(data := MemoryData())
    await store.put(DOMAIN, "d/good", b"1")
    await store.put(DOMAIN, "d/odd", b"bad")
    with caplog.at_level(logging.ERROR):
        async with viewing(store) as (view, seen):
            assert contents(view) == {"good": "1"}
            make_gap(data)
            await store.put(DOMAIN, "d/more", b"1")
            await seen.until(lambda: "more" in view.values())
            assert await view.refresh("odd") is None
            assert len(caplog.records) == 1
            await store.put(DOMAIN, "d/odd", b"2")
            await seen.until(lambda: contents(view).get("odd") == "2")
            await store.put(DOMAIN, "d/odd", b"bad")
            await seen.until(lambda: "odd" not in view.values())
            assert contents(view) == {"good": "1", "more": "1"}
            assert len(caplog.records) == 2


async def test_refresh_takes_in_what_is_there() -> None:
    store = MemoryStore()
    async with viewing(store) as (view, seen):
        assert await view.refresh("a") is None
        version = await store.put(DOMAIN, "d/a", b"1")
        assert await view.refresh("a") == Found("1", version) == view.get("a")
        await store.delete(DOMAIN, "d/a")
        assert await view.refresh("a") is None
        await let_others_run()
        assert seen.history == [("a", "1"), ("a", None)]


async def test_it_ends_when_the_store_is_closed() -> None:
    store = MemoryStore()
    view = Directory(store, DOMAIN, "d", text)
    task = asyncio.create_task(view.run())
    await view.loaded()
    await store.close()
    await task


async def test_a_wrong_directory_is_told_to_those_who_wait() -> None:
    view = Directory(MemoryStore(), DOMAIN, "d//e", text)
    task = asyncio.create_task(view.run())
    with pytest.raises(InvalidRequest):
        await view.loaded()
    with pytest.raises(InvalidRequest):
        await task


class FailingStore(MemoryStore):
    """The named calls fail while they are in `failing`."""

    def __init__(self, data: MemoryData) -> None:
        super().__init__(data)
        self.failing: set[str] = set()
        self.failures = 0
        self.failed = asyncio.Event()

    def _maybe_fail(self, call: str) -> None:
        if call in self.failing:
            self.failures += 1
            if self.failures == 3:
                self.failed.set()
            raise Unavailable(f"no {call} now")

    async def get(self, domain: int, key: str) -> Record | None:
        self._maybe_fail("get")
        return await super().get(domain, key)

    async def scan(
        self, domain: int, directory: str, *, start: str = "", end: str | None = None, limit: int
    ) -> list[Record]:
        self._maybe_fail("scan")
        return await super().scan(domain, directory, start=start, end=end, limit=limit)

    async def barrier(self, domain: int) -> None:
        self._maybe_fail("barrier")


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0)


@pytest.mark.parametrize("call", ["scan", "barrier"])
async def test_the_first_load_waits_for_the_store(call: str, no_pause: None) -> None:
    store = FailingStore(MemoryData())
    await store.put(DOMAIN, "d/a", b"1")
    store.failing = {call}
    view = Directory(store, DOMAIN, "d", text)
    task = asyncio.create_task(view.run())
    waiting = asyncio.create_task(view.loaded())
    await store.failed.wait()
    assert not waiting.done()
    store.failing = set()
    await waiting
    assert contents(view) == {"a": "1"}
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_one_that_is_stopped_before_it_was_loaded_lets_nobody_wait(no_pause: None) -> None:
    store = FailingStore(MemoryData())
    store.failing = {"scan"}
    view = Directory(store, DOMAIN, "d", text)
    task = asyncio.create_task(view.run())
    await store.failed.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(Unavailable, match="stopped before"):
        await view.loaded()


async def test_while_the_store_is_away_what_is_known_stays_and_then_it_goes_on(no_pause: None) -> None:
    data = MemoryData()
    store, writer = FailingStore(data), MemoryStore(data)
    await writer.put(DOMAIN, "d/a", b"1")
    async with viewing(store) as (view, seen):
        store.failing = {"get", "scan"}
        await writer.put(DOMAIN, "d/a", b"2")
        await writer.put(DOMAIN, "d/b", b"1")
        await store.failed.wait()
        assert contents(view) == {"a": "1"}
        with pytest.raises(Unavailable):
            await view.refresh("a")
        store.failing = set()
        await seen.until(lambda: contents(view) == {"a": "2", "b": "1"})


class GatedStore(MemoryStore):
    """Reads have their answer and then wait for the gate: answers overtake each other."""

    def __init__(self, data: MemoryData) -> None:
        super().__init__(data)
        self.gate = asyncio.Event()
        self.gate.set()

    async def get(self, domain: int, key: str) -> Record | None:
        answer = await super().get(domain, key)
        gate = self.gate
        await gate.wait()
        return answer

    async def scan(
        self, domain: int, directory: str, *, start: str = "", end: str | None = None, limit: int
    ) -> list[Record]:
        answer = await super().scan(domain, directory, start=start, end=end, limit=limit)
        gate = self.gate
        await gate.wait()
        return answer

    def shut(self) -> asyncio.Event:
        """Reads from now on wait for the gate that is returned; those that wait already are not touched."""
        self.gate = asyncio.Event()
        return self.gate

    def open_for_new(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()


async def test_a_refresh_that_a_load_overtook_does_not_bring_back_what_it_read() -> None:
    """The change fell into the gap, so nothing would ever correct it."""
    data = MemoryData()
    store, writer = GatedStore(data), MemoryStore(data)
    await writer.put(DOMAIN, "d/a", b"old")
    async with viewing(store) as (view, seen):
        gate = store.shut()
        refreshing = asyncio.create_task(view.refresh("a"))
        await let_others_run()
        store.open_for_new()
        await writer.put(DOMAIN, "d/a", b"new")
        make_gap(data)
        await seen.until(lambda: contents(view) == {"a": "new"})
        gate.set()
        found = await refreshing
        assert found is not None
        assert found.value == "new"
        assert seen.history == [("a", "old"), ("a", "new")]


async def test_a_load_does_not_undo_a_refresh_that_overtook_it() -> None:
    """Whoever created a topic and refreshed it must not lose it for a moment."""
    data = MemoryData()
    store, writer = GatedStore(data), MemoryStore(data)
    await writer.put(DOMAIN, "d/changed", b"old")
    await writer.put(DOMAIN, "d/removed", b"old")
    async with viewing(store) as (view, seen):
        gate = store.shut()
        make_gap(data)
        await let_others_run()
        store.open_for_new()
        await writer.put(DOMAIN, "d/created", b"new")
        await writer.put(DOMAIN, "d/changed", b"new")
        await writer.delete(DOMAIN, "d/removed")
        for segment in ("created", "changed", "removed"):
            await view.refresh(segment)
        now = list(seen.history)
        gate.set()
        await let_others_run()
        assert contents(view) == {"created": "new", "changed": "new"}
        assert seen.history == now


async def test_a_read_for_the_watch_does_not_undo_a_refresh_that_began_after_it() -> None:
    data = MemoryData()
    store, writer = GatedStore(data), MemoryStore(data)
    async with viewing(store) as (view, seen):
        gate = store.shut()
        await writer.put(DOMAIN, "d/a", b"old")
        await let_others_run()
        store.open_for_new()
        await writer.put(DOMAIN, "d/a", b"new")
        refreshing = asyncio.create_task(view.refresh("a"))
        await let_others_run()
        gate.set()
        found = await refreshing
        assert found is not None
        assert found.value == "new"
        await let_others_run()
        assert seen.history == [("a", "old"), ("a", "new")]


async def test_changes_of_one_batch_are_read_at_once_but_not_without_bound() -> None:
    class Counting(MemoryStore):
        running = most = 0

        async def get(self, domain: int, key: str) -> Record | None:
            self.running += 1
            self.most = max(self.most, self.running)
            await asyncio.sleep(0)
            self.running -= 1
            return await super().get(domain, key)

    store = Counting(data := MemoryData())
    async with viewing(store) as (view, seen):
        # Several writes in one event, as a store delivers them that had to catch up.
        inside = data.domain(DOMAIN)
        inside.publish([inside.put(f"d/{i}", b"1", data.next_version()) for i in range(100)])
        await seen.until(lambda: len(view.values()) == 100)
        assert 1 < store.most <= 16


async def test_an_error_of_one_read_does_not_leave_another_to_come_in_late(no_pause: None) -> None:
    """After an error all is loaded again; what was read before that must be through by then."""
    data = MemoryData()
    writer = MemoryStore(data)
    gate = asyncio.Event()

    class OneFails(MemoryStore):
        failed = False

        async def get(self, domain: int, key: str) -> Record | None:
            answer = await super().get(domain, key)
            if key == "d/held":
                await gate.wait()
            elif not self.failed:
                self.failed = True
                await writer.put(domain, "d/held", b"new")
                raise Unavailable("this once")
            return answer

    async with viewing(OneFails(data)) as (view, seen):
        inside = data.domain(DOMAIN)
        inside.publish([inside.put(f"d/{name}", b"old", data.next_version()) for name in ("held", "fails")])
        await let_others_run()
        gate.set()
        await seen.until(lambda: contents(view) == {"held": "new", "fails": "old"})
        await let_others_run()
        assert contents(view) == {"held": "new", "fails": "old"}


async def test_a_change_that_was_told_is_taken_in_though_a_read_does_not_see_it_yet() -> None:
    """A paused former leader answers with what was; only a read behind a barrier is as new as the watch."""
    data = MemoryData()
    writer = MemoryStore(data)

    class Behind(MemoryStore):
        stale: dict[str, Record] | None = None

        async def get(self, domain: int, key: str) -> Record | None:
            return await super().get(domain, key) if self.stale is None else self.stale.get(key)

        async def barrier(self, domain: int) -> None:
            self.stale = None

    store = Behind(data)
    await writer.put(DOMAIN, "d/changed", b"old")
    await writer.put(DOMAIN, "d/removed", b"old")
    async with viewing(store) as (view, seen):
        for write in (
            writer.put(DOMAIN, "d/changed", b"new"),
            writer.put(DOMAIN, "d/created", b"new"),
            writer.delete(DOMAIN, "d/removed"),
        ):
            store.stale = dict(data.domain(DOMAIN).records)
            await write
            await let_others_run()
        assert seen.history[2:] == [("changed", "new"), ("created", "new"), ("removed", None)]
        assert contents(view) == {"changed": "new", "created": "new"}


class StaleStore(MemoryStore):
    """Every read is answered late, and from any time since the last barrier: all that the contract allows."""

    def __init__(self, data: MemoryData, rng: random.Random) -> None:
        super().__init__(data)
        self._rng = rng
        self._states: list[dict[str, Record]] = [{}]
        self._oldest = 0

    def remember(self) -> None:
        self._states.append(dict(self._data.domain(DOMAIN).records))

    def _state(self) -> dict[str, Record]:
        return self._rng.choice([self._states[self._oldest], self._rng.choice(self._states[self._oldest :])])

    async def _delay(self) -> None:
        for _ in range(self._rng.randrange(6)):
            await asyncio.sleep(0)

    async def get(self, domain: int, key: str) -> Record | None:
        await self._delay()
        answer = self._state().get(key)
        await self._delay()
        return answer

    async def scan(
        self, domain: int, directory: str, *, start: str = "", end: str | None = None, limit: int
    ) -> list[Record]:
        await self._delay()
        state = self._state()
        await self._delay()
        names = sorted(key for key in state if key >= f"{directory}/{start}")
        return [state[name] for name in names[:limit]]

    async def barrier(self, domain: int) -> None:
        acknowledged = len(self._states) - 1
        await self._delay()
        self._oldest = max(self._oldest, acknowledged)
        await self._delay()


@pytest.mark.parametrize("seed", range(60))
async def test_whatever_the_store_does_the_view_ends_up_right(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes, refreshes and gaps at random on a stale store.

    In the end the view is what is stored; and once refreshed, a record is never seen older than it was then.
    """
    monkeypatch.setattr(module, "PAGE_RECORDS", 2)
    rng = random.Random(seed)
    data = MemoryData()
    store, writer = StaleStore(data, rng), MemoryStore(data)
    floors: dict[str, int] = {}  # the least that may be seen; these are never deleted again

    def check(segment: str) -> None:
        if segment in floors:
            found = view.get(segment)
            assert found is not None
            assert found.version >= floors[segment]

    async def write(segment: str) -> None:
        await writer.put(DOMAIN, f"d/{segment}", str(rng.random()).encode())
        store.remember()

    async def write_and_refresh(segment: str) -> None:
        await write(segment)
        floor = data.domain(DOMAIN).records[f"d/{segment}"].version
        found = await view.refresh(segment)
        assert found is not None
        assert found.version >= floor
        floors[segment] = max(floor, floors.get(segment, 0))

    async def delete(segment: str) -> None:
        await writer.delete(DOMAIN, f"d/{segment}")
        store.remember()
        if rng.random() < 0.5:
            await view.refresh(segment)

    view = Directory(store, DOMAIN, "d", text)
    seen = Seen(view)
    view.subscribe(check)
    task = asyncio.create_task(view.run())
    async with asyncio.TaskGroup() as group:
        for _ in range(60):
            match rng.randrange(8):
                case 0 | 1:
                    group.create_task(delete(rng.choice("abc")))
                case 2 | 3:
                    group.create_task(write(rng.choice("abcxyz")))
                case 4 | 5 | 6 if seed % 2:  # without refreshes nothing but the watch says what is new
                    group.create_task(write_and_refresh(rng.choice("xyz")))
                case 7 if seed % 3:
                    make_gap(data)
            for _ in range(rng.randrange(8)):
                await asyncio.sleep(0)

    def stored() -> dict[str, tuple[bytes, int]]:
        return {key[2:]: (r.value, r.version) for key, r in data.domain(DOMAIN).records.items()}

    def viewed() -> dict[str, tuple[bytes, int]]:
        return {segment: (found.value.encode(), found.version) for segment, found in view.values().items()}

    await seen.until(lambda: task.done() or viewed() == stored())
    await let_others_run()
    assert viewed() == stored()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
