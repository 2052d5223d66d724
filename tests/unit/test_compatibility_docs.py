"""The page of compatibility says what the tables say, and the tables leave nothing out."""

from __future__ import annotations

from pathlib import Path

from kio.index import load_request_schema

from dray.handlers.compatibility import DEVIATIONS, KAFKA, NOT_SERVED
from dray.handlers.docs import page
from dray.handlers.rejected import REJECTED
from dray.handlers.table import APIS
from tests import wire

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"


def test_the_page_is_the_tables() -> None:
    assert PAGE.read_text() == page(), "run python -m dray.handlers.docs > docs/compatibility.md"


def test_every_api_of_kafka_is_served_or_said_to_be_missing() -> None:
    assert not APIS.keys() & NOT_SERVED.keys()
    assert APIS.keys() | NOT_SERVED.keys() == KAFKA.keys()
    assert DEVIATIONS.keys() <= APIS.keys()
    assert REJECTED.keys() <= NOT_SERVED.keys()


def test_apis_have_kafka_s_names() -> None:
    for key, kafka in KAFKA.items():
        assert load_request_schema(key, max(wire.versions_of(key))).__name__ == f"{kafka.name}Request"
    assert {key: api.name for key, api in APIS.items()} == {key: KAFKA[key].name for key in APIS}


def test_versions_that_kafka_has_and_dray_has_not_are_explained() -> None:
    for key, api in APIS.items():
        served, kafka = (api.min_version, api.max_version), KAFKA[key][1:]
        assert kafka[0] <= served[0] <= served[1] <= kafka[1], f"{api.name}: Kafka has no such version"
        assert served == kafka or any("ersion" in note for note in DEVIATIONS[key]), api.name


def test_the_page_tells_versions_and_deviations() -> None:
    lines = page().splitlines()
    assert "| 1 | Fetch | 4–17 | 4–18 | [7 notes](#fetch-1) |" in lines
    assert "| 17 | SaslHandshake | 0–1 | no authentication | is cut off |" in lines
    assert "- Version 18 is for replicas of KRaft and not served." in lines
