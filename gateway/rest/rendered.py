"""Responses about sessions that have not changed since the last one."""

from collections import OrderedDict
from dataclasses import dataclass

from gateway.rest.schemas.public import to_json
from gateway.rest.schemas.sessions import to_session
from kvrecall.domain.sessions.session import Session
from kvrecall.domain.sessions.state_machine import SessionState

_SESSIONS = 1024
_BYTES = 8192


@dataclass(frozen=True)
class _Rendered:
    """A session in a state, and the body of a response about it."""

    session: Session
    state: SessionState
    body: bytes


class RenderedSessions:
    """At most 1,024 bodies of responses, the least recently used replaced first.

    The catalog decides whether a session has changed: until then it returns the same object. What
    takes more than 8 KiB is not held: its size is not bounded.
    """

    def __init__(self) -> None:
        self._rendered: OrderedDict[str, _Rendered] = OrderedDict()

    def render(self, session: Session, state: SessionState, model: str) -> bytes:
        """Return the body of the response about a session of the served model."""
        known = self._rendered.get(session.id)
        if known is not None and known.session is session and known.state is state:
            self._rendered.move_to_end(session.id)
            return known.body
        body = to_json(to_session(session, state, model))
        self._rendered.pop(session.id, None)
        if len(body) <= _BYTES:
            self._rendered[session.id] = _Rendered(session, state, body)
            if len(self._rendered) > _SESSIONS:
                self._rendered.popitem(last=False)
        return body
