"""The log of a session: its committed turns, with their tokens' positions."""

from collections.abc import Sequence
from datetime import UTC, datetime

from gateway.rest.schemas.base import View
from gateway.rest.schemas.memory import TurnMemoryView
from gateway.rest.schemas.messages import AssistantMessageView, ToolCallView
from gateway.rest.schemas.turns import (
    ReselectionsView,
    TurnEpisodeView,
    TurnPrefillView,
    TurnRetrievalView,
)
from kvrecall.domain.messages import Message
from kvrecall.domain.session import Session
from services.reading.turn_records import TurnRecord


class LoggedMessageView(View):
    """Message of a turn, as in the OpenAI API."""

    role: str
    content: str
    tool_calls: list[ToolCallView] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    @classmethod
    def from_domain(cls, message: Message) -> "LoggedMessageView":
        """Convert from the domain value."""
        return cls(
            role=message.role,
            content=message.content,
            tool_calls=[ToolCallView.from_domain(call) for call in message.tool_calls] or None,
            tool_call_id=message.tool_call_id or None,
            name=message.name or None,
        )


class TurnSpanView(View):
    """Consecutive tokens of one side, from `start` to `stop` - 1; results of tools are the user's."""

    side: str
    start: int
    stop: int


class LoggedTurnView(View):
    """Committed turn with its tokens, from `start` to `stop` - 1 of the session.

    `messages` are its input, `answer` what was generated, null where nothing was. `worker` ran it,
    after `retries` others were lost. `settled_tokens` of `prefilled_tokens` were of the answer
    before, and computed again.
    """

    turn: int
    start: int
    stop: int
    messages: list[LoggedMessageView]
    answer: AssistantMessageView | None
    finish_reason: str
    prompt_tokens: int
    output_tokens: int
    reasoning_tokens: int
    prefilled_tokens: int
    settled_tokens: int
    spans: list[TurnSpanView]
    seconds: dict[str, float]
    started_at: datetime
    committed_at: datetime
    worker: str | None
    retries: int
    episode: TurnEpisodeView | None
    durable: bool
    memory: TurnMemoryView
    reselections: ReselectionsView | None
    prefill: TurnPrefillView | None
    retrieval: TurnRetrievalView | None

    @classmethod
    def from_domain(cls, record: TurnRecord) -> "LoggedTurnView":
        """Convert from the domain value."""
        turn, outcome = record.turn, record.turn.outcome
        answer, episode = outcome.message, outcome.episode
        return cls(
            turn=turn.number,
            start=record.start,
            stop=record.stop,
            messages=[LoggedMessageView.from_domain(message) for message in turn.messages],
            answer=None if answer is None else AssistantMessageView.from_domain(answer),
            finish_reason=outcome.finish_reason,
            prompt_tokens=outcome.prompt_tokens,
            output_tokens=outcome.output_tokens,
            reasoning_tokens=outcome.reasoning_tokens,
            prefilled_tokens=outcome.prefilled_tokens,
            settled_tokens=outcome.settled_tokens,
            spans=[TurnSpanView.model_validate(span) for span in record.spans],
            seconds=dict(outcome.seconds),
            started_at=datetime.fromtimestamp(outcome.started_at, UTC),
            committed_at=datetime.fromtimestamp(outcome.committed_at, UTC),
            worker=outcome.worker or None,
            retries=outcome.retries,
            episode=None if episode is None else TurnEpisodeView.model_validate(episode),
            durable=outcome.durable,
            memory=TurnMemoryView.from_domain(outcome),
            reselections=ReselectionsView.from_domain(outcome.reselections),
            prefill=TurnPrefillView.from_domain(outcome.prefill),
            retrieval=TurnRetrievalView.from_domain(outcome.retrieval),
        )


class TurnLogView(View):
    """Turns of a session, oldest first. Pass `next_after` as `after` to get those that follow."""

    session: str
    turns_total: int
    length: int
    turns: list[LoggedTurnView]
    next_after: int | None

    @classmethod
    def from_domain(
        cls, session: Session, records: Sequence[TurnRecord], limit: int
    ) -> "TurnLogView":
        """Convert from a session and some of its turns, `limit` at most."""
        last = records[-1].turn.number if len(records) == limit else session.turns
        return cls(
            session=session.id,
            turns_total=session.turns,
            length=session.memory.length,
            turns=[LoggedTurnView.from_domain(record) for record in records],
            next_after=last if last < session.turns else None,
        )


def to_time(seconds: float | None) -> datetime | None:
    """Convert Unix seconds to a time; None, and the 0 of a time that was not stored, to None."""
    return datetime.fromtimestamp(seconds, UTC) if seconds else None
