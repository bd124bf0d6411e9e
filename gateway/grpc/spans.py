"""Spans of calls of the gRPC API, below the caller's."""

import grpc
from google.protobuf.descriptor import MethodDescriptor

from gateway.grpc.caller import Metadata
from gateway.observation.spans import TRACE_RESPONSE
from kvrecall.telemetry.spans import PassedSpan, Span, Tracer

# Statuses that are faults of the service, not of the caller.
_FAULTS = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)


def begin_call_span(tracer: Tracer, method: MethodDescriptor, metadata: Metadata) -> Span:
    """Begin the span of a call, with OpenTelemetry's attributes of RPCs."""
    name = f"{method.containing_service.full_name}/{method.name}"
    span = tracer.begin(name, "server", {key: str(value) for key, value in metadata})
    span.set({"rpc.system.name": "grpc", "rpc.method": name})
    return span


def build_trace_metadata(span: Span) -> list[tuple[str, str]]:
    """Build the trailing metadata that names a call's span; none where nobody traces."""
    parent = span.headers().get("traceparent")
    return [] if parent is None or isinstance(span, PassedSpan) else [(TRACE_RESPONSE, parent)]


def end_call_span(span: Span, status: grpc.StatusCode, request_id: str) -> None:
    """End a call's span; a mistake of the caller is no error of the service."""
    span.set({"rpc.response.status_code": status.name, "kvrecall.request_id": request_id})
    span.end(status.name if status in _FAULTS else "")
