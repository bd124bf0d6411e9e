"""Result rows of mq-niah: scores by condition and K, gains over matched no-repair, seconds."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from evals.codecs import byte_rows, cost_rows, rows_by_codec
from evals.conditions import FULL, MATCHED, WITHOUT_K
from evals.suite import Record
from evals.summary import (
    Key,
    difference_row,
    group_by,
    mean,
    mean_row,
    select_kind,
    split_cells,
    values_by_key,
)
from kvrecall_server.reporting.results import Row, speed_row

GROUP_KEYS = ("needles", "policy", "condition", "k")
_PAIR_KEYS = ("seed", "partition")
_MEASURES: Mapping[str, str] = {
    "exact": "all answers right",
    "held": "spans active",
    "overlap": "spans brought back",
}


def result_rows(records: Sequence[Record], seed: int) -> list[Row]:
    """Rows of each codec's cases, then the cost and the bytes of int8 if both codecs are there."""
    cases, unreported = split_at_chance(select_kind(records, "case"), seed)
    rows = rows_by_codec(cases, lambda group: _case_rows(group, seed), "of")
    rows += cost_rows(
        cases,
        ("condition", "k", "needles", "policy"),
        _PAIR_KEYS,
        lambda record: common_columns(tuple(record[name] for name in GROUP_KEYS), [record]),
        seed,
    )
    return [*rows, *byte_rows(select_kind(records, "stored")), *unreported]


def split_at_chance(records: Sequence[Record], seed: int) -> tuple[list[Record], list[Row]]:
    """Records with numbers of needles that can be judged, and rows on the others.

    Chance is to name the value of any fact, needle or distractor.
    """
    return split_cells(
        records,
        lambda each: each["condition"] == FULL,
        ("needles", "policy"),
        lambda each: 1 / each["facts"],
        seed,
    )


def _case_rows(records: Sequence[Record], seed: int) -> list[Row]:
    """Scores, gains over matched no-repair, other measures, partitions, seconds."""
    groups = group_by(records, *GROUP_KEYS)
    rows: list[Row] = []
    for key, group in groups.items():
        rows += mean_row(key[2], right_values(group), seed, **common_columns(key, group))
    rows += _gains(groups, seed)
    for key, group in groups.items():
        for name, measure in _MEASURES.items():
            values = [each[name] for each in group]
            columns = {**common_columns(key, group), "measure": measure}
            rows += mean_row(f"{key[2]}: {measure}", values, seed, **columns)
    rows += _partitions(records, seed)
    return [*rows, *repair_seconds(records)]


def common_columns(key: Key, group: Sequence[Record]) -> dict[str, Any]:
    """Columns of a row beside its mean; budget and active rows are means over the group's cases."""
    needles, policy, condition, k = key
    return {
        "method": policy,
        "k": k,
        "budget": round(mean(each["budget"] for each in group)),
        "base": group[0]["base"],
        "active_rows": round(mean(each["active_rows"] for each in group), 1),
        "needles": needles,
        "of": condition,
    }


def _gains(groups: Mapping[Key, Sequence[Record]], seed: int) -> Iterator[Row]:
    """Every condition that depends on K minus matched no-repair at the same K, case by case."""
    for key, group in groups.items():
        needles, policy, condition, k = key
        matched = groups.get((needles, policy, MATCHED, k))
        if condition in (MATCHED, *WITHOUT_K) or matched is None:
            continue
        columns = {**common_columns(key, group), "against": MATCHED}
        yield from difference_row(
            f"{condition} minus matched",
            _right_by_case(group),
            _right_by_case(matched),
            seed,
            **columns,
        )


def _partitions(records: Sequence[Record], seed: int) -> Iterator[Row]:
    """Scores at the largest K for each partition (RepairKV, Figure 7)."""
    largest = max((each["k"] for each in records), default=0)
    selected = [each for each in records if each["k"] == largest]
    for (*key, partition), group in group_by(selected, *GROUP_KEYS, "partition").items():
        columns = {**common_columns(tuple(key), group), "partition": partition}
        yield from mean_row(f"{key[2]}, {partition}", right_values(group), seed, **columns)


def repair_seconds(records: Iterable[Record]) -> Iterator[Row]:
    """Seconds that a condition took to select and move its rows, over all cases and K."""
    timed = [each for each in records if each["condition"] not in WITHOUT_K]
    for (needles, policy, condition), group in group_by(timed, *GROUP_KEYS[:3]).items():
        name = f"{condition}, {needles}q, {policy}"
        yield speed_row(
            name, "choosing and moving rows", "seconds", [each["seconds"] for each in group]
        )


def right_values(group: Sequence[Record]) -> list[float]:
    """Share of right answers of each record."""
    return [each["right"] for each in group]


def _right_by_case(group: Sequence[Record]) -> dict[Key, float]:
    return values_by_key(group, lambda each: float(each["right"]), *_PAIR_KEYS)
