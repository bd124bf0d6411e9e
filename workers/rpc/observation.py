"""Calls of a worker as log lines and spans, with the ids that the gateway sent."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import structlog

from kvrecall.protocol.calls import SERVICE, Call
from kvrecall.telemetry.spans import NO_SPAN, Span, Tracer, enter, get_error_code
from kvrecall.telemetry.wire import read_request_id

# Events of streams after which nothing comes: their readers cancel what is left of the call.
_LAST_EVENTS = frozenset({"done", "result"})
_log = structlog.get_logger("kvrecall.calls")


class ObservedCall:
    """A call that runs. `answered`: its whole answer is on its way, whatever becomes of the call."""

    def __init__(self) -> None:
        self.answered = False

    def add_event(self, event: Any) -> None:
        """Notice a message of a stream, before it is sent. Parts of a list are no events."""
        if "event" in event.DESCRIPTOR.oneofs_by_name:
            self.answered = event.WhichOneof("event") in _LAST_EVENTS


@contextmanager
def observe_call(
    tracer: Tracer,
    call: Call[Any, Any],
    request: Any,
    metadata: Mapping[str, str],
    observed: ObservedCall,
) -> Iterator[None]:
    """Run a call below the gateway's span, and log its end: work at info, other calls at debug.

    What is bound stays bound: each call has a task of its own, whose last lines are written after
    the block.
    """
    session = _get_session(request)
    ids = {"request_id": read_request_id(metadata), "session": session}
    structlog.contextvars.bind_contextvars(**{name: each for name, each in ids.items() if each})
    # A call of nobody's trace, such as the scrape of its counters, begins none.
    span: Span = NO_SPAN
    if "traceparent" in metadata:
        span = tracer.begin(f"{SERVICE}/{call.name}", "server", metadata)
        span.set(describe_call(call, session))
    enter(span)
    started = time.monotonic()
    error = ""
    try:
        yield
    except BaseException as raised:
        error = "" if observed.answered else get_error_code(raised)
        raise
    finally:
        span.end(error)
        log = _log.info if call.drained else _log.debug
        seconds = round(time.monotonic() - started, 6)
        log("call", method=call.name, code=error or "ok", seconds=seconds)


def describe_call(call: Call[Any, Any], session: str) -> dict[str, str]:
    """Describe a call by OpenTelemetry's attributes of RPCs."""
    attributes = {"rpc.system.name": "grpc", "rpc.method": f"{SERVICE}/{call.name}"}
    return attributes | ({"gen_ai.conversation.id": session} if session else {})


def _get_session(request: Any) -> str:
    """Return the session that a request names, by itself or in its specification."""
    session = getattr(getattr(request, "spec", request), "session", "")
    return session if isinstance(session, str) else ""
