"""Events of the service as log lines: one of each turn, and what no response reports."""

from typing import Any

import structlog

from gateway.observation.identity import hide_foreign
from kvrecall.domain.events import (
    EpisodesFailed,
    MembersIgnored,
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
from services.usage import count_tokens

_DIGITS = 6


def log_event(event: ServiceEvent) -> None:
    """Log a turn, or an event that no response reports, such as a failed background repair."""
    log = structlog.get_logger("kvrecall.service")
    match event:
        case TurnFinished():
            log.info("turn", **describe_turn(event), code="ok")
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
        case MembersIgnored(_, text):
            log.info("ignored", parts=text)
        case RepairFailed():
            log.warning("repair failed", **vars(event))
        case EpisodesFailed():
            log.warning("episodes or memory failed", **vars(event))
        case PagesRebuilt():
            log.warning("missing pages recomputed", **vars(event))
        case TurnRetried():
            log.warning("turn retried in another worker", **vars(event))
        case SessionMoved():
            log.info("session moved", **vars(event))
        case PauseTimedOut():
            log.warning("tool calls timed out", **vars(event))


def describe_turn(event: TurnFinished) -> dict[str, Any]:
    """Describe a committed turn by numbers and ids; nothing of its text."""
    outcome, first = event.outcome, event.timing.first_token
    seconds = {phase: round(value, _DIGITS) for phase, value in outcome.seconds.items()}
    return {
        "session": outcome.session,
        "turn": outcome.turn,
        "worker": "" if event.run is None else event.run.worker,
        "finish_reason": outcome.finish_reason,
        "prompt_tokens": outcome.prompt_tokens,
        "output_tokens": outcome.output_tokens,
        "remembered_tokens": count_tokens(outcome, appended=0).cached,
        "first_token": None if first is None else round(first, _DIGITS),
        "seconds": seconds,
        "durable": outcome.durable,
        "repairs": len(outcome.repairs),
        "repairs_skipped": outcome.repairs_skipped,
        "reselections": 0 if outcome.reselections is None else outcome.reselections.count,
    }
