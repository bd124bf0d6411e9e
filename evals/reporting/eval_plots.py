"""Figures of the suites on eviction methods and episodes, and the choice of a suite's figure."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from evals.reporting import eval_repair_plots
from kvrecall_server.reporting.figures import COLOURS, STYLE
from kvrecall_server.reporting.results import Results, Row

FULL = "full"
_OURS = "epicache"
_INT8 = ", int8"
_NOT_DRAWN = ("fact in the matched episode",)
_MARKERS = "osv^D<>pPX*h"


def build_figure(results: Results) -> Figure | None:
    """The figure of a suite's results; None without quality rows or for files of other commands."""
    draw = FIGURES.get(results.suite) or eval_repair_plots.FIGURES.get(results.suite)
    paired = results.suite in eval_repair_plots.FIGURES
    quality = [
        row
        for row in results.results
        if "mean" in row and "unreported" not in row and (paired or "against" not in row)
    ]
    if draw is None or not quality:
        return None
    with rc_context(STYLE):
        return draw(quality)


def budget_figure(rows: Sequence[Row]) -> Figure:
    """Mean against budget by method, a panel for each condition (EpiCache, Figure 5).

    The full cache is a horizontal line.
    """
    conditions = [
        each for each in dict.fromkeys(row["condition"] for row in rows) if each not in _NOT_DRAWN
    ]
    figure, panels = _panels(len(conditions), 4.7, 3.6)
    for axes, condition in zip(panels, conditions, strict=False):
        own = [row for row in rows if row["condition"] == condition]
        _lines(axes, own)
        axes.set_title(condition, fontsize=10, loc="left")
        axes.set_xlabel("budget, rows per head")
        axes.set_ylim(bottom=0)
    handles: dict[str, Any] = {}
    for axes in panels:
        lines, labels = axes.get_legend_handles_labels()
        handles |= dict(zip(labels, lines, strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside right upper", fontsize=8)
    return figure


def _lines(axes: Axes, rows: Sequence[Row]) -> None:
    methods = list(dict.fromkeys(row["method"] for row in rows if _method(row) != FULL))
    plain = list(dict.fromkeys(method.removesuffix(_INT8) for method in methods))
    for method in methods:
        own = sorted(
            (row for row in rows if row["method"] == method), key=lambda row: float(row["budget"])
        )
        means = [row["mean"] for row in own]
        spread = (
            [row["mean"] - row["ci_low"] for row in own],
            [row["ci_high"] - row["mean"] for row in own],
        )
        style = _style(method, plain.index(method.removesuffix(_INT8)))
        axes.errorbar([row["budget"] for row in own], means, yerr=spread, label=method, **style)
    for row in rows:
        if _method(row) == FULL:
            label = f"full cache{row['method'].removeprefix(FULL)}"
            axes.axhline(
                row["mean"],
                color=COLOURS[0],
                ls="--" if label == "full cache" else ":",
                lw=1.2,
                label=label,
            )


def _style(method: str, index: int) -> dict[str, Any]:
    """Style of a method's line; with int8 rows it has the same colour and is dotted."""
    ours = method.startswith(_OURS)
    dashes = "--" if "+per_episode" in method else "-"
    return {
        "color": COLOURS[1 + index % 3] if ours else colormaps["tab20"](index % 20),
        "lw": 2.2 if ours else 1.1,
        "ls": ":" if method.endswith(_INT8) else dashes,
        "marker": _MARKERS[index % len(_MARKERS)],
        "ms": 4,
        "capsize": 2,
        "elinewidth": 0.7,
    }


def _method(row: Row) -> str:
    """A row's method without the codec of its stored rows."""
    return str(row["method"]).removesuffix(_INT8)


def heat_map(rows: Sequence[Row]) -> Figure:
    """Accuracy by length (columns) and passkey depth (lines), a panel for each method."""
    with_depth = [row for row in rows if "depth" in row]
    methods = list(dict.fromkeys(row["method"] for row in with_depth))
    lengths = sorted({row["tokens"] for row in with_depth})
    depths = sorted({row["depth"] for row in with_depth})
    figure, panels = _panels(
        len(methods), 1.2 + 0.5 * len(lengths), 1.1 + 0.3 * len(depths), columns=4
    )
    for axes, method in zip(panels, methods, strict=False):
        means = {
            (row["depth"], row["tokens"]): row["mean"]
            for row in with_depth
            if row["method"] == method
        }
        cells = [
            [means.get((depth, length), float("nan")) for length in lengths] for depth in depths
        ]
        image = axes.imshow(cells, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        axes.set_title(method, fontsize=9, loc="left")
        axes.set_xticks(
            range(len(lengths)), [f"{length:,}" for length in lengths], fontsize=7, rotation=30
        )
        axes.set_yticks(range(len(depths)), [f"{100 * depth:.0f}%" for depth in depths], fontsize=7)
        axes.grid(visible=False)
    figure.colorbar(image, ax=panels, label="accuracy", shrink=0.6, location="right")
    figure.supxlabel("tokens of the history", fontsize=9)
    figure.supylabel("depth of the passkey", fontsize=9)
    return figure


def episodes_figure(rows: Sequence[Row]) -> Figure:
    """Evidence in the matched episode by number of episodes, a panel for each segment width."""
    matched = [row for row in rows if row["condition"] == _SHARE_HELD]
    widths = sorted({row["segment_utterances"] for row in matched})
    figure, panels = _panels(len(widths), 3.4, 3.4, columns=len(widths))
    for axes, width in zip(panels, widths, strict=False):
        for method, style in _ASSIGNED.items():
            own = [
                row
                for row in matched
                if row["segment_utterances"] == width and row["method"] == method
            ]
            own = sorted(own, key=lambda row: int(row["episodes"]))
            axes.errorbar(
                [row["episodes"] for row in own],
                [row["mean"] for row in own],
                yerr=(
                    [row["mean"] - row["ci_low"] for row in own],
                    [row["ci_high"] - row["mean"] for row in own],
                ),
                label=method,
                capsize=2,
                **style,
            )
        axes.set_title(f"segments of {width} utterances", fontsize=10, loc="left")
        axes.set_xlabel("episodes")
        axes.set_ylim(0, 1)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[0].set_ylabel(_SHARE_HELD)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside upper right", ncols=3, fontsize=9
    )
    return figure


def place_figure(rows: Sequence[Row]) -> Figure:
    """Means by the place of the question, a group of bars each (LoopServe, Figure 2d).

    A panel for each kind of dialogue, measure and budget; the full cache's bar is in all panels.
    """
    scores = [row for row in rows if "turn" not in row and "evidence" not in row]
    panels = list(
        dict.fromkeys(
            (row["condition"].partition("/")[0], row["measure"], row["share"])
            for row in scores
            if _method(row) != FULL
        )
    )
    figure, every_axes = _panels(len(panels), 4.4, 3.0)
    methods = list(dict.fromkeys(row["method"] for row in scores))
    for axes, (kind, measure, share) in zip(every_axes, panels, strict=False):
        own = [
            row
            for row in scores
            if row["condition"].partition("/")[0] == kind
            and row["measure"] == measure
            and (row["share"] == share or row["method"] == FULL)
        ]
        _place_bars(axes, own, methods)
        axes.set_title(f"{kind}, {measure}, {share} of the rows", fontsize=10, loc="left")
    handles: dict[str, Any] = {}
    for axes in every_axes:
        bars, labels = axes.get_legend_handles_labels()
        handles |= dict(zip(labels, bars, strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside right upper", fontsize=8)
    return figure


def _place_bars(axes: Axes, rows: Sequence[Row], methods: Sequence[str]) -> None:
    """A bar for each place and method, with its interval."""
    places = list(dict.fromkeys(row["place"] for row in rows))
    width = 0.8 / len(methods)
    for index, method in enumerate(methods):
        own = [row for row in rows if row["method"] == method]
        if not own:
            continue
        axes.bar(
            [places.index(row["place"]) + (index + 0.5) * width - 0.4 for row in own],
            [row["mean"] for row in own],
            width,
            yerr=(
                [row["mean"] - row["ci_low"] for row in own],
                [row["ci_high"] - row["mean"] for row in own],
            ),
            color=COLOURS[0] if method == FULL else colormaps["tab10"](index % 10),
            error_kw={"elinewidth": 0.7},
            label="full cache" if method == FULL else method,
        )
    axes.set_xticks(range(len(places)), places)
    axes.set_ylim(bottom=0)


_SHARE_HELD = "share of the evidence in the matched episode"
_ASSIGNED: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "k-means": {"color": COLOURS[3], "marker": "o", "ms": 4, "lw": 1.8},
        "random clusters": {"color": COLOURS[1], "marker": "v", "ms": 4, "lw": 1.2},
        "expected at random": {"color": COLOURS[0], "ls": "--", "lw": 1.2},
    }
)


def _panels(count: int, width: float, height: float, columns: int = 2) -> tuple[Figure, list[Axes]]:
    columns = min(columns, count)
    lines = -(-count // columns)
    figure = Figure(figsize=(width * columns + 1.6, height * lines), layout="constrained")
    panels = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axes in panels[count:]:
        axes.set_visible(False)
    return figure, panels[:count]


# The figure of each suite, by its name in the result file.
FIGURES: Mapping[str, Callable[[Sequence[Row]], Figure]] = MappingProxyType(
    {
        "longconv": budget_figure,
        "fidelity": budget_figure,
        "methods": budget_figure,
        "passkey": heat_map,
        "locomo": episodes_figure,
        "multiturn": place_figure,
    }
)
