"""From records to result rows: means with their intervals, paired differences, seconds apart."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from evals.suite import Record
from kvrecall.reporting.results import Row, bootstrap, quality_row

Key = tuple[Any, ...]


def grouped(records: Iterable[Record], *names: str) -> dict[Key, list[Record]]:
    """The records by their values of `names`, in the order in which these first come."""
    groups: dict[Key, list[Record]] = {}
    for record in records:
        groups.setdefault(tuple(record[name] for name in names), []).append(record)
    return groups


def of_kind(records: Iterable[Record], kind: str) -> list[Record]:
    """The records whose `kind` this is."""
    return [record for record in records if record["kind"] == kind]


def mean_row(condition: str, values: Sequence[float], seed: int, **common: Any) -> list[Row]:
    """One quality row: the mean with its 95% interval; none for no values."""
    estimate = bootstrap(values, seed)
    return [] if estimate is None else [quality_row(condition, estimate, **common)]


def difference_row(
    condition: str, ours: Mapping[Key, float], theirs: Mapping[Key, float], seed: int, **common: Any
) -> list[Row]:
    """A quality row of ours minus theirs over the questions that both were asked: paired, question by question."""
    return mean_row(
        condition,
        [value - theirs[key] for key, value in ours.items() if key in theirs],
        seed,
        **common,
    )


def values_of(
    records: Iterable[Record], value: Callable[[Record], float], *names: str
) -> dict[Key, float]:
    """Each record's value by what identifies it."""
    return {tuple(record[name] for name in names): value(record) for record in records}


def mean(values: Iterable[float]) -> float:
    """The mean of at least one value."""
    found = list(values)
    return sum(found) / len(found)
