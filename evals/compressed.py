"""A replayed conversation whose context was compressed after a turn: the base cache of RepairKV 3.1."""

from dataclasses import dataclass

import torch
from torch import Tensor

from evals.replay_session import Replayed, rows_held, tokens_held
from kvrecall.protocol.v1 import worker_pb2 as wire


@dataclass
class Compressed:
    """Between two turns. Only the first `context` tokens are evictable.

    `tail`: where the last turn begins, whose prompts and replies stay as they are. `scores`: of the first stage,
    float32 `[context]`.
    """

    replayed: Replayed
    context: int
    tail: int
    base_rows: int
    scores: Tensor

    @property
    def sinks(self) -> int:
        """First tokens, which every selection keeps."""
        return self.replayed.engine.settings.sinks

    @property
    def kept(self) -> Tensor:
        """Tokens of the context that every selection keeps, sinks and the newest: bool `[context]`."""
        places = torch.arange(self.context)
        return (places < self.sinks) | (
            places >= self.context - self.replayed.engine.settings.recent
        )

    def compressed(self, rows: int) -> Tensor:
        """The `rows` tokens of the context that the first stage keeps, int64 ascending.

        Whole tokens: the method's selection takes them as the rows of one head.
        """
        scores = self.scores.masked_fill(self.kept, torch.inf)
        places = torch.arange(self.context, dtype=torch.int32)
        return self.replayed.method.select(scores[None], places[None], rows)[0]

    @property
    def after(self) -> Tensor:
        """The last turn's own tokens, int64."""
        return torch.arange(self.tail, self.replayed.state.length)

    def holding(self, context: Tensor) -> wire.SessionState:
        """These tokens of the context, int64, and the last turn's."""
        return self.replayed.holding(torch.cat([context, self.after]), self.scores)

    def held_of_context(self, state: wire.SessionState) -> Tensor:
        """The context's tokens that a state holds, int64 ascending."""
        held = tokens_held(state)
        return held[held < self.context]

    def rows_of(self, state: wire.SessionState, budget: int) -> int:
        """Active rows per KV head of a state, all of them: at most `budget` of the context, and the last turn's.

        Asserts it: a condition with more rows than it says would be no comparison.
        """
        rows = rows_held(state)
        after = len(self.after)
        assert rows <= budget + after, f"{rows} rows are active, {budget} and {after} may be"
        return rows
