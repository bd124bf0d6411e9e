"""Spans by OpenTelemetry's SDK, exported as the standard OTEL_* variables say.

Imported only where traces are exported: `kvrecall_server.app.tracing` decides. The provider is this
module's own, not the process's: libraries that trace what passes them find none, and record nothing.
"""

import threading
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any

from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvrecall.telemetry.spans import NO_ATTRIBUTES, Attributes, Kind, Moment, Span

_W3C = TraceContextTextMapPropagator()
_NANOSECONDS = 1_000_000_000
_KINDS: Mapping[Kind, trace.SpanKind] = {
    "internal": trace.SpanKind.INTERNAL,
    "server": trace.SpanKind.SERVER,
    "client": trace.SpanKind.CLIENT,
}
_EXPORTERS = "opentelemetry_traces_exporter"
# Entry points of the exporter `otlp`, by its protocol.
_OTLP = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}


class CannotExport(Exception):
    """The variables name an exporter that is not installed, or one that cannot be built."""


class OtelSpan:
    """A span of OpenTelemetry. `outer` is the context of the caller that sent one."""

    def __init__(self, tracer: trace.Tracer, own: trace.Span, outer: Context | None = None) -> None:
        self._tracer = tracer
        self._own = own
        self._inner = trace.set_span_in_context(own, Context())
        self._outer = outer

    @property
    def trace_id(self) -> str:
        """Id of the trace."""
        return trace.format_trace_id(self._own.get_span_context().trace_id)

    def headers(self) -> dict[str, str]:
        """Return W3C's headers."""
        carrier: dict[str, str] = {}
        _W3C.inject(carrier, self._inner)
        return carrier

    def child(self, name: str, kind: Kind = "internal") -> "OtelSpan":
        """Begin a span below this one."""
        return OtelSpan(self._tracer, self._tracer.start_span(name, self._inner, kind=_KINDS[kind]))

    def follow(self, name: str) -> "OtelSpan":
        """Begin a trace of its own, linked to this span."""
        links = [trace.Link(self._own.get_span_context())]
        return OtelSpan(self._tracer, self._tracer.start_span(name, Context(), links=links))

    def record(
        self,
        name: str,
        start: float,
        end: float,
        *,
        attributes: Attributes = NO_ATTRIBUTES,
        moments: Sequence[Moment] = (),
        beside: bool = False,
    ) -> None:
        """Add a span that is over; see `Span.record`."""
        above = self._outer if beside and self._outer is not None else self._inner
        over = self._tracer.start_span(
            name, above, attributes=attributes, start_time=_to_nanoseconds(start)
        )
        for moment in moments:
            over.add_event(moment.name, moment.attributes, _to_nanoseconds(moment.at))
        over.end(_to_nanoseconds(max(start, end)))

    def rename(self, name: str) -> None:
        """Change the name."""
        self._own.update_name(name)

    def set(self, attributes: Attributes) -> None:
        """Add attributes."""
        self._own.set_attributes(attributes)

    def add(self, name: str, attributes: Attributes = NO_ATTRIBUTES) -> None:
        """Add an event."""
        self._own.add_event(name, attributes)

    def end(self, error: str = "") -> None:
        """End the span, with its status."""
        if error:
            self._own.set_attribute("error.type", error)
            self._own.set_status(trace.StatusCode.ERROR)
        self._own.end()


class OtelTracer:
    """Spans of one process, exported in batches by a thread."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("kvrecall")

    def begin(self, name: str, kind: Kind, headers: Mapping[str, str]) -> Span:
        """Begin the span of a request, below the caller's if `headers` name it."""
        # W3C's headers, as our own processes send them, and those of OTEL_PROPAGATORS.
        outer = propagate.extract(dict(headers), _W3C.extract(dict(headers), Context()))
        sent = trace.get_current_span(outer).get_span_context().is_valid
        own = self._tracer.start_span(name, outer, kind=_KINDS[kind])
        return OtelSpan(self._tracer, own, outer if sent else None)

    def close(self, seconds: float) -> None:
        """Export what is left; a collector that does not answer delays the exit no longer."""
        # The SDK's own limit is 30 seconds, which a process that drains does not have.
        closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(seconds)


def build_tracer(component: str, version: str, environment: Mapping[str, str]) -> OtelTracer:
    """Build the tracer that the OTEL_* variables describe. Raises CannotExport."""
    defaults = {"service.name": f"kvrecall-{component}", "service.version": version}
    # The environment's attributes last: they count, the service's name among them.
    resource = Resource.create(defaults).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    for name in _get_exporters(environment):
        provider.add_span_processor(BatchSpanProcessor(_build_exporter(name)))
    return OtelTracer(provider)


def _get_exporters(environment: Mapping[str, str]) -> list[str]:
    """Return the names of the exporters' entry points. Raises CannotExport."""
    protocol = (
        environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
        or environment.get("OTEL_EXPORTER_OTLP_PROTOCOL")
        or "http/protobuf"
    )
    wanted = (environment.get("OTEL_TRACES_EXPORTER") or "otlp").split(",")
    names = [name.strip() for name in wanted if name.strip() not in ("", "none")]
    if "otlp" in names and protocol not in _OTLP:
        raise CannotExport(
            f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}; traces are sent by one of {', '.join(_OTLP)}"
        )
    return [_OTLP[protocol] if name == "otlp" else name for name in names]


def _build_exporter(name: str) -> SpanExporter:
    """Build an exporter from its entry point. Raises CannotExport."""
    found = list(entry_points(group=_EXPORTERS, name=name))
    if not found:
        package = f"opentelemetry-exporter-{name.replace('_', '-')}"
        raise CannotExport(f"no exporter of traces is called {name!r}; install {package}")
    try:
        build: Any = found[0].load()
        exporter: SpanExporter = build()
    except Exception as error:  # whatever an exporter makes of its variables
        raise CannotExport(f"the exporter {name!r} cannot be built: {error}") from error
    return exporter


def _to_nanoseconds(seconds: float) -> int:
    return int(seconds * _NANOSECONDS)
