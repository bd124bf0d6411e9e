"""Prometheus metrics of the service: one registry per application, fed by service events."""

import re
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from gateway.metrics.workers import WorkerCounters
from kvrecall.domain.events import (
    EpisodesBuilt,
    EpisodesFailed,
    MembersIgnored,
    PagesRebuilt,
    PauseTimedOut,
    QuotaReached,
    RepairFailed,
    RepairFinished,
    ServiceEvent,
    SessionDeleted,
    SessionForgotten,
    SessionForked,
    SessionMoved,
    TurnFailed,
    TurnFinished,
    TurnRetried,
)
from kvrecall.domain.reports import EpisodeReport, MemoryReport, RepairReport, TurnOutcome
from kvrecall.protocol.v1 import worker_pb2 as pb
from services.admission import Admission

# Counters of repairs, by the report's field: the metric's name and help text.
REPAIR_COUNTS = {
    "candidates": ("repair_candidates", "Evicted tokens that were candidates of repairs."),
    "scored_rows": ("repair_scored_rows", "Evicted tokens scored by repairs."),
    "promoted": ("promoted_rows", "Tokens promoted by repairs."),
    "demoted": ("demoted_rows", "Rows per KV head demoted in exchange."),
    "bytes_read": ("repair_read_bytes", "Bytes of stored rows read by repairs for scoring."),
    "truncated": ("repairs_cut", "Repairs stopped early by a deadline or a turn."),
}
HTTP_METHODS = ("GET", "POST", "DELETE", "HEAD", "OPTIONS", "PUT", "PATCH")
# Members of requests that are counted by their names, and the form of such a name: clients choose
# them, so a key or a text must not be one.
MEMBER_NAMES = 64
MEMBER_NAME = re.compile(r"[a-z][a-z_]{0,39}")
# Histogram buckets: fractions, and seconds.
SHARES = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """Metrics of the service, and the registry of the metrics page."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, admission: Admission) -> None:
        self._registry = registry = CollectorRegistry()
        self._workers = WorkerCounters()
        registry.register(self._workers)
        self._memory: dict[str, MemoryReport] = {}
        self._requests = Counter(
            "kvrecall_http_requests", "HTTP requests.", ["method", "status"], registry=registry
        )
        self._calls = Counter(
            "kvrecall_grpc_calls", "gRPC calls.", ["method", "status"], registry=registry
        )
        self._turns = Counter(
            "kvrecall_turns", "Turns committed.", ["finish_reason"], registry=registry
        )
        self._failures = Counter(
            "kvrecall_turn_failures", "Turns not committed.", ["code"], registry=registry
        )
        self._tokens = Counter(
            "kvrecall_tokens", "Tokens of committed turns.", ["kind"], registry=registry
        )
        self._phases = Histogram(
            "kvrecall_turn_phase_seconds",
            "Time in a turn's phases.",
            ["phase"],
            buckets=SECONDS,
            registry=registry,
        )
        self._forks = Histogram(
            "kvrecall_fork_seconds", "Time of a fork.", ["at"], buckets=SECONDS, registry=registry
        )
        self._quotas = Counter(
            "kvrecall_quota_refusals",
            "Requests refused because the tenant's quota was reached.",
            registry=registry,
        )
        self._ignored = Counter(
            "kvrecall_ignored_members",
            "Members of requests that no API here knows, by name; the first names that come.",
            ["member"],
            registry=registry,
        )
        self._ignored_names: set[str] = set()
        self._add_moves()
        self._add_repairs()
        self._add_episodes()
        self._add_gauges(admission)

    def _add_moves(self) -> None:
        """Add metrics of failover, moves and rebuilds."""
        registry = self._registry
        self._retries = Counter(
            "kvrecall_turn_retries",
            "Turns retried in another worker.",
            ["code"],
            registry=registry,
        )
        self._moves = Histogram(
            "kvrecall_move_seconds", "Time of a move.", buckets=SECONDS, registry=registry
        )
        self._rebuilds = Histogram(
            "kvrecall_rebuild_seconds",
            "Time of recomputing missing pages.",
            buckets=SECONDS,
            registry=registry,
        )

    def _add_repairs(self) -> None:
        """Add metrics of repairs: rows scanned and moved, failures, completion within the pause."""
        registry = self._registry
        self._repairs = Histogram(
            "kvrecall_repair_seconds",
            "Time of a repair.",
            ["trigger"],
            buckets=SECONDS,
            registry=registry,
        )
        self._repair_shares = Histogram(
            "kvrecall_repair_share_scanned",
            "Fraction of the candidates scored.",
            buckets=SHARES,
            registry=registry,
        )
        self._repair_counts = {
            name: Counter(f"kvrecall_{metric}", text, ["trigger"], registry=registry)
            for name, (metric, text) in REPAIR_COUNTS.items()
        }
        self._repair_failures = Counter(
            "kvrecall_repair_failures",
            "Repairs that failed.",
            ["code"],
            registry=registry,
        )
        self._repairs_ended = Counter(
            "kvrecall_repairs_between_turns",
            "Repairs by which came first: their end, or a turn.",
            ["first"],
            registry=registry,
        )
        self._repairs_skipped = Counter(
            "kvrecall_repairs_left_out",
            "Pending repairs that had not started when a turn arrived.",
            registry=registry,
        )
        self._timed_out = Counter(
            "kvrecall_pauses_timed_out",
            "Pauses ended by the timeout of a tool call.",
            registry=registry,
        )

    def _add_episodes(self) -> None:
        """Add metrics of episodes: matches, switches, builds, failures."""
        registry = self._registry
        self._matches = Counter(
            "kvrecall_episode_matches", "Turns routed to an episode.", registry=registry
        )
        self._switches = Counter(
            "kvrecall_episode_switches",
            "Turns that made another episode active.",
            registry=registry,
        )
        self._moved_rows = Counter(
            "kvrecall_episode_moved_rows", "Rows loaded by switches.", registry=registry
        )
        self._moved_bytes = Counter(
            "kvrecall_episode_moved_bytes", "Bytes loaded by switches.", registry=registry
        )
        self._builds = Histogram(
            "kvrecall_episode_build_seconds",
            "Time of building episodes.",
            buckets=SECONDS,
            registry=registry,
        )
        self._episode_failures = Counter(
            "kvrecall_episode_failures",
            "Failed steps of episode routing and maintenance.",
            ["step", "code"],
            registry=registry,
        )

    def _add_gauges(self, admission: Admission) -> None:
        """Add gauges that are read at each scrape."""
        self._add_memory_gauge("active_rows", "Active rows of the largest layer")
        self._add_memory_gauge("active_bytes", "Bytes of active rows")
        self._add_memory_gauge("evicted_rows", "Tokens with an evicted row")
        running = Gauge(
            "kvrecall_turns_running", "Turns admitted and running.", registry=self._registry
        )
        running.set_function(lambda: admission.running)
        waiting = Gauge(
            "kvrecall_turns_waiting", "Turns waiting for admission.", registry=self._registry
        )
        waiting.set_function(lambda: admission.waiting)

    def _add_memory_gauge(self, field: str, text: str) -> None:
        """Add the sum of a memory report's field over all sessions."""
        gauge = Gauge(
            f"kvrecall_{field}", f"{text}, summed over sessions.", registry=self._registry
        )
        gauge.set_function(lambda: sum(getattr(memory, field) for memory in self._memory.values()))

    def count_request(self, method: str, status: int) -> None:
        """Count a request; unknown HTTP methods are counted together as `other`."""
        label = method if method in HTTP_METHODS else "other"
        self._requests.labels(label, str(status)).inc()

    def count_call(self, method: str, status: str) -> None:
        """Count a gRPC call with the name of its status."""
        self._calls.labels(method, status).inc()

    def observe(self, event: ServiceEvent) -> None:
        """Count an event of the service."""
        match event:
            case TurnFinished(outcome):
                self._count_turn(outcome)
            case TurnFailed(_, code):
                self._failures.labels(code).inc()
            case RepairFinished(session, report, memory):
                self._memory[session] = memory
                self._count_repair(report)
                self._repairs_ended.labels("end" if report.in_pause else "turn").inc()
            case PauseTimedOut():
                self._timed_out.inc()
            case RepairFailed(code=code):
                self._repair_failures.labels(code).inc()
            case EpisodesBuilt(seconds=seconds):
                self._builds.observe(seconds)
            case EpisodesFailed(step=step, code=code):
                self._episode_failures.labels(step, code).inc()
            case SessionDeleted(session) | SessionForgotten(session):
                self._memory.pop(session, None)
            case SessionForked(at=at, seconds=seconds):
                self._forks.labels(at).observe(seconds)
            case TurnRetried(code=code):
                self._retries.labels(code).inc()
            case SessionMoved(seconds=seconds):
                self._moves.observe(seconds)
            case PagesRebuilt(seconds=seconds):
                self._rebuilds.observe(seconds)
            case QuotaReached():
                self._quotas.inc()
            case MembersIgnored(names):
                self._count_ignored(names)

    def _count_ignored(self, names: Iterable[str]) -> None:
        """Count members by name while there are few; the others, and odd names, as `other`."""
        for name in names:
            if len(self._ignored_names) < MEMBER_NAMES and MEMBER_NAME.fullmatch(name):
                self._ignored_names.add(name)
            self._ignored.labels(name if name in self._ignored_names else "other").inc()

    def _count_turn(self, outcome: TurnOutcome) -> None:
        self._memory[outcome.session] = outcome.memory
        self._turns.labels(outcome.finish_reason).inc()
        self._tokens.labels("prompt").inc(outcome.prompt_tokens)
        self._tokens.labels("output").inc(outcome.output_tokens)
        for phase, seconds in outcome.seconds.items():
            self._phases.labels(phase).observe(seconds)
        self._repairs_skipped.inc(outcome.repairs_skipped)
        if outcome.own_repair is not None:
            self._count_repair(outcome.own_repair)
        if outcome.episode is not None:
            self._count_match(outcome.episode)

    def _count_match(self, report: EpisodeReport) -> None:
        self._matches.inc()
        if report.switched:
            self._switches.inc()
            self._moved_rows.inc(report.rows_moved)
            self._moved_bytes.inc(report.bytes_moved)

    def _count_repair(self, report: RepairReport) -> None:
        self._repairs.labels(report.trigger).observe(report.seconds)
        self._repair_shares.observe(report.share_scanned)
        for name, counter in self._repair_counts.items():
            counter.labels(report.trigger).inc(getattr(report, name))

    def render(self, stats: Mapping[str, pb.WorkerStats]) -> bytes:
        """Render the metrics page with the current counters of the reachable workers, by name."""
        self._workers.update(stats)
        return generate_latest(self._registry)
