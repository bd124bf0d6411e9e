"""Claims on sessions within one process."""

import time
from dataclasses import dataclass

from kvrecall.domain.errors import SessionBusy


@dataclass(frozen=True)
class _Claim:
    holder: str
    until: float


class Claims:
    """Claims by session, each with a deadline on this process's monotonic clock."""

    def __init__(self) -> None:
        self._claims: dict[str, _Claim] = {}

    def acquire(self, session_id: str, holder: str, seconds: float) -> None:
        """Claim a session, or extend the holder's claim, for `seconds` from now.

        Raises SessionBusy while another holder's claim lasts.
        """
        now = time.monotonic()
        claim = self._claims.get(session_id)
        if claim is not None and claim.holder != holder and now < claim.until:
            raise build_session_busy(session_id, claim.holder)
        self._claims[session_id] = _Claim(holder, now + seconds)

    def release(self, session_id: str, holder: str) -> None:
        """End the holder's claim, if it has one."""
        claim = self._claims.get(session_id)
        if claim is not None and claim.holder == holder:
            del self._claims[session_id]

    def discard(self, session_id: str) -> None:
        """End any claim on the session."""
        self._claims.pop(session_id, None)


def build_session_busy(session_id: str, holder: str) -> SessionBusy:
    """Build the error for a session that another holder has claimed."""
    return SessionBusy(
        f"session {session_id!r} is being worked on by {holder}; try again when its turn is over"
    )
