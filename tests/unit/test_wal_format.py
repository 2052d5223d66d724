"""WAL objects keep what they are given, byte for byte, and damage of any kind is noticed.

Positions and sizes are literals from the specification (§5.2.2), not the module's own constants.
"""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate
from uuid import UUID

import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from dray.errors import DamagedWal, UnknownWalVersion, WalFormatError, WrongDomain
from dray.protocol.records import patched, split_batches
from dray.wal.format import (
    ChunkInput,
    decode_chunk,
    decode_header,
    decode_index,
    decode_object,
    decode_run,
    encode_object,
    object_id_of,
    object_path,
    objects_of_domain,
)
from tests.batches import build_batch, captured

ID = UUID("00112233-4455-6677-8899-aabbccddeeff")
U32, U64 = 2**32 - 1, 2**64 - 1
I64 = st.integers(-(2**63), 2**63 - 1)


def chunk(stream_id: int, *batches: bytes, records: int | None = None) -> ChunkInput:
    return ChunkInput(stream_id, batches, len(batches) if records is None else records, 1000, 2000)


def small() -> bytearray:
    """Two streams, three batches: bodies at 49, 49 + 2 * (4 + 68) and 265, index at 265, 357 bytes in all."""
    first, second, third = (build_batch(base_offset=n, leader_epoch=n) for n in (1, 2, 3))
    return encode_object(ID, 3, 1_700_000_000_000, [chunk(9, third), chunk(5, first, second)]).body


def resealed(data: bytearray) -> bytearray:
    """With a right checksum, so that nothing but the structure can be at fault."""
    data[-4:] = struct.pack(">I", crc32c(data[:-4]))
    return data


def test_every_field_is_where_the_specification_has_it() -> None:
    batch = build_batch(base_offset=0)
    data = small()
    assert len(data) == 49 + 3 * (4 + 68) + 2 * 44 + 4
    assert data[:49] == (
        b"DRAYWO1"
        + (1).to_bytes(2, "big")
        + bytes.fromhex("00112233445566778899aabbccddeeff")
        + (3).to_bytes(4, "big")
        + (1_700_000_000_000).to_bytes(8, "big")
        + (2).to_bytes(4, "big")
        + (265).to_bytes(8, "big")
    )
    assert data[49:53] == (68).to_bytes(4, "big")
    assert data[53:65] == batch[:12]
    assert data[65:69] == (1).to_bytes(4, "big")
    assert data[69:121] == batch[16:]
    assert data[265:309] == struct.pack(">QQIIIqq", 5, 49, 144, 2, 2, 1000, 2000)
    assert data[309:353] == struct.pack(">QQIIIqq", 9, 193, 72, 1, 1, 1000, 2000)
    assert data[353:] == crc32c(data[:353]).to_bytes(4, "big")


def test_an_empty_object_is_header_and_checksum() -> None:
    data = encode_object(ID, 0, 0, []).body
    assert len(data) == 53
    assert decode_object(data).chunks == []


def test_what_is_stored_are_kafka_batches_not_rows() -> None:
    """Dray's deviation from Ursa: bytes come back as the client sent them, still compressed.

    Only the base offset is normalised to 0, outside of the batch's own checksum, and patched when read.
    """
    sent = bytearray(captured("librdkafka-zstd"))
    sent[:8] = (123).to_bytes(8, "big")
    ((_, (stored,)),) = decode_object(encode_object(ID, 0, 0, [chunk(1, bytes(sent), records=3)]).body).chunks
    assert stored[:8] == bytes(8)
    assert stored[8:] == sent[8:]

    head, rest = patched(stored, 4711, 9)
    (batch,) = split_batches(head + bytes(rest))
    assert (batch.base_offset, batch.leader_epoch, batch.codec, batch.records) == (4711, 9, "zstd", 3)


def test_encoding_leaves_its_input_alone() -> None:
    sent = bytearray(build_batch(base_offset=123))
    before = bytes(sent)
    encode_object(ID, 0, 0, [ChunkInput(1, [sent], 1, 0, 0)])
    assert sent == before


def test_positions_for_the_index_point_behind_the_prefixes() -> None:
    """X-10: offset and length of a batch are those of its bytes."""
    batches = [build_batch(bytes(size)) for size in (7, 70, 700)]
    body, (first, second) = encode_object(ID, 0, 0, [chunk(1, batches[0]), chunk(2, *batches)])
    assert first == (49, 4 + 68, [(4, 68)])
    assert second == (121, 12 + 68 + 131 + 761, [(4, 68), (76, 131), (211, 761)])
    for (offset, length), batch in zip(second.batches, batches, strict=True):
        at = second.offset + offset
        assert body[at : at + length] == batch


# Any bytes behind a header of the right length: the format looks no further.
BATCHES = st.binary(max_size=300).map(build_batch)
CHUNKS = st.lists(
    st.builds(
        lambda id, batches, more, times: ChunkInput(
            id, batches, min(len(batches) + more, U32), min(times), max(times)
        ),
        st.integers(0, U64),
        st.lists(BATCHES, min_size=1, max_size=5),
        st.integers(0, U32),
        st.tuples(I64, I64),
    ),
    max_size=8,
    unique_by=lambda chunk: chunk.stream_id,
)


@given(st.uuids(), st.integers(0, U32), I64, CHUNKS)
def test_round_trip(wal_id: UUID, domain: int, created_at_ms: int, chunks: list[ChunkInput]) -> None:
    body, encoded = encode_object(wal_id, domain, created_at_ms, chunks)
    decoded = decode_object(body, expected_domain=domain)

    ordered = sorted(chunks, key=lambda chunk: chunk.stream_id)
    assert decoded.has_checksum
    assert decoded.header[:4] == (wal_id, domain, created_at_ms, len(chunks))
    assert [(e.stream_id, e.records, e.min_timestamp_ms, e.max_timestamp_ms) for e, _ in decoded.chunks] == [
        (c.stream_id, c.records, c.min_timestamp_ms, c.max_timestamp_ms) for c in ordered
    ]
    assert [batches for _, batches in decoded.chunks] == [c.batches for c in ordered]
    assert [(e.offset, e.length, e.batch_count) for e, _ in decoded.chunks] == [
        (c.offset, c.length, len(c.batches)) for c in encoded
    ]
    assert all(batch.obj is body for _, batches in decoded.chunks for batch in batches)


@given(CHUNKS, st.randoms(use_true_random=False))
def test_the_same_chunks_in_any_order_give_the_same_bytes(
    chunks: list[ChunkInput], rng: random.Random
) -> None:
    shuffled = rng.sample(chunks, len(chunks))
    assert encode_object(ID, 1, 2, chunks) == encode_object(ID, 1, 2, shuffled)


@given(CHUNKS)
def test_two_range_reads_find_every_chunk_and_a_third_its_batches(chunks: list[ChunkInput]) -> None:
    body = bytes(encode_object(ID, 1, 2, chunks).body)
    header = decode_header(body[:49])
    entries = decode_index(header, body[header.index_offset : header.index_end])
    for entry, chunk in zip(entries, sorted(chunks, key=lambda chunk: chunk.stream_id), strict=True):
        batches = decode_chunk(entry, body[entry.offset : entry.offset + entry.length])
        assert batches == chunk.batches


@given(st.lists(BATCHES, min_size=1, max_size=6), st.data())
def test_one_batch_or_a_run_of_them_is_read_by_its_lengths(batches: list[bytes], data: st.DataObject) -> None:
    body, (written,) = encode_object(ID, 1, 2, [chunk(1, *batches)])
    first = data.draw(st.integers(0, len(batches) - 1))
    last = data.draw(st.integers(first, len(batches) - 1))
    start = written.offset + written.batches[first][0]
    end = written.offset + sum(written.batches[last])
    lengths = [length for _, length in written.batches[first : last + 1]]
    assert decode_run(lengths, body[start:end], start) == batches[first : last + 1]


def test_a_run_that_does_not_fit_its_lengths_is_refused() -> None:
    body = encode_object(ID, 1, 2, [chunk(1, build_batch(), build_batch(bytes(8)))]).body
    run = body[53:194]
    assert len(decode_run([68, 69], run, 53)) == 2
    for lengths, data in (
        ([68], run),
        ([68, 69], run[:-1]),
        ([68, 69], run + b"\0"),
        ([69, 68], run),
        ([137 + 4], run),
        ([68, 69 - 4, 0], run),
        ([60], run[:60]),
        ([], run),
    ):
        with pytest.raises(DamagedWal):
            decode_run(lengths, data, 53)
    with pytest.raises(DamagedWal, match="byte 121: a batch of 69 bytes where the index has one of 70"):
        decode_run([68, 70], run + b"\0", 53)


@pytest.mark.parametrize(
    "chunks",
    [
        [chunk(1, build_batch()), chunk(1, build_batch())],
        [chunk(-1, build_batch())],
        [chunk(U64 + 1, build_batch())],
        [chunk(1)],
        [chunk(1, build_batch(), records=0)],
        [chunk(1, build_batch(), records=U32 + 1)],
        [chunk(1, build_batch()[:60])],
        [chunk(1, build_batch() * 2)],
        [chunk(1, build_batch(length=60))],
        [ChunkInput(1, [build_batch()], 1, 2, 1)],
        [ChunkInput(1, [build_batch()], 1, -(2**63) - 1, 0)],
    ],
)
def test_what_the_format_cannot_hold_is_not_written(chunks: Sequence[ChunkInput]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        encode_object(ID, 0, 0, chunks)


@pytest.mark.parametrize(("domain", "created_at_ms"), [(-1, 0), (U32 + 1, 0), (0, 2**63)])
def test_a_header_out_of_range_is_not_written(domain: int, created_at_ms: int) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        encode_object(ID, domain, created_at_ms, [])


def put(form: str, at: int, value: int) -> Callable[[bytearray], None]:
    return lambda data: struct.pack_into(">" + form, data, at, value)


def swap_entries(data: bytearray) -> None:
    data[265:353] = data[309:353] + data[265:309]


def repeat_entry(data: bytearray) -> None:
    data[309:317] = data[265:273]


@pytest.mark.parametrize(
    ("damage", "error", "at"),
    [
        (put("B", 0, 0), DamagedWal, 0),
        (put("B", 6, ord("2")), DamagedWal, 0),
        (put("H", 7, 0), UnknownWalVersion, 7),
        (put("H", 7, 2), UnknownWalVersion, 7),
        (put("H", 7, 0x0100), UnknownWalVersion, 7),
        (put("I", 25, 4), WrongDomain, 25),
        (put("I", 37, U32), DamagedWal, 37),
        (put("I", 37, 4), DamagedWal, 37),
        (put("I", 37, 3), DamagedWal, 357),
        (put("I", 37, 1), DamagedWal, 309),
        (put("I", 37, 0), DamagedWal, 265),
        (put("Q", 41, 0), DamagedWal, 41),
        (put("Q", 41, 48), DamagedWal, 41),
        (put("Q", 41, 49), DamagedWal, 37),
        (put("Q", 41, 264), DamagedWal, 352),
        (put("Q", 41, 269), DamagedWal, 277),
        (put("Q", 41, 2**63), DamagedWal, 357),
        (put("Q", 41, U64), DamagedWal, 357),
        (swap_entries, DamagedWal, 273),
        (repeat_entry, DamagedWal, 309),
        (put("Q", 309, 4), DamagedWal, 309),
        (put("Q", 273, 0), DamagedWal, 273),
        (put("Q", 273, 50), DamagedWal, 273),
        (put("Q", 273, U64), DamagedWal, 273),
        (put("Q", 317, 192), DamagedWal, 317),
        (put("Q", 317, 49), DamagedWal, 317),
        (put("Q", 317, 194), DamagedWal, 317),
        (put("I", 281, 0), DamagedWal, 289),
        (put("I", 281, 143), DamagedWal, 317),
        (put("I", 281, 145), DamagedWal, 317),
        (put("I", 281, U32), DamagedWal, 273),
        (put("I", 325, 71), DamagedWal, 264),
        (put("I", 285, 1), DamagedWal, 285),
        (put("I", 289, 0), DamagedWal, 289),
        (put("I", 289, 1), DamagedWal, 121),
        (put("I", 289, 3), DamagedWal, 289),
        (put("I", 289, U32), DamagedWal, 289),
        (put("q", 293, 2001), DamagedWal, 293),
        (put("I", 49, 0), DamagedWal, 49),
        (put("I", 49, 60), DamagedWal, 49),
        (put("I", 49, 67), DamagedWal, 49),
        (put("I", 49, 69), DamagedWal, 49),
        (put("I", 49, 141), DamagedWal, 49),
        (put("I", 49, U32), DamagedWal, 49),
        (put("I", 121, U32), DamagedWal, 121),
        (put("I", 61, 57), DamagedWal, 49),
    ],
)
def test_bad_structure_is_refused_although_the_checksum_is_right(
    damage: Callable[[bytearray], None], error: type[WalFormatError], at: int
) -> None:
    data = small()
    damage(data)
    with pytest.raises(WalFormatError) as refused:
        decode_object(resealed(data), expected_domain=3)
    assert type(refused.value) is error
    assert refused.value.at == at
    assert f"byte {at}: " in str(refused.value)


def test_two_chunks_that_share_a_body_are_refused() -> None:
    """Overlap without any other fault: both chunks are whole and lie in the bodies."""
    batch = build_batch()
    data = encode_object(ID, 0, 0, [chunk(1, batch), chunk(2, batch)]).body
    struct.pack_into(">Q", data, 49 + 2 * 72 + 44 + 8, 49)
    with pytest.raises(DamagedWal, match="overlaps the one before it"):
        decode_object(resealed(data))


def test_bytes_between_the_chunks_are_refused() -> None:
    data = encode_object(ID, 0, 0, [chunk(1, build_batch())]).body
    data[121:121] = bytes(5)
    struct.pack_into(">Q", data, 41, 126)
    with pytest.raises(
        DamagedWal, match="byte 121: chunks end at byte 121, but the index begins at byte 126"
    ):
        decode_object(resealed(data))


def test_a_batch_that_begins_at_the_very_end_of_its_chunk_is_refused() -> None:
    """The first batch says, twice, that it takes all but six bytes: a prefix and the start of nothing."""
    data = encode_object(ID, 0, 0, [chunk(1, build_batch(), build_batch())]).body
    struct.pack_into(">I", data, 49, 134)
    struct.pack_into(">I", data, 61, 122)
    struct.pack_into(">I", data, 187, 68)
    with pytest.raises(DamagedWal, match="byte 187: a batch of 68 bytes, of which 2 are there"):
        decode_object(resealed(data))


def test_the_domain_is_only_compared_if_one_is_expected() -> None:
    data = small()
    assert decode_object(data).header.domain == 3
    assert decode_header(data, expected_domain=3).domain == 3
    with pytest.raises(WrongDomain, match="MetaDomain 3 instead of 0"):
        decode_header(data, expected_domain=0)


def test_a_checksum_off_by_one_bit_is_refused() -> None:
    data = small()
    data[-1] ^= 1
    with pytest.raises(DamagedWal, match="byte 353: checksum is 0x"):
        decode_object(data)


@pytest.mark.parametrize("objects", [small, lambda: encode_object(ID, 0, 0, []).body], ids=["small", "empty"])
def test_every_flipped_bit_is_noticed(objects: Callable[[], bytearray]) -> None:
    data = objects()
    for bit in range(len(data) * 8):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WalFormatError):
            decode_object(data)
        data[bit // 8] ^= 1 << bit % 8
    decode_object(data)


def test_random_flipped_bits_of_a_large_object_are_noticed() -> None:
    rng = random.Random(4)
    batches = [build_batch(rng.randbytes(rng.randrange(20_000))) for _ in range(60)]
    data = encode_object(ID, 0, 0, [chunk(id, *batches[id::20]) for id in range(20)]).body
    for _ in range(500):
        bit = rng.randrange(len(data) * 8)
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WalFormatError):
            decode_object(data)
        data[bit // 8] ^= 1 << bit % 8
    decode_object(data)


@pytest.mark.parametrize("objects", [small, lambda: encode_object(ID, 0, 0, []).body], ids=["small", "empty"])
def test_every_truncation_is_noticed_but_that_of_the_whole_checksum(
    objects: Callable[[], bytearray],
) -> None:
    """X-09: an object may end behind its index. It says so, and then nothing vouches for its batches."""
    data = bytes(objects())
    for size in range(len(data)):
        if size == len(data) - 4:
            assert not decode_object(data[:size]).has_checksum
            continue
        with pytest.raises(DamagedWal) as refused:
            decode_object(data[:size])
        assert refused.value.at <= size
    for extra in (b"\0", bytes(4), bytes(44)):
        with pytest.raises(DamagedWal, match=f"{4 + len(extra)} bytes behind the index"):
            decode_object(data + extra)


def test_range_reads_that_came_back_short_or_long_are_noticed() -> None:
    data = bytes(small())
    header = decode_header(data)
    index = data[265:353]
    entries = decode_index(header, index)
    with pytest.raises(DamagedWal, match="byte 20: it ends inside the header"):
        decode_header(data[:20])
    for wrong in (b"", index[:-1], index[:44], index + b"\0"):
        with pytest.raises(DamagedWal, match="2 chunks have an index of 88 bytes"):
            decode_index(header, wrong)
    for wrong in (b"", data[49:192], data[49:194]):
        with pytest.raises(DamagedWal, match="chunk of stream 5 has 144 bytes"):
            decode_chunk(entries[0], wrong)


MUTATIONS = st.lists(
    st.tuples(st.integers(0, 2**16), st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]) | st.integers(0, 255)),
    max_size=8,
)


@settings(max_examples=300)
@given(CHUNKS, MUTATIONS, st.integers(-60, 60), st.booleans())
def test_mutated_objects_are_read_or_refused_by_type(
    chunks: list[ChunkInput], mutations: list[tuple[int, int]], resize: int, reseal: bool
) -> None:
    data = encode_object(ID, 0, 0, chunks).body
    for position, value in mutations:
        data[position % len(data)] = value
    data = data[:resize] if resize < 0 else data + bytes(resize)
    if reseal and len(data) > 4:
        resealed(data)
    try:
        decoded = decode_object(data)
    except WalFormatError as error:
        assert 0 <= error.at <= len(data)
        return
    again = [ChunkInput(e.stream_id, b, e.records, *e[5:]) for e, b in decoded.chunks]
    header = decoded.header
    bodies = encode_object(header.wal_id, header.domain, header.created_at_ms, again).body
    # What decodes is canonical: written anew, every length and position comes out the same.
    assert len(bodies) == len(data) + (0 if decoded.has_checksum else 4)
    assert bodies[header.index_offset : -4] == data[header.index_offset : header.index_end]


@given(st.binary(max_size=400), st.booleans())
def test_random_bytes_are_refused_by_type(tail: bytes, plausible: bool) -> None:
    data = b"DRAYWO1\0\1" + tail if plausible else tail
    with pytest.raises(WalFormatError):
        decode_object(data)


def test_no_count_or_length_makes_decoding_allocate() -> None:
    """Extremes in every field of a large object: what is allocated stays far below what was given."""
    body = build_batch(bytes(1 << 20), attributes=1)
    pristine = bytes(encode_object(ID, 0, 0, [chunk(1, body), chunk(2, body)]).body)
    index = len(pristine) - 4 - 88
    fields = [(37, "I"), (41, "Q"), (49, "I"), (61, "I")]
    fields += [(index + row + at, form) for row in (0, 44) for at, form in enumerate_fields("QQIIIqq")]
    tracemalloc.start()
    try:
        for at, form in fields:
            for value in (0, 1, 2**31 - 1, 2**32 - 1, 2**63 - 1):
                data = bytearray(pristine)
                size = struct.calcsize(form)
                data[at : at + size] = (value % 2 ** (8 * size)).to_bytes(size, "big")
                resealed(data)
                tracemalloc.reset_peak()
                before, _ = tracemalloc.get_traced_memory()
                with suppress(WalFormatError):
                    decode_object(data)
                _, peak = tracemalloc.get_traced_memory()
                assert peak - before < 64 << 10, (at, value)
    finally:
        tracemalloc.stop()


def enumerate_fields(forms: str) -> list[tuple[int, str]]:
    starts = accumulate((struct.calcsize(form) for form in forms), initial=0)
    return list(zip(starts, forms, strict=False))


def test_the_smallest_batches_cost_a_bounded_multiple_of_their_bytes() -> None:
    """The worst that valid bytes can do: one slice and one entry for every 109 bytes."""
    smallest = build_batch(b"")
    data = encode_object(ID, 0, 0, [chunk(id, smallest) for id in range(5000)]).body
    tracemalloc.start()
    try:
        decode_object(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10 * len(data)


def test_encoding_copies_batches_once() -> None:
    batches = [build_batch(bytes(16_700), attributes=1) for _ in range(500)]
    chunks = [chunk(id, *batches[id::10]) for id in range(10)]
    tracemalloc.start()
    try:
        body = encode_object(ID, 0, 0, chunks).body
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1.1 * len(body)


@pytest.mark.parametrize(
    ("zone", "domain", "created_at_ms", "expected"),
    [
        ("eu-1a", 7, 1_700_000_000_000, "wal/v1/zone=eu-1a/domain=7/date=2023/11/14/"),
        ("a", U32, 1_709_164_799_999, "wal/v1/zone=a/domain=4294967295/date=2024/02/28/"),
        ("a", 0, 1_709_164_800_000, "wal/v1/zone=a/domain=0/date=2024/02/29/"),
        ("a", 0, 0, "wal/v1/zone=a/domain=0/date=1970/01/01/"),
        ("r/z=1 ü", 0, 0, "wal/v1/zone=r%2Fz%3D1%20%C3%BC/domain=0/date=1970/01/01/"),
    ],
)
def test_the_path_names_zone_domain_day_and_id(
    zone: str, domain: int, created_at_ms: int, expected: str
) -> None:
    path = object_path(zone, domain, created_at_ms, ID)
    assert path == expected + "00112233-4455-6677-8899-aabbccddeeff.wo"
    assert path.startswith(objects_of_domain(zone, domain))
    assert object_id_of(path) == ID


@pytest.mark.parametrize(
    "path",
    [
        "",
        "wal/v1/zone=a/domain=0/date=1970/01/01/00112233-4455-6677-8899-aabbccddeeff.wo.tmp",
        "wal/v1/zone=a/domain=0/date=1970/01/01/00112233-4455-6677-8899-aabbccddeeff",
        "wal/v1/zone=a/domain=0/date=1970/01/01/00112233445566778899aabbccddeeff.wo",
        "compaction/v1/00112233-4455-6677-8899-aabbccddeeff.wo",
    ],
)
def test_other_keys_are_nobodys_id(path: str) -> None:
    assert object_id_of(path) is None
