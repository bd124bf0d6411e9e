"""Sessions that run a dialogue: the full cache, whose replies are recorded, and every arm.

An arm appends each turn with the recorded reply, so that all arms have the same history (LoopServe's
turns would differ otherwise by what each arm answered before). Before that it answers the turn
itself, from the same state, and nothing of its own answer stays.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from evals import harness
from evals.harness import Message, Session
from evals.languages.base import Language
from evals.suites.multiturn.arms import Arm
from evals.suites.multiturn.dialogue import Dialogue, Place, Turn, render
from evals.suites.multiturn.scores import (
    CHOICE,
    DENSITY,
    KL,
    TOP1,
    choose,
    score_choice,
    score_reply,
)
from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.engine.session import Distribution
from workers.model.tokenizer import ChatTokenizer
from workers.scheduler.scheduler import Scheduler
from workers.tasks.turn import compare_distributions

Answers = Literal["generated", "chosen"]
# Tokens of a generated reply, at most; a list is longer than a value.
_REPLY_TOKENS = {"list": 120}
_MAX_REPLY_TOKENS = 32
# Tokens of the chat template around a turn's two messages, at most.
_TEMPLATE_TOKENS = 32


@dataclass(frozen=True)
class RenderedTurn:
    """A turn as it is sent: the messages up to its reply.

    `chosen`: the reply is given up to the value, which is chosen; else it is generated.
    """

    kind: str
    turn: Turn
    messages: tuple[Message, ...]
    chosen: bool

    @property
    def max_tokens(self) -> int:
        """Tokens of a generated reply, at most."""
        return _REPLY_TOKENS.get(self.kind, _MAX_REPLY_TOKENS)


@dataclass(frozen=True, eq=False)
class Recorded:
    """A turn with the full cache's reply.

    `values` are those that it chose, empty for a generated reply. `kept` is its distribution on
    the reply.
    """

    asked: RenderedTurn
    reply: str
    values: tuple[str, ...]
    kept: Distribution

    @property
    def messages(self) -> list[Message]:
        """The turn's messages and the reply."""
        return [*self.asked.messages, {"role": "assistant", "content": self.reply}]


@dataclass(frozen=True)
class ScoredTurn:
    """What an arm made of a turn: scores by measure, its reply, rows held after the turn."""

    scores: dict[str, float]
    reply: str
    rows: int
    active_rows: float


def list_turns(dialogue: Dialogue, place: Place, answers: Answers) -> list[RenderedTurn]:
    """The turns of a dialogue in order, the system's message before the first one."""
    asked = []
    system: tuple[Message, ...] = ({"role": "system", "content": dialogue.system},)
    for number, turn in enumerate(dialogue.turns):
        user: Message = {"role": "user", "content": render(turn, place)}
        messages = (*(() if number else system), user)
        chosen = answers == "chosen" and bool(turn.choices)
        asked.append(RenderedTurn(dialogue.kind, turn, messages, chosen))
    return asked


def count_rows(model: str, turns: Sequence[RenderedTurn]) -> int:
    """Tokens of a dialogue with its replies, at most."""
    tokenizer = harness.load(model).tokenizer
    rows = 0
    for asked in turns:
        longest = asked.turn.give(asked.turn.answers) if asked.turn.prefixes else ""
        reply = max(asked.max_tokens, 2 * len(tokenizer.encode(longest)))
        texts = [str(message["content"]) for message in asked.messages]
        rows += sum(len(tokenizer.encode(text)) + _TEMPLATE_TOKENS for text in texts) + reply
    return rows


@dataclass
class DialogueSession:
    """A session of an arm in a worker, with `budget` rows per head."""

    worker: Scheduler
    arm: Arm
    budget: int
    seed: int
    session: Session = field(init=False)

    def __post_init__(self) -> None:
        """Open the session."""
        least = self.worker.engine.settings.min_budget
        spec = self.arm.build_spec(self.arm.name, self.budget, least, self.seed)
        self.session = Session(self.worker, spec)

    def record(self, asked: RenderedTurn) -> Recorded:
        """Answer a turn and append it with the answer. Raises BadExample, `workers.errors`."""
        reply, values = self._choose(asked) if asked.chosen else (self._generate(asked), ())
        messages = [*asked.messages, {"role": "assistant", "content": reply}]
        self.session.append(messages, keep_distribution=True)
        return Recorded(asked, reply, values, self.session.distribution)

    def replay(self, recorded: Recorded, language: Language) -> ScoredTurn:
        """Answer a turn, then append it with the recorded reply.

        Raises BadExample, `workers.errors`.
        """
        asked = recorded.asked
        if self.arm.repairs and self.session.state.length:
            self.session.repair(asked.messages)
        reply = "" if asked.chosen else self._generate(asked)
        done = self.session.append(recorded.messages, keep_distribution=True)
        kept = self.session.distribution
        fidelity = compare_distributions(recorded.kept, kept)
        scores = {KL: fidelity.kl_mean, TOP1: fidelity.top1_agreement}
        if done.HasField("prefill"):
            scores[DENSITY] = done.prefill.density
        if asked.chosen:
            values = choose(kept, asked.turn, recorded.values, self._tokenizer)
            reply = asked.turn.give(values)
            scores[CHOICE] = score_choice(asked.turn, values)
        else:
            scores |= score_reply(asked.kind, asked.turn, reply, language)
        return ScoredTurn(scores, reply, self.budget, round(harness.active_rows(self.session), 2))

    def close(self) -> None:
        """Delete the session with its rows."""
        spec = self.session.spec
        self.worker.delete(pb.DeleteRequest(session=spec.session)).result()

    def _generate(self, asked: RenderedTurn) -> str:
        return str(self.session.ask(asked.messages, asked.max_tokens).message.content)

    def _choose(self, asked: RenderedTurn) -> tuple[str, tuple[str, ...]]:
        """Choose one value after the other, each behind those before it."""
        values: list[str] = []
        for _ in asked.turn.answers:
            tried = [*values, asked.turn.choices[0]]
            reply: Message = {"role": "assistant", "content": asked.turn.give(tried)}
            self.session.read([*asked.messages, reply], keep_distribution=True)
            values = choose(self.session.distribution, asked.turn, tried, self._tokenizer)
        return asked.turn.give(values), tuple(values)

    @property
    def _tokenizer(self) -> ChatTokenizer:
        return self.worker.engine.tokenizer
