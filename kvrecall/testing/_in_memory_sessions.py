"""Sessions of the in-memory catalog."""

from kvrecall.domain.commit_points import CommitPoint
from kvrecall.domain.errors import (
    UnknownSession,
    UnknownTurn,
)
from kvrecall.domain.session import Session
from kvrecall.domain.state_machine import SessionState
from kvrecall.testing._catalog_changes import build_child, pair_built
from kvrecall.testing._catalog_state import CatalogState, StoredSession
from services.catalog.claims import Claims
from services.catalog.quota import UNLIMITED, TenantLimits, TenantUse
from services.catalog.records import (
    ForkCommit,
    IdempotencyRecord,
    OrphanedPages,
    SessionDump,
    SessionPage,
)
from services.catalog.serialization import SETTINGS, decode_cursor, encode_cursor


class InMemorySessions:
    """Sessions, from their creation to their deletion."""

    def __init__(self, state: CatalogState, claims: Claims) -> None:
        self._state = state
        self._claims = claims

    async def create(
        self,
        session: Session,
        worker_state: bytes,
        record: IdempotencyRecord | None,
        limits: TenantLimits = UNLIMITED,
    ) -> None:
        """Add a session. Raises QuotaExceeded, and CatalogError when its id is taken."""
        size = len(SETTINGS.dump_json(session.settings))
        stored = StoredSession(session, worker_state, refs=session.shared, size=size)
        self._state.require_room(session.settings.tenant, limits, sessions=1, bytes=size)
        self._state.require_new_record(record)
        self._state.add(stored)
        self._state.store_record(record, created=session.id)

    async def get(self, session_id: str, tenant: str | None = None) -> Session:
        """Return the session as last committed, if it is the tenant's. Raises UnknownSession."""
        stored = self._state.get(session_id)
        if tenant not in (None, stored.session.settings.tenant):
            raise UnknownSession(session_id)
        return stored.to_session()

    async def get_worker_state(self, session_id: str) -> bytes:
        """Return the serialized pb.SessionState. Raises UnknownSession."""
        return self._state.get(session_id).worker_state

    async def get_history(self, session_id: str) -> tuple[CommitPoint, ...]:
        """Return the committed length at the end of each epoch. Raises UnknownSession."""
        history = self._state.get(session_id).history
        return tuple(CommitPoint(*point) for point in sorted(history.items()))

    async def get_page(self, limit: int, cursor: str | None, tenant: str = "") -> SessionPage:
        """Return up to `limit` sessions of a tenant, newest first. Raises InvalidRequest."""
        before = None if cursor is None else decode_cursor(cursor)
        sessions = [
            session
            for session in reversed(self._sort())
            if session.settings.tenant == tenant
            and (before is None or (session.created_at, session.id) < before)
        ]
        page = tuple(sessions[:limit])
        return SessionPage(page, encode_cursor(page[-1]) if len(sessions) > limit else None)

    async def get_ids(self) -> list[str]:
        """Return the ids of all sessions, oldest first."""
        return [session.id for session in self._sort()]

    async def get_use(self, tenant: str) -> TenantUse:
        """Return what the tenant has."""
        return self._state.get_use(tenant)

    async def count(self, tenant: str) -> int:
        """Return the number of the tenant's sessions."""
        sessions = [stored.session for stored in self._state.sessions.values()]
        return sum(each.settings.tenant == tenant for each in sessions)

    async def count_by_state(self) -> dict[SessionState, int]:
        """Count the idle and the paused sessions of all tenants."""
        sessions = [stored.session for stored in self._state.sessions.values()]
        paused = sum(bool(each.outstanding) for each in sessions)
        return {SessionState.PAUSED: paused, SessionState.IDLE: len(sessions) - paused}

    async def fork(
        self,
        commit: ForkCommit,
        record: IdempotencyRecord | None,
        limits: TenantLimits = UNLIMITED,
    ) -> None:
        """Add a session that starts from another. Raises UnknownSession, UnknownTurn, QuotaExceeded."""
        parent = self._state.get(commit.parent)
        if not 0 <= commit.turns <= parent.session.turns:
            raise UnknownTurn(commit.parent, commit.turns)
        for shared in commit.session.shared:
            if not self._state.have_pages(shared):
                raise UnknownSession(shared.owner)
        self._state.require_new_record(record)
        child = build_child(parent, commit)
        tokens = commit.session.memory.length
        tenant = commit.session.settings.tenant
        self._state.require_room(tenant, limits, sessions=1, tokens=tokens, bytes=child.size)
        self._state.add(child)
        self._state.creations.pop(commit.session.id, None)
        self._state.orphaned.pop(commit.session.id, None)
        self._state.store_record(record, created=commit.session.id)

    async def restore(self, dump: SessionDump) -> None:
        """Add a session from another catalog. Raises CatalogError when its id is taken."""
        stored = StoredSession(
            session=dump.session,
            worker_state=dump.worker_state,
            turns=list(dump.turns),
            calls={(call.turn, call.position): call for call in dump.calls},
            pieces={call: dict(pieces) for call, pieces in dump.pieces.items()},
            repairs=list(dump.repairs),
            episodes=dump.episodes,
            segments={segment.number: segment for segment in dump.segments},
            built=dict(pair_built(dump.episodes, dump.built)),
            refs=dump.session.shared,
        )
        self._state.add(stored)
        self._state.orphaned.pop(dump.session.id, None)

    async def delete(
        self, session_id: str, record: IdempotencyRecord | None
    ) -> list[OrphanedPages]:
        """Delete the session and return the orphaned pages. Raises UnknownSession."""
        self._state.require_new_record(record)
        orphaned = self._state.delete(session_id)
        self._state.store_record(record)
        self._claims.discard(session_id)
        return orphaned

    def _sort(self) -> list[Session]:
        sessions = [stored.to_session() for stored in self._state.sessions.values()]
        return sorted(sessions, key=lambda session: (session.created_at, session.id))
