"""Result rows from records: groups, means with their intervals, and paired differences."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from evals.suite import Record
from kvrecall_server.reporting.results import Row, bootstrap, quality_row

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


def split_cells(
    records: Sequence[Record],
    is_full: Callable[[Record], bool],
    cell_keys: tuple[str, ...],
    get_chance: Callable[[Record], float],
    seed: int,
) -> tuple[list[Record], list[Row]]:
    """Records of the cells that can be judged, and a row on every other cell.

    A cell has equal `cell_keys`. Where the full cache, the upper bound, is not above chance (the
    lower end of its interval), a method's score says nothing about the method: those cells are
    listed and not reported. Records have `right`; records of other kinds are no argument.
    """
    reported = list[Record]()
    rows: list[Row] = []
    for key, group in group_by(records, *cell_keys).items():
        full = [each for each in group if is_full(each)]
        estimate = bootstrap([each["right"] for each in full], seed)
        if estimate is None or estimate.low > get_chance(full[0]):
            reported += group
            continue
        cell = dict(zip(cell_keys, key, strict=True))
        name = ", ".join(f"{name} {value}" for name, value in cell.items())
        common = {"unreported": True, "chance": round(get_chance(full[0]), 4), **cell}
        rows.append(quality_row(f"not reported, full cache at chance: {name}", estimate, **common))
    return reported, rows


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
