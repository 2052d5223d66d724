"""kill -9 of a compactor right before and right after each thing that it does, while clients go on.

Every compactor that is started finishes what the one before has left, and is killed in its turn. Readers
notice nothing of that, and in the end the table is the log, and nothing is left over.
"""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest

from tests.integration.compacting import (
    Child,
    CompactedCluster,
    check_records,
    check_stores,
    traffic_and_reader,
)
from tests.integration.compactor_child import AFTER, BEFORE
from tests.integration.conftest import STACKS, store_urls

pytestmark = pytest.mark.timeout(600)

PAUSE_S = 0.1  # between two batches
TRIES = 5
ROUNDS_AT_LAST = 20
# What a compactor must have been killed at. On Oxia a swap is two requests.
EFFECTS = {
    "append garbage wal/objects",
    "append garbage",
    "put producers",
    "swap",
    "put .parquet",
    "delete .parquet",
    "delete .wo",
    "delete wal/objects",
    "delete garbage",
    "write .avro",
    "write .metadata.json",
    "catalog commit",
    *(
        f"put compaction {kind} {state}"
        for kind in ("compact", "rewrite")
        for state in (
            "CREATED",
            "PARQUET_WRITTEN",
            "ICEBERG_COMMITTED",
            "INDEX_SWAPPED",
            "WAL_GC_READY",
            "DONE",
        )
    ),
}


def points(stack: str, chance: random.Random) -> list[tuple[str, str]]:
    """What to be killed at, and on which side: everything, or elsewhere what differs between the stacks."""
    effects = EFFECTS | ({"swap's deletes"} if stack.startswith("oxia") else set())
    every = [(effect, side) for effect in sorted(effects) for side in (BEFORE, AFTER)]
    if not stack.startswith("sqlite"):
        both = [point for point in every if point[0] in ("swap", "swap's deletes", "catalog commit")]
        rest = [(effect, chance.choice((BEFORE, AFTER))) for effect in effects - {point[0] for point in both}]
        every = both + rest
    chance.shuffle(every)
    return every


@pytest.mark.parametrize("stack", STACKS)
def test_a_compactor_may_die_at_any_moment(
    request: pytest.FixtureRequest, stack: str, tmp_path: Path
) -> None:
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    cluster = CompactedCluster(tmp_path, *store_urls(request, stack, tmp_path))
    child = Child(cluster.settings(), tmp_path / "compactors.log")
    try:
        cluster.start()
        with traffic_and_reader(cluster, seed, PAUSE_S) as (traffic, reader):
            left = [(effect, side, TRIES) for effect, side in points(stack, chance)]
            while left:
                effect, side, tries = left.pop()
                traffic.more(2)
                child.begin(effect=effect, kill_at=chance.choice((1, 1, 2)), side=side, at_once=True)
                code = child.ended()
                if code != -signal.SIGKILL:
                    assert code == 0, f"seed {seed}"
                    # It had nothing of the kind to do. Small files are rewritten now and then only.
                    assert tries, f"seed {seed}: nobody ever comes to {side} {effect!r}"
                    left.insert(0, (effect, side, tries - 1))
                reader.check()
            traffic.stop()
            child.begin(rounds=ROUNDS_AT_LAST)
            assert child.ready(), f"seed {seed}"
            child.go()
            assert child.ended() == 0, f"seed {seed}"
            check_records(cluster, traffic, reader)
            reader.stop()
        check_stores(cluster)
    finally:
        child.close()
        cluster.kill()
