"""A compactor in the tests' own process, beside brokers that are processes: its workers are plain Python.

It lives as long as a test wants, round after round, on an event loop of its own thread.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import signal
import sys
import threading
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self, TypeVar

from compactor.command import opened
from compactor.service import Compactor, Counts, Runner
from compactor.spark import LocalRunner
from dray.config import Given, Settings, load_settings

T = TypeVar("T")


def settings_of(values: Mapping[str, object]) -> Settings:
    """From these alone, whatever the environment says."""
    given = [Given(name, str(value), "the test") for name, value in values.items()]
    return load_settings(arguments=given, environ={})


class LocalCompactor:
    def __init__(self, settings: Mapping[str, object], runner: Runner | None = None) -> None:
        self.settings = settings_of(settings)
        self._runner = runner or LocalRunner()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="compactor")

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self._opened = opened(self.settings, runner=self._runner)
            self.compactor: Compactor = self._call(self._opened.__aenter__())
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._call(self._opened.__aexit__(None, None, None))
        finally:
            self._end()

    @property
    def counts(self) -> Counts:
        """Since it was started."""
        return self.compactor.counts

    def round(self) -> bool:
        """Over all that there is, however young. Whether there may be more to do."""
        return self._call(self.compactor.round(everything=True))

    def compact(self) -> None:
        """All that there is. Everything works out."""
        failures = self.counts.failures
        while self.round():
            pass
        assert (self.counts.failures, self.counts.waiting_tasks) == (failures, 0)

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def main(most_bytes: int, values: Sequence[str]) -> None:
    """One such compactor in a process that may write no larger file: as a disk that is full."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the call fails instead
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
    logging.basicConfig(level=logging.WARNING)
    with LocalCompactor(dict(each.split("=", 1) for each in values)) as compactor:
        compactor.round()
        sys.stdout.write(json.dumps(asdict(compactor.counts)))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
