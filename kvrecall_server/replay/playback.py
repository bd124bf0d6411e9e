"""Playback of a recording through a running service, with measurements of every turn."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvrecall.client import KvrecallClient, KvrecallError, Logprobs, Turn
from kvrecall_server.replay.recording import (
    NO_RESULT,
    Exchange,
    PauseStep,
    Recording,
    TurnStep,
    split_exchanges,
)

# Texts are not shortened below this number of characters.
MIN_CHARACTERS = 64


@dataclass(frozen=True)
class SessionOptions:
    """Settings of the replayed session; with `compare`, each turn is compared with a full cache."""

    method: str
    budget: int
    repair_rows: int
    repair_on: tuple[str, ...]
    compare: bool


@dataclass(frozen=True)
class ReplayedTurn:
    """One turn of the budgeted session; rows and bytes as reported, times in seconds.

    `kl_mean` (nats) and `top1_agreement` compare its next-token distributions over the
    `compared_tokens` tokens of the recorded reply with the full cache's.
    """

    conversation: str
    part: int
    turn: int
    length: int
    active_rows: int
    peak_rows: int
    bound_rows: int
    evicted_rows: int
    promoted: int
    active_bytes: int
    tier_bytes: Mapping[str, int]
    seconds: float
    first_token: float
    repair_seconds: float
    compared_tokens: int = 0
    kl_mean: float | None = None
    top1_agreement: float | None = None


@dataclass(frozen=True)
class ReplayResult:
    """Turns of one recording, replayed in `parts` sessions.

    `truncated_characters` were removed from texts that do not fit the model's context.
    """

    name: str
    turns: tuple[ReplayedTurn, ...]
    parts: int
    truncated_characters: int


def replay(client: KvrecallClient, recording: Recording, options: SessionOptions) -> ReplayResult:
    """Replay one recording; past the model's context, continue in a new session at an exchange.

    Raises KvrecallError.
    """
    pending = split_exchanges(recording)
    opening = _opening(recording)
    turns: list[ReplayedTurn] = []
    part = 0
    truncated = 0
    while pending:
        part += 1
        pair = _SessionPair.open(client, recording, options, part)
        done = 0
        try:
            for exchange in pending:
                turns.extend(pair.run(exchange))
                done += 1
        except KvrecallError as error:
            if error.code != "turn_too_long":
                raise
            if done == 0:
                pending[0], removed = _shorten(pending[0])
                truncated += removed
                part -= 1
                if not removed:
                    raise
        finally:
            pair.close()
        pending = pending[done:]
        if pending and done:
            pending[0] = _with_opening(opening, pending[0])
    return ReplayResult(recording.name, tuple(turns), part, truncated)


@dataclass
class _SessionPair:
    """The budgeted session and, for comparison, its twin with a full cache."""

    client: KvrecallClient
    name: str
    part: int
    session: str
    twin: str | None
    turn: int = 0

    @classmethod
    def open(
        cls, client: KvrecallClient, recording: Recording, options: SessionOptions, part: int
    ) -> "_SessionPair":
        tools = [dict(tool) for tool in recording.tools]
        session = client.create_session(
            research={
                "method": options.method,
                "repair_rows": options.repair_rows,
                "repair_on": options.repair_on,
            },
            budget=options.budget,
            tools=tools,
            seed=0,
        ).id
        twin = None
        if options.compare:
            # Under another salt: the session's own times are those of computing every token.
            twin = client.create_session(
                recall=False,
                budget=options.budget,
                tools=tools,
                seed=0,
                cache_salt="full cache",
            ).id
        return cls(client, recording.name, part, session, twin)

    def close(self) -> None:
        """Delete the sessions."""
        for session in (self.session, self.twin):
            if session is not None:
                self.client.delete_session(session)

    def run(self, exchange: Exchange) -> list[ReplayedTurn]:
        """Run an exchange; returns its turns. Raises KvrecallError, then none of them counts."""
        return list(self._steps(exchange))

    def _steps(self, exchange: Exchange) -> Iterator[ReplayedTurn]:
        for step in exchange.steps:
            match step:
                case TurnStep():
                    yield self._run_turn(step)
                case PauseStep():
                    self._report(step)

    def _run_turn(self, step: TurnStep) -> ReplayedTurn:
        messages = [dict(message) for message in step.messages]
        logprobs: Logprobs = {}
        if self.twin is not None:
            self.client.turn(self.twin, messages, generate=False, logprobs={"save": step.has_reply})
            logprobs = {"compare_with": self.twin} if step.has_reply else {}
        started = time.perf_counter()
        # A replay has no waiting time of its own: the turn waits for the repairs before it.
        answer = self.client.turn(
            self.session, messages, generate=False, wait_for_repairs=True, logprobs=logprobs
        )
        self.turn += 1
        return self._measure(answer, time.perf_counter() - started)

    def _report(self, step: PauseStep) -> None:
        """Send the results of the calls that the previous turn ended with."""
        for session in (self.twin, self.session):
            for call, result in step.results if session is not None else ():
                handle = self.client.attach(str(session))
                if result is None:
                    handle.tool_failed(call, NO_RESULT)
                else:
                    handle.tool_result(call, result)

    def _measure(self, answer: Turn, seconds: float) -> ReplayedTurn:
        memory = answer.memory
        fidelity = answer.fidelity
        return ReplayedTurn(
            conversation=self.name,
            part=self.part,
            turn=self.turn,
            **{name: getattr(memory, name) for name in _MEMORY_FIELDS},
            promoted=sum(repair.promoted for repair in memory.repairs),
            seconds=seconds,
            first_token=answer.seconds_to_first_token,
            repair_seconds=sum(repair.seconds for repair in memory.repairs),
            compared_tokens=0 if fidelity is None else fidelity.tokens,
            kl_mean=None if fidelity is None else fidelity.kl_mean,
            top1_agreement=None if fidelity is None else fidelity.top1_agreement,
        )


_MEMORY_FIELDS = (
    "length",
    "active_rows",
    "peak_rows",
    "bound_rows",
    "evicted_rows",
    "active_bytes",
    "tier_bytes",
)


def _opening(recording: Recording) -> tuple[Mapping[str, Any], ...]:
    first = recording.messages[0]
    return (first,) if first["role"] == "system" else ()


def _with_opening(opening: Sequence[Mapping[str, Any]], exchange: Exchange) -> Exchange:
    """The first exchange of a new session, with the system message before it."""
    first = exchange.steps[0]
    if not isinstance(first, TurnStep) or not opening or first.messages[0]["role"] == "system":
        return exchange
    return Exchange((replace(first, messages=(*opening, *first.messages)), *exchange.steps[1:]))


def _shorten(exchange: Exchange) -> tuple[Exchange, int]:
    """Truncate the texts of an exchange to half the length of the longest one.

    Returns the exchange and the number of characters removed, 0 if no text can be shortened.
    """
    longest = max(len(text) for text in _texts(exchange))
    if longest < MIN_CHARACTERS:
        return exchange, 0
    limit = longest // 2
    removed = sum(max(0, len(text) - limit) for text in _texts(exchange))
    return Exchange(tuple(_truncate(step, limit) for step in exchange.steps)), removed


def _texts(exchange: Exchange) -> Iterator[str]:
    for step in exchange.steps:
        match step:
            case TurnStep(messages):
                yield from (message["content"] for message in messages)
            case PauseStep(results):
                yield from (result for _, result in results if result is not None)


def _truncate(step: TurnStep | PauseStep, limit: int) -> TurnStep | PauseStep:
    match step:
        case TurnStep(messages):
            return TurnStep(
                tuple({**message, "content": message["content"][:limit]} for message in messages)
            )
        case PauseStep(results):
            return PauseStep(tuple((call, result and result[:limit]) for call, result in results))
