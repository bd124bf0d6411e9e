"""Result rows of planted: answers by condition and K, paired differences, where rows came from."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from evals.suite import Record
from evals.summary import Key, difference_row, group_by, mean_row, values_by_key
from kvrecall.reporting.results import Row, speed_row

_FULL = "full cache"
_PAPER = "bursts (paper)"
_MEASURES: Mapping[str, str] = {
    "log_prob": "mean log-probability of the value",
    "in_statements": "promoted rows in the statements asked for",
    "in_template": "promoted rows in the chat template",
}


def result_rows(records: Sequence[Record], seed: int) -> list[Row]:
    """Scores, differences to the full cache and to the paper's bursts, other measures, seconds."""
    groups = group_by(records, "facts", "condition", "k")
    rows: list[Row] = []
    for key, group in groups.items():
        rows += mean_row(key[1], [each["right"] for each in group], seed, **_columns(key, group))
    for key, group in groups.items():
        rows += _differences(groups, key, group, seed)
    for key, group in groups.items():
        for name, measure in _MEASURES.items():
            values = [each[name] for each in group if name in each]
            rows += mean_row(
                f"{key[1]}: {measure}", values, seed, **_columns(key, group), measure=measure
            )
    return [*rows, *_seconds(records)]


def _differences(
    groups: Mapping[Key, Sequence[Record]], key: Key, group: Sequence[Record], seed: int
) -> Iterator[Row]:
    """The condition minus the full cache, and minus the paper's at the same K, text by text."""
    facts, condition, k = key
    for against, other in ((_FULL, (facts, _FULL, 0)), (_PAPER, (facts, _PAPER, k))):
        if condition in (against, _FULL) or other not in groups:
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
    facts, condition, k = key
    first = group[0]
    budget = {} if condition == _FULL else {"budget": first["budget"]}
    common = {"method": first["method"], "k": k, "facts": facts, "split": first["split"]}
    return {**common, **budget, "of": condition}


def _right_by_case(group: Sequence[Record]) -> dict[Key, float]:
    return values_by_key(group, lambda each: float(each["right"]), "seed")


def _seconds(records: Sequence[Record]) -> Iterator[Row]:
    timed = [each for each in records if "seconds" in each]
    for (condition, k), group in group_by(timed, "condition", "k").items():
        yield speed_row(
            f"{condition}, K = {k}", "repair", "seconds", [each["seconds"] for each in group]
        )
