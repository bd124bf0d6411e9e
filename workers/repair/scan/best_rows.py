"""The rows with each query's largest logits, kept while rows arrive in parts."""

import torch
from torch import Tensor

# Of so many rows the largest logit is looked at first.
_STRIDE = 16


class BestRows:
    """The rows with each query's largest logits, of rows that arrive in parts.

    Attributes:
        logits: float32 `[n_kv_heads, q, k]`, k at most the number of rows wanted; -inf for none.
        positions: int64 of the same shape; any row where there is none.
    """

    logits: Tensor
    positions: Tensor

    def __init__(self, count: int) -> None:
        """Keep `count` rows of each query."""
        self._count = count
        self._empty = True

    @property
    def none(self) -> Tensor:
        """Where there is no row, bool `[n_kv_heads, q, k]`."""
        return self.logits == -torch.inf

    def add(self, logits: Tensor, positions: Tensor) -> None:
        """Add rows: `[n_kv_heads, q, rows]`, and positions int64 `[rows]` or `[n_kv_heads, rows]`."""
        full = not self._empty and self.logits.shape[-1] == self._count
        least = self.logits.amin(-1, keepdim=True) if full else None
        index = _pick(logits, self._count, least)
        values = logits.gather(2, index)
        found = positions.expand(len(logits), -1)[:, None].expand_as(logits).gather(2, index)
        if not self._empty:
            values = torch.cat([self.logits, values], 2)
            found = torch.cat([self.positions, found], 2)
        best = values.topk(min(self._count, values.shape[2]), sorted=False)
        self.logits = best.values
        self.positions = found.gather(2, best.indices).clamp(min=0)
        self._empty = False


def _pick(logits: Tensor, count: int, least: Tensor | None) -> Tensor:
    """Indices of rows with the `count` largest logits over `least` among them, for each query.

    logits: `[n_kv_heads, q, rows]`; least: `[n_kv_heads, q, 1]`. Of every 16 rows the largest logit
    is looked at first, which takes a fraction of the time that a choice among all rows does.
    """
    rows = logits.shape[2]
    strides = rows // _STRIDE
    if strides <= count:
        return logits.topk(min(count, rows), sorted=False).indices
    whole = logits[..., : strides * _STRIDE]
    peaks = torch.unflatten(whole, 2, (_STRIDE, strides)).amax(2)
    if least is not None:
        count = min(count, int((peaks > least).sum(2).max()))
    chosen = peaks.topk(count, sorted=False).indices
    members = chosen[:, :, None] + strides * torch.arange(_STRIDE)[:, None]
    rest = torch.arange(strides * _STRIDE, rows).expand(*logits.shape[:2], -1)
    return torch.cat([members.flatten(2), rest], 2)
