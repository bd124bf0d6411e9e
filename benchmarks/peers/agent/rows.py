"""Rows of the result file: what each peer took, held and answered, before and after the restart."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.peers.agent.journal import PeerRun
from benchmarks.peers.agent.session import Measured
from benchmarks.peers.plan import Plan
from kvrecall_server.reporting.results import Row, bootstrap, quality_row, speed_row

FIRST = "time to first token"
LAST = "time to first token, last turn"
RESUMED = "time to first token, resumed session"
READY = "restart until ready"
DECODE = "decode"
PEAK = "peak memory"
COPY = "copy of the state behind a turn"
WAITED = "share of replies spent waiting for a CPU"
RIGHT = "right answers"
NOT_RUN = "not run"
# A reply of fewer tokens says nothing about the speed of decoding.
_DECODED = 4


def result_rows(runs: Sequence[PeerRun], plan: Plan, full: str, baseline: str) -> list[Row]:
    """All rows; a question counts if the peer `full` answers it, times are compared to `baseline`.

    Without the run of `full` all questions count, without that of `baseline` there are no ratios.
    """
    counted = _answered(runs, full)
    rows = list[Row]()
    for run in runs:
        if run.not_run is not None:
            rows.append({"condition": run.peer, "metric": NOT_RUN, "reason": run.not_run})
            continue
        rows += _speed_rows(run, plan)
        rows += _right_rows(run, plan, counted)
        rows += _resumed_rows(run)
    return _with_ratios(rows, baseline)


def _answered(runs: Sequence[PeerRun], full: str) -> frozenset[int] | None:
    found = [run.turns for run in runs if run.peer == full and run.not_run is None]
    return frozenset(turn.number for turn in found[0] if turn.right) if found else None


def _parts(run: PeerRun, plan: Plan) -> Mapping[str, list[Measured]]:
    """Turns before the restart in the middle, and from it on; the last question is apart."""
    turns = [turn for turn in run.turns if turn.number < plan.turns]
    return {
        "before the restart": [turn for turn in turns if turn.number < plan.restart_at],
        "after the restart": [turn for turn in turns if turn.number >= plan.restart_at],
    }


def _speed_rows(run: PeerRun, plan: Plan) -> Iterator[Row]:
    """The first turn warms up and is not counted; the resumed ones have rows of their own."""
    for part, turns in _parts(run, plan).items():
        common = {"part": part, "tokens": turns[-1].length}
        steady = [turn for turn in turns if turn.number > 0 and turn.started is None]
        if steady:
            yield _row(run, FIRST, "seconds", steady, lambda turn: turn.first_token, **common)
        decoded = [turn for turn in turns if turn.tokens >= _DECODED and turn.decode > 0]
        if decoded:
            yield _row(run, DECODE, "tokens per second", decoded, _decode_speed, **common)
        yield _row(run, PEAK, "bytes", turns[-1:], lambda turn: turn.peak_bytes, **common)
        yield _row(run, WAITED, "share", turns, _waited_share, **common)
        if any(turn.after for turn in turns):
            yield _row(run, COPY, "seconds", turns, lambda turn: turn.after, **common)
    last = [turn for turn in run.turns if turn.number == plan.turns - 1]
    tokens = last[0].length
    yield _row(run, LAST, "seconds", last, lambda turn: turn.first_token, tokens=tokens)


def _right_rows(run: PeerRun, plan: Plan, counted: frozenset[int] | None) -> Iterator[Row]:
    parts = {**_parts(run, plan), "all": list(run.turns)}
    for part, turns in parts.items():
        asked = [turn for turn in turns if counted is None or turn.number in counted]
        estimate = bootstrap([float(turn.right) for turn in asked], plan.seed)
        if estimate is not None:
            yield quality_row(run.peer, estimate, metric=RIGHT, part=part, asked=len(turns))


def _resumed_rows(run: PeerRun) -> Iterator[Row]:
    for turn in run.turns:
        if turn.started is not None:
            ready = turn.started
            common = {"tokens": turn.length, "turn": turn.number}
            yield _row(run, RESUMED, "seconds", [turn], lambda each: each.first_token, **common)
            yield speed_row(run.peer, READY, "seconds", [ready], **common)


def _row(
    run: PeerRun,
    metric: str,
    unit: str,
    turns: Sequence[Measured],
    value: Callable[[Measured], float],
    **common: Any,
) -> Row:
    return speed_row(run.peer, metric, unit, [value(turn) for turn in turns], **common)


def _decode_speed(turn: Measured) -> float:
    return (turn.tokens - 1) / turn.decode


def _waited_share(turn: Measured) -> float:
    """Share of the time of a reply; what a quiet machine has is next to nothing."""
    return turn.waited / max(1e-9, turn.first_token + turn.decode)


def _with_ratios(rows: Sequence[Row], baseline: str) -> list[Row]:
    """Speed rows with the ratio of their median to that of the baseline's row of the same kind."""
    base = {
        _kind(row): row["median"] for row in rows if row["condition"] == baseline if "median" in row
    }
    found = list[Row]()
    for row in rows:
        against = base.get(_kind(row)) if row["condition"] != baseline else None
        ratio = (
            {"ratio_to": baseline, "ratio": round(row["median"] / against, 3)} if against else {}
        )
        found.append({**row, **ratio})
    return found


def _kind(row: Row) -> tuple[Any, ...]:
    return row.get("metric"), row.get("part"), row.get("turn")


def describe(row: Row) -> str:
    """A row as a line of text."""
    place = row.get("part") or (f"turn {row['turn']}" if "turn" in row else "")
    start = f"{row['condition']:<50} {row['metric']:<36} {place:<18}"
    if "reason" in row:
        return f"{start} {row['reason']}"
    if "mean" in row:
        return (
            f"{start} {row['mean']:.2f} ({row['ci_low']:.2f}-{row['ci_high']:.2f}), n = {row['n']}"
        )
    ratio = f"  {row['ratio']:.2f} x {row['ratio_to']}" if "ratio" in row else ""
    return (
        f"{start} {row['median']:,.3f} (p95 {row['p95']:,.3f}) {row['unit']}, n = {row['n']}{ratio}"
    )
