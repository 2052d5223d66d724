"""Dray's exceptions, each named for what its receiver should do.

DrayError
├── ConfigError              fix the setting it names; nothing was opened
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


class DrayError(Exception):
    """Everything Dray raises on purpose."""


class ConfigError(DrayError):
    """A setting cannot be used. Names the setting, the value and what would be right."""

    def __init__(self, setting: str, value: object, expected: str) -> None:
        super().__init__(f"{setting}: {value!r} is not usable: {expected}")
        self.setting = setting
        self.value = value
        self.expected = expected


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
