"""Division of a model between ranks: what transformers' plans must give before it is served."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.distributed import DistributedConfig  # type: ignore[attr-defined]

from workers.cache.slot_pool import KVShape
from workers.errors import ModelRefused

# What a plan calls the projections that keys come from.
_KEYS = ("k_proj", "qkv_proj", "query_key_value")
_PROJECTIONS = {
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.k_proj": "colwise",
    "model.layers.*.self_attn.v_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
}
# Sinks have no module of their own: that of the attention runs with its rank's part of them.
_SINKS = {
    "model.layers.*.self_attn.sinks": "colwise",
    "model.layers.*.self_attn": "local_params",
}
# Rules for attention that a family's own plan leaves whole, of families in which a head's numbers depend on
# no other head's: a norm over all heads would be one over a rank's.
_ATTENTION = {
    "gpt_oss": _PROJECTIONS | _SINKS,
    "granitemoe": _PROJECTIONS,
    "hunyuan_v1_moe": _PROJECTIONS,
    "phimoe": _PROJECTIONS,
}


def build_arguments(config: PreTrainedConfig, count: int) -> dict[str, Any]:
    """Build the arguments of `from_pretrained` for one of `count` ranks, by the model's own plan.

    Of a mixture every rank has a part of each expert, so that all have as much to do whichever
    experts a token takes. Where the plan leaves experts whole, each rank has some of them.

    Raises ModelRefused where heads, or whole experts, cannot be divided.
    """
    if count == 1:
        return {}
    require_equal_parts(config, count)
    text = config.get_text_config(decoder=True)
    # Rules are added to the family's own; None leaves that as it is.
    plan = _ATTENTION.get(text.model_type)
    experts = count if _has_whole_experts(text) else None
    return {"distributed_config": DistributedConfig(tp_size=count, tp_plan=plan, ep_size=experts)}


def require_equal_parts(config: PreTrainedConfig, count: int) -> None:
    """Raise ModelRefused where `count` ranks cannot have equal parts of the heads, or of whole experts."""
    text = config.get_text_config(decoder=True)
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    if heads % count or kv_heads % count:
        raise ModelRefused(
            f"{text.model_type} has {heads} heads over {kv_heads} KV heads, which {count} ranks cannot have "
            "equal parts of: choose another --tensor-parallel"
        )
    if _has_whole_experts(text) and text.num_experts % count:
        raise ModelRefused(
            f"{text.model_type} has {text.num_experts} experts, which {count} ranks cannot have equal "
            "numbers of: choose another --tensor-parallel"
        )


def require_divided(config: PreTrainedConfig, shape: KVShape, count: int) -> None:
    """Raise ModelRefused unless each of `count` ranks has its part of the heads; shape: of this rank.

    Where a plan leaves attention whole (mixtures that divide experts alone, latents), every rank would
    hold all rows, and compute all of attention.
    """
    text = config.get_text_config(decoder=True)
    if count > 1 and (shape.latent or shape.n_heads * count != text.num_attention_heads):
        raise _refuse_whole(text)


def divide_shape(module: PreTrainedModel, shape: KVShape, count: int) -> KVShape:
    """Divide the heads of a whole model's rows by its plan, before any rank is there.

    Raises ModelRefused as `build_arguments` and `require_divided`.
    """
    if count == 1:
        return shape
    require_equal_parts(module.config, count)
    names = (
        name.rpartition(".")[2] for name, style in _get_plan(module).items() if style == "colwise"
    )
    if shape.latent or not any(name in _KEYS for name in names):
        raise _refuse_whole(module.config.get_text_config(decoder=True))
    return replace(shape, n_heads=shape.n_heads // count, n_kv_heads=shape.n_kv_heads // count)


def count_weight_bytes(module: PreTrainedModel, count: int) -> int:
    """Count the bytes of a whole model's weights that each of `count` ranks has. Tied ones count once."""
    plan = _get_plan(module) if count > 1 else {}
    return sum(
        weight.nbytes // (count if _is_divided(name, weight, plan) else 1)
        for name, weight in module.named_parameters()
    )


def _get_plan(module: PreTrainedModel) -> Mapping[str, str]:
    """Get the styles of a model's modules and weights by name; a star stands for a layer's number."""
    text = module.config.get_text_config(decoder=True)
    plan = (module._tp_plan or {}) | _ATTENTION.get(text.model_type, {})
    return plan | (module._ep_plan or {}) if _has_whole_experts(text) else plan


def _has_whole_experts(text: PreTrainedConfig) -> bool:
    """True if the family's plan for ranks leaves experts whole, which its plan for experts divides."""
    divided = any("experts" in name for name in text.base_model_tp_plan or ())
    return bool(text.base_model_ep_plan) and not divided


def _is_divided(name: str, weight: nn.Parameter, plan: Mapping[str, str]) -> bool:
    generic = re.sub(r"\d+", "*", name)
    style = plan.get(generic) or plan.get(generic.rpartition(".")[0], "")
    # The bias of a row-wise product is added to the ranks' sum.
    return "colwise" in style or style == "grouped_gemm" or ("rowwise" in style and weight.ndim > 1)


def _refuse_whole(text: PreTrainedConfig) -> ModelRefused:
    return ModelRefused(
        f"transformers' tensor-parallel plan of {text.model_type} does not divide its attention: every "
        "rank would hold all rows; run it without --tensor-parallel"
    )
