"""Tiny random models, built in memory by transformers' own classes."""

import re
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from tests.workers.model.architectures.architecture import Architecture
from tests.workers.model.architectures.shapes import BASE

_QUERY_KEY_NORM = re.compile(r"\b(q|k|query|key)_(norm|layernorm)\b")


def build(architecture: Architecture) -> PreTrainedModel:
    """Build a model, the same for the same architecture, whose greedy answers end at token 1."""
    torch.manual_seed(architecture.seed)
    config = build_config(architecture)
    try:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except ValueError:
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    _draw_weights(model)
    if model.generation_config is not None:
        model.generation_config.eos_token_id = BASE["eos_token_id"]
        model.generation_config.pad_token_id = BASE["pad_token_id"]
        model.generation_config.bos_token_id = None
        model.generation_config.do_sample = False
    built: PreTrainedModel = model.eval()
    return built


def build_config(architecture: Architecture) -> PreTrainedConfig:
    """Build the config of a model, and of the one inside it."""
    made: Any = CONFIG_MAPPING[architecture.kind]
    if architecture.text is not None:
        text = build_config(architecture.text).to_dict()
        config: PreTrainedConfig = made(text_config=text, **architecture.settings)
        return config
    layers = {"num_hidden_layers": architecture.layers}
    return made(**BASE | layers | dict(architecture.settings))


@torch.no_grad()
def _draw_weights(model: PreTrainedModel) -> None:
    """Draw the weights widely, so that attention is sharp and no two tokens are nearly as likely.

    Norms, biases and sinks move away from the ones and zeros they begin as: a part that is left out
    makes a difference.
    """
    generator = torch.Generator().manual_seed(3)
    for name, weight in model.named_parameters():
        drawn = torch.randn(weight.shape, generator=generator)
        if "sink" in name or not torch.isfinite(weight).all():
            weight.copy_(drawn)
        elif weight.dim() == 1:
            weight.add_(drawn, alpha=0.1)
            weight.add_(1.0 if _QUERY_KEY_NORM.search(name) else 0.0)
        elif weight.numel() > 1 and float(weight.std()) < 0.1 and "norm" not in name:
            weight.copy_(drawn * 0.3)
