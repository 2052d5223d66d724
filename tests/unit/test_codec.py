"""Requests out of frames, and responses into buffers."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from kio.index import load_request_schema, load_response_schema
from kio.schema.errors import ErrorCode

from dray.errors import MalformedRequest, UnsupportedRequest
from dray.protocol.codec import (
    Pieces,
    Target,
    build,
    decode_request,
    encode_response,
    may_be_request,
    peek,
    size_of,
)
from tests import wire

FETCH, API_VERSIONS, FIND_COORDINATOR = 1, 18, 10


def test_key_version_and_correlation_are_read_of_any_request() -> None:
    assert peek(b"\x7f\xff\xff\xff\x80\x00\x00\x01rest") == Target(32_767, -1, -(2**31) + 1)


@pytest.mark.parametrize("size", range(8))
def test_a_request_without_header(size: int) -> None:
    with pytest.raises(MalformedRequest, match=f"a request of {size} bytes has no header"):
        peek(bytes(size))


@pytest.mark.parametrize(
    ("key", "version"), [(999, 0), (-1, 0), (FETCH, 3), (FETCH, 99), (FETCH, -1), (27, 0)]
)
def test_what_kio_does_not_know_is_unsupported(key: int, version: int) -> None:
    start = key.to_bytes(2, "big", signed=True) + version.to_bytes(2, "big", signed=True)
    with pytest.raises(UnsupportedRequest):
        decode_request(start + bytes(40))


@pytest.mark.parametrize("version", [0, 1, 3, 4, 6])
def test_a_request_is_decoded_with_its_header(version: int) -> None:
    fields = wire.fitting(
        load_request_schema(FIND_COORDINATOR, version), {"key": "g", "coordinator_keys": ["g"]}
    )
    frame = wire.request(FIND_COORDINATOR, version, fields, correlation_id=5, client_id="zone_id=a")
    request = decode_request(frame)
    assert request[:4] == (FIND_COORDINATOR, version, 5, "zone_id=a")
    assert (getattr(request.body, "key", None) or request.body.coordinator_keys[0]) == "g"


def test_what_follows_a_request_is_ignored() -> None:
    frame = wire.request(FIND_COORDINATOR, 1, {"key": "g"})
    assert decode_request(frame + b"more").body.key == "g"


@pytest.mark.parametrize("bad", [b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\xf4\x90\x80\x80"])
def test_text_that_is_not_utf8(bad: bytes) -> None:
    frame = wire.request(FIND_COORDINATOR, 1, {"key": "#" * len(bad)})
    with pytest.raises(MalformedRequest, match="InvalidUnicode"):
        decode_request(frame.replace(b"#" * len(bad), bad))
    frame = wire.request(FIND_COORDINATOR, 1, {"key": "g"}, client_id="#" * len(bad))
    with pytest.raises(MalformedRequest, match="InvalidUnicode"):
        decode_request(frame.replace(b"#" * len(bad), bad))


def test_null_where_text_is_needed() -> None:
    frame = wire.request(FIND_COORDINATOR, 1, {"key": "", "key_type": 1})
    with pytest.raises(MalformedRequest, match="UnexpectedNull"):
        decode_request(frame[:-3] + b"\xff\xff" + frame[-1:])


@pytest.mark.parametrize(
    ("start", "may"),
    [
        (b"\0\0\0\x09", True),
        (b"\0\x5c\0\x12", True),
        (b"GET ", False),
        (b"\xff\xff\0\0", False),
        (b"\0\0\xff\xff", False),
        (b"\x0e\xe0\0\0", False),
    ],
)
def test_how_a_large_request_may_begin(start: bytes, may: bool) -> None:
    assert may_be_request(start) is may


def joined(buffers: Any) -> bytes:
    return b"".join(bytes(each) for each in buffers)


def fetch_fields(records: Any, topic_id: UUID) -> dict[str, Any]:
    partition = {
        "partition_index": 3,
        "error_code": ErrorCode.none,
        "high_watermark": 10,
        "last_stable_offset": 10,
        "log_start_offset": 0,
        "aborted_transactions": None,
        "records": records,
    }
    topic = {"topic": "t", "topic_id": topic_id, "partitions": [partition]}
    return {
        "throttle_time": timedelta(0),
        "error_code": ErrorCode.none,
        "session_id": 0,
        "responses": [topic],
    }


@pytest.mark.parametrize("version", range(4, 18))
def test_records_are_sent_from_where_they_lie(version: int) -> None:
    """The bytes are Kafka's, and the buffers of the records are the same objects, not copies."""
    first, second = memoryview(b"first batch"), b"second"
    buffers = encode_response(Target(FETCH, version, 6), fetch_fields(Pieces((first, second)), UUID(int=9)))
    assert any(each is first for each in buffers)
    assert any(each is second for each in buffers)
    sent = joined(buffers)
    assert int.from_bytes(sent[:4], "big") == len(sent) - 4 == size_of(buffers) - 4
    correlation_id, body = wire.decode(FETCH, version, sent[4:])
    assert correlation_id == 6
    (partition,) = body.responses[0].partitions
    assert partition.records == b"first batchsecond"
    assert partition.high_watermark == 10
    named = body.responses[0].topic if version < 13 else body.responses[0].topic_id
    assert named == ("t" if version < 13 else UUID(int=9))


def test_no_records_at_all() -> None:
    sent = joined(encode_response(Target(FETCH, 12, 0), fetch_fields(Pieces(()), UUID(int=0))))
    assert wire.decode(FETCH, 12, sent[4:])[1].responses[0].partitions[0].records == b""


def test_what_a_version_lacks_is_dropped_and_defaults_are_filled_in() -> None:
    row = {"api_key": 1, "min_version": 2, "max_version": 3}
    fields = {"error_code": ErrorCode.none, "api_keys": [row], "throttle_time": timedelta(0), "unheard_of": 1}
    for version in range(5):
        body = build(load_response_schema(API_VERSIONS, version), fields)
        assert body.api_keys[0].max_version == 3
        assert hasattr(body, "throttle_time") is (version >= 1)
    assert body.finalized_features_epoch == -1


def test_what_is_missing_and_has_no_default_is_a_mistake() -> None:
    with pytest.raises(TypeError, match="needs error_code"):
        build(load_response_schema(API_VERSIONS, 0), {"api_keys": ()})
