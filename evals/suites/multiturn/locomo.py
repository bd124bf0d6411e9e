"""Dialogues of kind `locomo`: sessions of a real conversation in order, and its own questions.

Segments are stretches of a session with the date before them. Every turn has one of another
conversation beside its own. The evidence of a question is in its turn or an earlier one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from evals.errors import BadExample
from evals.languages.base import contains_value
from evals.suites.locomo.data import Conversation, Question, list_files, read_conversation
from evals.suites.multiturn.dialogue import CUE, Dialogue, Size, Turn, draw_class, evidence_class

# Lines of a segment, and characters of a token, for estimates.
_LINES = 6
_TOKEN = 4
_DRAWS = 200


@dataclass(frozen=True)
class _Stretch:
    """Consecutive lines of a session as one paragraph, and their ids."""

    text: str
    ids: frozenset[str]


def build(seed: int, size: Size, data: Sequence[Path]) -> Dialogue:
    """The dialogue of a seed: one file's conversation, with stretches of another one's.

    Raises BadDataFile, and BadExample where no stretch of the files has a question for each turn.
    """
    files = [file for source in data for file in list_files(source)]
    if len(files) < 2:
        raise BadExample("locomo dialogues need two files: other people's lines are of another one")
    rng = Random(f"multiturn:locomo:{seed}")
    index = seed % len(files)
    conversation = read_conversation(files[index])
    other = read_conversation(files[(index + rng.randrange(1, len(files))) % len(files)])
    stretches = list(_stretches(conversation))
    for _ in range(_DRAWS):
        turns = _try(rng, size, conversation, stretches, list(_stretches(other)))
        if turns is not None:
            first, second = conversation.speakers
            return Dialogue(seed, "locomo", f"Notes of what {first} and {second} said.", turns)
    raise BadExample(
        f"{conversation.name} has no {size.tokens} tokens with a question for each of {size.turns} "
        "turns; take longer dialogues"
    )


def _stretches(conversation: Conversation) -> Iterator[_Stretch]:
    """The conversation cut into stretches, none of two sessions."""
    lines = list(conversation.lines)
    start = 0
    while start < len(lines):
        session = lines[start].session
        run = [line for line in lines[start : start + _LINES] if line.session == session]
        spoken = " ".join(f"{line.speaker}: {line.text}" for line in run)
        date = f"({run[0].date}) " if run[0].date else ""
        yield _Stretch(" ".join(f"{date}{spoken}".split()), frozenset(line.id for line in run))
        start += len(run)


def _try(
    rng: Random,
    size: Size,
    conversation: Conversation,
    stretches: Sequence[_Stretch],
    others: Sequence[_Stretch],
) -> tuple[Turn, ...] | None:
    """Turns from a random stretch on; None if some turn would have no question."""
    own = _split(stretches[rng.randrange(len(stretches)) :], size)
    if own is None:
        return None
    open_questions = list(conversation.questions)
    turns = []
    for number, segments in enumerate(own):
        found = _draw_question(rng, open_questions, own[: number + 1], size.turns)
        if found is None:
            return None
        question, evidence = found
        open_questions.remove(question)
        unlike = [each for each in others if not contains_value(each.text, question.answer)]
        if not unlike:
            return None
        texts = [each.text for each in segments]
        texts.insert(rng.randrange(len(texts) + 1), rng.choice(unlike).text)
        turns.append(Turn(tuple(texts), question.text, (question.answer,), evidence, cue=CUE))
    return tuple(turns)


def _split(stretches: Sequence[_Stretch], size: Size) -> list[list[_Stretch]] | None:
    """Stretches in order, each turn with its share of the tokens; None if there are too few."""
    share = size.tokens * _TOKEN // size.turns
    turns: list[list[_Stretch]] = [[] for _ in range(size.turns)]
    at = 0
    for turn in turns:
        length = 0
        # One more stretch, of the other conversation, belongs to the turn.
        while at < len(stretches) and (not turn or length + 2 * len(stretches[at].text) <= share):
            turn.append(stretches[at])
            length += len(stretches[at].text)
            at += 1
    return turns if all(turns) else None


def _draw_question(
    rng: Random, questions: Sequence[Question], stated: Sequence[Sequence[_Stretch]], turns: int
) -> tuple[Question, tuple[int, ...]] | None:
    """A question with all its evidence in the turns so far, and the turns that have it.

    Of the drawn class of evidence, if there is such a question.
    """
    ids = [frozenset().union(*(each.ids for each in segments)) for segments in stated]
    known = frozenset().union(*ids)
    answerable = [
        (question, tuple(index for index, own in enumerate(ids) if question.evidence & own))
        for question in questions
        if question.evidence <= known
    ]
    if not answerable:
        return None
    number = len(stated) - 1
    wanted = draw_class(rng, number, turns)
    fitting = [each for each in answerable if evidence_class(each[1], number) == wanted]
    return rng.choice(fitting or answerable)
