"""LoopServe: the answer's own queries select the rows anew, every few tokens."""

from dataclasses import dataclass
from typing import ClassVar

from kvrecall.domain.settings.methods import LoopServeSettings
from kvrecall.domain.settings.prefill import Prefill
from kvrecall.domain.settings.reselection import Reselection
from workers.methods.snapkv import SnapKV


@dataclass(frozen=True)
class LoopServe(LoopServeSettings, SnapKV):
    """Attention of the turn's last `window` tokens; while answering, of the answer's, over all rows.

    Source: "LoopServe: An Adaptive Dual-Phase LLM Inference Acceleration System for Multi-Turn
    Dialogues" (2025), section 5.2 and Algorithm 6.

    Deviations: `token_share` of the rows are selected as whole tokens and scores are pooled along
    the sequence, as SnapKV's; the paper's selection, each head on its own, is `{"every": 16,
    "token_share": 0, "pool": 1}`. A row's score is the largest attention of a query, where a token
    counts 0.85 of the next one, not the sum; sinks, the recent window and the newest rows of the
    turn stay, as in evictions; rows that are not selected are in the row store, not on the device.
    """

    name: ClassVar[str] = "loopserve"

    # No settings of a session; only research replaces them.
    first: int = Reselection.first
    token_share: float = Reselection.token_share

    @property
    def prefill(self) -> Prefill:
        """Prompts attend to every stored row: the paper keeps them all."""
        return Prefill(attend="stored")

    @property
    def reselection(self) -> Reselection:
        """After `first` tokens of the answer and every `every` after that."""
        return Reselection(self.every, self.first, self.token_share)
