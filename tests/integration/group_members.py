"""Members of consumer groups as processes, what they say of themselves, and what must be true of it.

A `MemberHost` is a process with members of Python's clients (`group_member_child.py`) or of Kafka's Java one.
All write into one `Journal`, by the machine's one monotonic clock. `Groups` has groups whose members come and
go while a producer writes numbers, waits until each has settled, and in the end judges the journal:

- every record that was acknowledged was consumed, and the committed offsets end where the log does;
- no partition was two members' at a time, nor two members' in one generation or epoch;
- whoever takes a partition over begins where it was committed, or behind.

A member has a partition from when it is told so until it has agreed to give it up, closes or is killed. One
that was expelled does not know when: it is believed until it sent the last commit that was taken.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, TypeVar

from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition
from confluent_kafka.admin import AdminClient

from tests.integration.numbered import RdkafkaNumbers
from tests.integration.rdkafka import QUIET, TIMEOUT_S, create_topic, fresh_name, in_zone, send_all
from tests.integration.waiting import eventually
from tests.servers import kafka
from tests.servers.dray import DrayBroker

T = TypeVar("T")

PARTITIONS = 12
ZONES = ("a", "b")
SESSION_MS = 6_000
HEARTBEAT_MS = 1_000
# A rebalance is over within a session and 5 s where the clients have a core to run on; 25 of them, four of
# them JVMs, share whatever there is with the brokers.
SETTLE_S = SESSION_MS / 1000 + 12
# For what takes some seconds: how long a test that fails waits.
LIMIT_S = 60.0
BROKER_SETTINGS = {
    "broker.session.timeout.ms": 2_000,
    "group.initial.rebalance.delay.ms": 200,
    "group.consumer.session.timeout.ms": SESSION_MS,
    "group.consumer.heartbeat.interval.ms": HEARTBEAT_MS,
}
# A few hundred records a second: every group reads them all.
PRODUCER = {
    "linger.ms": 500,
    "socket.timeout.ms": 2_000,
    "request.timeout.ms": 2_000,
    "reconnect.backoff.max.ms": 500,
}

BOOTSTRAP_AGAIN = ("librdkafka", "Java")

Place = tuple[str, int]
Client = Literal["librdkafka", "aiokafka", "kafka-python", "Java"]
Protocol = Literal["classic", "consumer"]


@contextmanager
def two_brokers(directory: Path, metadata: str, objects: str) -> Iterator[dict[str, DrayBroker]]:
    """By zone."""
    brokers = {
        zone: DrayBroker(directory, metadata=metadata, objects=objects, zone=zone, settings=BROKER_SETTINGS)
        for zone in ZONES
    }
    try:
        for broker in brokers.values():
            broker.launch()
        for broker in brokers.values():
            broker.wait_started()
        yield brokers
    finally:
        for broker in brokers.values():
            broker.kill()


@dataclass(frozen=True)
class Wanted:
    """A member to be started."""

    member: str
    client: Client
    group: str
    address: str
    topics: Sequence[str] = ()
    pattern: str | None = None  # instead of topics
    protocol: Protocol = "classic"
    assignor: str | None = "range"  # None leaves it to the broker, where that assigns
    client_id: str = "member"
    instance: str | None = None
    session_ms: int = SESSION_MS
    heartbeat_ms: int = HEARTBEAT_MS
    auto_commit_ms: int | None = None  # None has the member commit what it consumed


class Event(NamedTuple):
    at: int  # nanoseconds
    member: str
    what: str
    told: Mapping[str, Any]

    @property
    def places(self) -> list[Place]:
        return [(topic, partition) for topic, partition in self.told["partitions"]]


@dataclass
class Seen:
    """What is known of a member now."""

    wanted: Wanted
    owned: set[Place] = field(default_factory=set)
    changed_at: int = 0  # when it last was given something or gave it up
    started_at: int | None = None
    consumed: int = 0  # records
    brokers: set[str] = field(default_factory=set)  # that it was told of last, if it says so
    has_ended: bool = False
    failure: str | None = None


class Journal:
    def __init__(self) -> None:
        self.members: dict[str, Seen] = {}
        self.events: list[Event] = []
        self.consumed: dict[str, dict[Place, set[int]]] = defaultdict(lambda: defaultdict(set))  # by group
        self._changed = threading.Condition()

    def expect(self, wanted: Wanted) -> None:
        with self._changed:
            assert wanted.member not in self.members
            self.members[wanted.member] = Seen(wanted)

    def add(self, event: Event) -> None:
        with self._changed:
            self.events.append(event)
            self._note(event)
            self._changed.notify_all()

    def wait(
        self, condition: Callable[[], T], what: str, limit_s: float = LIMIT_S, may_fail: Iterable[str] = ()
    ) -> T:
        """What `condition` returns once it is true. Fails with what it said last, and when a member fails."""
        deadline = time.monotonic() + limit_s
        may_fail = set(may_fail)
        with self._changed:
            while not (got := condition()):
                for name, seen in self.members.items():
                    assert seen.failure is None or name in may_fail, f"{name}: {seen.failure}\n{self.tell()}"
                left = deadline - time.monotonic()
                assert left > 0, f"{what} did not come true in {limit_s:g} s: {got!r}\n{self.tell()}"
                self._changed.wait(left)
            return got

    def of(self, member: str, *whats: str) -> list[Event]:
        with self._changed:
            return [event for event in self.events if event.member == member and event.what in whats]

    def tell(self, last: int = 60) -> str:
        """For the message of a test that fails."""
        has = [
            f"{name}: {sorted(number for _, number in seen.owned)}"
            + (" ended" if seen.has_ended else "")
            + (f" {seen.failure}" if seen.failure else "")
            for name, seen in self.members.items()
        ]
        events = [
            event
            for event in self.events
            if event.what not in ("records", "committed", "commit failed", "brokers")
        ]
        return "\n".join([*has, "last events:", *map(tell_event, events[-last:])])

    def _note(self, event: Event) -> None:
        seen = self.members[event.member]
        match event.what:
            case "started":
                seen.started_at = event.at
            case "assigned":
                seen.owned |= set(event.places)
                seen.changed_at = event.at
            case "revoked" | "lost":
                seen.owned -= set(event.places)
                seen.changed_at = event.at
            case "records":
                seen.consumed += len(event.told["offsets"])
                place = event.told["topic"], event.told["partition"]
                self.consumed[seen.wanted.group][place].update(event.told["offsets"])
            case "brokers":
                seen.brokers = set(event.told["known"])
            case "closing" | "killed" | "failed":
                seen.owned.clear()
                seen.has_ended = True
                if event.what == "failed":
                    seen.failure = f"{event.told['error']}: {event.told['message']}"


def tell_event(event: Event) -> str:
    return f"{event.at / 1e9:.3f} {event.member} {event.what} {dict(event.told) or ''}"


class MemberHost:
    """A process with members."""

    def __init__(self, journal: Journal, is_java: bool) -> None:
        self._journal = journal
        self._names: list[str] = []
        if is_java:
            argv = kafka.java_command("GroupMembers", [], kafka.SHORT_LIVED_OPTIONS, _java_classes())
        else:
            argv = [sys.executable, "-m", "tests.integration.group_member_child"]
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - `kill` closes it
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def start(self, wanted: Wanted) -> None:
        self._journal.expect(wanted)
        self._names.append(wanted.member)
        self._tell({"do": "start", **asdict(wanted)})

    def close(self, member: str) -> None:
        """It leaves its group."""
        self._tell({"do": "close", "member": member})

    def commit(self, member: str, offsets: Mapping[Place, tuple[int, str]]) -> None:
        """Offsets and their metadata; the journal has the answer."""
        rows = [[*place, *offset] for place, offset in offsets.items()]
        self._tell({"do": "commit", "member": member, "offsets": rows})

    def committed(self, member: str, places: Sequence[Place]) -> dict[Place, tuple[int, str] | None]:
        """As the client tells it. The metadata of aiokafka is None: it does not say."""
        before = len(self._journal.of(member, "answer"))
        self._tell({"do": "committed", "member": member, "partitions": places})
        answers = self._journal.wait(
            lambda: self._journal.of(member, "answer")[before:], f"{member} has its committed offsets"
        )
        return {
            (topic, partition): None if offset is None else (offset, text)
            for topic, partition, offset, text in answers[0].told["offsets"]
        }

    def signal(self, how: signal.Signals) -> None:
        self._process.send_signal(how)

    def kill(self) -> None:
        """kill -9, and all that it said before is in the journal. Harmless when it is gone."""
        if self._process.poll() is None:
            at = time.monotonic_ns()
            self._process.kill()
            self._process.wait()
            self._reader.join(TIMEOUT_S)
            for name in self._names:
                if not self._journal.members[name].has_ended:
                    self._journal.add(Event(at, name, "killed", {}))
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                stream.close()

    def _tell(self, command: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._errors.seek(0)
            raise RuntimeError(f"the members died:\n{self._errors.read()[-4000:].decode()}") from None

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not line.endswith(b"\n"):
                return  # it was killed while it wrote
            told = json.loads(line)
            self._journal.add(Event(told.pop("at"), told.pop("member"), told.pop("event"), told))


@functools.cache
def _java_classes() -> Path:
    """`GroupMembers.java` compiled, once per run of the tests."""
    kafka.ensure_client_classes()  # so that there is a compiler
    source = Path(kafka.__file__).parent / "kafka" / "GroupMembers.java"
    target = Path(tempfile.mkdtemp(prefix="group-members-"))
    jars = f"{kafka.ensure_kafka_jars()}/*"
    subprocess.run(
        ["javac", "-Xlint:all,-processing", "-Werror", "-cp", jars, "-d", str(target), str(source)],
        check=True,
    )
    return target


@dataclass(frozen=True)
class Kind:
    """Of a member: its client, and how its group is to work."""

    client: Client
    protocol: Protocol
    assignor: str | None


class Hosts:
    """Processes, by name and by what they run. They end with the block."""

    def __init__(self) -> None:
        self.journal = Journal()
        self._hosts: dict[tuple[str, bool], MemberHost] = {}
        self._of: dict[str, MemberHost] = {}

    def start(self, wanted: Wanted, where: str = "stays") -> None:
        key = where, wanted.client == "Java"
        if key not in self._hosts:
            self._hosts[key] = MemberHost(self.journal, key[1])
        self._of[wanted.member] = self._hosts[key]
        self._hosts[key].start(wanted)

    def of(self, member: str) -> MemberHost:
        return self._of[member]

    def signal(self, where: str, how: signal.Signals) -> None:
        for host in self._named(where):
            host.signal(how)

    def kill(self, where: str) -> None:
        for host in self._named(where):
            host.kill()

    def close(self, *members: str) -> None:
        for member in members:
            self._of[member].close(member)

    def wait_closed(self, *members: str) -> None:
        self.journal.wait(
            lambda: all(self.journal.of(member, "closed") for member in members), f"{members} have closed"
        )

    def settle(
        self, members: Sequence[str], places: Iterable[Place], since_ns: int, bound_s: float = SETTLE_S
    ) -> float:
        """Wait until these share the partitions evenly; within the bound from when the last of them started.

        How long it took.
        """
        wanted = set(places)

        def settled_at() -> int:
            """Nanoseconds that it took, never 0; 0 when it has not come to that."""
            seen = [self.journal.members[member] for member in members]
            started = [each.started_at for each in seen if each.started_at is not None]
            sizes = [len(each.owned) for each in seen]
            if len(started) < len(seen) or sum(sizes) != len(wanted) or max(sizes) - min(sizes) > 1:
                return 0
            if set().union(*(each.owned for each in seen)) != wanted:
                return 0
            return max(0, max(each.changed_at for each in seen) - max(since_ns, *started)) + 1

        took = self.journal.wait(settled_at, f"{members} share {len(wanted)} partitions") / 1e9
        assert took <= bound_s, (
            f"{members} settled after {took:.1f} s, not {bound_s:g}\n{self.journal.tell()}"
        )
        return took

    def end(self) -> None:
        for host in self._hosts.values():
            host.kill()

    def _named(self, where: str) -> list[MemberHost]:
        return [host for (name, _), host in self._hosts.items() if name == where]


@contextmanager
def member_hosts() -> Iterator[Hosts]:
    hosts = Hosts()
    try:
        yield hosts
    finally:
        hosts.end()


class Groups:
    """Groups that all read one topic, to which a producer writes, with members that come and go."""

    def __init__(self, address: str, kinds: Mapping[str, Sequence[Kind]], hosts: Hosts) -> None:
        """`kinds` of the members of each group, in the order in which they come."""
        self.address = address
        self.hosts = hosts
        self.journal = hosts.journal
        self.topic = create_topic(address, partitions=PARTITIONS)
        self.places = [(self.topic, partition) for partition in range(PARTITIONS)]
        self._kinds = {fresh_name(name): members for name, members in kinds.items()}
        self._writer = RdkafkaNumbers(address, self.topic, PARTITIONS, PRODUCER)
        self._writer.start()
        self._is_writing = True
        self.took: dict[str, list[float]] = defaultdict(list)

    def names(self, group: str, numbers: Iterable[int]) -> list[str]:
        return [f"{group} #{number} {self._kinds[group][number - 1].client}" for number in numbers]

    def start(self, numbers: Sequence[int], where: str = "stays") -> None:
        """The members with these numbers of all groups: odd ones in one zone, even ones in the other.

        Not those of clients that do not ask the bootstrap servers again when every broker they know is gone
        (KIP-899): in a zone they know one broker, and would wait for it to return.
        """
        for group, kinds in self._kinds.items():
            for number, name in zip(numbers, self.names(group, numbers), strict=True):
                kind = kinds[number - 1]
                self.hosts.start(
                    Wanted(
                        name,
                        kind.client,
                        group,
                        self.address,
                        [self.topic],
                        protocol=kind.protocol,
                        assignor=kind.assignor,
                        client_id=in_zone(ZONES[number % 2]) if kind.client in BOOTSTRAP_AGAIN else "member",
                    ),
                    where,
                )

    def close(self, numbers: Sequence[int]) -> None:
        for group in self._kinds:
            self.hosts.close(*self.names(group, numbers))

    def settle(self, numbers: Sequence[int], since_ns: int) -> None:
        """All groups, and then each of their members consumes."""
        for group in self._kinds:
            self.took[group].append(self.hosts.settle(self.names(group, numbers), self.places, since_ns))
        self.consume(numbers)

    def consume(self, numbers: Sequence[int]) -> None:
        """Wait until each of these has got a record more."""
        members = [self.journal.members[name] for group in self._kinds for name in self.names(group, numbers)]
        before = [member.consumed for member in members]
        self.journal.wait(
            lambda: all(m.consumed > had for m, had in zip(members, before, strict=True)),
            f"the members {numbers} consume",
        )

    def wait_known(self, numbers: Sequence[int]) -> None:
        """Until these know the brokers at the address, as far as they could not go on without."""
        wanted = set(self.address.split(","))
        members = [
            self.journal.members[name]
            for group, kinds in self._kinds.items()
            for number, name in zip(numbers, self.names(group, numbers), strict=True)
            if kinds[number - 1].client not in BOOTSTRAP_AGAIN
        ]
        self.journal.wait(
            lambda: all(wanted <= member.brokers for member in members),
            f"the members {numbers} know all brokers",
        )

    def wait_rebalancing(self, since_ns: int) -> None:
        """Until some group has taken something from a member, and no more."""
        self.journal.wait(
            lambda: any(
                event.at > since_ns and event.what == "revoked" for event in self.journal.events[-1_000:]
            ),
            "a rebalance has begun",
        )

    def finish(self) -> None:
        """Write no more, wait until all is consumed and committed, and judge."""
        self.stop_writing()
        assert not self._writer.failed, self._writer.failed
        acked: dict[Place, set[int]] = {place: set() for place in self.places}
        for partition, offset in self._writer.acked.values():
            acked[self.topic, partition].add(offset)
        ends = {}
        for place in self.places:
            (last,) = send_all(self.address, self.topic, [b"last"], place[1])
            acked[place].add(last.offset)
            ends[place] = last.offset + 1
        for group in self._kinds:
            _wait_consumed(self.journal, group, acked)
            _wait_committed(self.address, group, ends)
        for group in self._kinds:
            judge(self.journal, group)

    def stop_writing(self) -> None:
        if self._is_writing:
            self._is_writing = False
            # Everything but what was given up on the way: that may be there or not.
            self._writer.end()
            self._writer.failed.clear()


def _wait_consumed(journal: Journal, group: str, acked: Mapping[Place, set[int]]) -> None:
    consumed = journal.consumed[group]

    def is_all() -> Truth:
        missing = {place: left for place, offsets in acked.items() if (left := offsets - consumed[place])}
        return Truth(not missing, {place: sorted(left)[:10] for place, left in missing.items()})

    journal.wait(is_all, f"all is consumed by {group}")


def _wait_committed(address: str, group: str, ends: Mapping[Place, int]) -> None:
    def is_at_end() -> Truth:
        offsets = committed_offsets(address, group)
        return Truth(offsets == ends, offsets)

    eventually(is_at_end, f"the offsets of {group} are at the ends {ends}")


@dataclass
class Truth:
    """Whether something holds, and what says so when it does not."""

    holds: bool
    why: object

    def __bool__(self) -> bool:
        return self.holds


def committed_offsets(address: str, group: str) -> dict[Place, int]:
    admin = AdminClient({**QUIET, "bootstrap.servers": address})
    asked = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)])
    parts: list[TopicPartition] = asked[group].result(TIMEOUT_S).topic_partitions
    return {(part.topic, part.partition): part.offset for part in parts}


@dataclass
class _Held:
    """A partition in one member's hands."""

    member: str
    place: Place
    start: int
    end: int | None = None
    how: str = ""
    last_taken: int | None = None  # when the last commit was sent that was taken
    offsets: list[int] = field(default_factory=list)

    @property
    def believed_until(self) -> int | float:
        if self.how == "lost":
            return self.start if self.last_taken is None else self.last_taken
        return float("inf") if self.end is None else self.end


def judge(journal: Journal, group: str) -> None:
    """Every rule at the top of this module that is about the journal alone."""
    members = {name for name, seen in journal.members.items() if seen.wanted.group == group}
    events = sorted(event for event in journal.events if event.member in members)
    held: list[_Held] = []
    now: dict[tuple[str, Place], _Held] = {}
    owners: dict[tuple[Place, int], str] = {}  # by generation or epoch
    taken: dict[Place, list[tuple[int, int]]] = defaultdict(list)  # commits: when answered, and the offset
    problems: list[str] = []
    for event in events:
        match event.what:
            case "assigned":
                for place in event.places:
                    if (event.member, place) not in now:
                        now[event.member, place] = _Held(event.member, place, event.at)
                        held.append(now[event.member, place])
            case "revoked" | "lost":
                for place in event.places:
                    _release(now, event, place)
            case "closing" | "killed" | "failed":
                for member, place in list(now):
                    if member == event.member:
                        _release(now, event, place)
            case "records":
                place = event.told["topic"], event.told["partition"]
                if (event.member, place) in now:
                    now[event.member, place].offsets += event.told["offsets"]
                if event.told["age"] >= 0:
                    owner = owners.setdefault((place, event.told["age"]), event.member)
                    if owner != event.member and not _are_one(journal, owner, event.member):
                        problems.append(f"{place} is {owner}'s in {event.told['age']}: {tell_event(event)}")
            case "committed":
                for topic, partition, offset in event.told["offsets"]:
                    taken[topic, partition].append((event.at, offset))
                    if (event.member, (topic, partition)) in now:
                        now[event.member, (topic, partition)].last_taken = event.told["sent"]
    by_place: dict[Place, list[_Held]] = defaultdict(list)
    for each in held:
        by_place[each.place].append(each)
        if each.offsets != sorted(set(each.offsets)):
            problems.append(f"{each.member} got records of {each.place} twice or out of order")
        if each.offsets:
            committed = max((offset for at, offset in taken[each.place] if at < each.start), default=0)
            if each.offsets[0] < committed:
                problems.append(
                    f"{each.member} got {each.place} at {each.start / 1e9:.3f} and began at "
                    f"{each.offsets[0]}, before {committed}, which was committed"
                )
    for place, holders in by_place.items():
        for number, one in enumerate(holders):
            problems += [
                f"{place} was {one.member}'s {_span(one)} and {other.member}'s {_span(other)}"
                for other in holders[number + 1 :]
                if one.member != other.member
                and one.start < other.believed_until
                and other.start < one.believed_until
            ]
    assert not problems, "\n".join([f"{group}:", *problems[:20], journal.tell()])


def _release(now: dict[tuple[str, Place], _Held], event: Event, place: Place) -> None:
    one = now.pop((event.member, place), None)
    if one is not None:
        one.end, one.how = event.at, event.what


def _are_one(journal: Journal, one: str, other: str) -> bool:
    """A static member is the same after a restart."""
    instance = journal.members[one].wanted.instance
    return instance is not None and instance == journal.members[other].wanted.instance


def _span(one: _Held) -> str:
    end = one.believed_until
    return f"from {one.start / 1e9:.3f} to {end / 1e9:.3f} ({one.how or 'still'})"
