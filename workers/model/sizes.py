"""Sizes of a model and its rows, read from its config: no weight is allocated or loaded."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedConfig

from kvstore.format.page import PageLayout
from workers.cache.layer_plan import LayerPlan
from workers.cache.row_packing import build_row_layout
from workers.cache.side_cache import SideShape
from workers.cache.slot_pool import KVShape
from workers.errors import ModelRefused
from workers.model.division import count_weight_bytes, divide_shape
from workers.model.layers.kinds import read_plan
from workers.model.layers.shape_probe import probe_shapes
from workers.model.loader import cache_argument, choose_class


@dataclass(frozen=True)
class ModelSizes:
    """What a model takes, or the part of it that one of several ranks has.

    Attributes:
        weight_bytes: Bytes of the weights.
        dtype: Data type of weights and rows.
        plan: What its layers keep.
        shape: Shape of the managed rows.
        side: What layers keep beside managed rows; None without such layers.
    """

    weight_bytes: int
    dtype: torch.dtype
    plan: LayerPlan
    shape: KVShape
    side: SideShape | None

    @property
    def layout(self) -> PageLayout:
        """The layout of a page of rows, for its bytes: without a fingerprint of weights."""
        return build_row_layout(self.shape, self.side, self.dtype, "")

    @property
    def state_bytes(self) -> int:
        """Bytes of a session's recurrent states."""
        return 0 if self.side is None else self.side.state_bytes

    def get_side_bytes(self, room: int) -> int:
        """Bytes of a slot's windows and states, for passes of `room` tokens at most."""
        return 0 if self.side is None else self.side.get_slot_bytes(room, self.dtype)


def read_sizes(name: str | Path, dtype: torch.dtype | None = None, ranks: int = 1) -> ModelSizes:
    """Read the sizes of a model by path or hub name.

    dtype: of weights and rows; None: the checkpoint's own. ranks: the sizes are those of one of so many.
    Raises ModelRefused for one whose config cannot be read, with layers of a kind that is not served, or
    that cannot be divided.
    """
    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ModelRefused(f"the config of {name} could not be loaded: {error}") from error
    return measure_sizes(config, dtype or config.dtype or torch.float32, ranks)


@torch.inference_mode()
def measure_sizes(config: PreTrainedConfig, dtype: torch.dtype, ranks: int = 1) -> ModelSizes:
    """Measure what a model of this config takes in a data type, on torch's meta device, as `read_sizes`."""
    plan = read_plan(config.get_text_config(decoder=True))
    with torch.device("meta"):
        module = choose_class(config).from_config(config, dtype=dtype)
    module.train(False)
    # Experts' other implementations need bfloat16 or numbers to route by.
    module.set_experts_implementation("batched_mm")
    shape, side, _ = probe_shapes(module, plan, cache_argument(module))
    shape = divide_shape(module, shape, ranks)
    if side is not None and side.windows is not None:
        # Recurrent states are whole on every rank.
        side = replace(side, windows=divide_shape(module, side.windows, ranks))
    return ModelSizes(count_weight_bytes(module, ranks), dtype, plan, shape, side)
