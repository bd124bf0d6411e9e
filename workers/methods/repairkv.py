"""RepairKV: the evicted tokens that a signal promotes, by the paper's selection or by ours."""

from dataclasses import dataclass

from torch import Tensor

from kvrecall.domain.settings.repair import RepairRule
from workers.primitives.selection import DecayWindow, best_tokens, bursts, diffuse_scores


@dataclass(frozen=True)
class RepairKV(RepairRule):
    """Attention of a signal over all rows; the best evicted tokens and their neighbours return.

    Source: RepairKV section 3, Algorithm 1.

    `select="bursts"` is the paper's selection: anchors among the evicted tokens, each with its
    neighbours. `select="spread"` is ours: every token, active or evicted, is an anchor, and a
    neighbour's utility is the anchor's score, decayed by the distance. Strong anchors therefore get
    wide bursts and weak ones narrow bursts, and a statement that is still active in part is
    completed.

    `contrast` is ours, too: the scores are the signal's attention less that of a neutral signal,
    so that tokens which every query attends to are no anchors.
    """

    @property
    def window(self) -> DecayWindow:
        """The neighbours of an anchor and their decay."""
        return DecayWindow(self.before, self.after, self.fade_before, self.fade_after)

    def utility(self, scores: Tensor) -> Tensor:
        """Selection score of each token, for itself or its neighbours.

        scores: float32 `[..., length]`, 0 or more. Returns float32 of the same shape.
        """
        if self.select == "bursts":
            return scores
        return diffuse_scores(scores, self.window)

    def choose(self, utility: Tensor, candidates: Tensor, tie_break: Tensor, count: int) -> Tensor:
        """Choose at most `count` of the candidates by utility: int64 positions, ascending.

        utility, tie_break: float `[length]`; candidates: bool `[length]`.
        """
        if self.select == "bursts":
            return bursts(
                utility, candidates, tie_break, count, before=self.before, after=self.after
            )
        return best_tokens(utility, candidates, tie_break, count).sort().values
