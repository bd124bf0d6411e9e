"""Sessions over fewer slots: turns need one, paused sessions may keep theirs or give it away."""

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from benchmarks.pause_slots.policies import Policy
from benchmarks.pause_slots.recordings import Step


@dataclass(eq=False)
class _Session:
    """A session: where its rows are, and since when it pauses."""

    steps: Iterator[Step]
    resident: bool = False
    arrives_at: float | None = None
    paused_at: float = 0.0
    returns_at: float = 0.0
    waits_since: float | None = None


@dataclass
class Simulation:
    """Plays sessions on `slots` slots; a swap-in takes `swap_seconds`.

    `waits` are the seconds from each tool's result to the beginning of its turn: of the queue for a slot
    and of the swap-in.
    """

    policy: Policy
    slots: int
    swap_seconds: float
    waits: list[float] = field(default_factory=list)
    _free: int = field(init=False)
    _now: float = 0.0
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _numbers: "count[int]" = field(default_factory=count)
    _waiting: deque[_Session] = field(default_factory=deque)
    _paused: list[_Session] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._free = self.slots

    def run(self, runs: list[Iterator[Step]]) -> list[float]:
        """Play each run in a session of its own, all at once; returns the waits."""
        for number, steps in enumerate(runs):
            session = _Session(steps)
            self._at(0.1 * number, partial(self._arrive, session))
        while self._events:
            self._now, _, happen = heapq.heappop(self._events)
            happen()
        return self.waits

    def _at(self, time: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), happen))

    def _arrive(self, session: _Session) -> None:
        """Begin a turn, or wait for a slot: the tool's result has come."""
        if session in self._paused:
            self._paused.remove(session)
        session.waits_since = self._now
        if session.resident:
            self._begin(session)
        elif session.arrives_at is None:
            self._waiting.append(session)
            self._dispatch()

    def _dispatch(self) -> None:
        while self._waiting and self._take_slot(None):
            self._swap_in(self._waiting.popleft())

    def _take_slot(self, returns_before: float | None) -> bool:
        """Take a free slot, or that of a paused session; of one that returns later, if a time is given."""
        if self._free:
            self._free -= 1
            return True
        resident = [each for each in self._paused if each.resident]
        if returns_before is not None:
            resident = [each for each in resident if each.returns_at > returns_before]
        if not resident:
            return False
        if self.policy.predict is None:
            victim = min(resident, key=lambda each: each.paused_at)
        else:
            victim = max(resident, key=lambda each: each.returns_at)
        victim.resident = False
        return True

    def _swap_in(self, session: _Session) -> None:
        session.arrives_at = self._now + self.swap_seconds
        self._at(session.arrives_at, partial(self._arrived, session))

    def _arrived(self, session: _Session) -> None:
        session.arrives_at = None
        session.resident = True
        if session.waits_since is not None:
            self._begin(session)
        elif self._waiting:
            self._dispatch()

    def _begin(self, session: _Session) -> None:
        assert session.waits_since is not None, "a turn begins with a result"
        self.waits.append(self._now - session.waits_since)
        session.waits_since = None
        step = next(session.steps, None)
        if step is None:
            session.resident = False
            self._free += 1
            self._dispatch()
        else:
            self._at(self._now + step.turn_seconds, partial(self._pause, session, step))

    def _pause(self, session: _Session, step: Step) -> None:
        session.paused_at = self._now
        self._paused.append(session)
        self._at(self._now + step.pause_seconds, partial(self._arrive, session))
        if self.policy.predict is not None:
            session.returns_at = self._now + self.policy.predict(step)
            ahead = max(self._now, session.returns_at - self.swap_seconds)
            self._at(ahead, partial(self._fetch_ahead, session))
        self._dispatch()

    def _fetch_ahead(self, session: _Session) -> None:
        """Swap a session in before its result comes, where no other loses by it."""
        absent = not session.resident and session.arrives_at is None
        wanted = absent and session in self._paused and not self._waiting
        if wanted and self._take_slot(session.returns_at):
            self._swap_in(session)
