"""The metadata store: one contract (`store`), four implementations, opened by URL (`opening`)."""
