"""Dray and Apache Kafka side by side: the same clients, the same settings, one run.

    python -m bench.broker
    python -m bench.broker --quick --only latency --targets dray
    python -m bench.broker --only idempotence --rounds 7
    python -m bench.broker --only contention

Both brokers run from the start, on loopback, with data in one temporary directory (several GB), and take
turns: each case runs on one and then on the other, and who begins changes from case to case. Every client is
a process of its own. Kafka is a single node with its defaults and the heap of `KafkaServer`: it answers from
the page cache and never syncs. Dray is embedded: SQLite and files.

- `produce` sends for `--seconds` through librdkafka, `java` sends `--records` through Kafka's own
  ProducerPerformance, whose first quarter only warms it up. acks=all, no idempotence, no compression.
  `default` leaves the batches to the client, `large` is what a client far from its broker would set (LARGE
  below).
- `latency` is from when a record was due to when the consumer has it: one producer at a fixed rate, one
  consumer, librdkafka's defaults, so up to 5 ms of linger are part of it. The first second is left out.
- `tail` is one producer and three consumers that follow it; MB/s is what the three got together.
- `catch-up` reads a topic of `--records` from the beginning by `assign`. ConsumerPerformance needs a group,
  so the Java reader is ours (tests/servers/kafka/Clients.java), with Kafka's consumer in a JVM just started.
- `idempotence` sends as `produce` and `java` do, without and with idempotence in turn, `--rounds` times on
  the same broker. Both have 5 requests in flight at most: an idempotent librdkafka allows no more, a plain
  one has no bound by default. `ratio` is the median of idempotent over plain of each round, beside it the
  range; `cpu` is the same of the broker's CPU for each byte.
- `contention` has no Kafka beside it: see `bench.contention`.

CPU is that of the broker with its children for each GB (10⁹ bytes) that producers sent or consumers got;
MiB is the peak of its resident memory during the case. Nothing here asserts: machines differ, ratios travel
better. To see where the time goes, `py-spy record -d 10 -o profile.svg --pid PID` while a case runs.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import math
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import confluent_kafka
from confluent_kafka import KafkaException

from bench.clients import Consume, Produce, Result
from bench.contention import Contest, Outcome, all_contests, run_contests
from bench.running import (
    CLIENT_TIMEOUT_S,
    Broker,
    ClientFailed,
    Failure,
    client,
    run,
    run_client,
    running,
    topic_on,
)
from tests.servers.kafka import (
    KafkaServer,
    answers_metadata,
    ensure_client_classes,
    java_command,
    kafka_version,
)
from tests.servers.process import ServerProcess, free_port

MIB = 2**20
SMALL, BIG = 100, 1024  # bytes of a record
TAIL_CONSUMERS = 3
LARGE = {
    "librdkafka": {"linger.ms": 50, "batch.num.messages": 100_000, "queue.buffering.max.messages": 500_000},
    "java": {
        "linger.ms": 50,
        "batch.size": 1_000_000,
        "max.request.size": 8 * MIB,
        "buffer.memory": 128 * MIB,
    },
}
PLAIN = {"enable.idempotence": "false", "max.in.flight.requests.per.connection": 5}
IDEMPOTENT = {**PLAIN, "enable.idempotence": "true"}
# By default librdkafka stops fetching for a second when it has 100,000 records: that would measure the pause.
READ_ON = {"queued.min.messages": 1_000_000, "fetch.queue.backoff.ms": 10}


class DrayServer:
    """`drayd broker` as a newcomer starts it, and what `arguments` add."""

    def __init__(self, directory: Path, arguments: Sequence[str] = ()) -> None:
        directory.mkdir(parents=True)
        self._objects = directory / "data" / "objects"
        self._port = free_port()
        argv = [sys.executable, "-m", "dray", "broker", f"--listen={self.address}"]
        argv += [f"--data={directory / 'data'}", *arguments]
        self._process = ServerProcess(argv, directory / "dray.log", lambda: answers_metadata(self._port))

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self) -> None:
        self._process.start()

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        self._process.stop(how)

    def signal(self, how: signal.Signals) -> None:
        self._process.signal(how)

    def remove_objects(self) -> None:
        """Of topics that are all deleted. Dray does not collect them yet, Kafka does; the disk is finite."""
        for path in self._objects.rglob("*"):
            if path.is_file():
                path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Scale:
    seconds: float
    records: int  # of 1 KiB

    def records_of(self, size: int) -> int:
        return self.records * (2 if size == SMALL else 1)


@dataclass(frozen=True)
class Measured:
    """What the clients saw of one broker in one case."""

    records_per_s: float
    bytes_per_s: float
    moved_bytes: int  # in all, for the CPU they took; the rates may leave a warm-up out
    latencies_ms: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Figures:
    """One cell of the table: what the clients saw, and what it took the broker."""

    records_per_s: float
    mb_per_s: float
    cpu_s_per_gb: float
    peak_mib: float
    latencies_ms: dict[str, float]


@dataclass(frozen=True)
class Compared:
    """One cell of the table of idempotence: a figure for each round, those of one round side by side."""

    plain: list[Figures]
    idempotent: list[Figures]

    @property
    def ratios(self) -> list[float]:
        return [i.mb_per_s / p.mb_per_s for p, i in zip(self.plain, self.idempotent, strict=True)]

    @property
    def cpu_ratio(self) -> float:
        rounds = zip(self.plain, self.idempotent, strict=True)
        return median(i.cpu_s_per_gb / p.cpu_s_per_gb if p.cpu_s_per_gb else math.nan for p, i in rounds)


Cell = Figures | Compared | Failure


@dataclass(frozen=True)
class Case:
    """`prepare` fills the topic before the clock runs, `measure` is the case."""

    name: str
    partitions: int
    measure: Callable[[Broker, str], Measured]
    prepare: Callable[[Broker, str], object] | None = None
    idempotent: Callable[[Broker, str], Measured] | None = None  # to be compared with `measure`
    quick: bool = False  # part of a quick run


# Cases


def all_cases(scale: Scale) -> list[Case]:
    return [
        *produce_cases(scale),
        *latency_cases(scale),
        tail_case(scale),
        *catch_up_cases(scale),
        *idempotence_cases(scale),
    ]


@dataclass(frozen=True)
class Load:
    """What a producer sends."""

    size: int
    partitions: int
    large: bool

    def __str__(self) -> str:
        return f"{self.size} B, {self.partitions} part., {'large' if self.large else 'default'}"


LOADS = [
    Load(size, partitions, large) for size in (SMALL, BIG) for partitions in (1, 6) for large in (False, True)
]
QUICK_LOADS = (Load(SMALL, 1, False), Load(BIG, 6, True))


def produce_cases(scale: Scale) -> Iterator[Case]:
    for load in LOADS:
        send = produce_librdkafka(scale, load, {"enable.idempotence": "false"})
        yield Case(f"produce {load}", load.partitions, send, quick=load in QUICK_LOADS)
    for load in LOADS:
        send = produce_java(scale, load, {"enable.idempotence": "false"})
        yield Case(f"java {load}", load.partitions, send, quick=load in QUICK_LOADS)


def idempotence_cases(scale: Scale) -> Iterator[Case]:
    """Shorter than those of `produce_cases`, since there are many rounds."""
    shorter = replace(scale, seconds=scale.seconds / 2)
    for load in LOADS:
        yield Case(
            f"{IDEMPOTENCE}librdkafka {load}",
            load.partitions,
            produce_librdkafka(shorter, load, PLAIN, primed=True),
            idempotent=produce_librdkafka(shorter, load, IDEMPOTENT, primed=True),
            quick=load in QUICK_LOADS,
        )
    # With default batches Java takes long for few records.
    few = replace(scale, records=scale.records // 4)
    for load in LOADS:
        amount = scale if load.large else few
        yield Case(
            f"{IDEMPOTENCE}java {load}",
            load.partitions,
            produce_java(amount, load, PLAIN),
            idempotent=produce_java(amount, load, IDEMPOTENT),
            quick=load in QUICK_LOADS,
        )


def produce_librdkafka(
    scale: Scale, load: Load, properties: Mapping[str, object], primed: bool = False
) -> Callable[[Broker, str], Measured]:
    given = {**(LARGE["librdkafka"] if load.large else {}), **properties}

    def measure(broker: Broker, topic: str) -> Measured:
        task = Produce(
            broker.address, topic, load.size, seconds=scale.seconds, primed=primed, properties=given
        )
        return seen(run_client(task))

    return measure


def produce_java(
    scale: Scale, load: Load, properties: Mapping[str, object]
) -> Callable[[Broker, str], Measured]:
    given = {"acks": "all", **(LARGE["java"] if load.large else {}), **properties}
    size, records = load.size, scale.records_of(load.size)

    def measure(broker: Broker, topic: str) -> Measured:
        arguments = ["--topic", topic, "--num-records", str(records), "--record-size", str(size)]
        arguments += ["--throughput", "-1", "--bootstrap-server", broker.address]
        arguments += ["--warmup-records", str(records // 4), "--command-property"]
        arguments += [f"{name}={value}" for name, value in given.items()]
        output = run(java_command("org.apache.kafka.tools.ProducerPerformance", arguments, ["-Xmx512m"]))
        sent, per_second = parse_producer_performance(output)
        if sent != records:
            raise ClientFailed(f"{records - sent} of {records} records were not taken")
        return Measured(per_second, per_second * size, records * size)

    return measure


def latency_cases(scale: Scale) -> Iterator[Case]:
    for rate in (1_000, 20_000):
        records = int(rate * max(3.0, scale.seconds * 1.5))
        measure = follow(records, SMALL, partitions=1, consumers=1, rate=rate)
        yield Case(f"latency at {rate:,} records/s", 1, measure, quick=True)


def tail_case(scale: Scale) -> Case:
    records = scale.records // 2
    measure = follow(records, BIG, partitions=6, consumers=TAIL_CONSUMERS)
    return Case(f"tail {BIG} B, 6 part., {TAIL_CONSUMERS} consumers", 6, measure, quick=True)


def follow(
    records: int, size: int, partitions: int, consumers: int, rate: float | None = None
) -> Callable[[Broker, str], Measured]:
    """Consumers that wait, then a producer; with `rate` the records say when they were due."""

    def measure(broker: Broker, topic: str) -> Measured:
        reading = Consume(
            broker.address,
            topic,
            partitions,
            records,
            stamped=rate is not None,
            properties={} if rate else READ_ON,
        )
        with ExitStack() as stack:
            readers = [stack.enter_context(client(reading)) for _ in range(consumers)]
            for reader in readers:
                reader.wait_ready()
            sent = run_client(Produce(broker.address, topic, size, records=records, rate=rate))
            got = [reader.result() for reader in readers]
        seconds = (max(one.ended_ns for one in got) - sent.started_ns) / 1e9
        return rates(sum(one.records for one in got), sum(one.bytes for one in got), seconds, got[0])

    return measure


def catch_up_cases(scale: Scale) -> Iterator[Case]:
    def fill(broker: Broker, topic: str) -> None:
        properties = LARGE["librdkafka"]
        run_client(Produce(broker.address, topic, BIG, records=scale.records, properties=properties))

    for partitions in (1, 6):
        for reader, read in (("librdkafka", catch_up_librdkafka), ("java", catch_up_java)):
            quick = partitions == 6
            name = f"catch-up {BIG} B, {partitions} part., {reader}"
            yield Case(name, partitions, read(scale, partitions), prepare=fill, quick=quick)


def catch_up_librdkafka(scale: Scale, partitions: int) -> Callable[[Broker, str], Measured]:
    def measure(broker: Broker, topic: str) -> Measured:
        return seen(run_client(Consume(broker.address, topic, partitions, scale.records, properties=READ_ON)))

    return measure


def catch_up_java(scale: Scale, partitions: int) -> Callable[[Broker, str], Measured]:
    def measure(broker: Broker, topic: str) -> Measured:
        arguments = ["drain", broker.address, str(CLIENT_TIMEOUT_S * 1000), "max.poll.records=10000"]
        wanted = "".join(f"{topic}\t{partition}\tearliest\tend\n" for partition in range(partitions))
        output = run(java_command("Clients", arguments, ["-Xmx512m"], ensure_client_classes()), wanted)
        read = json.loads(output.splitlines()[-1])
        if read.get("records") != scale.records:
            raise ClientFailed(f"read {output[-300:]}")
        return rates(read["records"], read["bytes"], read["seconds"])

    return measure


def parse_producer_performance(output: str) -> tuple[int, float]:
    """Records in all, and records per second behind the warm-up. Its MB are MiB, so they are not used."""
    sent = re.findall(r"^(\d+) records sent, ", output, re.MULTILINE)  # lines on the way, then the sum
    steady = re.findall(r"^\d+ steady state records sent, ([\d.]+) records/sec", output, re.MULTILINE)
    if not sent or not steady:
        raise ClientFailed(f"ProducerPerformance said: {output[-300:]}")
    return int(sent[-1]), float(steady[-1])


def rates(records: int, size: int, seconds: float, timed: Result | None = None) -> Measured:
    return Measured(records / seconds, size / seconds, size, timed.latencies_ms if timed else {})


def seen(result: Result) -> Measured:
    return rates(result.records, result.bytes, result.seconds, result)


# What a broker takes


def family(pid: int) -> list[int]:
    """The process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # ended meanwhile
            children.setdefault(parse_stat(stat.read_text())[0], []).append(int(stat.parent.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def cpu_seconds(pid: int) -> float:
    ticks = sum(parse_stat(Path(f"/proc/{one}/stat").read_text())[1] for one in family(pid))
    return ticks / os.sysconf("SC_CLK_TCK")


def parse_stat(stat: str) -> tuple[int, int]:
    """Parent, and clock ticks with those of children that ended. The name before may hold anything."""
    fields = stat.rpartition(")")[2].split()
    return int(fields[1]), sum(int(ticks) for ticks in fields[11:15])


def peak_mib(pid: int) -> float:
    total = 0
    for one in family(pid):
        match = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{one}/status").read_text())
        total += int(match[1]) if match else 0
    return total / 1024


def reset_peak(pid: int) -> None:
    """Where the kernel refuses, a peak is that of the whole run so far."""
    for one in family(pid):
        with contextlib.suppress(OSError):
            Path(f"/proc/{one}/clear_refs").write_text("5")


# The run


def measure(case: Case, broker: Broker, topic: str, rounds: int) -> Cell:
    try:
        if case.idempotent is None:
            return measure_once(case, broker, topic)
        plain, idempotent = [], []
        other = replace(case, measure=case.idempotent)
        for number in range(rounds):
            plain.append(measure_once(case, broker, f"{topic}-plain-{number}"))
            idempotent.append(measure_once(other, broker, f"{topic}-idempotent-{number}"))
        return Compared(plain, idempotent)
    except (ClientFailed, KafkaException) as error:
        return Failure(str(error))


def measure_once(case: Case, broker: Broker, topic: str) -> Figures:
    with topic_on(broker, topic, case.partitions):
        if case.prepare:
            case.prepare(broker, topic)
        os.sync()  # what the case before left to write is not this one's
        reset_peak(broker.pid)
        cpu_before = cpu_seconds(broker.pid)
        measured = case.measure(broker, topic)
        cpu = cpu_seconds(broker.pid) - cpu_before
        figures = Figures(
            measured.records_per_s,
            measured.bytes_per_s / 1e6,
            cpu / (measured.moved_bytes / 1e9),
            peak_mib(broker.pid),
            measured.latencies_ms,
        )
    if isinstance(broker, DrayServer):
        broker.remove_objects()
    return figures


def warm_up(broker: Broker, seconds: float) -> None:
    """So that no case pays for what a broker does once: a JVM compiles, caches fill."""
    with topic_on(broker, "warm-up", 1) as topic:
        sent = run_client(Produce(broker.address, topic, BIG, seconds=seconds))
        run_client(Consume(broker.address, topic, 1, sent.records, properties=READ_ON))


def run_cases(
    cases: Sequence[Case], brokers: Mapping[str, Broker], rounds: int
) -> dict[str, dict[str, Cell]]:
    results: dict[str, dict[str, Cell]] = {}
    heading = ""
    for number, case in enumerate(cases):
        order = list(brokers) if number % 2 == 0 else list(reversed(list(brokers)))
        cells = {name: measure(case, brokers[name], f"bench-{number}", rounds) for name in order}
        results[case.name] = {name: cells[name] for name in brokers}
        columns = throughput_heading
        if is_latency(case.name):
            columns = latency_heading
        elif case.idempotent is not None:
            columns = idempotence_heading
        if (wanted := columns(list(brokers))) != heading:
            heading = wanted
            print(f"\n{heading}", flush=True)
        print(row(case.name, results[case.name]), flush=True)
    return results


# Printing

WIDTH = 40
IDEMPOTENCE = "idempotence "  # before every name in its table


def is_latency(name: str) -> bool:
    return name.startswith("latency")


def throughput_heading(targets: Sequence[str]) -> str:
    each = [f" {name + ' rec/s':>13} {'MB/s':>7} {'cpu/GB':>7} {'MiB':>5}" for name in targets]
    return f"{'':<{WIDTH}}{''.join(each)} {'/'.join(targets):>12}"


def latency_heading(targets: Sequence[str]) -> str:
    each = [f" {name + ' p50 ms':>13} {'p99':>7} {'max':>7} {'MiB':>5}" for name in targets]
    return f"{'':<{WIDTH}}{''.join(each)} {'p50, p99':>12}"


def idempotence_heading(targets: Sequence[str]) -> str:
    each = [
        f" {name + ' plain':>13} {'idem.':>7} {'ratio':>6} {'of rounds':>10} {'cpu':>5}" for name in targets
    ]
    return f"{IDEMPOTENCE + 'MB/s':<{WIDTH}}{''.join(each)} {'/'.join(targets):>12}"


def row(name: str, cells: Mapping[str, Cell]) -> str:
    text = f"{name.removeprefix(IDEMPOTENCE):<{WIDTH}}"
    for cell in cells.values():
        if isinstance(cell, Failure):
            text += f" {'failed':>35}"
        elif isinstance(cell, Compared):
            ratios = cell.ratios
            text += f" {mb_per_s(cell.plain):>13.1f} {mb_per_s(cell.idempotent):>7.1f} {median(ratios):>6.2f}"
            text += f" {f'{min(ratios):.2f}–{max(ratios):.2f}':>10} {cell.cpu_ratio:>5.2f}"
        elif is_latency(name):
            ms = cell.latencies_ms
            text += f" {ms['p50']:>13.1f} {ms['p99']:>7.1f} {ms['max']:>7.1f} {cell.peak_mib:>5.0f}"
        else:
            text += f" {cell.records_per_s:>13,.0f} {cell.mb_per_s:>7.1f}"
            text += f" {cell.cpu_s_per_gb:>7.2f} {cell.peak_mib:>5.0f}"
    text += f" {ratio(name, list(cells.values())):>12}"
    failures = [
        f"    {target}: {cell.message}" for target, cell in cells.items() if isinstance(cell, Failure)
    ]
    return "\n".join([text, *failures])


def ratio(name: str, cells: Sequence[Cell]) -> str:
    if len(cells) != 2 or any(isinstance(cell, Failure) for cell in cells):
        return "–"
    first, second = cells
    if isinstance(first, Compared) and isinstance(second, Compared):
        return f"{mb_per_s(first.idempotent) / mb_per_s(second.idempotent):.2f}"
    assert isinstance(first, Figures)
    assert isinstance(second, Figures)
    if is_latency(name):
        return ", ".join(f"{first.latencies_ms[q] / second.latencies_ms[q]:.2f}" for q in ("p50", "p99"))
    return f"{first.mb_per_s / second.mb_per_s:.2f}"


def mb_per_s(rounds: Sequence[Figures]) -> float:
    return median(one.mb_per_s for one in rounds)


def peaks(cell: Cell) -> list[float]:
    if isinstance(cell, Failure):
        return []
    figures = [cell] if isinstance(cell, Figures) else [*cell.plain, *cell.idempotent]
    return [one.peak_mib for one in figures]


def describe_machine() -> dict[str, str]:
    match = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    java = subprocess.run(["java", "-version"], capture_output=True, text=True).stderr.splitlines()[0]
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="minutes"),
        "machine": f"{os.cpu_count()} x {match[1] if match else platform.machine()}, {memory:.0f} GiB, "
        f"{platform.system()} {platform.release()}",
        "load before": f"{os.getloadavg()[0]:.1f}",
        "versions": f"dray {metadata.version('dray')}, Kafka {kafka_version()}, {java}, "
        f"Python {platform.python_version()}, librdkafka {confluent_kafka.libversion()[0]}",
    }


def main() -> None:
    options = parse_arguments()
    quick = options.quick
    scale = Scale(
        options.seconds or (1.5 if quick else 5.0), options.records or (100_000 if quick else 400_000)
    )
    rounds = options.rounds or (1 if quick else 5)
    cases = [case for case in all_cases(scale) if wanted(case, options.only, quick)]
    contests = [
        contest
        for contest in all_contests()
        if wanted(contest, options.only, quick) and "dray" in options.targets
    ]
    if not cases and not contests:
        raise SystemExit("no case has that name")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # or nobody would stop the brokers
    header: dict[str, Any] = describe_machine()
    for name, value in header.items():
        print(f"{name}: {value}", flush=True)
    results: dict[str, Mapping[str, Cell | Outcome]] = {}
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="dray-bench-") as scratch:
        if cases:
            results |= run_side_by_side(cases, options, rounds, Path(scratch))
        if contests:
            results |= run_contests(contests, Path(scratch), scale.seconds, rounds)
    print(f"\n{len(results)} cases in {time.monotonic() - started:.0f} s")
    if options.json:
        told = {name: {t: asdict(cell) for t, cell in cells.items()} for name, cells in results.items()}
        options.json.write_text(json.dumps({**header, "rounds": rounds, "cases": told}, indent=2) + "\n")
    if any(isinstance(cell, Failure) for cells in results.values() for cell in cells.values()):
        raise SystemExit(1)


def run_side_by_side(
    cases: Sequence[Case], options: argparse.Namespace, rounds: int, scratch: Path
) -> dict[str, dict[str, Cell]]:
    with ExitStack() as stack:
        brokers: dict[str, Broker] = {}
        for number, name in enumerate(options.targets):
            home = scratch / f"{number}-{name}"
            broker: Broker
            if name == "dray":
                broker = DrayServer(home, shlex.split(options.dray_arguments))
            else:
                broker = KafkaServer(home, {"log.segment.delete.delay.ms": "1000"})
            # The same target may be named twice, to see what differs by chance.
            brokers[name if name not in brokers else f"{name}-{number}"] = stack.enter_context(
                running(broker)
            )
        print("pids:", ", ".join(f"{name} {broker.pid}" for name, broker in brokers.items()), flush=True)
        for broker in brokers.values():
            warm_up(broker, 3 if options.quick else 6)
        results = run_cases(cases, brokers, rounds)
    print()
    for name in brokers:
        peak = max((mib for cells in results.values() for mib in peaks(cells[name])), default=0)
        print(f"{name}: peak memory {peak:.0f} MiB")
    return results


def wanted(case: Case | Contest, only: Sequence[str], quick: bool) -> bool:
    return (case.quick or not quick) and (not only or any(part in case.name for part in only))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="cases that have this in their name"
    )
    parser.add_argument("--quick", action="store_true", help="fewer and shorter cases, five minutes in all")
    parser.add_argument("--targets", type=targets, default=["dray", "kafka"], help="default dray,kafka")
    parser.add_argument("--seconds", type=float, help="of each case that is bounded by time (default 5)")
    parser.add_argument(
        "--records",
        type=int,
        help="of 1 KiB in the other cases (default 400,000); of 100 B twice as many",
    )
    parser.add_argument(
        "--rounds", type=int, help="of cases that compare in turns (default 5, or 1 if quick)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    parser.add_argument("--directory", type=Path, help="where the brokers keep their data")
    parser.add_argument(
        "--dray-arguments", default="", metavar="ARGS", help="more for `drayd broker`, not in contention"
    )
    return parser.parse_args()


def targets(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - {"dray", "kafka"}:
        raise argparse.ArgumentTypeError(f"no target {', '.join(sorted(unknown))}")
    return names


if __name__ == "__main__":
    main()
