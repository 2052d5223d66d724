"""Where Dray differs from Apache Kafka, API by API: what `docs/compatibility.md` is made from.

What is served and in which versions is told by `table.py`. Here is what Kafka 4.2 has, as its ApiVersions
tells it, and every difference that a client could notice, in the words of the page. Whoever changes an
answer changes its line here.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class KafkaApi(NamedTuple):
    name: str
    min_version: int
    max_version: int


# A single node of Kafka 4.2.1 without a receiver of telemetry; 71 and 72 are told of where there is one.
KAFKA: dict[int, KafkaApi] = {
    0: KafkaApi("Produce", 0, 13),
    1: KafkaApi("Fetch", 4, 18),
    2: KafkaApi("ListOffsets", 1, 11),
    3: KafkaApi("Metadata", 0, 13),
    8: KafkaApi("OffsetCommit", 2, 10),
    9: KafkaApi("OffsetFetch", 1, 10),
    10: KafkaApi("FindCoordinator", 0, 6),
    11: KafkaApi("JoinGroup", 0, 9),
    12: KafkaApi("Heartbeat", 0, 4),
    13: KafkaApi("LeaveGroup", 0, 5),
    14: KafkaApi("SyncGroup", 0, 5),
    15: KafkaApi("DescribeGroups", 0, 6),
    16: KafkaApi("ListGroups", 0, 5),
    17: KafkaApi("SaslHandshake", 0, 1),
    18: KafkaApi("ApiVersions", 0, 4),
    19: KafkaApi("CreateTopics", 2, 7),
    20: KafkaApi("DeleteTopics", 1, 6),
    21: KafkaApi("DeleteRecords", 0, 2),
    22: KafkaApi("InitProducerId", 0, 5),
    23: KafkaApi("OffsetForLeaderEpoch", 2, 4),
    24: KafkaApi("AddPartitionsToTxn", 0, 5),
    25: KafkaApi("AddOffsetsToTxn", 0, 4),
    26: KafkaApi("EndTxn", 0, 5),
    27: KafkaApi("WriteTxnMarkers", 1, 2),
    28: KafkaApi("TxnOffsetCommit", 0, 5),
    29: KafkaApi("DescribeAcls", 1, 3),
    30: KafkaApi("CreateAcls", 1, 3),
    31: KafkaApi("DeleteAcls", 1, 3),
    32: KafkaApi("DescribeConfigs", 1, 4),
    33: KafkaApi("AlterConfigs", 0, 2),
    34: KafkaApi("AlterReplicaLogDirs", 1, 2),
    35: KafkaApi("DescribeLogDirs", 1, 4),
    36: KafkaApi("SaslAuthenticate", 0, 2),
    37: KafkaApi("CreatePartitions", 0, 3),
    38: KafkaApi("CreateDelegationToken", 1, 3),
    39: KafkaApi("RenewDelegationToken", 1, 2),
    40: KafkaApi("ExpireDelegationToken", 1, 2),
    41: KafkaApi("DescribeDelegationToken", 1, 3),
    42: KafkaApi("DeleteGroups", 0, 2),
    43: KafkaApi("ElectLeaders", 0, 2),
    44: KafkaApi("IncrementalAlterConfigs", 0, 1),
    45: KafkaApi("AlterPartitionReassignments", 0, 1),
    46: KafkaApi("ListPartitionReassignments", 0, 0),
    47: KafkaApi("OffsetDelete", 0, 0),
    48: KafkaApi("DescribeClientQuotas", 0, 1),
    49: KafkaApi("AlterClientQuotas", 0, 1),
    50: KafkaApi("DescribeUserScramCredentials", 0, 0),
    51: KafkaApi("AlterUserScramCredentials", 0, 0),
    55: KafkaApi("DescribeQuorum", 0, 2),
    57: KafkaApi("UpdateFeatures", 0, 2),
    60: KafkaApi("DescribeCluster", 0, 2),
    61: KafkaApi("DescribeProducers", 0, 0),
    64: KafkaApi("UnregisterBroker", 0, 0),
    65: KafkaApi("DescribeTransactions", 0, 0),
    66: KafkaApi("ListTransactions", 0, 2),
    68: KafkaApi("ConsumerGroupHeartbeat", 0, 1),
    69: KafkaApi("ConsumerGroupDescribe", 0, 1),
    71: KafkaApi("GetTelemetrySubscriptions", 0, 0),
    72: KafkaApi("PushTelemetry", 0, 0),
    74: KafkaApi("ListConfigResources", 0, 1),
    75: KafkaApi("DescribeTopicPartitions", 0, 0),
    76: KafkaApi("ShareGroupHeartbeat", 1, 1),
    77: KafkaApi("ShareGroupDescribe", 1, 1),
    78: KafkaApi("ShareFetch", 1, 2),
    79: KafkaApi("ShareAcknowledge", 1, 2),
    80: KafkaApi("AddRaftVoter", 0, 1),
    81: KafkaApi("RemoveRaftVoter", 0, 0),
    83: KafkaApi("InitializeShareGroupState", 0, 0),
    84: KafkaApi("ReadShareGroupState", 0, 0),
    85: KafkaApi("WriteShareGroupState", 0, 1),
    86: KafkaApi("DeleteShareGroupState", 0, 0),
    87: KafkaApi("ReadShareGroupStateSummary", 0, 1),
    88: KafkaApi("StreamsGroupHeartbeat", 0, 0),
    89: KafkaApi("StreamsGroupDescribe", 0, 0),
    90: KafkaApi("DescribeShareGroupOffsets", 0, 1),
    91: KafkaApi("AlterShareGroupOffsets", 0, 0),
    92: KafkaApi("DeleteShareGroupOffsets", 0, 0),
}


class Missing(Enum):
    "Why an API of Kafka is not served."

    TRANSACTIONS = "no transactions"
    SHARE_GROUPS = "no share groups"
    STREAMS_GROUPS = "no streams groups"
    AUTHENTICATION = "no authentication"
    DELEGATION_TOKENS = "no delegation tokens"
    ACLS = "no ACLs"
    QUOTAS = "no quotas"
    DIRECTORIES = "no directories to move replicas between"
    QUORUM = "no KRaft quorum: the metadata store keeps its own"


NOT_SERVED: dict[int, Missing] = {
    **dict.fromkeys((24, 25, 26, 27, 28, 65, 66), Missing.TRANSACTIONS),
    **dict.fromkeys((76, 77, 78, 79, 83, 84, 85, 86, 87, 90, 91, 92), Missing.SHARE_GROUPS),
    **dict.fromkeys((88, 89), Missing.STREAMS_GROUPS),
    **dict.fromkeys((17, 36, 50, 51), Missing.AUTHENTICATION),
    **dict.fromkeys((38, 39, 40, 41), Missing.DELEGATION_TOKENS),
    **dict.fromkeys((29, 30, 31), Missing.ACLS),
    **dict.fromkeys((48, 49), Missing.QUOTAS),
    34: Missing.DIRECTORIES,
    **dict.fromkeys((55, 64, 80, 81), Missing.QUORUM),
}

# Of the broker as a whole.
EVERYWHERE: tuple[str, ...] = (
    "Every broker serves every partition. The leader that clients are told of is an affinity, by hashing"
    " among the brokers of the client's zone (`zone_id=…` in its client id), and may differ between"
    " clients. A request to another broker is answered all the same, unless `routing.enforce_owner` is set.",
    "A partition has one replica, which is in sync. Copies are the object store's and the metadata store's"
    " affair: replication factors, `min.insync.replicas` and assignments of replicas change nothing.",
    "The leader epoch is 0 for ever: an older one cannot exist, and a newer one is UNKNOWN_LEADER_EPOCH.",
    "What certainly did not happen because a store is away is KAFKA_STORAGE_ERROR, what may have happened"
    " REQUEST_TIMED_OUT. Clients try both again.",
    "Throttle times are always 0: there are no quotas.",
    "No authentication, authorization or TLS: everybody may do everything. What one may do with topics and"
    ' the cluster is told as −2147483648, "not told"; Kafka tells it where it is asked for, and always in'
    " DescribeTopicPartitions.",
    "Error messages are Dray's own; the codes are Kafka's. Where there is no error the message is null;"
    " Kafka's is empty in DescribeConfigs.",
    "An API that is not served, or a version of one that does not exist, closes the connection, as in"
    " Kafka. Transactional APIs are answered with UNSUPPORTED_VERSION in their own schema.",
    "Limits of time below a second are taken for one second: no object store answers sooner for certain.",
    "Nothing is removed by age or size yet; see [topic configs](topic-configs.md) for each config's effect.",
)

DEVIATIONS: dict[int, tuple[str, ...]] = {
    0: (
        "Versions 0 to 2 are advertised, because librdkafka needs to see them, and not served; Kafka 4 does"
        " the same.",
        "acks=1 and acks=all are one: both wait until the object is stored and its offsets are committed."
        " acks=0 is committed too.",
        "Transactions: a transactional id or a transactional batch is INVALID_REQUEST; Kafka says"
        " TRANSACTIONAL_ID_AUTHORIZATION_FAILED where it does not know the id.",
        "Batches stay as their producer compressed them, whatever `compression.type` is.",
        "Two batches for one partition in a request of a plain producer are taken; Kafka says"
        " INVALID_RECORD. Of an idempotent producer they are refused by both.",
        "Null for records is INVALID_RECORD, as empty ones are; Kafka does not answer.",
        "An unknown codec is UNSUPPORTED_COMPRESSION_TYPE; Kafka says UNKNOWN_SERVER_ERROR.",
        "An error comes with a message, and with −1 for the log start unless it is about a sequence; Kafka"
        " sends no message, and the log start where it looked into the records.",
        "Idempotence: a producer that a partition does not know must begin at sequence 0, else"
        " UNKNOWN_PRODUCER_ID; Kafka takes any sequence.",
        "Idempotence: a partition remembers 10,000 producers, the longest silent go first; Kafka remembers"
        " any number.",
        "Idempotence: a producer is forgotten after 24 hours, a fixed time, by the clocks of the brokers"
        " that wrote; in Kafka it is `producer.id.expiration.ms`, by the timestamps of the records.",
        "Idempotence: a batch that comes twice before the first was committed is a duplicate, answered with"
        " its one offset; Kafka says OUT_OF_ORDER_SEQUENCE_NUMBER where both are in one request.",
        "Idempotence: the answer to a duplicate has a log-append time where the topic has one, and it is the"
        " present time; Kafka's has the newest timestamp of the original, on any topic.",
        "Idempotence: a producer id without an epoch is INVALID_RECORD; Kafka takes the batch.",
        "Idempotence: five batches back are known for certain as duplicates. An older one is out of order, or"
        " a duplicate at a broker that is behind, with the right offset either way.",
        "Idempotence: a broker that has just started reads what producers wrote to a partition before it"
        " takes more; where that takes seconds, it says KAFKA_STORAGE_ERROR meanwhile.",
    ),
    1: (
        "Version 18 is for replicas of KRaft and not served.",
        "Fetch sessions (KIP-227) are not kept ([ADR 7](adr/0007-fetch-without-sessions.md)): who asks for"
        ' one gets session 0, "none", and goes on sending whole requests. Any other id is'
        " FETCH_SESSION_ID_NOT_FOUND.",
        "READ_COMMITTED and READ_UNCOMMITTED are one: the last stable offset is the high watermark, and"
        " aborted transactions are null where Kafka has an empty list.",
        "Offsets can lie on nothing: a duplicate that came through another broker at the same moment keeps"
        " its offsets, and consumers pass over them as over a compacted record.",
        "Negative limits of bytes are taken for 0, which is one batch; Kafka says UNKNOWN_SERVER_ERROR.",
        "A fetch that does not wait, right after a write through another broker, may not see it yet."
        " ListOffsets does.",
        "Fetches by replicas are answered as those of consumers.",
    ),
    2: (
        "Version 11 is about tiered storage and not served.",
        "Timestamps −4 (earliest local) and −5 (latest tiered) are UNSUPPORTED_VERSION: there is one tier."
        " Kafka answers with the log start, and with −1.",
    ),
    3: (
        "Brokers are those of the client's zone, where it names one that exists, and the one that answers;"
        " the controller is one of that zone.",
        "A topic that is made because somebody asks for it is in the answer; Kafka says"
        " UNKNOWN_TOPIC_OR_PARTITION first.",
    ),
    8: (
        "Version 10, which names topics by id, is not served.",
        "A commit of a generation that has just ended is taken as long as no member of the next has committed"
        " for the same partition; Kafka refuses it. One of an older generation never replaces a newer one.",
    ),
    9: (
        "Version 10, which names topics by id, is not served.",
        "Offsets are always stable: there are no transactions.",
    ),
    10: (
        "Any broker serves any group: the coordinator is an affinity, and told at once. Kafka says"
        " COORDINATOR_NOT_AVAILABLE while it makes `__consumer_offsets`.",
        "The coordinator of a transaction is TRANSACTIONAL_ID_AUTHORIZATION_FAILED: there are no"
        " transactions, and this makes clients say so at once. That of a share group is INVALID_REQUEST.",
    ),
    11: (
        "Any broker takes any member; the record of a group lies in the metadata store"
        " ([ADR 11](adr/0011-groups-without-an-owner.md)). A broker that lost its registration says"
        " COORDINATOR_NOT_AVAILABLE.",
        "Generations go on when a consumer group becomes a classic one; Kafka begins at 1 again.",
        "At most 1,000 members may have been given an id that they have not joined with yet, and they count"
        " for `group.max.size`: GROUP_MAX_SIZE_REACHED. Kafka has no bound.",
        "A group id may have 3,000 bytes when percent-escaped, else INVALID_GROUP_ID. A group whose record is"
        " larger than the metadata store takes gets no more members: GROUP_MAX_SIZE_REACHED.",
        "Classic and consumer members are never mixed: a group changes its protocol when it is empty, as in"
        " Kafka with `group.consumer.migration.policy=disabled`.",
    ),
    15: ("A group that is named twice is described once.",),
    18: (
        "No features are supported or finalized: `metadata.version` and the others are those of KRaft."
        " Kafka tells of seven.",
    ),
    19: (
        "A replication factor above the number of brokers is taken and has no effect; Kafka says"
        " INVALID_REPLICATION_FACTOR. Assigned replicas are checked for their form only.",
        "With `validate_only` the topic id is zeros; Kafka tells some id.",
        "At most 50,000 partitions in a topic.",
        "Configs that ask for what Dray cannot do (`cleanup.policy=compact`, `remote.storage.enable=true`)"
        " are INVALID_CONFIG; see [topic configs](topic-configs.md).",
    ),
    20: (
        "The topic is gone when the answer comes; Kafka serves its records for a moment more.",
        "Their bytes stay in the object store until it is cleaned up, which is to come.",
    ),
    21: (
        "The log starts later from now on, on all brokers; the bytes stay in the object store until"
        " retention takes them.",
    ),
    22: (
        "A transactional id is INVALID_REQUEST.",
        "The first is answered at once; Kafka says COORDINATOR_LOAD_IN_PROGRESS while it gets itself ids.",
    ),
    23: ("Epoch 0 ends at the high watermark, for ever; any other is (−1, −1).",),
    32: (
        "Settings of a broker are told by that broker alone, and they are Dray's own, with Kafka's names"
        " where they mean the same.",
        "Loggers, client metrics and groups have no configs: INVALID_REQUEST.",
        "What is asked for twice is described once.",
        "`min.insync.replicas` is a default (source 5); Kafka stores it when it formats a cluster, so there"
        " it is a dynamic default of the cluster (3).",
        "`retention.ms`, `segment.ms`, `segment.jitter.ms` and `flush.ms` have the setting in milliseconds"
        " as synonym; Kafka has none, as its defaults come from other settings. Dray has no settings in"
        " hours.",
    ),
    33: (
        "Settings of brokers can be altered for all brokers (an empty name), not for one: INVALID_REQUEST.",
        "Of them, those that stand in for topic configs, `num.partitions` and `auto.create.topics.enable`"
        " can be altered (Kafka alters neither of the two); all others are INVALID_REQUEST, those that"
        " nobody knows too, which Kafka stores.",
        "Loggers, client metrics and groups have no configs: INVALID_REQUEST.",
    ),
    35: (
        "There is one directory, whose name is the URL of the object store. Its total and usable bytes are"
        " −1: nobody knows them.",
        "A broker lists the partitions that it is called the leader of in the client's zone, so that tools"
        " that add up over brokers count each once.",
        "Sizes are those of the batches as they were written, from the log start on, with 4 bytes more for"
        " each batch (its length in the object). Kafka's are those of its files, deleted records and all.",
    ),
    37: ("Assigned replicas are checked for their form only.",),
    43: (
        "There is nothing to elect: ELECTION_NOT_NEEDED for every partition that is named, and no results"
        " where all are meant. Kafka then names each topic, without partitions.",
    ),
    44: (
        "As for AlterConfigs.",
        "An operation that does not exist is INVALID_REQUEST; Kafka says UNKNOWN_SERVER_ERROR.",
    ),
    45: (
        "Only the replica that a partition has already is granted, anything else is"
        " INVALID_REPLICA_ASSIGNMENT: partitions are spread by hashing.",
    ),
    46: ("Always empty.",),
    57: ("There are no features: any update is INVALID_UPDATE_VERSION.",),
    60: (
        "Brokers are those of the client's zone, as in Metadata. Brokers that are gone are not listed as"
        " fenced.",
        "Endpoints of controllers are MISMATCHED_ENDPOINT_TYPE: there are none.",
    ),
    61: (
        "The last timestamp is when a broker wrote the producer's last batch; Kafka tells the newest"
        " record's.",
        "A partition that is named twice is described once.",
        "Any broker answers, whether or not it is called the leader.",
    ),
    68: (
        "Epochs go on when a classic group becomes a consumer group; Kafka begins at 1 again.",
        "A subscription by pattern is resolved with the heartbeat that brings it; Kafka does it a moment"
        " later.",
        "Where `uniform` has a choice it goes by the order of ids of members and topics; Kafka's by hashes."
        " Numbers of partitions and of moves are the same.",
    ),
    69: ("A group that is named twice is described once.",),
    71: ("No metrics are wanted. As in Kafka without a receiver, it is not advertised, and answered.",),
    72: ("As nothing was subscribed to: UNKNOWN_SUBSCRIPTION_ID.",),
    74: (
        "Of client metrics and groups there are none. Brokers are those of the client's zone.",
        "Kafka lists each broker a second time, for its loggers; here they have no configs.",
    ),
    75: ("Eligible leader replicas are always empty.",),
}
