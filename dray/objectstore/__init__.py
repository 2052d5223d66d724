"""Object stores: one contract (`store`), three implementations, opened by URL (`opening`)."""
