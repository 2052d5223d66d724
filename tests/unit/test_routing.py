"""Where clients are sent: zones, and the rendezvous hash that all brokers must agree on."""

from __future__ import annotations

import random

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from dray import routing
from dray.routing import BrokerInfo, Brokers, parse_client_id


def broker(node_id: int, zone: str = "") -> BrokerInfo:
    return BrokerInfo(node_id, "host", 9092 + node_id, zone, None, 0, "1.0")


ZONED = Brokers([broker(4, "b"), broker(0, "a"), broker(2, "a"), broker(7, "b"), broker(5)], 1)
STREAMS = range(200)

node_ids = st.sets(st.integers(0, 2**31 - 1), min_size=1, max_size=12)
stream_ids = st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=30)


@pytest.mark.parametrize(
    ("client_id", "zone"),
    [
        ("zone_id=use1-az1", "use1-az1"),
        ("zone_id=use1-az1,app=billing,x=1", "use1-az1"),
        ("app=billing,zone_id=use1-az1", "use1-az1"),
        ("zone_id=a,query=x=y", "a"),
        ("zone_id=a,empty=", "a"),
        ("zone_id= a ", " a "),  # exactly as written
        (None, None),
        ("", None),
        ("rdkafka", None),
        ("zone_id", None),
        ("zone_id=", None),
        ("zone_id=,app=x", None),
        ("zone_id=a,plain", None),
        ("zone_id=a,", None),
        (",zone_id=a", None),
        ("zone_id=a,=x", None),
        ("zone_id=a,zone_id=b", None),
        ("ZONE_ID=a", None),
        ("my_zone_id=a", None),
        ("app=billing,other=zone_id=a", None),
    ],
)
def test_the_zone_of_a_client_id(client_id: str | None, zone: str | None) -> None:
    assert parse_client_id(client_id) == zone


@given(st.text())
def test_any_client_id_is_accepted(client_id: str) -> None:
    parse_client_id(client_id)
    parse_client_id("zone_id=" + client_id)


def ids(brokers: tuple[BrokerInfo, ...]) -> list[int]:
    return [broker.node_id for broker in brokers]


def test_a_client_is_told_of_the_brokers_of_its_zone_and_else_of_all() -> None:
    assert ids(ZONED.in_zone("a")) == [0, 2]
    assert ids(ZONED.in_zone("b")) == [4, 7]
    assert ids(ZONED.in_zone("nowhere")) == [0, 2, 4, 5, 7]
    assert ids(ZONED.in_zone(None)) == [0, 2, 4, 5, 7]
    assert ids(ZONED.in_zone("")) == [0, 2, 4, 5, 7]


def test_a_broker_that_is_asked_from_another_zone_tells_of_itself_too() -> None:
    """Or a client whose zone has just died would know nobody who answers."""
    assert ids(ZONED.told_by(2, "a")) == [0, 2]
    assert ids(ZONED.told_by(2, "b")) == [2, 4, 7]
    assert ids(ZONED.told_by(5, "a")) == [0, 2, 5]
    assert ids(ZONED.told_by(5, None)) == [0, 2, 4, 5, 7]
    assert ids(ZONED.told_by(9, "a")) == [0, 2], "its own registration may have run out"


@pytest.mark.parametrize("zone", ["a", "b", "nowhere", "", None])
def test_whoever_a_client_is_sent_to_is_one_it_was_told_of(zone: str | None) -> None:
    told = ZONED.in_zone(zone)
    assert ZONED.controller(zone) in told
    assert {ZONED.leader(zone, stream) for stream in STREAMS} == set(told)
    assert {ZONED.coordinator(zone, f"group-{i}") for i in STREAMS} == set(told)


def test_the_hash_is_what_it_was() -> None:
    """Brokers of two versions of Dray run side by side and must name the same owners.

    XXH64, seed 0, of node id (4 bytes) and stream id (8 bytes) or UTF-8 name, big-endian. Found with
    another implementation of XXH64 over those bytes; the highest wins.
    """
    five = Brokers([broker(node_id) for node_id in range(5)], 1)
    streams = (0, 1, 2, 3, 0x0123456789ABCDEF, 2**64 - 1)
    assert [five.leader(None, stream).node_id for stream in streams] == [0, 3, 0, 0, 1, 4]
    names = ("", "g", "group-1", "grüppe")
    assert [five.coordinator(None, name).node_id for name in names] == [3, 1, 3, 4]
    far = Brokers([broker(1), broker(2**31 - 1)], 1)
    assert [far.leader(None, stream).node_id for stream in range(6)] == [
        1,
        2**31 - 1,
        2**31 - 1,
        2**31 - 1,
        2**31 - 1,
        2**31 - 1,
    ]


@given(node_ids, stream_ids, st.randoms())
def test_all_brokers_compute_the_same(nodes: set[int], streams: list[int], rng: random.Random) -> None:
    """Whatever the order in which they learnt of each other, and whatever they were asked before."""
    shuffled = list(nodes)
    rng.shuffle(shuffled)
    one, other = Brokers(map(broker, nodes), 1), Brokers(map(broker, shuffled), 9)
    expected = [one.leader(None, stream) for stream in streams]
    assert [other.leader(None, stream) for stream in reversed(streams)] == expected[::-1]
    assert [one.leader(None, stream) for stream in streams] == expected
    assert one.controller(None) == other.controller(None)


@given(node_ids, st.integers(0, 2**31 - 1), stream_ids)
def test_a_broker_that_comes_or_goes_moves_only_its_own_streams(
    nodes: set[int], one_more: int, streams: list[int]
) -> None:
    without = Brokers(map(broker, nodes - {one_more} or {one_more + 1}), 1)
    with_it = Brokers([*without.all, broker(one_more)], 2)
    for stream in streams:
        before, after = without.leader(None, stream), with_it.leader(None, stream)
        assert after in (before, broker(one_more))


def test_streams_are_spread_evenly() -> None:
    brokers = Brokers(map(broker, range(8)), 1)
    counts = [0] * 8
    for stream in range(8_000):
        counts[brokers.leader(None, stream).node_id] += 1
    assert min(counts) > 850
    assert max(counts) < 1_150


def test_an_owner_for_the_client_or_within_its_own_zone_may_serve() -> None:
    """A consumer of zone a that was sent to zone b by its client.rack is served there."""
    for stream in STREAMS:
        for zone in ("a", "b"):
            owner = ZONED.leader(zone, stream).node_id
            assert ZONED.is_owner(owner, "a", stream)
            assert ZONED.is_owner(owner, None, stream)
            for other in ids(ZONED.in_zone(zone)):
                expected = other in (owner, ZONED.leader(None, stream).node_id)
                assert ZONED.is_owner(other, None, stream) == expected
                assert ZONED.is_owner(other, zone, stream) == (other == owner)
        # A broker without a zone owns what it owns among all.
        assert ZONED.is_owner(5, "a", stream) == (ZONED.leader(None, stream).node_id == 5)
        assert not ZONED.is_owner(99, "a", stream)


def test_a_consumer_with_a_rack_is_sent_to_the_owner_in_that_zone() -> None:
    for stream in STREAMS:
        assert ZONED.nearest("b", stream) == ZONED.leader("b", stream)
        assert ZONED.nearest("nowhere", stream) is None
        assert ZONED.nearest("", stream) is None


def test_a_leader_is_hashed_once_per_zone_and_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Metadata answer for 1,000 partitions must not hash 1,000 times the number of brokers each time."""
    brokers = Brokers([broker(0, "a"), broker(1, "a"), broker(2, "b")], 1)
    asked = [(zone, stream) for zone in ("a", "b", None) for stream in STREAMS]
    expected = [brokers.leader(*each) for each in asked]
    monkeypatch.setattr(xxhash, "xxh64_intdigest", None)
    assert [brokers.leader(*each) for each in asked] == expected
    # What a client calls its zone costs no memory either.
    assert [brokers.leader(f"made up {stream}", stream) for stream in STREAMS] == expected[-len(STREAMS) :]


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "MAX_REMEMBERED", 10)
    brokers = Brokers(map(broker, range(3)), 1)
    unbounded = Brokers(map(broker, range(3)), 1)
    for stream in [*range(50), *range(50)]:
        brokers.leader(None, stream)
        assert len(brokers._leaders[None]) <= 10
    monkeypatch.undo()
    assert [brokers.leader(None, s) for s in STREAMS] == [unbounded.leader(None, s) for s in STREAMS]


def test_a_broker_is_found_by_its_id() -> None:
    assert ZONED.get(7) == broker(7, "b")
    assert ZONED.get(3) is None
