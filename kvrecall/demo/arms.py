"""One conversation through the running service, once per arm: full cache, budget alone, budget with repair."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvrecall.client._timing import seconds_to_first_token
from kvrecall.client.client import KvrecallClient
from reference.conversation import Conversation, Exchange

MOST_REPLY_TOKENS = 48
PLAIN = "plain"
AFTER_TOOL = "after a tool"
Answer = Mapping[str, Any]
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Arm:
    """A way to keep the conversation: what the session is created with."""

    name: str
    method: str
    budget: int
    repair_rows: int = 0
    repair_on: tuple[str, ...] = ()

    @property
    def has_budget(self) -> bool:
        """Whether rows are evicted."""
        return self.method != "full"


def demo_arms(method: str, budget: int, repair_rows: int) -> tuple[Arm, ...]:
    """The arms that are compared. With a budget they all hold the same: a repair's rows are part of it."""
    pauses = ("tool_call", "tool_result")
    return (
        Arm("full cache", "full", budget),
        Arm("budget alone", method, budget),
        Arm("repair in pauses", method, budget, repair_rows, pauses),
        Arm("repair in pauses and turns", method, budget, repair_rows, (*pauses, "turn")),
    )


@dataclass(frozen=True)
class Question:
    """A question that was asked and how it was answered. `age`: tokens since the fact was stated."""

    kind: str
    age: int
    right: bool
    asked: str
    expected: str
    reply: str


@dataclass(frozen=True)
class TurnPoint:
    """What one turn came to. Seconds are the client's; `first_token` is the service's share of them before a token."""

    length: int
    active_rows: int
    active_bytes: int
    seconds: float
    first_token: float
    answered: bool
    repairs: tuple[Mapping[str, Any], ...]
    after_pause: bool

    @property
    def promoted(self) -> int:
        """Rows that repairs brought back for this turn."""
        return sum(repair["promoted"] for repair in self.repairs)


@dataclass
class ArmRun:
    """One arm's way through one conversation."""

    arm: Arm
    seed: int
    turns: list[TurnPoint] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)
    pauses: int = 0
    memory: Mapping[str, Any] = field(default_factory=dict)

    @property
    def peak_rows(self) -> int:
        """The most rows that a layer's longest head ever held."""
        return int(max(self.memory["layer_peak_rows"]))

    @property
    def peak_bytes(self) -> int:
        """Bytes of all layers' peaks."""
        rows = sum(self.memory["layer_active_rows"])
        return int(sum(self.memory["layer_peak_rows"]) * self.memory["active_bytes"] / max(1, rows))


def run_arm(
    client: KvrecallClient,
    arm: Arm,
    conversation: Conversation,
    pause_seconds: float,
    progress: Progress,
) -> ArmRun:
    """Hold the conversation in a session of its own, which is deleted afterwards.

    Questions are answered by the model, and what it answers stays in the conversation. All other replies are
    remembered as they were recorded, so that every arm hears the same.
    """
    session = client.create_session(
        method=arm.method,
        budget=arm.budget,
        repair_rows=arm.repair_rows,
        repair_on=list(arm.repair_on),
        seed=conversation.seed,
        tools=conversation.tools,
    )
    holder = _Holder(client, session["id"], ArmRun(arm, conversation.seed), pause_seconds)
    holder.hold(conversation, progress)
    holder.run.memory = client.memory(session["id"])
    client.delete(session["id"])
    return holder.run


@dataclass
class _Holder:
    """Says a conversation's exchanges in one session and notes what comes back."""

    client: KvrecallClient
    session: str
    run: ArmRun
    pause_seconds: float

    def hold(self, conversation: Conversation, progress: Progress) -> None:
        said_at: list[int] = []
        opening = [{"role": "system", "content": conversation.system}]
        for exchange in conversation.exchanges:
            said_at.append(self._length)
            self._exchange(exchange, opening, said_at)
            opening = []
            progress(1)

    @property
    def _length(self) -> int:
        return self.run.turns[-1].length if self.run.turns else 0

    def _exchange(
        self, exchange: Exchange, opening: Sequence[Answer], said_at: Sequence[int]
    ) -> None:
        messages = [*opening, {"role": "user", "content": exchange.user}]
        if exchange.fact_exchange is None:
            self._turn(
                [*messages, {"role": "assistant", "content": exchange.reply}], generate=False
            )
            return
        answer = self._turn(messages)
        called = answer["finish_reason"] == "tool_calls"
        if called and exchange.tool_result is not None:
            answer = self._after_pause(answer, exchange.tool_result)
        elif called:
            self._refuse_calls(answer)
        reply = answer["message"]["content"] or ""
        # A tool's answer without its call could only be guessed: it counts as wrong.
        right = exchange.is_answered_by(reply) and called == (exchange.kind == "tool")
        kind = AFTER_TOOL if exchange.kind == "tool" else PLAIN
        age = self._length - said_at[exchange.fact_exchange]
        self.run.questions.append(Question(kind, age, right, exchange.user, exchange.reply, reply))

    def _after_pause(self, answer: Answer, result: str) -> Answer:
        """Let the tool take its time, report its result, and go on."""
        time.sleep(self.pause_seconds)
        for call in answer["message"]["tool_calls"]:
            self.client.event(self.session, "tool_call.completed", call["id"], result=result)
        self.run.pauses += 1
        answer = self._turn([], after_pause=True)
        if answer["finish_reason"] == "tool_calls":
            self._refuse_calls(answer)
        return answer

    def _refuse_calls(self, answer: Answer) -> None:
        for call in answer["message"]["tool_calls"]:
            self.client.event(self.session, "tool_call.failed", call["id"], result="not available")

    def _turn(
        self, messages: Sequence[Answer], *, generate: bool = True, after_pause: bool = False
    ) -> Answer:
        """Say something once the repairs before it have ended: what they find is measured, not how early it came."""
        started = time.perf_counter()
        sampling = {"max_tokens": MOST_REPLY_TOKENS}
        answer = self.client.turn(
            self.session, messages, generate=generate, wait_for_repairs=True, sampling=sampling
        )
        self._note(answer, time.perf_counter() - started, generate, after_pause)
        return answer

    def _note(self, answer: Answer, seconds: float, answered: bool, after_pause: bool) -> None:
        memory = answer["memory"]
        self.run.turns.append(
            TurnPoint(
                length=memory["length"],
                active_rows=memory["active_rows"],
                active_bytes=memory["active_bytes"],
                seconds=seconds,
                first_token=seconds_to_first_token(answer["seconds"]),
                answered=answered,
                repairs=tuple(memory["repairs"]),
                after_pause=after_pause,
            )
        )
