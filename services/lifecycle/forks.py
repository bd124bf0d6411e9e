"""Forks.

New sessions that begin at the end of a turn of another session, over the same stored rows.
"""

import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import structlog

from kvrecall.domain.errors import ServiceError, SessionBusy, UnknownSession, UnknownTurn
from kvrecall.domain.events import SessionForked
from kvrecall.domain.page_ids import ID_BYTES
from kvrecall.domain.repairs import due_repairs
from kvrecall.domain.sessions.session import Session, SharedPages, Turn
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
from services.pages.owners import list_owners
from services.sessions.active import ActiveSession
from services.sessions.specs import build_spec
from services.sessions.turn_log import get_turn, logged_turns
from services.sessions.worker_states import pack_state, unpack_state

# Opens a fork that the catalog has in the worker where its parent is open.
OpenFork = Callable[[pb.ForkRequest], Awaitable[pb.ForkResult]]

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
        page_tokens: int,
        tenant: str | None = None,
    ) -> Session:
        """Create a fork.

        At a turn that is named and whose state is known no running turn is waited for: the fork is
        the session as that turn was committed, without repairs since. With a `tenant`, another
        tenant's session is unknown. Raises UnknownSession, UnknownTurn, SessionBusy,
        QuotaExceeded, WorkerRefused.
        """
        live = self._sessions.activate(await self._catalog.sessions.get(parent, tenant))
        forking = self._fork_now(live, request, key, page_tokens)
        return await create_once(self._catalog, key, forking)

    async def _fork_now(
        self,
        live: ActiveSession,
        request: ForkRequest,
        key: IdempotencyKey | None,
        page_tokens: int,
    ) -> Session:
        """Fork, if it can be beside a turn that runs; with `queue` wait for that if it cannot."""
        try:
            return await self._fork_claimed(live, request, key, page_tokens, wait=False)
        except SessionBusy:
            child = await self._fork_beside(live, request, key, page_tokens)
            if child is not None:
                return child
            if not request.queue:
                raise
        return await self._fork_claimed(live, request, key, page_tokens, wait=True)

    async def _fork_claimed(
        self,
        live: ActiveSession,
        request: ForkRequest,
        key: IdempotencyKey | None,
        page_tokens: int,
        *,
        wait: bool,
    ) -> Session:
        try:
            async with self._sessions.claim_turn(live, wait):
                if (created := await find_created(self._catalog, key)) is not None:
                    return created
                await self._check(live.id, request)
                await self._background.yield_to_turn(live, wait=False)
                await self._sessions.epoch(live)  # no process writes the parent from here on
                return await self._fork(live, request, key, page_tokens)
        finally:
            self._background.resume(live)

    async def _fork_beside(
        self,
        live: ActiveSession,
        request: ForkRequest,
        key: IdempotencyKey | None,
        page_tokens: int,
    ) -> Session | None:
        """Fork beside a turn that runs, which changes nothing of what was committed before it.

        Returns None where no turn is named, so that the running one is to be the last, and for one
        without a kept state.
        """
        if request.turn is None:
            return None
        if (created := await find_created(self._catalog, key)) is not None:
            return created
        parent = await self._catalog.sessions.get(live.id)
        turn = _fork_turn(parent, request)
        await self._check(live.id, request)
        begins, state = await self._restore_committed(parent, turn, page_tokens)
        if state is None:
            return None
        child = replace(_child(parent, request, turn, begins), worker=parent.worker)
        started = time.monotonic()
        child = await run_to_completion(
            self._commit_and_open(child, state, key, lambda fork: self._worker.fork(fork))
        )
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
        self,
        live: ActiveSession,
        request: ForkRequest,
        key: IdempotencyKey | None,
        page_tokens: int,
    ) -> Session:
        started = time.monotonic()
        parent = await self._catalog.sessions.get(live.id)
        turn = _fork_turn(parent, request)
        begins, state = await self._restore(parent, turn, page_tokens)
        child = _child(parent, request, turn, begins)
        if state is None:
            child = await self._fork_replaying(live, parent, child, key)
        else:
            await self._sessions.ensure_open(live)
            child = replace(child, worker=live.claim.worker)
            child = await run_to_completion(
                self._commit_and_open(
                    child, state, key, lambda fork: self._fork_in_worker(live, fork)
                )
            )
        self._report(parent, child, started)
        return child

    def _report(self, parent: Session, child: Session, started: float) -> None:
        at: Literal["last", "earlier"] = "last" if child.turns == parent.turns else "earlier"
        self._events.publish(SessionForked(parent.id, child.id, at, time.monotonic() - started))

    async def _restore(
        self, parent: Session, number: int, page_tokens: int
    ) -> tuple[Session, bytes | None]:
        """Return the parent as it was at the end of a turn, and its worker state if it is known."""
        if number == parent.turns:
            state = await self._catalog.sessions.get_worker_state(parent.id)
            parsed = pb.SessionState.FromString(state)
            pages = parsed.length // page_tokens + sum(g.stop - g.start for g in parsed.dropped)
            owners = await list_owners(self._catalog, parent, pages, page_tokens)
            return replace(parent, shared=owners), state
        return await self._restore_committed(parent, number, page_tokens)

    async def _restore_committed(
        self, parent: Session, number: int, page_tokens: int
    ) -> tuple[Session, bytes | None]:
        """Return the parent as a turn committed it, and its worker state if it was kept."""
        turn = await get_turn(self._catalog.turns, parent.id, number)
        pages = turn.outcome.memory.written_rows // page_tokens
        owners = await list_owners(self._catalog, parent, pages, page_tokens)
        return _at_earlier_turn(parent, turn, owners), await self._find_state(parent, number)

    async def _find_state(self, session: Session, number: int) -> bytes | None:
        """Return the worker state that a turn's commit kept, without the active episode.

        A fork has those of its own turns; of the turns before them its parent has them.
        """
        while (origin := session.settings.forked_from) is not None and number <= origin.turn:
            try:
                session = await self._catalog.sessions.get(origin.session)
            except UnknownSession:
                return None
        kept = await self._catalog.turns.get_state(session.id, number)
        if kept is None:
            return None
        state = pb.SessionState.FromString(kept)
        for field in ("episode", "patched_prompt", "segments"):
            state.ClearField(field)
        return state.SerializeToString(deterministic=True)

    async def _commit_and_open(
        self, child: Session, state: bytes, key: IdempotencyKey | None, open_fork: OpenFork
    ) -> Session:
        """Fork in the catalog, then in the worker.

        The child is its parent's committed state: with the commit it exists. A worker that fails
        after it, or a gateway that is killed, leaves a session that its next use opens.
        """
        assert child.settings.forked_from is not None, "a child has an origin"
        parent = child.settings.forked_from.session
        pages = max((each.pages for each in child.shared), default=0)
        page_ids = (await self._catalog.sessions.get_page_ids(parent))[: pages * ID_BYTES]
        await self._commit(ForkCommit(child, parent, child.turns, state, page_ids), key)
        try:
            await open_fork(
                pb.ForkRequest(
                    parent=parent,
                    spec=self._build_spec(child),
                    state=unpack_state(state, page_ids),
                )
            )
        except ServiceError as error:
            self._worker.forget(child.id)
            _log.warning("fork not opened", session=child.id, reason=error.message)
        else:
            self._sessions.add_created(child)
        self._start_repairs(child)
        return child

    async def _commit(self, commit: ForkCommit, key: IdempotencyKey | None) -> None:
        """Fork in the catalog. Raises UnknownSession, UnknownTurn, QuotaExceeded."""
        record = build_record(key, commit.session)
        await self._quotas.keep_within(
            commit.session.settings.tenant,
            lambda limits: self._catalog.sessions.fork(commit, record, limits),
            keep=commit.parent,
        )

    async def _fork_replaying(
        self, live: ActiveSession, parent: Session, child: Session, key: IdempotencyKey | None
    ) -> Session:
        turns = await self._catalog.turns.get_after(parent.id, 0, child.turns)
        log = logged_turns(
            turns, await self._catalog.repairs.get_latest(parent.id, REPAIRS_RETAINED)
        )
        share = get_share(self._limits, parent.settings.tenant, child.id)
        async with self._admission.slot(share):
            self._admission.charge(share, sum(len(turn.token_ids) for turn in log))
            return await run_to_completion(self._replay_and_commit(live, child, log, key))

    async def _replay_and_commit(
        self,
        live: ActiveSession,
        child: Session,
        log: Sequence[pb.LoggedTurn],
        key: IdempotencyKey | None,
    ) -> Session:
        """Fork in the worker, which computes the child's state, then in the catalog.

        When the second fails the worker's copy is a session whose creation was abandoned: the
        collector deletes its pages.
        """
        await self._catalog.page_refs.begin_creation(child.id)
        try:
            spec = self._build_spec(child)
            request = pb.ForkRequest(parent=live.id, spec=spec, turns=log)
            result = await self._fork_in_worker(live, request)
            child = replace(child, memory=memory_from_wire(result.memory), worker=live.claim.worker)
            state, page_ids = pack_state(result.state)
            await self._commit(ForkCommit(child, live.id, child.turns, state, page_ids), key)
        except ServiceError:
            self._worker.forget(child.id)
            raise
        self._sessions.add_created(child)
        self._start_repairs(child)
        return child

    async def _fork_in_worker(self, live: ActiveSession, request: pb.ForkRequest) -> pb.ForkResult:
        epoch = await self._sessions.ensure_open(live)
        return await self._sessions.call_reopening(
            live, epoch, lambda _: self._worker.fork(request)
        )

    def _build_spec(self, child: Session) -> pb.SessionSpec:
        return build_spec(self._catalog, self._limits, child, child.epoch)

    def _start_repairs(self, child: Session) -> None:
        if due_repairs(child):
            self._background.start_repairs(self._sessions.activate(child))


def _fork_turn(session: Session, request: ForkRequest) -> int:
    """Return the turn to fork at. Raises UnknownTurn."""
    turn = session.turns if request.turn is None else request.turn
    if not 1 <= turn <= session.turns:
        raise UnknownTurn(session.id, turn)
    return turn


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


def _at_earlier_turn(parent: Session, last: Turn, owners: tuple[SharedPages, ...]) -> Session:
    """Restore the parent as it was when its turn `last` had just been committed."""
    calls = tuple(
        PendingCall(last.number, index, call) for index, call in enumerate(last.ending_calls)
    )
    output_due = 0 if calls else last.outcome.output_tokens
    return replace(
        parent,
        calls=calls,
        repairs=(),
        output_due=output_due,
        memory=last.outcome.memory,
        shared=owners,
    )
