"""The active cache against a plain model of it, and a step against the attention it feeds."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from workers.cache.active_cache import EMPTY, ActiveCache, KVRows, KVShape
from workers.cache.forward_step import ForwardStep

LAYERS = 2
KV_HEADS = 2
HEAD_DIM = 3
SLOTS = 3
ROWS = (14, 10)
SHAPE = KVShape(n_layers=LAYERS, n_heads=4, n_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
Row = tuple[int, float, bool, float]
"""A row in the plain model: position, key (the value is minus it), promoted, accumulated."""


class CacheMachine(RuleBasedStateMachine):
    """Random operations on the cache and on lists of rows, compared after each."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = ActiveCache(SHAPE, SLOTS, ROWS)
        self.rows: dict[
            int, list[list[list[Row]]]
        ] = {}  # slot -> layer -> head -> rows by position
        self.bounds: dict[int, list[int]] = {}
        self.next_position: dict[int, int] = {}
        self.fill = 0.0

    def _number(self) -> float:
        self.fill += 1
        return self.fill

    def _room(self, slot: int) -> int:
        return min(self._free_rows(slot, layer) // KV_HEADS for layer in range(LAYERS))

    def _free_rows(self, slot: int, layer: int) -> int:
        return KV_HEADS * self.bounds[slot][layer] - sum(map(len, self.rows[slot][layer]))

    @precondition(lambda self: len(self.rows) < SLOTS)
    @rule(
        spare=st.tuples(st.integers(0, 4), st.integers(0, 4)), shift=st.sampled_from([0, 0, -6, 5])
    )
    def claim(self, spare: tuple[int, int], shift: int) -> None:
        """Sessions divide their slot between the layers as they need."""
        bound = [ROWS[0] - spare[0] + shift, ROWS[1] - spare[1] - shift]
        slot = self.cache.claim(bound)
        assert slot not in self.rows
        self.rows[slot] = [[[] for _ in range(KV_HEADS)] for _ in range(LAYERS)]
        self.bounds[slot], self.next_position[slot] = bound, 0

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.rows)))
        self.cache.release(slot)
        del self.rows[slot]

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        """One step over several slots, in any order, as a forward pass takes it layer by layer."""
        slots = data.draw(st.lists(st.sampled_from(sorted(self.rows)), unique=True, min_size=1))
        room = min(self._room(slot) for slot in slots)
        if room < 1:
            return
        tokens = data.draw(st.integers(1, room))
        starts = torch.tensor([self.next_position[slot] for slot in slots])
        static = data.draw(st.booleans())
        positions = starts[:, None] + torch.arange(tokens)
        step = ForwardStep(self.cache, slots, positions, static=static)
        for layer in range(LAYERS):
            keys = torch.empty(len(slots), KV_HEADS, tokens, HEAD_DIM)
            for index, slot in enumerate(slots):
                for head in range(KV_HEADS):
                    for token in range(tokens):
                        number = self._number()
                        keys[index, head, token] = number
                        row = (self.next_position[slot] + token, number, False, 0.0)
                        self.rows[slot][layer][head].append(row)
            seen, _ = step.update(keys, -keys, layer)
            longest = max(len(rows) for slot in slots for rows in self.rows[slot][layer])
            assert seen.shape[2] >= longest if static else seen.shape[2] == longest
            visible = visible_rows(step, layer, seen)
            for index, slot in enumerate(slots):
                for head, rows in enumerate(self.rows[slot][layer]):
                    assert seen[index, head, : len(rows), 0].tolist() == [row[1] for row in rows]
                    for token in range(tokens):
                        ends = len(rows) - tokens + token + 1
                        assert bool(visible[index, head, :, token, :ends].all())
                        assert not bool(visible[index, head, :, token, ends:].any())
        for index, slot in enumerate(slots):
            assert step.rows[index].shape == (LAYERS, 2, KV_HEADS, tokens, HEAD_DIM)
            self.next_position[slot] += tokens

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        """Heads keep different rows, and different numbers of them."""
        slot = data.draw(st.sampled_from(sorted(self.rows)))
        layer = data.draw(st.integers(0, LAYERS - 1))
        heads = self.rows[slot][layer]
        kept = [
            sorted(
                data.draw(st.sets(st.sampled_from(range(len(rows)))) if rows else st.just(set()))
            )
            for rows in heads
        ]
        width = max(map(len, kept))
        indices = torch.tensor([row + [-1] * (width - len(row)) for row in kept], dtype=torch.int64)
        self.cache.keep(slot, layer, indices.view(KV_HEADS, width))
        self.rows[slot][layer] = [
            [rows[i] for i in row] for rows, row in zip(heads, kept, strict=True)
        ]

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def refill(self, data: st.DataObject) -> None:
        """A layer's rows leave, and are written again together."""
        slot = data.draw(st.sampled_from(sorted(self.rows)))
        layer = data.draw(st.integers(0, LAYERS - 1))
        rows = KVRows(*(each.clone() for each in self.cache.read(slot, layer).tensors()))
        self.cache.keep(slot, layer, torch.empty(KV_HEADS, 0, dtype=torch.int64))
        self.cache.fill(slot, layer, rows)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def insert(self, data: st.DataObject) -> None:
        """Rows come in at their true positions, some heads more than others."""
        slot = data.draw(st.sampled_from(sorted(self.rows)))
        layer = data.draw(st.integers(0, LAYERS - 1))
        heads = self.rows[slot][layer]
        new: list[list[Row]] = []
        free = self._free_rows(slot, layer)
        for rows in heads:
            missing = sorted(set(range(self.next_position[slot])) - {row[0] for row in rows})
            most = min(len(missing), free)
            chosen = data.draw(st.sets(st.sampled_from(missing), max_size=most)) if most else set()
            free -= len(chosen)
            new.append(
                [
                    (at, self._number(), data.draw(st.booleans()), self._number())
                    for at in sorted(chosen)
                ]
            )
        width = max(map(len, new))
        positions = torch.full((KV_HEADS, width), EMPTY, dtype=torch.int32)
        keys = torch.zeros(KV_HEADS, width, HEAD_DIM)
        promoted = torch.zeros(KV_HEADS, width, dtype=torch.bool)
        accumulated = torch.zeros(KV_HEADS, width)
        for head, rows in enumerate(new):
            for at, (position, number, flag, total) in enumerate(rows):
                positions[head, at], keys[head, at] = position, number
                promoted[head, at], accumulated[head, at] = flag, total
        self.cache.insert(slot, layer, positions, keys, -keys, promoted, accumulated)
        self.rows[slot][layer] = [sorted(a + b) for a, b in zip(heads, new, strict=True)]

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def append_and_drop(self, data: st.DataObject) -> None:
        """A prompt is appended, scored and dropped."""
        slot = data.draw(st.sampled_from(sorted(self.rows)))
        tokens = min(3, self._room(slot))
        if tokens < 1:
            return
        step = ForwardStep(
            self.cache, [slot], (self.next_position[slot] + torch.arange(tokens))[None]
        )
        for layer in range(LAYERS):
            step.update(
                torch.ones(1, KV_HEADS, tokens, HEAD_DIM),
                torch.ones(1, KV_HEADS, tokens, HEAD_DIM),
                layer,
            )
        self.cache.drop_last(slot, tokens)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def clear_promoted(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.rows)))
        self.cache.clear_promoted(slot)
        self.rows[slot] = [
            [[(p, n, False, a) for p, n, _, a in rows] for rows in heads]
            for heads in self.rows[slot]
        ]

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def accumulate(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.rows)))
        layer = data.draw(st.integers(0, LAYERS - 1))
        amount = self._number()
        heads = self.rows[slot][layer]
        self.cache.accumulate(slot, layer, torch.full((KV_HEADS, max(map(len, heads))), amount))
        self.rows[slot][layer] = [
            [(p, n, flag, a + amount) for p, n, flag, a in rows] for rows in heads
        ]

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def clear(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.rows)))
        self.cache.clear(slot)
        self.rows[slot] = [[[] for _ in range(KV_HEADS)] for _ in range(LAYERS)]

    @invariant()
    def same_as_the_plain_model(self) -> None:
        self.cache.check_integrity()
        assert self.cache.free_slots() == SLOTS - len(self.rows)
        for slot, layers in self.rows.items():
            assert self.cache.longest_heads(slot) == [max(map(len, heads)) for heads in layers]
            assert self.cache.rows_per_head(slot) == [
                -(-sum(map(len, heads)) // KV_HEADS) for heads in layers
            ]
            assert self.cache.free_rows(slot) == self._room(slot)
            expected = sum(len(rows) for heads in layers for rows in heads) * SHAPE.row_bytes(
                torch.float32
            )
            assert self.cache.active_bytes(slot) == expected
            for layer, heads in enumerate(layers):
                held = self.cache.read(slot, layer)
                for head, rows in enumerate(heads):
                    n = len(rows)
                    assert held.positions[head, :n].tolist() == [row[0] for row in rows]
                    assert bool((held.positions[head, n:] == EMPTY).all())
                    expected_keys = torch.tensor([row[1] for row in rows])[:, None].expand(
                        n, HEAD_DIM
                    )
                    assert torch.equal(held.keys[head, :n], expected_keys)
                    assert torch.equal(held.values[head, :n], -expected_keys)
                    assert held.promoted[head].tolist() == [row[2] for row in rows] + [False] * (
                        len(held.promoted[head]) - n
                    )
                    assert held.accumulated[head, :n].tolist() == [row[3] for row in rows]


TestActiveCache = CacheMachine.TestCase
TestActiveCache.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_a_layer_over_its_bound_is_an_error_before_anything_is_written(
    make_cache: Callable[..., ActiveCache], fill: Callable[..., None]
) -> None:
    cache = make_cache()
    slot = cache.claim([8, 6])
    fill(cache, slot, 6)
    with pytest.raises(AssertionError, match="would hold"):
        fill(cache, slot, 2)
    assert cache.longest_heads(slot) == [6, 6]
    with pytest.raises(AssertionError, match="capacity"):
        cache.claim([17, 12])


def test_the_peak_counts_rows_that_were_resident_at_once(
    make_cache: Callable[..., ActiveCache], fill: Callable[..., None]
) -> None:
    cache = make_cache()
    slot = cache.claim([16, 12])
    fill(cache, slot, 9)
    for layer in range(2):
        cache.keep(slot, layer, torch.tensor([[0, 8], [3, -1]]))
    assert cache.longest_heads(slot) == [2, 2]
    assert cache.peak[:, slot].tolist() == [9, 9]
    cache.release(slot)
    assert cache.claim([16, 12]) == slot
    assert cache.peak[:, slot].tolist() == [0, 0], "another session's peak is its own"


def test_a_released_slot_holds_nothing_of_its_session(
    make_cache: Callable[..., ActiveCache], fill: Callable[..., None]
) -> None:
    cache = make_cache()
    slot = cache.claim([16, 12])
    fill(cache, slot, 12, value=float("nan"))
    cache.release(slot)
    assert not bool(cache.pool.memories[0].keys[slot].any())
    assert not bool(cache.pool.memories[0].values[slot].any())
    cache.check_integrity()


def visible_rows(step: ForwardStep, layer: int, keys: torch.Tensor) -> torch.Tensor:
    """Which rows each query may see: bool `[B, n_kv_heads, group, t, n]`."""
    batch, heads, n, _ = keys.shape
    group, tokens = step.cache.shape.group, step.query_positions.shape[1]
    mask = step.mask(layer, torch.float32)
    if mask is None:
        mask = torch.zeros(1)
    assert set(mask.unique().tolist()) <= {0.0, -torch.inf}
    return (mask == 0).expand(batch, heads, group * tokens, n).unflatten(2, (group, tokens))


def test_rows_that_one_head_frees_can_be_used_by_another(
    make_cache: Callable[..., ActiveCache],
    fill: Callable[..., None],
    keep_uneven: Callable[..., None],
) -> None:
    """Sixteen rows per head: with two in the first head the second may hold 30."""
    cache = make_cache(rows=(16, 16))
    slot = cache.claim([16, 16])
    fill(cache, slot, 16)
    assert cache.free_rows(slot) == 0
    full = cache.active_bytes(slot)
    for layer in range(2):
        keep_uneven(cache, slot, layer, few=2)
    assert cache.active_bytes(slot) == full - 2 * 14 * cache.shape.row_bytes(torch.float32)
    assert cache.free_rows(slot) == 7
    step = ForwardStep(cache, [slot], 16 + torch.arange(7)[None])
    for layer in range(2):
        seen, _ = step.update(torch.full((1, 2, 7, 4), 2.0), torch.ones(1, 2, 7, 4), layer)
        assert seen.shape == (1, 2, 23, 4)
        assert seen[0, 0, 2:9].unique().tolist() == [2.0]
        assert visible_rows(step, layer, seen)[0, 0, 0, -1].tolist() == [True] * 9 + [False] * 14
        assert cache.read(slot, layer).positions[0, :9].tolist() == [0, 1, *range(16, 23)]
    assert cache.lengths[:, slot].tolist() == [[9, 23], [9, 23]]
    assert cache.rows_per_head(slot) == [16, 16]
    cache.check_integrity()
    with pytest.raises(AssertionError, match="would hold"):
        ForwardStep(cache, [slot], 23 + torch.arange(1)[None])


def test_an_empty_head_may_start_where_the_slot_ends(
    make_cache: Callable[..., ActiveCache],
) -> None:
    """The first head takes all rows of the last layer, so that none is left for the second."""
    cache = make_cache(rows=(16, 16))
    slot = cache.claim([16, 16])
    positions = torch.stack([torch.arange(32), torch.full((32,), EMPTY)]).int()
    rows = torch.ones(2, 32, cache.shape.head_dim)
    cache.insert(slot, 1, positions, rows, rows, torch.zeros_like(positions, dtype=torch.bool))
    cache.accumulate(slot, 1, torch.ones(2, 32))
    found = cache.read(slot, 1)
    assert torch.equal(found.positions, positions)
    assert found.accumulated.tolist() == [[1.0] * 32, [0.0] * 32]
    cache.check_integrity()


def test_integrity_notices_rows_out_of_order(
    make_cache: Callable[..., ActiveCache], fill: Callable[..., None]
) -> None:
    cache = make_cache()
    slot = cache.claim([16, 12])
    fill(cache, slot, 4)
    cache.read(slot, 1).positions[0, 1] = 7
    with pytest.raises(AssertionError, match="out of order"):
        cache.check_integrity()


def test_integrity_notices_data_at_an_empty_index(
    make_cache: Callable[..., ActiveCache], fill: Callable[..., None]
) -> None:
    for name in ("positions", "promoted", "accumulated"):
        cache = make_cache()
        fill(cache, cache.claim([16, 12]), 4)
        getattr(cache.pool.memories[0], name)[0, 5] = 1
        with pytest.raises(AssertionError, match="an empty index"):
            cache.check_integrity()


def test_memory_is_the_same_after_any_appends(
    make_cache: Callable[..., ActiveCache], fill: Callable[..., None]
) -> None:
    cache = make_cache()
    where = [tensor.data_ptr() for tensor in cache.pool.memories[0].tensors()]
    for bound in ([16, 12], [20, 8], [2, 26]):
        slot = cache.claim(bound)
        fill(cache, slot, min(bound))
        cache.release(slot)
    assert [tensor.data_ptr() for tensor in cache.pool.memories[0].tensors()] == where
