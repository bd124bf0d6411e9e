"""The active cache against a plain model of it, and a step against the attention it feeds."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from workers.cache import EMPTY, ActiveCache, RowShape

LAYERS, KV_HEADS, HEAD_DIM, SLOTS = 2, 2, 3, 3
ROWS = (14, 10)
SHAPE = RowShape(n_layers=LAYERS, n_heads=4, n_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
Row = tuple[int, float, bool]
"""A row in the plain model: its position, the number its key is filled with (its value: minus it), promoted."""


class CacheMachine(RuleBasedStateMachine):
    """Random operations on the cache and on lists of rows, compared after each."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = ActiveCache(SHAPE, SLOTS, ROWS)
        self.rows: dict[int, list[list[list[Row]]]] = {}  # slot -> layer -> head -> rows by position
        self.bounds: dict[int, list[int]] = {}
        self.next_position: dict[int, int] = {}
        self.fill = 0.0

    def _number(self) -> float:
        self.fill += 1
        return self.fill

    def _room(self, slot: int) -> int:
        return min(self.bounds[slot][layer] - max(map(len, heads)) for layer, heads in enumerate(self.rows[slot]))

    @precondition(lambda self: len(self.rows) < SLOTS)
    @rule(spare=st.tuples(st.integers(0, 4), st.integers(0, 4)))
    def claim(self, spare: tuple[int, int]) -> None:
        bound = [rows - less for rows, less in zip(ROWS, spare, strict=True)]
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
        step = self.cache.begin(slots, starts[:, None] + torch.arange(tokens), observe=1)
        for layer in range(LAYERS):
            keys = torch.empty(len(slots), KV_HEADS, tokens, HEAD_DIM)
            for index, slot in enumerate(slots):
                for head in range(KV_HEADS):
                    for token in range(tokens):
                        number = self._number()
                        keys[index, head, token] = number
                        row = (self.next_position[slot] + token, number, False)
                        self.rows[slot][layer][head].append(row)
            seen, _ = step.update(keys, -keys, layer)
            assert seen.shape[2] == step.key_positions(layer).shape[2]
            assert seen.shape[2] == max(len(rows) for slot in slots for rows in self.rows[slot][layer])
            for index, slot in enumerate(slots):
                for head, rows in enumerate(self.rows[slot][layer]):
                    assert seen[index, head, : len(rows), 0].tolist() == [number for _, number, _ in rows]
        for index, slot in enumerate(slots):
            assert step.rows(index).shape == (LAYERS, 2, KV_HEADS, tokens, HEAD_DIM)
            self.next_position[slot] += tokens

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        """Heads keep different rows, and different numbers of them."""
        slot = data.draw(st.sampled_from(sorted(self.rows)))
        layer = data.draw(st.integers(0, LAYERS - 1))
        heads = self.rows[slot][layer]
        kept = [sorted(data.draw(st.sets(st.sampled_from(range(len(rows)))) if rows else st.just(set())))
                for rows in heads]  # fmt: skip
        width = max(map(len, kept))
        places = torch.tensor([row + [-1] * (width - len(row)) for row in kept], dtype=torch.int64)
        self.cache.keep(slot, layer, places.view(KV_HEADS, width))
        self.rows[slot][layer] = [[rows[i] for i in row] for rows, row in zip(heads, kept, strict=True)]

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def insert(self, data: st.DataObject) -> None:
        """Rows come in at their true positions, some heads more than others."""
        slot = data.draw(st.sampled_from(sorted(self.rows)))
        layer = data.draw(st.integers(0, LAYERS - 1))
        heads = self.rows[slot][layer]
        new: list[list[Row]] = []
        for rows in heads:
            missing = sorted(set(range(self.next_position[slot])) - {position for position, _, _ in rows})
            most = min(len(missing), self.bounds[slot][layer] - len(rows))
            chosen = data.draw(st.sets(st.sampled_from(missing), max_size=most)) if missing and most else set()
            new.append([(position, self._number(), data.draw(st.booleans())) for position in sorted(chosen)])
        width = max(map(len, new))
        positions = torch.full((KV_HEADS, width), EMPTY, dtype=torch.int32)
        keys = torch.zeros(KV_HEADS, width, HEAD_DIM)
        promoted = torch.zeros(KV_HEADS, width, dtype=torch.bool)
        for head, rows in enumerate(new):
            for at, (position, number, flag) in enumerate(rows):
                positions[head, at], keys[head, at], promoted[head, at] = position, number, flag
        self.cache.insert(slot, layer, positions, keys, -keys, promoted)
        self.rows[slot][layer] = [sorted(a + b) for a, b in zip(heads, new, strict=True)]

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def say_and_trim(self, data: st.DataObject) -> None:
        """A prompt is said, scored and forgotten."""
        slot = data.draw(st.sampled_from(sorted(self.rows)))
        tokens = min(3, self._room(slot))
        if tokens < 1:
            return
        step = self.cache.begin([slot], (self.next_position[slot] + torch.arange(tokens))[None])
        for layer in range(LAYERS):
            step.update(torch.ones(1, KV_HEADS, tokens, HEAD_DIM), torch.ones(1, KV_HEADS, tokens, HEAD_DIM), layer)
        self.cache.trim(slot, tokens)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def clear_promoted(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.rows)))
        self.cache.clear_promoted(slot)
        self.rows[slot] = [[[(p, n, False) for p, n, _ in rows] for rows in heads] for heads in self.rows[slot]]

    @invariant()
    def same_as_the_plain_model(self) -> None:
        self.cache.check_integrity()
        assert self.cache.free_slots() == SLOTS - len(self.rows)
        for slot, layers in self.rows.items():
            assert self.cache.longest(slot) == [max(map(len, heads)) for heads in layers]
            expected = sum(len(rows) for heads in layers for rows in heads) * SHAPE.row_bytes(torch.float32)
            assert self.cache.active_bytes(slot) == expected
            for layer, heads in enumerate(layers):
                keys, values, positions = self.cache.rows_of(slot, layer)
                for head, rows in enumerate(heads):
                    n = len(rows)
                    assert positions[head, :n].tolist() == [position for position, _, _ in rows]
                    assert bool((positions[head, n:] == EMPTY).all())
                    expected_keys = torch.tensor([number for _, number, _ in rows])[:, None].expand(n, HEAD_DIM)
                    assert torch.equal(keys[head, :n], expected_keys)
                    assert torch.equal(values[head, :n], -expected_keys)
                    flags = self.cache.promoted[layer][slot, head, :n].tolist()
                    assert flags == [flag for _, _, flag in rows]


TestActiveCache = CacheMachine.TestCase
TestActiveCache.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def _fill(cache: ActiveCache, slot: int, tokens: int, value: float = 1.0) -> None:
    step = cache.begin([slot], torch.arange(tokens)[None])
    rows = torch.full((1, cache.shape.n_kv_heads, tokens, cache.shape.head_dim), value)
    for layer in range(cache.shape.n_layers):
        step.update(rows, rows, layer)


def test_a_layer_over_its_bound_is_an_error_before_anything_is_written(
    make_cache: Callable[..., ActiveCache],
) -> None:
    cache = make_cache()
    slot = cache.claim([8, 6])
    _fill(cache, slot, 6)
    with pytest.raises(AssertionError, match="would hold"):
        _fill(cache, slot, 2)
    assert cache.longest(slot) == [6, 6]
    with pytest.raises(AssertionError, match="capacity"):
        cache.claim([17, 12])


def test_the_peak_counts_what_was_held_at_once(make_cache: Callable[..., ActiveCache]) -> None:
    cache = make_cache()
    slot = cache.claim([16, 12])
    _fill(cache, slot, 9)
    for layer in range(2):
        cache.keep(slot, layer, torch.tensor([[0, 8], [3, -1]]))
    assert cache.longest(slot) == [2, 2]
    assert cache.peak[:, slot].tolist() == [9, 9]
    cache.release(slot)
    assert cache.claim([16, 12]) == slot
    assert cache.peak[:, slot].tolist() == [0, 0], "another session's peak is its own"


def test_nothing_of_a_session_is_left_in_its_slot(make_cache: Callable[..., ActiveCache]) -> None:
    cache = make_cache()
    slot = cache.claim([16, 12])
    _fill(cache, slot, 12, value=float("nan"))
    cache.release(slot)
    for tensors in (cache.keys, cache.values):
        assert not any(bool(tensor[slot].any()) for tensor in tensors)
    cache.check_integrity()


def test_integrity_notices_rows_out_of_order(make_cache: Callable[..., ActiveCache]) -> None:
    cache = make_cache()
    slot = cache.claim([16, 12])
    _fill(cache, slot, 4)
    cache.positions[1][slot, 0, 1] = 7
    with pytest.raises(AssertionError, match="out of order"):
        cache.check_integrity()


def test_a_step_holds_the_last_queries_only(make_cache: Callable[..., ActiveCache]) -> None:
    cache = make_cache()
    slot = cache.claim([16, 12])
    step = cache.begin([slot], torch.arange(6)[None], observe=2)
    queries: Any = torch.arange(4 * 6 * 4.0).view(1, 4, 6, 4)
    step.record(queries)
    assert torch.equal(step.observed[0], queries[:, :, -2:])
    unobserved = cache.begin([slot], torch.arange(6)[None])
    unobserved.record(queries)
    assert unobserved.observed == []


def test_memory_is_the_same_whatever_is_said(make_cache: Callable[..., ActiveCache]) -> None:
    cache = make_cache()
    where = [tensor.data_ptr() for tensor in (*cache.keys, *cache.values, *cache.positions)]
    for _ in range(5):
        slot = cache.claim([16, 12])
        _fill(cache, slot, 12)
        cache.release(slot)
    assert [tensor.data_ptr() for tensor in (*cache.keys, *cache.values, *cache.positions)] == where
