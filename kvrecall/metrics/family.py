"""A metric family as data: a catalogue of them makes a page, its documentation and its tests."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

PREFIX = "kvrecall_"
Kind = Literal["counter", "gauge", "histogram"]
Values = tuple[str, ...]


@dataclass(frozen=True)
class Family:
    """A metric family.

    Attributes:
        name: Name behind `kvrecall_`; that of a counter ends in `_total`, and a unit comes last
            otherwise.
        kind: Prometheus type.
        help: One sentence for the page and the documentation.
        labels: Labels with the values that are known before they occur: their series start at 0,
            so that the first increase is seen. Empty where values come with their events.
        buckets: Boundaries of a histogram.
    """

    name: str
    kind: Kind
    help: str
    labels: Mapping[str, Values] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()


def counter(name: str, text: str, /, **labels: Values) -> Family:
    """Build the family of a counter."""
    return Family(name, "counter", text, labels)


def gauge(name: str, text: str, /, **labels: Values) -> Family:
    """Build the family of a gauge."""
    return Family(name, "gauge", text, labels)


def histogram(name: str, text: str, buckets: tuple[float, ...], /, **labels: Values) -> Family:
    """Build the family of a histogram."""
    return Family(name, "histogram", text, labels, buckets)
