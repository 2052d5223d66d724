"""Runs the scripts of `golden/groups/`: against Apache Kafka to write the files, against Dray to compare.

    python -m tests.integration.golden_groups --kafka [script …]   write the files, from Apache Kafka
    python -m tests.integration.golden_groups --dray [script …]    print where Dray differs from them

A file is the transcript of one script. Where Dray answers otherwise on purpose, the script says so, and the
file has both answers and the reason. `group_script.py` says how to read them.
"""

from __future__ import annotations

import asyncio
import difflib
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from tests.integration import golden_groups_classic, golden_groups_consumer, golden_groups_offsets
from tests.integration.group_script import SCENARIOS, Scenario, Stuck, running, served
from tests.servers.dray import DrayBroker
from tests.servers.kafka import KafkaServer, kafka_version

MODULES = (golden_groups_classic, golden_groups_offsets, golden_groups_consumer)
DIRECTORY = Path(__file__).parents[2] / "golden" / "groups"
# Of both brokers. Sessions may be short, so that scripts see them end; three members are many.
SETTINGS = {
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "500",
    "group.max.size": "3",
    "group.consumer.max.size": "3",
}
# Of Kafka alone: Dray never converts a group that has members, and has no bounds for its own settings.
KAFKA_SETTINGS = {
    "group.consumer.migration.policy": "disabled",
    "group.consumer.min.session.timeout.ms": "1000",
    "group.consumer.min.heartbeat.interval.ms": "1000",
}


def settings_of(scenario: Scenario) -> dict[str, str]:
    return {**SETTINGS, **scenario.settings}


async def transcript(scenario: Scenario, address: tuple[str, int], *, of_kafka: bool) -> str:
    """One that could not go on ends with why."""
    async with running(scenario.name, address, of_kafka) as script:
        try:
            await scenario.run(script)
        except Stuck as stuck:
            script.stuck(stuck)
        return script.transcript()


def head(scenario: Scenario) -> str:
    about = "\n".join(f"# {line.strip()}".rstrip() for line in scenario.about.splitlines())
    given = {**settings_of(scenario), **KAFKA_SETTINGS}
    settings = "".join(f"#   {name}={value}\n" for name, value in given.items())
    return (
        f"{about}\n#\n# Apache Kafka {kafka_version()}, by\n"
        f"#   python -m tests.integration.golden_groups --kafka {scenario.name}\n# with\n{settings}\n"
    )


def expected_of_dray(text: str) -> str:
    """The transcript that Dray should have: its own answers where the file has two."""
    body = text.partition("\n\n")[2]
    blocks: list[list[str]] = []
    for line in body.splitlines():
        if line.startswith("because "):
            continue
        if line.startswith("Dray <"):
            connection = blocks.pop()[0].partition(" ")[0]
            blocks.append([line.replace("Dray", connection, 1)])
        elif line.startswith(" "):
            blocks[-1].append(line)
        else:
            blocks.append([line])
    return "\n".join(line for block in blocks for line in block) + "\n"


def write_from_kafka(names: Sequence[str]) -> None:
    DIRECTORY.mkdir(exist_ok=True)
    for settings, scenarios in _by_settings(names):
        with tempfile.TemporaryDirectory() as scratch:
            server = KafkaServer(Path(scratch), {**settings, **KAFKA_SETTINGS})
            server.start()
            try:
                texts = asyncio.run(_transcripts(scenarios, server.port))
            finally:
                server.kill()
        for scenario, text in zip(scenarios, texts, strict=True):
            (DIRECTORY / f"{scenario.name}.txt").write_text(head(scenario) + text)
            if "\nstuck: " in text:
                sys.stderr.write(f"{scenario.name} {text[text.index('stuck: ') :]}")


async def _transcripts(scenarios: Sequence[Scenario], port: int) -> list[str]:
    address = ("127.0.0.1", port)
    await served(address)
    return [await transcript(scenario, address, of_kafka=True) for scenario in scenarios]


def compare_with_dray(names: Sequence[str]) -> None:
    for settings, scenarios in _by_settings(names):
        with tempfile.TemporaryDirectory() as scratch:
            broker = DrayBroker(Path(scratch), settings=settings)
            broker.start()
            try:
                for scenario in scenarios:
                    expected = expected_of_dray((DIRECTORY / f"{scenario.name}.txt").read_text())
                    got = asyncio.run(transcript(scenario, ("127.0.0.1", broker.port), of_kafka=False))
                    sys.stdout.write(difference(scenario.name, expected, got))
            finally:
                broker.kill()


def difference(name: str, expected: str, got: str) -> str:
    lines = difflib.unified_diff(
        expected.splitlines(), got.splitlines(), f"{name}, of Kafka", f"{name}, of Dray", lineterm=""
    )
    return "".join(f"{line}\n" for line in lines)


def _by_settings(names: Sequence[str]) -> list[tuple[Mapping[str, str], list[Scenario]]]:
    def key(scenario: Scenario) -> list[tuple[str, str]]:
        return sorted(settings_of(scenario).items())

    wanted = sorted((SCENARIOS[name] for name in names or SCENARIOS), key=key)
    return [(dict(settings), list(group)) for settings, group in groupby(wanted, key)]


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--kafka", *names]:
            write_from_kafka(names)
        case ["--dray", *names]:
            compare_with_dray(names)
        case _:
            sys.exit("say --kafka to write the files from Apache Kafka, or --dray to compare Dray with them")
