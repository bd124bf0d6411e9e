"""The next token, through transformers' logits processors."""

from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from workers.errors import BadSettings


@dataclass(frozen=True)
class SamplingSettings:
    """How tokens are chosen. Temperature 0 is greedy; top_p 1 and top_k 0 are off."""

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise BadSettings(f"max_tokens is {self.max_tokens}, it must be at least 1")
        if not 0 <= self.temperature <= 100:
            raise BadSettings(f"temperature is {self.temperature}, it must be between 0 and 100")
        if not 0 < self.top_p <= 1:
            raise BadSettings(f"top_p is {self.top_p}, it must be over 0 and at most 1")
        if self.top_k < 0:
            raise BadSettings(f"top_k is {self.top_k}, it must not be negative")
        if any(not text for text in self.stop):
            raise BadSettings("a stop string is empty")

    def limited_to(self, tokens: int) -> "SamplingSettings":
        """The same with a lower limit on tokens."""
        return replace(self, max_tokens=tokens)


class Sampler:
    """Chooses one session's tokens; its random numbers depend on the seed alone, not on who shares the batch."""

    def __init__(self, settings: SamplingSettings) -> None:
        self._greedy = settings.temperature == 0
        self._generator = torch.Generator().manual_seed(settings.seed)
        self._processors = LogitsProcessorList()
        if self._greedy:
            return
        if settings.temperature != 1:
            self._processors.append(TemperatureLogitsWarper(settings.temperature))
        if settings.top_k:
            self._processors.append(TopKLogitsWarper(settings.top_k))
        if settings.top_p < 1:
            self._processors.append(TopPLogitsWarper(settings.top_p))

    def next_token(self, logits: Tensor, best: int) -> int:
        """Choose from float `[vocabulary]` logits, whose maximum is at `best` (found for a whole batch at once)."""
        if self._greedy:
            return best
        # On the CPU, so that a seed gives the same tokens on every device.
        no_history = cast("torch.LongTensor", torch.empty(1, 0, dtype=torch.long))
        scores = self._processors(no_history, cast("torch.FloatTensor", logits[None].float().cpu()))
        return int(torch.multinomial(scores.softmax(-1), 1, generator=self._generator))
