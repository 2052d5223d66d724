"""A process that writes to the WAL and kills itself at a given step of its second object.

METADATA_URL OBJECTS_URL STEP
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

from dray.metadata.opening import open_store
from dray.objectstore.opening import open_object_store
from dray.wal import writer as module
from dray.wal.writer import WalWriter
from tests.pending import pending

D = 1
STEPS = ["before the marker", "before the object", "before the append", "before the answer"]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Mortal(module._Pipeline):
    step = ""

    async def _put_marker(self, *arguments: Any) -> None:
        if self.step == "before the marker":
            die()
        await super()._put_marker(*arguments)

    async def _put_object(self, *arguments: Any) -> None:
        if self.step == "before the object":
            die()
        await super()._put_object(*arguments)

    async def _append(self, *arguments: Any) -> None:
        if self.step == "before the append":
            die()
        await super()._append(*arguments)

    async def _acknowledge(self, *arguments: Any) -> None:
        if self.step == "before the answer":
            die()
        await super()._acknowledge(*arguments)


async def main(metadata_url: str, objects_url: str, step: str) -> None:
    metadata = await open_store(metadata_url)
    objects = await open_object_store(objects_url)
    writer = WalWriter(metadata, objects, zone="z", incarnation="00" * 16, pipeline=Mortal)
    for round_ in range(2):
        if round_ == 1:
            Mortal.step = step
        done = await asyncio.gather(*(writer.write(D, pending(stream, copies=2)) for stream in (1, 2, 3)))
        sys.stdout.write(" ".join(str(each.end_offset) for each in done) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
