"""What the broker benchmark computes: wrong figures would look like right ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from bench.broker import (
    Case,
    Cell,
    Compared,
    Figures,
    Scale,
    all_cases,
    cpu_seconds,
    family,
    parse_producer_performance,
    parse_stat,
    peak_mib,
    peaks,
    row,
    wanted,
)
from bench.clients import Result, quantile, round_trips
from bench.contention import (
    Contest,
    Outcome,
    Round,
    Stopped,
    all_contests,
    measured,
    parse_log,
    rows,
    summary,
)
from bench.running import ClientFailed, Failure

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


def test_idempotence_is_compared_within_each_round() -> None:
    """The machine was slower in the second round, which is not the fault of either."""
    cell = Compared([figures(100), figures(50), figures(100)], [figures(95), figures(50), figures(90)])
    text = row("idempotence java 100 B", {"dray": cell, "kafka": Compared([figures(80)], [figures(190)])})
    assert text.startswith("java 100 B ")
    assert text.split()[3:] == [
        *("100.0", "90.0", "0.95", "0.90–1.00", "1.00"),
        *("80.0", "190.0", "2.38", "2.38–2.38", "1.00"),
        "0.47",
    ]


def test_a_broker_that_failed_is_not_compared_with_one_that_did_not() -> None:
    cells: dict[str, Cell] = {"dray": Compared([figures(1)], [figures(1)]), "kafka": Failure("no answer")}
    assert row("idempotence java", cells).splitlines()[0].endswith(" –")


def test_peaks_are_those_of_all_rounds() -> None:
    low, high = Figures(1, 1, 1, 100, {}), Figures(1, 1, 1, 200, {})
    assert max(peaks(Compared([low], [high]))) == 200
    assert peaks(Failure("no answer")) == []


def test_the_first_word_of_a_name_chooses_one_table() -> None:
    every: list[Case | Contest] = [*all_cases(Scale(1, 1)), *all_contests()]
    for first in ("produce", "idempotence", "contention"):
        assert {case.name.split()[0] for case in every if wanted(case, [first], quick=False)} == {first}
        assert any(wanted(case, [first], quick=True) for case in every)


def test_round_trips_of_windows_without_requests_do_not_count() -> None:
    """librdkafka tells of every broker it has heard of, also of those it never asked."""
    windows = [(3, 1000, 9000, 9500), (0, 0, 0, 0), (5, 2000, 4000, 5000), (1, 6000, 6000, 6000)]
    told = [
        json.dumps({"brokers": {"b": {"rtt": {"cnt": cnt, "p50": p50, "p99": p99, "max": most}}}})
        for cnt, p50, p99, most in windows
    ]
    assert round_trips(told) == {"p50": 2.0, "p99": 9.0, "max": 9.5}
    assert round_trips(told[1:2]) == {}


def log_line(message: str, level: str = "info", **more: int) -> str:
    return json.dumps({"level": level, "message": message, **more}) + "\n"


def test_counts_are_those_of_the_last_stop_and_warnings_of_all() -> None:
    first = log_line("broker stopped", appends=1, start_conflicts=1, unresolved=1)
    last = log_line("broker stopped", appends=30, start_conflicts=20, unresolved=10)
    text = f"Traceback\n{first}{log_line('slow', 'warning') * 2}{log_line('ready')}{last}"
    assert parse_log(text) == Stopped(30, 20, 10, {"slow": 2})


def test_a_broker_that_was_killed_has_no_counts() -> None:
    with pytest.raises(ClientFailed):
        parse_log(log_line("ready"))


def test_the_producer_that_starves_is_seen() -> None:
    second = 1_000_000_000
    sent = [
        Result(30, 30_000_000, 0, second, {"p50": 5, "p99": 50, "max": 60}),
        Result(10, 10_000_000, second, 2 * second, {"p50": 7, "p99": 40, "max": 60}),
    ]
    seen = measured(sent, ())
    assert seen.mb_per_s == 20
    assert seen.slower == pytest.approx(1 / 3)
    assert seen.latencies_ms == {"p50": 7, "p99": 50}


def test_rounds_add_up_counts_and_take_the_median_of_rates() -> None:
    rounds = [
        Round(10, 0.5, {"p50": 1, "p99": 30}, (Stopped(1, 2, 3, {"slow": 1}), Stopped(10, 20, 30, {}))),
        Round(30, 0.9, {"p50": 2, "p99": 20}, (Stopped(100, 200, 300, {"slow": 4}),)),
        Round(20, 0.7, {"p50": 9, "p99": 10}, ()),
    ]
    assert summary(rounds) == Outcome(20, 0.7, 111, 222, 333, {"p50": 2, "p99": 30}, {"slow": 5})


def test_the_same_partitions_are_compared_with_separate_ones() -> None:
    separate = Outcome(80, 1, 100, 0, 0, {}, {"slow": 2})
    same = Outcome(60, 1, 1100, 50, 0, {"p50": 1, "p99": 2}, {})
    first, warning, second = rows("etcd", {"separate": separate, "same": same}).splitlines()
    assert first.split() == ["etcd", "separate", "80.0", "–", "1.00", "100", "0", "0", "–", "–"]
    assert warning.split() == ["2", "x", "slow"]
    assert second.split() == ["etcd", "same", "60.0", "0.75", "1.00", "1,100", "50", "0", "1.0", "2.0"]


def test_a_way_that_failed_leaves_the_other_without_a_ratio() -> None:
    told = rows("etcd", {"separate": Failure("lost"), "same": Outcome(60, 1, 1, 0, 0, {}, {})}).splitlines()
    assert "failed" in told[0]
    assert told[1].strip() == "lost"
    assert told[2].split()[3] == "–"
