"""Records of groups. Those in `golden/groups-record/` must be read for ever, and written the same while
format 1 is current. `golden/groups-record/manifest.json` says what each of them holds.
`python -m tests.unit.test_group_record --rewrite` makes them anew, for a diff that somebody reviews; a new
format adds files instead.
"""

from __future__ import annotations

import enum
import json
import sys
import zlib
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dray.errors import CorruptStore, IncompatibleStore, TooLarge
from dray.groups import group_pb2 as pb
from dray.groups import record
from dray.groups.group import (
    ClassicGroup,
    ClassicMember,
    ConsumerGroup,
    ConsumerMember,
    Dying,
    Group,
    GroupState,
    MemberState,
    PendingMember,
    Process,
)

DIRECTORY = Path(__file__).parents[2] / "golden" / "groups-record"
MANIFEST = DIRECTORY / "manifest.json"
NAMES = sorted(path.stem for path in DIRECTORY.glob("*.bin"))
GROUP_ID = "orders/é"
KEY = "groups/orders%2F%C3%A9"

HERE, THERE = Process(1, 1_700_000_000_000), Process(2, 1_700_000_000_001)
TOPIC, OTHER = UUID("0190b5a2-7c1e-4d3f-8a6b-1c2d3e4f5a6b"), UUID(int=2**128 - 1)


def classic_member(name: str, **changes: Any) -> ClassicMember:
    values: dict[str, Any] = {
        "member_id": f"consumer-{name}",
        "instance_id": None,
        "client_id": "consumer",
        "client_host": "/10.0.0.1",
        "session_timeout_ms": 45_000,
        "rebalance_timeout_ms": 300_000,
        "protocols": (("range", b"\0\3range"), ("cooperative-sticky", b"")),
        "heard_by": HERE,
    }
    return ClassicMember(**values | changes)


def by_id(*members: Any) -> dict[str, Any]:
    return {member.member_id: member for member in members}


CASES: dict[str, Group] = {
    "dying": Dying(),
    "classic_empty": ClassicGroup(state_since_ms=1_700_000_000_000),
    "classic_was_stable": ClassicGroup(
        state_since_ms=1_700_000_000_000, generation=8, protocol_type="consumer", phase=12, timeout_ms=300_000
    ),
    "classic_preparing": ClassicGroup(
        state=GroupState.PREPARING,
        protocol_type="consumer",
        leader="consumer-b",
        members=by_id(
            classic_member("b", is_joining=True, is_new=True),
            classic_member("a", is_joining=True, is_new=True, heard_by=THERE),
        ),
        pending={"consumer-c": PendingMember(session_timeout_ms=45_000, heard_by=THERE)},
        phase=1,
        timeout_ms=3_000,
        initial_delay_ms=3_000,
        initial_remaining_ms=297_000,
        has_newcomers=True,
    ),
    "classic_no_delay": ClassicGroup(
        state=GroupState.PREPARING,
        protocol_type="connect",
        leader="consumer-a",
        members=by_id(classic_member("a", is_joining=True)),
        initial_delay_ms=0,
    ),
    "classic_completing": ClassicGroup(
        state=GroupState.COMPLETING,
        generation=3,
        protocol_type="consumer",
        protocol="range",
        leader="consumer-a",
        members=by_id(
            classic_member("a"),
            classic_member("i", instance_id="i", is_synced=True),
            classic_member("e", instance_id=""),
        ),
        phase=5,
        timeout_ms=300_000,
    ),
    "classic_stable": ClassicGroup(
        state=GroupState.STABLE,
        generation=2**31 - 1,
        protocol_type="consumer",
        protocol="range",
        leader="consumer-0",
        members=by_id(
            *(classic_member(str(number), assignment=bytes([number]), is_synced=True) for number in range(40))
        ),
        phase=2**64 - 1,
        timeout_ms=2**31 - 1,
    ),
    "consumer_empty": ConsumerGroup(epoch=4, state_since_ms=1_700_000_000_000, target_epoch=4),
    "consumer": ConsumerGroup(
        epoch=7,
        target_epoch=6,
        target={"a": {TOPIC: frozenset({0, 1}), OTHER: frozenset({2**31 - 1})}},
        members=by_id(
            ConsumerMember(
                member_id="a",
                instance_id="i",
                rack_id="r",
                client_id="consumer",
                client_host="/10.0.0.1",
                rebalance_timeout_ms=45_000,
                topics=frozenset({"orders", "bills"}),
                regex="o.*",
                assignor="uniform",
                heard_by=THERE,
                epoch=6,
                previous_epoch=5,
                state=MemberState.UNREVOKED,
                assigned={TOPIC: frozenset({0})},
                revoking={TOPIC: frozenset({3}), OTHER: frozenset({0})},
                revoking_for=6,
            ),
            ConsumerMember(
                member_id="b",
                instance_id=None,
                rack_id=None,
                client_id="",
                client_host="",
                rebalance_timeout_ms=0,
                topics=frozenset(),
                regex=None,
                assignor=None,
                heard_by=HERE,
                epoch=-2,
                state=MemberState.UNRELEASED,
            ),
        ),
        topics_digest=b"\0\xff",
    ),
}


def manifest() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(MANIFEST.read_text())
    return loaded


def unpacked(value: bytes) -> bytes:
    return value[1:] if value[0] == 0 else zlib.decompress(value[1:])


def test_every_file_is_in_the_manifest() -> None:
    assert set(CASES) <= set(NAMES)
    assert sorted(manifest()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_golden_record_is_read_as_promised(name: str) -> None:
    group = record.decode(KEY, (DIRECTORY / f"{name}.bin").read_bytes())
    assert describe(group) == manifest()[name]
    assert list(describe(group).get("members", [])) == list(manifest()[name].get("members", []))


@pytest.mark.parametrize("name", NAMES)
def test_golden_record_is_written_the_same(name: str) -> None:
    """How zlib packs is its own affair."""
    value = (DIRECTORY / f"{name}.bin").read_bytes()
    again = record.encode(GROUP_ID, record.decode(KEY, value))
    assert again[0] == value[0]
    assert unpacked(again) == unpacked(value)


def test_golden_record_says_what_its_fields_mean() -> None:
    """Written out once, so that the promise does not rest on the encoder alone."""
    assert (
        DIRECTORY / "dying.bin"
    ).read_bytes() == b"\0" + b"\x08\1" + b"\x12\x09orders/\xc3\xa9" + b"\x2a\0"
    assert (DIRECTORY / "consumer_empty.bin").read_bytes() == (
        b"\0"
        + b"\x08\1"
        + b"\x12\x09orders/\xc3\xa9"
        + b"\x22\x0b"
        + b"\x08\4"
        + b"\x10\x80\xd0\x95\xff\xbc\x31"
        + b"\x18\4"
    )


def test_there_are_golden_records_packed_and_plain() -> None:
    assert {(DIRECTORY / f"{name}.bin").read_bytes()[0] for name in NAMES} == {0, 1}


def test_keys_are_one_segment_below_their_directory() -> None:
    assert record.group_key("a.b_c-d") == "groups/a.b_c-d"
    assert record.group_key(GROUP_ID) == KEY
    assert record.group_of_key(KEY) == GROUP_ID
    assert record.group_of_key("offsets/g/t:0") is None


# Any group comes back as it was.

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
ids = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
int31s = st.integers(0, 2**31 - 1)
int64s = st.integers(-(2**63), 2**63 - 1)
flags = st.booleans()
optional_texts = st.none() | texts
processes = st.builds(Process, int31s, int64s)
assignments = st.dictionaries(st.uuids(), st.frozensets(int31s, min_size=1, max_size=3), max_size=3)


def all_of(kind: type[Any], **strategies: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """With every field, so that one that is added later is not left out here."""
    assert set(strategies) == {field.name for field in fields(kind) if field.init}
    return st.builds(kind, **strategies)


def mapped(members: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(members, max_size=4).map(lambda listed: by_id(*listed))


pending_members = all_of(PendingMember, session_timeout_ms=int31s, heard_by=processes)
classic_members = all_of(
    ClassicMember,
    member_id=ids,
    instance_id=optional_texts,
    client_id=texts,
    client_host=texts,
    session_timeout_ms=int31s,
    rebalance_timeout_ms=int31s,
    protocols=st.lists(st.tuples(texts, st.binary(max_size=20)), max_size=3).map(tuple),
    heard_by=processes,
    assignment=st.binary(max_size=2_000),
    is_joining=flags,
    is_synced=flags,
    is_new=flags,
)
classic_groups = all_of(
    ClassicGroup,
    state=st.sampled_from([GroupState.EMPTY, GroupState.PREPARING, GroupState.COMPLETING, GroupState.STABLE]),
    state_since_ms=int64s,
    generation=int31s,
    protocol_type=optional_texts,
    protocol=optional_texts,
    leader=optional_texts,
    members=mapped(classic_members),
    pending=st.dictionaries(ids, pending_members, max_size=3),
    phase=st.integers(0, 2**64 - 1),
    timeout_ms=int31s,
    initial_delay_ms=st.none() | int31s,
    initial_remaining_ms=int31s,
    has_newcomers=flags,
)
consumer_members = all_of(
    ConsumerMember,
    member_id=ids,
    instance_id=optional_texts,
    rack_id=optional_texts,
    client_id=texts,
    client_host=texts,
    rebalance_timeout_ms=int31s,
    topics=st.frozensets(texts, max_size=3),
    regex=optional_texts,
    assignor=optional_texts,
    heard_by=processes,
    epoch=st.integers(-(2**31), 2**31 - 1),
    previous_epoch=st.integers(-(2**31), 2**31 - 1),
    state=st.sampled_from(list(MemberState)),
    assigned=assignments,
    revoking=assignments,
    revoking_for=int31s,
)


@st.composite
def consumer_groups(draw: st.DrawFn) -> ConsumerGroup:
    members = draw(mapped(consumer_members))
    targets = {member_id: draw(assignments) for member_id in members}
    strategy = all_of(
        ConsumerGroup,
        epoch=int31s,
        state_since_ms=int64s,
        target_epoch=int31s,
        target=st.just({member_id: target for member_id, target in targets.items() if target}),
        members=st.just(members),
        topics_digest=st.binary(max_size=20),
    )
    group: ConsumerGroup = draw(strategy)
    return group


groups = classic_groups | consumer_groups() | st.just(Dying())


@given(texts, groups)
def test_any_group_comes_back_as_it_was(group_id: str, group: Group) -> None:
    key = record.group_key(group_id)
    again = record.decode(key, record.encode(group_id, group))
    assert again == group
    if not isinstance(group, Dying):
        assert not isinstance(again, Dying)
        assert list(again.members) == list(group.members)
    assert record.group_of_key(key) == group_id


def test_members_that_say_the_same_take_little_room() -> None:
    members = by_id(*(classic_member(f"{number:04}", assignment=bytes(200)) for number in range(1_000)))
    group = ClassicGroup(state=GroupState.STABLE, leader="consumer-0000", members=members)
    assert len(record.encode("g", group)) < 40_000


# What is none.


def test_newer_format_is_left_alone() -> None:
    message = pb.Group(format=2, group_id="another")
    with pytest.raises(IncompatibleStore, match="format 2"):
        record.decode(KEY, b"\0" + message.SerializeToString())


def written(**changes: Any) -> bytes:
    message = pb.Group(format=1, group_id=GROUP_ID)
    message.classic.members.add(member_id="a")
    message.classic.processes.add(node_id=1)
    for name, value in changes.items():
        setattr(message, name, value)
    return message.SerializeToString()


def test_the_record_from_which_damaged_ones_are_made_is_none() -> None:
    assert isinstance(record.decode(KEY, b"\0" + written()), ClassicGroup)


def _damaged() -> dict[str, bytes]:
    no_process = pb.Group(format=1, group_id=GROUP_ID)
    no_process.classic.members.add(member_id="a", heard_by=1)
    no_state = pb.Group(format=1, group_id=GROUP_ID)
    no_state.classic.state = 9  # type: ignore[assignment]
    no_member_state = pb.Group(format=1, group_id=GROUP_ID)
    no_member_state.consumer.processes.add()
    no_member_state.consumer.members.add(member_id="a", state=9)
    short_topic = pb.Group(format=1, group_id=GROUP_ID)
    short_topic.consumer.topic_ids.append(b"short")
    no_topic = pb.Group(format=1, group_id=GROUP_ID)
    no_topic.consumer.processes.add()
    no_topic.consumer.members.add(member_id="a").assigned.add(topic=1)
    packed = zlib.compress(written())
    return {
        "nothing": b"",
        "no message": b"\0\xff",
        "packed in another way": b"\2" + written(),
        "no format": b"\0" + written(format=0),
        "of another group": b"\0" + written(group_id="another"),
        "of no kind": b"\0" + pb.Group(format=1, group_id=GROUP_ID).SerializeToString(),
        "nobody times a member": b"\0" + no_process.SerializeToString(),
        "no such state": b"\0" + no_state.SerializeToString(),
        "no such state of a member": b"\0" + no_member_state.SerializeToString(),
        "no topic id": b"\0" + short_topic.SerializeToString(),
        "topic of nowhere": b"\0" + no_topic.SerializeToString(),
        "not packed": b"\1" + written(),
        "cut short": b"\1" + packed[:-1],
        "too long": b"\1" + packed + b"\0",
        "packed wrongly": b"\1" + packed[:-1] + b"\0",
    }


@pytest.mark.parametrize("name", _damaged())
def test_damaged_record_is_told(name: str) -> None:
    with pytest.raises(CorruptStore, match="groups/orders%2F"):
        record.decode(KEY, _damaged()[name])


def test_record_that_would_fill_the_memory_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "MAX_RECORD_BYTES", 1_000)
    value = b"\1" + zlib.compress(bytes(10_000_000))
    with pytest.raises(CorruptStore, match="too large"):
        record.decode(KEY, value)


def test_what_would_not_be_read_again_is_not_written() -> None:
    """Zeros fit into any store when they are packed; the group could not be read by anybody from then on."""

    def group(size: int) -> ClassicGroup:
        return ClassicGroup(members=by_id(classic_member("a", assignment=bytes(size))))

    largest = group(16 * 2**20 - 1_000)
    assert record.decode(KEY, record.encode(GROUP_ID, largest)) == largest
    with pytest.raises(TooLarge):
        record.encode(GROUP_ID, group(16 * 2**20))


@given(groups, st.data())
def test_damage_is_told_or_is_another_group(group: Group, data: st.DataObject) -> None:
    """There is no checksum: stores keep what they were given. Nothing else than these comes of it."""
    value = bytearray(record.encode("g", group))
    at = data.draw(st.integers(0, len(value) - 1))
    if data.draw(flags):
        del value[at:]
    else:
        value[at] ^= data.draw(st.integers(1, 255))
    with suppress(CorruptStore, IncompatibleStore):
        record.decode("groups/g", bytes(value))


def describe(group: Group) -> dict[str, Any]:
    """As JSON. Numbers above 2^53, where JSON's end in many languages, are strings; so are bytes, in hex."""

    def plain(value: Any) -> Any:
        if is_dataclass(value):
            return {field.name: plain(getattr(value, field.name)) for field in fields(value) if field.init}
        if isinstance(value, enum.Enum):
            return value.value
        if isinstance(value, bytes):
            return value.hex()
        if isinstance(value, frozenset):
            return sorted(value)
        if isinstance(value, list | tuple):
            return [plain(one) for one in value]
        if hasattr(value, "items"):
            return {str(key): plain(one) for key, one in value.items()}
        is_small = value is None or (isinstance(value, int) and abs(value) < 2**53)
        return value if is_small else str(value)

    return {"kind": type(group).__name__, **plain(group)}


def rewrite() -> None:
    DIRECTORY.mkdir(exist_ok=True)
    for name, group in CASES.items():
        (DIRECTORY / f"{name}.bin").write_bytes(record.encode(GROUP_ID, group))
    rows = [f"{json.dumps(name)}: {json.dumps(describe(group))}" for name, group in CASES.items()]
    MANIFEST.write_text("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    if sys.argv[1:] != ["--rewrite"]:
        sys.exit("this replaces golden files; say --rewrite if that is meant")
    rewrite()
