"""Suite mq-niah revisit: five turns that ask for different needles, some of them again.

RepairKV 5.3, Figure 3. Every turn's questions and replies come from the full cache and are
replayed, so that conditions differ in the rows of the context alone. Before each turn the context
is compressed to the base budget again, keyed to the last turn's replies (Algorithm 1, line 5):
repairs do not accumulate. The last turn's exchange stays as it is; that of older turns is evicted,
or their replies would answer repeated questions. Only "spread, swap, carried on" continues with the
rows that the last turn's exchange left, and is not compressed again.

The paper does not specify the needles of its turns. Here the first turn asks for the latest four;
later turns never for the two latest, nor for a needle of the turn before: StaleQ-K can profit from
no needle in common.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from evals.compressed import CompressedContext
from evals.conditions import (
    CONDITIONS,
    FULL,
    MATCHED,
    OLDEST,
    RANDOM,
    REPAIR,
    SPREAD,
    SPREAD_REPAIR_SWAP,
    STALE,
    SWAP,
    BaselineState,
    ConditionResult,
)
from evals.suite import Record, Suite
from evals.suites.mq_niah.case import Case, Protocol, ask_needles, open_case
from evals.suites.mq_niah.rows import (
    GROUP_KEYS,
    common_columns,
    repair_seconds,
    right_values,
    split_at_chance,
)
from evals.suites.mq_niah.suite import BASE_BUDGETS, protocol_columns
from evals.summary import Key, difference_row, group_by, mean_row
from kvrecall_server.reporting.results import Row

NEEDLES = 8
# Needles of each turn, counted from the context's beginning.
SCHEDULE = ((5, 6, 7, 8), (1, 2, 3), (4, 5, 6), (1, 2, 3), (4, 5, 6))
# The paper's 80 are 20 for each of the four needles of a turn; ours are three, half as long.
K = 32
CARRIED_ON = "spread, swap, carried on"
COMPARED = (FULL, MATCHED, RANDOM, OLDEST, STALE, REPAIR, SPREAD, SWAP)


@dataclass(frozen=True)
class Revisit:
    """One example through the whole schedule, under every condition."""

    protocol: Protocol
    seed: int
    k: int

    @property
    def label(self) -> str:
        """Short text for the progress bar."""
        return f"revisit, seed {self.seed}"


def suite(protocol: Protocol, k: int, seed: int, cases: int) -> Suite[Revisit]:
    """`cases` examples from `seed` on."""
    sized = replace(protocol, needles=NEEDLES, base=protocol.base or BASE_BUDGETS[NEEDLES])
    units = tuple(Revisit(sized, case_seed, k) for case_seed in range(seed, seed + cases))
    return Suite(
        "mq-niah revisit", seed, protocol.model, units, run, partial(result_rows, seed=seed)
    )


def run(unit: Revisit) -> list[Record]:
    """The first turn, then every later one under every condition.

    Raises BadExample, BadBudget, `workers.errors`.
    """
    records = list[Record]()
    partition = "→".join("".join(map(str, numbers)) for numbers in SCHEDULE[:2])
    with open_case(unit.protocol, unit.seed, partition) as case:
        carried = case.cache.select(case.cache.base_rows)
        for turn, numbers in enumerate(SCHEDULE[1:], start=2):
            case.second = case.example.get_needles(numbers)
            baseline = case.build_baseline()
            results = {name: CONDITIONS[name](baseline, unit.k) for name in COMPARED}
            results[CARRIED_ON] = _carry_on(baseline, carried, unit.k)
            identity = {"kind": "turn", "seed": unit.seed, "turn": turn, **_unit_columns(unit)}
            records += [
                {**identity, "condition": name, **_measure(case, baseline, each)}
                for name, each in results.items()
            ]
            active = case.cache.active_context(results[CARRIED_ON].state)
            carried = _within_base(case.cache, active)
            _advance(case)
    return records


def _advance(case: Case) -> None:
    """Append the second turn to the full cache and score the context by its replies.

    It becomes the case's first turn.
    """
    cache = case.cache
    cache.turn_start = cache.session.state.length
    observed = ask_needles(cache.session, case.second)
    cache.scores = cache.session.first_stage_scores(observed, cache.context)
    case.first = case.second


def _carry_on(baseline: BaselineState, tokens: Tensor, k: int) -> ConditionResult:
    """A swap in the rows that the last turn's swap left, int64 positions `tokens`."""
    cache = baseline.cache
    state = cache.with_active(tokens)
    result = cache.session.repair(state, k, SPREAD_REPAIR_SWAP, [baseline.signal])
    return ConditionResult(result.state, len(baseline.base), result.report)


def _within_base(cache: CompressedContext, tokens: Tensor) -> Tensor:
    """The best tokens within the base budget.

    There may be more of them, since a swap may replace rows of the turn by rows of the context.
    """
    best = cache.scores[tokens].sort(descending=True, stable=True).indices[: cache.base_rows]
    return tokens[best].sort().values


def _measure(case: Case, baseline: BaselineState, result: ConditionResult) -> dict[str, Any]:
    return {**case.measure(baseline, result), "seconds": result.repair_seconds}


def _unit_columns(unit: Revisit) -> dict[str, Any]:
    return {**protocol_columns(unit.protocol), "k": unit.k}


def result_rows(records: Sequence[Record], seed: int) -> list[Row]:
    """Scores over all later turns and in each, gains over matched no-repair, seconds."""
    records, unreported = split_at_chance(records, seed)
    groups = group_by(records, *GROUP_KEYS)
    rows: list[Row] = []
    for key, group in groups.items():
        columns = common_columns(key, group)
        rows += mean_row(f"{key[2]}, all turns", _example_means(group), seed, **columns)
    for key, group in groups.items():
        for (turn,), in_turn in group_by(group, "turn").items():
            columns = {**common_columns(key, in_turn), "turn": turn}
            rows += mean_row(f"{key[2]}, turn {turn}", right_values(in_turn), seed, **columns)
    rows += _gains(groups, seed)
    seconds = repair_seconds([each for each in records if each["seconds"]])
    return [*rows, *seconds, *unreported]


def _example_means(group: Sequence[Record]) -> list[float]:
    """Mean of each example over its turns: turns of one example are not independent."""
    return [
        sum(each["right"] for each in turns) / len(turns)
        for turns in group_by(group, "seed").values()
    ]


def _gains(groups: Mapping[Key, Sequence[Record]], seed: int) -> Iterator[Row]:
    for key, group in groups.items():
        matched = groups[(*key[:2], MATCHED, key[3])]
        if key[2] in (FULL, MATCHED):
            continue
        columns = {**common_columns(key, group), "against": MATCHED}
        yield from difference_row(
            f"{key[2]} minus matched",
            _means_by_seed(group),
            _means_by_seed(matched),
            seed,
            **columns,
        )


def _means_by_seed(group: Sequence[Record]) -> dict[Key, float]:
    return dict(zip(group_by(group, "seed"), _example_means(group), strict=True))
