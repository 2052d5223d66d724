"""Two brokers of one Dray cluster that write the same partitions at once, and what that costs.

    python -m bench.broker --only contention
    python -m bench.broker --only contention --quick --rounds 3

Two idempotent librdkafka producers send for `--seconds`, each to the broker of its own zone: `separate` gives
each its own partitions, `same` gives both the same ones. They take turns, `--rounds` times, every time with
a new cluster and new brokers, since a broker tells what it counted when it stops. Objects are files whatever
the metadata store. etcd and Oxia are those of the tests; the stand-in for Oxia says nothing of Oxia's speed.

- `MB/s` is of both producers together, `slower` the rate of the slower one over that of the faster: near
  zero, one starves the other. Both are medians of the rounds.
- `appends` were sent to the store by both brokers. `anew` are those it refused because another came before,
  so that they were made anew; `unres.` the entries it let in all the same, so that they had to be resolved.
  These are sums of the rounds.
- `p50` and `p99` are of requests, as librdkafka tells them: the median of the rounds, and the worst.

Then all that was acknowledged is read back through each broker, to the ends of the partitions; any other
number of records fails the case. So does a broker that nobody wrote to. Warnings in the logs are told below
the row.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from confluent_kafka import KafkaException

from bench.clients import Consume, Produce, Result
from bench.running import ClientFailed, Failure, client, run_client, running, topic_on
from tests.servers.dray import DrayBroker
from tests.servers.etcd import EtcdServer
from tests.servers.oxia import start_oxia

STORES = ("sqlite", "etcd", "oxia")
ZONES = ("a", "b")
RECORD_BYTES = 1024
TOPIC = "contention"
# Warnings told of one row; they tend to repeat.
MAX_WARNINGS = 5

Url = Callable[[Path], str]  # of metadata that nobody has used yet, for a cluster in this directory


@dataclass(frozen=True)
class Contest:
    store: str
    partitions: int
    quick: bool

    @property
    def name(self) -> str:
        return f"contention {self.store}, {self.partitions} part."


@dataclass(frozen=True)
class Stopped:
    """What a broker's log says once it stopped."""

    appends: int
    start_conflicts: int
    unresolved: int
    warnings: dict[str, int]


@dataclass(frozen=True)
class Round:
    mb_per_s: float
    slower: float
    latencies_ms: dict[str, float]
    brokers: tuple[Stopped, ...]


@dataclass(frozen=True)
class Outcome:
    """One row: all rounds of one way to write."""

    mb_per_s: float
    slower: float
    appends: int
    start_conflicts: int
    unresolved: int
    latencies_ms: dict[str, float]
    warnings: dict[str, int]


def all_contests() -> list[Contest]:
    return [Contest(store, partitions, partitions == 1) for store in STORES for partitions in (1, 6)]


def run_contests(
    contests: Sequence[Contest], scratch: Path, seconds: float, rounds: int
) -> dict[str, dict[str, Outcome | Failure]]:
    print(f"\n{heading()}", flush=True)
    results: dict[str, dict[str, Outcome | Failure]] = {}
    for number, contest in enumerate(contests):
        with store_of(contest.store, scratch / f"{contest.store}-{number}") as (kind, url):
            results[contest.name] = run_contest(contest, url, scratch / f"contest-{number}", seconds, rounds)
        print(rows(f"{kind}, {contest.partitions} part.", results[contest.name]), flush=True)
    return results


@contextmanager
def store_of(name: str, directory: Path) -> Iterator[tuple[str, Url]]:
    """What the table calls it, and where."""
    if name == "sqlite":
        yield name, lambda cluster: f"sqlite:///{cluster / 'metadata.db'}"
    elif name == "etcd":
        server = EtcdServer(directory)
        server.start()
        try:
            yield name, lambda _: f"etcd://{server.address}/{secrets.token_hex(6)}"
        finally:
            server.stop()
    else:
        with start_oxia(directory) as oxia:
            url = f"oxia://{oxia.address}/default?prefix="
            yield f"{name} ({oxia.kind})", lambda _: f"{url}{secrets.token_hex(6)}"


def run_contest(
    contest: Contest, url: Url, scratch: Path, seconds: float, rounds: int
) -> dict[str, Outcome | Failure]:
    seen: dict[str, list[Round]] = {"separate": [], "same": []}
    failures: dict[str, Failure] = {}
    for number in range(rounds):
        for how in seen:
            if how in failures:
                continue
            directory = scratch / f"{number}-{how}"
            try:
                seen[how].append(run_round(contest.partitions, how == "same", url, directory, seconds))
            except (ClientFailed, KafkaException) as error:
                failures[how] = Failure(str(error))
            shutil.rmtree(directory, ignore_errors=True)
    return {how: failures.get(how) or summary(seen[how]) for how in seen}


def run_round(partitions: int, same: bool, url: Url, directory: Path, seconds: float) -> Round:
    metadata, objects = url(directory), f"file://{directory / 'objects'}"
    brokers = [
        DrayBroker(directory, metadata=metadata, objects=objects, zone=zone, settings={"log.format": "json"})
        for zone in ZONES
    ]
    count = partitions if same else partitions * len(brokers)
    with ExitStack() as stack:
        for broker in brokers:
            stack.enter_context(running(broker))
        stack.enter_context(topic_on(brokers[0], TOPIC, count))
        sent = produce_at_once(brokers, partitions, same, seconds)
        acknowledged = sum(one.records + one.primed for one in sent)
        for broker, zone in zip(brokers, ZONES, strict=True):
            reading = Consume(
                broker.address,
                TOPIC,
                count,
                acknowledged,
                to_end=True,
                properties={"client.id": f"zone_id={zone}"},
            )
            if (read := run_client(reading).records) != acknowledged:
                raise ClientFailed(f"{acknowledged} records acknowledged, {read} read in zone {zone}")
    stopped = tuple(parse_log(broker.log.read_text(errors="replace")) for broker in brokers)
    if not all(one.appends for one in stopped):
        raise ClientFailed("a broker got nothing to write")
    return measured(sent, stopped)


def produce_at_once(
    brokers: Sequence[DrayBroker], partitions: int, same: bool, seconds: float
) -> list[Result]:
    with ExitStack() as stack:
        producers = []
        for number, (broker, zone) in enumerate(zip(brokers, ZONES, strict=True)):
            first = 0 if same else number * partitions
            task = Produce(
                broker.address,
                TOPIC,
                RECORD_BYTES,
                seconds=seconds,
                partitions=list(range(first, first + partitions)),
                timed=True,
                primed=True,
                properties={"enable.idempotence": True, "client.id": f"zone_id={zone}"},
            )
            producers.append(stack.enter_context(client(task)))
        return [producer.result() for producer in producers]


def measured(sent: Sequence[Result], stopped: tuple[Stopped, ...]) -> Round:
    seconds = (max(one.ended_ns for one in sent) - min(one.started_ns for one in sent)) / 1e9
    each = sorted(one.bytes / one.seconds for one in sent)
    timed = [one.latencies_ms for one in sent if one.latencies_ms]
    latencies = {q: max(one[q] for one in timed) for q in ("p50", "p99")} if timed else {}
    return Round(sum(one.bytes for one in sent) / seconds / 1e6, each[0] / each[-1], latencies, stopped)


def parse_log(text: str) -> Stopped:
    """The counts in the last line, and the warnings; other programs write into logs, too."""
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    stopped = [line for line in lines if line["message"] == "broker stopped"]
    if not stopped:
        raise ClientFailed(f"a broker did not stop by itself: {text[-300:]}")
    warnings = Counter(line["message"] for line in lines if line["level"] in ("warning", "error", "critical"))
    last = stopped[-1]
    return Stopped(last["appends"], last["start_conflicts"], last["unresolved"], dict(warnings))


def summary(rounds: Sequence[Round]) -> Outcome:
    brokers = [broker for one in rounds for broker in one.brokers]
    timed = [one.latencies_ms for one in rounds if one.latencies_ms]
    latencies = {}
    if timed:
        latencies = {"p50": median(one["p50"] for one in timed), "p99": max(one["p99"] for one in timed)}
    return Outcome(
        median(one.mb_per_s for one in rounds),
        median(one.slower for one in rounds),
        sum(broker.appends for broker in brokers),
        sum(broker.start_conflicts for broker in brokers),
        sum(broker.unresolved for broker in brokers),
        latencies,
        dict(sum((Counter(broker.warnings) for broker in brokers), Counter[str]())),
    )


# Printing

WIDTH = 28


def heading() -> str:
    return (
        f"{'two brokers':<{WIDTH}} {'writing':<9} {'MB/s':>7} {'ratio':>6} {'slower':>7}"
        f" {'appends':>8} {'anew':>7} {'unres.':>7} {'p50 ms':>8} {'p99':>8}"
    )


def rows(name: str, ways: Mapping[str, Outcome | Failure]) -> str:
    """`same` is compared with `separate`."""
    lines = []
    before: Outcome | None = None
    for how, outcome in ways.items():
        start = f"{name:<{WIDTH}} {how:<9}"
        if isinstance(outcome, Failure):
            lines += [f"{start} {'failed':>7}", f"    {outcome.message}"]
            continue
        ratio = f"{outcome.mb_per_s / before.mb_per_s:.2f}" if before else "–"
        ms = [f"{outcome.latencies_ms[q]:.1f}" if outcome.latencies_ms else "–" for q in ("p50", "p99")]
        lines.append(
            f"{start} {outcome.mb_per_s:>7.1f} {ratio:>6} {outcome.slower:>7.2f} {outcome.appends:>8,}"
            f" {outcome.start_conflicts:>7,} {outcome.unresolved:>7,} {ms[0]:>8} {ms[1]:>8}"
        )
        lines += [
            f"    {count} x {told}" for told, count in Counter(outcome.warnings).most_common(MAX_WARNINGS)
        ]
        before = outcome
    return "\n".join(lines)
