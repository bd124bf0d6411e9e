"""The repairs between two turns: with which signal, in which order, and what becomes of one that fails.

What is due follows from the committed state alone (`sessions.due_repairs`); here it is run, one repair after the
other, in the background (`resting.py`) or by a turn that waits for them.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from contextlib import suppress

from kvrecall.domain.codes import ErrorCode
from kvrecall.domain.errors import ServiceError, SessionBusy, StaleEpoch, WorkerLost, WorkerRefused
from kvrecall.domain.events import EventBus, RepairFailed, RepairFinished
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.messages import Message
from kvrecall.domain.repairs import DueRepair, due_repairs
from kvrecall.domain.session import Session
from kvrecall.domain.session_settings import RepairTrigger
from kvrecall.domain.state_machine import SessionEvent, SessionState
from kvrecall.protocol.convert import memory_from_wire, message_to_wire, repair_from_wire
from kvrecall.protocol.v1 import worker_pb2 as wire
from services.catalog.base import Catalog
from services.catalog.records import RepairCommit, RepairDetails
from services.cluster.worker_client import Worker
from services.session_manager import ActiveSession, SessionManager

# The signal itself is at fault: a second attempt would be refused again, here or after a restart.
FINAL_REFUSALS = frozenset(
    {ErrorCode.BAD_MESSAGES, ErrorCode.BAD_SETTINGS, ErrorCode.TURN_TOO_LONG}
)
MOST_SIGNAL_CHARACTERS = 500
"""Of a signal, that is kept for people to read."""


class RepairRunner:
    """Runs the repairs of paused sessions; its callers see to it that only one of them does so at a time."""

    def __init__(
        self,
        catalog: Catalog,
        worker: Worker,
        sessions: SessionManager,
        observers: EventBus,
        settings: ServiceLimits,
    ) -> None:
        self._catalog = catalog
        self._worker = worker
        self._sessions = sessions
        self._observers = observers
        self._settings = settings

    async def run_due(self, live: ActiveSession, patient: bool = False) -> None:
        """Run every repair that is due, until a turn has come that does not wait for them.

        Raises a ServiceError when the worker is not well.

        A `patient` caller gives up a repair that breaks a worker which is well otherwise (it opens the session again),
        so that it never stands between a client and its session.
        """
        try:
            await self._run_due(live)
        except WorkerLost:
            if not patient:
                raise
            await self._run_due(live, give_up=True)

    async def _run_due(self, live: ActiveSession, give_up: bool = False) -> None:
        session = await self._catalog.sessions.get(live.id)
        while not live.hurry.is_set() and (due := due_repairs(session)):
            if due[0].trigger is RepairTrigger.TOOL_RESULT and not live.turns_in_line:
                await self._let_a_turn_come(live)
            try:
                await self._run(live, session, due[0], give_up)
            except (StaleEpoch, SessionBusy):
                raise  # another process went on with the session
            except ServiceError as error:
                self._observers.publish(
                    RepairFailed(live.id, due[0].trigger, error.code, error.message, final=False)
                )
                raise
            session = await self._catalog.sessions.get(live.id)

    async def _let_a_turn_come(self, live: ActiveSession) -> None:
        """A moment after a result: who reports it and goes on at once should find no repair in the way."""
        with suppress(TimeoutError):
            await asyncio.wait_for(live.hurry.wait(), self._settings.result_delay_seconds)

    async def hurry(self, live: ActiveSession) -> None:
        """Have the repair that runs now end with what it has found so far; it does not wait for that end."""
        if live.state is SessionState.REPAIRING:
            # A worker that cannot be reached ends the repair as well.
            with suppress(ServiceError):
                await self._worker.hurry(wire.HurryRequest(session=live.id))

    async def _run(
        self, live: ActiveSession, session: Session, repair: DueRepair, give_up: bool
    ) -> None:
        request, signal = await self._request(session, repair)
        known = live.claim.epoch
        request.epoch = await self._sessions.ensure_open(live)
        if request.epoch != known and repair not in due_repairs(
            await self._catalog.sessions.get(live.id)
        ):
            return  # another process ran it before this one took the session over
        if live.hurry.is_set():
            return  # from here to the worker nothing is waited for: whoever hurries now finds the repair there
        live.advance(SessionEvent.REPAIR_STARTED)
        live.in_doubt = True
        try:
            commit = await self._ask(live, repair, request, signal, give_up)
            await self._catalog.repairs.commit(live.id, commit, request.epoch)
            live.in_doubt = commit.worker_state is None
        finally:
            paused = session.committed_state is SessionState.PAUSED
            live.advance(
                SessionEvent.REPAIR_ENDED_IN_PAUSE if paused else SessionEvent.REPAIR_ENDED_IN_IDLE
            )
        if commit.report is not None and commit.memory is not None:
            self._observers.publish(RepairFinished(live.id, commit.report, commit.memory))

    async def _request(self, session: Session, repair: DueRepair) -> tuple[wire.RepairRequest, str]:
        """What the worker is asked, and the signal as text."""
        request = wire.RepairRequest(
            session=session.id,
            trigger=repair.trigger.value,
            text=repair.text,
            messages=[message_to_wire(message) for message in repair.messages],
            seconds=session.settings.repair_seconds or 0.0,
        )
        if not repair.output:
            return request, repair.text or signal_text(repair.messages)
        (turn,) = await self._catalog.turns.get_after(session.id, session.turns - 1, 1)
        start = turn.outcome.prompt_tokens
        request.token_ids.extend(turn.token_ids[start : start + repair.output])
        return request, signal_text([] if turn.outcome.message is None else [turn.outcome.message])

    async def _ask(
        self,
        live: ActiveSession,
        repair: DueRepair,
        request: wire.RepairRequest,
        signal: str,
        give_up: bool,
    ) -> RepairCommit:
        def ask_under(epoch: int) -> Awaitable[wire.RepairResult]:
            request.epoch = epoch
            return self._worker.repair(request)

        try:
            result = await self._sessions.call_in(live, request.epoch, ask_under)
        except (WorkerRefused, WorkerLost) as error:
            if error.code not in FINAL_REFUSALS and not (give_up and isinstance(error, WorkerLost)):
                raise
            self._observers.publish(
                RepairFailed(live.id, repair.trigger, error.code, error.message, final=True)
            )
            return RepairCommit(repair)
        return RepairCommit(
            repair,
            result.state.SerializeToString(deterministic=True),
            repair_from_wire(result.report, in_pause=not live.turns_in_line),
            memory_from_wire(result.memory),
            repair_details(signal, result.report),
        )


def signal_text(messages: Sequence[Message]) -> str:
    """Messages that a repair is conditioned on, as a person reads them."""
    return "\n".join(
        " ".join([message.content, *(call.signal for call in message.tool_calls)])
        for message in messages
    )


def repair_details(signal: str, report: wire.RepairReport) -> RepairDetails:
    """What is kept of a repair beside its report."""
    return RepairDetails(signal[:MOST_SIGNAL_CHARACTERS], tuple(report.promoted))
