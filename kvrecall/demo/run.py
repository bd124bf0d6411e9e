"""A generated conversation through a running service, in one configuration."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvrecall.client import KvrecallClient, Memory, Repair, Session, Turn
from kvrecall.demo.configs import DemoConfig
from reference.conversation import Conversation, Exchange

MAX_REPLY_TOKENS = 48
PLAIN = "plain"
AFTER_TOOL = "after a tool"
Json = Mapping[str, Any]
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Question:
    """A question and the model's reply. `age`: tokens since the fact was stated."""

    kind: str
    age: int
    correct: bool
    text: str
    expected: str
    reply: str


@dataclass(frozen=True)
class TurnPoint:
    """Measurements of one turn, after it. `length` is tokens, `active_rows` rows of a layer's head.

    `seconds` are the client's; `first_token` is the service's time to the first token, in seconds.
    """

    length: int
    active_rows: int
    active_bytes: int
    seconds: float
    first_token: float
    generated: bool
    repairs: tuple[Repair, ...]
    after_pause: bool

    @property
    def promoted(self) -> int:
        """Rows that repairs promoted before this turn."""
        return sum(repair.promoted for repair in self.repairs)


@dataclass
class DemoRun:
    """One conversation in one configuration; `memory` is the session's at the end."""

    config: DemoConfig
    seed: int
    turns: list[TurnPoint] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)
    pauses: int = 0
    memory: Memory | None = None

    @property
    def peak_rows(self) -> int:
        """Peak of active rows over layers, each measured at its longest head."""
        return max(self.final_memory.layer_peak_rows)

    @property
    def peak_bytes(self) -> int:
        """Bytes of active rows if all layers were at their peak at once."""
        memory = self.final_memory
        rows = sum(memory.layer_active_rows)
        return int(sum(memory.layer_peak_rows) * memory.active_bytes / max(1, rows))

    @property
    def final_memory(self) -> Memory:
        """Memory of the session at its end. Only after the run."""
        assert self.memory is not None, "the run has not ended"
        return self.memory


def run_config(
    client: KvrecallClient,
    config: DemoConfig,
    conversation: Conversation,
    pause_seconds: float,
    progress: Progress,
) -> DemoRun:
    """Run the conversation in a new session, which is deleted afterwards.

    The model answers the questions, and its replies stay in the session. All other replies are
    appended as recorded, so that they are equal in every configuration. A tool takes
    `pause_seconds`; `progress` is called with 1 after every exchange. Raises KvrecallError.
    """
    session = client.create_session(
        method=config.method,
        budget=config.budget,
        repair_rows=config.repair_rows,
        repair_on=config.repair_on,
        seed=conversation.seed,
        tools=conversation.tools,
    )
    runner = _Runner(client, session, DemoRun(config, conversation.seed), pause_seconds)
    runner.run_all(conversation, progress)
    runner.run.memory = client.memory(session)
    client.delete_session(session)
    return runner.run


@dataclass
class _Runner:
    """Sends a conversation's exchanges to one session and records the results in `run`."""

    client: KvrecallClient
    session: Session
    run: DemoRun
    pause_seconds: float

    def run_all(self, conversation: Conversation, progress: Progress) -> None:
        starts: list[int] = []
        opening = [{"role": "system", "content": conversation.system}]
        for exchange in conversation.exchanges:
            starts.append(self._length)
            self._exchange(exchange, opening, starts)
            opening = []
            progress(1)

    @property
    def _length(self) -> int:
        return self.run.turns[-1].length if self.run.turns else 0

    def _exchange(self, exchange: Exchange, opening: Sequence[Json], starts: Sequence[int]) -> None:
        messages = [*opening, {"role": "user", "content": exchange.user}]
        if exchange.fact_exchange is None:
            self._turn(
                [*messages, {"role": "assistant", "content": exchange.reply}], generate=False
            )
            return
        turn = self._turn(messages)
        called = turn.finish_reason == "tool_calls"
        if called and exchange.tool_result is not None:
            turn = self._after_pause(turn, exchange.tool_result)
        elif called:
            self._fail_calls(turn)
        reply = turn.text
        # A reply that needs a tool's result, but was given without a call, is a guess: not correct.
        correct = exchange.is_answered_by(reply) and called == (exchange.kind == "tool")
        kind = AFTER_TOOL if exchange.kind == "tool" else PLAIN
        age = self._length - starts[exchange.fact_exchange]
        self.run.questions.append(
            Question(kind, age, correct, exchange.user, exchange.reply, reply)
        )

    def _after_pause(self, turn: Turn, result: str) -> Turn:
        """Wait for `pause_seconds`, send the tool's result and run the next turn."""
        time.sleep(self.pause_seconds)
        for call in turn.tool_calls:
            self.client.event(self.session, "tool_call.completed", call.id, result=result)
        self.run.pauses += 1
        turn = self._turn([], after_pause=True)
        if turn.finish_reason == "tool_calls":
            self._fail_calls(turn)
        return turn

    def _fail_calls(self, turn: Turn) -> None:
        for call in turn.tool_calls:
            self.client.event(self.session, "tool_call.failed", call.id, result="not available")

    def _turn(
        self, messages: Sequence[Json], *, generate: bool = True, after_pause: bool = False
    ) -> Turn:
        """Run a turn after the repairs before it: their results are measured, not their speed."""
        started = time.perf_counter()
        turn = self.client.turn(
            self.session,
            messages,
            generate=generate,
            wait_for_repairs=True,
            max_tokens=MAX_REPLY_TOKENS,
        )
        self._record(turn, time.perf_counter() - started, generate, after_pause)
        return turn

    def _record(self, turn: Turn, seconds: float, generated: bool, after_pause: bool) -> None:
        memory = turn.memory
        self.run.turns.append(
            TurnPoint(
                length=memory.length,
                active_rows=memory.active_rows,
                active_bytes=memory.active_bytes,
                seconds=seconds,
                first_token=turn.seconds_to_first_token,
                generated=generated,
                repairs=memory.repairs,
                after_pause=after_pause,
            )
        )
