"""Several answers to one request: each is a turn of a session of its own, and all run at once.

Which of them the conversation goes on with is found by its next request's history.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvrecall.domain.errors import ServiceError
from kvrecall.domain.events import TurnFinished
from kvrecall.domain.sessions.session import Session
from kvrecall.domain.tolerance.ignored import Ignored
from services.cancellation import run_to_completion
from services.conversations.continuation import Continuation, MatchKind
from services.conversations.steps import Place, Steps
from services.streams.turn import ProgressStream, TurnProgress


@dataclass(frozen=True)
class ChoiceProgress:
    """A piece of progress of one of the answers, by its number from 0."""

    choice: int
    progress: TurnProgress


class ChoicesStream:
    """The progress of several turns as it comes.

    The first error ends it. What is not read to the end of all turns leaves nothing: turns that run
    are cancelled, and `discard` deletes the sessions of all of them.
    """

    def __init__(
        self,
        turns: Sequence[ProgressStream],
        discard: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._turns = turns
        self._discard = discard
        self._running = len(turns)
        self._closed = False
        self._first: ChoiceProgress | None = None
        self._progress: asyncio.Queue[ChoiceProgress | BaseException] = asyncio.Queue()
        self._readers = [
            asyncio.create_task(self._read(choice, turn), name="choice")
            for choice, turn in enumerate(turns)
        ]

    def __aiter__(self) -> AsyncIterator[ChoiceProgress]:
        return self

    async def __anext__(self) -> ChoiceProgress:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        if not self._running:
            raise StopAsyncIteration
        item = await self._progress.get()
        if isinstance(item, BaseException):
            raise item
        self._running -= isinstance(item.progress, TurnFinished)
        return item

    async def wait(self) -> TurnProgress:
        """Wait for the first piece of progress, which stays to be read. Raises what a turn raises."""
        try:
            self._first = await anext(self)
        except BaseException:
            await self.aclose()
            raise
        return self._first.progress

    async def aclose(self) -> None:
        """End all turns early, unless all are committed."""
        if not self._closed:
            self._closed = True
            await run_to_completion(self._close())

    async def _close(self) -> None:
        for reader in self._readers:
            reader.cancel()
        await asyncio.wait(self._readers)
        await _close_all(self._turns)
        if self._running and self._discard is not None:
            await self._discard()

    async def _read(self, choice: int, turn: ProgressStream) -> None:
        try:
            async for progress in turn:
                self._progress.put_nowait(ChoiceProgress(choice, progress))
        except Exception as error:  # any error at all is raised to the reader
            self._progress.put_nowait(error)


@dataclass(frozen=True)
class Choices:
    """Accepted turns of one request, and the progress of all. The first one stands for them."""

    turns: tuple[Continuation, ...]
    stream: ChoicesStream

    @property
    def session(self) -> str:
        """The first one's session."""
        return self.turns[0].session

    @property
    def turn(self) -> int:
        """The first one's turn."""
        return self.turns[0].turn

    @property
    def ignored(self) -> tuple[Ignored, ...]:
        """What of the messages was mended."""
        return self.turns[0].ignored

    @property
    def match(self) -> MatchKind:
        """How the session was found from which all of them go on."""
        return self.turns[0].match


async def start_choices(steps: Steps, place: Place | None, count: int) -> Choices:
    """Start turns from a place of a session, or at the beginning of a conversation.

    Raises what a step raises; then none of the turns runs.
    """
    created: list[Session] = []
    turns: list[Continuation] = []

    async def discard() -> None:
        """Delete the sessions; of a request with a key those alone that no repetition has used."""
        for session in created:
            if steps.has_key:
                await steps.api.delete_unused(session)
            else:
                with suppress(ServiceError):
                    await steps.api.delete(session.id)

    try:
        match: MatchKind = "built" if place is None else "forked"
        appended = 0
        if place is None:
            *before, _ = steps.cut()
            if before:
                place = await steps.create()
                created.append(place.session)
                place, appended = await steps.append(place, before)
        else:
            steps.check(place.number)
        for choice in range(count):
            step = f"choice {choice}"
            branch = await (
                steps.create(step, branch=True)
                if place is None
                else steps.fork(place, step, branch=True)
            )
            created.append(branch.session)
            # Begun at once: while it runs, no quota makes room for the next one by its deletion.
            turns.append(await steps.begin(branch, match, appended, choice))
    except BaseException:
        await run_to_completion(_close_all([turn.stream for turn in turns]))
        await run_to_completion(discard())
        raise
    # Accepted answers of a request with a key are left to its repetition.
    streams = [turn.stream for turn in turns]
    return Choices(tuple(turns), ChoicesStream(streams, None if steps.has_key else discard))


async def _close_all(turns: Sequence[ProgressStream]) -> None:
    """End turns early, unless they are committed."""
    await asyncio.gather(*(turn.aclose() for turn in turns))
