"""Random calls, several clients, every store: compared with a naive model that shares none of their code.

The model is dictionaries and sorted() over everything. It decides what a call must return from what
the contract says, in its strong or its weak form, and knows no positions but those it adds up itself.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
)

from dray.errors import StartConflict, VersionConflict
from dray.metadata.store import Delete, Expect, MetadataStore, NewEntry, Position, Put
from tests.conformance.backends import Backend
from tests.stateful.running import STORES, run_on

T = TypeVar("T")

KEYS = st.sampled_from(["a", "b", "d/a", "d/b", "d/é", "d/e/a", "d+/x", "d-", "d/-1"])
DIRECTORIES = st.sampled_from(["", "d", "d/e", "d+", "absent"])
SEQUENCES = st.sampled_from(["s", "s-1", "s/1"])
DOMAINS = st.sampled_from([0, 9])
VALUES = st.binary(max_size=6)
WHAT_TO_EXPECT = st.sampled_from(["any", "absent", "current", "stale"])


class Model:
    """One domain: records by key, entries by sequence, and versions as the store reported them."""

    def __init__(self) -> None:
        self.records: dict[str, tuple[bytes, int]] = {}
        self.entries: dict[str, dict[int, tuple[int, bytes, int]]] = {}  # end -> (bytes, value, version)
        self.used: dict[str, set[int]] = {}  # every version a key ever had

    def holds(self, key: str, expect: Expect | int) -> bool:
        if expect is Expect.ANY:
            return True
        if expect is Expect.ABSENT:
            return key not in self.records
        return key in self.records and self.records[key][1] == expect

    def wrote(self, key: str, value: bytes, version: int) -> None:
        seen = self.used.setdefault(key, set())
        assert version not in seen, f"version {version} of {key} was used before"
        seen.add(version)
        self.records[key] = (value, version)

    def end(self, sequence: str) -> tuple[int, int]:
        known = self.entries.get(sequence)
        return (max(known), known[max(known)][0]) if known else (0, 0)


class Machine(RuleBasedStateMachine):
    backend_factory: Any  # set by the test: makes an empty store

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.directory = tempfile.TemporaryDirectory()
        backend: Backend = type(self).backend_factory(Path(self.directory.name))
        self.clients: list[MetadataStore] = [self.run_call(backend.open()) for _ in range(2)]
        self.strict = self.clients[0].conditions_abort
        self.models: dict[int, Model] = {domain: Model() for domain in (0, 9)}

    def run_call(self, call: Awaitable[T]) -> T:
        async def wrapped() -> T:
            return await call

        return self.runner.run(wrapped())

    def teardown(self) -> None:
        for client in self.clients:
            self.run_call(client.close())
        self.runner.close()
        self.directory.cleanup()

    def client(self, which: int) -> MetadataStore:
        return self.clients[which]

    def expectation(self, domain: int, key: str, what: str) -> Expect | int:
        model = self.models[domain]
        if what == "any":
            return Expect.ANY
        if what == "absent":
            return Expect.ABSENT
        current = model.records[key][1] if key in model.records else None
        if what == "current" and current is not None:
            return current
        stale = model.used.get(key, set()) - {current}
        return max(stale) if stale else 10**9

    @rule(who=st.integers(0, 1), domain=DOMAINS, key=KEYS, value=VALUES, what=WHAT_TO_EXPECT)
    def put(self, who: int, domain: int, key: str, value: bytes, what: str) -> None:
        model, expect = self.models[domain], self.expectation(domain, key, what)
        try:
            version = self.run_call(self.client(who).put(domain, key, value, expect))
        except VersionConflict:
            assert not model.holds(key, expect)
        else:
            assert model.holds(key, expect)
            model.wrote(key, value, version)

    @rule(who=st.integers(0, 1), domain=DOMAINS, key=KEYS, what=WHAT_TO_EXPECT)
    def delete(self, who: int, domain: int, key: str, what: str) -> None:
        model, expect = self.models[domain], self.expectation(domain, key, what)
        try:
            existed = self.run_call(self.client(who).delete(domain, key, expect))
        except VersionConflict:
            assert not model.holds(key, expect)
        else:
            assert model.holds(key, expect)
            assert existed == (model.records.pop(key, None) is not None)

    @rule(
        who=st.integers(0, 1),
        domain=DOMAINS,
        entries=st.lists(
            st.tuples(SEQUENCES, st.integers(1, 9), st.integers(0, 9), VALUES, st.booleans()), max_size=4
        ),
        puts=st.dictionaries(KEYS, st.tuples(VALUES, WHAT_TO_EXPECT), max_size=2),
        deletes=st.dictionaries(KEYS, WHAT_TO_EXPECT, max_size=2),
        wrong_by=st.sampled_from([0, 0, 0, 1, -1]),
    )
    def append(
        self,
        who: int,
        domain: int,
        entries: list[tuple[str, int, int, bytes, bool]],
        puts: dict[str, tuple[bytes, str]],
        deletes: dict[str, str],
        wrong_by: int,
    ) -> None:
        model = self.models[domain]
        ends = {sequence: model.end(sequence) for sequence, *_ in entries}
        new, expected_positions, starts_hold = [], [], True
        for sequence, records, size, value, states_start in entries:
            start, start_bytes = ends[sequence]
            stated = max(0, start + wrong_by) if states_start else None
            starts_hold &= stated is None or stated == start
            new.append(NewEntry(sequence, records, size, value, stated))
            ends[sequence] = (start + records, start_bytes + size)
            expected_positions.append(ends[sequence])
        put_list = [Put(k, v, self.expectation(domain, k, what)) for k, (v, what) in puts.items()]
        delete_list = [
            Delete(k, self.expectation(domain, k, what)) for k, what in deletes.items() if k not in puts
        ]
        puts_hold = [model.holds(p.key, p.expect) for p in put_list]
        deletes_hold = [model.holds(d.key, d.expect) for d in delete_list]
        try:
            result = self.run_call(self.client(who).append(domain, new, put_list, delete_list))
        except VersionConflict:
            assert self.strict
            assert not all(puts_hold + deletes_hold)
            return
        except StartConflict:
            assert self.strict
            assert not starts_hold
            return
        if self.strict:
            assert all(puts_hold + deletes_hold)
            assert starts_hold
        assert [a.position for a in result.entries] == expected_positions
        assert [v is not None for v in result.puts] == puts_hold
        assert list(result.deletes) == deletes_hold
        for entry, assigned in zip(new, result.entries, strict=True):
            known = model.entries.setdefault(entry.sequence, {})
            known[assigned.position.end_records] = (
                assigned.position.end_bytes,
                entry.value,
                assigned.version,
            )
        for put, version in zip(put_list, result.puts, strict=True):
            if version is not None:
                model.wrote(put.key, put.value, version)
        for delete, held in zip(delete_list, deletes_hold, strict=True):
            if held:
                model.records.pop(delete.key, None)

    @rule(
        who=st.integers(0, 1),
        domain=DOMAINS,
        sequence=SEQUENCES,
        data=st.data(),
        stale=st.booleans(),
        value=VALUES,
    )
    def swap(
        self, who: int, domain: int, sequence: str, data: st.DataObject, stale: bool, value: bytes
    ) -> None:
        known = self.models[domain].entries.get(sequence, {})
        if not known:
            return
        end = data.draw(st.sampled_from(sorted(known)))
        below = [e for e in sorted(known) if e < end]
        gone = data.draw(st.lists(st.sampled_from(below), unique=True)) if below else []
        size, _, version = known[end]
        positions = [Position(e, known[e][0]) for e in gone] + [Position(end - 1, 10**6)] * (
            not below and end > 1
        )
        call = self.client(who).swap(
            domain, sequence, Position(end, size), version + 10**9 * stale, value, positions
        )
        if stale:
            with pytest.raises(VersionConflict):
                self.run_call(call)
            return
        new_version = self.run_call(call)
        assert new_version != version
        known[end] = (size, value, new_version)
        for e in gone:
            del known[e]

    @rule(
        who=st.integers(0, 1),
        domain=DOMAINS,
        directory=DIRECTORIES,
        limit=st.integers(1, 4),
        start=st.sampled_from(["", "a", "b", "é"]),
    )
    def scan(self, who: int, domain: int, directory: str, limit: int, start: str) -> None:
        parent = directory + "/" if directory else ""
        children = sorted(
            (key[len(parent) :].encode(), key, value, version)
            for key, (value, version) in self.models[domain].records.items()
            if key.startswith(parent) and "/" not in key[len(parent) :]
        )
        expected = [(k, v, n) for name, k, v, n in children if name >= start.encode()][:limit]
        found = self.run_call(self.client(who).scan(domain, directory, start=start, limit=limit))
        assert [(r.key, r.value, r.version) for r in found] == expected

    @rule(
        who=st.integers(0, 1),
        domain=DOMAINS,
        sequence=SEQUENCES,
        near=st.integers(0, 10),
        by=st.integers(-1, 1),
        limit=st.integers(1, 5),
    )
    def read_sequence(self, who: int, domain: int, sequence: str, near: int, by: int, limit: int) -> None:
        store, known = self.client(who), self.models[domain].entries.get(sequence, {})
        ends = [0, *sorted(known)]
        n = max(0, ends[near % len(ends)] + by)  # at a boundary, or beside it
        rows = [(e, *known[e]) for e in sorted(known)]

        def shown(entry: Any) -> Any:
            return entry and (*entry.position, entry.value, entry.version)

        found = self.run_call(store.entries(domain, sequence, n, limit))
        assert [shown(e) for e in found] == [r for r in rows if r[0] >= n][:limit]
        assert shown(self.run_call(store.ceiling(domain, sequence, n))) == next(
            (r for r in rows if r[0] >= n), None
        )
        at_most = [r for r in rows if r[0] <= n]
        assert shown(self.run_call(store.floor(domain, sequence, n))) == (at_most[-1] if at_most else None)
        assert shown(self.run_call(store.tail(domain, sequence))) == (rows[-1] if rows else None)

    @invariant()
    def every_record_is_as_it_should_be(self) -> None:
        for domain, model in self.models.items():
            for key in ("a", "d/e/a"):
                record = self.run_call(self.clients[1].get(domain, key))
                assert (record and (record.value, record.version)) == model.records.get(key)


@pytest.mark.parametrize("name", STORES)
def test_every_store_behaves_like_the_model(name: str, request: pytest.FixtureRequest) -> None:
    run_on(Machine, name, request, examples=30, in_memory=100, steps=35)
