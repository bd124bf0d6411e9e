"""Completions of plain prompts: each runs in a session of its own, which is deleted after it."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace

from kvrecall.domain.errors import ServiceError
from kvrecall.domain.events import TurnStarted
from kvrecall.domain.sessions.request import CreateSession
from kvrecall.domain.sessions.session import Session
from kvrecall.domain.tolerance.ignored import Ignored
from kvrecall.domain.turn_request import TurnRequest
from services.cancellation import run_to_completion
from services.conversations.choices import ChoicesStream
from services.conversations.continuation import MatchKind, SessionApi
from services.streams.turn import TurnProgress

# Such a session expires after this time without a turn, should the process be killed before it is
# deleted.
ALONE_SECONDS = 60.0


@dataclass(frozen=True)
class Completions:
    """Accepted completions of one request, and the progress of all, by their numbers.

    `session` is the first one's.
    """

    stream: ChoicesStream
    session: str
    turn: int = 1
    match: MatchKind = "built"
    ignored: tuple[Ignored, ...] = ()


async def start_completions(
    api: SessionApi, settings: CreateSession, turns: Sequence[TurnRequest]
) -> Completions:
    """Start the turns, each the only one of its session, and return when the first was accepted.

    As many run at once as the worker has slots; the others follow. Raises what the creation of a
    session and a turn raise; then none of them runs.
    """
    alone = replace(settings, expires_after_seconds=ALONE_SECONDS, matched=True)
    at_once = asyncio.Semaphore(min(api.info.slots, api.limits.max_running_turns))
    stream = ChoicesStream([_run(api, alone, turn, at_once) for turn in turns])
    started = await stream.wait()
    assert isinstance(started, TurnStarted), "a turn begins with its acceptance"
    return Completions(stream, started.session)


async def _run(
    api: SessionApi, settings: CreateSession, turn: TurnRequest, at_once: asyncio.Semaphore
) -> AsyncGenerator[TurnProgress, None]:
    """Run a turn in a session of its own, and delete that at the end, whatever the end is."""
    async with at_once:
        creating = asyncio.create_task(api.create(settings), name="creation")
        try:
            session = await asyncio.shield(creating)  # it goes on when this is cancelled
            async with aclosing(api.turn(session.id, turn)) as stream:
                async for progress in stream:
                    yield progress
        finally:
            await run_to_completion(_delete(api, creating))


async def _delete(api: SessionApi, creating: asyncio.Task[Session]) -> None:
    with suppress(ServiceError):
        await api.delete((await creating).id)
