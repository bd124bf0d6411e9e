"""The repairs of a pause: with which signal, in which order, and what becomes of one that fails.

What is due follows from the committed state alone (`sessions.due_repairs`); here it is run, one repair after the
other, in the background (`resting.py`) or by the turn that ends the pause.
"""

from kvrecall.v1 import worker_pb2 as wire
from services.catalog import Catalog, RepairCommit
from services.errors import ServiceError, WorkerLost, WorkerRefused
from services.live import LiveSession, LiveSessions
from services.messages import message_to_wire
from services.observing import Observers, RepairFailed, RepairFinished
from services.reports import memory_from_wire, repair_from_wire
from services.sessions import DueRepair, SessionEvent, due_repairs
from services.worker_client import Worker

# The signal itself is at fault: a second attempt would be refused again, here or after a restart.
FINAL_REFUSALS = frozenset({"bad_messages", "bad_settings", "turn_too_long"})


class Pauses:
    """Runs the repairs of paused sessions; its callers see to it that only one of them does so at a time."""

    def __init__(self, catalog: Catalog, worker: Worker, sessions: LiveSessions, observers: Observers) -> None:
        self._catalog = catalog
        self._worker = worker
        self._sessions = sessions
        self._observers = observers

    async def run_due(self, live: LiveSession, patient: bool = False) -> None:
        """Run every repair that is due. Raises a ServiceError when the worker is not well.

        A `patient` caller gives up a repair that breaks a worker which is well otherwise (it opens the session again),
        so that it never stands between a client and its session.
        """
        try:
            await self._run_due(live)
        except WorkerLost:
            if not patient:
                raise
            await self._run_due(live, give_up=True)

    async def _run_due(self, live: LiveSession, give_up: bool = False) -> None:
        while due := due_repairs(await self._catalog.session(live.id)):
            try:
                await self._run(live, due[0], give_up)
            except ServiceError as error:
                self._observers.tell(RepairFailed(live.id, due[0].trigger, error.code, error.message, final=False))
                raise

    async def _run(self, live: LiveSession, repair: DueRepair, give_up: bool) -> None:
        epoch = await self._sessions.ensure_open(live)
        live.advance(SessionEvent.REPAIR_STARTED)
        live.in_doubt = True
        try:
            commit = await self._ask(live, repair, epoch, give_up)
            await self._catalog.commit_repair(live.id, commit, epoch)
            live.in_doubt = commit.worker_state is None
        finally:
            live.advance(SessionEvent.REPAIR_ENDED)
        if commit.report is not None and commit.memory is not None:
            self._observers.tell(RepairFinished(live.id, commit.report, commit.memory))

    async def _ask(self, live: LiveSession, repair: DueRepair, epoch: int, give_up: bool) -> RepairCommit:
        request = wire.RepairRequest(
            session=live.id,
            epoch=epoch,
            trigger=repair.trigger.value,
            text=repair.text,
            messages=[message_to_wire(message) for message in repair.messages],
        )
        try:
            result = await self._worker.repair(request)
        except (WorkerRefused, WorkerLost) as error:
            if error.code not in FINAL_REFUSALS and not (give_up and isinstance(error, WorkerLost)):
                raise
            self._observers.tell(RepairFailed(live.id, repair.trigger, error.code, error.message, final=True))
            return RepairCommit(repair)
        state = result.state.SerializeToString(deterministic=True)
        return RepairCommit(repair, state, repair_from_wire(result.report), memory_from_wire(result.memory))
