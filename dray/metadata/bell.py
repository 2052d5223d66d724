"""Wakes the other processes that have the same file open: a bell is a FIFO in a shared directory.

Ringing never blocks: a full FIFO has been rung already, and one without a reader belonged to a process
that died, so it is taken away. A ring says "look", no more: what there is to see is in the database.
"""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from pathlib import Path


class Bell:
    """This process's own bell: an event loop waits for `fd` to become readable, then drains it."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        self._path = directory / uuid.uuid4().hex
        # Ringers skip hidden names: they would take a FIFO that nobody has opened yet for a dead one.
        unready = directory / f".{self._path.name}"
        os.mkfifo(unready)
        # Read and write: with a writer of its own the FIFO never reports end-of-file.
        self.fd = os.open(unready, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        unready.rename(self._path)

    def drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self.fd, 4096):
                pass

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self.fd)


def ring_all(directory: Path) -> None:
    """Ring every bell in the directory, and take away those of the dead."""
    for entry in os.scandir(directory):
        if entry.name.startswith("."):
            continue
        try:
            fd = os.open(entry.path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno == errno.ENXIO:
                Path(entry.path).unlink(missing_ok=True)
            continue
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(fd, b"!")
        os.close(fd)
