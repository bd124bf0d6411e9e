"""The picture of a layer profile."""

from collections.abc import Mapping, Sequence

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kvrecall.reporting.figures import COLOURS, STYLE


def layers_plot(sensitivity: Sequence[float], splits: Mapping[str, Sequence[int]]) -> Figure:
    """Each layer's sensitivity as bars; beside it, its rows under each way to split a budget."""
    layers = range(len(sensitivity))
    with rc_context(STYLE):
        figure = Figure(figsize=(max(9.4, 0.5 * len(layers)), 3.6), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(2, 3))
        left.bar(layers, sensitivity, color=COLOURS[1], width=0.72)
        left.set_title("how much eviction moves the keys", fontsize=10, loc="left")
        left.set_ylabel("1 - mean cosine")
        width = 0.8 / len(splits)
        for index, (name, rows) in enumerate(splits.items()):
            places = [layer + (index - (len(splits) - 1) / 2) * width for layer in layers]
            right.bar(places, rows, color=COLOURS[(0, 2, 1)[index % 3]], width=width, label=name)
        right.set_title("rows per head, the same sum for all", fontsize=10, loc="left")
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
