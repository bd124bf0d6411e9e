"""Which models are computed natively, and why the others are not."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.workers.conftest import tiny_config
from tests.workers.model.architectures.building import build
from tests.workers.model.architectures.full_attention import DENSE, MIXTURES
from tests.workers.model.architectures.recurrent import RECURRENT
from tests.workers.model.architectures.windows import WINDOWED
from workers.model.decoding.decoder import build_decoder, open_decoder
from workers.model.decoding.plan import NotCovered, read_weights
from workers.model.loader import LoadedModel, adopt
from workers.model.weights.quantized_linear import Quantization, quantize_linears
from workers.native.library import open_library

pytestmark = pytest.mark.usefixtures("one_thread")


def make(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model of a family with numbers of its own."""
    torch.manual_seed(7)
    made: PreTrainedModel = AutoModelForCausalLM.from_config(tiny_config(family), dtype=dtype)
    return made


def refuse(model: LoadedModel) -> str:
    """Why a model is not computed natively."""
    level, library = open_library(torch.backends.cpu.get_cpu_capability())
    assert level is not None
    assert library is not None
    with pytest.raises(NotCovered) as caught:
        build_decoder(model, level, library)
    return str(caught.value)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("phi3", "it has no model.layers.0.mlp.act_fn"),
        ("olmo2", "model.layers.0.self_attn.q_norm normalizes all heads together"),
        ("nemotron", "model.layers.0.mlp.act_fn is a ReLUSquaredActivation, not SiLU"),
        ("hunyuan_v1_dense", "query_layernorm.weight is no part of a native step"),
        # What no module shows, steps do.
        ("granite", "a logit differs from torch's by"),
        ("smollm3", "a logit differs from torch's by"),
        ("ministral3", "a logit differs from torch's by"),
    ],
)
def test_a_dense_model_of_other_parts_is_left_to_torch(family: str, reason: str) -> None:
    assert reason in refuse(adopt(build(DENSE[family])))


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("family", ["granite", "smollm3", "ministral3"])
def test_roundings_of_narrow_weights_hide_no_other_part(
    family: str, quantization: Quantization | None
) -> None:
    """Queries that are scaled from some position on change less than bfloat16's roundings may."""
    module = build(DENSE[family])
    nn.Module.to(module, torch.bfloat16)
    if quantization:
        quantize_linears(module, quantization)
    assert "a logit differs from torch's by" in refuse(adopt(module))


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_experts_are_left_to_torch(family: str) -> None:
    assert "it has no model.layers.0.mlp" in refuse(adopt(build(MIXTURES[family])))


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("qwen3_5_moe_text", "it has no model.layers.0.mlp.act_fn"),
        ("olmo_hybrid", "linear_attn is a OlmoHybridGatedDeltaNet, no gated delta net"),
        ("granitemoehybrid", "it has no model.rotary_emb"),
    ],
)
def test_a_hybrid_of_other_parts_is_left_to_torch(family: str, reason: str) -> None:
    assert reason in refuse(adopt(build(RECURRENT[family])))


def test_windows_are_left_to_torch() -> None:
    reason = refuse(adopt(build(WINDOWED["gemma2"])))
    assert (
        reason == "not all of its layers are delta nets, or attend to all rows of keys and values"
    )


def test_a_norm_that_is_none_of_the_kind_is_found(loaded: Callable[[str], LoadedModel]) -> None:
    module = make("llama")
    model = adopt(module)

    class Raised(type(module.model.norm)):  # type: ignore[misc]
        def forward(self, numbers: torch.Tensor) -> torch.Tensor:
            return super().forward(numbers) * 3

    module.model.norm.__class__ = Raised
    with pytest.raises(NotCovered, match=r"model\.norm is no RMSNorm, but a Raised"):
        read_weights(module, model.plan, model.shape)


def test_a_layer_with_a_parameter_of_its_own_is_left_to_torch() -> None:
    module = make("llama")
    model = adopt(module)
    module.model.layers[1].self_attn.extra = nn.Parameter(torch.zeros(3))
    with pytest.raises(
        NotCovered, match=r"layers\.1\.self_attn\.extra is no part of a native step"
    ):
        read_weights(module, model.plan, model.shape)


def test_quantized_layers_are_read_in_their_few_bits() -> None:
    module = make("llama", torch.bfloat16)
    model = adopt(module)
    quantize_linears(module, "int8")
    weights = read_weights(module, model.plan, model.shape)
    assert {each.up.format for each in weights.layers} == {"int8"}
    up = weights.layers[0].up
    assert up.scales is not None
    wide = module.model.layers[0].mlp.up_proj.wide.weight
    assert torch.equal((up.numbers * up.scales[:, None]).bfloat16(), wide)
    assert weights.head.format == "bfloat16", "it stays as it is"


def test_weights_that_are_not_those_of_their_codes_are_left_to_torch() -> None:
    module = make("llama", torch.bfloat16)
    model = adopt(module)
    quantize_linears(module, "int4")
    assert read_weights(module, model.plan, model.shape).layers[1].down.format == "int4"
    with torch.no_grad():
        module.model.layers[1].mlp.down_proj.wide.weight[3, 7] += 1
    with pytest.raises(
        NotCovered, match=r"layers\.1\.mlp\.down_proj has weights that are not those"
    ):
        read_weights(module, model.plan, model.shape)


def test_numbers_of_bfloat16_are_kept_in_half_of_the_bytes() -> None:
    module = make("qwen2", torch.bfloat16).float()
    with torch.no_grad():
        module.model.layers[0].mlp.up_proj.weight[0, 0] = 1 / 3
    model = adopt(module)
    weights = read_weights(module, model.plan, model.shape)
    first, second = weights.layers[:2]
    assert second.up.numbers.dtype == first.down.numbers.dtype == torch.bfloat16
    assert torch.equal(second.up.numbers.float(), module.model.layers[1].mlp.up_proj.weight)
    own = module.model.layers[0].mlp.up_proj.weight
    assert first.up.numbers.data_ptr() == own.data_ptr()
    assert weights.embedding.numbers.data_ptr() == module.get_input_embeddings().weight.data_ptr()


def test_a_model_that_is_not_covered_has_no_decoder() -> None:
    assert open_decoder(adopt(build(DENSE["nemotron"]))) is None
