"""Lines of a block's attention: the few columns and diagonals that hold most of its weight.

Source: LoopServe (section 5.1, Algorithm 5). A vertical line is a key, a slash line a distance
between query and key. Distances are differences of true positions: evicted rows leave gaps, and the
tensor's diagonals mean nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvrecall.domain.settings.prefill import Prefill
from workers.prefill.block_rows import TILE, BlockRows
from workers.prefill.greedy import LineSearch

# Sampled attention weights in memory at a time: 128 MiB.
_MAX_WEIGHTS = 1 << 25
# Counts of a distance, in numbers of the weights' size.
_COUNTS = 4


@dataclass(frozen=True, eq=False)
class Lines:
    """The lines of one layer of a block, per query head.

    Attributes:
        columns: Rows before the block that every query attends to, bool `[n_heads, n]`.
        offsets: Distances at which every query attends to a row, bool `[n_heads, o]`.
        exact: Heads whose lines would cost more than exact attention, bool `[n_heads]`.
        cover: Mean share of the held-out rows' attention weight on the lines and on what is always
            attended to, float32 `[n_heads]`; 1 for exact heads.
    """

    columns: Tensor
    offsets: Tensor
    exact: Tensor
    cover: Tensor


def choose_lines(rows: BlockRows, settings: Prefill, generator: torch.Generator) -> Lines | None:
    """Choose lines that hold `alpha` of the weight; None if exact attention pays for every head.

    Some of the block's queries are drawn with `generator` (a CPU one), without replacement. Lines
    are taken by their weight in the sample, without the held-out queries, per cell of the block;
    cells that a crossing line has covered do not count again. More are taken until the held-out
    queries' mean cover is `alpha` as well. Sinks, near distances and the block's own rows are
    attended to in any case, and count.

    What the cover promises: a query with attention weights A that attends to cells of the weight
    c = sum of A over them, and renormalises, gives o' with |o - o'| <= 2 (1 - c) max |v|. For o' has
    the weights A / c there and 0 elsewhere, which differ from A by (1 - c) on the cells left out,
    and by as much in sum on the others. `cover` is the mean of c over the held-out queries; its
    standard error is their deviation over the root of their number.
    """
    drawn = torch.randperm(rows.tokens, generator=generator)[: settings.sample]
    drawn = drawn.to(rows.keys.device)
    n_kv_heads, n, _ = rows.keys.shape
    size = max(1, _MAX_WEIGHTS // (rows.group * (len(drawn) * n + _COUNTS * rows.end)))
    parts = [
        _choose(rows.heads(start, min(start + size, n_kv_heads)), drawn, settings)
        for start in range(0, n_kv_heads, size)
    ]
    lines = Lines(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
    return None if bool(lines.exact.all()) else lines


def _choose(
    rows: BlockRows, drawn: Tensor, settings: Prefill
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The fields of `Lines` for the KV heads of `rows`."""
    held_out = int(len(drawn) * settings.held_out)
    search = LineSearch(
        rows.weights(drawn),
        rows,
        drawn,
        always=rows.always(settings.sinks),
        band=settings.band,
        width=settings.slash_width,
        tile=TILE,
        fitted=len(drawn) - held_out,
    )
    search.run(settings.alpha, settings.max_density)
    cover = search.checked_cover().masked_fill(search.exact, 1.0)
    offsets = search.slashes.repeat_interleave(settings.slash_width, 1)[:, : rows.end]
    return search.columns, offsets, search.exact, cover
