"""Versions of sessions as they are read: equal ones mean that nothing was committed in between."""

from hashlib import blake2b

from kvrecall.domain.sessions.session import Session
from kvrecall.domain.sessions.state_machine import SessionState


def get_version(session: Session, state: SessionState | None = None) -> str:
    """Digest all that a commit to the session changes, and its `state` now where that is shown."""
    calls = [
        (call.call.id, call.status, call.last_event_at, call.call_signal, call.delta_repaired)
        for call in session.calls
    ]
    parts = (
        session.epoch,
        session.turns,
        session.updated_at,
        session.memory,
        session.output_due,
        session.worker,
        session.repairs,
        calls,
        None if state is None else state.value,
    )
    return blake2b(repr(parts).encode(), digest_size=12).hexdigest()
