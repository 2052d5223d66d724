"""Reads Parquet entries: records in columns become record batches again, with the offsets they have.

`read` answers a fetch. A file is read by its footer and then row group by row group, each by its own range of
bytes: `WalReader` brings and keeps those, like the bytes of WAL objects. A group that was rebuilt is kept as
batches, so that readers who follow one another pay for it once; while one group is sent, the next is rebuilt.

**Bound.** Batches that are kept never exceed `cache_bytes`, footers `FOOTER_CACHE_BYTES`; at most `MAX_WORK`
groups are rebuilt at once, in threads, and a group has about 8 MiB of records (`dray.columns.parquet`).

**What a reader gets** are the records, not the batches they came in: as many to a batch as fit into
`BATCH_BYTES`, uncompressed. Offsets that have no record (void batches, duplicates of a producer) are passed
over, as in a topic that Kafka has compacted; where they end an entry an empty batch stands for them, so that
whoever waits for an end offset gets there (protocol 22).
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dray.columns.encode import Rebuilt, encode_batches
from dray.columns.parquet import RowGroup, read_row_group, row_groups
from dray.errors import DamagedFile
from dray.index.entry import ParquetFile, Placed
from dray.protocol.records import empty_batch
from dray.wal.reader import WalReader

# Small enough for any client's limit of a partition to be worth a batch.
BATCH_BYTES = 16 * 2**10
MAX_WORK = 2
# A file of 128 MiB with 20 row groups has a footer of some 40 KiB.
FOOTER_BYTES = 64 * 2**10
FOOTER_CACHE_BYTES = 16 * 2**20
# A group that was rebuilt may be larger than all that is to be kept; then it is used and let go.
LEADER_EPOCH = 0
_MAGIC = b"PAR1"
_TAIL_BYTES = 8  # the length of the footer, and the magic

T = TypeVar("T")


class TimedOffset(NamedTuple):
    offset: int
    timestamp_ms: int


@dataclass(frozen=True, slots=True)
class _Footer:
    metadata: pq.FileMetaData
    groups: list[RowGroup]
    size_bytes: int

    def group_at(self, offset: int) -> int:
        """The number of the group that has the first record at or behind `offset`."""
        return bisect_right(self.groups, offset, key=lambda group: group.end_offset)


class CompactedReader:
    def __init__(self, objects: WalReader, *, cache_bytes: int) -> None:
        self._objects = objects
        self._cache_bytes = cache_bytes
        self._bytes = 0
        # The one used last is last, of both.
        self._rebuilt: OrderedDict[tuple[str, int], list[Rebuilt]] = OrderedDict()
        self._footers: OrderedDict[str, _Footer] = OrderedDict()
        self._footer_bytes = 0
        self._under_way: dict[tuple[str, int], asyncio.Task[list[Rebuilt]]] = {}
        self._turns = asyncio.Semaphore(MAX_WORK)

    @property
    def size_bytes(self) -> int:
        return self._bytes

    async def read(self, placed: Placed, offset: int, max_bytes: int) -> list[bytes]:
        """Batches from the one that holds `offset` on, as many as fit, and at least one.

        Raises `DamagedFile`, and what the object store raises.
        """
        file = _file_of(placed)
        footer = await self._footer(file)
        batches: list[bytes] = []
        end, left = offset, max_bytes
        for number in range(footer.group_at(offset), len(footer.groups)):
            for rebuilt in await self._group(file, footer, number):
                if rebuilt.end_offset <= offset:
                    continue
                if batches and len(rebuilt.data) > left:
                    self._read_ahead(file, footer, number)
                    return batches
                batches.append(rebuilt.data)
                end = rebuilt.end_offset
                left -= len(rebuilt.data)
            if left <= 0 and number + 1 < len(footer.groups):
                self._read_ahead(file, footer, number)
                return batches
        if end < placed.end_offset:
            batches.append(empty_batch(end, placed.end_offset - end, LEADER_EPOCH))
        return batches

    async def first_at_or_after(
        self, placed: Placed, timestamp_ms: int, start_offset: int, end_offset: int
    ) -> TimedOffset | None:
        """The first record in these offsets that is not older."""

        def look(times: np.ndarray[Any, Any]) -> int | None:
            found = times >= timestamp_ms
            return int(found.argmax()) if found.any() else None

        async for found in self._look(placed, start_offset, end_offset, look):
            return found
        return None

    async def latest(self, placed: Placed, start_offset: int, end_offset: int) -> TimedOffset | None:
        """The newest record in these offsets; the first of them, if several are equally new."""
        best: TimedOffset | None = None
        async for found in self._look(placed, start_offset, end_offset, lambda times: int(times.argmax())):
            if best is None or found.timestamp_ms > best.timestamp_ms:
                best = found
        return best

    async def _look(
        self,
        placed: Placed,
        start_offset: int,
        end_offset: int,
        look: Callable[[np.ndarray[Any, Any]], int | None],
    ) -> AsyncIterator[TimedOffset]:
        """What `look` chooses of the times of each row group that has records in these offsets."""
        file = _file_of(placed)
        footer = await self._footer(file)
        for number in range(footer.group_at(start_offset), len(footer.groups)):
            group = footer.groups[number]
            if group.first_offset >= end_offset:
                return
            body = await self._bytes_of(file, group)

            def work(number: int = number, body: bytes = body) -> TimedOffset | None:
                table = read_row_group(footer.metadata, number, body)
                offsets = table["offset"].to_numpy()
                first, last = offsets.searchsorted([start_offset, end_offset])
                times = _times_ms(table.slice(first, last - first))
                chosen = look(times) if len(times) else None
                return (
                    None if chosen is None else TimedOffset(int(offsets[first + chosen]), int(times[chosen]))
                )

            found = await self._work(file, work)
            if found is not None:
                yield found

    # --- row groups

    async def _group(self, file: ParquetFile, footer: _Footer, number: int) -> list[Rebuilt]:
        """One work for all who ask at the same time. It goes on when one of them is cancelled."""
        key = (file.path, number)
        found = self._rebuilt.get(key)
        if found is not None:
            self._rebuilt.move_to_end(key)
            return found
        return await asyncio.shield(self._begin(file, footer, number))

    def _begin(self, file: ParquetFile, footer: _Footer, number: int) -> asyncio.Task[list[Rebuilt]]:
        key = (file.path, number)
        task = self._under_way.get(key)
        if task is None:
            task = asyncio.create_task(self._rebuild(file, footer, number))
            self._under_way[key] = task
            task.add_done_callback(lambda done: self._has_ended(key, done))
        return task

    def _has_ended(self, key: tuple[str, int], done: asyncio.Task[list[Rebuilt]]) -> None:
        del self._under_way[key]
        if not done.cancelled():
            done.exception()  # nobody may be left who waits for it

    async def _rebuild(self, file: ParquetFile, footer: _Footer, number: int) -> list[Rebuilt]:
        body = await self._bytes_of(file, footer.groups[number])
        rebuilt = await self._work(
            file,
            lambda: encode_batches(read_row_group(footer.metadata, number, body), target_bytes=BATCH_BYTES),
        )
        size = sum(len(batch.data) for batch in rebuilt)
        self._bytes += size
        self._rebuilt[file.path, number] = rebuilt
        while self._bytes > self._cache_bytes:
            _, gone = self._rebuilt.popitem(last=False)
            self._bytes -= sum(len(batch.data) for batch in gone)
        return rebuilt

    def _read_ahead(self, file: ParquetFile, footer: _Footer, number: int) -> None:
        """The reader comes back for what follows: rebuild the next group meanwhile, if nobody waits."""
        key = (file.path, number + 1)
        is_last = number + 1 >= len(footer.groups)
        if is_last or key in self._rebuilt or len(self._under_way) >= MAX_WORK:
            return
        self._begin(file, footer, number + 1)

    async def _bytes_of(self, file: ParquetFile, group: RowGroup) -> bytes:
        pieces = await self._objects.read(file.path, group.byte_start, group.byte_end)
        return b"".join(pieces)

    async def _work(self, file: ParquetFile, work: Callable[[], T]) -> T:
        async with self._turns:
            try:
                return await asyncio.to_thread(work)
            except (pa.ArrowException, OSError, ValueError) as error:
                self._objects.forget(file.path)  # what is stored may be better than what was read
                raise DamagedFile(file.path, str(error)) from None

    # --- footers

    async def _footer(self, file: ParquetFile) -> _Footer:
        found = self._footers.get(file.path)
        if found is not None:
            self._footers.move_to_end(file.path)
            return found
        size = min(FOOTER_BYTES, file.size_bytes)
        tail = await self._tail(file, size)
        if size < _TAIL_BYTES or tail[-4:] != _MAGIC:
            self._objects.forget(file.path)
            raise DamagedFile(file.path, "it does not end like a Parquet file")
        needed = int.from_bytes(tail[-8:-4], "little") + _TAIL_BYTES
        if needed > file.size_bytes:
            raise DamagedFile(file.path, f"a footer of {needed} bytes in {file.size_bytes}")
        if needed > size:
            tail = await self._tail(file, needed)

        def parse() -> _Footer:
            metadata = pq.read_metadata(pa.BufferReader(tail[-needed:]))
            return _Footer(metadata, row_groups(metadata), needed)

        footer = await self._work(file, parse)
        self._footers[file.path] = footer
        self._footer_bytes += footer.size_bytes
        while self._footer_bytes > FOOTER_CACHE_BYTES and len(self._footers) > 1:
            self._footer_bytes -= self._footers.popitem(last=False)[1].size_bytes
        return footer

    async def _tail(self, file: ParquetFile, size: int) -> bytes:
        return b"".join(await self._objects.read(file.path, file.size_bytes - size, file.size_bytes))


def _file_of(placed: Placed) -> ParquetFile:
    where = placed.entry.where
    assert isinstance(where, ParquetFile), "only a Parquet file has rows"
    return where


def _times_ms(table: pa.Table) -> np.ndarray[Any, Any]:
    ms = pc.divide(table["timestamp"].cast(pa.int64()), 1000)
    return pc.coalesce(table["raw_timestamp"], ms).to_numpy()  # type: ignore[no-any-return]
