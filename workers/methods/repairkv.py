"""RepairKV: which evicted tokens a signal brings back, as published and as we do it."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field
from torch import Tensor

from workers.primitives.selection import best_tokens, bursts, spread
from workers.primitives.uncertainty import ambiguous_tokens_bursts, ambiguous_tokens_spread

Share = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True)
class RepairKV:
    """Attention of a signal over all rows; the best evicted tokens come back, with what stands around them.

    Source: RepairKV section 3, Algorithm 1. `bursts` is its selection: anchors among the evicted tokens, each with its
    neighbours `before` and `after`. `spread` is ours: every token, active or evicted, is an anchor, and a neighbour is
    worth the anchor's score times `fade_after` (or `fade_before`) per token between them. So strong anchors get wide
    bursts and weak ones narrow ones, and a statement of which a part is still active brings back the rest of it.

    `swap`: for each token that comes a less wanted one leaves, so that the budget need not keep a reserve free.
    `per_head`: every layer and KV head chooses for itself, by its own score together with the token's; else tokens come
    whole. `hops`: how often the signal is observed: again each time over what came back.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    select: Literal["spread", "bursts"] = "spread"
    before: Annotated[int, Field(ge=0, le=256)] = 2
    after: Annotated[int, Field(ge=0, le=256)] = 20
    fade_before: Share = 0.6
    fade_after: Share = 0.9
    swap: bool = False
    per_head: bool = False
    hops: Annotated[int, Field(ge=1, le=4)] = 1

    @property
    def counts_active(self) -> bool:
        """Whether a token's attention counts where it is active, too: it can then lead to its neighbours."""
        return self.select == "spread"

    def utility(self, scores: Tensor) -> Tensor:
        """What each token is worth for itself or its neighbours: float32 of the shape of scores, `[..., length]`."""
        if self.select == "bursts":
            return scores
        return spread(scores, self.before, self.after, self.fade_before, self.fade_after)

    def choose(self, worth: Tensor, candidates: Tensor, tie_break: Tensor, count: int) -> Tensor:
        """At most `count` of the candidates, by what `worth` says of them: int64 positions, ascending.

        worth, tie_break: float `[length]`; candidates: bool `[length]`.
        """
        if self.select == "bursts":
            return bursts(worth, candidates, tie_break, count, before=self.before, after=self.after)
        return best_tokens(worth, candidates, tie_break, count).sort().values

    def ambiguous_tokens(
        self, lower: Tensor, upper: Tensor, candidates: Tensor, count: int
    ) -> Tensor:
        """Tokens whose scores must be known better before `choose` is certain: bool `[length]`.

        lower, upper: bounds on the scores, float `[length]`.
        """
        if self.select == "bursts":
            return ambiguous_tokens_bursts(
                lower, upper, candidates, count, before=self.before, after=self.after
            )
        fades = (self.before, self.after, self.fade_before, self.fade_after)
        return ambiguous_tokens_spread(lower, upper, candidates, count, *fades)
