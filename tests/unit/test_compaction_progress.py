"""What somebody at a terminal sees while workers write."""

from __future__ import annotations

import io

from compactor.command import Progress
from compactor.work import Done


def test_the_line_says_how_far_it_is() -> None:
    terminal = io.StringIO()
    progress = Progress(terminal)
    progress.planned(2, {"a": 3 * 2**20, "b": 2**20, "c": 0})
    progress.written(Done("a"))
    line = terminal.getvalue().rpartition("\r")[2]
    assert "1/3 files of 2 streams, 3.0 MiB of 4.0 MiB" in line
    assert line.count("█") == 22
    assert " left" in line
    progress.written(Done("c"))
    progress.written(Done("b"))
    assert "3/3 files of 2 streams, 4.0 MiB of 4.0 MiB" in terminal.getvalue()
    assert terminal.getvalue().endswith("\n")
