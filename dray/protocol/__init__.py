"""Kafka's wire format. Pure: bytes in, values out."""
