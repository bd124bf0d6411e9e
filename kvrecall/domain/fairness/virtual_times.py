"""Start-time fair queueing (Goyal et al. 1996), with tokens as the unit of service."""

from collections import Counter, OrderedDict
from collections.abc import Iterable

# Flows that left with more service than the others are remembered, the last so many of them.
_MAX_LEFT = 1024


class VirtualTimes:
    """Virtual time of each flow: its service over its weight, since it came, in tokens.

    The flow with the smallest is next. A flow that comes begins at the time of what is being served:
    it is owed nothing for the time of its absence, and waits for nothing that was served before.
    A flow that leaves and comes again keeps what it had too much.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._times: dict[str, float] = {}
        self._users = Counter[str]()
        self._left: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._times)

    def __getitem__(self, flow: str) -> float:
        """Virtual time of a flow; that of the present service for one that has no work."""
        return self._times.get(flow, max(self._now, self._left.get(flow, 0.0)))

    def enter(self, flow: str) -> None:
        """Add a piece of work of the flow, waiting or running."""
        if flow not in self._times:
            self._times[flow] = self[flow]
            self._left.pop(flow, None)
        self._users[flow] += 1

    def leave(self, flow: str) -> None:
        """Remove a piece of work of the flow."""
        self._users[flow] -= 1
        if not self._users[flow]:
            del self._users[flow]
            time = self._times.pop(flow)
            if time > self._now:
                self._left[flow] = time
                if len(self._left) > _MAX_LEFT:
                    self._left.popitem(last=False)

    def charge(self, costs: Iterable[tuple[str, float]]) -> None:
        """Charge what was served at once: flows with the tokens over their weights."""
        served = [(flow, cost) for flow, cost in costs if flow in self._times]
        if served:
            self._now = max(self._now, min(self._times[flow] for flow, _ in served))
        for flow, cost in served:
            self._times[flow] += cost
