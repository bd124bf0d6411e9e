"""A recording through the running service, turn by turn: what is kept, what it costs, how true it stays."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvrecall.client import KvrecallClient, KvrecallError, Logprobs, Turn
from kvrecall.replay.recording import NO_RESULT, Exchange, Recording, Results, Say, exchanges_of

SHORTEST_CUT = 64


@dataclass(frozen=True)
class SessionOptions:
    """How the replayed session is kept; `compare`: beside a twin that keeps everything."""

    method: str
    budget: int
    repair_rows: int
    repair_on: tuple[str, ...]
    compare: bool


@dataclass(frozen=True)
class ReplayedTurn:
    """One turn of the budgeted session. Seconds; rows and bytes as the service reports them.

    `kl_mean` (nats) and `top1_agreement` compare its next-token distribution over the recorded reply's `heard`
    tokens with the full cache's.
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
    heard: int = 0
    kl_mean: float | None = None
    top1_agreement: float | None = None


@dataclass(frozen=True)
class Replayed:
    """One recording's turns. `parts`: sessions it took; `cut_characters`: text that no context could hold."""

    name: str
    turns: tuple[ReplayedTurn, ...]
    parts: int
    cut_characters: int


def play(client: KvrecallClient, recording: Recording, options: SessionOptions) -> Replayed:
    """Replay one recording. What outgrows the model's context goes on in a fresh session, from a user's message on.

    Raises KvrecallError.
    """
    waiting = exchanges_of(recording)
    opening = _opening(recording)
    turns: list[ReplayedTurn] = []
    part = cut = 0
    while waiting:
        part += 1
        pair = _Pair.open(client, recording, options, part)
        said = 0
        try:
            for exchange in waiting:
                turns.extend(pair.say(exchange))
                said += 1
        except KvrecallError as error:
            if error.code != "turn_too_long":
                raise
            if said == 0:
                waiting[0], gone = _shortened(waiting[0])
                cut += gone
                part -= 1
                if not gone:
                    raise
        finally:
            pair.close()
        waiting = waiting[said:]
        if waiting and said:
            waiting[0] = _led_by(opening, waiting[0])
    return Replayed(recording.name, tuple(turns), part, cut)


@dataclass
class _Pair:
    """The budgeted session and, to compare with, its twin that keeps everything."""

    client: KvrecallClient
    name: str
    part: int
    session: str
    twin: str | None
    turn: int = 0

    @classmethod
    def open(
        cls, client: KvrecallClient, recording: Recording, options: SessionOptions, part: int
    ) -> "_Pair":
        tools = [dict(tool) for tool in recording.tools]
        session = client.create_session(
            method=options.method,
            budget=options.budget,
            repair_rows=options.repair_rows,
            repair_on=options.repair_on,
            tools=tools,
            seed=0,
        ).id
        twin = None
        if options.compare:
            twin = client.create_session(
                method="full", budget=options.budget, repair_rows=0, tools=tools, seed=0
            ).id
        return cls(client, recording.name, part, session, twin)

    def close(self) -> None:
        """Delete the sessions."""
        for session in (self.session, self.twin):
            if session is not None:
                self.client.delete_session(session)

    def say(self, exchange: Exchange) -> list[ReplayedTurn]:
        """An exchange's turns; none of them when it does not fit."""
        return list(self._steps(exchange))

    def _steps(self, exchange: Exchange) -> Iterator[ReplayedTurn]:
        for step in exchange.steps:
            match step:
                case Say():
                    yield self._say(step)
                case Results():
                    self._report(step)

    def _say(self, step: Say) -> ReplayedTurn:
        messages = [dict(message) for message in step.messages]
        logprobs: Logprobs = {}
        if self.twin is not None:
            self.client.turn(self.twin, messages, generate=False, logprobs={"save": step.has_reply})
            logprobs = {"compare_with": self.twin} if step.has_reply else {}
        started = time.perf_counter()
        # A recording has no pauses to wait in: repairs are let end, so that what they find is measured.
        answer = self.client.turn(
            self.session, messages, generate=False, wait_for_repairs=True, logprobs=logprobs
        )
        self.turn += 1
        return self._noted(answer, time.perf_counter() - started)

    def _report(self, results: Results) -> None:
        """The pause: every result of the calls that the turn before ended on."""
        for session in (self.twin, self.session):
            for call, result in results.of_calls if session is not None else ():
                handle = self.client.attach(str(session))
                if result is None:
                    handle.tool_failed(call, NO_RESULT)
                else:
                    handle.tool_result(call, result)

    def _noted(self, answer: Turn, seconds: float) -> ReplayedTurn:
        memory = answer.memory
        fidelity = answer.fidelity
        return ReplayedTurn(
            conversation=self.name,
            part=self.part,
            turn=self.turn,
            **{name: getattr(memory, name) for name in _OF_MEMORY},
            promoted=sum(repair.promoted for repair in memory.repairs),
            seconds=seconds,
            first_token=answer.seconds_to_first_token,
            repair_seconds=sum(repair.seconds for repair in memory.repairs),
            heard=0 if fidelity is None else fidelity.tokens,
            kl_mean=None if fidelity is None else fidelity.kl_mean,
            top1_agreement=None if fidelity is None else fidelity.top1_agreement,
        )


_OF_MEMORY = (
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


def _led_by(opening: Sequence[Mapping[str, Any]], exchange: Exchange) -> Exchange:
    """An exchange that begins a session: the system message leads it."""
    first = exchange.steps[0]
    if not isinstance(first, Say) or not opening or first.messages[0]["role"] == "system":
        return exchange
    return Exchange((replace(first, messages=(*opening, *first.messages)), *exchange.steps[1:]))


def _shortened(exchange: Exchange) -> tuple[Exchange, int]:
    """The exchange with the longer half of its texts halved, and how many characters that cost."""
    longest = max(len(text) for text in _texts(exchange))
    if longest < SHORTEST_CUT:
        return exchange, 0
    limit = longest // 2
    gone = sum(max(0, len(text) - limit) for text in _texts(exchange))
    return Exchange(tuple(_limited(step, limit) for step in exchange.steps)), gone


def _texts(exchange: Exchange) -> Iterator[str]:
    for step in exchange.steps:
        match step:
            case Say(messages):
                yield from (message["content"] for message in messages)
            case Results(calls):
                yield from (result for _, result in calls if result is not None)


def _limited(step: Say | Results, limit: int) -> Say | Results:
    match step:
        case Say(messages):
            return Say(
                tuple({**message, "content": message["content"][:limit]} for message in messages)
            )
        case Results(calls):
            return Results(tuple((call, result and result[:limit]) for call, result in calls))
