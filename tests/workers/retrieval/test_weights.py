"""Attention weights of a group of queries."""

import pytest
import torch

from workers.retrieval import weights as weights_module
from workers.retrieval.weights import weigh, weigh_code_runs


@pytest.mark.parametrize("instructions", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_weight_is_the_mean_of_the_groups_softmaxes(
    dtype: torch.dtype, instructions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_module, "cpu_has_bfloat16", lambda: instructions)
    random = torch.Generator().manual_seed(1)
    # Whole numbers whose products both types hold exactly.
    queries = torch.randint(-2, 3, (2, 3, 8), generator=random).float()
    keys = torch.randint(-2, 3, (2, 40, 8), generator=random).to(dtype)
    expected = torch.einsum("hgd,hnd->hgn", queries, keys.float()).softmax(-1).mean(1)
    torch.testing.assert_close(weigh(queries, keys), expected)


def test_a_raised_key_weighs_as_several_and_one_raised_by_minus_infinity_nothing() -> None:
    random = torch.Generator().manual_seed(2)
    queries, keys = torch.randn(2, 3, 8, generator=random), torch.randn(2, 5, 8, generator=random)
    raised = torch.zeros(2, 5)
    raised[:, 1] = torch.tensor(3.0).log()
    raised[:, 4] = -torch.inf
    repeated = weigh(queries, keys[:, [0, 1, 1, 1, 2, 3]])
    weights = weigh(queries, keys, raised)
    torch.testing.assert_close(weights[:, 1], repeated[:, 1:4].sum(1))
    torch.testing.assert_close(weights[:, [0, 2, 3]], repeated[:, [0, 4, 5]])
    assert weights[:, 4].tolist() == [0, 0]


def test_codes_of_each_run_are_weighed_by_its_own_queries() -> None:
    random = torch.Generator().manual_seed(3)
    asked = torch.randn(4, 2, 3, 8, generator=random)
    codes = torch.randint(-63, 64, (2, 10, 8), generator=random).float()
    scales = torch.rand(2, 10, generator=random)
    sizes = [3, 0, 5, 2]
    run_of_row = [0, 0, 0, 2, 2, 2, 2, 2, 3, 3]
    steps = asked.abs().amax(-1, keepdim=True) / 127
    queries = ((asked / steps).round() * steps)[run_of_row]
    keys = codes * scales[..., None]
    expected = torch.einsum("nhgd,hnd->hgn", queries, keys).softmax(-1).mean(1)
    torch.testing.assert_close(weigh_code_runs(asked, codes, scales, sizes), expected)
