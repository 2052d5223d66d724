"""`drayd admin fsck`: nothing to say of a sound cluster, and the right thing of one that somebody broke."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from compactor.command import opened
from compactor.spark import LocalRunner
from dray.config import Given, load_settings
from tests.integration.rdkafka import Sender, create_topic
from tests.servers.dray import DrayBroker

TOPIC = "orders"


@dataclass(frozen=True)
class Found:
    code: int
    stdout: str
    stderr: str

    @property
    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads(self.stdout)
        return report

    @property
    def problems(self) -> list[str]:
        return [f"{each['where']}: {each['what']}" for each in self.report["problems"]]


def fsck(data: Path, *arguments: str) -> Found:
    argv = [sys.executable, "-m", "dray", "admin", "fsck", f"--data={data}", *arguments]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    return Found(done.returncode, done.stdout, done.stderr)


async def compact(data: Path) -> None:
    settings = load_settings(arguments=[Given("data", str(data), "the test")], environ={})
    async with opened(settings, runner=LocalRunner()) as compactor:
        while await compactor.round(everything=True):
            pass
        assert compactor.counts.failures == 0


@pytest.fixture
def data(tmp_path: Path) -> Iterator[Path]:
    """A cluster with records in a data file and, behind them, in a WAL object."""
    broker = DrayBroker(tmp_path)
    broker.start()
    yield tmp_path
    broker.kill()


def write(data: Path, records: int) -> None:
    address = f"127.0.0.1:{_port(data)}"
    sender = Sender(address)
    for number in range(records):
        sender.send(TOPIC, b"value %d" % number)
    sender.flush()
    assert not sender.failed


def _port(data: Path) -> int:
    (log,) = data.glob("broker-*.log")
    return int(log.stem.rpartition("-")[2])


async def test_what_is_wrong_is_told(data: Path) -> None:
    create_topic(f"127.0.0.1:{_port(data)}", TOPIC)
    write(data, 30)
    await compact(data)
    write(data, 20)

    sound = fsck(data, "--json")
    assert (sound.code, sound.problems, sound.stderr) == (0, [], "")
    assert (sound.report["partitions"], sound.report["records"], sound.report["dataFiles"]) == (1, 50, 1)
    told = fsck(data)
    assert told.code == 0
    assert "50 offsets" in told.stdout

    (file,) = (data / "objects/warehouse").rglob("*.parquet")
    stray = file.with_name("of-nobody.parquet")
    stray.write_bytes(b"1234")
    notes = fsck(data, "--json").report["notes"]
    assert {"where": "warehouse/", "what": "1 objects of 4 bytes belong to nothing"} in notes
    stray.unlink()

    kept = file.read_bytes()
    file.write_bytes(kept[:-1])
    cut = fsck(data, "--json")
    assert cut.code == 1
    assert [f"has {len(kept) - 1} bytes, not {len(kept)}" in problem for problem in cut.problems] == [True]
    file.unlink()
    gone = fsck(data)
    assert gone.code == 1
    assert "PROBLEM  orders-0: offsets 0 to 30: object warehouse/" in gone.stdout
    assert gone.stderr == "drayd: 1 problems (the first is orders-0)\n"
    file.write_bytes(kept)

    objects = list((data / "objects/wal").rglob("*.wo"))
    for path in objects:
        path.unlink()
    lost = fsck(data, "--json")
    assert lost.code == 1
    assert lost.problems
    assert all(problem.endswith(" is gone") for problem in lost.problems)


def test_a_cluster_that_is_not_there(tmp_path: Path) -> None:
    nothing = fsck(tmp_path)
    assert nothing.code == 1
    assert "there is no cluster" in nothing.stderr
    assert not (tmp_path / "metadata.db").exists()
