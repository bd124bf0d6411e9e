"""Spans of requests, and the attributes of the work below them, by OpenTelemetry's conventions.

The services open spans and publish events; what a span says of a turn is decided here. No text of a
conversation is an attribute: not of messages, not of results, and not of stop sequences, which are a
client's text too.
"""

from collections.abc import Callable, Mapping
from http import HTTPMethod
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.observation.identity import OWN_ID, get_path
from kvrecall.domain.events import (
    EpisodesBuilt,
    PagesRebuilt,
    RepairFailed,
    RepairFinished,
    ServiceEvent,
    SessionMoved,
    ToolCallEnded,
    TurnFailed,
    TurnFinished,
    TurnRetried,
    TurnRun,
)
from kvrecall.domain.messages import Sampling
from kvrecall.domain.reports import RepairReport, TurnOutcome
from kvrecall.telemetry.spans import (
    NO_SPAN,
    PassedSpan,
    Span,
    Tracer,
    Value,
    current_span,
    get_error_code,
    using,
)
from services.usage import count_tokens

PROBES = frozenset({"/healthz", "/readyz", "/health", "/metrics"})
"""Paths that machines ask for every few seconds: no spans, and no log lines but at debug."""
TRACE_RESPONSE = "traceresponse"
_PROVIDER = "kvrecall"
_SERVER_ERROR = 500


class TraceRequests:
    """A span for each HTTP request, below the caller's; the answer names it in `traceresponse`."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http" or scope["path"] in PROBES:
            await self._app(scope, receive, send)
            return
        headers = {str(name, "latin-1"): str(value, "latin-1") for name, value in scope["headers"]}
        own = self._tracer.begin(_get_method(scope), "server", headers)
        with using(own):
            if isinstance(own, PassedSpan):
                await self._app(scope, receive, send)
            else:
                await self._run(own, scope, receive, send)

    async def _run(self, own: Span, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, and end its span: an answer that is an error of the service is one."""
        status = 0

        async def send_with_trace(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own.set(_describe_response(message))
                if parent := own.headers().get("traceparent"):
                    line = (TRACE_RESPONSE.encode(), parent.encode())
                    message["headers"] = [*message["headers"], line]
            await send(message)

        error = ""
        try:
            await self._app(scope, receive, send_with_trace)
            error = str(status) if status >= _SERVER_ERROR else ""
        except BaseException as raised:
            error = get_error_code(raised)
            raise
        finally:
            _describe_request(own, scope)
            own.end(error)


def _describe_request(own: Span, scope: Scope) -> None:
    """Name a span by its route: path and method may have in them what a client chose."""
    method = _get_method(scope)
    route = get_path(scope["route"]) if "route" in scope else ""
    attributes = {"http.request.method": method, "url.scheme": scope.get("scheme", "http")}
    if route:
        own.rename(f"{method} {route}")
        attributes |= {"http.route": route, "url.template": route}
    own.set(attributes)


def _get_method(scope: Scope) -> str:
    """Return a request's method, `_OTHER` for one that HTTP does not know."""
    method: str = scope["method"]
    return method if method in HTTPMethod.__members__ else "_OTHER"


def _describe_response(message: Message) -> dict[str, Value]:
    headers = dict(message["headers"])
    attributes: dict[str, Value] = {"http.response.status_code": message["status"]}
    if headers.get(b"content-type", b"").startswith(b"text/event-stream"):
        attributes["gen_ai.request.stream"] = True
    if request_id := headers.get(b"x-request-id"):
        attributes["kvrecall.request_id"] = request_id.decode("latin-1")
    return attributes


def create_span_observer(get_model: Callable[[], str]) -> Callable[[ServiceEvent], None]:
    """Build an observer that describes the current span by the events published under it.

    `get_model` returns the name of the served model.
    """

    def observe(event: ServiceEvent) -> None:
        current = current_span()
        if current is NO_SPAN:
            return
        match event:
            case TurnFinished(outcome=outcome, timing=timing, run=run):
                current.rename(f"chat {get_model()}")
                current.set(_describe_chat(get_model(), outcome.session))
                current.set(_describe_outcome(outcome, timing.first_token))
                if run is not None:
                    current.set(_describe_run(run))
            case TurnFailed(session):
                current.rename(f"chat {get_model()}")
                current.set(_describe_chat(get_model(), session))
            case TurnRetried(worker=worker, code=code):
                current.add("turn retried", {"kvrecall.worker": worker, "error.type": str(code)})
            case PagesRebuilt(pages=pages):
                current.add("pages rebuilt", {"kvrecall.pages": pages})
            case SessionMoved(left=left, worker=worker):
                current.add("session moved", {"kvrecall.left": left, "kvrecall.worker": worker})
            case RepairFinished(session, report):
                current.set({"gen_ai.conversation.id": session, **_describe_repair(report)})
            case RepairFailed(session, trigger, code, final=True):
                current.set({"kvrecall.trigger": trigger, "error.type": str(code)})
            case EpisodesBuilt(session, episodes, segments):
                counts = {"kvrecall.episodes": episodes, "kvrecall.segments": segments}
                current.set({"gen_ai.conversation.id": session, **counts})
            case ToolCallEnded():
                _record_tool_call(current, event)

    return observe


def _describe_chat(model: str, session: str) -> dict[str, Value]:
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": _PROVIDER,
        "gen_ai.request.model": model,
    }
    if OWN_ID.fullmatch(session):
        attributes["gen_ai.conversation.id"] = session
    return attributes


def _describe_run(run: TurnRun) -> dict[str, Value]:
    return {
        **_describe_sampling(run.sampling),
        "kvrecall.method": run.method,
        "kvrecall.worker": run.worker,
        "kvrecall.epoch": run.epoch,
    }


def _describe_sampling(sampling: Sampling) -> dict[str, Value]:
    return {
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.seed": sampling.seed,
    }


def _describe_outcome(outcome: TurnOutcome, first: float | None) -> dict[str, Value]:
    memory = outcome.memory
    counts = count_tokens(outcome, appended=0)
    return {
        "gen_ai.usage.input_tokens": counts.prompt,
        "gen_ai.usage.output_tokens": outcome.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": counts.cached,
        "gen_ai.response.finish_reasons": [outcome.finish_reason],
        **({} if first is None else {"gen_ai.response.time_to_first_chunk": first}),
        "kvrecall.turn": outcome.turn,
        "kvrecall.budget": memory.budget,
        "kvrecall.active_rows": memory.active_rows,
        "kvrecall.evicted_tokens": memory.evicted_rows,
        "kvrecall.promoted_tokens": memory.promoted_rows,
        "kvrecall.durable": outcome.durable,
        **({} if outcome.episode is None else {"kvrecall.episode": outcome.episode.episode}),
    }


def _describe_repair(report: RepairReport) -> Mapping[str, Any]:
    return {
        "kvrecall.trigger": report.trigger,
        "kvrecall.repair.candidates": report.candidates,
        "kvrecall.repair.scored": report.scored_rows,
        "kvrecall.repair.promoted": report.promoted,
        "kvrecall.repair.cut": report.truncated,
        "kvrecall.repair.in_pause": report.in_pause,
    }


def _record_tool_call(current: Span, event: ToolCallEnded) -> None:
    """Add the span of a pause: below the span that the client runs its tool in, if it sent one."""
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": event.name,
        "gen_ai.tool.call.id": event.call,
        "gen_ai.conversation.id": event.session,
        **({"error.type": "tool_failed"} if event.failed else {}),
    }
    current.record(
        f"execute_tool {event.name}",
        event.began,
        event.ended,
        attributes=attributes,
        beside=True,
    )
