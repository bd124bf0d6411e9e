"""The metrics of one part of a process, and the page that shows those of all its parts."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, product
from threading import Lock
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder

from kvrecall.metrics.family import PREFIX, Family, gauge

BUILD_INFO = gauge("build_info", "1, with the version of the process.", version=(), component=())
Instrument = Counter | Gauge | Histogram


class Metrics:
    """The instruments of a catalogue, by name. Safe to use from several threads.

    Every series carries the `constant` labels. An unknown name or label is a programming error and
    raises KeyError or ValueError.
    """

    def __init__(self, catalogue: Sequence[Family], **constant: str) -> None:
        self.catalogue = tuple(catalogue)
        self.registry = CollectorRegistry()
        self._constant = constant
        self._instruments = {family.name: self._create(family) for family in self.catalogue}
        self._refreshes: list[Callable[[], None]] = []
        self._totals: dict[tuple[str, ...], float] = {}
        self._advancing = Lock()

    def inc(self, name: str, amount: float = 1.0, /, **labels: str) -> None:
        """Add to a counter or a gauge."""
        self._get(name, labels).inc(amount)

    @contextmanager
    def add_seconds(self, name: str, /, **labels: str) -> Iterator[None]:
        """Add the seconds of the block inside to a counter."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.inc(name, time.perf_counter() - began, **labels)

    def set(self, name: str, value: float | None, /, **labels: str) -> None:
        """Set a gauge; None removes the labelled series: a limit that is not set is absent, not 0."""
        if value is not None:
            self._get(name, labels).set(value)
        else:
            self._instruments[name].remove_by_labels({**self._constant, **labels})

    def advance(self, name: str, total: float, /, **labels: str) -> None:
        """Advance a counter to a total that is counted elsewhere and never falls."""
        key = (name, *labels.values())
        with self._advancing:
            self._get(name, labels).inc(max(0.0, total - self._totals.get(key, 0.0)))
            self._totals[key] = total

    def observe(self, name: str, value: float, trace: str = "", /, **labels: str) -> None:
        """Add a value to a histogram, with the id of its `trace`, if there is one, as exemplar."""
        self._get(name, labels).observe(value, {"trace_id": trace} if trace else None)

    def refresh_with(self, refresh: Callable[[], None]) -> None:
        """Call `refresh` before each reading, to set gauges of what is so at that moment."""
        self._refreshes.append(refresh)

    def collect(self) -> Iterator[Metric]:
        """Yield all families with their values now."""
        for refresh in self._refreshes:
            refresh()
        yield from self.registry.collect()

    def _get(self, name: str, labels: dict[str, str]) -> Any:
        instrument = self._instruments[name]
        values = {**self._constant, **labels}
        return instrument.labels(**values) if values else instrument

    def _create(self, family: Family) -> Instrument:
        name, names = PREFIX + family.name, (*self._constant, *family.labels)
        instrument: Instrument
        match family.kind:
            case "counter":
                instrument = Counter(name, family.help, names, registry=self.registry)
            case "gauge":
                instrument = Gauge(name, family.help, names, registry=self.registry)
            case "histogram":
                instrument = Histogram(
                    name, family.help, names, registry=self.registry, buckets=family.buckets
                )
        if names and all(family.labels.values()):
            for values in product(*family.labels.values()):
                instrument.labels(*self._constant.values(), *values)
        return instrument


class MetricsPage:
    """The metrics page of a process: of its parts, and of the process itself."""

    def __init__(self, component: str, version: str, parts: Sequence[Metrics]) -> None:
        """Build the page of a `component` of this `version`: gateway, worker or serve."""
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a third of all series
        self._process = Metrics((BUILD_INFO,))
        self._process.set("build_info", 1.0, version=version, component=component)
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._process.registry)
        self._parts = (self._process, *parts)

    def collect(self) -> Iterator[Metric]:
        """Yield the families of all parts."""
        return chain.from_iterable(part.collect() for part in self._parts)

    def render(self, accept: str) -> tuple[str, bytes]:
        """Return content type and text, as the `Accept` header asks: OpenMetrics has exemplars."""
        encode, content_type = choose_encoder(accept)
        return content_type, encode(self)
