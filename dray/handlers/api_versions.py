"""ApiVersions (18): what this broker can be asked."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from kio.schema.errors import ErrorCode

from dray.handlers.call import NO_THROTTLE, Call, Handler
from dray.protocol.codec import Fields

API_VERSIONS = 18
# The layout that every client understands, for those who ask in a version that does not exist (KIP-511).
FALLBACK_VERSION = 0
# From here on a client says what it is, and Kafka wants that to look like a name (KIP-511).
FIRST_WITH_SOFTWARE = 3
_SOFTWARE = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9\-.]*[a-zA-Z0-9])?")


class Versions(NamedTuple):
    """The versions of an API that clients are told of."""

    api_key: int
    min_version: int
    max_version: int


def handler(advertised: Iterable[Versions]) -> Handler:
    rows = [versions._asdict() for versions in advertised]

    async def handle(call: Call) -> Fields:
        code = ErrorCode.none
        if call.version >= FIRST_WITH_SOFTWARE:
            named = (call.body.client_software_name, call.body.client_software_version)
            if not all(_SOFTWARE.fullmatch(name) for name in named):
                code = ErrorCode.invalid_request
        return answer(code, rows if code is ErrorCode.none else [])

    return handle


def unknown_version(own: Versions) -> Fields:
    """To a version of ApiVersions itself that does not exist: which of it do."""
    return answer(ErrorCode.unsupported_version, [own._asdict()])


def answer(code: ErrorCode, rows: list[dict[str, int]]) -> Fields:
    return {"error_code": code, "api_keys": rows, "throttle_time": NO_THROTTLE}
