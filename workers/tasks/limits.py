"""The end of a session, in tokens."""

from workers.engine.engine import Engine
from workers.engine.session import ResidentSession


def get_limit(engine: Engine, resident: ResidentSession) -> int:
    """Return the most tokens of the session: see `LongSessions`, or a slot that `full` never leaves."""
    limit = engine.long_sessions.get_limit(resident.config)
    if resident.config.method.evicts:
        return limit
    return min(limit, engine.bound(resident.session)[0])
