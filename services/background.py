"""Background work between turns: settling first, then pending repairs and prefill ahead, then maintenance.

One task per session does all. A turn waits for work that it would have to do itself: the settling, and the
running block of its prompt. It takes what the running repair has found so far and skips the repairs that
were due but not started, unless it asks to wait. Episode maintenance is interrupted at once by a turn or
a repair, and continues later from its last commit. So is that of a memory's passages.
"""

import asyncio
from contextlib import suppress

import structlog

from kvrecall.domain.errors import ServiceError
from kvrecall.telemetry.spans import current_span
from services.ahead import AheadPrefiller
from services.context import ServiceContext
from services.episodes import EpisodeMaintainer
from services.memories.indexer import PassageIndexer
from services.repairs.runner import RepairRunner
from services.sessions.active import ActiveSession
from services.settling import Settler


class BackgroundTasks:
    """Starts, interrupts and stops the background work of sessions."""

    def __init__(self, context: ServiceContext) -> None:
        self._sessions = context.sessions
        self._settler = Settler(context)
        self._repairs = RepairRunner(context)
        self._ahead = AheadPrefiller(context)
        self._maintainer = EpisodeMaintainer(context)
        self._indexer = PassageIndexer(context)

    def start_repairs(self, live: ActiveSession) -> None:
        """Run the repairs that are due, before anything else."""
        live.repairs_pending = True
        live.repairs_cause = current_span()
        _interrupt_maintenance(live)
        self._start(live)

    def prefill_ahead(self, live: ActiveSession) -> None:
        """Prefill what tools have said of the next prompt, behind the repairs that are due."""
        live.outputs_grown = True
        self._start(live)

    def resume(self, live: ActiveSession) -> None:
        """Continue after a turn, committed or not.

        Settling and the repairs that it left due, then maintenance.
        """
        due = live.unsettled or live.repairs_pending or live.has_episodes or live.remembers
        if due and not live.deleted:
            self._start(live)

    async def yield_to_turn(self, live: ActiveSession, wait: bool) -> None:
        """Make way for a turn: interrupt maintenance, and return when nothing else runs any more.

        The running repair stops early with what it has found so far, prefill ahead behind its block, and
        no other starts. With
        `wait` all that are due finish first, as they would without a turn. Raises a ServiceError
        when the worker is unhealthy, with `wait` only.
        """
        _interrupt_maintenance(live)
        try:
            if not wait:
                live.stop_repairs.set()
                await self._repairs.stop_early(live)
                with suppress(ServiceError):  # a worker that cannot be reached ends it as well
                    await self._ahead.stop_early(live)
            if live.background is not None and not live.background.done():
                await asyncio.wait({live.background})
            if wait:
                await self._repairs.run_due(live, patient=True)
        finally:
            live.stop_repairs.clear()
            # Until the turn is committed: what it skips stays due if it fails.
            live.repairs_pending = True

    async def cancel(self, live: ActiveSession) -> None:
        """Stop the session's background work; what is due stays due."""
        task = live.background
        live.background = None
        live.repairs_pending = False
        live.unsettled = False
        live.outputs_grown = False
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    async def stop(self) -> None:
        """Stop all background work."""
        await asyncio.gather(*map(self.cancel, self._sessions.all()))

    def _start(self, live: ActiveSession) -> None:
        if live.background is None or live.background.done():
            live.background = asyncio.create_task(self._run(live), name=f"background {live.id}")

    async def _run(self, live: ActiveSession) -> None:
        structlog.contextvars.bind_contextvars(session=live.id)  # in this task alone
        while True:
            try:
                if live.unsettled:
                    await self._settler.run(live)
                if live.repairs_pending:
                    live.repairs_pending = False
                    await self._repairs.run_due(live)
                if live.outputs_grown:
                    await self._ahead.run(live)
            except ServiceError:
                return  # told where it happened; still due, and tried again at the next event
            await self._maintain(live)
            if not (live.repairs_pending or live.outputs_grown):
                return

    async def _maintain(self, live: ActiveSession) -> None:
        """Maintain the episodes, or the passages of a memory, until done or interrupted.

        Not at all while a turn runs or waits. A session with a memory has no episodes.
        """
        if live.queued_turns or live.repairs_pending:
            return
        if not (live.has_episodes or live.remembers):
            return
        run = self._indexer.run if live.remembers else self._maintainer.run
        live.maintenance = asyncio.create_task(run(live), name=f"maintenance {live.id}")
        try:
            await asyncio.wait({live.maintenance})
        finally:
            _interrupt_maintenance(live)
            await asyncio.wait({live.maintenance})
            ended = live.maintenance
            live.maintenance = None
        if not ended.cancelled():
            ended.result()


def _interrupt_maintenance(live: ActiveSession) -> None:
    if live.maintenance is not None:
        live.maintenance.cancel()
