"""Passes in float32 of models whose weights are in fewer bits."""

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.workers.model.architectures.building import build
from tests.workers.model.architectures.full_attention import DENSE
from tests.workers.model.architectures.recurrent import RECURRENT
from workers.model.decoding.widened import widen
from workers.model.weights.quantized_linear import (
    Quantization,
    QuantizedLinear,
    quantize_linears,
)

MODELS = {"qwen3": DENSE["qwen3"], "qwen2": DENSE["qwen2"], "qwen3_5": RECURRENT["qwen3_5_text"]}


def run(module: PreTrainedModel) -> Tensor:
    """Logits of some tokens."""
    tokens = 1 + torch.arange(12)[None]
    with torch.inference_mode():
        logits: Tensor = module(input_ids=tokens, use_cache=False).logits
    return logits


def describe(module: nn.Module) -> list[tuple[object, ...]]:
    """What a model is made of: its modules, and the memory and data type of its numbers."""
    numbers = (*module.named_parameters(), *module.named_buffers())
    return [
        *((name, id(each)) for name, each in module.named_modules()),
        *((name, id(each), each.data_ptr(), each.dtype) for name, each in numbers),
    ]


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("family", list(MODELS))
def test_a_widened_model_computes_as_one_of_the_same_weights_in_float32(
    family: str, quantization: Quantization | None
) -> None:
    module, exact = (build(MODELS[family]) for _ in range(2))
    nn.Module.to(module, torch.bfloat16)
    if quantization:
        quantize_linears(module, quantization)
    state = module.state_dict()  # a quantized layer has its bias twice, as `_bias` too
    values = {name.replace(".wide.", "."): each for name, each in state.items() if "._" not in name}
    exact.load_state_dict(values)
    for own, each in zip(module.buffers(), exact.buffers(), strict=True):
        each.copy_(own)  # frequencies, which are in no state
    narrow, before = run(module), describe(module)
    with widen(module):
        assert not any(isinstance(each, QuantizedLinear) for each in module.modules())
        found = run(module)
    torch.testing.assert_close(found, run(exact), rtol=1e-4, atol=1e-5)
    assert describe(module) == before
    assert torch.equal(run(module), narrow)


def test_a_pass_that_fails_leaves_the_model_as_it_was() -> None:
    module = build(MODELS["qwen2"])
    nn.Module.to(module, torch.bfloat16)
    before = describe(module)
    with pytest.raises(ZeroDivisionError), widen(module):
        raise ZeroDivisionError
    assert describe(module) == before
