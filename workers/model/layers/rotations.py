"""The rotation of each layer's keys, found by running the same tokens at two places: no config says it for all."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from workers.cache.layer_plan import LayerPlan
from workers.model.layers.latent import find_latent_layers
from workers.model.layers.shape_probe import Probe, run_probe
from workers.positions.rotation import Rotation

# Kinds of scaling whose frequencies are others in longer passes: keys of both would be mixed.
_BY_LENGTH = ("dynamic", "longrope")
# Places of the probe's tokens, within every window that has chunks.
_PLACES = (1, 2, 3, 5, 11, 23, 47, 91)
# The largest difference of a number, relative to the largest number of a layer's keys.
_LIMITS = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}


def find_rotations(
    module: PreTrainedModel, plan: LayerPlan, cache_argument: str
) -> tuple[Rotation, ...] | str:
    """Find how a model turns the keys of each layer; of layers without keys as of those without positions.

    The model must not attend to latents yet (`keep_latents`). If keys at other places are not turned ones,
    no key can be brought to another place: then returns the reason, to be read after the model's name.
    """
    config = module.config.get_text_config(decoder=True)
    if kinds := sorted(set(_BY_LENGTH) & _list_scalings(config)):
        return f"has {' and '.join(kinds)} rotary scaling, whose frequencies depend on the length of a pass"
    zero = torch.zeros(len(_PLACES), dtype=torch.int64)
    try:
        at_zero = _probe_keys(module, plan, cache_argument, zero)
        placed = _probe_keys(module, plan, cache_argument, torch.tensor(_PLACES))
    except (IndexError, RuntimeError) as error:  # a table of positions may be shorter
        return f"does not run at positions of our own: {error}"
    limit = _LIMITS.get(module.dtype, 1e-3)
    candidates = list(_list_candidates(module))
    found = []
    for layer in range(plan.n_layers):
        if layer not in at_zero:
            found.append(Rotation())
            continue
        rotation = _choose(candidates, at_zero[layer], placed[layer], limit)
        if rotation is None:
            return f"does not rotate the keys of layer {layer} by their positions"
        found.append(rotation)
    return tuple(found)


def _probe_keys(
    module: PreTrainedModel, plan: LayerPlan, cache_argument: str, places: Tensor
) -> dict[int, Tensor]:
    """Compute keys at places, int64 `[t]`, by layer: `[n_kv_heads, t, head_dim]` on the host."""
    probe = Probe(plan)
    run_probe(module, probe, cache_argument, 1 + torch.arange(len(places)), places)
    parts = 2 if any(find_latent_layers(module)) else 1
    return {
        layer: torch.cat(rows[:parts], -1)[0].float().cpu() for layer, rows in probe.rows.items()
    }


def _list_candidates(module: PreTrainedModel) -> Iterator[Rotation]:
    """List the rotations that a model may use: no frequency is made up."""
    yield Rotation()
    frequencies = {
        tuple(buffer.double().flatten().tolist())
        for name, buffer in module.named_buffers()
        if name.endswith("inv_freq") and not name.endswith("original_inv_freq")
    }
    for angles in sorted(frequencies):
        for interleaved in (False, True):
            yield Rotation(angles, interleaved=interleaved)


def _choose(
    candidates: Sequence[Rotation], at_zero: Tensor, placed: Tensor, limit: float
) -> Rotation | None:
    """Choose the rotation that turns keys at 0 into those at their places; None if none does."""
    head_dim = at_zero.shape[-1]
    for each in candidates:
        rest = head_dim - 2 * len(each.angles)
        for first in sorted({0, rest}) if rest >= 0 else ():
            rotation = Rotation(each.angles, first, each.interleaved)
            cosines, sines = rotation.build_table(_PLACES, at_zero.device)
            turned = rotation.turn(at_zero, cosines, sines)
            if float((turned - placed).abs().max()) <= limit * float(placed.abs().max()):
                return rotation
    return None


def _list_scalings(config: PreTrainedConfig) -> set[str]:
    """List the kinds of rotary scaling of a config, of all kinds of layers."""
    given: Any = getattr(config, "rope_parameters", None) or {}
    parts = [given, *(part for part in given.values() if isinstance(part, dict))]
    return {str(part["rope_type"]) for part in parts if "rope_type" in part}
