"""Pauses that never end: a tool call that nothing is heard of for too long is given up, and the model is told so."""

import asyncio
import time
from contextlib import suppress

from kvrecall.domain.errors import ServiceError
from kvrecall.domain.events import EventBus, PauseTimedOut
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.tool_events import timed_out
from services.catalog.base import Catalog
from services.session_manager import SessionManager

_SWEEPS_PER_PAUSE = 10
_LONGEST_SLEEP_SECONDS = 60.0


class ToolCallTimeouts:
    """One task that looks for such calls. It goes by committed times, so that a restart changes nothing."""

    def __init__(
        self,
        catalog: Catalog,
        sessions: SessionManager,
        observers: EventBus,
        settings: ServiceLimits,
    ) -> None:
        self._catalog = catalog
        self._sessions = sessions
        self._observers = observers
        self._seconds = settings.pause_seconds
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Look from now on."""
        self._task = asyncio.create_task(self._watch(), name="pause limit")

    async def stop(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def sweep(self) -> None:
        """Give up every call that is silent for too long. What cannot be written now is tried again next time."""
        try:
            silent = await self._catalog.tool_calls.get_idle_sessions(time.time() - self._seconds)
        except ServiceError:
            return  # the next sweep comes
        for session in silent:
            with suppress(ServiceError):  # it is gone, or busy here or in another process
                await self._give_up(session)

    async def _watch(self) -> None:
        while True:
            await self.sweep()
            await asyncio.sleep(min(self._seconds / _SWEEPS_PER_PAUSE, _LONGEST_SLEEP_SECONDS))

    async def _give_up(self, session: str) -> None:
        live = self._sessions.of(await self._catalog.sessions.get(session))
        if live.writing.locked():
            return  # a turn or a report is under way, perhaps with the result
        async with self._sessions.claim(live, patience=0.0):
            found = await self._catalog.sessions.get(session)
            since = time.time() - self._seconds
            silent = [call for call in found.outstanding if call.last_event_at <= since]
            for call in silent:
                epoch = await self._sessions.epoch(live)
                await self._catalog.tool_calls.commit(
                    session, timed_out(call, self._seconds), epoch, None
                )
            if silent:
                self._observers.publish(
                    PauseTimedOut(session, tuple(call.call.id for call in silent))
                )
