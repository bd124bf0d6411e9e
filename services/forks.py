"""New sessions that begin as another was at the end of one of its turns, over the same stored rows."""

import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import TypeAdapter

from kvrecall.domain.errors import ServiceError, UnknownTurn
from kvrecall.domain.events import EventBus, SessionForked
from kvrecall.domain.messages import ToolCall
from kvrecall.domain.repairs import due_repairs
from kvrecall.domain.session import Session, SharedPages, Turn
from kvrecall.domain.session_settings import ForkOrigin
from kvrecall.domain.tool_calls import PendingCall
from kvrecall.protocol.convert import memory_from_wire, session_spec_to_wire
from kvrecall.protocol.v1 import worker_pb2 as wire
from services.admission import Admission
from services.background import BackgroundTasks
from services.cancellation import run_to_completion
from services.catalog.base import Catalog
from services.catalog.records import REPAIRS_RETAINED, ForkCommit, IdempotencyKey, IdempotencyRecord
from services.cluster.worker_client import Worker
from services.quotas import Quotas
from services.session_manager import ActiveSession, SessionManager
from services.turn_log import logged_turns

SESSION = TypeAdapter(Session)


@dataclass(frozen=True)
class NewFork:
    """A fork as the client asks for it: at the end of `turn`, None for the last one; with metadata of its own.

    `queue`: wait (for a bounded time) while a turn of the parent runs.
    """

    turn: int | None = None
    metadata: Mapping[str, str] | None = None
    queue: bool = False


class ForkRunner:
    """Makes forks. At the parent's last turn no token is computed; up to an earlier one the worker says them again.

    A child keeps its parent's settings, seed included: asked the same, it answers as its parent would.
    """

    def __init__(
        self,
        catalog: Catalog,
        worker: Worker,
        sessions: SessionManager,
        resting: BackgroundTasks,
        admission: Admission,
        tenants: Quotas,
        observers: EventBus,
    ) -> None:
        self._catalog = catalog
        self._worker = worker
        self._sessions = sessions
        self._resting = resting
        self._admission = admission
        self._tenants = tenants
        self._observers = observers

    async def fork(
        self, parent: str, request: NewFork, key: IdempotencyKey | None, page_tokens: int
    ) -> Session:
        """The new session. Raises UnknownSession, UnknownTurn, SessionBusy, QuotaExceeded, WorkerRefused."""
        live = self._sessions.of(await self._catalog.sessions.get(parent))
        try:
            async with self._sessions.claim_turn(live, request.queue):
                if (
                    key is not None
                    and (told := await self._catalog.idempotency.get(key)) is not None
                ):
                    return SESSION.validate_json(told)
                await self._check(parent, request)
                await self._resting.settle(live, wait=False)
                await self._sessions.epoch(
                    live
                )  # nobody writes the parent from here on, in no process
                return await self._forked(live, request, key, page_tokens)
        finally:
            self._resting.resume(live)

    async def _check(self, parent: str, request: NewFork) -> None:
        """Refuse what is wrong before a repair is broken off for it."""
        session = await self._catalog.sessions.get(parent)
        turn = _turn_of(session, request)
        at_end = await self._turn(parent, turn)
        await self._tenants.check_quota(
            session.settings.tenant, max(1, at_end.outcome.memory.length)
        )

    async def _forked(
        self, live: ActiveSession, request: NewFork, key: IdempotencyKey | None, page_tokens: int
    ) -> Session:
        started = time.monotonic()
        parent = await self._catalog.sessions.get(live.id)
        turn = _turn_of(parent, request)
        if turn == parent.turns:
            state = wire.SessionState.FromString(
                await self._catalog.sessions.get_worker_state(parent.id)
            )
            begins = replace(parent, shared=_lineage(parent, state.length // page_tokens))
            child = _child(parent, request, turn, begins)
            child = await run_to_completion(
                self._make(live, child, wire.ForkRequest(state=state), key)
            )
        else:
            turns = await self._catalog.turns.get_after(parent.id, 0, turn)
            log = logged_turns(
                turns, await self._catalog.repairs.get_latest(parent.id, REPAIRS_RETAINED)
            )
            child = _child(parent, request, turn, _earlier(parent, turns[-1], page_tokens))
            async with self._admission.place():
                child = await run_to_completion(
                    self._make(live, child, wire.ForkRequest(turns=log), key)
                )
        at: Literal["last", "earlier"] = "last" if turn == parent.turns else "earlier"
        self._observers.publish(SessionForked(parent.id, child.id, at, time.monotonic() - started))
        return child

    async def _make(
        self,
        live: ActiveSession,
        child: Session,
        request: wire.ForkRequest,
        key: IdempotencyKey | None,
    ) -> Session:
        """Fork in the worker, then in the catalog; what the worker made is dropped if the second fails."""
        epoch = await self._sessions.ensure_open(live)
        request.parent = live.id
        request.spec.CopyFrom(session_spec_to_wire(child, child.epoch))
        try:
            result = await self._sessions.call_in(live, epoch, lambda _: self._worker.fork(request))
            child = replace(child, memory=memory_from_wire(result.memory), worker=live.claim.worker)
            state = result.state.SerializeToString(deterministic=True)
            answer = (
                None if key is None else IdempotencyRecord(key, SESSION.dump_json(child).decode())
            )
            await self._catalog.sessions.fork(
                ForkCommit(child, live.id, child.turns, state), answer
            )
        except ServiceError:
            with suppress(
                ServiceError
            ):  # a worker that is lost drops, when it is back, what the catalog does not know
                await self._worker.drop(wire.DropRequest(session=child.id))
            raise
        self._sessions.created(child)
        if due_repairs(child):
            self._resting.begin_repairs(self._sessions.of(child))
        return child

    async def _turn(self, session: str, number: int) -> Turn:
        (turn,) = await self._catalog.turns.get_after(session, number - 1, 1)
        return turn


def _turn_of(session: Session, request: NewFork) -> int:
    """The turn to fork at. Raises UnknownTurn."""
    turn = session.turns if request.turn is None else request.turn
    if not 1 <= turn <= session.turns:
        raise UnknownTurn(session.id, turn)
    return turn


def _child(parent: Session, request: NewFork, turn: int, begins: Session) -> Session:
    """The new session: as `begins` is, under an id and with a life of its own."""
    metadata = parent.settings.metadata if request.metadata is None else request.metadata
    settings = replace(parent.settings, metadata=metadata, forked_from=ForkOrigin(parent.id, turn))
    now = time.time()
    child = f"s_{secrets.token_hex(12)}"
    return replace(
        begins, id=child, epoch=1, settings=settings, created_at=now, updated_at=now, turns=turn
    )


def _earlier(parent: Session, last: Turn, page_tokens: int) -> Session:
    """The parent as it was when its turn `last` had just been committed."""
    calls = tuple(PendingCall(last.number, place, call) for place, call in enumerate(_asked(last)))
    shared = _lineage(parent, last.outcome.memory.length // page_tokens)
    output_due = 0 if calls else last.outcome.output_tokens
    return replace(parent, calls=calls, repairs=(), output_due=output_due, shared=shared)


def _asked(turn: Turn) -> tuple[ToolCall, ...]:
    """The calls that a turn ended on: the model's, or recorded ones."""
    said = turn.outcome.message
    if said is not None:
        return said.tool_calls if turn.outcome.finish_reason == "tool_calls" else ()
    return turn.messages[-1].tool_calls


def _lineage(parent: Session, pages: int) -> tuple[SharedPages, ...]:
    """Whose the first `pages` pages of the parent are, the parent's own among them."""
    lineage: list[SharedPages] = []
    for owner in (*parent.shared, SharedPages(parent.id, pages)):
        covered = lineage[-1].pages if lineage else 0
        if covered < min(owner.pages, pages):
            lineage.append(SharedPages(owner.owner, min(owner.pages, pages)))
    return tuple(lineage)
