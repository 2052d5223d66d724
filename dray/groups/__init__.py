"""Consumer groups: membership, assignments and offsets, without a broker that owns any of it."""
