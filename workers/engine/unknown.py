"""Deletion of sessions that the catalog does not know."""

from concurrent.futures import Future

from workers.engine.engine import Engine


def delete_unknown(engine: Engine, name: str, keep_pages: int = 0) -> "Future[bool]":
    """Delete a session that is open, or stored by an earlier process and not opened since.

    All but its first `keep_pages` pages, which others share. It may be in creation: a later epoch
    may write it again. Returns whether there was one. To be called on the scheduler's thread.
    """
    session = engine.sessions.pop(name, None)
    if session is None:
        return engine.store_io.submit(
            lambda: engine.stored.delete_unclaimed(name, keep_pages=keep_pages)
        )
    engine.discard(session)
    fence = session.config.epoch + 1

    def delete() -> bool:
        engine.stored.delete(name, keep_pages=keep_pages, fence=fence)
        return True

    return engine.store_io.submit(delete)
