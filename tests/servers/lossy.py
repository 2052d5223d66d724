"""A proxy for Kafka's protocol that loses answers to Produce: the broker got the request, the client nothing.

One produce request in so many, by chance, meets one of the fates below, which take turns; `happened` counts
those that came true. Everything else passes, as long as its connection lives.
"""

from __future__ import annotations

import asyncio
import enum
import random
import struct
from collections import Counter, deque
from collections.abc import Coroutine
from itertools import chain, cycle
from typing import Any

from tests.servers.proxy import Cut, TcpProxy

_PRODUCE = 0


class Fate(enum.Enum):
    PASS = "pass"
    LOST_ANSWER = "lost answer"  # it came back to the proxy; the connection is reset instead
    LOST_TAIL = "lost tail"  # the request went on as a whole, and the connection is reset at once
    CUT_INSIDE = "cut inside"  # reset in the middle of the request
    SILENCE = "silence"  # from this answer on nothing comes back, until the client gives up


RESETS = (Fate.LOST_ANSWER, Fate.LOST_TAIL, Fate.CUT_INSIDE)


class LossyProxy(TcpProxy):
    def __init__(self, chances: random.Random, one_in: int, silences: int = 0) -> None:
        """So many `silences`, first of all: a client waits for its request timeout each time."""
        super().__init__("")
        self._chances = chances
        self._one_in = one_in
        self._fates = chain([Fate.SILENCE] * silences, cycle(RESETS))
        self.is_lossy = True
        self.happened: Counter[Fate] = Counter()

    def _pumps(
        self,
        reader: asyncio.StreamReader,
        onward: asyncio.StreamWriter,
        back: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> tuple[Coroutine[Any, Any, None], Coroutine[Any, Any, None]]:
        fates: deque[Fate] = deque()  # of the requests that have no answer yet; answers keep their order
        return self._requests(reader, onward, fates), self._answers(back, writer, fates)

    async def _requests(
        self, reader: asyncio.StreamReader, onward: asyncio.StreamWriter, fates: deque[Fate]
    ) -> None:
        while frame := await _read_frame(reader):
            fate = self._draw(frame)
            fates.append(fate)
            if fate is Fate.CUT_INSIDE:
                frame = frame[: len(frame) // 2]
            onward.write(frame)
            await onward.drain()
            if fate in (Fate.CUT_INSIDE, Fate.LOST_TAIL):
                self.happened[fate] += 1
                raise Cut
        raise Cut

    async def _answers(
        self, back: asyncio.StreamReader, writer: asyncio.StreamWriter, fates: deque[Fate]
    ) -> None:
        is_silent = False
        while frame := await _read_frame(back):
            fate = fates.popleft()
            if fate in (Fate.LOST_ANSWER, Fate.SILENCE):
                self.happened[fate] += 1
            if fate is Fate.LOST_ANSWER:
                raise Cut
            is_silent = is_silent or fate is Fate.SILENCE
            if not is_silent:
                writer.write(frame)
                await writer.drain()
        raise Cut

    def _draw(self, frame: bytes) -> Fate:
        (api_key,) = struct.unpack_from(">h", frame, 4)
        if api_key != _PRODUCE or not self.is_lossy or self._chances.randrange(self._one_in):
            return Fate.PASS
        return next(self._fates)


async def _read_frame(reader: asyncio.StreamReader) -> bytes:
    """With its length; nothing when the other side has closed."""
    try:
        size = await reader.readexactly(4)
        return size + await reader.readexactly(struct.unpack(">i", size)[0])
    except asyncio.IncompleteReadError:
        return b""
