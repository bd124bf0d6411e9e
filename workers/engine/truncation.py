"""Truncation of a running turn: the session forgets its last tokens."""

from workers.cache.active_cache import ActiveCache
from workers.engine.session import ResidentSession
from workers.engine.store_io import StoreIO


def truncate(cache: ActiveCache, store_io: StoreIO, resident: ResidentSession, length: int) -> None:
    """Drop the rows and the observed queries of all tokens from position `length` on.

    Rows that were evicted while those tokens were appended stay evicted, and their attention stays
    in accumulated sums.
    """
    session = resident.session
    dropped = session.length - length
    if not dropped:
        return
    cache.drop_from(resident.slot, length)
    session.length = length
    session.eviction_scores = session.eviction_scores.before(length)
    session.queries.drop_last(dropped)
    session.block = session.block[: max(0, len(session.block) - dropped)]
    if session.host_copy is not None:
        session.host_copy.truncate(length)
    if session.stored:
        store_io.truncate(session, length)
