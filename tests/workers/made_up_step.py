"""Made-up steps of one layer with retrieval, and torch's draws of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.made_up_copy import build_copy
from kvrecall.domain.settings.retrieval import Retrieval
from kvstore.format.page import PageLayout
from workers.cache.active_cache import EMPTY
from workers.cache.logits import Logits
from workers.cache.transfers import Transfers
from workers.native.attention import NativeAttention
from workers.native.searched_rows import SearchedRows
from workers.positions.chunks import Chunks
from workers.positions.rotation import Rotation
from workers.positions.seen_rows import SeenRows
from workers.positions.tables import RotationTables
from workers.retrieval.retriever import LAYER_STEP, Retriever
from workers.retrieval.sampling import Ranks
from workers.retrieval.step import RetrievalStep
from workers.retrieval.weights import weigh_code_runs, weigh_codes

CPU = Transfers(torch.device("cpu"))
LAYERS = 3
EXACT = Retrieval(index="exact")
# Priorities and weights that float32 cannot tell apart, after a softmax that was summed in another order.
NEAR, NOTHING = 1e-5, 1e-30


@dataclass(frozen=True)
class Shape:
    """Shape of a layer's step.

    sessions: rows and retrieved rows of each, None without retrieval. chunks: of the model's positions, which
    sessions of as many rows as its window are behind; None: none is. search: how rows are found.
    """

    sessions: Sequence[tuple[int, int] | None]
    heads: int = 2
    group: int = 3
    dim: int = 16
    active: int = 12
    layer: int = 1
    sharpness: float = 2.0
    shorter: bool = False
    dtype: torch.dtype = torch.float32
    seed: int = 0
    chunks: Chunks | None = None
    search: Retrieval = EXACT


@st.composite
def shapes(
    draw: st.DrawFn, rows: int = 700, sessions: int = 4, heads: int = 4, *, behind: bool = False
) -> Shape:
    """Any step, of so many rows, sessions and heads at most; behind: some are behind the window."""
    session = st.tuples(st.integers(1, rows), st.integers(1, 60))
    others = draw(st.lists(st.none() | session, max_size=sessions - 1))
    return Shape(
        draw(st.permutations([draw(session), *others])),
        heads=draw(st.integers(1, heads)),
        group=draw(st.integers(1, 9)),
        dim=draw(st.sampled_from([3, 8, 20, 64, 80, 128])),
        active=draw(st.integers(1, 40)),
        layer=draw(st.integers(0, LAYERS - 1)),
        sharpness=draw(st.sampled_from([0.1, 1.0, 3.0])),
        shorter=draw(st.booleans()),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        seed=draw(st.integers(0, 10_000)),
        chunks=_draw_chunks(draw) if behind else None,
    )


def _draw_chunks(draw: st.DrawFn) -> Chunks:
    size = draw(st.integers(1, 100))
    return Chunks(3 * size + draw(st.integers(0, 200)), size)


@dataclass(frozen=True, eq=False)
class Made:
    """Tensors of a step."""

    shape: Shape
    queries: Tensor
    rows: tuple[Tensor, Tensor, Tensor]
    mask: Tensor | None
    retrievers: list[Retriever | None] = field(default_factory=list)

    def attend(self, native: NativeAttention | None) -> Tensor:
        """Output of the step."""
        step = RetrievalStep(self.retrievers, CPU, native, self.seen)
        logits = Logits(self.shape.dim**-0.5)
        return step.attend(self.shape.layer, self.queries, self.rows, self.mask, logits)

    @property
    def searched(self) -> list[SearchedRows | None]:
        """Rows of the layer of each session."""
        layer, scale = self.shape.layer, self.shape.dim**-0.5
        rows = [None if each is None else each.searched_rows(layer) for each in self.retrievers]
        return [
            each if each is None or seen is None else each.asked_by(queries, scale, seen)
            for each, queries, seen in zip(rows, self.queries, self.seen, strict=True)
        ]

    @property
    def seen(self) -> list[SeenRows | None]:
        """How each session sees its rows."""
        return [self._see(each) for each in self.retrievers]

    def _see(self, retriever: Retriever | None) -> SeenRows | None:
        chunks, dim = self.shape.chunks, self.shape.dim
        length = 0 if retriever is None else retriever.copy.rows.length
        if chunks is None or length < chunks.window:
            return None
        rotation = Rotation(tuple(0.5**pair for pair in range(dim // 2)))
        return SeenRows(RotationTables([rotation] * LAYERS), chunks.find_segments(length))

    def draw(self, native: NativeAttention) -> Tensor:
        """Positions that the native code draws."""
        rotation, scale = LAYER_STEP * self.shape.layer, self.shape.dim**-0.5
        arguments = (self.queries, self.rows, self.mask, self.searched)
        _, drawn = native.attend(*arguments, rotation=rotation, scale=scale)
        assert torch.equal((drawn[:, :, 1:] >= 0).sum(2), drawn[:, :, 0])
        return drawn[:, :, 1:]


def make(shape: Shape, dtype: torch.dtype | None = None) -> Made:
    """Numbers of a step in the shape's dtype, in tensors of `dtype`, by default the same."""
    random = torch.Generator().manual_seed(shape.seed)

    def numbers(*sizes: int, scale: float = 1.0) -> Tensor:
        made = (torch.randn(sizes, generator=random) * scale).to(shape.dtype)
        return made if dtype is None else made.to(dtype)

    batch, heads, active = len(shape.sessions), shape.heads, shape.active
    queries = numbers(batch, heads, shape.group, shape.dim, scale=shape.sharpness)
    # Views of a wider region, as those of the pool.
    keys, values = (numbers(batch, heads, active + 5, shape.dim)[:, :, :active] for _ in range(2))
    positions = torch.empty(batch, heads, active + 2, dtype=torch.int32)[:, :, :active]
    mask = torch.zeros(batch, heads, 1, active) if shape.shorter else None
    retrievers = list[Retriever | None]()
    for index, session in enumerate(shape.sessions):
        length = 50 if session is None else session[0]
        for head in range(heads):
            # Some are behind the stored ones, as those of an answer's tokens.
            chosen = torch.randperm(length + active, generator=random)[:active]
            positions[index, head] = chosen.sort().values
        if mask is not None and index % 2:
            end = max(1, active // 2)
            positions[index, :, end:] = EMPTY
            mask[index, :, :, end:] = -torch.inf
        retrievers.append(None)
        if session is not None:
            layout = PageLayout(LAYERS, heads, shape.dim, keys.dtype, "made up")
            layers = [(numbers(heads, length, shape.dim),) * 2 for _ in range(LAYERS)]
            copy = build_copy(layout, shape.search, layers)
            retrievers[-1] = Retriever(copy, shape.search, session[1])
    return Made(shape, queries, (keys, values, positions), mask, retrievers)


def draws_differ(made: Made, index: int, drawn: Tensor) -> bool:
    """Compare a session's draw with torch's; True if they differ in rows that are as good as equal.

    Fails if they differ in others.
    """
    retriever, shape = made.retrievers[index], made.shape
    assert retriever is not None
    active, scale = made.rows[2][index], shape.dim**-0.5
    seen = made.seen[index]
    found, _ = retriever.search(shape.layer, made.queries[index], active, scale, seen)
    codes = retriever.copy.scored_codes(shape.layer)
    assert codes is not None
    queries = made.queries[index].float() * scale
    if seen is None:
        weights = weigh_codes(queries, *codes)
    else:
        asked = seen.turn_queries(shape.layer, queries)
        weights = weigh_code_runs(asked, *codes, seen.split(0, retriever.copy.rows.length))
    newest = int(active.masked_fill(active == EMPTY, 0).max())
    rotation = newest + LAYER_STEP * shape.layer
    priorities = weights * Ranks().rotated(shape.heads, weights.shape[1], rotation)
    different = False
    for head in range(shape.heads):
        mine, theirs = ({p for p in each[head].tolist() if p >= 0} for each in (drawn, found))
        ours = torch.tensor(sorted(mine ^ theirs), dtype=torch.int64)
        ours = ours[weights[head, ours] > NOTHING]
        if len(ours):
            those = priorities[head, ours]
            assert float(those.max() / those.min()) < 1 + NEAR
            different = True
    return different
