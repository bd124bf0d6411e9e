"""What mq-niah comes to: scores by condition and K, gains over matched no-repair, spans, seconds."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from evals.codecs import byte_rows, cost_rows, rows_by_codec
from evals.conditions import MATCHED, WITHOUT_K
from evals.suite import Record
from evals.summary import Key, difference_row, grouped, mean, mean_row, of_kind, values_of
from kvrecall.reporting.results import Row, speed_row

_GROUP = ("needles", "policy", "condition", "k")
_MEASURES: Mapping[str, str] = {
    "exact": "all answers right",
    "held": "spans active",
    "overlap": "spans brought back",
}
_PAIR = ("seed", "partition")


def result_rows(records: Sequence[Record], seed: int) -> list[Row]:
    """The rows of each codec's cases, then what int8 costs and takes, where there are both."""
    cases = of_kind(records, "case")
    stored = of_kind(records, "stored")
    rows = rows_by_codec(cases, lambda own: _case_rows(own, seed), "of")
    asked = ("condition", "k", "needles", "policy")
    rows += cost_rows(
        cases, asked, _PAIR, lambda one: common(tuple(one[name] for name in _GROUP), [one]), seed
    )
    return [*rows, *byte_rows(stored)]


def _case_rows(records: Sequence[Record], seed: int) -> list[Row]:
    """Scores, then gains over matched no-repair, other measures, partitions at the largest K, seconds."""
    groups = grouped(records, *_GROUP)
    rows: list[Row] = []
    for key, found in groups.items():
        rows += mean_row(key[2], _right(found), seed, **common(key, found))
    rows += gains(groups, seed)
    for key, found in groups.items():
        for name, told in _MEASURES.items():
            values = [each[name] for each in found]
            rows += mean_row(f"{key[2]}: {told}", values, seed, **common(key, found), measure=told)
    rows += _partitions(records, seed)
    return [*rows, *repair_seconds(records)]


def common(key: Key, found: Sequence[Record]) -> dict[str, Any]:
    """What a row says beside its mean; rows are the most of any case, a budget their mean."""
    needles, policy, condition, k = key
    return {
        "method": policy,
        "k": k,
        "budget": round(mean(each["budget"] for each in found)),
        "base": found[0]["base"],
        "active_rows": round(mean(each["active_rows"] for each in found), 1),
        "needles": needles,
        "of": condition,
    }


def gains(groups: Mapping[Key, Sequence[Record]], seed: int) -> Iterator[Row]:
    """Every condition minus matched no-repair at its K, case by case; the full cache and the base at every K's."""
    for key, found in groups.items():
        needles, policy, condition, k = key
        theirs = groups.get((needles, policy, MATCHED, k))
        if condition in (MATCHED, *WITHOUT_K) or theirs is None:
            continue
        told = {**common(key, found), "against": MATCHED}
        yield from difference_row(
            f"{condition} minus matched", _paired(found), _paired(theirs), seed, **told
        )


def _partitions(records: Sequence[Record], seed: int) -> Iterator[Row]:
    """The scores at the largest K, each partition by itself (RepairKV, Figure 7)."""
    largest = max((each["k"] for each in records), default=0)
    chosen = [each for each in records if each["k"] == largest]
    for (*key, partition), found in grouped(chosen, *_GROUP, "partition").items():
        told = {**common(tuple(key), found), "partition": partition}
        yield from mean_row(f"{key[2]}, {partition}", _right(found), seed, **told)


def repair_seconds(records: Iterable[Record]) -> Iterator[Row]:
    """How long a condition took to choose and move its rows, over all cases and K."""
    timed = [each for each in records if each["condition"] not in WITHOUT_K]
    for (needles, policy, condition), found in grouped(timed, *_GROUP[:3]).items():
        name = f"{condition}, {needles}q, {policy}"
        yield speed_row(
            name, "choosing and moving rows", "seconds", [each["seconds"] for each in found]
        )


def _right(found: Sequence[Record]) -> list[float]:
    return [each["right"] for each in found]


def _paired(found: Sequence[Record]) -> dict[Key, float]:
    return values_of(found, lambda each: float(each["right"]), *_PAIR)
