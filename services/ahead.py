"""Prefill ahead: in a pause the next prompt is computed as far as its tools have said it.

Results that were reported, and what a tool has put out so far, are the next turn's first messages, in the
order of the calls. The worker keeps their rows uncommitted: a turn that begins with these messages goes on
behind them, any other one has the session opened again.
"""

import structlog

from kvrecall.domain.errors import ServiceError, SessionBusy, StaleEpoch
from kvrecall.domain.messages import Message
from kvrecall.domain.sessions.session import Session
from kvrecall.domain.tool_calls import PendingCall
from kvrecall.protocol.convert import message_to_wire
from kvrecall.protocol.v1 import worker_pb2 as pb
from services.catalog.base import PIECES_AT_ONCE
from services.context import ServiceContext
from services.sessions.active import ActiveSession

_log = structlog.get_logger("kvrecall.ahead")

# Text that is worth a call of the worker: about a block of tokens, and not each piece of a long output.
_LEAST_BYTES = 1024
_LEAST_GROWTH = 0.125


class AheadPrefiller:
    """Prefills one session's next prompt at a time. Callers ensure that nothing else runs in it."""

    def __init__(self, context: ServiceContext) -> None:
        self._catalog = context.catalog
        self._worker = context.worker
        self._sessions = context.sessions

    async def run(self, live: ActiveSession) -> None:
        """Prefill what has become known since the last time, if it is much. Raises a ServiceError.

        Sessions with repairs or episodes do not: these change what is active before the turn. Nor do those
        with a memory: what it brings back comes first.
        """
        live.outputs_grown = False
        if live.stop_repairs.is_set():
            return
        session = await self._catalog.sessions.get(live.id)
        settings = session.settings
        if settings.repair_rows or settings.episodes is not None or settings.remember:
            return
        turn, before = live.prefilled_ahead
        before = before if turn == session.turns else 0
        known = sum(map(_count_bytes, _list_known(session)))
        if known - before < max(_LEAST_BYTES, _LEAST_GROWTH * before):
            return
        live.prefilled_ahead = session.turns, known
        messages = [await self._read(session.id, call) for call in _list_known(session)]
        try:
            await self._prefill(live, messages)
        except (StaleEpoch, SessionBusy):
            raise  # another process went on with the session
        except ServiceError as error:
            _log.info("not prefilled ahead", session=live.id, reason=error.message)
            raise

    async def stop_early(self, live: ActiveSession) -> None:
        """Ask the worker to end behind the running block; do not wait for the end."""
        if live.prefills_ahead:
            await self._worker.stop_early(pb.StopEarlyRequest(session=live.id))

    async def _prefill(self, live: ActiveSession, messages: list[Message]) -> None:
        request = pb.PrefillAheadRequest(
            session=live.id,
            messages=[message_to_wire(message) for message in messages],
            epoch=await self._sessions.ensure_open(live),
        )

        async def ask_under(epoch: int) -> pb.PrefillAheadResult:
            request.epoch = epoch
            return await self._worker.prefill_ahead(request)

        if live.stop_repairs.is_set():
            return  # nothing is awaited from here to the worker: a later stop request finds the job there
        live.prefills_ahead = True
        try:
            found = await self._sessions.call_reopening(live, request.epoch, ask_under)
            _log.debug("prefilled ahead", session=live.id, tokens=found.prompt_tokens)
        finally:
            live.prefills_ahead = False

    async def _read(self, session: str, call: PendingCall) -> Message:
        """Read a call's result, or what its tool has put out so far."""
        if call.result is not None:
            return call.result_message()
        text = ""
        for first in range(0, call.output.joined, PIECES_AT_ONCE):
            count = min(PIECES_AT_ONCE, call.output.joined - first)
            text += "".join(await self._catalog.tool_calls.get_pieces(session, call, first, count))
        return Message("tool", text, tool_call_id=call.call.id, name=call.call.name)


def _list_known(session: Session) -> list[PendingCall]:
    """List the calls whose messages begin the next turn: those with results, and the one after them."""
    known = []
    for call in session.calls:
        if call.consumed_in_turn is not None:
            continue
        known.append(call)
        if call.result is None:
            break
    return known


def _count_bytes(call: PendingCall) -> int:
    """Count the bytes of a call's result or output."""
    return call.output.size if call.result is None else len(call.result.encode())
