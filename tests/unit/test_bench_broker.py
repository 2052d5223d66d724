"""What the broker benchmark computes: wrong figures would look like right ones."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from bench.broker import (
    ClientFailed,
    Failure,
    Figures,
    cpu_seconds,
    family,
    parse_producer_performance,
    parse_stat,
    peak_mib,
    row,
)
from bench.clients import quantile

# As the tool of Kafka 4.2 prints it.
PERFORMANCE = """\
Warmup first 500000 records. Steady state results will print after the complete test summary.
222277 records sent, 218346.8 records/sec (20.82 MB/sec), 32.2 ms avg latency, 336.0 ms max latency.
In steady state.
2000000 records sent, 608457.560085 records/sec (58.03 MB/sec), 47.52 ms avg latency, 336.00 ms max latency.
1500000 steady state records sent, 818777.292576 records/sec (78.08 MB/sec), 55.10 ms avg latency.
"""


def figures(mb_per_s: float, p50_ms: float = 1, p99_ms: float = 1) -> Figures:
    return Figures(1000, mb_per_s, 2.5, 100, {"p50": p50_ms, "p99": p99_ms, "max": 9})


def test_the_rate_of_the_java_producer_is_that_behind_its_warm_up() -> None:
    assert parse_producer_performance(PERFORMANCE) == (2_000_000, 818777.292576)


def test_a_java_producer_that_printed_no_result_has_failed() -> None:
    with pytest.raises(ClientFailed):
        parse_producer_performance("0 records sent\n")


def test_a_process_is_parsed_whatever_its_name() -> None:
    """The name is in parentheses and may hold some itself, and spaces."""
    times = "7 8 1 2"  # user, system, and both of children that ended
    stat = f"12 (a) S 1 (b) R 42 12 12 0 -1 4194304 1 2 3 4 {times} 20 0 1 0 100 1000 10"
    assert parse_stat(stat) == (42, 18)


def test_children_count_with_their_parent() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert child.pid in family(os.getpid())
        assert peak_mib(os.getpid()) > peak_mib(child.pid) > 0
        assert cpu_seconds(os.getpid()) >= cpu_seconds(child.pid)
    finally:
        child.communicate(b"\n")


def test_throughput_is_compared_by_bytes() -> None:
    assert row("produce", {"dray": figures(60), "kafka": figures(80)}).endswith(" 0.75")


def test_latency_is_compared_by_both_quantiles() -> None:
    text = row("latency", {"dray": figures(1, p50_ms=6, p99_ms=10), "kafka": figures(1, p50_ms=4, p99_ms=40)})
    assert text.endswith(" 1.50, 0.25")


def test_a_failure_is_told_and_not_compared() -> None:
    first, second = row("produce", {"dray": Failure("no answer"), "kafka": figures(80)}).splitlines()
    assert "failed" in first
    assert first.endswith(" –")
    assert "dray: no answer" in second


def test_quantiles_of_few_values_are_values() -> None:
    assert [quantile([3.0, 1.0, 2.0], q) for q in (0.5, 0.99)] == [2.0, 3.0]
