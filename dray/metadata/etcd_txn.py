"""How the contract is said in etcd's transactions: positions, conditions, sizes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dray.errors import StartConflict
from dray.metadata.keys import escape
from dray.metadata.layout import Layout, spell_position
from dray.metadata.proto import etcd_pb2 as pb
from dray.metadata.store import Delete, Expect, Expectation, Limits, NewEntry, Position, Put

# `Limits` does not know the domain; any that is configured has at most as many digits as this one.
_WIDEST_DOMAIN = 2**31 - 1


_POSITION_BYTES = len(spell_position(Position(0, 0)))
_MOD = pb.Compare.MOD  # looked up once: enums of generated messages are slow to reach


@dataclass(frozen=True, slots=True)
class EtcdLimits(Limits):
    """Counts what a transaction really carries: names are escaped, and repeated in its conditions.

    A name can be six times as long in a request as in the contract: too much to be covered by a margin.
    """

    layout: Layout = field(kw_only=True)

    def size(self, entries: Sequence[NewEntry], puts: Sequence[Put], deletes: Sequence[Delete]) -> int:
        size = self.OPERATION_OVERHEAD_BYTES * self.operations(len(entries), len(puts), len(deletes))
        # The entry's key, and the tail's in the comparison, the write and the read after a conflict.
        root = len(self.layout.domain(_WIDEST_DOMAIN).encode())
        for entry in entries:
            size += 4 * (root + len("s//") + len(escape(entry.sequence))) + _POSITION_BYTES + len(entry.value)
        for key in (*(p.key for p in puts), *(d.key for d in deletes)):
            size += 3 * len(self.layout.key(_WIDEST_DOMAIN, key).encode())
        return size + sum(len(p.value) for p in puts)


@dataclass(frozen=True, slots=True)
class Tail:
    """Where a sequence ends, and the revision of the record that says so (0 if it has no entry yet)."""

    position: Position
    revision: int


def place(entries: Sequence[NewEntry], tails: Mapping[str, Tail]) -> list[Position]:
    """Where the entries end if the sequences end at `tails`. Raises `StartConflict`."""
    ends = {sequence: tail.position for sequence, tail in tails.items()}
    positions = []
    for entry in entries:
        start = ends[entry.sequence]
        if entry.expected_start is not None and entry.expected_start != start.end_records:
            raise StartConflict(entry.sequence, entry.expected_start, start.end_records)
        end = Position(start.end_records + entry.records, start.end_bytes + entry.size_bytes)
        ends[entry.sequence] = end
        positions.append(end)
    return positions


def append_request(
    layout: Layout,
    domain: int,
    entries: Sequence[NewEntry],
    positions: Sequence[Position],
    tails: Mapping[str, Tail],
    puts: Sequence[Put],
    deletes: Sequence[Delete],
) -> pb.TxnRequest:
    """Write all of it if the sequences still end at `tails` and every expectation holds.

    Else read the tail records, in the order of `tails`, and the `conditional` keys behind them: so a
    conflict tells in the same round trip what is true now.
    """
    request = pb.TxnRequest()
    ends: dict[str, str] = {}
    # Filled in place: making messages and copying them in takes four times as long.
    for entry, position in zip(entries, positions, strict=True):
        write = request.success.add().request_put
        end = spell_position(position)
        write.key = (layout.sequence(domain, entry.sequence) + end).encode()
        write.value = entry.value
        ends[entry.sequence] = end
    for sequence, tail in tails.items():
        raw = layout.tail(domain, sequence).encode()
        request.compare.add(target=_MOD, key=raw, mod_revision=tail.revision)
        write = request.success.add().request_put
        write.key = raw
        write.value = ends[sequence].encode()
        request.failure.add().request_range.key = raw
    request.success.extend(put(layout.key(domain, p.key).encode(), p.value) for p in puts)
    request.success.extend(delete(layout.key(domain, d.key).encode()) for d in deletes)
    for condition in conditional(puts, deletes):
        raw = layout.key(domain, condition.key).encode()
        request.compare.extend(conditions(raw, condition.expect))
        request.failure.append(read(pb.RangeRequest(key=raw, keys_only=True)))
    return request


def conditional(puts: Sequence[Put], deletes: Sequence[Delete]) -> list[Put | Delete]:
    writes: list[Put | Delete] = [*puts, *deletes]
    return [write for write in writes if write.expect is not Expect.ANY]


def conditions(key: bytes, expect: Expectation) -> list[pb.Compare]:
    return [] if expect is Expect.ANY else [at_revision(key, expected_revision(expect))]


def expected_revision(expect: Expectation) -> int:
    if isinstance(expect, Expect):
        return 0  # the revision of what is absent
    return expect if expect > 0 else -1  # no version: must not be taken for "absent"


def at_revision(key: bytes, revision: int) -> pb.Compare:
    return pb.Compare(target=_MOD, key=key, mod_revision=revision)


def put(key: bytes, value: bytes, lease: int = 0) -> pb.RequestOp:
    return pb.RequestOp(request_put=pb.PutRequest(key=key, value=value, lease=lease))


def delete(key: bytes) -> pb.RequestOp:
    return pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=key))


def read(request: pb.RangeRequest) -> pb.RequestOp:
    return pb.RequestOp(request_range=request)


def end_of(prefix: bytes) -> bytes:
    """The first key behind all that begin with `prefix`, which is UTF-8: its last byte is never 0xFF."""
    return prefix[:-1] + bytes([prefix[-1] + 1])
