"""Which queries rows are scored with."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Observation:
    """Which queries a method scores with: a value, so that the engine need not know the method.

    - `window`: the turn's last so many tokens, prefilled or decoded.
    - `prompt`: a text that is run over the active rows after the block, scored with and forgotten (EpiCache 2.3).
    - `repeats_block`: the block's own tokens follow the prompt (KVzip).
    - `episode`: the active episode's medoid segments follow the prompt; without an episode the window is observed.
    - `accumulate`: every query is observed, and each row's sum over all of them is kept with the row: of its
      "attention", mean over the group (H2O), or of the "hits", queries that gave it more than an even share
      (Scissorhands).
    """

    window: int = 0
    prompt: str = ""
    repeats_block: bool = False
    episode: bool = False
    accumulate: Literal["", "attention", "hits"] = ""

    @property
    def uses_patched_prompt(self) -> bool:
        """Whether a prompt may be run over the active rows: places for it are then kept free."""
        return bool(self.prompt or self.repeats_block or self.episode)

    def patched_prompts(
        self, instruction: Sequence[int], block: Sequence[int], episode: Sequence[int], most: int
    ) -> list[list[int]]:
        """What to run over the active rows before an eviction, each for itself, `most` tokens each; none: the window.

        instruction: token ids of `prompt`; block: those said since the last eviction; episode: those of the active
        episode's medoid segments. A block that is too long is repeated in pieces, each after the instruction; of an
        episode that is too long the last tokens count.
        """
        if not self.uses_patched_prompt or (self.episode and not episode):
            return []
        asked = list(instruction[:most])
        room = most - len(asked)
        if self.repeats_block and room and block:
            return [[*asked, *block[start : start + room]] for start in range(0, len(block), room)]
        if self.episode and room:
            return [[*asked, *episode[-room:]]]
        return [asked] if asked else []


@dataclass(frozen=True)
class Observed:
    """Post-RoPE queries of some tokens: per layer `[n_heads, t, head_dim]`; their positions, int32 `[t]`.

    beside: what each query sees beside the rows, per layer `causal_logsumexp`, float32 `[n_heads, t]`: its prompt's own keys,
    which were forgotten. None for tokens that were said: their keys are rows.
    """

    queries: tuple[Tensor, ...]
    positions: Tensor
    extra_logsumexp: tuple[Tensor, ...] = ()

    @property
    def tokens(self) -> int:
        """How many tokens were observed."""
        return int(self.positions.shape[0])

    @classmethod
    def concatenate(cls, parts: "Sequence[Observed]") -> "Observed":
        """Several observations as one."""
        queries = zip(*(part.queries for part in parts), strict=True)
        extra = zip(*(part.extra_logsumexp for part in parts), strict=True)
        return cls(
            tuple(torch.cat(of_layer, dim=1) for of_layer in queries),
            torch.cat([part.positions for part in parts]),
            tuple(torch.cat(of_layer, dim=1) for of_layer in extra),
        )


def causal_logsumexp(queries: Tensor, keys: Tensor) -> Tensor:
    """How much softmax weight a prompt's queries have for the prompt's own keys, each for those up to its own.

    queries `[n_heads, t, head_dim]`, keys `[n_kv_heads, t, head_dim]`, of the same tokens. Returns the logarithm of
    the sum of the exponentials of the logits, float32 `[n_heads, t]`. Head by head: t may be a whole block.
    """
    tokens, head_dim = keys.shape[1:]
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=keys.device).triu(1)
    masses = []
    for of_group, of_head in zip(queries.float().chunk(len(keys)), keys.float(), strict=True):
        logits = (of_group @ of_head.T) * head_dim**-0.5
        masses.append(logits.masked_fill(later, -torch.inf).logsumexp(-1))
    return torch.cat(masses)


class RecentQueries:
    """The queries of a turn's last `width` tokens, prefilled or decoded, as eviction methods observe them.

    It starts empty in every turn: what is evicted then depends on the turn alone, so a session that was resumed
    after a crash evicts what it would have evicted.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self._queries: tuple[Tensor, ...] = ()
        self._positions = torch.empty(0, dtype=torch.int32)

    def push(self, queries: list[Tensor], positions: Tensor) -> None:
        """Add the newest tokens: per layer `[n_heads, t, head_dim]`, positions `[t]`."""
        if not self.width:
            return
        if self._queries:
            queries = [
                torch.cat([a, b], dim=1) for a, b in zip(self._queries, queries, strict=True)
            ]
            positions = torch.cat([self._positions.to(positions.device), positions])
        self._queries = tuple(q[:, -self.width :] for q in queries)
        self._positions = positions[-self.width :]

    def clear(self) -> None:
        """Forget, at the start of a turn."""
        self._queries = ()
        self._positions = self._positions[:0]

    def observed(self) -> Observed:
        """What is held now; no layers and no tokens before the turn's first."""
        return Observed(self._queries, self._positions)
