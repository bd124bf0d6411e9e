"""Loading of Hugging Face causal LMs with our attention, and refusal of unsupported ones."""

import hashlib
import inspect
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from kvrecall.domain.answer.sampling_defaults import GREEDY, SamplingDefaults
from workers.cache.caches import Caches
from workers.cache.forward_step import ForwardStep
from workers.cache.layer_plan import LayerPlan
from workers.cache.side_cache import SideShape
from workers.cache.slot_pool import KVShape
from workers.errors import ModelRefused
from workers.model.decoding.decoder import Decoder, open_decoder
from workers.model.division import build_arguments, require_divided
from workers.model.layers import attention
from workers.model.layers.experts import choose_experts
from workers.model.layers.kinds import read_plan
from workers.model.layers.latent import keep_latents
from workers.model.layers.rotations import find_rotations
from workers.model.layers.self_test import check_model
from workers.model.layers.shape_probe import probe_shapes
from workers.model.weights.packed_linear import can_pack, pack_linears
from workers.model.weights.pickles import describe_pickle, find_pickle
from workers.model.weights.quantized_linear import Quantization, quantize_linears
from workers.parallel.alone import Alone
from workers.parallel.group import Group
from workers.positions.rotation import Rotation
from workers.primitives.products import cpu_has_bfloat16

# Sampling of models that recommend none, chosen by `kvrecall eval sampling`.
FALLBACK = SamplingDefaults(temperature=0.7, min_p=0.1)


@dataclass(frozen=True)
class LoadedModel:
    """A causal LM that runs over slots.

    Attributes:
        module: The model, with kvrecall's attention.
        plan: What its layers keep.
        shape: Shape of the rows that sessions select and retrieve.
        side: Shapes of what its layers keep beside them; None if that is nothing.
        fingerprint: Digest of its config and weights, see `fingerprint`.
        max_context: Maximum number of positions.
        eos_token_ids: Token ids that end a turn.
        sampling: Sampling parameters of turns that name none, see `_read_sampling`.
        devices: Device of each layer, where its slots are as well.
        rotations: How each layer turns its keys by their positions; empty if no rotation was found.
        unrotated: Why none was found, to be read after the model's name; empty if one was.
        group: The ranks between which its heads are divided. `shape` and `side` are this rank's.
    """

    module: PreTrainedModel
    plan: LayerPlan
    shape: KVShape
    side: SideShape | None
    fingerprint: str
    max_context: int
    eos_token_ids: tuple[int, ...]
    sampling: SamplingDefaults
    devices: tuple[torch.device, ...]
    rotations: tuple[Rotation, ...] = ()
    unrotated: str = ""
    group: Group = field(default_factory=Alone)

    @property
    def device(self) -> torch.device:
        """Device of the embeddings, and of all work that is not a layer's."""
        return self.module.device

    @property
    def on_one_device(self) -> bool:
        """True if all of this process' layers are on one device."""
        return len(set(self.devices)) == 1

    @property
    def vocabulary(self) -> int:
        """Number of tokens that have a logit."""
        return int(self.module.config.get_text_config(decoder=True).vocab_size)

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the weights and the rows."""
        return self.module.dtype

    @cached_property
    def _cache_argument(self) -> str:
        return cache_argument(self.module)

    @cached_property
    def decoder(self) -> Decoder | None:
        """What computes decode steps natively, tested when it is first asked for; None: torch does.

        One rank's native step could not wait for the others within its layers.
        """
        return open_decoder(self) if self.group.count == 1 else None

    @property
    def whole_shape(self) -> KVShape:
        """Shape of the rows of the whole model, with the heads of all ranks."""
        heads, kv_heads = self.shape.n_heads, self.shape.n_kv_heads
        ranks = self.group.count
        return replace(self.shape, n_heads=heads * ranks, n_kv_heads=kv_heads * ranks)

    def cache_arguments(self, cache: object) -> dict[str, Any]:
        """Return the arguments that hand a cache to the model's `forward`."""
        return {self._cache_argument: cache}

    @property
    def state_bytes(self) -> int:
        """Bytes of a session's recurrent states; 0 for a model without any."""
        return 0 if self.side is None else self.side.state_bytes

    def get_side_bytes(self, room: int, devices: Collection[torch.device] | None = None) -> int:
        """Bytes of a slot's windows and states, for passes of `room` tokens at most.

        devices: those whose layers count; None: all.
        """
        if self.side is None:
            return 0
        layers = [i for i, own in enumerate(self.devices) if devices is None or own in devices]
        return self.side.keep_layers(layers).get_slot_bytes(room, self.dtype)

    def count_row_layers(self, devices: Collection[torch.device]) -> int:
        """Count the layers on devices whose rows are selected."""
        return sum(self.devices[layer] in devices for layer in self.plan.rows)

    def create_caches(
        self, slots: int, rows: int, room: int, dtype: torch.dtype | None = None
    ) -> Caches:
        """Allocate slots of `rows` rows per head and layer, for passes of `room` tokens at most.

        dtype: of the rows; the model's own if None.
        """
        return Caches.create(
            self.shape,
            self.side,
            slots,
            [rows] * self.shape.n_layers,
            room,
            dtype or self.dtype,
            self.devices,
            self.group,
        )

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, step: ForwardStep, logits_to_keep: int = 1) -> Tensor:
        """Run `token_ids`, int64 `[B, t]`, at the step's places, and append their rows.

        Recurrent states change with the step's `commit`.

        Returns logits of the last tokens, float32 `[B, logits_to_keep, vocabulary]`.
        """
        with attention.run_pass(step):
            out = self.module(
                input_ids=token_ids.to(self.device, non_blocking=True),
                position_ids=step.places.long(),
                use_cache=True,
                logits_to_keep=logits_to_keep,
                **self.cache_arguments(step),
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
    divide: bool = False,
    group: Group = Alone(),
) -> LoadedModel:
    """Load a model by path or hub name, from weights in safetensors alone.

    Args:
        name: Path or hub name.
        dtype: Data type; that of `choose_dtype` if None.
        device: Device; a GPU if there is one, else the CPU, if None.
        pack: Pack the weights once for the CPU's matrix units, where it has them (bfloat16) and torch
            computes the decode steps.
        quantize: Quantize the weights of the linear layers. The model computes in bfloat16 then,
            and has another fingerprint.
        divide: Divide the layers between all GPUs of the machine, as accelerate does by
            `device_map="auto"`; `device` is not used then.
        group: Ranks to divide the heads between, each on a device of its own, by transformers' plan;
            weights are not packed then.

    Raises:
        ModelRefused: The model cannot be loaded, has layers of a kind that is not served, is not
            computed as transformers computes it (`check_model`), or cannot be quantized.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    _refuse_together(group, divide, quantize)
    if quantize:
        _refuse_quantization(dtype, device)
        dtype = torch.bfloat16
    refuse_pickle(name)
    try:
        config = AutoConfig.from_pretrained(name)
        read_plan(config.get_text_config(decoder=True))
        attention.register()
        module = choose_class(config).from_pretrained(
            name,
            dtype=dtype or choose_dtype(config.dtype),
            attn_implementation=attention.NAME,
            use_safetensors=True,  # of a hub's names
            **({"device_map": "auto"} if divide else {}),
            **build_arguments(config, group.count),
        )
    except (OSError, ValueError) as error:
        raise ModelRefused(f"{name} could not be loaded: {error}") from error
    if divide:
        _refuse_offloaded(module)
    elif group.count == 1:
        nn.Module.to(module, device)
    choose_experts(module)
    if quantize:
        quantize_linears(module, quantize)
    model = adopt(module, group)
    if pack and group.count == 1 and can_pack(module) and model.decoder is None:
        pack_linears(module)
    return model


def _refuse_together(group: Group, divide: bool, quantize: Quantization | None) -> None:
    """Raise ModelRefused for divisions that exclude each other, or that this machine has no devices for."""
    if group.count > 1 and (quantize or divide):
        raise ModelRefused("tensor parallelism excludes --quantize and --device-map")
    if divide and not torch.cuda.is_available():
        raise ModelRefused("a model is divided between GPUs, and this machine has none")


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


def adopt(module: PreTrainedModel, group: Group = Alone()) -> LoadedModel:
    """Prepare a causal LM that is in memory. Raises ModelRefused as `load_model` does."""
    config = module.config.get_text_config(decoder=True)
    plan = read_plan(config)
    attention.register()
    module.train(False)
    shape, side, devices = probe_shapes(module, plan, cache_argument(module))
    require_divided(module.config, shape, group.count)
    _refuse_apart(plan, devices)
    rotations = find_rotations(module, plan, cache_argument(module))
    module.set_attn_implementation(attention.NAME)
    keep_latents(module)
    model = LoadedModel(
        module=module,
        plan=plan,
        shape=shape,
        side=side,
        fingerprint=fingerprint(module),
        max_context=_read_max_context(config),
        eos_token_ids=_eos_token_ids(module),
        sampling=_read_sampling(module),
        devices=devices,
        rotations=() if isinstance(rotations, str) else rotations,
        unrotated=rotations if isinstance(rotations, str) else "",
        group=group,
    )
    check_model(model)
    return model


def _refuse_offloaded(module: PreTrainedModel) -> None:
    """Raise ModelRefused for a model that the GPUs have no room for."""
    elsewhere = {str(each) for each in getattr(module, "hf_device_map", {}).values()}
    if elsewhere & {"cpu", "disk"}:
        raise ModelRefused(
            "the GPUs have no room for the model: accelerate has put layers into "
            f"{', '.join(sorted(elsewhere & {'cpu', 'disk'}))}; take a smaller model"
        )


def _refuse_apart(plan: LayerPlan, devices: Sequence[torch.device]) -> None:
    """Raise ModelRefused where a layer and the one whose rows it attends to are on two devices."""
    for layer, owner in plan.shared.items():
        if devices[layer] != devices[owner]:
            raise ModelRefused(
                f"layer {layer} attends to the rows of layer {owner}, which is on another device: this "
                "model cannot be divided between devices"
            )


def choose_class(config: PreTrainedConfig) -> Any:
    """Choose the class that loads a config: of a model that sees as well, its text is served."""
    known = type(config) in AutoModelForCausalLM._model_mapping
    return AutoModelForCausalLM if known else AutoModelForImageTextToText


def _read_max_context(config: PreTrainedConfig) -> int:
    """Read the maximum number of positions. Raises ModelRefused for a config that names none."""
    positions = getattr(config, "max_position_embeddings", None)
    if not positions:
        raise ModelRefused(
            f"{config.model_type}'s config lacks max_position_embeddings: the length of its context is "
            "unknown"
        )
    return int(positions)


def _refuse_quantization(dtype: torch.dtype | None, device: str) -> None:
    if torch.device(device).type != "cpu":
        raise ModelRefused(f"weights are quantized for CPUs only, and the device is {device}")
    if dtype not in (None, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        raise ModelRefused(f"a quantized model computes in bfloat16, not in {name}")


def fingerprint(module: PreTrainedModel, samples: int = 4096) -> str:
    """Compute a hex digest that identifies a model's rows, from its config and weights.

    `samples` numbers of every weight are hashed. Two fine-tunes of one base differ; the same
    checkpoint loaded twice does not, nor does it if ranks have parts of it: they join one weight after
    the other, all of them in the same order.
    """
    config = module.config.get_text_config(decoder=True)
    digest = hashlib.sha256(json.dumps(_rope(config), sort_keys=True, default=str).encode())
    for name, weight in sorted(module.state_dict().items()):
        weight = _join_parts(weight.detach())
        flat = weight.flatten()
        sample = flat[:: max(1, flat.numel() // samples)][:samples].contiguous().cpu()
        digest.update(f"{name}{tuple(weight.shape)}{weight.dtype}".encode())
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


def _join_parts(weight: Tensor) -> Tensor:
    """Join the ranks' parts of a weight; one that is not divided is returned as it is."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def _rope(config: PreTrainedConfig) -> dict[str, Any]:
    keys = (
        "model_type",
        "rope_parameters",
        "rope_theta",
        "num_hidden_layers",
        "head_dim",
    )
    values = config.to_dict()  # a config whose layers differ in a setting has no attribute for it
    scaling = getattr(config, "rope_scaling", None)
    return {"rope_scaling": scaling} | {key: values.get(key) for key in keys}


def _eos_token_ids(module: PreTrainedModel) -> tuple[int, ...]:
    generation = module.generation_config.eos_token_id if module.generation_config else None
    config = module.config.get_text_config(decoder=True)
    eos: int | Sequence[int] | None = generation if generation is not None else config.eos_token_id
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
