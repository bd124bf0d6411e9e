"""The log of a session: its committed turns, with their tokens' positions."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from gateway.rest.schemas.memory import to_turn_memory
from gateway.rest.schemas.messages import (
    AssistantMessage,
    LoggedMessage,
    to_assistant_message,
    to_logged_message,
)
from gateway.rest.schemas.public import copy_optional, copy_to
from kvrecall import client
from kvrecall.domain.sessions.session import Session
from services.reading.turn_records import TurnRecord


@dataclass(frozen=True)
class LoggedTurn(client.LoggedTurn):
    """Committed turn with its tokens, from `start` to `stop` - 1 of the session.

    `messages` are its input, `answer` what was generated, null where nothing was. `worker` ran it,
    after `retries` others were lost. `settled_tokens` of `prefilled_tokens` were of the answer
    before, and computed again. `dropped_tokens` of the turns before are gone since: reasoning that the
    chat template drops. Positions are those at the turn's end. `seconds` are by phase, `phase_starts`
    those from `started_at` to each phase's first beginning, empty in older turns. `request_id` and
    `trace_id` are of the request that ran it: log lines and traces have them. `sender` is who
    sent that, null in older turns.
    """

    # The client reads both forms of a message as one.
    messages: tuple[LoggedMessage, ...]  # type: ignore[assignment]
    answer: AssistantMessage | None  # type: ignore[assignment]


@dataclass(frozen=True)
class TurnLog(client.TurnLog):
    """Turns of a session, oldest first. Pass `next_after` as `after` to get those that follow."""

    turns: tuple[LoggedTurn, ...]


def to_turn_log(session: Session, records: Sequence[TurnRecord], limit: int) -> TurnLog:
    """Convert a session and some of its turns, `limit` at most."""
    last = records[-1].turn.number if len(records) == limit else session.turns
    return TurnLog(
        session=session.id,
        turns_total=session.turns,
        length=session.memory.length,
        turns=tuple(_to_logged_turn(record) for record in records),
        next_after=last if last < session.turns else None,
    )


def _to_logged_turn(record: TurnRecord) -> LoggedTurn:
    turn, outcome = record.turn, record.turn.outcome
    return copy_to(
        LoggedTurn,
        outcome,
        turn=turn.number,
        start=record.start,
        stop=record.stop,
        messages=tuple(to_logged_message(message) for message in turn.messages),
        answer=to_assistant_message(outcome.message),
        spans=tuple(copy_to(client.TurnSpan, span) for span in record.spans),
        started_at=datetime.fromtimestamp(outcome.started_at, UTC),
        committed_at=datetime.fromtimestamp(outcome.committed_at, UTC),
        worker=outcome.worker or None,
        request_id=outcome.request_id or None,
        trace_id=outcome.trace_id or None,
        sender=copy_optional(client.TurnSender, outcome.sender),
        episode=copy_optional(client.TurnEpisode, outcome.episode),
        memory=to_turn_memory(outcome),
        reselections=copy_optional(client.Reselections, outcome.reselections),
        prefill=copy_optional(client.TurnPrefill, outcome.prefill),
        retrieval=copy_optional(client.TurnRetrieval, outcome.retrieval),
        remembered=copy_optional(client.TurnRemembered, outcome.remembered),
    )
