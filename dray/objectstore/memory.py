"""An object store in memory, for unit tests: the contract in its plainest form.

`MemoryObjectStore` is one client of a `MemoryObjects`; several may share one, as processes share a bucket.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dray.errors import (
    InvalidObjectRequest,
    ObjectExists,
    ObjectNotFound,
    ObjectStoreError,
    ObjectStoreUnavailable,
    ObjectTooShort,
)
from dray.objectstore.health import Health
from dray.objectstore.store import Body, ObjectInfo, check_key, check_list, check_range


@dataclass(slots=True)
class MemoryObjects:
    clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000
    objects: dict[str, tuple[bytes, int]] = field(default_factory=dict)  # bytes and time of the put


class MemoryObjectStore:
    def __init__(self, data: MemoryObjects | None = None) -> None:
        self._data = data or MemoryObjects()
        self._closed = False

    async def put(self, key: str, body: Body, *, if_absent: bool = False) -> None:
        await self._turn()
        check_key(key)
        objects = self._data.objects
        if if_absent and key in objects:
            raise ObjectExists(key)
        parts = key.split("/")
        above = any("/".join(parts[:depth]) in objects for depth in range(1, len(parts)))
        if above or any(other.startswith(f"{key}/") for other in objects):
            raise InvalidObjectRequest(f"key {key!r}: an object cannot lie below another")
        objects[key] = bytes(body), self._data.clock_ms()

    async def get(self, key: str) -> bytes:
        return (await self._object(key))[0]

    async def get_range(self, key: str, start: int, end: int, *, clip: bool = False) -> bytes:
        check_range(start, end)
        body, _ = await self._object(key)
        if (start if clip else end - 1) >= len(body):
            raise ObjectTooShort(key, start, end, len(body))
        return body[start:end]

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        for start, end in ranges:
            check_range(start, end)
        body, _ = await self._object(key)
        for start, end in ranges:
            if end > len(body):
                raise ObjectTooShort(key, start, end, len(body))
        return [body[start:end] for start, end in ranges]

    async def head(self, key: str) -> ObjectInfo:
        body, modified_ms = await self._object(key)
        return ObjectInfo(key, len(body), modified_ms)

    async def delete(self, key: str) -> None:
        await self._turn()
        check_key(key)
        self._data.objects.pop(key, None)

    async def delete_many(self, keys: Sequence[str]) -> dict[str, ObjectStoreError]:
        await self._turn()
        for key in keys:
            check_key(key)
        for key in keys:
            self._data.objects.pop(key, None)
        return {}

    async def list(self, prefix: str = "", *, after: str = "", limit: int = 1000) -> list[ObjectInfo]:
        await self._turn()
        check_list(prefix, after, limit)
        found = sorted(
            (key for key in self._data.objects if key.startswith(prefix) and key.encode() > after.encode()),
            key=str.encode,
        )
        objects = self._data.objects
        return [ObjectInfo(key, len(objects[key][0]), objects[key][1]) for key in found[:limit]]

    async def check(self) -> None:
        await self._turn()

    @property
    def health(self) -> Health:
        return Health.HEALTHY

    async def close(self) -> None:
        self._closed = True

    async def _object(self, key: str) -> tuple[bytes, int]:
        await self._turn()
        check_key(key)
        try:
            return self._data.objects[key]
        except KeyError:
            raise ObjectNotFound(key) from None

    async def _turn(self) -> None:
        """Let others run first, as every real store does, so that races show."""
        await asyncio.sleep(0)
        if self._closed:
            raise ObjectStoreUnavailable("the object store was closed")
