"""Who wrote a session's first pages: the sessions whose pages it shares, then it itself."""

from dataclasses import replace

from kvrecall.domain.sessions.commit_points import cut_points
from kvrecall.domain.sessions.session import Session, SharedPages
from services.catalog.base import Catalog


async def list_owners(
    catalog: Catalog, session: Session, pages: int, page_tokens: int
) -> tuple[SharedPages, ...]:
    """List the owners of the session's first pages, with the commits that these need.

    Raises UnknownSession.
    """
    own = SharedPages(session.id, pages, await catalog.sessions.get_history(session.id))
    return limit_owners((*session.shared, own), pages, page_tokens)


def limit_owners(
    shared: tuple[SharedPages, ...], pages: int, page_tokens: int
) -> tuple[SharedPages, ...]:
    """Return the owners of the first `pages` of these pages."""
    owners: list[SharedPages] = []
    for owner in shared:
        covered = owners[-1].pages if owners else 0
        if covered < (taken := min(owner.pages, pages)):
            history = cut_points(owner.history, taken * page_tokens)
            owners.append(replace(owner, pages=taken, history=history))
    return tuple(owners)
