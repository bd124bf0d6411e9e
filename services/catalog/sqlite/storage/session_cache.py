"""Sessions that the SQLite catalog has read."""

from collections import OrderedDict
from collections.abc import Awaitable, Callable

from kvrecall.domain.sessions.session import Session

# Sessions that are cached, and the longest settings of one that is.
_SESSIONS = 1024
_SETTINGS_CHARACTERS = 8192


class SessionCache:
    """At most 1,024 committed sessions, the least recently used replaced first.

    The process that owns the file is its only writer, so an entry is right until that writer drops
    it, which it does before it acknowledges the write. A session with open calls, repairs or
    settings of more than 8,192 characters is not held: its size is not bounded.
    """

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._reading: dict[str, object] = {}

    async def get(
        self, session_id: str, read: Callable[[], Awaitable[Session]], tenant: str | None = None
    ) -> Session:
        """Return the cached session, or the result of `read`. Raises what `read` raises.

        With a `tenant`, another tenant's session is read as if it were not cached.
        """
        found = self._sessions.get(session_id)
        if found is not None and tenant in (None, found.settings.tenant):
            self._sessions.move_to_end(session_id)
            return found
        reading = self._reading[session_id] = object()
        try:
            session = await read()
        finally:
            # A write in between, or a later read, has taken this read's place.
            current = self._reading.get(session_id) is reading
            if current:
                del self._reading[session_id]
        if current and _is_small(session):
            self._sessions[session_id] = session
            if len(self._sessions) > _SESSIONS:
                self._sessions.popitem(last=False)
        return session

    def drop(self, session_id: str | None) -> None:
        """Forget a session that was written, or all of them; reads on their way stay uncached."""
        if session_id is None:
            self._sessions.clear()
            self._reading.clear()
        else:
            self._sessions.pop(session_id, None)
            self._reading.pop(session_id, None)


def _is_small(session: Session) -> bool:
    if session.calls or session.repairs:
        return False
    settings = session.settings
    texts = (
        *settings.tools,
        str(settings.method_settings),
    )
    pairs = (text for pair in settings.metadata.items() for text in pair)
    return sum(map(len, texts)) + sum(map(len, pairs)) <= _SETTINGS_CHARACTERS
