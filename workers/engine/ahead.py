"""Tokens of a session's next prompt whose rows are computed before the turn that brings it."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Ahead:
    """Rows behind those of the committed state.

    - `length`: rows of the committed state; `pending`: the token ids behind them.
    - `token_ids`: those that have rows now, from position `length` on: the pending ones, and the next
      prompt's first.
    """

    length: int
    pending: tuple[int, ...]
    token_ids: tuple[int, ...] = ()

    @property
    def prompt_tokens(self) -> int:
        """Number of the next prompt's tokens that have rows."""
        return max(0, len(self.token_ids) - len(self.pending))

    def begins(self, prompt: Sequence[int]) -> bool:
        """Check if the prompt begins with these tokens and goes on."""
        tokens = self.prompt_tokens
        own = self.token_ids[len(self.pending) :]
        return tokens < len(prompt) and own == tuple(prompt[:tokens])
