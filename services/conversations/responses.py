"""Responses that clients read again by id, and go on from; each tenant has its own."""

import asyncio
from collections.abc import Awaitable, Callable

from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.reports import TurnOutcome
from kvrecall.domain.session import Turn
from services.catalog.base import Catalog
from services.catalog.responses.base import StoredResponse
from services.turn_stream import ProgressStream, TurnEnded, TurnProgress

_DAY_SECONDS = 86_400.0


class ResponseStore:
    """Stored responses, and the turns that lead to them. Raises UnknownResponse.

    Another tenant's response is unknown.
    """

    def __init__(self, catalog: Catalog, limits: ServiceLimits) -> None:
        self._catalog = catalog
        self._seconds = limits.response_days * _DAY_SECONDS

    async def store(self, response: StoredResponse) -> None:
        """Store a response for `response_days`."""
        await self._catalog.responses.store(response, self._seconds)

    async def get(self, response_id: str, tenant: str) -> StoredResponse:
        """Return a response."""
        return await self._catalog.responses.get(response_id, tenant)

    async def delete(self, response_id: str, tenant: str) -> None:
        """Delete a response; others that go on from it stay."""
        await self._catalog.responses.delete(response_id, tenant)

    async def get_turns(self, response: StoredResponse, after: int, limit: int) -> list[Turn]:
        """Return turns that led to the response, its own last, in order."""
        turns = await self._catalog.turns.get_after(response.session, after, limit)
        return [turn for turn in turns if turn.number <= response.turn]


class RecordedStream:
    """A turn's stream that passes on the turn's end when `record` has stored what came of it.

    So what a client has seen the end of is found by its next request, whoever is killed in between.
    `observe` is called with each piece before it, and `close` when the stream is closed.
    """

    def __init__(
        self,
        stream: ProgressStream,
        record: Callable[[TurnOutcome], Awaitable[None]],
        close: Callable[[], Awaitable[None]],
        observe: Callable[[TurnProgress], object] | None = None,
    ) -> None:
        self._stream = stream
        self._record = record
        self._close = close
        self._observe = observe
        self._recording: asyncio.Future[None] | None = None

    def __aiter__(self) -> "RecordedStream":
        return self

    async def __anext__(self) -> TurnProgress:
        progress = await anext(self._stream)
        if isinstance(progress, TurnEnded):
            self._recording = asyncio.ensure_future(self._record(progress.outcome))
            await asyncio.shield(self._recording)
        elif self._observe is not None:
            self._observe(progress)
        return progress

    async def aclose(self) -> None:
        """Cancel the turn unless it is committed; return when what came of it is stored."""
        try:
            await self._stream.aclose()
            if self._recording is not None:
                await asyncio.wait({self._recording})
        finally:
            await self._close()
