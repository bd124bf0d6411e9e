"""Reports of clients on their tool calls: recorded, acknowledged, and followed by repairs."""

import time
from collections.abc import Mapping

from pydantic import TypeAdapter

from kvrecall.domain.events import CallReported, ToolCallEnded
from kvrecall.domain.repairs import due_repairs
from kvrecall.domain.tool_calls import CallStatus, PendingCall
from kvrecall.domain.tool_events import (
    NO_PIECES,
    EventReceipt,
    ToolEvent,
    ToolEventType,
    apply_event,
    get_piece_index,
    is_late,
    receipt,
)
from services.background import BackgroundTasks
from services.catalog.base import PIECES_AT_ONCE, Catalog
from services.catalog.records import IdempotencyKey, IdempotencyRecord
from services.context import ServiceContext
from services.sessions.active import ActiveSession

_RECEIPT = TypeAdapter(EventReceipt)


class ToolReports:
    """Records tool events of sessions that the caller holds exclusively."""

    def __init__(self, context: ServiceContext, background: BackgroundTasks) -> None:
        self._catalog = context.catalog
        self._sessions = context.sessions
        self._events = context.events
        self._limits = context.limits
        self._quotas = context.quotas
        self._background = background

    async def find(self, key: IdempotencyKey | None) -> EventReceipt | None:
        """Return the receipt that is recorded under the key."""
        record = None if key is None else await self._catalog.idempotency.get(key)
        return None if record is None else _RECEIPT.validate_json(record)

    async def record(
        self, live: ActiveSession, event: ToolEvent, key: IdempotencyKey | None
    ) -> EventReceipt:
        """Record an event and start the repair that it calls for.

        Raises as `apply_event`, and QuotaExceeded.
        """
        session = await self._catalog.sessions.get(live.id)
        call = await self._catalog.tool_calls.get(live.id, event.call_id)
        stored = await _read_stored_pieces(self._catalog, live.id, call, event)
        changed = apply_event(session, call, event, self._limits, stored)
        late = is_late(call, event)
        acknowledged = receipt(session, changed, event, live.state, late=late)
        if changed is not call or key is not None:
            record = None
            if key is not None:
                record = IdempotencyRecord(key, _RECEIPT.dump_json(acknowledged).decode())
            grown = changed.output.pieces > call.output.pieces
            piece = (get_piece_index(call, event), event.text) if grown else None
            epoch = await self._sessions.epoch(live)
            await self._quotas.keep_within(
                session.settings.tenant,
                lambda limits: self._catalog.tool_calls.commit(
                    live.id, changed, epoch, record, piece, limits
                ),
                keep=live.id,
            )
        if changed is not call or late:
            self._events.publish(
                CallReported(live.id, call.call.id, event.type, changed.status, late)
            )
        self._publish_end(live, call, changed, event)
        if due_repairs(await self._catalog.sessions.get(live.id)):
            self._background.start_repairs(live)
        elif changed is not call and event.text:
            self._background.prefill_ahead(live)
        return acknowledged

    def _publish_end(
        self, live: ActiveSession, call: PendingCall, changed: PendingCall, event: ToolEvent
    ) -> None:
        """Publish the end of a call with its result.

        Its beginning is known to the process that was told of it; another one takes the call's last
        event.
        """
        now = time.time()
        if event.type is ToolEventType.STARTED:
            live.started_calls.setdefault(event.call_id, now)
        if call.result is None and changed.result is not None:
            began = live.started_calls.pop(event.call_id, call.last_event_at)
            failed = changed.status is CallStatus.FAILED
            name = call.call.name
            self._events.publish(
                ToolCallEnded(live.id, event.call_id, name, min(began, now), now, failed)
            )


async def _read_stored_pieces(
    catalog: Catalog, session_id: str, call: PendingCall, event: ToolEvent
) -> Mapping[int, str]:
    """Read the pieces that `apply_event` compares a delta with, or joins with it."""
    at = get_piece_index(call, event)
    if event.type is not ToolEventType.DELTA or at >= call.output.next_index:
        return NO_PIECES
    if at != call.output.joined:
        return dict(enumerate(await catalog.tool_calls.get_pieces(session_id, call, at, 1), at))
    following: list[str] = []
    while True:
        first = at + 1 + len(following)
        some = await catalog.tool_calls.get_pieces(session_id, call, first, PIECES_AT_ONCE)
        following += some
        if len(some) < PIECES_AT_ONCE:
            return dict(enumerate(following, at + 1))
