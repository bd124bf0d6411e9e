"""One session in this process: its state, its locks and its background work."""

import asyncio

from kvrecall.domain.session import Session
from kvrecall.domain.state_machine import SessionEvent, SessionState, next_state
from services.leases import Claim


class ActiveSession:
    """Everything that this process knows of a session beyond the catalog.

    - `needs_reopen`: the worker may hold something else than what was committed. True until the
      session is first opened here, while a turn or repair runs, after one that failed, and when
      another process has written the session since.
    - `stop_repairs` is set while a turn waits that takes what repairs have found so far: the
      running one stops early and no other starts.
    - `repairs_pending`: some repairs may be due.
    """

    def __init__(self, session: Session) -> None:
        self.id = session.id
        self.state = session.committed_state
        self.claim = Claim(session.id)
        self._dirty = True
        self.opened = False
        self.deleted = False
        self.write_lock = asyncio.Lock()
        self.open_lock = asyncio.Lock()
        self.queued_turns = 0
        self.waiting_writers = 0
        self.has_episodes = session.settings.episodes is not None
        self.background: asyncio.Task[None] | None = None
        self.maintenance: asyncio.Task[None] | None = None
        self.repairs_pending = False
        self.stop_repairs = asyncio.Event()

    @property
    def needs_reopen(self) -> bool:
        """True when the worker may hold something else than what was committed."""
        return self._dirty or self.claim.epoch is None

    @needs_reopen.setter
    def needs_reopen(self, dirty: bool) -> None:
        self._dirty = dirty

    @property
    def idle(self) -> bool:
        """True when nothing in this process changes the session's state; another process may."""
        return self.state in (SessionState.IDLE, SessionState.PAUSED)

    @property
    def in_turn(self) -> bool:
        """True while a turn runs that is not committed."""
        return self.state in (SessionState.PREFILLING, SessionState.DECODING)

    def advance(self, event: SessionEvent) -> None:
        """Move to the next state. Raises IllegalTransition."""
        self.state = next_state(self.state, event)

    def roll_back(self, session: Session) -> None:
        """Return to the state that was committed."""
        paused = session.committed_state is SessionState.PAUSED
        self.advance(
            SessionEvent.ROLLED_BACK_TO_PAUSE if paused else SessionEvent.ROLLED_BACK_TO_IDLE
        )
