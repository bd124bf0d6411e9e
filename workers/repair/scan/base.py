"""The input and the result of a scan, shared by its kinds."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvrecall.domain.session_settings import RepairScan
from workers.repair.scan.pages import Chunk, Pages
from workers.repair.scan.softmax import Signal

# Lower and upper bounds on the scores, float32 `[length]` -> bool `[length]`: the tokens whose
# selection is ambiguous under the bounds; none if the selection is certain.
FindAmbiguous = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class ScanResult:
    """The scores that a scan computed.

    Attributes:
        scores: float32 `[length]`, on the CPU; 0 where a token was not scored.
        scored: Tokens that were scored, bool `[length]`.
        bytes_read: Bytes of stored pages, keys and values, as the tiers delivered them.
        complete: False if the scan was stopped early.
        searched_share: Share of the rows, over all layers and heads, whose key or code was compared
            to the queries; under 1 where an index left rows out.
        kind: The scan that ran.
        head_means: Of a scan by head: the scores of the heads' mean attention, float32 `[length]`.
    """

    scores: Tensor
    scored: Tensor
    bytes_read: int
    complete: bool
    searched_share: float = 1.0
    kind: RepairScan = "exact"
    head_means: Tensor | None = None

    @property
    def tokens(self) -> Tensor:
        """The tokens' scores, float32 `[length]`, whether or not heads were scored on their own."""
        return self.scores if self.head_means is None else self.head_means


@dataclass(frozen=True, eq=False)
class Scan:
    """The input of a scan.

    Attributes:
        pages: The session's pages.
        signal: The queries to score against.
        counted: Rows that contribute to a score, bool `[n_layers, n_kv_heads, length]` on the
            device; None for all.
        stop_requested: Returns True once the scan must end.
        device: Device of the computation.
    """

    pages: Pages
    signal: Signal
    counted: Tensor | None
    stop_requested: Callable[[], bool]
    device: torch.device

    def no_attention(self) -> Tensor:
        """Create the groups' attention before any row: float32 zeros `[groups, length]`."""
        return torch.zeros(self.signal.groups, self.pages.length, device=self.device)

    def no_tokens(self) -> Tensor:
        """Create an empty mask of tokens: bool `[length]` on the device."""
        return torch.zeros(self.pages.length, dtype=torch.bool, device=self.device)

    def get_counted(self, layer: int, chunk: Chunk) -> Tensor | None:
        """Rows of a chunk that contribute to a score, bool `[n_kv_heads, rows]`; None for all."""
        return None if self.counted is None else self.counted[layer][:, chunk.positions]

    def to_result(self, scores: Tensor, scored: Tensor, complete: bool) -> ScanResult:
        """Build the result from scores and scored tokens, `[length]`, on the device."""
        return ScanResult(scores.cpu(), scored.cpu(), self.pages.bytes_read, complete)
