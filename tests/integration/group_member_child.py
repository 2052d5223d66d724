"""Members of consumer groups in a process of their own, which may be stopped or killed: the Python clients.

Lines of JSON in (`group_members.py` writes them): `start` a member, and for each member `close`, `commit` and
`committed`. Lines of JSON out: what happens to the members, as it happens, with the time of the machine's
monotonic clock. Each member is a thread that polls, says what it got, and commits that, in turns waiting for
the answer and not. What is revoked is committed first. `tests/servers/kafka/GroupMembers.java` is the same
for the Java client.
"""

from __future__ import annotations

import asyncio
import json
import queue
import struct
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener  # type: ignore[import-untyped]
from aiokafka import TopicPartition as AioPartition
from aiokafka.coordinator.assignors.range import (  # type: ignore[import-untyped]
    RangePartitionAssignor as AioRange,
)
from aiokafka.coordinator.assignors.roundrobin import (  # type: ignore[import-untyped]
    RoundRobinPartitionAssignor as AioRoundRobin,
)
from aiokafka.coordinator.assignors.sticky.sticky_assignor import (  # type: ignore[import-untyped]
    StickyPartitionAssignor as AioSticky,
)
from aiokafka.structs import OffsetAndMetadata as AioOffset  # type: ignore[import-untyped]
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

with warnings.catch_warnings():
    # kafka-python reads its schemas in a way that Python wants to drop.
    warnings.simplefilter("ignore", DeprecationWarning)
    import kafka  # type: ignore[import-untyped]
    from kafka.coordinator.assignors.cooperative_sticky import (  # type: ignore[import-untyped]
        CooperativeStickyAssignor,
    )
    from kafka.coordinator.assignors.range import RangePartitionAssignor  # type: ignore[import-untyped]
    from kafka.coordinator.assignors.roundrobin import (  # type: ignore[import-untyped]
        RoundRobinPartitionAssignor,
    )
    from kafka.coordinator.assignors.sticky.sticky_assignor import (  # type: ignore[import-untyped]
        StickyPartitionAssignor,
    )
    from kafka.structs import OffsetAndMetadata  # type: ignore[import-untyped]

POLL_S = 0.1
CALL_S = 10.0
MAX_RECORDS = 500
# Fetches wait a little for more: members are many, and the brokers have other things to do.
FETCH_WAIT_MS = 100
FETCH_MIN_BYTES = 100_000
BACKOFF_MS = 50
BACKOFF_MAX_MS = 500
METADATA_AGE_MS = 1_000

Place = tuple[str, int]
Offsets = Mapping[Place, tuple[int, str]]

_out = threading.Lock()


def say(member: str, event: str, **more: Any) -> None:
    with _out:
        line = json.dumps({"at": time.monotonic_ns(), "member": member, "event": event, **more})
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


class Member:
    """What the members of all clients do. `_run` is the thread's."""

    def __init__(self, wanted: Mapping[str, Any]) -> None:
        self.name: str = wanted["member"]
        self._wanted = wanted
        self._commands: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._positions: dict[Place, int] = {}  # behind what was consumed, where that is not committed
        self._commits = 0
        self._known: list[str] = []
        self._thread = threading.Thread(target=self._guard, name=self.name, daemon=True)
        self._thread.start()

    def tell(self, command: dict[str, Any]) -> None:
        self._commands.put(command)

    def _guard(self) -> None:
        try:
            self._run()
        except Exception as error:
            why = f"{error} {error.__cause__!r}" if error.__cause__ else str(error)
            say(self.name, "failed", error=type(error).__name__, message=why)

    def _run(self) -> None:
        raise NotImplementedError

    def _next(self) -> dict[str, Any] | None:
        try:
            return self._commands.get_nowait()
        except queue.Empty:
            return None

    def _knows(self, brokers: Iterable[Any]) -> None:
        """Of a client that asks only the brokers that it was told of last."""
        known = sorted(f"{broker.host}:{broker.port}" for broker in brokers)
        if known != self._known:
            self._known = known
            say(self.name, "brokers", known=known)

    def _assigned(self, places: Iterable[Place]) -> None:
        say(self.name, "assigned", partitions=sorted(places))

    def _dirty(self, places: Iterable[Place] | None = None) -> dict[Place, tuple[int, str]]:
        """What there is to commit, of these or of all."""
        wanted = self._positions if places is None else places
        return {place: (self._positions[place], "") for place in wanted if place in self._positions}

    def _revoked(self, places: Iterable[Place]) -> None:
        places = sorted(places)
        self._forget(places)
        say(self.name, "revoked", partitions=places)

    def _lost(self, places: Iterable[Place]) -> None:
        places = sorted(places)
        self._forget(places)
        say(self.name, "lost", partitions=places)

    def _forget(self, places: Iterable[Place]) -> None:
        for place in places:
            self._positions.pop(place, None)

    def _consumed(self, place: Place, offsets: list[int], age: int) -> None:
        self._positions[place] = offsets[-1] + 1
        say(self.name, "records", topic=place[0], partition=place[1], offsets=offsets, age=age)

    def _committed(self, offsets: Offsets, sent: int, error: object = None) -> None:
        """The answer to a commit, if it was one that the member did not ask for again since."""
        told = [[topic, partition, offset] for (topic, partition), (offset, _) in offsets.items()]
        if error is not None:
            say(self.name, "commit failed", offsets=told, sent=sent, error=str(error))
            return
        for place, (offset, _) in offsets.items():
            if self._positions.get(place) == offset:
                del self._positions[place]
        say(self.name, "committed", offsets=told, sent=sent)

    def _waits_for_commit(self) -> bool:
        self._commits += 1
        return self._commits % 2 == 0


def asked_offsets(command: Mapping[str, Any]) -> Offsets:
    return {(topic, partition): (offset, text) for topic, partition, offset, text in command["offsets"]}


class RdkafkaMember(Member):
    def _run(self) -> None:
        wanted = self._wanted
        self._sent: deque[int] = deque()  # when the commits were that have no answer yet
        self._polled: dict[Place, list[int]] = {}
        conf: dict[str, Any] = {
            "log_level": 0,
            "bootstrap.servers": wanted["address"],
            "group.id": wanted["group"],
            "client.id": wanted["client_id"],
            "enable.auto.commit": wanted["auto_commit_ms"] is not None,
            "auto.offset.reset": "earliest",
            "fetch.wait.max.ms": FETCH_WAIT_MS,
            "fetch.min.bytes": FETCH_MIN_BYTES,
            "reconnect.backoff.ms": BACKOFF_MS,
            "reconnect.backoff.max.ms": BACKOFF_MAX_MS,
            "topic.metadata.refresh.interval.ms": METADATA_AGE_MS,
            "group.protocol": wanted["protocol"],
            "on_commit": self._on_commit,
        }
        if wanted["auto_commit_ms"] is not None:
            conf["auto.commit.interval.ms"] = wanted["auto_commit_ms"]
        if wanted["instance"] is not None:
            conf["group.instance.id"] = wanted["instance"]
        if wanted["protocol"] == "classic":
            conf["partition.assignment.strategy"] = wanted["assignor"]
            conf["session.timeout.ms"] = wanted["session_ms"]
            conf["heartbeat.interval.ms"] = wanted["heartbeat_ms"]
        elif wanted["assignor"] is not None:
            conf["group.remote.assignor"] = wanted["assignor"]
        consumer = self._consumer = Consumer(conf)
        consumer.subscribe(
            wanted["topics"] if wanted["pattern"] is None else ["^" + wanted["pattern"]],
            on_assign=lambda _, parts: self._assigned(_places(parts)),
            on_revoke=lambda _, parts: self._on_revoke(_places(parts)),
            on_lost=lambda _, parts: self._on_lost(_places(parts)),
        )
        say(self.name, "started")
        while True:
            if (command := self._next()) is not None:
                if command["do"] == "close":
                    break
                self._do(command)
            self._poll()
            if self._wanted["auto_commit_ms"] is None and self._positions:
                self._commit(self._dirty(), wait=self._waits_for_commit())
        say(self.name, "closing")
        consumer.close()
        say(self.name, "closed")

    def _poll(self) -> None:
        for number in range(MAX_RECORDS):
            message = self._consumer.poll(0 if number else POLL_S)
            if message is None:
                break
            error = message.error()
            if error is None:
                place = (str(message.topic()), int(message.partition() or 0))
                self._polled.setdefault(place, []).append(int(message.offset() or 0))
            elif error.fatal():
                raise KafkaException(error)
            else:
                say(self.name, "error", error=str(error))
        self._consume_polled()

    def _consume_polled(self) -> None:
        """Also before a partition is taken away, which happens between two records."""
        if self._polled:
            age = self._age()
            polled, self._polled = self._polled, {}
            for place, offsets in polled.items():
                self._consumed(place, offsets, age)

    def _age(self) -> int:
        """librdkafka writes its generation down behind a mark of seven bytes."""
        written: Any = self._consumer.consumer_group_metadata()
        return int(struct.unpack_from("=i", written, 7)[0])

    def _on_revoke(self, places: list[Place]) -> None:
        self._consume_polled()
        if self._wanted["auto_commit_ms"] is None and (dirty := self._dirty(places)):
            self._commit(dirty, wait=True)
        self._revoked(places)

    def _on_lost(self, places: list[Place]) -> None:
        self._consume_polled()
        self._lost(places)

    def _commit(self, offsets: Offsets, wait: bool) -> None:
        parts = [
            TopicPartition(topic, partition, offset, text)
            for (topic, partition), (offset, text) in offsets.items()
        ]
        sent = time.monotonic_ns()
        if not wait:
            self._sent.append(sent)
            self._consumer.commit(offsets=parts, asynchronous=True)
            return
        try:
            answered = self._consumer.commit(offsets=parts, asynchronous=False)
        except KafkaException as error:
            self._committed(offsets, sent, error)
            return
        self._say_committed(answered or (), sent)

    def _on_commit(self, error: KafkaError | None, parts: list[TopicPartition]) -> None:
        """The answer to one that did not wait, or to the client's own."""
        self._say_committed(parts, self._sent.popleft() if self._sent else time.monotonic_ns(), error)

    def _say_committed(
        self, parts: Iterable[TopicPartition], sent: int, error: KafkaError | None = None
    ) -> None:
        for part in parts:
            self._committed({(part.topic, part.partition): (part.offset, "")}, sent, error or part.error)

    def _do(self, command: Mapping[str, Any]) -> None:
        if command["do"] == "commit":
            self._commit(asked_offsets(command), wait=True)
            return
        parts = [TopicPartition(topic, partition) for topic, partition in command["partitions"]]
        found = self._consumer.committed(parts, timeout=CALL_S)
        rows: list[list[Any]] = []
        for part in found:
            known = (part.offset, part.metadata) if part.offset >= 0 else (None, None)
            rows.append([part.topic, part.partition, *known])
        say(self.name, "answer", offsets=rows)


def _places(parts: Iterable[Any]) -> list[Place]:
    return [(part.topic, part.partition) for part in parts]


class KafkaPythonMember(Member):
    ASSIGNORS: ClassVar[dict[str, Any]] = {
        "range": RangePartitionAssignor,
        "roundrobin": RoundRobinPartitionAssignor,
        "sticky": StickyPartitionAssignor,
        "cooperative-sticky": CooperativeStickyAssignor,
    }

    def _run(self) -> None:
        wanted = self._wanted
        member = self

        class Listener(kafka.AsyncConsumerRebalanceListener):  # type: ignore[misc]
            """Runs in the client's own thread, which must not wait for itself."""

            async def on_partitions_assigned(self, assigned: Any) -> None:
                member._assigned(_places(assigned))

            async def on_partitions_revoked(self, revoked: Any) -> None:
                places = _places(revoked)
                if wanted["auto_commit_ms"] is None and (dirty := member._dirty(places)):
                    sent = time.monotonic_ns()
                    try:
                        await consumer.commit_async(member._given(dirty))
                    except kafka.errors.KafkaError as error:
                        member._committed(dirty, sent, repr(error))
                    else:
                        member._committed(dirty, sent)
                member._revoked(places)

            async def on_partitions_lost(self, lost: Any) -> None:
                member._lost(_places(lost))

        consumer = self._consumer = kafka.KafkaConsumer(
            bootstrap_servers=wanted["address"].split(","),
            group_id=wanted["group"],
            group_instance_id=wanted["instance"],
            client_id=wanted["client_id"],
            enable_auto_commit=wanted["auto_commit_ms"] is not None,
            auto_commit_interval_ms=wanted["auto_commit_ms"] or 5_000,
            auto_offset_reset="earliest",
            fetch_max_wait_ms=FETCH_WAIT_MS,
            fetch_min_bytes=FETCH_MIN_BYTES,
            reconnect_backoff_ms=BACKOFF_MS,
            reconnect_backoff_max_ms=BACKOFF_MAX_MS,
            metadata_max_age_ms=METADATA_AGE_MS,
            partition_assignment_strategy=[self.ASSIGNORS[wanted["assignor"]]],
            session_timeout_ms=wanted["session_ms"],
            heartbeat_interval_ms=wanted["heartbeat_ms"],
            metrics_enabled=False,
        )
        consumer.subscribe(wanted["topics"] or (), pattern=wanted["pattern"], listener=Listener())
        say(self.name, "started")
        while True:
            if (command := self._next()) is not None:
                if command["do"] == "close":
                    break
                self._do(command)
            try:
                polled = consumer.poll(timeout_ms=int(POLL_S * 1000), max_records=MAX_RECORDS)
            except kafka.errors.KafkaError as error:
                if not error.retriable:
                    raise
                say(self.name, "error", error=repr(error))
                continue
            self._knows(consumer._client.cluster.brokers())
            if polled:
                age = consumer.group_metadata().generation_id
                for where, records in polled.items():
                    self._consumed((where.topic, where.partition), [record.offset for record in records], age)
            if wanted["auto_commit_ms"] is None and self._positions:
                self._commit(self._dirty(), wait=self._waits_for_commit())
        say(self.name, "closing")
        consumer.close()
        say(self.name, "closed")

    @staticmethod
    def _given(offsets: Offsets) -> dict[Any, Any]:
        return {
            kafka.TopicPartition(*place): OffsetAndMetadata(offset, text, -1)
            for place, (offset, text) in offsets.items()
        }

    def _commit(self, offsets: Offsets, wait: bool) -> None:
        given = self._given(offsets)
        sent = time.monotonic_ns()
        if not wait:

            def answered(_: Any, answer: Any) -> None:
                self._committed(offsets, sent, answer if isinstance(answer, Exception) else None)

            self._consumer.commit_async(given, callback=answered)
            return
        try:
            self._consumer.commit(given, timeout_ms=CALL_S * 1000)
        except kafka.errors.KafkaError as error:
            self._committed(offsets, sent, repr(error))
            return
        self._committed(offsets, sent)

    def _do(self, command: Mapping[str, Any]) -> None:
        if command["do"] == "commit":
            self._commit(asked_offsets(command), wait=True)
            return
        rows = []
        for topic, partition in command["partitions"]:
            found = self._consumer.committed(kafka.TopicPartition(topic, partition), metadata=True)
            rows.append(
                [topic, partition, *((None, None) if found is None else (found.offset, found.metadata))]
            )
        say(self.name, "answer", offsets=rows)


class AiokafkaMember(Member):
    ASSIGNORS: ClassVar[dict[str, Any]] = {
        "range": AioRange,
        "roundrobin": AioRoundRobin,
        "sticky": AioSticky,
    }

    def _run(self) -> None:
        asyncio.run(self._run_in_loop())

    async def _run_in_loop(self) -> None:
        wanted = self._wanted
        consumer = self._consumer = AIOKafkaConsumer(
            bootstrap_servers=wanted["address"].split(","),
            group_id=wanted["group"],
            group_instance_id=wanted["instance"],
            client_id=wanted["client_id"],
            enable_auto_commit=wanted["auto_commit_ms"] is not None,
            auto_commit_interval_ms=wanted["auto_commit_ms"] or 5_000,
            auto_offset_reset="earliest",
            fetch_max_wait_ms=FETCH_WAIT_MS,
            fetch_min_bytes=FETCH_MIN_BYTES,
            metadata_max_age_ms=METADATA_AGE_MS,
            request_timeout_ms=int(CALL_S * 1000),
            partition_assignment_strategy=[self.ASSIGNORS[wanted["assignor"]]],
            session_timeout_ms=wanted["session_ms"],
            heartbeat_interval_ms=wanted["heartbeat_ms"],
        )
        member = self

        class Listener(ConsumerRebalanceListener):  # type: ignore[misc]
            def on_partitions_assigned(self, assigned: Any) -> None:
                member._assigned(_places(assigned))

            async def on_partitions_revoked(self, revoked: Any) -> None:
                """Also of what was lost: then the client has no generation any more."""
                places = _places(revoked)
                if consumer._coordinator.generation < 0:
                    member._lost(places)
                    return
                if wanted["auto_commit_ms"] is None and (dirty := member._dirty(places)):
                    await member._commit(dirty)
                member._revoked(places)

        consumer.subscribe(wanted["topics"] or (), pattern=wanted["pattern"], listener=Listener())
        await consumer.start()
        say(self.name, "started")
        while True:
            if (command := self._next()) is not None:
                if command["do"] == "close":
                    break
                await self._do(command)
            polled = await consumer.getmany(timeout_ms=int(POLL_S * 1000), max_records=MAX_RECORDS)
            self._knows(consumer._client.cluster.brokers())
            age = consumer._coordinator.generation
            for where, records in polled.items():
                self._consumed((where.topic, where.partition), [record.offset for record in records], age)
            if wanted["auto_commit_ms"] is None and self._positions:
                await self._commit(self._dirty())
        if wanted["auto_commit_ms"] is None and self._positions:
            await self._commit(self._dirty())
        say(self.name, "closing")
        await consumer.stop()
        say(self.name, "closed")

    async def _commit(self, offsets: Offsets) -> None:
        given = {AioPartition(*place): AioOffset(offset, text) for place, (offset, text) in offsets.items()}
        sent = time.monotonic_ns()
        try:
            await self._consumer.commit(given)
        except Exception as error:  # of a member that is none any more, it is an IllegalStateError
            self._committed(offsets, sent, repr(error))
            return
        self._committed(offsets, sent)

    async def _do(self, command: Mapping[str, Any]) -> None:
        if command["do"] == "commit":
            await self._commit(asked_offsets(command))
            return
        rows: list[list[Any]] = []
        for topic, partition in command["partitions"]:
            found = await self._consumer.committed(AioPartition(topic, partition))
            rows.append([topic, partition, found, None])
        say(self.name, "answer", offsets=rows)


CLIENTS: dict[str, type[Member]] = {
    "librdkafka": RdkafkaMember,
    "kafka-python": KafkaPythonMember,
    "aiokafka": AiokafkaMember,
}


def main() -> None:
    members: dict[str, Member] = {}
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "start":
            members[command["member"]] = CLIENTS[command["client"]](command)
        else:
            members[command["member"]].tell(command)


if __name__ == "__main__":
    main()
