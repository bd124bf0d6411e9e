"""The progress of a turn, and the stream that carries it to one reader."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from kvrecall.domain.errors import WorkerLost
from kvrecall.domain.events import TurnFinished, TurnStarted
from kvrecall.domain.messages import TokenLogprob, ToolCall
from kvrecall.domain.reports import TurnOutcome


@dataclass(frozen=True)
class TurnPlanned:
    """The worker has counted the turn's tokens, and they fit: nothing else is refused for its size.

    `held_tokens` of the session come before the `prompt_tokens` that the turn appends.
    """

    held_tokens: int
    prompt_tokens: int


@dataclass(frozen=True)
class TextDelta:
    """A piece of the generated text, with the log-probabilities of its tokens if they are asked for.

    It may be empty: the text of a token may come with a later one's. `tokens`: how many it stands for.
    """

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    tokens: int = field(default=0, compare=False)


@dataclass(frozen=True)
class ReasoningDelta:
    """A piece of what the model reasons before its text; `tokens`: how many it stands for."""

    text: str
    tokens: int = field(default=0, compare=False)


@dataclass(frozen=True)
class ArgumentsDelta:
    """A piece of the arguments of a call while it is generated; the first one of a call begins it.

    `index`: the call's number in the answer, from 0. The whole call follows as `ToolCallEmitted`. A
    call may come without pieces.
    """

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ToolCallEmitted:
    """A tool call of the answer. Its result can be reported once the turn is committed."""

    call: ToolCall


TurnProgress = (
    TurnStarted
    | TurnPlanned
    | ReasoningDelta
    | TextDelta
    | ArgumentsDelta
    | ToolCallEmitted
    | TurnFinished
)
Publish = Callable[[TurnProgress], None]
_PLANNING_SECONDS = 5.0
Item_co = TypeVar("Item_co", covariant=True)


class ClosableStream(Protocol[Item_co]):
    """Progress for one reader."""

    def __aiter__(self) -> AsyncIterator[Item_co]: ...

    async def __anext__(self) -> Item_co: ...

    async def aclose(self) -> None:
        """End what runs early, unless it is committed."""
        ...


# The progress of one turn.
ProgressStream = ClosableStream[TurnProgress]


def replay(outcome: TurnOutcome) -> Iterator[TurnProgress]:
    """Yield the progress that a committed turn would have had: each text in one piece."""
    yield TurnStarted(outcome.session, outcome.turn, replayed=True)
    if (message := outcome.generated) is not None:
        if message.reasoning:
            yield ReasoningDelta(message.reasoning)
        if message.content:
            yield TextDelta(message.content)
        for call in message.tool_calls:
            yield ToolCallEmitted(call)
    yield TurnFinished(outcome)


class TurnStream:
    """The progress of one turn, computed by a task of its own: a slow reader delays nothing.

    The buffer is bounded by the turn's max_tokens. Closing the stream early cancels the turn.
    """

    def __init__(self, run: Callable[[Publish], Awaitable[None]]) -> None:
        self._progress: asyncio.Queue[TurnProgress | BaseException | None] = asyncio.Queue()
        self._committed = False
        self._put_back: TurnProgress | None = None
        self.task = asyncio.create_task(self._run(run), name="turn")

    def __aiter__(self) -> AsyncIterator[TurnProgress]:
        return self

    async def __anext__(self) -> TurnProgress:
        if self._put_back is not None:
            first, self._put_back = self._put_back, None
            return first
        item = await self._progress.get()
        if item is None:
            raise StopAsyncIteration
        if isinstance(item, BaseException):
            raise item
        return item

    async def wait_until_planned(self) -> TurnPlanned | None:
        """Wait for the turn's plan, so that a refusal by the worker is raised here.

        None for a turn that has to wait for its worker: its client should hear of it meanwhile.
        """
        try:
            async with asyncio.timeout(_PLANNING_SECONDS):
                progress = await anext(self)
        except TimeoutError:
            return None
        if isinstance(progress, TurnPlanned):
            return progress
        self._put_back = progress
        return None

    async def aclose(self) -> None:
        """Cancel the turn unless it is committed, and return when its task has ended."""
        if not self._committed:
            self.task.cancel()
        await asyncio.wait({self.task})

    def _publish(self, item: TurnProgress) -> None:
        self._committed = isinstance(item, TurnFinished)
        self._progress.put_nowait(item)

    async def _run(self, run: Callable[[Publish], Awaitable[None]]) -> None:
        try:
            await run(self._publish)
        except Exception as error:  # any error at all is raised to the reader
            self._progress.put_nowait(error)
        except asyncio.CancelledError:
            self._progress.put_nowait(WorkerLost("the turn was cancelled before it was committed"))
            raise
        finally:
            self._progress.put_nowait(None)
