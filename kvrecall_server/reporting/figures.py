"""Style of all plots; output as SVG text for HTML pages or as a PNG file."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = ("#5b6472", "#d1495b", "#2e86ab", "#3a9d5d")
STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9aa3af",
    "axes.labelcolor": "#374151",
    "xtick.color": "#4b5563",
    "ytick.color": "#4b5563",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e5e7eb",
    "legend.frameon": False,
    "svg.fonttype": "path",
    "svg.hashsalt": "kvrecall",
}


@contextmanager
def drawing(width: float, height: float) -> Iterator[tuple[Figure, Axes]]:
    """A figure with one set of axes in the common style; width and height in inches."""
    with rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure, figure.subplots()


def svg(figure: Figure) -> str:
    """The figure as SVG text without its XML header."""
    out = io.StringIO()
    metadata: dict[str, Any] = {"Date": None, "Creator": None}
    figure.savefig(out, format="svg", metadata=metadata)
    text = out.getvalue()
    return text[text.index("<svg") :]


def png(figure: Figure, path: Path) -> None:
    """Write the figure as a PNG file."""
    figure.savefig(path, format="png", dpi=150, facecolor="white")
