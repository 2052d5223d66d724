"""More producers than are kept: of one stream, and of all streams that a broker has in memory."""

from __future__ import annotations

import random

import pytest

from dray.errors import OutOfOrderSequence, UnknownProducer
from dray.index.entry import Kind, Placed, Producer
from dray.index.fold import Fold, decode, encode
from dray.metadata.memory import MemoryData, MemoryStore
from dray.objectstore.memory import MemoryObjects, MemoryObjectStore
from tests.batches import build_batch
from tests.index_entries import wal_entry
from tests.log_node import Node, settle, soon

# Of a stream, as it is documented.
KEPT = 10_000
# The smallest limit of a store for one value.
VALUE_BYTES = 1_250_000

STREAMS = range(0x51, 0x51 + 30)
PRODUCERS = range(700, 710)

both = pytest.mark.parametrize("conditions_abort", [True, False], ids=["strong", "weak"])


def test_a_hundred_thousand_in_one_stream() -> None:
    """Ten times what is kept, a batch each: what is held, and its snapshot, do not grow."""
    fold = Fold()
    count, per_entry = 10 * KEPT, 1_000
    for number in range(count // per_entry):
        ids = range(number * per_entry, (number + 1) * per_entry)
        entry = wal_entry(*[1] * per_entry, producers=[Producer(id, 0, 0) for id in ids])
        fold.advance(Placed(entry, ids.stop, ids.stop * 100, number))
        assert len(fold.producers) == min(KEPT, ids.stop)
    assert list(fold.producers) == list(range(count - KEPT, count))
    for id, sequence, expected in (
        (count - 1, 1, Kind.OK),
        (count - 1, 0, Kind.DUPLICATE),
        (count - KEPT, 0, Kind.DUPLICATE),
        (count - KEPT - 1, 1, Kind.UNKNOWN_PRODUCER),
        (0, 1, Kind.UNKNOWN_PRODUCER),
        (0, 0, Kind.OK),  # as though it were new
    ):
        assert fold.check(Producer(id, 0, sequence), 1, 0).kind is expected
    snapshot = encode(fold)
    assert len(snapshot) < VALUE_BYTES
    assert encode(decode(snapshot, fold.expiration_ms)) == snapshot


@both
@pytest.mark.parametrize("snapshot_entries", [3, 1_000], ids=["with snapshots", "without"])
async def test_more_streams_than_fit_into_memory(conditions_abort: bool, snapshot_entries: int) -> None:
    """Folds are forgotten and loaded again all the time, at two brokers; nobody is told anything wrong."""
    data, objects = MemoryData(), MemoryObjects()
    nodes = []
    for _ in range(2):
        node = Node(MemoryStore(data, conditions_abort=conditions_abort), MemoryObjectStore(objects))
        # A few streams' worth.
        node.index.folds._max_producers = 60
        node.index.folds._snapshot_entries = snapshot_entries
        await node.start()
        nodes.append(node)
    seed = random.randrange(2**32)
    chances = random.Random(seed)
    next_sequence = {(stream, id): 0 for stream in STREAMS for id in PRODUCERS}
    offsets: dict[tuple[int, int], list[int]] = {who: [] for who in next_sequence}
    try:
        for _ in range(600):
            who = stream, id = chances.choice(list(next_sequence))
            node = chances.choice(nodes)
            sequence = next_sequence[who]
            known = offsets[who]
            match chances.randrange(4):
                case 0 if known:  # one of the last five again
                    back = chances.randrange(1, 1 + min(5, len(known)))
                    done = await soon(node.append(stream, _batch(id, sequence - back)))
                    assert done.start_offset == known[-back], f"seed {seed}"
                case 1:  # a gap
                    expected = OutOfOrderSequence if known else UnknownProducer
                    with pytest.raises(expected):
                        await soon(node.append(stream, _batch(id, sequence + 1)))
                case _:
                    done = await soon(node.append(stream, _batch(id, sequence)))
                    known.append(done.start_offset)
                    next_sequence[who] += 1
            assert sum(len(fold.fold.producers) for fold in node.index.folds._streams.values()) <= 60
        for stream in STREAMS:
            told = sorted(offset for (of, _), known in offsets.items() if of == stream for offset in known)
            assert len(set(told)) == len(told), f"seed {seed}"
            if conditions_abort:  # elsewhere some are void
                assert told == list(range(len(told))), f"seed {seed}"
        await settle()
        snapshots = [key for key in data.domain(0).records if key.startswith("producers/")]
        assert bool(snapshots) == (snapshot_entries == 3)
    finally:
        for node in nodes:
            await node.stop()


def _batch(id: int, sequence: int) -> bytes:
    return build_batch(producer_id=id, producer_epoch=0, base_sequence=sequence)
