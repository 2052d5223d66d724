"""Which broker a client is sent to: zones, and one owner per stream within a zone. Pure.

Any broker can serve any stream. Owners are a preference that keeps a stream's latest records in one
broker's memory and its traffic in one zone; nothing is wrong when brokers differ for a moment. They agree
as soon as they see the same registrations: the owner is a rendezvous hash, so when a broker comes or goes
only the streams move that it takes or leaves.

The bytes that are hashed are the same in every version of Dray: brokers of two versions run side by side.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from struct import Struct

import xxhash

# Leaders remembered per zone: about 12 MiB. Above it all are forgotten and found anew as they are asked for.
MAX_REMEMBERED = 131_072

# Hashed for a stream: node id and stream id, big-endian. For any other name: node id and its UTF-8 bytes.
_STREAM = Struct(">IQ")
_NODE = Struct(">I")


@dataclass(frozen=True, slots=True)
class BrokerInfo:
    """One registered broker, as clients are told of it."""

    node_id: int
    host: str
    port: int
    zone: str  # "" where zones are not used
    rack: str | None
    started_at_ms: int
    version: str


class Brokers:
    """The brokers that are registered at one moment. At least one: whoever asks is one of them.

    In all of this, a zone that is None or has no brokers stands for all zones.
    """

    def __init__(self, brokers: Iterable[BrokerInfo], revision: int) -> None:
        self.revision = revision  # grows when the brokers change
        self.all = tuple(sorted(brokers, key=lambda broker: broker.node_id))
        self._by_id = {broker.node_id: broker for broker in self.all}
        self._by_zone: dict[str, tuple[BrokerInfo, ...]] = {}
        for broker in self.all:
            if broker.zone:
                self._by_zone[broker.zone] = (*self._by_zone.get(broker.zone, ()), broker)
        # By zones that exist, never by what a client calls its zone.
        self._leaders: dict[str | None, dict[int, BrokerInfo]] = {zone: {} for zone in (None, *self._by_zone)}

    def get(self, node_id: int) -> BrokerInfo | None:
        return self._by_id.get(node_id)

    def in_zone(self, zone: str | None) -> tuple[BrokerInfo, ...]:
        """Whom a client of this zone is sent to, ordered by node id."""
        return self.all if zone is None else self._by_zone.get(zone, self.all)

    def told_by(self, node_id: int, zone: str | None) -> tuple[BrokerInfo, ...]:
        """Whom this broker tells a client of this zone of, ordered by node id.

        Also of itself, as brokers of Kafka do: a client of another zone comes when its own does not answer.
        If it were told only of brokers that are gone, and not yet known to be, it would know nobody to ask
        again: librdkafka then does not go back to its bootstrap servers for minutes, if at all.
        """
        own = self._by_id.get(node_id)
        near = self.in_zone(zone)
        if own is None or own in near:
            return near
        return tuple(sorted((*near, own), key=lambda broker: broker.node_id))

    def leader(self, zone: str | None, stream_id: int) -> BrokerInfo:
        """The owner of a stream for clients of this zone."""
        if zone not in self._by_zone:
            zone = None
        remembered = self._leaders[zone]
        leader = remembered.get(stream_id)
        if leader is None:
            leader = max(
                self.in_zone(zone),
                key=lambda broker: xxhash.xxh64_intdigest(_STREAM.pack(broker.node_id, stream_id)),
            )
            if len(remembered) >= MAX_REMEMBERED:
                remembered.clear()
            remembered[stream_id] = leader
        return leader

    def coordinator(self, zone: str | None, key: str) -> BrokerInfo:
        """Whom clients of this zone ask about a group, or whatever else has a name."""
        name = key.encode()
        return max(
            self.in_zone(zone),
            key=lambda broker: xxhash.xxh64_intdigest(_NODE.pack(broker.node_id) + name),
        )

    def controller(self, zone: str | None) -> BrokerInfo:
        """Kafka's clients want one among those they are told of. Any would do; this one is stable."""
        return self.in_zone(zone)[0]

    def is_owner(self, node_id: int, client_zone: str | None, stream_id: int) -> bool:
        """Whether a broker may serve a stream where `routing.enforce_owner` is on.

        It owns it for the client's zone; or within its own zone, where a client's `client.rack` may have
        sent it.
        """
        if self.leader(client_zone, stream_id).node_id == node_id:
            return True
        broker = self._by_id.get(node_id)
        return broker is not None and self.leader(broker.zone, stream_id).node_id == node_id

    def nearest(self, rack: str, stream_id: int) -> BrokerInfo | None:
        """The owner of a stream in the zone that a consumer calls its `client.rack`; None if it has none."""
        return self.leader(rack, stream_id) if rack in self._by_zone else None


def parse_client_id(client_id: str | None) -> str | None:
    """The zone in a client id of the form `zone_id=<zone>,key=value,…`; None in any other.

    The zone is taken to the letter, and `zone_id` may stand at any place, once.
    """
    if client_id is None or "zone_id=" not in client_id:
        return None
    zones = []
    for pair in client_id.split(","):
        key, equals, value = pair.partition("=")
        if not key or not equals:
            return None
        if key == "zone_id":
            zones.append(value)
    return zones[0] if len(zones) == 1 and zones[0] else None
