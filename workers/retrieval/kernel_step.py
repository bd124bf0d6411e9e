"""Retrieval within one forward pass, by kernels of a GPU."""

from collections.abc import Sequence
from dataclasses import replace
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
        otherwise: RetrievalStep | None,
    ) -> None:
        """Begin a pass; otherwise: the same one by the host, where kernels do not compute the model's attention."""
        self.retrievers = tuple(retrievers)
        self.table = table
        self._kernels = kernels
        self._otherwise = otherwise
        self._found: list[Tensor] = []

    @property
    def computed(self) -> int:
        """Layers that kernels have computed so far."""
        return len(self._found)

    @property
    def found(self) -> Tensor:
        """Rows that the pass has found, int32 `[n_layers, B, n_kv_heads]`, on the device."""
        return torch.stack(self._found)

    def take(self, found: Tensor) -> None:
        """Take what a captured graph of the pass has found, as `found`."""
        self._found = list(found)

    def rebind(self, described: Tensor | None) -> "KernelStep":
        """The same pass over another description of stored rows, if one is given: the input of a captured graph.

        It counts for no session.
        """
        table = self.table if described is None else replace(self.table, described=described)
        return KernelStep((), self._kernels, table, None)

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
            assert self._otherwise is not None, (
                "a pass that is captured is computed by kernels alone"
            )
            return self._otherwise.attend(layer, queries, rows, mask, logits)
        turned = LAYER_STEP * layer
        out, drawn = self._kernels.attend(
            *(queries, rows, mask, self.table), layer=layer, rotation=turned, scale=logits.scale
        )
        self._found.append(drawn[:, :, 0])
        return out

    def measure(self, metrics: Metrics) -> None:
        """Hand the sessions their counts, which stay on the device until a turn is reported."""
        if not self._found and self._otherwise is not None:
            self._otherwise.measure(metrics)
            return
        for retriever, rows in zip(self.retrievers, self.found.sum((0, 2)), strict=True):
            if retriever is not None:
                retriever.count_later(rows)
