"""RepairKV: the evicted tokens that a signal promotes, by the paper's selection or by ours."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field
from torch import Tensor

from workers.primitives.selection import DecayWindow, best_tokens, bursts, diffuse_scores


@dataclass(frozen=True)
class RepairKV:
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

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    select: Annotated[
        Literal["spread", "bursts"],
        Field(description="Selection: decayed scores around every token, or the paper's bursts."),
    ] = "spread"
    contrast: Annotated[
        float,
        Field(
            ge=0,
            le=8,
            description="Weight of a neutral signal's attention, the chat template around an empty "
            "message, which is subtracted from the signal's; 0: the paper's scores.",
        ),
    ] = 2.0
    before: Annotated[
        int, Field(ge=0, le=256, description="Neighbours in front of an anchor, in tokens.")
    ] = 2
    after: Annotated[
        int, Field(ge=0, le=256, description="Neighbours behind an anchor, in tokens.")
    ] = 20
    fade_before: Annotated[
        float, Field(ge=0, lt=1, description="Decay per token in front of an anchor (spread).")
    ] = 0.8
    fade_after: Annotated[
        float, Field(ge=0, lt=1, description="Decay per token behind an anchor (spread).")
    ] = 0.93
    swap: Annotated[
        bool,
        Field(
            description="Demote one active row per promoted row, so that no part of the budget is "
            "reserved for repairs."
        ),
    ] = False
    per_head: Annotated[
        bool,
        Field(
            description="Select per layer and KV head, by the head's score plus the token's; "
            "otherwise whole tokens are promoted."
        ),
    ] = False
    hops: Annotated[
        int,
        Field(
            ge=1,
            le=4,
            description="Observations of the signal, each over the rows promoted so far.",
        ),
    ] = 1
    turn_tokens: Annotated[
        int,
        Field(
            ge=2,
            description="Tokens of a turn that its own repair observes: of a longer one half at its "
            "beginning and half at its end, where questions are. Its first token waits for them.",
        ),
    ] = 256

    @property
    def window(self) -> DecayWindow:
        """The neighbours of an anchor and their decay."""
        return DecayWindow(self.before, self.after, self.fade_before, self.fade_after)

    @property
    def counts_active(self) -> bool:
        """True if attention to active rows counts, so that an active token can be an anchor."""
        return self.select == "spread"

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
