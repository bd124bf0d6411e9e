"""Kernel: attention to active and drawn rows."""

import triton
import triton.language as tl


@triton.jit
def _add(most, total, out, logit, counted, value):
    """Add rows to a softmax that is computed step by step; counted: for how many rows each one stands."""
    now = tl.maximum(most, tl.max(logit, 1))
    # Of queries that have seen no row yet the largest logit is none.
    shift = tl.where(now == -float("inf"), 0.0, now)
    power = tl.exp(logit - shift[:, None]) * counted[None, :]
    kept = tl.exp(most - shift)
    total = total * kept + tl.sum(power, 1)
    out = out * kept[:, None] + tl.dot(power, value, input_precision="ieee")
    return now, total, out


@triton.jit
def _read(query, keys, values, present, inside):
    """Read rows that are present, and return the logits of queries, -inf elsewhere, and the rows' values."""
    both = present[:, None] & inside[None, :]
    key = tl.load(keys, mask=both, other=0.0).to(tl.float32)
    value = tl.load(values, mask=both, other=0.0).to(tl.float32)
    logit = tl.dot(query, tl.trans(key), input_precision="ieee")
    return tl.where(present[None, :], logit, -float("inf")), value


@triton.jit
def attend(
    queries,
    queries_session,
    queries_head,
    keys,
    keys_session,
    keys_head,
    values,
    values_session,
    values_head,
    mask,
    mask_session,
    mask_head,
    active,
    table,
    table_session,
    stored_keys,
    stored_values,
    scale,
    weights,
    width,
    drawn,
    shares,
    lasts,
    most_drawn,
    out,
    heads: tl.constexpr,
    group: tl.constexpr,
    padded_group: tl.constexpr,
    dim: tl.constexpr,
    padded_dim: tl.constexpr,
    page_rows: tl.constexpr,
    chunk: tl.constexpr,
    masked: tl.constexpr,
) -> None:
    """Attend with the queries of a head to its active rows, and to those that were drawn.

    Grid: sessions * heads. queries and out: `[sessions, heads, group, dim]`, out contiguous; keys, values:
    `[sessions, heads, active, dim]`; mask: `[sessions, heads, active]`, where `masked`. stored_keys,
    stored_values: bytes from a page to the layer's keys and values. Pages are read where they lie: in memory
    of the host that the device can address, or in its own. weights: as `workers.kernels.weigh.weigh` writes
    them; drawn, shares, lasts: as `workers.kernels.draw.draw`.
    """
    program = tl.program_id(0).to(tl.int64)
    session = program // heads
    head = program % heads
    asked = tl.arange(0, padded_group)
    channels = tl.arange(0, padded_dim)
    inside = channels < dim
    query = tl.load(
        queries
        + session * queries_session
        + head * queries_head
        + asked[:, None] * dim
        + channels[None, :],
        mask=(asked[:, None] < group) & inside[None, :],
        other=0.0,
    )
    query = query.to(tl.float32) * scale
    most = tl.full([padded_group], -float("inf"), tl.float32)
    total = tl.zeros([padded_group], tl.float32)
    sums = tl.zeros([padded_group, padded_dim], tl.float32)

    keys += session * keys_session + head * keys_head
    values += session * values_session + head * values_head
    for begin in range(0, active, chunk):
        row = begin + tl.arange(0, chunk)
        present = row < active
        at = row[:, None] * dim + channels[None, :]
        logit, value = _read(query, keys + at, values + at, present, inside)
        if masked:
            added = mask + session * mask_session + head * mask_head + row
            logit += tl.load(added, mask=present, other=0.0).to(tl.float32)[None, :]
        most, total, sums = _add(most, total, sums, logit, present.to(tl.float32), value)

    described = table + session * table_session
    weights += program * width
    drawn += program * (1 + most_drawn)
    made = tl.load(drawn)
    threshold = tl.load(shares + program * 2)
    share = tl.load(shares + program * 2 + 1)
    last = tl.load(lasts + program)
    for begin in range(0, made, chunk):
        index = begin + tl.arange(0, chunk)
        present = index < made
        row = tl.load(drawn + 1 + index, mask=present, other=0)
        weight = tl.load(weights + row, mask=present, other=1.0)
        alone = (weight >= threshold) & (row != last)
        counted = tl.where(present, tl.where(alone, 1.0, share / weight), 0.0)
        page = tl.load(described + 2 + row // page_rows, mask=present, other=0)
        at = (head * page_rows + row % page_rows)[:, None] * dim + channels[None, :]
        kind: tl.constexpr = tl.pointer_type(queries.dtype.element_ty)
        first_key = tl.multiple_of((page + stored_keys).to(kind), 16)
        first_value = tl.multiple_of((page + stored_values).to(kind), 16)
        logit, value = _read(
            query, first_key[:, None] + at, first_value[:, None] + at, present, inside
        )
        most, total, sums = _add(most, total, sums, logit, counted, value)

    tl.store(
        out + (program * group + asked[:, None]) * dim + channels[None, :],
        sums / total[:, None],
        mask=(asked[:, None] < group) & inside[None, :],
    )
