"""Retrieval within one forward pass, by kernels of a GPU."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvrecall.metrics.page import Metrics
from workers.cache.logits import Logits
from workers.retrieval.retriever import LAYER_STEP, Retriever
from workers.retrieval.step import RetrievalStep

if TYPE_CHECKING:  # it needs triton, which comes with torch for GPUs
    from workers.kernels.attention import KernelAttention
    from workers.kernels.searched_table import SearchedTable


class KernelStep:
    """The retrieval of a pass over B sessions whose searches score every row: as `RetrievalStep`, on the device.

    All that changes from pass to pass is in tensors of the device, so one captured graph of a pass serves
    others of its shapes.

    Attributes:
        retrievers: Of each session of the pass; None for one that retrieves nothing.
        table: The sessions' stored rows.
    """

    def __init__(
        self,
        retrievers: Sequence[Retriever | None],
        kernels: "KernelAttention",
        table: "SearchedTable",
        otherwise: RetrievalStep,
    ) -> None:
        """Begin a pass; otherwise: the same one by the host, where kernels do not compute the model's attention."""
        self.retrievers = tuple(retrievers)
        self.table = table
        self._kernels = kernels
        self._otherwise = otherwise
        self._found: list[Tensor] = []

    @property
    def found(self) -> Tensor:
        """Rows that the pass has found for each session, in all layers and heads, int64 `[B]`, on the device."""
        return torch.stack(self._found).sum((0, 2))

    def attend(
        self,
        layer: int,
        queries: Tensor,
        rows: tuple[Tensor, Tensor, Tensor],
        mask: Tensor | None,
        logits: Logits,
    ) -> Tensor:
        """Attend to a layer's active rows, and to those that are drawn; as `RetrievalStep.attend`."""
        if not logits.plain or not self._kernels.takes(queries, rows, mask, self.table.layout):
            return self._otherwise.attend(layer, queries, rows, mask, logits)
        turned = LAYER_STEP * layer
        out, drawn = self._kernels.attend(
            *(queries, rows, mask, self.table), layer=layer, rotation=turned, scale=logits.scale
        )
        self._found.append(drawn[:, :, 0])
        return out

    def measure(self, metrics: Metrics) -> None:
        """Leave to the sessions what the pass has found, which nobody waits for before they ask."""
        if not self._found:
            self._otherwise.measure(metrics)
            return
        for retriever, rows in zip(self.retrievers, self.found, strict=True):
            if retriever is not None:
                retriever.count_later(rows)
