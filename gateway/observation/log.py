"""Events of the service as log lines: one of each turn, and what no response reports."""

from collections.abc import Mapping
from typing import Any

import structlog

from gateway.observation.identity import hide_foreign
from gateway.openai.usage import count_tokens
from kvrecall.domain.events import (
    EpisodesFailed,
    PagesRebuilt,
    PauseTimedOut,
    RepairFailed,
    RepairFinished,
    ServiceEvent,
    SessionMoved,
    TurnFailed,
    TurnFinished,
    TurnRetried,
)
from kvrecall.domain.reports import TurnOutcome

_PHASES_AFTER_FIRST_TOKEN = ("decode", "evict", "flush")
_DIGITS = 6


def log_event(event: ServiceEvent) -> None:
    """Log a turn, or an event that no response reports, such as a failed background repair."""
    log = structlog.get_logger("kvrecall.service")
    match event:
        case TurnFinished(outcome=outcome, run=run):
            worker = "" if run is None else run.worker
            log.info("turn", **describe_turn(outcome), worker=worker, code="ok")
        case TurnFailed(session, code):
            log.info("turn", session=hide_foreign(session), finish_reason="error", code=str(code))
        case RepairFinished(session, report):
            log.debug(
                "repair",
                session=session,
                trigger=report.trigger,
                seconds=round(report.seconds, _DIGITS),
                promoted=report.promoted,
                truncated=report.truncated,
            )
        case RepairFailed():
            log.warning("repair failed", **vars(event))
        case EpisodesFailed():
            log.warning("episode maintenance failed", **vars(event))
        case PagesRebuilt():
            log.warning("missing pages recomputed", **vars(event))
        case TurnRetried():
            log.warning("turn retried in another worker", **vars(event))
        case SessionMoved():
            log.info("session moved", **vars(event))
        case PauseTimedOut():
            log.warning("tool calls timed out", **vars(event))


def describe_turn(outcome: TurnOutcome) -> dict[str, Any]:
    """Describe a committed turn by numbers and ids; nothing of its text."""
    seconds = {phase: round(value, _DIGITS) for phase, value in outcome.seconds.items()}
    return {
        "session": outcome.session,
        "turn": outcome.turn,
        "finish_reason": outcome.finish_reason,
        "prompt_tokens": outcome.prompt_tokens,
        "output_tokens": outcome.output_tokens,
        "remembered_tokens": count_tokens(outcome, appended=0).cached,
        "first_token": get_first_token_seconds(outcome.seconds),
        "seconds": seconds,
        "durable": outcome.durable,
        "repairs": len(outcome.repairs),
        "repairs_skipped": outcome.repairs_skipped,
        "reselections": 0 if outcome.reselections is None else outcome.reselections.count,
    }


def get_first_token_seconds(seconds: Mapping[str, float]) -> float | None:
    """Sum the phases from a turn's arrival to its first token; None for a turn without an answer."""
    if "first_token" not in seconds:
        return None
    before = (value for name, value in seconds.items() if name not in _PHASES_AFTER_FIRST_TOKEN)
    return round(sum(before), _DIGITS)
