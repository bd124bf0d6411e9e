"""Loading of Hugging Face causal LMs with our attention, and refusal of unsupported ones."""

import hashlib
import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from kvrecall.domain.answer.sampling_defaults import GREEDY, SamplingDefaults
from workers.cache.active_cache import ActiveCache, KVShape
from workers.cache.forward_step import ForwardStep
from workers.errors import ModelRefused
from workers.model import attention
from workers.model.packed_linear import can_pack, pack_linears
from workers.model.quantized_linear import Quantization, quantize_linears
from workers.model.weights import describe_pickle, find_pickle
from workers.primitives.products import cpu_has_bfloat16

# Settings that the shape of a model's rows is computed from.
_REQUIRED = ("num_hidden_layers", "num_attention_heads", "hidden_size", "max_position_embeddings")

# Sampling of models that recommend none, chosen by `kvrecall eval sampling`.
FALLBACK = SamplingDefaults(temperature=0.7, min_p=0.1)

# Settings of models with layers that have no key and value per token.
_LINEAR_ATTENTION_KEYS = (
    "layers_block_type",
    "linear_attn_config",
    "mamba_d_state",
    "ssm_cfg",
    "kv_lora_rank",
)


@dataclass(frozen=True)
class LoadedModel:
    """A causal LM that runs over slots.

    Attributes:
        module: The model, with kvrecall's attention.
        shape: Shape of its rows.
        fingerprint: Digest of its config and weights, see `fingerprint`.
        max_context: Maximum number of positions.
        eos_token_ids: Token ids that end a turn.
        sampling: Sampling parameters of turns that name none, see `_read_sampling`.
    """

    module: PreTrainedModel
    shape: KVShape
    fingerprint: str
    max_context: int
    eos_token_ids: tuple[int, ...]
    sampling: SamplingDefaults

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.module.device

    @property
    def vocabulary(self) -> int:
        """Number of tokens that have a logit."""
        return int(self.module.config.vocab_size)

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the weights and the rows."""
        return self.module.dtype

    @cached_property
    def _cache_argument(self) -> str:
        return cache_argument(self.module)

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, step: ForwardStep, logits_to_keep: int = 1) -> Tensor:
        """Run `token_ids`, int64 `[B, t]`, at the step's positions, and append their rows.

        Returns logits of the last tokens, float32 `[B, logits_to_keep, vocabulary]`.
        """
        out = self.module(
            input_ids=token_ids.to(self.device, non_blocking=True),
            position_ids=step.query_positions.long(),
            use_cache=True,
            logits_to_keep=logits_to_keep,
            step=step,
            **{self._cache_argument: step},
        )
        logits: Tensor = out.logits
        return logits.float()


def load_model(
    name: str | Path,
    dtype: torch.dtype | None = None,
    device: str | None = None,
    *,
    pack: bool = True,
    quantize: Quantization | None = None,
) -> LoadedModel:
    """Load a model by path or hub name, from weights in safetensors alone.

    Args:
        name: Path or hub name.
        dtype: Data type; that of `choose_dtype` if None.
        device: Device; a GPU if there is one, else the CPU, if None.
        pack: Pack the weights once for the CPU's matrix units, where it has them (bfloat16).
        quantize: Quantize the weights of the linear layers. The model computes in bfloat16 then,
            and has another fingerprint.

    Raises:
        ModelRefused: The model cannot be loaded, or has layers whose past is not one row per token
            (sliding windows, linear attention, hybrids), or cannot be quantized.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if quantize:
        _refuse_quantization(dtype, device)
        dtype = torch.bfloat16
    refuse_pickle(name)
    try:
        config = AutoConfig.from_pretrained(name)
        refuse_unsupported(config)
        attention.register()
        module = AutoModelForCausalLM.from_pretrained(
            name,
            dtype=dtype or choose_dtype(config.dtype),
            attn_implementation=attention.NAME,
            use_safetensors=True,  # of a hub's names
        )
    except (OSError, ValueError) as error:
        raise ModelRefused(f"{name} could not be loaded: {error}") from error
    nn.Module.to(module, device)
    if quantize:
        quantize_linears(module, quantize)
    model = adopt(module)
    if pack and can_pack(module):
        pack_linears(module)
    return model


def refuse_pickle(name: str | Path) -> None:
    """Raise ModelRefused for a folder whose weights are a pickle."""
    if pickle := find_pickle(Path(name).expanduser()):
        raise ModelRefused(f"the folder {name} could not be loaded: {describe_pickle(pickle)}")


def cache_argument(module: PreTrainedModel) -> str:
    """Return the name that a causal LM's `forward` has for its cache.

    transformers 5.24 renamed it, and models with code of their own follow when they like.
    """
    arguments = inspect.signature(type(module).forward).parameters
    return "cache" if "cache" in arguments else "past_key_values"


def choose_dtype(own: torch.dtype | None) -> torch.dtype | Literal["auto"]:
    """Return the data type for a checkpoint of data type `own`; `auto`: its own.

    Float32 instead of bfloat16 where there is no GPU, and the CPU would have to emulate bfloat16,
    several times slower. The answer is the same for all processes of a machine, also for those
    that load the model on the CPU beside its GPU.
    """
    emulated = not torch.cuda.is_available() and not cpu_has_bfloat16()
    return torch.float32 if own == torch.bfloat16 and emulated else "auto"


def adopt(module: PreTrainedModel) -> LoadedModel:
    """Prepare a causal LM that is in memory. Raises ModelRefused as `load_model` does."""
    refuse_unsupported(module.config)
    attention.register()
    module.set_attn_implementation(attention.NAME)
    module.train(False)
    model = LoadedModel(
        module=module,
        shape=row_shape(module.config),
        fingerprint=fingerprint(module),
        max_context=int(module.config.max_position_embeddings),
        eos_token_ids=_eos_token_ids(module),
        sampling=_read_sampling(module),
    )
    _check_forward(model)
    return model


def _refuse_quantization(dtype: torch.dtype | None, device: str) -> None:
    if torch.device(device).type != "cpu":
        raise ModelRefused(f"weights are quantized for CPUs only, and the device is {device}")
    if dtype not in (None, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        raise ModelRefused(f"a quantized model computes in bfloat16, not in {name}")


def _check_forward(model: LoadedModel) -> None:
    """Run two tokens, to refuse a model that bypasses our attention or cache."""
    name = model.module.config.model_type
    shape = model.shape
    rows = [2] * shape.n_layers
    cache = ActiveCache(shape, 1, rows, model.dtype, model.device)
    step = ForwardStep(cache, [cache.claim(rows)], torch.arange(2)[None], observe=2)
    try:
        model.forward(torch.zeros(1, 2, dtype=torch.int64), step)
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise ModelRefused(
            f"{name} does not run with kvrecall's attention and cache: {error}"
        ) from error
    expected = [(1, shape.n_heads, 2, shape.head_dim)] * shape.n_layers
    observed = [tuple(queries.shape) for queries in step.observed]
    if observed != expected or len(step.new_keys) != shape.n_layers:
        raise ModelRefused(f"{name} does not call transformers' attention interface once per layer")


def refuse_unsupported(config: PreTrainedConfig) -> None:
    """Check a config: every layer must attend over all past tokens, one key and value each.

    Raises ModelRefused otherwise.
    """
    name = config.model_type
    if config.is_encoder_decoder:
        raise ModelRefused(f"{name} is an encoder-decoder; kvrecall serves decoder-only causal LMs")
    linear = [key for key in _LINEAR_ATTENTION_KEYS if getattr(config, key, None)]
    if linear:
        raise ModelRefused(
            f"{name} has layers without a key and a value per token (config: {', '.join(linear)})"
        )
    _refuse_windows(config)
    missing = [k for k in _REQUIRED if not hasattr(config, k)]
    if missing:
        raise ModelRefused(
            f"{name}'s config lacks {', '.join(missing)}: the shape of its rows is unknown"
        )


def _refuse_windows(config: PreTrainedConfig) -> None:
    name = config.model_type
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
            f"{name} attends over a sliding window of {window} tokens; kvrecall needs full "
            "attention in every layer (where the checkpoint allows it, set sliding_window to null "
            "in its config.json)"
        )


def row_shape(config: PreTrainedConfig) -> KVShape:
    """Read the shape of the model's rows from its config."""
    n_heads = config.num_attention_heads
    return KVShape(
        n_layers=config.num_hidden_layers,
        n_heads=n_heads,
        n_kv_heads=getattr(config, "num_key_value_heads", None) or n_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // n_heads,
    )


def fingerprint(module: PreTrainedModel, samples: int = 4096) -> str:
    """Compute a hex digest that identifies a model's rows, from its config and weights.

    `samples` numbers of every weight are hashed. Two fine-tunes of one base differ; the same
    checkpoint loaded twice does not.
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


def _read_sampling(module: PreTrainedModel) -> SamplingDefaults:
    """Read the sampling parameters of the model's generation config.

    A config that names some has the others off, and one that only says `do_sample: false` is greedy.
    Where it says nothing, they are FALLBACK. Raises ModelRefused for values out of range.
    """
    config = module.generation_config
    given = {field.name: getattr(config, field.name, None) for field in fields(SamplingDefaults)}
    named = {name: value for name, value in given.items() if value is not None}
    if not named:
        greedy = config is not None and config.do_sample is False
        return GREEDY if greedy else FALLBACK
    try:
        return SamplingDefaults(**{"temperature": 1.0, **named})
    except (TypeError, ValueError) as error:
        raise ModelRefused(f"{module.config.model_type}'s generation_config: {error}") from error
