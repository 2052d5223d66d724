"""`check_store`: a good store passes, a wrong answer is found, and two checks do not disturb each other."""

from __future__ import annotations

import pytest

from dray.errors import Unavailable
from dray.metadata.check import check_store
from dray.metadata.memory import MemoryData, MemoryStore
from dray.metadata.store import Expect, Expectation, NewEntry, Position, Record


@pytest.mark.parametrize("conditions_abort", [True, False])
async def test_good_store_has_no_problems_and_no_keys_left(conditions_abort: bool) -> None:
    data = MemoryData()
    findings = await check_store(MemoryStore(data, conditions_abort=conditions_abort), 1, 5)
    assert [finding.problem for finding in findings] == [None] * 14
    assert data.domain(0).keys == []


async def test_wrong_answers_are_problems_of_their_primitive() -> None:
    class Forgetful(MemoryStore):
        async def get(self, domain: int, key: str) -> Record | None:
            return None

        async def put(self, domain: int, key: str, value: bytes, expect: Expectation = Expect.ANY) -> int:
            return await super().put(domain, key, value)

        async def delete(self, domain: int, key: str, expect: Expectation = Expect.ANY) -> bool:
            await super().delete(domain, key)
            return False

    problems = {f.primitive: f.problem for f in await check_store(Forgetful(), 16, 5) if f.problem}
    assert problems == {
        "put": "it replaced a record where none was expected",
        "get": "it returned None",
        "delete": "it did not find what was written",
    }


async def test_second_check_at_the_same_time_is_turned_away() -> None:
    data = MemoryData()
    async with MemoryStore(data).session(2_000) as session:
        await session.put_ephemeral(0, "drayd-check/lock", b"")
        with pytest.raises(Unavailable, match="another check is running"):
            await check_store(MemoryStore(data), 1, 5)


async def test_entries_left_by_killed_checks_are_removed() -> None:
    store = MemoryStore()
    for _ in range(2_500):
        await store.append(0, [NewEntry("drayd-check", records=1, size_bytes=0, value=b"")])
    findings = await check_store(store, 1, 5)
    assert [finding.problem for finding in findings] == [None] * 14
    left = await store.entries(0, "drayd-check", 0, 10)
    assert [entry.position for entry in left] == [Position(2_555, 5_500)]
