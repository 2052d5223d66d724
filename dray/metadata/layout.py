"""How keys and sequence entries are spelled in stores that have one flat space of keys (etcd, Oxia).

    <root><domain>/k/<key>
    <root><domain>/s/<escaped sequence>/-<end_records:020d>-<end_bytes:020d>
    <root><domain>/t/<escaped sequence>

The second is what Oxia's server makes of a sequence put on the key up to and including the last
slash. The third is etcd's alone: the position of the sequence's last entry, spelled as in its key.
Plain keys can never get into a sequence's directory, and a sequence is always one segment: that is
what keeps a neighbour from being taken for its tail. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from dray.errors import CorruptStore
from dray.metadata.keys import escape, unescape
from dray.metadata.store import Position


@dataclass(frozen=True, slots=True)
class KeyOf:
    domain: int
    key: str


@dataclass(frozen=True, slots=True)
class EntryOf:
    domain: int
    sequence: str
    position: Position


@dataclass(frozen=True, slots=True)
class Layout:
    root: str  # "" or a path ending in "/"

    def domain(self, domain: int) -> str:
        return f"{self.root}{domain}/"

    def key(self, domain: int, key: str) -> str:
        return f"{self.root}{domain}/k/{key}"

    def directory(self, domain: int, directory: str) -> str:
        return self.key(domain, directory + "/" if directory else "")

    def sequence(self, domain: int, sequence: str) -> str:
        return f"{self.root}{domain}/s/{escape(sequence)}/"

    def entry(self, domain: int, sequence: str, position: Position) -> str:
        return self.sequence(domain, sequence) + spell_position(position)

    def tail(self, domain: int, sequence: str) -> str:
        return f"{self.root}{domain}/t/{escape(sequence)}"

    def from_end(self, domain: int, sequence: str, n: int) -> str:
        """Sorts at or before every entry with end_records >= n, and after all others."""
        return f"{self.sequence(domain, sequence)}-{max(n, 0):020d}"

    def parse(self, raw: str) -> KeyOf | EntryOf | None:
        """What a stored key stands for, or None if it is neither a key nor an entry."""
        if not raw.startswith(self.root):
            return None
        domain, _, rest = raw[len(self.root) :].partition("/")
        kind, _, name = rest.partition("/")
        if not domain.isascii() or not domain.isdecimal():
            return None
        if kind == "k" and name:
            return KeyOf(int(domain), name)
        if kind == "s" and name:
            sequence, _, position = name.partition("/")
            return EntryOf(int(domain), unescape(sequence), parse_position(position, raw))
        return None


def spell_position(position: Position) -> str:
    return f"-{position.end_records:020d}-{position.end_bytes:020d}"


def parse_position(suffix: str, raw: str) -> Position:
    """Read `-<20 digits>-<20 digits>`; anything else in a sequence's directory is nobody's entry."""
    empty, _, numbers = suffix.partition("-")
    records, _, size = numbers.partition("-")
    if empty or len(records) != 20 or len(size) != 20 or not (records + size).isdecimal():
        raise CorruptStore(f"{raw!r} lies in a sequence but is no entry of one")
    return Position(int(records), int(size))
