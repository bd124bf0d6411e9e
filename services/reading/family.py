"""The family of a session: all sessions that were forked from the same first one, as far as known."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvrecall.domain.errors import UnknownSession
from kvrecall.domain.page_ids import PageId, count_common, split_ids
from kvrecall.domain.sessions.session import Session
from services.catalog.base import Catalog
from services.reading.search import scan

# Generations that are followed upwards: each is a read.
_GENERATIONS = 64


@dataclass(frozen=True)
class Member:
    """A session of a family; `session` is None for one that was deleted.

    `parent` and `turn` are where it was forked. `shared_tokens` are those of the pages that it has in
    common with its parent now.
    """

    id: str
    parent: str | None
    turn: int | None
    session: Session | None
    shared_tokens: int = 0


@dataclass(frozen=True)
class Family:
    """A family, its first member first and the others by creation.

    `scanned` sessions of the tenant were looked at; `complete`: these are all that it has.
    """

    root: str
    members: tuple[Member, ...]
    scanned: int
    complete: bool


async def read_family(catalog: Catalog, session: Session, page_tokens: int) -> Family:
    """Read the family of a session among its tenant's sessions, the newest of them."""
    known = {session.id: session}
    scanned, complete = 0, False
    async for page in scan(catalog, session.settings.tenant, None):
        known |= {each.id: each for each in page.sessions}
        scanned += len(page.sessions)
        complete = page.next_cursor is None
    await _read_ancestors(catalog, session, known)
    root = _get_root(session.id, known)
    ids = [each for each in known if _get_root(each, known) == root]
    ids.sort(key=lambda each: (each != root, known[each].created_at, each))
    deleted = () if root in known else (Member(root, None, None, None),)
    pages = {each: await _read_pages(catalog, each) for each in ids}
    members = [_build_member(known[each], pages, page_tokens) for each in ids]
    return Family(root, (*deleted, *members), scanned, complete)


async def _read_pages(catalog: Catalog, session: str) -> tuple[PageId, ...]:
    """Read the pages of a session; none if it was deleted since."""
    try:
        return split_ids(await catalog.sessions.get_page_ids(session))
    except UnknownSession:
        return ()


async def _read_ancestors(catalog: Catalog, session: Session, known: dict[str, Session]) -> None:
    """Add the ancestors that are older than what was scanned."""
    for _ in range(_GENERATIONS):
        origin = session.settings.forked_from
        if origin is None:
            return
        if origin.session not in known:
            try:
                found = await catalog.sessions.get(origin.session, session.settings.tenant)
            except UnknownSession:
                return
            known[found.id] = found
        session = known[origin.session]


def _get_root(session: str, known: dict[str, Session]) -> str:
    """Return the oldest ancestor that is known by its id."""
    while (found := known.get(session)) is not None and found.settings.forked_from is not None:
        session = found.settings.forked_from.session
    return session


def _build_member(
    session: Session, pages: Mapping[str, Sequence[PageId]], page_tokens: int
) -> Member:
    origin = session.settings.forked_from
    parent = () if origin is None else pages.get(origin.session, ())
    return Member(
        id=session.id,
        parent=None if origin is None else origin.session,
        turn=None if origin is None else origin.turn,
        session=session,
        shared_tokens=count_common(parent, pages[session.id]) * page_tokens,
    )
