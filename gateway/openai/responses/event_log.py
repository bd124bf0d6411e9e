"""The events of a response that runs in the background, for any number of readers."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any


class EventLog:
    """The events of one response by their numbers, for any number of readers."""

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._grown = asyncio.Event()
        self._end = asyncio.Event()

    @property
    def ended(self) -> bool:
        """True if no event follows."""
        return self._end.is_set()

    def add(self, events: bytes) -> None:
        """Add encoded events."""
        self._events += [event + b"\n\n" for event in events.split(b"\n\n") if event]
        self._wake()

    def end(self) -> None:
        """Let readers end."""
        self._end.set()
        self._wake()

    async def wait(self, seconds: float | None = None) -> None:
        """Wait for the end, at most so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._end.wait()

    async def read(self, after: int) -> AsyncIterator[bytes]:
        """Yield the events behind number `after`, those to come as well."""
        number = after + 1
        while True:
            if fresh := self._events[number:]:
                number += len(fresh)
                yield b"".join(fresh)
            elif self.ended:
                return
            else:
                await self._grown.wait()

    def _wake(self) -> None:
        self._grown.set()
        self._grown = asyncio.Event()


class EncodedStream:
    """Events for one reader, who may leave: what they are of goes on."""

    def __init__(self, events: AsyncIterator[bytes]) -> None:
        self._events = events

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        return await anext(self._events)

    async def aclose(self) -> None:
        """Do nothing."""


class AsTheyAre:
    """Encodes events that are encoded already."""

    def begin(self) -> bytes:
        """Encode nothing."""
        return b""

    def encode(self, progress: bytes) -> bytes:
        """Return the events."""
        return progress

    def fail(self, problem: Mapping[str, Any]) -> bytes:
        """Encode nothing: a reader of half a response asks again."""
        return b""
