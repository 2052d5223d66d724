"""A Kafka connection to one broker, whoever is called the leader: for what no client can be made to do.

Built on `tests.wire`; shares no code with Dray.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from types import TracebackType
from typing import Any, NamedTuple, Self

from kio.schema.describe_producers.v0 import request as describe_producers
from kio.schema.errors import ErrorCode
from kio.schema.fetch.v12 import request as fetch
from kio.schema.find_coordinator.v4 import request as find_coordinator
from kio.schema.list_offsets.v7 import request as list_offsets
from kio.schema.metadata.v9 import request as metadata
from kio.schema.produce.v9 import request as produce

from tests import wire

LATEST = -1
EARLIEST = -2


class Produced(NamedTuple):
    error: ErrorCode
    base_offset: int


class Fetched(NamedTuple):
    error: ErrorCode
    high_watermark: int
    records: bytes
    preferred_read_replica: int


class Wire:
    """One connection. Requests may be sent ahead: `send` any number, then `receive` in their order."""

    def __init__(self, address: str, client_id: str | None = None, timeout_s: float = 30) -> None:
        self._frames = wire.Wire(int(address.rpartition(":")[2]), timeout_s)
        # What is sent has arrived: nothing waits for an acknowledgement of what was sent before.
        self._frames.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._client_id = client_id
        self._sent: list[Any] = []
        self._next_id = 0

    def send(self, request: Any) -> None:
        """One of kio's requests."""
        api_key, version = request.__api_key__, request.__version__
        self._frames.send(wire.encode(api_key, version, request, self._next_id, self._client_id))
        self._next_id += 1
        self._sent.append(request)

    def receive(self) -> Any:
        """The answer to the earliest request that has none. Raises `ConnectionError`, `TimeoutError`."""
        request = self._sent[0]
        answer = self._frames.receive()
        if answer is None:
            raise ConnectionError("the broker closed the connection")
        answered_to, body = wire.decode(int(request.__api_key__), int(request.__version__), answer)
        assert answered_to == self._next_id - len(self._sent)
        del self._sent[0]
        return body

    def ask(self, request: Any) -> Any:
        self.send(request)
        return self.receive()

    def produce(self, topic: str, partition: int, batch: bytes, **more: Any) -> Produced:
        self.send(produce_request(topic, partition, batch, **more))
        return self.receive_produced()

    def receive_produced(self) -> Produced:
        part = self.receive().responses[0].partition_responses[0]
        return Produced(part.error_code, part.base_offset)

    def fetch(self, topic: str, partition: int, offset: int, **more: Any) -> Fetched:
        self.send(fetch_request(topic, partition, offset, **more))
        return self.receive_fetched()

    def receive_fetched(self) -> Fetched:
        part = self.receive().responses[0].partitions[0]
        records = bytes(part.records or b"")
        return Fetched(part.error_code, part.high_watermark, records, part.preferred_read_replica)

    def list_offset(self, topic: str, partition: int, which: int) -> tuple[ErrorCode, int]:
        """By a time, or what stands for one."""
        part = list_offsets.ListOffsetsPartition(partition_index=_int(partition), timestamp=_int(which))
        topics = (list_offsets.ListOffsetsTopic(name=_name(topic), partitions=(part,)),)
        request = list_offsets.ListOffsetsRequest(replica_id=_int(-1), isolation_level=_int(0), topics=topics)
        found = self.ask(request).topics[0].partitions[0]
        return found.error_code, found.offset

    def metadata(self, *topics: str) -> Any:
        named = tuple(metadata.MetadataRequestTopic(name=_name(topic)) for topic in topics)
        return self.ask(
            metadata.MetadataRequest(
                topics=named,
                allow_auto_topic_creation=False,
                include_cluster_authorized_operations=False,
                include_topic_authorized_operations=False,
            )
        )

    def coordinator(self, group: str) -> int:
        answer = self.ask(find_coordinator.FindCoordinatorRequest(coordinator_keys=(group,)))
        assert answer.coordinators[0].error_code is ErrorCode.none
        return int(answer.coordinators[0].node_id)

    def producers(self, topic: str, partition: int) -> dict[int, tuple[int, int]] | ErrorCode:
        """Epoch and last sequence by id."""
        asked = describe_producers.TopicRequest(name=_name(topic), partition_indexes=(_int(partition),))
        answer = self.ask(describe_producers.DescribeProducersRequest(topics=(asked,)))
        found = answer.topics[0].partitions[0]
        if found.error_code is not ErrorCode.none:
            return ErrorCode(found.error_code)
        for one in found.active_producers:
            assert (one.coordinator_epoch, one.current_txn_start_offset) == (-1, -1)
            assert one.last_timestamp > 0
        return {one.producer_id: (one.producer_epoch, one.last_sequence) for one in found.active_producers}

    def close(self) -> None:
        self._frames.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def produce_request(
    topic: str, partition: int, batch: bytes, *, acks: int = -1, timeout_ms: int = 10_000
) -> produce.ProduceRequest:
    data = produce.PartitionProduceData(index=_int(partition), records=_records(batch))
    return produce.ProduceRequest(
        acks=_int(acks),
        timeout=_milliseconds(timeout_ms),
        topic_data=(produce.TopicProduceData(name=_name(topic), partition_data=(data,)),),
    )


def fetch_request(
    topic: str,
    partition: int,
    offset: int,
    *,
    max_wait_ms: int = 0,
    min_bytes: int = 1,
    max_bytes: int = 2**31 - 1,
    partition_max_bytes: int = 2**20,
    rack: str = "",
) -> fetch.FetchRequest:
    part = fetch.FetchPartition(
        partition=_int(partition), fetch_offset=_int(offset), partition_max_bytes=_int(partition_max_bytes)
    )
    return fetch.FetchRequest(
        max_wait=_milliseconds(max_wait_ms),
        min_bytes=_int(min_bytes),
        max_bytes=_int(max_bytes),
        topics=(fetch.FetchTopic(topic=_name(topic), partitions=(part,)),),
        forgotten_topics_data=(),
        rack_id=rack,
    )


def _int(value: int) -> Any:
    """kio has a type per width, and checks none of them when it writes."""
    return value


def _name(value: str) -> Any:
    return value


def _records(value: bytes) -> Any:
    return value


def _milliseconds(value: int) -> Any:
    return timedelta(milliseconds=value)
