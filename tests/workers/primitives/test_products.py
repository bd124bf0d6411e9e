"""Logits are sums of exact products in float32, whatever instructions compute them."""

import pytest
import torch

from workers.primitives.products import compute_logits, cpu_has_bfloat16


@pytest.mark.parametrize("keys_in", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("queries_in", [torch.float32, torch.bfloat16])
def test_logits_differ_from_exact_ones_by_the_rounding_of_float32(
    queries_in: torch.dtype, keys_in: torch.dtype
) -> None:
    random = torch.Generator().manual_seed(1)
    queries = (4 * torch.randn(3, 50, 96, generator=random)).to(queries_in)
    keys = (4 * torch.randn(3, 200, 96, generator=random)).to(keys_in)
    scale = 96**-0.5
    logits = compute_logits(queries, keys, scale)
    assert logits.dtype == torch.float32
    exact = scale * queries.double() @ keys.double().mT
    largest = scale * queries.double().abs() @ keys.double().abs().mT
    assert float(((logits - exact).abs() / largest).max()) < 1e-6


def test_float32_products_of_others_stay_exact() -> None:
    rows = torch.ones(1, 4, 8, dtype=torch.bfloat16)
    compute_logits(rows, rows, 1.0)
    with pytest.raises(RuntimeError):
        compute_logits(rows, rows[..., :3], 1.0)
    others = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(2))
    product = others @ others
    exact = others.double() @ others.double()
    assert float((product - exact).abs().max()) < 1e-4, "rounded to bfloat16 it is over 1e-2"


def test_no_row_has_no_logit() -> None:
    rows = torch.ones(2, 4, 8)
    assert compute_logits(rows, rows[:, :0], 1.0).shape == (2, 4, 0)


@pytest.mark.parametrize(
    ("machine", "avx512_bf16", "amx", "found"),
    [
        ("x86_64", True, False, True),
        ("x86_64", False, True, True),
        ("AMD64", False, False, False),  # AVX-512 alone, whatever oneDNN says
        ("aarch64", False, False, True),  # oneDNN knows
    ],
)
def test_a_cpu_that_would_emulate_bfloat16_has_none(
    monkeypatch: pytest.MonkeyPatch, machine: str, avx512_bf16: bool, amx: bool, found: bool
) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert cpu_has_bfloat16() == found
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    assert not cpu_has_bfloat16()
