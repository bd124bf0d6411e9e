"""REST: sessions that begin as another was."""

from fastapi import APIRouter, Request
from pydantic import Field

from gateway.errors import problems
from gateway.idempotency import Key, key_of
from gateway.rest.schemas.requests import Body, MetadataBody
from gateway.rest.schemas.views import SessionView
from services.forks import ForkRequest
from services.service import SessionService


class ForkBody(Body):
    """Where a session is forked, and what the new one is called."""

    turn: int | None = Field(
        default=None, ge=0, lt=2**31, description="At the end of which turn; null: the last one."
    )
    metadata: MetadataBody | None = Field(
        default=None, description="The new session's own; null: as its parent's."
    )
    queue: bool = Field(
        default=False, description="Wait (for a bounded time) while a turn of the session runs."
    )

    def value(self) -> ForkRequest:
        """The domain's value."""
        return ForkRequest(self.turn, self.metadata, self.queue)


def add_forks(router: APIRouter, service: SessionService) -> None:
    """The route of forks."""

    @router.post(
        "/sessions/{session}/fork",
        status_code=201,
        responses=problems(404, 409, 429),
        tags=["sessions"],
    )
    async def fork_session(
        request: Request, session: str, body: ForkBody = ForkBody(), key: Key = None
    ) -> SessionView:
        """Open a session that begins as this one was at the end of a turn; both go on by themselves.

        It has the same settings, seed included: asked the same, it answers as the first would. It shares the stored
        rows; at the last turn nothing is computed.
        """
        child = await service.fork(session, body.value(), key_of(request, key, body))
        return SessionView.of(child, child.committed_state, service.info.model)
