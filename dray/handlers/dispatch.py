"""From a frame to its answer: what is the same for all APIs happens here, once.

Which API and version it is, whether it is served, decoding, who the client is, and encoding. What nobody
expected closes the connection, with its traceback in the log: the client connects anew and tries again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from typing import TypeAlias

from kio.schema.errors import ErrorCode

from dray.errors import MalformedRequest, UnsupportedRequest
from dray.handlers.api_versions import API_VERSIONS, FALLBACK_VERSION, unknown_version
from dray.handlers.call import Call, Reply, Services, Stable
from dray.handlers.rejected import REJECTED
from dray.handlers.table import APIS, Api
from dray.protocol.codec import Buffer, Fields, Request, Target, decode_request, encode_response, peek
from dray.routing import parse_client_id
from dray.server import Answer, Connection

log = logging.getLogger(__name__)


# Responses kept: Metadata of a topic of 1,000 partitions takes 40 KB, and 20 ms to encode.
MAX_KEPT_BYTES = 16 * 2**20
MAX_KEPT_REQUEST_BYTES = 4_096
# What is around a kept response and its request: measured with tracemalloc on CPython 3.11, rounded up.
KEPT_BYTES = 512
# Encoding more than this takes long enough for others to notice.
INLINE_PARTITIONS = 500

# What a kept response was the answer to: API and version, the client's zone, the request behind its client
# id, the brokers and the topics. Nothing else of a client matters, and many ask the same when they start.
_Key: TypeAlias = tuple[bytes, str | None, bytes, int, int]


class Dispatcher:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._kept: OrderedDict[_Key, bytes] = OrderedDict()  # without length and correlation id
        self._kept_bytes = 0
        self._making: dict[_Key, asyncio.Event] = {}  # those who ask for the same wait for it
        # Held while a large response is encoded: several threads at once would leave the loop no time.
        self._encoding = asyncio.Lock()

    async def handle(self, frame: bytes, connection: Connection) -> Answer | None:
        """Raises `MalformedRequest` where only closing the connection helps."""
        target = peek(frame)
        api = APIS.get(target.api_key)
        if api is None:
            return self._reject(frame, target, connection)
        if not api.min_version <= target.version <= api.max_version:
            if target.api_key == API_VERSIONS:
                own = api.versions(API_VERSIONS)
                fallback = target._replace(version=FALLBACK_VERSION)
                return Answer(encode_response(fallback, unknown_version(own)))
            raise MalformedRequest(f"{api.name} version {target.version} is not served", 2)
        key = self._key(frame) if api.is_kept else None
        if key is None:
            return await self._answer(api, target, frame, connection, None)
        if key not in self._kept and (making := self._making.get(key)) is not None:
            await making.wait()  # once: where it was not kept, all go on side by side
        kept = self._kept.get(key)
        if kept is not None:
            self._kept.move_to_end(key)
            return Answer([(len(kept) + 4).to_bytes(4) + frame[4:8], kept])
        self._making[key] = making = asyncio.Event()
        try:
            return await self._answer(api, target, frame, connection, key)
        finally:
            making.set()
            if self._making.get(key) is making:
                del self._making[key]

    async def _answer(
        self, api: Api, target: Target, frame: bytes, connection: Connection, key: _Key | None
    ) -> Answer | None:
        request = decode_request(frame)
        del frame  # its records were copied out; do not hold them twice
        call = self._call(request, connection)
        if api.in_turn:
            async with connection.answer_turn:
                if connection.closed.done():
                    return None  # a client may leave a thousand behind, each with megabytes to be read
                reply = await api.handle(call)
        else:
            reply = await api.handle(call)
        if reply is None:
            return None
        if isinstance(reply, Reply):
            return Answer(encode_response(target, reply.fields), reply.on_sent)
        if isinstance(reply, Stable):
            return Answer(await self._encode_and_keep(key, target, reply.fields))
        return Answer(encode_response(target, reply))

    def _key(self, frame: bytes) -> _Key | None:
        if len(frame) > MAX_KEPT_REQUEST_BYTES:
            return None
        size = int.from_bytes(frame[8:10], signed=True)
        end = 10 + max(size, 0)
        try:
            zone = parse_client_id(frame[10:end].decode())
        except UnicodeDecodeError:
            return None
        if size < -1 or end > len(frame):
            return None
        services = self._services
        return frame[:4], zone, frame[end:], services.brokers.revision, services.topics.revision

    async def _encode_and_keep(self, key: _Key | None, target: Target, fields: Fields) -> list[Buffer]:
        partitions = sum(len(topic["partitions"]) for topic in fields["topics"])
        if partitions <= INLINE_PARTITIONS:
            buffers = encode_response(target, fields)
        else:
            async with self._encoding:
                buffers = await asyncio.to_thread(encode_response, target, fields)
        kept = b"".join(buffers)[8:]
        if key is not None and key not in self._kept:
            self._kept[key] = kept
            self._kept_bytes += _weigh(key, kept)
            while self._kept_bytes > MAX_KEPT_BYTES:
                self._kept_bytes -= _weigh(*self._kept.popitem(last=False))
        return buffers

    def _call(self, request: Request, connection: Connection) -> Call:
        zone = parse_client_id(request.client_id)
        return Call(self._services, connection, request.version, request.client_id, zone, request.body)

    def _reject(self, frame: bytes, target: Target, connection: Connection) -> Answer:
        """Of what is known but not served (D-PROTO-30…32). Anything else is not Kafka's to ask a broker."""
        rejected = REJECTED.get(target.api_key)
        if rejected is None:
            raise MalformedRequest(f"API {target.api_key} version {target.version} is not served", 0)
        try:
            request = decode_request(frame)
        except UnsupportedRequest as error:
            raise MalformedRequest(str(error), 0) from None
        log.warning(
            "request refused: %s is not supported",
            rejected.name,
            extra={"peer": connection.peer, "client_id": request.client_id, "version": target.version},
        )
        fields = rejected.answer(request.body, ErrorCode.unsupported_version)
        return Answer(encode_response(target, fields))


def _weigh(key: _Key, kept: bytes) -> int:
    """The request too: it may be far larger than its response, and clients can vary it as they like."""
    _, zone, request, *_ = key
    return KEPT_BYTES + len(zone or "") + len(request) + len(kept)
