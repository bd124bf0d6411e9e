"""Counts events of the service in the gateway's metrics."""

import re
from collections.abc import Iterable

from gateway.metrics.catalogue import GATEWAY
from kvrecall.domain.codes import ErrorCode
from kvrecall.domain.events import (
    AnswerReplayed,
    CallReported,
    ClaimLost,
    EpisodesBuilt,
    EpisodesFailed,
    GrammarCompiled,
    MembersIgnored,
    PagesRebuilt,
    PauseTimedOut,
    QuotaReached,
    RepairFailed,
    RepairFinished,
    ServiceEvent,
    SessionForked,
    SessionMoved,
    SessionOpened,
    TokensComputed,
    TurnFailed,
    TurnFinished,
    TurnRetried,
    WriterFenced,
)
from kvrecall.domain.reports import EpisodeReport, RepairReport, TurnOutcome
from kvrecall.metrics.page import Metrics
from kvrecall.telemetry.spans import current_span
from services.catalog.observed import CatalogCall

HTTP_METHODS = ("GET", "POST", "DELETE", "HEAD", "OPTIONS", "PUT", "PATCH")
# Members of requests that are counted by their names, and the form of such a name: clients choose
# them, so a key or a text must not be one.
MEMBER_NAMES = 64
MEMBER_NAME = re.compile(r"[a-z][a-z_]{0,39}")


class Recorder:
    """Metrics of one gateway, fed by its requests and the service's events."""

    def __init__(self) -> None:
        self.metrics = Metrics(GATEWAY)
        self._member_names: set[str] = set()

    def begin_request(self) -> None:
        """Count a request that is being answered."""
        self.metrics.inc("http_in_flight")

    def end_request(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count an answered request, its response's beginning after `seconds`.

        Unknown HTTP methods are counted together as `other`.
        """
        metrics = self.metrics
        method = method if method in HTTP_METHODS else "other"
        metrics.inc("http_in_flight", -1)
        metrics.inc("http_requests_total", method=method, route=route, status=str(status))
        metrics.observe("http_request_seconds", seconds, method=method, route=route)

    def count_call(self, method: str, status: str) -> None:
        """Count a gRPC call with the name of its status."""
        self.metrics.inc("grpc_calls_total", method=method, status=status)

    def count_catalog_call(self, call: CatalogCall) -> None:
        """Time a call of the catalog, and count it if it failed."""
        self.metrics.observe("catalog_seconds", call.seconds, op=call.kind)
        if call.failed:
            self.metrics.inc("catalog_errors_total", op=call.kind)

    def observe(self, event: ServiceEvent) -> None:
        """Count an event of the service."""
        metrics = self.metrics
        match event:
            case TurnFinished():
                self._count_turn(event)
            case TurnFailed(_, code):
                metrics.inc("turn_failures_total", code=code, fault=get_fault(code))
            case AnswerReplayed():
                metrics.inc("replayed_answers_total")
            case TurnRetried(code=code):
                metrics.inc("turn_retries_total", code=code)
            case RepairFinished(report=report):
                self._count_repair(report)
                first = "end" if report.in_pause else "turn"
                metrics.inc("repairs_between_turns_total", first=first)
            case RepairFailed(code=code):
                metrics.inc("repair_failures_total", code=code)
            case CallReported(type=kind, late=late):
                metrics.inc("tool_events_total", type=kind, late=str(late).lower())
            case PauseTimedOut():
                metrics.inc("pauses_timed_out_total")
            case EpisodesBuilt(seconds=seconds):
                metrics.observe("episode_build_seconds", seconds)
            case EpisodesFailed(step=step, code=code):
                metrics.inc("episode_failures_total", step=step, code=code)
            case TokensComputed():
                self._count_computed(event)
            case GrammarCompiled(cpu_seconds=seconds):
                metrics.inc("grammar_seconds_total", seconds)
            case QuotaReached():
                metrics.inc("quota_refusals_total")
            case MembersIgnored(names):
                self._count_ignored(names)
            case _:
                self._count_session(event)

    def _count_session(self, event: ServiceEvent) -> None:
        """Count an event in the life of a session beside its turns."""
        metrics = self.metrics
        match event:
            case SessionOpened(reason=reason):
                metrics.inc("takeovers_total", reason=reason)
            case ClaimLost():
                metrics.inc("claims_lost_total")
            case WriterFenced(where):
                metrics.inc("stale_epochs_total", where=where)
            case SessionForked(at=at, seconds=seconds):
                metrics.observe("fork_seconds", seconds, at=at)
            case SessionMoved(seconds=seconds):
                metrics.observe("move_seconds", seconds)
            case PagesRebuilt(seconds=seconds):
                metrics.observe("rebuild_seconds", seconds)

    def _count_ignored(self, names: Iterable[str]) -> None:
        """Count members by name while there are few; the others, and odd names, as `other`."""
        for name in names:
            if len(self._member_names) < MEMBER_NAMES and MEMBER_NAME.fullmatch(name):
                self._member_names.add(name)
            label = name if name in self._member_names else "other"
            self.metrics.inc("ignored_members_total", member=label)

    def _count_turn(self, event: TurnFinished) -> None:
        metrics, outcome, start, timing = self.metrics, event.outcome, event.start, event.timing
        ended = outcome.finish_reason
        metrics.inc("turns_total", finish_reason=ended)
        if not outcome.durable:
            metrics.inc("turns_not_durable_total")
        trace = current_span().trace_id
        metrics.observe("turn_seconds", timing.total, trace, finish_reason=ended)
        if timing.first_token is not None:
            after = "pause" if start.after_pause else "turn"
            first = timing.first_token
            metrics.observe("time_to_first_token_seconds", first, trace, after=after)
        if timing.per_output_token is not None:
            metrics.observe("time_per_output_token_seconds", timing.per_output_token)
        for phase, seconds in {**outcome.seconds, "commit": timing.commit}.items():
            metrics.observe("turn_phase_seconds", seconds, phase=phase)
        self._count_tokens(event)
        if start.pause is not None:
            metrics.observe("pause_seconds", start.pause)
        if start.repair_lead is not None:
            metrics.observe("repair_lead_seconds", start.repair_lead)
        metrics.inc("repairs_left_out_total", outcome.repairs_skipped)
        if outcome.own_repair is not None:
            self._count_repair(outcome.own_repair)
        if outcome.episode is not None:
            self._count_match(outcome.episode)
        self._count_fidelity(outcome)

    def _count_computed(self, event: TokensComputed) -> None:
        kinds = {
            "prefilled": event.prefilled,
            "decoded": event.decoded,
            "repaired": event.repaired,
            "settled": event.settled,
        }
        for kind, count in kinds.items():
            self.metrics.inc("computed_tokens_total", count, kind=kind)

    def _count_tokens(self, event: TurnFinished) -> None:
        metrics, outcome, start = self.metrics, event.outcome, event.start
        tokens = {"prompt": outcome.prompt_tokens, "output": outcome.output_tokens}
        for kind, count in tokens.items():
            metrics.inc("tokens_total", count, kind=kind)
            metrics.observe("turn_tokens", count, kind=kind)
        metrics.inc("remembered_tokens_total", start.remembered_tokens)
        if start.shared_tokens is not None:
            result = "hit" if start.shared_tokens else "miss"
            metrics.inc("prefix_lookups_total", result=result)
            metrics.inc("prefix_shared_tokens_total", start.shared_tokens)

    def _count_fidelity(self, outcome: TurnOutcome) -> None:
        if outcome.fidelity is not None:
            self.metrics.observe("fidelity_kl_nats", outcome.fidelity.kl_mean)
            self.metrics.observe("fidelity_top1_ratio", outcome.fidelity.top1_agreement)

    def _count_match(self, report: EpisodeReport) -> None:
        metrics = self.metrics
        metrics.inc("episode_matches_total")
        if report.switched:
            metrics.inc("episode_switches_total")
            metrics.inc("episode_moved_rows_total", report.rows_moved)
            metrics.inc("episode_moved_bytes_total", report.bytes_moved)

    def _count_repair(self, report: RepairReport) -> None:
        metrics, trigger = self.metrics, report.trigger
        trace = current_span().trace_id
        metrics.observe("repair_seconds", report.seconds, trace, trigger=trigger)
        metrics.observe("repair_scanned_ratio", report.share_scanned)
        counts = {
            "repair_candidate_tokens_total": report.candidates,
            "repair_scored_tokens_total": report.scored_rows,
            "repair_promoted_tokens_total": report.promoted,
            "repair_demoted_rows_total": report.demoted,
            "repair_read_bytes_total": report.bytes_read,
            "repairs_cut_total": report.truncated,
        }
        for name, count in counts.items():
            metrics.inc(name, count, trigger=trigger)


def get_fault(code: str) -> str:
    """Who has to act on an error: the client, the operator for more capacity, or the service."""
    status = ErrorCode.parse(code).http_status
    if code == ErrorCode.CANCELLED:
        return "client"
    if status == 429:
        return "capacity"
    return "client" if status < 500 else "service"
