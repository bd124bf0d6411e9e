"""Load a Hugging Face causal LM with our attention, or say why it cannot be served."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from workers.cache.active_cache import ActiveCache, ForwardStep, KVShape
from workers.errors import ModelRefused
from workers.model import attention

_NEEDED = ("num_hidden_layers", "num_attention_heads", "hidden_size", "max_position_embeddings")
_LINEAR_MARKS = (
    "layers_block_type",
    "linear_attn_config",
    "mamba_d_state",
    "ssm_cfg",
    "kv_lora_rank",
)


@dataclass(frozen=True)
class LoadedModel:
    """A causal LM ready for slots: the module and what kvrecall needs to know of it."""

    module: PreTrainedModel
    shape: KVShape
    fingerprint: str
    max_context: int
    eos_token_ids: tuple[int, ...]

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.module.device

    @property
    def dtype(self) -> torch.dtype:
        """The weights' dtype, and so the rows'."""
        return self.module.dtype

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, step: ForwardStep, logits_to_keep: int = 1) -> Tensor:
        """Run `token_ids` int64 `[B, t]` at the step's positions; the step's slots gain their rows.

        Returns logits float32 `[B, logits_to_keep, vocabulary]` of the last tokens.
        """
        out = self.module(
            input_ids=token_ids.to(self.device),
            position_ids=step.query_positions.long(),
            past_key_values=step,
            use_cache=True,
            logits_to_keep=logits_to_keep,
            step=step,
        )
        logits: Tensor = out.logits
        return logits.float()


def load_model(
    name: str | Path, dtype: torch.dtype | None = None, device: str | None = None
) -> LoadedModel:
    """Load a model by path or hub name. dtype: the checkpoint's own when None; device: a GPU when there is one.

    Raises ModelRefused for layers whose past is not one row per token (sliding windows, linear attention, hybrids).
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        config = AutoConfig.from_pretrained(name)
        refuse_unservable(config)
        attention.register()
        module = AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype or "auto", attn_implementation=attention.NAME
        )
    except (OSError, ValueError) as error:
        raise ModelRefused(f"{name} could not be loaded: {error}") from error
    nn.Module.to(module, device)
    return adopt(module)


def adopt(module: PreTrainedModel) -> LoadedModel:
    """Serve a causal LM that is in memory already. Raises ModelRefused as `load_model` does."""
    refuse_unservable(module.config)
    attention.register()
    module.set_attn_implementation(attention.NAME)
    module.train(False)
    model = LoadedModel(
        module=module,
        shape=row_shape(module.config),
        fingerprint=fingerprint(module),
        max_context=int(module.config.max_position_embeddings),
        eos_token_ids=_eos_token_ids(module),
    )
    _try_out(model)
    return model


def _try_out(model: LoadedModel) -> None:
    """Run two tokens: a model that goes past our attention or cache must be refused, not serve wrong answers."""
    name = model.module.config.model_type
    shape = model.shape
    rows = [2] * shape.n_layers
    cache = ActiveCache(shape, 1, rows, model.dtype, model.device)
    step = cache.begin_step([cache.claim(rows)], torch.arange(2)[None], observe=2)
    try:
        model.forward(torch.zeros(1, 2, dtype=torch.int64), step)
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise ModelRefused(
            f"{name} does not run with kvrecall's attention and cache: {error}"
        ) from error
    expected = (1, shape.n_heads, 2, shape.head_dim)
    if [tuple(q.shape) for q in step.observed] != [expected] * shape.n_layers or len(
        step.new_keys
    ) != shape.n_layers:
        raise ModelRefused(f"{name} does not call transformers' attention interface once per layer")


def refuse_unservable(config: PreTrainedConfig) -> None:
    """Raise ModelRefused unless every layer attends over all past tokens, one key and value each."""
    name = config.model_type
    if config.is_encoder_decoder:
        raise ModelRefused(f"{name} is an encoder-decoder; kvrecall serves decoder-only causal LMs")
    marks = [mark for mark in _LINEAR_MARKS if getattr(config, mark, None)]
    if marks:
        raise ModelRefused(
            f"{name} has layers without a key and a value per token (config: {', '.join(marks)})"
        )
    types = sorted(set(getattr(config, "layer_types", None) or ["full_attention"]))
    if types != ["full_attention"]:
        others = ", ".join(t for t in types if t != "full_attention")
        raise ModelRefused(
            f"{name} has {others} layers; kvrecall needs full attention in every layer"
        )
    window = getattr(config, "sliding_window", None)
    if (
        window
        and getattr(config, "use_sliding_window", True)
        and not getattr(config, "layer_types", None)
    ):
        raise ModelRefused(
            f"{name} attends over a sliding window of {window} tokens; kvrecall needs full attention in every "
            "layer (where the checkpoint allows it, set sliding_window to null in its config.json)"
        )
    missing = [k for k in _NEEDED if not hasattr(config, k)]
    if missing:
        raise ModelRefused(
            f"{name}'s config lacks {', '.join(missing)}: the shape of its rows is unknown"
        )


def row_shape(config: PreTrainedConfig) -> KVShape:
    """The shape of the model's rows, from its config."""
    n_heads = config.num_attention_heads
    return KVShape(
        n_layers=config.num_hidden_layers,
        n_heads=n_heads,
        n_kv_heads=getattr(config, "num_key_value_heads", None) or n_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // n_heads,
    )


def fingerprint(module: PreTrainedModel, samples: int = 4096) -> str:
    """A hex digest that tells two models' rows apart: the config's shape and a sample of every weight.

    Two fine-tunes of one base differ; the same checkpoint loaded twice does not.
    """
    digest = hashlib.sha256(json.dumps(_rope(module.config), sort_keys=True, default=str).encode())
    for name, weight in sorted(module.state_dict().items()):
        flat = weight.detach().flatten()
        sample = flat[:: max(1, flat.numel() // samples)][:samples].contiguous().cpu()
        digest.update(f"{name}{tuple(weight.shape)}{weight.dtype}".encode())
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


def _rope(config: PreTrainedConfig) -> dict[str, Any]:
    keys = (
        "model_type",
        "rope_parameters",
        "rope_theta",
        "rope_scaling",
        "num_hidden_layers",
        "head_dim",
    )
    return {key: getattr(config, key, None) for key in keys}


def _eos_token_ids(module: PreTrainedModel) -> tuple[int, ...]:
    generation = module.generation_config.eos_token_id if module.generation_config else None
    eos: int | Sequence[int] | None = (
        generation if generation is not None else module.config.eos_token_id
    )
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(eos)
