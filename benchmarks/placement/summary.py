"""What a policy did in a part of a simulation: tokens by where they were found, waits, busy workers."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from benchmarks.placement.traces import Turn
from benchmarks.placement.worker import Served
from kvrecall_server.reporting.results import Row, speed_row


@dataclass
class Summary:
    """Sums over turns, with the waits for their first tokens, on so many workers."""

    workers: int
    tokens: Counter[str] = field(default_factory=Counter)
    waits: list[float] = field(default_factory=list)
    busy: dict[str, float] = field(default_factory=dict)
    moves: int = 0
    _begin: float = float("inf")
    _end: float = 0.0
    _owners: dict[int, str] = field(default_factory=dict)

    def add(self, turn: Turn, served: Served) -> None:
        """Add a turn."""
        found = served.found
        self.tokens.update(
            ram=found.ram, files=found.files, shared=found.shared, computed=found.computed
        )
        self.waits.append(served.wait)
        self.busy[served.worker] = self.busy.get(served.worker, 0.0) + served.busy
        self.moves += self._owners.get(turn.session, served.worker) != served.worker
        self._owners[turn.session] = served.worker
        self._begin = min(self._begin, turn.at)
        self._end = max(self._end, turn.at)

    def build_row(self, condition: str) -> Row:
        """Build a row of a result file, of at least one turn."""
        total = self.tokens.total()
        idle = [0.0] * (self.workers - len(self.busy))
        busy = np.array([*self.busy.values(), *idle])
        return {
            **speed_row(condition, "wait for the first token", "seconds", self.waits),
            **{
                f"{tier}_share": round(self.tokens[tier] / total, 4)
                for tier in ("ram", "files", "shared")
            },
            "computed_tokens": self.tokens["computed"],
            "imbalance": round(float(np.percentile(busy, 99) / busy.mean()), 3),
            "busy_share": round(float(busy.mean()) / max(self._end - self._begin, 1e-9), 3),
            "moves": self.moves,
        }
