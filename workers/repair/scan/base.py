"""What every kind of scan has: what it goes over, when it must end, and what it found."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.repair.scan.pages import Chunk, Pages
from workers.repair.scan.softmax import Signal

AmbiguousTokens = Callable[[Tensor, Tensor], Tensor]
"""Lower and upper bounds on the scores, float32 `[length]` -> bool `[length]`: tokens whose scores must be known
better before the choice is certain; none: it is."""


@dataclass(frozen=True, eq=False)
class ScanResult:
    """What a scan found.

    scores: float32 `[length]`, on the CPU, 0 where a token was not scored; scored: bool `[length]`; bytes_read: of
    stored pages, keys and values, as the tiers delivered them; complete: whether it came to its end unhurried.
    """

    scores: Tensor
    scored: Tensor
    bytes_read: int
    complete: bool


@dataclass(frozen=True, eq=False)
class Scan:
    """What is scanned, and with what; `counted` is bool `[n_layers, n_kv_heads, length]` on the device, or None."""

    pages: Pages
    signal: Signal
    counted: Tensor | None
    stop_requested: Callable[[], bool]
    device: torch.device

    def zeros(self) -> Tensor:
        """float32 `[length]` on the device."""
        return torch.zeros(self.pages.length, device=self.device)

    def counts(self, layer: int, chunk: Chunk) -> Tensor | None:
        """Which of a chunk's rows count, bool `[n_kv_heads, rows]`; None for all."""
        return None if self.counted is None else self.counted[layer][:, chunk.positions]

    def to_result(self, scores: Tensor, scored: Tensor, complete: bool) -> ScanResult:
        """The result as it is now."""
        return ScanResult(scores.cpu(), scored.cpu(), self.pages.bytes_read, complete)
