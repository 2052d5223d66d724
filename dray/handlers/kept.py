"""Encoded responses that stay the same until brokers or topics change: Metadata, above all.

Many clients ask the same when they start, and encoding is what it costs to answer them: 20 ms for a topic of
1,000 partitions. So one request makes the response and the others take it. Bounded by bytes, requests
included: clients can vary these as they like.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from struct import Struct
from typing import TypeAlias

from dray.protocol.codec import Buffer
from dray.routing import parse_client_id

MAX_KEPT_BYTES = 16 * 2**20
MAX_REQUEST_BYTES = 4_096
# What is around a kept response and its request: measured with tracemalloc on CPython 3.11, rounded up.
OVERHEAD_BYTES = 512

# Of a framed response: its length, and what it answers to.
_START = Struct(">ii")

# What a response was the answer to: API and version, the client's zone, the request behind its client id, and
# the revisions of brokers and topics. Nothing else of a client matters.
Key: TypeAlias = tuple[bytes, str | None, bytes, int, int]


class KeptResponses:
    def __init__(self) -> None:
        self._responses: OrderedDict[Key, bytes] = OrderedDict()  # without length and correlation id
        self._size_bytes = 0
        self._making: dict[Key, asyncio.Event] = {}

    async def take(self, key: Key, correlation_id: int) -> list[Buffer] | None:
        """The response to such a request. None: make it, between `begin` and `end`."""
        if key not in self._responses and (making := self._making.get(key)) is not None:
            await making.wait()  # once: where it was not kept, all go on side by side
        kept = self._responses.get(key)
        if kept is None:
            return None
        self._responses.move_to_end(key)
        return [_START.pack(len(kept) + 4, correlation_id), kept]

    def begin(self, key: Key) -> asyncio.Event:
        self._making[key] = making = asyncio.Event()
        return making

    def end(self, key: Key, making: asyncio.Event) -> None:
        making.set()
        if self._making.get(key) is making:
            del self._making[key]

    def keep(self, key: Key, buffers: Sequence[Buffer]) -> None:
        if key in self._responses:
            return
        kept = b"".join(buffers)[_START.size :]
        self._responses[key] = kept
        self._size_bytes += _weigh(key, kept)
        while self._size_bytes > MAX_KEPT_BYTES:
            self._size_bytes -= _weigh(*self._responses.popitem(last=False))


def key_of(frame: bytes, brokers_revision: int, topics_revision: int) -> Key | None:
    """None: it is answered without being kept."""
    if len(frame) > MAX_REQUEST_BYTES:
        return None
    size = int.from_bytes(frame[8:10], signed=True)
    end = 10 + max(size, 0)
    try:
        zone = parse_client_id(frame[10:end].decode())
    except UnicodeDecodeError:
        return None
    if size < -1 or end > len(frame):
        return None
    return frame[:4], zone, frame[end:], brokers_revision, topics_revision


def _weigh(key: Key, kept: bytes) -> int:
    _, zone, request, *_ = key
    return OVERHEAD_BYTES + len(zone or "") + len(request) + len(kept)
