"""Packed linear layers compute what `nn.Linear` does."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs
from torch import nn

from tests.workers.model.architectures.building import build
from tests.workers.model.architectures.latent import LATENTS
from workers.cache.active_cache import ActiveCache
from workers.cache.forward_step import ForwardStep
from workers.model import loader
from workers.model.loader import LoadedModel, load_model
from workers.model.weights.packed_linear import PackedLinear, can_pack, pack_linears
from workers.primitives.products import cpu_has_bfloat16

# oneDNN packs float32 as well: on a CPU without instructions for bfloat16 these tests do.
DTYPE = torch.bfloat16 if cpu_has_bfloat16() else torch.float32


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, 130])
def test_a_packed_layer_computes_the_layer_that_it_was_made_of(tokens: int, bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(96, 40, bias=bias, dtype=DTYPE)
    inputs = torch.randn(2, tokens, 96, dtype=DTYPE)
    with torch.inference_mode():
        expected, found = linear(inputs), PackedLinear(linear)(inputs)
    assert found.shape == (2, tokens, 40)
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)


def test_every_linear_layer_is_replaced_and_nothing_else() -> None:
    module = nn.Sequential(
        nn.Embedding(9, 32), nn.Sequential(nn.Linear(32, 16), nn.SiLU()), nn.Linear(16, 8)
    ).to(DTYPE)
    tokens = torch.arange(9)
    with torch.inference_mode():
        expected = module(tokens)
        pack_linears(module)
        found = module(tokens)
    kinds = [type(each) for each in module.modules() if not list(each.children())]
    assert kinds == [nn.Embedding, PackedLinear, nn.SiLU, PackedLinear]
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)


def test_the_share_of_the_weights_that_stay_is_in_the_log() -> None:
    """Experts that are one tensor and projections that are read: the others are linear layers or embeddings."""
    model: nn.Module = build(LATENTS["deepseek_v3"])
    model.to(DTYPE)
    total = sum(each.numel() for each in model.parameters())
    kept = {
        "experts": sum(w.numel() for name, w in model.named_parameters() if ".experts." in name),
        "latents": sum(w.numel() for name, w in model.named_parameters() if "kv_b_proj" in name),
    }
    with capture_logs() as logs:
        pack_linears(model)
    left = [each for each in model.modules() if isinstance(each, nn.Linear)]
    assert sum(each.weight.numel() for each in left) == kept["latents"] > 0
    assert {log["event"]: (log["share"], log["experts"], log["latents"]) for log in logs} == {
        "weights are not packed": tuple(
            round(count / total, 3) for count in (sum(kept.values()), *kept.values())
        )
    }


def test_nothing_is_said_of_a_model_all_of_whose_linear_layers_are_packed() -> None:
    with capture_logs() as logs:
        pack_linears(nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 8)).to(DTYPE))
    assert logs == []


def test_only_bfloat16_on_a_cpu_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not can_pack(nn.Linear(4, 4))
    assert not can_pack(nn.Linear(4, 4, dtype=torch.bfloat16, device="meta"))
    assert can_pack(nn.Linear(4, 4, dtype=torch.bfloat16)) == cpu_has_bfloat16()
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not can_pack(nn.Linear(4, 4, dtype=torch.bfloat16))


def test_a_model_whose_steps_torch_computes_is_packed_and_keeps_its_fingerprint(
    model_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model_path("llama")
    plain = load_model(path, dtype=DTYPE, pack=False)
    monkeypatch.setattr(loader, "can_pack", lambda module: True)
    monkeypatch.setattr(loader, "open_decoder", lambda model: None)
    packed = load_model(path, dtype=DTYPE)
    assert [_find_kinds(model) for model in (plain, packed)] == [{nn.Linear}, {PackedLinear}]
    assert (packed.fingerprint, packed.dtype) == (plain.fingerprint, plain.dtype)
    expected, found = (_logits(model) for model in (plain, packed))
    assert torch.cosine_similarity(found, expected, dim=-1).min() > 0.999
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


def test_a_model_with_native_steps_is_not_packed(
    model_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They read the weights as they are, and a packed copy would take their memory again."""
    monkeypatch.setattr(loader, "can_pack", lambda module: True)
    model = load_model(model_path("llama"), dtype=DTYPE)
    assert model.decoder is not None
    assert _find_kinds(model) == {nn.Linear}


def _find_kinds(model: LoadedModel) -> set[type[nn.Module]]:
    return {type(each) for each in model.module.modules()} & {nn.Linear, PackedLinear}


def _logits(model: LoadedModel) -> torch.Tensor:
    tokens = 1 + torch.arange(20)[None]  # 0 is padding
    cache = ActiveCache(model.shape, 1, [20] * model.shape.n_layers, model.dtype)
    step = ForwardStep(cache, [cache.claim(cache.rows)], tokens)
    return model.forward(tokens, step, logits_to_keep=20)[0]
