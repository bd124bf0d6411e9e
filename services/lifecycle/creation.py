"""Creation of sessions: opened in a worker, then committed to the catalog."""

import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from pydantic import TypeAdapter

from kvrecall.domain.errors import CatalogError, ServiceError, WorkerLost, WorkerRefused
from kvrecall.domain.events import SessionCreated
from kvrecall.domain.messages import Message
from kvrecall.domain.reports import MemoryReport
from kvrecall.domain.sessions.request import CreateSession, resolve_settings
from kvrecall.domain.sessions.session import Session
from kvrecall.domain.settings.session import SessionSettings
from kvrecall.domain.worker_info import WorkerInfo
from kvrecall.protocol.v1 import worker_pb2 as pb
from services.access.shares import get_share
from services.cancellation import run_to_completion
from services.catalog.base import Catalog
from services.catalog.records import IdempotencyKey, IdempotencyRecord
from services.cluster.prompt_family import prompt_family
from services.context import ServiceContext
from services.sessions.specs import build_spec

_SESSION = TypeAdapter(Session)
_ATTEMPTS = 3


async def find_created(catalog: Catalog, key: IdempotencyKey | None) -> Session | None:
    """Return the session that a request with this key has created. Raises IdempotencyConflict."""
    record = None if key is None else await catalog.idempotency.get(key)
    return None if record is None else _SESSION.validate_json(record)


async def create_once(
    catalog: Catalog, key: IdempotencyKey | None, create: Callable[[], Awaitable[Session]]
) -> Session:
    """Return the session that is created, or the one that a request with the same key was first with.

    The catalog refuses the record of the second of two that come at once. If the first one's session is
    gone again, since what it was created for failed, the second creates its own.
    """
    for attempt in range(_ATTEMPTS):
        try:
            return await create()
        except CatalogError:
            if (created := await find_created(catalog, key)) is not None:
                return created
            if key is None or attempt == _ATTEMPTS - 1:
                raise
    raise AssertionError("the last attempt returns or raises")


def build_record(key: IdempotencyKey | None, created: Session) -> IdempotencyRecord | None:
    """Build the record of a request that creates a session."""
    return None if key is None else IdempotencyRecord(key, _SESSION.dump_json(created).decode())


class SessionCreator:
    """Creates sessions concurrently, a bounded number at a time."""

    def __init__(self, context: ServiceContext) -> None:
        self._catalog = context.catalog
        self._worker = context.worker
        self._sessions = context.sessions
        self._events = context.events
        self._quotas = context.quotas
        self._admission = context.creations
        self._limits = context.limits

    async def create(
        self,
        request: CreateSession,
        info: WorkerInfo,
        key: IdempotencyKey | None,
        messages: Sequence[Message] = (),
    ) -> Session:
        """Open a session in a worker that `info` describes, in that of its prompt family if it can.

        Raises BudgetOutOfRange, UnknownMethod, UnknownModel, QuotaExceeded, LimitExceeded,
        Overloaded, WorkerRefused, WorkerLost.
        """
        if (created := await find_created(self._catalog, key)) is not None:
            return created
        self._quotas.check_metadata(request.metadata)
        await self._quotas.check_new_session(request.tenant)
        settings = resolve_settings(request, info, self._limits)
        share = get_share(self._limits, request.tenant)
        async with self._admission.slot(share):
            self._admission.charge(share, 1)
            family = prompt_family(settings, messages)

            def create() -> Awaitable[Session]:
                return run_to_completion(self._create(settings, info, key, family))

            return await create_once(self._catalog, key, create)

    async def _create(
        self, settings: SessionSettings, info: WorkerInfo, key: IdempotencyKey | None, family: str
    ) -> Session:
        now = time.time()
        session = Session(
            f"s_{secrets.token_hex(12)}",
            1,
            settings,
            now,
            now,
            0,
            MemoryReport(budget=settings.budget or info.max_budget),
        )
        session = replace(session, worker=await self._open_anywhere(session, family))
        record = build_record(key, session)
        try:
            await self._quotas.keep_within(
                settings.tenant,
                lambda limits: self._catalog.sessions.create(session, b"", record, limits),
            )
        except ServiceError:
            # Whether it was committed may be unknown. If not, the worker releases it once it has
            # been idle for long.
            self._worker.forget(session.id)
            raise
        self._sessions.add_created(session)
        self._events.publish(SessionCreated(session.id))
        return session

    async def _open_anywhere(self, session: Session, family: str) -> str:
        """Open the new session in a worker, in another one when the first is lost; return its name.

        Raises WorkerLost, WorkerRefused.
        """
        lost: list[str] = []
        spec = await build_spec(self._catalog, self._limits, session, session.epoch)
        while True:
            worker = self._worker.choose_worker(session.id, "", lost, family)
            try:
                await self._worker.open(pb.OpenRequest(spec=spec))
            except (WorkerLost, WorkerRefused) as error:
                lost.append(worker)
                self._worker.forget(session.id)
                if not self._sessions.can_retry_elsewhere(session.id, lost, error):
                    raise
            else:
                return worker
