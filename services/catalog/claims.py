"""Who works on a session now, within one process."""

import time
from dataclasses import dataclass

from kvrecall.domain.errors import SessionBusy


@dataclass(frozen=True)
class _Claim:
    holder: str
    until: float


class Claims:
    """Claims of sessions, each until a time of this process's own clock."""

    def __init__(self) -> None:
        self._claims: dict[str, _Claim] = {}

    def take(self, session: str, holder: str, seconds: float) -> None:
        """Claim a session, or have a claim last on. Raises SessionBusy while another holder's lasts."""
        now = time.monotonic()
        claim = self._claims.get(session)
        if claim is not None and claim.holder != holder and now < claim.until:
            raise busy(session, claim.holder)
        self._claims[session] = _Claim(holder, now + seconds)

    def give_back(self, session: str, holder: str) -> None:
        """End the holder's claim, if it has one."""
        claim = self._claims.get(session)
        if claim is not None and claim.holder == holder:
            del self._claims[session]

    def forget(self, session: str) -> None:
        """End whatever claim there is."""
        self._claims.pop(session, None)


def busy(session: str, holder: str) -> SessionBusy:
    """What is told to whoever comes second."""
    return SessionBusy(
        f"session {session!r} is being worked on by {holder}; try again when its turn is over"
    )
