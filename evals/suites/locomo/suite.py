"""Suite locomo: evidence in the matched episode and, if a model is given, the model's answers."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from evals.configs import FULL, RunConfig, parse_config
from evals.suite import Record, Suite
from evals.suites.locomo import answers as locomo_answers
from evals.suites.locomo import matching as locomo_matching
from evals.suites.locomo.answers import Answering
from evals.suites.locomo.data import list_files
from evals.suites.locomo.matching import Matching
from evals.summary import select_kind
from kvrecall_server.reporting.results import Row

NO_MODEL = "none, the sentence encoder alone"


def suite(
    source: Path,
    limit: int | None,
    seed: int,
    counts: Sequence[int],
    widths: Sequence[int],
    answers: Sequence[Answering],
) -> Suite[Matching | Answering]:
    """Matching on the first `limit` files, and the given answering units. Raises BadDataFile."""
    files = list_files(source)[:limit]
    matching = [
        Matching(str(path), width, tuple(counts), seed) for path in files for width in widths
    ]
    model = answers[0].setup.model if answers else NO_MODEL
    return Suite("locomo", seed, model, (*matching, *answers), run, partial(result_rows, seed=seed))


def answering_units(
    first: Answering,
    source: Path,
    limit: int | None,
    configs: Sequence[RunConfig],
    budgets: Sequence[str],
) -> list[Answering]:
    """The full cache once and every configuration at every budget, on the first `limit` files.

    Raises BadDataFile.
    """
    return [
        replace(first, path=str(path), setup=setup)
        for path in list_files(source)[:limit]
        for setup in (
            replace(first.setup, config=parse_config(FULL), budget="1/1"),
            *(
                replace(first.setup, config=config, budget=each)
                for each in budgets
                for config in configs
                if config.evicts
            ),
        )
    ]


def run(unit: Matching | Answering) -> list[Record]:
    """Run a unit of either kind. Raises BadDataFile, `workers.errors`."""
    match unit:
        case Matching():
            return locomo_matching.run(unit)
        case Answering():
            return locomo_answers.run(unit)


def result_rows(records: Sequence[Record], seed: int) -> list[Row]:
    """Rows of matching, then rows of answers."""
    rows = locomo_matching.result_rows(select_kind(records, "matching"), seed)
    return [*rows, *locomo_answers.result_rows(select_kind(records, "answer"), seed)]
