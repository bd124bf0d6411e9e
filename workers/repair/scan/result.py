"""The result of a scan."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class ScanResult:
    """The scores that a scan computed.

    Attributes:
        scores: float32 `[length]`, on the CPU; 0 where a token was not scored.
        scored: Tokens that were scored, bool `[length]`.
        bytes_read: Bytes of stored rows, keys and values, that were read.
        complete: False if the scan was stopped early.
        head_means: Of a scan by head: the scores of the heads' mean attention, float32 `[length]`.
    """

    scores: Tensor
    scored: Tensor
    bytes_read: int
    complete: bool
    head_means: Tensor | None = None

    @property
    def tokens(self) -> Tensor:
        """The tokens' scores, float32 `[length]`, whether or not heads were scored on their own."""
        return self.scores if self.head_means is None else self.head_means
