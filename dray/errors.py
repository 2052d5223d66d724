"""Dray's exceptions, each named for what its receiver should do.

DrayError
├── ConfigError              fix the setting it names; nothing was opened
├── MalformedRequest         close the connection: what follows cannot be told apart
├── UnsupportedRequest       there is no such API, or not in this version
├── InvalidBatch             refuse what the client sent; nothing of it was stored
│   ├── CorruptBatch         it was damaged on the way, or never was a record batch
│   ├── LegacyBatch          the client speaks a message format from before Kafka 0.11
│   ├── UnsupportedCodec     nobody could decompress it
│   ├── BatchTooLarge        the client is to make smaller batches
│   ├── DecompressedTooLarge leave the records inside alone: they are more than may be held in memory
│   ├── InvalidRecords       the batch contradicts itself, or is not a client's to write
│   ├── InvalidTimestamp     its timestamps are not a client's to set
│   ├── TransactionalBatch   Dray has no transactions
│   └── UndecodableBatch     leave it and its offsets as they are, and go on behind it
├── SequenceError            the batch is not the next one of its producer; nothing of it counts
│   ├── OutOfOrderSequence   batches before it are missing: send those first
│   ├── StaleEpoch           the producer goes on under a newer epoch
│   └── UnknownProducer      nothing is known of the producer, or no longer: begin at sequence 0
├── NotOwner                 ask the broker that owns the partition
├── FutureEpoch              the client knows of a leader that there never was
├── BadRequest               the request contradicts itself, or asks for what Dray does not do
│   ├── UnsupportedRequestValue  another version of the request, or another broker, could
│   └── NotAListConfig       set the config as a whole
├── TimedOut                 it is not done in the time that was given; it may be done yet
├── OffsetOutOfRange         the reader is to choose another place to begin
├── DamagedFile              a data file is not what was written: read again, then look
├── WalFormatError           do not use the object, or this part of it
│   ├── DamagedWal           these are not the bytes that were written: read again, then look
│   ├── UnknownWalVersion    a newer Dray wrote it: upgrade, and leave it alone
│   └── WrongDomain          a sound object, but not the one that was meant
├── TopicError               tell the client which topic, and what is wrong with it
│   ├── TopicExists          the name is taken: use the topic, or choose another name
│   ├── UnknownTopic         there is no such topic, or no longer
│   ├── UnknownTopicId       no topic has this id, or no longer
│   ├── UnknownPartition     the topic has fewer partitions
│   ├── InvalidAssignment    leave replicas to Dray, or assign them without holes
│   ├── InvalidTopicName     choose a name that Kafka allows
│   ├── InvalidPartitions    choose a number of partitions that this topic can have
│   ├── InvalidReplication   choose a replication factor that Dray can give
│   └── InvalidTopicConfig   correct the config it names
├── GroupError               tell the member, or whoever asked about the group
│   ├── InvalidGroupId       choose a group id that is not empty
│   ├── UnknownGroup         there is no such group
│   ├── GroupNotEmpty        its members have to leave first
│   ├── GroupFull            it takes no more members
│   ├── UnknownMember        join again, as a newcomer
│   ├── MemberIdRequired     join again, with the id that it was given
│   ├── FencedInstance       another has this instance id now: stop
│   ├── InconsistentProtocol the members have no protocol in common, or the group has another type
│   ├── InvalidSessionTimeout choose one that the broker allows
│   ├── IllegalGeneration    the group went on: join again
│   ├── RebalanceInProgress  join again
│   ├── InvalidMemberRequest the request contradicts itself
│   ├── FencedMemberEpoch    give up all partitions and join again
│   ├── StaleMemberEpoch     the member went on: try again with its epoch
│   ├── NoMemberEpoch        commit with a newer version of the request, that has it
│   ├── UnreleasedInstance   another has this instance id still: try again when it left
│   ├── UnsupportedAssignor  choose one that the broker has
│   ├── InvalidRegex         write it in the syntax of RE2
│   ├── MetadataTooLarge     commit less text with the offset
│   ├── TopicInUse           the group subscribes to it
│   └── CoordinatorAway      look for the coordinator again
├── ClaimLost                leave the stream alone: another compactor works at it
├── CatalogError             a table cannot be read or changed; the log has everything all the same
│   ├── CatalogUnavailable   nothing was committed: try again later
│   ├── TableCommitUnknown   it may be committed: try the same again later, and delete nothing
│   ├── CatalogDenied        correct the credentials or their rights
│   ├── CatalogMisconfigured correct the setting `catalog`
│   ├── TableOfAnotherTopic  rename or drop the table, or name its topic in it
│   ├── TableAltered         do to the table what it says
│   ├── TableGone            make the table anew, and append what the index names
│   ├── TableBehind          append what the index names and the table lacks, then the rest
│   └── InputsGone           give the rewrite up: somebody else changed what it was made from
├── SparkError               Spark cannot be used like this; nothing was run
│   ├── JavaMissing          install Java 17, or say where it is
│   ├── JarsMissing          let them be fetched, or put them where it says
│   ├── SparkNotStarted      correct what it says about the master or the properties of Spark
│   ├── SparkInUse           end the other session, or the process: a JVM does not take new jars
│   └── NoTables             wait until the compactor has made some
├── QueryFailed              correct the query
├── NodeIdTaken              give this broker another node id, or none
├── NotCommitted             nothing was written, nor will be: the client may retry
├── ReadAgain                the index was changed while it was read, and says nothing yet
├── CommitUnknown            it may be written: the client may retry, and may get it twice
└── MetadataError
    ├── VersionConflict      another writer won: read again before retrying
    ├── StartConflict        the sequence went on: fold what came in between, then append anew
    ├── Unavailable          nothing happened and nothing will: try again later
    ├── OutcomeUnknown       it may have happened, or may yet: resolve it, never resend it
    ├── SessionLost          the ephemeral keys are gone, or may be: make a new session
    ├── TooLarge             split the write by `limits`
    ├── StoreFull            nothing happened: free space, then retry
    ├── InvalidRequest       the caller's mistake: a bad key, name, count or URL
    ├── AccessDenied         fix the credentials or their rights
    ├── NoSuchNamespace      create the namespace or correct the URL
    ├── IncompatibleStore    another version or another cluster wrote this: do not touch it
    └── CorruptStore         the store answered what nobody can have written: stop and look
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID


class DrayError(Exception):
    """Everything Dray raises on purpose."""


class ConfigError(DrayError):
    """A setting cannot be used. Names the setting, the value and what would be right."""

    def __init__(self, setting: str, value: object, expected: str) -> None:
        super().__init__(f"{setting}: {value!r} is not usable: {expected}")
        self.setting = setting
        self.value = value
        self.expected = expected


class MalformedRequest(DrayError):
    """Bytes that are not a Kafka request. `at` is the byte of the request where that shows."""

    def __init__(self, problem: str, at: int) -> None:
        super().__init__(f"request, byte {at}: {problem}")
        self.problem = problem
        self.at = at


class UnsupportedRequest(DrayError):
    """An API that Dray does not serve, or a version of it that Dray does not know."""

    def __init__(self, api_key: int, version: int) -> None:
        super().__init__(f"API {api_key} version {version} is not supported")
        self.api_key = api_key
        self.version = version


class InvalidBatch(DrayError):
    """A client's record batch cannot be taken. `at` is where the batch begins in what the client sent.

    Each kind names the Kafka error that the client is to get.
    """

    def __init__(self, problem: str, at: int) -> None:
        super().__init__(f"record batch at byte {at}: {problem}")
        self.problem = problem
        self.at = at


class CorruptBatch(InvalidBatch):
    """Lengths that do not fit, an unknown magic or a wrong checksum. CORRUPT_MESSAGE: clients resend."""


class LegacyBatch(InvalidBatch):
    """Magic 0 or 1. INVALID_RECORD, as Kafka answers since Produce 3.

    UNSUPPORTED_FOR_MESSAGE_FORMAT would be the reverse: a topic too old for the request.
    """


class UnsupportedCodec(InvalidBatch):
    """A compression code that Kafka has not assigned. UNSUPPORTED_COMPRESSION_TYPE."""


class BatchTooLarge(InvalidBatch):
    """Above the topic's `max.message.bytes`. MESSAGE_TOO_LARGE: clients split the batch."""


class DecompressedTooLarge(InvalidBatch):
    """Its records would take more memory than the reader gave. MESSAGE_TOO_LARGE, if a client is told."""


class InvalidRecords(InvalidBatch):
    """Counts, offsets, sequence numbers or attribute bits that no client may send. INVALID_RECORD."""


class InvalidTimestamp(InvalidBatch):
    """LogAppendTime, which is the broker's to set, or a negative time. INVALID_TIMESTAMP."""


class TransactionalBatch(InvalidBatch):
    """Part of a transaction. INVALID_REQUEST."""


class UndecodableBatch(InvalidBatch):
    """It was stored by what its header says, and its records are not that. `number` counts from 0."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(reason, 0)
        self.args = (f"record batch number {number}: {reason}",)
        self.number = number
        self.reason = reason


class SequenceError(DrayError):
    """The fold's verdict on a batch that is neither ok nor a duplicate."""


class OutOfOrderSequence(SequenceError):
    """OUT_OF_ORDER_SEQUENCE_NUMBER."""


class StaleEpoch(SequenceError):
    """INVALID_PRODUCER_EPOCH."""


class UnknownProducer(SequenceError):
    """UNKNOWN_PRODUCER_ID."""


class NotOwner(DrayError):
    """`routing.enforce_owner` is on, and another broker owns the partition."""


class FutureEpoch(DrayError):
    """A client named a leader epoch above the only one there is."""


class BadRequest(DrayError):
    """Well-formed, but nothing that can be done. INVALID_REQUEST."""


class UnsupportedRequestValue(BadRequest):
    """Something that another version, or another broker, would understand. UNSUPPORTED_VERSION."""


class NotAListConfig(BadRequest):
    """Only lists can be appended to or subtracted from. INVALID_CONFIG."""

    def __init__(self, config: str) -> None:
        super().__init__(f"config {config[:200]!r} is no list: nothing can be appended or subtracted")
        self.config = config


class TimedOut(DrayError):
    """The client's own time limit has passed."""


class OffsetOutOfRange(DrayError):
    """There is no such offset, as of a moment after it was asked for."""

    def __init__(self, offset: int, log_start: int, end: int) -> None:
        super().__init__(f"offset {offset} is not within {log_start} to {end}")
        self.offset = offset
        self.log_start = log_start
        self.end = end


class DamagedFile(DrayError):
    """A Parquet file of a table cannot be read: cut short, changed, or never one."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem


class WalFormatError(DrayError):
    """Bytes that cannot be read as a WAL object. `at` is the byte of the object where that shows."""

    def __init__(self, problem: str, at: int) -> None:
        super().__init__(f"WAL object, byte {at}: {problem}")
        self.problem = problem
        self.at = at


class DamagedWal(WalFormatError):
    """Cut short, changed, or never a WAL object."""


class UnknownWalVersion(WalFormatError):
    """A version of the format that this Dray does not know."""


class WrongDomain(WalFormatError):
    """The object belongs to another MetaDomain than the one it was looked for in."""


class NotCommitted(DrayError):
    """A write came to nothing, for certain. Its cause says why."""


class ReadAgain(DrayError):
    """An entry does not continue what was folded. It says nothing about a batch (protocol 17).

    Read again from the end of the fold; if that does not help, from the newest snapshot.
    """


class CommitUnknown(DrayError):
    """Nobody could find out in time whether a write was committed."""


class ClaimLost(DrayError):
    """The record of a stream's compaction was changed by another compactor."""

    def __init__(self, stream_id: int) -> None:
        super().__init__(f"stream {stream_id:016x}: another compactor works at it")
        self.stream_id = stream_id


class CatalogError(DrayError):
    """A call to the Iceberg catalog, or on a table in it, did not do what was asked."""


class CatalogUnavailable(CatalogError):
    """The catalog, or the store of its files, could not be reached, or others were faster each time."""


class TableCommitUnknown(CatalogError):
    """A commit was sent and no answer came that says whether it holds. Doing it again finds out."""


class CatalogDenied(CatalogError):
    """The catalog, or the store of its files, refused the credentials, or they do not allow this."""


class CatalogMisconfigured(CatalogError):
    """The catalog cannot work as it is set up. Says what to correct."""


class TableOfAnotherTopic(CatalogError):
    """There is a table of the topic's name, and it is not the topic's. `found` is the topic id it states."""

    def __init__(self, table: str, found: str | None, topic_id: UUID) -> None:
        whose = "was not made by Dray" if found is None else f"is that of a topic with the id {found}"
        super().__init__(
            f"table {table} {whose}, and the topic of this name has the id {topic_id}: rename the table, or"
            f" drop it. If it is the topic's all the same, set its property dray.topic-id to {topic_id}"
        )
        self.table = table
        self.found = found
        self.topic_id = topic_id


class TableAltered(CatalogError):
    """The topic's table was changed into something that cannot take its records any more."""

    def __init__(self, table: str, problem: str, remedy: str) -> None:
        super().__init__(f"table {table}: {problem}; {remedy}")
        self.table = table
        self.problem = problem
        self.remedy = remedy


class TableGone(CatalogError):
    """The table was dropped, or dropped and made anew, since it was loaded."""

    def __init__(self, table: str) -> None:
        super().__init__(f"table {table} was dropped: it has to be made anew, with all that the topic has")
        self.table = table


class TableBehind(CatalogError):
    """The table lacks files that the index has. It was dropped, and made anew without them."""

    def __init__(self, table: str, partition: int, end_offset: int, expected: int) -> None:
        super().__init__(
            f"table {table} has partition {partition} up to offset {end_offset}, not {expected}: the files in"
            " between have to be appended first"
        )
        self.table = table
        self.partition = partition
        self.end_offset = end_offset
        self.expected = expected


class InputsGone(CatalogError):
    """Files that were to be replaced are not in the table as they were. Nothing was replaced."""

    def __init__(self, table: str, task_id: UUID, paths: Sequence[str], why: str) -> None:
        super().__init__(f"table {table}: {why}, for instance {paths[0]}; they cannot be replaced any more")
        self.table = table
        self.task_id = task_id
        self.paths = tuple(paths)


class SparkError(DrayError):
    """Spark, or what it needs, is not there."""


class JavaMissing(SparkError):
    """No Java, or one that Spark does not run on."""


class JarsMissing(SparkError):
    """A jar is neither here nor to be had."""

    def __init__(self, path: object, url: str, reason: str) -> None:
        super().__init__(f"{url} cannot be fetched: {reason}; put it there by hand: {path}")
        self.path = path
        self.url = url


class SparkNotStarted(SparkError):
    """The JVM or the session did not come up."""


class SparkInUse(SparkError):
    """A JVM of this process was started without what is needed now."""


class NoTables(SparkError):
    """There is no catalog yet, so no topic can be asked."""


class QueryFailed(DrayError):
    """Spark refuses a statement, or fails at it. `hint` says what may help, or nothing."""

    def __init__(self, problem: str, hint: str = "") -> None:
        super().__init__(problem)
        self.hint = hint


class NodeIdTaken(DrayError):
    """Another broker is registered under the node id that this one was given, and stays so."""

    def __init__(self, node_id: int, by: str) -> None:
        super().__init__(f"node id {node_id} is taken by the broker at {by}: give this one another, or none")
        self.node_id = node_id
        self.by = by


class ObjectStoreError(DrayError):
    """A call to the object store did not do what was asked."""


class ObjectNotFound(ObjectStoreError):
    """The store was asked and has no such object."""

    def __init__(self, key: str) -> None:
        super().__init__(f"{key}: there is no such object")
        self.key = key


class ObjectExists(ObjectStoreError):
    """A put-if-absent lost: the object there is another's. Nothing was changed."""

    def __init__(self, key: str) -> None:
        super().__init__(f"{key}: the object exists already")
        self.key = key


class ObjectTooShort(ObjectStoreError):
    """The range reaches beyond the end of the object. `size` is None where the store does not say."""

    def __init__(self, key: str, start: int, end: int, size: int | None) -> None:
        has = "fewer" if size is None else size
        super().__init__(f"{key}: bytes {start} to {end} were asked for, but the object has {has}")
        self.key = key
        self.start = start
        self.end = end
        self.size = size


class ObjectDamaged(ObjectStoreError):
    """The body had another length or checksum than the store announced, each time it was read."""


class ObjectStoreUnavailable(ObjectStoreError):
    """No usable answer before the deadline. A write may have happened, or may happen yet."""


class ObjectStoreFull(ObjectStoreError):
    """The store has no room. Nothing was put."""


class ObjectStoreDenied(ObjectStoreError):
    """The store refused the credentials, or they do not allow this."""


class ObjectStoreMisconfigured(ObjectStoreError):
    """The store cannot work as it is set up. Says which setting or what else to correct."""


class InvalidObjectRequest(ObjectStoreError):
    """The caller asked for something no object store can do. Nothing was sent."""


class MetadataError(DrayError):
    """A call to the metadata store did not do what was asked."""


class VersionConflict(MetadataError):
    """Another writer won. Read again before retrying. Nothing of the call was applied."""

    def __init__(self, key: str, expected: object) -> None:
        super().__init__(f"{key}: not at the expected version ({expected})")
        self.key = key
        self.expected = expected


class StartConflict(MetadataError):
    """The sequence does not end where the append expected. Nothing of the append was applied.

    Read the entries from `expected` to `actual`, decide again, and append anew.
    """

    def __init__(self, sequence: str, expected: int, actual: int) -> None:
        super().__init__(f"sequence {sequence}: expected to start at {expected}, but it ends at {actual}")
        self.sequence = sequence
        self.expected = expected
        self.actual = actual


class Unavailable(MetadataError):
    """The store could not be reached in time. The call had no effect and will have none."""


class OutcomeUnknown(MetadataError):
    """The write may have been applied, or may be applied later. Never resend an append after this."""


class SessionLost(MetadataError):
    """The session ended: its ephemeral keys are gone, or may be gone at any moment."""


class TooLarge(MetadataError):
    """The request is above the store's limits. Nothing was sent."""

    def __init__(self, what: str, actual: int, limit: int) -> None:
        super().__init__(f"{what}: {actual} is above the store's limit of {limit}")
        self.what = what
        self.actual = actual
        self.limit = limit


class StoreFull(MetadataError):
    """The store has no room. The call had no effect."""


class InvalidRequest(MetadataError):
    """The caller asked for something no store can do. Nothing was sent."""


class AccessDenied(MetadataError):
    """The store refused the credentials, or they do not allow this."""


class NoSuchNamespace(MetadataError):
    """The namespace in the URL does not exist on that server."""


class IncompatibleStore(MetadataError):
    """The store was written by a newer version or with other fixed settings. It was left as it is."""


class CorruptStore(MetadataError):
    """The store holds or answered something that Dray cannot have written."""


class TopicError(DrayError):
    """What was asked of a topic cannot be done. Nothing was changed."""


class TopicExists(TopicError):
    """There is a topic of this name."""

    def __init__(self, name: str) -> None:
        super().__init__(f"topic {name!r} already exists")
        self.name = name


class UnknownTopic(TopicError):
    """There is no such topic. `topic` is the name or the id it was looked for by."""

    def __init__(self, topic: str | UUID) -> None:
        super().__init__(f"there is no topic {str(topic)!r}")
        self.topic = topic


class UnknownTopicId(TopicError):
    """No topic has this id."""

    def __init__(self, topic_id: UUID) -> None:
        super().__init__(f"there is no topic with id {topic_id}")
        self.topic_id = topic_id


class UnknownPartition(TopicError):
    """The topic has no such partition."""

    def __init__(self, name: str, partition: int, partitions: int) -> None:
        super().__init__(f"topic {name!r} has {partitions} partitions, and no number {partition}")
        self.name = name
        self.partition = partition
        self.partitions = partitions


class InvalidAssignment(TopicError):
    """Replicas were assigned in a way that cannot be."""


class InvalidTopicName(TopicError):
    """No topic can have this name."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"topic name {name[:300]!r} is not usable: {problem}")
        self.name = name
        self.problem = problem


class InvalidPartitions(TopicError):
    """The topic cannot have so many partitions."""

    def __init__(self, name: str, partitions: int, expected: str) -> None:
        super().__init__(f"topic {name!r} cannot have {partitions} partitions: {expected}")
        self.name = name
        self.partitions = partitions
        self.expected = expected


class InvalidReplication(TopicError):
    """The topic cannot have this replication factor."""

    def __init__(self, name: str, factor: int, expected: str) -> None:
        super().__init__(f"topic {name!r} cannot have replication factor {factor}: {expected}")
        self.name = name
        self.factor = factor
        self.expected = expected


class InvalidTopicConfig(TopicError):
    """A config cannot have this value, or there is no such config. `value` is None where none was given."""

    def __init__(self, config: str, value: str | None, expected: str) -> None:
        said = value if value is None or len(value) <= 200 else value[:200] + "…"
        super().__init__(f"topic config {config[:200]}: {said!r} is not usable: {expected}")
        self.config = config
        self.value = value
        self.expected = expected


class GroupError(DrayError):
    """Tell the member, or whoever asked about the group."""


class InvalidGroupId(GroupError):
    """Choose a group id that is not empty, and that is not too long."""


class UnknownGroup(GroupError):
    """There is no such group, or none of this type."""


class GroupNotEmpty(GroupError):
    """Its members have to leave first."""


class GroupFull(GroupError):
    """It takes no more members."""


class UnknownMember(GroupError):
    """Join again, as a newcomer."""


class MemberIdRequired(GroupError):
    """Join again, with the id that it was given."""

    def __init__(self, member_id: str) -> None:
        super().__init__("join again with the member id that is given here")
        self.member_id = member_id


class FencedInstance(GroupError):
    """Another member has this instance id now: stop."""


class InconsistentProtocol(GroupError):
    """The members have no protocol in common, or the group is of another type."""


class InvalidSessionTimeout(GroupError):
    """Choose a session timeout that the broker allows."""


class IllegalGeneration(GroupError):
    """The group went on: join again."""


class RebalanceInProgress(GroupError):
    """Join again."""


class NoMemberEpoch(GroupError):
    """Commit with a version of OffsetCommit that has the member's epoch. UNSUPPORTED_VERSION."""


class InvalidMemberRequest(GroupError):
    """The request contradicts itself, or lacks what it needs."""


class FencedMemberEpoch(GroupError):
    """Give up all partitions and join again."""


class StaleMemberEpoch(GroupError):
    """The member went on: try again with its epoch."""


class UnreleasedInstance(GroupError):
    """Another member has this instance id still: try again when it left."""


class UnsupportedAssignor(GroupError):
    """Choose an assignor that the broker has."""


class InvalidRegex(GroupError):
    """Write it in the syntax of RE2."""


class MetadataTooLarge(GroupError):
    """Commit less text with the offset."""


class TopicInUse(GroupError):
    """The group subscribes to it."""


class CoordinatorAway(GroupError):
    """Nothing was decided: look for the coordinator again."""
