"""The cluster record: created once, by one of several, and left alone when it is not ours to read."""

from __future__ import annotations

import json
import re

import pytest

from dray.errors import CorruptStore, IncompatibleStore, OutcomeUnknown
from dray.metadata.cluster import Cluster, decode, encode, open_cluster, read_cluster
from dray.metadata.memory import MemoryStore
from dray.metadata.store import Expect, Expectation

RECORD = (
    b'{"format_version": 1, "cluster_id": "vPeOCWypqUOSepEvx0cbog", "num_domains": 16,'
    b' "incarnation": "0f8fad5bd9cb469fa16570867728950e", "created_at_ms": 1700000000000}'
)
CLUSTER = Cluster("vPeOCWypqUOSepEvx0cbog", 16, "0f8fad5bd9cb469fa16570867728950e", 1700000000000)


async def holding(value: bytes) -> MemoryStore:
    store = MemoryStore()
    await store.put(0, "cluster", value)
    return store


async def stored(store: MemoryStore) -> bytes:
    record = await store.get(0, "cluster")
    assert record is not None
    return record.value


class LosesAnswers(MemoryStore):
    """Fails the first puts with an unknown outcome, after applying the write or instead of it."""

    def __init__(self, *, applied: bool, times: int = 1) -> None:
        super().__init__()
        self.applied = applied
        self.times = times
        self.barriers = 0

    async def put(self, domain: int, key: str, value: bytes, expect: Expectation = Expect.ANY) -> int:
        if self.times == 0:
            return await super().put(domain, key, value, expect)
        self.times -= 1
        if self.applied:
            await super().put(domain, key, value, expect)
        raise OutcomeUnknown("the connection was cut")

    async def barrier(self, domain: int) -> None:
        self.barriers += 1
        await super().barrier(domain)


class Beaten(MemoryStore):
    """Another creator always comes first, between the read and the write."""

    async def put(self, domain: int, key: str, value: bytes, expect: Expectation = Expect.ANY) -> int:
        await super().put(domain, key, RECORD)
        return await super().put(domain, key, value, expect)


def test_stored_record_is_read_and_written_as_promised() -> None:
    assert decode(RECORD) == CLUSTER
    assert encode(CLUSTER) == RECORD


async def test_new_cluster_is_created_with_a_kafka_like_id() -> None:
    store = MemoryStore()
    cluster = await open_cluster(store, 64)
    record = json.loads(await stored(store))
    assert record["format_version"] == 1
    assert record["num_domains"] == 64
    assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]{21}", record["cluster_id"])
    assert re.fullmatch(r"[0-9a-f]{32}", record["incarnation"])
    assert record["created_at_ms"] > 1_700_000_000_000
    assert cluster.cluster_id == record["cluster_id"]


async def test_new_cluster_has_16_domains_unless_told() -> None:
    assert (await open_cluster(MemoryStore(), None)).num_domains == 16


async def test_existing_cluster_is_returned_and_not_written_again() -> None:
    store = await holding(RECORD)
    before = await store.get(0, "cluster")
    assert await open_cluster(store, 16) == CLUSTER
    assert await open_cluster(store, None) == CLUSTER
    assert await store.get(0, "cluster") == before


async def test_reading_never_creates() -> None:
    store = MemoryStore()
    assert await read_cluster(store) is None
    assert await store.scan(0, "", limit=10) == []


async def test_loser_of_a_creation_race_takes_the_winners_record() -> None:
    assert await open_cluster(Beaten(), None) == CLUSTER


async def test_loser_of_a_creation_race_checks_the_winners_domains() -> None:
    with pytest.raises(IncompatibleStore, match=r"metadata\.domains is 32.* created with 16"):
        await open_cluster(Beaten(), 32)


@pytest.mark.parametrize("applied", [True, False])
async def test_unknown_outcome_is_resolved_behind_a_barrier(applied: bool) -> None:
    store = LosesAnswers(applied=applied)
    cluster = await open_cluster(store, None)
    assert decode(await stored(store)) == cluster
    assert store.barriers == 1


async def test_outcome_that_stays_unknown_is_reported() -> None:
    with pytest.raises(OutcomeUnknown):
        await open_cluster(LosesAnswers(applied=False, times=3), None)


async def test_newer_format_is_refused_whatever_else_it_holds() -> None:
    newer = b'{"format_version": 2, "num_domains": "many"}'
    store = await holding(newer)
    with pytest.raises(IncompatibleStore, match="format version 2"):
        await open_cluster(store, None)
    assert await stored(store) == newer


async def test_other_number_of_domains_is_refused_naming_both_and_the_setting() -> None:
    store = await holding(RECORD)
    with pytest.raises(IncompatibleStore, match=r"metadata\.domains is 32.* created with 16"):
        await open_cluster(store, 32)
    assert await stored(store) == RECORD


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b'{"format_version": "1"}',
        RECORD.replace(b'"format_version": 1', b'"format_version": 0'),
        RECORD.replace(b'"format_version": 1', b'"format_version": true'),
        RECORD.replace(b'"num_domains": 16', b'"num_domains": 0'),
        RECORD.replace(b'"num_domains": 16', b'"num_domains": 65537'),
        RECORD.replace(b'"num_domains": 16', b'"num_domains": 16.0'),
        RECORD.replace(b'"incarnation"', b'"incarnations"'),
        RECORD.replace(b'"vPeOCWypqUOSepEvx0cbog"', b"null"),
        RECORD[:-1],
    ],
)
async def test_unreadable_record_is_corrupt_and_left_alone(value: bytes) -> None:
    store = await holding(value)
    with pytest.raises(CorruptStore, match="cluster record"):
        await open_cluster(store, None)
    assert await stored(store) == value
