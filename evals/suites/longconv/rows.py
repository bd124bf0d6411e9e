"""Result rows of longconv: accuracy by configuration and budget, differences, and costs."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from evals.codecs import byte_rows, cost_rows, rows_by_codec
from evals.configs import FULL
from evals.suite import Record
from evals.suites.longconv.conversations import PLACES
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

_ONE_PASS = "+one_pass"
_PER_EPISODE = "+per_episode"


def result_rows(records: Sequence[Record], seed: int) -> list[Row]:
    """Rows of each codec's sessions, then cost and bytes of int8 if both codecs are there.

    Cells that cannot be judged are listed last: chance is to name any of the stated values.
    """
    questions = select_kind(records, "question")
    asked = len({each["question"] for each in questions})
    reported, unreported = split_cells(
        questions, lambda each: each["arm"] == FULL, ("place",), lambda each: 1 / asked, seed
    )
    if not reported:
        return unreported
    records = [*select_kind(records, "history"), *reported]
    rows = rows_by_codec(records, lambda group: _rows(group, seed), "method")
    histories = select_kind(records, "history")
    common = {
        key: _common(key, group) for key, group in group_by(histories, "arm", "budget").items()
    }
    rows += cost_rows(
        select_kind(records, "question"),
        ("arm", "budget"),
        ("seed", "question"),
        lambda record: common[record["arm"], record["budget"]],
        seed,
    )
    return [*rows, *byte_rows(histories), *unreported]


def _rows(records: Sequence[Record], seed: int) -> list[Row]:
    """Quality rows, which the same seed reproduces, then speed rows."""
    questions = group_by(select_kind(records, "question"), "arm", "budget")
    histories = group_by(select_kind(records, "history"), "arm", "budget")
    common = {key: _common(key, group) for key, group in histories.items()}
    rows: list[Row] = []
    for key, group in questions.items():
        rows += _accuracy(group, common[key], seed)
    rows += _differences(questions, common, seed)
    for key, group in histories.items():
        rows += _costs(key, group, questions[key], histories)
    return rows


def _common(key: Key, histories: Sequence[Record]) -> dict[str, Any]:
    return {
        "method": key[0],
        "k": 0,
        "budget": round(mean(each["rows"] for each in histories)),
        "share": key[1],
        "active_rows": round(mean(each["active_rows"] for each in histories), 1),
    }


def _accuracy(questions: Sequence[Record], common: Mapping[str, Any], seed: int) -> list[Row]:
    rows = mean_row("all facts", [each["right"] for each in questions], seed, **common)
    for place in PLACES:
        rows += mean_row(
            f"{place} facts",
            [each["right"] for each in questions if each["place"] == place],
            seed,
            **common,
        )
    held = [each["held"] for each in questions if "held" in each]
    rows += mean_row("fact in the matched episode", held, seed, **common)
    for condition, inside in (
        ("facts in the matched episode", 1.0),
        ("facts outside the matched episode", 0.0),
    ):
        right = [each["right"] for each in questions if each.get("held") == inside]
        rows += mean_row(condition, right, seed, **common)
    return rows


def _differences(
    questions: Mapping[Key, Sequence[Record]], common: Mapping[Key, Any], seed: int
) -> Iterator[Row]:
    """Every configuration with episodes against the others at its budget and the full cache."""
    right = {
        key: values_by_key(group, lambda each: each["right"], "seed", "question")
        for key, group in questions.items()
    }
    for (config, budget), ours in right.items():
        if not any("episode" in each for each in questions[config, budget]):
            continue
        for (other, its_budget), theirs in right.items():
            if other != config and (its_budget == budget or other == FULL):
                columns = {**common[config, budget], "against": other}
                yield from difference_row(f"{config} minus {other}", ours, theirs, seed, **columns)


def _costs(
    key: Key,
    histories: Sequence[Record],
    questions: Sequence[Record],
    all_histories: Mapping[Key, Sequence[Record]],
) -> Iterator[Row]:
    """Seconds of answers and of prefill and build; one pass also as a ratio to E passes."""
    name = f"{key[0]}, {key[1]}"
    yield speed_row(name, "answer", "seconds", [each["seconds"] for each in questions])
    spent = [prefill_seconds(each) for each in histories]
    against: dict[str, Any] = {}
    rival = (key[0].replace(_ONE_PASS, _PER_EPISODE), key[1])
    if rival != key and rival in all_histories:
        rival_seconds = sum(prefill_seconds(each) for each in all_histories[rival])
        against = {"ratio_to": rival[0], "ratio": round(sum(spent) / rival_seconds, 4)}
    yield speed_row(name, "prefill and build", "seconds", spent, **against)
    if against:
        yield from _like_for_like(name, histories, all_histories[rival], rival[0])
    if "index_bytes" in histories[0]:
        yield from _episode_costs(name, histories, questions)


def _episode_costs(
    name: str, histories: Sequence[Record], questions: Sequence[Record]
) -> Iterator[Row]:
    """Bytes of the index, seconds of clustering, and share of rows that an episode switch moves."""
    copies = sum(each["copy_bytes"] for each in histories)
    ratio = round(sum(each["index_bytes"] for each in histories) / copies, 5)
    sizes = [each["index_bytes"] for each in histories]
    yield speed_row(
        name, "index of all episodes", "bytes", sizes, ratio_to="copies of their rows", ratio=ratio
    )
    yield speed_row(
        name, "clustering", "seconds", [each["seconds"]["clustering"] for each in histories]
    )
    moved = [each["rows_moved"] / (each["rows_moved"] + each["rows_kept"]) for each in questions]
    yield speed_row(name, "rows moved by a switch", "share", moved)


def _like_for_like(
    name: str, histories: Sequence[Record], rivals: Sequence[Record], rival: str
) -> Iterator[Row]:
    """The same comparison with one kind of prefill: the history at once, as in each of E passes.

    A session's own prefill comes turn by turn, each written through and committed; a pass of
    EpiCache's build is neither.
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
    """Seconds until questions can be asked.

    That is one prefill and the build on it, or the E prefills of EpiCache's own build, which do not
    need the session's own prefill before them.
    """
    seconds = history["seconds"]
    if history["build"] == "per_episode":
        return float(seconds["build"])
    return float(seconds["prefill"] + seconds.get("build", 0.0))
