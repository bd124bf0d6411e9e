"""A session that this process is active in."""

import asyncio

from kvrecall.domain.events import EventBus, OpenReason, StateChanged
from kvrecall.domain.sessions.session import Session
from kvrecall.domain.sessions.state_machine import SessionEvent, SessionState, next_state
from kvrecall.telemetry.spans import NO_SPAN, Span
from services.sessions.leases import Claim


class ActiveSession:
    """The state of a session in this process, beyond the catalog.

    - `needs_reopen`: the worker may hold something else than what was committed. True until the
      session is first opened here, while a turn or repair runs, after one that failed, and when
      another process has written the session since.
    - `stop_repairs` is set while a turn waits that takes what repairs have found so far: the
      running one stops early and no other starts.
    - `repairs_pending`: some repairs may be due; `repairs_cause` is the turn or event because of
      which they are.
    - `unsettled`: its last turn left pages of tokens to be computed.
    - `outputs_grown`: a tool of the pause has reported output or a result.
    - `prefilled_ahead`: the session's turns and the bytes of tools' messages, when the next prompt was
      last prefilled; `prefills_ahead`: it is now.
    - `started_calls`: when this process was told of the start of tool calls that run, by id, in
      seconds since the epoch.
    - `pause_began`, `repair_ended`: monotonic seconds of the last such moment in this process.
    """

    def __init__(self, session: Session, events: EventBus) -> None:
        self.id = session.id
        self.tenant = session.settings.tenant
        self.state = session.committed_state
        self._events = events
        self.claim = Claim(session.id)
        self._dirty = True
        self.opened = False
        self.deleted = False
        self.write_lock = asyncio.Lock()
        self.open_lock = asyncio.Lock()
        self.queued_turns = 0
        self.waiting_writers = 0
        self.has_episodes = session.settings.episodes is not None
        self.remembers = bool(session.settings.remember)
        self.background: asyncio.Task[None] | None = None
        self.maintenance: asyncio.Task[None] | None = None
        self.repairs_pending = False
        self.unsettled = False
        self.outputs_grown = False
        self.prefilled_ahead = (0, 0)
        self.prefills_ahead = False
        self.pause_began: float | None = None
        self.repair_ended: float | None = None
        self.repairs_cause: Span = NO_SPAN
        self.stop_repairs = asyncio.Event()
        self.started_calls: dict[str, float] = {}

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
    def in_use(self) -> bool:
        """True while a request or background work holds the session, or waits for it."""
        return bool(
            self.queued_turns
            or self.waiting_writers
            or self.write_lock.locked()
            or self.open_lock.locked()
            or self.claim.tasks
            or (self.background is not None and not self.background.done())
        )

    @property
    def in_turn(self) -> bool:
        """True while a turn runs that is not committed."""
        return self.state in (SessionState.PREFILLING, SessionState.DECODING)

    def get_open_reason(self, worker: str) -> OpenReason:
        """Why the session is opened in `worker` now."""
        if not self.opened:
            return "first_use"
        if self.claim.epoch is None:
            return "other_gateway"
        return "rollback" if self.claim.worker == worker else "worker_lost"

    def advance(self, event: SessionEvent) -> None:
        """Move to the next state. Raises IllegalTransition."""
        before, self.state = self.state, next_state(self.state, event)
        if self.state is not before:
            self._events.publish(StateChanged(self.id, self.state))

    def roll_back(self, session: Session) -> None:
        """Return to the state that was committed."""
        paused = session.committed_state is SessionState.PAUSED
        idle, pause = SessionEvent.ROLLED_BACK_TO_IDLE, SessionEvent.ROLLED_BACK_TO_PAUSE
        self.advance(pause if paused else idle)
