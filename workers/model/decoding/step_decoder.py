"""What computes decode steps in place of a model's own operators."""

from typing import Protocol

from torch import Tensor

from workers.cache.forward_step import ForwardStep


class StepDecoder(Protocol):
    """Computes passes of one new token a session, to the model's own results.

    Attributes:
        static: Its passes are `ForwardStep.static`.
    """

    static: bool

    def takes(self, step: ForwardStep) -> bool:
        """True for a pass that it computes: all others are torch's."""

    def forward(self, token_ids: Tensor, step: ForwardStep) -> Tensor:
        """Run `token_ids`, int64 `[B, 1]`, and append their rows: see `LoadedModel.forward`.

        Returns logits float32 `[B, 1, vocabulary]`.
        """
