"""A broker that kills itself at a given step of the writer, once a file appears.

STEP TRIGGER and then the arguments of `drayd`. It lives as any other broker until the file TRIGGER exists.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from dray.cli import main
from dray.wal import writer as module

BEFORE_MARKER = "before the marker"
BEFORE_OBJECT = "before the object"
BEFORE_APPEND = "before the append"
BEFORE_ANSWER = "before the answer"
STEPS = [BEFORE_MARKER, BEFORE_OBJECT, BEFORE_APPEND, BEFORE_ANSWER]

_Pipeline = module._Pipeline


class Mortal(_Pipeline):
    step = ""
    trigger = Path()

    def _reach(self, step: str) -> None:
        if step == self.step and self.trigger.exists():
            os.kill(os.getpid(), signal.SIGKILL)

    async def _put_marker(self, *arguments: Any) -> None:
        self._reach(BEFORE_MARKER)
        await super()._put_marker(*arguments)

    async def _put_object(self, *arguments: Any) -> None:
        self._reach(BEFORE_OBJECT)
        await super()._put_object(*arguments)

    async def _append(self, *arguments: Any) -> None:
        self._reach(BEFORE_APPEND)
        await super()._append(*arguments)

    async def _acknowledge(self, *arguments: Any) -> None:
        self._reach(BEFORE_ANSWER)
        await super()._acknowledge(*arguments)


if __name__ == "__main__":
    Mortal.step, Mortal.trigger = sys.argv[1], Path(sys.argv[2])
    # What the broker makes its writer with, unless told otherwise.
    module._Pipeline = Mortal  # type: ignore[misc]
    sys.exit(main(sys.argv[3:]))
