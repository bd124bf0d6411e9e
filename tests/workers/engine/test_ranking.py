"""How a method's scores and an episode's nearness become one order of rows."""

import torch

from workers.cache.active_cache import EMPTY
from workers.engine.ranking import combined
from workers.methods.epicache import EpiCache
from workers.methods.keydiff import KeyDiff

POSITIONS = [torch.tensor([[0, 1, 2, 3], [0, 1, 2, EMPTY]], dtype=torch.int32)] * 2
SCORES = [
    torch.tensor([[4.0, 1.0, 3.0, 2.0], [9.0, 7.0, 8.0, 0.0]]),
    torch.tensor([[1.0, 2.0, 3.0, 4.0], [0.3, 0.2, 0.1, 0.0]]),
]
NOWHERE = torch.empty(0)


def test_a_method_that_keeps_single_rows_without_a_topic_keeps_its_own_scores() -> None:
    found = combined(KeyDiff(), SCORES, POSITIONS, 4, NOWHERE)
    assert all(torch.equal(a, b) for a, b in zip(found, SCORES, strict=True))


def test_whole_tokens_get_the_mean_of_their_ranks_in_every_layer_and_head_that_holds_them() -> None:
    found = combined(KeyDiff(whole_tokens=True), SCORES, POSITIONS, 4, NOWHERE)
    # Ranks of token 0: highest of four, highest of three, lowest of four, highest of three.
    means = [
        (1 + 1 + 0 + 1) / 4,
        (0 + 0 + 1 / 3 + 0.5) / 4,
        (2 / 3 + 0.5 + 2 / 3 + 0) / 4,
        (1 / 3 + 1) / 2,
    ]
    for layer in found:
        torch.testing.assert_close(layer, torch.tensor([means, [*means[:3], 0.0]]))


def test_nearness_adds_to_ranks_and_what_came_after_the_build_is_of_the_episode() -> None:
    method = EpiCache(topic=2.0)
    plain = combined(method, SCORES, POSITIONS, 4, NOWHERE)
    near = combined(method, SCORES, POSITIONS, 4, torch.tensor([0.0, 0.5, 1.0]))
    for before, after in zip(plain, near, strict=True):
        torch.testing.assert_close(after[0] - before[0], torch.tensor([0.0, 1.0, 2.0, 2.0]))
        assert float(after[1, 3]) == 0.0, "a place without a row has no score"
