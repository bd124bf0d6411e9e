"""What the eviction methods get to see of a turn's queries."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.observation import RecentQueries

LAYERS, HEADS, HEAD_DIM = 2, 3, 4


@given(st.integers(1, 9), st.lists(st.tuples(st.integers(1, 12), st.integers(0, 5)), max_size=6))
def test_the_last_tokens_are_held_with_their_positions(width: int, pushes: list[tuple[int, int]]) -> None:
    """A step observes as much as the widest method of its batch wants, which may be more than this one's width."""
    recent = RecentQueries(width)
    everything = torch.arange(LAYERS * HEADS * 80 * HEAD_DIM).float().view(LAYERS, HEADS, 80, HEAD_DIM)
    said = 0
    for tokens, more in pushes:
        observed = min(width + more, tokens)
        queries = [layer[:, said + tokens - observed : said + tokens] for layer in everything]
        recent.push(queries, torch.arange(said, said + tokens, dtype=torch.int32))
        said += tokens
    held = recent.observed()
    assert held.positions.tolist() == list(range(max(0, said - width), said))
    assert held.tokens == min(width, said)
    for layer, queries in enumerate(held.queries):
        assert torch.equal(queries, everything[layer, :, max(0, said - width) : said])


def test_a_method_that_observes_nothing_holds_nothing() -> None:
    recent = RecentQueries(0)
    recent.push([torch.ones(HEADS, 1, HEAD_DIM)] * LAYERS, torch.tensor([0]))
    assert recent.observed().queries == ()
    assert recent.observed().tokens == 0


def test_a_new_turn_starts_with_nothing_observed() -> None:
    recent = RecentQueries(4)
    recent.push([torch.ones(HEADS, 2, HEAD_DIM)] * LAYERS, torch.tensor([0, 1]))
    recent.clear()
    assert recent.observed().queries == ()
    recent.push([torch.zeros(HEADS, 1, HEAD_DIM)] * LAYERS, torch.tensor([2]))
    assert recent.observed().positions.tolist() == [2]
    assert recent.observed().queries[0].shape == (HEADS, 1, HEAD_DIM)
