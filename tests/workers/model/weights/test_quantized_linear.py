"""Quantized linear layers compute what their quantized values do, at any number of tokens."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor, nn

from tests.workers.model.architectures.building import build
from tests.workers.model.architectures.latent import LATENTS
from workers.cache.active_cache import ActiveCache
from workers.cache.forward_step import ForwardStep
from workers.errors import ModelRefused
from workers.model import loader
from workers.model.loader import LoadedModel, load_model
from workers.model.weights.packed_linear import PackedLinear
from workers.model.weights.quantized_linear import Quantization, QuantizedLinear, quantize_linears
from workers.primitives.products import cpu_has_bfloat16

EVERY_KIND = pytest.mark.parametrize("kind", ["int8", "int4"])
TOKENS = 48


@EVERY_KIND
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_a_layer_computes_with_its_quantized_weight(
    kind: Quantization, tokens: int, bias: bool
) -> None:
    linear = make_linear(96, 48, bias=bias)
    original = linear.weight.detach().clone()
    layer = QuantizedLinear(linear, kind)
    values = layer.get_parameter("wide.weight")
    inputs = torch.randn(2, tokens, 96, dtype=torch.bfloat16)
    with torch.inference_mode():
        expected, found = nn.functional.linear(inputs, values, linear.bias), layer(inputs)
    assert not torch.equal(values, original)
    assert found.shape == (2, tokens, 48)
    torch.testing.assert_close(found, expected, atol=0.03, rtol=0.02)


@EVERY_KIND
def test_a_token_gets_the_same_from_both_weights(kind: Quantization) -> None:
    """One at a time they run over few bits, together over bfloat16."""
    layer = QuantizedLinear(make_linear(64, 32), kind)
    inputs = torch.randn(30, 64, dtype=torch.bfloat16)
    with torch.inference_mode():
        together = layer(inputs)
        alone = torch.cat([layer(token) for token in inputs.split(1)])
    torch.testing.assert_close(alone, together, atol=0.03, rtol=0.02)


def test_a_weight_is_off_by_half_a_step_at_most() -> None:
    """A step: of an output's 255 in 8 bits, of 32 inputs' 16 in 4 bits."""
    weight = make_linear(96, 48).weight.detach().float()
    groups = weight.view(48, 3, 32)
    steps: dict[Quantization, torch.Tensor] = {
        "int8": weight.abs().amax(1, keepdim=True) / 127,
        "int4": ((groups.amax(2) - groups.amin(2)) / 15).repeat_interleave(32, 1),
    }
    for kind, step in steps.items():
        error = (values_of(weight, kind) - weight).abs()
        rounding = weight.abs().max() / 128  # of scales, middles and values to bfloat16
        assert (error <= 0.5 * step + rounding).all(), kind
        assert error.max() > 0.25 * step.min(), kind


@EVERY_KIND
def test_weights_of_zeros_stay_zeros(kind: Quantization) -> None:
    weight = torch.randn(16, 64)
    weight[3] = 0
    weight[5, :32] = 0
    values = values_of(weight, kind)
    assert (values[3] == 0).all()
    assert (values[5, :32] == 0).all()
    assert values.isfinite().all()


@EVERY_KIND
def test_layers_that_no_kernel_takes_stay(
    kind: Quantization, model_path: Callable[[str], Path]
) -> None:
    """With 40 inputs the 8-bit kernel would compute nonsense, with 10 outputs the 4-bit one fails."""
    module = load_model(model_path("llama"), dtype=torch.bfloat16, pack=False).module
    module.extra = nn.Sequential(make_linear(40, 16), make_linear(32, 10), make_linear(32, 16))
    quantize_linears(module, kind)
    assert [type(each) for each in module.extra] == [nn.Linear, nn.Linear, QuantizedLinear]


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@EVERY_KIND
def test_a_loaded_model_is_quantized_and_packed(
    family: str,
    kind: Quantization,
    model_path: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loader, "open_decoder", lambda model: None)
    path = model_path(family)
    plain = load_model(path, dtype=torch.bfloat16, pack=False)
    wide = PackedLinear if cpu_has_bfloat16() else nn.Linear
    for pack in (False, True):
        model = load_model(path, quantize=kind, pack=pack)
        layers = [each for each in model.module.modules() if isinstance(each, QuantizedLinear)]
        linears = [each for each in plain.module.modules() if isinstance(each, nn.Linear)]
        assert len(layers) == len(linears) - 1  # the output layer
        assert {type(each.wide) for each in layers} == {wide if pack else nn.Linear}
        assert model.dtype == torch.bfloat16
        # Random weights, the hardest to quantize.
        similar = torch.cosine_similarity(together(model), together(plain), dim=-1)
        assert similar.mean() > {"int8": 0.99, "int4": 0.8}[kind]


def test_each_quantization_has_a_fingerprint_of_its_own(
    model_path: Callable[[str], Path],
) -> None:
    """Rows of one are never read by another."""
    kinds: list[Quantization | None] = [None, "int8", "int4"]

    def load(kind: Quantization | None) -> str:
        return load_model(model_path("llama"), dtype=torch.bfloat16, quantize=kind).fingerprint

    first, again = [load(kind) for kind in kinds], [load(kind) for kind in kinds]
    assert first == again
    assert len(set(first)) == len(kinds)


@EVERY_KIND
@pytest.mark.parametrize("family", ["reference", "llama"])
def test_the_output_layer_and_the_embedding_stay_as_they_are(
    family: str, kind: Quantization, model_path: Callable[[str], Path]
) -> None:
    """Tied to each other in one of the models."""
    plain, found = (
        load_model(model_path(family), torch.bfloat16, pack=False, quantize=each).module
        for each in (None, kind)
    )
    assert plain.config.tie_word_embeddings == (family == "reference")
    for layer in ("get_input_embeddings", "get_output_embeddings"):
        before, after = getattr(plain, layer)(), getattr(found, layer)()
        assert type(after) is type(before)
        assert torch.equal(after.weight, before.weight)


@EVERY_KIND
def test_the_reference_model_decodes_nearly_as_in_float32(
    kind: Quantization, model_path: Callable[[str], Path]
) -> None:
    """On tokens that are no text: docs/benchmarks.md has it on some."""
    path = model_path("reference")
    full, quantized = load_model(path, dtype=torch.float32), load_model(path, quantize=kind)
    expected = together(full).log_softmax(-1)
    for logits in (together(quantized), one_by_one(quantized)):
        found = logits.log_softmax(-1)
        divergence = (expected.exp() * (expected - found)).sum(-1).mean()
        assert divergence < {"int8": 0.02, "int4": 0.2}[kind]


def test_what_cannot_be_quantized_is_refused(model_path: Callable[[str], Path]) -> None:
    path = model_path("llama")
    with pytest.raises(ModelRefused, match="in bfloat16, not in float32"):
        load_model(path, dtype=torch.float32, quantize="int8")
    with pytest.raises(ModelRefused, match="for CPUs only"):
        load_model(path, device="cuda", quantize="int4")


def make_linear(inputs: int, outputs: int, *, bias: bool = False) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, bias=bias, dtype=torch.bfloat16)


def values_of(weight: Tensor, kind: Quantization) -> Tensor:
    """The values that a weight is quantized to, float32."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = nn.Parameter(weight)
    return QuantizedLinear(linear, kind).get_parameter("wide.weight").detach()


def together(model: LoadedModel) -> Tensor:
    """Logits of all tokens in one pass, float32 `[TOKENS, vocabulary]`."""
    return run(model, [TOKENS])


def one_by_one(model: LoadedModel) -> Tensor:
    """Logits of all tokens, a pass each."""
    return run(model, [1] * TOKENS)


def run(model: LoadedModel, passes: list[int]) -> Tensor:
    """Logits of TOKENS tokens, in passes of these numbers of them."""
    cache = ActiveCache(model.shape, 1, [TOKENS] * model.shape.n_layers, model.dtype)
    slot = cache.claim(cache.rows)
    logits = []
    for piece in torch.arange(1, 1 + TOKENS).split(passes):  # 0 is padding
        step = ForwardStep(cache, [slot], piece[None] - 1)
        logits.append(model.forward(piece[None], step, logits_to_keep=len(piece))[0])
    return torch.cat(logits)


def test_a_model_with_latents_is_quantized_but_for_what_is_read(tmp_path: Path) -> None:
    """The projections of latents are weights of the attention itself; experts stay, and the log says so."""
    build(LATENTS["deepseek_v3"]).save_pretrained(tmp_path)
    with capture_logs() as logs:
        model = load_model(tmp_path, device="cpu", quantize="int8")
    layer = model.module.model.layers[0].self_attn
    assert isinstance(layer.kv_b_proj, nn.Linear)
    assert model.shape.latent
    warned = [log for log in logs if log["event"] == "weights are not quantized"]
    assert len(warned) == 1
    assert 0 < warned[0]["latents"] < warned[0]["experts"] < warned[0]["share"] < 1
