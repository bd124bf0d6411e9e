"""The shape of what a model's layers keep, found by running two tokens: no config says it for all."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache, LinearAttentionLayer

from workers.cache.layer_plan import LayerPlan
from workers.cache.side_cache import SideShape
from workers.cache.slot_pool import KVShape
from workers.cache.state_pool import find_state_tensors
from workers.errors import ModelRefused
from workers.model.layers.kinds import refuse_running
from workers.model.layers.latent import find_latent_layers

_NAME = "kvrecall-probe"
_TOKENS = 2


@dataclass(frozen=True, order=True)
class _LayerRows:
    """Rows of one layer: heads, and numbers of a key and a value."""

    n_heads: int
    n_kv_heads: int
    key_dim: int
    value_dim: int


class Probe(Cache):
    """A cache that notes what each layer hands over, and gives nothing back but recurrent states.

    Attributes:
        rows: Keys and values of each layer, `[1, n_kv_heads, t, head_dim]`; of latents the latent and the
            rotated key.
    """

    def __init__(self, plan: LayerPlan) -> None:
        super().__init__(layers=[])
        self.recurrent = {
            layer: LinearAttentionLayer(number_of_states=count)
            for layer, count in plan.states.items()
        }
        self.layers: list[Any] = [self.recurrent.get(i) for i in range(plan.n_layers)]
        self.given: dict[int, tuple[int, int, int]] = {}
        self.rows: dict[int, tuple[Tensor, Tensor]] = {}
        self.asked: dict[int, int] = {}
        self.reach: dict[int, int] = {}
        self.devices: dict[int, torch.device] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Note a layer's rows, and their shape."""
        self.given[layer_idx] = (key_states.shape[1], key_states.shape[3], value_states.shape[3])
        self.rows[layer_idx] = (key_states, value_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: no token is kept."""
        return 0

    def attend(
        self, module: nn.Module, query: Tensor, value: Tensor, reach: object
    ) -> tuple[Tensor, None]:
        """Note a layer's query heads; returns zeros in the shape of its output."""
        layer = cast("int", module.layer_idx)
        self.asked[layer] = query.shape[1]
        self.devices[layer] = query.device
        if isinstance(reach, int):
            self.reach[layer] = reach
        return value.new_zeros(len(query), query.shape[2], query.shape[1], value.shape[3]), None

    def find_device(self, layer: int, other: torch.device) -> torch.device:
        """Find the device that a layer has computed on; `other` of one that keeps nothing."""
        own = self.devices.get(layer)
        if own is None and layer in self.recurrent:
            own = self.recurrent[layer].device
        return own or other


def probe_shapes(
    module: PreTrainedModel, plan: LayerPlan, cache_argument: str
) -> tuple[KVShape, SideShape | None, tuple[torch.device, ...]]:
    """Find the shapes of a model's managed rows and of what else its layers keep, and each layer's device.

    The model must not attend to latents yet (`keep_latents`). Raises ModelRefused where its layers
    differ in them, or do not use transformers' attention interface and cache.
    """
    name = module.config.model_type
    probe = Probe(plan)
    try:
        places = torch.arange(_TOKENS)
        run_probe(module, probe, cache_argument, torch.zeros_like(places), places)
    except (TypeError, ValueError, AttributeError, IndexError, KeyError, RuntimeError) as error:
        raise refuse_running(name, plan, error) from error
    for layer, size in probe.reach.items():
        if layer in plan.rows:
            raise ModelRefused(
                f"{name} attends over a window of {size} tokens in layer {layer}, which its config "
                "does not say"
            )
    is_latent = any(find_latent_layers(module))
    rows = _join(name, "full attention", probe, plan.rows, latent=is_latent)
    windows = None
    if plan.windows:
        if is_latent:
            raise ModelRefused(f"{name} has latents beside windows, which kvrecall does not serve")
        windows = _join(name, "a window", probe, tuple(plan.windows), latent=False)
    devices = tuple(probe.find_device(layer, module.device) for layer in range(plan.n_layers))
    if plan == LayerPlan.full(plan.n_layers):
        return rows, None, devices
    return rows, SideShape(plan, windows, find_state_tensors(probe.recurrent)), devices


def run_probe(
    module: PreTrainedModel, probe: Probe, cache_argument: str, token_ids: Tensor, places: Tensor
) -> None:
    """Run tokens at places, int64 `[t]` both, with the probe as attention and cache.

    The model's own attention comes back.
    """
    before = module.config._attn_implementation
    AttentionInterface.register(_NAME, _as_function(probe))
    module.set_attn_implementation(_NAME)
    try:
        with torch.inference_mode():
            module(
                input_ids=token_ids[None].to(module.device),
                position_ids=places[None].to(module.device),
                use_cache=True,
                **{cache_argument: probe},
            )
    finally:
        module.set_attn_implementation(before)


def _as_function(probe: Probe) -> Callable[..., tuple[Tensor, None]]:
    """Wrap the probe's method: transformers looks at functions alone."""

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: object, **extras: object
    ) -> tuple[Tensor, None]:
        return probe.attend(module, query, value, extras.get("sliding_window"))

    return attend


def _join(name: str, kind: str, probe: Probe, layers: tuple[int, ...], *, latent: bool) -> KVShape:
    """Join the shapes of layers of one kind. Raises ModelRefused unless all have the same."""
    if lacking := [i for i in layers if i not in probe.given or i not in probe.asked]:
        raise ModelRefused(
            f"{name} does not call transformers' attention interface and cache once in layers "
            f"{', '.join(map(str, lacking))}, which have {kind}"
        )
    shapes = sorted({_LayerRows(probe.asked[i], *probe.given[i]) for i in layers})
    if len(shapes) > 1:
        raise ModelRefused(
            f"{name}: its layers with {kind} have rows of {len(shapes)} shapes, {shapes[0]} and "
            f"{shapes[1]}; kvrecall serves one"
        )
    one = shapes[0]
    if latent:
        # The latent comes as key, the rotated key as value: a row is both.
        width = one.key_dim + one.value_dim
        return KVShape(len(layers), one.n_heads, 1, width, one.key_dim, latent=True)
    if one.value_dim > one.key_dim:
        raise ModelRefused(
            f"{name} has values of {one.value_dim} numbers and keys of {one.key_dim}; kvrecall serves "
            "values that are not wider than keys"
        )
    narrower = one.value_dim if one.value_dim < one.key_dim else None
    return KVShape(len(layers), one.n_heads, one.n_kv_heads, one.key_dim, narrower)
