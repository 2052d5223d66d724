"""The four codecs of record batches, within a given amount of memory. Pure.

`decompress` gives what Kafka's own clients would read out of a batch's body, or raises `InvalidBatch`:
`DecompressedTooLarge` for a bomb, `CorruptBatch` for rubbish. Which codec it is says the batch's header
(`records.py`); what the bytes mean is for whoever walks the records.

Several frames in one body are read as the Java client reads them:
- gzip: one member after the other; what does not begin like a member ends the data (`GZIPInputStream`);
- snappy: blocks in the framing of snappy-java, whose header may come again; without that framing one bare
  block, as librdkafka writes it (`SnappyInputStream`);
- lz4: the first frame, nothing behind it (Kafka's `Lz4BlockInputStream`);
- zstd: one frame after the other, also skippable ones, with and without a content size (`ZstdInputStream`).

The decompressors themselves need some memory more: a window, at most as large as the limit or 8 MiB, or a few
blocks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from struct import Struct

import cramjam
import lz4.frame  # type: ignore[import-untyped]  # has no stubs
import zstandard
from isal import isal_zlib
from isal.igzip_lib import IsalError

from dray.errors import CorruptBatch, DecompressedTooLarge, UnsupportedCodec
from dray.protocol.records import Buffer

# Output is made in steps of so many bytes, so that a bomb is noticed early.
_STEP_BYTES = 2**20
# What is left of an input piece at the end of a member is copied. Small first pieces keep that cheap where a
# body is made of many tiny members; larger ones follow where a member goes on.
_FIRST_PIECE_BYTES = 2**12
_PIECE_BYTES = 2**16

_GZIP_MAGIC = b"\x1f\x8b"
_GZIP_WBITS = 16 + isal_zlib.MAX_WBITS

_XERIAL_MAGIC = b"\x82SNAPPY\x00"
_XERIAL_HEADER_BYTES = 16  # magic, version i32, oldest compatible version i32
_XERIAL_LENGTH = Struct(">i")

# Every decoder is to support windows of 8 MiB (RFC 8878, 3.1.1.1.2), also one with a lower limit.
_ZSTD_WINDOW_BYTES = 2**23
_ZSTD_SKIPPABLE = Struct("<II")
_ZSTD_SKIPPABLE_MAGIC = 0x184D2A50  # and the 15 that follow
_ZSTD_BLOCK_HEADER_BYTES = 3
_ZSTD_BLOCK_RLE = 1
_ZSTD_CHECKSUM_BYTES = 4

_kept = threading.local()


def decompress(codec: str, body: memoryview, max_bytes: int) -> Buffer:
    """The records of a batch, `body` itself if they are not compressed. Never more than `max_bytes`."""
    if codec == "none":
        if len(body) > max_bytes:
            raise _too_large(codec, max_bytes)
        return body
    read = _READERS.get(codec)
    if read is None:
        raise UnsupportedCodec(f"codec {codec!r}", 0)
    output = _Output(codec, max_bytes)
    read(body, output)
    return output.data


class _Output:
    """What was decompressed so far."""

    def __init__(self, codec: str, max_bytes: int) -> None:
        self.data = bytearray()
        self._codec = codec
        self._max_bytes = max_bytes

    @property
    def max_bytes(self) -> int:
        return self._max_bytes

    @property
    def room(self) -> int:
        """How many bytes may come yet."""
        return self._max_bytes - len(self.data)

    @property
    def step(self) -> int:
        """How many to ask for next. One more than there is room for, to see whether there are more."""
        return min(_STEP_BYTES, self.room + 1)

    def add(self, data: Buffer) -> None:
        if len(data) > self.room:
            raise self.too_large()
        self.data += data

    def too_large(self) -> DecompressedTooLarge:
        return _too_large(self._codec, self._max_bytes)


def _read_gzip(body: memoryview, output: _Output) -> None:
    at = 0
    while at == 0 or body[at : at + 2] == _GZIP_MAGIC:
        at = _read_gzip_member(body, at, output)


def _read_gzip_member(body: memoryview, at: int, output: _Output) -> int:
    """Where it ends."""
    member = isal_zlib.decompressobj(_GZIP_WBITS)
    piece_bytes = _FIRST_PIECE_BYTES
    while not member.eof:
        piece = body[at : at + piece_bytes]
        try:
            data = member.decompress(piece, output.step)
        except IsalError as error:  # type: ignore[misc]  # a class, but its stub says an instance
            raise CorruptBatch(f"gzip: {error}", 0) from None
        unread = member.unused_data if member.eof else member.unconsumed_tail
        used = len(piece) - len(unread)
        if not used and not data and not member.eof:
            raise CorruptBatch("gzip: cut short", 0)
        output.add(data)
        at += used
        piece_bytes = min(2 * piece_bytes, _PIECE_BYTES)
    return at


def _read_snappy(body: memoryview, output: _Output) -> None:
    if body[: len(_XERIAL_MAGIC)] != _XERIAL_MAGIC:
        _read_snappy_block(body, output)
        return
    at = 0
    while at < len(body):
        is_header = body[at : at + len(_XERIAL_MAGIC)] == _XERIAL_MAGIC
        start = at + (_XERIAL_HEADER_BYTES if is_header else _XERIAL_LENGTH.size)
        if start > len(body):
            raise CorruptBatch("snappy: cut short", 0)
        if is_header:
            at = start
            continue
        (length,) = _XERIAL_LENGTH.unpack_from(body, at)
        if not 0 <= length <= len(body) - start:
            raise CorruptBatch(f"snappy: a block of {length} bytes where {len(body) - start} are left", 0)
        at = start + length
        _read_snappy_block(body[start:at], output)


def _read_snappy_block(block: memoryview, output: _Output) -> None:
    try:
        if cramjam.snappy.decompress_raw_len(block) > output.room:
            raise output.too_large()
        output.add(memoryview(cramjam.snappy.decompress_raw(block)))
    except cramjam.DecompressionError as error:
        raise CorruptBatch(f"snappy: {error}", 0) from None


def _read_lz4(body: memoryview, output: _Output) -> None:
    frame = lz4.frame.LZ4FrameDecompressor()
    at = 0
    while not frame.eof:
        piece = body[at : at + _PIECE_BYTES] if frame.needs_input else b""
        if frame.needs_input and not piece:
            raise CorruptBatch("lz4: cut short", 0)
        try:
            data = frame.decompress(piece, max_length=output.step)
        except RuntimeError as error:
            raise CorruptBatch(f"lz4: {error}", 0) from None
        output.add(data)
        at += len(piece)


def _read_zstd(body: memoryview, output: _Output) -> None:
    if not body:
        raise CorruptBatch("zstd: cut short", 0)
    window_bytes = max(output.max_bytes, _ZSTD_WINDOW_BYTES)
    at = 0
    try:
        while at < len(body):
            end, needed_bytes = _zstd_frame(body, at)
            if needed_bytes > window_bytes:
                raise output.too_large()
            decompressor = _zstd_decompressor(needed_bytes)
            # Says nothing if its input is cut short; that is why the end was looked for.
            with decompressor.stream_reader(body[at:end]) as frame:
                while data := frame.read(output.step):
                    output.add(data)
            at = end
    except zstandard.ZstdError as error:
        raise CorruptBatch(f"zstd: {error}", 0) from None


def _zstd_decompressor(window_bytes: int) -> zstandard.ZstdDecompressor:
    """Making one takes longer than a batch of 16 KiB, and one thread can use it again."""
    if window_bytes > _ZSTD_WINDOW_BYTES:
        return zstandard.ZstdDecompressor(max_window_size=window_bytes)
    if not hasattr(_kept, "zstd"):
        _kept.zstd = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
    kept: zstandard.ZstdDecompressor = _kept.zstd
    return kept


def _zstd_frame(body: memoryview, at: int) -> tuple[int, int]:
    """Where the frame ends, and the window that it asks for (RFC 8878, 3.1). All of it is there."""
    if len(body) - at >= _ZSTD_SKIPPABLE.size:
        magic, length = _ZSTD_SKIPPABLE.unpack_from(body, at)
        if magic & ~0xF == _ZSTD_SKIPPABLE_MAGIC:
            return _inside(body, at + _ZSTD_SKIPPABLE.size + length), 0
    frame = zstandard.get_frame_parameters(body[at:])
    at += zstandard.frame_header_size(body[at:])
    is_last = False
    while not is_last:
        header = int.from_bytes(body[at : _inside(body, at + _ZSTD_BLOCK_HEADER_BYTES)], "little")
        is_last, kind, size = bool(header & 1), header >> 1 & 3, header >> 3
        at += _ZSTD_BLOCK_HEADER_BYTES + (1 if kind == _ZSTD_BLOCK_RLE else size)
    return _inside(body, at + _ZSTD_CHECKSUM_BYTES if frame.has_checksum else at), frame.window_size


def _inside(body: memoryview, end: int) -> int:
    if end > len(body):
        raise CorruptBatch("zstd: cut short", 0)
    return end


def _too_large(codec: str, max_bytes: int) -> DecompressedTooLarge:
    return DecompressedTooLarge(f"{codec}: more than {max_bytes} bytes of records", 0)


_READERS: dict[str, Callable[[memoryview, _Output], None]] = {
    "gzip": _read_gzip,
    "snappy": _read_snappy,
    "lz4": _read_lz4,
    "zstd": _read_zstd,
}
