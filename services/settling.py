"""Computing the rows of answers' tokens again, as the full cache has them, in pauses.

The next turn would do it first thing, to the same bits. In a pause nobody waits for it.
"""

import asyncio

import structlog

from kvrecall.domain.errors import ServiceError, SessionBusy, StaleEpoch
from kvrecall.protocol.convert import memory_from_wire
from kvrecall.protocol.v1 import worker_pb2 as pb
from services.catalog.records import SettleCommit
from services.context import ServiceContext
from services.sessions.active import ActiveSession
from services.sessions.worker_states import pack_state

_log = structlog.get_logger("kvrecall.settling")
# The longest that a cancelled settling goes on to its commit.
_COMMIT_SECONDS = 2.0


class Settler:
    """Settles one session at a time. Callers ensure that nothing else runs in it."""

    def __init__(self, context: ServiceContext) -> None:
        self._catalog = context.catalog
        self._worker = context.worker
        self._sessions = context.sessions

    async def run(self, live: ActiveSession) -> None:
        """Settle the session and commit its rows. Raises a ServiceError.

        A cancellation waits for the commit, at most `_COMMIT_SECONDS`: a shared place keeps pages that
        no commit names until they expire, also those of a session that is deleted next.
        """
        live.unsettled = False
        settling = asyncio.ensure_future(self._settle(live))
        try:
            await asyncio.shield(settling)
        except asyncio.CancelledError:
            try:
                await asyncio.wait({settling}, timeout=_COMMIT_SECONDS)
            finally:
                settling.cancel()
            raise
        except (StaleEpoch, SessionBusy):
            raise  # another process went on with the session
        except ServiceError as error:
            _log.warning("not settled", session=live.id, reason=error.message)
            raise

    async def _settle(self, live: ActiveSession) -> None:
        request = pb.SettleRequest(session=live.id, epoch=await self._sessions.ensure_open(live))
        if live.stop_repairs.is_set():
            return

        async def ask_under(epoch: int) -> pb.SettleResult:
            request.epoch = epoch
            return await self._worker.settle(request)

        live.needs_reopen = True
        result = await self._sessions.call_reopening(live, request.epoch, ask_under)
        if result.settled_tokens:
            memory = memory_from_wire(result.memory, durable=result.durable)
            state, page_ids = pack_state(result.state)
            commit = SettleCommit(state, memory, page_ids)
            await self._catalog.turns.commit_settled(live.id, commit, request.epoch)
        live.needs_reopen = False
