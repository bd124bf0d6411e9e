"""Answers to whole conversations, as every API of stateless clients gives them.

Each API has its own objects and events; the way from a request to them and the headers are the same.
"""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from gateway.http.middleware import CLIENT_CLOSED_REQUEST
from gateway.http.settings import GatewaySettings
from gateway.http.sse import (
    COMMENT,
    ClientDisconnected,
    Encoder,
    EventStream,
    read_outcome,
    run_while_connected,
)
from kvrecall.domain.errors import UnknownModel
from kvrecall.domain.reports import TurnOutcome
from kvrecall.domain.tolerance.ignored import Ignored
from services.conversations.continuation import Continuation
from services.service import SessionService
from services.streams.turn import ClosableStream

Json = dict[str, Any]
Item_co = TypeVar("Item_co", covariant=True)


def require_model(name: str, service: SessionService, settings: GatewaySettings) -> None:
    """Raise UnknownModel unless the service serves it, by its own name or an alias."""
    if name != service.info.model and name not in settings.model_aliases:
        message = f"model {name!r} is not served here; {service.info.model!r} is"
        raise UnknownModel("model", message)


class Accepted(Protocol[Item_co]):
    """Accepted work: its progress, and the session and turn that answer it."""

    @property
    def stream(self) -> ClosableStream[Item_co]:
        """The progress."""
        ...

    @property
    def session(self) -> str:
        """The session."""
        ...

    @property
    def match(self) -> str:
        """How the session was found."""
        ...

    @property
    def turn(self) -> int:
        """The turn's number."""
        ...

    @property
    def ignored(self) -> Sequence[Ignored]:
        """What of the messages was mended."""
        ...


Found = TypeVar("Found", bound=Accepted[Any])


async def respond(
    request: Request,
    starting: Coroutine[Any, Any, Found],
    build: Callable[[Found], Coroutine[Any, Any, Json]],
    encode: Callable[[Found], Encoder[Any]] | None,
    settings: GatewaySettings,
    report: Callable[[Sequence[Ignored]], Mapping[str, str]],
    beat: bytes = COMMENT,
) -> Response:
    """Respond with what `starting` begins, cancelled when the client disconnects.

    `report` returns the headers that say what of the request was not taken as it was sent, from what
    was mended in its messages. The answer is the object of `build`, or with `encode` a stream of the
    encoder's events, with `beat` in between while there are none.
    """
    try:
        found = await run_while_connected(request, starting)
        headers = {
            "kvrecall-session": found.session,
            "kvrecall-match": found.match,
            "kvrecall-turn": str(found.turn),
            **report(found.ignored),
        }
        if encode is not None:
            seconds = settings.heartbeat_seconds
            return EventStream(found.stream, seconds, encode(found), headers, beat)
        try:
            answer = await run_while_connected(request, build(found))
        finally:
            await found.stream.aclose()
    except ClientDisconnected:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return JSONResponse(answer, headers=headers)


async def read_answer(
    build: Callable[[TurnOutcome, Continuation], Json], found: Continuation
) -> Json:
    """Read a turn to its end and build its answer. Raises what the turn raises."""
    return build(await read_outcome(found.stream), found)
