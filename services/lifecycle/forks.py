"""Forks: new sessions that begin at the end of a turn of another session, with the same pages.

A fork is a copy of the log up to there, and the pages that its parent had then. Neither session knows
of the other from then on.
"""

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import structlog

from kvrecall.domain.errors import ServiceError, SessionBusy, UnknownSession, UnknownTurn
from kvrecall.domain.events import SessionForked
from kvrecall.domain.repairs import due_repairs
from kvrecall.domain.sessions.session import Session, Turn
from kvrecall.domain.settings.session import ForkOrigin
from kvrecall.domain.tool_calls import PendingCall
from kvrecall.protocol.convert import memory_from_wire
from kvrecall.protocol.v1 import worker_pb2 as pb
from services.access.shares import get_share
from services.background import BackgroundTasks
from services.cancellation import run_to_completion
from services.catalog.records import REPAIRS_RETAINED, ForkCommit, IdempotencyKey
from services.context import ServiceContext
from services.lifecycle.creation import build_record, create_once, find_created
from services.sessions.active import ActiveSession
from services.sessions.specs import build_spec
from services.sessions.turn_log import get_turn, logged_turns
from services.sessions.worker_states import pack_state, read_state, unpack_kept

_log = structlog.get_logger("kvrecall.forks")


@dataclass(frozen=True)
class ForkRequest:
    """A request for a fork at the end of `turn` (None: the last one), with metadata of its own.

    `queue`: wait (for a bounded time) while a turn of the parent runs. `branch`: its next turn is one
    of several answers to one request.
    """

    turn: int | None = None
    metadata: Mapping[str, str] | None = None
    queue: bool = False
    branch: bool = False


class ForkRunner:
    """Creates forks.

    Where the worker's state at the end of the turn is known, as it is for the last turns, nothing is
    computed; up to another the worker replays the log.

    A child keeps its parent's settings, seed included: to the same request it gives its parent's
    answer.
    """

    def __init__(self, context: ServiceContext, background: BackgroundTasks) -> None:
        self._catalog = context.catalog
        self._worker = context.worker
        self._sessions = context.sessions
        self._events = context.events
        self._admission = context.admission
        self._quotas = context.quotas
        self._limits = context.limits
        self._background = background

    async def fork(
        self,
        parent: str,
        request: ForkRequest,
        key: IdempotencyKey | None,
        tenant: str | None = None,
    ) -> Session:
        """Create a fork.

        At a turn that is named and whose state is known no running turn is waited for: the fork is
        the session as that turn was committed, without repairs since. With a `tenant`, another
        tenant's session is unknown. Raises UnknownSession, UnknownTurn, SessionBusy,
        QuotaExceeded, WorkerRefused, WorkerLost.
        """
        live = self._sessions.activate(await self._catalog.sessions.get(parent, tenant))
        return await create_once(self._catalog, key, lambda: self._fork_now(live, request, key))

    async def _fork_now(
        self, live: ActiveSession, request: ForkRequest, key: IdempotencyKey | None
    ) -> Session:
        """Fork, if it can be beside a turn that runs; with `queue` wait for that if it cannot."""
        try:
            return await self._fork_claimed(live, request, key, wait=False)
        except SessionBusy:
            child = await self._fork_beside(live, request, key)
            if child is not None:
                return child
            if not request.queue:
                raise
        return await self._fork_claimed(live, request, key, wait=True)

    async def _fork_claimed(
        self, live: ActiveSession, request: ForkRequest, key: IdempotencyKey | None, *, wait: bool
    ) -> Session:
        try:
            async with self._sessions.claim_turn(live, wait):
                if (created := await find_created(self._catalog, key)) is not None:
                    return created
                await self._check(live.id, request)
                await self._background.yield_to_turn(live, wait=False)
                await self._sessions.epoch(live)  # no process writes the parent from here on
                return await self._fork(live, request, key)
        finally:
            self._background.resume(live)

    async def _fork_beside(
        self, live: ActiveSession, request: ForkRequest, key: IdempotencyKey | None
    ) -> Session | None:
        """Fork beside a turn that runs, which changes nothing of what was committed before it.

        Returns None where no turn is named, so that the running one is to be the last, and for one
        without a kept state.
        """
        if request.turn is None:
            return None
        if (created := await find_created(self._catalog, key)) is not None:
            return created
        started = time.monotonic()
        parent = await self._catalog.sessions.get(live.id)
        turn = _fork_turn(parent, request)
        await self._check(live.id, request)
        begins, state = await self._restore_committed(parent, turn)
        if state is None:
            return None
        child = _child(parent, request, turn, begins)
        child = await run_to_completion(self._commit_and_open(child, state, key))
        self._report(parent, child, started)
        return child

    async def _check(self, parent: str, request: ForkRequest) -> None:
        """Refuse an invalid fork before a repair is interrupted for it."""
        session = await self._catalog.sessions.get(parent)
        turn = _fork_turn(session, request)
        at_end = await get_turn(self._catalog.turns, parent, turn)
        self._quotas.check_metadata(request.metadata)
        await self._quotas.check_new_session(
            session.settings.tenant, max(1, at_end.outcome.memory.length), keep=parent
        )

    async def _fork(
        self, live: ActiveSession, request: ForkRequest, key: IdempotencyKey | None
    ) -> Session:
        started = time.monotonic()
        parent = await self._catalog.sessions.get(live.id)
        turn = _fork_turn(parent, request)
        begins, state = await self._restore(parent, turn)
        child = _child(parent, request, turn, begins)
        if state is None:
            child = await self._fork_replaying(parent, child, key)
        else:
            child = await run_to_completion(self._commit_and_open(child, state, key))
        self._report(parent, child, started)
        return child

    def _report(self, parent: Session, child: Session, started: float) -> None:
        at: Literal["last", "earlier"] = "last" if child.turns == parent.turns else "earlier"
        self._events.publish(SessionForked(parent.id, child.id, at, time.monotonic() - started))

    async def _restore(
        self, parent: Session, number: int
    ) -> tuple[Session, pb.SessionState | None]:
        """Return the parent as it was at the end of a turn, and its worker state if it is known."""
        if number == parent.turns:
            return parent, await read_state(self._catalog, parent.id)
        return await self._restore_committed(parent, number)

    async def _restore_committed(
        self, parent: Session, number: int
    ) -> tuple[Session, pb.SessionState | None]:
        """Return the parent as a turn committed it, and its worker state if it was kept."""
        turn = await get_turn(self._catalog.turns, parent.id, number)
        return _at_earlier_turn(parent, turn), await self._find_state(parent, number)

    async def _find_state(self, parent: Session, number: int) -> pb.SessionState | None:
        """Return the worker state that a turn's commit kept, without the active episode.

        A fork has those of its own turns; of the turns before them its parent has them.
        """
        session = parent
        while (origin := session.settings.forked_from) is not None and number <= origin.turn:
            try:
                session = await self._catalog.sessions.get(origin.session)
            except UnknownSession:
                return None
        kept = await self._catalog.turns.get_state(session.id, number)
        if kept is None:
            return None
        state = unpack_kept(kept, await self._catalog.sessions.get_page_ids(parent.id))
        if state is not None:
            for field in ("episode", "patched_prompt", "segments"):
                state.ClearField(field)
        return state

    async def _commit_and_open(
        self, child: Session, state: pb.SessionState, key: IdempotencyKey | None
    ) -> Session:
        """Fork in the catalog, then open the child in a worker, in its parent's if it can.

        With the commit the child exists. A worker that fails after it, or a gateway that is killed,
        leaves a session that its next use opens.
        """
        child = self._place(child)
        await self._commit(_build_commit(child, state), key)
        try:
            spec = await self._build_spec(child)
            await self._worker.open(pb.OpenRequest(spec=spec, state=state))
        except ServiceError as error:
            self._worker.forget(child.id)
            _log.warning("fork not opened", session=child.id, reason=error.message)
        else:
            self._sessions.add_created(child)
        self._start_repairs(child)
        return child

    def _place(self, child: Session) -> Session:
        """Choose the child's worker: its parent's, which has its pages at hand. Raises WorkerLost."""
        return replace(child, worker=self._worker.choose_worker(child.id, child.worker))

    async def _commit(self, commit: ForkCommit, key: IdempotencyKey | None) -> None:
        """Fork in the catalog. Raises UnknownSession, UnknownTurn, QuotaExceeded."""
        record = build_record(key, commit.session)
        await self._quotas.keep_within(
            commit.session.settings.tenant,
            lambda limits: self._catalog.sessions.fork(commit, record, limits),
            keep=commit.parent,
        )

    async def _fork_replaying(
        self, parent: Session, child: Session, key: IdempotencyKey | None
    ) -> Session:
        turns = await self._catalog.turns.get_after(parent.id, 0, child.turns)
        log = logged_turns(
            turns, await self._catalog.repairs.get_latest(parent.id, REPAIRS_RETAINED)
        )
        share = get_share(self._limits, parent.settings.tenant, child.id)
        async with self._admission.slot(share):
            self._admission.charge(share, sum(len(turn.token_ids) for turn in log))
            return await run_to_completion(self._replay_and_commit(parent.id, child, log, key))

    async def _replay_and_commit(
        self, parent: str, child: Session, log: Sequence[pb.LoggedTurn], key: IdempotencyKey | None
    ) -> Session:
        """Fork in a worker, which computes the child's state, then in the catalog.

        When the second fails, pages that were written are no session's: the sweep deletes them.
        """
        child = self._place(child)
        page_ids = await self._catalog.sessions.get_page_ids(parent)
        spec = await self._build_spec(child)
        request = pb.ForkRequest(spec=spec, turns=log, page_ids=page_ids)
        try:
            result = await self._worker.fork(request)
            child = replace(child, memory=memory_from_wire(result.memory))
            await self._commit(_build_commit(child, result.state), key)
        except ServiceError:
            self._worker.forget(child.id)
            raise
        self._sessions.add_created(child)
        self._start_repairs(child)
        return child

    async def _build_spec(self, child: Session) -> pb.SessionSpec:
        return await build_spec(self._catalog, self._limits, child, child.epoch)

    def _start_repairs(self, child: Session) -> None:
        if due_repairs(child):
            self._background.start_repairs(self._sessions.activate(child))


def _fork_turn(session: Session, request: ForkRequest) -> int:
    """Return the turn to fork at. Raises UnknownTurn."""
    turn = session.turns if request.turn is None else request.turn
    if not 1 <= turn <= session.turns:
        raise UnknownTurn(session.id, turn)
    return turn


def _build_commit(child: Session, state: pb.SessionState) -> ForkCommit:
    """Build the commit of a child that begins in a worker's state."""
    assert child.settings.forked_from is not None, "a child has an origin"
    packed, page_ids = pack_state(state)
    return ForkCommit(child, child.settings.forked_from.session, child.turns, packed, page_ids)


def _child(parent: Session, request: ForkRequest, turn: int, begins: Session) -> Session:
    """Build the child: the session `begins` under an id of its own."""
    metadata = parent.settings.metadata if request.metadata is None else request.metadata
    settings = replace(
        parent.settings,
        metadata=metadata,
        forked_from=ForkOrigin(parent.id, turn),
        branch=request.branch,
    )
    now = time.time()
    child = f"s_{secrets.token_hex(12)}"
    return replace(
        begins, id=child, epoch=1, settings=settings, created_at=now, updated_at=now, turns=turn
    )


def _at_earlier_turn(parent: Session, last: Turn) -> Session:
    """Restore the parent as it was when its turn `last` had just been committed."""
    calls = tuple(
        PendingCall(last.number, index, call) for index, call in enumerate(last.ending_calls)
    )
    output_due = 0 if calls else last.outcome.output_tokens
    return replace(
        parent, calls=calls, repairs=(), output_due=output_due, memory=last.outcome.memory
    )
