"""What the arms' runs come to: the table's numbers and the result file's rows."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from kvrecall.app.errors import BoundExceeded
from kvrecall.demo.arms import AFTER_TOOL, PLAIN, Arm, ArmRun, Question, TurnPoint
from kvrecall.reporting.results import Estimate, Row, bootstrap, quality_row, speed_row

KINDS = (PLAIN, AFTER_TOOL)
AGE_BOUNDS = (128, 256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True)
class ArmSummary:
    """One column of the table. Bytes and rows are the largest over its conversations."""

    arm: Arm
    exact: Mapping[str, Estimate | None]
    """By kind of question, and `all`."""
    peak_rows: int
    peak_bytes: int
    tokens: int
    answer_seconds: float
    first_token_seconds: float
    promoted: int
    repairs: int
    pauses: int


def summarise(runs: Sequence[ArmRun], seed: int) -> list[ArmSummary]:
    """One summary per arm, in the arms' order."""
    arms = list(dict.fromkeys(run.arm for run in runs))
    return [_summary(arm, [run for run in runs if run.arm == arm], seed) for arm in arms]


def _summary(arm: Arm, runs: Sequence[ArmRun], seed: int) -> ArmSummary:
    asked = [question for run in runs for question in run.questions]
    turns = [turn for run in runs for turn in run.turns]
    answered = [turn for turn in turns if turn.answered]
    return ArmSummary(
        arm=arm,
        exact={
            "all": exact(asked, seed),
            **{kind: exact(of_kind(asked, kind), seed) for kind in KINDS},
        },
        peak_rows=max(run.peak_rows for run in runs),
        peak_bytes=max(run.peak_bytes for run in runs),
        tokens=max(run.turns[-1].length for run in runs),
        answer_seconds=_median(turn.seconds for turn in answered),
        first_token_seconds=_median(turn.first_token for turn in answered),
        promoted=sum(turn.promoted for turn in turns),
        repairs=sum(len(turn.repairs) for turn in turns),
        pauses=sum(run.pauses for run in runs),
    )


def exact(questions: Sequence[Question], seed: int) -> Estimate | None:
    """The share of right answers."""
    return bootstrap([float(question.right) for question in questions], seed)


def of_kind(questions: Iterable[Question], kind: str) -> list[Question]:
    """The questions of one kind."""
    return [question for question in questions if question.kind == kind]


def by_age(questions: Iterable[Question]) -> list[tuple[str, int, int]]:
    """Right and wrong answers by the fact's age in tokens, youngest first; `<256` means 128 to 255."""
    found = []
    asked = list(questions)
    lower = 0
    for upper in (*AGE_BOUNDS, 1 << 40):
        group = [question for question in asked if lower <= question.age < upper]
        label = f"{lower:,}+" if upper == 1 << 40 else f"<{upper:,}"
        right = sum(question.right for question in group)
        found.append((label, right, len(group) - right))
        lower = upper
    return found


def pause_seconds(turns: Iterable[TurnPoint], trigger: str) -> list[tuple[int, float]]:
    """Repair seconds of each pause for one trigger, at the session's length in tokens."""
    return [
        (
            turn.length,
            sum(repair.seconds for repair in turn.repairs if repair.trigger == trigger),
        )
        for turn in turns
        if turn.after_pause
    ]


def check_bound(runs: Iterable[ArmRun]) -> None:
    """Raise BoundExceeded when a layer of a budgeted session ever held more than its budget and a block."""
    for run in runs:
        if not run.arm.has_budget:
            continue
        memory = run.final_memory
        pairs = zip(memory.layer_peak_rows, memory.layer_bound_rows, strict=True)
        for layer, (peak, bound) in enumerate(pairs):
            if peak > bound:
                raise BoundExceeded(
                    f"arm {run.arm.name!r}: layer {layer} held {peak} rows; its budget and a block are {bound}"
                )


def result_rows(runs: Sequence[ArmRun], seed: int) -> list[Row]:
    """The result file's rows: quality by arm, kind and age, speed by arm."""
    return [row for summary in summarise(runs, seed) for row in _rows_of(summary, runs, seed)]


def _rows_of(summary: ArmSummary, runs: Sequence[ArmRun], seed: int) -> list[Row]:
    arm = summary.arm
    own = [run for run in runs if run.arm == arm]
    asked = [question for run in own for question in run.questions]
    common = {"method": arm.method, "k": arm.repair_rows, "active_rows": summary.peak_rows}
    if arm.has_budget:
        common["budget"] = arm.budget
    rows = [
        quality_row(f"{arm.name}: {kind}", estimate, **common)
        for kind, estimate in summary.exact.items()
        if estimate is not None
    ]
    for label, right, wrong in by_age(asked):
        estimate = bootstrap([1.0] * right + [0.0] * wrong, seed)
        if estimate is not None:
            rows.append(quality_row(f"{arm.name}: age {label}", estimate, **common))
    return rows + _speed_rows(summary, own)


def _speed_rows(summary: ArmSummary, runs: Sequence[ArmRun]) -> list[Row]:
    measures: list[tuple[str, str, Callable[[TurnPoint], float], Callable[[TurnPoint], bool]]] = [
        ("answer", "seconds", lambda turn: turn.seconds, lambda turn: turn.answered),
        (
            "time to first token",
            "seconds",
            lambda turn: turn.first_token,
            lambda turn: turn.answered,
        ),
        (
            "repair per pause",
            "seconds",
            _repair_seconds,
            lambda turn: turn.after_pause and bool(turn.repairs),
        ),
        ("active bytes after a turn", "bytes", lambda turn: turn.active_bytes, lambda _: True),
    ]
    found = [
        (metric, unit, [value(turn) for run in runs for turn in run.turns if counts(turn)])
        for metric, unit, value, counts in measures
    ]
    return [
        speed_row(summary.arm.name, metric, unit, values)
        for metric, unit, values in found
        if values
    ]


def _repair_seconds(turn: TurnPoint) -> float:
    return sum(repair.seconds for repair in turn.repairs)


def _median(values: Iterable[float]) -> float:
    found = list(values)
    return median(found) if found else 0.0
