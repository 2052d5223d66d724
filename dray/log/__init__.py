"""Partitions as Kafka clients know them: append batches, read them, wait for more."""
