"""Indexes that are compared: all rows, DCI-trees, and faiss where it is installed."""

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from kvstore.index.base import KeyIndex
from kvstore.index.dci.settings import PAPER, DciSettings
from kvstore.index.dci.tree import DciTree

# The shares are to be compared: the floor of the default would be half of 4,096 rows.
OURS = replace(DciSettings(), scan_floor=0)
TWO_LEVELS = replace(OURS, promotion=(*OURS.promotion, 0.2))
# The paper's parents and ranking, in nodes of our size.
PAPER_SMALL_NODES = replace(PAPER, promotion=OURS.promotion)
_FAISS_LINKS = 16
_FAISS_EFFORT = 256


class EveryRow:
    """All rows are candidates."""

    rows = 0
    nbytes = 0

    def extend(self, keys: Tensor) -> None:
        """Note the number of rows."""
        self.rows = keys.shape[1]

    def candidates(self, queries: Tensor) -> Tensor:
        """All positions."""
        return torch.arange(self.rows).expand(len(queries), -1)

    def truncate(self, rows: int) -> None:
        """Forget rows."""
        self.rows = min(self.rows, rows)

    def check(self) -> None:
        """Nothing can be wrong."""


class FaissGraphs:
    """HNSW graphs of faiss over lifted keys; the best 256 rows of each query, some twice.

    Keys are lifted onto a sphere (IceCache, B.1) of twice the first keys' largest norm: by inner
    product itself the graphs find fewer.
    """

    def __init__(self) -> None:
        self._faiss: Any = import_module("faiss")
        self._faiss.omp_set_num_threads(1)
        self._graphs: list[Any] = []
        self._radius = 1.0
        self.rows = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the graphs, which hold the keys."""
        return sum(len(self._faiss.serialize_index(graph)) for graph in self._graphs)

    def extend(self, keys: Tensor) -> None:
        """Insert the rows from `rows` on."""
        if not self._graphs:
            self._graphs = [self._open(keys.shape[-1] + 1) for _ in keys]
            self._radius = 2 * float(keys.norm(dim=-1).max())
        points = keys[:, self.rows :] / self._radius
        height = (1 - points.square().sum(-1, keepdim=True)).clamp_min(0).sqrt()
        for graph, lifted in zip(self._graphs, torch.cat([points, height], -1), strict=True):
            graph.add(lifted.numpy())
        self.rows = keys.shape[1]

    def candidates(self, queries: Tensor) -> Tensor:
        """Find 256 rows of each query."""
        flat = torch.nn.functional.pad(queries, (0, 1))
        found = [
            torch.from_numpy(graph.search(each.contiguous().numpy(), _FAISS_EFFORT)[1]).flatten()
            for graph, each in zip(self._graphs, flat, strict=True)
        ]
        return torch.stack(found)

    def truncate(self, rows: int) -> None:
        """Refuse: a graph of faiss forgets nothing."""
        raise NotImplementedError("faiss' graphs cannot remove rows")

    def check(self) -> None:
        """Raise AssertionError unless every graph has every row."""
        assert all(graph.ntotal == self.rows for graph in self._graphs)

    def _open(self, dimensions: int) -> Any:
        graph = self._faiss.IndexHNSWFlat(dimensions, _FAISS_LINKS)
        graph.hnsw.efSearch = _FAISS_EFFORT
        return graph


def list_subjects() -> dict[str, Callable[[], KeyIndex]]:
    """Indexes by their names in the result file."""
    subjects: dict[str, Callable[[], KeyIndex]] = {
        "exact scan": EveryRow,
        "dci tree": lambda: DciTree(OURS),
        "dci tree, 10%": lambda: DciTree(replace(OURS, scan=0.1)),
        "dci tree, 5%": lambda: DciTree(replace(OURS, scan=0.05)),
        "dci tree, two levels": lambda: DciTree(TWO_LEVELS),
        "dci tree, paper": lambda: DciTree(PAPER),
        "dci tree, paper in small nodes": lambda: DciTree(PAPER_SMALL_NODES),
    }
    if find_spec("faiss"):
        subjects["faiss HNSW"] = FaissGraphs
    return subjects
