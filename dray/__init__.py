"""Dray: Kafka-compatible streaming on object storage, every topic an Iceberg table."""

__version__ = "0.1.0"
