"""Kafka's command-line tools, from the jars: what `bin/kafka-*.sh` would run. Each is a JVM, a second or two.

Those that do not wait for each other go into one `run_tools`.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tests.servers.kafka import SHORT_LIVED_OPTIONS, java_command

# A tool gives up by itself well before: this is for one that hangs.
_TIMEOUT_S = 100
# JVMs at a time: each needs a core while it starts.
_AT_A_TIME = 3


@dataclass(frozen=True)
class Tool:
    main: str  # below org.apache.kafka.tools, unless it begins with kafka.
    arguments: Sequence[str]
    stdin: str = ""
    refused: bool = False  # whether it is to fail


def run_tool(main: str, *arguments: str, stdin: str = "", refused: bool = False) -> str:
    """What it says; fails unless it ends as expected."""
    name = main if main.startswith("kafka.") else f"org.apache.kafka.tools.{main}"
    done = subprocess.run(
        java_command(name, arguments, SHORT_LIVED_OPTIONS),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    said = done.stdout + done.stderr
    assert (done.returncode != 0) == refused, f"{main} {arguments} ended with {done.returncode}:\n{said}"
    return said


def run_tools(*tools: Tool) -> list[str]:
    """At the same time; what each says."""
    with ThreadPoolExecutor(_AT_A_TIME) as threads:
        running = [
            threads.submit(run_tool, tool.main, *tool.arguments, stdin=tool.stdin, refused=tool.refused)
            for tool in tools
        ]
        return [each.result() for each in running]
