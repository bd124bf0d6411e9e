"""Kernel: weights of all stored rows."""

import triton
import triton.language as tl


@triton.jit
def weigh(
    table,
    table_session,
    logits,
    largest,
    sums,
    marks,
    weights,
    width,
    heads: tl.constexpr,
    group: tl.constexpr,
    padded_splits: tl.constexpr,
    split_rows: tl.constexpr,
) -> None:
    """Weigh `split_rows` rows of a head by their shares of the softmax, the mean over the queries.

    Grid and arguments: as `workers.kernels.score.score`, whose results it reads. Writes weights
    `[sessions * heads, width]`, -1 where a row is marked as active.
    """
    program = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * split_rows
    rows = tl.load(table + program // heads * table_session).to(tl.int32)
    if first >= rows:
        return
    row = first + tl.arange(0, split_rows)
    present = row < rows
    split = tl.arange(0, padded_splits)
    scored = split * split_rows < rows
    weight = tl.zeros([split_rows], tl.float32)
    for query in range(group):
        line = program * group + query
        part = line * tl.num_programs(1) + split
        most_of = tl.load(largest + part, mask=scored, other=-float("inf"))
        sum_of = tl.load(sums + part, mask=scored, other=0.0)
        most = tl.max(most_of, 0)
        total = tl.sum(sum_of * tl.exp(most_of - most), 0)
        logit = tl.load(logits + line * width + row, mask=present, other=-float("inf"))
        weight += tl.exp(logit - most) / (total * group)
    marked = tl.load(marks + program * width + row, mask=present, other=1)
    tl.store(weights + program * width + row, tl.where(marked != 0, -1.0, weight), mask=present)
