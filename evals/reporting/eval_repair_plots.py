"""Figures of the suites on repair (MQ-NIAH, call sites), after RepairKV's figures."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvrecall_server.reporting.figures import COLOURS
from kvrecall_server.reporting.results import Row

FULL = "full cache"
BASE = "base"
MATCHED = "matched no-repair"
REPAIR = "RepairKV"
SPREAD = "spread"
SWAP = "spread, swap"
_CONTROLS = ("Random-K", "Oldest-K", "StaleQ-K", "WrongQ-K")
_GREY, _RED, _BLUE, _GREEN = COLOURS
_STYLES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        FULL: {"color": _GREY, "ls": "--", "lw": 1.0},
        BASE: {"color": _GREY, "ls": ":", "lw": 1.0},
        MATCHED: {"color": _GREY, "ls": ":", "marker": "o", "lw": 1.6},
        "Random-K": {"color": "#b08968", "marker": "v", "lw": 1.0},
        "Oldest-K": {"color": "#7f5539", "marker": "^", "lw": 1.0},
        "StaleQ-K": {"color": "#9d8189", "marker": "<", "lw": 1.0},
        "WrongQ-K": {"color": "#6d6875", "marker": ">", "lw": 1.0},
        "page summary": {"color": "#e9a03b", "marker": "s", "lw": 1.3},
        "Refresh": {"color": "#8e6bbf", "marker": "D", "lw": 1.3},
        REPAIR: {"color": _BLUE, "marker": "o", "lw": 2.0},
        "RepairKV, contrast": {"color": _BLUE, "marker": "x", "ls": "--", "lw": 1.2},
        SPREAD: {"color": _RED, "marker": "o", "lw": 2.2},
        "spread, no contrast": {"color": _RED, "ls": ":", "lw": 1.6},
        "spread, per head": {"color": _RED, "marker": "x", "ls": "--", "lw": 1.2},
        SWAP: {"color": _GREEN, "marker": "P", "lw": 1.8},
        "spread, swap, carried on": {"color": _GREEN, "marker": "*", "ls": "--", "lw": 1.6},
    }
)


def frontier_figure(rows: Sequence[Row]) -> Figure:
    """Conditions, partitions (RepairKV, Figure 7) and spans (Figure 8) by number of needles.

    For several numbers of needles, Figure 2 comes first.
    """
    scores = _scores(rows)
    counts = sorted({row["needles"] for row in scores})
    several = len(counts) > 1
    figure, panels = _grid(several + len(counts), 3, 5.0, 3.7)
    if several:
        _figure2(panels[0][0], scores, counts)
        for axes in panels[0][1:]:
            axes.set_visible(False)
    lines = panels[several:]
    for line, needles in zip(lines, counts, strict=True):
        own = [row for row in rows if row.get("needles") == needles]
        _conditions(line[0], _scores(own))
        line[0].set_title(f"{needles}q: all conditions", fontsize=10, loc="left")
        _partitions(line[1], [row for row in own if "partition" in row])
        _spans(line[2], [row for row in own if row.get("measure") == "spans brought back"])
    handles, labels = _legend(line[0] for line in lines)
    figure.legend(
        handles, labels, loc="upper right" if several else "outside right upper", fontsize=8
    )
    return figure


def _figure2(axes: Axes, scores: Sequence[Row], counts: Sequence[int]) -> None:
    for index, needles in enumerate(counts):
        colour = colormaps["viridis"](index / max(1, len(counts)))
        for condition, style in ((REPAIR, "-"), (SPREAD, "--"), (MATCHED, ":")):
            own = _line(scores, condition, needles)
            axes.plot(
                [row["k"] for row in own],
                [row["mean"] for row in own],
                style,
                color=colour,
                marker="o",
                ms=3,
            )
            if own and condition == REPAIR:
                axes.annotate(
                    f" {needles}q", (own[-1]["k"], own[-1]["mean"]), fontsize=8, color=colour
                )
    axes.set_title("solid: RepairKV, dashed: spread, dotted: matched", fontsize=9, loc="left")
    _label_axes(axes)


def _conditions(axes: Axes, scores: Sequence[Row]) -> None:
    for condition in dict.fromkeys(row["of"] for row in scores):
        own = _line(scores, condition)
        style = _style(condition)
        positions = [row["k"] for row in own]
        if own[0]["k"] == 0:
            axes.axhline(own[0]["mean"], label=condition, **style)
            continue
        axes.plot(positions, [row["mean"] for row in own], label=condition, ms=4, **style)
        if condition in _WITH_INTERVAL:
            low = [row["ci_low"] for row in own]
            high = [row["ci_high"] for row in own]
            axes.fill_between(positions, low, high, color=style["color"], alpha=0.12, lw=0)
    _label_axes(axes)


def _style(condition: str) -> Mapping[str, Any]:
    """Style of a condition; with int8 rows it has the same colour and is dashed."""
    plain = condition.removesuffix(_INT8)
    return _STYLES[plain] if plain == condition else {**_STYLES[plain], "ls": "--", "alpha": 0.7}


_INT8 = ", int8"
# The intervals of all conditions would hide the lines; file and table have them.
_WITH_INTERVAL = (MATCHED, REPAIR, SPREAD)


def _partitions(axes: Axes, rows: Sequence[Row]) -> None:
    """A line for each partition from matched no-repair to repair, and `spread` (Figure 7)."""
    names = list(dict.fromkeys(row["partition"] for row in rows))
    found = {(row["partition"], row["of"]): row["mean"] for row in rows}
    for at, name in enumerate(names):
        ends = [
            found[name, condition] for condition in (MATCHED, REPAIR) if (name, condition) in found
        ]
        if len(ends) > 1:
            axes.plot(ends, [at, at], color="#c4cad4", lw=4, zorder=1)
        for condition in (MATCHED, REPAIR, SPREAD):
            if (name, condition) in found:
                colour = _STYLES[condition]["color"]
                axes.scatter(
                    found[name, condition],
                    at,
                    color=colour,
                    s=46 if condition == REPAIR else 26,
                    zorder=2,
                )
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.margins(y=0.2)
    axes.invert_yaxis()
    axes.set_xlim(-0.03, 1.03)
    k = rows[0]["k"] if rows else ""
    axes.set_title(
        f"by partition, K = {k}: grey matched, blue RepairKV, red spread", fontsize=9, loc="left"
    )
    axes.set_xlabel("score")


def _spans(axes: Axes, rows: Sequence[Row]) -> None:
    """Share of the asked needles' rows that were promoted (Figure 8)."""
    for condition in (MATCHED, *_CONTROLS, REPAIR, SPREAD, SWAP):
        own = _line(rows, condition)
        if own:
            axes.plot(
                [row["k"] for row in own], [row["mean"] for row in own], ms=4, **_STYLES[condition]
            )
    axes.set_title("answer spans promoted", fontsize=10, loc="left")
    axes.set_xlabel("K, rows promoted")
    axes.set_ylim(-0.03, 1.03)


def revisit_figure(rows: Sequence[Row]) -> Figure:
    """A group of bars for each turn, one bar for each condition (Figure 3)."""
    by_turn = [row for row in _scores(rows) if "turn" in row]
    turns = sorted({row["turn"] for row in by_turn})
    conditions = [each for each in dict.fromkeys(row["of"] for row in by_turn) if each != FULL]
    figure = Figure(figsize=(11, 4), layout="constrained")
    axes = figure.subplots()
    width = 0.84 / len(conditions)
    for index, condition in enumerate(conditions):
        own = {row["turn"]: row for row in by_turn if row["of"] == condition}
        positions = [at + (index - len(conditions) / 2 + 0.5) * width for at in range(len(turns))]
        means = [own[turn]["mean"] for turn in turns]
        below = [own[turn]["mean"] - own[turn]["ci_low"] for turn in turns]
        above = [own[turn]["ci_high"] - own[turn]["mean"] for turn in turns]
        style = _STYLES[condition]
        hatch = "//" if style.get("ls") == "--" else None
        axes.bar(
            positions,
            means,
            width * 0.92,
            color=style["color"],
            label=condition,
            hatch=hatch,
            edgecolor="white",
        )
        axes.errorbar(
            positions,
            means,
            yerr=(below, above),
            fmt="none",
            ecolor="#374151",
            elinewidth=0.7,
            capsize=2,
        )
    axes.set_xticks(range(len(turns)), [f"turn {turn}" for turn in turns])
    axes.set_ylabel("score")
    axes.set_ylim(0, 1.05)
    axes.grid(visible=False, axis="x")
    axes.set_title(f"revisited needles, K = {by_turn[0]['k']}", fontsize=10, loc="left")
    figure.legend(loc="outside right upper", fontsize=8)
    return figure


def policies_figure(rows: Sequence[Row]) -> Figure:
    """Gains over matched no-repair, a panel for each first stage (Figure 4).

    The controls are a band.
    """
    gains = [row for row in rows if "against" in row]
    names = list(dict.fromkeys((row["needles"], row["method"]) for row in gains))
    figure, panels = _grid(1, len(names), 3.3, 3.4)
    for axes, (needles, method) in zip(panels[0], names, strict=True):
        own = [row for row in gains if (row["needles"], row["method"]) == (needles, method)]
        controls = [_line(own, condition) for condition in _CONTROLS[:2]]
        if all(controls):
            ends = [sorted(row["mean"] for row in pair) for pair in zip(*controls, strict=True)]
            positions = [row["k"] for row in controls[0]]
            axes.fill_between(
                positions,
                [e[0] for e in ends],
                [e[-1] for e in ends],
                color="#c4cad4",
                label="controls",
            )
        for condition in (REPAIR, SPREAD):
            line = _line(own, condition)
            low = [row["ci_low"] for row in line]
            high = [row["ci_high"] for row in line]
            positions = [row["k"] for row in line]
            axes.plot(
                positions,
                [row["mean"] for row in line],
                ms=4,
                label=condition,
                **_STYLES[condition],
            )
            axes.fill_between(
                positions, low, high, color=_STYLES[condition]["color"], alpha=0.12, lw=0
            )
        axes.axhline(0, color=_GREY, lw=0.8)
        axes.set_title(f"{method}, {needles}q", fontsize=10, loc="left")
        axes.set_xlabel("K")
        axes.set_ylim(-0.2, 1.0)
    panels[0][0].set_ylabel("gain over matched no-repair")
    panels[0][0].legend(fontsize=8, loc="upper left")
    return figure


def anytime_figure(rows: Sequence[Row]) -> Figure:
    """Score by share of the evicted tokens scored, a panel for each operator.

    The last panel compares the operators in equal time.
    """
    stopped = [row for row in rows if "stopped_at" in row]
    operators = list(dict.fromkeys(row["of"] for row in stopped))
    figure, panels = _grid(1, len(operators) + 1, 4.4, 3.5)
    for axes, operator in zip(panels[0], operators, strict=False):
        own = [row for row in stopped if row["of"] == operator]
        own = sorted(own, key=lambda row: float(row["stopped_at"]))
        positions = [row["scanned"] for row in own]
        axes.plot(positions, [row["mean"] for row in own], color=COLOURS[1], marker="o", ms=4)
        low = [row["ci_low"] for row in own]
        high = [row["ci_high"] for row in own]
        axes.fill_between(positions, low, high, color=COLOURS[1], alpha=0.1, lw=0)
        axes.set_title(operator, fontsize=10, loc="left")
        axes.set_xlabel("share of the evicted tokens scored")
        axes.set_ylim(0, 1.05)
    panels[0][0].set_ylabel("score")
    _bars(panels[0][-1], [row for row in rows if "stopped_at" not in row])
    panels[0][-1].set_title("in the time of spread", fontsize=10, loc="left")
    return figure


def repository_figure(rows: Sequence[Row]) -> Figure:
    """Exact recovery at the largest K, and the position of promoted rows (Figure 6, left)."""
    scores = _scores(rows)
    largest = max(row["k"] for row in scores)
    figure, panels = _grid(1, 3, 4.6, 4.0)
    _bars(panels[0][0], [row for row in scores if row["k"] in (0, largest)])
    panels[0][0].set_title(f"names recovered, K = {largest}", fontsize=10, loc="left")
    measures = list(dict.fromkeys(row["measure"] for row in rows if "measure" in row))
    for axes, measure in zip(panels[0][1:], (measures[0], measures[-1]), strict=True):
        _bars(
            axes,
            [row for row in rows if row.get("measure") == measure and row["k"] in (0, largest)],
        )
        axes.set_title(measure, fontsize=8, loc="left")
        axes.autoscale(axis="x")
    return figure


def _bars(axes: Axes, rows: Sequence[Row]) -> None:
    names = [row["of"] for row in rows]
    colours = [_STYLES.get(name, {"color": "#c4cad4"})["color"] for name in names]
    spread = (
        [row["mean"] - row["ci_low"] for row in rows],
        [row["ci_high"] - row["mean"] for row in rows],
    )
    means = [row["mean"] for row in rows]
    axes.barh(names, means, xerr=spread, color=colours, error_kw={"elinewidth": 0.7, "capsize": 2})
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=8)
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, 1.05)


def _scores(rows: Sequence[Row]) -> list[Row]:
    parts = ("against", "measure", "partition")
    return [row for row in rows if not any(name in row for name in parts)]


def _line(rows: Sequence[Row], condition: str, needles: int | None = None) -> list[Row]:
    own = [row for row in rows if row["of"] == condition and needles in (None, row.get("needles"))]
    return sorted(own, key=lambda row: int(row["k"]))


def _label_axes(axes: Axes) -> None:
    axes.set_xlabel("K, rows promoted")
    axes.set_ylabel("score")
    axes.set_ylim(-0.03, 1.05)


def _grid(lines: int, columns: int, width: float, height: float) -> tuple[Figure, list[list[Axes]]]:
    figure = Figure(figsize=(width * columns, height * lines), layout="constrained")
    return figure, [list(line) for line in figure.subplots(lines, columns, squeeze=False)]


def _legend(panels: Any) -> tuple[list[Any], list[str]]:
    handles: dict[str, Any] = {}
    for axes in panels:
        lines, labels = axes.get_legend_handles_labels()
        handles |= dict(zip(labels, lines, strict=True))
    return list(handles.values()), list(handles)


FIGURES: Mapping[str, Callable[[Sequence[Row]], Figure]] = MappingProxyType(
    {
        "mq-niah": frontier_figure,
        "mq-niah revisit": revisit_figure,
        "mq-niah policies": policies_figure,
        "mq-niah anytime": anytime_figure,
        "repository": repository_figure,
    }
)
"""The picture of each suite; unlike the other suites' they also show paired differences."""
