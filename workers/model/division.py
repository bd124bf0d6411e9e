"""Division of a model between ranks: what transformers' plans must give before it is served."""

from typing import Any

from transformers import PreTrainedConfig
from transformers.distributed import DistributedConfig  # type: ignore[attr-defined]

from workers.cache.slot_pool import KVShape
from workers.errors import ModelRefused

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
    text = config.get_text_config(decoder=True)
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    if heads % count or kv_heads % count:
        raise ModelRefused(
            f"{text.model_type} has {heads} heads over {kv_heads} KV heads, which {count} ranks cannot have "
            "equal parts of: choose another --tensor-parallel"
        )
    by_expert = _has_whole_experts(text)
    if by_expert and text.num_experts % count:
        raise ModelRefused(
            f"{text.model_type} has {text.num_experts} experts, which {count} ranks cannot have equal "
            "numbers of: choose another --tensor-parallel"
        )
    # Rules are added to the family's own; None leaves that as it is.
    plan = _ATTENTION.get(text.model_type)
    ranks = DistributedConfig(tp_size=count, tp_plan=plan, ep_size=count if by_expert else None)
    return {"distributed_config": ranks}


def require_divided(config: PreTrainedConfig, shape: KVShape, count: int) -> None:
    """Raise ModelRefused unless each of `count` ranks has its part of the heads; shape: of this rank.

    Where a plan leaves attention whole (mixtures that divide experts alone, latents), every rank would
    hold all rows, and compute all of attention.
    """
    text = config.get_text_config(decoder=True)
    if count > 1 and (shape.latent or shape.n_heads * count != text.num_attention_heads):
        raise ModelRefused(
            f"transformers' tensor-parallel plan of {text.model_type} does not divide its attention: every "
            "rank would hold all rows; run it without --tensor-parallel"
        )


def _has_whole_experts(text: PreTrainedConfig) -> bool:
    """True if the family's plan for ranks leaves experts whole, which its plan for experts divides."""
    divided = any("experts" in name for name in text.base_model_tp_plan or ())
    return bool(text.base_model_ep_plan) and not divided
