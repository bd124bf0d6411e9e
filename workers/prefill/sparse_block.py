"""One prefilled block of a session with a sparse prefill, and what it left out."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvrecall.domain.settings.prefill import Prefill
from kvrecall.metrics.page import Metrics
from workers.cache.logits import Logits
from workers.prefill.attention import attend, find_places
from workers.prefill.block_rows import BlockRows
from workers.prefill.lines import choose_lines


@dataclass(frozen=True)
class SparseReport:
    """What the sparse layers of some blocks computed.

    Attributes:
        blocks: Blocks with a layer in which lines were searched.
        layers: Such layers, over all blocks.
        cover_min: Least cover of a layer and head: the held-out queries' mean share of weight on
            what is computed, at least; see `choose_lines`. 1 where a head is computed whole.
        cover_mean: Mean over blocks, layers and heads.
        density_mean: Mean share of the rows that the queries' tiles attended to.
    """

    blocks: int = 0
    layers: int = 0
    cover_min: float = 1.0
    cover_mean: float = 1.0
    density_mean: float = 1.0

    @classmethod
    def join(cls, parts: Iterable["SparseReport"]) -> "SparseReport":
        """Join the reports of several blocks; means are weighted by their layers."""
        some = [part for part in parts if part.layers]
        layers = sum(part.layers for part in some)
        return cls(
            sum(part.blocks for part in some),
            layers,
            min((part.cover_min for part in some), default=1.0),
            sum(part.layers * part.cover_mean for part in some) / layers if layers else 1.0,
            sum(part.layers * part.density_mean for part in some) / layers if layers else 1.0,
        )


class SparseBlock:
    """Sparse attention of one block, layer by layer, as `ForwardStep.block_attention`.

    The queries that are sampled follow from the session's seed, the block's first position and the
    layer: a block that is computed again, after a crash or a loss of pages, has the same rows.
    """

    def __init__(self, settings: Prefill, seed: int, first: int) -> None:
        """Begin a block; `first` is the position of its first token."""
        self._settings = settings
        self._seed = seed
        self._first = first
        self._layers: list[SparseReport] = []

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        logits: Logits,
    ) -> Tensor | None:
        """Attend over the layer's lines; see `BlockAttention.attend`.

        None for a layer that the settings leave exact, whose logits have a soft cap or sinks, or where
        exact attention pays in all heads.
        """
        tokens, n = query.shape[2], key.shape[2]
        if not logits.plain or not self._settings.is_sparse(tokens, n):
            return None
        rows = BlockRows(
            query[0],
            key[0],
            value[0],
            positions[0],
            self._first,
            logits.scale,
        )
        lines = choose_lines(rows, self._settings, self._generator(layer))
        places = None if lines is None else find_places(rows, lines, self._settings)
        if lines is None or places is None or bool(places.exact.all()):
            self._layers.append(SparseReport(1, 1))
            return None
        cover = lines.cover.masked_fill(places.exact.repeat_interleave(rows.group), 1.0)
        least, mean = float(cover.min()), float(cover.double().mean())
        self._layers.append(SparseReport(1, 1, least, mean, float(places.density.mean())))
        return attend(rows, places)[None]

    @property
    def report(self) -> SparseReport | None:
        """The block's report; None if no layer was to be sparse."""
        if not self._layers:
            return None
        joined = SparseReport.join(self._layers)
        return SparseReport(
            1, joined.layers, joined.cover_min, joined.cover_mean, joined.density_mean
        )

    def measure(self, metrics: Metrics) -> None:
        """Observe the block's density and cover, unless no layer was sparse."""
        if (found := self.report) is not None:
            metrics.observe("worker_prefill_density", found.density_mean)
            metrics.observe("worker_prefill_cover", found.cover_mean)

    def _generator(self, layer: int) -> torch.Generator:
        seed = (self._seed * 1_000_003 + self._first) * 1_009 + layer
        return torch.Generator().manual_seed(seed % 2**63)
