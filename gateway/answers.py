"""Answers to whole conversations, as every API of stateless clients gives them.

Each API has its own objects and events; the session, the counts and the headers are the same.
"""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from gateway.middleware import CLIENT_CLOSED_REQUEST
from gateway.settings import GatewaySettings
from gateway.sse import ClientDisconnected, Encoder, EventStream, read_outcome, run_while_connected
from kvrecall.domain.errors import UnknownModel
from kvrecall.domain.reports import TurnOutcome
from services.conversations.matching import Continuation
from services.service import SessionService

Json = dict[str, Any]


@dataclass(frozen=True)
class TokenCounts:
    """Tokens of the whole conversation, those of them that were not computed now, the answer's."""

    prompt: int
    cached: int
    output: int


def count_tokens(outcome: TurnOutcome, found: Continuation) -> TokenCounts:
    """Count the tokens of an answered request.

    The last token of an answer has no row yet. Tokens whose rows are evicted count as cached: they
    are stored and can come back.
    """
    memory = outcome.memory
    prompt = max(outcome.prompt_tokens, memory.length + 1 - outcome.output_tokens)
    held = found.held_tokens
    cached = prompt - outcome.prompt_tokens if held is None else min(held, prompt)
    return TokenCounts(prompt, cached, outcome.output_tokens)


def describe_memory(outcome: TurnOutcome) -> Json:
    """Describe what the session holds after the answer: the member `kvrecall` of its usage."""
    memory = outcome.memory
    return {
        "active_rows": memory.active_rows,
        "evicted_rows": memory.evicted_rows,
        "promoted_rows": memory.promoted_rows,
        "repaired_seconds": round(sum(repair.seconds for repair in outcome.repairs), 6),
    }


def require_model(name: str, service: SessionService, settings: GatewaySettings) -> None:
    """Raise UnknownModel unless the service serves it, by its own name or an alias."""
    if name != service.info.model and name not in settings.model_aliases:
        message = f"model {name!r} is not served here; {service.info.model!r} is"
        raise UnknownModel("model", message)


async def respond(
    request: Request,
    starting: Coroutine[Any, Any, Continuation],
    build: Callable[[TurnOutcome, Continuation], Json],
    encode: Callable[[Continuation], Encoder] | None,
    settings: GatewaySettings,
) -> Response:
    """Respond with the turn that `starting` begins, cancelled when the client disconnects.

    The answer is the object of `build`, or with `encode` a stream of the encoder's events.
    """
    try:
        found = await run_while_connected(request, starting)
        headers = {"kvrecall-session": found.session, "kvrecall-match": found.match}
        if encode is not None:
            return EventStream(found.stream, settings.heartbeat_seconds, encode(found), headers)
        try:
            outcome = await run_while_connected(request, read_outcome(found.stream))
        finally:
            await found.stream.aclose()
    except ClientDisconnected:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    headers["kvrecall-turn"] = str(outcome.turn)
    return JSONResponse(build(outcome, found), headers=headers)
