"""The tracer of a process: OpenTelemetry where the OTEL_* variables ask for it, else none."""

import os
from collections.abc import Mapping
from importlib.metadata import version

import structlog

from kvrecall.telemetry.spans import Tracer
from kvrecall.telemetry.wire import PassingTracer

EXPORT_SECONDS = 5.0
"""Longest time that a process's end waits for its last traces to be exported."""

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_log = structlog.get_logger("kvrecall.tracing")


def build_tracer(component: str, environment: Mapping[str, str] = os.environ) -> Tracer:
    """Build the tracer of a process. OpenTelemetry is imported only where traces are exported.

    Traces never keep a service from starting: what is wrong with their set-up is logged.
    """
    if not wants_traces(environment):
        return PassingTracer()
    try:
        from kvrecall.telemetry import otel
    except ImportError as error:
        _log.error(
            "traces are off", reason=str(error), todo="pip install '.[otel]' in the checkout"
        )
        return PassingTracer()
    try:
        tracer = otel.build_tracer(component, version("kvrecall"), environment)
    except otel.CannotExport as error:
        _log.error("traces are off", reason=str(error), todo="correct the OTEL_* variables")
        return PassingTracer()
    _log.info("traces are exported")
    return tracer


def wants_traces(environment: Mapping[str, str]) -> bool:
    """Return whether the OTEL_* variables ask for traces: by an exporter, or by an endpoint."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporters = environment.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    if exporters:
        return exporters != "none"
    return any(environment.get(name) for name in _ENDPOINTS)
