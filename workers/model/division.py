"""Division of a model's heads between ranks: what transformers' plans must give before it is served."""

from typing import Any

from transformers import PreTrainedConfig
from transformers.distributed import DistributedConfig  # type: ignore[attr-defined]

from workers.cache.slot_pool import KVShape
from workers.errors import ModelRefused


def build_arguments(config: PreTrainedConfig, count: int) -> dict[str, Any]:
    """Build the arguments of `from_pretrained` for one of `count` ranks, by the model's own plan.

    Raises ModelRefused where the heads cannot be divided.
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
    return {"distributed_config": DistributedConfig(tp_size=count, tp_plan="auto")}


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
