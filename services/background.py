"""What is done in a session while nobody speaks in it: repairs first, then the care of its episodes.

One task per session does it. A turn takes what the repair that runs has found so far, and leaves out what was due
and not begun, unless it asks to wait. The care of episodes gives way at once to a turn or to a repair, and goes on
later from what it has committed.
"""

import asyncio

from kvrecall.domain.errors import ServiceError
from services.episode_maintenance import EpisodeMaintainer
from services.repair_runner import RepairRunner
from services.session_manager import ActiveSession, SessionManager


class BackgroundTasks:
    """Starts, interrupts and stops the background work of sessions."""

    def __init__(
        self, sessions: SessionManager, pauses: RepairRunner, keeper: EpisodeMaintainer
    ) -> None:
        self._sessions = sessions
        self._pauses = pauses
        self._keeper = keeper

    def begin_repairs(self, live: ActiveSession) -> None:
        """Run what repairs are due, before anything else."""
        live.repairs_wanted = True
        _interrupt(live)
        self._begin(live)

    def resume(self, live: ActiveSession) -> None:
        """A turn is over, committed or not: go on with the repairs that it left due, then the care of episodes."""
        if (live.has_episodes or live.repairs_wanted) and not live.deleted:
            self._begin(live)

    async def settle(self, live: ActiveSession, wait: bool) -> None:
        """Make way for a turn: break off the care of episodes, and return when no repair runs any more.

        The one that runs ends with what it has found so far, and no other begins. With `wait` all that are due end
        first, as they would without a turn. Raises a ServiceError when the worker is not well, with `wait` only.
        """
        _interrupt(live)
        try:
            if not wait:
                live.hurry.set()
                await self._pauses.hurry(live)
            if live.rest is not None and not live.rest.done():
                await asyncio.wait({live.rest})
            if wait:
                await self._pauses.run_due(live, patient=True)
        finally:
            live.hurry.clear()
            live.repairs_wanted = (
                True  # until the turn is committed: what it leaves out stays due if it fails
            )

    async def cancel(self, live: ActiveSession) -> None:
        """Stop the session's background work; what is due stays due."""
        task = live.rest
        live.rest = None
        live.repairs_wanted = False
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    async def stop(self) -> None:
        """Stop all background work."""
        for live in self._sessions.all():
            await self.cancel(live)

    def _begin(self, live: ActiveSession) -> None:
        if live.rest is None or live.rest.done():
            live.rest = asyncio.create_task(self._background(live), name=f"rest of {live.id}")

    async def _background(self, live: ActiveSession) -> None:
        while True:
            if live.repairs_wanted:
                live.repairs_wanted = False
                try:
                    await self._pauses.run_due(live)
                except ServiceError:
                    return  # told to the observers where it happened; still due, and tried again at the next report
            await self._keep(live)
            if not live.repairs_wanted:
                return

    async def _keep(self, live: ActiveSession) -> None:
        """Care for the episodes until it is done or interrupted; not at all while a turn runs or waits."""
        if not live.has_episodes or live.turns_in_line or live.repairs_wanted:
            return
        live.keeping = asyncio.create_task(self._keeper.keep(live), name=f"episodes of {live.id}")
        try:
            await asyncio.wait({live.keeping})
        finally:
            _interrupt(live)
            await asyncio.wait({live.keeping})
            kept = live.keeping
            live.keeping = None
        if not kept.cancelled():
            kept.result()


def _interrupt(live: ActiveSession) -> None:
    if live.keeping is not None:
        live.keeping.cancel()
