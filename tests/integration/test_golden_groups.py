"""Groups answer as Apache Kafka's do: `golden/groups/` has transcripts, and where Dray differs on purpose.

`golden_groups.py` has the commands, and runs the same scripts against either broker.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dray.broker import open_broker
from dray.config import Given, load_settings
from tests.integration.golden_groups import DIRECTORY, difference, expected_of_dray, settings_of, transcript
from tests.integration.group_script import SCENARIOS, served


def test_every_script_has_its_file() -> None:
    assert {path.stem for path in DIRECTORY.glob("*.txt")} == set(SCENARIOS)


@pytest.mark.parametrize("name", sorted(SCENARIOS))
async def test_answers_are_those_of_kafka(name: str, tmp_path: Path) -> None:
    scenario = SCENARIOS[name]
    given = {"data": tmp_path, "listen": "127.0.0.1:0", **settings_of(scenario)}
    settings = load_settings(None, [Given(key, str(value), "test") for key, value in given.items()], {})
    expected = expected_of_dray((DIRECTORY / f"{name}.txt").read_text())
    async with open_broker(settings) as broker:
        assert broker.address is not None
        address = (broker.address.host, broker.address.port)
        await served(address)
        got = await transcript(scenario, address, of_kafka=False)
    assert got == expected, difference(name, expected, got)
