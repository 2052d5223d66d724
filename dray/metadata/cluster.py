"""The cluster record: what was decided once, when the cluster was created, and can never change.

One JSON record under `cluster` in the cluster domain. Whoever opens a cluster reads it first and stays
away from what it cannot understand; whoever creates one writes it expecting nothing there, so that of
several creators one wins and the others take what it wrote.
"""

from __future__ import annotations

import base64
import json
import time
import uuid
from dataclasses import asdict, dataclass
from typing import TypeVar

from dray.errors import CorruptStore, IncompatibleStore, OutcomeUnknown, VersionConflict
from dray.metadata.keys import CLUSTER_DOMAIN
from dray.metadata.store import Expect, MetadataStore

CLUSTER_KEY = "cluster"
# Raised when an older Dray would misread what a newer one stores anywhere in the cluster.
FORMAT_VERSION = 1
DEFAULT_NUM_DOMAINS = 16
MAX_NUM_DOMAINS = 65_536

# An unknown outcome with nothing to be seen afterwards is rare; three in a row are an outage.
CREATE_ATTEMPTS = 3

Value = TypeVar("Value", int, str)


@dataclass(frozen=True, slots=True)
class Cluster:
    cluster_id: str  # as Kafka's: 16 random bytes in base64url, 22 characters
    num_domains: int
    incarnation: str  # differs from that of any cluster created in this place before
    created_at_ms: int


async def read_cluster(store: MetadataStore) -> Cluster | None:
    """The record, or None where no cluster was created. Raises `IncompatibleStore`, `CorruptStore`."""
    record = await store.get(CLUSTER_DOMAIN, CLUSTER_KEY)
    return None if record is None else decode(record.value)


async def open_cluster(store: MetadataStore, num_domains: int | None) -> Cluster:
    """Read the record, or create it. `num_domains` None takes what is stored, and 16 for a new cluster.

    Raises `IncompatibleStore` for a newer format or another number of domains: then nothing was written.
    """
    cluster = await read_cluster(store)
    if cluster is None:
        cluster = await _create(store, new_cluster(num_domains or DEFAULT_NUM_DOMAINS))
    if num_domains is not None and num_domains != cluster.num_domains:
        raise IncompatibleStore(
            f"metadata.domains is {num_domains}, but the cluster was created with {cluster.num_domains} "
            f"and that is fixed: unset it or set it to {cluster.num_domains}"
        )
    return cluster


def new_cluster(num_domains: int) -> Cluster:
    return Cluster(
        cluster_id=_new_cluster_id(),
        num_domains=num_domains,
        incarnation=uuid.uuid4().hex,
        created_at_ms=time.time_ns() // 1_000_000,
    )


def encode(cluster: Cluster) -> bytes:
    return json.dumps({"format_version": FORMAT_VERSION, **asdict(cluster)}).encode()


def decode(value: bytes) -> Cluster:
    """The version is looked at before anything else: a newer format may change all the rest."""
    try:
        record = json.loads(value)
    except ValueError:
        raise CorruptStore(f"the cluster record is not JSON: {value[:80]!r}") from None
    if not isinstance(record, dict):
        raise CorruptStore(f"the cluster record is not a JSON object: {value[:80]!r}")
    version = _field(record, "format_version", int)
    if version > FORMAT_VERSION:
        raise IncompatibleStore(
            f"the cluster has format version {version}, and this Dray knows those up to {FORMAT_VERSION}"
        )
    cluster = Cluster(
        cluster_id=_field(record, "cluster_id", str),
        num_domains=_field(record, "num_domains", int),
        incarnation=_field(record, "incarnation", str),
        created_at_ms=_field(record, "created_at_ms", int),
    )
    if version < 1 or not 1 <= cluster.num_domains <= MAX_NUM_DOMAINS:
        raise CorruptStore(f"the cluster record has numbers that nobody can have written: {value[:200]!r}")
    return cluster


async def _create(store: MetadataStore, cluster: Cluster) -> Cluster:
    """Write `cluster` unless there is one; what is there afterwards."""
    for attempt in range(CREATE_ATTEMPTS):
        try:
            await store.put(CLUSTER_DOMAIN, CLUSTER_KEY, encode(cluster), Expect.ABSENT)
            return cluster
        except VersionConflict:
            pass
        except OutcomeUnknown:
            if attempt == CREATE_ATTEMPTS - 1:
                raise
        # The barrier, because a read alone may be older than the record that stood in the way. If the
        # record is not there, the write may still arrive: putting the same again is harmless either way.
        await store.barrier(CLUSTER_DOMAIN)
        found = await read_cluster(store)
        if found is not None:
            return found
    raise CorruptStore("the cluster record is reported as existing but cannot be read")


def _new_cluster_id() -> str:
    while True:
        text = base64.urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()
        if not text.startswith("-"):  # Kafka avoids these too: they look like an option to a command
            return text


def _field(record: dict[str, object], name: str, kind: type[Value]) -> Value:
    value = record.get(name)
    if type(value) is not kind:  # not isinstance: True is no number here
        raise CorruptStore(f"the cluster record has no usable {name}: {value!r}")
    return value
