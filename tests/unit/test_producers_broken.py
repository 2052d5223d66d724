"""Which producers' gaps are of the broker's making, and for how long that is remembered."""

from __future__ import annotations

from dray.index.entry import Producer
from dray.producers.broken import Broken

S = 7


def producer(producer_id: int = 1) -> Producer:
    return Producer(producer_id, epoch=0, base_sequence=0)


def test_as_many_fail_alike_as_a_client_may_have_in_flight() -> None:
    broken = Broken()
    broken.add(S, producer())
    assert [broken.fails_alike(S, producer()) for _ in range(7)] == [True] * 5 + [False] * 2


def test_it_is_counted_anew_from_the_last_that_failed() -> None:
    broken = Broken()
    broken.add(S, producer())
    assert broken.fails_alike(S, producer())
    broken.add(S, producer())
    assert [broken.fails_alike(S, producer()) for _ in range(6)] == [True] * 5 + [False]


def test_a_batch_that_is_committed_ends_it() -> None:
    broken = Broken()
    broken.add(S, producer())
    broken.mend(S, producer())
    assert not broken.fails_alike(S, producer())


def test_other_producers_and_streams_are_not_concerned() -> None:
    broken = Broken()
    broken.add(S, producer(1))
    broken.add(S, None)
    assert not broken.fails_alike(S, producer(2))
    assert not broken.fails_alike(S + 1, producer(1))
    broken.mend(S, producer(2))
    broken.mend(S + 1, producer(1))
    broken.mend(S, None)
    assert broken.fails_alike(S, producer(1))


def test_the_one_that_failed_longest_ago_is_forgotten() -> None:
    broken = Broken()
    for producer_id in range(10_000):
        broken.add(S, producer(producer_id))
    broken.add(S, producer(0))
    broken.add(S, producer(10_000))
    assert broken.fails_alike(S, producer(0))
    assert broken.fails_alike(S, producer(2))
    assert not broken.fails_alike(S, producer(1))
