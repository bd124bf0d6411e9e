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
    """Rows at an eviction: positions per head, protected ones, number of observed tokens."""

    positions: list[list[int]]
    protected: list[set[int]]
    tokens: int
    budget: int
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Two heads of different lengths, one maybe empty, and a budget for the protected rows."""
    heads = [sorted(draw(st.sets(st.integers(0, 90), max_size=40))) for _ in range(2)]
    assume(any(heads))
    budget = draw(st.integers(1, 45))
    protected = [set(draw(st.permutations(head))[: draw(st.integers(0, budget))]) for head in heads]
    return Case(heads, protected, draw(st.integers(0, 12)), budget, draw(st.integers(0, 9)))


def _selected(
    method: methods.Method, rows: LayerRows, case: Case
) -> tuple[Tensor, list[list[int]]]:
    """Indices as the method returns them, and their positions, per head."""
    scores = method.scores(rows)
    # An index without a row is after every position: the engine protects it, too.
    kept = torch.tensor(
        [
            [p in {*free, EMPTY} for p in head]
            for head, free in zip(rows.positions.tolist(), case.protected, strict=True)
        ]
    )
    indices = method.select(scores.masked_fill(kept, torch.inf), rows.positions, case.budget)
    found = [
        rows.positions[head][of_head[of_head >= 0]].tolist() for head, of_head in enumerate(indices)
    ]
    return indices, found


@pytest.mark.parametrize("name", list(METHODS))
@given(case=cases())
def test_every_row_has_a_finite_score(
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
def test_indices_are_resident_rows_in_order(
    name: str, case: Case, make_rows: Callable[..., LayerRows]
) -> None:
    rows = make_rows(case.positions, case.seed, case.tokens)
    method = METHODS[name]
    indices, found = _selected(method, rows, case)
    assert indices.dtype == torch.int64
    assert indices.shape[0] == 2
    for kept, positions in zip(indices.tolist(), found, strict=True):
        resident = [index for index in kept if index >= 0]
        assert kept == resident + [-1] * (len(kept) - len(resident)), "-1 only at the end"
        assert resident == sorted(set(resident))
        assert EMPTY not in positions
    assert torch.equal(indices, _selected(method, rows, case)[0]), (
        "the same rows, the same selection"
    )


@pytest.mark.parametrize("name", EVICTING)
@given(case=cases())
def test_the_budget_is_respected_and_used(
    name: str, case: Case, make_rows: Callable[..., LayerRows]
) -> None:
    rows = make_rows(case.positions, case.seed, case.tokens)
    found = _selected(METHODS[name], rows, case)[1]
    counts = [len(kept) for kept in found]
    lengths = [len(head) for head in case.positions]
    if name in POOLED:
        assert sum(counts) == min(2 * case.budget, sum(lengths))
    elif name in WHOLE_CHUNKS:
        assert all(min(case.budget, n) >= count for count, n in zip(counts, lengths, strict=True))
    else:
        assert counts == [min(case.budget, n) for n in lengths]


@pytest.mark.parametrize("name", EVICTING)
@given(case=cases())
def test_protected_rows_are_kept(
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
    indices = method.select(
        method.scores(rows), rows.positions, max(map(len, case.positions)) + more
    )
    assert (indices >= 0).sum(1).tolist() == [len(head) for head in case.positions]


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
    """A head's rows depend on its own scores; ties are broken in the same way in every head."""
    rows = make_rows([range(60)] * 2, seed=4)
    keys = rows.keys[:1].expand(2, -1, -1)
    queries = rows.queries[:2].repeat(2, 1, 1)
    same = make_rows(
        [range(60)] * 2, keys=keys, queries=queries, accumulated=torch.zeros(2, 60), seed=4
    )
    method = METHODS[name]
    indices = method.select(method.scores(same), same.positions, 25)
    assert torch.equal(indices[0], indices[1])
