"""Result rows of repository: exact recovery by condition and K, gains, log-probabilities."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from evals.conditions import MATCHED, OLDEST, RANDOM, STALE, WITHOUT_K, WRONG
from evals.suite import Record
from evals.summary import Key, difference_row, group_by, mean, mean_row, values_by_key
from kvrecall_server.reporting.results import Row, speed_row

CONTROL = "best non-query control"
CONTROLS = (RANDOM, OLDEST, STALE, WRONG)
_MEASURES: Mapping[str, str] = {
    "log_prob": "log-probability of the name, nats a token",
    "held": "the name's rows active",
    "in_lines": "came back from the call's or definition's line",
}


def result_rows(records: Sequence[Record], seed: int) -> list[Row]:
    """Exact recovery by condition and K, other measures, gains over matched no-repair; seconds."""
    groups = group_by(records, "condition", "k")
    rows: list[Row] = []
    for key, group in groups.items():
        rows += mean_row(key[0], [each["right"] for each in group], seed, **_common(key, group))
    rows += _best_control(groups, seed)
    for name, measure in _MEASURES.items():
        for key, group in groups.items():
            values = [each[name] for each in group]
            columns = {**_common(key, group), "measure": measure}
            rows += mean_row(f"{key[0]}: {measure}", values, seed, **columns)
    rows += _gains(groups, seed)
    repairs = [each for each in records if each["seconds"]]
    for (condition,), group in group_by(repairs, "condition").items():
        rows.append(speed_row(condition, "repair", "seconds", [each["seconds"] for each in group]))
    return rows


def _common(key: Key, group: Sequence[Record]) -> dict[str, Any]:
    return {
        "method": "snapkv",
        "k": key[1],
        "budget": round(mean(each["budget"] for each in group)),
        "active_rows": round(mean(each["active_rows"] for each in group), 1),
        "of": key[0],
    }


def _best_control(groups: Mapping[Key, Sequence[Record]], seed: int) -> Iterator[Row]:
    """The one of the four controls with the highest mean at each K (Table 2)."""
    for k in dict.fromkeys(key[1] for key in groups if key[1]):
        right = {name: [each["right"] for each in groups[name, k]] for name in CONTROLS}
        means = {name: mean(values) for name, values in right.items()}
        best = max(means, key=means.__getitem__)
        columns = {**_common((CONTROL, k), groups[best, k]), "control": best}
        yield from mean_row(CONTROL, right[best], seed, **columns)


def _gains(groups: Mapping[Key, Sequence[Record]], seed: int) -> Iterator[Row]:
    for (condition, k), group in groups.items():
        matched = groups.get((MATCHED, k))
        if condition in (*WITHOUT_K, MATCHED) or matched is None:
            continue
        columns = {**_common((condition, k), group), "against": MATCHED}
        ours, theirs = (
            values_by_key(each, lambda record: float(record["right"]), "seed")
            for each in (group, matched)
        )
        yield from difference_row(f"{condition} minus matched", ours, theirs, seed, **columns)
