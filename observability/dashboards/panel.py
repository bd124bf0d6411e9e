"""A panel as data: what is asked, and how the answer is drawn."""

from dataclasses import dataclass
from enum import StrEnum

GATEWAY = 'job=~"$job"'
WORKER = 'job=~"$job", worker=~"$worker"'


class Unit(StrEnum):
    """Grafana's names of the units that panels use."""

    BYTES = "bytes"
    BYTES_PER_SECOND = "binBps"
    COUNT = "short"
    NATS = "none"
    PER_SECOND = "cps"
    RATIO = "percentunit"
    SECONDS = "s"


class Kind(StrEnum):
    """How a panel is drawn."""

    LINES = "lines"
    STACKED = "stacked"
    HEATMAP = "heatmap"
    NUMBER = "number"
    TABLE = "table"


@dataclass(frozen=True)
class Query:
    """A PromQL expression, and the legend of its series with {{label}} for a label's value."""

    expression: str
    legend: str = "__auto"


@dataclass(frozen=True)
class Panel:
    """A panel.

    Attributes:
        title: Unique in its dashboard.
        description: One sentence or two: what is bad, and what to do then.
        unit: Of every series.
        queries: What is drawn.
        kind: How it is drawn.
        warn_above: Value from which on it is drawn in red; None: never.
    """

    title: str
    description: str
    unit: Unit
    queries: tuple[Query, ...]
    kind: Kind = Kind.LINES
    warn_above: float | None = None


@dataclass(frozen=True)
class Board:
    """A dashboard: its file is `<name>.json` and its uid `kvrecall-<name>`."""

    name: str
    title: str
    description: str
    panels: tuple[Panel, ...]
    by_instance: bool = False


def rate(metric: str, labels: str, *by: str) -> str:
    """Build the sum of a counter's rates per second, for each value of the labels `by`."""
    return f"sum{_by(by)} (rate(kvrecall_{metric}{{{labels}}}[$__rate_interval]))"


def quantile(share: float, histogram: str, labels: str, *by: str) -> str:
    """Build a quantile of a histogram over all processes, for each value of the labels `by`."""
    return f"histogram_quantile({share:g}, {rate(f'{histogram}_bucket', labels, 'le', *by)})"


def _by(labels: tuple[str, ...]) -> str:
    return f" by ({', '.join(labels)})" if labels else ""
