"""Which Kafka error stands for which of Dray's. The one place that knows both.

Numbers come from Kafka's own table, by way of kio. What is not in this table is a bug: it is logged with its
traceback and becomes UNKNOWN_SERVER_ERROR.
"""

from __future__ import annotations

import logging

from kio.schema.errors import ErrorCode

from dray import errors

log = logging.getLogger(__name__)

CODES: dict[type[errors.DrayError], ErrorCode] = {
    errors.CorruptBatch: ErrorCode.corrupt_message,
    errors.LegacyBatch: ErrorCode.invalid_record,
    errors.UnsupportedCodec: ErrorCode.unsupported_compression_type,
    errors.BatchTooLarge: ErrorCode.message_too_large,
    errors.InvalidRecords: ErrorCode.invalid_record,
    errors.InvalidTimestamp: ErrorCode.invalid_timestamp,
    errors.TransactionalBatch: ErrorCode.invalid_request,
    errors.InvalidBatch: ErrorCode.corrupt_message,
    errors.OutOfOrderSequence: ErrorCode.out_of_order_sequence_number,
    errors.StaleEpoch: ErrorCode.invalid_producer_epoch,
    errors.UnknownProducer: ErrorCode.unknown_producer_id,
    errors.OffsetOutOfRange: ErrorCode.offset_out_of_range,
    errors.UnknownPartition: ErrorCode.unknown_topic_or_partition,
    errors.UnknownTopic: ErrorCode.unknown_topic_or_partition,
    errors.UnknownTopicId: ErrorCode.unknown_topic_id,
    errors.TopicExists: ErrorCode.topic_already_exists,
    errors.InvalidTopicName: ErrorCode.invalid_topic_exception,
    errors.InvalidPartitions: ErrorCode.invalid_partitions,
    errors.InvalidReplication: ErrorCode.invalid_replication_factor,
    errors.InvalidAssignment: ErrorCode.invalid_replica_assignment,
    errors.InvalidTopicConfig: ErrorCode.invalid_config,
    errors.NotOwner: ErrorCode.not_leader_or_follower,
    errors.FutureEpoch: ErrorCode.unknown_leader_epoch,
    errors.BadRequest: ErrorCode.invalid_request,
    errors.UnsupportedRequestValue: ErrorCode.unsupported_version,
    errors.NotAListConfig: ErrorCode.invalid_config,
    errors.InvalidGroupId: ErrorCode.invalid_group_id,
    errors.UnknownGroup: ErrorCode.group_id_not_found,
    errors.GroupNotEmpty: ErrorCode.non_empty_group,
    errors.GroupFull: ErrorCode.group_max_size_reached,
    errors.UnknownMember: ErrorCode.unknown_member_id,
    errors.MemberIdRequired: ErrorCode.member_id_required,
    errors.FencedInstance: ErrorCode.fenced_instance_id,
    errors.InconsistentProtocol: ErrorCode.inconsistent_group_protocol,
    errors.InvalidSessionTimeout: ErrorCode.invalid_session_timeout,
    errors.IllegalGeneration: ErrorCode.illegal_generation,
    errors.RebalanceInProgress: ErrorCode.rebalance_in_progress,
    errors.NoMemberEpoch: ErrorCode.unsupported_version,
    errors.InvalidMemberRequest: ErrorCode.invalid_request,
    errors.FencedMemberEpoch: ErrorCode.fenced_member_epoch,
    errors.StaleMemberEpoch: ErrorCode.stale_member_epoch,
    errors.UnreleasedInstance: ErrorCode.unreleased_instance_id,
    errors.UnsupportedAssignor: ErrorCode.unsupported_assignor,
    errors.InvalidRegex: ErrorCode.invalid_regular_expression,
    errors.MetadataTooLarge: ErrorCode.offset_metadata_too_large,
    errors.TopicInUse: ErrorCode.group_subscribed_to_topic,
    # Clients try these again.
    errors.CoordinatorAway: ErrorCode.coordinator_not_available,
    errors.ReadAgain: ErrorCode.kafka_storage_error,
    errors.NotCommitted: ErrorCode.kafka_storage_error,
    errors.CommitUnknown: ErrorCode.request_timed_out,
    errors.TimedOut: ErrorCode.request_timed_out,
    errors.TooLarge: ErrorCode.message_too_large,
    errors.Unavailable: ErrorCode.kafka_storage_error,
    errors.OutcomeUnknown: ErrorCode.request_timed_out,
    errors.MetadataError: ErrorCode.kafka_storage_error,
    errors.ObjectStoreError: ErrorCode.kafka_storage_error,
    errors.WalFormatError: ErrorCode.kafka_storage_error,
    errors.DamagedFile: ErrorCode.kafka_storage_error,
}


def code_of(error: BaseException) -> ErrorCode:
    for kind in type(error).__mro__:
        code = CODES.get(kind)
        if code is not None:
            return code
    log.error("an error that nobody expected", exc_info=error)
    return ErrorCode.unknown_server_error


def message_of(error: BaseException) -> str:
    """What a client may read. Of what nobody expected, nothing but its kind."""
    return str(error) if isinstance(error, errors.DrayError) else type(error).__name__
