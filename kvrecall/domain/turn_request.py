"""Planning of a turn from the request and the committed session, before anything is changed.

Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvrecall.domain.errors import (
    CallsOutstanding,
    DuplicateCall,
    EmptyTurn,
    InvalidRequest,
    LimitExceeded,
    ResultConflict,
    SessionBusy,
    ToolResultWithoutCall,
    TurnTooLong,
)
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.messages import Message, Sampling, ToolCall, json_object
from kvrecall.domain.sessions.session import Session
from kvrecall.domain.settings.session import RepairTrigger
from kvrecall.domain.tool_calls import CallStatus, PendingCall

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class TurnRequest:
    """A turn as the client requests it.

    - `seed`: None derives it from the session's seed and the turn's number.
    - `repair`: repair on this turn's messages before they are prefilled; None: as the session's
      settings say, if something is predicted in this turn.
    - `wait_for_repairs`: let due repairs finish first instead of taking what they have found so
      far.
    - `history`: the digest of the conversation up to the last of the messages, by which the turn is
      found again; empty: it need not be.
    - `follows`: the turn that it follows; None: whichever is the last. Raises SessionBusy when
      another one came first.
    - `prompt`: token ids instead of messages. They are appended as they are, and what is generated
      behind them is text alone: neither reasoning nor calls.
    - `opening`: the beginning of the answer. The model goes on with it, and the message has both.
    - `background`: nobody waits for the answer; other work comes first.
    """

    messages: tuple[Message, ...]
    generate: bool = True
    sampling: Sampling | None = None
    seed: int | None = None
    queue: bool = False
    keep_distribution: bool = False
    compare_with: str = ""
    repair: bool | None = None
    wait_for_repairs: bool = False
    history: bytes = b""
    follows: int | None = None
    prompt: tuple[int, ...] = ()
    opening: str = ""
    background: bool = False

    @property
    def predicts(self) -> bool:
        """True if an answer is generated, or a recorded one's distribution is measured."""
        return self.generate or self.keep_distribution or bool(self.compare_with)


@dataclass(frozen=True)
class TurnPlan:
    """The worker's task in a turn.

    `messages` begin with the results of the pause before, in call order. `inline_results` are the
    results that the turn itself brings, by call id. `asks` are recorded tool calls that the turn
    ends on. `defer_repair`: nothing is predicted that a repair could help, so what the turn leaves
    unanswered is part of the next repair's signal.
    """

    number: int
    messages: tuple[Message, ...]
    sampling: Sampling
    repair: bool
    defer_repair: bool
    inline_results: Mapping[str, str]
    asks: tuple[ToolCall, ...]


def plan_turn(session: Session, request: TurnRequest, settings: ServiceLimits) -> TurnPlan:
    """Check the request against the session.

    Raises InvalidRequest, CallsOutstanding, ResultConflict, SessionBusy.
    """
    if request.follows is not None and request.follows != session.turns:
        message = f"another turn has followed turn {request.follows} of session {session.id!r}"
        raise SessionBusy(message, session=session.id)
    check_messages(request.messages, settings)
    length = settings.default_max_tokens or settings.cut_length(Sampling.max_tokens)
    sampling = request.sampling or Sampling(length)
    limit = settings.cut_length(sampling.max_tokens)
    if not 1 <= sampling.max_tokens <= limit:
        raise LimitExceeded("max_tokens", f"max_tokens must be between 1 and {limit}", limit)
    answers = _leading_results(request.messages)
    calls, inline_results = _answered(session.calls, answers)
    asks = _walk(request.messages[len(answers) :], len(answers), request.generate)
    messages = tuple(call.result_message() for call in calls) + request.messages[len(answers) :]
    if not messages and not request.prompt:
        raise EmptyTurn(
            "messages",
            "a turn needs a message, unless results of tool calls are waiting to be appended",
        )
    number = session.turns + 1
    seed = (session.settings.seed + number) % 2**64 if request.seed is None else request.seed
    brings_news = bool(inline_results or request.messages[len(answers) :] or request.prompt)
    repairs = _repairs(session, request, brings_news=brings_news)
    deferred = repairs and request.repair is None and not request.predicts
    return TurnPlan(
        number,
        messages,
        replace(sampling, seed=seed),
        repairs and not deferred,
        deferred,
        inline_results,
        asks,
    )


def _repairs(session: Session, request: TurnRequest, *, brings_news: bool) -> bool:
    """Whether rows are promoted before the turn.

    By default not for results that were reported as events and nothing else, where the pause's repair
    has had them. Raises InvalidRequest.
    """
    if request.repair and not session.settings.repair_rows:
        raise InvalidRequest(
            "repair", "this session keeps no rows for repair; open one with repair_rows over 0"
        )
    if request.repair is not None:
        return request.repair
    repaired = not brings_news and session.settings.repairs_on(RepairTrigger.TOOL_RESULT)
    return session.settings.repairs_on(RepairTrigger.TURN) and not repaired


def check_messages(messages: Sequence[Message], settings: ServiceLimits) -> None:
    """Check messages independently of any session. Raises TurnTooLong, InvalidRequest."""
    check_size(messages, settings)
    for index, message in enumerate(messages):
        check_message(message, f"messages[{index}]")


def check_size(messages: Sequence[Message], settings: ServiceLimits) -> None:
    """Check that one turn may bring so many messages of this size. Raises TurnTooLong."""
    if len(messages) > settings.max_turn_messages:
        limit = settings.max_turn_messages
        raise TurnTooLong(
            "messages", f"{len(messages)} messages in one turn; the limit is {limit}", limit
        )
    size = sum(message.size for message in messages)
    if size > settings.max_turn_bytes:
        limit = settings.max_turn_bytes
        raise TurnTooLong("messages", f"{size} bytes in one turn; the limit is {limit}", limit)


def check_message(message: Message, field: str) -> None:
    """Check one message by itself; `field` is its place in the request. Raises InvalidRequest."""
    if message.role not in ROLES:
        raise InvalidRequest(
            f"{field}.role", f"role {message.role!r} is none of {', '.join(ROLES)}"
        )
    if message.tool_calls and message.role != "assistant":
        raise InvalidRequest(f"{field}.tool_calls", "only an assistant message has tool calls")
    if bool(message.tool_call_id) != (message.role == "tool"):
        raise InvalidRequest(
            f"{field}.tool_call_id",
            "a tool message names the call it answers, no other message does",
        )
    for position, call in enumerate(message.tool_calls):
        _check_call(call, f"{field}.tool_calls[{position}]")
    if len({call.id for call in message.tool_calls}) < len(message.tool_calls):
        raise DuplicateCall(f"{field}.tool_calls", "two tool calls of one message have the same id")


def _check_call(call: ToolCall, field: str) -> None:
    if not call.id or not call.name:
        raise InvalidRequest(field, "a tool call needs an id and a name")
    if json_object(call.arguments) is None:
        raise InvalidRequest(
            f"{field}.arguments", "the arguments of a tool call are the JSON text of an object"
        )


def _leading_results(messages: Sequence[Message]) -> list[Message]:
    results = []
    for message in messages:
        if message.role != "tool":
            break
        results.append(message)
    return results


def _answered(
    calls: Sequence[PendingCall], answers: Sequence[Message]
) -> tuple[list[PendingCall], dict[str, str]]:
    """The pause's calls, every one with its result, and the results that are new with this turn."""
    waiting = {call.call.id: call for call in calls}
    results: dict[str, str] = {}
    for index, answer in enumerate(answers):
        call = waiting.get(answer.tool_call_id)
        if call is None or answer.tool_call_id in results:
            raise _without_call(index, answer)
        if call.result is not None and call.result != answer.content:
            why = (
                "timed out before"
                if call.status is CallStatus.TIMED_OUT
                else "has another result already than"
            )
            raise ResultConflict(f"tool call {call.call.id!r} {why} this result", call=call.call.id)
        results[answer.tool_call_id] = answer.content
    missing = [
        call.call.id for call in calls if call.result is None and call.call.id not in results
    ]
    if missing:
        raise CallsOutstanding(missing)
    inline_results = {
        call: result for call, result in results.items() if waiting[call].result is None
    }
    return [
        replace(call, result=inline_results.get(call.call.id, call.result)) for call in calls
    ], inline_results


def _walk(messages: Sequence[Message], offset: int, generate: bool) -> tuple[ToolCall, ...]:
    """Follow recorded calls and their results through a turn.

    The calls it ends on, none of them answered.
    """
    asked: dict[str, ToolCall] = {}
    answered = False
    for index, message in enumerate(messages, offset):
        if message.role == "tool":
            if asked.pop(message.tool_call_id, None) is None:
                raise _without_call(index, message)
            answered = True
            continue
        if asked:
            raise CallsOutstanding(list(asked))
        asked = {call.id: call for call in message.tool_calls}
        answered = False
    if asked and (generate or answered):
        raise CallsOutstanding(list(asked))
    return tuple(asked.values())


def _without_call(index: int, message: Message) -> ToolResultWithoutCall:
    return ToolResultWithoutCall(
        f"messages[{index}].tool_call_id",
        f"no tool call {message.tool_call_id!r} waits for a result here",
        call=message.tool_call_id,
    )
