"""What a compactor tells Prometheus: its counts, as they are when somebody asks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from compactor.service import Counts
from dray.config import Address
from dray.errors import ConfigError

_COUNTERS = {
    "tasks": "Tasks that were finished.",
    "files": "Data files that were made of WAL.",
    "records": "Records in them.",
    "wal_bytes": "WAL bytes that they were made of.",
    "file_bytes": "Their bytes.",
    "rewritten_files": "Small data files that became part of larger ones.",
    "undecodable": "Ranges that nobody can decode and that stay in the WAL.",
    "failures": "Things that failed and are tried again.",
}
_GAUGES = {
    "waiting_tasks": "Tasks that were not finished by the last round.",
    "waiting_for_catalog": "Of these, those that are written and not in their table.",
    "backlog_bytes": "WAL bytes that the last round left for later.",
    "undecided": "Streams with entries of which nobody had decided what counts.",
}


@contextmanager
def serving(counts: Counts, address: Address | None) -> Iterator[None]:
    """Raises `ConfigError` where it cannot listen."""
    if address is None:
        yield
        return
    registry = CollectorRegistry()
    registry.register(_Counts(counts))
    try:
        server, thread = start_http_server(address.port, address.host, registry)
    except OSError as error:
        raise ConfigError("http", str(address), f"cannot listen there: {error.strerror}") from None
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Counts(Collector):
    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        counts = self._counts
        for name, doc in _COUNTERS.items():
            yield CounterMetricFamily(f"dray_compactor_{name}", doc, value=getattr(counts, name))
        for name, doc in _GAUGES.items():
            yield GaugeMetricFamily(f"dray_compactor_{name}", doc, value=getattr(counts, name))
        done = counts.collected
        for name, doc, value in (
            ("collected_objects", "WAL objects that were deleted.", done.objects),
            ("collected_bytes", "Their bytes.", done.object_bytes),
            ("collected_files", "Data files that were deleted.", done.files),
        ):
            yield CounterMetricFamily(f"dray_compactor_{name}", doc, value=value)
