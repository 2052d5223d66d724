"""From a frame to its answer: what is the same for all APIs happens here, once.

Which API and version it is, whether it is served, decoding, who the client is, and encoding. What nobody
expected closes the connection, with its traceback in the log: the client connects anew and tries again.
"""

from __future__ import annotations

import asyncio
import logging

from kio.schema.errors import ErrorCode

from dray.errors import MalformedRequest, UnsupportedRequest
from dray.handlers.api_versions import API_VERSIONS, FALLBACK_VERSION, unknown_version
from dray.handlers.call import Call, Reply, Services, Stable
from dray.handlers.kept import KeptResponses, Key, key_of
from dray.handlers.rejected import REJECTED
from dray.handlers.table import APIS, Api
from dray.protocol.codec import Buffer, Fields, Request, Target, decode_request, encode_response, peek
from dray.routing import parse_client_id
from dray.server import Answer, Connection

log = logging.getLogger(__name__)


# Encoding more than this takes long enough for others to notice.
INLINE_PARTITIONS = 500


class Dispatcher:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._kept = KeptResponses()
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
        if key is not None and (kept := await self._kept.take(key, target.correlation_id)) is not None:
            return Answer(kept)
        call = self._call(decode_request(frame), connection)
        del frame  # its records were copied out; do not hold them twice
        if key is None:
            return await self._answer(api, target, call, None)
        making = self._kept.begin(key)
        try:
            return await self._answer(api, target, call, key)
        finally:
            self._kept.end(key, making)

    async def _answer(self, api: Api, target: Target, call: Call, key: Key | None) -> Answer | None:
        connection = call.connection
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
            buffers = await self._encode_stable(target, reply.fields)
            if key is not None:
                self._kept.keep(key, buffers)
            return Answer(buffers)
        return Answer(encode_response(target, reply))

    def _key(self, frame: bytes) -> Key | None:
        return key_of(frame, self._services.brokers.revision, self._services.topics.revision)

    async def _encode_stable(self, target: Target, fields: Fields) -> list[Buffer]:
        partitions = sum(len(topic["partitions"]) for topic in fields["topics"])
        if partitions <= INLINE_PARTITIONS:
            return encode_response(target, fields)
        async with self._encoding:
            return await asyncio.to_thread(encode_response, target, fields)

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
