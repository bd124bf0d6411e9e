"""An OTLP/HTTP receiver in this process: what a collector gets, decoded."""

import gzip
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Exported:
    """A span as it was exported; ids in hexadecimal digits, times in nanoseconds."""

    service: str
    name: str
    kind: int
    trace: str
    id: str
    parent: str
    links: tuple[tuple[str, str], ...]
    attributes: dict[str, Any]
    events: tuple[tuple[str, dict[str, Any]], ...]
    start: int
    end: int
    failed: bool


@dataclass
class Collector:
    """Receives traces at `endpoint` while it is entered; `status` is what it answers."""

    status: int = 200
    bodies: list[bytes] = field(default_factory=list)

    def __enter__(self) -> "Collector":
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.bodies.append(body)
                self.send_response(collector.status)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Write nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def spans(self) -> list[Exported]:
        """All spans that have come so far."""
        return [
            _decode(span, _values(resource.resource.attributes)["service.name"])
            for body in list(self.bodies)
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def named(self, name: str) -> list[Exported]:
        """The spans of a name, in the order of their beginnings."""
        return sorted((each for each in self.spans() if each.name == name), key=lambda s: s.start)

    def below(self, span: Exported) -> list[str]:
        """Names of the spans right below one, in the order of their beginnings."""
        found = [each for each in self.spans() if each.parent == span.id]
        return [each.name for each in sorted(found, key=lambda each: each.start)]

    def child(self, span: Exported, name: str) -> Exported:
        """The one span of a name right below another."""
        (found,) = [each for each in self.named(name) if each.parent == span.id]
        return found


def _decode(span: Any, service: str) -> Exported:
    return Exported(
        service,
        span.name,
        span.kind,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
        _values(span.attributes),
        tuple((event.name, _values(event.attributes)) for event in span.events),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.status.code == 2,
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)
