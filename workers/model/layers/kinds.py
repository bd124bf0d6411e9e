"""Reading of a model's layer plan: what transformers' own cache for its config keeps per layer."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedConfig
from transformers.cache_utils import get_layer_types_and_kwargs

from workers.cache.layer_plan import LayerPlan
from workers.cache.window import Window
from workers.errors import ModelRefused

# Layers whose past is a row per token, all of which a query sees.
_ROWS = ("full_attention", "hybrid")
# Layers that see the newest rows alone.
_WINDOWS = ("sliding_attention", "chunked_attention", "hybrid_sliding")
# Layers with recurrent states.
_STATES = ("linear_attention", "conv", "hybrid", "hybrid_sliding")
# Layers that keep nothing: those of experts alone, or that use another layer's rows.
_NOTHING = ("dummy", "moe", "mlp")


def read_plan(config: PreTrainedConfig) -> LayerPlan:
    """Read what each layer of a decoder keeps. Raises ModelRefused for kinds that are not served."""
    name = config.model_type
    if config.is_encoder_decoder:
        raise ModelRefused(f"{name} is an encoder-decoder; kvrecall serves decoder-only causal LMs")
    types, settings = _read_layers(config)
    served = {*_ROWS, *_WINDOWS, *_STATES, *_NOTHING}
    if others := sorted(set(types) - served):
        raise ModelRefused(
            f"{name} has layers of kind {', '.join(others)}; kvrecall serves layers of full attention, "
            "windows, chunks and recurrent states"
        )
    rows = tuple(i for i, kind in enumerate(types) if kind in _ROWS)
    if not rows:
        advice = (
            " (where the checkpoint allows it, set sliding_window to null in its config.json)"
            if set(types) == {"sliding_attention"}
            else ""
        )
        raise ModelRefused(
            f"{name} has no layer of full attention, only {', '.join(sorted(set(types)))}: there is "
            f"nothing to remember{advice}"
        )
    return LayerPlan(
        n_layers=len(types),
        rows=rows,
        windows={
            i: Window(settings[i]["sliding_window"], kind == "chunked_attention")
            for i, kind in enumerate(types)
            if kind in _WINDOWS
        },
        states={
            i: settings[i].get("number_of_states", 1)
            for i, kind in enumerate(types)
            if kind in _STATES
        },
        shared=_find_shared(config, types),
    )


def refuse_running(name: str, plan: LayerPlan, error: Exception) -> ModelRefused:
    """Build the refusal of a model that fails in a pass, with what its layers keep."""
    return ModelRefused(
        f"{name} (layers with {', '.join(plan.kinds)}) does not run with kvrecall's attention and cache: "
        f"{error}"
    )


def _read_layers(config: PreTrainedConfig) -> tuple[list[str], list[dict[str, Any]]]:
    """Read each layer's type and the settings of its cache."""
    try:
        types, settings = get_layer_types_and_kwargs(config)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelRefused(f"{config.model_type}: its layers are unknown: {error}") from error
    # transformers before 5.2x has one dictionary for all layers.
    each = [settings] * len(types) if isinstance(settings, dict) else list(settings)
    if getattr(config, "use_sliding_window", True) is False:
        types = ["full_attention" if kind == "sliding_attention" else kind for kind in types]
    return list(types), each


def _find_shared(config: PreTrainedConfig, types: Sequence[str]) -> dict[int, int]:
    """Find the layers that use the rows of an earlier layer of their own kind."""
    modes = getattr(config, "kv_sharing_modes", None) or [None] * len(types)
    kinds = getattr(config, "layer_types", None) or types
    shared: dict[int, int] = {}
    stored: dict[str, int] = {}
    for i, (mode, kind) in enumerate(zip(modes, kinds, strict=True)):
        if mode == "store":
            stored[kind] = i
        elif mode == "reuse":
            shared[i] = stored[kind]
    return shared
