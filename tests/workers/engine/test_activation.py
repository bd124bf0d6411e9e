"""A selection becomes active by its difference, within the bound, or not at all."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from workers.cache.active_cache import EMPTY, ActiveCache, KVShape
from workers.engine.activation import become
from workers.engine.session import ResidentSession, SessionConfig, WorkerSession
from workers.methods import build

SHAPE = KVShape(n_layers=2, n_heads=4, n_kv_heads=2, head_dim=4)
LENGTH = 40
MOST = 12


class Rows:
    """A source of rows whose numbers tell layer, head and position; it can fail."""

    def __init__(self) -> None:
        self.fails = False
        self.read: list[int] = []

    def gather_selection(
        self, session: str, selection: Sequence[Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        if self.fails:
            raise OSError("the tier is gone")
        self.read.append(sum(int((positions >= 0).sum()) for positions in selection))
        return [(row_of(layer, each), -row_of(layer, each)) for layer, each in enumerate(selection)]


def row_of(layer: int, positions: Tensor) -> Tensor:
    heads = torch.arange(len(positions))[:, None]
    number = (layer * 1000.0 + heads * 100.0 + positions).masked_fill(positions < 0, 0.0)
    return number[..., None].expand(-1, -1, SHAPE.head_dim).contiguous()


def padded(heads: Sequence[Sequence[int]]) -> Tensor:
    width = max(map(len, heads))
    return torch.tensor(
        [[*sorted(head), *[-1] * (width - len(head))] for head in heads], dtype=torch.int64
    ).view(len(heads), width)


def holding(selection: Sequence[Tensor], bound: int = MOST) -> tuple[ActiveCache, ResidentSession]:
    """A cache in which a session holds a selection."""
    cache = ActiveCache(SHAPE, 2, [bound] * SHAPE.n_layers)
    session = WorkerSession.create(
        SessionConfig("s", 1, bound, 0, build("snapkv"), (bound,) * SHAPE.n_layers)
    )
    session.length = LENGTH
    session.slot = cache.claim([bound] * SHAPE.n_layers)
    resident = ResidentSession(session)
    become(cache, Rows(), resident, selection)
    return cache, resident


def held(cache: ActiveCache, slot: int, layer: int) -> list[dict[int, tuple[float, float]]]:
    """Per head: position, and the first number of the key and of the value."""
    rows = cache.read(slot, layer)
    return [
        {
            p: (float(key[0]), float(value[0]))
            for p, key, value in zip(positions, keys, values, strict=True)
            if p != EMPTY
        }
        for positions, keys, values in zip(
            rows.positions.tolist(), rows.keys, rows.values, strict=True
        )
    ]


@st.composite
def selections(draw: st.DrawFn) -> list[Tensor]:
    """Rows of every layer and head, on average at most the bound; heads may be uneven or empty."""
    layers = []
    for _ in range(SHAPE.n_layers):
        first = draw(st.sets(st.integers(0, LENGTH - 1), max_size=2 * MOST))
        room = 2 * MOST - len(first)
        second = draw(st.sets(st.integers(0, LENGTH - 1), max_size=room))
        layers.append(padded([sorted(first), sorted(second)]))
    return layers


@settings(deadline=None, max_examples=60)
@given(before=selections(), wanted=selections())
def test_exactly_the_wanted_rows_become_active_and_only_absent_ones_are_read(
    before: list[Tensor], wanted: list[Tensor]
) -> None:
    cache, resident = holding(before)
    source = Rows()
    moves = become(cache, source, resident, wanted)
    cache.check_integrity()
    entered = left = kept = 0
    for layer, (was, now) in enumerate(zip(before, wanted, strict=True)):
        for head, found in enumerate(held(cache, resident.slot, layer)):
            old = {p for p in was[head].tolist() if p >= 0}
            new = {p for p in now[head].tolist() if p >= 0}
            number = layer * 1000.0 + head * 100.0
            assert found == {p: (number + p, -number - p) for p in sorted(new)}
            gone = {p for p in moves.evicted[layer][head].tolist() if p >= 0}
            assert gone == old - new
            entered += len(new - old)
            left += len(old - new)
            kept += len(new & old)
    assert (moves.rows_in, moves.rows_out, moves.rows_kept) == (entered, left, kept)
    assert source.read == [entered]


def test_a_full_layer_exchanges_all_of_its_rows_without_ever_exceeding_its_bound() -> None:
    cache, resident = holding([padded([range(MOST)] * 2)] * 2)
    become(cache, Rows(), resident, [padded([range(20, 20 + MOST)] * 2)] * 2)
    cache.check_integrity()
    assert cache.peak[:, resident.slot].tolist() == [MOST] * 2


def test_a_selection_over_the_bound_is_refused_by_the_cache() -> None:
    cache, resident = holding([padded([range(3)] * 2)] * 2)
    with pytest.raises(AssertionError, match="bound"):
        become(cache, Rows(), resident, [padded([range(MOST + 1)] * 2)] * 2)


def test_a_failed_read_changes_nothing() -> None:
    cache, resident = holding([padded([[1, 5, 9], [2, 30]]), padded([[0], [3, 4]])])
    before = [held(cache, resident.slot, layer) for layer in range(2)]
    source = Rows()
    source.fails = True
    with pytest.raises(OSError, match="gone"):
        become(cache, source, resident, [padded([[7], [8]])] * 2)
    assert [held(cache, resident.slot, layer) for layer in range(2)] == before


def test_rows_that_stay_keep_their_marks_and_sums_and_new_ones_have_none() -> None:
    cache, resident = holding([padded([[1, 5], [2, 6]])] * 2)
    slot = resident.slot
    one = torch.ones(2, 1, dtype=torch.int32)
    rows = row_of(0, one.long())
    cache.insert(slot, 0, one * 20, rows, rows, one.bool(), one.float() * 3)
    become(cache, Rows(), resident, [padded([[5, 20, 21], [2, 20, 21]]), padded([[1], [2]])])
    found = cache.read(slot, 0)
    assert found.promoted.tolist() == [[False, True, False]] * 2
    assert found.accumulated.tolist() == [[0.0, 3.0, 0.0]] * 2
