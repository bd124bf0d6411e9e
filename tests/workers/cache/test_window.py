"""Reach of layers with windows, and what their slots keep."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.cache.caches import Caches
from workers.cache.layer_plan import LayerPlan
from workers.cache.side_cache import SideShape
from workers.cache.slot_pool import KVShape
from workers.cache.window import Window

SHAPE = KVShape(n_layers=1, n_heads=4, n_kv_heads=2, head_dim=4)


def open_caches(window: Window, room: int = 8) -> Caches:
    """Slots of a model with a layer of full attention and one with a window."""
    side = SideShape(LayerPlan(2, rows=(0,), windows={1: window}), windows=SHAPE)
    return Caches.create(SHAPE, side, 2, [200], room, torch.float32, "cpu")


def append(caches: Caches, slot: int, start: int, tokens: int) -> torch.Tensor:
    """Run a pass; returns what its queries see of the window's layer, bool `[t, positions]`."""
    side = caches.side
    assert side is not None
    side.make_room(slot, start, tokens)
    step = caches.begin([slot], start + torch.arange(tokens)[None])
    rows = torch.randn(1, 2, tokens, 4)
    step.update(rows, rows, 0)
    step.update(rows, rows, 1)
    part, layer = step.find(1)
    mask = part.mask(layer, torch.float32)
    assert mask is not None
    positions = part.positions(layer)[0, 0].long()
    seen = torch.zeros(tokens, 400, dtype=torch.bool)
    for token in range(tokens):
        seen[token, positions[mask[0, 0, token] == 0]] = True
    return seen


@given(
    size=st.integers(1, 20),
    chunked=st.booleans(),
    passes=st.lists(st.integers(1, 8), min_size=1, max_size=12),
)
def test_a_query_sees_its_window_whatever_the_passes_before(
    size: int, chunked: bool, passes: list[int]
) -> None:
    window = Window(size, chunked)
    caches = open_caches(window)
    slot = caches.active.claim(caches.active.rows)
    start = 0
    for tokens in passes:
        seen = append(caches, slot, start, tokens)
        for token in range(tokens):
            at = start + token
            first = at - at % size if chunked else max(0, at - size + 1)
            assert seen[token].nonzero()[:, 0].tolist() == list(range(first, at + 1))
        start += tokens
    caches.active.check_integrity()
    assert caches.side is not None
    assert caches.side.windows is not None
    caches.side.windows.check_integrity()


@given(before=st.integers(1, 60), dropped=st.integers(0, 20))
def test_a_window_that_lost_rows_for_room_is_not_complete(before: int, dropped: int) -> None:
    caches = open_caches(Window(10))
    side = caches.side
    assert side is not None
    assert side.windows is not None
    slot = caches.active.claim(caches.active.rows)
    for start in range(before):
        append(caches, slot, start, 1)
    length = max(0, before - dropped)
    side.drop_from(slot, length)
    held = side.windows.read(slot, 0).positions[0].tolist()
    wanted = set(range(max(0, length - 9), length))
    assert side.is_complete(slot, length) == (wanted <= set(held))


def test_a_slot_that_is_taken_and_put_back_has_its_window() -> None:
    caches = open_caches(Window(10))
    first = caches.active.claim(caches.active.rows)
    other = caches.active.claim(caches.active.rows)
    append(caches, first, 0, 7)
    taken = caches.active.take(first)
    append(caches, other, 0, 3)
    assert caches.active.put_back(taken) == first
    assert append(caches, first, 7, 1)[0].nonzero()[:, 0].tolist() == list(range(8))


def test_a_pass_that_is_undone_leaves_no_row() -> None:
    caches = open_caches(Window(10))
    slot = caches.active.claim(caches.active.rows)
    append(caches, slot, 0, 5)
    step = caches.begin([slot], torch.arange(5, 8)[None])
    rows = torch.randn(1, 2, 3, 4)
    step.update(rows, rows, 0)
    step.update(rows, rows, 1)
    step.undo()
    assert caches.side is not None
    assert caches.side.is_complete(slot, 5)
    assert append(caches, slot, 5, 1)[0].nonzero()[:, 0].tolist() == list(range(6))
