"""The APIs that this broker serves: the one table behind ApiVersions and behind dispatch.

Versions are those of Kafka 4.1 (requirements, A12).
"""

from __future__ import annotations

from typing import NamedTuple

from dray.handlers import (
    alter_configs,
    api_versions,
    cluster,
    configs,
    consumer_groups,
    delete_records,
    features,
    fetch,
    group_admin,
    groups,
    list_offsets,
    log_dirs,
    metadata,
    offset_for_leader_epoch,
    offsets,
    produce,
    producers,
    replicas,
    telemetry,
    topics,
)
from dray.handlers.api_versions import API_VERSIONS, Versions
from dray.handlers.call import Handler


class Api(NamedTuple):
    name: str
    min_version: int
    max_version: int
    handle: Handler
    # librdkafka takes a broker for broken that does not offer Produce 0 (KAFKA-18659). It never sends it.
    advertised_from: int | None = None
    # Requests of one connection are worked on one after the other. For those that wait for memory and keep it
    # until their answer has left: a later one that has it, behind an earlier one that waits for it, would
    # never leave.
    in_turn: bool = False
    # Its `Stable` responses are kept.
    is_kept: bool = False
    # Whether clients are told of it. Those who ask without being told are answered all the same.
    is_advertised: bool = True

    def versions(self, key: int) -> Versions:
        first = self.min_version if self.advertised_from is None else self.advertised_from
        return Versions(key, first, self.max_version)


_SERVED: dict[int, Api] = {
    0: Api("Produce", 3, 13, produce.handle, advertised_from=0),
    1: Api("Fetch", 4, 17, fetch.handle, in_turn=True),
    2: Api("ListOffsets", 1, 10, list_offsets.handle),
    3: Api("Metadata", 0, 13, metadata.handle, is_kept=True),
    8: Api("OffsetCommit", 2, 9, offsets.offset_commit),
    9: Api("OffsetFetch", 1, 9, offsets.offset_fetch),
    47: Api("OffsetDelete", 0, 0, offsets.offset_delete),
    11: Api("JoinGroup", 0, 9, groups.join_group),
    12: Api("Heartbeat", 0, 4, groups.heartbeat),
    13: Api("LeaveGroup", 0, 5, groups.leave_group),
    14: Api("SyncGroup", 0, 5, groups.sync_group),
    15: Api("DescribeGroups", 0, 6, group_admin.describe_groups),
    16: Api("ListGroups", 0, 5, group_admin.list_groups),
    42: Api("DeleteGroups", 0, 2, group_admin.delete_groups),
    68: Api("ConsumerGroupHeartbeat", 0, 1, consumer_groups.heartbeat),
    69: Api("ConsumerGroupDescribe", 0, 1, consumer_groups.describe),
    10: Api("FindCoordinator", 0, 6, cluster.find_coordinator),
    19: Api("CreateTopics", 2, 7, topics.create_topics),
    20: Api("DeleteTopics", 1, 6, topics.delete_topics),
    21: Api("DeleteRecords", 0, 2, delete_records.handle),
    23: Api("OffsetForLeaderEpoch", 2, 4, offset_for_leader_epoch.handle),
    22: Api("InitProducerId", 0, 5, producers.init_producer_id),
    32: Api("DescribeConfigs", 1, 4, configs.describe_configs),
    33: Api("AlterConfigs", 0, 2, alter_configs.alter_configs),
    35: Api("DescribeLogDirs", 1, 4, log_dirs.handle),
    37: Api("CreatePartitions", 0, 3, topics.create_partitions),
    44: Api("IncrementalAlterConfigs", 0, 1, alter_configs.incremental_alter_configs),
    43: Api("ElectLeaders", 0, 2, replicas.elect_leaders),
    45: Api("AlterPartitionReassignments", 0, 1, replicas.alter_partition_reassignments),
    46: Api("ListPartitionReassignments", 0, 0, replicas.list_partition_reassignments),
    57: Api("UpdateFeatures", 0, 2, features.update_features),
    60: Api("DescribeCluster", 0, 2, cluster.describe_cluster),
    74: Api("ListConfigResources", 0, 1, configs.list_config_resources),
    71: Api("GetTelemetrySubscriptions", 0, 0, telemetry.get_telemetry_subscriptions, is_advertised=False),
    72: Api("PushTelemetry", 0, 0, telemetry.push_telemetry, is_advertised=False),
    61: Api("DescribeProducers", 0, 0, producers.describe_producers),
    75: Api("DescribeTopicPartitions", 0, 0, metadata.describe_topic_partitions),
}
_OWN_VERSIONS = Versions(API_VERSIONS, 0, 4)
ADVERTISED: tuple[Versions, ...] = tuple(
    sorted([*(api.versions(key) for key, api in _SERVED.items() if api.is_advertised), _OWN_VERSIONS])
)

APIS: dict[int, Api] = {
    **_SERVED,
    API_VERSIONS: Api("ApiVersions", 0, 4, api_versions.handler(ADVERTISED)),
}
