"""The byte strings of the broker-stages specification, with its mistakes corrected.

Requests must decode to what the specification means by them; responses must encode to exactly these bytes.
They say nothing of what this broker offers or answers (X-41): `golden/protocol/` does. Layouts are in the
specification's own notation, and each correction names the requirement that found the mistake.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import UUID

from kio.schema.errors import ErrorCode

from dray.errors import NotCommitted
from dray.handlers.api_versions import Versions, unknown_version
from dray.handlers.errors import code_of
from dray.protocol.codec import Request, Target, decode_request, encode_response
from dray.protocol.records import HEADER_BYTES, patched, read_batch, split_batches

NO_THROTTLE = timedelta(0)
FOO_ID = UUID("a1b2c3d4-e5f6-a7b8-c9d0-e1f2a3b4c5d6")


def spelled(text: str) -> bytes:
    """Bytes in the specification's notation: hexadecimal, with what they mean behind `//`."""
    return bytes.fromhex(" ".join(line.partition("//")[0] for line in text.splitlines()))


def decoded(text: str) -> Request:
    frame = spelled(text)
    assert int.from_bytes(frame[:4], "big") == len(frame) - 4, "the message size is wrong"
    return decode_request(frame[4:])


def encoded(api_key: int, version: int, fields: dict[str, Any], correlation_id: int = 0x6789_0ABC) -> bytes:
    return b"".join(encode_response(Target(api_key, version, correlation_id), fields))


def api_versions(*served: Versions) -> bytes:
    rows = [versions._asdict() for versions in served]
    fields = {"error_code": ErrorCode(0), "api_keys": rows, "throttle_time": NO_THROTTLE}
    return encoded(18, 4, fields)


PRODUCE, FETCH = Versions(0, 0, 11), Versions(1, 0, 16)
API_VERSIONS, DESCRIBE_TOPIC_PARTITIONS = Versions(18, 0, 4), Versions(75, 0, 0)


# The frame of "Manual Testing". X-64: its size is 0x23, not 0x1a.
MANUAL_TEST = """
    00 00 00 23                 // message_size: 35
    00 12                       // request_api_key: 18
    00 04                       // request_api_version: 4
    67 89 0a bc                 // correlation_id
    00 09 6b 61 66 6b 61 2d 63 6c 69  // client_id: "kafka-cli", in the old form of strings
    00                          // TAG_BUFFER
    0a 6b 61 66 6b 61 2d 63 6c 69  // client_software_name: "kafka-cli"
    04 30 2e 31                 // client_software_version: "0.1"
    00                          // TAG_BUFFER
"""


def test_the_manual_request_is_one_of_api_versions() -> None:
    request = decoded(MANUAL_TEST)
    assert request[:4] == (18, 4, 0x6789_0ABC, "kafka-cli")
    assert request.body.client_software_name == "kafka-cli"
    assert request.body.client_software_version == "0.1"


# Stages 4, 5, 9 and 14.
ONE_API = """
    00 00 00 13  // message_size: 19
    67 89 0a bc  // correlation_id; ApiVersions has response header 0 in all its versions
    00 00        // error_code
    02           // api_keys: 1 element
    00 12 00 00 00 04 00
    00 00 00 00  // throttle_time_ms
    00           // TAG_BUFFER
"""
TWO_APIS = """
    00 00 00 1a  // message_size: 26
    67 89 0a bc
    00 00
    03           // api_keys: 2 elements
    00 12 00 00 00 04 00
    00 4b 00 00 00 00 00
    00 00 00 00
    00
"""
THREE_APIS = """
    00 00 00 21  // message_size: 33
    67 89 0a bc
    00 00
    04           // api_keys: 3 elements
    00 01 00 00 00 10 00
    00 12 00 00 00 04 00
    00 4b 00 00 00 00 00
    00 00 00 00
    00
"""
FOUR_APIS = """
    00 00 00 28  // message_size: 40
    67 89 0a bc
    00 00
    05           // api_keys: 4 elements
    00 00 00 00 00 0b 00
    00 01 00 00 00 10 00
    00 12 00 00 00 04 00
    00 4b 00 00 00 00 00
    00 00 00 00
    00
"""


def test_api_versions_of_each_stage() -> None:
    assert api_versions(API_VERSIONS) == spelled(ONE_API)
    assert api_versions(API_VERSIONS, DESCRIBE_TOPIC_PARTITIONS) == spelled(TWO_APIS)
    assert api_versions(FETCH, API_VERSIONS, DESCRIBE_TOPIC_PARTITIONS) == spelled(THREE_APIS)
    assert api_versions(PRODUCE, FETCH, API_VERSIONS, DESCRIBE_TOPIC_PARTITIONS) == spelled(FOUR_APIS)


# Stage 3. X-67: not the error code alone, but the whole of version 0, with what there is of ApiVersions.
UNSUPPORTED_API_VERSIONS = """
    00 00 00 10  // message_size: 16
    67 89 0a bc
    00 23        // error_code: 35
    00 00 00 01  // api_keys: 1 element, in the old form of arrays
    00 12 00 00 00 04
"""


def test_a_version_of_api_versions_that_does_not_exist_is_answered_in_version_0() -> None:
    assert encoded(18, 0, dict(unknown_version(API_VERSIONS))) == spelled(UNSUPPORTED_API_VERSIONS)


# an empty compact array is 01, null is 00; and a length is a varint, not a byte.
def test_lengths_of_compact_arrays() -> None:
    head = "00 03 00 0c 00 00 00 07 ff ff 00"  # Metadata 12, no client id
    assert decoded(f"00 00 00 0f {head} 00 01 00 00").body.topics is None
    assert decoded(f"00 00 00 0f {head} 01 01 00 00").body.topics == ()
    assert encoded(1, 16, fetch_fields([]))[-2:] == b"\x01\x00"


def test_a_compact_array_of_127_elements_has_a_length_of_two_bytes() -> None:
    frame = api_versions(*(Versions(key, 0, 0) for key in range(127)))
    assert frame[10:12] == b"\x80\x01"
    assert len(frame) == 4 + 4 + 2 + 2 + 127 * 7 + 4 + 1
    name = "04 66 6f 6f 00"
    head = f"00 4b 00 00 00 00 00 07 ff ff 00 80 01 {name * 127} 00 00 07 d0 ff 00"
    size = len(bytes.fromhex(head)).to_bytes(4, "big").hex()
    assert [topic.name for topic in decoded(f"{size} {head}").body.topics] == ["foo"] * 127


# Stage 6. X-69: limit and cursor belong to the request.
DESCRIBE_FOO = """
    00 00 00 20                 // message_size: 32
    00 4b 00 00 ab cd ef 12     // DescribeTopicPartitions 0
    00 09 6b 61 66 6b 61 2d 63 6c 69
    00
    02                          // topics: 1 element
    04 66 6f 6f                 //   name: "foo"
    00                          //   TAG_BUFFER
    00 00 07 d0                 // response_partition_limit: 2000
    ff                          // cursor: null
    00                          // TAG_BUFFER
"""
DESCRIBE_FROM_A_CURSOR = """
    00 00 00 24
    00 4b 00 00 ab cd ef 12
    00 09 6b 61 66 6b 61 2d 63 6c 69
    00
    01                          // topics: none, which means all
    00 00 00 01                 // response_partition_limit: 1
    01                          // cursor: there is one
    04 66 6f 6f                 //   topic_name: "foo"
    00 00 00 02                 //   partition_index: 2
    00
    00
"""


def test_describe_topic_partitions_requests() -> None:
    request = decoded(DESCRIBE_FOO)
    assert request[:4] == (75, 0, 0xABCD_EF12 - 2**32, "kafka-cli")
    assert [topic.name for topic in request.body.topics] == ["foo"]
    assert (request.body.response_partition_limit, request.body.cursor) == (2000, None)
    body = decoded(DESCRIBE_FROM_A_CURSOR).body
    assert (body.topics, body.response_partition_limit) == ((), 1)
    assert (body.cursor.topic_name, body.cursor.partition_index) == ("foo", 2)


# the size is 0x29, not 0x2f. X-68: authorized operations that nobody asked for are -2147483648, not 0.
FOO_IS_UNKNOWN = """
    00 00 00 29  // message_size: 41
    ab cd ef 12  // correlation_id
    00           // TAG_BUFFER, of response header 1
    00 00 00 00  // throttle_time_ms
    02           // topics: 1 element
    00 03        //   error_code: UNKNOWN_TOPIC_OR_PARTITION
    04 66 6f 6f  //   name: "foo"
    00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00  // topic_id
    00           //   is_internal
    01           //   partitions: none
    80 00 00 00  //   topic_authorized_operations
    00           //   TAG_BUFFER
    ff           // next_cursor: null
    00           // TAG_BUFFER
"""
# Stage 7. X-64: the size is 0x45, not 0x4a, and broker ids have four bytes.
FOO_IS_KNOWN = """
    00 00 00 45  // message_size: 69
    ab cd ef 12
    00
    00 00 00 00
    02           // topics: 1 element
    00 00        //   error_code
    04 66 6f 6f
    a1 b2 c3 d4 e5 f6 a7 b8 c9 d0 e1 f2 a3 b4 c5 d6  // topic_id
    00           //   is_internal
    02           //   partitions: 1 element
    00 00        //     error_code
    00 00 00 00  //     partition_index
    00 00 00 01  //     leader_id
    00 00 00 00  //     leader_epoch
    02 00 00 00 01  //  replica_nodes: 1
    02 00 00 00 01  //  isr_nodes: 1
    01           //     eligible_leader_replicas: none
    01           //     last_known_elr: none
    01           //     offline_replicas: none
    00           //     TAG_BUFFER
    80 00 00 00  //   topic_authorized_operations (X-68)
    00           //   TAG_BUFFER
    ff           // next_cursor: null
    00           // TAG_BUFFER
"""


def described(topic: dict[str, Any]) -> bytes:
    fields = {"throttle_time": NO_THROTTLE, "topics": [{"name": "foo", **topic}], "next_cursor": None}
    return encoded(75, 0, fields, correlation_id=0xABCD_EF12 - 2**32)


def test_describe_topic_partitions_responses() -> None:
    unknown = {"error_code": ErrorCode(3), "topic_id": UUID(int=0), "is_internal": False, "partitions": ()}
    assert described(unknown) == spelled(FOO_IS_UNKNOWN)
    partition = {
        "error_code": ErrorCode(0),
        "partition_index": 0,
        "leader_id": 1,
        "leader_epoch": 0,
        "replica_nodes": (1,),
        "isr_nodes": (1,),
        "eligible_leader_replicas": (),
        "last_known_elr": (),
        "offline_replicas": (),
    }
    known = {"error_code": ErrorCode(0), "topic_id": FOO_ID, "is_internal": False, "partitions": [partition]}
    assert described(known) == spelled(FOO_IS_KNOWN)


# Stage 10.
NOTHING_FETCHED = """
    00 00 00 11  // message_size: 17
    67 89 0a bc
    00           // TAG_BUFFER, of response header 1
    00 00 00 00  // throttle_time_ms
    00 00        // error_code
    00 00 00 00  // session_id
    01           // responses: none
    00           // TAG_BUFFER
"""
# Stage 11. The specification has the layout of the response only; this is a request that it answers.
FETCH_UNKNOWN = """
    00 00 00 60
    00 01 00 10 67 89 0a bc     // Fetch 16
    00 09 6b 61 66 6b 61 2d 63 6c 69
    00
    00 00 01 f4                 // max_wait_ms: 500
    00 00 00 01                 // min_bytes: 1
    03 20 00 00                 // max_bytes: 52428800
    00                          // isolation_level
    00 00 00 00                 // session_id
    ff ff ff ff                 // session_epoch: -1
    02                          // topics: 1 element
    a1 b2 c3 d4 e5 f6 a7 b8 c9 d0 e1 f2 a3 b4 c5 d6  // topic_id
    02                          //   partitions: 1 element
    00 00 00 02                 //     partition: 2
    ff ff ff ff                 //     current_leader_epoch: -1
    00 00 00 00 00 00 00 07     //     fetch_offset: 7
    ff ff ff ff                 //     last_fetched_epoch: -1
    ff ff ff ff ff ff ff ff     //     log_start_offset: -1
    00 10 00 00                 //     partition_max_bytes: 1048576
    00                          //     TAG_BUFFER
    00                          //   TAG_BUFFER
    01                          // forgotten_topics_data: none
    01                          // rack_id: ""
    00                          // TAG_BUFFER
"""
# the partition that was asked for, and -1 for what is not known of it. X-62: no records are 01, for 00
# is null.
FETCHED_UNKNOWN = """
    00 00 00 48  // message_size: 72
    67 89 0a bc
    00
    00 00 00 00
    00 00        // error_code: none at the top
    00 00 00 00
    02           // responses: 1 element
    a1 b2 c3 d4 e5 f6 a7 b8 c9 d0 e1 f2 a3 b4 c5 d6
    02           //   partitions: 1 element
    00 00 00 02  //     partition_index: 2
    00 64        //     error_code: UNKNOWN_TOPIC_ID
    ff ff ff ff ff ff ff ff  // high_watermark
    ff ff ff ff ff ff ff ff  // last_stable_offset
    ff ff ff ff ff ff ff ff  // log_start_offset
    01           //     aborted_transactions: none
    ff ff ff ff  //     preferred_read_replica
    01           //     records: none
    00 00 00     // TAG_BUFFER of partition, topic and response
"""
# Stage 12.
FETCHED_EMPTY = FETCHED_UNKNOWN.replace("00 64 ", "00 00 ").replace("ff ff ff ff ff ff ff ff", "00" * 8)


def fetch_fields(responses: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "throttle_time": NO_THROTTLE,
        "error_code": ErrorCode(0),
        "session_id": 0,
        "responses": responses,
    }


def fetched(code: int, offset: int, records: bytes = b"", high_watermark: int | None = None) -> bytes:
    partition = {
        "partition_index": 2,
        "error_code": ErrorCode(code),
        "high_watermark": offset if high_watermark is None else high_watermark,
        "last_stable_offset": offset if high_watermark is None else high_watermark,
        "log_start_offset": offset,
        "aborted_transactions": (),
        "records": records,
    }
    return encoded(1, 16, fetch_fields([{"topic_id": FOO_ID, "partitions": [partition]}]))


def test_fetch_request() -> None:
    request = decoded(FETCH_UNKNOWN)
    assert request[:4] == (1, 16, 0x6789_0ABC, "kafka-cli")
    body = request.body
    assert (body.max_wait, body.min_bytes, body.max_bytes) == (timedelta(milliseconds=500), 1, 52_428_800)
    assert (body.isolation_level, body.session_id, body.session_epoch, body.rack_id) == (0, 0, -1, "")
    (topic,) = body.topics
    (partition,) = topic.partitions
    assert topic.topic_id == FOO_ID
    assert (partition.partition, partition.fetch_offset, partition.partition_max_bytes) == (2, 7, 1_048_576)


def test_fetch_responses() -> None:
    assert encoded(1, 16, fetch_fields([])) == spelled(NOTHING_FETCHED)
    assert fetched(100, -1) == spelled(FETCHED_UNKNOWN)
    assert fetched(0, 0) == spelled(FETCHED_EMPTY)


# Stage 17. X-63: 12 bytes before the length ends and 49 behind it are the 61 of the header. X-70: with the 18
# of this record the length is 67, not 61.
HELLO_WORLD = """
    00 00 00 00 00 00 00 00  // baseOffset
    00 00 00 43              // batchLength: 67
    ff ff ff ff              // partitionLeaderEpoch: -1
    02                       // magic
    90 cc 77 8d              // crc
    00 00                    // attributes
    00 00 00 00              // lastOffsetDelta
    00 00 01 8b cf e5 68 00  // baseTimestamp: 1700000000000
    00 00 01 8b cf e5 68 00  // maxTimestamp
    ff ff ff ff ff ff ff ff  // producerId: none
    ff ff                    // producerEpoch
    ff ff ff ff              // baseSequence
    00 00 00 01              // recordsCount
    22                       // length: 17, zigzag
    00 00 00                 // attributes, timestampDelta, offsetDelta
    01                       // keyLength: -1
    16 48 65 6c 6c 6f 20 57 6f 72 6c 64  // value: "Hello World"
    00                       // headers
"""


def test_a_batch_has_a_header_of_61_bytes_and_says_how_many_follow_the_first_12() -> None:
    data = spelled(HELLO_WORLD)
    assert len(data) == 12 + 67 == 12 + 49 + 18
    assert HEADER_BYTES == 12 + 49 == 61
    (batch,) = split_batches(data)
    assert (batch.records, batch.codec, len(batch.data)) == (1, "none", 79)
    assert batch.timestamp_range_ms == (1_700_000_000_000, 1_700_000_000_000)


# no second prefix, and the base offset is the real one.
def test_a_stored_batch_is_the_produced_one_with_its_offset() -> None:
    data = spelled(HELLO_WORLD)
    stored = b"".join(patched(memoryview(data), base_offset=41, leader_epoch=0))
    assert stored == bytes(7) + b"\x29" + data[8:12] + bytes(4) + data[16:]
    assert read_batch(memoryview(stored)).base_offset == 41


# Stage 13. X-65: with records there is a high watermark, and a batch keeps its first 12 bytes.
FETCHED_HELLO = f"""
    00 00 00 97  // message_size: 151
    67 89 0a bc
    00
    00 00 00 00 00 00 00 00 00 00
    02 a1 b2 c3 d4 e5 f6 a7 b8 c9 d0 e1 f2 a3 b4 c5 d6
    02 00 00 00 02
    00 00
    00 00 00 00 00 00 00 01  // high_watermark
    00 00 00 00 00 00 00 01  // last_stable_offset
    00 00 00 00 00 00 00 00  // log_start_offset
    01
    ff ff ff ff
    50           // records: 79 bytes
    {HELLO_WORLD}
    00 00 00
"""


def test_a_batch_is_fetched_whole() -> None:
    assert fetched(0, 0, spelled(HELLO_WORLD), high_watermark=1) == spelled(FETCHED_HELLO)


# Stages 15 and 16.
PRODUCE_HELLO = f"""
    00 00 00 78
    00 00 00 0b 67 89 0a bc  // Produce 11
    00 09 6b 61 66 6b 61 2d 63 6c 69
    00
    00                       // transactional_id: null
    ff ff                    // acks: all
    00 00 05 dc              // timeout_ms: 1500
    02                       // topics: 1 element
    04 66 6f 6f
    02                       //   partitions: 1 element
    00 00 00 02              //     index: 2
    50                       //     records: 79 bytes
    {HELLO_WORLD}
    00                       //     TAG_BUFFER
    00                       //   TAG_BUFFER
    00                       // TAG_BUFFER
"""
PRODUCED = """
    00 00 00 32  // message_size: 50
    67 89 0a bc
    00           // TAG_BUFFER, of response header 1
    02           // responses: 1 element
    04 66 6f 6f
    02           //   partitions: 1 element
    00 00 00 02  //     index: 2
    00 00        //     error_code
    00 00 00 00 00 00 00 00  // base_offset
    ff ff ff ff ff ff ff ff  // log_append_time_ms: -1 says CreateTime (X-70)
    00 00 00 00 00 00 00 00  // log_start_offset
    01           //     record_errors: none
    00           //     error_message: null
    00           //     TAG_BUFFER
    00           //   TAG_BUFFER
    00 00 00 00  // throttle_time_ms
    00           // TAG_BUFFER
"""
NOT_PRODUCED = PRODUCED.replace("00 00 00 00 00 00 00 00", "ff" * 8)
UNKNOWN_PARTITION = NOT_PRODUCED.replace("00 00        //     error_code", "00 03")
# a failure to write is KAFKA_STORAGE_ERROR, which producers try again.
FAILED_TO_WRITE = NOT_PRODUCED.replace("00 00        //     error_code", "00 38")


def produced(code: ErrorCode, offset: int) -> bytes:
    partition = {
        "index": 2,
        "error_code": code,
        "base_offset": offset,
        "log_append_time": None,
        "log_start_offset": offset,
        "record_errors": (),
        "error_message": None,
    }
    topic = {"name": "foo", "partition_responses": [partition]}
    return encoded(0, 11, {"responses": [topic], "throttle_time": NO_THROTTLE})


def test_produce_request() -> None:
    request = decoded(PRODUCE_HELLO)
    assert request[:4] == (0, 11, 0x6789_0ABC, "kafka-cli")
    body = request.body
    assert (body.transactional_id, body.acks, body.timeout) == (None, -1, timedelta(seconds=1.5))
    (topic,) = body.topic_data
    (partition,) = topic.partition_data
    assert (topic.name, partition.index, bytes(partition.records)) == ("foo", 2, spelled(HELLO_WORLD))


def test_produce_responses() -> None:
    assert produced(ErrorCode(0), 0) == spelled(PRODUCED)
    assert produced(ErrorCode(3), -1) == spelled(UNKNOWN_PARTITION)
    assert produced(code_of(NotCommitted("the object store is away")), -1) == spelled(FAILED_TO_WRITE)
