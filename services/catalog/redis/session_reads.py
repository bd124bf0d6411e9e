"""Reads of single sessions in Redis, which share round trips."""

import asyncio
from dataclasses import dataclass

from kvrecall.domain.errors import CatalogError
from kvrecall.domain.session import Session
from services.catalog.redis.slot import SessionSlots


@dataclass(frozen=True)
class _Read:
    """A session's id, the tenant that it must be of, and the future of the session."""

    session_id: str
    tenant: str | None
    result: "asyncio.Future[Session | None]"


class SessionReads:
    """Reads of sessions; those that begin in one pass of the event loop take one round trip.

    On a cluster each takes its own: a slow server delays no other's sessions.
    """

    def __init__(self, slots: SessionSlots, one_server: bool) -> None:
        self._slots = slots
        self._one_server = one_server
        self._waiting: list[_Read] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def get(self, session_id: str, tenant: str | None = None) -> Session | None:
        """Return a session as last committed, None if there is none. Raises CatalogError.

        With a `tenant`, there is none of another tenant.
        """
        if not self._one_server:
            return (await self._slots.get_each([session_id], [tenant]))[0]
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._start)
        read = _Read(session_id, tenant, loop.create_future())
        self._waiting.append(read)
        return await read.result

    def _start(self) -> None:
        batch, self._waiting = self._waiting, []
        task = asyncio.create_task(self._read(batch), name="session reads")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _read(self, batch: list[_Read]) -> None:
        waiting = [read for read in batch if not read.result.done()]
        try:
            sessions = await self._slots.get_each(
                [read.session_id for read in waiting], [read.tenant for read in waiting]
            )
        except Exception as error:  # raised to everyone who asked
            for read in waiting:
                if not read.result.done():
                    read.result.set_exception(_copy(error))
        else:
            for read, session in zip(waiting, sessions, strict=True):
                if not read.result.done():
                    read.result.set_result(session)


def _copy(error: Exception) -> Exception:
    """An error of its own for each reader: a traceback grows wherever it is raised."""
    if isinstance(error, CatalogError):
        copy = CatalogError(error.message)
        copy.__cause__ = error
        return copy
    return error
