"""EpiCache: what belongs to the active episode."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from kvrecall.domain.session_settings import LayerBudgets
from workers.methods.base import LayerRows, Method
from workers.primitives.observation import Observation
from workers.primitives.scoring import Reduction, attention_scores, cosine_to_mean, smooth


@dataclass(frozen=True)
class EpiCache(Method):
    """One selection per episode of the conversation: rows of its own topic, and of these the most unlike the others.

    Source: Kim et al., "EpiCache: Episodic KV Cache Management for Long Conversational Question Answering" (2025):
    episodes, section 3.1; layer budgets by sensitivity, section 3.2. The defaults are what `kvrecall eval longconv`
    found best on the reference model: `rank="key_difference"` (KeyDiff's score), averaged over layers and heads as
    ranks (`whole_tokens`), plus `topic` times how near the token's segment is to the episode. The paper's own way is
    `rank="attention"`, `whole_tokens=false`, `topic=0`: the attention that the episode's medoid segments pay, max over
    their tokens and over a KV head's group (eq. 3), after `prompt` as in the authors' code, or that of the last
    `window` tokens before there are episodes; a layer's budget is then shared between its heads by score.
    """

    rank: Literal["attention", "key_difference"] = "key_difference"
    whole_tokens: bool = True
    topic: Annotated[float, Field(ge=0, le=100)] = 1.0
    window: Annotated[int, Field(ge=1, le=256)] = 64
    prompt: Annotated[str, Field(max_length=2000)] = (
        "Extract the essential information of this conversation."
    )
    reduce: Reduction = "max"
    pool_heads: bool = True
    pool: Annotated[int, Field(ge=1, le=63)] = 1

    name: ClassVar[str] = "epicache"
    has_episodes: ClassVar[bool] = True
    layer_budgets: ClassVar[LayerBudgets] = "sensitivity"

    @property
    def observation(self) -> Observation:
        """The episode's patched prompt, or the window; nothing where attention is not asked."""
        if self.rank == "key_difference":
            return Observation()
        return Observation(window=self.window, prompt=self.prompt, episode=True)

    @property
    def compares_rows(self) -> bool:
        """Keys are compared with their mean."""
        return self.rank == "key_difference"

    def scores(self, rows: LayerRows) -> Tensor:
        """The rank's score, attention smoothed over neighbours where `pool` says so."""
        if self.rank == "key_difference":
            return -cosine_to_mean(rows.keys, rows.positions)
        by = self.reduce
        scores = attention_scores(
            rows.queries, rows.keys, rows.positions, rows.query_positions, tokens=by, group=by
        )
        return smooth(scores, self.pool)
