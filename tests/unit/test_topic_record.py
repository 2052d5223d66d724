"""Records of topics. Those in `golden/topics/` must be read for ever, and written the same while format 1 is
current. `python -m tests.unit.test_topic_record --rewrite` makes them anew, for a diff that somebody reviews;
a new format adds files instead.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from uuid import UUID

import pytest

from dray.errors import CorruptStore, IncompatibleStore
from dray.topics.record import (
    StreamRecord,
    TopicRecord,
    TopicState,
    decode_stream,
    decode_topic,
    deleted_key,
    encode_stream,
    encode_topic,
    partition_uuid,
    stream_key,
    topic_key,
)

DIRECTORY = Path(__file__).parents[2] / "golden" / "topics"
ID = UUID("0190b5a2-7c1e-4d3f-8a6b-1c2d3e4f5a6b")

CASES: dict[str, TopicRecord | StreamRecord] = {
    "topic": TopicRecord("orders", ID, TopicState.ACTIVE, (1, 0xABCDEF), (), {}, 1_700_000_000_000),
    "topic_configs": TopicRecord(
        "orders.v1_eu-west",
        ID,
        TopicState.ACTIVE,
        (7,),
        (),
        {"retention.ms": "-1", "cleanup.policy": "", "max.message.bytes": "2097152"},
        1_700_000_000_000,
    ),
    "topic_creating": TopicRecord("orders", ID, TopicState.ACTIVE, (), (2**63 - 1, 16), {}, 0),
    "topic_growing": TopicRecord("orders", ID, TopicState.ACTIVE, (1, 2), (3,), {}, 1),
    "topic_deleting": TopicRecord("orders", ID, TopicState.DELETING, (1, 2), (3,), {}, 1),
    "topic_largest": TopicRecord(
        "x" * 249, UUID(int=2**128 - 1), TopicState.ACTIVE, (2**64 - 1,), (), {}, 2**63 - 1
    ),
    "stream": StreamRecord(ID, "orders", 0, 1_700_000_000_000),
    "stream_largest": StreamRecord(UUID(int=2**128 - 1), "x" * 249, 2**31 - 1, 2**63 - 1),
}
NAMES = sorted(path.stem for path in DIRECTORY.glob("*.json"))


def recode(name: str, value: bytes) -> tuple[TopicRecord | StreamRecord, bytes]:
    if name.startswith("topic"):
        topic = decode_topic("topics/x", value)
        return topic, encode_topic(topic)
    stream = decode_stream("streams/x", value)
    return stream, encode_stream(stream)


def test_every_case_has_a_golden_file() -> None:
    assert set(CASES) <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_golden_record_is_read_and_written_as_promised(name: str) -> None:
    value = (DIRECTORY / f"{name}.json").read_bytes()
    record, again = recode(name, value)
    assert again == value
    if name in CASES:
        assert record == CASES[name]


def test_golden_topic_says_what_its_fields_mean() -> None:
    """Written out once, so that the promise does not rest on the encoder alone."""
    assert (DIRECTORY / "topic_growing.json").read_bytes() == (
        b'{"format":1,"name":"orders","topic_id":"0190b5a2-7c1e-4d3f-8a6b-1c2d3e4f5a6b","state":"active",'
        b'"streams":["0000000000000001","0000000000000002"],"planned":["0000000000000003"],"configs":{},'
        b'"created_at_ms":1}'
    )


def test_keys_are_one_segment_below_their_directory() -> None:
    assert topic_key("a.b_c-d") == "topics/a.b_c-d"
    assert topic_key("a/b") == "topics/a%2Fb"
    assert deleted_key(ID) == "deleted-topics/0190b5a27c1e4d3f8a6b1c2d3e4f5a6b"
    assert stream_key(255) == "streams/00000000000000ff"


def test_partition_uuid_is_version_5_of_the_number() -> None:
    # RFC 9562, 5.5, done by hand with sha1sum.
    assert partition_uuid(ID, 12) == UUID("4cc5e028-e58d-5362-9363-fd7d5d804ae4")
    assert partition_uuid(ID, 1) != partition_uuid(ID, 12)


@pytest.mark.parametrize(
    ("state", "streams", "planned", "visible", "at_rest"),
    [
        (TopicState.ACTIVE, (1,), (), True, True),
        (TopicState.ACTIVE, (1,), (2,), True, False),
        (TopicState.ACTIVE, (), (2,), False, False),
        (TopicState.DELETING, (1,), (), False, False),
    ],
)
def test_visible_is_what_is_active_and_has_partitions(
    state: TopicState, streams: tuple[int, ...], planned: tuple[int, ...], visible: bool, at_rest: bool
) -> None:
    record = TopicRecord("t", ID, state, streams, planned, {}, 0)
    assert (record.visible, record.at_rest) == (visible, at_rest)


def test_newer_format_is_left_alone_whatever_else_it_says() -> None:
    for decode in (decode_topic, decode_stream):
        with pytest.raises(IncompatibleStore, match="format 2"):
            decode("topics/t", b'{"format": 2, "streams": "elsewhere"}')


@pytest.mark.parametrize(
    "change",
    [
        {"format": 0},
        {"format": True},
        {"format": None},
        {"name": 1},
        {"topic_id": "0190b5a2"},
        {"state": "sleeping"},
        {"streams": ["1"]},
        {"streams": [1]},
        {"streams": ["000000000000000g"]},
        {"streams": ["00000000 0000001"]},
        {"streams": None},
        {"streams": [], "planned": []},
        {"planned": [None]},
        {"configs": {"retention.ms": 1}},
        {"configs": []},
        {"created_at_ms": "now"},
    ],
)
def test_rubbish_in_a_topic_is_told(change: dict[str, object]) -> None:
    fields = json.loads((DIRECTORY / "topic.json").read_bytes())
    with pytest.raises(CorruptStore, match="topics/t"):
        decode_topic("topics/t", json.dumps(fields | change).encode())


@pytest.mark.parametrize("value", [b"", b"\xff", b"[]", b"null", b"{}", b'{"format":1}'])
def test_rubbish_is_told(value: bytes) -> None:
    for decode in (decode_topic, decode_stream):
        with pytest.raises(CorruptStore):
            decode("streams/s", value)


def rewrite() -> None:
    for name, record in CASES.items():
        encoded = encode_topic(record) if isinstance(record, TopicRecord) else encode_stream(record)
        (DIRECTORY / f"{name}.json").write_bytes(encoded)


if __name__ == "__main__":
    if sys.argv[1:] != ["--rewrite"]:
        sys.exit("this replaces golden files; say --rewrite if that is meant")
    rewrite()
