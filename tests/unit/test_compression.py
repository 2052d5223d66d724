"""The codecs, against what clients and the reference libraries write, and against what nobody should send."""

from __future__ import annotations

import contextlib
import gzip
import random
import struct
import tracemalloc
import zlib
from collections.abc import Callable

import cramjam
import lz4.frame  # type: ignore[import-untyped]  # has no stubs
import pytest
import zstandard
from aiokafka.codec import snappy_encode  # type: ignore[import-untyped]  # has no stubs
from hypothesis import example, given
from hypothesis import strategies as st

from dray.errors import CorruptBatch, DecompressedTooLarge, InvalidBatch, UnsupportedCodec
from dray.protocol.compression import decompress
from tests.batches import captured

MIB = 2**20
XERIAL_HEADER = b"\x82SNAPPY\x00" + struct.pack(">ii", 1, 1)


def raw_snappy(data: bytes) -> bytes:
    return bytes(cramjam.snappy.compress_raw(data))


def xerial_snappy(data: bytes, block_bytes: int = 32_768) -> bytes:
    blocks = [raw_snappy(data[at : at + block_bytes]) for at in range(0, len(data), block_bytes)]
    return XERIAL_HEADER + b"".join(struct.pack(">i", len(block)) + block for block in blocks)


def zstd_of_unknown_size(data: bytes) -> bytes:
    compressor = zstandard.ZstdCompressor(write_checksum=True).compressobj()
    return compressor.compress(data) + compressor.flush()


def lz4_linked(data: bytes) -> bytes:
    return bytes(lz4.frame.compress(data, block_linked=True, block_size=4, content_checksum=True))


MAKERS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "snappy, bare": ("snappy", raw_snappy),
    "snappy, framed": ("snappy", xerial_snappy),
    "lz4": ("lz4", lz4.frame.compress),
    "lz4, linked blocks": ("lz4", lz4_linked),
    "zstd": ("zstd", zstandard.ZstdCompressor().compress),
    "zstd, unknown size": ("zstd", zstd_of_unknown_size),
}
made_by_any = pytest.mark.parametrize("maker", MAKERS)


def unpack(maker: str, body: bytes, max_bytes: int = 2 * MIB) -> bytes:
    return bytes(decompress(MAKERS[maker][0], memoryview(body), max_bytes))


def pack(maker: str, data: bytes) -> bytes:
    return MAKERS[maker][1](data)


@pytest.mark.parametrize("client", ["librdkafka", "kafka-python"])
@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_what_clients_sent_is_read(client: str, codec: str) -> None:
    """The three records of each capture have keys and values that `golden/records/README.md` gives."""
    body = memoryview(captured(f"{client}-{codec}"))[61:]
    records = bytes(decompress(codec, body, MIB))
    for n in range(3):
        assert f"key {n}".encode() in records
        assert f"value {n} abc abc".encode() in records


@made_by_any
@pytest.mark.parametrize("size", [1, 100, 32_768, 70_000, MIB + 1])
def test_data_comes_back(maker: str, size: int) -> None:
    noise = random.Random(size).randbytes(size // 2 + 1)
    data = (noise + b"abcabc" * size)[:size]
    assert unpack(maker, pack(maker, data)) == data


def test_uncompressed_records_are_not_copied() -> None:
    body = memoryview(b"records")
    assert decompress("none", body, 7) is body
    with pytest.raises(DecompressedTooLarge):
        decompress("none", body, 6)


@made_by_any
def test_the_limit_is_exact(maker: str) -> None:
    body = pack(maker, b"x" * 5_000)
    assert len(unpack(maker, body, 5_000)) == 5_000
    for limit in (4_999, 1, 0):
        with pytest.raises(DecompressedTooLarge):
            unpack(maker, body, limit)


@made_by_any
def test_a_bomb_takes_no_more_memory_than_the_limit(maker: str) -> None:
    """256 MiB of zeros. Twice the limit leaves room for a window or a block beside the output."""
    bomb = pack(maker, bytes(256 * MIB))
    tracemalloc.start()
    try:
        with pytest.raises(DecompressedTooLarge):
            unpack(maker, bomb, 8 * MIB)
        assert tracemalloc.get_traced_memory()[1] < 16 * MIB + len(bomb)
    finally:
        tracemalloc.stop()


def test_a_zstd_frame_that_asks_for_a_huge_window_is_refused() -> None:
    """The decoder would allocate it before the first byte of output."""
    parameters = zstandard.ZstdCompressionParameters(window_log=27, write_content_size=False)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    frame = compressor.compress(b"a") + compressor.flush()
    assert unpack("zstd", frame, 128 * MIB) == b"a"
    with pytest.raises(DecompressedTooLarge):
        unpack("zstd", frame, 64 * MIB)


def test_a_zstd_frame_that_lies_about_its_size_is_refused() -> None:
    """Says 2^40 bytes, and has one block of 3."""
    frame = b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 2**40) + bytes([25, 0, 0]) + b"abc"
    with pytest.raises(InvalidBatch):
        unpack("zstd", frame)


@pytest.mark.parametrize("maker", ["gzip", "zstd", "zstd, unknown size"])
def test_frames_that_follow_each_other_are_one_stream(maker: str) -> None:
    body = b"".join(pack(maker, part) for part in (b"one", b"", b"two" * 50_000, b"three"))
    assert unpack(maker, body) == b"one" + b"two" * 50_000 + b"three"
    with pytest.raises(DecompressedTooLarge):
        unpack(maker, body, 100_000)


def test_a_framed_snappy_stream_may_be_followed_by_another() -> None:
    body = xerial_snappy(b"one" * 20_000) + xerial_snappy(b"two")
    assert unpack("snappy, framed", body) == b"one" * 20_000 + b"two"


def test_snappy_of_another_client_is_read() -> None:
    """aiokafka frames it as snappy-java does."""
    assert unpack("snappy, framed", snappy_encode(b"abc" * 40_000)) == b"abc" * 40_000


def test_only_the_first_lz4_frame_counts() -> None:
    """Kafka's own reader stops at its end mark."""
    assert unpack("lz4", pack("lz4", b"one") + pack("lz4", b"two")) == b"one"


def test_what_follows_gzip_members_is_left_alone() -> None:
    """Java's reader takes what is no member for the end."""
    assert unpack("gzip", gzip.compress(b"one") + bytes(600)) == b"one"


def test_skippable_zstd_frames_are_skipped() -> None:
    skippable = struct.pack("<II", 0x184D2A5F, 5) + b"other"
    body = skippable + pack("zstd", b"one") + skippable + pack("zstd", b"two") + skippable
    assert unpack("zstd", body) == b"onetwo"


@made_by_any
def test_every_cut_is_noticed(maker: str) -> None:
    body = pack(maker, bytes(range(256)) * 3)
    for end in range(len(body)):
        if maker == "snappy, framed" and end == len(XERIAL_HEADER):
            continue  # a stream without blocks
        with pytest.raises(CorruptBatch):
            unpack(maker, body[:end])


def test_many_tiny_gzip_members_are_read() -> None:
    assert unpack("gzip", gzip.compress(b"") * 20_000 + gzip.compress(b"end")) == b"end"


@pytest.mark.parametrize("at", range(-8, 0))
def test_the_checksum_and_length_of_a_gzip_member_are_checked(at: int) -> None:
    body = bytearray(gzip.compress(b"abc" * 1_000))
    body[at] ^= 1
    with pytest.raises(CorruptBatch):
        unpack("gzip", bytes(body))


def test_gzip_without_its_header_is_refused() -> None:
    with pytest.raises(CorruptBatch):
        unpack("gzip", zlib.compress(b"abc"))


@pytest.mark.parametrize("length", [-1, -(2**31), 2**31 - 1, 4])
def test_a_framed_snappy_block_stays_inside(length: int) -> None:
    with pytest.raises(CorruptBatch):
        unpack("snappy, framed", XERIAL_HEADER + struct.pack(">i", length) + b"\x01\x00a")


def test_an_unknown_codec_is_refused() -> None:
    with pytest.raises(UnsupportedCodec):
        decompress("brotli", memoryview(b""), 1)


@st.composite
def mutated(draw: st.DrawFn) -> tuple[str, bytes]:
    """A sound body, with some bytes changed, cut out, doubled or appended."""
    maker = draw(st.sampled_from(sorted(MAKERS)))
    body = bytearray(pack(maker, draw(st.binary(max_size=300)) * draw(st.integers(1, 50))))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(body)))
        change = draw(st.sampled_from(["set", "cut", "double", "append"]))
        if change == "set" and at < len(body):
            body[at] = draw(st.integers(0, 255))
        elif change == "cut":
            del body[at : at + draw(st.integers(1, 20))]
        elif change == "double":
            body[at:at] = body[at : at + draw(st.integers(1, 20))]
        else:
            body += draw(st.binary(max_size=20))
    return maker, bytes(body)


@given(mutated())
def test_mutated_bodies_raise_only_typed_errors(case: tuple[str, bytes]) -> None:
    maker, body = case
    with contextlib.suppress(InvalidBatch):
        assert len(unpack(maker, body, 10_000)) <= 10_000


@given(st.sampled_from(sorted(MAKERS)), st.binary(max_size=100))
@example("lz4", b"")
@example("zstd", b"")
def test_rubbish_raises_only_typed_errors(maker: str, body: bytes) -> None:
    with contextlib.suppress(InvalidBatch):
        assert len(unpack(maker, body, 10_000)) <= 10_000
