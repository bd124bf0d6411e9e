"""Prefix sharing: a session's first turn takes the pages of sessions that begin with the same tokens.

A worker names the pages of the prompt by their tokens, and the catalog finds sessions of the same
tenant and salt that begin with the most of them, whatever the conversations and their settings are.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from kvrecall.domain.errors import UnknownSession
from kvrecall.domain.messages import Message
from kvrecall.domain.page_ids import ID_BYTES, count_common, split_ids
from kvrecall.domain.sessions.session import Session, SharedPages
from kvrecall.domain.turn_request import TurnPlan, TurnRequest
from kvrecall.domain.worker_info import WorkerInfo
from kvrecall.protocol.convert import (
    message_to_wire,
    shared_pages_to_wire,
    worker_info_from_wire,
)
from kvrecall.protocol.v1 import worker_pb2 as pb
from services.catalog.records import KnownPrefix, TurnCommit
from services.context import ServiceContext
from services.pages.owners import limit_owners, list_owners
from services.sessions.specs import derive_session_key


@dataclass(frozen=True)
class FirstTurn:
    """What is known of the pages of a session's first prompt.

    `page_ids`: of those that other sessions have, joined, whose owners are `shared`; both empty if
    none is known. The pages are referenced already. `snapshots`: of the owner's recurrent states, as its
    worker state has them.
    """

    page_tokens: int
    page_ids: bytes = b""
    shared: tuple[SharedPages, ...] = ()
    snapshots: tuple[int, ...] = ()

    @property
    def offered(self) -> pb.Prefix | None:
        """The pages that the worker may take."""
        if not self.shared:
            return None
        return pb.Prefix(
            page_ids=self.page_ids,
            shared=shared_pages_to_wire(self.shared),
            snapshots=self.snapshots,
        )

    def complete(self, commit: TurnCommit, done: pb.TurnDone) -> TurnCommit:
        """Add the pages that the session shares since the turn to a commit."""
        shared = limit_owners(self.shared, done.shared_pages, self.page_tokens)
        return replace(commit, shared=shared)


class PrefixSharing:
    """Finds, for a session's first turn, pages of other sessions."""

    def __init__(self, context: ServiceContext) -> None:
        self._catalog = context.catalog
        self._worker = context.worker
        self._info: WorkerInfo | None = None

    async def find(
        self, session: Session, request: TurnRequest, plan: TurnPlan, worker: str
    ) -> FirstTurn | None:
        """Find pages for the turn; None for a later turn, and for one that fills no page.

        Pages of sessions in the same worker come first: without Redis it can read no others. They are
        referenced before they are used, so that the deletion of their owners keeps them.
        """
        info = await self.describe_worker()
        if session.turns or not _may_fill_page(session, plan.messages, info.page_tokens):
            return None
        first = FirstTurn(info.page_tokens)
        page_ids = await self._name(session, request, plan)
        tenant = session.settings.tenant
        known = await self._catalog.page_refs.find_prefix(tenant, page_ids)
        owner = await self._choose(known, worker) if known.pages else None
        if owner is None:
            return first
        try:
            # What the session was committed with counts: the tree may lag behind.
            held = await self._catalog.sessions.get_page_ids(owner.id)
            pages = count_common(split_ids(page_ids), split_ids(held))
            shared = await list_owners(self._catalog, owner, pages, info.page_tokens)
            snapshots = await self._read_snapshots(owner.id) if info.has_states else ()
        except UnknownSession:  # deleted since
            return first
        for each in shared:
            if not await self._catalog.page_refs.reserve(session.id, each):
                return first
        return replace(
            first,
            page_ids=page_ids[: pages * ID_BYTES],
            shared=shared,
            snapshots=snapshots,
        )

    async def _read_snapshots(self, session_id: str) -> tuple[int, ...]:
        """Read which recurrent states a session has stored. Raises UnknownSession."""
        packed = await self._catalog.sessions.get_worker_state(session_id)
        return tuple(pb.SessionState.FromString(packed).snapshots)

    async def _name(self, session: Session, request: TurnRequest, plan: TurnPlan) -> bytes:
        """Name the whole pages of the prompt. Raises WorkerRefused as the turn would."""
        settings = session.settings
        named = await self._worker.tokenize(
            pb.TokenizeRequest(
                messages=[message_to_wire(message) for message in plan.messages],
                tools=settings.tools,
                without_answer=not request.generate,
                opening=request.opening,
                template_arguments=settings.template_arguments,
                keep_reasoning=settings.keep_reasoning,
                row_key=derive_session_key(self._catalog, settings),
            )
        )
        return named.page_ids

    async def _choose(self, known: KnownPrefix, worker: str) -> Session | None:
        """Choose one of the sessions: one in this worker, else any."""
        first = None
        for id in known.sessions:
            with suppress(UnknownSession):
                session = await self._catalog.sessions.get(id)
                if session.worker == worker:
                    return session
                first = first or session
        return first

    async def describe_worker(self) -> WorkerInfo:
        """Describe the workers, which are alike."""
        if self._info is None:
            self._info = worker_info_from_wire(await self._worker.describe())
        return self._info


def _may_fill_page(session: Session, messages: Sequence[Message], page_tokens: int) -> bool:
    """Check that a prompt has enough text for a page: few of its tokens are not of the text."""
    size = sum(message.size for message in messages) + sum(map(len, session.settings.tools))
    return bool(messages) and size >= page_tokens
