"""Turns that come, are placed, served and end, in the order of their times."""

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from benchmarks.placement.policies import Policy
from benchmarks.placement.traces import Turn
from benchmarks.placement.worker import Served, Worker


@dataclass
class Simulation:
    """Plays turns on workers by a policy. A turn that comes before its session's last one ends waits for that.

    What a worker holds is looked up when a turn is placed; what a turn computes is there when it ends.
    """

    policy: Policy
    workers: Sequence[Worker]
    _ends: list[tuple[float, int, Turn]] = field(default_factory=list)
    _numbers: "count[int]" = field(default_factory=count)
    _owners: dict[int, str] = field(default_factory=dict)
    _running: dict[int, deque[Turn]] = field(default_factory=dict)

    def run(self, turns: Sequence[Turn]) -> Iterator[tuple[Turn, Served]]:
        """Play turns in the order of their times; yields what each found when it is placed."""
        self._by_name = {each.name: each for each in self.workers}
        for turn in turns:
            yield from self._end_until(turn.at)
            if turn.session in self._running:
                self._running[turn.session].append(turn)
            else:
                yield self._begin(turn, turn.at)
        yield from self._end_until(float("inf"))

    def _end_until(self, time: float) -> Iterator[tuple[Turn, Served]]:
        while self._ends and self._ends[0][0] <= time:
            now, _, turn = heapq.heappop(self._ends)
            self.policy.end(turn)
            self._by_name[self._owners[turn.session]].end(turn)
            waiting = self._running.pop(turn.session)
            if waiting:
                yield self._begin(waiting.popleft(), now, waiting)

    def _begin(
        self, turn: Turn, now: float, waiting: deque[Turn] | None = None
    ) -> tuple[Turn, Served]:
        owner = self.policy.place(turn, self._owners.get(turn.session, ""))
        served = self._by_name[owner].serve(turn, now)
        self._owners[turn.session] = owner
        self._running[turn.session] = waiting or deque()
        heapq.heappush(self._ends, (served.end, next(self._numbers), turn))
        return turn, served
