"""Results of the demo: summaries by configuration, their table, rows of the result file."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from rich import box
from rich.table import Table

from kvrecall_server.app.errors import BoundExceeded
from kvrecall_server.demo.configs import DemoConfig
from kvrecall_server.demo.run import AFTER_TOOL, PLAIN, DemoRun, Question, TurnPoint
from kvrecall_server.reporting.results import Estimate, Row, bootstrap, quality_row, speed_row
from kvrecall_server.reporting.units import readable_bytes

SUMMARY_NOTE = (
    "right answers: share of n, 95% bootstrap interval; "
    "seconds of an answer: median, 95th percentile"
)
KINDS = (PLAIN, AFTER_TOOL)
# Upper bounds of the age groups, in tokens.
AGE_BOUNDS = (128, 256, 512, 1024, 2048, 4096, 8192)

Cell = Callable[["ConfigSummary"], str]


@dataclass(frozen=True)
class ConfigSummary:
    """Results of one configuration; rows, bytes and tokens are maxima over its conversations.

    `exact` is the share of exact answers by kind of question, and of `all`. `seconds` are those of
    all turns together.
    """

    config: DemoConfig
    exact: Mapping[str, Estimate | None]
    peak_rows: int
    peak_bytes: int
    tokens: int
    seconds: float
    answer_seconds: "Spread"
    first_token_seconds: "Spread"
    promoted: int
    repairs: int
    pauses: int


@dataclass(frozen=True)
class Spread:
    """Median and 95th percentile of a measure; 0 without values."""

    median: float
    p95: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        """The spread of any number of values."""
        median, p95 = np.percentile([*values] or [0.0], [50, 95])
        return cls(float(median), float(p95))


def summarise(runs: Sequence[DemoRun], seed: int) -> list[ConfigSummary]:
    """One summary per configuration, in the order of the runs. `seed` is the bootstrap's."""
    configs = list(dict.fromkeys(run.config for run in runs))
    return [
        _summary(config, [run for run in runs if run.config == config], seed) for config in configs
    ]


def _summary(config: DemoConfig, runs: Sequence[DemoRun], seed: int) -> ConfigSummary:
    asked = [question for run in runs for question in run.questions]
    turns = [turn for run in runs for turn in run.turns]
    generated = [turn for turn in turns if turn.generated]
    return ConfigSummary(
        config=config,
        exact={
            "all": _exact_share(asked, seed),
            **{
                kind: _exact_share([each for each in asked if each.kind == kind], seed)
                for kind in KINDS
            },
        },
        peak_rows=max(run.peak_rows for run in runs),
        peak_bytes=max(run.peak_bytes for run in runs),
        tokens=max(run.turns[-1].length for run in runs),
        seconds=sum(turn.seconds for turn in turns),
        answer_seconds=Spread.of(turn.seconds for turn in generated),
        first_token_seconds=Spread.of(turn.first_token for turn in generated),
        promoted=sum(turn.promoted for turn in turns),
        repairs=sum(len(turn.repairs) for turn in turns),
        pauses=sum(run.pauses for run in runs),
    )


def _exact_share(questions: Sequence[Question], seed: int) -> Estimate | None:
    return bootstrap([float(question.correct) for question in questions], seed)


def count_by_age(questions: Iterable[Question]) -> list[tuple[str, int, int]]:
    """Correct and wrong replies by the fact's age in tokens; `<256` is 128 to 255."""
    counts = []
    asked = list(questions)
    lower = 0
    for upper in (*AGE_BOUNDS, 1 << 40):
        group = [question for question in asked if lower <= question.age < upper]
        label = f"{lower:,}+" if upper == 1 << 40 else f"<{upper:,}"
        correct = sum(question.correct for question in group)
        counts.append((label, correct, len(group) - correct))
        lower = upper
    return counts


def pause_seconds(turns: Iterable[TurnPoint], trigger: str) -> list[tuple[int, float]]:
    """Pairs of session length in tokens and repair seconds, of each pause and one trigger."""
    return [
        (
            turn.length,
            sum(repair.seconds for repair in turn.repairs if repair.trigger == trigger),
        )
        for turn in turns
        if turn.after_pause
    ]


def check_bound(runs: Iterable[DemoRun]) -> None:
    """Check that no layer ever held more rows than its budget and a block. Raises BoundExceeded."""
    for run in runs:
        if not run.config.has_budget:
            continue
        memory = run.final_memory
        pairs = zip(memory.layer_peak_rows, memory.layer_bound_rows, strict=True)
        for layer, (peak, bound) in enumerate(pairs):
            if peak > bound:
                raise BoundExceeded(
                    f"configuration {run.config.name!r}: layer {layer} held {peak} rows; "
                    f"its budget and a block are {bound}"
                )


def result_rows(runs: Sequence[DemoRun], seed: int) -> list[Row]:
    """Rows of the result file: quality by configuration, kind and age, speed, then every reply."""
    return [
        *(row for summary in summarise(runs, seed) for row in _config_rows(summary, runs, seed)),
        *(_reply_row(run, question) for run in runs for question in run.questions),
    ]


def _reply_row(run: DemoRun, question: Question) -> Row:
    return {
        "condition": run.config.name,
        "seed": run.seed,
        "question": question.text,
        "kind": question.kind,
        "age": question.age,
        "expected": question.expected,
        "reply": question.reply,
        "right": question.correct,
    }


def _config_rows(summary: ConfigSummary, runs: Sequence[DemoRun], seed: int) -> list[Row]:
    config = summary.config
    own = [run for run in runs if run.config == config]
    asked = [question for run in own for question in run.questions]
    common = {"method": config.method, "k": config.repair_rows, "active_rows": summary.peak_rows}
    if config.has_budget:
        common["budget"] = config.budget
    rows = [
        quality_row(f"{config.name}: {kind}", estimate, **common)
        for kind, estimate in summary.exact.items()
        if estimate is not None
    ]
    for label, correct, wrong in count_by_age(asked):
        estimate = bootstrap([1.0] * correct + [0.0] * wrong, seed)
        if estimate is not None:
            rows.append(quality_row(f"{config.name}: age {label}", estimate, **common))
    return rows + _speed_rows(summary, own)


def _speed_rows(summary: ConfigSummary, runs: Sequence[DemoRun]) -> list[Row]:
    measures: list[tuple[str, str, Callable[[TurnPoint], float], Callable[[TurnPoint], bool]]] = [
        ("answer", "seconds", lambda turn: turn.seconds, lambda turn: turn.generated),
        (
            "time to first token",
            "seconds",
            lambda turn: turn.first_token,
            lambda turn: turn.generated,
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
    found += [
        ("all turns", "seconds", [sum(turn.seconds for turn in run.turns) for run in runs]),
        ("peak active bytes", "bytes", [float(run.peak_bytes) for run in runs]),
    ]
    return [
        speed_row(summary.config.name, metric, unit, values)
        for metric, unit, values in found
        if values
    ]


def _repair_seconds(turn: TurnPoint) -> float:
    return sum(repair.seconds for repair in turn.repairs)


def measures(summaries: Sequence[ConfigSummary]) -> list[tuple[str, Cell]]:
    """Lines of the table: a label, and a function from a summary to the cell's text."""
    lines: list[tuple[str, Cell]] = [
        (f"{label}, n={_question_count(summaries, kind)}", partial(_exact_cell, kind))
        for label, kind in (
            ("right answers", "all"),
            ("  plain", PLAIN),
            ("  after a tool", AFTER_TOOL),
        )
    ]
    return [
        *lines,
        ("peak active rows", lambda each: f"{each.peak_rows:,}"),
        ("peak active bytes", lambda each: readable_bytes(each.peak_bytes)),
        ("seconds, all turns", lambda each: f"{each.seconds:.1f}"),
        ("seconds per answer", lambda each: _spread_cell(each.answer_seconds)),
        ("  to first token", lambda each: _spread_cell(each.first_token_seconds)),
        ("tool pauses", lambda each: f"{each.pauses}"),
        ("repairs", lambda each: f"{each.repairs}"),
        ("rows promoted", lambda each: f"{each.promoted:,}"),
    ]


def summary_table(summaries: Sequence[ConfigSummary], title: str) -> Table:
    """A table with one column per configuration and one line per measure."""
    table = Table(
        title=title,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.caption = SUMMARY_NOTE
    table.add_column("", no_wrap=True)
    for summary in summaries:
        table.add_column(summary.config.name, justify="right", width=12)
    for name, cell in measures(summaries):
        table.add_row(name, *(cell(summary) for summary in summaries))
    return table


def _exact_cell(kind: str, summary: ConfigSummary) -> str:
    """A share above its interval."""
    estimate = summary.exact[kind]
    return (
        "no questions"
        if estimate is None
        else f"{estimate.mean:.2f}\n{estimate.low:.2f}-{estimate.high:.2f}"
    )


def _spread_cell(spread: Spread) -> str:
    """A median above the 95th percentile."""
    return f"{spread.median:.3f}\n{spread.p95:.3f}"


def _question_count(summaries: Sequence[ConfigSummary], kind: str) -> int:
    """Number of questions of a kind, which is equal in all configurations."""
    estimate = summaries[0].exact[kind]
    return 0 if estimate is None else estimate.n
