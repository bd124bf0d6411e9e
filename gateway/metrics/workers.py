"""Prometheus metrics of the workers as of the last scrape: per worker, and per worker and tier."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvrecall.protocol.v1 import worker_pb2 as pb

Family = type[GaugeMetricFamily] | type[CounterMetricFamily]
WORKER_METRICS: Mapping[str, tuple[Family, str, str]] = {
    "slots_in_use": (GaugeMetricFamily, "slots_in_use", "Slots with a resident session."),
    "sessions": (GaugeMetricFamily, "worker_sessions", "Sessions open in the worker."),
    "queued": (GaugeMetricFamily, "worker_queued", "Requests waiting for a slot."),
    "lost_pages": (CounterMetricFamily, "lost_pages", "Stored pages found missing or damaged."),
    "rebuilt_pages": (CounterMetricFamily, "rebuilt_pages", "Missing pages that were recomputed."),
    "prefilled_tokens": (
        CounterMetricFamily,
        "prefilled_tokens",
        "Tokens computed in blocks: prompts of turns, and what is computed again after a loss.",
    ),
}
TIER_METRICS: Mapping[str, tuple[Family, str, str]] = {
    "bytes": (GaugeMetricFamily, "tier_bytes", "Bytes of stored rows."),
    "limit_bytes": (
        GaugeMetricFamily,
        "tier_limit_bytes",
        "Capacity of a tier in bytes; 0: unlimited.",
    ),
    "failure": (
        GaugeMetricFamily,
        "tier_failed",
        "1 if a tier's last calls failed: a disk error, a silent server.",
    ),
    "hits": (CounterMetricFamily, "tier_hits", "Pages found in a tier."),
    "misses": (CounterMetricFamily, "tier_misses", "Pages not found in a tier."),
    "errors": (CounterMetricFamily, "tier_errors", "Failed calls of a tier."),
    "refused_pages": (
        CounterMetricFamily,
        "tier_refused_pages",
        "Pages rejected by a full tier.",
    ),
    "read_bytes": (CounterMetricFamily, "tier_read_bytes", "Bytes read from a tier."),
    "written_bytes": (CounterMetricFamily, "tier_written_bytes", "Bytes written to a tier."),
    "reads": (CounterMetricFamily, "tier_reads", "Read calls of a tier."),
    "writes": (CounterMetricFamily, "tier_writes", "Write calls of a tier."),
    "read_seconds": (CounterMetricFamily, "tier_read_seconds", "Time of read calls."),
    "write_seconds": (CounterMetricFamily, "tier_write_seconds", "Time of write calls."),
}


class WorkerCounters(Collector):
    """Counters of the workers. An unreachable worker has `kvrecall_worker_up` only."""

    def __init__(self) -> None:
        self._stats: Mapping[str, pb.WorkerStats] = {}
        self._seen: set[str] = set()

    def update(self, stats: Mapping[str, pb.WorkerStats]) -> None:
        """Replace the counters by those of the workers reachable now, by name."""
        self._stats = dict(sorted(stats.items()))
        self._seen |= stats.keys()

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families of all workers seen so far."""
        up = GaugeMetricFamily(
            "kvrecall_worker_up",
            "1 if a worker seen before is reachable, else 0.",
            labels=["worker"],
        )
        for name in sorted(self._seen):
            up.add_metric([name], float(name in self._stats))
        yield up
        for field, (family_type, name, text) in WORKER_METRICS.items():
            family = family_type(f"kvrecall_{name}", text, labels=["worker"])
            for worker, stats in self._stats.items():
                family.add_metric([worker], getattr(stats, field))
            yield family
        for field, (family_type, name, text) in TIER_METRICS.items():
            family = family_type(f"kvrecall_{name}", text, labels=["worker", "tier"])
            for worker, stats in self._stats.items():
                for tier, tier_stats in sorted(stats.tiers.items()):
                    family.add_metric([worker, tier], _to_number(getattr(tier_stats, field)))
            yield family


def _to_number(value: float | str) -> float:
    """Convert a field; a message, which is no label because its values never end, counts as 1."""
    return float(bool(value)) if isinstance(value, str) else value
