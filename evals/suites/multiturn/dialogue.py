"""A dialogue of several turns, each a context of segments with a question (LoopServe 4, A.4.3).

What it states where: the evidence of each question, and the place of the question in its message.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from types import MappingProxyType
from typing import Literal, get_args

from evals.errors import BadExample
from evals.languages.base import contains_value

Place = Literal["begin", "middle", "end"]
PLACES: tuple[Place, ...] = get_args(Place)
Evidence = Literal["own", "earlier", "multi"]

# Shares of questions whose evidence is in their own turn, in one earlier turn, in several turns.
SHARES: Mapping[Evidence, float] = MappingProxyType({"own": 0.4, "earlier": 0.4, "multi": 0.2})
CANDIDATES = 4
# What a message ends with whose question stands before recorded text.
CUE = "Answer my question."


@dataclass(frozen=True)
class Turn:
    """A turn's context, its question, and the answers to it.

    Attributes:
        segments: Paragraphs of the context.
        question: The question.
        answers: Values that the answer has to give, in order; one per line of a list.
        evidence: Numbers of the turns that have the evidence, ascending.
        choices: Candidates for each answer; empty: the answer is not one of a few.
        prefixes: Text of a reply before each answer; empty where there are no choices.
        cue: What the message ends with, unless the question does.
    """

    segments: tuple[str, ...]
    question: str
    answers: tuple[str, ...]
    evidence: tuple[int, ...]
    choices: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()
    cue: str = ""

    def give(self, values: Sequence[str]) -> str:
        """A reply that gives `values` behind the prefixes."""
        parts = [f"{prefix} {value}" for prefix, value in zip(self.prefixes, values, strict=False)]
        return ". ".join(parts) + "."


@dataclass(frozen=True)
class Dialogue:
    """A dialogue of one kind: the system's message and the turns in order."""

    seed: int
    kind: str
    system: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Size:
    """Size of a generated dialogue.

    Attributes:
        turns: Turns, each with a question.
        distractors: Segments of each of the two pools of other people that a turn has.
        chat: Sentences of small talk in a segment.
        statements: How often a segment states its fact.
        tokens: Length of a dialogue that is made of recorded text, about.
    """

    turns: int = 3
    distractors: int = 1
    chat: int = 1
    statements: int = 1
    tokens: int = 1500


def render(turn: Turn, place: Place) -> str:
    """The user's message: the question before, between or behind the segments, one a paragraph.

    `middle` is between two segments, never within one.
    """
    at = {"begin": 0, "middle": len(turn.segments) // 2, "end": len(turn.segments)}[place]
    parts = [*turn.segments[:at], turn.question, *turn.segments[at:]]
    if turn.cue and at < len(turn.segments):
        parts.append(turn.cue)
    return "\n".join(parts)


def evidence_class(evidence: Sequence[int], number: int) -> Evidence:
    """Where the evidence of turn `number` is, by the numbers of the turns that have it."""
    if len(evidence) > 1:
        return "multi"
    return "own" if tuple(evidence) == (number,) else "earlier"


def draw_class(rng: Random, number: int, turns: int) -> Evidence:
    """Where the evidence of turn `number` of `turns` shall be.

    The first turn has no earlier one: the later ones have less evidence of their own for it, so
    that a dialogue has `SHARES` in the mean.
    """
    if not number:
        return "own"
    own = max(0.0, (SHARES["own"] * turns - 1) / (turns - 1))
    weights = [own, *((1 - own) * SHARES[each] for each in ("earlier", "multi"))]
    weights[1:] = [each / (SHARES["earlier"] + SHARES["multi"]) for each in weights[1:]]
    kinds: tuple[Evidence, ...] = get_args(Evidence)
    return rng.choices(kinds, weights)[0]


def check(dialogue: Dialogue) -> None:
    """Raise BadExample unless the evidence is in exactly the turns that a turn names.

    Up to the question each of its answers is stated in those turns alone, and the question gives none.
    """
    for number, turn in enumerate(dialogue.turns):
        stated = {
            index
            for index, each in enumerate(dialogue.turns[: number + 1])
            if any(
                contains_value(text, answer) for text in each.segments for answer in turn.answers
            )
        }
        given = any(contains_value(turn.question, answer) for answer in turn.answers)
        if given or stated != set(turn.evidence):
            raise BadExample(
                f"{dialogue.kind} dialogue {dialogue.seed}, turn {number}: the answers "
                f"{turn.answers} are stated in turns {sorted(stated)}, not {turn.evidence}"
            )
