"""What looks into sessions, blocking and async. Nothing here changes a session or opens one."""

from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from types import TracebackType
from typing import Protocol, Self, TypeVar

import httpx

from kvrecall.client import _inspection_calls as calls
from kvrecall.client._calls import Call, SessionInput
from kvrecall.client._sse import LineParser
from kvrecall.client._transport import to_connection_failed
from kvrecall.client.events import WatchEvent
from kvrecall.client.inspection import (
    Family,
    MemoryMap,
    MemoryTokens,
    Overview,
    Pause,
    TurnLog,
    Version,
)

Result = TypeVar("Result")


class Send(Protocol):
    """A client's way to send a call and to parse the answer."""

    def __call__(self, call: Call[Result]) -> Result: ...


class Request(Protocol):
    """A client's way to send a call and to return the response, not read yet."""

    def __call__(self, call: Call[Result], *, stream: bool) -> httpx.Response: ...


class AsyncSend(Protocol):
    """As `Send`."""

    async def __call__(self, call: Call[Result]) -> Result: ...


class AsyncRequest(Protocol):
    """As `Request`."""

    async def __call__(self, call: Call[Result], *, stream: bool) -> httpx.Response: ...


class WatchStream(Iterator[WatchEvent]):
    """Events as they come, the first a snapshot; a context manager that closes the connection.

    The request is sent when the first event is read. It ends when the service ends it: connect again
    for a new snapshot. Raises ServiceProblem and ConnectionFailed.
    """

    def __init__(self, events: Generator[WatchEvent, None, None]) -> None:
        self._events = events

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __next__(self) -> WatchEvent:
        return next(self._events)

    def close(self) -> None:
        """Close the connection."""
        self._events.close()


class AsyncWatchStream(AsyncIterator[WatchEvent]):
    """Events as they come, the first a snapshot; a context manager that closes the connection.

    The request is sent when the first event is read. It ends when the service ends it: connect again
    for a new snapshot. Raises ServiceProblem and ConnectionFailed.
    """

    def __init__(self, events: AsyncGenerator[WatchEvent, None]) -> None:
        self._events = events

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def __anext__(self) -> WatchEvent:
        return await anext(self._events)

    async def aclose(self) -> None:
        """Close the connection."""
        await self._events.aclose()


class Inspector:
    """Looks into sessions: their log, memory map, family, pauses and events."""

    def __init__(self, send: Send, request: Request) -> None:
        self._send = send
        self._request = request

    def turns(self, session: SessionInput, after: int = 0, limit: int = 50) -> TurnLog:
        """List committed turns that follow turn `after`, oldest first, with messages and times."""
        return self._send(calls.turns(session, after, limit))

    def memory_map(
        self,
        session: SessionInput,
        start: int = 0,
        stop: int | None = None,
        *,
        columns: int = 512,
        head: int | None = None,
    ) -> MemoryMap:
        """Map which tokens are active, layer by layer, in up to `columns` cells; works in a turn."""
        return self._send(calls.memory_map(session, start, stop, columns, head))

    def memory_tokens(
        self, session: SessionInput, start: int = 0, stop: int | None = None
    ) -> MemoryTokens:
        """List up to 512 tokens with the layers and heads that hold them and the reason."""
        return self._send(calls.memory_tokens(session, start, stop))

    def family(self, session: SessionInput) -> Family:
        """List the sessions that were forked from the same first one."""
        return self._send(calls.family(session))

    def pauses(self, session: SessionInput, limit: int = 10) -> tuple[Pause, ...]:
        """List the last pauses, newest first: tool calls with their times, and repairs."""
        return self._send(calls.pauses(session, limit))

    def overview(self) -> Overview:
        """Sum up the last 15 minutes of the gateway that answers."""
        return self._send(calls.overview())

    def version(self) -> Version:
        """Get the version of the service."""
        return self._send(calls.version())

    def watch(self, session: SessionInput | None = None) -> WatchStream:
        """Watch a session, or all of them, as an iterator of events."""
        return WatchStream(self._watch(calls.watch(session)))

    def _watch(self, call: Call[None]) -> Generator[WatchEvent, None, None]:
        response = self._request(call, stream=True)
        parser = LineParser()
        try:
            for line in response.iter_lines():
                if (event := parser.feed(line)) is not None:
                    yield WatchEvent(*event)
        except httpx.TransportError as error:
            raise to_connection_failed(error) from error
        finally:
            response.close()


class AsyncInspector:
    """Looks into sessions: their log, memory map, family, pauses and events."""

    def __init__(self, send: AsyncSend, request: AsyncRequest) -> None:
        self._send = send
        self._request = request

    async def turns(self, session: SessionInput, after: int = 0, limit: int = 50) -> TurnLog:
        """List committed turns that follow turn `after`, oldest first, with messages and times."""
        return await self._send(calls.turns(session, after, limit))

    async def memory_map(
        self,
        session: SessionInput,
        start: int = 0,
        stop: int | None = None,
        *,
        columns: int = 512,
        head: int | None = None,
    ) -> MemoryMap:
        """Map which tokens are active, layer by layer, in up to `columns` cells; works in a turn."""
        return await self._send(calls.memory_map(session, start, stop, columns, head))

    async def memory_tokens(
        self, session: SessionInput, start: int = 0, stop: int | None = None
    ) -> MemoryTokens:
        """List up to 512 tokens with the layers and heads that hold them and the reason."""
        return await self._send(calls.memory_tokens(session, start, stop))

    async def family(self, session: SessionInput) -> Family:
        """List the sessions that were forked from the same first one."""
        return await self._send(calls.family(session))

    async def pauses(self, session: SessionInput, limit: int = 10) -> tuple[Pause, ...]:
        """List the last pauses, newest first: tool calls with their times, and repairs."""
        return await self._send(calls.pauses(session, limit))

    async def overview(self) -> Overview:
        """Sum up the last 15 minutes of the gateway that answers."""
        return await self._send(calls.overview())

    async def version(self) -> Version:
        """Get the version of the service."""
        return await self._send(calls.version())

    def watch(self, session: SessionInput | None = None) -> AsyncWatchStream:
        """Watch a session, or all of them, as an iterator of events."""
        return AsyncWatchStream(self._watch(calls.watch(session)))

    async def _watch(self, call: Call[None]) -> AsyncGenerator[WatchEvent, None]:
        response = await self._request(call, stream=True)
        parser = LineParser()
        try:
            async for line in response.aiter_lines():
                if (event := parser.feed(line)) is not None:
                    yield WatchEvent(*event)
        except httpx.TransportError as error:
            raise to_connection_failed(error) from error
        finally:
            await response.aclose()
