"""Result rows of multiturn: scores by kind, place, arm and budget, and paired differences."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from evals.configs import FULL
from evals.suite import Record
from evals.suites.multiturn.scores import DENSITY, KL, TOP1
from evals.summary import (
    Key,
    difference_row,
    group_by,
    mean,
    mean_row,
    split_cells,
    values_by_key,
)
from kvrecall_server.reporting.results import Row

# Measures that are reported whatever the full cache answers.
_NOT_OF_ANSWERS = (KL, TOP1, DENSITY)
# Arms that every other one is compared with, turn by turn.
AGAINST = (FULL, "snapkv")
_CELL = ("kind", "place", "measure")
_ARM = (*_CELL, "arm", "budget")
# What is separated within a cell, in rows of their own.
_WITHIN = ("turn", "evidence")
_TURN = ("seed", "turn")


def result_rows(records: Sequence[Record], seed: int) -> list[Row]:
    """Scores of every cell that can be judged, differences, then the cells that cannot.

    A cell is a kind, a place and a measure; it needs the full cache above chance. KL and top-1
    agreement are distances from the full cache, and reported whatever that answers, as is the density
    of sparse prompts.
    """
    distances = [each for each in records if each["measure"] in _NOT_OF_ANSWERS]
    scored = [each for each in records if each["measure"] not in _NOT_OF_ANSWERS]
    chances = {
        key: mean(each["chance"] for each in group if each["arm"] == FULL)
        for key, group in group_by(scored, *_CELL).items()
    }
    reported, unreported = split_cells(
        scored,
        lambda each: each["arm"] == FULL,
        _CELL,
        lambda each: chances[tuple(each[name] for name in _CELL)],
        seed,
    )
    groups = group_by([*reported, *distances], *_ARM)
    rows: list[Row] = []
    for key, group in groups.items():
        rows += _score_rows(key, group, seed)
    for key, group in groups.items():
        rows += _differences(groups, key, group, seed)
    return [*rows, *_position_rows(groups, seed), *unreported]


def _score_rows(key: Key, group: Sequence[Record], seed: int) -> Iterator[Row]:
    """All turns together, with the interval over dialogues, then each turn and kind of evidence."""
    condition = f"{key[0]}/{key[1]}"
    columns = _columns(key, group)
    yield from mean_row(condition, list(_means_by_dialogue(group).values()), seed, **columns)
    for name in _WITHIN:
        for (value,), within in sorted(group_by(group, name).items()):
            row = f"{condition}/t{value}" if name == "turn" else f"{condition}/{value}"
            scores = [each["right"] for each in within]
            yield from mean_row(row, scores, seed, **_columns(key, within), **{name: value})


def _differences(
    groups: Mapping[Key, Sequence[Record]], key: Key, group: Sequence[Record], seed: int
) -> Iterator[Row]:
    """The arm minus others of the same cell and budget, turn by turn."""
    *cell, arm, budget = key
    for other in AGAINST:
        theirs = groups.get((*cell, other, "1/1" if other == FULL else budget))
        if arm in (FULL, other) or theirs is None:
            continue
        yield from difference_row(
            f"{key[0]}/{key[1]}: {arm} minus {other}",
            _by_turn(group),
            _by_turn(theirs),
            seed,
            **{**_columns(key, group), "against": other},
        )


def _position_rows(groups: Mapping[Key, Sequence[Record]], seed: int) -> Iterator[Row]:
    """An arm's loss to the full cache at a place minus its loss at the end, turn by turn.

    What the place of the question costs an arm, whatever it costs the full cache (LoopServe 6.1).
    """
    losses = {
        key: _subtract(_by_turn(group), _by_turn(groups[*key[:3], FULL, "1/1"]))
        for key, group in groups.items()
        if (*key[:3], FULL, "1/1") in groups and key[3] != FULL
    }
    for key, ours in losses.items():
        kind, place, measure, arm, budget = key
        end = losses.get((kind, "end", measure, arm, budget))
        if place == "end" or end is None:
            continue
        columns = {**_columns(key, groups[key]), "against": "end"}
        yield from difference_row(
            f"{kind}: {arm} minus full, {place} minus end", ours, end, seed, **columns
        )


def _columns(key: Key, group: Sequence[Record]) -> dict[str, Any]:
    _, place, measure, arm, budget = key
    rows = {} if arm == FULL else {"budget": round(mean(each["rows"] for each in group))}
    return {
        "method": arm,
        "k": 0,
        **rows,
        "share": budget,
        "active_rows": round(mean(each["active_rows"] for each in group), 1),
        "place": place,
        "measure": measure,
    }


def _by_turn(group: Sequence[Record]) -> dict[Key, float]:
    return values_by_key(group, lambda each: float(each["right"]), *_TURN)


def _means_by_dialogue(group: Sequence[Record]) -> dict[Key, float]:
    """Mean over the turns of each dialogue: turns of one dialogue are not independent."""
    return {
        key: mean(each["right"] for each in turns) for key, turns in group_by(group, "seed").items()
    }


def _subtract(ours: Mapping[Key, float], theirs: Mapping[Key, float]) -> dict[Key, float]:
    return {key: value - theirs[key] for key, value in ours.items() if key in theirs}
