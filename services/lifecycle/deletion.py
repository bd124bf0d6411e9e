"""Deletion of sessions: asked for, expired, or in the way of a tenant's new ones."""

import asyncio
from contextlib import suppress

from kvrecall.domain.errors import DataKeyDeleted, ServiceError
from kvrecall.domain.events import SessionDeleted
from kvrecall.domain.sessions.session import Session
from kvrecall.protocol.v1 import worker_pb2 as pb
from services.background import BackgroundTasks
from services.cancellation import run_to_completion
from services.catalog.records import IdempotencyKey, IdempotencyRecord
from services.context import ServiceContext
from services.pages.collector import PageCollector
from services.sessions.active import ActiveSession

SWEEP_SECONDS = 60.0
# The longest that a deletion waits for the workers; they release idle sessions by themselves.
_RELEASE_SECONDS = 2.0
# Sessions that one query of a sweep returns, and that make room for a new one at once.
_SWEPT_AT_ONCE = 100
_ROOM_AT_ONCE = 8


class SessionDeleter:
    """Deletes sessions that no turn is running in."""

    def __init__(
        self, context: ServiceContext, background: BackgroundTasks, collector: PageCollector
    ) -> None:
        self._context = context
        self._background = background
        self._collector = collector

    async def delete(
        self, session_id: str, key: IdempotencyKey | None = None, tenant: str | None = None
    ) -> None:
        """Delete a session and its rows.

        With a `tenant`, another tenant's session is unknown. Raises UnknownSession, and SessionBusy
        while a turn runs.
        """
        catalog = self._context.catalog
        if key is not None and await catalog.idempotency.get(key) is not None:
            return
        record = None if key is None else IdempotencyRecord(key, "{}")
        try:
            session = await catalog.sessions.get(session_id, tenant)
        except DataKeyDeleted:  # no turn of it can run
            await catalog.sessions.delete(session_id, record)
            self._collector.wake()
            return
        live = self._context.sessions.activate(session)
        async with self._context.sessions.claim_turn(live, wait=False):
            await run_to_completion(self._delete(live, record))

    async def delete_unused(self, session: Session) -> bool:
        """Delete a session unless a turn followed or it is busy; return whether it was deleted."""
        catalog = self._context.catalog
        live = self._context.sessions.activate(session)
        try:
            async with self._context.sessions.claim_turn(live, wait=False):
                if (await catalog.sessions.get(session.id)).turns != session.turns:
                    return False
                await run_to_completion(self._delete(live, None))
        except ServiceError:
            return False
        return True

    async def _delete(self, live: ActiveSession, record: IdempotencyRecord | None) -> None:
        await self._background.cancel(live)
        await self._context.catalog.sessions.delete(live.id, record)
        self._context.sessions.remove(live)
        self._context.events.publish(SessionDeleted(live.id, live.tenant))
        with suppress(ServiceError, TimeoutError):
            async with asyncio.timeout(_RELEASE_SECONDS):
                await self._context.worker.delete(pb.DeleteRequest(session=live.id))
        self._collector.wake()


class Retention:
    """One task that deletes expired sessions, and room for tenants that are over their quota."""

    def __init__(self, context: ServiceContext, deleter: SessionDeleter) -> None:
        self._catalog = context.catalog
        self._deleter = deleter
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start sweeping."""
        self._task = asyncio.create_task(self._watch(), name="retention")

    async def stop(self) -> None:
        """Stop sweeping; a deletion that has begun is finished."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def sweep(self) -> None:
        """Delete what has expired. What cannot be deleted now is tried again next time."""
        with suppress(ServiceError):
            while True:
                expired = await self._catalog.expiry.get_expired(_SWEPT_AT_ONCE)
                deleted = [await self._deleter.delete_unused(session) for session in expired]
                if len(expired) < _SWEPT_AT_ONCE or not any(deleted):
                    return

    async def make_room(self, tenant: str, keep: str) -> bool:
        """Delete the tenant's matched sessions that expire next; return whether there was one.

        Their clients know of no session and delete none. `keep` is left alone, and so are
        sessions of stored responses, which clients may delete, and those without a turn of their own:
        another request has just created them, and goes on there.
        """
        made = False
        for session in await self._catalog.expiry.get_next(tenant, _ROOM_AT_ONCE):
            settings = session.settings
            is_free = settings.matched and not settings.stored and _has_own_turn(session)
            if is_free and session.id != keep:
                made |= await self._deleter.delete_unused(session)
        return made

    async def _watch(self) -> None:
        while True:
            await self.sweep()
            await asyncio.sleep(SWEEP_SECONDS)


def _has_own_turn(session: Session) -> bool:
    origin = session.settings.forked_from
    return session.turns > (0 if origin is None else origin.turn)
