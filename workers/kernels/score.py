"""Kernel: logits of the codes of all stored keys."""

import triton
import triton.language as tl

# Of `kvstore.index.key_codes`: what is added to keys' codes, and the largest code of a query.
_OFFSET: tl.constexpr = tl.constexpr(64)
_MOST_QUERY: tl.constexpr = tl.constexpr(127.0)
# A sum with it has no fraction: 1.5 * 2^23.
_ROUND: tl.constexpr = tl.constexpr(12582912.0)
_TINY: tl.constexpr = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def _load(queries, asked, channels, scale, group: tl.constexpr, dim: tl.constexpr):
    """Load some channels of a head's queries, scaled, and 0 where there are none."""
    query = tl.load(
        queries + asked[:, None] * dim + channels[None, :],
        mask=(asked[:, None] < group) & (channels[None, :] < dim),
        other=0.0,
    )
    return query.to(tl.float32) * scale


@triton.jit
def _round(numbers, step):
    """Round numbers to whole ones of a step each line, those in the middle to even ones."""
    return (tl.div_rn(numbers, tl.broadcast_to(step[:, None], numbers.shape)) + _ROUND) - _ROUND


@triton.jit
def _find_step(queries, asked, quad, scale, group: tl.constexpr, dim: tl.constexpr):
    """Find the scale of each query's codes."""
    step = tl.zeros([asked.shape[0]], tl.float32)
    for channel in tl.static_range(4):
        query = _load(queries, asked, 4 * quad + channel, scale, group, dim)
        step = tl.maximum(step, tl.max(tl.abs(query), 1))
    return tl.div_rn(step, tl.full([asked.shape[0]], _MOST_QUERY, tl.float32))


@triton.jit
def _multiply(queries, asked, quad, scale, group: tl.constexpr, dim: tl.constexpr, step, words):
    """Multiply the codes of queries and keys; words: of a key's four channels each, `[quads, rows]`."""
    products = tl.zeros([asked.shape[0], words.shape[1]], tl.int32)
    for channel in tl.static_range(4):
        query = _load(queries, asked, 4 * quad + channel, scale, group, dim)
        query_code = _round(query, tl.maximum(step, _TINY)).to(tl.int8)
        # Behind the last channel the query's codes are 0.
        key_code = (((words >> (8 * channel)) & 255) - _OFFSET).to(tl.int8)
        products = tl.dot(query_code, key_code, products, out_dtype=tl.int32)
    return products


@triton.jit
def _mark(positions, active, marks, first, split_rows: tl.constexpr, rows) -> None:
    """Mark the active ones of `split_rows` rows from `first` on: the last split of a head may be one of fewer."""
    for begin in range(0, active, split_rows):
        index = begin + tl.arange(0, split_rows)
        position = tl.load(positions + index, mask=index < active, other=-1)
        own = (position >= first) & (position < first + split_rows) & (position < rows)
        tl.store(marks + position, 1, mask=own)


@triton.jit
def score(
    queries,
    queries_session,
    queries_head,
    positions,
    positions_session,
    positions_head,
    active,
    table,
    table_session,
    pages,
    scales,
    coded,
    scale,
    logits,
    largest,
    sums,
    marks,
    width,
    heads: tl.constexpr,
    group: tl.constexpr,
    padded_group: tl.constexpr,
    dim: tl.constexpr,
    padded_quads: tl.constexpr,
    page_rows: tl.constexpr,
    split_rows: tl.constexpr,
) -> None:
    """Score `split_rows` rows of a head by their codes, and mark those of them that are active.

    Grid: sessions * heads, splits. queries: `[sessions, heads, group, dim]`; positions: int32 `[sessions,
    heads, active]`; table: int64 `[sessions, table_session]`, see `SearchedTable`, with `pages` places for
    addresses. scales, coded: bytes from a page's codes to the layer's scales and codes. Writes logits
    `[sessions * heads, group, width]`, of each split their largest one and the sum of their powers,
    `[sessions * heads, group, splits]`, and marks int8 `[sessions * heads, width]`, which are 0 before.

    Whole numbers are multiplied, so the logits are those of `workers.retrieval.weights.weigh_codes` to the bit.
    """
    program = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    session = program // heads
    head = program % heads
    described = table + session * table_session
    rows = tl.load(described).to(tl.int32)
    first = split * split_rows
    if first >= rows:
        return
    row = first + tl.arange(0, split_rows)
    present = row < rows
    asked = tl.arange(0, padded_group)
    quad = tl.arange(0, padded_quads)
    # A word has four channels of a key.
    quads: tl.constexpr = (dim + 3) // 4
    queries += session * queries_session + head * queries_head
    step = _find_step(queries, asked, quad, scale, group, dim)
    page = tl.load(described + 2 + pages + row // page_rows, mask=present, other=0)
    place = row % page_rows
    # Of blocks of eight rows, to which the rows of a head in a page are filled up.
    blocks: tl.constexpr = (page_rows + 7) // 8
    codes = (page + coded).to(tl.pointer_type(tl.int32))
    at = (head * blocks + place // 8)[None, :] * (quads * 8) + quad[:, None] * 8 + place % 8
    words = tl.load(codes[None, :] + at, mask=present[None, :] & (quad[:, None] < quads), other=0)
    products = _multiply(queries, asked, quad, scale, group, dim, step, words)
    scales_at = (page + scales).to(tl.pointer_type(tl.float32))
    key_scales = tl.load(scales_at + head * (blocks * 8) + place, mask=present, other=0.0)
    logit = products.to(tl.float32) * key_scales[None, :] * step[:, None]
    logit = tl.where(present[None, :], logit, -float("inf"))
    most = tl.max(logit, 1)

    line = program * group + asked
    tl.store(
        logits + line[:, None] * width + row[None, :],
        logit,
        mask=(asked[:, None] < group) & present[None, :],
    )
    part = line * tl.num_programs(1) + split
    tl.store(largest + part, most, mask=asked < group)
    tl.store(sums + part, tl.sum(tl.exp(logit - most[:, None]), 1), mask=asked < group)

    mine = positions + session * positions_session + head * positions_head
    _mark(mine, active, marks + program * width, first, split_rows, rows)
