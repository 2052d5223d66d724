"""The guard before kio's reader: it lets every valid request pass, and nothing that could harm."""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
from typing import Any

import pytest
from kio.index import load_request_schema

from dray.errors import DrayError, MalformedRequest
from dray.handlers.rejected import REJECTED
from dray.handlers.table import APIS
from dray.protocol.codec import decode_request
from tests import wire

ALL = [(key, version) for key in sorted({*APIS, *REJECTED}) for version in wire.versions_of(key)]

METADATA, DESCRIBE_TOPIC_PARTITIONS, API_VERSIONS = 3, 75, 18


@pytest.mark.parametrize("api_key", sorted({*APIS, *REJECTED}))
def test_whatever_kio_encodes_passes_and_comes_back(api_key: int) -> None:
    rng = random.Random(api_key)
    for version in wire.versions_of(api_key):
        for _ in range(20):
            body = wire.random_entity(load_request_schema(api_key, version), rng)
            client_id = rng.choice((None, "", "zone_id=a", "x" * 32_767))
            request = decode_request(wire.encode(api_key, version, body, -2, client_id))
            assert (request.api_key, request.version, request.correlation_id) == (api_key, version, -2)
            assert request.client_id == client_id
            assert request.body == body


FUZZ = """
    import random, resource, sys
    from kio.index import load_request_schema
    from dray.errors import MalformedRequest, UnsupportedRequest
    from dray.protocol.codec import decode_request
    from tests import wire
    from tests.mutation import mutated
    from tests.unit.test_guard import ALL

    # Room for what a request may take, and far less than a false claim would; libraries have theirs already.
    pages = int(open("/proc/self/statm").read().split()[0])
    limit = pages * resource.getpagesize() + 2**30
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    seed, rounds = int(sys.argv[1]), int(sys.argv[2])
    rng = random.Random(seed)
    requests = [
        wire.encode(key, version, wire.random_entity(load_request_schema(key, version), rng))
        for key, version in ALL
        for _ in range(3)
    ]
    taken = 0
    for _ in range(rounds):
        request = mutated(rng.choice(requests), rng, requests)
        try:
            decode_request(request)
            taken += 1
        except (MalformedRequest, UnsupportedRequest):
            pass
        except BaseException as error:
            sys.exit(f"{error!r} of {request.hex()}")
    print(taken)
"""


def test_mutated_requests_of_every_api_and_version_do_no_harm() -> None:
    """In another process: what goes wrong in kio is no exception, but the end."""
    seed = 20_240_607
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FUZZ), str(seed), "30000"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"seed {seed}: exit {done.returncode}\n{done.stderr[-2000:]}"
    assert int(done.stdout) > 1_000, "hardly anything passed the guard: the fuzz tests nothing behind it"


def malformed(payload: bytes) -> str:
    with pytest.raises(MalformedRequest) as caught:
        decode_request(payload)
    return caught.value.problem


def header(api_key: int, version: int, flexible: bool) -> bytes:
    start = api_key.to_bytes(2, "big") + version.to_bytes(2, "big") + bytes(4) + b"\xff\xff"
    return start + (b"\0" if flexible else b"")


@pytest.mark.parametrize("claim", [2**31 - 1, 2**30, 1000])
def test_an_array_that_claims_more_than_there_is(claim: int) -> None:
    problem = malformed(header(METADATA, 4, False) + claim.to_bytes(4, "big") + b"\0" * 20)
    assert problem == f"an array claims {claim} elements in 20 bytes"


@pytest.mark.parametrize("claim", [b"\xff\xff\xff\xff\x0f", b"\xff\xff\xff\xff\x07"])
def test_a_compact_array_that_claims_more_than_there_is(claim: bytes) -> None:
    assert "an array claims" in malformed(header(METADATA, 9, True) + claim + b"\0" * 20)


def test_an_array_of_less_than_null() -> None:
    assert malformed(header(METADATA, 4, False) + b"\xff\xff\xff\xfe\0") == "an array claims -2 elements"


@pytest.mark.parametrize(("version", "empty", "null"), [(4, bytes(4), b"\xff" * 4), (9, b"\1", b"\0")])
def test_null_is_taken_only_where_the_schema_has_it(version: int, empty: bytes, null: bytes) -> None:
    """kio reads null for any array, and handlers go through what the schema says is a list."""
    assert decode_request(wire.request(METADATA, version, {"topics": None})).body.topics is None
    delete = wire.request(20, 4 if version == 9 else 3, {"topic_names": ()})
    at = len(delete) - 4 - len(empty) - (version == 9)  # before the timeout, and the tags
    assert delete[at:].startswith(empty)
    assert malformed(delete[:at] + null + delete[at + len(empty) :]) == "an array claims -1 elements"


def test_numbers_of_more_than_32_bits() -> None:
    for number in (b"\xff\xff\xff\xff\xff\x01", b"\xff\xff\xff\xff\x1f", b"\x80\x80\x80\x80\x80"):
        assert malformed(header(METADATA, 9, True) + number + b"\0" * 20) == "a number has more than 32 bits"


def test_a_number_that_ends_the_request() -> None:
    assert malformed(header(METADATA, 9, True) + b"\x80") == "it ends within a number"


def test_a_structure_that_is_neither_there_nor_null() -> None:
    good = wire.request(DESCRIBE_TOPIC_PARTITIONS, 0, {"cursor": None})
    at = len(good) - 2  # the mark, and no tags
    assert good[at] == 0xFF
    assert decode_request(good).body.cursor is None
    assert malformed(good[:at] + b"\x80" + good[at + 1 :]) == "a structure begins with 128"


def test_requests_of_very_many_elements_are_not_taken() -> None:
    """Two bytes on the wire are a hundred in memory, and as many structures keep the broker busy for long."""
    topics = b"\1\0" * 150_000
    count = bytes([150_001 & 0x7F | 0x80, (150_001 >> 7) & 0x7F | 0x80, 150_001 >> 14])
    assert "more than 100000 elements" in malformed(header(METADATA, 9, True) + count + topics + b"\0" * 8)


def test_elements_are_counted_over_all_arrays() -> None:
    partitions = {"topics": [{"topic": "t", "partitions": [{}] * 10_000}] * 11}
    assert "more than 100000 elements" in malformed(wire.request(1, 12, partitions))
    partitions["topics"] = partitions["topics"][:9]
    assert len(decode_request(wire.request(1, 12, partitions)).body.topics) == 9


def test_arrays_of_numbers_are_counted_too() -> None:
    replicas = {"topics": [{"name": "t", "assignments": [{"broker_ids": [1] * 100_000}]}]}
    assert "more than 100000 elements" in malformed(wire.request(19, 5, replicas))


def test_very_many_tags_are_not_taken() -> None:
    count = bytes([150_000 & 0x7F | 0x80, (150_000 >> 7) & 0x7F | 0x80, 150_000 >> 14])
    head = header(METADATA, 9, True)[:-1]
    assert "more than 100000 elements" in malformed(head + count + b"\x63\0" * 150_000 + b"\1\0\0\0\0")


def test_strings_are_bounded_as_in_kafka() -> None:
    """A long string with one character beyond the first 65,536 takes four bytes for each."""
    names = {"client_software_name": "x" * 32_767, "client_software_version": ""}
    assert len(decode_request(wire.request(API_VERSIONS, 3, names)).body.client_software_name) == 32_767
    names["client_software_name"] += "x"
    assert malformed(wire.request(API_VERSIONS, 3, names)) == "a string of 32768 bytes"


TAG = b"\x63\x03abc"  # 99, of three bytes


def test_unknown_tags_are_ignored() -> None:
    """KIP-482: a newer client may send what this broker does not know."""
    plain = wire.request(API_VERSIONS, 3, {"client_software_name": "a", "client_software_version": "b"})
    assert plain.endswith(b"\0")
    in_header = plain.index(b"wire") + 4
    for changed in (
        plain[:-1] + b"\1" + TAG,
        plain[:-1] + b"\2" + TAG + b"\x64\0",
        plain[:in_header] + b"\1" + TAG + plain[in_header + 1 :],
        plain[:in_header] + b"\2" + TAG + TAG + plain[in_header + 1 : -1] + b"\1" + TAG,
    ):
        request = decode_request(changed)
        assert (request.client_id, request.body.client_software_name) == ("wire", "a")
        assert request.body.client_software_version == "b"


def test_unknown_tags_beside_and_inside_known_ones() -> None:
    state = {"replica_id": 5, "replica_epoch": 6}
    plain = wire.request(1, 15, {"cluster_id": "c", "replica_state": state, "max_bytes": 77})
    # Two tags: 0 is the cluster, 1 the replica, a structure with tags of its own.
    at = plain.rindex(b"\2\0\2\2c")
    replica = b"\1\x0d" + (5).to_bytes(4, "big") + (6).to_bytes(8, "big") + b"\0"
    assert plain.endswith(replica)
    nested = b"\1\x12" + replica[2:-1] + b"\1" + TAG
    behind = b"\3" + plain[at + 1 :] + TAG
    around = b"\4" + TAG + plain[at + 1 : -len(replica)] + nested + b"\x64\0"
    for end in (behind, around):
        request = decode_request(plain[:at] + end)
        assert request.body.cluster_id == "c"
        assert request.body.replica_state.replica_epoch == 6
        assert request.body.max_bytes == 77


def test_a_known_tag_that_does_not_fill_its_bytes() -> None:
    plain = wire.request(1, 12, {"cluster_id": "c"})
    tag = b"\1\0\2\2c"
    assert plain.endswith(tag)
    for wrong in (b"\1\0\3\2c\0", b"\1\0\1\2c"):
        assert "tagged field 0 does not fill its" in malformed(plain[: -len(tag)] + wrong)


def test_every_truncation_is_refused() -> None:
    for key, version in ALL:
        body: Any = wire.random_entity(load_request_schema(key, version), random.Random(version))
        whole = wire.encode(key, version, body)
        for size in range(0, len(whole), max(1, len(whole) // 20)):
            with pytest.raises(DrayError):
                decode_request(whole[:size])
