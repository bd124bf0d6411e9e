"""Answers to whole conversations, as every API of stateless clients gives them.

Each API has its own objects and events; the way from a request to them and the headers are the same.
"""

from collections.abc import Callable, Coroutine
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
        headers = {
            "kvrecall-session": found.session,
            "kvrecall-match": found.match,
            "kvrecall-turn": str(found.turn),
        }
        if encode is not None:
            return EventStream(found.stream, settings.heartbeat_seconds, encode(found), headers)
        try:
            outcome = await run_while_connected(request, read_outcome(found.stream))
        finally:
            await found.stream.aclose()
    except ClientDisconnected:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return JSONResponse(build(outcome, found), headers=headers)
