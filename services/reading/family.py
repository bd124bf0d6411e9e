"""The family of a session: all sessions that were forked from the same first one, as far as known."""

from dataclasses import dataclass
from itertools import pairwise

from kvrecall.domain.errors import UnknownSession
from kvrecall.domain.sessions.session import Session, SharedPages
from services.catalog.base import Catalog
from services.reading.search import scan

# Generations that are followed upwards: each is a read.
_GENERATIONS = 64


@dataclass(frozen=True)
class Member:
    """A session of a family; `session` is None for one that was deleted.

    `parent` and `turn` are where it was forked. `shared` are the owners of the pages that it begins
    with, each with the number of tokens.
    """

    id: str
    parent: str | None
    turn: int | None
    session: Session | None
    shared: tuple[tuple[str, int], ...] = ()


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
    members = (_build_member(known[each], page_tokens) for each in ids)
    return Family(root, (*deleted, *members), scanned, complete)


def measure_shared(
    shared: tuple[SharedPages, ...], page_tokens: int
) -> tuple[tuple[str, int], ...]:
    """Return the owners of a session's first pages, with the tokens that each of them wrote."""
    ends = [0, *(each.pages for each in shared)]
    return tuple(
        (each.owner, (end - begin) * page_tokens)
        for each, (begin, end) in zip(shared, pairwise(ends), strict=True)
        if end > begin
    )


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


def _build_member(session: Session, page_tokens: int) -> Member:
    origin = session.settings.forked_from
    return Member(
        id=session.id,
        parent=None if origin is None else origin.session,
        turn=None if origin is None else origin.turn,
        session=session,
        shared=measure_shared(session.shared, page_tokens),
    )
