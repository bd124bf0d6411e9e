"""The Prometheus page: a registry per application, fed by what the services tell and what the worker counts."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from gateway.metrics.workers import WorkerCounters
from kvrecall.domain.events import (
    EpisodesBuilt,
    EpisodesFailed,
    PagesRebuilt,
    PauseTimedOut,
    QuotaReached,
    RepairFailed,
    RepairFinished,
    ServiceEvent,
    SessionDeleted,
    SessionForked,
    SessionMoved,
    TurnFailed,
    TurnFinished,
    TurnRetried,
)
from kvrecall.domain.reports import EpisodeReport, MemoryReport, RepairReport, TurnOutcome
from kvrecall.protocol.v1 import worker_pb2 as wire
from services.admission import Admission

REPAIR_COUNTS = {
    "candidates": ("repair_candidates", "Evicted tokens that repairs could have chosen."),
    "scored_rows": ("repair_scored_rows", "Evicted tokens that repairs scored."),
    "promoted": ("promoted_rows", "Tokens that repairs brought back."),
    "demoted": ("demoted_rows", "Rows per KV head that left the active set for those that came."),
    "bytes_read": ("repair_read_bytes", "Bytes of stored rows that repairs read while scoring."),
    "truncated": ("repairs_cut", "Repairs that a deadline or a turn ended."),
}
"""Counters of repairs, by the report's field: the metric's name and what it says."""
SHARES = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """Everything on the metrics page."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, admission: Admission) -> None:
        self._registry = registry = CollectorRegistry()
        self._workers = WorkerCounters()
        registry.register(self._workers)
        self._held: dict[str, MemoryReport] = {}
        self._requests = Counter(
            "kvrecall_http_requests", "Requests answered.", ["method", "status"], registry=registry
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
            "Requests refused as their tenant holds as much as it may.",
            registry=registry,
        )
        self._add_moves()
        self._add_repairs()
        self._add_episodes()
        self._add_gauges(admission)

    def _add_moves(self) -> None:
        """What it costs that workers come and go."""
        registry = self._registry
        self._retries = Counter(
            "kvrecall_turn_retries",
            "Turns run again in another worker.",
            ["code"],
            registry=registry,
        )
        self._moves = Histogram(
            "kvrecall_move_seconds", "Time of a move.", buckets=SECONDS, registry=registry
        )
        self._rebuilds = Histogram(
            "kvrecall_rebuild_seconds",
            "Time of computing lost pages again.",
            buckets=SECONDS,
            registry=registry,
        )

    def _add_repairs(self) -> None:
        """What repairs looked at, what they moved, and whether they ended in time."""
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
            "Share of the candidates scored.",
            buckets=SHARES,
            registry=registry,
        )
        self._repair_counts = {
            name: Counter(f"kvrecall_{metric}", text, ["trigger"], registry=registry)
            for name, (metric, text) in REPAIR_COUNTS.items()
        }
        self._repair_failures = Counter(
            "kvrecall_repair_failures",
            "Repairs that could not be run.",
            ["code"],
            registry=registry,
        )
        self._repairs_ended = Counter(
            "kvrecall_repairs_between_turns",
            "Repairs by what came first: their end, or a turn.",
            ["first"],
            registry=registry,
        )
        self._repairs_left_out = Counter(
            "kvrecall_repairs_left_out",
            "Repairs that were due and not begun when a turn came.",
            registry=registry,
        )
        self._timed_out = Counter(
            "kvrecall_pauses_timed_out",
            "Pauses that were ended because nothing was heard of a call.",
            registry=registry,
        )

    def _add_episodes(self) -> None:
        """What happens to sessions' episodes."""
        registry = self._registry
        self._matches = Counter(
            "kvrecall_episode_matches", "Turns matched with an episode.", registry=registry
        )
        self._switches = Counter(
            "kvrecall_episode_switches",
            "Turns that made another episode active.",
            registry=registry,
        )
        self._moved_rows = Counter(
            "kvrecall_episode_moved_rows", "Rows that switches loaded.", registry=registry
        )
        self._moved_bytes = Counter(
            "kvrecall_episode_moved_bytes", "Bytes of these rows.", registry=registry
        )
        self._builds = Histogram(
            "kvrecall_episode_build_seconds",
            "Time of building episodes.",
            buckets=SECONDS,
            registry=registry,
        )
        self._episode_failures = Counter(
            "kvrecall_episode_failures",
            "What could not be done for episodes.",
            ["step", "code"],
            registry=registry,
        )

    def _add_gauges(self, admission: Admission) -> None:
        """Values that are asked for at each scrape."""
        active = Gauge(
            "kvrecall_active_rows",
            "Active rows of all sessions' largest layers.",
            registry=self._registry,
        )
        active.set_function(lambda: sum(held.active_rows for held in self._held.values()))
        bytes_held = Gauge(
            "kvrecall_active_bytes",
            "Bytes of active rows of all sessions.",
            registry=self._registry,
        )
        bytes_held.set_function(lambda: sum(held.active_bytes for held in self._held.values()))
        evicted = Gauge(
            "kvrecall_evicted_rows",
            "Tokens with an evicted row, all sessions.",
            registry=self._registry,
        )
        evicted.set_function(lambda: sum(held.evicted_rows for held in self._held.values()))
        running = Gauge(
            "kvrecall_turns_running", "Turns that hold a place.", registry=self._registry
        )
        running.set_function(lambda: admission.running)
        waiting = Gauge(
            "kvrecall_turns_waiting", "Turns that wait for a place.", registry=self._registry
        )
        waiting.set_function(lambda: admission.waiting)

    def count_request(self, method: str, status: int) -> None:
        """Note an answered request; methods that HTTP does not know are counted together."""
        known = (
            method
            if method in ("GET", "POST", "DELETE", "HEAD", "OPTIONS", "PUT", "PATCH")
            else "other"
        )
        self._requests.labels(known, str(status)).inc()

    def observe(self, observation: ServiceEvent) -> None:
        """Note what the services tell."""
        match observation:
            case TurnFinished(outcome):
                self._count_turn(outcome)
            case TurnFailed(_, code):
                self._failures.labels(code).inc()
            case RepairFinished(session, report, memory):
                self._held[session] = memory
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
            case SessionDeleted(session):
                self._held.pop(session, None)
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

    def _count_turn(self, outcome: TurnOutcome) -> None:
        self._held[outcome.session] = outcome.memory
        self._turns.labels(outcome.finish_reason).inc()
        self._tokens.labels("prompt").inc(outcome.prompt_tokens)
        self._tokens.labels("output").inc(outcome.output_tokens)
        for phase, seconds in outcome.seconds.items():
            self._phases.labels(phase).observe(seconds)
        self._repairs_left_out.inc(outcome.repairs_skipped)
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

    def render(self, stats: Mapping[str, wire.WorkerStats]) -> bytes:
        """The page, with the counters of now of the workers that answer, by name."""
        self._workers.show(stats)
        return generate_latest(self._registry)
