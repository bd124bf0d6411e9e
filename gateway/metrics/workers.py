"""What the workers count, as it was at the last scrape: per worker, and per worker and tier."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvrecall.protocol.v1 import worker_pb2 as wire

Family = type[GaugeMetricFamily] | type[CounterMetricFamily]
OF_WORKER: Mapping[str, tuple[Family, str, str]] = {
    "slots_in_use": (GaugeMetricFamily, "slots_in_use", "Slots that hold a session."),
    "sessions": (GaugeMetricFamily, "worker_sessions", "Sessions open in the worker."),
    "queued": (GaugeMetricFamily, "worker_queued", "Requests that wait for a slot."),
    "lost_pages": (CounterMetricFamily, "lost_pages", "Stored pages that could not be read."),
    "rebuilt_pages": (CounterMetricFamily, "rebuilt_pages", "Lost pages that were computed again."),
}
OF_TIER: Mapping[str, tuple[Family, str, str]] = {
    "bytes": (GaugeMetricFamily, "tier_bytes", "Bytes of stored rows."),
    "limit_bytes": (
        GaugeMetricFamily,
        "tier_limit_bytes",
        "Bytes that a tier may hold; 0: any number.",
    ),
    "hits": (CounterMetricFamily, "tier_hits", "Pages found in a tier."),
    "misses": (CounterMetricFamily, "tier_misses", "Pages looked for in a tier in vain."),
    "errors": (CounterMetricFamily, "tier_errors", "Calls that a tier failed at."),
    "refused_pages": (
        CounterMetricFamily,
        "tier_refused_pages",
        "Pages that a tier had no room for.",
    ),
    "read_bytes": (CounterMetricFamily, "tier_read_bytes", "Bytes read from a tier."),
    "written_bytes": (CounterMetricFamily, "tier_written_bytes", "Bytes written to a tier."),
    "reads": (CounterMetricFamily, "tier_reads", "Calls that read from a tier."),
    "writes": (CounterMetricFamily, "tier_writes", "Calls that wrote to a tier."),
    "read_seconds": (CounterMetricFamily, "tier_read_seconds", "Time of the calls that read."),
    "write_seconds": (CounterMetricFamily, "tier_write_seconds", "Time of the calls that wrote."),
}


class WorkerCounters(Collector):
    """The workers' own counters. Those of a worker that does not answer are absent, but for `kvrecall_worker_up`."""

    def __init__(self) -> None:
        self._stats: Mapping[str, wire.WorkerStats] = {}
        self._seen: set[str] = set()

    def show(self, stats: Mapping[str, wire.WorkerStats]) -> None:
        """These are the workers that answer now, by name."""
        self._stats = dict(sorted(stats.items()))
        self._seen |= stats.keys()

    def collect(self) -> Iterator[Metric]:
        """The families of the page."""
        up = GaugeMetricFamily(
            "kvrecall_worker_up", "Whether a worker answers, that once did.", labels=["worker"]
        )
        for name in sorted(self._seen):
            up.add_metric([name], float(name in self._stats))
        yield up
        for field, (family, name, text) in OF_WORKER.items():
            of_worker = family(f"kvrecall_{name}", text, labels=["worker"])
            for worker, stats in self._stats.items():
                of_worker.add_metric([worker], getattr(stats, field))
            yield of_worker
        for field, (family, name, text) in OF_TIER.items():
            of_tier = family(f"kvrecall_{name}", text, labels=["worker", "tier"])
            for worker, stats in self._stats.items():
                for tier, counted in sorted(stats.tiers.items()):
                    of_tier.add_metric([worker, tier], getattr(counted, field))
            yield of_tier
