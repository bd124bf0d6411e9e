"""Turns that are suspected to kill their workers.

A turn that loses its worker is run again in another one, once: what kills a second worker as well
is taken for the cause. It is then refused for a while, and run in one worker at a time after that,
until it succeeds, the client sends another turn, or an operator moves the session.
"""

import time
from collections import OrderedDict
from dataclasses import dataclass

from kvrecall.domain.errors import TurnQuarantined

# Workers that a turn may lose before it is quarantined.
_MAX_DEATHS = 2
_MAX_TURNS = 1024


@dataclass
class _Suspect:
    deaths: int = 0
    until: float = 0.0


class Quarantine:
    """Suspected turns by session and fingerprint, in the memory of this process; the newest ones."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._suspects: OrderedDict[tuple[str, str], _Suspect] = OrderedDict()

    def check(self, session: str, turn: str) -> None:
        """Raise TurnQuarantined while the turn is in quarantine."""
        suspect = self._suspects.get((session, turn))
        remaining = 0.0 if suspect is None else suspect.until - time.monotonic()
        if suspect is not None and remaining > 0:
            raise TurnQuarantined(
                f"{suspect.deaths} workers were lost while they ran this turn of session "
                f"{session!r}; send another turn, or this one again in {remaining:.0f} seconds",
                remaining,
            )

    def add_death(self, session: str, turn: str) -> bool:
        """Count a worker that was lost while it ran the turn; return whether it may run again."""
        suspect = self._suspects.setdefault((session, turn), _Suspect())
        self._suspects.move_to_end((session, turn))
        if len(self._suspects) > _MAX_TURNS:
            self._suspects.popitem(last=False)
        suspect.deaths += 1
        if suspect.deaths < _MAX_DEATHS:
            return True
        suspect.until = time.monotonic() + self._seconds
        return False

    def clear(self, session: str) -> None:
        """Forget the session's suspected turns: one succeeded, or an operator moved it."""
        for key in [key for key in self._suspects if key[0] == session]:
            del self._suspects[key]
