"""transformers' own forward passes over the tokens that a service passed, on a cache of transformers."""

import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from workers.model.loader import cache_argument

# Copies of caches: a turn goes back by a few blocks at most.
_MOST_KEPT = 8


@dataclass(frozen=True)
class Pass:
    """One forward pass of a session: its first token's position, and its tokens."""

    start: int
    token_ids: tuple[int, ...]


class PlainModel:
    """One conversation's cache, which goes back to where a pass begins.

    Caches with recurrent states cannot be cut: copies of the last ones at the ends of blocks are kept.

    Attributes:
        cache: transformers' cache of the tokens so far.
    """

    def __init__(self, module: PreTrainedModel) -> None:
        self._module: Any = module
        self._argument = cache_argument(module)
        self.cache = DynamicCache(config=module.config)
        self._length = 0
        self._kept: dict[int, DynamicCache] = {}

    @torch.inference_mode()
    def run(self, passes: Sequence[Pass]) -> float:
        """Run passes; returns their CPU seconds, without copies of caches."""
        return sum(self._run(each) for each in passes)

    def _run(self, one: Pass) -> float:
        self._go_back(one.start)
        tokens = torch.tensor([one.token_ids])
        positions = torch.arange(one.start, one.start + len(one.token_ids))[None]
        began = time.process_time()
        out = self._module(
            input_ids=tokens,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{self._argument: self.cache},
        )
        out.logits.argmax(-1).tolist()
        spent = time.process_time() - began
        self._length = one.start + len(one.token_ids)
        if len(one.token_ids) > 1 and not self.cache.is_croppable:
            self._kept[self._length] = deepcopy(self.cache)
            for position in sorted(self._kept)[:-_MOST_KEPT]:
                del self._kept[position]
        return spent

    def _go_back(self, position: int) -> None:
        """Cut the cache, or take the copy at this position."""
        if position == self._length:
            return
        if self.cache.is_croppable:
            self.cache.crop(position - self._length)
        else:
            self.cache = deepcopy(self._kept[position])
        self._length = position
