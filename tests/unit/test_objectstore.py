"""What object stores are made of: health, pauses, ranges, URLs, threads."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from dray.errors import InvalidObjectRequest, ObjectStoreUnavailable
from dray.objectstore.health import Health, HealthTracker
from dray.objectstore.opening import FileUrl, S3Url, parse_objects_url
from dray.objectstore.s3_client import pause
from dray.objectstore.store import cut, merge_ranges
from dray.objectstore.threads import ThreadPool

MIB = 2**20


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tracker(clock: Clock) -> HealthTracker:
    return HealthTracker(clock)


def state(tracker: HealthTracker) -> Health:
    return tracker.state  # by a call, since mypy takes a property for a constant


def fail(tracker: HealthTracker, clock: Clock, times: int, each_s: float) -> None:
    for _ in range(times):
        began_s = clock.now_s
        clock.now_s += each_s
        tracker.failed(began_s)


def test_a_store_without_calls_is_healthy(tracker: HealthTracker) -> None:
    assert state(tracker) is Health.HEALTHY


def test_a_burst_of_failures_is_bad_luck(tracker: HealthTracker, clock: Clock) -> None:
    """One cut connection fails all that is under way."""
    fail(tracker, clock, times=50, each_s=0.01)
    assert state(tracker) is Health.HEALTHY


def test_failures_one_after_another_are_unavailability(tracker: HealthTracker, clock: Clock) -> None:
    fail(tracker, clock, times=2, each_s=5.0)
    assert state(tracker) is Health.HEALTHY
    fail(tracker, clock, times=1, each_s=5.0)
    assert state(tracker) is Health.UNAVAILABLE


def test_timeouts_that_end_together_count_from_when_they_began(tracker: HealthTracker, clock: Clock) -> None:
    began_s = clock.now_s
    clock.now_s += 10
    for _ in range(3):
        tracker.failed(began_s)
    assert state(tracker) is Health.UNAVAILABLE


def test_success_now_and_then_is_degradation(tracker: HealthTracker, clock: Clock) -> None:
    for _ in range(4):
        fail(tracker, clock, times=2, each_s=0.3)
        tracker.succeeded()
        tracker.succeeded()
    assert state(tracker) is Health.DEGRADED


def test_rare_failures_between_successes_do_no_harm(tracker: HealthTracker, clock: Clock) -> None:
    for _ in range(100):
        fail(tracker, clock, times=1, each_s=0.3)
        for _ in range(3):
            tracker.succeeded()
        assert state(tracker) is Health.HEALTHY


def test_success_heals_by_steps(tracker: HealthTracker, clock: Clock) -> None:
    fail(tracker, clock, times=5, each_s=1.0)
    seen = [state(tracker)]
    for _ in range(3):
        tracker.succeeded()
        seen.append(state(tracker))
    assert seen == [Health.UNAVAILABLE, Health.DEGRADED, Health.DEGRADED, Health.HEALTHY]


def test_time_heals_too(tracker: HealthTracker, clock: Clock) -> None:
    """A broker that refuses everything makes no calls that could show that the store is back."""
    fail(tracker, clock, times=5, each_s=1.0)
    clock.now_s += 29.9
    assert state(tracker) is Health.UNAVAILABLE
    clock.now_s += 0.1
    assert state(tracker) is Health.HEALTHY
    fail(tracker, clock, times=1, each_s=1.0)
    assert state(tracker) is Health.HEALTHY


def test_pauses_are_full_jitter_below_a_doubling_limit() -> None:
    limits = [pause(attempt, 1.0) for attempt in range(10)]
    assert limits == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0])
    assert [pause(attempt, 0.0) for attempt in range(10)] == [0.0] * 10
    assert pause(3, 0.25) == pytest.approx(0.1)
    assert pause(10_000, 1.0) == 5.0


@pytest.mark.parametrize(
    ("ranges", "reads"),
    [
        ([], []),
        ([(3, 5)], [(3, 5)]),
        ([(5, 6), (3, 5)], [(3, 6)]),
        ([(0, 10), (2, 3)], [(0, 10)]),
        ([(0, 10), (5, 15)], [(0, 15)]),
        ([(0, 1), (262_145, 262_146)], [(0, 262_146)]),  # a hole of 256 KiB
        ([(0, 1), (262_146, 262_147)], [(0, 1), (262_146, 262_147)]),
        ([(0, 8 * MIB), (8 * MIB, 9 * MIB)], [(0, 8 * MIB), (8 * MIB, 9 * MIB)]),
        ([(0, 9 * MIB), (1, 2)], [(0, 9 * MIB)]),
    ],
)
def test_near_ranges_are_read_at_once(ranges: list[tuple[int, int]], reads: list[tuple[int, int]]) -> None:
    assert merge_ranges(ranges) == reads
    body = bytes(number % 251 for number in range(1000)) * (9 * MIB // 1000 + 1)
    bodies = [body[start:end] for start, end in reads]
    assert cut(ranges, reads, bodies) == [body[start:end] for start, end in ranges]


@pytest.mark.parametrize(
    ("url", "parsed"),
    [
        ("file:///srv/50%25/a", FileUrl(Path("/srv/50%/a"))),
        ("s3://bucket", S3Url("bucket", "", None, None, False, True)),
        ("s3://bucket/a/b%20c/", S3Url("bucket", "a/b c/", None, None, False, True)),
        (
            "s3://bucket/p?endpoint=http://127.0.0.1:7070&region=auto",
            S3Url("bucket", "p/", "http://127.0.0.1:7070", "auto", True, True),
        ),
        (
            "s3://bucket?endpoint=https://h&path_style=false&checksums=false",
            S3Url("bucket", "", "https://h", None, False, False),
        ),
    ],
)
def test_urls_mean_what_they_say(url: str, parsed: object) -> None:
    assert parse_objects_url(url) == parsed


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("gs://bucket", "begins with file:/// or s3://"),
        ("file://host/path", "name an absolute directory"),
        ("file:///a%00b", "name an absolute directory"),
        ("s3://bucket/a/../b", "a prefix is a path"),
        ("s3://bucket/a//b", "a prefix is a path"),
        ("s3://bucket?path_style=yes", "path_style is true or false"),
        ("s3://bucket?checksums=1", "checksums is true or false"),
        ("s3://bucket?region=a/b", "region is a name"),
    ],
)
def test_bad_urls_are_refused(url: str, complaint: str) -> None:
    with pytest.raises(InvalidObjectRequest, match=complaint):
        parse_objects_url(url)


class Body:
    """What a put holds in memory."""


@pytest.mark.parametrize("how", ["timed out", "cancelled"])
async def test_calls_given_up_while_all_threads_hang_hold_nothing(how: str) -> None:
    """Otherwise memory grows for as long as a file system hangs."""
    pool = ThreadPool("test", 2)
    gate = threading.Event()
    bodies: list[weakref.ref[Body]] = []

    def hanging() -> Callable[[threading.Event], object]:
        body = Body()
        bodies.append(weakref.ref(body))
        return lambda _: (gate.wait(), body)

    async def call() -> None:
        await pool.run(hanging(), 0.05 if how == "timed out" else 60)

    try:
        for _ in range(3):
            calls = [asyncio.create_task(call()) for _ in range(10)]
            if how == "cancelled":
                await asyncio.sleep(0)
                assert all(each.cancel() for each in calls)
            await asyncio.wait(calls)
            assert all(each.cancelled() or isinstance(each.exception(), TimeoutError) for each in calls)
            del calls
        gc.collect()
        assert len(bodies) == 30
        assert sum(body() is not None for body in bodies) <= 2
    finally:
        gate.set()
    assert await pool.run(lambda _: "works", 60) == "works"
    await pool.close()


async def test_a_call_that_waits_for_a_thread_ends_when_the_pool_is_closed() -> None:
    pool = ThreadPool("test", 1)
    gate = threading.Event()
    first = asyncio.create_task(pool.run(lambda _: gate.wait(), 60))
    second = asyncio.create_task(pool.run(lambda _: True, 60))
    await asyncio.sleep(0)
    closing = asyncio.create_task(pool.close())
    await asyncio.sleep(0)
    gate.set()
    await closing
    assert await first
    with pytest.raises(ObjectStoreUnavailable, match="closed"):
        await second
