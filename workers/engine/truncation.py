"""Truncation of a running turn: the session loses its last rows."""

from workers.cache.caches import Caches
from workers.engine.session import ResidentSession
from workers.engine.side_content import rewind_side


def truncate(caches: Caches, resident: ResidentSession, length: int) -> int:
    """Drop the active rows of all tokens from position `length` on; return the number of tokens.

    Rows that were evicted while those tokens were appended stay evicted, and their attention stays
    in accumulated sums. The store drops its rows at the end of the turn.
    """
    session = resident.session
    dropped = session.length - length
    if dropped:
        caches.active.drop_from(resident.slot, length)
        session.length = length
        if caches.side is not None:
            rewind_side(caches.side, session)
        session.eviction_scores = session.eviction_scores.before(length)
        if session.host_copy is not None:
            session.host_copy.truncate(length)
    return dropped
