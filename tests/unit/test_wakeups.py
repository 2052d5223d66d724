"""Who waits for which stream, and what wakes them."""

from __future__ import annotations

import asyncio

from dray.log.wakeups import Waiter, Wakeups
from tests.log_node import settle, soon


async def test_only_those_who_wait_for_the_stream_are_woken() -> None:
    wakeups = Wakeups()
    one, other = Waiter(), Waiter()
    wakeups.register(one, {1, 2})
    wakeups.register(other, {2, 3})
    tasks = [asyncio.create_task(waiter.wait(60.0)) for waiter in (one, other)]
    await settle()
    wakeups.wake(1)
    wakeups.wake(7)
    assert await soon(tasks[0]) == {1}
    await settle()
    assert not tasks[1].done()
    wakeups.wake(2)
    assert await soon(tasks[1]) == {2}


async def test_what_comes_before_the_wait_is_not_lost_and_told_once() -> None:
    wakeups = Wakeups()
    waiter = Waiter()
    wakeups.register(waiter, {1, 2})
    for _ in range(3):
        wakeups.wake(1)
        wakeups.wake(2)
    assert await soon(waiter.wait(60.0)) == {1, 2}
    assert await waiter.wait(0.001) == set()


async def test_what_comes_while_the_last_is_looked_at_wakes_again() -> None:
    wakeups = Wakeups()
    waiter = Waiter()
    wakeups.register(waiter, {1})
    wakeups.wake(1)
    assert await soon(waiter.wait(60.0)) == {1}
    wakeups.wake(1)
    assert await soon(waiter.wait(60.0)) == {1}


async def test_a_gap_wakes_everybody_for_all_of_their_streams() -> None:
    wakeups = Wakeups()
    one, other = Waiter(), Waiter()
    wakeups.register(one, {1, 2})
    wakeups.register(other, {2, 3})
    wakeups.wake_all()
    assert await soon(one.wait(60.0)) == {1, 2}
    assert await soon(other.wait(60.0)) == {2, 3}


async def test_giving_up_ends_this_wait_and_all_later_ones() -> None:
    waiter = Waiter()
    task = asyncio.create_task(waiter.wait(60.0))
    await settle()
    waiter.give_up()
    assert await soon(task) == set()
    assert waiter.is_over
    assert await soon(waiter.wait(60.0)) == set()


async def test_stopping_ends_the_waits_of_today_and_of_tomorrow() -> None:
    wakeups = Wakeups()
    before, after = Waiter(), Waiter()
    wakeups.register(before, {1})
    task = asyncio.create_task(before.wait(60.0))
    await settle()
    wakeups.stop()
    assert await soon(task) == set()
    wakeups.register(after, {1})
    assert await soon(after.wait(60.0)) == set()
    assert before.is_over
    assert after.is_over


async def test_nothing_is_kept_of_those_who_left() -> None:
    wakeups = Wakeups()
    waiters = [Waiter() for _ in range(3)]
    for waiter in waiters:
        wakeups.register(waiter, {1, 2})
    wakeups.unregister(waiters[0], {1, 2})
    wakeups.wake(1)
    assert waiters[0].changed == set()
    assert waiters[1].changed == {1}
    for waiter in waiters[1:]:
        wakeups.unregister(waiter, {1, 2})
    wakeups.unregister(waiters[0], {1, 2})
    assert not wakeups._by_stream
    assert not wakeups._waiters


async def test_what_is_remembered_is_bounded_by_the_streams() -> None:
    wakeups = Wakeups()
    waiter = Waiter()
    wakeups.register(waiter, {1, 2, 3})
    for number in range(10_000):
        wakeups.wake(number % 5)
    assert waiter.changed == {1, 2, 3}
