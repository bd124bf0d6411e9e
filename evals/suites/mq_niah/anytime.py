"""Suite mq-niah anytime: what a repair is worth that was stopped early (RepairKV, appendix C, and beyond it).

Two questions. What share of the evicted tokens must be scored until the answers are right, for each way to scan? And
what do selectors that choose otherwise reach in the time that the repair took? The first is stopped after so many
looks at the clock, which is the same on every machine; the second by the clock itself, so its numbers are this
machine's.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, product
from typing import Any

import torch
from torch import Tensor

from evals import selectors
from evals.conditions import (
    CONDITIONS,
    MATCHED,
    OURS,
    PUBLISHED,
    REFRESH,
    REPAIR,
    SPREAD,
    SUMMARY,
    Before,
    Held,
)
from evals.replay_session import Operator
from evals.selectors import Summaries
from evals.suite import Record, Suite
from evals.suites.mq_niah.case import Case, Protocol, begun
from evals.suites.mq_niah.rows import common
from evals.suites.mq_niah.suite import cases_of
from evals.summary import grouped, mean, mean_row, of_kind
from kvrecall.reporting.results import Row, speed_row
from workers.primitives.observation import Observed

K = 48
NEEDLES = 4
BASE = "1/16"
TOKENS = 6000
"""Longer than the other suites' contexts: a scan looks at the clock after so many pages."""
STEPS = 8
"""Shares scanned are told apart by eighths."""
SCANS = ("exact", "bounded", "summary")
_GROUP = ("needles", "policy", "condition", "k")
_OPERATORS = {REPAIR: PUBLISHED, SPREAD: OURS}


@dataclass(frozen=True)
class Anytime:
    """One example and partition: every scan stopped ever later, and other selectors in the repair's time."""

    protocol: Protocol
    seed: int
    partition: str
    k: int

    @property
    def label(self) -> str:
        """For the progress bar."""
        return f"anytime {self.partition}, seed {self.seed}"


def suite(protocol: Protocol, k: int, seed: int, cases: int) -> Suite[Anytime]:
    """So many cases from the examples from `seed` on."""
    made = replace(protocol, needles=NEEDLES, base=protocol.base or BASE)
    units = tuple(
        Anytime(made, one, partition, k) for one, partition in cases_of(NEEDLES, seed, cases)
    )
    return Suite(
        "mq-niah anytime", seed, protocol.model, units, run, partial(result_rows, seed=seed)
    )


def run(unit: Anytime) -> list[Record]:
    """Raises BadExample, BadBudget, `workers.errors`."""
    told = {
        "needles": unit.protocol.needles,
        "policy": unit.protocol.policy,
        "base": unit.protocol.base,
        "k": unit.k,
    }
    identity = {**told, "seed": unit.seed, "partition": unit.partition}
    with begun(unit.protocol, unit.seed, unit.partition) as case:
        ready = case.before()
        records = list(_stopped(case, ready, unit, identity))
        records += _time_matched(case, ready, unit.k, identity)
    return records


def _stopped(
    case: Case, ready: Before, unit: Anytime, identity: dict[str, Any]
) -> Iterator[Record]:
    """Each operator and scan, stopped at every look at the clock that finds more scored than the last one asked at."""
    for (name, operator), scan in product(_OPERATORS.items(), SCANS):
        last = -1.0
        for held in _ever_later(ready, Operator(operator.settings, scan), unit.k):
            assert held.report is not None, "the worker reports its repairs"
            scanned = held.report.scored_rows / max(1, held.report.candidates)
            share = round(scanned * STEPS) / STEPS
            if share == last and held.report.truncated:
                continue
            last = share
            told = {
                "kind": "stopped",
                **identity,
                "condition": name,
                "scan": scan,
                "stopped_at": share,
            }
            told |= {
                "complete": not held.report.truncated,
                "scanned": scanned,
                "bytes_read": held.report.bytes_read,
            }
            yield {**told, **case.told_of(ready, held), "seconds": held.report.seconds}


def _ever_later(ready: Before, operator: Operator, k: int) -> Iterator[Held]:
    """The worker's repair, told to end at its first look at the clock, its second, and so on until it is done."""
    for most in count():
        held = _run(ready, operator, k, most)
        yield held
        if held.report is not None and not held.report.truncated:
            return


def _run(ready: Before, operator: Operator, k: int, most: int) -> Held:
    looks = count(1)
    result = ready.cache.replayed.repaired(
        ready.state, k, operator, [ready.signal], lambda: next(looks) > most
    )
    return Held(result.state, len(ready.base) + k, result.report)


def _time_matched(case: Case, ready: Before, k: int, identity: dict[str, Any]) -> Iterator[Record]:
    """Matched no-repair and the repairs, then Refresh and page summary with no more time than ours took."""
    allowed = 0.0
    for name in (MATCHED, REPAIR, SPREAD):
        held = CONDITIONS[name](ready, k)
        allowed = held.report.seconds if held.report else 0.0
        yield {**identity, **_told(case, ready, _Timed(held, 1.0, allowed)), "condition": name}
    for name, choose in ((REFRESH, _refresh_in_time), (SUMMARY, _summary_in_time)):
        yield {
            **identity,
            **_told(case, ready, choose(ready, k, allowed)),
            "condition": f"{name}, in ours' time",
        }


@dataclass(frozen=True)
class _Timed:
    """What was chosen, the share of the evicted tokens that was scored for it, and how long that took."""

    held: Held
    scanned: float
    seconds: float


def _told(case: Case, ready: Before, timed: _Timed) -> dict[str, Any]:
    return {
        "kind": "timed",
        "scanned": timed.scanned,
        "seconds": timed.seconds,
        **case.told_of(ready, timed.held),
    }


class _Clock:
    """Whether as many seconds have passed as it allows."""

    def __init__(self, allowed: float) -> None:
        self._allowed = allowed
        self._started = time.perf_counter()

    def spent(self) -> float:
        return time.perf_counter() - self._started

    def late(self) -> bool:
        return self.spent() >= self._allowed


def _refresh_in_time(ready: Before, k: int, seconds: float) -> _Timed:
    """Refresh that stops scoring evicted tokens, the earliest first, when the time is up."""
    cache = ready.cache
    keys = ready.cache.replayed.keys()
    clock = _Clock(seconds)
    observed = cache.replayed.observed(ready.state, [ready.signal])
    scores, seen = _scored(ready, observed, keys, ready.candidates, clock)
    known = torch.cat([seen, ready.base])
    chosen = selectors.best_bursts(
        scores, known[~cache.kept[known]], cache.scores, len(ready.base) + k - int(cache.kept.sum())
    )
    spent = clock.spent()
    state = cache.holding(torch.cat([cache.kept.nonzero().flatten(), chosen]))
    return _Timed(Held(state, len(ready.base) + k), len(seen) / len(ready.candidates), spent)


def _summary_in_time(ready: Before, k: int, seconds: float) -> _Timed:
    """Chunks in the order of their summaries, each read whole, until the time is up."""
    cache = ready.cache
    keys = ready.cache.replayed.keys()
    summaries = Summaries(keys, cache.context)
    clock = _Clock(seconds)
    observed = cache.replayed.observed(ready.state, [ready.signal])
    chunk_of = ready.candidates // selectors.CHUNK
    order = torch.cat([ready.candidates[chunk_of == chunk] for chunk in summaries.ranked(observed)])
    scores, seen = _scored(ready, observed, keys, order, clock)
    chosen = selectors.best_bursts(scores, seen.sort().values, cache.scores, k)
    return _Timed(ready.with_tokens(chosen), len(seen) / len(ready.candidates), clock.spent())


def _scored(
    ready: Before, observed: Observed, keys: Sequence[Tensor], order: Tensor, clock: _Clock
) -> tuple[Tensor, Tensor]:
    active = torch.cat([ready.base, ready.cache.after])
    scores, seen = selectors.scores_in_time(
        observed, keys, active, order, ready.cache.sinks, clock.late
    )
    return scores[: ready.cache.context], seen


def result_rows(records: Sequence[Record], seed: int) -> list[Row]:
    """Scores by scan and share, then those of selectors in the same time, then seconds."""
    stopped = of_kind(records, "stopped")
    timed = of_kind(records, "timed")
    rows: list[Row] = []
    for (*key, scan, share), found in grouped(stopped, *_GROUP, "scan", "stopped_at").items():
        read = round(mean(each["bytes_read"] for each in found))
        told = {**_common(key, found), "scan": scan, "stopped_at": share, "bytes_read": read}
        rows += mean_row(f"{key[2]}, {scan}, {share:.0%} scored", _right(found), seed, **told)
    for (*key,), found in grouped(timed, *_GROUP).items():
        rows += mean_row(key[2], _right(found), seed, **_common(key, found))
    whole = [each for each in stopped if each["complete"]]
    for (condition, scan), found in grouped(whole, "condition", "scan").items():
        rows.append(
            speed_row(
                f"{condition}, {scan}", "repair", "seconds", [each["seconds"] for each in found]
            )
        )
    return rows


def _common(key: Sequence[Any], found: Sequence[Record]) -> dict[str, Any]:
    return {
        **common(tuple(key), found),
        "scanned": round(mean(each["scanned"] for each in found), 4),
    }


def _right(found: Sequence[Record]) -> list[float]:
    return [each["right"] for each in found]
