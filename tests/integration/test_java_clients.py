"""The harness around the Java clients, against Apache Kafka itself: what it says about Dray rests on it."""

from __future__ import annotations

from pathlib import Path

from tests.integration.java_clients import Admin, JavaConsumer, Refused, ToRead, ToSend, consume, produce
from tests.servers.kafka import KafkaServer


def test_everything_arrives_as_it_was_sent(tmp_path: Path) -> None:
    server = KafkaServer(tmp_path)
    server.start()
    try:
        created, refused, described = (
            Admin(server.address)
            .create_topic("t", partitions=2, replication_factor=1, configs={"retention.ms": "-1"})
            .create_topic("t")
            .describe_topic("t")
            .run()
        )
        assert isinstance(created, dict)
        assert created["partitions"] == 2
        assert isinstance(refused, Refused)
        assert refused.error == "TopicExistsException"
        assert isinstance(described, dict)
        assert described["topic_id"] == created["topic_id"]

        headers = (("h", b"\xff\x00"), ("h", b""), ("ü\n", None))
        records = [
            ToSend("t", b"first", key=b"k", partition=1, timestamp=1000, headers=headers),
            ToSend("t", b"", key=b"", partition=1, timestamp=2000),
            ToSend("t", None, partition=1, timestamp=3000),
            ToSend("t", bytes(2_000_000), partition=1),
        ]
        with JavaConsumer(server.address, [ToRead("t", 1, "latest", "+3")]) as tail:
            assert tail.wait_started() == {("t", 1): 0}
            *sent, too_large = produce(server.address, records, {"compression.type": "gzip"}, flush_every=1)
            received = tail.records()
        assert [getattr(answer, "offset", None) for answer in sent] == [0, 1, 2]
        assert isinstance(too_large, Refused)
        assert too_large.error == "RecordTooLargeException"
        assert [(one.offset, one.key, one.value, one.timestamp, one.headers) for one in received] == [
            (0, b"k", b"first", 1000, headers),
            (1, b"", b"", 2000, ()),
            (2, None, None, 3000, ()),
        ]

        behind = consume(server.address, [ToRead("t", 1, "@1001"), ToRead("t", 0)])
        assert [one.offset for one in behind] == [1, 2]
    finally:
        server.kill()
