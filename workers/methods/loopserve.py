"""LoopServe: the answer's own queries select the rows anew, every few tokens."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from kvrecall.domain.session_settings import Reselection
from workers.methods.snapkv import SnapKV


@dataclass(frozen=True)
class LoopServe(SnapKV):
    """Attention of the turn's last `window` tokens; while answering, of the answer's, over all rows.

    Source: "LoopServe: An Adaptive Dual-Phase LLM Inference Acceleration System for Multi-Turn
    Dialogues" (2025), section 5.2 and Algorithm 6. Scores are SnapKV's without pooling
    along the sequence, by the mean over a KV head's group.

    Deviations: the first selection is the prompt's eviction, not one from the prompt's last `every`
    tokens; sinks, the recent window and the newest rows of the turn stay, as in evictions; rows
    that are not selected are in the row store, not on the device.
    """

    pool: Annotated[
        int, Field(ge=1, le=63, description="Width of the pooling, in tokens; 1 is none.")
    ] = 1
    every: Annotated[
        int,
        Field(
            ge=1, le=256, description="Tokens of an answer between two selections among all rows."
        ),
    ] = 16
    first: Annotated[
        int,
        Field(ge=1, lt=2**31, description="Tokens of an answer before the first such selection."),
    ] = 16

    name: ClassVar[str] = "loopserve"

    @property
    def reselection(self) -> Reselection:
        """After `first` tokens and every `every` after that, each head its own rows."""
        return Reselection(self.every, self.first, token_share=0)
