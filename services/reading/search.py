"""Lists of sessions by filter and order.

The catalog has sessions by creation only. So other orders, and all filters, are applied to the
sessions as they are read, and a request reads a bounded number of them.
"""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Literal

from kvrecall.domain.sessions.session import Session
from kvrecall.domain.sessions.state_machine import SessionState
from services.catalog.base import Catalog
from services.catalog.records import SessionPage
from services.catalog.serialization import decode_cursor, encode_cursor, encode_place

SCANNED = 2000
"""The most sessions that one request reads."""
_SESSIONS_AT_ONCE = 200

Order = Literal["created", "updated", "length"]
State = Literal["idle", "prefilling", "decoding", "paused", "repairing"]
GetState = Callable[[Session], SessionState]


@dataclass(frozen=True)
class SessionQuery:
    """Which sessions of a tenant to list; empty filters let all pass.

    `text` is found in a session's id or in its metadata, in any case of letters.
    """

    limit: int
    cursor: str | None = None
    state: State | Literal[""] = ""
    method: str = ""
    worker: str = ""
    text: str = ""
    order: Order = "created"

    @property
    def filters(self) -> bool:
        """True if not every session passes."""
        return bool(self.state or self.method or self.worker or self.text)

    def passes(self, session: Session, state: SessionState) -> bool:
        """Return whether a session is to be listed."""
        settings = session.settings
        metadata = (each for pair in settings.metadata.items() for each in pair)
        wanted = self.text.casefold()
        return (
            self.state in ("", state)
            and self.method in ("", settings.method)
            and self.worker in ("", session.worker)
            and (not wanted or any(wanted in each.casefold() for each in (session.id, *metadata)))
        )


@dataclass(frozen=True)
class FoundSessions:
    """A page of sessions with their states, and how it was found.

    `scanned` sessions were read. `truncated`: the tenant has more than those, so that an order other
    than by creation is one of the newest only.
    """

    sessions: tuple[tuple[Session, SessionState], ...]
    next_cursor: str | None
    scanned: int
    truncated: bool = False


async def search(
    catalog: Catalog, query: SessionQuery, tenant: str, get_state: GetState
) -> FoundSessions:
    """List a page of a tenant's sessions. Raises InvalidRequest for a wrong cursor."""
    if query.order != "created":
        return await _sort(catalog, query, tenant, get_state)
    return await _filter(catalog, query, tenant, get_state)


async def scan(
    catalog: Catalog, tenant: str, cursor: str | None, at_once: int = _SESSIONS_AT_ONCE
) -> AsyncIterator[SessionPage]:
    """Read the tenant's sessions after a cursor, newest first, SCANNED at most."""
    scanned = 0
    while scanned < SCANNED:
        page = await catalog.sessions.get_page(min(at_once, SCANNED - scanned), cursor, tenant)
        yield page
        scanned += len(page.sessions)
        cursor = page.next_cursor
        if cursor is None:
            return


async def _filter(
    catalog: Catalog, query: SessionQuery, tenant: str, get_state: GetState
) -> FoundSessions:
    found: list[tuple[Session, SessionState]] = []
    scanned, after = 0, query.cursor
    at_once = _SESSIONS_AT_ONCE if query.filters else query.limit
    async for page in scan(catalog, tenant, query.cursor, at_once):
        after = page.next_cursor
        for index, session in enumerate(page.sessions):
            scanned += 1
            state = get_state(session)
            if query.passes(session, state):
                found.append((session, state))
            if len(found) == query.limit:
                more = after is not None or index + 1 < len(page.sessions)
                return FoundSessions(
                    tuple(found), encode_cursor(session) if more else None, scanned
                )
    return FoundSessions(tuple(found), after, scanned)


async def _sort(
    catalog: Catalog, query: SessionQuery, tenant: str, get_state: GetState
) -> FoundSessions:
    before = None if query.cursor is None else decode_cursor(query.cursor)
    found: list[tuple[float, str, Session, SessionState]] = []
    scanned, truncated = 0, False
    async for page in scan(catalog, tenant, None):
        truncated = page.next_cursor is not None
        for session in page.sessions:
            scanned += 1
            state = get_state(session)
            value = session.updated_at if query.order == "updated" else session.memory.length
            if query.passes(session, state) and (before is None or (value, session.id) < before):
                found.append((value, session.id, session, state))
    found.sort(key=lambda each: each[:2], reverse=True)
    shown = found[: query.limit]
    cursor = encode_place(*shown[-1][:2]) if len(found) > query.limit else None
    sessions = tuple((session, state) for _, _, session, state in shown)
    return FoundSessions(sessions, cursor, scanned, truncated)
