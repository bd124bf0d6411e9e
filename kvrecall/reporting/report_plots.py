"""Plots of result rows, as SVG text."""

from collections.abc import Sequence

from kvrecall.reporting.figures import COLOURS, drawing, svg
from kvrecall.reporting.results import Row

BLUE = COLOURS[2]
GREEN = COLOURS[3]


def quality_plot(rows: Sequence[Row]) -> str:
    """Means as points with their intervals, one line per row."""
    labels = _unlike([_label(row) for row in rows])
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
    """Medians as bars, the ratio written beside them; all rows have one metric."""
    labels = _unlike([str(row["condition"]) for row in rows])
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
    """Mean KL of each turn over the length of its conversation."""
    with drawing(9.4, 3.2) as (figure, axes):
        axes.plot(
            [row["length"] for row in rows],
            [row["kl_mean"] for row in rows],
            ".",
            color=BLUE,
            alpha=0.5,
        )
        axes.set_xlabel("tokens said")
        axes.set_ylabel("KL of a turn, nats")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        return svg(figure)


def _label(row: Row) -> str:
    method = f" ({row['method']})" if "method" in row else ""
    return f"{row['condition']}{method}"


def _unlike(labels: Sequence[str]) -> list[str]:
    """Equal labels would share a line: later ones are told apart by trailing spaces."""
    seen: dict[str, int] = {}
    told = []
    for label in labels:
        told.append(label + " " * seen.get(label, 0))
        seen[label] = seen.get(label, 0) + 1
    return told
