"""Repairs between two turns.

What is due follows from the committed state alone (`kvrecall.domain.repairs.due_repairs`). The
repairs run one after the other, in the background (`services/background.py`) or for a turn that
waits for them.
"""

import asyncio
import time
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import replace

from kvrecall.domain.codes import ErrorCode
from kvrecall.domain.errors import ServiceError, SessionBusy, StaleEpoch, WorkerLost, WorkerRefused
from kvrecall.domain.events import RepairBegan, RepairFailed, RepairFinished
from kvrecall.domain.messages import Message
from kvrecall.domain.repairs import SIGNAL_CHARACTERS, DueRepair, due_repairs, get_call_id
from kvrecall.domain.sessions.session import Session
from kvrecall.domain.sessions.state_machine import SessionEvent, SessionState
from kvrecall.domain.settings.session import RepairTrigger
from kvrecall.protocol.convert import memory_from_wire, message_to_wire, repair_from_wire
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall.telemetry.spans import under
from services.catalog.base import PIECES_AT_ONCE, Catalog
from services.catalog.records import RepairCommit, RepairDetails
from services.context import ServiceContext
from services.sessions.active import ActiveSession
from services.sessions.turn_log import get_turn
from services.sessions.worker_states import pack_state

# The signal itself is at fault: a second attempt would be refused again, here or after a restart.
FINAL_REFUSALS = frozenset(
    {ErrorCode.BAD_MESSAGES, ErrorCode.BAD_SETTINGS, ErrorCode.TURN_TOO_LONG}
)
# The repair broke its worker, or an error in the worker broke the repair: again, it may not.
_BROKEN = frozenset({ErrorCode.WORKER_LOST, ErrorCode.WORKER_ERROR})
# Characters of a signal that are kept for the repair history.
MAX_SIGNAL_CHARACTERS = 500


class RepairRunner:
    """Runs the repairs of one session at a time.

    Callers ensure that no two run in the same session.
    """

    def __init__(self, context: ServiceContext) -> None:
        self._catalog = context.catalog
        self._worker = context.worker
        self._sessions = context.sessions
        self._events = context.events
        self._limits = context.limits

    async def run_due(self, live: ActiveSession, patient: bool = False) -> None:
        """Run every repair that is due, until a turn arrives that does not wait for them.

        A `patient` caller abandons a repair that breaks, or breaks an otherwise healthy worker (one
        that opens the session again), so that no repair can lock a client out of its session. Raises a
        ServiceError when the worker is unhealthy.
        """
        try:
            await self._run_due(live)
        except (WorkerLost, WorkerRefused) as error:
            if not patient or error.code not in _BROKEN:
                raise
            await self._run_due(live, abandon_broken=True)

    async def _run_due(self, live: ActiveSession, abandon_broken: bool = False) -> None:
        session = await self._catalog.sessions.get(live.id)
        while not live.stop_repairs.is_set() and (due := due_repairs(session)):
            if due[0].trigger is RepairTrigger.TOOL_RESULT and not live.queued_turns:
                await self._wait_for_a_turn(live)
            try:
                with under(live.repairs_cause.follow(f"repair {due[0].trigger}")):
                    await self._run(live, session, due[0], abandon_broken)
            except (StaleEpoch, SessionBusy):
                raise  # another process went on with the session
            except ServiceError as error:
                self._events.publish(
                    RepairFailed(live.id, due[0].trigger, error.code, error.message, final=False)
                )
                raise
            session = await self._catalog.sessions.get(live.id)

    async def _wait_for_a_turn(self, live: ActiveSession) -> None:
        """Wait a moment after a result: a client that continues at once should meet no repair."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._limits.result_delay_seconds):
                await live.stop_repairs.wait()

    async def stop_early(self, live: ActiveSession) -> None:
        """Ask the running repair to end with what it has found so far; do not wait for the end."""
        if live.state is SessionState.REPAIRING:
            # A worker that cannot be reached ends the repair as well.
            with suppress(ServiceError):
                await self._worker.stop_early(pb.StopEarlyRequest(session=live.id))

    async def _run(
        self, live: ActiveSession, session: Session, repair: DueRepair, abandon_broken: bool
    ) -> None:
        request, signal = await self._request(session, repair)
        known = live.claim.epoch
        request.epoch = await self._sessions.ensure_open(live)
        if request.epoch != known and repair not in due_repairs(
            await self._catalog.sessions.get(live.id)
        ):
            return  # another process ran it before this one took the session over
        if live.stop_repairs.is_set():
            return  # nothing is awaited from here to the worker: a later stop request finds the repair there
        live.advance(SessionEvent.REPAIR_STARTED)
        live.needs_reopen = True
        call, started_at = get_call_id(session, repair), time.time()
        self._events.publish(RepairBegan(live.id, repair.trigger, call))
        try:
            commit = await self._call_worker(live, repair, request, signal, abandon_broken)
            commit = _complete(commit, session, call, started_at)
            await self._catalog.repairs.commit(live.id, commit, request.epoch)
            live.needs_reopen = commit.worker_state is None
        finally:
            paused = session.committed_state is SessionState.PAUSED
            live.advance(
                SessionEvent.REPAIR_ENDED_IN_PAUSE if paused else SessionEvent.REPAIR_ENDED_IN_IDLE
            )
        if commit.report is not None and commit.memory is not None:
            live.repair_ended = time.monotonic()
            self._events.publish(RepairFinished(live.id, commit.report, commit.memory))

    async def _request(self, session: Session, repair: DueRepair) -> tuple[pb.RepairRequest, str]:
        """Build the worker's request, and the signal as text."""
        text = repair.text
        if repair.reach:
            text = await read_signal(self._catalog, session, repair)
        request = pb.RepairRequest(
            session=session.id,
            trigger=repair.trigger.value,
            text=text,
            messages=[message_to_wire(message) for message in repair.messages],
        )
        if not repair.output:
            return request, text or signal_text(repair.messages)
        turn = await get_turn(self._catalog.turns, session.id, session.turns)
        start = turn.outcome.prompt_tokens
        request.token_ids.extend(turn.token_ids[start : start + repair.output])
        return request, signal_text([] if turn.outcome.message is None else [turn.outcome.message])

    async def _call_worker(
        self,
        live: ActiveSession,
        repair: DueRepair,
        request: pb.RepairRequest,
        signal: str,
        abandon_broken: bool,
    ) -> RepairCommit:
        def ask_under(epoch: int) -> Awaitable[pb.RepairResult]:
            request.epoch = epoch
            return self._worker.repair(request)

        try:
            result = await self._sessions.call_reopening(live, request.epoch, ask_under)
        except (WorkerRefused, WorkerLost) as error:
            if error.code not in FINAL_REFUSALS | (_BROKEN if abandon_broken else set()):
                raise
            self._events.publish(
                RepairFailed(live.id, repair.trigger, error.code, error.message, final=True)
            )
            return RepairCommit(repair)
        return RepairCommit(
            repair,
            pack_state(result.state)[0],
            repair_from_wire(result.report, in_pause=not live.queued_turns),
            memory_from_wire(result.memory),
            repair_details(signal, result.report),
        )


def _complete(commit: RepairCommit, session: Session, call: str, started_at: float) -> RepairCommit:
    """Add what the worker does not know: when the repair began, for which call, and durability.

    A repair computes no rows, so the session is as durable as after its last turn.
    """
    if commit.report is None or commit.memory is None:
        return commit
    return replace(
        commit,
        report=replace(commit.report, call_id=call, started_at=started_at),
        memory=replace(commit.memory, durable=session.memory.durable),
    )


def signal_text(messages: Sequence[Message]) -> str:
    """Format the messages that a repair is conditioned on for people to read."""
    return "\n".join(
        " ".join([message.content, *(call.signal for call in message.tool_calls)])
        for message in messages
    )


def repair_details(signal: str, report: pb.RepairReport) -> RepairDetails:
    """Build the details that are kept of a repair beside its report."""
    return RepairDetails(signal[:MAX_SIGNAL_CHARACTERS], tuple(report.promoted))


async def read_signal(catalog: Catalog, session: Session, repair: DueRepair) -> str:
    """Read the output that a repair is conditioned on: its end, of at most SIGNAL_CHARACTERS."""
    planned = next(call for call in session.calls if call.position == repair.position)
    call = await catalog.tool_calls.get(session.id, planned.call.id)
    # Characters of the joined pieces that the repair does not take into account.
    after = call.delta_due + call.output.recent_characters - repair.reach
    text, first = "", call.output.joined
    while first and len(text) < after + SIGNAL_CHARACTERS:
        count = min(first, PIECES_AT_ONCE)
        first -= count
        text = "".join(await catalog.tool_calls.get_pieces(session.id, call, first, count)) + text
    return text[: len(text) - after][-SIGNAL_CHARACTERS:]
