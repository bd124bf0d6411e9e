"""Recurrent states of slots."""

import pytest
import torch
from transformers.cache_utils import LinearAttentionLayer

from workers.cache.layer_plan import LayerPlan
from workers.cache.state_pool import StatePool, StateTensor, find_state_tensors

PLAN = LayerPlan(2, rows=(1,), states={0: 1})
TENSORS = (
    StateTensor(0, 0, recurrent=False, shape=(3, 4), dtype=torch.bfloat16),
    StateTensor(0, 0, recurrent=True, shape=(2, 2), dtype=torch.float32),
)


def run(pool: StatePool, slots: list[int], value: float) -> dict[int, LinearAttentionLayer]:
    """Run a pass that leaves states full of `value`."""
    layers = pool.begin(PLAN, slots)
    shape = (len(slots), 3, 4)
    layers[0].update_conv_state(torch.full(shape, value, dtype=torch.bfloat16), 0)
    layers[0].update_recurrent_state(torch.full((len(slots), 2, 2), value), 0)
    return layers


def test_the_tensors_are_those_that_a_pass_leaves() -> None:
    pool = StatePool(TENSORS, 1, "cpu")
    assert find_state_tensors(run(pool, [0], 1.0)) == TENSORS
    assert pool.nbytes == 12 * 2 + 4 * 4


def test_a_pass_changes_no_state_before_it_is_kept() -> None:
    pool = StatePool(TENSORS, 3, "cpu")
    run(pool, [1], 5.0)
    assert pool.copy(1) == ()
    pool.keep(run(pool, [1], 2.0), [1])
    run(pool, [1], 7.0)
    assert [float(part.float().mean()) for part in pool.copy(1)] == [2.0, 2.0]


def test_a_pass_over_several_slots_keeps_each_its_own() -> None:
    pool = StatePool(TENSORS, 3, "cpu")
    for slot in (0, 2):
        pool.keep(run(pool, [slot], float(slot + 1)), [slot])
    layers = pool.begin(PLAN, [2, 0])
    state = layers[0].recurrent_states[0]
    assert state is not None
    assert state[:, 0, 0].tolist() == [3.0, 1.0]
    pool.keep(layers, [2, 0])
    assert float(pool.copy(0)[1].mean()) == 1.0
    assert float(pool.copy(2)[1].mean()) == 3.0


@pytest.mark.parametrize("slots", [[1, 2], [0, 1, 2], [2, 1]])
def test_slots_in_a_row_and_others_are_copied_alike(slots: list[int]) -> None:
    pool = StatePool(TENSORS, 3, "cpu")
    for slot in range(3):
        pool.keep(run(pool, [slot], float(slot + 1)), [slot])
    layers = pool.begin(PLAN, slots)
    for state in (layers[0].conv_states[0], layers[0].recurrent_states[0]):
        assert state is not None
        assert state[:, 0, 0].tolist() == [slot + 1.0 for slot in slots]
        state.add_(10.0)
    assert [float(pool.copy(slot)[1].mean()) for slot in range(3)] == [1.0, 2.0, 3.0]
    pool.keep(layers, slots)
    kept = [slot + 1.0 + 10.0 * (slot in slots) for slot in range(3)]
    assert [float(pool.copy(slot)[1].mean()) for slot in range(3)] == kept


def test_sessions_with_and_without_a_token_do_not_share_a_pass() -> None:
    pool = StatePool(TENSORS, 2, "cpu")
    pool.keep(run(pool, [0], 1.0), [0])
    with pytest.raises(AssertionError, match="passes of their own"):
        pool.begin(PLAN, [0, 1])


def test_a_state_is_its_bytes() -> None:
    pool = StatePool(TENSORS, 2, "cpu")
    pool.keep(run(pool, [0], 1.5), [0])
    packed = pool.pack(pool.copy(0))
    assert packed.shape == (pool.nbytes,)
    pool.put(1, pool.unpack(packed))
    pairs = zip(pool.copy(0), pool.copy(1), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_slot_that_is_cleared_begins_anew() -> None:
    pool = StatePool(TENSORS, 1, "cpu")
    pool.keep(run(pool, [0], 1.0), [0])
    pool.put(0, ())
    assert pool.copy(0) == ()
    assert not pool.begin(PLAN, [0])[0].has_previous_state[0]
