"""Kernel: draw of stored rows by their weights."""

import triton
import triton.language as tl

_TINY: tl.constexpr = tl.constexpr(1.1754943508222875e-38)
# Bits of the threshold are found so many at once, by a count of each of their values.
_BITS: tl.constexpr = tl.constexpr(8)
_VALUES: tl.constexpr = tl.constexpr(256)
_EMPTY: tl.constexpr = tl.constexpr(2147483647)


@triton.jit
def _find_newest(positions, heads_stride, heads, active, chunk: tl.constexpr):
    """Find the position of a session's newest active row: that of the query's own token."""
    newest = tl.zeros([chunk], tl.int32)
    for head in range(heads):
        for begin in range(0, active, chunk):
            index = begin + tl.arange(0, chunk)
            position = tl.load(
                positions + head * heads_stride + index, mask=index < active, other=0
            )
            newest = tl.maximum(newest, tl.where(position == _EMPTY, 0, position))
    return tl.max(newest, 0)


@triton.jit
def _load(weights, ranks, row, rows):
    """Load weights, 0 for none, and priorities, negative where a row may not be drawn."""
    weight = tl.load(weights + row, mask=row < rows, other=0.0)
    return weight, weight * tl.load(ranks + row, mask=row < rows, other=0.0)


@triton.jit
def _find_threshold(weights, ranks, rows, count, chunk: tl.constexpr):
    """Find the priority after those of `count` rows, by its bits, and how many rows of it are drawn yet.

    Numbers that are not negative have the order of their bits as whole numbers.
    """
    # Its bits so far, and rows to draw among those that have the same.
    found = tl.full([], 0, tl.int32)
    left = count
    bins = tl.arange(0, _VALUES)
    for step in tl.static_range(4):
        shift = (3 - step) * _BITS
        numbers = tl.zeros([_VALUES], tl.int32)
        for begin in range(0, rows, chunk):
            _, priority = _load(weights, ranks, begin + tl.arange(0, chunk), rows)
            bits = tl.maximum(priority, 0.0).to(tl.int32, bitcast=True)
            # Of 31 bits: in the first step there are none before.
            same = ((bits ^ found) >> shift) < _VALUES
            numbers += tl.histogram((bits >> shift) & (_VALUES - 1), _VALUES, mask=same)
        from_top = tl.cumsum(numbers, 0, reverse=True)
        digit = tl.maximum(tl.sum((from_top > left).to(tl.int32), 0) - 1, 0)
        left -= tl.sum(tl.where(bins > digit, numbers, 0), 0)
        found |= digit << shift
    return found.to(tl.float32, bitcast=True), left


@triton.jit
def _take(weights, ranks, rows, chunk: tl.constexpr, following, room, threshold, all_taken, drawn):
    """Write the drawn rows, in order: those of a priority above `following`, and `room` of those that have it.

    Returns how many they are, how many of them are certain, the weight of all rows that are not, and the drawn row
    of the least priority with its weight.
    """
    made = tl.full([], 0, tl.int32)
    equal = tl.full([], 0, tl.int32)
    certain = tl.full([], 0, tl.int32)
    rest = tl.full([], 0.0, tl.float32)
    least = tl.full([], float("inf"), tl.float32)
    last = tl.full([], -1, tl.int32)
    last_weight = tl.full([], 0.0, tl.float32)
    for begin in range(0, rows, chunk):
        row = begin + tl.arange(0, chunk)
        weight, priority = _load(weights, ranks, row, rows)
        at_it = (priority == following) & (row < rows)
        before = equal + tl.cumsum(at_it.to(tl.int32), 0)
        taken = (priority > following) | (at_it & (before <= room))
        taken = tl.where(all_taken, (weight >= 0) & (row < rows), taken)
        equal += tl.sum(at_it.to(tl.int32), 0)
        place = made + tl.cumsum(taken.to(tl.int32), 0)
        tl.store(drawn + place, row, mask=taken)
        made += tl.sum(taken.to(tl.int32), 0)
        certain += tl.sum((taken & (weight >= threshold)).to(tl.int32), 0)
        rest += tl.sum(tl.where((weight > 0) & (weight < threshold), weight, 0.0), 0)
        lowest = tl.min(tl.where(taken, priority, float("inf")), 0)
        lowest_row = tl.min(tl.where(taken & (priority == lowest), row, _EMPTY), 0)
        lowest_weight = tl.sum(tl.where(row == lowest_row, weight, 0.0), 0)
        last = tl.where(lowest < least, lowest_row, last)
        last_weight = tl.where(lowest < least, lowest_weight, last_weight)
        least = tl.minimum(lowest, least)
    return made, certain, rest, last, last_weight


@triton.jit
def draw(
    table,
    table_session,
    positions,
    positions_session,
    positions_head,
    active,
    weights,
    width,
    ranks,
    rotation,
    rotations,
    first_head,
    head_step,
    drawn,
    shares,
    lasts,
    most,
    heads: tl.constexpr,
    chunk: tl.constexpr,
) -> None:
    """Draw rows of a head: `workers.retrieval.sampling.draw`, and all where there are no more than the count.

    Grid: sessions * heads. weights: as `workers.kernels.weigh.weigh` writes them; ranks: unrotated, of
    `Ranks`, which are rotated by the newest position and `rotation`, modulo `rotations`, and by `head_step` for
    each head from `first_head` on. Writes drawn int32 `[sessions * heads, 1 + most]`, how many rows and their
    positions in order; places of rows that are none stay as they are. For how many rows each one stands follows
    from shares `[sessions * heads, 2]`, the threshold and the share, and lasts int32 `[sessions * heads]`: a row
    of a weight from the threshold on stands for itself alone, unless it is the last; any other for share / weight.
    """
    program = tl.program_id(0).to(tl.int64)
    session = program // heads
    head = program % heads
    described = table + session * table_session
    rows = tl.load(described).to(tl.int32)
    count = tl.load(described + 1).to(tl.int32)
    drawn += program * (1 + most)
    if rows == 0:
        tl.store(drawn, 0)
        return
    newest = _find_newest(
        positions + session * positions_session, positions_head, heads, active, chunk
    )
    ranks += (newest + rotation) % rotations + (first_head + head) * head_step
    weights += program * width
    all_taken = rows <= count

    following, left = _find_threshold(weights, ranks, rows, count, chunk)
    threshold = tl.maximum(following, _TINY)
    # Of the rows at the threshold as many are drawn as there is room for, the first ones.
    room = tl.where(following > 0, left, 0)

    made, certain, rest, last, last_weight = _take(
        weights, ranks, rows, chunk, following, room, threshold, all_taken, drawn
    )
    tl.store(drawn, made)

    # One drawn row at least, that of the least priority, is not certain: it and others share what is left.
    last = tl.where(made == count, last, -1)
    last_certain = (last >= 0) & (last_weight >= threshold)
    rest += tl.where(last_certain, last_weight, 0.0)
    certain -= last_certain.to(tl.int32)
    share = rest / tl.maximum(made - certain, 1).to(tl.float32)
    tl.store(shares + program * 2, tl.where(all_taken, -1.0, threshold))
    tl.store(shares + program * 2 + 1, share)
    tl.store(lasts + program, tl.where(all_taken, -1, last))
