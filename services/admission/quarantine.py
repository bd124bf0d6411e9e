"""Turns that are suspected to kill their workers.

A turn that loses its worker is run again in another one, once: what kills a second worker as well
is taken for the cause. It is then refused for a while, and run in one worker at a time after that,
until it succeeds, the client sends another turn, or an operator moves the session.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from kvrecall.domain.errors import TurnQuarantined

# Workers that a turn may lose before it is quarantined.
_MAX_DEATHS = 2
_MAX_SESSIONS = 1024


@dataclass
class _Suspect:
    """A turn, by its fingerprint, and the workers that it lost."""

    turn: str
    deaths: int = 0
    until: float = 0.0


class Quarantine:
    """The suspected turn of each session, in the memory of this process; the newest ones.

    Turns are named by a function that computes their fingerprint: most are never suspected.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._suspects: OrderedDict[str, _Suspect] = OrderedDict()

    def check(self, session: str, fingerprint: Callable[[], str]) -> None:
        """Raise TurnQuarantined while the turn is in quarantine."""
        suspect = self._suspects.get(session)
        if suspect is None or suspect.turn != fingerprint():
            return
        remaining = suspect.until - time.monotonic()
        if remaining > 0:
            raise TurnQuarantined(
                f"{suspect.deaths} workers were lost while they ran this turn of session "
                f"{session!r}; send another turn, or this one again in {remaining:.0f} seconds",
                remaining,
            )

    def add_death(self, session: str, fingerprint: Callable[[], str]) -> bool:
        """Count a worker that was lost while it ran the turn; return whether it may run again."""
        turn = fingerprint()
        suspect = self._suspects.pop(session, None)
        if suspect is None or suspect.turn != turn:
            suspect = _Suspect(turn)
        self._suspects[session] = suspect
        if len(self._suspects) > _MAX_SESSIONS:
            self._suspects.popitem(last=False)
        suspect.deaths += 1
        if suspect.deaths < _MAX_DEATHS:
            return True
        suspect.until = time.monotonic() + self._seconds
        return False

    def clear(self, session: str) -> None:
        """Forget the session's suspected turn: one succeeded, or an operator moved it."""
        self._suspects.pop(session, None)
