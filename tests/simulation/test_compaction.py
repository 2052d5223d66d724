"""Compactors on seeded schedules of faults: rows once, the index whole, and nothing left behind.

Two compactors run the real rounds, saga and garbage collector over a store of Oxia's promises or of etcd's;
they crash, and they stand still and wake late. Producers and readers go on meanwhile. Each rule that this
rests on is taken out once: then somebody notices (`BROKEN`).

Two are not among them. What the touch before a commit prevents needs somebody else to change the table, or
the topic to be deleted, meanwhile. And references of a committed object only go: two looks at them instead
of one scan leave it behind at worst.

`SIMULATIONS` in the environment is how many times as many schedules are to be run.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from compactor import saga as saga_module
from compactor.collect import Collected, GarbageCollector
from compactor.saga import Claim, FileGarbage, Saga
from compactor.task import Part, State, state_key
from dray.errors import CorruptStore, DrayError
from dray.index.changes import Swap
from dray.index.entry import ParquetFile, Placed, sequence_of
from dray.index.entry import encode as encode_entry
from dray.index.fold import Fold
from dray.index.fold import encode as encode_fold
from dray.metadata.store import Expect, Record
from dray.producers.folds import snapshot_key
from dray.wal.objects import OBJECTS, decode_record
from tests.simulation.compaction import CompactorMetadata, Plot, Rules, play
from tests.simulation.test_wal import Violation

TIMES = int(os.environ.get("SIMULATIONS", "1"))
WEAK = Plot()
STRONG = Plot(strong=True)
ROUGH = Plot(trouble=0.15, crashes=6)
SLEEPY = Plot(crashes=0, naps=0.1)
REAL = Rules()


@pytest.mark.parametrize(
    ("plot", "seeds"),
    [(WEAK, 40), (STRONG, 20), (ROUGH, 20), (SLEEPY, 20)],
    ids=["weak", "strong", "rough", "sleepy"],
)
def test_rows_are_there_once_and_nothing_is_left_behind(plot: Plot, seeds: int) -> None:
    told: Counter[str] = Counter()
    for seed in range(seeds * TIMES):
        try:
            told += play(seed, plot, REAL)
        except (Violation, CorruptStore) as violation:
            raise AssertionError(f"seed {seed}: {violation}") from violation
    assert told["swapped"] > 3 * seeds, told
    assert told["rewritten"] > seeds, told
    assert told["acknowledged"] > 10 * seeds, told
    assert told["naps"] > seeds, told


# --- the rules, and what happens without each


class CollectsBlindly(GarbageCollector):
    """Without protocol 14: does not look for references."""

    async def _collect_object(self, domain: int, found: Record, now_ms: int, done: Collected) -> None:
        key = f"{OBJECTS}/{found.key.rpartition('/')[2]}"
        await self._store.barrier(domain)
        beside = await self._store.get(domain, key)
        if beside is not None and b"COMMITTED" in beside.value:
            await self._objects.delete(decode_record(key, beside.value).path)
            await self._store.delete(domain, key)
        await self._store.delete(domain, found.key, found.version)


class ForgetsFirst(GarbageCollector):
    """Without protocol 14: the record goes before the object."""

    async def _collect_object(self, domain: int, found: Record, now_ms: int, done: Collected) -> None:
        name = found.key.rpartition("/")[2]
        await self._store.barrier(domain)
        beside = await self._store.scan(domain, OBJECTS, start=name, end=f"{name}.", limit=2)
        if len(beside) == 1 and beside[0].key == f"{OBJECTS}/{name}":
            record = decode_record(beside[0].key, beside[0].value)
            if now_ms - record.at_ms < self._min_record_age_ms:
                return
            await self._store.delete(domain, beside[0].key)
            await self._objects.delete(record.path)
        await self._store.delete(domain, found.key, found.version)


class ForgetsTheIndex(GarbageCollector):
    """Data files that the index names are garbage too, once somebody said so."""

    async def _is_named(self, domain: int, garbage: FileGarbage) -> bool:
        return False

    def __init__(self, store: Any, objects: Any, in_tables: Any, **more: Any) -> None:
        async def nothing(*_: object) -> Sequence[str]:
            return ()

        super().__init__(store, objects, nothing, **more)


class ForgetsTheTable(GarbageCollector):
    """Data files that a snapshot has are deleted."""

    def __init__(self, store: Any, objects: Any, in_tables: Any, **more: Any) -> None:
        async def nothing(*_: object) -> Sequence[str]:
            return ()

        super().__init__(store, objects, nothing, **more)

    async def _task(self, domain: int, stream_id: int) -> None:
        return None


class NoSnapshot(Saga):
    """Without protocol 15: entries go that no producer snapshot covers."""

    async def store_snapshot(self, claim: Claim) -> None: ...


class SnapshotGoesBack(Saga):
    """Without protocol 16."""

    async def store_snapshot(self, claim: Claim) -> None:
        fold = Fold()
        await self._fold_to(claim.stream_id, fold, claim.task.end_offset)
        await self._store.put(claim.domain, snapshot_key(claim.stream_id), encode_fold(fold), Expect.ANY)


async def swaps_blindly(store: CompactorMetadata, domain: int, swap: Swap) -> Placed:
    """Without protocol 15: over whatever is there by then."""
    sequence, value = sequence_of(swap.new.stream_id), encode_entry(swap.new)

    async def put() -> int:
        found = await store._real.ceiling(domain, sequence, swap.at.end_records)
        version = swap.version if found is None else found.version
        return await store._real.swap(domain, sequence, swap.at, version, value, swap.deletes)

    return Placed(swap.new, *swap.at, await store._machine.write(put))


async def deletes_first(store: CompactorMetadata, domain: int, swap: Swap) -> Placed:
    """Without protocol 15: a swap the other way round."""
    sequence = sequence_of(swap.new.stream_id)
    if swap.deletes:
        await store.remove(domain, sequence, swap.deletes)
    version = await store.swap(domain, sequence, swap.at, swap.version, encode_entry(swap.new), ())
    return Placed(swap.new, *swap.at, version)


class LeavesTheRest(Saga):
    """A swap whose end entry is there is taken for done."""

    async def _stored(self, claim: Claim, part: Part) -> list[Placed]:
        stored = await super()._stored(claim, part)
        where = stored[-1].entry.where
        is_there = isinstance(where, ParquetFile) and where.file_id == part.file_id
        return stored[-1:] if is_there else stored


class ReleasesFirst(Saga):
    """Without protocol 15: references go before the entries."""

    async def swap(self, claim: Claim) -> None:
        await self.release(claim)
        await super().swap(claim)


class TellsNobody(Saga):
    """Removes references, and leaves no garbage record."""

    async def _write(self, domain: int, puts: Any, deletes: Any) -> None:
        await super()._write(domain, [put for put in puts if "garbage/wal" not in put.key], deletes)


class PutsOverOthers(Saga):
    """Without protocol 23: whoever has lost a claim goes on with it."""

    async def _put(self, claim: Claim, value: bytes) -> int:
        return await self._store.put(claim.domain, state_key(claim.stream_id), value, Expect.ANY)


class SwapsBeforeTheCommit(Saga):
    """The index names files that the table has not."""

    async def touch(self, claims: Any) -> None:
        claims = list(claims)
        await super().touch(claims)
        for claim in (each for each in claims if each.task.state is State.PARQUET_WRITTEN):
            await self.store_snapshot(claim)
            await self.swap(claim)


BROKEN: dict[str, tuple[Plot, Rules]] = {
    "14 CollectsBlindly": (WEAK, Rules(collector=CollectsBlindly)),
    "14 ForgetsFirst": (ROUGH, Rules(collector=ForgetsFirst)),
    "14 ForgetsTheIndex": (ROUGH, Rules(collector=ForgetsTheIndex)),
    "14 ForgetsTheTable": (ROUGH, Rules(collector=ForgetsTheTable)),
    "15 NoSnapshot": (WEAK, Rules(saga=NoSnapshot)),
    "15 SwapsBlindly": (SLEEPY, Rules(patches=((saga_module, "carry_out", swaps_blindly),))),
    "15 DeletesFirst": (ROUGH, Rules(patches=((saga_module, "carry_out", deletes_first),))),
    "15 LeavesTheRest": (ROUGH, Rules(saga=LeavesTheRest)),
    "15 ReleasesFirst": (WEAK, Rules(saga=ReleasesFirst)),
    "15 TellsNobody": (WEAK, Rules(saga=TellsNobody)),
    "16 SnapshotGoesBack": (SLEEPY, Rules(saga=SnapshotGoesBack)),
    "21 NothingIsAsserted": (SLEEPY, Rules(asserts=False)),
    "21 NobodyLooks": (ROUGH, Rules(looks=False)),
    "21 SwapsBeforeTheCommit": (WEAK, Rules(saga=SwapsBeforeTheCommit)),
    "23 PutsOverOthers": (SLEEPY, Rules(saga=PutsOverOthers)),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_without_a_rule_somebody_notices(rule: str) -> None:
    plot, rules = BROKEN[rule]

    def fails(seed: int) -> bool:
        try:
            play(seed, plot, rules)
        except (Violation, DrayError, AssertionError):
            return True
        return False

    assert any(fails(seed) for seed in range(300)), f"{rule} makes no difference in 300 schedules"
