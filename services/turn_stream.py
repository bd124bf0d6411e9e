"""What is told of a turn while it runs, and the stream in which it is told."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass

from kvrecall.domain.errors import WorkerLost
from kvrecall.domain.messages import ToolCall
from kvrecall.domain.reports import TurnOutcome


@dataclass(frozen=True)
class TurnStarted:
    """The turn was accepted: from here on an error is told within the stream."""

    session: str
    turn: int


@dataclass(frozen=True)
class TextDelta:
    """A piece of the answer's text."""

    text: str


@dataclass(frozen=True)
class ToolCallEmitted:
    """A tool call of the answer. It becomes one that may be answered with the turn's commit."""

    call: ToolCall


@dataclass(frozen=True)
class TurnEnded:
    """The turn is committed."""

    outcome: TurnOutcome


TurnProgress = TurnStarted | TextDelta | ToolCallEmitted | TurnEnded


class TurnStream:
    """The progress of one turn, computed by a task of its own: a slow reader holds nobody up.

    What waits to be read is bounded by the turn's max_tokens. Closing the stream early cancels the turn.
    """

    def __init__(self, progress: AsyncGenerator[TurnProgress, None]) -> None:
        self._told: asyncio.Queue[TurnProgress | BaseException | None] = asyncio.Queue()
        self._committed = False
        self.task = asyncio.create_task(self._run(progress), name="turn")

    def __aiter__(self) -> AsyncIterator[TurnProgress]:
        return self

    async def __anext__(self) -> TurnProgress:
        item = await self._told.get()
        if item is None:
            raise StopAsyncIteration
        if isinstance(item, BaseException):
            raise item
        return item

    async def aclose(self) -> None:
        """Cancel the turn unless it is committed, and return when nothing of it is left running."""
        if not self._committed:
            self.task.cancel()
        await asyncio.wait({self.task})

    async def _run(self, progress: AsyncGenerator[TurnProgress, None]) -> None:
        try:
            async with aclosing(progress):
                async for item in progress:
                    self._committed = isinstance(item, TurnEnded)
                    self._told.put_nowait(item)
        except Exception as error:  # handed to the reader, whatever it is
            self._told.put_nowait(error)
        except asyncio.CancelledError:
            self._told.put_nowait(WorkerLost("the turn was cancelled before it was committed"))
            raise
        finally:
            self._told.put_nowait(None)
