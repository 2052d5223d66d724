"""What a compactor serves at /metrics."""

from __future__ import annotations

import urllib.request
from dataclasses import fields

import pytest

from compactor.metrics import serving
from compactor.service import Counts
from dray.config import Address
from dray.errors import ConfigError
from tests.servers.process import free_port


def test_every_count_is_served_as_it_is_now() -> None:
    counts = Counts()
    port = free_port()
    with serving(counts, Address("127.0.0.1", port)):
        for number, each in enumerate(fields(Counts)):
            if each.type == "int":
                setattr(counts, each.name, 1_000 + number)
        counts.collected.objects = 7
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            text = answer.read().decode()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    served = {name: float(value) for name, value in (line.split(" ") for line in lines)}
    assert served["dray_compactor_records_total"] == counts.records
    assert served["dray_compactor_backlog_bytes"] == counts.backlog_bytes
    assert served["dray_compactor_waiting_for_catalog"] == counts.waiting_for_catalog
    assert served["dray_compactor_collected_objects_total"] == 7
    told = {getattr(counts, each.name) for each in fields(Counts) if each.type == "int"}
    assert told <= set(served.values())


def test_a_port_that_is_taken_is_named() -> None:
    port = free_port()
    with (
        serving(Counts(), Address("127.0.0.1", port)),
        pytest.raises(ConfigError, match=r"http.*cannot listen"),
        serving(Counts(), Address("127.0.0.1", port)),
    ):
        pass
