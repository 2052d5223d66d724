"""Names inside the metadata store: escaping, and which domain a name belongs to. Pure."""

from __future__ import annotations

from functools import lru_cache
from urllib.parse import quote, unquote

import xxhash

# Cluster-wide records live here: it exists whatever the number of domains is.
CLUSTER_DOMAIN = 0


# Called for every entry of every append, with the names of the same streams.
@lru_cache(maxsize=65_536)
def escape(name: str) -> str:
    """Make any non-empty name one key segment: reversible, ASCII, and free of `/`."""
    return quote(name, safe="")


def unescape(segment: str) -> str:
    return unquote(segment, errors="strict")


def domain_of(name: str, num_domains: int) -> int:
    """The MetaDomain of a stream or group: XXH64 (seed 0) of its UTF-8 name, modulo the domains.

    Part of the stored format: changing it would look for every stream in the wrong place.
    """
    return xxhash.xxh64_intdigest(name.encode()) % num_domains
