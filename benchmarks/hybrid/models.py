"""A random hybrid of delta nets and full attention, and a dense model with as many parameters."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

HYBRID, DENSE = "hybrid", "dense"
LAYERS = 8
# Widths of the MLP are multiples of it.
_STEP = 8
_CONTEXT = 1 << 16


def build_models(hidden: int, vocabulary: int, seed: int) -> dict[str, PreTrainedModel]:
    """Build both models in float32: of the dense one the MLP is wider, until it has as many parameters.

    Sizes have the proportions of Qwen3.5's defaults: three of four layers are delta nets, and the heads of
    a layer's state are as wide together as the model. Its state has the bytes of some 800 tokens' rows.
    """
    shared = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 256,
        "head_dim": 64,
        "max_position_embeddings": _CONTEXT,
        "tie_word_embeddings": False,
    }
    states = {
        "linear_num_key_heads": hidden // 256,
        "linear_num_value_heads": hidden // 128,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * (LAYERS // 4),
    }

    def configure(kind: str, width: int, settings: Mapping[str, object]) -> PreTrainedConfig:
        made: Any = CONFIG_MAPPING[kind]
        config: PreTrainedConfig = made(intermediate_size=width, **settings)
        return config

    hybrid = configure("qwen3_5_text", 3 * hidden, shared | states)
    missing = count_parameters(_build_empty(hybrid))
    missing -= count_parameters(_build_empty(configure("qwen3", hidden, shared)))
    width = hidden + round(missing / (3 * hidden * LAYERS) / _STEP) * _STEP
    return {
        HYBRID: _build(hybrid, seed),
        DENSE: _build(configure("qwen3", width, shared), seed),
    }


def count_parameters(module: PreTrainedModel) -> int:
    """Count a model's parameters."""
    return sum(weight.numel() for weight in module.parameters())


def _build_empty(config: PreTrainedConfig) -> PreTrainedModel:
    """Build a model without memory."""
    with torch.device("meta"):
        return _create(config)


def _build(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """Build a model of random weights."""
    torch.manual_seed(seed)
    return _create(config)


def _create(config: PreTrainedConfig) -> PreTrainedModel:
    module: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, dtype=torch.float32
    )
    module.train(False)
    return module
