"""Softmax of a signal's queries over rows that arrive in chunks, in any order."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from kvrecall.domain.settings.methods import Reduction
from workers.parallel.alone import Alone
from workers.parallel.group import Group
from workers.primitives.observation import Observed
from workers.primitives.products import compute_logits
from workers.primitives.scoring import reduce
from workers.repair.key_chunks import CHUNK_ROWS

# Logits in memory at a time: 128 MiB.
_MAX_LOGITS = 1 << 25
# The most tokens of one part of a contrasted signal.
PART_TOKENS = 256


@dataclass(frozen=True, eq=False)
class Contrast:
    """A neutral signal, and the weight `beta` with which its attention is subtracted."""

    neutral: Observed
    beta: float


@dataclass(frozen=True)
class HeadReduction:
    """How the attention of a signal becomes a score in each KV head.

    Over the signal's `tokens` first, then over the head's `group`. `causal`: the signal's tokens are
    rows, and attend to none after themselves. `decay`: what a token's attention counts relative to
    that of the next one.
    """

    tokens: Reduction = "max"
    group: Reduction = "mean"
    causal: bool = False
    decay: float = 1.0


class Signal:
    """The queries that rows are scored against: one group, or several with a contrast.

    With a contrast the groups are the parts of the signal, of at most PART_TOKENS tokens, and the
    neutral signal. They ride in one scan: a chunk is read once and multiplied once with the queries
    of all.

    Memory: the queries as they were observed, one layer of them in float32, and in the scan one
    float32 per group and token of the history (33 groups for a signal of 8,192 tokens and its
    contrast). A long signal is compared with fewer rows at a time (`rows_at_once`).

    Attributes:
        tokens: Number of tokens of all groups, t.
        groups: Number of groups.
        n_layers: Number of layers.
        n_heads: Number of query heads.
        n_kv_heads: Number of KV heads.
        first_position: Position of the signal's first token.
        device: Device of the computation.
        group: The ranks that have the other heads.
    """

    def __init__(
        self,
        observed: Observed,
        n_kv_heads: int,
        device: torch.device,
        contrast: Contrast | None = None,
        group: Group = Alone(),
    ) -> None:
        """Take the observed queries; they are scaled and grouped by KV head where they are used."""
        given = [observed] if contrast is None else [observed, contrast.neutral]
        self._parts = 1 if contrast is None else -(-observed.tokens // PART_TOKENS)
        bounds = [observed.tokens * part // self._parts for part in range(self._parts + 1)]
        self._group_tokens = [end - start for start, end in pairwise(bounds)]
        self._group_tokens += [part.tokens for part in given[1:]]
        self.n_heads, _, self._head_dim = observed.queries[0].shape
        self.tokens = sum(self._group_tokens)
        self.n_layers = len(observed.queries)
        self.n_kv_heads = n_kv_heads
        self.groups = len(self._group_tokens)
        self._beta = 0.0 if contrast is None else contrast.beta
        self.device = device
        self.group = group
        self._positions = torch.cat([part.positions for part in given]).to(device)
        self.first_position = min((int(part.positions.min()) for part in given), default=0)
        self._observed = [[queries.to(device) for queries in part.queries] for part in given]

    def queries(self, layer: int) -> Tensor:
        """Scaled queries of a layer, float32 `[n_kv_heads, group * t, head_dim]`."""
        scaled: Tensor = self._of_layer(layer).float() * self._head_dim**-0.5
        return scaled

    def rows_at_once(self, most: int, *, layers: int = 1) -> int:
        """Rows, at most `most`, whose logits in `layers` layers fit into 128 MiB; at least 1."""
        return max(1, min(most, _MAX_LOGITS // (layers * self.n_heads * self.tokens)))

    def split_rows(self, length: int, page_tokens: int) -> list[slice]:
        """Split `length` rows into chunks of whole pages, whose logits fit into memory.

        The chunks do not depend on where the keys are, so that neither do the sums over them.
        """
        pages = max(1, self.rows_at_once(CHUNK_ROWS) // page_tokens)
        firsts = range(0, length, pages * page_tokens)
        return [slice(first, min(length, first + firsts.step)) for first in firsts]

    def logits(self, layer: int, keys: Tensor) -> Tensor:
        """Logits of a layer's keys `[n_kv_heads, rows, head_dim]`: `[n_kv_heads, group * t, rows]`."""
        return compute_logits(self._of_layer(layer), keys, self._head_dim**-0.5)

    def hide_later(self, logits: Tensor, first: int) -> None:
        """Set the logits of rows after their queries to -inf, for queries that are rows.

        logits: `[..., group * t, rows]` of consecutive rows, of which `first` is the first position.
        """
        # Only the last rows can be after a query.
        skipped = max(0, self.first_position - first)
        logits = logits[..., skipped:]
        first += skipped
        positions = torch.arange(first, first + logits.shape[-1], device=logits.device)
        asked = self._positions.repeat(self.n_heads // self.n_kv_heads)
        logits.masked_fill_(positions > asked[:, None], -torch.inf)

    def attention(
        self, weights: Tensor, counted: Tensor | None, *, logarithms: bool = False
    ) -> Tensor:
        """A layer's contribution to the groups' attention to rows: float32 `[groups, rows]`.

        weights: `[n_kv_heads, group * t, rows]`, or their `logarithms`: then only the largest ones
        are raised to a power. counted: bool `[n_kv_heads, rows]`, None for all.
        """
        largest = self._max_over_tokens(weights)
        best = (largest.exp_() if logarithms else largest).sum(2)
        if counted is not None:
            best = best * counted
        return best.sum(1) / (self.n_layers * self.n_heads)

    def head_attention(self, weights: Tensor, reduction: HeadReduction) -> Tensor:
        """Attention to rows per KV head: float32 `[groups, n_kv_heads, rows]`.

        weights: `[n_kv_heads, group * t, rows]`.
        """
        parts = self._split(weights)
        if reduction.decay != 1:
            parts = [part * _decay(part, reduction.decay) for part in parts]
        by_query_head = torch.stack([reduce(part, reduction.tokens, 2) for part in parts])
        return reduce(by_query_head, reduction.group, 2)

    def score(self, attention: Tensor) -> Tensor:
        """Scores from the groups' mean attention over this rank's heads, `[groups, ...]`: `contrast` of all ranks'."""
        return self.contrast(self.group.mean(attention))

    def contrast(self, attention: Tensor) -> Tensor:
        """Scores from the groups' attention `[groups, ...]`: float32 `[...]`, 0 or more.

        `max(0, a(signal) - beta * a(neutral))`, where a(signal) is that of the part that attends
        most, less the mean of all parts if there are several: what all parts of a long signal
        attend to is nothing that one of them asks for. Without a contrast it is the signal's
        attention itself.
        """
        if self.groups == 1:
            return attention[0]
        parts = attention[: self._parts]
        signal = parts[0] if self._parts == 1 else (parts - parts.sum(0) / self._parts).amax(0)
        return (signal - self._beta * attention[-1]).clamp_min(0)

    def _of_layer(self, layer: int) -> Tensor:
        """Queries of a layer as they were observed, `[n_kv_heads, group * t, head_dim]`."""
        queries = torch.cat([part[layer] for part in self._observed], dim=1)
        return queries.reshape(self.n_kv_heads, -1, self._head_dim)

    def _max_over_tokens(self, weights: Tensor) -> Tensor:
        """The largest weight of each group's tokens: `[groups, n_kv_heads, group, rows]`."""
        return torch.stack([part.amax(2) for part in self._split(weights)])

    def _split(self, weights: Tensor) -> list[Tensor]:
        """The groups' weights: `[n_kv_heads, group, t of the group, rows]` each."""
        heads, _, rows = weights.shape
        by_token = weights.view(heads, -1, self.tokens, rows)
        return list(by_token.split_with_sizes(self._group_tokens, dim=2))


def _decay(part: Tensor, decay: float) -> Tensor:
    """What each token of a part `[..., t, rows]` counts, the last one 1: `[t, 1]`."""
    ages = torch.arange(part.shape[-2] - 1, -1, -1, dtype=part.dtype, device=part.device)
    return decay ** ages[:, None]


class Normaliser:
    """Running softmax normaliser of one layer, for every query (online softmax).

    Attributes:
        peak: Largest logit so far, float32 `[n_kv_heads, group * t, 1]`.
        total: Sum of `exp(logit - peak)`, float64 of the same shape.
    """

    def __init__(self, queries: Tensor) -> None:
        """Start without rows; queries: float32 `[n_kv_heads, group * t, head_dim]`."""
        # The least number, not -inf: a query may come after none of the first rows.
        least = torch.finfo(torch.float32).min
        self.peak = torch.full((*queries.shape[:2], 1), least, device=queries.device)
        self.total = torch.zeros_like(self.peak, dtype=torch.float64)

    def add(self, logits: Tensor) -> Tensor:
        """Add rows, `[n_kv_heads, group * t, rows]`; returns `exp(logits - peak)`, in place."""
        peak = torch.maximum(self.peak, logits.amax(-1, keepdim=True))
        self.total *= (self.peak - peak).exp()
        self.peak = peak
        weights = logits.sub_(peak).exp_()
        self.total += weights.sum(-1, keepdim=True)
        return weights

    def log(self) -> Tensor:
        """Compute the logarithm of the sum over the rows, float32 `[n_kv_heads, group * t, 1]`."""
        return self.peak + self.total.log().float()

    def weights(self, logits: Tensor) -> Tensor:
        """Compute attention weights, float32 of the shape of `logits`, in place."""
        return self.log_weights(logits).exp_()

    def log_weights(self, logits: Tensor) -> Tensor:
        """Compute the logarithms of attention weights, in place."""
        return logits.sub_(self.log())
