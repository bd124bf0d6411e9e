"""Streamed turns, blocking and async."""

from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from types import TracebackType
from typing import Self

from kvrecall.client.events import TurnCompleted, TurnEvent
from kvrecall.client.exceptions import StreamBroken
from kvrecall.client.models import Turn


class TurnStream(Iterator[TurnEvent]):
    """Events of a streamed turn; the last one is TurnCompleted. Closing it early cancels the turn.

    The request is sent when the first event is read. It raises as `KvrecallClient.turn`.
    """

    def __init__(self, events: Generator[TurnEvent, None, None]) -> None:
        self._events = events
        self._turn: Turn | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __next__(self) -> TurnEvent:
        event = next(self._events)
        if isinstance(event, TurnCompleted):
            self._turn = event.turn
        return event

    @property
    def turn(self) -> Turn | None:
        """Committed turn; None before its last event was read."""
        return self._turn

    def read(self) -> Turn:
        """Read the remaining events and return the committed turn."""
        for _ in self:
            pass
        if self._turn is None:
            raise StreamBroken
        return self._turn

    def close(self) -> None:
        """Close the connection; a turn that is not committed is cancelled."""
        self._events.close()


class AsyncTurnStream(AsyncIterator[TurnEvent]):
    """Events of a streamed turn; the last one is TurnCompleted. Closing it early cancels the turn.

    The request is sent when the first event is read. It raises as `AsyncKvrecallClient.turn`.
    """

    def __init__(self, events: AsyncGenerator[TurnEvent, None]) -> None:
        self._events = events
        self._turn: Turn | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def __anext__(self) -> TurnEvent:
        event = await anext(self._events)
        if isinstance(event, TurnCompleted):
            self._turn = event.turn
        return event

    @property
    def turn(self) -> Turn | None:
        """Committed turn; None before its last event was read."""
        return self._turn

    async def read(self) -> Turn:
        """Read the remaining events and return the committed turn."""
        async for _ in self:
            pass
        if self._turn is None:
            raise StreamBroken
        return self._turn

    async def aclose(self) -> None:
        """Close the connection; a turn that is not committed is cancelled."""
        await self._events.aclose()
