"""Plots of the demo's report, as SVG text."""

from collections.abc import Sequence

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvrecall_server.demo.configs import ALONE, DEFAULT, FULL, IN_PAUSES, IN_TURNS
from kvrecall_server.demo.run import DemoRun
from kvrecall_server.demo.summary import count_by_age, pause_seconds
from kvrecall_server.reporting.figures import COLOURS, STYLE, drawing, svg

CORRECT_COLOUR = "#3a9d5d"
WRONG_COLOUR = "#d1495b"
RUN_COLOURS = dict(zip((FULL, ALONE, IN_TURNS, DEFAULT), COLOURS, strict=True)) | {
    IN_PAUSES: "#8d6fb8"
}


def active_rows_plot(runs: Sequence[DemoRun], bound: int) -> str:
    """Active rows after each turn of one conversation, one line per configuration.

    The right panel has the configurations with a budget alone. `bound` is a budget and a block.
    """
    with rc_context(STYLE):
        figure = Figure(figsize=(9.4, 3.9), layout="constrained")
        everything, budgeted = figure.subplots(1, 2, width_ratios=(3, 2))
        for run in runs:
            colour = RUN_COLOURS[run.config.name]
            lengths = [turn.length for turn in run.turns]
            rows = [turn.active_rows for turn in run.turns]
            everything.plot(lengths, rows, color=colour, label=run.config.name, lw=1.8)
            if run.config.has_budget:
                budgeted.plot(lengths, rows, color=colour, lw=1.2)
        for axes, title in ((everything, "all configurations"), (budgeted, "with a budget")):
            axes.axhline(
                bound, color="#9aa3af", ls="--", lw=1, label=f"bound with a budget: {bound} rows"
            )
            axes.set_title(title, fontsize=10, loc="left")
            axes.set_xlabel("tokens in the session")
            axes.set_xlim(left=0)
            axes.set_ylim(bottom=0)
        everything.set_ylabel("active rows per layer and head")
        figure.legend(
            *everything.get_legend_handles_labels(), loc="outside upper left", ncols=3, fontsize=9
        )
        return svg(figure)


def answers_plot(groups: Sequence[tuple[str, Sequence[DemoRun]]]) -> str:
    """Correct and wrong replies by the age of the fact, one panel per configuration."""
    with rc_context(STYLE):
        figure = Figure(figsize=(9.4, 0.3 + 2.5 * ((len(groups) + 1) // 2)), layout="constrained")
        panels = figure.subplots((len(groups) + 1) // 2, 2, sharey=True, squeeze=False)
        for axes, (name, runs) in zip(panels.flat, groups, strict=False):
            _answers_panel(axes, name, runs)
        for axes in panels.flat[len(groups) :]:
            axes.set_visible(False)
        figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside upper right", ncols=2)
        return svg(figure)


def _answers_panel(axes: Axes, name: str, runs: Sequence[DemoRun]) -> None:
    ages = [
        age for age in count_by_age(q for run in runs for q in run.questions) if age[1] + age[2]
    ]
    labels = [label for label, _, _ in ages]
    correct = [count for _, count, _ in ages]
    axes.bar(labels, correct, color=CORRECT_COLOUR, label="correct", width=0.72)
    axes.bar(
        labels,
        [count for _, _, count in ages],
        bottom=correct,
        color=WRONG_COLOUR,
        label="wrong",
        width=0.72,
    )
    axes.set_title(name, fontsize=10, loc="left")
    axes.set_ylabel("questions")
    axes.set_xlabel("tokens since the fact was stated")
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(visible=False, axis="x")


def repairs_plot(runs: Sequence[DemoRun]) -> str:
    """Repair milliseconds of each pause over the conversation, on the call and on the result."""
    with drawing(9.4, 2.9) as (figure, axes):
        for run in runs:
            for trigger, marker in (("tool_call", "o"), ("tool_result", "^")):
                points = pause_seconds(run.turns, trigger)
                axes.plot(
                    [length for length, _ in points],
                    [1000 * seconds for _, seconds in points],
                    marker,
                    color=RUN_COLOURS[run.config.name],
                    fillstyle="none" if trigger == "tool_call" else "full",
                    markersize=5,
                    label=f"{run.config.name}: {trigger.replace('_', ' ')}",
                )
        axes.set_xlabel("tokens in the session")
        axes.set_ylabel("milliseconds of repair")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        figure.legend(fontsize=8, loc="outside upper left", ncols=2)
        return svg(figure)
