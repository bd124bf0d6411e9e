"""Timeouts of tool calls.

A call without an event for too long fails, and the model reads that as its result.
"""

import asyncio
from contextlib import suppress

from kvrecall.domain.errors import ServiceError
from kvrecall.domain.events import PauseTimedOut
from kvrecall.domain.sessions.session import Session
from kvrecall.domain.tool_calls import PendingCall
from kvrecall.domain.tool_events import timed_out
from services.context import ServiceContext

_SWEEPS_PER_PAUSE = 10
_LONGEST_SLEEP_SECONDS = 60.0


class ToolCallTimeouts:
    """One task that looks for idle calls.

    It compares committed times with the clock that they were taken from, the catalog's, so that
    neither a restart nor another machine's clock changes anything. A call times out when two sweeps
    found it idle and without an event in between: a clock that was wrong for a moment is harmless.
    """

    def __init__(self, context: ServiceContext) -> None:
        self._catalog = context.catalog
        self._sessions = context.sessions
        self._events = context.events
        self._seconds = context.limits.pause_seconds
        self._idle: dict[str, set[PendingCall]] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start sweeping."""
        self._task = asyncio.create_task(self._watch(), name="tool call timeouts")

    async def stop(self) -> None:
        """Stop sweeping."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def sweep(self) -> None:
        """Time out every call that was idle for too long at the last sweep already.

        What cannot be written now is tried again next time.
        """
        try:
            since = await self._catalog.tool_calls.get_time() - self._seconds
            sessions = await self._catalog.tool_calls.get_idle_sessions(since)
        except ServiceError:
            return  # the next sweep comes
        before, self._idle = self._idle, {}
        for name in sessions:
            with suppress(ServiceError):  # it is gone, or busy here or in another process
                session = await self._catalog.sessions.get(name)
                if not session.settings.matched:
                    self._idle[name] = _get_idle(session, since)
                    await self._time_out(name, before.get(name, set()) & self._idle[name])

    async def _watch(self) -> None:
        while True:
            await self.sweep()
            await asyncio.sleep(min(self._seconds / _SWEEPS_PER_PAUSE, _LONGEST_SLEEP_SECONDS))

    async def _time_out(self, session: str, idle: set[PendingCall]) -> None:
        """Time out those of the calls that are still as they were found."""
        if not idle:
            return
        live = self._sessions.activate(await self._catalog.sessions.get(session))
        if live.write_lock.locked():
            return  # a turn or an event is under way, perhaps with the result
        async with self._sessions.claim(live, patience=0.0):
            found = await self._catalog.sessions.get(session)
            calls = [call for call in found.outstanding if call in idle]
            for call in calls:
                epoch = await self._sessions.epoch(live)
                await self._catalog.tool_calls.commit(
                    session, timed_out(call, self._seconds), epoch, None
                )
            if calls:
                self._events.publish(PauseTimedOut(session, tuple(call.call.id for call in calls)))


def _get_idle(session: Session, since: float) -> set[PendingCall]:
    return {call for call in session.outstanding if call.last_event_at <= since}
