"""Collects WAL objects that were never committed.

An object is an orphan when its writer died, or failed, between marker and append. Age only says when to
look: whether it is one is decided by its record (protocol 13). Whoever puts FENCED where nothing was has
stopped the append for good, late or not, and may then delete the object; whoever finds COMMITTED takes only
the marker away. Every step may be repeated, by anybody: a collector that dies is finished by the next.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from uuid import UUID

from dray.errors import DrayError, VersionConflict
from dray.metadata.pages import records_of
from dray.metadata.store import Expect, MetadataStore
from dray.objectstore.store import ObjectInfo, ObjectStore
from dray.wal.format import object_id_of, objects_of_domain
from dray.wal.objects import (
    OBJECTS,
    STAGING,
    ObjectRecord,
    State,
    decode_marker,
    decode_record,
    encode_record,
    marker_key,
    record_key,
)

log = logging.getLogger(__name__)

PAGE = 500


@dataclass(slots=True)
class Collected:
    """What one round did. What failed is logged, left as it is, and tried again by the next round."""

    objects_deleted: int = 0
    markers_removed: int = 0
    fences_removed: int = 0
    failed: int = 0


class OrphanCollector:
    def __init__(self, metadata: MetadataStore, objects: ObjectStore) -> None:
        self._metadata = metadata
        self._objects = objects

    async def collect(self, domain: int, now_ms: int, older_than_ms: int) -> Collected:
        """Deal with markers that are older than any seal, upload and append may take."""
        done = Collected()
        async for found in records_of(self._metadata, domain, STAGING):
            with _one_at_a_time(found.key, done):
                marker = decode_marker(found.key, found.value)
                if now_ms - marker.created_at_ms < older_than_ms:
                    continue
                record = ObjectRecord(State.FENCED, marker.path, marker.size_bytes, now_ms)
                if await self._fenced(domain, marker.object_id, record):
                    await self._objects.delete(marker.path)
                    done.objects_deleted += 1
                # Last: as long as it is there, the object can be found.
                await self._metadata.delete(domain, found.key)
                done.markers_removed += 1
        return done

    async def collect_unmarked(self, domain: int, zone: str, now_ms: int, older_than_ms: int) -> Collected:
        """Deal with objects that have neither marker nor record: nobody would ever find them otherwise.

        Lists the whole domain in one zone, so for now and then.
        """
        done = Collected()
        async for found in self._listed(objects_of_domain(zone, domain)):
            object_id = object_id_of(found.key)
            if object_id is None or now_ms - found.modified_ms < older_than_ms:
                continue
            with _one_at_a_time(found.key, done):
                if await self._metadata.get(domain, marker_key(object_id)) is not None:
                    continue  # `collect` will see to it
                record = ObjectRecord(State.FENCED, found.key, found.size, now_ms)
                if await self._fenced(domain, object_id, record):
                    await self._objects.delete(found.key)
                    done.objects_deleted += 1
        return done

    async def forget_fences(self, domain: int, now_ms: int, older_than_ms: int) -> Collected:
        """Remove FENCED records, once no append of such an object is conceivable any more.

        One with a reference stays: the append has landed on a store where the fence could not keep it out,
        and the record is all that tells readers that its entries are void.
        """
        done = Collected()
        async for found in records_of(self._metadata, domain, OBJECTS):
            name = found.key.rpartition("/")[2]
            if "-" in name:
                continue
            with _one_at_a_time(found.key, done):
                record = decode_record(found.key, found.value)
                if record.state is not State.FENCED or now_ms - record.at_ms < older_than_ms:
                    continue
                await self._metadata.barrier(domain)
                # References are `<id>-…`, so they lie between the record and `<id>.`: one scan, one moment.
                beside = await self._metadata.scan(domain, OBJECTS, start=name, end=f"{name}.", limit=2)
                if len(beside) == 1:
                    await self._objects.delete(record.path)
                    await self._metadata.delete(domain, found.key, found.version)
                    done.fences_removed += 1
        return done

    async def _fenced(self, domain: int, object_id: UUID, fence: ObjectRecord) -> bool:
        """Fence an object; False if it is committed."""
        key = record_key(object_id)
        while True:
            try:
                await self._metadata.put(domain, key, encode_record(fence), Expect.ABSENT)
            except VersionConflict:
                # There is a record. A read alone may be older than it.
                await self._metadata.barrier(domain)
                found = await self._metadata.get(domain, key)
                if found is not None:
                    return decode_record(key, found.value).state is State.FENCED
            else:
                return True

    async def _listed(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        after = ""
        while page := await self._objects.list(prefix, after=after, limit=PAGE):
            for found in page:
                yield found
            after = page[-1].key


@contextmanager
def _one_at_a_time(what: str, done: Collected) -> Iterator[None]:
    """One that cannot be dealt with must not keep the others."""
    try:
        yield
    except DrayError as error:
        log.warning("collecting %s: %s", what, error)
        done.failed += 1
