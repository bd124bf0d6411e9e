"""Suite multiturn: questions before, within and behind their context, over several turns.

LoopServe 4 and A.4. The full cache runs a dialogue turn by turn, and its answers are
recorded. Every arm, at every budget, is a session of its own that replays the same dialogue with the
recorded answers, so that all have the same history; each turn is scored from the state before it. A
unit is one dialogue at one place of its questions, with all arms.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

from evals import harness
from evals.configs import FULL, budget_rows
from evals.errors import BadSuite
from evals.harness import Setup
from evals.languages.base import Language
from evals.languages.choice import get_language
from evals.suite import Record, Suite
from evals.suites.multiturn.arms import Arm, parse_arm
from evals.suites.multiturn.dialogue import PLACES, Dialogue, Place, Size, evidence_class
from evals.suites.multiturn.kinds import build_dialogue
from evals.suites.multiturn.rows import result_rows
from evals.suites.multiturn.scores import CHOICE, EXACT, score_choice, score_reply
from evals.suites.multiturn.sessions import (
    Answers,
    DialogueSession,
    Recorded,
    ScoredTurn,
    count_rows,
    list_turns,
)
from evals.summary import mean

BUDGETS = ("1/16", "1/8", "1/4")


@dataclass(frozen=True)
class Unit:
    """One dialogue at one place of its questions, under all arms at all budgets.

    Attributes:
        setup: Model, seed and block; the configuration is the full cache's.
        kind: Kind of the dialogue.
        place: Where the questions are.
        size: Size of the dialogue.
        answers: `generated`: replies are generated and compared with the answers. `chosen`: where a
            turn has choices the reply is given up to the value, which is the likeliest choice.
        arms: Arms to compare, the full cache among them.
        budgets: Budgets of the arms but the full cache, rows or shares of the dialogue's tokens.
        data: Files and folders with recorded text.
    """

    setup: Setup
    kind: str
    place: Place
    size: Size
    answers: Answers
    arms: tuple[Arm, ...]
    budgets: tuple[str, ...]
    data: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Short text for the progress bar."""
        return f"{self.kind}, {self.place}, seed {self.setup.seed}"


def suite(
    first: Unit, kinds: Sequence[str], places: Sequence[Place], dialogues: int
) -> Suite[Unit]:
    """`dialogues` dialogues of each kind, from the first one's seed on, at all places.

    Dialogue by dialogue, so that a run that was stopped has whole ones.
    """
    units = [
        replace(first, setup=replace(first.setup, seed=seed), kind=kind, place=place)
        for seed in range(first.setup.seed, first.setup.seed + dialogues)
        for kind in kinds
        for place in places
    ]
    seed = first.setup.seed
    return Suite(
        "multiturn", seed, first.setup.model, tuple(units), run, partial(result_rows, seed=seed)
    )


def parse_answers(text: str, of_reference: bool) -> Answers:
    """The way of answering of this name; empty: `generated` for the reference model, else `chosen`.

    Raises BadSuite.
    """
    if not text:
        return "generated" if of_reference else "chosen"
    known: tuple[Answers, ...] = get_args(Answers)
    for answers in known:
        if answers == text:
            return answers
    raise BadSuite(f"there is no way {text!r} of answering; there are {', '.join(known)}")


def parse_places(texts: Sequence[str]) -> tuple[Place, ...]:
    """The places of these names; all without one. Raises BadSuite."""
    for text in texts:
        if text not in PLACES:
            raise BadSuite(f"there is no place {text!r}; there are {', '.join(PLACES)}")
    return tuple(place for place in PLACES if place in texts or not texts)


def run(unit: Unit) -> list[Record]:
    """Run the dialogue with the full cache, then with every arm at every budget.

    Raises BadExample, BadDataFile, BadReplayFile, BadBudget, `workers.errors`.
    """
    setup = unit.setup
    language = get_language(setup.model)
    dialogue = build_dialogue(unit.kind, setup.seed, unit.size, language, unit.data)
    turns = list_turns(dialogue, unit.place, unit.answers)
    rows = count_rows(setup.model, turns)
    largest = max(budget_rows(budget, rows) for budget in ("1/1", *unit.budgets))
    with harness.open_worker(setup, largest) as worker:
        full = DialogueSession(worker, parse_arm(FULL), rows, setup.seed)
        recorded = [full.record(asked) for asked in turns]
        length = full.session.memory.length
        full.close()
        records = list(_full_records(unit, dialogue, recorded, length, language))
        for arm, budget in _compared(unit):
            session = DialogueSession(worker, arm, budget_rows(budget, length), setup.seed)
            scored = [session.replay(each, language) for each in recorded]
            session.close()
            records += _arm_records(unit, dialogue, (arm.name, budget), length, scored)
        return records


def _compared(unit: Unit) -> Iterator[tuple[Arm, str]]:
    """The arms beside the full cache, each with its budget: one that keeps every row has no other."""
    arms = [arm for arm in unit.arms if arm.name != FULL]
    yield from ((arm, "1/1") for arm in arms if not arm.config.evicts)
    yield from ((arm, budget) for budget in unit.budgets for arm in arms if arm.config.evicts)


def _full_records(
    unit: Unit, dialogue: Dialogue, recorded: Sequence[Recorded], length: int, language: Language
) -> Iterator[Record]:
    """Scores of the full cache, each with its chance: the upper bound of all arms."""
    for number, (turn, each) in enumerate(zip(dialogue.turns, recorded, strict=True)):
        columns = _columns(unit, dialogue, number, (FULL, "1/1"), length)
        columns |= {"rows": length, "active_rows": length, "reply": each.reply}
        if each.values:
            scores = {CHOICE: score_choice(turn, each.values)}
        else:
            scores = score_reply(dialogue.kind, turn, each.reply, language)
        for measure, score in scores.items():
            chance = 1 / len(turn.choices) if turn.choices else 0.0
            if measure not in (CHOICE, EXACT):
                others = [other for other in dialogue.turns if other is not turn]
                chance = mean(
                    score_reply(dialogue.kind, other, each.reply, language)[measure]
                    for other in others or [turn]
                )
            yield {**columns, "measure": measure, "right": score, "chance": round(chance, 4)}


def _arm_records(
    unit: Unit, dialogue: Dialogue, arm: tuple[str, str], length: int, scored: Sequence[ScoredTurn]
) -> Iterator[Record]:
    for number, each in enumerate(scored):
        columns = _columns(unit, dialogue, number, arm, length)
        columns |= {"rows": each.rows, "active_rows": each.active_rows, "reply": each.reply}
        for measure, score in each.scores.items():
            yield {**columns, "measure": measure, "right": score}


def _columns(
    unit: Unit, dialogue: Dialogue, number: int, arm: tuple[str, str], length: int
) -> dict[str, Any]:
    """Columns of a turn's records; `arm` is its name and its budget."""
    turn = dialogue.turns[number]
    return {
        "kind": unit.kind,
        "place": unit.place,
        "seed": dialogue.seed,
        "turn": number + 1,
        "evidence": evidence_class(turn.evidence, number),
        "arm": arm[0],
        "budget": arm[1],
        "length": length,
        "expected": list(turn.answers),
    }
