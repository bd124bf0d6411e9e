"""Sampling of the next token, through transformers' logits processors."""

from typing import cast

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvrecall.domain.messages import Sampling
from workers.errors import BadSettings


def require_valid(sampling: Sampling) -> None:
    """Check sampling parameters from the wire. Raises BadSettings for one out of range."""
    if sampling.max_tokens < 1:
        raise BadSettings(f"max_tokens is {sampling.max_tokens}, it must be at least 1")
    if not 0 <= sampling.temperature <= 100:
        raise BadSettings(f"temperature is {sampling.temperature}, it must be between 0 and 100")
    if not 0 < sampling.top_p <= 1:
        raise BadSettings(f"top_p is {sampling.top_p}, it must be over 0 and at most 1")
    if sampling.top_k < 0:
        raise BadSettings(f"top_k is {sampling.top_k}, it must not be negative")
    if any(not text for text in sampling.stop):
        raise BadSettings("a stop string is empty: leave it out")


class Sampler:
    """Samples one session's tokens. Its random numbers depend on the seed, not on the batch."""

    def __init__(self, sampling: Sampling) -> None:
        self._greedy = sampling.temperature == 0
        self._generator = torch.Generator().manual_seed(sampling.seed)
        self._processors = LogitsProcessorList()
        if self._greedy:
            return
        if sampling.temperature != 1:
            self._processors.append(TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k:
            self._processors.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            self._processors.append(TopPLogitsWarper(sampling.top_p))

    def next_token(self, logits: Tensor, best: int) -> int:
        """Sample from float `[vocabulary]` logits; `best` is the index of their maximum."""
        if self._greedy:
            return best
        # On the CPU: a seed then gives the same tokens on every device.
        no_history = cast("torch.LongTensor", torch.empty(1, 0, dtype=torch.long))
        scores = self._processors(no_history, cast("torch.FloatTensor", logits[None].float().cpu()))
        return int(torch.multinomial(scores.softmax(-1), 1, generator=self._generator))
