"""Dialogues of several turns, each a context of segments with a question (LoopServe 4, A.4.3).

The generator of the kinds `qa`, `list` and `fewshot`, in a `Language`. A dialogue is a function of
its seed and size. What it states where is checked while it is made: see `check`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, get_args

from evals.errors import BadExample
from evals.languages.base import Fact, Language, contains_value

Place = Literal["begin", "middle", "end"]
PLACES: tuple[Place, ...] = get_args(Place)
Evidence = Literal["own", "earlier", "multi"]

# Shares of questions whose evidence is in their own turn, in one earlier turn, in several turns.
SHARES: dict[Evidence, float] = {"own": 0.4, "earlier": 0.4, "multi": 0.2}
CANDIDATES = 4
LABELS = ("amber", "cobalt", "green", "purple", "scarlet", "white")
# What a message ends with whose question stands before recorded text.
CUE = "Answer my question."
# Lines of a list, spread over the turns up to its question.
LIST_LINES = 4
# A turn's own facts: with two of them a later turn finds one that nobody has asked for.
_OWN_FACTS = 2
_DRAWS = 50


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
        said: How often a segment states its fact.
        tokens: Length of a dialogue that is made of recorded text, about.
    """

    turns: int = 3
    distractors: int = 1
    chat: int = 1
    said: int = 1
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


def generate(kind: str, seed: int, size: Size, language: Language) -> Dialogue:
    """The dialogue of a kind and a seed.

    Raises BadExample where the language has too few people, topics or attributes for the size.
    """
    rng = Random(f"multiturn:{kind}:{seed}")
    turns = {"qa": _qa, "list": _list, "fewshot": _fewshot}[kind](_Writer(rng, size, language))
    dialogue = Dialogue(seed, kind, language.system_lines[0], tuple(turns))
    check(dialogue)
    return dialogue


def check(dialogue: Dialogue) -> None:
    """Raise BadExample unless the evidence is in exactly the turns that a turn names.

    Up to the question each of its answers is said in those turns alone, and the question says none.
    """
    for number, turn in enumerate(dialogue.turns):
        said = {
            index
            for index, each in enumerate(dialogue.turns[: number + 1])
            if any(
                contains_value(text, answer) for text in each.segments for answer in turn.answers
            )
        }
        told = any(contains_value(turn.question, answer) for answer in turn.answers)
        if told or said != set(turn.evidence):
            raise BadExample(
                f"{dialogue.kind} dialogue {dialogue.seed}, turn {number}: the answers "
                f"{turn.answers} are said in turns {sorted(said)}, not {turn.evidence}"
            )


class _Writer:
    """Draws of one dialogue: people, values, and small talk on a topic a turn."""

    def __init__(self, rng: Random, size: Size, language: Language) -> None:
        self.rng = rng
        self.size = size
        self.language = language
        self.topics = rng.sample(language.topics, len(language.topics))
        self._names = language.draw_names(rng)
        self._used: set[str] = set()
        self._initials: set[str] = set()

    def fact(self, attribute: str) -> Fact:
        """A new person's value, which begins unlike those before as far as there are letters."""
        if not self._names:
            raise BadExample("the language has too few people for a dialogue of this size")
        for _ in range(_DRAWS):
            used = set(self._used)
            value = self.language.draw_value(self.rng, attribute, used)
            if value[0] not in self._initials:
                break
        self._used = used
        self._initials.add(value[0])
        return Fact(self._names.pop(), attribute, value)

    def segment(self, turn: int, fact: Fact) -> str:
        """A paragraph that states a fact, after or before small talk on the turn's topic."""
        stated = [self.language.state(self.rng, fact) for _ in range(self.size.said)]
        chat = [
            self.language.line(self.rng, self.topics[turn % len(self.topics)])
            for _ in range(self.size.chat)
        ]
        return " ".join([*chat, *stated] if self.rng.random() < 0.5 else [*stated, *chat])

    def example(self, topic: str) -> str:
        """A line with its topic, up to its label."""
        return f"{self.language.line(self.rng, topic)} ({topic}) ->"

    def distractors(self, attribute: str) -> list[Fact]:
        """Facts on people of two other pools, whom no question names."""
        return [self.fact(attribute) for _ in range(2 * self.size.distractors)]

    def shuffled(self, segments: Iterable[str]) -> tuple[str, ...]:
        """The segments in random order."""
        drawn = list(segments)
        self.rng.shuffle(drawn)
        return tuple(drawn)


def _qa(writer: _Writer) -> list[Turn]:
    """Questions on facts of any turn so far, none asked twice: its answer is in the history."""
    rng, language = writer.rng, writer.language
    attribute = rng.choice(language.worded)
    open_facts: list[list[Fact]] = []
    stated: list[Fact] = []
    turns = []
    for number in range(writer.size.turns):
        own = [writer.fact(attribute) for _ in range(_OWN_FACTS)]
        others = writer.distractors(attribute)
        stated += [*own, *others]
        open_facts.append(list(own))
        asked = _draw_evidence(rng, number, writer.size.turns, open_facts)
        facts = [open_facts[index].pop(rng.randrange(len(open_facts[index]))) for index in asked]
        turns.append(
            Turn(
                writer.shuffled(writer.segment(number, fact) for fact in [*own, *others]),
                " ".join(language.ask(rng, fact) for fact in facts),
                tuple(fact.value for fact in facts),
                tuple(asked),
                _draw_choices(rng, facts, stated),
                tuple(language.answer_prefix(fact) for fact in facts),
                language.closing_cue,
            )
        )
    return turns


def _draw_evidence(
    rng: Random, number: int, turns: int, open_facts: Sequence[Sequence[Fact]]
) -> list[int]:
    """Numbers of the turns that a question is about, ascending."""
    wanted = draw_class(rng, number, turns)
    if wanted == "own":
        return [number]
    earlier = [index for index in range(number) if open_facts[index]]
    if wanted == "earlier":
        return [rng.choice(earlier)]
    return sorted(rng.sample([*earlier, number], 2))


def _draw_choices(rng: Random, facts: Sequence[Fact], stated: Sequence[Fact]) -> tuple[str, ...]:
    """The facts' values and others that were stated, at most four, each with another initial."""
    chosen = {fact.value[0]: fact.value for fact in facts}
    for fact in rng.sample(stated, len(stated)):
        if len(chosen) < CANDIDATES:
            chosen.setdefault(fact.value[0], fact.value)
    return tuple(rng.sample(sorted(chosen.values()), len(chosen)))


def _list(writer: _Writer) -> list[Turn]:
    """A list of all values of an attribute, a new attribute each turn.

    The facts of turn t's list are spread over the turns up to t: no earlier answer has any.
    """
    rng, language, count = writer.rng, writer.language, writer.size.turns
    if len(language.attributes) <= count:
        raise BadExample(f"a dialogue of {count} lists needs {count + 1} attributes")
    *asked, other = rng.sample(language.attributes, count + 1)
    planned: list[list[Fact]] = [[] for _ in range(count)]
    for last, attribute in enumerate(asked):
        for line in range(max(LIST_LINES, last + 1)):
            planned[line % (last + 1)].append(writer.fact(attribute))
    turns = []
    lists: dict[str, list[Fact]] = {attribute: [] for attribute in (*asked, other)}
    for number, own in enumerate(planned):
        stated = [*own, *writer.distractors(other)]
        rng.shuffle(stated)
        for fact in stated:
            lists[fact.attribute].append(fact)
        turns.append(
            Turn(
                tuple(writer.segment(number, fact) for fact in stated),
                f"List every {asked[number]} that I have told you, one person per line.",
                tuple(fact.value for fact in lists[asked[number]]),
                tuple(range(number + 1)),
                cue=language.closing_cue,
            )
        )
    return turns


def _fewshot(writer: _Writer) -> list[Turn]:
    """Lines with labels, one of each label a turn; a label stands for a topic (Algorithm 3)."""
    rng, language = writer.rng, writer.language
    if len(language.topics) < len(LABELS):
        raise BadExample(f"few-shot examples need {len(LABELS)} topics")
    topics = dict(zip(rng.sample(LABELS, len(LABELS)), writer.topics, strict=False))
    turns = []
    for number in range(writer.size.turns):
        segments = [f"{writer.example(topic)} {label}" for label, topic in topics.items()]
        label = rng.choice(LABELS)
        example = writer.example(topics[label])
        before = "Use the examples of earlier turns with these. " if number else ""
        turns.append(
            Turn(
                writer.shuffled(segments),
                f"{before}Which label has this one? {example}",
                (label,),
                tuple(range(number + 1)),
                LABELS,
                (example,),
                language.closing_cue,
            )
        )
    return turns
