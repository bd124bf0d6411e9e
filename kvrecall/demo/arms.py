"""One conversation through the running service, once per arm: full cache, budget alone, budget with repair."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvrecall.client import KvrecallClient, Memory, Repair, Session, Turn
from reference.conversation import Conversation, Exchange

MOST_REPLY_TOKENS = 48
PLAIN = "plain"
AFTER_TOOL = "after a tool"
Json = Mapping[str, Any]
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
    repairs: tuple[Repair, ...]
    after_pause: bool

    @property
    def promoted(self) -> int:
        """Rows that repairs brought back for this turn."""
        return sum(repair.promoted for repair in self.repairs)


@dataclass
class ArmRun:
    """One arm's way through one conversation."""

    arm: Arm
    seed: int
    turns: list[TurnPoint] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)
    pauses: int = 0
    memory: Memory | None = None

    @property
    def peak_rows(self) -> int:
        """The most rows that a layer's longest head ever held."""
        return max(self.final_memory.layer_peak_rows)

    @property
    def peak_bytes(self) -> int:
        """Bytes of all layers' peaks."""
        memory = self.final_memory
        rows = sum(memory.layer_active_rows)
        return int(sum(memory.layer_peak_rows) * memory.active_bytes / max(1, rows))

    @property
    def final_memory(self) -> Memory:
        """Memory of the session at its end. To be read after the run."""
        assert self.memory is not None, "the run has not ended"
        return self.memory


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
        repair_on=arm.repair_on,
        seed=conversation.seed,
        tools=conversation.tools,
    )
    holder = _Holder(client, session, ArmRun(arm, conversation.seed), pause_seconds)
    holder.hold(conversation, progress)
    holder.run.memory = client.memory(session)
    client.delete_session(session)
    return holder.run


@dataclass
class _Holder:
    """Says a conversation's exchanges in one session and notes what comes back."""

    client: KvrecallClient
    session: Session
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
        self, exchange: Exchange, opening: Sequence[Json], said_at: Sequence[int]
    ) -> None:
        messages = [*opening, {"role": "user", "content": exchange.user}]
        if exchange.fact_exchange is None:
            self._turn(
                [*messages, {"role": "assistant", "content": exchange.reply}], generate=False
            )
            return
        answer = self._turn(messages)
        called = answer.finish_reason == "tool_calls"
        if called and exchange.tool_result is not None:
            answer = self._after_pause(answer, exchange.tool_result)
        elif called:
            self._refuse_calls(answer)
        reply = answer.text
        # A tool's answer without its call could only be guessed: it counts as wrong.
        right = exchange.is_answered_by(reply) and called == (exchange.kind == "tool")
        kind = AFTER_TOOL if exchange.kind == "tool" else PLAIN
        age = self._length - said_at[exchange.fact_exchange]
        self.run.questions.append(Question(kind, age, right, exchange.user, exchange.reply, reply))

    def _after_pause(self, answer: Turn, result: str) -> Turn:
        """Let the tool take its time, report its result, and go on."""
        time.sleep(self.pause_seconds)
        for call in answer.tool_calls:
            self.client.event(self.session, "tool_call.completed", call.id, result=result)
        self.run.pauses += 1
        answer = self._turn([], after_pause=True)
        if answer.finish_reason == "tool_calls":
            self._refuse_calls(answer)
        return answer

    def _refuse_calls(self, answer: Turn) -> None:
        for call in answer.tool_calls:
            self.client.event(self.session, "tool_call.failed", call.id, result="not available")

    def _turn(
        self, messages: Sequence[Json], *, generate: bool = True, after_pause: bool = False
    ) -> Turn:
        """Say something once the repairs before it have ended: what they find is measured, not how early it came."""
        started = time.perf_counter()
        answer = self.client.turn(
            self.session,
            messages,
            generate=generate,
            wait_for_repairs=True,
            max_tokens=MOST_REPLY_TOKENS,
        )
        self._note(answer, time.perf_counter() - started, generate, after_pause)
        return answer

    def _note(self, answer: Turn, seconds: float, answered: bool, after_pause: bool) -> None:
        memory = answer.memory
        self.run.turns.append(
            TurnPoint(
                length=memory.length,
                active_rows=memory.active_rows,
                active_bytes=memory.active_bytes,
                seconds=seconds,
                first_token=answer.seconds_to_first_token,
                answered=answered,
                repairs=memory.repairs,
                after_pause=after_pause,
            )
        )
