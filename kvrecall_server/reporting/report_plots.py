"""Plots of result rows, as SVG text, and the figure of a layer profile."""

from collections.abc import Mapping, Sequence

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kvrecall_server.reporting.figures import COLOURS, STYLE, drawing, svg
from kvrecall_server.reporting.results import Row

BLUE = COLOURS[2]
GREEN = COLOURS[3]


def quality_plot(rows: Sequence[Row]) -> str:
    """Means as points with their intervals, one line for each row."""
    labels = _distinct([_label(row) for row in rows])
    with drawing(9.4, 0.8 + 0.3 * len(rows)) as (figure, axes):
        means = [row["mean"] for row in rows]
        below = [row["mean"] - row.get("ci_low", row["mean"]) for row in rows]
        above = [row.get("ci_high", row["mean"]) - row["mean"] for row in rows]
        axes.errorbar(means, labels, xerr=(below, above), fmt="o", color=BLUE, capsize=3)
        axes.margins(y=0.4 / len(rows))
        axes.invert_yaxis()
        axes.set_xlabel("mean, 95% interval")
        return svg(figure)


def speed_plot(rows: Sequence[Row]) -> str:
    """Medians as bars, labelled with ratios; all rows have the same metric."""
    labels = _distinct([str(row["condition"]) for row in rows])
    with drawing(9.4, 0.9 + 0.34 * len(rows)) as (figure, axes):
        bars = axes.barh(labels, [row["median"] for row in rows], color=GREEN, height=0.66)
        ratios = [
            f" {row['ratio']:.2f} x {row['ratio_to']}" if "ratio" in row else "" for row in rows
        ]
        axes.bar_label(bars, ratios, fontsize=8, color="#4b5563")
        axes.margins(x=0.25)
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(f"{rows[0]['metric']}, {rows[0]['unit']} (median)")
        return svg(figure)


def divergence_plot(rows: Sequence[Row]) -> str:
    """Mean KL divergence of each turn, in nats, over the length of the conversation."""
    with drawing(9.4, 3.2) as (figure, axes):
        axes.plot(
            [row["length"] for row in rows],
            [row["kl_mean"] for row in rows],
            ".",
            color=BLUE,
            alpha=0.5,
        )
        axes.set_xlabel("tokens in the session")
        axes.set_ylabel("KL of a turn, nats")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        return svg(figure)


def layer_figure(sensitivity: Sequence[float], splits: Mapping[str, Sequence[int]]) -> Figure:
    """Bars of each layer's sensitivity, and of its rows under each way to split a budget."""
    layers = range(len(sensitivity))
    with rc_context(STYLE):
        figure = Figure(figsize=(max(9.4, 0.5 * len(layers)), 3.6), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(2, 3))
        left.bar(layers, sensitivity, color=COLOURS[1], width=0.72)
        left.set_title("sensitivity of the keys to eviction", fontsize=10, loc="left")
        left.set_ylabel("1 - mean cosine")
        width = 0.8 / len(splits)
        for index, (name, rows) in enumerate(splits.items()):
            positions = [layer + (index - (len(splits) - 1) / 2) * width for layer in layers]
            right.bar(positions, rows, color=COLOURS[(0, 2, 1)[index % 3]], width=width, label=name)
        right.set_title("rows per head, equal sums", fontsize=10, loc="left")
        figure.legend(
            *right.get_legend_handles_labels(),
            fontsize=9,
            loc="outside upper right",
            ncols=len(splits),
        )
        for axes in (left, right):
            axes.set_xlabel("layer")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.grid(visible=False, axis="x")
        return figure


def _label(row: Row) -> str:
    method = f" ({row['method']})" if "method" in row else ""
    return f"{row['condition']}{method}"


def _distinct(labels: Sequence[str]) -> list[str]:
    """Labels made distinct by trailing spaces: equal ones would share a line of the plot."""
    seen: dict[str, int] = {}
    distinct = []
    for label in labels:
        distinct.append(label + " " * seen.get(label, 0))
        seen[label] = seen.get(label, 0) + 1
    return distinct
