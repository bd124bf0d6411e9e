"""Suite mq-niah anytime: the quality of a repair that was stopped early (RepairKV, appendix C).

Two questions. Which share of the evicted tokens must be scored until the answers are right? And
which accuracy do other selectors reach in the time that the repair took? The first is stopped after
a number of checks of the time limit, which is the same on every machine; the second by the clock
itself, so its numbers depend on the machine.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

from evals.conditions import (
    CONDITIONS,
    MATCHED,
    PUBLISHED,
    REFRESH,
    REPAIR,
    SPREAD,
    SPREAD_REPAIR,
    SUMMARY,
    BaselineState,
    ConditionResult,
)
from evals.replay_session import Operator
from evals.suite import Record, Suite
from evals.suites.mq_niah.case import Case, Protocol, open_case
from evals.suites.mq_niah.rows import GROUP_KEYS, common_columns, right_values
from evals.suites.mq_niah.suite import list_cases, protocol_columns
from evals.suites.mq_niah.timed import TimedResult, refresh_in_time, summary_in_time
from evals.summary import group_by, mean, mean_row, select_kind
from kvrecall_server.reporting.results import Row, speed_row

K = 48
NEEDLES = 4
BASE = "1/16"
# Longer than the other suites' contexts: a scan checks the time limit after a number of pages.
TOKENS = 6000
# Scanned shares are rounded to eighths.
STEPS = 8
_OPERATORS = {REPAIR: PUBLISHED, SPREAD: SPREAD_REPAIR}


@dataclass(frozen=True)
class Anytime:
    """One example and partition: scans stopped ever later, other selectors in the same time."""

    protocol: Protocol
    seed: int
    partition: str
    k: int

    @property
    def label(self) -> str:
        """Short text for the progress bar."""
        return f"anytime {self.partition}, seed {self.seed}"


def suite(protocol: Protocol, k: int, seed: int, cases: int) -> Suite[Anytime]:
    """`cases` cases of the examples from `seed` on."""
    sized = replace(protocol, needles=NEEDLES, base=protocol.base or BASE)
    units = tuple(
        Anytime(sized, case_seed, partition, k)
        for case_seed, partition in list_cases(NEEDLES, seed, cases)
    )
    return Suite(
        "mq-niah anytime", seed, protocol.model, units, run, partial(result_rows, seed=seed)
    )


def run(unit: Anytime) -> list[Record]:
    """Measure every stopped scan, then other selectors in the same time.

    Raises BadExample, BadBudget, `workers.errors`.
    """
    identity = {
        **protocol_columns(unit.protocol),
        "k": unit.k,
        "seed": unit.seed,
        "partition": unit.partition,
    }
    with open_case(unit.protocol, unit.seed, unit.partition) as case:
        baseline = case.build_baseline()
        records = list(_stopped_scans(case, baseline, unit.k, identity))
        records += _time_matched(case, baseline, unit.k, identity)
    return records


def _stopped_scans(
    case: Case, baseline: BaselineState, k: int, identity: dict[str, Any]
) -> Iterator[Record]:
    """Each operator, stopped at ever later checks of the time limit.

    A stop counts only if it has scored more eighths of the candidates than the last one that
    counts. `of_whole` is the share of the tokens that the whole scan brings back.
    """
    for name, operator in _OPERATORS.items():
        results = list(_stop_later_and_later(baseline, operator, k))
        whole = case.list_added(baseline, results[-1])
        last = -1.0
        for result in results:
            report = result.report
            assert report is not None, "the worker reports its repairs"
            scanned = report.scored_rows / max(1, report.candidates)
            share = round(scanned * STEPS) / STEPS
            if share == last and report.truncated:
                continue
            last = share
            added = case.list_added(baseline, result)
            yield {
                "kind": "stopped",
                **identity,
                "condition": name,
                "stopped_at": share,
                "complete": not report.truncated,
                "scanned": scanned,
                "bytes_read": report.bytes_read,
                "of_whole": len(whole & added) / max(1, len(whole)),
                **case.measure(baseline, result),
                "seconds": report.seconds,
            }


def _stop_later_and_later(
    baseline: BaselineState, operator: Operator, k: int
) -> Iterator[ConditionResult]:
    """The worker's repair, stopped at its first check of the time limit, its second, and so on."""
    for checks in count():
        result = _repair_with_checks(baseline, operator, k, checks)
        yield result
        if result.report is not None and not result.report.truncated:
            return


def _repair_with_checks(
    baseline: BaselineState, operator: Operator, k: int, checks: int
) -> ConditionResult:
    """The worker's repair, stopped at the check after `checks` checks of the time limit."""
    numbers = count(1)
    result = baseline.cache.session.repair(
        baseline.state, k, operator, [baseline.signal], lambda: next(numbers) > checks
    )
    return ConditionResult(result.state, len(baseline.base) + k, result.report)


def _time_matched(
    case: Case, baseline: BaselineState, k: int, identity: dict[str, Any]
) -> Iterator[Record]:
    """Matched no-repair and the repairs, then Refresh and page summary in as much time as `spread`."""
    allowed = 0.0
    for name in (MATCHED, REPAIR, SPREAD):
        result = CONDITIONS[name](baseline, k)
        allowed = result.repair_seconds
        timed = TimedResult(result, 1.0, allowed)
        yield {**identity, **_measure(case, baseline, timed), "condition": name}
    for name, select in ((REFRESH, refresh_in_time), (SUMMARY, summary_in_time)):
        timed = select(baseline, k, allowed)
        condition = f"{name}, in spread's time"
        yield {**identity, **_measure(case, baseline, timed), "condition": condition}


def _measure(case: Case, baseline: BaselineState, timed: TimedResult) -> dict[str, Any]:
    return {
        "kind": "timed",
        "scanned": timed.scanned,
        "seconds": timed.seconds,
        **case.measure(baseline, timed.result),
    }


def result_rows(records: Sequence[Record], seed: int) -> list[Row]:
    """Scores by share, then those of selectors in the same time, then seconds."""
    stopped = select_kind(records, "stopped")
    rows: list[Row] = []
    by_share = group_by(stopped, *GROUP_KEYS, "stopped_at")
    for (*key, share), group in by_share.items():
        read = round(mean(each["bytes_read"] for each in group))
        columns = {**_columns(key, group), "stopped_at": share, "bytes_read": read}
        columns["of_whole"] = round(mean(each["of_whole"] for each in group), 4)
        condition = f"{key[2]}, {share:.0%} scored"
        rows += mean_row(condition, right_values(group), seed, **columns)
    for (*key,), group in group_by(select_kind(records, "timed"), *GROUP_KEYS).items():
        rows += mean_row(key[2], right_values(group), seed, **_columns(key, group))
    complete = [each for each in stopped if each["complete"]]
    for (condition,), group in group_by(complete, "condition").items():
        seconds = [each["seconds"] for each in group]
        rows.append(speed_row(condition, "repair", "seconds", seconds))
    return rows


def _columns(key: Sequence[Any], group: Sequence[Record]) -> dict[str, Any]:
    return {
        **common_columns(tuple(key), group),
        "scanned": round(mean(each["scanned"] for each in group), 4),
    }
