"""HTTP requests of the chat doors: a route, its body, headers, and where the client leaves."""

import gzip
from collections.abc import Mapping, Sequence

from hypothesis import strategies as st

from benchmarks.fuzz.cases import bodies
from benchmarks.fuzz.cases.json_text import encode_json
from benchmarks.fuzz.cases.mutation import mutated
from benchmarks.fuzz.requests import Cut, Request

Route = tuple[str, str, bodies.Bodies | None]
_SESSION = "/v1/sessions/@session:0"
ROUTES: Mapping[str, Sequence[Route]] = {
    "chat": (("POST", "/v1/chat/completions", bodies.chat),),
    "completions": (
        ("POST", "/v1/completions", bodies.completions),
        ("POST", "/v1/completions", bodies.completions),
        ("POST", "/tokenize", bodies.tokenize),
        ("POST", "/detokenize", bodies.tokenize),
    ),
    "responses": (
        ("POST", "/v1/responses", bodies.responses),
        ("POST", "/v1/responses", bodies.responses),
        ("POST", "/v1/responses", bodies.responses),
        ("POST", "/v1/responses/input_tokens", bodies.responses),
        ("POST", "/v1/responses/compact", bodies.responses),
        ("GET", "/v1/responses/@response:0", None),
        ("POST", "/v1/responses/@response:0/cancel", None),
        ("DELETE", "/v1/responses/@response:1", None),
        ("GET", "/v1/responses/@foreign:0", None),
        ("POST", "/v1/conversations", bodies.conversation),
        ("POST", "/v1/conversations/@conversation:0/items", bodies.items),
        ("GET", "/v1/conversations/@conversation:0/items", None),
        ("DELETE", "/v1/conversations/@conversation:1", None),
    ),
    "messages": (
        ("POST", "/v1/messages", bodies.messages),
        ("POST", "/v1/messages", bodies.messages),
        ("POST", "/v1/messages/count_tokens", bodies.messages),
    ),
    "sessions": (
        ("POST", "/v1/sessions", bodies.session),
        ("POST", f"{_SESSION}/turns", bodies.turn),
        ("POST", f"{_SESSION}/turns", bodies.turn),
        ("POST", f"{_SESSION}/turns", bodies.turn),
        ("POST", f"{_SESSION}/events", bodies.event),
        ("POST", f"{_SESSION}/fork", bodies.fork),
        ("POST", f"{_SESSION}/move", st.just({})),
        ("POST", "/v1/sessions/@foreign:0/turns", bodies.turn),
        ("GET", f"{_SESSION}/memory/tokens", None),
        ("GET", f"{_SESSION}/repairs", None),
        ("GET", f"{_SESSION}/turns", None),
        ("DELETE", "/v1/sessions/@session:1", None),
        ("DELETE", "/v1/sessions/@foreign:0", None),
    ),
}
_JSON = ("content-type", "application/json")
_HEADERS: Sequence[tuple[tuple[str, str], ...]] = (
    *((),) * 24,
    (("idempotency-key", "k1"),),
    (("idempotency-key", "k2"),),
    (("idempotency-key", "x" * 2000),),
    (("x-kvrecall-tenant", "ann"),),
    (("kvrecall-session", "@session:0"),),
    (("kvrecall-session", "@foreign:0"),),
    (("kvrecall-session", "none"),),
    (("kvrecall-budget", "1e400"),),
    (("kvrecall-nothing", "1"),),
    (("content-encoding", "gzip"),),
    (("accept", "text/event-stream"),),
    (("x-request-id", "%0a" * 100),),
)
_TYPES = (_JSON,) * 9 + (("content-type", "text/plain"),)
_CUTS = (Cut.NONE,) * 7 + (Cut.BODY, Cut.REPLY)


@st.composite
def http_requests(draw: st.DrawFn, door: str) -> Request:
    """Draw a request of a door."""
    method, path, strategy = draw(st.sampled_from(ROUTES[door]))
    headers = draw(st.sampled_from(_HEADERS))
    if strategy is None:
        return Request(door, method, path, headers)
    body = encode_json(draw(mutated(strategy)), draw(st.sampled_from((True, True, True, False))))
    if ("content-encoding", "gzip") in headers and draw(st.booleans()):
        body = gzip.compress(body, mtime=0)
    headers = (draw(st.sampled_from(_TYPES)), *headers)
    return Request(door, method, path, headers, body, draw(st.sampled_from(_CUTS)))
