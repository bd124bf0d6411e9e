"""Scores with which tokens were last evicted, in a form that does not grow with the session."""

from dataclasses import dataclass, field

import torch
from safetensors.torch import load, save
from torch import Tensor


def _no_tokens() -> Tensor:
    return torch.empty(0, dtype=torch.int32)


def _no_scores() -> Tensor:
    return torch.empty(0)


@dataclass(frozen=True, eq=False)
class EvictionScores:
    """The highest of the scores with which a session's tokens were last evicted.

    A repair breaks ties with them (RepairKV, Algorithm 1). It chooses fewer tokens than the budget,
    so of equal candidates only the best `limit` matter: the others are kept out of the state.

    Attributes:
        tokens: Positions, int32 `[m]`, ascending, on the CPU.
        scores: float32 `[m]`, the mean over layers and heads.
    """

    tokens: Tensor = field(default_factory=_no_tokens)
    scores: Tensor = field(default_factory=_no_scores)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return int(self.tokens.nbytes + self.scores.nbytes)

    def updated(self, tokens: Tensor, scores: Tensor, limit: int) -> "EvictionScores":
        """Set the scores of some tokens, int `[k]`, each once; keep the `limit` highest of all.

        Of equal scores the earlier token's is kept.
        """
        older = ~torch.isin(self.tokens, tokens.to(torch.int32))
        return _highest(
            torch.cat([self.tokens[older], tokens.to(torch.int32)]),
            torch.cat([self.scores[older], scores.float()]),
            limit,
        )

    def before(self, length: int) -> "EvictionScores":
        """Keep the scores of the first `length` tokens."""
        kept = self.tokens < length
        return EvictionScores(self.tokens[kept], self.scores[kept])

    def to_dense(self, length: int) -> Tensor:
        """Scores of the first `length` tokens: float32 `[length]`, `-inf` where there is none."""
        dense = torch.full((length,), -torch.inf)
        dense[self.tokens.long()] = self.scores
        return dense

    def to_bytes(self) -> bytes:
        """Serialise as safetensors: 8 bytes a token."""
        return save({"tokens": self.tokens, "scores": self.scores})

    @classmethod
    def from_bytes(cls, data: bytes) -> "EvictionScores":
        """Parse the result of `to_bytes`; empty bytes have no token."""
        if not data:
            return cls()
        tensors = load(data)
        return cls(tensors["tokens"], tensors["scores"])

    @classmethod
    def from_dense(cls, scores: Tensor, limit: int) -> "EvictionScores":
        """Keep the `limit` highest of float32 `[length]`, 0 where there is none."""
        tokens = scores.nonzero().flatten()
        return _highest(tokens, scores[tokens], limit)


def _highest(tokens: Tensor, scores: Tensor, limit: int) -> EvictionScores:
    tokens, order = tokens.to(torch.int32).sort()
    scores = scores[order]
    if len(tokens) > limit:
        kept = scores.sort(descending=True, stable=True).indices[:limit].sort().values
        tokens, scores = tokens[kept], scores[kept]
    return EvictionScores(tokens, scores)
