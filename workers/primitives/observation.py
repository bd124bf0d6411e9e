"""Observed queries: the choice of the tokens, and the queries of those tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Observation:
    """The queries that a method scores with, as a value that the engine can act on.

    Attributes:
        window: Number of the turn's last tokens, prefilled or decoded.
        prompt: Text that is run over the active rows after the block, scored with and dropped (the
            patched prompt of EpiCache, section 2.3).
        repeats_block: True if the block's own tokens follow the prompt (KVzip).
        episode: True if the active episode's medoid segments follow the prompt; without an episode
            the window is observed.
        accumulate: Observe every query, and keep each row's sum over all of them with the row: of
            its "attention", mean over the group (H2O), or of the "hits", queries that gave it more
            than uniform attention (Scissorhands).
    """

    window: int = 0
    prompt: str = ""
    repeats_block: bool = False
    episode: bool = False
    accumulate: Literal["", "attention", "hits"] = ""

    @property
    def uses_patched_prompt(self) -> bool:
        """True if a prompt may be run over the active rows, so that rows are reserved for it."""
        return bool(self.prompt or self.repeats_block or self.episode)

    def patched_prompts(
        self, instruction: Sequence[int], block: Sequence[int], episode: Sequence[int], limit: int
    ) -> list[list[int]]:
        """Build the prompts to run over the active rows before an eviction, each on its own.

        A block or an episode that is too long is split, each piece after the instruction, which
        then has at most half of the limit.

        Args:
            instruction: Token ids of `prompt`.
            block: Token ids appended since the last eviction.
            episode: Token ids of the active episode's medoid segments.
            limit: Maximum number of tokens of a prompt.

        Returns:
            Token ids per prompt; an empty list if the window is observed.
        """
        if not self.uses_patched_prompt or (self.episode and not episode):
            return []
        repeated = [*(block if self.repeats_block else ()), *(episode if self.episode else ())]
        if not repeated or not limit:
            return [list(instruction[:limit])] if instruction and limit else []
        head = instruction[: limit // 2]
        room = limit - len(head)
        return [[*head, *repeated[at : at + room]] for at in range(0, len(repeated), room)]


@dataclass(frozen=True)
class Observed:
    """Post-RoPE queries of some tokens.

    Attributes:
        queries: Per layer `[n_heads, t, head_dim]`.
        positions: Positions of the tokens, int32 `[t]`.
        extra_logsumexp: Per layer `causal_logsumexp` of a dropped prompt's own keys, float32
            `[n_heads, t]`; empty for appended tokens, whose keys are rows.
    """

    queries: tuple[Tensor, ...]
    positions: Tensor
    extra_logsumexp: tuple[Tensor, ...] = ()

    @property
    def tokens(self) -> int:
        """Number of observed tokens."""
        return int(self.positions.shape[0])

    @classmethod
    def of_prompt(
        cls, queries: Sequence[Tensor], keys: Sequence[Tensor], positions: Tensor
    ) -> "Observed":
        """Observe a prompt whose rows are dropped, with the softmax weight on its own keys.

        queries: per layer `[n_heads, t, head_dim]`; keys: `[n_kv_heads, t, head_dim]`; positions
        int32 `[t]`.
        """
        return cls(tuple(queries), positions, tuple(map(causal_logsumexp, queries, keys)))

    @classmethod
    def concatenate(cls, parts: "Sequence[Observed]") -> "Observed":
        """Concatenate observations along the tokens."""
        queries = zip(*(part.queries for part in parts), strict=True)
        extra = zip(*(part.extra_logsumexp for part in parts), strict=True)
        return cls(
            tuple(torch.cat(layer, dim=1) for layer in queries),
            torch.cat([part.positions for part in parts]),
            tuple(torch.cat(layer, dim=1) for layer in extra),
        )

    def last(self, tokens: int) -> "Observed":
        """The observation of the last `tokens` tokens, or of all if there are fewer."""
        first = max(0, self.tokens - tokens)
        return Observed(
            tuple(layer[:, first:] for layer in self.queries),
            self.positions[first:],
            tuple(layer[:, first:] for layer in self.extra_logsumexp),
        )


def causal_logsumexp(queries: Tensor, keys: Tensor) -> Tensor:
    """Log-sum-exp of the causal attention logits of a prompt over its own keys.

    queries `[n_heads, t, head_dim]` and keys `[n_kv_heads, t, head_dim]` belong to the same tokens.
    Returns float32 `[n_heads, t]`. It is computed head by head, since t may be a whole block.
    """
    tokens, head_dim = keys.shape[1:]
    future = torch.ones(tokens, tokens, dtype=torch.bool, device=keys.device).triu(1)
    parts = []
    for group_queries, head_keys in zip(
        queries.float().chunk(len(keys)), keys.float(), strict=True
    ):
        logits = (group_queries @ head_keys.T) * head_dim**-0.5
        parts.append(logits.masked_fill(future, -torch.inf).logsumexp(-1))
    return torch.cat(parts)


class RecentQueries:
    """Queries of a turn's last `width` tokens, prefilled or decoded, for the observation window.

    It is empty at the start of every turn: an eviction then depends on the turn alone, and a
    session resumed after a crash evicts the same rows.
    """

    def __init__(self, width: int) -> None:
        """Start empty; a width of 0 keeps nothing."""
        self.width = width
        # As they came: a token that is appended copies no other's queries.
        self._parts: tuple[tuple[Tensor, Tensor], ...] = ()

    def push(self, queries: Tensor, positions: Tensor) -> None:
        """Add the newest tokens: `[n_layers, n_heads, t, head_dim]`, positions int32 `[t]`."""
        if not self.width:
            return
        newest = queries[:, :, -self.width :], positions[-self.width :]
        parts = (*self._parts, newest)
        tokens = sum(len(at) for _, at in parts)
        while (tokens := tokens - len(parts[0][1])) >= self.width:
            parts = parts[1:]
        self._parts = parts

    def drop_last(self, count: int) -> None:
        """Drop the queries of the last `count` tokens; all if there are fewer."""
        if not self._parts:
            return
        queries, positions = self._joined()
        kept = max(0, len(positions) - count)
        self._parts = ((queries[:, :, :kept], positions[:kept]),)

    def clear(self) -> None:
        """Drop all queries, at the start of a turn."""
        self._parts = ()

    def observed(self) -> Observed:
        """The current window; no layers and no tokens before the turn's first."""
        if not self._parts:
            return Observed((), torch.empty(0, dtype=torch.int32))
        queries, positions = self._joined()
        return Observed(tuple(queries), positions)

    def _joined(self) -> tuple[Tensor, Tensor]:
        queries, positions = zip(*self._parts, strict=True)
        return (
            torch.cat(queries, dim=2)[:, :, -self.width :],
            torch.cat(positions)[-self.width :],
        )
