"""What longconv comes to: accuracy by arm, budget and place, paired differences, and what episodes cost."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from evals.codecs import byte_rows, cost_rows, rows_by_codec
from evals.configs import FULL
from evals.suite import Record
from evals.summary import Key, difference_row, grouped, mean, mean_row, of_kind, values_of
from kvrecall.reporting.results import Row, speed_row

PLACES = ("early", "middle", "late")
_ONE_PASS = "+one_pass"
_PER_EPISODE = "+per_episode"


def result_rows(records: Sequence[Record], seed: int) -> list[Row]:
    """The rows of each codec's sessions, then what int8 costs and takes, where there are both."""
    rows = rows_by_codec(records, lambda own: _rows(own, seed), "method")
    histories = of_kind(records, "history")
    known = grouped(histories, "arm", "budget")
    asked = of_kind(records, "question")
    common = {key: _common(key, found) for key, found in known.items()}
    rows += cost_rows(
        asked,
        ("arm", "budget"),
        ("seed", "question"),
        lambda one: common[one["arm"], one["budget"]],
        seed,
    )
    return [*rows, *byte_rows(histories)]


def _rows(records: Sequence[Record], seed: int) -> list[Row]:
    """Quality rows, which the same seed gives again, then speed rows."""
    questions = of_kind(records, "question")
    histories = of_kind(records, "history")
    asked = grouped(questions, "arm", "budget")
    kept = grouped(histories, "arm", "budget")
    common = {key: _common(key, found) for key, found in kept.items()}
    rows: list[Row] = []
    for key, found in asked.items():
        rows += _accuracy(found, common[key], seed)
    rows += _differences(asked, common, seed)
    for key, found in kept.items():
        rows += _costs(key, found, asked[key], kept)
    return rows


def _common(key: Key, histories: Sequence[Record]) -> dict[str, Any]:
    return {
        "method": key[0],
        "k": 0,
        "budget": round(mean(each["rows"] for each in histories)),
        "share": key[1],
        "active_rows": round(mean(each["active_rows"] for each in histories), 1),
    }


def _accuracy(asked: Sequence[Record], common: Mapping[str, Any], seed: int) -> list[Row]:
    rows = mean_row("all facts", [each["right"] for each in asked], seed, **common)
    for place in PLACES:
        rows += mean_row(
            f"{place} facts",
            [each["right"] for each in asked if each["place"] == place],
            seed,
            **common,
        )
    held = [each["held"] for each in asked if "held" in each]
    rows += mean_row("fact in the matched episode", held, seed, **common)
    for condition, inside in (
        ("facts in the matched episode", 1.0),
        ("facts outside the matched episode", 0.0),
    ):
        right = [each["right"] for each in asked if each.get("held") == inside]
        rows += mean_row(condition, right, seed, **common)
    return rows


def _differences(
    asked: Mapping[Key, Sequence[Record]], common: Mapping[Key, Any], seed: int
) -> Iterator[Row]:
    """Every arm with episodes against every other at the same budget, and against the full cache."""
    right = {
        key: values_of(found, lambda each: each["right"], "seed", "question")
        for key, found in asked.items()
    }
    for (arm, budget), ours in right.items():
        if not any("episode" in each for each in asked[arm, budget]):
            continue
        for (other, its_budget), theirs in right.items():
            if other != arm and (its_budget == budget or other == FULL):
                told = {**common[arm, budget], "against": other}
                yield from difference_row(f"{arm} minus {other}", ours, theirs, seed, **told)


def _costs(
    key: Key,
    histories: Sequence[Record],
    asked: Sequence[Record],
    kept: Mapping[Key, Sequence[Record]],
) -> Iterator[Row]:
    name = f"{key[0]}, {key[1]}"
    yield speed_row(name, "answer", "seconds", [each["seconds"] for each in asked])
    spent = [prefill_seconds(each) for each in histories]
    against: dict[str, Any] = {}
    rival = (key[0].replace(_ONE_PASS, _PER_EPISODE), key[1])
    if rival != key and rival in kept:
        whole = sum(prefill_seconds(each) for each in kept[rival])
        against = {"ratio_to": rival[0], "ratio": round(sum(spent) / whole, 4)}
    yield speed_row(name, "prefill and build", "seconds", spent, **against)
    if against:
        yield from _like_for_like(name, histories, kept[rival], rival[0])
    if "index_bytes" not in histories[0]:
        return
    copies = sum(each["copy_bytes"] for each in histories)
    ratio = round(sum(each["index_bytes"] for each in histories) / copies, 5)
    sizes = [each["index_bytes"] for each in histories]
    yield speed_row(
        name, "index of all episodes", "bytes", sizes, ratio_to="copies of their rows", ratio=ratio
    )
    yield speed_row(
        name, "clustering", "seconds", [each["seconds"]["clustering"] for each in histories]
    )
    moved = [each["rows_moved"] / (each["rows_moved"] + each["rows_kept"]) for each in asked]
    yield speed_row(name, "rows moved by a switch", "share", moved)


def _like_for_like(
    name: str, histories: Sequence[Record], rivals: Sequence[Record], rival: str
) -> Iterator[Row]:
    """The same comparison with prefills of one kind: the history in one go, as each of the E passes does it.

    A session's own prefill comes turn by turn, each written through and committed; a pass of EpiCache's build is
    neither.
    """
    passes = [each["seconds"]["build"] for each in rivals]
    builds = [each["seconds"]["build"] for each in histories]
    spent = [
        all_e / each["episodes"] + build
        for all_e, each, build in zip(passes, rivals, builds, strict=True)
    ]
    ratio = round(sum(spent) / sum(passes), 4)
    yield speed_row(
        name, "one of the E passes, and build", "seconds", spent, ratio_to=rival, ratio=ratio
    )
    ratio = round(sum(builds) / sum(passes), 4)
    yield speed_row(name, "build alone", "seconds", builds, ratio_to=rival, ratio=ratio)


def prefill_seconds(history: Record) -> float:
    """Seconds until questions can be asked: one prefill and the build on it, or the E prefills of EpiCache's own build.

    These do not need the session's own prefill before them, so it is not counted there.
    """
    seconds = history["seconds"]
    if history["build"] == "per_episode":
        return float(seconds["build"])
    return float(seconds["prefill"] + seconds.get("build", 0.0))
