"""What every eviction method promises, whatever rows it is given."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from workers import methods
from workers.cache.active_cache import EMPTY
from workers.methods import LayerRows

POOLED = {
    "adakv": methods.build("adakv"),
    "kvzip": methods.build("kvzip"),
    "epicache, as in its paper": methods.build(
        "epicache", '{"rank": "attention", "whole_tokens": false}'
    ),
    "keydiff, heads pooled": methods.build("keydiff", '{"pool_heads": true}'),
    "infinipot, heads pooled": methods.build("infinipot", '{"pool_heads": true}'),
}
"""Share a layer's budget between its heads."""
METHODS = {name: methods.build(name) for name in methods.METHODS} | POOLED
EVICTING = [name for name, method in METHODS.items() if method.evicts]
WHOLE_CHUNKS = ["chunkkv"]
"""May leave a part of the budget unused."""


@dataclass(frozen=True)
class Case:
    """Rows at the moment of an eviction: positions per head, which of them are protected, what is observed."""

    positions: list[list[int]]
    protected: list[set[int]]
    tokens: int
    budget: int
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Two heads of different lengths, one of them maybe empty, and a budget that holds what is protected."""
    heads = [sorted(draw(st.sets(st.integers(0, 90), max_size=40))) for _ in range(2)]
    assume(any(heads))
    budget = draw(st.integers(1, 45))
    protected = [set(draw(st.permutations(head))[: draw(st.integers(0, budget))]) for head in heads]
    return Case(heads, protected, draw(st.integers(0, 12)), budget, draw(st.integers(0, 9)))


def _selected(
    method: methods.Method, rows: LayerRows, case: Case
) -> tuple[Tensor, list[list[int]]]:
    """Places as the method returns them, and the positions they stand for, per head."""
    scores = method.scores(rows)
    # A place without a row is after every position: the engine calls it protected, too.
    kept = torch.tensor(
        [
            [p in {*free, EMPTY} for p in head]
            for head, free in zip(rows.positions.tolist(), case.protected, strict=True)
        ]
    )
    places = method.select(scores.masked_fill(kept, torch.inf), rows.positions, case.budget)
    found = [
        rows.positions[head][of_head[of_head >= 0]].tolist() for head, of_head in enumerate(places)
    ]
    return places, found


@pytest.mark.parametrize("name", list(METHODS))
@given(case=cases())
def test_scores_are_finite_and_there_for_every_row(
    name: str, case: Case, make_rows: Callable[..., LayerRows]
) -> None:
    rows = make_rows(case.positions, case.seed, case.tokens)
    scores = METHODS[name].scores(rows)
    assert scores.shape == rows.positions.shape
    assert scores.dtype == torch.float32
    assert bool(scores.isfinite().all())
    assert torch.equal(scores, METHODS[name].scores(rows)), "the same rows, the same scores"


@pytest.mark.parametrize("name", list(METHODS))
@given(case=cases())
def test_places_are_rows_that_are_there_in_order(
    name: str, case: Case, make_rows: Callable[..., LayerRows]
) -> None:
    rows = make_rows(case.positions, case.seed, case.tokens)
    method = METHODS[name]
    places, found = _selected(method, rows, case)
    assert places.dtype == torch.int64
    assert places.shape[0] == 2
    for kept, positions in zip(places.tolist(), found, strict=True):
        held = [place for place in kept if place >= 0]
        assert kept == held + [-1] * (len(kept) - len(held)), "what is not a row stands at the end"
        assert held == sorted(set(held))
        assert EMPTY not in positions
    assert torch.equal(places, _selected(method, rows, case)[0]), (
        "the same rows, the same selection"
    )


@pytest.mark.parametrize("name", EVICTING)
@given(case=cases())
def test_the_budget_is_held_and_used(
    name: str, case: Case, make_rows: Callable[..., LayerRows]
) -> None:
    rows = make_rows(case.positions, case.seed, case.tokens)
    found = _selected(METHODS[name], rows, case)[1]
    counts = [len(kept) for kept in found]
    held = [len(head) for head in case.positions]
    if name in POOLED:
        assert sum(counts) == min(2 * case.budget, sum(held))
    elif name in WHOLE_CHUNKS:
        assert all(min(case.budget, n) >= count for count, n in zip(counts, held, strict=True))
    else:
        assert counts == [min(case.budget, n) for n in held]


@pytest.mark.parametrize("name", EVICTING)
@given(case=cases())
def test_what_is_protected_is_kept(
    name: str, case: Case, make_rows: Callable[..., LayerRows]
) -> None:
    rows = make_rows(case.positions, case.seed, case.tokens)
    found = _selected(METHODS[name], rows, case)[1]
    assert all(free <= set(kept) for free, kept in zip(case.protected, found, strict=True))


@pytest.mark.parametrize("name", list(METHODS))
@given(case=cases(), more=st.integers(0, 5))
def test_everything_stays_within_the_budget(
    name: str, case: Case, more: int, make_rows: Callable[..., LayerRows]
) -> None:
    rows = make_rows(case.positions, case.seed, case.tokens)
    method = METHODS[name]
    places = method.select(
        method.scores(rows), rows.positions, max(map(len, case.positions)) + more
    )
    assert (places >= 0).sum(1).tolist() == [len(head) for head in case.positions]


@pytest.mark.parametrize("name", list(METHODS))
def test_a_layer_without_a_row_selects_none(name: str, make_rows: Callable[..., LayerRows]) -> None:
    rows = make_rows([[], []])
    method = METHODS[name]
    assert method.scores(rows).shape == (2, 0)
    assert not (method.select(method.scores(rows), rows.positions, 4) >= 0).any()


@pytest.mark.parametrize("name", [name for name in EVICTING if name not in [*POOLED, "random"]])
def test_heads_that_hold_the_same_keys_keep_the_same_rows(
    name: str, make_rows: Callable[..., LayerRows]
) -> None:
    """A head's rows depend on its own scores: ties are broken alike in every head."""
    rows = make_rows([range(60)] * 2, seed=4)
    keys = rows.keys[:1].expand(2, -1, -1)
    queries = rows.queries[:2].repeat(2, 1, 1)
    same = make_rows(
        [range(60)] * 2, keys=keys, queries=queries, accumulated=torch.zeros(2, 60), seed=4
    )
    method = METHODS[name]
    places = method.select(method.scores(same), same.positions, 25)
    assert torch.equal(places[0], places[1])
