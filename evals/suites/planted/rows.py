"""Result rows of planted: answers by condition and K, paired differences, where rows came from."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from evals.suite import Record
from evals.summary import Key, difference_row, group_by, mean_row, split_cells, values_by_key
from kvrecall_server.reporting.results import Row, speed_row

FULL = "full cache"
QUESTIONS = "questions"
_PAPER = "bursts (paper)"
_MEASURES: Mapping[str, str] = {
    "log_prob": "mean log-probability of the value",
    "in_statements": "promoted rows in the statements asked for",
    "in_template": "promoted rows in the chat template",
    "brought_back": "statements asked for, share brought back",
}


def result_rows(records: Sequence[Record], seed: int) -> list[Row]:
    """Scores, differences to the full cache and to the paper's bursts, other measures, seconds.

    Numbers of facts at which the full cache is not above chance are listed, not reported. Chance is
    to name the value of any planted fact.
    """
    records, unreported = split_cells(
        records,
        lambda each: each["condition"] == FULL,
        ("facts",),
        lambda each: 1 / each["planted"] if each["planted"] > 1 else 0.0,
        seed,
    )
    groups = group_by(records, "signal", "facts", "condition", "k")
    rows: list[Row] = []
    for key, group in groups.items():
        rows += mean_row(key[2], [each["right"] for each in group], seed, **_columns(key, group))
    for key, group in groups.items():
        rows += _differences(groups, key, group, seed)
    for key, group in groups.items():
        for name, measure in _MEASURES.items():
            values = [each[name] for each in group if name in each]
            rows += mean_row(
                f"{key[2]}: {measure}", values, seed, **_columns(key, group), measure=measure
            )
    return [*rows, *_seconds(records), *unreported]


def _differences(
    groups: Mapping[Key, Sequence[Record]], key: Key, group: Sequence[Record], seed: int
) -> Iterator[Row]:
    """The condition minus the full cache, and minus the paper's at the same K, text by text."""
    signal, facts, condition, k = key
    full = (QUESTIONS, facts, FULL, 0)
    for against, other in ((FULL, full), (_PAPER, (signal, facts, _PAPER, k))):
        if condition in (against, FULL) or other not in groups:
            continue
        columns = {**_columns(key, group), "against": against}
        yield from difference_row(
            f"{condition} minus {against}",
            _right_by_case(group),
            _right_by_case(groups[other]),
            seed,
            **columns,
        )


def _columns(key: Key, group: Sequence[Record]) -> dict[str, Any]:
    signal, facts, condition, k = key
    first = group[0]
    budget = {} if condition == FULL else {"budget": first["budget"]}
    common = {"method": first["method"], "k": k, "facts": facts, "planted": first["planted"]}
    return {**common, "signal": signal, "split": first["split"], **budget, "of": condition}


def _right_by_case(group: Sequence[Record]) -> dict[Key, float]:
    return values_by_key(group, lambda each: float(each["right"]), "seed")


def _seconds(records: Sequence[Record]) -> Iterator[Row]:
    timed = [each for each in records if "seconds" in each]
    for (signal, condition, k), group in group_by(timed, "signal", "condition", "k").items():
        name = f"{condition}, {signal}, K = {k}"
        yield speed_row(name, "repair", "seconds", [each["seconds"] for each in group])
