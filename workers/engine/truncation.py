"""Truncation of a running turn: the session loses its last rows."""

from workers.cache.active_cache import ActiveCache
from workers.engine.session import ResidentSession


def truncate(cache: ActiveCache, resident: ResidentSession, length: int) -> int:
    """Drop the active rows of all tokens from position `length` on; return the number of tokens.

    Rows that were evicted while those tokens were appended stay evicted, and their attention stays
    in accumulated sums. The store drops its rows at the end of the turn.
    """
    session = resident.session
    dropped = session.length - length
    if dropped:
        cache.drop_from(resident.slot, length)
        session.length = length
        session.eviction_scores = session.eviction_scores.before(length)
        if session.host_copy is not None:
            session.host_copy.truncate(length)
    return dropped
