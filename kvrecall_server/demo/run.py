"""A generated conversation through a running service, in one configuration."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from kvrecall.client import KvrecallClient, Memory, Passage, Repair, Session, Turn
from kvrecall_server.demo.configs import DemoConfig
from kvrecall_server.demo.conversation import Conversation, Exchange, RecordedCall
from kvrecall_server.demo.progress import Advance

PLAIN = "plain"
AFTER_TOOL = "after a tool"
Json = Mapping[str, Any]


@dataclass(frozen=True)
class Question:
    """A question and the model's reply. `age`: tokens since the fact was stated in `statement`.

    `passages` are the text that the last repair before the reply brought back.
    """

    kind: str
    age: int
    correct: bool
    text: str
    expected: str
    reply: str
    statement: str
    passages: tuple[Passage, ...] = ()


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


def open_session(client: KvrecallClient, config: DemoConfig, conversation: Conversation) -> Session:
    """Create the session of a run. Raises KvrecallError."""
    options = config.options
    options["tools"] = conversation.tools
    options["seed"] = conversation.seed
    return client.create_session(**options)


def run_config(
    client: KvrecallClient,
    config: DemoConfig,
    session: Session,
    conversation: Conversation,
    pause_seconds: float,
    progress: Advance,
) -> DemoRun:
    """Run the conversation in a new session of the configuration.

    The model answers the questions, and its replies stay in the session. All other exchanges are
    appended as recorded, those between two questions in one turn, and so are the calls of a model
    that calls no tools itself: they are equal in every configuration. A tool takes `pause_seconds`;
    `progress` is called with numbers of exchanges. Raises KvrecallError.
    """
    run = DemoRun(config.resolve(session), conversation.seed)
    runner = _Runner(client, session, run, pause_seconds, conversation.reply_tokens)
    runner.run_all(conversation, progress)
    runner.run.memory = client.memory(session)
    return runner.run


@dataclass
class _Runner:
    """Sends a conversation's exchanges to one session and records the results in `run`.

    `opening` goes before the messages of the next turn.
    """

    client: KvrecallClient
    session: Session
    run: DemoRun
    pause_seconds: float
    reply_tokens: int
    opening: tuple[Json, ...] = ()

    def run_all(self, conversation: Conversation, progress: Advance) -> None:
        """Append what was recorded up to each question, and ask it."""
        self.opening = (_message("system", conversation.system),)
        ends: list[int] = []
        for recorded, question in _split(conversation.exchanges):
            if recorded:
                ends += self._append(recorded)
                progress(len(recorded))
            if question is not None:
                self._ask(question, conversation.exchanges, ends)
                ends.append(self._length)
                progress(1)

    def _append(self, exchanges: Sequence[Exchange]) -> list[int]:
        """Append exchanges in one turn; return where each message of the user ends."""
        texts = ((("user", each.user), ("assistant", each.reply)) for each in exchanges)
        messages = [_message(role, text) for role, text in chain.from_iterable(texts)]
        turn = self._turn(messages, generate=False)
        (logged,) = self.client.inspect.turns(self.session, after=turn.turn - 1, limit=1).turns
        return [span.stop for span in logged.spans if span.side == "user"]

    @property
    def _length(self) -> int:
        return self.run.turns[-1].length if self.run.turns else 0

    def _ask(self, exchange: Exchange, exchanges: Sequence[Exchange], ends: Sequence[int]) -> None:
        """Have the model answer a question about one of the exchanges, and record its reply."""
        assert exchange.fact is not None, "a question has a fact"
        messages = [_message("user", exchange.user)]
        if exchange.recorded_call is not None:
            called = True
            turn = self._play_call(messages, exchange.recorded_call)
        else:
            turn = self._turn(messages)
            called = turn.finish_reason == "tool_calls"
        if called and exchange.tool_result is not None:
            turn = self._after_pause([call.id for call in turn.tool_calls], exchange.tool_result)
        if turn.finish_reason == "tool_calls":
            self._fail_calls(turn)
        reply = turn.text
        # A reply that needs a tool's result, but was given without a call, is a guess: not correct.
        correct = exchange.is_right(reply) and called == exchange.needs_tool
        self.run.questions.append(
            Question(
                AFTER_TOOL if exchange.needs_tool else PLAIN,
                self._length - ends[exchange.fact],
                correct,
                exchange.question,
                exchange.reply,
                reply,
                exchanges[exchange.fact].user,
                self._passages(turn),
            )
        )

    def _play_call(self, messages: Sequence[Json], recorded: RecordedCall) -> Turn:
        """Append a recorded call, wait for its result and run the turn with the user's question."""
        number = f"call_{self.run.pauses}"
        function = {"name": recorded.name, "arguments": recorded.arguments}
        call = {"id": number, "type": "function", "function": function}
        calling = {**_message("assistant", ""), "tool_calls": [call]}
        self._turn([*messages, calling], generate=False)
        return self._after_pause([number], recorded.result, [_message("user", recorded.question)])

    def _after_pause(
        self, calls: Sequence[str], result: str, messages: Sequence[Json] = ()
    ) -> Turn:
        """Wait for `pause_seconds`, send the tool's result and run the next turn."""
        time.sleep(self.pause_seconds)
        for call in calls:
            self.client.event(self.session, "tool_call.completed", call, result=result)
        self.run.pauses += 1
        return self._turn(messages, after_pause=True)

    def _fail_calls(self, turn: Turn) -> None:
        for call in turn.tool_calls:
            self.client.event(self.session, "tool_call.failed", call.id, result="not available")

    def _passages(self, turn: Turn) -> tuple[Passage, ...]:
        """Text brought back by the last repair before a turn, which chose all promoted rows."""
        if not turn.memory.repairs:
            return ()
        (last,) = self.client.repairs(self.session, limit=1)
        return last.passages

    def _turn(
        self, messages: Sequence[Json], *, generate: bool = True, after_pause: bool = False
    ) -> Turn:
        """Run a turn after the repairs before it: their results are measured, not their speed."""
        opening, self.opening = self.opening, ()
        started = time.perf_counter()
        turn = self.client.turn(
            self.session,
            [*opening, *messages],
            generate=generate,
            wait_for_repairs=True,
            max_tokens=self.reply_tokens,
            temperature=0,
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


def _split(
    exchanges: Iterable[Exchange],
) -> Iterator[tuple[list[Exchange], Exchange | None]]:
    """Exchanges that ask nothing, in their order, each time with the question behind them."""
    recorded: list[Exchange] = []
    for exchange in exchanges:
        if exchange.fact is None:
            recorded.append(exchange)
        else:
            yield recorded, exchange
            recorded = []
    yield recorded, None


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}
