"""A session's selection outlives its slot, its scores grow with it."""

from collections.abc import Callable

import torch

from workers import methods
from workers.cache.active_cache import EMPTY, ActiveCache
from workers.cache.forward_step import ForwardStep
from workers.engine.selection import Selection
from workers.engine.session import SessionConfig, WorkerSession


def make_session() -> WorkerSession:
    """A session of 30 and 50 rows per head, with a reserve of 10 for repair."""
    return WorkerSession.create(SessionConfig("s", 1, 50, 10, methods.build("random"), (30, 50)))


def test_a_selection_of_uneven_heads_survives_as_bytes(
    make_cache: Callable[..., ActiveCache],
) -> None:
    cache = make_cache()
    slot = cache.claim([16, 12])
    step = ForwardStep(cache, [slot], torch.arange(9)[None])
    for layer in range(2):
        step.update(torch.ones(1, 2, 9, 4), torch.ones(1, 2, 9, 4), layer)
    cache.keep(slot, 0, torch.tensor([[0, 4, 8], [2, -1, -1]]))
    cache.read(slot, 0).promoted[0, 1] = True
    selection = Selection.from_bytes(Selection.from_slot(cache, slot).to_bytes())
    assert selection.positions[0].tolist() == [[0, 4, 8], [2, EMPTY, EMPTY]]
    assert selection.promoted[0].tolist() == [[False, True, False], [False, False, False]]
    assert [positions.tolist() for positions in selection.store_positions()] == [
        [[0, 4, 8], [2, -1, -1]],
        [list(range(9)), list(range(9))],
    ]
    assert selection.row_counts() == [4, 18]
    assert selection.rows_per_head() == [2, 9]


def test_an_empty_selection_survives_too(make_cache: Callable[..., ActiveCache]) -> None:
    cache = make_cache()
    selection = Selection.from_bytes(Selection.from_slot(cache, cache.claim([16, 12])).to_bytes())
    assert selection.row_counts() == [0, 0]


def test_many_layers_keep_their_order() -> None:
    positions = tuple(torch.full((1, 2), layer, dtype=torch.int32) for layer in range(12))
    promoted = tuple(torch.zeros(1, 2, dtype=torch.bool) for _ in range(12))
    selection = Selection.from_bytes(Selection(positions, promoted).to_bytes())
    assert [int(p[0, 0]) for p in selection.positions] == list(range(12))


def test_the_target_includes_the_reserve_only_while_rows_are_promoted() -> None:
    session = make_session()
    assert [session.target(layer) for layer in range(2)] == [30, 50]
    session.promoted_rows = 3
    assert [session.target(layer) for layer in range(2)] == [40, 60]


def test_a_selection_keeps_accumulated_scores_when_asked(
    make_cache: Callable[..., ActiveCache],
) -> None:
    cache = make_cache()
    slot = cache.claim([16, 12])
    step = ForwardStep(cache, [slot], torch.arange(3)[None])
    for layer in range(2):
        step.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), layer)
        cache.accumulate(slot, layer, torch.tensor([[0.1, 0.2, 0.3], [1.0, 2.0, 3.0]]) + layer)
    selection = Selection.from_bytes(Selection.from_slot(cache, slot, accumulated=True).to_bytes())
    assert torch.equal(
        selection.accumulated[1], torch.tensor([[0.1, 0.2, 0.3], [1.0, 2.0, 3.0]]) + 1
    )
    assert Selection.from_bytes(Selection.from_slot(cache, slot).to_bytes()).accumulated == ()


def test_a_saved_selection_does_not_change_with_the_slot(
    make_cache: Callable[..., ActiveCache],
) -> None:
    cache = make_cache()
    slot = cache.claim([16, 12])
    step = ForwardStep(cache, [slot], torch.arange(12)[None])
    for layer in range(2):
        step.update(torch.ones(1, 2, 12, 4), torch.ones(1, 2, 12, 4), layer)
    selection = Selection.from_slot(cache, slot)
    cache.clear(slot)
    assert selection.row_counts() == [24, 24]
