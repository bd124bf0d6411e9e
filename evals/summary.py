"""Result rows from records: groups, means with their intervals, and paired differences."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from evals.suite import Record
from kvrecall.reporting.results import Row, bootstrap, quality_row

Key = tuple[Any, ...]


def group_by(records: Iterable[Record], *names: str) -> dict[Key, list[Record]]:
    """Records grouped by their values of `names`, in the order in which these first occur."""
    groups: dict[Key, list[Record]] = {}
    for record in records:
        groups.setdefault(tuple(record[name] for name in names), []).append(record)
    return groups


def select_kind(records: Iterable[Record], kind: str) -> list[Record]:
    """Records of this `kind`."""
    return [record for record in records if record["kind"] == kind]


def mean_row(condition: str, values: Sequence[float], seed: int, **common: Any) -> list[Row]:
    """One quality row: the mean with its 95% interval. No row without values."""
    estimate = bootstrap(values, seed)
    return [] if estimate is None else [quality_row(condition, estimate, **common)]


def difference_row(
    condition: str, ours: Mapping[Key, float], theirs: Mapping[Key, float], seed: int, **common: Any
) -> list[Row]:
    """A quality row of ours minus theirs, paired over the questions that both were asked."""
    return mean_row(
        condition,
        [value - theirs[key] for key, value in ours.items() if key in theirs],
        seed,
        **common,
    )


def values_by_key(
    records: Iterable[Record], get_value: Callable[[Record], float], *names: str
) -> dict[Key, float]:
    """A value of each record by the record's values of `names`."""
    return {tuple(record[name] for name in names): get_value(record) for record in records}


def mean(values: Iterable[float]) -> float:
    """The mean of at least one value."""
    numbers = list(values)
    return sum(numbers) / len(numbers)
