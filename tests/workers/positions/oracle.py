"""A model behind its window by the definition: one pass over all tokens, every key rotated to where it is seen.

The model's own code runs at position 0, where RoPE rotates nothing, and the attention rotates instead.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from tests.workers.positions.test_chunks import seen_by_definition
from tests.workers.positions.test_seen_rows import rotate
from workers.positions.chunks import Chunks
from workers.positions.rotation import Rotation

_NAME = "kvrecall-oracle"


class Oracle:
    """A model with chunks, computed without a cache."""

    def __init__(
        self, model: PreTrainedModel, rotations: Sequence[Rotation], chunks: Chunks
    ) -> None:
        """Take a model of transformers, whose attention is replaced, and how its layers rotate."""
        self._model: Any = model
        self._rotations = rotations
        self._chunks = chunks
        oracle = self

        def attend(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **extras: Any
        ) -> tuple[Tensor, None]:
            return oracle._attend(module, query, key, value, extras), None

        AttentionInterface.register(_NAME, attend)
        model.set_attn_implementation(_NAME)

    @torch.inference_mode()
    def say(self, token_ids: Sequence[int], tokens: int) -> list[int]:
        """The best next token after each of the last `tokens` tokens."""
        ids = torch.tensor([list(token_ids)])
        logits = self._model(input_ids=ids, position_ids=torch.zeros_like(ids), use_cache=False)
        best: list[int] = logits.logits[0, -tokens:].argmax(-1).tolist()
        return best

    def _attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, extras: dict[str, Any]
    ) -> Tensor:
        rotation = self._rotations[module.layer_idx]
        count = query.shape[2]
        group = query.shape[1] // key.shape[1]
        key, value = (part[0].repeat_interleave(group, 0).double() for part in (key, value))
        rows = torch.arange(count)
        reach = extras.get("sliding_window") or count
        asked = rotate(query[0], self._place(rows), rotation) * extras["scaling"]
        out = torch.zeros(count, query.shape[1], value.shape[-1], dtype=torch.float64)
        for first, stop in self._split(count):
            keys = rotate(key[:, :stop], self._seen(rows[:stop], first), rotation)
            logits = asked[:, first:stop] @ keys.mT
            distance = rows[first:stop, None] - rows[:stop]
            logits = logits.masked_fill((distance < 0) | (distance >= reach), -torch.inf)
            out[first:stop] = (logits.softmax(-1) @ value[:, :stop]).transpose(0, 1)
        return out.float()[None]

    def _split(self, count: int) -> list[tuple[int, int]]:
        """Tokens within the window, and of each chunk behind it."""
        window, size = self._chunks.window, self._chunks.size
        bounds = [0, *range(window, count, size), count]
        return list(pairwise(bounds))

    def _place(self, rows: Tensor) -> Tensor:
        window, size = self._chunks.window, self._chunks.size
        return torch.where(rows < window, rows, 2 * size + (rows - window) % size)

    def _seen(self, rows: Tensor, first: int) -> Tensor:
        if first < self._chunks.window:
            return rows
        return torch.tensor([seen_by_definition(self._chunks, at, first) for at in rows.tolist()])
