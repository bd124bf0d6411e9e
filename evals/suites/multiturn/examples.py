"""Generated dialogues, in a `Language`: kinds `qa`, `list` and `fewshot`.

A dialogue is a function of its seed and size. What it states where is checked while it is made.
"""

from collections.abc import Iterable, Sequence
from random import Random

from evals.errors import BadExample
from evals.languages.base import Fact, Language
from evals.suites.multiturn.dialogue import CANDIDATES, Dialogue, Size, Turn, check, draw_class

LABELS = ("amber", "cobalt", "green", "purple", "scarlet", "white")
# Lines of a list, spread over the turns up to its question.
LIST_LINES = 4
# A turn's own facts: with two of them a later turn finds one that nobody has asked for.
_OWN_FACTS = 2
_DRAWS = 50


def generate(kind: str, seed: int, size: Size, language: Language) -> Dialogue:
    """The dialogue of a kind and a seed.

    Raises BadExample where the language has too few people, topics or attributes for the size.
    """
    rng = Random(f"multiturn:{kind}:{seed}")
    turns = {"qa": _qa, "list": _list, "fewshot": _fewshot}[kind](_Writer(rng, size, language))
    dialogue = Dialogue(seed, kind, language.system_lines[0], tuple(turns))
    check(dialogue)
    return dialogue


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
        stated = [self.language.state(self.rng, fact) for _ in range(self.size.statements)]
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
        asked, facts = _draw_asked(rng, number, writer.size.turns, open_facts)
        for index, fact in zip(asked, facts, strict=True):
            open_facts[index].remove(fact)
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


def _draw_asked(
    rng: Random, number: int, turns: int, open_facts: Sequence[Sequence[Fact]]
) -> tuple[list[int], list[Fact]]:
    """Turns that a question is about and a fact of each, whose values begin unlike each other."""
    for _ in range(_DRAWS):
        asked = _draw_evidence(rng, number, turns, open_facts)
        facts = [rng.choice(open_facts[index]) for index in asked]
        if len({fact.value[0] for fact in facts}) == len(facts):
            return asked, facts
    raise BadExample("no two facts that are still to be asked for begin unlike each other")


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
