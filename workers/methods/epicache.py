"""EpiCache: one selection per episode of the conversation."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvrecall.domain.settings.methods import EpiCacheSettings
from kvrecall.domain.settings.session import LayerBudgets
from workers.methods.base import LayerRows, Method
from workers.primitives.observation import Observation
from workers.primitives.scoring import attention_scores, cosine_to_mean, smooth


@dataclass(frozen=True)
class EpiCache(EpiCacheSettings, Method):
    """Rows of the active episode's topic; among them the keys least similar to the others.

    Source: Kim et al., "EpiCache: Episodic KV Cache Management for Long Conversational Question
    Answering" (2025): episodes in section 3.1, layer budgets by sensitivity in section 3.2.

    Deviations: the defaults are the best configuration of `kvrecall eval longconv` on the reference
    model: KeyDiff's score, averaged as ranks over layers and heads, plus `topic` times the
    similarity of the token's segment to the episode. The paper's configuration is
    `rank="attention"`, `whole_tokens=false`, `topic=0`: the attention from the episode's medoid
    segments (the patched prompt, section 2.3), max over their tokens and over a KV head's group
    (eq. 3), pooled over 7 neighbours, with `prompt` in front and 8 medoid windows (32 utterances)
    as in the authors' code; a layer's budget is then shared between its heads by score. Builds and
    evictions run the same prompt: at most `episode_tokens` of the worker (2,048), in pieces of at
    most `prompt_tokens` (256). Before there are episodes, the last `window` tokens are observed
    instead.
    """

    name: ClassVar[str] = "epicache"
    has_episodes: ClassVar[bool] = True
    layer_budgets: ClassVar[LayerBudgets] = "sensitivity"

    @property
    def observation(self) -> Observation:
        """The episode's patched prompt, or the window; nothing unless `rank` is attention."""
        if self.rank == "key_difference":
            return Observation()
        return Observation(window=self.window, prompt=self.prompt, episode=True)

    @property
    def compares_rows(self) -> bool:
        """True for `key_difference`: keys are compared with their mean."""
        return self.rank == "key_difference"

    def scores(self, rows: LayerRows) -> Tensor:
        """KeyDiff's score, or attention pooled over `pool` neighbouring tokens."""
        if self.rank == "key_difference":
            return -cosine_to_mean(rows.keys, rows.positions)
        by = self.reduce
        scores = attention_scores(
            rows.queries, rows.keys, rows.positions, rows.query_positions, tokens=by, group=by
        )
        return smooth(scores, rows.positions, self.pool)
