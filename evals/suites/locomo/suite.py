"""Suite locomo: real conversations. Whether episodes hold the evidence, and, where a model is given, its answers."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from evals.configs import FULL, Arm, arm_of
from evals.suite import Record, Suite
from evals.suites.locomo import answers as locomo_answers
from evals.suites.locomo import matching as locomo_matching
from evals.suites.locomo.answers import Answering
from evals.suites.locomo.data import files_of
from evals.suites.locomo.matching import Matching
from evals.summary import of_kind
from kvrecall.reporting.results import Row

NO_MODEL = "none, the sentence encoder alone"


def suite(
    source: Path,
    limit: int | None,
    seed: int,
    counts: Sequence[int],
    widths: Sequence[int],
    answers: Sequence[Answering],
) -> Suite[Matching | Answering]:
    """Matching on the first `limit` files, and the answers that `answering` lists. Raises BadDataFile."""
    files = files_of(source)[:limit]
    matching = [
        Matching(str(path), width, tuple(counts), seed) for path in files for width in widths
    ]
    model = answers[0].setup.model if answers else NO_MODEL
    return Suite("locomo", seed, model, (*matching, *answers), run, partial(result_rows, seed=seed))


def answering(
    first: Answering, source: Path, limit: int | None, arms: Sequence[Arm], budgets: Sequence[str]
) -> list[Answering]:
    """Every arm at every budget, and the full cache once, on the first `limit` files. Raises BadDataFile."""
    return [
        replace(first, path=str(path), setup=setup)
        for path in files_of(source)[:limit]
        for setup in (
            replace(first.setup, arm=arm_of(FULL), budget="1/1"),
            *(
                replace(first.setup, arm=arm, budget=each)
                for each in budgets
                for arm in arms
                if arm.evicts
            ),
        )
    ]


def run(unit: Matching | Answering) -> list[Record]:
    """Whichever it is."""
    match unit:
        case Matching():
            return locomo_matching.run(unit)
        case Answering():
            return locomo_answers.run(unit)


def result_rows(records: Sequence[Record], seed: int) -> list[Row]:
    """The rows of both parts."""
    matched = locomo_matching.result_rows(of_kind(records, "matching"), seed)
    return [*matched, *locomo_answers.result_rows(of_kind(records, "answer"), seed)]
