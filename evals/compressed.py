"""A replayed conversation with a compressed context: the base cache of RepairKV 3.1."""

from dataclasses import dataclass

import torch
from torch import Tensor

from evals.replay_session import ReplaySession, active_row_count, active_tokens
from kvrecall.protocol.v1 import worker_pb2 as pb


@dataclass
class CompressedContext:
    """A conversation between two turns, of which only the first `context` tokens are evictable.

    `turn_start` is the position of the last turn's first token: its prompts and replies stay
    active. `base_rows` is the base budget in rows per head. `scores` are the first stage's, float32
    `[context]`.
    """

    session: ReplaySession
    context: int
    turn_start: int
    base_rows: int
    scores: Tensor

    @property
    def sinks(self) -> int:
        """Number of first tokens, which every selection keeps."""
        return self.session.engine.settings.sinks

    @property
    def protected(self) -> Tensor:
        """Mask of the tokens that every selection keeps, sinks and the newest: bool `[context]`."""
        positions = torch.arange(self.context)
        recent = self.session.engine.settings.recent
        return (positions < self.sinks) | (positions >= self.context - recent)

    @property
    def turn_tokens(self) -> Tensor:
        """Positions of the last turn's own tokens, int64 ascending."""
        return torch.arange(self.turn_start, self.session.state.length)

    def select(self, rows: int) -> Tensor:
        """Positions of the `rows` context tokens that the first stage keeps, int64 ascending.

        Whole tokens are kept: the method's selection takes them as the rows of one head.
        """
        scores = self.scores.masked_fill(self.protected, torch.inf)
        positions = torch.arange(self.context, dtype=torch.int32)
        return self.session.method.select(scores[None], positions[None], rows)[0]

    def with_active(self, context: Tensor) -> pb.SessionState:
        """State with the context tokens at these int64 positions and the last turn active."""
        return self.session.with_active(torch.cat([context, self.turn_tokens]), self.scores)

    def active_context(self, state: pb.SessionState) -> Tensor:
        """Positions of the context's tokens that are active in `state`, int64 ascending."""
        active = active_tokens(state)
        return active[active < self.context]

    def count_rows(self, state: pb.SessionState, budget: int) -> int:
        """Active rows per KV head of a state, context and last turn together.

        Asserts that they are at most `budget` plus the last turn's: a condition with more rows than
        it reports would be no comparison.
        """
        rows = active_row_count(state)
        own = len(self.turn_tokens)
        assert rows <= budget + own, f"{rows} rows are active, {budget} and {own} may be"
        return rows
