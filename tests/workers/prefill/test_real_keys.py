"""On the reference model's own queries and keys: the promised cover is about the real one."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvrecall.domain.settings.prefill import Prefill
from kvrecall.metrics.page import Metrics
from tests.workers.prefill.blocks import dense_weights
from workers.cache.active_cache import ActiveCache
from workers.cache.forward_step import ForwardStep
from workers.cache.logits import Logits
from workers.model.loader import LoadedModel
from workers.model.tokenizer import ChatTokenizer
from workers.prefill.attention import find_places
from workers.prefill.block_rows import TILE, BlockRows
from workers.prefill.lines import choose_lines

BLOCK = 256


class Audit:
    """Exact attention, with the cover that lines would have: promised, and real, by layer and head."""

    def __init__(self, settings: Prefill, first: int) -> None:
        self._settings = settings
        self._first = first
        self.promised: list[float] = []
        self.real: list[float] = []

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        logits: Logits,
    ) -> None:
        rows = BlockRows(query[0], key[0], value[0], positions[0], self._first, logits.scale)
        lines = choose_lines(rows, self._settings, torch.Generator().manual_seed(layer))
        assert lines is not None
        wanted = find_places(rows, lines, self._settings).wanted
        cells = wanted.repeat_interleave(TILE, 1)[:, : rows.tokens]
        covered = dense_weights(rows) * cells.repeat_interleave(rows.group, 0)
        self.promised += lines.cover.tolist()
        self.real += covered.sum(-1).mean(1).tolist()

    def measure(self, metrics: Metrics) -> None:
        """No worker has this block."""


@pytest.mark.parametrize("alpha", [0.9, 0.99])
def test_the_cover_is_as_promised(
    loaded: Callable[[str], LoadedModel],
    tokenizer: ChatTokenizer,
    words: Callable[..., str],
    alpha: float,
) -> None:
    model = loaded("reference")
    tokens = torch.tensor(tokenizer.encode(words(600, seed=4))[: 3 * BLOCK])
    rows = [len(tokens)] * model.shape.n_layers
    cache = ActiveCache(model.shape, 1, rows)
    slot = cache.claim(rows)
    promised, real = [], []
    for first in range(0, len(tokens), BLOCK):
        step = ForwardStep(cache, [slot], torch.arange(first, first + BLOCK)[None])
        step.block_attention = audit = Audit(
            Prefill(sparse="on", alpha=alpha, max_density=1.0), first
        )
        with torch.inference_mode():
            model.forward(tokens[None, first : first + BLOCK], step)
        promised += audit.promised
        real += audit.real
    assert min(promised) >= alpha - 1e-6
    enough = [cover >= alpha for cover in real]
    assert sum(enough) >= 0.95 * len(enough)
    assert min(real) < 1
